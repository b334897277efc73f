"""What a checkpoint's `config.json` says about its model, in our words: no torch, no I/O beyond two small files.

Two dialects are read: hub files (`rope_theta` + `rope_scaling{type}`, `torch_dtype`) and files that transformers 5 saves
(`rope_parameters{rope_type, rope_theta}`, `dtype`). Whatever would change the computation and is not supported is refused.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mla.config import MLAConfig, YarnConfig
from moe.config import MoEConfig
from mtp.config import MTPConfig

V2 = "DeepseekV2ForCausalLM"
V3 = "DeepseekV3ForCausalLM"  # also Kimi-K2 and Moonlight, whose model_type may be another
ARCHITECTURES = (V2, V3)
DTYPES = ("float32", "bfloat16", "float16")

# Keys that must hold exactly this value, or be absent or null, because nothing else is implemented.
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_interleave": True}


@dataclass(frozen=True)
class FP8BlockConfig:
    """Matrices stored as float8 e4m3 with one scale per `block_n` x `block_k` block of `[out, in]`."""

    block_n: int
    block_k: int
    scale_format: Literal["fp32", "ue8m0"]  # ue8m0: every scale is a power of two, on disk fp32 or one exponent byte


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of MLA attention and dense or mixture-of-experts MLPs. Build it with `from_folder` or `from_dict`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int  # of the MLP in a dense layer
    rms_norm_eps: float
    max_position_embeddings: int
    mla: MLAConfig
    moe: MoEConfig | None
    moe_layers: tuple[int, ...]  # ascending; the others are dense
    mtp: MTPConfig
    dtype: Literal["float32", "bfloat16", "float16"]  # of the checkpoint's unquantised matrices
    quantization: FP8BlockConfig | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # of config.json, then those only generation_config.json has
    tie_word_embeddings: bool  # the head is the embedding, and `lm_head.weight` need not be stored

    @classmethod
    def from_folder(cls, path: str | Path) -> "ModelConfig":
        """Read a checkpoint folder. Raises ValueError with the file or the offending value."""
        config = _read_json(Path(path) / "config.json")
        generation_path = Path(path) / "generation_config.json"
        return cls.from_dict(config, _read_json(generation_path) if generation_path.exists() else None)

    @classmethod
    def from_dict(cls, config: dict[str, Any], generation_config: dict[str, Any] | None = None) -> "ModelConfig":
        """Raises ValueError with the missing key or the offending value."""
        architecture = _architecture(config)
        for key, only in _FIXED.items():
            if config.get(key) not in (None, only):
                raise ValueError(f"{key} {config[key]!r} is not supported, only {only!r}")
        num_layers = _int(config, "num_hidden_layers")
        moe = _moe(config, architecture)
        return cls(
            architecture=architecture,
            vocab_size=_int(config, "vocab_size"),
            hidden_size=_int(config, "hidden_size"),
            num_layers=num_layers,
            intermediate_size=_int(config, "intermediate_size"),
            rms_norm_eps=_float(config, "rms_norm_eps"),
            max_position_embeddings=_int(config, "max_position_embeddings"),
            mla=_mla(config),
            moe=moe,
            moe_layers=() if moe is None else _moe_layers(config, num_layers),
            mtp=MTPConfig(_int(config, "num_nextn_predict_layers", "num_mtp_layers", default=0, least=0), num_layers),
            dtype=_dtype(config),
            quantization=_quantization(config),
            bos_token_id=_int(config, "bos_token_id", default=None, least=0),
            eos_token_ids=_eos_token_ids(config, generation_config or {}),
            tie_word_embeddings=bool(config.get("tie_word_embeddings")),
        )

    def is_moe_layer(self, layer_idx: int) -> bool:
        """MTP modules are mixture-of-experts layers wherever the model has such."""
        return layer_idx in self.moe_layers or (self.moe is not None and self.mtp.owns(layer_idx))

    @property
    def head_name(self) -> str:
        """Which checkpoint tensor the output head is."""
        return "model.embed_tokens.weight" if self.tie_word_embeddings else "lm_head.weight"

    def num_parameters(self) -> int:
        """Parameters of the main model, without MTP modules."""
        mla, moe, hidden = self.mla, self.moe, self.hidden_size
        q_width, q_input = mla.num_heads * mla.qk_head_dim, mla.q_lora_rank or hidden
        attention = q_input * q_width + hidden * mla.latent_dim + mla.kv_lora_rank
        attention += mla.kv_lora_rank * mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        attention += mla.num_heads * mla.v_head_dim * hidden
        if mla.q_lora_rank is not None:
            attention += hidden * mla.q_lora_rank + mla.q_lora_rank
        dense = 3 * hidden * self.intermediate_size
        sparse = 0
        if moe is not None:
            experts = moe.num_experts + moe.num_shared_experts
            sparse = 3 * hidden * moe.intermediate_size * experts + moe.num_experts * (hidden + moe.has_bias)
        num_moe = len(self.moe_layers)
        layers = self.num_layers * (attention + 2 * hidden) + num_moe * sparse + (self.num_layers - num_moe) * dense
        return layers + hidden + self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent} is not a checkpoint folder: it has no {path.name}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


_REQUIRED: Any = object()


def _lookup(config: dict[str, Any], keys: tuple[str, ...], default: Any) -> Any:
    """The first of `keys` that is present; a null counts as absent when there is a default."""
    for key in keys:
        if key in config and not (config[key] is None and default is not _REQUIRED):
            return config[key]
    if default is _REQUIRED:
        raise ValueError(f"the model's config has no {keys[0]}")
    return default


def _int(config: dict[str, Any], *keys: str, default: Any = _REQUIRED, least: int = 1) -> Any:
    value = _lookup(config, keys, default)
    if value is default:
        return value
    if type(value) is not int or value < least:
        raise ValueError(f"{keys[0]} must be a whole number of at least {least}, got {value!r}")
    return value


def _float(config: dict[str, Any], key: str, default: Any = _REQUIRED) -> Any:
    value = _lookup(config, (key,), default)
    if value is default:
        return value
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"{key} must be a number above 0, got {value!r}")
    return float(value)


def _architecture(config: dict[str, Any]) -> str:
    names = _lookup(config, ("architectures",), _REQUIRED)
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ValueError(f"architectures {names!r} is not supported, only one of {', '.join(ARCHITECTURES)}")
    return names[0]


def _mla(config: dict[str, Any]) -> MLAConfig:
    num_heads = _int(config, "num_attention_heads")
    num_kv_heads = _int(config, "num_key_value_heads", default=num_heads)
    if num_kv_heads != num_heads:
        raise ValueError(f"num_key_value_heads {num_kv_heads} is not supported: MLA has as many as num_attention_heads, {num_heads}")
    if "q_lora_rank" not in config:  # null has a meaning of its own, so absence is no way to say it
        raise ValueError("the model's config has no q_lora_rank")
    rope_theta, yarn = _rope(config)
    return MLAConfig(
        hidden_size=_int(config, "hidden_size"),
        num_heads=num_heads,
        kv_lora_rank=_int(config, "kv_lora_rank"),
        qk_nope_head_dim=_int(config, "qk_nope_head_dim"),
        qk_rope_head_dim=_int(config, "qk_rope_head_dim"),
        v_head_dim=_int(config, "v_head_dim"),
        q_lora_rank=_int(config, "q_lora_rank", default=None),
        rope_theta=rope_theta,
        max_position_embeddings=_int(config, "max_position_embeddings"),
        yarn=yarn,
    )


def _rope(config: dict[str, Any]) -> tuple[float, YarnConfig | None]:
    """rope_theta and YaRN, from either dialect. transformers 5 moves rope_theta into `rope_parameters`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_scaling must be an object, got {rope!r}")
    theta = _float({"rope_theta": config.get("rope_theta"), **rope} if "rope_theta" in config else rope, "rope_theta")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "none", "yarn"):
        raise ValueError(f"rope scaling type {kind!r} is not supported, only yarn, default or none")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ValueError("partial_rotary_factor is not supported: MLA rotates all of qk_rope_head_dim")
    return theta, _yarn(rope) if kind == "yarn" else None


def _yarn(rope: dict[str, Any]) -> YarnConfig:
    for key, only in (("attention_factor", None), ("truncate", True)):
        if rope.get(key, only) not in (None, only):
            raise ValueError(f"rope scaling with {key} {rope[key]!r} is not supported")
    # A zero means the same as no key, here and for beta_fast and beta_slow.
    rope = {key: value for key, value in rope.items() if value != 0}
    mscale, mscale_all_dim = _float(rope, "mscale", 0.0), _float(rope, "mscale_all_dim", 0.0)
    # With only one of them, transformers and DeepSeek's own code scale the rotation differently, unless mscale is 1.
    if bool(mscale) != bool(mscale_all_dim) and (mscale, mscale_all_dim) != (1.0, 0.0):
        raise ValueError(f"yarn needs both mscale and mscale_all_dim or neither, got {mscale} and {mscale_all_dim}")
    return YarnConfig(
        factor=_float(rope, "factor"),
        original_max_position_embeddings=_int(rope, "original_max_position_embeddings"),
        beta_fast=_float(rope, "beta_fast", 32.0),
        beta_slow=_float(rope, "beta_slow", 1.0),
        mscale=mscale or 1.0,
        mscale_all_dim=mscale_all_dim,
    )


def _moe(config: dict[str, Any], architecture: str) -> MoEConfig | None:
    num_experts = _lookup(config, ("n_routed_experts", "num_local_experts", "num_experts"), _REQUIRED)
    if num_experts is None:
        return None
    # transformers saves neither key for V3, whose class knows no other gate.
    scoring = config.get("scoring_func") or ("softmax" if architecture == V2 else "sigmoid")
    topk_method = config.get("topk_method") or ("greedy" if architecture == V2 else "noaux_tc")
    methods = ("greedy", "group_limited_greedy") if architecture == V2 else ("noaux_tc",)
    if scoring != ("softmax" if architecture == V2 else "sigmoid"):
        raise ValueError(f"scoring_func {scoring!r} is not supported for {architecture}")
    if topk_method not in methods:
        raise ValueError(f"topk_method {topk_method!r} is not supported for {architecture}, only {' or '.join(methods)}")
    norm_topk_prob = bool(_lookup(config, ("norm_topk_prob",), False if architecture == V2 else _REQUIRED))
    if architecture == V2 and norm_topk_prob:
        raise ValueError("norm_topk_prob true is not supported for V2: its published implementations disagree on what it does")
    num_groups = _int(config, "n_group", default=1)
    # Without groups the other key is often left at a value that means nothing.
    num_groups, topk_groups = (1, 1) if num_groups == 1 or topk_method == "greedy" else (num_groups, _int(config, "topk_group"))
    return MoEConfig(
        hidden_size=_int(config, "hidden_size"),
        intermediate_size=_int(config, "moe_intermediate_size"),
        num_experts=_int(config, "n_routed_experts", "num_local_experts", "num_experts"),
        num_shared_experts=_int(config, "n_shared_experts", default=0, least=0),
        top_k=_int(config, "num_experts_per_tok"),
        scoring=scoring,
        topk_method=topk_method,
        num_groups=num_groups,
        topk_groups=topk_groups,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=_float(config, "routed_scaling_factor"),
    )


def _moe_layers(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    types = config.get("mlp_layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != num_layers or not set(types) <= {"dense", "sparse"}:
            raise ValueError(f"mlp_layer_types must name dense or sparse for each of {num_layers} layers, got {types!r}")
        return tuple(i for i, kind in enumerate(types) if kind == "sparse")
    first, freq = _int(config, "first_k_dense_replace", least=0), _int(config, "moe_layer_freq", default=1)
    return tuple(i for i in range(first, num_layers) if i % freq == 0)


def _dtype(config: dict[str, Any]) -> Any:
    # Every published model of the family computes in bf16, so a file without the key means that.
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported, only {', '.join(DTYPES)}")
    return dtype


def _quantization(config: dict[str, Any]) -> FP8BlockConfig | None:
    quant = config.get("quantization_config")
    if quant is None:
        return None
    if not isinstance(quant, dict) or quant.get("quant_method") != "fp8":
        method = quant.get("quant_method") if isinstance(quant, dict) else quant
        raise ValueError(f"quant_method {method!r} is not supported, only fp8")
    for key, only in (("fmt", "e4m3"), ("activation_scheme", "dynamic"), ("scale_fmt", "ue8m0")):
        if quant.get(key) not in (None, only):
            raise ValueError(f"fp8 quantization with {key} {quant[key]!r} is not supported, only {only}")
    block = _lookup(quant, ("weight_block_size",), _REQUIRED)
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise ValueError(f"weight_block_size must be two whole numbers, got {block!r}")
    return FP8BlockConfig(block[0], block[1], "ue8m0" if quant.get("scale_fmt") else "fp32")


def _eos_token_ids(*configs: dict[str, Any]) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for config in configs:
        value = config.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if type(token_id) is not int or token_id < 0:
                raise ValueError(f"eos_token_id must be a token id or a list of them, got {value!r}")
            ids[token_id] = None
    return tuple(ids)
