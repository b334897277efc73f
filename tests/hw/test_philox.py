"""The noise behind every draw: Random123's known answers, then the statistics of the Gumbel values and of their keys."""

import math

import pytest
import torch

from hw.cpu.reference.philox import gumbel_noise, philox

EULER = 0.5772156649015329

# Random123's kat_vectors, philox4x32-10: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, expected: str):
    assert [f"{int(word):08x}" for word in philox(words(counter), words(key))] == expected.split()


def noise(seed=0, sequence=0, position=0, vocab_size: int = 1000) -> torch.Tensor:
    """Rows by broadcasting the three keys."""
    seed, sequence, position = torch.broadcast_tensors(*(torch.as_tensor(value).reshape(-1) for value in (seed, sequence, position)))
    return gumbel_noise(seed, sequence, position, vocab_size)


def test_layout_of_counter_and_key():
    seed = -(2**62) + 12345  # a negative seed is its two's complement
    row = noise(seed, 3, 70_000, 11)[0]
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for token in range(11):
        bits = philox(tuple(map(torch.tensor, (token // 4, 70_000, 3, 0))), (torch.tensor(low), torch.tensor(high)))[token % 4]
        assert row[token].item() == pytest.approx(-math.log(-math.log((int(bits) + 0.5) / 2**32)), rel=1e-14)


def test_a_row_depends_on_its_own_keys_only():
    seeds, sequences, positions = torch.randint(-(2**63), 2**63 - 1, (50,)), torch.randint(0, 9, (50,)), torch.randint(0, 10**6, (50,))
    together = noise(seeds, sequences, positions, 37)
    for i in range(50):
        assert torch.equal(noise(seeds[i], sequences[i], positions[i], 37)[0], together[i])
    # A larger vocabulary only adds tokens.
    assert torch.equal(noise(seeds, sequences, positions, 130)[:, :37], together)


def test_no_two_keys_share_their_noise():
    seeds = torch.tensor([0, 1, -1, 2**31, 2**32, 2**32 + 1, -(2**63), 2**63 - 1])
    grid = torch.cartesian_prod(seeds, torch.arange(4), torch.arange(6))
    rows = noise(*grid.T, vocab_size=8)
    assert len({tuple(row) for row in rows.tolist()}) == len(grid)


def test_moments_of_a_gumbel():
    values = noise(torch.arange(1000), vocab_size=1000).flatten()  # a million: standard errors are 0.0013 and 0.0033
    assert values.isfinite().all()
    assert values.mean().item() == pytest.approx(EULER, abs=4 * 0.0013)
    assert values.var().item() == pytest.approx(math.pi**2 / 6, abs=4 * 0.0033)
    skewness = ((values - values.mean()) / values.std()).pow(3).mean().item()
    assert skewness == pytest.approx(1.1395, abs=0.05)


@pytest.mark.parametrize("axis", ["seed", "high half of the seed", "sequence", "position", "token"])
def test_uniform_along_every_key(axis: str):
    """Chi-square of the implied uniforms in 256 cells; 255 degrees of freedom, 5 standard deviations of sqrt(2 * 255)."""
    many = torch.arange(50_000)
    if axis == "token":
        values = noise(7, 1, 5, vocab_size=50_000)[0]
    else:
        keys = {"seed": (many, 0, 0), "high half of the seed": (many << 32, 0, 0), "sequence": (7, many, 5), "position": (7, 1, many)}[axis]
        values = noise(*keys, vocab_size=1)[:, 0]
    uniform = (-(-values).exp()).exp()
    counts = torch.histc(uniform, 256, 0.0, 1.0)
    expected = len(values) / 256
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("axis", ["seed", "sequence", "position", "token"])
@pytest.mark.parametrize("distance", [1, 2, 4, 256])
def test_neighbours_are_not_correlated(axis: str, distance: int):
    """Correlation of 100,000 pairs has a standard error of 0.0032."""
    first = torch.arange(1000)
    keys = {"seed": 5, "sequence": 1, "position": 2}
    if axis == "token":
        rows = noise(seed=first, vocab_size=100 + distance)
        a, b = rows[:, :100], rows[:, distance:]
    else:
        a = noise(**keys | {axis: first}, vocab_size=100)
        b = noise(**keys | {axis: first + distance}, vocab_size=100)
    correlation = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1].item()
    assert abs(correlation) < 5 * 0.0032
