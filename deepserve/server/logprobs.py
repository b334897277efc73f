"""Log-probabilities in the shapes of the two OpenAI routes and of vLLM's `prompt_logprobs`."""

from deepserve.engine.request import PositionLogprobs
from deepserve.server.responses import ChatLogprobs, CompletionLogprobs, PromptLogprob, PromptLogprobs, TokenLogprob, TopLogprob
from deepserve.text.tokenizer import Tokenizer

# JSON has no infinity; OpenAI and vLLM write this for impossible tokens.
LOWEST = -9999.0


def chat_logprobs(tokenizer: Tokenizer, positions: list[PositionLogprobs], num_top: int) -> ChatLogprobs:
    return ChatLogprobs([_token_logprob(tokenizer, position, num_top) for position in positions])


def _token_logprob(tokenizer: Tokenizer, position: PositionLogprobs, num_top: int) -> TokenLogprob:
    pairs = list(zip(position.token_ids, position.logprobs, strict=True))
    top = [
        TopLogprob(tokenizer.id_to_text(token_id), max(logprob, LOWEST), list(tokenizer.token_bytes(token_id)))
        for token_id, logprob in pairs[1 : 1 + num_top]
    ]
    token_id, logprob = pairs[0]
    return TokenLogprob(tokenizer.id_to_text(token_id), max(logprob, LOWEST), list(tokenizer.token_bytes(token_id)), top)


def completion_logprobs(
    tokenizer: Tokenizer, token_ids: list[int], positions: list[PositionLogprobs | None], offsets: list[int], num_top: int
) -> CompletionLogprobs:
    """`positions` holds None where nothing was predicted: the first token of an echoed prompt."""
    return CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[None if position is None else max(position.logprobs[0], LOWEST) for position in positions],
        tokens=[tokenizer.id_to_text(token_id) for token_id in token_ids],
        top_logprobs=[None if position is None else _top(tokenizer, position, num_top) for position in positions],
    )


def _top(tokenizer: Tokenizer, position: PositionLogprobs, num_top: int) -> dict[str, float]:
    """By text, as OpenAI has it, so tokens of equal text share an entry. The token that stands there is always among them."""
    ids, values = position.token_ids, position.logprobs
    top: dict[str, float] = {}
    for token_id, logprob in zip([*ids[1 : 1 + num_top], ids[0]], [*values[1 : 1 + num_top], values[0]], strict=True):
        top.setdefault(tokenizer.id_to_text(token_id), max(logprob, LOWEST))
    return top


def prompt_logprobs(tokenizer: Tokenizer, positions: list[PositionLogprobs | None]) -> PromptLogprobs:
    return [None if position is None else _prompt_position(tokenizer, position) for position in positions]


def _prompt_position(tokenizer: Tokenizer, position: PositionLogprobs) -> dict[str, PromptLogprob]:
    """The likeliest have ranks 1, 2, ... in order; the token that stands there has a rank of its own."""
    entries = zip(position.token_ids, position.logprobs, [position.rank, *range(1, len(position.token_ids))], strict=True)
    return {str(token_id): PromptLogprob(max(logprob, LOWEST), rank, tokenizer.id_to_text(token_id)) for token_id, logprob, rank in entries}
