"""Sizes and rope settings of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension (arXiv 2309.00071) as DeepSeek uses it."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    @staticmethod
    def magnitude(factor: float, mscale: float) -> float:
        """YaRN's attention temperature, `0.1 * mscale * ln(factor) + 1`."""
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    @property
    def table_scale(self) -> float:
        """What cos and sin are multiplied by; 1.0 in every released model."""
        return self.magnitude(self.factor, self.mscale) / self.magnitude(self.factor, self.mscale_all_dim)


@dataclass(frozen=True)
class MLAConfig:
    """One attention layer. `q_lora_rank` None: queries come straight from the hidden state (V2-Lite, Moonlight)."""

    hidden_size: int
    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None
    rope_theta: float
    max_position_embeddings: int
    yarn: YarnConfig | None = None
    # transformers and DeepSeek's own code give the two latent norms 1e-6 whatever the model's rms_norm_eps is.
    latent_norm_eps: float = 1e-6

    def __post_init__(self):
        for name, value in vars(self).items():
            if type(value) is int and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim must be even, got {self.qk_rope_head_dim}")

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values cached per token and layer: normed latent, then rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        scale = self.qk_head_dim**-0.5
        if self.yarn is not None and self.yarn.mscale_all_dim:
            scale *= YarnConfig.magnitude(self.yarn.factor, self.yarn.mscale_all_dim) ** 2
        return scale
