"""Scores of routed experts: the gates of V2 (softmax) and V3 (sigmoid with correction bias), decided in fp32."""

import torch

from hw.api import GateRule, Ops, Replicas
from hw.weights import Weight
from moe.config import MoEConfig


def gate_rule(config: MoEConfig) -> GateRule:
    """V2 ranks groups by their best expert, V3 by the sum of their two best."""
    return GateRule(
        top_k=config.top_k,
        scoring=config.scoring,
        num_groups=config.num_groups if config.grouped else 1,
        topk_groups=config.topk_groups,
        group_score="top2_sum" if config.has_bias else "max",
        normalize=config.norm_topk_prob,
        scaling=config.routed_scaling_factor,
    )


class Gate:
    """`[T, hidden]` -> logical and physical experts `[T, k]` int64 and weights `[T, k]` fp32."""

    def __init__(self, config: MoEConfig, ops: Ops, *, prefix: str, device: torch.device):
        self.config, self.ops, self.prefix, self.rule = config, ops, prefix, gate_rule(config)
        self.weight = torch.empty(config.num_experts, config.hidden_size, dtype=torch.float32, device=device)
        self.bias = torch.empty(config.num_experts, dtype=torch.float32, device=device) if config.has_bias else None

    def weights(self) -> list[Weight]:
        found = [Weight(name=f"{self.prefix}.weight", shape=tuple(self.weight.shape), target=self.weight)]
        if self.bias is not None:
            name = f"{self.prefix}.e_score_correction_bias"
            found.append(Weight(name=name, shape=tuple(self.bias.shape), target=self.bias, kind="gate_bias"))
        return found

    def forward(self, x: torch.Tensor, replicas: Replicas) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.ops.gate_topk(self.ops.gate_logits(x, self.weight), self.bias, self.rule, replicas)
