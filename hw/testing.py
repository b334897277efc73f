"""What tests and benches of kernels share: named grids of cases, tolerances by number format, a comparison that says where.

The grids hold shapes only, so that every backend and the benches read the same ones; drawing data is the test's work.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hw import select
from hw.api import Replicas

_TOLERANCES = {
    torch.float64: (1e-9, 1e-10),
    torch.float32: (2e-5, 2e-5),
    torch.float16: (4e-3, 4e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),  # two steps of 2^-7: one where the kernel rounds, one where its twin does
    torch.float8_e4m3fn: (0.1251, 2e-3),  # one step, where what was quantised had been rounded otherwise
}


def available_backends() -> list[str]:
    """Names that `hw.select.open_backend` takes and whose device torch sees here. That its libraries load is for the tests to find out."""
    present = {"cpu"}
    if torch.accelerator.is_available():
        present.add(torch.accelerator.current_accelerator().type)
    return [name for name in select.NAMES if name in present]


def variants() -> dict[str, dict[str, Any]]:
    """Ways to open a backend here whose results must agree: arguments of `open_backend` by a name for each."""
    found: dict[str, dict[str, Any]] = {name: {"name": name} for name in available_backends()}
    found["cpu-torch"] = {"name": "cpu", "cpu_kernels": "torch"}
    for name in ("cpu", "cpu-torch"):
        found[f"{name}-invariant"] = found[name] | {"batch_invariant": True}
    return found


def num_devices(name: str) -> int:
    """How many ranks a backend could run here, each with a device of its own; CPU ranks share one."""
    if name == "cpu" or name not in available_backends():
        return int(name == "cpu")
    return torch.accelerator.device_count()


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Raises RuntimeError where torch itself would wait for the device; waits on events, and inside other libraries, pass."""
    assert device.type == "cuda", f"torch can tell of waiting for an NVIDIA GPU, not for {device.type}"
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """(rtol, atol) for values of about 1 that differ in summation order; integers must be equal."""
    return _TOLERANCES.get(dtype, (0.0, 0.0))


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tol: tuple[float, float], what: str) -> None:
    """`|actual - expected| <= atol + rtol * |expected|` everywhere, infinities equal, no NaN on either side."""
    shapes = f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.shape == expected.shape, shapes
    if actual.numel() == 0:
        return
    a, e = actual.detach().cpu().double(), expected.detach().cpu().double()
    error = (a - e).abs()
    error[a == e] = 0.0  # equal infinities
    excess = error - (tol[1] + tol[0] * e.abs())
    excess[error == torch.inf] = torch.inf  # an infinite bound must not excuse it
    excess[error.isnan()] = torch.inf
    bad = excess > 0
    if not bad.any():
        return
    place = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    raise AssertionError(
        f"{what}: {int(bad.sum())} of {bad.numel()} values differ by more than rtol {tol[0]:g}, atol {tol[1]:g}; "
        f"worst at {place}: {a[place].item():.9g}, expected {e[place].item():.9g}"
    )


@dataclass(frozen=True)
class RowsCase:
    """Ops that treat rows by themselves."""

    id: str
    num_rows: int
    width: int


def row_cases() -> list[RowsCase]:
    return [
        RowsCase("no-rows", 0, 16),
        RowsCase("one-row", 1, 16),
        RowsCase("odd", 7, 23),
        RowsCase("more-than-a-tile", 33, 130),
        RowsCase("wide", 3, 1536),
    ]


@dataclass(frozen=True)
class DecodeCase:
    """Absorbed attention over pages. The page table has `spare_pages` columns of -1 more than the longest sequence needs."""

    id: str
    seq_lens: tuple[int, ...]
    query_len: int = 1
    num_heads: int = 3
    latent: int = 24
    rope: int = 8
    page_size: int = 16
    spare_pages: int = 1


def decode_cases() -> list[DecodeCase]:
    return [
        DecodeCase("no-sequences", ()),
        DecodeCase("one-token", (1,)),
        DecodeCase("all-empty", (0, 0)),
        DecodeCase("page-borders", (15, 16, 17, 32, 33)),
        DecodeCase("empty-among-others", (0, 40, 0, 3)),
        DecodeCase("no-spare-pages", (16, 48), spare_pages=0),
        DecodeCase("two-queries", (2, 16, 17, 18), query_len=2),
        DecodeCase("three-queries", (3, 64, 0, 31), query_len=3),
        DecodeCase("four-queries", (4, 5, 19, 48, 100), query_len=4, num_heads=16),
        DecodeCase("one-head-odd-sizes", (37, 9), num_heads=1, latent=13, rope=6, page_size=5),
        DecodeCase("long", (700, 1, 513), num_heads=2, page_size=64),
        DecodeCase("v3-heads", (130, 64), num_heads=16, latent=512, rope=64, page_size=64),
    ]


@dataclass(frozen=True)
class PrefillCase:
    """Ragged attention: `query_lens[i]` queries of sequence i over `key_lens[i]` keys."""

    id: str
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    causal: bool
    num_heads: int = 3
    key_dim: int = 20
    value_dim: int = 12


def prefill_cases() -> list[PrefillCase]:
    return [
        PrefillCase("no-sequences", (), (), True),
        PrefillCase("one-token", (1,), (1,), True),
        PrefillCase("ragged", (5, 1, 17, 8), (5, 1, 17, 8), True),
        PrefillCase("empty-sequence", (4, 0, 3), (4, 0, 3), True),
        PrefillCase("behind-a-prefix", (3, 1, 6), (10, 64, 6), True),
        PrefillCase("queries-that-see-nothing", (5, 2), (2, 4), True),
        PrefillCase("all-keys", (3, 7), (9, 2), False),
        PrefillCase("no-keys-for-some", (3, 2, 4), (0, 33, 0), False),
        PrefillCase("no-keys-at-all", (3,), (0,), False),
        PrefillCase("long", (190,), (333,), True, num_heads=2),
        PrefillCase("v3-heads", (9, 40), (70, 40), True, num_heads=4, key_dim=192, value_dim=128),
        PrefillCase("v3-heads-tiles", (130, 0, 200), (130, 5, 333), True, num_heads=2, key_dim=192, value_dim=128),
        PrefillCase("v3-heads-see-nothing", (140,), (3,), True, num_heads=2, key_dim=192, value_dim=128),
        PrefillCase("v3-heads-no-keys-for-some", (70, 3, 65), (0, 129, 200), False, num_heads=2, key_dim=192, value_dim=128),
    ]


@dataclass(frozen=True)
class GatherCase:
    """Rows `first[i] .. first[i] + lens[i]` of each sequence."""

    id: str
    first: tuple[int, ...]
    lens: tuple[int, ...]
    page_size: int = 8


def gather_cases() -> list[GatherCase]:
    return [
        GatherCase("no-sequences", (), ()),
        GatherCase("nothing", (0, 8, 11), (0, 0, 0)),
        GatherCase("whole-pages", (0, 8), (16, 8)),
        GatherCase("across-borders", (3, 7, 15), (13, 2, 1)),
        GatherCase("some-done", (5, 9, 0), (0, 14, 1)),
    ]


@dataclass(frozen=True)
class GateCase:
    """A gate and how many tokens pass it. Ties: logits and bias take few values, so that equal scores are common."""

    id: str
    num_tokens: int
    num_experts: int
    top_k: int
    scoring: str
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str = "top2_sum"
    normalize: bool = True
    scaling: float = 1.0
    bias: float | None = None  # spread of the correction bias
    ties: bool = False


def gate_cases() -> list[GateCase]:
    v2 = {"scoring": "softmax", "group_score": "max", "normalize": False}
    return [
        GateCase("v2-greedy", 9, 16, 6, **v2),
        GateCase("v2-groups", 40, 32, 6, num_groups=8, topk_groups=3, scaling=16.0, **v2),
        GateCase("v2-no-tokens", 0, 32, 6, num_groups=8, topk_groups=3, **v2),
        GateCase("v3", 40, 256, 8, "sigmoid", 8, 4, scaling=2.5, bias=0.2),
        GateCase("v3-no-tokens", 0, 16, 4, "sigmoid", 4, 2, bias=0.2),
        GateCase("v3-one-token", 1, 16, 4, "sigmoid", 4, 2, bias=0.2),
        GateCase("v3-one-group", 21, 24, 6, "sigmoid", scaling=2.446, bias=0.2),
        GateCase("v3-choice-below-zero", 40, 16, 6, "sigmoid", 4, 2, bias=5.0),
        GateCase("v3-ties", 60, 32, 5, "sigmoid", 8, 3, bias=1.0, ties=True),
        GateCase("v2-ties", 60, 32, 5, num_groups=4, topk_groups=2, ties=True, **v2),
        GateCase("all-experts", 5, 8, 8, "softmax"),
    ]


def replicas(num_experts: int, most: int = 1) -> Replicas:
    """Physical copies of experts in an order of their own: expert e has up to `most`, in turn."""
    counts = [1 + e % most for e in range(num_experts)]
    free = iter(torch.randperm(sum(counts)).tolist())
    slots = [[next(free) for _ in range(count)] for count in counts]
    table = [row + row[:1] * (most - len(row)) for row in slots]
    return Replicas(torch.tensor(table), torch.tensor(counts))


@dataclass(frozen=True)
class GroupedCase:
    """Rows per expert of a grouped GEMM; `capacity` rows each in the masked layout."""

    id: str
    counts: tuple[int, ...]
    capacity: int
    inner: int = 24
    outer: int = 17


def grouped_cases() -> list[GroupedCase]:
    return [
        GroupedCase("no-rows", (0, 0, 0), 0),
        GroupedCase("all-idle", (0, 0), 4),
        GroupedCase("one-row", (0, 1, 0), 1),
        GroupedCase("ragged", (3, 0, 17, 1, 16), 20),
        GroupedCase("one-takes-all", (0, 40), 40),
        GroupedCase("wide", (5, 9), 9, inner=512, outer=130),
    ]


@dataclass(frozen=True)
class SampleCase:
    """Rows of logits and which processors they mix; each row draws its own settings."""

    id: str
    num_rows: int
    vocab_size: int
    sampled: bool = True
    filtered: bool = False


def sample_cases() -> list[SampleCase]:
    return [
        SampleCase("no-rows", 0, 16, filtered=True),
        SampleCase("greedy", 5, 33, sampled=False),
        SampleCase("one-row", 1, 33),
        SampleCase("plain", 24, 101),
        SampleCase("filters", 64, 101, filtered=True),
        SampleCase("wide", 4, 5000, filtered=True),
    ]
