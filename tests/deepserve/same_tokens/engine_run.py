"""Runs prompts through an engine in one of the grid's ways and compares what comes out with the reference."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from deepserve.config import EngineArgs, SpeculativeConfig
from deepserve.engine.engine import Engine
from deepserve.engine.request import SamplingParams, validate
from deepserve.messages import Load, Submit
from tests.deepserve.same_tokens.grid import Case
from tests.deepserve.same_tokens.reference import Reference

MAX_MODEL_LEN = 192
TOLERANCE = 1e-4  # of a log-probability against the reference
# Too few for what would run at once: 16 prompts need 27 pages at their ends, four sequences of one prompt 12, or 9 with a shared one.
FEW_PAGES = {"16 prompts": 6, "alone": 4}


@dataclass
class Answer:
    """What one sequence got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] | None = None  # of each prompt token but the first
    finish_reason: str | None = None


def engine_args(folder: Path, case: Case, *, batch_invariant: bool = False) -> EngineArgs:
    """With the prefix cache few prompts run at once, so that the last ones find what the first ones left."""
    return EngineArgs(
        model=str(folder),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8 if case.prefix_cache else 16,
        max_num_batched_tokens=256 if case.prefix_cache else 2048,
        enable_chunked_prefill=case.chunk is not None,
        long_prefill_token_threshold=case.chunk or 0,
        enable_prefix_caching=case.prefix_cache,
        num_pages=FEW_PAGES[case.company] if case.preempt else 64,
        batch_invariant=batch_invariant,
        async_scheduling=case.asynchronous,
        speculative_config=SpeculativeConfig(num_speculative_tokens=case.num_drafts, adaptive=case.adaptive),
        num_threads=1,
        cpu_kernels=case.kernels,
    )


def run_case(engine: Engine, case: Case, references: list[Reference]) -> list[tuple[Reference, Answer]]:
    """All answers beside what they should be. Asserts that what the case names has happened: prefix hits, preemption."""
    n = 1
    rounds = [references]
    if case.company == "alone":
        # Preempted by, or finding a prefix of, nobody but itself: as four sequences, or asked again.
        n = 4 if case.preempt else 1
        one = [r for r in references if len(r.prompt) == 127]
        rounds = [one, one] if case.prefix_cache else [one]
    found = [pair for some in rounds for pair in run(engine, some, n=n, prompt_logprobs=not case.prefix_cache)]
    load = engine.load()
    assert load.num_generated_tokens == sum(len(reference.output) for reference, _ in found)
    # With drafts and few pages it depends on how sequences move on: those of one prompt may be through before they get in each other's
    # way, and pages of a prefix may be taken before somebody asks for it.
    unsure = case.preempt and case.num_drafts
    assert (unsure and case.company == "alone") or (load.num_preemptions > 0) == case.preempt, load
    assert (unsure and case.prefix_cache) or (load.num_prefix_hit_tokens > 0) == case.prefix_cache, load
    assert (load.num_draft_tokens > 0) == (case.num_drafts > 0), load
    return found


def run(engine: Engine, references: list[Reference], *, n: int = 1, prompt_logprobs: bool = False) -> list[tuple[Reference, Answer]]:
    """Submit everything at once and step until all is done; the engine must hold nothing afterwards."""
    for i, reference in enumerate(references):
        params = SamplingParams(
            n=n,
            temperature=0.0,
            max_tokens=len(reference.output),
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=0 if prompt_logprobs else None,
        )
        engine.submit(Submit(str(i), reference.prompt, validate(reference.prompt, params, engine.limits)))
    answers = {(str(i), j): Answer() for i in range(len(references)) for j in range(n)}
    while engine.has_work:
        outputs = engine.step()
        engine.scheduler.check()
        for output in outputs:
            answer = answers[output.request_id, output.index]
            assert answer.finish_reason is None, f"news of {output.request_id} after its end"
            answer.tokens += output.token_ids
            answer.logprobs += [position.logprobs[0] for position in output.logprobs]
            answer.finish_reason = output.finish_reason
            if output.prompt_logprobs is not None:
                answer.prompt_logprobs = [position.logprobs[0] for position in output.prompt_logprobs[1:]]
    _check_empty(engine.load())
    for (_, index), answer in answers.items():
        assert (answer.prompt_logprobs is not None) == (prompt_logprobs and index == 0), "prompt log-probabilities come with sequence 0"
    return [(references[int(request_id)], answer) for (request_id, _), answer in answers.items()]


def _check_empty(load: Load) -> None:
    assert (load.num_running, load.num_waiting, load.num_held_pages) == (0, 0, 0), load


def compare(found: Iterable[tuple[Reference, Answer]]) -> None:
    """AssertionError names the prompt and the first position that differs."""
    for reference, answer in found:
        name = f"prompt of {len(reference.prompt)} tokens"
        assert answer.tokens == reference.output, f"{name}: got {answer.tokens}, the reference says {reference.output}"
        assert answer.finish_reason == "length", f"{name}: {answer.finish_reason}"
        _close(answer.logprobs, reference.logprobs, f"{name}, output")
        if answer.prompt_logprobs is not None:
            _close(answer.prompt_logprobs, reference.prompt_logprobs, f"{name}, prompt")


def _close(got: list[float], wanted: list[float], name: str) -> None:
    assert len(got) == len(wanted), f"{name}: {len(got)} log-probabilities for {len(wanted)} tokens"
    for position, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert math.isclose(a, b, rel_tol=0.0, abs_tol=TOLERANCE), (
            f"{name}, position {position}: log-probability {a}, the reference says {b}"
        )
