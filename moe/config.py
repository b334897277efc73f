"""Sizes and gate rules of a mixture-of-experts layer (DeepSeekMoE, arXiv 2401.06066; V3's gate, arXiv 2412.19437)."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MoEConfig:
    """One layer. `topk_method`: "greedy" and "group_limited_greedy" are V2's, "noaux_tc" is V3's with a correction bias."""

    hidden_size: int
    intermediate_size: int  # of one routed expert
    num_experts: int
    num_shared_experts: int  # fused into one MLP of num_shared_experts * intermediate_size
    top_k: int
    scoring: Literal["softmax", "sigmoid"]
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"]
    num_groups: int
    topk_groups: int
    norm_topk_prob: bool
    routed_scaling_factor: float

    def __post_init__(self):
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"num_experts_per_tok must be from 1 to {self.num_experts} experts, got {self.top_k}")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(f"{self.num_experts} experts do not divide into n_group {self.num_groups}")
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(f"topk_group must be from 1 to n_group {self.num_groups}, got {self.topk_groups}")
        if self.top_k > self.topk_groups * (self.num_experts // self.num_groups):
            size = self.num_experts // self.num_groups
            raise ValueError(f"num_experts_per_tok {self.top_k} exceeds the experts of topk_group {self.topk_groups} groups of {size}")
        if self.has_bias and self.grouped and self.num_experts // self.num_groups < 2:
            raise ValueError(f"noaux_tc needs two experts in a group, {self.num_experts} experts in {self.num_groups} groups leave one")

    @property
    def has_bias(self) -> bool:
        """Whether the gate has `e_score_correction_bias`: it chooses experts and never weighs them."""
        return self.topk_method == "noaux_tc"

    @property
    def grouped(self) -> bool:
        return self.topk_method != "greedy" and self.num_groups > 1
