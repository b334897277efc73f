"""A generation as an HTTP response: one JSON body, or server-sent events. A client that hangs up aborts what still runs."""

import asyncio
from typing import Protocol

import msgspec
from starlette.responses import Response

from deepserve.server.errors import ApiError
from deepserve.server.generation import Choice, EngineFailure, Generation, News
from deepserve.server.responses import PromptTokensDetails, Usage

_DONE = b"data: [DONE]\n\n"


class Form(Protocol):
    """The two routes' shapes of the same news."""

    def chunk(self, choice: Choice, news: News) -> bytes:
        """One or more events, or nothing when there is nothing to tell."""

    def usage_chunk(self) -> bytes: ...

    def body(self, choices: list[tuple[Choice, News]]) -> bytes: ...


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


class ChunkWriter:
    """Events of one stream: what is equal in all of them is encoded once."""

    def __init__(
        self, *, response_id: str, kind: str, created: int, model: str, fingerprint: str, usage_in_every_chunk: bool, include_usage: bool
    ):
        self._encoder = msgspec.json.Encoder()
        head = {"id": response_id, "object": kind, "created": created, "model": model, "system_fingerprint": fingerprint}
        self._head = b"data: " + self._encoder.encode(head)[:-1] + b',"choices":['
        self._usage_in_every_chunk = usage_in_every_chunk
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def event(self, choice: msgspec.Struct, generation: Generation, extra: bytes = b"") -> bytes:
        """`extra`: further fields of the top level, encoded, each behind a comma."""
        tail = self._tail
        if self._usage_in_every_chunk:
            tail = b'],"usage":' + self._encoder.encode(usage(generation)) + b"}\n\n"
        return b"".join((self._head, self._encoder.encode(choice), b"]" + extra + tail[1:] if extra else tail))

    def usage_event(self, generation: Generation) -> bytes:
        return self._head + b'],"usage":' + self._encoder.encode(usage(generation)) + b"}\n\n"
