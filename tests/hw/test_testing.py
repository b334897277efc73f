"""The comparison that all parity tests rest on must itself fail when it should."""

import dataclasses

import pytest
import torch

from hw import testing
from hw.testing import assert_close, available_backends, tolerance

INF, NAN = float("inf"), float("nan")
TOL = (1e-3, 1e-3)


def test_the_message_names_the_worst_place_both_values_and_the_count():
    expected = torch.zeros(3, 4)
    actual = expected.clone()
    actual[0, 1], actual[2, 3] = 0.5, -2.0
    with pytest.raises(AssertionError, match=r"scores: 2 of 12 values .* worst at \(2, 3\): -2, expected 0$"):
        assert_close(actual, expected, TOL, "scores")


def test_the_bound_is_absolute_plus_relative():
    expected = torch.tensor([0.0, 100.0])
    assert_close(expected + torch.tensor([0.0009, 0.1]), expected, TOL, "x")
    with pytest.raises(AssertionError, match=r"worst at \(1,\)"):
        assert_close(expected + torch.tensor([0.0009, 0.102]), expected, TOL, "x")


@pytest.mark.parametrize(
    ("actual", "expected"), [(NAN, 1.0), (1.0, NAN), (NAN, NAN), (INF, 1.0), (1.0, INF), (1.0, -INF), (INF, -INF), (-INF, NAN)]
)
def test_not_finite_values_that_fail(actual: float, expected: float):
    with pytest.raises(AssertionError, match=r"1 of 2 values .* worst at \(1,\)"):
        assert_close(torch.tensor([1.0, actual]), torch.tensor([1.0, expected]), TOL, "x")


def test_equal_infinities_pass():
    assert_close(torch.tensor([INF, -INF]), torch.tensor([INF, -INF]), TOL, "x")


def test_shapes_must_agree_even_when_they_broadcast():
    with pytest.raises(AssertionError, match=r"x: shape \(1, 3\), expected \(2, 3\)"):
        assert_close(torch.zeros(1, 3), torch.zeros(2, 3), TOL, "x")
    assert_close(torch.zeros(0, 3), torch.zeros(0, 3), TOL, "x")


def test_integers_must_be_equal():
    assert tolerance(torch.int64) == (0.0, 0.0)
    with pytest.raises(AssertionError, match="1 of 1"):
        assert_close(torch.tensor([1_000_001]), torch.tensor([1_000_000]), tolerance(torch.int64), "ids")


def test_tolerances_follow_the_format():
    formats = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    assert [tolerance(dtype) for dtype in formats] == sorted(tolerance(dtype) for dtype in formats)
    assert all(tolerance(dtype)[0] > torch.finfo(dtype).eps for dtype in formats)


def test_cpu_is_always_available():
    assert "cpu" in available_backends()


def test_every_grid_has_distinct_ids():
    grids = [make for name, make in vars(testing).items() if name.endswith("_cases")]
    assert len(grids) == 7
    for grid in grids:
        ids = [case.id for case in grid()]
        assert len(ids) == len(set(ids)) > 3
        assert all(dataclasses.is_dataclass(case) for case in grid())
