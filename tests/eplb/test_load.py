"""The sliding window, and profiles that outlive an instance."""

import json
from pathlib import Path

import numpy as np
import pytest

from eplb.load import PHASES, LoadProfile, LoadWindow

LAYERS = (1, 2)


def random_counts() -> np.ndarray:
    return np.random.randint(0, 50, (len(PHASES), len(LAYERS), 4))


@pytest.mark.parametrize(("size", "steps_at_once"), [(1, 1), (5, 1), (32, 1), (1000, 7), (64, 100)])
def test_a_window_holds_the_last_steps(size: int, steps_at_once: int):
    window, history = LoadWindow(2, 4, size), []
    for _ in range(300):
        history.append(random_counts())
        window.add(history[-1], steps_at_once)
        entries, rest = divmod(window.num_steps, steps_at_once)
        assert rest == 0 and np.array_equal(window.total, np.sum(history[-entries:], 0))
        # All of the window once there was so much, and little beyond: a part is a sixteenth, in whole entries.
        assert window.num_steps >= min(size, len(history) * steps_at_once)
        assert window.num_steps < size + size / 16 + 2 * steps_at_once


def test_counts_of_another_shape():
    with pytest.raises(AssertionError, match=r"\(2, 4\) of 1 steps, expected \(2, 2, 4\)"):
        LoadWindow(2, 4, 8).add(np.zeros((2, 4), int))


def test_later_counts_do_not_change_what_was_given():
    window, counts = LoadWindow(2, 4, 64), random_counts()
    kept = counts.copy()
    window.add(counts)
    profile = window.profile(LAYERS)
    window.add(random_counts())
    assert np.array_equal(counts, kept) and np.array_equal(profile.tokens, kept)


def test_profiles_come_back(tmp_path: Path):
    window = LoadWindow(2, 4, 100)
    for _ in range(5):
        window.add(random_counts(), 3)
    profile = window.profile(LAYERS)
    profile.dump(tmp_path / "load.json")
    read = LoadProfile.read(tmp_path / "load.json", LAYERS, 4)
    assert (read.layers, read.num_steps) == (LAYERS, 15) and np.array_equal(read.tokens, profile.tokens)
    assert np.array_equal(read.load("decode"), profile.tokens[1]) and np.array_equal(read.load(), profile.tokens.sum(0))


WRONG = {
    "version": ({"version": 2}, "has version 2, expected 1"),
    "layers": ({"layers": [0, 1]}, r"is of MoE layers \[0, 1\], the model has \[1, 2\]"),
    "experts": ({"tokens": {"prefill": [[1, 2]] * 2, "decode": [[1, 2]] * 2}}, "must count 4 experts in each of 2 layers"),
    "fractions": ({"tokens": {"prefill": [[0.5] * 4] * 2, "decode": [[1] * 4] * 2}}, "by whole numbers from 0"),
    "negative": ({"tokens": {"prefill": [[-1] * 4] * 2, "decode": [[1] * 4] * 2}}, "by whole numbers from 0"),
    "phase": ({"tokens": {"prefill": [[1] * 4] * 2}}, "cannot read the load profile .*'decode'"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_profiles(tmp_path: Path, change: dict, message: str):
    LoadProfile(LAYERS, 1, random_counts()).dump(tmp_path / "load.json")
    content = json.loads((tmp_path / "load.json").read_text()) | change
    (tmp_path / "load.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        LoadProfile.read(tmp_path / "load.json", LAYERS, 4)


def test_no_profile(tmp_path: Path):
    with pytest.raises(ValueError, match=r"cannot read the load profile .*absent\.json"):
        LoadProfile.read(tmp_path / "absent.json", LAYERS, 4)
    (tmp_path / "text").write_text("not JSON")
    with pytest.raises(ValueError, match="cannot read the load profile"):
        LoadProfile.read(tmp_path / "text", LAYERS, 4)
    (tmp_path / "list").write_text("[1]")
    with pytest.raises(ValueError, match="cannot read the load profile"):
        LoadProfile.read(tmp_path / "list", LAYERS, 4)
