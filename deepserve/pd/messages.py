"""What router, prefill and decode ranks say to each other about one hand-off: msgspec structs, tagged, versioned, never pickled.

    router --Reserve--> decode --Reservation or GiveUp--> router --Prefill--> prefill
    prefill --Progress...--> decode, --HandOff--> decode --Taken--> prefill
    any of them --GiveUp--> the others; prefill --Settled--> decode, from each TP rank, whether it was given up or not

Pages travel beside these messages (`hw.transfer`), and a sequence goes on when its `HandOff` and all its parts are there. An attempt is
named by (transfer, epoch); what names another is void. Times are durations, since hosts' clocks differ.
"""

from typing import Annotated

import msgspec

from deepserve.engine.request import SequenceOutput
from deepserve.messages import Submit

VERSION = 1
Count = Annotated[int, msgspec.Meta(ge=0)]


class Attempt(msgspec.Struct, array_like=True, frozen=True):
    """Names one attempt at one hand-off."""

    transfer: str
    epoch: Count


class Reserve(msgspec.Struct, tag="reserve", array_like=True, frozen=True):
    """Set pages aside for this request's prompt, less what the prefix cache has."""

    attempt: Attempt
    submit: Submit
    lease_s: float


class Reservation(msgspec.Struct, tag="reservation", array_like=True, frozen=True):
    """Pages of a decode rank that the prefill side may write to, as long as the lease lasts or is renewed by progress."""

    attempt: Attempt
    instance: str
    dp_rank: Count
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
    """A chunk of the prompt is computed; renews the lease."""

    attempt: Attempt
    num_tokens: Count  # computed so far


class HandOff(msgspec.Struct, tag="hand_off", array_like=True, frozen=True):
    """The prompt is computed and the first token is drawn.

    Noise is keyed by seed and position and penalties by the tokens, so the seed is all there is of a sampler's state.
    """

    attempt: Attempt
    first: SequenceOutput  # the first token with its log-probabilities, and those of the prompt
    seed: int  # that the draw used, also where the request named none
    drafts: list[Count]  # for the tokens behind the first; may be empty
    num_writers: Count  # TP ranks that announce parts


class Taken(msgspec.Struct, tag="taken", array_like=True, frozen=True):
    """The decode rank has all of it: the prefill side may free its pages."""

    attempt: Attempt


class GiveUp(msgspec.Struct, tag="give_up", array_like=True, frozen=True):
    """The attempt has failed or is refused; `error` is the sentence that says why."""

    attempt: Attempt
    error: str


class Settled(msgspec.Struct, tag="settled", array_like=True, frozen=True):
    """Nothing that this writer sent for the attempt is under way any more, so a quarantine waits for it no longer."""

    attempt: Attempt
    writer: Count


Message = Reserve | Reservation | Prefill | Progress | HandOff | Taken | GiveUp | Settled


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
