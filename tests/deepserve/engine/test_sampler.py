"""From logits to tokens: penalties, bias, bans and log-probabilities against formulas in numpy."""

from array import array

import numpy as np
import pytest
import torch

from deepserve.engine.request import SamplingParams
from deepserve.engine.rows import Rows
from deepserve.engine.sampler import Sampler
from deepserve.engine.step import RowFill
from hw.cpu.ops import CpuOps
from hw.cpu.runtime import CpuRuntime

VOCAB_SIZE = 50
PROMPT = [3, 7, 7, 20]
GENERATED = [9, 7, 9, 9, 30, 3]


class RecordingOps(CpuOps):
    """Keeps the logits that were drawn from."""

    def sample(self, logits, inputs):
        self.drawn_from = logits.clone()
        return super().sample(logits, inputs)


def make_sampler(num_rows: int = 4) -> Sampler:
    return Sampler(RecordingOps(), Rows(num_rows, 1), VOCAB_SIZE, CpuRuntime())


def fill(sampler: Sampler, row: int, *, prompt=PROMPT, generated=(), ends=(), sequence_idx=0, **params) -> None:
    checked = SamplingParams(**{"max_tokens": 20, "seed": 5, "temperature": 0.0, **params})
    tokens = array("i", [*prompt, *generated]).tobytes()
    sampler.rows._fill(RowFill(row, sequence_idx, len(prompt), tokens, [0], checked, tuple(ends)))
    sampler.forget([row])


def draw(sampler: Sampler, logits: torch.Tensor, rows: list[int], positions: list[int]):
    """One token a row, and log-probabilities by index into `rows`, as the host gets them. Nothing is counted as generated."""
    told = torch.tensor(positions, dtype=torch.int64)
    tokens, wanted = sampler.draw(logits, [(row, 1) for row in rows], told, torch.zeros_like(told))
    return tokens.tolist(), {} if wanted is None else wanted.unpack(wanted.tensors)


def processed(sampler: Sampler, logits: torch.Tensor, rows: list[int], positions: list[int]) -> np.ndarray:
    draw(sampler, logits.clone(), rows, positions)
    return sampler.ops.drawn_from.numpy()


def penalized(logits: np.ndarray, prompt: list[int], generated: list[int], presence=0.0, frequency=0.0, repetition=1.0) -> np.ndarray:
    """Repetition divides positive scores and multiplies negative ones, over prompt and output; the others subtract, over the output."""
    out = logits.astype(np.float64).copy()
    for token in set(prompt) | set(generated):
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token in set(generated):
        out[token] -= frequency * generated.count(token) + presence
    return out


# Penalties, bias, bans

PENALTIES = {
    "presence": {"presence": 1.5},
    "negative presence": {"presence": -1.5},
    "frequency": {"frequency": 0.7},
    "repetition": {"repetition": 1.3},
    "repetition below 1": {"repetition": 0.5},
    "all": {"presence": 0.5, "frequency": -0.25, "repetition": 1.1},
}


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties(name):
    numbers = PENALTIES[name]
    sampler = make_sampler()
    params = {f"{key}_penalty": value for key, value in numbers.items()}
    fill(sampler, 1, generated=GENERATED, **params)
    fill(sampler, 2, generated=GENERATED)
    logits = torch.randn(2, VOCAB_SIZE) * 3
    for num_generated in (0, 1, 2, 5, 6):
        fill(sampler, 1, generated=GENERATED[:num_generated], **params)
        position = len(PROMPT) + num_generated
        found = processed(sampler, logits, [2, 1], [position, position])
        np.testing.assert_array_equal(found[0], logits[0].numpy())
        wanted = penalized(logits[1].numpy(), PROMPT, GENERATED[:num_generated], **numbers)
        np.testing.assert_allclose(found[1], wanted, rtol=1e-5, atol=1e-5)


def test_drafts_count_before_the_draws_behind_them():
    """Three draws of a run: behind the latest token, behind one draft, behind two, one of them a token seen before."""
    sampler = make_sampler()
    fill(sampler, 0, generated=GENERATED)
    fill(sampler, 1, generated=GENERATED[:2], presence_penalty=0.5, frequency_penalty=1.0, repetition_penalty=1.2)
    logits = torch.randn(4, VOCAB_SIZE)
    inputs = torch.tensor([0, GENERATED[1], 40, GENERATED[0]])
    sampler.draw(logits.clone(), [(0, 1), (1, 3)], torch.tensor([10, 6, 7, 8]), inputs)
    found = sampler.ops.drawn_from.numpy()
    np.testing.assert_array_equal(found[0], logits[0].numpy())
    for j in range(3):
        wanted = penalized(logits[1 + j].numpy(), PROMPT, [*GENERATED[:2], 40, GENERATED[0]][: 2 + j], 0.5, 1.0, 1.2)
        np.testing.assert_allclose(found[1 + j], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_accepted", [0, 1, 2])
def test_draws_are_counted_as_far_as_drafts_stood(num_accepted):
    sampler = make_sampler()
    fill(sampler, 0, generated=GENERATED[:2], frequency_penalty=1.0)
    logits = torch.randn(1, VOCAB_SIZE)
    processed(sampler, logits, [0], [6])
    sampler.count([(0, 3)], torch.tensor([40, 41, 40]), torch.tensor([num_accepted]))
    found = processed(sampler, logits, [0], [7 + num_accepted])
    wanted = penalized(logits[0].numpy(), PROMPT, [*GENERATED[:2], *[40, 41, 40][: num_accepted + 1]], frequency=1.0)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-6)


def test_a_token_drawn_again_is_counted_once():
    """Both steps are discarded: the row is filled anew, and what was counted since is forgotten."""
    sampler = make_sampler()
    logits = torch.randn(1, VOCAB_SIZE)
    for token in (40, 41):
        fill(sampler, 0, generated=GENERATED[:2], frequency_penalty=1.0)
        processed(sampler, logits, [0], [len(PROMPT) + 2])
        sampler.count([(0, 1)], torch.tensor([token]), torch.empty(0, dtype=torch.int64))
        found = processed(sampler, logits, [0], [len(PROMPT) + 3])
        wanted = penalized(logits[0].numpy(), PROMPT, [*GENERATED[:2], token], frequency=1.0)
        np.testing.assert_allclose(found[0], wanted, rtol=1e-6)


def test_a_new_tenant_of_a_row_is_counted_anew():
    sampler = make_sampler()
    fill(sampler, 0, generated=GENERATED, repetition_penalty=2.0, presence_penalty=1.0)
    logits = torch.randn(1, VOCAB_SIZE)
    processed(sampler, logits, [0], [10])
    fill(sampler, 0, prompt=[1], generated=[2], repetition_penalty=2.0, presence_penalty=1.0)
    found = processed(sampler, logits, [0], [2])
    np.testing.assert_allclose(found[0], penalized(logits[0].numpy(), [1], [2], presence=1.0, repetition=2.0), rtol=1e-6)


def test_logit_bias():
    sampler = make_sampler()
    bias = {0: 2.5, 17: -100.0, 49: 0.25}
    fill(sampler, 3, logit_bias=bias)
    fill(sampler, 0)
    logits = torch.randn(2, VOCAB_SIZE)
    found = processed(sampler, logits, [0, 3], [4, 4])
    wanted = logits.numpy().copy()
    for token, value in bias.items():
        wanted[1, token] += np.float32(value)
    np.testing.assert_array_equal(found, wanted)


def test_bias_comes_behind_penalties():
    sampler = make_sampler()
    fill(sampler, 0, repetition_penalty=2.0, logit_bias={3: 1.0})
    logits = torch.ones(1, VOCAB_SIZE)
    assert processed(sampler, logits, [0], [4])[0, 3] == 1.0 / 2 + 1.0


@pytest.mark.parametrize(("num_generated", "banned"), [(0, True), (1, True), (2, False), (3, False)])
def test_end_tokens_wait_for_min_tokens(num_generated, banned):
    sampler = make_sampler()
    fill(sampler, 0, generated=GENERATED, ends=[1, 8], min_tokens=2, logit_bias={8: 100.0})
    fill(sampler, 1, generated=GENERATED, ends=[1, 8])
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, 1] = 50.0
    found = processed(sampler, logits, [0, 1], [len(PROMPT) + num_generated] * 2)
    assert (found[0, [1, 8]] == -np.inf).all() == banned
    assert np.isfinite(np.delete(found[0], [1, 8])).all() and np.isfinite(found[1]).all()


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1}])
def test_a_ban_of_every_token_stops_nothing(params):
    sampler = make_sampler()
    fill(sampler, 0, ends=range(VOCAB_SIZE), min_tokens=2, logprobs=2, **params)
    tokens, found = draw(sampler, torch.randn(1, VOCAB_SIZE), [0], [4])
    assert 0 <= tokens[0] < VOCAB_SIZE
    assert np.isfinite(found[0].logprobs).all()


EXTREMES = [
    {"temperature": 100.0},
    {"temperature": 1.1e-5, "top_p": 1e-6},
    {"temperature": 1.0, "top_k": 1 << 31, "top_p": 0.999, "min_p": 1.0},
    {"temperature": 1.0, "repetition_penalty": 0.01, "presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"temperature": 1.1e-5, "repetition_penalty": 100.0, "logit_bias": {0: 100.0, 1: -100.0}},
    {"temperature": 1.0, "seed": (1 << 63) - 1},
    {"temperature": 1.0, "seed": -(1 << 63), "sequence_idx": 127},
]


@pytest.mark.parametrize("params", EXTREMES)
def test_extreme_params_draw_a_token(params):
    sampler = make_sampler()
    fill(sampler, 0, generated=GENERATED, **params)
    tokens, _ = draw(sampler, torch.randn(1, VOCAB_SIZE) * 30, [0], [8])
    assert 0 <= tokens[0] < VOCAB_SIZE


# Draws


def test_a_draw_depends_on_its_own_row_only():
    sampler = make_sampler(8)
    settings = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2, "frequency_penalty": 1.0},
        {"temperature": 1.0, "logit_bias": {4: 3.0}, "top_k": 7, "top_p": 0.9},
        {"temperature": 1.0, "min_tokens": 10, "ends": [5, 6]},
        {"temperature": 1.0, "sequence_idx": 1},
    ]
    for row, params in enumerate(settings):
        fill(sampler, row, generated=GENERATED, seed=row // 2, **params)
    logits = torch.randn(8, VOCAB_SIZE)
    for position in range(4, 10):
        together, _ = draw(sampler, logits.clone(), list(range(8)), [position] * 8)
        alone = [draw(sampler, logits[row : row + 1].clone(), [row], [position])[0][0] for row in range(8)]
        backwards, _ = draw(sampler, logits.flip(0), list(range(7, -1, -1)), [position] * 8)
        assert together == alone == backwards[::-1]


def test_noise_is_keyed_by_seed_sequence_and_position():
    sampler = make_sampler(3)
    fill(sampler, 0, temperature=1.0, seed=1)
    fill(sampler, 1, temperature=1.0, seed=2)
    fill(sampler, 2, temperature=1.0, seed=1, sequence_idx=1)
    flat = torch.zeros(3, VOCAB_SIZE)
    draws = np.array([draw(sampler, flat.clone(), [0, 1, 2], [position] * 3)[0] for position in range(4, 24)])
    again = np.array([draw(sampler, flat.clone(), [0, 1, 2], [position] * 3)[0] for position in range(4, 24)])
    assert (draws == again).all()
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (draws[:, a] != draws[:, b]).sum() > 10
    assert len(set(draws[:, 0])) > 8


def test_greedy_takes_the_best():
    sampler = make_sampler(2)
    fill(sampler, 0)
    fill(sampler, 1, temperature=1.0)
    logits = torch.randn(2, VOCAB_SIZE)
    assert draw(sampler, logits.clone(), [0, 1], [4, 4])[0][0] == logits[0].argmax()
    assert draw(sampler, torch.empty(0, VOCAB_SIZE), [], []) == ([], {})


# Log-probabilities


def reference_logprobs(logits: torch.Tensor) -> np.ndarray:
    wide = logits.double().numpy()
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def check_logprobs(found, token: int, wanted: np.ndarray, num: int) -> None:
    best = np.argsort(-wanted)[:num].tolist()
    assert found.token_ids == [token, *best]
    np.testing.assert_allclose(found.logprobs, wanted[found.token_ids], atol=1e-5)
    assert found.rank == 1 + (wanted > wanted[token]).sum()


def test_logprobs_are_of_the_raw_distribution():
    sampler = make_sampler(4)
    fill(sampler, 0, logprobs=0, temperature=1.3, top_k=2, frequency_penalty=2.0, logit_bias={5: 90.0}, generated=GENERATED)
    fill(sampler, 1)
    fill(sampler, 2, logprobs=5, temperature=1.0)
    fill(sampler, 3, logprobs=64)
    logits = torch.randn(4, VOCAB_SIZE) * 2
    tokens, found = draw(sampler, logits.clone(), [3, 1, 0, 2], [4] * 4)
    wanted = reference_logprobs(logits)
    assert set(found) == {0, 2, 3}
    for i, num in ((0, VOCAB_SIZE), (2, 0), (3, 5)):
        check_logprobs(found[i], tokens[i], wanted[i], num)
    assert tokens[2] == 5 and found[2].rank > 1  # the bias chose it, its log-probability does not know


@pytest.mark.parametrize("num", [0, 3])
def test_prompt_logprobs(num):
    sampler = make_sampler()
    prompt = [int(token) for token in np.random.randint(0, VOCAB_SIZE, 12)]
    fill(sampler, 2, prompt=prompt, prompt_logprobs=num)
    logits = torch.randn(11, VOCAB_SIZE)
    wanted = reference_logprobs(logits)
    tiles = sampler.prompt_logprobs(logits[:4], 2, 1), sampler.prompt_logprobs(logits[4:], 2, 5)
    found = [position for tile in tiles for position in tile.unpack(tile.tensors).values()]
    assert len(found) == 11
    for i, position in enumerate(found):
        check_logprobs(position, prompt[i + 1], wanted[i], num)
