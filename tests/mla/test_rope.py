"""Rotation tables against transformers' rope functions, and rotation against its two DeepSeek classes."""

import math
from typing import Any

import pytest
import torch

from hw.select import open_backend
from hw.testing import assert_close
from mla.config import MLAConfig, YarnConfig
from mla.rope import inverse_frequencies, rope_table

CPU = torch.device("cpu")
# V3; V2; Kimi K2, whose ramp is one dim wide; cos and sin scaled; short contexts, where both ends of the ramp are clamped.
YARNS: dict[str, tuple[float, dict[str, Any]]] = {
    "v3": (10000.0, {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "v2": (10000.0, {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 0.707}),
    "k2": (50000.0, {"factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "scaled": (10000.0, {"factor": 8.0, "original_max_position_embeddings": 512, "mscale": 1.0, "mscale_all_dim": 0.5}),
    "short": (10000.0, {"factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "steep": (10.0, {"factor": 4.0, "original_max_position_embeddings": 100_000, "mscale": 1.0, "mscale_all_dim": 1.0}),
}


def mla_config(theta: float, yarn: YarnConfig | None, rope_dim: int = 64) -> MLAConfig:
    sizes = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": rope_dim, "v_head_dim": 8, "q_lora_rank": None}
    return MLAConfig(hidden_size=16, num_heads=2, rope_theta=theta, max_position_embeddings=100, yarn=yarn, **sizes)


def transformers_rotary(theta: float, scaling: dict[str, Any] | None, rope_dim: int = 64):
    import transformers
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": theta}
    if scaling is not None:
        rope |= {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, **scaling}
    return DeepseekV3RotaryEmbedding(transformers.DeepseekV3Config(rope_parameters=rope, qk_rope_head_dim=rope_dim))


@pytest.mark.parametrize("name", [*YARNS, None])
@pytest.mark.parametrize("rope_dim", [64, 10])
def test_tables_equal_those_of_transformers(name: str | None, rope_dim: int):
    theta, scaling = YARNS[name] if name else (10000.0, None)
    config = mla_config(theta, None if scaling is None else YarnConfig(**scaling), rope_dim)
    theirs = transformers_rotary(theta, scaling, rope_dim)
    assert_close(inverse_frequencies(rope_dim, theta, config.yarn), theirs.inv_freq, (1e-6, 0.0), "inverse frequencies")
    cos, sin = theirs(torch.zeros(1), torch.arange(3000)[None])
    table = rope_table(config, 3000, CPU)
    assert table.shape == (3000, rope_dim) and table.dtype == torch.float32
    # An angle of up to 3,000 radians has steps of 2^-12 in fp32.
    assert_close(table[:, : rope_dim // 2], cos[0, :, : rope_dim // 2], (0.0, 3e-4), "cos")
    assert_close(table[:, rope_dim // 2 :], sin[0, :, : rope_dim // 2], (0.0, 3e-4), "sin")


def test_ramp_of_v3_by_hand():
    """Of 32 frequencies 0..10 stay, 23.. are divided by 40, and those between are blended."""
    plain = 10000.0 ** -(torch.arange(32) / 32)
    ratio = inverse_frequencies(64, 10000.0, YarnConfig(**YARNS["v3"][1])) / plain
    expected = [1.0] * 11 + [1 - (i - 10) / 13 * (1 - 1 / 40) for i in range(11, 23)] + [1 / 40] * 9
    assert_close(ratio, torch.tensor(expected), (1e-5, 0.0), "ratio")


def test_scores_equal_those_of_transformers_interleaved_rotation():
    """V3's class permutes the dims of query and key alike, so only scores can be compared; V2's gives the same numbers as ours."""
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

    num_tokens, num_heads, dim = 9, 3, 64
    theta, scaling = YARNS["scaled"]
    positions = torch.tensor([0, 1, 2, 5, 100, 511, 512, 1000, 2999])
    q, k = torch.randn(num_tokens, num_heads, dim), torch.randn(num_tokens, 1, dim)
    table = rope_table(mla_config(theta, YarnConfig(**scaling)), 3000, CPU)
    ops = open_backend("cpu").ops
    ours_q, ours_k = ops.rope(q, positions, table), ops.rope(k, positions, table)

    rotary = transformers_rotary(theta, scaling)
    cos, sin = rotary(q, positions[None])
    as_heads = [x.transpose(0, 1)[None] for x in (q, k)]
    v3_q, v3_k = apply_rotary_pos_emb_interleave(*as_heads, cos, sin)
    scores = torch.einsum("thd,sd->hts", ours_q, ours_k[:, 0])
    assert_close(scores, (v3_q @ v3_k.transpose(2, 3))[0], (1e-3, 1e-2), "scores")

    angles = torch.outer(positions.float(), rotary.inv_freq)
    turns = torch.polar(torch.full_like(angles, rotary.attention_scaling), angles)[None]
    v2_q, v2_k = apply_rotary_emb(*as_heads, turns)
    assert_close(ours_q, v2_q[0].transpose(0, 1), (1e-3, 1e-3), "query")
    assert_close(ours_k, v2_k[0].transpose(0, 1), (1e-3, 1e-3), "key")


def test_scores_depend_on_the_distance_only():
    table = rope_table(mla_config(10000.0, None), 200, CPU)
    ops, q, k = open_backend("cpu").ops, torch.randn(1, 1, 64), torch.randn(1, 1, 64)

    def score(a: int, b: int) -> float:
        return (ops.rope(q, torch.tensor([a]), table) * ops.rope(k, torch.tensor([b]), table)).sum().item()

    assert math.isclose(score(7, 3), score(154, 150), abs_tol=1e-3)
    assert not math.isclose(score(7, 3), score(7, 4), abs_tol=1e-2)
