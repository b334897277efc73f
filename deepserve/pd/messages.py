"""What router, prefill and decode ranks say to each other about one hand-off: msgspec structs, tagged, versioned, never pickled.

    router --Reserve--> decode --Reservation--> router --Prefill--> prefill --Progress...--> decode, then --HandOff--> decode
    router, prefill or decode --GiveUp--> the others; prefill --Settled--> decode

They travel as `deepserve.messages.Relay` on the lines that ranks have to the frontend, which passes on what is for another rank and
reads along: once it has seen a `GiveUp` it sends no `Prefill` for that attempt any more. Pages travel beside them (`hw.transfer`), and a
sequence goes on when its `HandOff` and all its parts are there. An attempt is named by (transfer, epoch); what names another is void.
Times are durations, since hosts' clocks differ.

A decode rank that gave an attempt up, or was told that another did, repeats its `GiveUp` to the prefill rank until it is `Settled`. A
prefill rank that does not know the attempt says so at once. That counts if it is the one that the pages were reserved for, and not a later
process under its name; where no answer comes that counts, the decode rank shuts the writers out (`deepserve.pd.fence`).
"""

from typing import Annotated

import msgspec

from deepserve.engine.request import SequenceOutput
from deepserve.messages import Place, Process, Submit

VERSION = 2
Count = Annotated[int, msgspec.Meta(ge=0)]


class Attempt(msgspec.Struct, array_like=True, frozen=True):
    """Names one attempt at one hand-off."""

    transfer: str
    epoch: Count


class Reserve(msgspec.Struct, tag="reserve", array_like=True, frozen=True):
    """Set pages aside for this prompt, less what the prefix cache has. Waits until there is room; a `GiveUp` withdraws it."""

    attempt: Attempt
    submit: Submit
    prefill: Place  # who will write to them
    writers: list[Process]  # its TP ranks
    lease_s: float


class Reservation(msgspec.Struct, tag="reservation", array_like=True, frozen=True):
    """Pages of a decode rank that the prefill side may write to, as long as the lease lasts or is renewed by progress."""

    attempt: Attempt
    decode: Place
    weight_version: Count  # latents of other weights are refused
    page_size: Count  # in tokens
    num_cached_tokens: Count  # of the prompt's beginning, in whole pages that are there already and not sent
    pages: list[Count]  # for the tokens behind them, in order
    descriptions: list[bytes]  # of `KVTransfer.describe`, one for each TP rank of the decode instance
    lease_s: float


class Prefill(msgspec.Struct, tag="prefill", array_like=True, frozen=True):
    """Compute this prompt, write its pages there, draw the first token."""

    submit: Submit
    reservation: Reservation


class Progress(msgspec.Struct, tag="progress", array_like=True, frozen=True):
    """The prefill rank still means to do it; renews the lease. Comes at least twice a lease."""

    attempt: Attempt
    num_tokens: Count  # computed so far


class HandOff(msgspec.Struct, tag="hand_off", array_like=True, frozen=True):
    """The prompt is computed and the first token is drawn.

    Noise is keyed by the request's seed and the position, and penalties by the tokens, so no state of a sampler goes along.
    """

    attempt: Attempt
    first: SequenceOutput  # the first token with its log-probabilities, and those of the prompt
    num_writers: Count  # TP ranks that announce parts


class GiveUp(msgspec.Struct, tag="give_up", array_like=True, frozen=True):
    """The attempt has failed or is refused; `error` is the sentence that says why."""

    attempt: Attempt
    error: str


class Settled(msgspec.Struct, tag="settled", array_like=True, frozen=True):
    """Answer to a `GiveUp`: nothing that `writers` sent for the attempt is under way any more, nor ever will be."""

    attempt: Attempt
    writers: list[Process]


Message = Reserve | Reservation | Prefill | Progress | HandOff | GiveUp | Settled


class _Envelope(msgspec.Struct, array_like=True, frozen=True):
    version: int
    message: msgspec.Raw


def encode(message: Message) -> bytes:
    """One frame of msgpack."""
    return msgspec.msgpack.encode(_Envelope(VERSION, msgspec.Raw(msgspec.msgpack.encode(message))))


def decode(frame: bytes) -> Message:
    """Inverse of `encode`. Raises ValueError for a frame of another version, whatever follows it, and for what is no message."""
    try:
        envelope = msgspec.msgpack.decode(frame, type=_Envelope)
        if envelope.version != VERSION:
            raise ValueError(f"hand-off message of version {envelope.version}, this is version {VERSION}")
        return msgspec.msgpack.decode(envelope.message, type=Message)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{len(frame)} bytes are no hand-off message: {error}") from error
