import random

import pytest

from deepserve.text.stops import StopStrings


def brute_force(text: str, stops: list[str], include: bool) -> tuple[str, str | None, int | None]:
    """Output, stop string and its place, by looking at every beginning of the text."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop, end - len(stop)
    return text, None, None


def cut(rng: random.Random, text: str) -> list[str]:
    pieces = []
    while text:
        size = rng.randint(0, 4)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def test_any_split_gives_the_brute_force_result():
    rng = random.Random(0)
    num_matches = 0
    for _ in range(4000):
        stops = ["".join(rng.choices("ab\n", k=rng.randint(1, 5))) for _ in range(rng.randint(0, 4))]
        text = "".join(rng.choices("abc\n", (5, 5, 1, 3), k=rng.randint(0, 25)))
        include = rng.random() < 0.5
        matcher = StopStrings(stops, include)
        output, released = "", ""
        for piece in cut(rng, text):
            output += matcher.push(piece)
            released += piece
            # As much as possible has left: what is held is the longest beginning of a stop string that the text ends with.
            if matcher.matched is None:
                held = max((k for stop in stops for k in range(len(stop)) if released.endswith(stop[:k])), default=0)
                assert output == released[: len(released) - held]
        output += matcher.finish()
        assert (output, matcher.matched, matcher.matched_at) == brute_force(text, stops, include), (text, stops)
        num_matches += matcher.matched is not None
    assert 1000 < num_matches < 3900


@pytest.mark.parametrize(
    ("text", "stops", "output", "matched"),
    [
        ("xabcd", ["bc", "abcd"], "xa", "bc"),  # complete first
        ("xabcd", ["bc", "abc"], "x", "abc"),  # complete together: the longest
        ("xabcd", ["abcd", "abc"], "x", "abc"),
        ("abab", ["abc"], "abab", None),
        ("从3数到，数到12", ["数到1", "到，数"], "从3数", "到，数"),
    ],
)
def test_which_stop_string_wins(text, stops, output, matched):
    for order in (stops, stops[::-1]):
        matcher = StopStrings(order)
        assert matcher.push(text) + matcher.finish() == output
        assert matcher.matched == matched


def test_nothing_leaves_after_a_match():
    matcher = StopStrings(["END"], include=True)
    assert [matcher.push(piece) for piece in ("a E", "N", "D tail", "more")] == ["a ", "", "END", ""]
    assert matcher.finish() == "" and matcher.matched_at == 2


def test_fresh_forgets_the_text_but_not_the_stops():
    matcher = StopStrings(["END"])
    matcher.push("x END")
    other = matcher.fresh()
    assert other.matched is None and other.push("yEN") == "y" and other.push("D") == "" and other.matched_at == 1


def test_long_stop_strings_cost_no_more_for_each_character():
    matcher = StopStrings(["a" * 1023 + "b"] * 64)
    assert matcher.push("a" * 3000) == "a" * (3000 - 1023)


def test_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
