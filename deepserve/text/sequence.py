"""From the tokens of one sequence to its text: detokenizing, stop strings, and what finished it. Shared by server and `LLM`."""

from deepserve.engine.request import PositionLogprobs, SamplingParams, SequenceOutput
from deepserve.text.detokenize import Detokenizer
from deepserve.text.stops import StopStrings
from deepserve.text.tokenizer import Tokenizer


class News:
    """What happened to one sequence since the last look."""

    __slots__ = ("finish_reason", "logprobs", "offsets", "stop_reason", "text", "token_ids")

    def __init__(self):
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []  # one for each token, empty if not asked for
        self.offsets: list[int] = []  # where each token begins, in characters of generated text; as `logprobs`
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def add(self, later: "News"):
        """All but the text, which the caller joins."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.offsets += later.offsets
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


class SequenceText:
    """One sequence on its way to text. Text behind a stop string never leaves, nor do tokens behind the one that completed it."""

    __slots__ = (
        "_detokenizer", "_drop_end", "_min_tokens", "_num_chars", "_one_by_one", "_stop_token_ids", "_stops", "num_generated",
    )  # fmt: skip

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer):
        self.num_generated = 0
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output) if params.stop_strings else None
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._min_tokens = params.min_tokens
        self._drop_end = not params.include_stop_str_in_output
        self._num_chars = 0
        self._one_by_one = self._stops is not None or params.logprobs is not None

    def feed(self, output: SequenceOutput) -> News:
        news = News()
        news.token_ids = token_ids = output.token_ids
        news.finish_reason = output.finish_reason
        if output.stop_token_id in self._stop_token_ids:
            news.stop_reason = output.stop_token_id  # the model's own end token is no reason to tell
        if output.logprobs:
            news.logprobs = output.logprobs
        # The token that ended the sequence is no text unless asked for.
        shown = token_ids[:-1] if output.stop_token_id is not None and self._drop_end else token_ids
        if not self._one_by_one:
            news.text = self._detokenizer.push(shown)
            self.num_generated += len(token_ids)
            if output.finish_reason is not None:
                news.text += self._detokenizer.finish()
            return news
        self._feed_one_by_one(shown, news)
        return news

    def _feed_one_by_one(self, shown: list[int], news: News):
        """Finds the token at which a stop string is complete, and where each token begins."""
        pieces: list[str] = []
        for position, token_id in enumerate(shown):
            news.offsets.append(self._num_chars)
            piece = self._detokenizer.push((token_id,))
            self._num_chars += len(piece)
            self.num_generated += 1
            pieces.append(self._released(piece))
            if self._stops is not None and self._stops.matched is not None:
                news.token_ids = news.token_ids[: position + 1]
                news.logprobs = news.logprobs[: position + 1]
                self._stop(news)
                break
        else:
            unshown = len(news.token_ids) - len(shown)
            self.num_generated += unshown
            news.offsets += [self._num_chars] * unshown
            if news.finish_reason is not None:
                pieces.append(self._released(self._detokenizer.finish()))
                if self._stops is not None:
                    if self._stops.matched is None:
                        pieces.append(self._stops.finish())
                    else:
                        self._stop(news)
        news.text = "".join(pieces)

    def _released(self, piece: str) -> str:
        # Text of the first `min_tokens` tokens cannot stop anything.
        if self._stops is None or self.num_generated <= self._min_tokens:
            return piece
        return self._stops.push(piece)

    def _stop(self, news: News):
        news.finish_reason = "stop"
        news.stop_reason = self._stops.matched
