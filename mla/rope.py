"""Rotation tables of rotary position embedding, with YaRN (arXiv 2309.00071) as DeepSeek applies it."""

import math

import torch

from mla.config import MLAConfig, YarnConfig


def inverse_frequencies(dim: int, theta: float, yarn: YarnConfig | None) -> torch.Tensor:
    """Radians per position of each pair: `[dim / 2]` fp32.

    YaRN divides slow frequencies by `factor`, keeps fast ones, and blends linearly between the dims that turn `beta_fast` and
    `beta_slow` times over the original context.
    """
    inv_freq = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if yarn is None:
        return inv_freq

    def dim_of(turns: float) -> float:
        return dim * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dim_of(yarn.beta_fast)), 0)
    high = min(math.ceil(dim_of(yarn.beta_slow)), dim - 1)
    width = 0.001 if low == high else high - low
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return inv_freq / yarn.factor * ramp + inv_freq * (1 - ramp)


def rope_table(config: MLAConfig, num_positions: int, device: torch.device) -> torch.Tensor:
    """cos | sin of every position: `[num_positions, qk_rope_head_dim]` fp32, cosines in the first half of the columns."""
    inv_freq = inverse_frequencies(config.qk_rope_head_dim, config.rope_theta, config.yarn)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq)
    scale = 1.0 if config.yarn is None else config.yarn.table_scale
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(scale).to(device)
