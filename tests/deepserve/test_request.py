"""What a request may ask for: nothing that passes here can stop an engine, and every refusal names the value."""

import math

import msgspec
import pytest

from deepserve.engine.request import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    Limits,
    SamplingParams,
    validate,
)
from deepserve.messages import Submit

LIMITS = Limits(vocab_size=100, max_model_len=20, max_seq_tokens=64)
HUGE = 10**400  # no float holds it
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
WHOLES = ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")
FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize")

# (name, values that are taken, values that are refused)
RANGES = [
    ("n", [1, MAX_N], [0, -1, MAX_N + 1]),
    ("max_tokens", [None, 16, 1 << 31], [-1, (1 << 31) + 1]),
    ("min_tokens", [0, 16], [-1, 17, (1 << 31) + 1]),  # max_tokens is 16
    ("temperature", [0, 0.0, 1e-9, 2, 100.0], [-0.1, 100.1]),
    ("top_p", [1e-9, 0.5, 1], [0, 0.0, -0.5, 1.001]),
    ("top_k", [-1, 0, 1, 1 << 31], [-2, (1 << 31) + 1]),
    ("min_p", [0, 1.0], [-0.1, 1.1]),
    ("presence_penalty", [-2, 0.5, 2], [-2.1, 2.1]),
    ("frequency_penalty", [-2, 0.5, 2], [-2.1, 2.1]),
    ("repetition_penalty", [0.01, 1, 100], [0, 0.009, -1, 101]),
    ("seed", [None, 0, -1, -(1 << 63), (1 << 63) - 1], [-(1 << 63) - 1, 1 << 63]),
    ("logprobs", [None, 0, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1]),
    ("prompt_logprobs", [None, 0, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1]),
]


def refused(name: str, value, shown: str = "") -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{name: value})
    text = str(caught.value)
    assert name in text and (shown or repr(value)) in text


@pytest.mark.parametrize(("name", "good", "bad"), RANGES, ids=[name for name, _, _ in RANGES])
def test_ranges(name, good, bad):
    for value in good:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in bad:
        refused(name, value)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_finite_and_no_other_type(name):
    for value in (math.nan, math.inf, -math.inf, HUGE, -HUGE, True, "1", None, [1.0], 1j):
        refused(name, value)


@pytest.mark.parametrize("name", WHOLES)
def test_whole_numbers_are_no_other_type(name):
    for value in (1.0, math.nan, True, "1", [1], HUGE):
        refused(name, value)
    if name in ("n", "min_tokens"):
        refused(name, None)


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_booleans(name):
    for value in (0, 1, "yes", None):
        refused(name, value)


def test_stops():
    for stop, strings in ((["a", "b"], ["a", "b"]), (("a",), ["a"]), ("ab", ["ab"]), ([], [])):
        assert SamplingParams(stop=stop).stop_strings == strings
    assert len(SamplingParams(stop=["x"] * MAX_STOP_STRINGS).stop) == MAX_STOP_STRINGS
    for stop, shown in (
        ("", "''"),
        (["a", ""], "''"),
        ([1], "1"),
        ([None], "None"),
        (5, "5"),
        ({"a": 1}, "{'a': 1}"),
        (["x"] * (MAX_STOP_STRINGS + 1), str(MAX_STOP_STRINGS + 1)),
        (["y" * (MAX_STOP_STRING_CHARS + 1)], str(MAX_STOP_STRING_CHARS + 1)),
    ):
        refused("stop", stop, shown)
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(stop=["a"], detokenize=False)


def test_stop_token_ids_and_logit_bias():
    refused("stop_token_ids", [1] * (MAX_STOP_TOKEN_IDS + 1), str(MAX_STOP_TOKEN_IDS + 1))
    for value in (5, "5", {5}):
        refused("stop_token_ids", value)
    refused("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0), str(MAX_LOGIT_BIAS + 1))
    for value in ([5, 1.0], "5", 5):
        refused("logit_bias", value)
    for bias in (math.nan, math.inf, 100.5, -101, True, "1", None, HUGE):
        refused("logit_bias", {7: bias}, "logit_bias[7]")
    assert SamplingParams(logit_bias={7: -100, 8: 100.0}).logit_bias == {7: -100, 8: 100.0}


def test_min_tokens_within_max_tokens():
    with pytest.raises(ValueError, match="min_tokens 5 exceeds max_tokens 4"):
        SamplingParams(max_tokens=4, min_tokens=5)
    assert SamplingParams(max_tokens=None, min_tokens=500).min_tokens == 500


def test_greedy():
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy and not SamplingParams().greedy


def test_a_message_is_checked_as_well():
    good = Submit("r", [1, 2], SamplingParams(temperature=0.5, stop=["x"], logit_bias={3: 1.0}, seed=-5))
    payload = msgspec.msgpack.encode(good)
    assert msgspec.msgpack.decode(payload, type=Submit) == good
    bad = payload.replace(msgspec.msgpack.encode(0.5), msgspec.msgpack.encode(math.nan))
    assert bad != payload
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        msgspec.msgpack.decode(bad, type=Submit)


# validate


def refused_prompt(prompt: list, match: str, limits: Limits = LIMITS, **params) -> None:
    with pytest.raises(ValueError, match=match):
        validate(prompt, SamplingParams(**params), limits)


def test_prompts():
    refused_prompt([], "the prompt is empty")
    refused_prompt([1, 100], "token id 100, the vocabulary has ids 0 to 99")
    refused_prompt([1, -1, 3], "token id -1")
    refused_prompt([1, HUGE], "token id 1000")
    for wrong in (True, 1.0, "a", None):
        refused_prompt([1, wrong], repr(wrong))
    assert validate([0, 99], SamplingParams(), LIMITS).max_tokens == 16


def test_ids_in_params():
    for params in ({"stop_token_ids": [5, 100]}, {"logit_bias": {100: 1.0}}):
        refused_prompt([1], f"{next(iter(params))} holds token id 100", **params)
    for wrong in (-1, True, "5", 5.0):
        refused_prompt([1], f"stop_token_ids holds token id {wrong!r}", stop_token_ids=[wrong])
        refused_prompt([1], f"logit_bias holds token id {wrong!r}", logit_bias={wrong: 1.0})
    validate([1], SamplingParams(stop_token_ids=[0, 99], logit_bias={0: 1.0, 99: 1.0}), LIMITS)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "room"),
    [(4, 3, 3), (4, 16, 16), (4, 17, 16), (4, None, 16), (19, None, 1), (19, 5, 1), (4, 0, 0), (20, 0, 0), (19, 0, 0)],
)
def test_max_tokens_are_cut_to_the_room(num_prompt, max_tokens, room):
    assert validate([1] * num_prompt, SamplingParams(max_tokens=max_tokens), LIMITS).max_tokens == room


def test_too_long():
    refused_prompt([1] * 20, "the prompt has 20 tokens, at most 20 fit .* one token must be left")
    refused_prompt([1] * 20, "at most 20 fit", max_tokens=None)
    refused_prompt([1] * 21, "the prompt has 21 tokens", max_tokens=0)
    small = Limits(vocab_size=100, max_model_len=4096, max_seq_tokens=8)
    refused_prompt([1] * 8, "8 fit its cache", small)
    assert validate([1] * 7, SamplingParams(max_tokens=None), small).max_tokens == 1
    assert validate([1] * 8, SamplingParams(max_tokens=0), small).max_tokens == 0


def test_min_tokens_need_room():
    refused_prompt([1] * 10, "min_tokens 11 exceeds the 10 tokens of room", min_tokens=11, max_tokens=None)
    refused_prompt([1] * 10, "min_tokens 11 exceeds the 10 tokens of room", min_tokens=11, max_tokens=15)
    checked = validate([1] * 10, SamplingParams(min_tokens=10, max_tokens=None), LIMITS)
    assert checked.min_tokens == checked.max_tokens == 10


def test_seeds_are_drawn_once_and_kept():
    seeds = {validate([1], SamplingParams(), LIMITS).seed for _ in range(20)}
    assert len(seeds) == 20 and all(0 <= seed < 1 << 62 for seed in seeds)
    assert validate([1], SamplingParams(seed=0), LIMITS).seed == 0
    params = SamplingParams()
    validate([1], params, LIMITS)
    assert params.seed is None and params.max_tokens == 16  # the caller's stay as they were


def test_all_else_is_kept():
    params = SamplingParams(n=3, temperature=0.5, stop=["x"], stop_token_ids=[4], logit_bias={5: 1.0}, logprobs=2, seed=7, max_tokens=2)
    assert validate([1], params, LIMITS) == params


def test_none_means_off():
    params = SamplingParams(stop=None, stop_token_ids=None, top_k=None)
    assert (params.stop_strings, params.stop_token_ids, params.top_k) == ([], [], 0)
    assert params == SamplingParams()
