"""The whole engine on every accelerator this machine has, against transformers: stored values of the shipped model, and tiny models.

fp32: the same tokens wherever the reference's lead exceeds 1e-3, log-probabilities within 1e-3. bf16: transformers' fp32 continuation is
scored as a prompt, so that one rounding cannot hide what follows it: the mean and the 99th percentile of the differences of
log-probabilities are bounded, and a token that leads by more than `BF16_MARGIN` must be the most likely one here too. (The CPU in bf16
has 0.025 and 0.34: rounding, and now and then another expert.)
"""

import json
from functools import partial
from pathlib import Path

import msgspec
import pytest

from deepserve.config import SpeculativeConfig
from deepserve.engine.engine import Engine, resolve
from deepserve.engine.lockstep import expert_step
from hw.api import ExpertMode
from hw.testing import available_backends, no_waiting
from tests.deepserve.engine.driving import MINIMAL, Driver, Request, golden_cases, make_engine, run_alone, run_together
from tests.deepserve.engine.test_engine import check_case, golden_requests
from tests.deepserve.same_tokens.engine_run import compare, engine_args, run_case
from tests.deepserve.same_tokens.find_prompts import DATA
from tests.deepserve.same_tokens.grid import Case
from tests.deepserve.same_tokens.reference import Reference, refer
from tests.deepserve.tiny_models import load_reference

DEVICES = [name for name in available_backends() if name != "cpu"]
pytestmark = pytest.mark.skipif(not DEVICES, reason="needs an accelerator")
BF16_MARGIN, BF16_MEAN, BF16_P99 = 0.5, 0.035, 0.5
PROMPTS = json.loads(DATA.read_text())


@pytest.mark.parametrize(
    "args", [{}, {"max_num_batched_tokens": 100}, {"max_dispatch_tokens_per_rank": 1}], ids=["plain", "chunked", "throughput"]
)
@pytest.mark.parametrize("device", DEVICES)
def test_golden_values_in_fp32(device: str, args: dict):
    stories = run_together(make_engine(device=device, **args), golden_requests())
    for case, story in zip(golden_cases(), stories, strict=True):
        check_case(case, story)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("device", DEVICES)
def test_golden_values_of_overlapped_steps(device: str, graphs: bool, monkeypatch: pytest.MonkeyPatch):
    """Rows of one rank do not travel, but they take the same way through the streams of a device."""
    every = dict.fromkeys(ExpertMode, 1)
    monkeypatch.setattr(Engine, "overlap", property(lambda engine: every))
    monkeypatch.setattr("deepserve.engine.engine.expert_step", partial(expert_step, overlap=every))
    engine = make_engine(device=device, graphs=graphs, max_num_batched_tokens=150, max_dispatch_tokens_per_rank=40, max_num_seqs=40)
    for case, story in zip(golden_cases(), run_together(engine, golden_requests()), strict=True):
        check_case(case, story)


@pytest.mark.parametrize("device", DEVICES)
def test_golden_values_in_bf16(device: str):
    cases = golden_cases()
    engine = make_engine(device=device, dtype="bfloat16")
    params = {"max_tokens": 0, "prompt_logprobs": 0}
    stories = run_together(engine, [Request(case["prompt_ids"] + case["output_ids"], params) for case in cases])
    errors = []
    for case, story in zip(cases, stories, strict=True):
        found = story.prompt_logprobs[1:]
        wanted = [*case["prompt_logprobs"], *case["logprobs"]]
        errors += [abs(position.logprobs[0] - logprob) for position, logprob in zip(found, wanted, strict=True)]
        for position, margin in zip(found[-len(case["margin"]) :], case["margin"], strict=True):
            assert position.rank == 1 or margin <= BF16_MARGIN, (case["name"], position, margin)
    mean, p99 = sum(errors) / len(errors), sorted(errors)[len(errors) * 99 // 100]
    assert mean < BF16_MEAN and p99 < BF16_P99, (mean, p99)


@pytest.mark.parametrize("device", DEVICES)
def test_draws_are_those_of_the_cpu(device: str):
    """Same noise, nearly the same logits: for these seeds no token comes near to changing."""
    settings = [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.2, "min_p": 0.05},
        {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    ]
    prompts = [case["prompt_ids"] for case in golden_cases()[:10]]
    requests = [
        Request(prompt, {"max_tokens": 24, "ignore_eos": True, "seed": i, "n": 2, **settings[i % len(settings)]})
        for i, prompt in enumerate(prompts)
    ]
    here, there = (run_together(make_engine(device=name), requests) for name in ("cpu", device))
    assert [story.tokens for story in there] == [story.tokens for story in here]
    assert [story.tokens for story in run_alone(make_engine(device=device), requests)] == [story.tokens for story in here]


CASES = [
    Case("", "16 prompts", 7, prefix_cache=False, preempt=True),
    Case("", "16 prompts", None, prefix_cache=False, preempt=False),
    Case("", "alone", 64, prefix_cache=True, preempt=False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case)[2:])
@pytest.mark.parametrize("kind", ("v2", "v2-lite", "v3", "moonlight"))
@pytest.mark.parametrize("device", DEVICES)
def test_tiny_models_in_fp32(device: str, kind: str, case: Case, tiny_model, references):
    folder = tiny_model(kind, PROMPTS[kind]["seed"])
    case = Case(kind, case.company, case.chunk, case.prefix_cache, case.preempt)
    engine = Engine(resolve(msgspec.structs.replace(engine_args(folder, case), device=device)), progress=False)
    compare(run_case(engine, case, references(kind)))


@pytest.fixture(scope="module")
def references(tiny_model):
    """`references("v3")`: what transformers says about a model's prompts, on the CPU."""
    made: dict[str, list[Reference]] = {}

    def get(kind: str) -> list[Reference]:
        if kind not in made:
            model = load_reference(tiny_model(kind, PROMPTS[kind]["seed"]))
            made[kind] = [refer(model, case["prompt"], case["output"]) for case in PROMPTS[kind]["cases"]]
        return made[kind]

    return get


MTP_WAYS = {
    "captured, asynchronous": {},
    "asynchronous": {"graphs": False},
    "captured": {"async_scheduling": False, "num_pages": 14, "max_model_len": 192},
    "neither": {"graphs": False, "async_scheduling": False, "max_num_batched_tokens": 100},
}


SHORT_CASES = [case for case in golden_cases() if len(case["prompt_ids"]) < 150]
FILTERS = [{"temperature": 0.8, "top_k": 20}, {"top_p": 0.8}, {"presence_penalty": 1.0, "repetition_penalty": 1.2}]
SAMPLED = [
    Request(case["prompt_ids"], {"max_tokens": 24, "ignore_eos": True, "seed": i, "n": 2, **FILTERS[i % 3]})
    for i, case in enumerate(SHORT_CASES[:9])
]


@pytest.fixture(scope="module")
def drawn_without_drafts() -> list[list[int]]:
    """What the CPU draws for `SAMPLED` in plain torch."""
    return [story.tokens for story in run_together(make_engine(cpu_kernels="torch", graphs=False), SAMPLED)]


@pytest.mark.parametrize("num_drafts", [1, 2, 4])
@pytest.mark.parametrize("way", MTP_WAYS)
@pytest.mark.parametrize("device", DEVICES)
def test_mtp_changes_no_token(device: str, way: str, num_drafts: int, drawn_without_drafts: list[list[int]]):
    """Greedy against the stored values, sampled against the CPU without drafts; acceptance is the shipped model's."""
    speculative = SpeculativeConfig(num_speculative_tokens=num_drafts, adaptive=False)
    engine = make_engine(device=device, max_num_seqs=24, speculative_config=speculative, **MTP_WAYS[way])
    greedy = [Request(case["prompt_ids"], {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}) for case in SHORT_CASES]
    for case, story in zip(SHORT_CASES, run_together(engine, greedy), strict=True):
        clear = next((i for i, margin in enumerate(case["margin"][:24]) if margin < 1e-3), 24)
        assert story.tokens[:clear] == case["output_ids"][:clear], case["name"]
    load = engine.load()
    assert load.num_accepted_by_position[0] > 0.7 * load.num_drafts
    assert [story.tokens for story in run_together(engine, SAMPLED)] == drawn_without_drafts


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_device_refuses_it_refuses_at_the_door(device: str):
    with pytest.raises(ValueError, match="batch_invariant"):
        make_engine(device=device, batch_invariant=True)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


SETTINGS = {
    "greedy": [{"temperature": 0.0}],
    "sampled": [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}, {"min_p": 0.05}],
    "logprobs": [{"temperature": 1.0, "logprobs": 3}, {}],
    "penalties": [{"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2}, {}],
    "bias": [{"logit_bias": {7: 2.0, 9: -1.0}, "min_tokens": 50}, {}],
}


def steady(settings: list[dict], **args) -> Driver:
    """An asynchronous engine with captured steps, in the middle of decoding five sequences."""
    driver = Driver(make_engine(max_model_len=256, num_pages=20, **args))
    assert driver.engine.asynchronous and driver.engine.runner.graphs is not None
    for i in range(5):
        params = {"max_tokens": 100, "ignore_eos": True, "seed": i, **settings[i % len(settings)]}
        driver.submit(f"r{i}", Request([3 + i] * (1 + 25 * i), params))
    for _ in range(6):
        driver.step()
    assert len(driver.engine.scheduler.running) == 5 and driver.engine.has_launched
    return driver


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("device", DEVICES)
def test_decode_steps_wait_for_nothing(device: str, settings: list[dict], num_drafts: int):
    speculative = SpeculativeConfig(num_speculative_tokens=num_drafts, adaptive=False)
    driver = steady(settings, device=device, dtype="bfloat16", speculative_config=speculative)
    with no_waiting(driver.engine.backend.runtime.device):
        while min(len(story.tokens) for story in driver.stories.values()) <= 70:  # long enough for each to take another page
            driver.step()
    assert driver.engine.load().num_accepted_tokens > 0 or not num_drafts


@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=pytest.mark.long)], ids=["bf16", "fp8"])
@pytest.mark.parametrize("device", DEVICES)
def test_prefill_steps_wait_for_nothing(device: str, fp8: bool, tmp_path: Path):
    """Prompts in chunks, behind cached context in both forms of attention, and beside sequences that decode."""
    widths = {"hidden_size": 512, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
              "q_lora_rank": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "torch_dtype": "bfloat16"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**MINIMAL, **widths, **({"quantization_config": FP8} if fp8 else {})}))
    args = {"dtype": "bfloat16", "load_format": "dummy", "num_pages": 64, "max_num_batched_tokens": 200, "max_dispatch_tokens_per_rank": 16}
    driver = Driver(make_engine(model=str(tmp_path), device=device, max_num_seqs=8, **args))

    def ask(names: str) -> None:
        for i, name in enumerate(names):
            driver.submit(name, Request([3 + i] * (1 + 90 * i), {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}))

    ask("abcd")
    driver.finish()  # whatever compiles or allocates first
    driver.engine.pages.forget_cached()
    with no_waiting(driver.engine.backend.runtime.device):
        ask("efgh")
        driver.finish()
    assert [len(story.tokens) for story in driver.stories.values()] == [6] * 8


@pytest.mark.parametrize("device", DEVICES)
def test_a_wait_in_a_decode_step_is_found(device: str):
    driver = steady(SETTINGS["greedy"], device=device)
    runtime = driver.engine.backend.runtime
    download = runtime.download

    def hasty(tensors):
        tensors[0].sum().item()
        return download(tensors)

    runtime.download = hasty
    with no_waiting(runtime.device), pytest.raises(RuntimeError, match="synchron"):
        driver.step()
