"""Which checkpoint layers belong to MTP modules."""

from mtp.config import MTPConfig


def test_v3_stores_one_module_behind_its_61_layers():
    config = MTPConfig(num_layers=1, first_layer_idx=61)
    assert [layer for layer in range(100) if config.owns(layer)] == [61]


def test_several_modules_and_none():
    assert [layer for layer in range(20) if MTPConfig(3, 10).owns(layer)] == [10, 11, 12]
    assert not any(MTPConfig(0, 10).owns(layer) for layer in range(20))
