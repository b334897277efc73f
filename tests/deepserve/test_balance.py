"""Experts that move while an instance serves: what users set, see and keep. That no token changes is in test_many_ranks."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import numpy as np
import pytest

from deepserve import LLM, SamplingParams
from deepserve.config import EngineArgs, EngineConfig
from deepserve.engine.balance import initial_placements, prepare_moves
from deepserve.engine.engine import build_model
from deepserve.messages import ExpertBalance
from deepserve.model.config import ModelConfig
from deepserve.model.hub import SHIPPED_FOLDER
from deepserve.server.balance import layer_balance
from eplb.config import EPLBConfig
from eplb.load import PHASES, LoadProfile
from eplb.pack import Layout, rebalance
from eplb.plan import balancedness, rank_loads
from hw.api import Unsupported
from hw.groups import open_groups
from hw.select import open_backend
from hw.topology import ParallelConfig
from tests.deepserve.serving import WAIT_S, Served, command
from tests.deepserve.test_many_ranks import MOVING, logprobs
from tests.deepserve.tiny_models import to_fp8

LAYERS, NUM_EXPERTS = (1, 2, 3, 4, 5), 32


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    tokens = np.random.randint(0, 100, (len(PHASES), len(LAYERS), NUM_EXPERTS))
    LoadProfile(LAYERS, 10, tokens).dump(tmp_path / "load.json")
    return tmp_path / "load.json"


def resolve(**args) -> EngineConfig:
    return EngineConfig.resolve(EngineArgs(**args), str(SHIPPED_FOLDER), ModelConfig.from_folder(SHIPPED_FOLDER))


def test_a_profile_decides_where_experts_start(profile: Path):
    eplb = EPLBConfig(load_profile=str(profile), num_redundant_experts=4)
    found = initial_placements(resolve(eplb_config=eplb, data_parallel_size=3))
    load = LoadProfile.read(profile, LAYERS, NUM_EXPERTS).load()
    expected = rebalance(load, Layout(NUM_EXPERTS, 3, 12, 1, 4))
    assert {layer: list(placement.phy2log) for layer, placement in found.items()} == dict(zip(LAYERS, expected.tolist(), strict=True))
    assert initial_placements(resolve()) == {}
    model = build_model(resolve(eplb_config=eplb), open_backend("cpu"), 0)
    assert [None if p is None else p.num_physical for p in model.placements()] == [None, 36, 36, 36, 36, 36]
    assert sorted(model.layers[1].moe.local.held) == sorted(initial_placements(resolve(eplb_config=eplb))[1].phy2log)


def test_a_profile_of_another_model(tmp_path: Path):
    LoadProfile((1, 9), 10, np.zeros((2, 2, NUM_EXPERTS), int)).dump(tmp_path / "load.json")
    with pytest.raises(ValueError, match=r"is of MoE layers \[1, 9\], the model has \[1, 2, 3, 4, 5, 6\]"):
        initial_placements(resolve(eplb_config=EPLBConfig(load_profile=str(tmp_path / "load.json"))))


def test_a_backend_without_moves_refuses():
    backend = replace(open_backend("cpu"), name="other", moves=None)
    model = build_model(resolve(), backend, 0)
    alone = open_groups(ParallelConfig(), 0)
    several = replace(alone, world=SimpleNamespace(size=2))
    with pytest.raises(Unsupported, match="other: eplb_config step_interval, since"):
        prepare_moves(model, backend, several)
    prepare_moves(model, backend, alone)


def test_one_rank_counts_for_others(tmp_path: Path):
    path = tmp_path / "load.json"
    eplb = EPLBConfig(step_interval=8, window_size=16, dump_profile=str(path))
    with LLM(eplb_config=eplb, num_pages=20, num_threads=1) as llm:
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=40, ignore_eos=True, temperature=0), use_tqdm=False)
        assert llm.engine.load().num_moved_experts == 0
    profile = LoadProfile.read(path, LAYERS, NUM_EXPERTS)
    # One token a step, four experts each; the prompt is three.
    assert profile.load("decode").sum(-1).tolist() == [4 * 16] * len(LAYERS)


def test_balancedness_is_the_planners():
    for num_ranks, slots in ((2, 5), (3, 4)):
        phy2log = np.stack([np.random.permutation(np.arange(num_ranks * slots) % 8) for _ in range(3)])
        tokens = {phase: np.random.randint(0, 9, (3, 8)) for phase in PHASES}
        tokens["decode"][1] = 0
        balance = ExpertBalance(num_ranks, 5, [1, 2, 3], {phase: part.tolist() for phase, part in tokens.items()}, phy2log.tolist())
        for phase, found in layer_balance(balance).items():
            assert found == pytest.approx(balancedness(rank_loads(tokens[phase].astype(float), phy2log, num_ranks)).tolist())


def test_fp8_experts_move_with_their_scales(tiny_model: Callable[..., Path], tmp_path: Path):
    folder = to_fp8(tiny_model("v3"), tmp_path, (16, 16))
    common = {"dtype": "float32", "weight_format": "fp8", "batch_invariant": True, "max_model_len": 128, "num_threads": 1, "num_pages": 20}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    prompts = [[3, 99, 7, 250, 31, 8], [17] * 9 + [40, 41], [5], [200, 100] * 8]
    found = []
    for options in ({}, {"data_parallel_size": 2, **MOVING}):
        with LLM(str(folder), skip_tokenizer_init=True, **common, **options) as llm:
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            found.append([(output.outputs[0].token_ids, logprobs(output)) for output in outputs])
            moved = options and sum(load.num_moved_experts for load in llm.engine.loads.values())
    assert found[0] == found[1] and moved > 0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("eplb") / "load.json"
    config = {
        "step_interval": 10,
        "window_size": 16,
        "tolerance": 0,
        "hysteresis": 0,
        "num_redundant_experts": 2,
        "dump_profile": str(path),
    }
    flags = ("--max-model-len", "512", "--kv-cache-memory-bytes", str(24 * 61440), "--num-threads", "1")
    with Served("--dp", "2", "--eplb-config", json.dumps(config), *flags) as server:
        server.profile = path
        yield server


def ask(served: Served, text: str) -> str:
    body = {"model": "deepserve-tiny", "temperature": 0, "messages": [{"role": "user", "content": text}]}
    return httpx.post(served.url + "/v1/chat/completions", json=body, timeout=WAIT_S).json()["choices"][0]["message"]["content"]


def test_placement_and_load_are_shown(served: Served):
    assert httpx.get(served.url + "/eplb").json() == {"instances": []}
    for _ in range(6):
        assert "17, 18, 19, 20" in ask(served, "Count from 1 to 20.")
    (instance,) = httpx.get(served.url + "/eplb").json()["instances"]
    assert instance["num_ranks"] == 2 and instance["num_steps"] >= 8
    assert [layer["layer"] for layer in instance["layers"]] == list(LAYERS)
    for layer in instance["layers"]:
        assert set(layer["phy2log"]) == set(range(NUM_EXPERTS)) and len(layer["phy2log"]) == 34
        # Each token chooses four experts.
        assert sum(layer["tokens"]["decode"]) % 4 == 0 and sum(layer["tokens"]["decode"]) > 0
        assert all(0.5 <= layer["balancedness"][phase] <= 1.0 for phase in PHASES)
    assert served.metric("vllm:eplb_moved_experts_total") > 0
    text = httpx.get(served.url + "/metrics").text
    assert text.count("deepserve:expert_balancedness{") == len(LAYERS) * len(PHASES)


def test_the_profile_it_leaves_can_be_started_from(served: Served):
    profile = LoadProfile.read(served.profile, LAYERS, NUM_EXPERTS)
    assert profile.load("decode").sum() > 0
    config = {"load_profile": str(served.profile), "num_redundant_experts": 2}
    args = EngineArgs(data_parallel_size=2, eplb_config=msgspec.convert(config, EPLBConfig))
    found = initial_placements(EngineConfig.resolve(args, str(SHIPPED_FOLDER), ModelConfig.from_folder(SHIPPED_FOLDER)))
    before = [rank_loads(profile.load()[None, i], np.array([found[layer].phy2log]), 2) for i, layer in enumerate(LAYERS)]
    assert all(balancedness(load)[0] > 0.95 for load in before)


def test_wrong_flags():
    done = command("serve", "--eplb-config", '{"step_intervall": 3}')
    assert done.exit_code == 1 and "--eplb-config" in done.stderr and "unknown field `step_intervall`" in done.stderr
