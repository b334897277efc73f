"""POST /v1/chat/completions: messages to a prompt, and the reply's shape."""

import msgspec
from msgspec import UNSET

from deepserve.engine.request import MAX_LOGPROBS, Limits, SamplingParams
from deepserve.server.generation import Choice, Generation, News
from deepserve.server.logprobs import chat_logprobs, prompt_logprobs
from deepserve.server.prepare import check_common, check_model, encode_text, generate, needed_limits, validated
from deepserve.server.protocol import ChatRequest, Message, Tool, sampling_params
from deepserve.server.reply import Form, Reply, usage
from deepserve.server.responses import AssistantMessage, ChatChoice, ChatChunkChoice, ChatCompletion, Delta
from deepserve.server.state import ServerState


async def chat_reply(state: ServerState, request: ChatRequest) -> Reply:
    """Raises ApiError for whatever cannot be served."""
    model = check_model(state, request.model)
    limits = needed_limits(state)
    with check_common(request):
        params = _params(request, state)
        prompt = await chat_prompt(
            state,
            limits,
            request.messages,
            tools=_tools(request),
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=bool(request.continue_final_message),
            chat_template_kwargs=request.chat_template_kwargs,
        )
        params = validated([prompt], params, limits)
    generation = generate(state, [prompt], params, request.cache_salt or "")
    form = ChatForm(state, request, generation, model)
    return Reply(generation, form, stream=bool(request.stream), include_usage=request.include_usage)


async def chat_prompt(
    state: ServerState,
    limits: Limits,
    messages: list[Message],
    *,
    tools: list[Tool] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    chat_template_kwargs: dict | None,
) -> list[int]:
    """Prompt token ids. Raises ValueError."""
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    turns = msgspec.to_builtins(messages)
    for turn in turns:
        # OpenAI's newer name; templates know "system" and silently leave out roles they do not know.
        if turn["role"] == "developer":
            turn["role"] = "system"
    marked = state.template.marked(
        turns,
        tools=msgspec.to_builtins(tools) if tools else None,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template_kwargs=chat_template_kwargs,
    )
    return await encode_text(state, marked, limits, state.template.encode_marked)


def _tools(request: ChatRequest) -> list[Tool] | None:
    choice = request.tool_choice
    if choice not in (None, "none", "auto"):
        raise ValueError(f"tool_choice {choice!r} is not supported: the model decides ('auto'), or there are no calls ('none')")
    if choice == "auto" and not request.tools:
        raise ValueError("tool_choice 'auto' needs tools")
    # A model that does not see the tools does not call them.
    return None if choice == "none" else request.tools


def _params(request: ChatRequest, state: ServerState) -> SamplingParams:
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if request.max_tokens is not None and request.max_tokens != max_tokens:
        raise ValueError(f"max_tokens {request.max_tokens} and max_completion_tokens {max_tokens} differ: give one of them")
    if max_tokens == 0 and request.prompt_logprobs is None:
        raise ValueError("max_tokens 0 generates nothing: it needs prompt_logprobs")
    logprobs = None
    if request.logprobs:
        logprobs = request.top_logprobs or 0
        if not 0 <= logprobs <= MAX_LOGPROBS:
            raise ValueError(f"top_logprobs must be a whole number from 0 to {MAX_LOGPROBS}, got {logprobs}")
    elif request.top_logprobs:
        raise ValueError(f"top_logprobs {request.top_logprobs} needs logprobs to be true")
    return sampling_params(request, state.defaults, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=request.prompt_logprobs)


class ChatForm(Form):
    def __init__(self, state: ServerState, request: ChatRequest, generation: Generation, model: str):
        super().__init__(state, request, generation, model, id_prefix="chatcmpl", chunk_kind="chat.completion.chunk")
        self._num_top = (request.top_logprobs or 0) if request.logprobs else None

    def chunk(self, choice: Choice, news: News) -> bytes:
        opening = b"" if choice.started else self._opening(choice)
        choice.started = True
        if not (news.text or news.finish_reason or news.logprobs or self._wants_ids):
            return opening  # a part of a character, or of what may become a stop string
        chunk = ChatChunkChoice(index=choice.index, delta=Delta(content=news.text))
        if self._num_top is not None:
            chunk.logprobs = chat_logprobs(self._tokenizer, news.logprobs, self._num_top)
        if news.finish_reason is not None:
            chunk.finish_reason = news.finish_reason
            chunk.stop_reason = news.stop_reason
            chunk.seed = choice.seed
        if self._wants_ids:
            chunk.token_ids = news.token_ids
        return opening + self._event(chunk)

    def _opening(self, choice: Choice) -> bytes:
        extra = b""
        if choice.index == 0:
            if self._wants_ids:
                extra += b',"prompt_token_ids":' + msgspec.json.encode(self._generation.prompts[0])
            if (positions := self._generation.prompt_logprobs[0]) is not None:
                extra += b',"prompt_logprobs":' + msgspec.json.encode(prompt_logprobs(self._tokenizer, positions))
        return self._event(ChatChunkChoice(index=choice.index, delta=Delta(role="assistant", content="")), extra)

    def body(self, choices: list[tuple[Choice, News]]) -> bytes:
        positions = self._generation.prompt_logprobs[0]
        return msgspec.json.encode(
            ChatCompletion(
                **self._names,
                choices=[self._whole_choice(choice, news) for choice, news in choices],
                usage=usage(self._generation),
                prompt_logprobs=UNSET if positions is None else prompt_logprobs(self._tokenizer, positions),
                prompt_token_ids=self._generation.prompts[0] if self._wants_ids else UNSET,
            )
        )

    def _whole_choice(self, choice: Choice, news: News) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=AssistantMessage(news.text),
            logprobs=None if self._num_top is None else chat_logprobs(self._tokenizer, news.logprobs, self._num_top),
            finish_reason=news.finish_reason,
            stop_reason=news.stop_reason,
            seed=choice.seed,
            token_ids=news.token_ids if self._wants_ids else UNSET,
        )
