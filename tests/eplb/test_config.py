"""EPLB settings: what is wrong is named."""

import msgspec
import pytest

from eplb.config import EPLBConfig


def test_from_json():
    config = msgspec.json.decode('{"window_size": 500, "step_interval": 3000}', type=EPLBConfig)
    assert (config.window_size, config.step_interval, config.num_redundant_experts) == (500, 3000, 0)
    assert EPLBConfig() == EPLBConfig(step_interval=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"windowsize": 3}', "unknown field `windowsize`"),
        ('{"window_size": 0}', "window_size must be at least 1, got 0"),
        ('{"window_size": 1.5}', r"Expected `int`, got `float` - at `\$.window_size`"),
        ('{"step_interval": true}', r"Expected `int`, got `bool` - at `\$.step_interval`"),
        ('{"step_interval": -1}', "step_interval must be at least 0, got -1"),
        ('{"num_redundant_experts": -1}', "num_redundant_experts must be at least 0, got -1"),
        ('{"tolerance": "0.1"}', r"Expected `float`, got `str` - at `\$.tolerance`"),
        ('{"hysteresis": -0.5}', "hysteresis must be at least 0, got -0.5"),
        ('{"step_budget_ms": 0}', "step_budget_ms must be above 0, got 0.0"),
        ('{"dump_profile": "load.json"}', "dump_profile load.json needs a step_interval"),
    ],
)
def test_wrong_settings(text: str, message: str):
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.json.decode(text, type=EPLBConfig)


@pytest.mark.parametrize("name", ["tolerance", "hysteresis", "step_budget_ms"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(name: str, value: float):
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
        EPLBConfig(**{name: value})
