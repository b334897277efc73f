"""Expert dispatch over ranks: bitwise what one rank gets, in an order that no placement changes, with the bytes it should need."""

import itertools
from dataclasses import dataclass

import pytest
import torch

from hw.api import Activation, Dispatched, ExpertMode, ExpertStep
from hw.cpu.ep_comm import GlooExpertComm
from hw.cpu.expert_comm import LocalExpertComm
from hw.groups import Group
from hw.quant import QuantTensor, dequantize, quantize_activation

CAP = 16
DIM = 192  # one and a half scale groups of 128


@dataclass(frozen=True)
class Case:
    """Tokens of each rank, and which logical expert each slot of each rank holds."""

    id: str
    num_tokens: tuple[int, ...]
    phy2log: tuple[int, ...]
    top_k: int

    @property
    def size(self) -> int:
        return len(self.num_tokens)

    @property
    def num_local(self) -> int:
        return len(self.phy2log) // self.size

    @property
    def num_logical(self) -> int:
        return max(self.phy2log) + 1


CASES = [
    Case("two-ranks", (5, 9), tuple(range(8)), 3),
    Case("some-rank-is-idle", (0, 7), tuple(range(8)), 3),
    Case("one-token", (1, 0), tuple(range(4)), 1),
    Case("nothing", (0, 0), tuple(range(4)), 2),
    Case("more-choices-than-a-rank-has-experts", (6, 4), tuple(range(4)), 3),
    Case("all-experts", (3, 3), tuple(range(6)), 6),
    Case("three-ranks", (4, 0, 11), tuple(range(12)), 4),
    Case("spare-slots-hold-replicas", (8, 5, 3), (*range(10), 0, 1), 4),  # 10 experts over 3 ranks
    Case("replicas-on-one-rank", (8, 5, 3), (0, 1, 1, 2, 3, 4, 5, 0, 6), 2),
    Case("full", (CAP, CAP, CAP), tuple(range(9)), 4),
]
BY_SIZE = {size: [case for case in CASES if case.size == size] for size in (2, 3)}
FORMATS = ("float32", "bfloat16", "fp8", "fp8 ue8m0")


class CountedGroup(Group):
    """Counts what leaves for other ranks."""

    num_bytes = 0

    def all_to_all(self, x, send, receive):
        row_bytes = x[:1].numel() * x.element_size()
        self.num_bytes += row_bytes * (sum(send) - send[self.rank])
        return super().all_to_all(x, send, receive)


_groups: dict[int, CountedGroup] = {}


def comm_of(rendezvous, rank: int, size: int) -> GlooExpertComm:
    """One group per process, for every case."""
    if size not in _groups:
        _groups[size] = CountedGroup("ep", list(range(size)), rank, rendezvous)
    return GlooExpertComm(_groups[size], CAP)


def inputs(case: Case, rank: int, form: str) -> tuple[Activation, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens of a rank, their logical and physical experts, their weights; known to every process. Replicas are drawn at random."""
    generator = torch.Generator().manual_seed(100 + rank)
    num = case.num_tokens[rank]
    x = torch.randn(num, DIM, generator=generator)
    logical = torch.rand(num, case.num_logical, generator=generator).argsort(-1)[:, : case.top_k]
    physical = torch.empty_like(logical)
    for place in itertools.product(range(num), range(case.top_k)):
        slots = [phy for phy, log in enumerate(case.phy2log) if log == int(logical[place])]
        physical[place] = slots[int(torch.randint(len(slots), (), generator=generator))]
    weight = torch.rand(num, case.top_k, generator=generator)
    if form.startswith("fp8"):
        quant = quantize_activation(x, ue8m0="ue8m0" in form)
        scale = quant.scale.to(torch.float8_e8m0fnu) if "ue8m0" in form else quant.scale
        return Activation(None, QuantTensor(quant.data, scale, quant.format, quant.block)), logical, physical, weight
    return Activation(x.to(getattr(torch, form))), logical, physical, weight


def expert(rows: torch.Tensor, logical: int) -> torch.Tensor:
    """Stands for an expert's MLP: row by row, and no two experts alike."""
    return (rows.float() * (logical + 1.5)).sin().to(rows.dtype)


def run_experts(sent: Dispatched, logical: tuple[int, ...]) -> torch.Tensor:
    """Outputs in the layout of `sent.x`; what is not a real row is NaN, which must not come home."""
    y = torch.full_like(sent.x, torch.nan)
    for e, (rows, out) in enumerate(zip(each_expert(sent, sent.x), each_expert(sent, y), strict=True)):
        out.copy_(expert(rows, logical[e]))
    return y


def each_expert(sent: Dispatched, rows: torch.Tensor) -> list[torch.Tensor]:
    """Views of the real rows of each local expert."""
    counts = sent.counts.tolist()
    if sent.mode is ExpertMode.THROUGHPUT:
        assert sent.layout.counts == counts and sent.layout.align == 1 and rows.shape[0] == sum(counts)
        return list(rows.split(counts))
    assert sent.layout is None and rows.shape[0] == len(counts)
    return [rows[e, :num] for e, num in enumerate(counts)]


def over_ranks(rendezvous, rank, case: Case, mode: ExpertMode, form: str):
    """What comes home, what each local expert saw, and the bytes that left."""
    comm = comm_of(rendezvous, rank, case.size)
    comm.group.num_bytes = 0
    x, _, physical, weight = inputs(case, rank, form)
    sent = comm.dispatch(x, physical, weight, ExpertStep(mode, max(case.num_tokens)), case.num_local)
    dispatch_bytes = comm.group.num_bytes
    held = case.phy2log[rank * case.num_local : (rank + 1) * case.num_local]
    home = comm.combine(run_experts(sent, held), weight, sent)
    return home, [rows.clone() for rows in each_expert(sent, sent.x)], dispatch_bytes, comm.group.num_bytes - dispatch_bytes


def locally(case: Case, rank: int, mode: ExpertMode, form: str) -> torch.Tensor:
    """A rank's tokens if it held all experts itself."""
    x, _, physical, weight = inputs(case, rank, form)
    comm = LocalExpertComm(CAP)
    sent = comm.dispatch(Activation(as_computed(x)), physical, weight, ExpertStep(mode, max(case.num_tokens)), len(case.phy2log))
    return comm.combine(run_experts(sent, case.phy2log), weight, sent)


def as_computed(x: Activation) -> torch.Tensor:
    return x.dense if x.quant is None else dequantize(x.quant, torch.bfloat16)


@pytest.mark.parametrize("mode", list(ExpertMode))
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_equals_one_rank_bit_by_bit(ranks_of, case: Case, mode: ExpertMode, form: str):
    found = ranks_of(case.size).run(over_ranks, case, mode, form)
    everyone = [inputs(case, rank, form) for rank in range(case.size)]
    seen = [rows for _, by_expert, _, _ in found for rows in by_expert]  # by physical expert
    for phy, rows in enumerate(seen):
        by_source = [as_computed(x)[(physical == phy).any(-1)] for x, _, physical, _ in everyone]
        assert torch.equal(rows, torch.cat(by_source)), f"physical expert {phy}: rows of rank 0 first, in the order of its batch"
    for rank, (home, *_) in enumerate(found):
        assert home.dtype == as_computed(everyone[rank][0]).dtype
        assert torch.equal(home, locally(case, rank, mode, form)), f"rank {rank}"


@pytest.mark.parametrize("mode", list(ExpertMode))
def test_no_placement_changes_the_order_in_which_an_expert_sees_rows(ranks_of, mode: ExpertMode):
    tokens, top_k = (7, 0, 9), 4
    seen = []
    for phy2log in (range(9), (4, 8, 0, 2, 6, 1, 7, 3, 5), reversed(range(9))):
        case = Case("", tokens, tuple(phy2log), top_k)
        found = ranks_of(3).run(over_ranks, case, mode, "float32")
        by_physical = [rows for _, by_expert, _, _ in found for rows in by_expert]
        seen.append([by_physical[case.phy2log.index(logical)] for logical in range(9)])
        homes = [home for home, *_ in found]
        if len(seen) == 1:
            first = homes
        assert all(map(torch.equal, homes, first))
    for other in seen[1:]:
        assert all(map(torch.equal, other, seen[0]))


@pytest.mark.parametrize("form", FORMATS)
def test_bytes_of_throughput_mode(ranks_of, form: str):
    """Counts, then for each row that leaves its expert id and its values; outputs come back row by row."""
    case = next(case for case in CASES if case.id == "spare-slots-hold-replicas")
    out_bytes = {"float32": 4 * DIM, "bfloat16": 2 * DIM}
    in_bytes = {**out_bytes, "fp8": DIM + 2 * 4, "fp8 ue8m0": DIM + 2}[form]
    for rank, (_, _, dispatched, combined) in enumerate(ranks_of(3).run(over_ranks, case, ExpertMode.THROUGHPUT, form)):
        ranks = [inputs(case, source, form)[2] // case.num_local for source in range(3)]
        away = int((ranks[rank] != rank).sum())
        from_others = sum(int((ranks[source] == rank).sum()) for source in range(3) if source != rank)
        assert dispatched == (3 - 1) * 8 + away * (8 + in_bytes)
        assert combined == from_others * out_bytes.get(form, 2 * DIM)


def test_bytes_of_low_latency_mode_depend_on_the_vote_alone(ranks_of):
    for case in BY_SIZE[3]:
        rows = max(case.num_tokens) * min(case.top_k, case.num_local)
        for _, _, dispatched, combined in ranks_of(3).run(over_ranks, case, ExpertMode.LOW_LATENCY, "bfloat16"):
            assert dispatched == 2 * rows * (8 + 2 * DIM)
            assert combined == 2 * rows * 2 * DIM


def test_low_latency_layout_is_fixed_by_the_vote(ranks_of):
    case = Case("", (2, 5), tuple(range(6)), 2)
    for shape, counts in ranks_of(2).run(layout, case):
        assert shape == (3, 5 * 2, DIM) and len(counts) == 3


def layout(rendezvous, rank, case: Case):
    x, _, physical, weight = inputs(case, rank, "float32")
    sent = comm_of(rendezvous, rank, case.size).dispatch(x, physical, weight, ExpertStep(ExpertMode.LOW_LATENCY, 5), case.num_local)
    unused = torch.arange(sent.x.shape[1]) >= sent.counts[:, None]
    assert not sent.x[unused].any(), "unused rows are zero"
    return tuple(sent.x.shape), sent.counts.tolist()


class NobodyElse:
    """A group in which nothing may be sent: the check comes before the wire."""

    size, rank = 2, 0


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [(CAP + 1, CAP + 1), (5, 4), (1, CAP + 1)])
def test_low_latency_beyond_the_cap_is_a_mistake_of_the_caller(num_tokens: int, max_tokens: int):
    comm = GlooExpertComm(NobodyElse(), CAP)
    step = ExpertStep(ExpertMode.LOW_LATENCY, max_tokens)
    with pytest.raises(AssertionError, match=str(num_tokens)):
        weight = torch.zeros(num_tokens, 1)
        comm.dispatch(Activation(torch.zeros(num_tokens, DIM)), weight.long(), weight, step, 4)


def test_throughput_has_no_cap(ranks_of):
    case = Case("", (3 * CAP, 1), tuple(range(6)), 2)
    for rank, (home, *_) in enumerate(ranks_of(2).run(over_ranks, case, ExpertMode.THROUGHPUT, "float32")):
        assert torch.equal(home, locally(case, rank, ExpertMode.THROUGHPUT, "float32"))
