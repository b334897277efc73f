"""The HTTP routes. FastAPI routes and documents; bodies are decoded by msgspec, and tokens never pass through it."""

import asyncio
from functools import partial

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from deepserve import __version__
from deepserve.server.balance import expert_balance
from deepserve.server.chat import chat_prompt, chat_reply
from deepserve.server.completions import completion_reply
from deepserve.server.errors import ApiError, bad_request, model_not_found, no_engine, undecodable
from deepserve.server.gate import Gate
from deepserve.server.metrics import exposition
from deepserve.server.prepare import check_model, encode_text, needed_limits
from deepserve.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, ScaleRequest, TokenizeRequest
from deepserve.server.responses import Detokenized, ModelCard, ModelList, Tokenized
from deepserve.server.state import ServerState


def create_app(state: ServerState) -> Gate:
    """The ASGI application of one frontend."""
    app = FastAPI(title="deepserve", version=__version__)
    _add_generation(app, state)
    _add_models(app, state)
    _add_operations(app, state)
    _add_texts(app, state)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    return Gate(app, state)


def _add_generation(app: FastAPI, state: ServerState):
    chat_decoder = msgspec.json.Decoder(ChatRequest)
    completion_decoder = msgspec.json.Decoder(CompletionRequest)

    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        return await chat_reply(state, await _decode(request, chat_decoder, state))

    @app.post("/v1/completions", openapi_extra=_body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await completion_reply(state, await _decode(request, completion_decoder, state))


def _add_models(app: FastAPI, state: ServerState):
    def card(name: str) -> ModelCard:
        limits = state.client.limits
        return ModelCard(id=name, created=state.created, root=state.model_names[0], max_model_len=limits.max_model_len if limits else None)

    @app.get("/v1/models")
    async def models() -> Response:
        return _json(ModelList([card(name) for name in state.model_names]))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name not in state.model_names:
            raise model_not_found(name)
        return _json(card(name))


def _add_operations(app: FastAPI, state: ServerState):
    @app.get("/health")
    async def health() -> Response:
        if not state.healthy:
            raise no_engine("the server is shutting down" if state.draining else "no engine can take requests now")
        return _json({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        if not state.ready:
            raise no_engine(f"{len(state.client.engines)} of {state.num_wanted} engine ranks have registered")
        return _json({"status": "ready", "engines": len(state.client.engines)})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition(state), media_type="text/plain; version=1.0.0; charset=utf-8")

    @app.get("/eplb")
    async def eplb() -> Response:
        return _json(expert_balance(state.client.engines.values()))

    scale_decoder = msgspec.json.Decoder(ScaleRequest)

    @app.post("/scale", openapi_extra=_body_schema(ScaleRequest))
    async def scale(request: Request) -> Response:
        asked = await _decode(request, scale_decoder, state)
        try:
            await state.scale(asked.instance, asked.dp)
        except ValueError as error:
            raise bad_request(error) from error
        return Response(msgspec.json.encode({"dp": asked.dp}), status_code=202, media_type="application/json")

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": __version__})


def _add_texts(app: FastAPI, state: ServerState):
    tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
    detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)

    @app.post("/tokenize", openapi_extra=_body_schema(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        asked = await _decode(request, tokenize_decoder, state)
        check_model(state, asked.model)
        try:
            tokens = await _tokenize(state, asked)
        except ValueError as error:
            raise bad_request(error) from error
        strings = [state.tokenizer.id_to_text(token) for token in tokens] if asked.return_token_strs else None
        limits = state.client.limits
        return _json(Tokenized(len(tokens), limits.max_model_len if limits else None, tokens, strings))

    @app.post("/detokenize", openapi_extra=_body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        asked = await _decode(request, detokenize_decoder, state)
        check_model(state, asked.model)
        for token in asked.tokens:
            if not 0 <= token < state.tokenizer.vocab_size:
                raise bad_request(f"tokens holds token id {token}, the vocabulary has ids 0 to {state.tokenizer.vocab_size - 1}", "tokens")
        return _json(Detokenized(state.tokenizer.decode(asked.tokens, skip_special_tokens=False)))


async def _tokenize(state: ServerState, asked: TokenizeRequest) -> list[int]:
    if (asked.prompt is None) == (asked.messages is None):
        raise ValueError("give either prompt or messages")
    if asked.prompt is not None:
        encode = partial(state.tokenizer.encode, add_special_tokens=asked.add_special_tokens is not False)
        return await encode_text(state, asked.prompt, needed_limits(state), encode)
    if asked.add_special_tokens:
        raise ValueError("add_special_tokens is for prompts: the chat template adds them to messages")
    return await chat_prompt(
        state,
        needed_limits(state),
        asked.messages,
        tools=asked.tools,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=bool(asked.continue_final_message),
        chat_template_kwargs=asked.chat_template_kwargs,
    )


async def _decode(request: Request, decoder: msgspec.json.Decoder, state: ServerState):
    """The body as the decoder's type. Raises ApiError."""
    timeout_s = state.options.body_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            body = await _read_body(request, state.options.max_body_bytes)
    except TimeoutError as error:
        raise ApiError(408, f"the body was not complete after {timeout_s:g} s", headers={"connection": "close"}) from error
    except ClientDisconnect as error:
        raise bad_request("the client left before its body was complete") from error  # for the access log: nobody hears it
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise undecodable(error) from error


async def _read_body(request: Request, limit: int) -> bytearray:
    """Stops at the limit, so that a large body is neither waited for nor held. The server drops what is still coming."""
    too_large = ApiError(413, f"the body has more than {limit} bytes", code="body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > limit:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise too_large
    return body


async def _on_api_error(request: Request, error: ApiError) -> Response:
    return error.response()


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    """What the router itself refuses: unknown paths and methods."""
    message = f"{request.method} {request.url.path}: {error.detail}"
    return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()


async def _on_bug(request: Request, error: Exception) -> Response:
    # The log has the trace; the client gets no inner details.
    return ApiError(500, "internal error").response()


def _json(value) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _body_schema(kind: type) -> dict:
    schema = msgspec.json.schema(kind)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
