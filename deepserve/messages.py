"""Messages between processes: msgspec structs, tagged, versioned, never pickled.

Frontend -> engine: `Submit`, `Abort`, `Drain`, `Stop`. Engine -> frontend: `Register`, `Heartbeat`, `Outputs`, `Leaving`, `Goodbye`.
Frontend -> guardian of an instance: `Scale`. Guardian -> frontend: `Guardian`, `Died`.
Both ways, and through the frontend from engine to engine: `Relay`.
One message is one ZMQ frame of msgpack; the engine's DEALER socket connects to the frontend's ROUTER socket.
"""

import msgspec

from deepserve.engine.request import PositionLogprobs, SamplingParams, SequenceOutput

PROTOCOL_VERSION = 5


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    """One request, already validated (`deepserve.engine.request.validate`)."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """Forget these requests and free their pages; unknown ids are ignored. No output follows for them."""

    request_ids: list[str]


class Drain(msgspec.Struct, tag="drain", array_like=True, frozen=True):
    """Finish what is accepted, then say `Goodbye` and exit 0."""


class Stop(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """Say `Goodbye` and exit 0 now, whatever is running."""


class Load(msgspec.Struct, array_like=True, frozen=True):
    """What one DP rank carries at one moment; counters grow from engine start."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_held_pages: int = 0
    num_cached_pages: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_drafts: int = 0  # times that a sequence had drafts verified
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_by_position: list[int] = []
    num_moved_experts: int = 0  # between ranks of the instance, by the balancer
    num_queued_tokens: int = 0  # of prompts, that are neither computed nor found in the prefix cache
    num_transfer_pages: int = 0  # held pages that a prefill instance may write to
    num_quarantined_pages: int = 0  # held pages of hand-offs that failed, to which something may be under way yet


class Process(msgspec.Struct, array_like=True, frozen=True):
    """One that may write to pages of others (`deepserve.pd.fence`). Numbers are used again, so its start tells it from a later one."""

    machine: str
    pid: int
    started: int  # clock ticks after the machine's start


class Register(msgspec.Struct, tag="register", array_like=True, frozen=True):
    """An engine rank is loaded and can take requests."""

    protocol_version: int
    instance: str
    role: str  # "unified", "prefill" or "decode"
    dp_rank: int
    model_fingerprint: str
    weight_version: int
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    page_size: int
    num_pages: int
    pid: int
    outlived: bool = False  # whether the other ranks of the instance go on when this one dies
    writers: list[Process] = []  # of a prefill instance: the ranks of the TP group, each of which writes pages


class Heartbeat(msgspec.Struct, tag="heartbeat", array_like=True, frozen=True):
    """Sent every second, busy or idle, from a thread with a socket of its own: it names its rank, its socket does not."""

    instance: str
    dp_rank: int
    load: Load


class Outputs(msgspec.Struct, tag="outputs", array_like=True, frozen=True):
    """What one step produced for this frontend's requests."""

    outputs: list[SequenceOutput]
    load: Load


class ExpertBalance(msgspec.Struct, tag="expert_balance", array_like=True, frozen=True):
    """Rank 0 tells, after each look at the loads, where experts are from then on, and what they got before."""

    num_ranks: int
    num_steps: int  # in which tokens were counted
    layers: list[int]  # numbers of the MoE layers
    tokens: dict[str, list[list[int]]]  # by phase: of each layer and logical expert
    phy2log: list[list[int]]  # logical expert of each slot of each layer, slots numbered rank after rank


class Leaving(msgspec.Struct, tag="leaving", array_like=True, frozen=True):
    """The engine takes no new requests, finishes what it has and then says `Goodbye`."""


class Goodbye(msgspec.Struct, tag="goodbye", array_like=True, frozen=True):
    """The engine ends; `error` is empty for an orderly end, else the sentence that explains it."""

    error: str = ""


class Guardian(msgspec.Struct, tag="guardian", array_like=True, frozen=True):
    """The process that holds an instance's ranks, where they outlive each other. Also the answer to each `Scale`."""

    instance: str
    num_more: int = 0  # DP replicas that are wanted beyond those that it was started with; below 0: fewer
    error: str = ""  # why the latest `Scale` was refused


class Died(msgspec.Struct, tag="died", array_like=True, frozen=True):
    """A guardian tells that these processes are gone, and that the other ranks of their instance go on."""

    pids: list[int]
    reason: str


class Scale(msgspec.Struct, tag="scale", array_like=True, frozen=True):
    """Have so many DP replicas from now on."""

    dp: int


class Place(msgspec.Struct, array_like=True, frozen=True):
    """Who leads a TP group: where hand-off messages go."""

    instance: str
    dp_rank: int


class Relay(msgspec.Struct, tag="relay", array_like=True, frozen=True):
    """A message of a hand-off, a frame of `deepserve.pd.messages`.

    From an engine `peer` says where it goes, to an engine it says whom it comes from; None: the frontend's router.
    """

    peer: Place | None
    frame: bytes


ToEngine = Submit | Abort | Drain | Stop | Relay | Scale
FromEngine = Register | Heartbeat | Outputs | ExpertBalance | Leaving | Goodbye | Relay | Guardian | Died

__all__ = [
    "PROTOCOL_VERSION",
    "Abort",
    "Died",
    "Drain",
    "ExpertBalance",
    "FromEngine",
    "Goodbye",
    "Guardian",
    "Heartbeat",
    "Leaving",
    "Load",
    "Outputs",
    "Place",
    "PositionLogprobs",
    "Process",
    "Register",
    "Relay",
    "SamplingParams",
    "Scale",
    "SequenceOutput",
    "Stop",
    "Submit",
    "ToEngine",
]  # fmt: skip
