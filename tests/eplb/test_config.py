"""EPLB settings: what is wrong is named."""

import pytest

from eplb.config import EPLBConfig


def test_from_json():
    config = EPLBConfig.parse('{"window_size": 500, "step_interval": 3000}', num_redundant_experts=4)
    assert (config.window_size, config.step_interval, config.num_redundant_experts) == (500, 3000, 4)
    assert EPLBConfig.parse('{"num_redundant_experts": 3}', num_redundant_experts=0).num_redundant_experts == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("window_size=3", "eplb_config must be a JSON object, got 'window_size=3'"),
        ("[1]", r"eplb_config must be a JSON object, got '\[1\]'"),
        ('{"windowsize": 3}', "eplb_config has no field 'windowsize'; it takes num_redundant_experts, load_profile"),
        ('{"window_size": 0}', "window_size must be at least 1, got 0"),
        ('{"window_size": 1.5}', "window_size must be a whole number, got 1.5"),
        ('{"step_interval": true}', "step_interval must be a whole number, got True"),
        ('{"step_interval": -1}', "step_interval must be at least 0, got -1"),
        ('{"tolerance": "0.1"}', "tolerance must be a number of at least 0, got '0.1'"),
        ('{"tolerance": NaN}', "tolerance must be a number of at least 0, got nan"),
        ('{"hysteresis": -0.5}', "hysteresis must be a number of at least 0, got -0.5"),
        ('{"step_budget_ms": 0}', "step_budget_ms must be above 0, got 0"),
        ('{"load_profile": 3}', "load_profile must be the path of a file, got 3"),
        ('{"num_redundant_experts": 3}', "num_redundant_experts is 3 in eplb_config and 2 outside; give it once"),
    ],
)
def test_wrong_settings(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        EPLBConfig.parse(text, num_redundant_experts=2)
