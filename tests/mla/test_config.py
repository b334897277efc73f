"""Numbers of released models, and what is refused."""

import dataclasses

import pytest

from hw.cache_spec import CacheSpec
from mla.cache import latent_cache
from mla.config import MLAConfig, YarnConfig

V3_YARN = YarnConfig(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)
V3 = MLAConfig(
    hidden_size=7168, num_heads=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=1536,
    rope_theta=10000.0, max_position_embeddings=163840, yarn=V3_YARN,
)  # fmt: skip


def with_yarn(**changes: float) -> MLAConfig:
    return dataclasses.replace(V3, yarn=dataclasses.replace(V3_YARN, **changes))


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        (V3, 0.135234),
        (with_yarn(mscale=0.707, mscale_all_dim=0.707), 0.114721),  # V2
        (with_yarn(factor=32.0), 0.130861),  # Kimi K2, times 32
        (with_yarn(factor=64.0), 0.144680),  # Kimi K2, times 64
        (with_yarn(mscale_all_dim=0.0), 192**-0.5),
        (with_yarn(factor=1.0), 192**-0.5),
        (dataclasses.replace(V3, yarn=None), 192**-0.5),
    ],
)
def test_softmax_scale(config: MLAConfig, scale: float):
    assert config.softmax_scale == pytest.approx(scale, abs=1e-6)


def test_yarn_magnitudes():
    assert YarnConfig.magnitude(40.0, 1.0) == pytest.approx(1.368888, abs=1e-6)
    assert YarnConfig.magnitude(40.0, 0.707) == pytest.approx(1.260804, abs=1e-6)
    assert YarnConfig.magnitude(1.0, 1.0) == YarnConfig.magnitude(0.5, 1.0) == 1.0
    assert V3_YARN.table_scale == 1.0
    uneven = dataclasses.replace(V3_YARN, mscale=1.0, mscale_all_dim=0.707)
    assert uneven.table_scale == pytest.approx(1.368888 / 1.260804, abs=1e-6)


def test_cached_bytes_of_v3():
    layer = latent_cache(V3, "bfloat16")
    assert CacheSpec((layer,)).bytes_per_token == 1152
    assert CacheSpec((layer,) * 61).bytes_per_token == 70_272
    assert CacheSpec((layer,)).page_bytes(64) == 73_728
    assert CacheSpec((latent_cache(V3, "float32"),)).bytes_per_token == 2304
    assert CacheSpec((layer,)).state_bytes == 0


def test_derived_sizes():
    assert V3.qk_head_dim == 192
    assert V3.latent_dim == 576


@pytest.mark.parametrize(
    "name",
    [
        "hidden_size",
        "num_heads",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "q_lora_rank",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("value", [0, -8])
def test_sizes_below_one_are_refused(name: str, value: int):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
        dataclasses.replace(V3, **{name: value})


def test_an_odd_rope_dim_is_refused():
    with pytest.raises(ValueError, match="qk_rope_head_dim must be even, got 63"):
        dataclasses.replace(V3, qk_rope_head_dim=63)


def test_queries_without_a_low_rank_are_accepted():
    assert dataclasses.replace(V3, q_lora_rank=None).q_lora_rank is None
