"""Layers of DeepSeek-V3's widths on every accelerator this machine has, so that the libraries' shapes run through the engine.

Log-probabilities are compared with the CPU's. What they may differ by is measured beside, on the CPU alone: there products are rounded to
bf16 up or down by chance, as if their sums had come out a little higher or lower, which is all that a device may do otherwise. In FP8 such
a step may take a value to the next e4m3 one, an eighth away.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hw.cpu.ops import CpuOps
from hw.quant import QuantTensor, dequantize, quantize_activation
from hw.testing import available_backends
from tests.deepserve.engine.driving import MINIMAL, Request, make_engine, run_together
from tests.deepserve.engine.world import Story

DEVICES = [name for name in available_backends() if name != "cpu"]
pytestmark = [pytest.mark.long, pytest.mark.skipif(not DEVICES, reason="needs an accelerator")]

# One dense and one MoE layer.
V3_WIDTHS = {
    **MINIMAL,
    "hidden_size": 7168,
    "vocab_size": 4096,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 2048,
    "torch_dtype": "bfloat16",
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


class TwinOps(CpuOps):
    """CPU ops that quantise where a device does, and may round products by chance. Weights are dequantised once, which takes memory."""

    rows_by_library = False

    def __init__(self):
        self.by_chance = False
        self._generator = torch.Generator().manual_seed(0)
        self._dense: dict[tuple, torch.Tensor] = {}

    def quantizes(self, weight, dtype):
        return isinstance(weight, QuantTensor) and dtype == torch.bfloat16

    def linear(self, x, weight):
        if isinstance(x, torch.Tensor) and x.dtype == torch.float32:
            return super().linear(x, weight)
        if isinstance(weight, QuantTensor) and isinstance(x, torch.Tensor):
            x = quantize_activation(x)  # as a device does with dense rows, those of prompts' attention for one
        wide = dequantize(x) if isinstance(x, QuantTensor) else x.float()
        product = wide @ self._wide(weight).T
        return self._either_way(product) if self.by_chance else product.bfloat16()

    def _wide(self, weight) -> torch.Tensor:
        if not isinstance(weight, QuantTensor):
            return weight.float()
        key = weight.data.data_ptr(), weight.shape
        if key not in self._dense:
            self._dense[key] = dequantize(weight)
        return self._dense[key]

    def _either_way(self, values: torch.Tensor) -> torch.Tensor:
        """To one of the two bf16 neighbours, to the nearer one more often: right on average."""
        bits = values.contiguous().view(torch.int32)
        dropped = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, generator=self._generator)
        return ((bits + dropped) & ~0xFFFF).view(torch.float32).bfloat16()


def differences(stories: list[Story], expected: list[Story]) -> list[float]:
    """Of the log-probabilities of prompts and of generated tokens, up to the first other one, whose rival was a rounding away."""
    found = []
    for mine, theirs in zip(stories, expected, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(mine.tokens, theirs.tokens, strict=True)) if a != b), len(mine.tokens))
        pairs = [*zip(mine.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True)]
        pairs += zip(mine.logprobs[:same], theirs.logprobs[:same], strict=True)
        found += [abs(a.logprobs[0] - b.logprobs[0]) for a, b in pairs]
    return found


def compare_layers(device: str, folder: Path, config: dict, monkeypatch: pytest.MonkeyPatch, **args) -> None:
    """Random weights, scored and generated: whole prompts, and chunks of 16, which attend in absorbed form where the device prefers it."""
    (folder / "config.json").write_text(json.dumps(config))
    draw = random.Random(0)
    prompts = [[draw.randrange(2, config["vocab_size"]) for _ in range(length)] for length in (1, 20, 64, 65, 100)]
    params = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, "logprobs": 0, "prompt_logprobs": 0}
    requests = [Request(prompt, params) for prompt in prompts]
    args = {"model": str(folder), "dtype": "bfloat16", "load_format": "dummy", "num_pages": 20, "max_num_seqs": 8, "num_threads": 8,
            "enable_prefix_caching": False, **args}  # fmt: skip
    twin = TwinOps()
    monkeypatch.setattr("hw.cpu.backend.CpuOps", lambda: twin)
    reference, engine = make_engine(device="cpu", cpu_kernels="torch", **args), make_engine(device=device, **args)
    # A device draws dummy weights of its own.
    for ours, theirs in zip(engine.runner.model.weights(), reference.runner.model.weights(), strict=True):
        ours.fill(theirs.target)
    twin.prefers_absorbed = engine.backend.ops.prefers_absorbed
    for chunk in (512, 16):
        for each in (reference, engine):
            each.scheduler.config = replace(each.scheduler.config, max_chunk_tokens=chunk)
        twin.by_chance = False
        expected = run_together(reference, requests)
        twin.by_chance = True
        allowed = differences(run_together(reference, requests), expected)
        found = differences(run_together(engine, requests), expected)
        for name, some in ("by chance", allowed), (device, found):
            print(f"chunk {chunk}, {name}: {len(some)} values, mean {mean(some):.4f}, one in ten above {tenth(some):.4f}")
        assert len(found) >= len(allowed) // 2 > sum(map(len, prompts)) // 2 - len(prompts)
        assert mean(found) < 1.5 * mean(allowed) and tenth(found) < 1.5 * tenth(allowed)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def tenth(values: list[float]) -> float:
    """What one in ten exceeds: a token that went to another expert, as a few do, does not move it."""
    return sorted(values)[len(values) * 9 // 10]


@pytest.mark.parametrize("device", DEVICES)
def test_in_bf16(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compare_layers(device, tmp_path, V3_WIDTHS, monkeypatch)


@pytest.mark.parametrize("device", DEVICES)
def test_in_fp8(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Weights stay in blocks and activations are quantised on both sides."""
    compare_layers(device, tmp_path, {**V3_WIDTHS, "quantization_config": FP8}, monkeypatch, weight_format="fp8")
