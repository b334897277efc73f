"""Tiny random models on disk, saved by transformers, which is the outside reference for the tests.

Every parameter is random: transformers' initial values (norms of 1, gate biases of 0, matrices of std 0.02) would hide a
norm that is skipped, a bias that is added twice, or an expert that is never chosen.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from deepserve.model.config import ModelConfig
from hw.quant import QuantTensor, dequantize, quantize_weight_blocks
from hw.weights import Weight

_SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,  # V3's class would write 128
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 640,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _yarn(mscale: float) -> dict[str, Any]:
    scaling = {"factor": 40.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0}
    return {"rope_type": "yarn", "rope_theta": 10000.0, **scaling, "mscale": mscale, "mscale_all_dim": mscale}


_V2_EXPERTS = {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "norm_topk_prob": False}
_V3_EXPERTS = {"n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4, "norm_topk_prob": True, "num_mtp_layers": 0}

# The four shapes of gate, query and rope that V2 and V3 checkpoints come in.
KINDS: dict[str, dict[str, Any]] = {
    "v2": {
        **_V2_EXPERTS,
        "q_lora_rank": 48,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 16.0,
        "rope_parameters": _yarn(0.707),
    },
    "v2-lite": {
        **_V2_EXPERTS,
        "q_lora_rank": None,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "rope_parameters": _yarn(0.707),
    },
    "v3": {**_V3_EXPERTS, "q_lora_rank": 48, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "rope_parameters": _yarn(1.0)},
    "moonlight": {
        **_V3_EXPERTS,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {**_PLAIN_ROPE, "rope_theta": 50000.0},
    },
}


def make_tiny(kind: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Save a random fp32 model of one of `KINDS` into `folder`; `changes` override its config."""
    import transformers  # seconds to import: only tests that need a model pay for it

    version = "V2" if kind.startswith("v2") else "V3"
    config = getattr(transformers, f"Deepseek{version}Config")(**{**_SIZES, **KINDS[kind], **changes})
    model = getattr(transformers, f"Deepseek{version}ForCausalLM")(config).float()
    _randomize(model, seed)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def add_mtp(source: Path, folder: Path, seed: int = 0) -> Path:
    """Write `source` again with a random MTP module behind its layers; the model itself stays what it is."""
    tensors = load_file(source / "model.safetensors")
    num_layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    last, mtp = f"model.layers.{num_layers - 1}.", f"model.layers.{num_layers}."
    hidden = tensors["model.norm.weight"].shape[0]
    shapes = {mtp + name.removeprefix(last): tensor.shape for name, tensor in tensors.items() if name.startswith(last)}
    shapes |= {f"{mtp}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"{mtp}eh_proj.weight"] = (hidden, 2 * hidden)
    generator = torch.Generator().manual_seed(seed)
    for name, shape in sorted(shapes.items()):
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1.0 + 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
    _copy_with(source, folder, {"num_nextn_predict_layers": 1}, tensors)
    return folder


def load_reference(folder: Path) -> Any:
    """The transformers model of a folder, fp32, plain attention."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def _randomize(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    for name, tensor in sorted(tensors.items()):
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(0.2 * noise)
        elif tensor.ndim == 1:
            tensor.copy_(1.0 + 0.1 * noise)
        elif name.endswith("embed_tokens.weight"):
            tensor.copy_(noise)
        else:
            # Gates and head wider than their fan-in asks for: scores and logits then lie far apart, near ties are rare.
            gain = 2.0 if name.endswith(("mlp.gate.weight", "lm_head.weight")) else 1.0
            tensor.copy_(gain * noise * tensor.shape[-1] ** -0.5)


def to_fp8(source: Path, folder: Path, block: tuple[int, int] = (128, 128), ue8m0: bool = False, e8m0_dtype: bool = False) -> Path:
    """Write `source` again with its projections in block FP8, as V3 (or, with ue8m0, V3.1) is published."""
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            tensors[name] = tensor
            continue
        quant = quantize_weight_blocks(tensor, block, ue8m0)
        tensors[name] = quant.data
        tensors[name + "_scale_inv"] = quant.scale.to(torch.float8_e8m0fnu) if e8m0_dtype else quant.scale
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    _copy_with(source, folder, {"quantization_config": scheme | ({"scale_fmt": "ue8m0"} if ue8m0 else {})}, tensors)
    return folder


def dequantized(source: Path, folder: Path) -> Path:
    """Write an FP8 folder again in fp32, for transformers, whose own reader guesses ragged blocks wrongly."""
    stored = load_file(source / "model.safetensors")
    block = tuple(json.loads((source / "config.json").read_text())["quantization_config"]["weight_block_size"])
    tensors = {}
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            continue
        scale = stored.get(name + "_scale_inv")
        tensors[name] = tensor if scale is None else dequantize(QuantTensor(tensor, scale, block=block))
    _copy_with(source, folder, {"quantization_config": None}, tensors)
    return folder


def _copy_with(source: Path, folder: Path, changes: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if key != "quantization_config" or value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "generation_config.json", folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def weights_of(config: ModelConfig, dtype: torch.dtype = torch.float32) -> list[Weight]:
    """Every tensor of a model by the published names, with storage of its own: the list written down a second time."""
    mla, moe, hidden = config.mla, config.moe, config.hidden_size
    weights: list[Weight] = []

    def add(name: str, *shape: int, kind: Any = "matrix") -> None:
        weights.append(Weight(name=name, shape=shape, target=torch.full(shape, torch.nan, dtype=dtype), kind=kind))

    def add_mlp(prefix: str, width: int) -> None:
        add(f"{prefix}.gate_proj.weight", width, hidden)
        add(f"{prefix}.up_proj.weight", width, hidden)
        add(f"{prefix}.down_proj.weight", hidden, width)

    add("model.embed_tokens.weight", config.vocab_size, hidden)
    add("model.norm.weight", hidden, kind="norm")
    add("lm_head.weight", config.vocab_size, hidden)
    for layer_idx in range(config.num_layers):
        layer = f"model.layers.{layer_idx}"
        attention = f"{layer}.self_attn"
        add(f"{layer}.input_layernorm.weight", hidden, kind="norm")
        add(f"{layer}.post_attention_layernorm.weight", hidden, kind="norm")
        if mla.q_lora_rank is None:
            add(f"{attention}.q_proj.weight", mla.num_heads * mla.qk_head_dim, hidden)
        else:
            add(f"{attention}.q_a_proj.weight", mla.q_lora_rank, hidden)
            add(f"{attention}.q_a_layernorm.weight", mla.q_lora_rank, kind="norm")
            add(f"{attention}.q_b_proj.weight", mla.num_heads * mla.qk_head_dim, mla.q_lora_rank)
        add(f"{attention}.kv_a_proj_with_mqa.weight", mla.latent_dim, hidden)
        add(f"{attention}.kv_a_layernorm.weight", mla.kv_lora_rank, kind="norm")
        add(f"{attention}.kv_b_proj.weight", mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
        add(f"{attention}.o_proj.weight", hidden, mla.num_heads * mla.v_head_dim)
        if moe is None or not config.is_moe_layer(layer_idx):
            add_mlp(f"{layer}.mlp", config.intermediate_size)
            continue
        add(f"{layer}.mlp.gate.weight", moe.num_experts, hidden)
        if moe.has_bias:
            add(f"{layer}.mlp.gate.e_score_correction_bias", moe.num_experts, kind="gate_bias")
        for expert_idx in range(moe.num_experts):
            add_mlp(f"{layer}.mlp.experts.{expert_idx}", moe.intermediate_size)
        add_mlp(f"{layer}.mlp.shared_experts", moe.num_shared_experts * moe.intermediate_size)
    return weights
