"""Dummy weights: the same model whatever the ranks, and of a size that keeps activations sane."""

import torch

from deepserve.model.checkpoint import dummy_weights
from hw.weights import Weight


def _weight(name: str, *shape: int, index: tuple[slice, ...] = (), kind="matrix", dtype: torch.dtype = torch.float32) -> Weight:
    part = torch.empty(shape, device="meta")[index]
    return Weight(name=name, shape=shape, target=torch.full(part.shape, torch.nan, dtype=dtype), index=index, kind=kind)


def test_slices_and_replicas_are_of_one_tensor():
    whole = _weight("a", 64, 32)
    dummy_weights([whole, _weight("b", 3, 3)], seed=7)
    part, twin = _weight("a", 64, 32, index=(slice(16, 48), slice(8, 9))), _weight("a", 64, 32)
    dummy_weights([part, twin], seed=7)
    assert torch.equal(part.target, whole.target[16:48, 8:9])
    assert torch.equal(twin.target, whole.target)


def test_names_and_seeds_differ():
    a, b, other = _weight("a", 64, 32), _weight("b", 64, 32), _weight("a", 64, 32)
    dummy_weights([a, b], seed=0)
    dummy_weights([other], seed=1)
    assert not torch.equal(a.target, b.target)
    assert not torch.equal(a.target, other.target)


def test_sizes():
    matrix, norm, bias = _weight("m", 512, 256), _weight("n", 4096, kind="norm"), _weight("b", 4096, kind="gate_bias")
    dummy_weights([matrix, norm, bias], seed=0)
    out = torch.randn(64, 256) @ matrix.target.T
    assert 0.9 < out.std().item() < 1.1  # unit inputs give unit outputs
    assert abs(norm.target.mean().item() - 1.0) < 0.01 and 0.09 < norm.target.std().item() < 0.11
    assert 0.0 < bias.target.std().item() < 0.05


def test_the_dtype_is_the_targets():
    exact, rounded = _weight("a", 8, 8), _weight("a", 8, 8, dtype=torch.bfloat16)
    dummy_weights([exact, rounded], seed=0)
    assert torch.equal(rounded.target, exact.target.bfloat16())
