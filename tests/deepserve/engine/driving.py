"""Runs requests through a whole engine, step by step, and collects what comes out."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from deepserve.config import EngineArgs
from deepserve.engine.engine import Engine, resolve
from deepserve.engine.lockstep import expert_step
from deepserve.engine.request import SamplingParams, SequenceOutput, validate
from deepserve.messages import Submit
from tests.deepserve.engine.world import Story

MODEL_FOLDER = Path(__file__).parents[3] / "deepserve" / "models" / "deepserve-tiny"

# A V3 model that steps in a millisecond. Some widths are odd, so that no kernel meets only whole vectors.
MINIMAL = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 512,
    "rope_theta": 10000,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def minimal_folder(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(MINIMAL))
    return str(folder)


def make_engine(**args) -> Engine:
    # One thread: on a busy machine two wait for each other at every small product. What a test needs compiles when it does.
    return Engine(resolve(EngineArgs(**{"dtype": "float32", "num_threads": 1, "compile_ahead": False, **args})))


@dataclass(frozen=True)
class Request:
    """A prompt and what to do with it."""

    prompt: list[int]
    params: dict = field(default_factory=dict)


def calm(driver: "Driver") -> None:
    """No disturbance."""


class Driver:
    """An engine and the stories of its sequences."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.stories: dict[tuple[str, int], Story] = {}
        self._num_calls = 0

    def submit(self, request_id: str, request: Request) -> None:
        params = validate(request.prompt, SamplingParams(**request.params), self.engine.limits)
        self.stories |= {(request_id, i): Story() for i in range(params.n)}
        self.engine.submit(Submit(request_id, request.prompt, params))

    def collect(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            self.stories[output.request_id, output.index].add(output)

    def step(self) -> None:
        self.collect(self.engine.step())

    def discard(self) -> None:
        """A step that runs on the device and whose result is then lost."""
        plan = self.engine.plan()
        if plan is not None:
            self.engine.runner.run(plan, expert_step([plan.num_tokens], self.engine.config.args.max_dispatch_tokens_per_rank))
        self.engine.scheduler.discard()

    def preempt(self) -> None:
        """Every third time the newest running sequence gives up its pages, as if they had run out. Pages of 64 tokens rarely do."""
        self._num_calls += 1
        scheduler = self.engine.scheduler
        if self._num_calls % 3 == 0 and len(scheduler.running) > 1:  # the oldest goes on, so there is an end
            scheduler._preempt(scheduler.running[-1])

    def finish(self, disturb: Callable[["Driver"], None] = calm) -> None:
        """Run until nothing is left, with a disturbance before every step; then the audit."""
        while self.engine.has_work:
            disturb(self)
            self.step()
        self.engine.scheduler.check()
        assert self.engine.pages.num_held == 0


def run_together(engine: Engine, requests: list[Request], disturb: Callable[[Driver], None] = calm) -> list[Story]:
    """All at once. Returns the stories in order of requests and their sequences, cached tokens left out."""
    driver = Driver(engine)
    for i, request in enumerate(requests):
        driver.submit(f"r{i}", request)
    driver.finish(disturb)
    for story in driver.stories.values():
        story.num_cached_tokens = 0
    return list(driver.stories.values())


def run_alone(engine: Engine, requests: list[Request]) -> list[Story]:
    """One after the other."""
    return [story for request in requests for story in run_together(engine, [request])]


def golden_cases() -> list[dict]:
    """What transformers computed for the shipped model; see `about` in the file."""
    return json.loads((MODEL_FOLDER / "expected.json").read_text())["cases"]
