"""Engine ranks as a frontend knows them, and who may join."""

import msgspec

from deepserve.messages import PROTOCOL_VERSION, ExpertBalance, Load, Register
from deepserve.server.stats import EngineStats
from deepserve.server.stream import EngineRequest


class Engine:
    """One registered engine rank."""

    def __init__(self, identity: bytes, register: Register, label: str, stats: EngineStats):
        self.identity = identity
        self.register = register
        self.label = label  # of the metrics
        self.stats = stats
        self.load = Load()
        self.balance: ExpertBalance | None = None  # of its instance, where it is rank 0
        self.silent_s = 0.0
        self.leaving = False  # it finishes what it has
        self.requests: dict[str, EngineRequest] = {}  # that it answers
        self.prefills: dict[str, EngineRequest] = {}  # whose prompts it computes for decode ranks that answer them

    def has(self, request: EngineRequest) -> bool:
        return request.request_id in self.requests or request.request_id in self.prefills

    @property
    def num_sequences(self) -> int:
        # Our own count is exact but knows only this frontend; the report knows all frontends but is up to a heartbeat old.
        ours = sum(len(request.open) for request in self.requests.values()) + len(self.prefills)
        return max(ours, self.load.num_running + self.load.num_waiting)

    @property
    def num_queued_tokens(self) -> int:
        ours = sum(request.num_prompt for request in self.requests.values() if not request.prefilled and request.hand_off is None)
        return ours + sum(request.hand_off.num_fresh for request in self.prefills.values() if not request.hand_off.handed)

    @property
    def num_cache_tokens(self) -> int:
        return self.register.num_pages * self.register.page_size

    @property
    def num_free_tokens(self) -> int:
        return self.num_cache_tokens - self.load.num_held_pages * self.register.page_size

    @property
    def instance(self) -> str:
        return self.register.instance

    @property
    def lost_with_it(self) -> str:
        """The instance, if all of it is lost with this rank; else empty."""
        return "" if self.register.outlived else self.instance

    @property
    def place(self) -> tuple[str, int]:
        return self.register.instance, self.register.dp_rank

    @property
    def name(self) -> str:
        return f"engine {self.register.instance!r} rank {self.register.dp_rank} (pid {self.register.pid})"


def refusal_of(register: Register, peers: list[Engine]) -> str:
    """Why an engine cannot join these, empty if it can."""
    if register.protocol_version != PROTOCOL_VERSION:
        return f"it speaks protocol version {register.protocol_version}, this frontend speaks {PROTOCOL_VERSION}"
    for peer in peers:
        if peer.register.model_fingerprint != register.model_fingerprint:
            return f"its model {register.model_fingerprint} is not the {peer.register.model_fingerprint} of {peer.name}"
    return ""


def other_version(payload: bytes) -> str:
    """A hint for messages that do not fit: a `Register` of another protocol version."""
    try:
        fields = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, RecursionError):
        return ""
    if isinstance(fields, list) and len(fields) > 1 and fields[0] == "register" and fields[1] != PROTOCOL_VERSION:
        return f" (it speaks protocol version {fields[1]!r}, this frontend speaks {PROTOCOL_VERSION})"
    return ""
