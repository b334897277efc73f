"""Who does what: a backend's choices between libraries and kernels, as tables that both its ops and `deepserve inspect` read.

A table lists who could do an op, best first; the last one takes whatever is left. Each says why it does not take a shape:

    LINEAR = (Candidate("DeepGEMM", deep_gemm_refuses), Candidate("cuBLAS", takes_all))
    choose("linear", LINEAR, Product(...))    Provider("linear", "cuBLAS", "DeepGEMM: K 100 is no multiple of 128")

No device is needed to ask.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hw.quant import QuantTensor


@dataclass(frozen=True)
class Product:
    """Shape of `linear` (experts None), `grouped_linear` and `grouped_linear_masked`: `[rows, inner]` times `[(experts,) outer, inner]`."""

    dtype: torch.dtype  # of the activations
    rows: int  # in all; for the masked form the capacity of an expert
    outer: int
    inner: int
    experts: int | None = None
    block: tuple[int, int] | None = None  # of an FP8 weight; None: the weight is in `dtype`

    @classmethod
    def of(cls, rows: int, dtype: torch.dtype, weight: torch.Tensor | QuantTensor) -> "Product":
        """That of `rows` rows in `dtype` with this weight."""
        *experts, outer, inner = weight.shape
        block = weight.block if isinstance(weight, QuantTensor) else None
        return cls(dtype, rows, outer, inner, experts[0] if experts else None, block)


@dataclass(frozen=True)
class Decode:
    """Shape of `mla_decode`."""

    dtype: torch.dtype
    num_seqs: int
    query_len: int
    num_heads: int
    latent: int
    rope: int
    page_size: int
    max_seq_len: int


@dataclass(frozen=True)
class Candidate:
    """One who could do an op. `refuses(shape)`: why not for this shape, in a few words; None: it takes the shape."""

    name: str
    refuses: Callable[[Any], str | None]


@dataclass(frozen=True)
class Provider:
    """Who does an op for one shape, and why those who come before it in line do not."""

    op: str
    served_by: str
    reason: str = ""
    shape: str = field(default="", compare=False)  # for people


def takes_all(shape: Any) -> None:
    """The last candidate's answer."""


def choose(op: str, candidates: tuple[Candidate, ...], shape: Any, absent: frozenset[str] = frozenset()) -> Provider:
    """The first candidate that takes `shape`. `absent`: libraries to leave out."""
    reasons = []
    for candidate in candidates:
        reason = "not there" if candidate.name in absent else candidate.refuses(shape)
        if reason is None:
            return Provider(op, candidate.name, "; ".join(reasons))
        reasons.append(f"{candidate.name}: {reason}")
    raise AssertionError(f"{op}: nobody takes {shape}: {reasons}")


@dataclass(frozen=True)
class ModelShapes:
    """What a backend is asked about: the shapes of one rank's part of a model, and of its steps."""

    dtype: torch.dtype  # of activations
    decode: Decode  # of one sequence
    products: dict[str, torch.Tensor | QuantTensor]  # by role, `[N, K]` or `[E, N, K]`; meta tensors will do
    top_k: int  # experts of a token
    max_rows: int  # most tokens of a step
    max_low_latency_rows: int  # most tokens of a step that reaches experts in the masked layout
    num_ranks: int = 1


@dataclass(frozen=True)
class Facts:
    """What a backend decides without its device."""

    keeps_fp8: bool  # see `hw.api.Backend`
    compute_dtype: Callable[[str], str]  # see `hw.api.Runtime`
    providers: Callable[[ModelShapes], list[Provider]]  # of every op
    needs_all_ranks: str = ""  # why an instance cannot go on without a dead rank; empty: it can


# Row counts at which tables are asked; a choice may change between any two.
ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)


def by_rows(ask: Callable[[int], Provider], label: str) -> Iterator[Provider]:
    """One answer for each run of `ROW_COUNTS` that have the same one."""
    runs: list[tuple[Provider, int, int]] = []
    for rows in ROW_COUNTS:
        provider = ask(rows)
        if runs and runs[-1][0] == provider:
            runs[-1] = (provider, runs[-1][1], rows)
        else:
            runs.append((provider, rows, rows))
    for provider, first, last in runs:
        many = "" if len(runs) == 1 else f", {first} rows or more" if last == ROW_COUNTS[-1] else f", {first} to {last} rows"
        yield replace(provider, shape=label + many)
