"""Batching, chunking, prefix hits and preemption change no greedy token: engine against transformers, fp32.

Every prompt keeps more than 1e-3 between what its gates and its greedy choices took and what they left (asserted here, from
transformers' numbers), far more than rounding moves; nothing is skipped for near ties. same_tokens/find_prompts.py found the prompts.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepserve.engine.engine import Engine, resolve
from deepserve.model.hub import SHIPPED_FOLDER
from tests.deepserve.same_tokens.engine_run import Answer, compare, engine_args, run, run_case
from tests.deepserve.same_tokens.find_prompts import DATA, SHIPPED
from tests.deepserve.same_tokens.grid import DRAFTED, DRAFTED_PAIRWISE, FULL, KINDS, PAIRWISE, Case, pairs
from tests.deepserve.same_tokens.reference import Reference, refer
from tests.deepserve.tiny_models import add_mtp, load_reference

MIN_MARGIN = 1e-3
# Company that may not move a bit of anyone's log-probabilities: chunks, hits, preemption, few and many tokens in a step.
BITWISE = [("16 prompts", 7, True, True), ("16 prompts", 64, False, True), ("16 prompts", None, True, False)]
PROMPTS = json.loads(DATA.read_text())


@pytest.fixture(autouse=True)
def one_thread(seed: int):
    """These matrices are too small to be worth sharing; on a busy machine a second thread costs more than it does."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder_of(tiny_model: Callable[..., Path]) -> Callable[[str], Path]:
    return lambda kind: SHIPPED_FOLDER if kind == SHIPPED else tiny_model(kind, PROMPTS[kind]["seed"])


@pytest.fixture(scope="session")
def references(folder_of: Callable[[str], Path]) -> Callable[[str], list[Reference]]:
    """`references("v3")`: what transformers says about a model's prompts, computed once."""
    made: dict[str, list[Reference]] = {}

    def get(kind: str) -> list[Reference]:
        if kind not in made:
            model = load_reference(folder_of(kind))
            made[kind] = [refer(model, case["prompt"], case["output"]) for case in PROMPTS[kind]["cases"]]
        return made[kind]

    return get


@pytest.fixture(scope="session")
def v3_with_mtp(folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_mtp(folder_of("v3"), tmp_path_factory.mktemp("v3-mtp"))


@pytest.fixture
def engine_for(folder_of: Callable[[str], Path], request: pytest.FixtureRequest) -> Callable[..., Engine]:
    def build(case: Case, **flags: bool) -> Engine:
        with_mtp = case.num_drafts and case.kind != SHIPPED
        folder = request.getfixturevalue("v3_with_mtp") if with_mtp else folder_of(case.kind)
        return Engine(resolve(engine_args(folder, case, **flags)), progress=False)

    return build


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_clear_and_as_long_as_the_cases_need(kind, references):
    found = references(kind)
    assert len(found) == 16
    for reference in found:
        assert len(reference.output) == PROMPTS[kind]["num_new_tokens"] >= 8
        assert reference.token_margin > MIN_MARGIN, f"prompt of {len(reference.prompt)} tokens"
        assert reference.gate_margin > MIN_MARGIN, f"prompt of {len(reference.prompt)} tokens"
    lengths = [len(reference.prompt) for reference in found]
    assert {1, 63, 64, 65, 127, 128, 150} <= set(lengths)
    first_pages = [tuple(r.prompt[:64]) for r in found if len(r.prompt) > 64]
    assert len(first_pages) - len(set(first_pages)) >= 4, "too few prompts share a page"


@pytest.mark.parametrize("kind", KINDS)
def test_the_stored_continuation_is_what_transformers_generates(kind, references, folder_of):
    reference = next(r for r in references(kind) if len(r.prompt) == 31)
    num = len(reference.output)
    prompt = torch.tensor([reference.prompt])
    tokens = load_reference(folder_of(kind)).generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, min_new_tokens=num, max_new_tokens=num, eos_token_id=None
    )
    assert tokens[0, prompt.shape[1] :].tolist() == reference.output


@pytest.mark.parametrize(("full", "cover"), [(FULL, PAIRWISE), (DRAFTED, DRAFTED_PAIRWISE)], ids=["plain", "with drafts"])
def test_the_cover_meets_every_pair_of_settings(full, cover):
    missing = set().union(*map(pairs, full)) - set().union(*map(pairs, cover))
    assert not missing, sorted(map(str, missing))


@pytest.mark.parametrize("case", PAIRWISE + DRAFTED_PAIRWISE, ids=str)
def test_tokens_equal_the_reference(case, references, engine_for):
    compare(run_case(engine_for(case), case, references(case.kind)))


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in FULL + DRAFTED if case not in PAIRWISE + DRAFTED_PAIRWISE], ids=str)
def test_tokens_equal_the_reference_over_the_full_grid(case, references, engine_for):
    compare(run_case(engine_for(case), case, references(case.kind)))


@pytest.fixture(scope="session")
def alone(folder_of: Callable[[str], Path], references: Callable[[str], list[Reference]]) -> Callable[..., list[Answer]]:
    """`alone("v3")`: batch-invariant answers to a model's prompts, each with the engine to itself, uncut; computed once."""
    made: dict[tuple[str, str], list[Answer]] = {}

    def get(kind: str, kernels: str = "native") -> list[Answer]:
        if (kind, kernels) not in made:
            case = Case(kind, "alone", None, prefix_cache=False, preempt=False, kernels=kernels)
            engine = Engine(resolve(engine_args(folder_of(kind), case, batch_invariant=True)), progress=False)
            found = [pair for reference in references(kind) for pair in run(engine, [reference], prompt_logprobs=True)]
            compare(found)
            made[kind, kernels] = [answer for _, answer in found]
        return made[kind, kernels]

    return get


def check_bits(engine: Engine, case: Case, references: list[Reference], alone: list[Answer]) -> None:
    for (reference, answer), single in zip(run_case(engine, case, references), alone, strict=True):
        name = f"prompt of {len(reference.prompt)} tokens"
        assert answer.tokens == single.tokens, name
        assert answer.logprobs == single.logprobs, name
        if answer.prompt_logprobs is not None:
            assert answer.prompt_logprobs == single.prompt_logprobs, name


@pytest.mark.parametrize("way", BITWISE, ids=lambda way: str(Case("", *way))[2:])
@pytest.mark.parametrize(("kind", "kernels"), [("deepserve-tiny", "native"), ("v2", "native"), ("v3", "native"), ("v3", "torch")])
def test_batch_invariant_logprobs_have_the_same_bits_in_company(kind, kernels, way, references, alone, engine_for):
    case = Case(kind, *way, kernels=kernels)
    check_bits(engine_for(case, batch_invariant=True), case, references(kind), alone(kind, kernels))


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in FULL if case.company != "alone"], ids=str)
def test_batch_invariant_logprobs_have_the_same_bits_over_the_full_grid(case, references, alone, engine_for):
    check_bits(engine_for(case, batch_invariant=True), case, references(case.kind), alone(case.kind, case.kernels))


def scale_an_expert(engine: Engine) -> None:
    """One of sixteen experts of one layer, by a thousandth."""
    engine.runner.model.layers[1].moe.local.down[5] *= 1.001


def shift_rope(engine: Engine) -> None:
    """From position 40 on; a shift of all positions would be none, since rope is relative."""
    for layer in engine.runner.model.layers:
        table = layer.attention.table.clone()
        table[40:] = table[39:-1].clone()
        layer.attention.table = table


def forget_bias(engine: Engine) -> None:
    """The gates choose by score alone."""
    for layer in engine.runner.model.layers:
        if layer.moe is not None:
            layer.moe.gate.bias.zero_()


def take_any_page(engine: Engine) -> None:
    """The prefix cache takes any page for any other."""
    engine.pages.match = lambda tokens, salt: _first_published(engine, len(tokens))


def _first_published(engine: Engine, num_tokens: int) -> tuple[list[int], list[bytes]]:
    published = engine.pages._published
    if num_tokens <= engine.pages.page_size or not published:
        return [], []
    digest, (page, _) = next(iter(published.items()))
    return [page], [digest]


@pytest.mark.parametrize("plant", (scale_an_expert, shift_rope, forget_bias, take_any_page))
def test_a_planted_error_is_found(plant, references, engine_for):
    case = Case("v3", "16 prompts", 64, prefix_cache=True, preempt=False)
    engine = engine_for(case)
    plant(engine)
    with pytest.raises(AssertionError, match="the reference says"):
        compare(run_case(engine, case, references("v3")))


def test_an_engine_whose_bits_depend_on_company_is_found(references, alone, engine_for):
    """The native kernels' do not, asked for or not."""
    case = Case("v3", "16 prompts", 7, prefix_cache=False, preempt=False, kernels="torch")
    with pytest.raises(AssertionError, match="prompt of"):
        check_bits(engine_for(case, batch_invariant=False), case, references("v3"), alone("v3", "torch"))
