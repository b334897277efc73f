"""Token ids to text while they are being generated."""

import codecs
from collections.abc import Iterable

from deepserve.text.tokenizer import Tokenizer


class Detokenizer:
    """Text of one sequence, piece by piece: the pieces together are `tokenizer.decode` of all its tokens.

    Exact because it works on bytes, and constant in time for each token; a character whose bytes are not complete waits for the rest.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Take new tokens; returns the text that is certain now, perhaps empty."""
        return self._utf8.decode(self._tokenizer.joined_bytes(token_ids, self._skip_special_tokens))

    def finish(self) -> str:
        """The sequence has ended; returns U+FFFD if it ended inside a character."""
        return self._utf8.decode(b"", final=True)
