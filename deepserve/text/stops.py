"""Stop strings in streamed text."""

from collections.abc import Iterable


class StopStrings:
    """Cuts streamed text at the first stop string; the work for a character does not grow with the stop strings' lengths.

    The stop string that is *complete first*, reading character by character, wins: it is the one at which generation can end without
    looking further. If several are complete at the same character, the longest of them wins. So the result does not depend on
    how the text is cut into pieces or on the order of the list: with stops "bc" and "abcd", "xabcd" ends as "xa" by "bc"; with "bc"
    and "abc" it ends as "x" by "abc".

    Text that may turn out to be the beginning of a stop string is held back. Nothing behind a stop string ever leaves.
    """

    def __init__(self, stops: Iterable[str], include: bool = False):
        """`include`: the stop string itself leaves too. Raises ValueError for an empty stop string."""
        self._stops = tuple(stops)
        if "" in self._stops:
            raise ValueError("a stop string is empty")
        self._borders = [_border_lens(stop) for stop in self._stops]
        self._include = include
        self._reset()

    def _reset(self) -> None:
        self._num_begun = [0] * len(self._stops)  # how many first characters of each stop string the text ends with
        self._held = ""
        self._num_released = 0
        self.matched: str | None = None  # the stop string that ended the text
        self.matched_at: int | None = None  # where it begins, in characters from the start of all text pushed

    def fresh(self) -> "StopStrings":
        """The same stop strings for another text: cheaper than a new object."""
        other = StopStrings((), self._include)
        other._stops, other._borders = self._stops, self._borders
        other._reset()
        return other

    def push(self, piece: str) -> str:
        """Take more text; returns what may leave now. After a match: always empty."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        for end, char in enumerate(piece, len(self._held) + 1):
            self.matched = self._advance(char)
            if self.matched is not None:
                start = end - len(self.matched)
                self.matched_at = self._num_released + start
                self._held = ""
                return text[: end if self._include else start]
        return self._release(text, len(text) - max(self._num_begun, default=0))

    def finish(self) -> str:
        """The text has ended without a stop string; returns what was held back."""
        return self._release(self._held, len(self._held))

    def _release(self, text: str, split: int) -> str:
        self._held = text[split:]
        self._num_released += split
        return text[:split]

    def _advance(self, char: str) -> str | None:
        """One step of Knuth, Morris and Pratt's search for every stop string; returns the longest that is complete now."""
        complete = None
        for i, stop in enumerate(self._stops):
            num = self._num_begun[i]
            while num and stop[num] != char:
                num = self._borders[i][num]
            self._num_begun[i] = num = num + (stop[num] == char)
            if num == len(stop) and (complete is None or num > len(complete)):
                complete = stop
        return complete


def _border_lens(stop: str) -> list[int]:
    """At [k]: how many characters, fewer than k, `stop[:k]` both begins and ends with."""
    lens = [0, 0]
    for char in stop[1:]:
        num = lens[-1]
        while num and stop[num] != char:
            num = lens[num]
        lens.append(num + (stop[num] == char))
    return lens
