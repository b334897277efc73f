"""A generation as an HTTP response: one JSON body, or server-sent events. A client that hangs up aborts what still runs."""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod

import msgspec
from starlette.responses import Response

from deepserve.server.errors import ApiError
from deepserve.server.generation import Choice, EngineFailure, Generation, News
from deepserve.server.protocol import GenerateRequest
from deepserve.server.responses import PromptTokensDetails, Usage
from deepserve.server.state import ServerState

_DONE = b"data: [DONE]\n\n"


class Form(ABC):
    """What the replies of both routes share; each has its own shapes of the same news."""

    def __init__(
        self, state: ServerState, request: GenerateRequest, generation: Generation, model: str, *, id_prefix: str, chunk_kind: str
    ):
        self._tokenizer = state.tokenizer
        self._generation = generation
        self._wants_ids = bool(request.return_token_ids)
        self._names = {
            "id": f"{id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": state.client.fingerprint,
        }
        # What is equal in all events of a stream is encoded once.
        self._encoder = msgspec.json.Encoder()
        self._head = b"data: " + self._encoder.encode({"object": chunk_kind, **self._names})[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"
        self._usage_in_every_chunk = request.usage_in_every_chunk

    @abstractmethod
    def chunk(self, choice: Choice, news: News) -> bytes:
        """One or more events, or nothing when there is nothing to tell."""

    @abstractmethod
    def body(self, choices: list[tuple[Choice, News]]) -> bytes:
        """The whole reply."""

    def usage_chunk(self) -> bytes:
        return self._head + self._usage_tail()

    def _usage_tail(self) -> bytes:
        return b'],"usage":' + self._encoder.encode(usage(self._generation)) + b"}\n\n"

    def _event(self, choice: msgspec.Struct, extra: bytes = b"") -> bytes:
        """`extra`: further fields of the top level, encoded, each behind a comma."""
        tail = self._usage_tail() if self._usage_in_every_chunk else self._tail
        return b"".join((self._head, self._encoder.encode(choice), b"]" + extra + tail[1:] if extra else tail))


class Reply(Response):
    """Made before the response starts, so that whatever fails until the first token still gets its own status."""

    def __init__(self, generation: Generation, form: Form, *, stream: bool, include_usage: bool):
        super().__init__()
        self._generation = generation
        self._form = form
        self._streams = stream
        self._include_usage = include_usage

    async def __call__(self, scope, receive, send):
        generation = self._generation
        watcher = asyncio.create_task(_close_on_disconnect(receive, generation))
        try:
            await (self._events(send) if self._streams else self._whole(send))
        finally:
            watcher.cancel()
            generation.close()

    async def _whole(self, send):
        totals = [News() for _ in self._generation.choices]
        texts: list[list[str]] = [[] for _ in totals]  # joined once: appending to a long text copies it each time
        try:
            while news := await self._generation.news():
                for choice, latest in news:
                    totals[choice.index].add(latest)
                    texts[choice.index].append(latest.text)
        except EngineFailure as error:
            raise _failed(error) from error
        if self._generation.closed:
            return
        for total, pieces in zip(totals, texts, strict=True):
            total.text = "".join(pieces)
        body = self._form.body(list(zip(self._generation.choices, totals, strict=True)))
        await send(_start(b"application/json", (b"content-length", b"%d" % len(body))))
        await send({"type": "http.response.body", "body": body})

    async def _events(self, send):
        try:
            news = await self._generation.news()
        except EngineFailure as error:
            raise _failed(error) from error
        if not news:
            return
        await send(_start(b"text/event-stream; charset=utf-8", (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")))
        try:
            await self._relay(news, send)
        except EngineFailure as error:
            # The status is out, so the error is an event, and the missing [DONE] says that the answer is not whole.
            await send({"type": "http.response.body", "body": b"data: " + _failed(error).body() + b"\n\n"})
            return
        if self._generation.closed:
            return
        last = (self._form.usage_chunk() if self._include_usage else b"") + _DONE
        await send({"type": "http.response.body", "body": last})

    async def _relay(self, news: list[tuple[Choice, News]], send):
        """The loop that every streamed token goes through."""
        chunk, next_news = self._form.chunk, self._generation.news
        while news:
            body = chunk(*news[0]) if len(news) == 1 else b"".join([chunk(choice, latest) for choice, latest in news])
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            news = await next_news()


def _failed(error: EngineFailure) -> ApiError:
    return ApiError(500, str(error), code="engine_error")


async def _close_on_disconnect(receive, generation: Generation):
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.close()


def _start(content_type: bytes, *headers: tuple[bytes, bytes]) -> dict:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type), *headers]}


def usage(generation: Generation) -> Usage:
    num_prompt, num_generated = generation.num_prompt_tokens, generation.num_generated_tokens
    return Usage(num_prompt, num_prompt + num_generated, num_generated, PromptTokensDetails(sum(generation.num_cached)))
