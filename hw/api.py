"""The whole hardware contract: what the layers above may ask of a device. `hw/cpu/reference` is its plain meaning.

Conventions: a tensor is documented as `[shape] dtype`; `model dtype` is the activation dtype (float32 or bfloat16); sums run in
fp32 whatever the model dtype. Sizes are `T` tokens, `H` heads, `L` kv_lora_rank, `r` rope dims, `K`/`N` matrix dims. Arguments
are checked by callers at the door; ops assert their layout. A backend that lacks an op raises `Unsupported`; nothing falls back silently.

A weight may be a `QuantTensor`. Then a backend may also quantise bf16 activations, each token by itself in groups of 128 channels
(`hw.quant.quantize_activation`), as the models themselves are meant to run; fp32 activations stay as they are. A product quantises
dense rows by itself; where `Ops.quantizes` says that it will, a layer asks the op before it for rows in that form, which saves a pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch

from hw.draws import Logprobs, PenaltyInputs, SampleInputs
from hw.guess_head import GuessHead
from hw.moves import ExpertMoves
from hw.quant import QuantTensor
from hw.row_kernels import RowKernels
from hw.rules import ModelShapes

T = TypeVar("T")
Matrix = torch.Tensor | QuantTensor  # weight [N, K], used as x @ W.T
Rows = torch.Tensor | QuantTensor  # activations [T, K], dense in the model dtype or quantised as `hw.quant.quantize_activation` does


class Unsupported(ValueError):
    """A backend lacks an op or a format, or cannot keep a promise that it was asked for; the message names both."""


class ExpertMode(StrEnum):
    """How tokens travel to experts."""

    THROUGHPUT = "throughput"  # contiguous layout; a backend may bring the counts to the host
    LOW_LATENCY = "low_latency"  # fixed-size masked layout, no host knowledge, graph-safe


@dataclass(frozen=True)
class ExpertStep:
    """How experts are reached in one step; equal on all ranks of an instance."""

    mode: ExpertMode
    max_tokens: int  # most tokens that any rank dispatches in a layer of this step
    overlapped: bool = False  # as two micro-batches that take turns: one computes while the other's rows travel


@dataclass(frozen=True)
class Activation:
    """Rows in the forms that their consumers asked for."""

    dense: torch.Tensor | None  # [T, D] model dtype
    quant: QuantTensor | None = None  # [T, D], the same values quantised

    def rows(self, quantized: bool) -> Rows:
        """One form, which must be there."""
        found = self.quant if quantized else self.dense
        assert found is not None, f"rows were not made {'quantised' if quantized else 'dense'}"
        return found

    @property
    def smallest(self) -> Rows:
        """The form with the fewest bytes that is there."""
        return self.rows(self.quant is not None)


@dataclass(frozen=True)
class ExpertRows:
    """M rows sorted by expert. Each expert's begin at a multiple of `align`; rows between, and behind all of them, hold anything.

    | expert 0 rows | - | expert 1 rows | - | ... | - |    no gaps with align 1
    """

    counts: list[int] | None  # rows of each expert; None: only the device knows
    align: int = 1
    experts: torch.Tensor | None = None  # [M] int32 on the device, each row's expert, -1 = none; there if align > 1
    ends: torch.Tensor | None = None  # [E] int32 on the device, first row behind each expert's and their gap; there if counts is None

    @property
    def starts(self) -> list[int]:
        """First row of each expert, and the first row behind the last one's, where the host knows."""
        assert self.counts is not None, "only the device knows the counts"
        return [0, *accumulate(-(-count // self.align) * self.align for count in self.counts)]


@dataclass(frozen=True)
class Segments:
    """Consecutive runs of rows, one for each sequence. The host list is exact; backends that launch from device data read `starts`."""

    lens: list[int]
    starts: torch.Tensor  # [num_segments + 1] int32, exclusive prefix sum of lens


@dataclass(frozen=True)
class LatentDims:
    """Head sizes that decide what the two forms of latent attention cost."""

    latent: int  # kv_lora_rank
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class GateRule:
    """How gate scores become experts and weights; see `Ops.gate_topk`."""

    top_k: int
    scoring: Literal["softmax", "sigmoid"]
    num_groups: int  # 1: no grouping
    topk_groups: int
    group_score: Literal["max", "top2_sum"]
    normalize: bool
    scaling: float


@dataclass(frozen=True)
class Replicas:
    """Physical copies of each logical expert. Tokens take those of an expert in turn, by their row in the batch."""

    slots: torch.Tensor  # [E, width] int64, physical experts, filled up with the first
    counts: torch.Tensor  # [E] int64, how many are real

    def physical(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """topk_idx `[T, k]` logical -> `[T, k]` physical."""
        rows = torch.arange(topk_idx.shape[0], device=topk_idx.device)[:, None]
        return self.slots[topk_idx, rows % self.counts[topk_idx]]


class Ops(Protocol):
    """Compute primitives. `num_*` row counts may be 0 everywhere."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`x * rsqrt(mean(x^2) + eps)` in fp32 over the last dim, cast to x's dtype, times weight. x `[T, D]`, weight `[D]`."""

    def quantizes(self, weight: Matrix, dtype: torch.dtype) -> bool:
        """Whether products of activations of `dtype` with `weight` quantise them here, and so take them quantised."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, dense: bool = True, quant: bool = False
    ) -> tuple[Activation, torch.Tensor]:
        """`(rms_norm(x + residual), x + residual)`, the first in the forms asked for. All `[T, D]`.

        The sum is rounded to the model dtype before the norm, and the norm before it is quantised.
        """

    def rope(self, x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rotate neighbouring pairs (2i, 2i+1). x `[T, H, r]`, positions `[T]` int64, table `[max_pos, r]` fp32 = cos | sin halves.

        out: where the result goes, new storage if None; it may be x itself.
        """

    def silu_mul(self, gate_up: torch.Tensor, quant: bool = False, counts: torch.Tensor | None = None) -> Rows:
        """`silu(gate) * up` of `[T, 2I]` whose first half is gate: `[T, I]`, quantised if `quant`.

        counts `[E]` int32: gate_up is `[E, M, 2I]` in the layout of `grouped_linear_masked`, and so is the result.
        """

    def linear(self, x: Rows, weight: Matrix) -> torch.Tensor:
        """`x @ weight.T`: x `[T, K]`, weight `[N, K]`, result `[T, N]` in x's dtype, bf16 if x is quantised."""

    def absorb_query(self, q: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
        """Queries against latents: `q_nope @ w_uk` of each head, and beside it q_rope rotated as `rope` does; `[T, H, L + r]`.

        q `[T, H, n + r]` as projected, rows may be strided; w_uk `[H, n, L]`; positions `[T]` int64; table `[max_pos, r]` fp32.
        """

    def unabsorb(self, out: torch.Tensor, w_uv: torch.Tensor, quant: bool = False) -> Rows:
        """Values from attended latents: out `[T, H, L]`, w_uv `[H, v, L]` -> `out @ w_uv.T` of each head, `[T, H * v]`.
        Rounded to the model dtype, and quantised after that if `quant`.
        """

    def expand_latent(self, latent: torch.Tensor, key: torch.Tensor, kv_up: torch.Tensor, nope: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of every head: latent `[S, L]`, rotated key `[S, r]` -> keys `[S, H, n + r]`, values `[S, H, v]`.

        kv_up `[H, n + v, L]`, of each head first the `nope` rows of keys. Every head has the same last r dims of keys. Rows may be strided.
        """

    def latent_write(
        self, down: torch.Tensor, q_norm: torch.Tensor | None, kv_norm: torch.Tensor, eps: float, positions: torch.Tensor,
        table: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, quant: bool = False,
    ) -> tuple[Rows | None, torch.Tensor, torch.Tensor]:  # fmt: skip
        """Norm the query's latent and the keys' latent, rotate the key, write the last two to the cache, return all three.

        down `[T, Q + L + r]` as projected, Q the size of q_norm, 0 if None; cache `[num_pages, page_size, L + r]` model dtype; slots `[T]`
        int64, `page * page_size + offset`, -1 = do not write. Returns the query's `[T, Q]`, quantised if `quant`, None without q_norm;
        latent `[T, L]` and key `[T, r]`, model dtype.
        """

    def latent_gather(self, cache: torch.Tensor, page_table: torch.Tensor, first: list[int], lens: list[int]) -> torch.Tensor:
        """Rows `first[i] .. first[i] + lens[i]` of sequence i, all sequences one after the other: `[sum(lens), L + r]`.
        page_table `[num_seqs, max_pages]` int32, -1 = unused.
        """

    def decode_plan(self) -> Any:
        """A fresh object for what the `mla_decode` calls of one step's layers can share, such as a kernel's schedule; may be None."""

    def mla_decode(
        self, q: torch.Tensor, cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int,
        kv_lora_rank: int, scale: float, plan: Any = None, with_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Absorbed attention over pages, all heads sharing one key: the value is the key's first `kv_lora_rank` dims.

        q `[B, q_len, H, L + r]`; page_table `[B, max_pages]` int32, -1 = unused; seq_lens `[B]` int32 counts the cached tokens with the
        q_len new ones; query j of a sequence sees `seq_len - q_len + 1 + j` tokens; max_seq_len is a host upper bound. seq_len 0 gives
        out 0, lse -inf. `plan`: from `decode_plan`, shared by calls that differ in q and cache alone. Returns out `[B, q_len, H, L]` model
        dtype, lse `[B, q_len, H]` fp32 (natural logarithm) if asked for.
        """

    def mla_prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_segments: Segments, k_segments: Segments, scale: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Multi-head attention of ragged sequences. q `[T, H, n + r]`, k `[S, H, n + r]`, v `[S, H, v]`.

        causal: the last query of a sequence sees all its keys, the one before all but one, and so on. A query that sees none gives out 0,
        lse -inf. Returns out `[T, H, v]`, lse `[T, H]` fp32.
        """

    def merge_attention(
        self, out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Join attention over two disjoint key sets by their log-sum-exp, in fp32. out `[T, H, v]`, lse `[T, H]`."""

    def prefers_absorbed(self, query_len: int, context_len: int, dims: LatentDims) -> bool:
        """Whether a prefill chunk of `query_len` tokens behind `context_len` cached ones is cheaper in absorbed form here."""

    def gate_logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`x @ weight.T` as if both were fp32, sums too: x `[T, K]` model dtype, weight `[E, K]` fp32, result `[T, E]` fp32."""

    def gate_topk(
        self, logits: torch.Tensor, bias: torch.Tensor | None, rule: GateRule, replicas: Replicas
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Experts of each token, best first, ties to the lowest id: idx `[T, k]` int64, their physical copies `[T, k]` int64, as
        `replicas.physical` finds them, and weight `[T, k]` fp32.

        logits `[T, E]` fp32, bias `[E]` fp32. Scores are softmax or sigmoid of the logits; choice is by score + bias, within the
        `topk_groups` best groups of consecutive experts; weights are the unbiased scores, divided by their sum + 1e-20 if `normalize`,
        times `scaling`.
        """

    def grouped_linear(self, x: Rows, weight: Matrix, layout: ExpertRows) -> torch.Tensor:
        """Contiguous grouped GEMM: x `[M, K]` in `layout`, weight `[E, N, K]`, result `[M, N]` in the same layout."""

    def grouped_linear_masked(self, x: Rows, weight: Matrix, counts: torch.Tensor, expected: int | None = None) -> torch.Tensor:
        """Masked grouped GEMM: x `[E, M, K]`, the first `counts[e]` rows of expert e are real; the rest of `[E, M, N]` is not.

        counts `[E]` int32, on the device. expected: about how many rows an expert has, a hint for speed; None: as many as fit.
        """

    def fuses_experts(self, num_tokens: int, top_k: int, gate_up: Matrix, dtype: torch.dtype) -> bool:
        """Whether `fused_gate_up` and `fused_down` are faster here for so many tokens in `dtype`, whose experts are all on this rank, than
        dispatch, grouped products, `silu_mul` and combine. gate_up `[E, 2I, D]`.
        """

    def fused_gate_up(self, x: torch.Tensor, topk_phy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu_mul` of the products of each token with its experts' gate_up `[E, 2I, D]`, gate rows first: `[T, k, I]`.

        x `[T, D]`; topk_phy `[T, k]` int64.
        """

    def fused_down(
        self, inner: torch.Tensor, topk_phy: torch.Tensor, topk_weight: torch.Tensor, down: torch.Tensor, shared: torch.Tensor | None
    ) -> torch.Tensor:
        """The products of `fused_gate_up`'s rows with down `[E, D, I]`, summed by the reduction rule of `ExpertComm`: `[T, D]`.

        topk_weight `[T, k]` fp32; shared `[T, D]` or None is added last.
        """

    def penalize(self, logits: torch.Tensor, inputs: PenaltyInputs) -> None:
        """Repetition (CTRL, arXiv 1909.05858), frequency and presence penalties (OpenAI's formula), in place. logits `[R, V]` fp32."""

    def sample(self, logits: torch.Tensor, inputs: SampleInputs) -> torch.Tensor:
        """Gumbel-max over the processed distribution (temperature, min-p, top-k, top-p in this order): tokens `[R]` int64.

        logits `[R, V]` fp32. Tokens that tie with the last one inside a filter stay.
        """

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> Logprobs:
        """Log-softmax at `tokens` `[R]` and the `num_top` best, of equals the lower token first. logits `[R, V]` fp32."""


@dataclass(frozen=True)
class Dispatched:
    """Tokens at the rank that holds their experts. `handle` is the backend's own and goes back into `combine` unread.

    THROUGHPUT: x `[M, D]` in `layout`. LOW_LATENCY: x `[E_local, cap, D]`, of which `counts` are real.
    """

    mode: ExpertMode
    x: Rows
    counts: torch.Tensor  # [E_local] int32 on the device
    layout: ExpertRows | None  # THROUGHPUT only
    handle: Any
    expected: int | None = None  # see `Ops.grouped_linear_masked`


class Collectives(Protocol):
    """A group of ranks that share each attention layer. A group of one gives its arguments back."""

    rank: int  # in the group
    size: int

    def all_gather_rows(self, x: torch.Tensor, lens: list[int]) -> torch.Tensor:
        """x `[lens[rank], ...]` of every rank -> `[sum(lens), ...]`, in rank order."""

    def reduce_scatter_rows(self, x: torch.Tensor, lens: list[int]) -> torch.Tensor:
        """x `[sum(lens), D]` -> this rank's rows of the sum over ranks, added in fp32 in rank order."""

    def gather_columns(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor | None:
        """x `[R, widths[rank]]` of every rank side by side at rank 0: `[R, sum(widths)]`; None elsewhere."""

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor, in place."""


class ExpertComm(Protocol):
    """Moves tokens to experts and back over the expert-parallel group. One rank is its own local path.

    Reduction rule: combine brings one row for each (token, k) home and sums them there in top-k order in fp32, so a result does not
    depend on where an expert lives. An implementation that sums otherwise says so.
    """

    max_tokens_per_rank: int  # cap of the LOW_LATENCY mode

    def reserve(self, hidden_size: int, num_local_experts: int, dtype: torch.dtype) -> None:
        """Take what dispatches of these sizes keep between steps; collective. Called before memory is planned; again changes nothing."""

    def dispatch(
        self, x: Activation, topk_phy: torch.Tensor, topk_weight: torch.Tensor, step: ExpertStep, num_local_experts: int
    ) -> Dispatched:
        """Send x `[T, D]` to physical experts topk_phy `[T, k]` int64, `num_local_experts` on each rank.

        topk_weight `[T, k]` fp32: those of `combine`, for an implementation that sums where the experts are.
        x has its dense form, and its quantised one if the experts take that; then an implementation may send either and the experts
        get quantised rows, unless they compute in dense ones on its device. It may quantise by itself, as `quantize_activation` does.
        A token's k physical experts are distinct. T is at most step.max_tokens; LOW_LATENCY needs that to be within max_tokens_per_rank.
        """

    def combine(
        self, y: torch.Tensor, topk_weight: torch.Tensor, dispatched: Dispatched, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Weighted sum of expert outputs y (laid out like `dispatched.x`), plus `shared` `[T, D]`: `[T, D]`. topk_weight `[T, k]` fp32.
        Summed in fp32, the shared rows last, and rounded once to y's dtype.
        """


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of the device a rank may plan with."""

    total_bytes: int
    free_bytes: int


class Runtime(Protocol):
    """The device itself."""

    device: torch.device
    captures: bool  # whether repeating captured work is cheaper than doing it again
    captures_any_size: bool  # whether capturing costs so little that no batch need be filled up to the size of another
    runs_ahead: bool  # whether ops return before they are done, so that the host can plan meanwhile
    compiles: bool  # whether ops are slow at first use: compiled, or loaded onto the device

    def memory(self) -> MemoryInfo:
        """Memory of the device now."""

    def default_cache_bytes(self) -> int | None:
        """Most bytes of KV pages to take when the user named none; None: all that the budget leaves."""

    def num_sharing(self, num_ranks: int) -> int:
        """How many of an instance's `num_ranks` ranks on this machine draw on the same memory as this one."""

    def compute_dtype(self, checkpoint_dtype: str) -> str:
        """What `dtype="auto"` means for a checkpoint stored in `checkpoint_dtype`: "float32" or "bfloat16"."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed storage for long-lived buffers; pages that are never touched may cost no memory."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised storage for weights, laid out so that reading all of them is fast."""

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """A copy on the device, queued behind earlier work and not waited for; the array may change at once."""

    def send(self, *parts: tuple[np.ndarray, torch.Tensor]) -> None:
        """Queue one copy of host arrays to tensors that are there, of the same shapes and dtypes. The arrays may change at once."""

    def download(self, tensors: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Queue copies to the host; the result waits for them, and for nothing that is queued later."""

    def synchronize(self) -> None:
        """Wait for all queued work."""

    def beside(self, work: Callable[[], T]) -> Callable[[], T]:
        """Queue `work` so that it may run beside what is queued next; whatever is queued after the result is asked for comes after it.
        What `work` reads must stay as it is until then. Where nothing is gained the work is queued like any other.
        """

    def fork(self) -> Callable[[Callable[[], T]], T]:
        """Mark what is queued by now. Work given to the result comes behind that alone, so it may run beside what is queued meanwhile.
        Whatever is queued after the work comes after it, and may read what the work returns.
        """

    def warm_up(self, shapes: ModelShapes, progress: bool | None = None) -> None:
        """Compile what these shapes need and earlier starts have not left behind; nothing where nothing is compiled.
        progress: show a bar; None: if stderr is a terminal. Ranks that share a folder of compiled kernels take turns.
        """

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        """Record device work once; the result repeats it on the same storage and returns the same tensors.
        The work must not wait for the device, and reads what varies from buffers that its maker keeps.
        """

    def chain(self, first: Sequence[Callable[[], object]], beside: Sequence[Callable[[], object]] = ()) -> Callable[[], Callable[[], None]]:
        """One call for several captured works: queues `first`, in order, and starts `beside` behind them, in order, beside the host's own
        work where that can be. What the call returns waits for the latter; what reads or writes what they use is queued behind that.
        """


@dataclass(frozen=True)
class Backend:
    """One device family, ready to run."""

    name: str
    ops: Ops
    runtime: Runtime
    expert_comm: ExpertComm
    tp: Collectives
    moves: ExpertMoves | None = None  # None: experts stay where they are loaded
    rows: RowKernels | None = None  # None: torch does it
    guess_head: Callable[[torch.Tensor], GuessHead] | None = None  # stands for a head where that pays; None: nowhere
    keeps_fp8: bool = False  # whether block-FP8 weights are worth keeping as they are; if not, they are dequantised on load
