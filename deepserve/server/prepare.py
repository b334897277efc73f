"""From a decoded request to engine requests: every check that stands between a client and an engine."""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import contextmanager

from msgspec.structs import replace

from deepserve.engine.request import Limits, PromptTooLong, SamplingParams, validate
from deepserve.server.client import NoEngine
from deepserve.server.errors import bad_request, model_not_found, no_engine
from deepserve.server.generation import Generation
from deepserve.server.protocol import GenerateRequest, refuse_unsupported
from deepserve.server.state import ServerState

# Longer texts are encoded in a thread, so that they do not stop every stream for the time it takes.
ENCODE_IN_THREAD_CHARS = 16 * 1024
MAX_CACHE_SALT_CHARS = 256


def check_model(state: ServerState, name: str | None) -> str:
    """The name to answer with; raises ApiError 404 for one that is not served."""
    if name is None:
        return state.model_names[0]
    if name not in state.model_names:
        raise model_not_found(name)
    return name


@contextmanager
def check_common(request: GenerateRequest):
    """Checks what both routes share; a ValueError inside becomes a 400."""
    try:
        refuse_unsupported(request)
        if len(request.cache_salt or "") > MAX_CACHE_SALT_CHARS:
            raise ValueError(f"cache_salt has {len(request.cache_salt)} characters, at most {MAX_CACHE_SALT_CHARS} are allowed")
        yield
    except ValueError as error:
        raise bad_request(error) from error


def needed_limits(state: ServerState) -> Limits:
    limits = state.client.limits
    if limits is None:
        raise no_engine()
    return limits


async def encode_text(state: ServerState, text: str, limits: Limits, encode: Callable[[str], list[int]]) -> list[int]:
    """`encode(text)`. Raises ValueError for a text that cannot fit, without encoding it first."""
    if len(text) > limits.max_model_len * state.longest_token_bytes:
        raise PromptTooLong(f"the prompt has {len(text)} characters, which cannot fit {limits.max_model_len} tokens")
    if len(text) < ENCODE_IN_THREAD_CHARS:
        await asyncio.sleep(0)  # a turn for the others: a request may have thousands of texts
        return encode(text)
    return await asyncio.to_thread(encode, text)


def validated(prompts: list[list[int]], params: SamplingParams, limits: Limits) -> list[SamplingParams]:
    """One for each prompt: without a seed of the client's, every prompt draws its own, exact in a JSON reader's double."""
    return [
        validate(prompt, params if params.seed is not None else replace(params, seed=secrets.randbits(53)), limits) for prompt in prompts
    ]


def generate(state: ServerState, prompts: list[list[int]], params: list[SamplingParams], cache_salt: str) -> Generation:
    try:
        return Generation(state.client, state.tokenizer, prompts, params, cache_salt)
    except NoEngine as error:
        raise no_engine(str(error)) from error
