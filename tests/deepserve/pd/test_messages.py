"""Hand-off messages say the same on the other side, or are refused."""

from typing import get_args

import msgspec
import pytest

from deepserve.engine.request import PositionLogprobs, SamplingParams, SequenceOutput
from deepserve.messages import Place, Process, Submit
from deepserve.pd import messages
from deepserve.pd.messages import Attempt, GiveUp, HandOff, Message, Prefill, Progress, Reservation, Reserve, Settled, decode, encode

ATTEMPT = Attempt("request-7/0", 3)
SUBMIT = Submit("request-7", [1, 2, 129_279], SamplingParams(temperature=0.5, seed=-(1 << 63), stop=["é"]), cache_salt="salt")
WRITERS = [Process("boot pid:[1]", 1 << 22, 1 << 40), Process("boot pid:[1]", 2, 3)]
RESERVATION = Reservation(ATTEMPT, Place("decode0", 143), 2, 64, 128, [5, 0, 1 << 20], [b"\x00\xff" * 40, b""], 15.0)
FIRST = SequenceOutput(
    "request-7", 0, [17], None, None, [PositionLogprobs([17, 4], [-0.1, float("-inf")], 1)], [None, PositionLogprobs([2], [-3e-38], 9)], 128
)
EXAMPLES = [
    Reserve(ATTEMPT, SUBMIT, Place("prefill0", 1), WRITERS, 15.0),
    RESERVATION,
    Prefill(SUBMIT, RESERVATION),
    Progress(ATTEMPT, 1 << 40),
    HandOff(ATTEMPT, FIRST, 8),
    GiveUp(ATTEMPT, "3 pages wanted, 2 available"),
    Settled(ATTEMPT, WRITERS),
]


def test_every_message_has_an_example():
    assert {type(example) for example in EXAMPLES} == set(get_args(Message))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_round_trip(message):
    frame = encode(message)
    assert decode(frame) == message
    assert type(decode(frame)) is type(message)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_frame_cut_anywhere_is_refused(message):
    frame = encode(message)
    for end in range(len(frame)):
        with pytest.raises(ValueError, match=f"^{end} bytes are no hand-off message"):
            decode(frame[:end])
    with pytest.raises(ValueError, match="no hand-off message"):
        decode(frame + b"\x00")


def test_another_version_is_refused_before_its_content_is_read(monkeypatch):
    monkeypatch.setattr(messages, "VERSION", messages.VERSION + 1)
    newer = encode(Settled(ATTEMPT, []))
    monkeypatch.undo()
    unknown = msgspec.msgpack.encode([messages.VERSION + 1, ["a message of later days", {"field": 1}]])
    for frame in (newer, unknown):
        with pytest.raises(ValueError, match=f"version {messages.VERSION + 1}, this is version {messages.VERSION}"):
            decode(frame)


@pytest.mark.parametrize(
    "content",
    [
        ["unknown", ["t", 1]],
        ["settled", ["t", -1], []],  # no epoch
        ["settled", ["t"]],
        ["settled", "t", []],
        ["hand_off", ["t", 1], ["r", 0, [1]], -1],
        ["reservation", ["t", 1], ["decode0", 0], 0, 64, 0, [-1], [], 1.0],  # a page that cannot be
        ["progress", ["t", 1], "many"],
    ],
)
def test_what_cannot_be_is_refused(content):
    with pytest.raises(ValueError, match="no hand-off message"):
        decode(msgspec.msgpack.encode([messages.VERSION, content]))
