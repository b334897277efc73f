"""Offline use: `LLM` generates for a list of prompts, in this process, in the shapes that users of vLLM know."""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deepserve.config import EngineArgs
from deepserve.engine.engine import Engine, resolve
from deepserve.engine.request import PositionLogprobs, SamplingParams, SequenceOutput, validate
from deepserve.messages import Submit
from deepserve.pool import RankPool
from deepserve.text.chat import ChatTemplate
from deepserve.text.sequence import News, SequenceText
from deepserve.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """Of one token at one position, before penalties, bias and temperature."""

    logprob: float  # natural logarithm
    rank: int  # 1 = most likely
    decoded_token: str | None = None  # None without a tokenizer


@dataclass
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None  # one for each token, the drawn one first
    cumulative_logprob: float | None = None
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: int | str | None = None  # the stop token id or stop string; None for the end of sequence and for length


@dataclass
class RequestOutput:
    """One prompt and what came of it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False
    seed: int | None = None  # that the draws were keyed with; give it again to repeat them


class LLM:
    """A model, loaded into this process or, with several ranks, into processes of its own.

    Use it as a context manager, or call `shutdown`. Threads may share it; their calls run one after the other.

    Options are those of `EngineArgs`; an unknown one is a TypeError. Raises ValueError for what cannot run.
    """

    def __init__(self, model: str = "deepserve-tiny", *, skip_tokenizer_init: bool = False, **options: Any):
        unknown = set(options) - set(EngineArgs.__struct_fields__)
        if unknown:
            known = ", ".join(EngineArgs.__struct_fields__)
            raise TypeError(f"LLM has no option {sorted(unknown)[0]!r}; it takes skip_tokenizer_init and {known}")
        try:
            args = msgspec.convert({"model": model, **options}, EngineArgs)
        except msgspec.ValidationError as error:
            raise ValueError(f"LLM: {error}") from None
        config = resolve(args)
        self.tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None
        if not skip_tokenizer_init:
            self.tokenizer = Tokenizer.from_folder(config.model_path)
            self._template = ChatTemplate.from_folder(config.model_path, self.tokenizer)
        # One rank runs in this process; several are processes of their own.
        self._engine: Engine | RankPool | None = Engine(config) if config.parallel.num_ranks == 1 else RankPool(args)
        self._ids = itertools.count()
        self._turn = threading.Lock()  # an engine has one user at a time

    @property
    def engine(self) -> Engine | RankPool:
        if self._engine is None:
            raise RuntimeError("this LLM was shut down")
        return self._engine

    def generate(
        self,
        prompts: str | dict | Sequence[str | dict],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt; results come in input order.

        prompts: text, or `{"prompt_token_ids": [...]}`, or a list of these. One SamplingParams serves all, or one for each.
        `use_tqdm` shows a progress bar. Raises ValueError naming the prompt that cannot run, before any of them starts.
        """
        if not isinstance(prompts, str | dict | Sequence):
            raise ValueError(f"prompts must be text, a dict or a list of these, got {prompts!r}")
        items = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        params = list(sampling_params) if isinstance(sampling_params, list | tuple) else [sampling_params or SamplingParams()] * len(items)
        for one in params:
            if not isinstance(one, SamplingParams):
                raise ValueError(f"sampling params must be SamplingParams or a list of them, got {one!r}")
        if len(params) != len(items):
            raise ValueError(f"{len(items)} prompts came with {len(params)} sampling params")
        jobs = [self._job(i, item, one) for i, (item, one) in enumerate(zip(items, params, strict=True))]
        return self._run(jobs, use_tqdm)

    def chat(
        self,
        messages: list[dict] | list[list[dict]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: list[dict] | None = None,
        chat_template_kwargs: dict | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, each a list of `{"role": ..., "content": ...}`."""
        if self._template is None:
            raise ValueError("chat needs a tokenizer; this LLM was made with skip_tokenizer_init=True")
        many = messages if isinstance(messages, list | tuple) and messages and isinstance(messages[0], list) else [messages]
        prompts = [
            {
                "prompt_token_ids": self._template.encode(
                    conversation,
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    chat_template_kwargs=chat_template_kwargs,
                )
            }
            for conversation in many
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def shutdown(self) -> None:
        """Free the model and end its ranks; the object cannot be used any more."""
        if isinstance(self._engine, RankPool):
            self._engine.shutdown()
        self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _job(self, number: int, prompt: str | dict, params: SamplingParams) -> "_Job":
        text, ids = None, None
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, list):
            ids = prompt
        elif isinstance(prompt, dict) and set(prompt) <= {"prompt", "prompt_token_ids"} and prompt:
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        else:
            raise ValueError(f"prompt {number}: must be text or {{'prompt_token_ids': [...]}}, got {prompt!r}")
        try:
            if ids is None:
                if self.tokenizer is None:
                    raise ValueError("text needs a tokenizer; this LLM was made with skip_tokenizer_init=True")
                ids = self.tokenizer.encode(text)
            if self.tokenizer is None and params.stop_strings:
                raise ValueError("stop strings need a tokenizer; this LLM was made with skip_tokenizer_init=True")
            if not isinstance(ids, Sequence):
                raise ValueError(f"prompt_token_ids must be a list of token ids, got {ids!r}")
            params = validate(list(ids), params, self.engine.limits)
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from None
        return _Job(str(next(self._ids)), text, list(ids), params, self.tokenizer)

    def _run(self, jobs: list["_Job"], progress: bool) -> list[RequestOutput]:
        with self._turn:
            return self._run_alone(self.engine, jobs, progress)

    def _run_alone(self, engine: Engine | RankPool, jobs: list["_Job"], progress: bool) -> list[RequestOutput]:
        by_id = {job.output.request_id: job for job in jobs}
        try:
            for job in jobs:
                engine.submit(Submit(job.output.request_id, job.output.prompt_token_ids, job.params))
            with _bar(len(jobs), progress) as advance:
                while engine.has_work:
                    for news in engine.step():
                        job = by_id[news.request_id]
                        if job.output.finished:
                            continue
                        job.take(news)
                        if job.output.finished:
                            engine.abort([news.request_id])  # sequences that a stop string ended still run
                            advance(1)
        except BaseException:
            engine.abandon(list(by_id))
            raise
        return [job.output for job in jobs]


class _Job:
    """One request in flight: collects tokens and text of its sequences."""

    def __init__(self, request_id: str, prompt: str | None, ids: list[int], params: SamplingParams, tokenizer: Tokenizer | None):
        self.params, self.tokenizer = params, tokenizer
        logprobs = params.logprobs is not None
        outputs = [
            CompletionOutput(i, logprobs=[] if logprobs else None, cumulative_logprob=0.0 if logprobs else None) for i in range(params.n)
        ]
        self.output = RequestOutput(request_id, prompt, ids, outputs, seed=params.seed)
        self._texts: list[SequenceText] | None = None
        if tokenizer is not None and params.detokenize:
            self._texts = [SequenceText(params, tokenizer) for _ in outputs]

    def take(self, news: SequenceOutput) -> None:
        """Add what a step brought for one sequence."""
        if news.num_cached_tokens:
            self.output.num_cached_tokens = news.num_cached_tokens
        if news.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None if at is None else self._logprobs(at) for at in news.prompt_logprobs]
        sequence = self.output.outputs[news.index]
        if sequence.finish_reason is not None:
            return
        found = self._bare(news) if self._texts is None else self._texts[news.index].feed(news)
        sequence.token_ids += found.token_ids
        sequence.text += found.text
        if sequence.logprobs is not None:
            for at in found.logprobs:
                sequence.logprobs.append(self._logprobs(at))
                sequence.cumulative_logprob += at.logprobs[0]
        sequence.finish_reason, sequence.stop_reason = found.finish_reason, found.stop_reason
        self.output.finished = all(s.finish_reason is not None for s in self.output.outputs)

    def _bare(self, news: SequenceOutput) -> News:
        """The same without text."""
        found = News()
        found.token_ids, found.logprobs, found.finish_reason = news.token_ids, news.logprobs or [], news.finish_reason
        if news.stop_token_id in self.params.stop_token_ids:
            found.stop_reason = news.stop_token_id
        return found

    def _logprobs(self, at: PositionLogprobs) -> dict[int, Logprob]:
        def named(token: int, logprob: float, rank: int) -> Logprob:
            return Logprob(logprob, rank, None if self.tokenizer is None else self.tokenizer.id_to_text(token))

        found = {at.token_ids[0]: named(at.token_ids[0], at.logprobs[0], at.rank)}
        for rank, (token, logprob) in enumerate(zip(at.token_ids[1:], at.logprobs[1:], strict=True), start=1):
            found.setdefault(token, named(token, logprob, rank))
        return found


class _bar:
    """A progress bar over prompts on stderr, or nothing."""

    def __init__(self, total: int, wanted: bool):
        columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), disable=not wanted or total == 0)
        self._task = self._progress.add_task("prompts", total=total)

    def __enter__(self):
        self._progress.start()
        return lambda num: self._progress.advance(self._task, num)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
