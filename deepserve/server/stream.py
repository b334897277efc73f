"""What comes back for the engine requests of one client call, merged per sequence when the reader is slower than the engine."""

import asyncio
from collections.abc import Callable

from deepserve.engine.request import SequenceOutput
from deepserve.messages import Submit
from deepserve.server.router import Prompt
from deepserve.server.stats import EngineStats


class EngineRequest:
    """One request as the engine that answers it has it. `open` holds the sequences that are not finished yet."""

    __slots__ = (
        "engine", "hand_off", "last_s", "message", "num_generated", "num_prompt", "open", "prefilled", "prompt", "request_id", "retried",
        "start_s", "stats", "stream",
    )  # fmt: skip

    def __init__(self, *, message: Submit, stream: "OutputStream", start_s: float):
        """`engine`, `stats` and `hand_off` are the dispatcher's to set."""
        self.message = message
        self.request_id = message.request_id
        self.prompt = Prompt.of(message.prompt_token_ids, message.cache_salt)
        self.engine = None
        self.stats: EngineStats | None = None
        self.hand_off = None
        self.stream = stream
        self.num_prompt = len(message.prompt_token_ids)
        self.prefilled = False  # something came back, so the prompt has been computed
        self.retried = False
        n = message.params.n
        self.open = set(range(n))
        self.num_generated = [0] * n
        self.start_s = start_s
        self.last_s: list[float | None] = [None] * n  # when the latest token of each sequence came

    def fail(self, reason: str, now_s: float):
        """End what is open with an error."""
        for index in list(self.open):
            self.receive(SequenceOutput(self.request_id, index, [], finish_reason="error", error=reason), now_s)

    def receive(self, output: SequenceOutput, now_s: float):
        index = output.index
        if index not in self.open:
            return  # ended here by a stop string; the engine does not know
        num_tokens = len(output.token_ids)
        stats = self.stats
        last_s = self.last_s[index]
        if not self.prefilled and not output.error:
            self.prefilled = True
            stats.num_prompt_tokens += self.num_prompt
        if num_tokens:
            if last_s is None:
                stats.first_token_s.observe(now_s - self.start_s)
            else:
                stats.inter_token_s.observe((now_s - last_s) / num_tokens, num_tokens)
            self.last_s[index] = now_s
            self.num_generated[index] += num_tokens
            stats.num_generated_tokens += num_tokens
        if output.finish_reason is not None:
            self.finish(index, output.finish_reason, now_s)
        self.stream.put(output)

    def finish(self, index: int, reason: str, now_s: float):
        self.open.discard(index)
        stats = self.stats
        stats.num_finished[reason if reason in stats.num_finished else "error"] += 1
        stats.end_to_end_s.observe(now_s - self.start_s)
        stats.generated_tokens.observe(self.num_generated[index])
        if not self.open:
            if self.prefilled:
                stats.prompt_tokens.observe(self.num_prompt)
            self.engine.requests.pop(self.request_id, None)
            self.stream.requests.pop(self.request_id, None)


class OutputStream:
    """Reader's end of one or several engine requests. Always `close` it: what still runs then is aborted.

    An engine that is lost or fails a request gives a last output with `finish_reason` "error" and a sentence in `error`.
    """

    def __init__(self, abort: Callable[[list[EngineRequest]], None]):
        self.requests: dict[str, EngineRequest] = {}  # with a sequence that is not finished
        self.closed = False
        self._abort = abort
        self._pending: dict[tuple[str, int], SequenceOutput] = {}
        self._waiter: asyncio.Future | None = None

    def put(self, output: SequenceOutput):
        key = (output.request_id, output.index)
        held = self._pending.get(key)
        self._pending[key] = output if held is None else _merge(held, output)
        self._wake()

    async def take(self) -> list[SequenceOutput]:
        """All news since the last call, at most one output for each sequence; empty when there will be no more."""
        while not self._pending:
            if self.closed or not self.requests:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        outputs = list(self._pending.values())
        self._pending.clear()
        return outputs

    async def __aiter__(self):
        while outputs := await self.take():
            for output in outputs:
                yield output

    def end(self, request_id: str, index: int, now_s: float):
        """The reader is done with one sequence; the engine request is aborted once all its sequences are done."""
        request = self.requests.get(request_id)
        if request is None or index not in request.open:
            return
        self._pending.pop((request_id, index), None)
        request.finish(index, "stop", now_s)
        if not request.open:
            self._abort([request])

    def close(self, now_s: float):
        """Abort what is not finished and end the stream. Harmless when repeated."""
        self.closed = True
        self._pending.clear()
        unfinished = list(self.requests.values())
        for request in unfinished:
            for index in list(request.open):
                request.finish(index, "abort", now_s)
        if unfinished:
            self._abort(unfinished)
        self._wake()

    def _wake(self):
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _merge(held: SequenceOutput, new: SequenceOutput) -> SequenceOutput:
    """Append in place: a reader that sleeps through ten thousand tokens costs one list, not ten thousand objects."""
    held.token_ids.extend(new.token_ids)
    logprobs = held.logprobs
    if logprobs is None:
        logprobs = new.logprobs
    elif new.logprobs:
        logprobs.extend(new.logprobs)
    if new.finish_reason is None and logprobs is held.logprobs and new.prompt_logprobs is None:
        return held
    return SequenceOutput(
        request_id=held.request_id,
        index=held.index,
        token_ids=held.token_ids,
        finish_reason=new.finish_reason,
        stop_token_id=new.stop_token_id,
        logprobs=logprobs,
        prompt_logprobs=held.prompt_logprobs if new.prompt_logprobs is None else new.prompt_logprobs,
        num_cached_tokens=max(held.num_cached_tokens, new.num_cached_tokens),
        error=new.error,
    )
