"""Block-FP8 checkpoints: kept as they are, or dequantised on load, the same model either way."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepserve.config import EngineArgs
from deepserve.engine.engine import Engine, load_model, resolve
from deepserve.engine.request import SamplingParams, validate
from deepserve.messages import Submit
from deepserve.model.decoder import Decoder
from hw.quant import QuantTensor
from tests.deepserve.tiny_models import dequantized, load_reference, to_fp8

PROMPTS = [[3, 99, 7, 250, 31, 8], [17] * 9 + [40, 41]]
# 40 rows of kv_a_proj_with_mqa are two and a half blocks; every other edge of these models falls between blocks.
BLOCK = (16, 16)


@pytest.fixture(scope="module")
def fp8(tiny_model, tmp_path_factory) -> Path:
    return to_fp8(tiny_model("v3"), tmp_path_factory.mktemp("fp8"), BLOCK)


def args(folder: Path, weight_format: str, **changes) -> EngineArgs:
    return EngineArgs(model=str(folder), dtype="float32", weight_format=weight_format, max_model_len=128, num_threads=1, **changes)


def answers(engine: Engine) -> dict[str, list]:
    """Tokens and log-probabilities of the prompts."""
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
        engine.submit(Submit(str(i), prompt, validate(prompt, params, engine.limits)))
    found: dict[str, list] = {str(i): [] for i in range(len(PROMPTS))}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += [(at.token_ids[0], at.logprobs[0]) for at in output.logprobs]
    return found


def quantized_in(model: Decoder) -> set[str]:
    return {weight.name.split(".", 3)[-1] for weight in model.weights() if isinstance(weight.target, QuantTensor)}


def test_kept_or_not_the_results_are_the_same_bits(fp8: Path):
    kept, plain = Engine(resolve(args(fp8, "fp8"))), Engine(resolve(args(fp8, "dequantized")))
    assert answers(kept) == answers(plain)
    assert kept.memory.weight_bytes < 0.6 * plain.memory.weight_bytes
    assert not quantized_in(plain.runner.model)
    names = quantized_in(kept.runner.model)
    assert {"self_attn.q_a_proj.weight", "self_attn.o_proj.weight", "mlp.experts.3.down_proj.weight"} <= names
    # Taken apart by head for absorption, or never quantised.
    assert not names & {"self_attn.kv_b_proj.weight", "mlp.gate.weight", "input_layernorm.weight"}


def test_the_tokens_are_transformers_own(fp8: Path, tmp_path: Path):
    reference = load_reference(dequantized(fp8, tmp_path / "plain"))
    found = answers(Engine(resolve(args(fp8, "fp8"))))
    for i, prompt in enumerate(PROMPTS):
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(8):
                tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert [token for token, _ in found[str(i)]] == tokens[len(prompt) :]


def test_the_device_decides_unless_asked(fp8: Path):
    config = resolve(args(fp8, "auto"))
    assert not quantized_in(Engine(config).runner.model), "a CPU computes with the values"


def test_dummy_weights_fill_blocks_too(fp8: Path):
    engine = Engine(resolve(args(fp8, "fp8", load_format="dummy")))
    for weight in engine.runner.model.weights():
        if isinstance(weight.target, QuantTensor):
            assert weight.target.scale.min() > 0 and weight.target.scale.max() < 1
            assert weight.target.data.float().std() > 10, "the range of e4m3 is used"
    assert len({token for token, _ in answers(engine)["0"]}) > 1


def test_a_slice_that_cuts_a_block_is_kept_in_the_models_dtype(tiny_model, tmp_path: Path):
    """Half the heads end in the middle of a block of 128."""
    folder = to_fp8(tiny_model("v3"), tmp_path, (128, 128))
    engine = Engine(resolve(args(folder, "fp8")))
    config = resolve(args(folder, "fp8", tensor_parallel_size=2))

    class Seat:
        rank, size = 0, 2

    names = quantized_in(load_model(config, replace(engine.backend, tp=Seat()), rank=0))
    assert "self_attn.o_proj.weight" in quantized_in(engine.runner.model) and "self_attn.o_proj.weight" not in names
    assert "self_attn.q_b_proj.weight" not in names


def test_fp8_of_a_checkpoint_that_is_not_is_refused(tiny_model):
    with pytest.raises(ValueError, match="needs a checkpoint in block-FP8"):
        resolve(args(tiny_model("v3"), "fp8"))
    with pytest.raises(ValueError, match="'int4'"):
        resolve(args(tiny_model("v3"), "int4"))
