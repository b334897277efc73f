"""From engine outputs to text: one `Choice` for each sequence of each prompt of a client's request."""

import time

from deepserve.engine.request import PositionLogprobs, SamplingParams, SequenceOutput
from deepserve.server.client import EngineClient
from deepserve.text.detokenize import Detokenizer
from deepserve.text.stops import StopStrings
from deepserve.text.tokenizer import Tokenizer


class EngineFailure(RuntimeError):
    """The engine lost or failed the request; the message says how."""


class News:
    """What happened to one choice since the last look."""

    __slots__ = ("finish_reason", "logprobs", "offsets", "stop_reason", "text", "token_ids")

    def __init__(self):
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []  # one for each token, empty if not asked for
        self.offsets: list[int] = []  # where each token begins, in characters of generated text; as `logprobs`
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def add(self, later: "News"):
        """All but the text, which the caller joins."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.offsets += later.offsets
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


class Choice:
    """One sequence on its way to text."""

    __slots__ = (
        "_detokenizer", "_drop_end", "_min_tokens", "_num_chars", "_one_by_one", "_stop_token_ids", "_stops",
        "index", "num_generated", "prompt_idx", "seed", "started",
    )  # fmt: skip

    def __init__(self, index: int, prompt_idx: int, params: SamplingParams, tokenizer: Tokenizer):
        self.index = index  # among all choices of the client's request
        self.prompt_idx = prompt_idx
        self.seed = params.seed
        self.num_generated = 0
        self.started = False  # for the reply: whether something of it has been sent
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output) if params.stop_strings else None
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._min_tokens = params.min_tokens
        self._drop_end = not params.include_stop_str_in_output
        self._num_chars = 0
        self._one_by_one = self._stops is not None or params.logprobs is not None

    def feed(self, output: SequenceOutput) -> News:
        news = News()
        news.token_ids = token_ids = output.token_ids
        news.finish_reason = output.finish_reason
        if output.stop_token_id in self._stop_token_ids:
            news.stop_reason = output.stop_token_id  # the model's own end token is no reason to tell
        if output.logprobs:
            news.logprobs = output.logprobs
        # The token that ended the sequence is no text unless asked for.
        shown = token_ids[:-1] if output.stop_token_id is not None and self._drop_end else token_ids
        if not self._one_by_one:
            news.text = self._detokenizer.push(shown)
            self.num_generated += len(token_ids)
            if output.finish_reason is not None:
                news.text += self._detokenizer.finish()
            return news
        self._feed_one_by_one(shown, news)
        return news

    def _feed_one_by_one(self, shown: list[int], news: News):
        """Finds the token at which a stop string is complete, and where each token begins."""
        pieces: list[str] = []
        for position, token_id in enumerate(shown):
            news.offsets.append(self._num_chars)
            piece = self._detokenizer.push((token_id,))
            self._num_chars += len(piece)
            self.num_generated += 1
            pieces.append(self._released(piece))
            if self._stops is not None and self._stops.matched is not None:
                news.token_ids = news.token_ids[: position + 1]
                news.logprobs = news.logprobs[: position + 1]
                self._stop(news)
                break
        else:
            unshown = len(news.token_ids) - len(shown)
            self.num_generated += unshown
            news.offsets += [self._num_chars] * unshown
            if news.finish_reason is not None:
                pieces.append(self._released(self._detokenizer.finish()))
                if self._stops is not None:
                    if self._stops.matched is None:
                        pieces.append(self._stops.finish())
                    else:
                        self._stop(news)
        news.text = "".join(pieces)

    def _released(self, piece: str) -> str:
        # Text of the first `min_tokens` tokens cannot stop anything.
        if self._stops is None or self.num_generated <= self._min_tokens:
            return piece
        return self._stops.push(piece)

    def _stop(self, news: News):
        news.finish_reason = "stop"
        news.stop_reason = self._stops.matched


class Generation:
    """All choices of one client request. Always `close` it."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, prompts: list[list[int]], params: list[SamplingParams], cache_salt: str):
        """`params`: one for each prompt, as `validate` returned them. Raises NoEngine."""
        self.prompts = prompts
        self.num_cached = [0] * len(prompts)
        self.prompt_logprobs: list[list[PositionLogprobs | None] | None] = [None] * len(prompts)
        self._stream = client.stream()
        self._awaits_prompt = [p.prompt_logprobs is not None for p in params]
        self._held: list[SequenceOutput] = []
        self._num_choices = params[0].n
        self.choices = [
            Choice(prompt_idx * each.n + i, prompt_idx, each, tokenizer) for prompt_idx, each in enumerate(params) for i in range(each.n)
        ]
        self._prompt_of: dict[str, int] = {}
        try:
            for prompt_idx, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
                self._prompt_of[client.submit_to(self._stream, prompt, each, cache_salt)] = prompt_idx
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return self._stream.closed

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_generated_tokens(self) -> int:
        return sum(choice.num_generated for choice in self.choices)

    async def news(self) -> list[tuple[Choice, News]]:
        """Waits for news; empty at the end, or when closed meanwhile. Raises EngineFailure."""
        while outputs := await self._stream.take():
            pairs = []
            for output in outputs:
                pairs += self._on_output(output)
            if pairs:
                return pairs
        return []

    def close(self):
        self._stream.close(time.perf_counter())

    def _on_output(self, output: SequenceOutput) -> list[tuple[Choice, News]]:
        if output.finish_reason == "error":
            raise EngineFailure(output.error or "the engine failed the request")
        prompt_idx = self._prompt_of[output.request_id]
        if output.num_cached_tokens > self.num_cached[prompt_idx]:
            self.num_cached[prompt_idx] = output.num_cached_tokens
        if not self._awaits_prompt[prompt_idx]:
            return [self._feed(prompt_idx, output)]
        # The prompt's log-probabilities come with sequence 0; the others wait, for they may echo them.
        self._held.append(output)
        if output.prompt_logprobs is None:
            return []
        self._awaits_prompt[prompt_idx] = False
        self.prompt_logprobs[prompt_idx] = output.prompt_logprobs
        ready = [held for held in self._held if self._prompt_of[held.request_id] == prompt_idx]
        self._held = [held for held in self._held if self._prompt_of[held.request_id] != prompt_idx]
        return [self._feed(prompt_idx, held) for held in ready]

    def _feed(self, prompt_idx: int, output: SequenceOutput) -> tuple[Choice, News]:
        choice = self.choices[prompt_idx * self._num_choices + output.index]
        news = choice.feed(output)
        if news.finish_reason is not None and output.finish_reason is None:
            self._stream.end(output.request_id, output.index, time.perf_counter())
        return choice, news
