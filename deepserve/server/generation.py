"""From engine outputs to text: one `Choice` for each sequence of each prompt of a client's request."""

import time

from deepserve.engine.request import PositionLogprobs, SamplingParams, SequenceOutput
from deepserve.server.client import EngineClient
from deepserve.text.sequence import News, SequenceText
from deepserve.text.tokenizer import Tokenizer


class EngineFailure(RuntimeError):
    """The engine lost or failed the request; the message says how."""


class Choice(SequenceText):
    """One sequence of a client's request."""

    __slots__ = ("index", "prompt_idx", "seed", "started")

    def __init__(self, index: int, prompt_idx: int, params: SamplingParams, tokenizer: Tokenizer):
        super().__init__(params, tokenizer)
        self.index = index  # among all choices of the client's request
        self.prompt_idx = prompt_idx
        self.seed = params.seed
        self.started = False  # for the reply: whether something of it has been sent


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
