"""`deepserve inspect`: the numbers of a start, without one."""

import json
from pathlib import Path

import pytest

from deepserve.config import EngineArgs
from deepserve.engine.engine import Engine, resolve
from deepserve.inspect import Report, inspect_model, size
from hw.select import open_backend
from tests.deepserve.serving import command

# DeepSeek-V3's published configuration.
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1, "max_position_embeddings": 163840, "rope_theta": 10000,
    "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def v3(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(V3))
    return str(tmp_path)


def test_the_shipped_model_is_what_an_engine_holds():
    args = EngineArgs(max_model_len=256, kv_cache_memory_bytes=1 << 22)
    report, engine = inspect_model(args), Engine(resolve(args))
    (rank,) = report.ranks
    assert rank.weight_bytes == engine.memory.weight_bytes
    assert report.budget.num_pages == engine.memory.num_pages
    assert report.bytes_per_token == 960
    assert report.refusals == []


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 3), (2, 2)])
def test_ranks_share_heads_and_experts(tp: int, dp: int):
    report = inspect_model(EngineArgs(tensor_parallel_size=tp, data_parallel_size=dp))
    assert len(report.ranks) == tp * dp
    assert {rank.num_heads for rank in report.ranks} == {8 // tp}
    assert {rank.num_experts for rank in report.ranks} == {-(-32 // (tp * dp))}
    alone = inspect_model(EngineArgs()).ranks[0]
    assert all(rank.weight_bytes < alone.weight_bytes for rank in report.ranks)


def test_v3_without_its_weights(v3: str):
    """One latent of 576 values a layer; 671 billion parameters."""
    report = inspect_model(EngineArgs(model=v3, dtype="bfloat16", data_parallel_size=8))
    assert report.bytes_per_token == 61 * 1152
    assert round(report.config.model.num_parameters() / 1e9) == 671
    assert {rank.num_experts for rank in report.ranks} == {32}
    # The gate is kept in fp32, everything else in two bytes a parameter; attention, norms, dense parts are whole on every rank.
    expert = 3 * 7168 * 2048 * 2
    assert report.ranks[0].weight_bytes - 58 * 32 * expert == pytest.approx(36e9, rel=0.1)
    assert "weights of all ranks" in report.refusals[0]


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def who(report: Report) -> dict[tuple[str, str], str]:
    return {(provider.op, provider.shape): provider.served_by for provider in report.providers}


def test_who_computes_on_a_gpu_is_known_without_one(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**V3, "quantization_config": FP8}))
    found = who(inspect_model(EngineArgs(model=str(tmp_path), device="cuda", data_parallel_size=8)))
    assert {library for (op, shape), library in found.items() if op == "mla_decode" and "128 heads" in shape} == {"FlashMLA"}
    assert found["linear", "head 129280 x 7168, 16 rows or more"] == "cuBLAS"
    assert found["dispatch, combine", "low latency steps"] == "peer memory"
    assert found["dispatch, combine", "throughput steps"] == "DeepEP" and found["collectives", "all"] == "NCCL"
    assert "DeepGEMM" in {library for (op, _), library in found.items() if op == "grouped_linear_masked"}


def test_who_computes_the_shipped_model():
    report = inspect_model(EngineArgs(device="cuda"))
    assert who(report)["mla_decode", "8 heads, latent 64 + rope 16"] == "Triton"
    (decode,) = [provider for provider in report.providers if provider.op == "mla_decode"]
    assert "FlashMLA: latent 64, it takes 512" in decode.reason
    target = open_backend("cpu", cpu_kernels="native").ops.kernels.target
    by_cpu = {provider.served_by for provider in inspect_model(EngineArgs()).providers}
    assert by_cpu == {f"native kernels for {target}", "torch", "in this process"}
    two = inspect_model(EngineArgs(device="cuda", data_parallel_size=2))
    dispatch = next(each for each in two.providers if each.op == "dispatch, combine" and each.shape == "throughput steps")
    assert dispatch.served_by == "NCCL" and "DeepEP: hidden size 256, it takes 2048" in dispatch.reason
    assert "DeepEP ElasticBuffer: of DeepEP 2, which needs NCCL 2.30.4" in dispatch.reason


def test_command(v3: str):
    fits = command("inspect", "--tp", "2")
    assert fits.exit_code == 0
    for word in ("DeepseekV3ForCausalLM", "960 bytes", "32 routed", "number of pages"):
        assert word in fits.stdout
    assert "mixture of experts" in fits.stdout and "torch" in fits.stdout
    too_big = command("inspect", v3)
    assert too_big.exit_code == 1
    assert "does not fit this machine" in too_big.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tp", "3"], "tensor_parallel_size 3 does not divide the model's 8 heads"),
        (["--max-model-len", "9999"], "max_model_len 9999"),
        (["/no/such"], "/no/such"),
    ],
)
def test_refusals(arguments: list[str], sentence: str):
    ended = command("inspect", *arguments)
    assert ended.exit_code == 1
    assert sentence in ended.stderr


def test_size():
    assert [size(n) for n in (5, 2048, 3 << 30)] == ["5.0 B", "2.0 KiB", "3.0 GiB"]
