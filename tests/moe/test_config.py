"""What a MoE config refuses, and what it derives."""

import dataclasses
from typing import Any

import pytest

from hw.api import GateRule
from moe.config import MoEConfig
from moe.gate import gate_rule

V3 = MoEConfig(
    hidden_size=7168, intermediate_size=2048, num_experts=256, num_shared_experts=1, top_k=8, scoring="sigmoid", topk_method="noaux_tc",
    num_groups=8, topk_groups=4, norm_topk_prob=True, routed_scaling_factor=2.5,
)  # fmt: skip
V2 = dataclasses.replace(
    V3, num_experts=160, top_k=6, scoring="softmax", topk_method="group_limited_greedy", topk_groups=3, norm_topk_prob=False,
    routed_scaling_factor=16.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 0}, "num_experts_per_tok must be from 1 to 256 experts, got 0"),
        ({"top_k": 257}, "num_experts_per_tok must be from 1 to 256 experts, got 257"),
        ({"num_groups": 0}, "256 experts do not divide into n_group 0"),
        ({"num_groups": 7}, "256 experts do not divide into n_group 7"),
        ({"topk_groups": 0}, "topk_group must be from 1 to n_group 8, got 0"),
        ({"topk_groups": 9}, "topk_group must be from 1 to n_group 8, got 9"),
        ({"top_k": 33, "topk_groups": 1}, "num_experts_per_tok 33 exceeds the experts of topk_group 1 groups of 32"),
        ({"num_groups": 256, "topk_groups": 8}, "noaux_tc needs two experts in a group"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(V3, **changes)


def test_v2_may_have_one_expert_in_a_group():
    assert dataclasses.replace(V2, num_groups=160, topk_groups=6).grouped


def test_rules_of_the_released_gates():
    assert gate_rule(V3) == GateRule(8, "sigmoid", 8, 4, "top2_sum", True, 2.5)
    assert gate_rule(V2) == GateRule(6, "softmax", 8, 3, "max", False, 16.0)
    # "greedy" ignores groups, whatever the config says.
    assert gate_rule(dataclasses.replace(V2, topk_method="greedy")).num_groups == 1
    assert V3.has_bias and not V2.has_bias
    assert not dataclasses.replace(V3, num_groups=1, topk_groups=1).grouped
