"""Two GPUs and more: collectives, and expert dispatch over NCCL, DeepEP and each other's memory, against their plain meaning.

Recorded and not.

Each test runs its function in a process for each rank. An expert's MLP is stood for by a factor, so that what comes home can be told.
"""

from dataclasses import dataclass

import pytest
import torch

from hw.api import Activation, Backend, Dispatched, ExpertComm, ExpertMode, ExpertStep
from hw.groups import Groups, open_groups
from hw.quant import QuantTensor, dequantize, quantize_activation
from hw.select import open_backend
from hw.testing import num_devices
from hw.topology import ParallelConfig
from tests.hw.ranks import Ranks

pytestmark = pytest.mark.skipif(num_devices("cuda") < 2, reason="needs two NVIDIA GPUs")
SIZE, CAP = 2, 128
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory):
    with Ranks(SIZE, tmp_path_factory.mktemp("ranks"), timeout_s=60.0) as made:
        yield made


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory):
    """Others, for another hidden size: a process has one DeepEP buffer."""
    with Ranks(SIZE, tmp_path_factory.mktemp("narrow"), timeout_s=60.0) as made:
        yield made


# Of a rank's process, once for all tests.
_opened: dict[str, Backend] = {}
_groups: dict[str, Groups] = {}
_comms: dict[str, ExpertComm] = {}


def opened(rendezvous, rank: int, *, tp: bool = False) -> Backend:
    kind = "tp" if tp else "dp"
    if kind not in _opened:
        parallel = ParallelConfig(tp=SIZE) if tp else ParallelConfig(dp=SIZE)
        rendezvous = type(rendezvous)(torch.distributed.PrefixStore(kind, rendezvous.store), rendezvous.timeout_s)
        _groups[kind] = open_groups(parallel, rank, rendezvous)
        _opened[kind] = open_backend("cuda", _groups[kind], max_dispatch_tokens_per_rank=CAP)
    return _opened[kind]


# -- collectives --


def block(rank: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(rows, cols, generator=generator) * 9).to(dtype)


def collect(rendezvous, rank: int, lens: list[int], dtype: torch.dtype, captured: bool):
    """What each collective gives, of blocks that every process knows."""
    backend = opened(rendezvous, rank, tp=True)
    tp, device = backend.tp, backend.runtime.device
    mine, whole = torch.zeros(lens[rank], 48, dtype=dtype, device=device), torch.zeros(sum(lens), 48, dtype=dtype, device=device)
    columns, told = torch.zeros(5, lens[rank], dtype=dtype, device=device), torch.zeros(7, dtype=torch.int64, device=device)

    def work():
        sums = tp.reduce_scatter_rows(whole, lens)
        return tp.all_gather_rows(mine, lens), sums, tp.gather_columns(columns, lens), tp.broadcast(told + 0)

    run = backend.runtime.capture(work) if captured else work
    mine.copy_(block(rank, lens[rank], 48, dtype))
    whole.copy_(block(10 + rank, sum(lens), 48, dtype))
    columns.copy_(block(20 + rank, lens[rank], 5, dtype).T)
    told.fill_(rank + 3)
    return [None if found is None else found.cpu() for found in run()]


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("lens", [[4, 4], [5, 4], [1, 0], [300, 299]], ids=str)
def test_collectives(ranks: Ranks, lens: list[int], dtype: torch.dtype, captured: bool):
    found = ranks.run(collect, lens, dtype, captured)
    gathered = torch.cat([block(rank, lens[rank], 48, dtype) for rank in range(SIZE)])
    wholes = [block(10 + rank, sum(lens), 48, dtype) for rank in range(SIZE)]
    sums = (wholes[0].float() + wholes[1].float()).to(dtype).split(lens)
    columns = torch.cat([block(20 + rank, lens[rank], 5, dtype).T for rank in range(SIZE)], 1)
    for rank, (rows, mine, side_by_side, told) in enumerate(found):
        assert torch.equal(rows, gathered) and torch.equal(mine, sums[rank])
        assert side_by_side is None if rank else torch.equal(side_by_side, columns)
        assert told.tolist() == [3] * 7


# -- experts --


@dataclass(frozen=True)
class Case:
    """Tokens of each rank; rows in `form`: "float32", "bfloat16" or "fp8", the last of which experts get quantised."""

    num_tokens: tuple[int, int]
    width: int
    form: str
    num_local: int = 8
    top_k: int = 8

    def __str__(self) -> str:
        return f"{self.num_tokens[0]}+{self.num_tokens[1]} tokens of {self.width}, {self.form}, top {self.top_k}"


def inputs(case: Case, rank: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, their experts and weights, and the shared experts' rows; known to every process."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    num, dtype = case.num_tokens[rank], torch.float32 if case.form == "float32" else BF16
    x, shared = (torch.randn(num, case.width, generator=generator).to(dtype) for _ in range(2))
    topk = torch.rand(num, SIZE * case.num_local, generator=generator).argsort(-1)[:, : case.top_k]
    return x, topk, torch.rand(num, case.top_k, generator=generator), shared


def factor(expert: torch.Tensor) -> torch.Tensor:
    """Experts multiply by this; exact in bf16, and no two are alike."""
    return (expert + 3) / 8


def expected(case: Case, rank: int, seed: int = 0) -> torch.Tensor:
    x, topk, weight, shared = inputs(case, rank, seed)
    if case.form == "fp8":
        x = dequantize(quantize_activation(x), BF16)
    each = (x[:, None] * factor(topk)[:, :, None].to(x.dtype)).float()
    return (each * weight[:, :, None]).sum(1) + shared.float()


def run_experts(sent: Dispatched, rank: int, num_local: int) -> torch.Tensor:
    """Outputs in the layout of `sent.x`; in exact layouts, what is no real row is NaN, which must not come home."""
    rows = dequantize(sent.x, BF16) if isinstance(sent.x, QuantTensor) else sent.x
    factors = factor(torch.arange(num_local, device=rows.device) + rank * num_local).to(rows.dtype)
    if sent.mode is ExpertMode.LOW_LATENCY:
        real = torch.arange(rows.shape[1], device=rows.device) < sent.counts[:, None]
        return torch.where(real[:, :, None], rows * factors[:, None, None], torch.nan)
    assert sent.layout.counts == sent.counts.tolist()
    y = torch.full(rows.shape, torch.nan, dtype=rows.dtype, device=rows.device)
    for e, (first, count) in enumerate(zip(sent.layout.starts, sent.layout.counts, strict=False)):
        y[first : first + count] = rows[first : first + count] * factors[e]
    return y


def activation(x: torch.Tensor, form: str) -> Activation:
    return Activation(x, quantize_activation(x)) if form == "fp8" else Activation(x)


def there_and_back(rendezvous, rank: int, case: Case, mode: ExpertMode, library: str):
    """What comes home, and how many rows each local expert got."""
    comm, device = comm_of(rendezvous, rank, library), opened(rendezvous, rank).runtime.device
    x, topk, weight, shared = (each.to(device) for each in inputs(case, rank))
    step = ExpertStep(mode, CAP if mode is ExpertMode.LOW_LATENCY else max(case.num_tokens))
    sent = comm.dispatch(activation(x, case.form), topk, weight, step, case.num_local)
    assert isinstance(sent.x, QuantTensor) == (case.form == "fp8" and library != "nccl")
    home = comm.combine(run_experts(sent, rank, case.num_local), weight, sent, shared)
    return home.cpu(), sent.counts.cpu()


def comm_of(rendezvous, rank: int, library: str) -> ExpertComm:
    """Of ranks that reach experts in this way only."""
    from hw.cuda.backend import import_deep_ep
    from hw.cuda.deep_ep import DeepEpComm
    from hw.cuda.peers import PeerExpertComm

    if library not in _comms:
        own, groups = opened(rendezvous, rank).expert_comm, _groups["dp"]
        if library == "peers":
            _comms[library] = PeerExpertComm(groups.ep, CAP)
        elif library == "deepep":
            _comms[library] = DeepEpComm(import_deep_ep(), groups.ep, CAP, low_latency=True)
        else:
            _comms[library] = own.by_name("NCCL")
    return _comms[library]


def check(case: Case, found: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    everyone = torch.cat([inputs(case, rank)[1].flatten() for rank in range(SIZE)])
    counts = torch.bincount(everyone, minlength=SIZE * case.num_local).split(case.num_local)
    for rank, (home, mine) in enumerate(found):
        assert mine.tolist() == counts[rank].tolist(), f"rank {rank}: rows of each expert"
        close(home, expected(case, rank), case.form, f"rank {rank}")


def close(found: torch.Tensor, wanted: torch.Tensor, form: str, what: str) -> None:
    # bf16: outputs and, unless over NCCL, partial sums are rounded; fp8: a value between two may be quantised to either.
    limit, mean_limit = {"float32": (1e-5, 1e-6), "bfloat16": (2e-2, 1e-2), "fp8": (0.1, 1e-2)}[form]
    assert found.shape == wanted.shape
    if not wanted.numel():
        return
    error = (found.float() - wanted).abs()
    largest, mean = error.max() / wanted.abs().max(), error.mean() / wanted.abs().mean()
    assert largest < limit and mean < mean_limit, f"{what}: {largest:.2e} of the largest value, on average {mean:.2e}"


TOKENS = [(5, 9), (0, 7), (1, 0), (0, 0), (CAP, CAP)]
NCCL_CASES = [Case(tokens, 200, form, 5, 3) for tokens in TOKENS for form in ("float32", "bfloat16")]
DEEP_EP_CASES = [Case(tokens, 7168, form) for tokens in TOKENS for form in ("bfloat16", "fp8")]
LARGE = [Case(tokens, 7168, form) for tokens in ((1024, 1024), (1024, 0), (3000, 1)) for form in ("bfloat16", "fp8")]


@pytest.mark.parametrize("mode", list(ExpertMode))
@pytest.mark.parametrize("case", NCCL_CASES, ids=str)
def test_experts_over_nccl(ranks: Ranks, case: Case, mode: ExpertMode):
    check(case, ranks.run(there_and_back, case, mode, "nccl"))


@pytest.mark.parametrize("mode", list(ExpertMode))
@pytest.mark.parametrize("case", DEEP_EP_CASES, ids=str)
def test_experts_over_deep_ep(ranks: Ranks, case: Case, mode: ExpertMode):
    check(case, ranks.run(there_and_back, case, mode, "deepep"))


@pytest.mark.parametrize("case", NCCL_CASES + DEEP_EP_CASES, ids=str)
def test_experts_over_each_others_memory(ranks: Ranks, case: Case):
    check(case, ranks.run(there_and_back, case, ExpertMode.LOW_LATENCY, "peers"))


@pytest.mark.parametrize("mode", list(ExpertMode))
@pytest.mark.parametrize("form", ["bfloat16", "fp8"])
def test_another_width_over_deep_ep(narrow: Ranks, form: str, mode: ExpertMode):
    case = Case((33, 64), 2048, form, 32, 6)
    check(case, narrow.run(there_and_back, case, mode, "deepep"))


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large_steps_over_deep_ep(ranks: Ranks, case: Case):
    check(case, ranks.run(there_and_back, case, ExpertMode.THROUGHPUT, "deepep"))


def replayed(rendezvous, rank: int, case: Case, library: str, seeds: list[int]):
    """A dispatch and combine recorded once, two results alive at a time, and replayed with other tokens."""
    backend, comm = opened(rendezvous, rank), comm_of(rendezvous, rank, library)
    device = backend.runtime.device
    first, second = ([each.to(device) for each in inputs(case, rank, seed)] for seed in (98, 99))
    step = ExpertStep(ExpertMode.LOW_LATENCY, CAP)

    def work():
        sent = [comm.dispatch(activation(b[0], case.form), b[1], b[2], step, case.num_local) for b in (first, second)]
        y = [run_experts(each, rank, case.num_local) for each in sent]
        return [comm.combine(out, b[2], each, b[3]) for out, b, each in zip(y, (first, second), sent, strict=True)]

    run, found = backend.runtime.capture(work), []
    for seed in seeds:
        for buffers, number in ((first, seed), (second, seed + 1)):
            for buffer, new in zip(buffers, inputs(case, rank, number), strict=True):
                buffer.copy_(new)
        found.append([home.cpu() for home in run()])
    return found


CAPTURED_WIDE = [Case((7, 64), 7168, "bfloat16"), Case((CAP, 3), 7168, "fp8"), Case((0, 5), 7168, "fp8")]
CAPTURED = [
    ("nccl", Case((7, 64), 200, "float32", 5, 3)),
    ("nccl", Case((0, 5), 7168, "bfloat16")),
    *((library, case) for library in ("deepep", "peers") for case in CAPTURED_WIDE),
    ("peers", Case((7, 64), 200, "float32", 5, 3)),
]


@pytest.mark.parametrize(("library", "case"), CAPTURED, ids=str)
def test_captured_experts(ranks: Ranks, library: str, case: Case):
    seeds = [1, 5, 9]
    for rank, found in enumerate(ranks.run(replayed, case, library, seeds)):
        for seed, homes in zip(seeds, found, strict=True):
            for number, home in zip((seed, seed + 1), homes, strict=True):
                close(home, expected(case, rank, number), case.form, f"rank {rank}, tokens {number}")


def hurried(rendezvous, rank: int, case: Case, times: int):
    """Three layers recorded once, of which two are under way at a time, and replayed without ever waiting for the device, one rank or the
    other late before each replay. Whatever is read before it is written, or overwritten before it is read, has the values of other turns.
    """
    backend, comm = opened(rendezvous, rank), comm_of(rendezvous, rank, "peers")
    x, topk, weight, _ = (each.to(backend.runtime.device) for each in inputs(case, rank))
    turn, step = torch.zeros(1, device=x.device), ExpertStep(ExpertMode.LOW_LATENCY, CAP)

    def work():
        homes, before = [], None
        for layer in range(3):
            sent = comm.dispatch(Activation(x + turn + 1000 * layer), topk, weight, step, case.num_local)
            now = run_experts(sent, rank, case.num_local), sent
            if before:
                homes.append(comm.combine(before[0], weight, before[1]))
            before = now
        return torch.stack([*homes, comm.combine(before[0], weight, before[1])])

    run, found = backend.runtime.capture(work), []
    for number in range(times):
        if (number * 7 // 3 + rank) % 2:
            torch.cuda._sleep(100_000 * (number % 4))
        turn.fill_(number)
        found.append(run().clone())
    return torch.stack(found).cpu()


def test_ranks_that_hurry_on_over_each_others_memory(ranks: Ranks):
    case, times = Case((CAP, 77), 1024, "float32", 5, 4), 60
    for rank, found in enumerate(ranks.run(hurried, case, times)):
        x, topk, weight, _ = inputs(case, rank)
        share = (factor(topk) * weight).sum(1)[:, None]
        rows = x + torch.arange(times)[:, None, None, None] + 1000 * torch.arange(3)[:, None, None]
        torch.testing.assert_close(found, rows * share, rtol=1e-5, atol=1e-2)
