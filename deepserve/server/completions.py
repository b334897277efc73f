"""POST /v1/completions: prompts as text or ids, and the reply's shape."""

from functools import partial

import msgspec

from deepserve.engine.request import MAX_LOGPROBS, SamplingParams
from deepserve.server.generation import Choice, Generation, News
from deepserve.server.logprobs import completion_logprobs, prompt_logprobs
from deepserve.server.prepare import check_common, check_model, encode_text, generate, needed_limits, validated
from deepserve.server.protocol import COMPLETION_MAX_TOKENS, MAX_CHOICES, CompletionRequest, sampling_params, split_prompts
from deepserve.server.reply import Form, Reply, usage
from deepserve.server.responses import Completion, CompletionChoice, CompletionLogprobs
from deepserve.server.state import ServerState
from deepserve.text.detokenize import Detokenizer
from deepserve.text.tokenizer import Tokenizer


async def completion_reply(state: ServerState, request: CompletionRequest) -> Reply:
    """Raises ApiError for whatever cannot be served."""
    model = check_model(state, request.model)
    limits = needed_limits(state)
    with check_common(request):
        given = split_prompts(request.prompt)
        params = _params(request, state)
        if len(given) * params.n > MAX_CHOICES:
            raise ValueError(
                f"n {params.n} times {len(given)} prompts are {len(given) * params.n} choices, at most {MAX_CHOICES} are allowed"
            )
        encode = partial(state.tokenizer.encode, add_special_tokens=request.add_special_tokens is not False)
        prompts = [await encode_text(state, prompt, limits, encode) if isinstance(prompt, str) else prompt for prompt in given]
        each = validated(prompts, params, limits)
    generation = generate(state, prompts, each, request.cache_salt or "")
    echoes = (
        [_Echo(state.tokenizer, *pair, params.skip_special_tokens) for pair in zip(given, prompts, strict=True)] if request.echo else None
    )
    form = CompletionForm(state, request, generation, model, echoes)
    return Reply(generation, form, stream=bool(request.stream), include_usage=request.include_usage)


def _params(request: CompletionRequest, state: ServerState) -> SamplingParams:
    logprobs, prompt = request.logprobs, request.prompt_logprobs
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        raise ValueError(f"logprobs must be a whole number from 0 to {MAX_LOGPROBS}, got {logprobs}")
    if request.echo and logprobs is not None:
        prompt = max(logprobs, prompt or 0)
    max_tokens = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if request.max_tokens is None and request.min_tokens is not None:
        max_tokens = max(max_tokens, request.min_tokens)
    if max_tokens == 0 and not request.echo and prompt is None:
        raise ValueError("max_tokens 0 generates nothing: it needs echo or prompt_logprobs")
    return sampling_params(request, state.defaults, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt)


class _Echo:
    """A prompt given back as text, with the place of each of its tokens in it."""

    def __init__(self, tokenizer: Tokenizer, given: str | list[int], token_ids: list[int], skip_special_tokens: bool):
        # Control tokens that the client spelled are part of its text; the begin token that was added to it is not.
        is_text = isinstance(given, str)
        detokenizer = Detokenizer(tokenizer, skip_special_tokens and not is_text)
        num_chars, offsets, pieces = 0, [], []
        for token_id in token_ids:
            offsets.append(num_chars)
            pieces.append(detokenizer.push((token_id,)))
            num_chars += len(pieces[-1])
        text = "".join(pieces) + detokenizer.finish()
        surplus = len(text) - len(given) if is_text else 0
        self.text = given if is_text else text
        self.offsets = [max(0, offset - surplus) for offset in offsets]


class CompletionForm(Form):
    def __init__(self, state: ServerState, request: CompletionRequest, generation: Generation, model: str, echoes: list[_Echo] | None):
        super().__init__(state, request, generation, model, id_prefix="cmpl", chunk_kind="text_completion")
        self._echoes = echoes
        self._num_top = request.logprobs
        self._wants_prompt_logprobs = request.prompt_logprobs is not None

    def chunk(self, choice: Choice, news: News) -> bytes:
        if choice.started and not (news.text or news.finish_reason or news.logprobs or self._wants_ids):
            return b""  # a part of a character, or of what may become a stop string
        part = self._choice(choice, news, first=not choice.started)
        choice.started = True
        return self._event(part)

    def body(self, choices: list[tuple[Choice, News]]) -> bytes:
        return msgspec.json.encode(
            Completion(
                **self._names,
                choices=[self._choice(choice, news, first=True) for choice, news in choices],
                usage=usage(self._generation),
            )
        )

    def _choice(self, choice: Choice, news: News, *, first: bool) -> CompletionChoice:
        """`first`: what belongs to the prompt goes along."""
        part = CompletionChoice(index=choice.index, text=news.text)
        if self._num_top is not None:
            part.logprobs = self._logprobs(choice, news, with_prompt=first and self._echoes is not None)
        if news.finish_reason is not None:
            part.finish_reason = news.finish_reason
            part.stop_reason = news.stop_reason
            part.seed = choice.seed
        if self._wants_ids:
            part.token_ids = news.token_ids
        if first:
            self._add_prompt(part, choice.prompt_idx)
        return part

    def _add_prompt(self, part: CompletionChoice, prompt_idx: int):
        if self._echoes is not None:
            part.text = self._echoes[prompt_idx].text + part.text
        if self._wants_ids:
            part.prompt_token_ids = self._generation.prompts[prompt_idx]
        positions = self._generation.prompt_logprobs[prompt_idx]
        if self._wants_prompt_logprobs and positions is not None:
            part.prompt_logprobs = prompt_logprobs(self._tokenizer, positions)

    def _logprobs(self, choice: Choice, news: News, *, with_prompt: bool) -> CompletionLogprobs:
        token_ids, positions, offsets = news.token_ids, news.logprobs, news.offsets
        if self._echoes is not None:
            echo = self._echoes[choice.prompt_idx]
            offsets = [len(echo.text) + offset for offset in offsets]
            if with_prompt:
                token_ids = self._generation.prompts[choice.prompt_idx] + token_ids
                positions = self._generation.prompt_logprobs[choice.prompt_idx] + positions
                offsets = echo.offsets + offsets
        return completion_logprobs(self._tokenizer, token_ids, positions, offsets, self._num_top)
