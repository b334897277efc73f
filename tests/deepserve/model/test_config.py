"""Model configs: the published files, both dialects, and a refusal for all that would change the computation."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepserve.model.config import V2, V3, FP8BlockConfig, ModelConfig
from deepserve.model.hub import SHIPPED_FOLDER
from mla.config import YarnConfig
from tests.deepserve.tiny_models import KINDS, weights_of

_COMMON = {
    "attention_bias": False,
    "hidden_act": "silu",
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
# As the hub files say it.
V3_HUB = {
    **_COMMON,
    "architectures": [V3],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
    "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "bos_token_id": 0,
    "eos_token_id": 1,
}
V2_LITE_HUB = {
    **_COMMON,
    "architectures": [V2],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 163840,
    "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "bos_token_id": 100000,
    "eos_token_id": 100001,
}


def _changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return copy.deepcopy(base) | changes


def _without(base: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in base.items() if key not in keys}


def test_v3_as_published():
    config = ModelConfig.from_dict(V3_HUB)
    assert config.architecture == V3
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.num_groups, config.moe.topk_groups, config.moe.top_k) == (256, 8, 4, 8)
    assert config.moe.scoring == "sigmoid" and config.moe.has_bias and config.moe.norm_topk_prob
    assert config.moe_layers == tuple(range(3, 61))
    assert not config.is_moe_layer(2) and config.is_moe_layer(3)
    assert config.mla.yarn == YarnConfig(40.0, 4096, 32.0, 1.0, 1.0, 1.0)
    assert config.mla.softmax_scale == pytest.approx(0.135234, abs=1e-6)
    assert config.mtp.owns(61) and not config.mtp.owns(60) and not config.mtp.owns(62)
    assert config.quantization == FP8BlockConfig(128, 128, "fp32")
    assert (config.dtype, config.bos_token_id, config.eos_token_ids) == ("bfloat16", 0, (1,))
    assert config.head_name == "lm_head.weight"


def test_v2_lite_as_published():
    config = ModelConfig.from_dict(V2_LITE_HUB)
    assert config.moe is not None
    assert config.mla.q_lora_rank is None
    assert config.moe.scoring == "softmax" and not config.moe.grouped and not config.moe.has_bias and not config.moe.norm_topk_prob
    assert config.mla.softmax_scale == pytest.approx(0.114721, abs=1e-6)
    assert config.mtp.num_layers == 0
    assert config.quantization is None


@pytest.mark.parametrize(("hub", "billions"), [(V3_HUB, 671.0), (V2_LITE_HUB, 15.7)], ids=["v3", "v2-lite"])
def test_parameter_counts_of_published_models(hub: dict[str, Any], billions: float):
    assert ModelConfig.from_dict(hub).num_parameters() / 1e9 == pytest.approx(billions, abs=0.05)


@pytest.mark.parametrize("hub", [V3_HUB, V2_LITE_HUB], ids=["v3", "v2-lite"])
def test_both_dialects_of_one_model_are_equal(hub: dict[str, Any]):
    scaling = dict(hub["rope_scaling"])
    rope = {"rope_theta": hub["rope_theta"], "rope_type": scaling.pop("type"), **scaling}
    other = _without(hub, "rope_theta", "rope_scaling", "torch_dtype", "moe_layer_freq", "num_nextn_predict_layers", "n_routed_experts")
    other |= {"rope_parameters": rope, "dtype": "bfloat16", "num_local_experts": hub["n_routed_experts"], "attention_dropout": 0.0}
    other |= {"num_mtp_layers": hub["num_nextn_predict_layers"]} if "num_nextn_predict_layers" in hub else {}
    other |= {
        "mlp_layer_types": ["dense"] * hub["first_k_dense_replace"] + ["sparse"] * (hub["num_hidden_layers"] - hub["first_k_dense_replace"])
    }
    other = _without(other, "first_k_dense_replace")
    if hub is V3_HUB:  # transformers saves neither for V3
        other = _without(other, "scoring_func", "topk_method")
    assert ModelConfig.from_dict(other) == ModelConfig.from_dict(hub)


@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_saves_is_read(kind: str, tiny_model):
    folder = tiny_model(kind)
    config = ModelConfig.from_folder(folder)
    said = KINDS[kind]
    assert config.moe is not None
    assert config.mla.q_lora_rank == said["q_lora_rank"]
    assert config.moe.topk_method == said.get("topk_method", "noaux_tc")
    assert (config.moe.num_groups, config.moe.topk_groups) == (said["n_group"], said["topk_group"])
    assert config.moe.routed_scaling_factor == said["routed_scaling_factor"]
    assert config.mla.rope_theta == said["rope_parameters"]["rope_theta"]
    assert (config.mla.yarn is None) == (said["rope_parameters"]["rope_type"] == "default")
    assert config.dtype == "float32"
    assert config.moe_layers == (1, 2)
    assert config.num_parameters() == sum(weight.target.numel() for weight in weights_of(config))


def test_the_shipped_model_is_read():
    config = ModelConfig.from_folder(SHIPPED_FOLDER)
    assert config.architecture == V3
    assert config.mla.yarn is None
    assert config.mtp.owns(config.num_layers) and config.mtp.num_layers == 1


def test_kimi_k2_is_a_v3():
    config = ModelConfig.from_dict(
        _changed(
            V3_HUB, model_type="kimi_k2", n_routed_experts=384, n_group=1, topk_group=1, num_attention_heads=64, num_key_value_heads=64
        )
    )
    assert config.moe is not None and not config.moe.grouped


@pytest.mark.parametrize(
    "groups", [{"n_group": None, "topk_group": None}, {"n_group": 1, "topk_group": 1}, {"n_group": 1, "topk_group": None}]
)
def test_no_groups_in_every_spelling(groups: dict[str, Any]):
    moe = ModelConfig.from_dict(_changed(V3_HUB, **groups)).moe
    assert moe is not None and (moe.num_groups, moe.topk_groups) == (1, 1)


@pytest.mark.parametrize("rope", [None, {}, {"type": "default"}, {"rope_type": "none"}])
def test_no_rope_scaling_in_every_spelling(rope: Any):
    assert ModelConfig.from_dict(_changed(V3_HUB, rope_scaling=rope)).mla.yarn is None


def test_absent_yarn_values_take_the_published_defaults():
    rope = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 4096, "beta_fast": None, "mscale_all_dim": 0}
    assert ModelConfig.from_dict(_changed(V3_HUB, rope_scaling=rope)).mla.yarn == YarnConfig(4.0, 4096)


def test_layers_by_frequency():
    assert ModelConfig.from_dict(_changed(V3_HUB, num_hidden_layers=9, moe_layer_freq=2)).moe_layers == (4, 6, 8)


def test_a_model_without_experts_is_dense():
    config = ModelConfig.from_dict(_changed(V3_HUB, n_routed_experts=None))
    assert config.moe is None and config.moe_layers == ()


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (1, None, (1,)),
        (1, {"eos_token_id": [1, 7]}, (1, 7)),
        ([5, 1], {"eos_token_id": 9}, (5, 1, 9)),
        (None, {"eos_token_id": 3}, (3,)),
        (1, {}, (1,)),
    ],
)
def test_stop_tokens_are_the_union_of_both_files(config_eos: Any, generation: Any, expected: tuple[int, ...]):
    assert ModelConfig.from_dict(_changed(V3_HUB, eos_token_id=config_eos), generation).eos_token_ids == expected


def test_ue8m0_scales():
    quant = V3_HUB["quantization_config"] | {"scale_fmt": "ue8m0"}
    assert ModelConfig.from_dict(_changed(V3_HUB, quantization_config=quant)).quantization == FP8BlockConfig(128, 128, "ue8m0")


def test_a_tied_head_is_the_embedding():
    config = ModelConfig.from_dict(_changed(V3_HUB, tie_word_embeddings=True))
    assert config.head_name == "model.embed_tokens.weight"


_REFUSED = {
    "architecture": ({"architectures": ["DeepseekV32ForCausalLM"]}, "DeepseekV32ForCausalLM"),
    "no architecture": ({"architectures": []}, r"\[\]"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "attention bias": ({"attention_bias": True}, "attention_bias True"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias True"),
    "half-layout rope": ({"rope_interleave": False}, "rope_interleave False"),
    "rope type": ({"rope_scaling": {"type": "linear", "factor": 2}}, "'linear'"),
    "rope of another shape": ({"rope_scaling": "yarn"}, "'yarn'"),
    "yarn without factor": ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 1}}, "no factor"),
    "yarn factor 0": ({"rope_scaling": {**_YARN, "factor": 0}}, "no factor"),
    "yarn attention factor": ({"rope_scaling": {**_YARN, "attention_factor": 1.2}}, "attention_factor 1.2"),
    "yarn without truncation": ({"rope_scaling": {**_YARN, "truncate": False}}, "truncate False"),
    "half of mscale": ({"rope_scaling": {**_YARN, "mscale": 0.707}}, "0.707 and 0.0"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "grouped queries": ({"num_key_value_heads": 8}, "num_key_value_heads 8"),
    "quant method": ({"quantization_config": {"quant_method": "compressed-tensors"}}, "'compressed-tensors'"),
    "quant format": ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}}, "'e5m2'"),
    "per-tensor fp8": ({"quantization_config": {"quant_method": "fp8", "weight_block_size": None}}, "weight_block_size .* None"),
    "static activations": ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}, "'static'"),
    "scoring": ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
    "gate": ({"topk_method": "greedy"}, "topk_method 'greedy'"),
    "layer types": ({"mlp_layer_types": ["dense"]}, r"\['dense'\]"),
    "dtype": ({"torch_dtype": "int8"}, "'int8'"),
    "text for a number": ({"hidden_size": "7168"}, "hidden_size .* '7168'"),
    "bool for a number": ({"num_hidden_layers": True}, "num_hidden_layers .* True"),
    "zero eps": ({"rms_norm_eps": 0}, "rms_norm_eps .* 0"),
    "stop token": ({"eos_token_id": ["</s>"]}, "eos_token_id .*</s>"),
    "groups without a choice": ({"topk_group": None}, "topk_group"),
    "uneven groups": ({"n_group": 7}, "n_group 7"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_refusals_name_the_value(case: str):
    changes, message = _REFUSED[case]
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(_changed(V3_HUB, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": True}, "norm_topk_prob true"),
        ({"topk_method": "noaux_tc"}, "'noaux_tc'"),
        ({"scoring_func": "sigmoid"}, "'sigmoid'"),
    ],
)
def test_v2_refuses_gates_of_others(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(_changed(V2_LITE_HUB, **changes))


_REQUIRED = [
    *("architectures", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings", "rms_norm_eps"),
    *("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_theta"),
    *("n_routed_experts", "moe_intermediate_size", "num_experts_per_tok", "topk_group", "norm_topk_prob", "routed_scaling_factor"),
    "first_k_dense_replace",
]


@pytest.mark.parametrize("key", _REQUIRED)
def test_a_missing_key_is_named(key: str):
    with pytest.raises(ValueError, match=f"no {key}$"):
        ModelConfig.from_dict(_without(V3_HUB, key))


def test_a_folder_without_a_config_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=f"{tmp_path} is not a checkpoint folder"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        ModelConfig.from_folder(tmp_path)


def test_generation_config_is_read_from_the_folder(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(V3_HUB))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (1, 2)


def test_reading_a_config_does_not_load_torch():
    program = "import sys, deepserve.model.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
