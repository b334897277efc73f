"""What `sample` draws: the filters against brute force, and the joint distribution of several draws against the exact product.

The distribution test is also run on samplers with a planted mistake, each of which it must reject.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from hw.api import SampleInputs
from hw.cpu.ops import CpuOps
from hw.cpu.reference import philox
from hw.cpu.reference.ops import ReferenceOps
from hw.select import open_backend
from hw.testing import available_backends

OPENED = {name: open_backend(name) for name in available_backends()}
VARIANTS = {
    "reference": ReferenceOps(),
    "cpu-invariant": open_backend("cpu", batch_invariant=True).ops,
    **{name: backend.ops for name, backend in OPENED.items()},
}
DEVICES = {name: backend.runtime.device for name, backend in OPENED.items()}


def sample(name: str, logits: torch.Tensor, inputs: SampleInputs) -> torch.Tensor:
    """Tokens on the CPU, whatever the device of the variant."""
    device = DEVICES.get(name, torch.device("cpu"))
    fields = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    moved = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in fields.items()}
    return VARIANTS[name].sample(logits.to(device), SampleInputs(**moved)).cpu()


def processed(logits: np.ndarray, temperature: float, top_k: float, top_p: float, min_p: float) -> np.ndarray:
    """Probabilities after temperature, min-p, top-k and top-p in float64; each filter sees what the one before left, renormalised."""
    probs = np.exp((logits - logits.max()) / temperature)
    probs[probs < min_p * probs.max()] = 0.0
    if top_k:
        kth = sorted(probs, reverse=True)[int(min(top_k, len(probs))) - 1]
        probs[probs < kth] = 0.0  # tokens that tie with the k-th stay
    probs /= probs.sum()
    if top_p < 1:
        total, border = 0.0, 0.0
        for border in sorted(probs, reverse=True):
            total += border
            if total >= top_p:
                break
        probs[probs < border] = 0.0
    return probs / probs.sum()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_draw_is_the_best_noisy_token_that_brute_force_keeps(name: str):
    num_rows, vocab = 300, 9
    logits = (torch.randn(num_rows, vocab) * 3).round() / 2  # half-integers: ties at the borders
    temperature = torch.rand(num_rows) + 0.2
    top_k = torch.randint(0, vocab + 3, (num_rows,))
    top_p = torch.where(torch.rand(num_rows) < 0.7, torch.rand(num_rows), 1.0)
    min_p = torch.where(torch.rand(num_rows) < 0.5, torch.rand(num_rows), 0.0)
    keys = torch.randint(0, 2**62, (num_rows,)), torch.randint(0, 4, (num_rows,)), torch.randint(0, 999, (num_rows,))
    tokens = sample(name, logits, SampleInputs(temperature, top_k, top_p, min_p, *keys, True, True))
    noise = philox.gumbel_noise(*keys, vocab).numpy()
    kept_sizes = set()
    for i in range(num_rows):
        probs = processed(logits[i].double().numpy(), *(float(x[i]) for x in (temperature, top_k, top_p, min_p)))
        kept_sizes.add(int((probs > 0).sum()))
        with np.errstate(divide="ignore"):
            assert int(tokens[i]) == (np.log(probs) + noise[i]).argmax(), f"row {i}"
    assert kept_sizes == set(range(1, vocab + 1))  # the case mix reaches from one token left to all


@pytest.mark.parametrize("name", VARIANTS)
def test_borders_of_the_filters(name: str):
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()  # exact in fp32 up to a last bit

    def kept(top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
        num = 100
        ones, none = torch.ones(num), torch.zeros(num, dtype=torch.int64)
        inputs = SampleInputs(ones, none + top_k, ones * top_p, ones * min_p, torch.arange(num), none, none, True, True)
        return set(sample(name, logits.expand(num, -1).contiguous(), inputs).tolist())

    assert kept() == kept(top_k=3) == kept(top_k=4) == kept(top_k=99) == {0, 1, 2, 3}  # top-k 3: the fourth ties with the third
    assert kept(top_k=2) == {0, 1}
    assert kept(top_k=1) == kept(top_p=0.49) == kept(top_p=1e-20) == kept(top_p=1e-50) == kept(min_p=1.0) == {0}
    assert kept(top_p=0.51) == kept(top_p=0.74) == {0, 1}  # the token that crosses top-p stays
    assert kept(top_p=0.76) == {0, 1, 2, 3}
    assert kept(min_p=0.24) == {0, 1, 2, 3}
    assert kept(min_p=0.26) == {0, 1}
    assert kept(top_k=2, top_p=0.6) == {0}  # top-p sees 2/3 and 1/3
    assert kept(min_p=0.3, top_p=0.66) == {0}


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_and_sampled_rows_share_a_batch(name: str):
    logits = torch.randn(40, 50)
    temperature = (torch.arange(40) % 2).float()
    ones, none = torch.ones(40), torch.zeros(40, dtype=torch.int64)
    tokens = sample(name, logits, SampleInputs(temperature, none, ones, 0 * ones, torch.arange(40), none, none, True, False))
    greedy = logits.argmax(-1)
    assert torch.equal(tokens[::2], greedy[::2])
    assert not torch.equal(tokens[1::2], greedy[1::2])


Draw = Callable[[torch.Tensor, SampleInputs], torch.Tensor]
NUM_DRAWS, VOCAB = 20_000, 16
TEMPERATURE, TOP_K, TOP_P, MIN_P = 0.8, 7, 0.9, 0.02
# (sequence index, position) of the three draws that one seed makes.
PLACES = {"consecutive positions": [(0, 41), (0, 42), (0, 43)], "sequences of one request": [(0, 41), (1, 41), (2, 41)]}


def draws(draw: Draw, logits: torch.Tensor, places: list[tuple[int, int]]) -> torch.Tensor:
    """Tokens `[NUM_DRAWS, 3]`: neighbouring seeds, each drawing from logits `[3, VOCAB]` at the three places."""
    num_rows = NUM_DRAWS * 3
    sequence, position = (torch.tensor(column).repeat(NUM_DRAWS) for column in zip(*places, strict=True))
    ones, seed = torch.ones(num_rows), torch.arange(NUM_DRAWS).repeat_interleave(3)
    filters = torch.full((num_rows,), TOP_K), TOP_P * ones, MIN_P * ones
    inputs = SampleInputs(TEMPERATURE * ones, *filters, seed, sequence, position, True, True)
    return draw(logits.repeat(NUM_DRAWS, 1), inputs).view(NUM_DRAWS, 3)


def chi_square(tokens: torch.Tensor, probs: list[np.ndarray]) -> tuple[float, float]:
    """(statistic, threshold) over the joint cells; threshold 6 standard deviations above the mean. Rare cells share one."""
    cells = np.ravel_multi_index(tuple(tokens.T.numpy()), (VOCAB,) * 3)
    counts = np.bincount(cells, minlength=VOCAB**3)
    expected = NUM_DRAWS * np.array([math.prod(cell) for cell in itertools.product(*probs)])
    if counts[expected == 0].any():
        return math.inf, 0.0
    often = expected >= 5
    counts = np.append(counts[often], counts[~often].sum())
    expected = np.append(expected[often], max(expected[~often].sum(), 1e-9))
    freedom = len(expected) - 1
    return float(((counts - expected) ** 2 / expected).sum()), freedom + 6 * math.sqrt(2 * freedom)


class DropsTheLast(CpuOps):
    """Top-p one token short."""

    def _filter_rows(self, scores, inputs, rows):
        super()._filter_rows(scores, inputs, rows)
        lowest = scores.masked_fill(scores == -torch.inf, torch.inf).argmin(-1)
        scores.scatter_(1, lowest[:, None], -torch.inf)


class KeepsOneMore(CpuOps):
    """Top-p one token long."""

    def _filter_rows(self, scores, inputs, rows):
        before = scores.clone()
        super()._filter_rows(scores, inputs, rows)
        extra = before.masked_fill(scores > -torch.inf, -torch.inf).argmax(-1)[:, None]
        scores.scatter_(1, extra, before.gather(1, extra))


def scaled(seed, sequence, position, vocab_size):
    return 0.9 * philox.gumbel_noise(seed, sequence, position, vocab_size)


def without_position(seed, sequence, position, vocab_size):
    return philox.gumbel_noise(seed, sequence, 0 * position, vocab_size)


def without_sequence(seed, sequence, position, vocab_size):
    return philox.gumbel_noise(seed, 0 * sequence, position, vocab_size)


def without_token(seed, sequence, position, vocab_size):
    return philox.gumbel_noise(seed, sequence, position, 4).repeat(1, vocab_size // 4)


PLANTED = {
    "noise scaled by 0.9": (CpuOps(), scaled, "consecutive positions"),
    "noise keyed without position": (CpuOps(), without_position, "consecutive positions"),
    "noise keyed without sequence": (CpuOps(), without_sequence, "sequences of one request"),
    "four tokens share their noise": (CpuOps(), without_token, "consecutive positions"),
    "top-p drops the last token": (DropsTheLast(), philox.gumbel_noise, "consecutive positions"),
    "top-p keeps one more": (KeepsOneMore(), philox.gumbel_noise, "consecutive positions"),
}


def joint_test(draw: Draw, places: str) -> tuple[float, float]:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)) * 1.5
    probs = [processed(row.double().numpy(), TEMPERATURE, TOP_K, TOP_P, MIN_P) for row in logits]
    assert all(3 <= (p > 0).sum() <= 7 for p in probs), "the filters should bite without leaving one token"
    return chi_square(draws(draw, logits, PLACES[places]), probs)


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "reference"])
def test_joint_distribution_is_the_product(name: str, places: str):
    statistic, threshold = joint_test(partial(sample, name), places)
    assert statistic < threshold


@pytest.mark.parametrize("mistake", PLANTED)
def test_the_distribution_test_rejects(mistake: str, monkeypatch: pytest.MonkeyPatch):
    ops, noise, places = PLANTED[mistake]
    monkeypatch.setattr("hw.cpu.ops.gumbel_noise", noise)
    statistic, threshold = joint_test(ops.sample, places)
    assert statistic > 1.2 * threshold
