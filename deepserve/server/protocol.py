"""Request types of the OpenAI routes, with vLLM's extra fields.

Decoding is strict: unknown fields and wrong types are refused by name. Fields that clients send and that change nothing with
their usual values are listed in `NO_EFFECT`; any other value is refused, so that nothing a user asked for is dropped silently.
"""

from typing import Any, Literal

import msgspec

from deepserve.engine.request import SamplingParams

MAX_PROMPTS = 2048
MAX_CHOICES = 4096  # prompts times n
COMPLETION_MAX_TOKENS = 16  # OpenAI's default

# field -> (the values that are accepted beside null, what to say otherwise)
NO_EFFECT: dict[str, tuple[tuple, str]] = {
    "audio": ((), "audio output is not supported"),
    "function_call": (("none", "auto"), "use `tools` and `tool_choice`"),
    "functions": ((), "use `tools`"),
    "guided_choice": ((), "constrained output is not supported"),
    "guided_grammar": ((), "constrained output is not supported"),
    "guided_json": ((), "constrained output is not supported"),
    "guided_regex": ((), "constrained output is not supported"),
    "kv_transfer_params": ((), "it is not supported"),
    "modalities": ((["text"],), "only text is supported"),
    "prediction": ((), "predicted outputs are not supported"),
    "priority": ((0,), "priorities are not supported"),
    "reasoning_effort": ((), "say what the model's chat template knows in `chat_template_kwargs`"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "store": ((False,), "completions are not stored"),
    "structured_outputs": ((), "constrained output is not supported"),
    "suffix": (("",), "insertion is not supported"),
    "verbosity": (("medium",), "it is not supported"),
    "web_search_options": ((), "there is no web search"),
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    include_usage: bool | None = False
    include_obfuscation: bool | None = False  # padding against traffic analysis; never added here
    continuous_usage_stats: bool | None = False


class ResponseFormat(msgspec.Struct, frozen=True):
    type: str


class GenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both routes share."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = False
    response_format: ResponseFormat | None = None

    # No effect here whatever they say.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    request_id: str | None = None
    # `NO_EFFECT`
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    kv_transfer_params: Any = None
    priority: Any = None
    service_tier: Any = None
    store: Any = None
    structured_outputs: Any = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_every_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerateRequest, kw_only=True, forbid_unknown_fields=True):
    # Text, texts, ids, or lists of ids. msgspec allows one list type in a union; `split_prompts` checks the mixture.
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = False
    add_special_tokens: bool | None = None
    suffix: Any = None


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class TextPart(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # What servers answer and clients send back in the history.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class Function(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    function: Function
    type: Literal["function"] = "function"


class ChatRequest(GenerateRequest, kw_only=True, forbid_unknown_fields=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    echo: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None  # the template adds them
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Of a prompt or of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


class ScaleRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    dp: int  # DP replicas that the instance is to have
    instance: str = ""  # which one, where a cluster file names several


def refuse_unsupported(request: GenerateRequest):
    """Raises ValueError for what is asked for and not there."""
    for name, (accepted, why) in NO_EFFECT.items():
        value = getattr(request, name, None)
        # `True == 1`: the types are compared as well.
        if value is not None and not any(value == good and type(value) is type(good) for good in accepted):
            raise ValueError(f"{name} {_short(value)} is not supported: {why}")
    if request.response_format is not None and request.response_format.type != "text":
        raise ValueError(f"response_format {request.response_format.type!r} is not supported, only 'text'")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ValueError(f"best_of {request.best_of} must equal n {request.n or 1}: choices are not ranked")


def sampling_params(
    request: GenerateRequest, defaults: dict[str, float], *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Raises ValueError with the offending value. `defaults` are the model's own sampling settings."""
    given = {
        name: value
        for name in _PASSED_ON
        if (value := getattr(request, name)) is not None  # null means: the default
    }
    if request.logit_bias is not None:
        given["logit_bias"] = {_token_id(key): bias for key, bias in request.logit_bias.items()}
    return SamplingParams(**{**defaults, **given}, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


_PASSED_ON = (
    "n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens",
)  # fmt: skip


def split_prompts(prompt: str | list) -> list[str | list[int]]:
    """One entry for each prompt. Raises ValueError."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ValueError("prompt is an empty list")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise ValueError(
            "prompt mixes text, token ids and lists; it must be one text, a list of texts, a list of ids or a list of such lists"
        )
    if kinds == {int}:
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise ValueError(f"prompt has {len(prompt)} entries, at most {MAX_PROMPTS} are allowed")
    return prompt


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 12):
        raise ValueError(f"logit_bias has the key {_short(key)}, keys are token ids")
    return int(key)


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
