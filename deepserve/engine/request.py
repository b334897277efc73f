"""What a client asked for and what a sequence is doing: no torch, no I/O.

A *request* is what a client sent; it has `params.n` *sequences*, each one token list being generated.
"""

import secrets
from array import array

import msgspec

MAX_N = 128
MAX_LOGPROBS = 64
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 4096
# Beyond this a float32 logit divided by the temperature can overflow; smaller values mean greedy.
MIN_TEMPERATURE = 1e-5


class PromptTooLong(ValueError):
    """No room for it in the model's context, or in the cache."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to turn logits into tokens; the names and defaults that users of vLLM know.

    Raises ValueError with the offending value. Vocabulary-dependent checks are in `validate`.
    """

    n: int = 1
    max_tokens: int | None = 16  # None: up to the model's context
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    # One list type each, as decoding from a message needs; tuples are as good here.
    stop: list[str] | str = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives beside the sampled token
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self):
        for name, off in (("stop", []), ("stop_token_ids", []), ("top_k", 0)):
            if getattr(self, name) is None:  # how some callers say "off"
                msgspec.structs.force_setattr(self, name, off)
        _whole("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 0, 1 << 31)
        _whole("min_tokens", self.min_tokens, 0, 1 << 31)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        _real("temperature", self.temperature, 0.0, 100.0)
        _real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise ValueError("top_p must be above 0, got 0.0")
        _whole("top_k", self.top_k, -1, 1 << 31)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.seed is not None:
            _whole("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        self._check_stops()
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
            if len(self.logit_bias) > MAX_LOGIT_BIAS:
                raise ValueError(f"logit_bias has {len(self.logit_bias)} entries, at most {MAX_LOGIT_BIAS} are allowed")
            for token, bias in self.logit_bias.items():
                _real(f"logit_bias[{token}]", bias, -100.0, 100.0)

    def _check_stops(self):
        if not isinstance(self.stop, (str, list, tuple)):
            raise ValueError(f"stop must be text or a list of texts, got {self.stop!r}")
        if not isinstance(self.stop_token_ids, (list, tuple)):
            raise ValueError(f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}")
        stops = self.stop_strings
        if len(stops) > MAX_STOP_STRINGS:
            raise ValueError(f"stop has {len(stops)} strings, at most {MAX_STOP_STRINGS} are allowed")
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise ValueError(f"stop strings must be non-empty text, got {stop!r}")
            if len(stop) > MAX_STOP_STRING_CHARS:
                raise ValueError(f"a stop string has {len(stop)} characters, at most {MAX_STOP_STRING_CHARS} are allowed")
        if stops and not self.detokenize:
            raise ValueError("stop strings need detokenize=True")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids has {len(self.stop_token_ids)} ids, at most {MAX_STOP_TOKEN_IDS} are allowed")

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE


class PositionLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities at one position, natural logarithm, before any penalty, bias or temperature."""

    token_ids: list[int]  # the token that stands there, then the most likely ones in falling order
    logprobs: list[float]  # same length
    rank: int  # 1 = the token that stands there was the most likely one


class SequenceOutput(msgspec.Struct, array_like=True, frozen=True):
    """News of one sequence. `prompt_logprobs` comes once, before or with the first token, for sequence 0 only."""

    request_id: str
    index: int  # which of the request's n sequences
    token_ids: list[int]  # new tokens, usually one; the end token is among them
    finish_reason: str | None = None  # "stop", "length", "error"
    stop_token_id: int | None = None  # the end or stop token that finished it
    logprobs: list[PositionLogprobs] | None = None  # one for each new token
    prompt_logprobs: list[PositionLogprobs | None] | None = None  # one for each prompt token, None for the first
    num_cached_tokens: int = 0  # prompt tokens served from the prefix cache
    error: str = ""


class Limits(msgspec.Struct, frozen=True):
    """What a model and an engine can take; the frontend learns it from `Register`."""

    vocab_size: int
    max_model_len: int
    # Tokens that one sequence may hold when it has every page to itself.
    max_seq_tokens: int


def validate(prompt_token_ids: list[int], params: SamplingParams, limits: Limits) -> SamplingParams:
    """Check a request against a model and fill in what was left open (`max_tokens`, `seed`).

    Returns params to run with: `max_tokens` cut to the room behind the prompt, `seed` drawn if absent. Raises ValueError with the
    offending value; nothing that passes here can stop an engine.
    """
    num_prompt = len(prompt_token_ids)
    if num_prompt == 0:
        raise ValueError("the prompt is empty: at least one token is needed")
    if not all(type(token) is int for token in prompt_token_ids):
        bad = next(token for token in prompt_token_ids if type(token) is not int)
        raise ValueError(f"the prompt holds {bad!r}, token ids are whole numbers")
    low, high = min(prompt_token_ids), max(prompt_token_ids)
    if low < 0 or high >= limits.vocab_size:
        raise ValueError(f"the prompt holds token id {low if low < 0 else high}, the vocabulary has ids 0 to {limits.vocab_size - 1}")
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
        for token in ids:
            if type(token) is not int or not 0 <= token < limits.vocab_size:
                raise ValueError(f"{name} holds token id {token!r}, the vocabulary has ids 0 to {limits.vocab_size - 1}")
    room = min(limits.max_model_len, limits.max_seq_tokens) - num_prompt
    scores_only = params.max_tokens == 0
    if room < (0 if scores_only else 1):
        raise PromptTooLong(
            f"the prompt has {num_prompt} tokens, at most {limits.max_model_len} fit the model's context "
            f"and {limits.max_seq_tokens} fit its cache" + ("" if scores_only else ", and one token must be left to generate")
        )
    if params.min_tokens > room:
        raise ValueError(f"min_tokens {params.min_tokens} exceeds the {room} tokens of room behind the prompt")
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    seed = secrets.randbits(62) if params.seed is None else params.seed
    return msgspec.structs.replace(params, max_tokens=max_tokens, seed=seed)


def _whole(name: str, value, low: int, high: int):
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} must be a whole number from {low} to {high}, got {value!r}")


def _real(name: str, value, low: float, high: float):
    # NaN is in no range, and whole numbers too large for a float compare all the same.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")


class Sequence:
    """One token list being generated, as the scheduler sees it.

    The scheduler moves a sequence forward by computing its tokens in order; there is no prefill or decode phase beyond that.

        tokens      | computed, in the cache | in flight | to be planned |
                                num_computed ^           ^ num_started   ^ num_expected

    Steps in flight draw tokens that nobody has seen yet: `num_expected` counts them, `tokens` does not. Without a step in flight
    num_started equals num_computed and num_expected equals the number of tokens. While drafts are in flight both are the most that can
    be, as if all of them stood.
    """

    __slots__ = (
        "cache_salt", "end_token_ids", "hands_off", "index", "num_cached", "num_computed", "num_drafts", "num_expected", "num_preemptions",
        "num_prompt", "num_sent_pages", "num_started", "page_hashes", "pages", "params", "prompt_logprobs", "request_id", "row", "stay",
        "tokens",
    )  # fmt: skip

    def __init__(self, request_id: str, index: int, prompt: array, params: SamplingParams, cache_salt: str, end_token_ids: frozenset[int]):
        self.request_id = request_id
        self.index = index
        self.tokens = array("i", prompt)  # prompt, then generated
        self.num_prompt = len(prompt)
        self.num_computed = 0
        self.num_started = 0
        self.num_expected = len(prompt)
        self.stay = 0  # which stay in the batch this is; a result of an earlier stay is void
        self.params = params
        self.cache_salt = cache_salt
        self.end_token_ids = end_token_ids  # any of these finishes the sequence
        self.pages: list[int] = []
        self.page_hashes: list[bytes] = []  # chain hashes of the full pages hashed so far
        self.row: int | None = None  # place in the runner's tables while running
        self.num_drafts = 0  # that wait on the device to be verified
        self.num_sent_pages = 0  # pages the runner was told of
        self.num_cached = 0  # prompt tokens found in the prefix cache at first admission
        self.num_preemptions = 0
        self.hands_off = False  # its first token is the last one that is drawn here
        self.prompt_logprobs: list[PositionLogprobs | None] = []

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def most_tokens(self) -> int:
        """Length at which it ends for sure."""
        return self.num_prompt + self.params.max_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.index == 0 and self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt

    def append(self, tokens: list[int], logprobs: list[PositionLogprobs] | None) -> SequenceOutput:
        """The one place through which drawn tokens enter a sequence. What stands behind its end is dropped. News for the client."""
        num_generated, params = self.num_generated, self.params
        first = not num_generated
        reason = stop_token = None
        kept: list[int] = []
        for token in tokens:
            kept.append(token)
            num_generated += 1
            if token in self.end_token_ids and num_generated > params.min_tokens:
                reason, stop_token = "stop", token
            elif num_generated >= params.max_tokens:
                reason = "length"
            if reason is not None:
                break
        self.tokens.extend(kept)
        return SequenceOutput(
            request_id=self.request_id,
            index=self.index,
            token_ids=kept,
            finish_reason=reason,
            stop_token_id=stop_token,
            logprobs=None if logprobs is None else logprobs[: len(kept)],
            prompt_logprobs=self.prompt_logprobs if first and self.prompt_logprobs else None,
            num_cached_tokens=self.num_cached if first else 0,
        )

    def scored(self) -> SequenceOutput:
        """News of a sequence that wants no tokens: it is done when its prompt is computed."""
        return SequenceOutput(self.request_id, self.index, [], "length", None, None, self.prompt_logprobs or None, self.num_cached)

    def add_prompt_logprobs(self, positions: list[PositionLogprobs]) -> None:
        if not self.prompt_logprobs:
            self.prompt_logprobs.append(None)  # nothing precedes the first token
        self.prompt_logprobs += positions
