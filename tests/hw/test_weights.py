"""Slices of checkpoint tensors."""

import pytest
import torch

from hw.weights import Weight


def test_a_slice_fills_its_target_in_its_dtype():
    storage = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    weight = Weight("w", (12, 4), storage, index=(slice(6, 12),))
    assert weight.slice_shape == (6, 4)
    value = torch.arange(48.0).view(12, 4)
    weight.fill(value[weight.index])
    assert torch.equal(storage.flatten(0, 1), value[6:].bfloat16())


def test_columns_and_whole_tensors():
    assert Weight("w", (8, 10), torch.zeros(8, 5), index=(slice(None), slice(5, 10))).slice_shape == (8, 5)
    assert Weight("w", (8, 10), torch.zeros(8, 10)).slice_shape == (8, 10)


@pytest.mark.parametrize(
    ("shape", "target", "index", "message"),
    [
        ((4,), (4,), (slice(0, 2), slice(0, 2)), "of a tensor of shape"),
        ((4,), (2,), (slice(0, 4, 2),), "has a step"),
        ((4, 4), (4, 3), (), r"slice \(4, 4\) does not fill"),
        ((4, 4), (4, 4), (slice(2, 6),), r"slice \(2, 4\) does not fill"),
    ],
)
def test_mistakes_of_a_layer(shape, target, index, message: str):
    with pytest.raises(AssertionError, match=message):
        Weight("w", shape, torch.zeros(target), index=index)
