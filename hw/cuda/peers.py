"""Low-latency expert dispatch over the GPUs of one host, which write to each other's memory.

A token goes once to each rank that holds some of its experts and is copied to each of them there; their outputs are weighed and summed
there too, and the source sums what ranks send. So links carry a row for each token and rank, not for each token and expert, and a sum
depends on where experts live: it is rounded on each rank before it is rounded at the source.

Each rank has a window, memory of its GPU that all ranks write to:

    | flags, one of each rank | half 0: packets [rank, token] | half 1: packets [rank, token] |
    packet out   | experts here [k] | their weights [k] | row | its scales |      packet home   | sum of a token's outputs |

An op, out or home, has three kernels: write packets, meet, read packets. To meet is to count up the own flag in all windows and to wait
until all flags in the own one are as high. Ops take the halves in turn. Packets of op n are overwritten by op n + 2, and a rank writes
those after it has met for n + 1, by when everybody has read op n, since a rank's kernels are queued in order. Which op it is, is counted
on the device, so captured steps may be replayed in any order that is the same on all ranks, and nothing is reset between them.
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hw.api import Activation, Dispatched, ExpertStep
from hw.cuda.expert_comm import expected_rows
from hw.cuda.launch import cdiv, power_of_2
from hw.cuda.layout import GROUP, masked_rows, quantized_masked_rows
from hw.cuda.rules import PEERS_MOST_ROWS
from hw.cuda.triton_peers import meet_kernel, place_packets_kernel, return_packets_kernel, send_packets_kernel, sum_packets_kernel
from hw.groups import Group

MOST_TOP_K = 32
_HEADER = 64  # words of 4 bytes before the packets: 32 flags
_COLUMNS = 1024  # of one program where rows are summed
_WORDS = 2048  # of a row that a program holds at a time


@dataclass(frozen=True)
class PeerHandle:
    """How to send expert outputs home. Rows are those of all ranks, `max_tokens` of each, with or without a token."""

    home: torch.Tensor  # [size * max_tokens, k] int32, an expert here and a row of it, see the kernels; -1: none
    weight: torch.Tensor  # [size * max_tokens, k] fp32, of the experts here
    max_tokens: int
    topk_phy: torch.Tensor  # [T, k] int64, of this rank's tokens
    num_local_experts: int


class Window:
    """This rank's window, and where those of all ranks are in this process."""

    def __init__(self, mine: torch.Tensor, theirs: list[torch.Tensor], num_slots: int, packet_words: int):
        """mine: `[bytes]` uint8, zeroed; theirs: of all ranks, in rank order."""
        self.places = (num_slots, packet_words)
        self._held = theirs
        self.flags = mine[: _HEADER * 4].view(torch.int64)
        self.addresses = torch.tensor([each.data_ptr() for each in theirs], dtype=torch.int64, device=mine.device)
        self.op = torch.zeros(1, dtype=torch.int64, device=mine.device)  # ops that this rank has met for


def window_bytes(num_slots: int, packet_words: int) -> int:
    return 4 * (_HEADER + 2 * num_slots * packet_words)


def open_window(control: Group, num_slots: int, packet_words: int) -> Window:
    """Collective. control: the ranks over gloo, each with the current GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    mine = torch.zeros(window_bytes(num_slots, packet_words), dtype=torch.uint8, device=device)
    torch.cuda.synchronize()  # nobody writes before it is zeroed
    facts = mine.untyped_storage()._share_cuda_()[1:7] if control.size > 1 else ()
    theirs = []
    for root in range(control.size):
        told = control.broadcast_bytes(repr(facts).encode() if root == control.rank else None, root)
        if root == control.rank:
            theirs.append(mine)
        else:  # opened on this rank's GPU, which is to reach it, not on the one where it lies
            storage = torch.UntypedStorage._new_shared_cuda(device.index, *ast.literal_eval(told.decode()), False)
            theirs.append(torch.empty(0, dtype=torch.uint8, device=device).set_(storage))
    return Window(mine, theirs, num_slots, packet_words)


class PeerExpertComm:
    """ExpertComm of ranks whose GPUs reach each other's memory, of the low-latency mode and any width and dtype."""

    def __init__(self, control: Group, max_tokens_per_rank: int, open_window: Callable[[Group, int, int], Window] = open_window):
        self._control, self._open_window = control, open_window
        self._rank, self._size, self.max_tokens_per_rank = control.rank, control.size, max_tokens_per_rank
        self._windows: dict[tuple[int, torch.dtype], Window] = {}  # by width and dtype of what travels

    def reserve(self, hidden_size: int, num_local_experts: int, dtype: torch.dtype) -> None:
        if (hidden_size, dtype) not in self._windows:
            row_bytes = max(hidden_size * dtype.itemsize, hidden_size + hidden_size // GROUP * 4)
            packet_words = 2 * MOST_TOP_K + cdiv(row_bytes, 16) * 4
            self._windows[hidden_size, dtype] = self._open_window(self._control, self._size * self.max_tokens_per_rank, packet_words)

    def dispatch(
        self, x: Activation, topk_phy: torch.Tensor, topk_weight: torch.Tensor, step: ExpertStep, num_local_experts: int
    ) -> Dispatched:
        width, dtype, most = x.rows(quantized=False).shape[1], x.rows(quantized=False).dtype, step.max_tokens
        (num_tokens, top_k), device = topk_phy.shape, topk_phy.device
        assert num_tokens <= most <= self.max_tokens_per_rank and top_k <= MOST_TOP_K, (topk_phy.shape, step)
        assert self._size * most <= PEERS_MOST_ROWS, (self._size, step)
        self.reserve(width, num_local_experts, dtype)
        window, capacity = self._windows[width, dtype], self._size * most
        if x.quant is None:
            out = masked_rows(num_local_experts, capacity, width, dtype, device)
            rows, out_rows, scale, out_scale, num_groups = x.dense, out, None, None, 0
        else:
            out = quantized_masked_rows(num_local_experts, capacity, width, device)
            rows, out_rows, scale, out_scale, num_groups = x.quant.data, out.data, x.quant.scale, out.scale, width // GROUP
        words, out_words = _words(rows), _words(out_rows)
        counts = torch.empty((num_local_experts,), dtype=torch.int32, device=device)
        home = torch.empty((capacity, top_k), dtype=torch.int32, device=device)
        weight = torch.empty((capacity, top_k), device=device)
        topk_phy, num_words = topk_phy.contiguous(), words.shape[1]
        sizes = {"TOP_K": top_k, "KS": max(4, power_of_2(top_k)), "HEADER": _HEADER, "BLOCK": min(_WORDS, power_of_2(num_words)),
                 "GROUPS": power_of_2(num_groups) if num_groups else 0}  # fmt: skip
        send_packets_kernel[(most, self._size)](
            words, scale, topk_phy, topk_weight.contiguous(), window.addresses, window.op, counts, num_tokens, words.stride(0),
            *((0, 0) if scale is None else scale.stride()), self._rank, num_local_experts, self.max_tokens_per_rank, *window.places,
            num_words, num_groups, EXPERTS=power_of_2(num_local_experts), **sizes,
        )  # fmt: skip
        self._meet(window)
        place_packets_kernel[(capacity,)](
            window.addresses, window.op, counts, home, weight, out_words, out_scale, self._rank, most, self.max_tokens_per_rank,
            *window.places, out_words.stride(0), *((0, 0) if scale is None else (out_scale.stride(0), out_scale.stride(2))),
            num_words, num_groups, **sizes,
        )  # fmt: skip
        expected = expected_rows(topk_phy, num_local_experts, self.max_tokens_per_rank)
        return Dispatched(step.mode, out, counts, None, PeerHandle(home, weight, most, topk_phy, num_local_experts), expected)

    def combine(
        self, y: torch.Tensor, topk_weight: torch.Tensor, dispatched: Dispatched, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        handle: PeerHandle = dispatched.handle
        _, capacity, width = y.shape
        assert y.stride(2) == 1 and y.stride(1) == width, y.stride()
        assert shared is None or shared.is_contiguous(), shared.stride()
        window, block = self._windows[width, y.dtype], min(_COLUMNS, power_of_2(width))
        num_tokens, top_k = handle.topk_phy.shape
        blocks = cdiv(width, block)
        return_packets_kernel[(capacity, blocks)](
            y, handle.home, handle.weight, window.addresses, window.op, self._rank, handle.max_tokens, self.max_tokens_per_rank,
            *window.places, y.stride(0), width, TOP_K=top_k, HEADER=_HEADER, BLOCK=block,
        )  # fmt: skip
        self._meet(window)
        out = torch.empty((num_tokens, width), dtype=y.dtype, device=y.device)
        if num_tokens:
            sum_packets_kernel[(num_tokens, blocks)](
                window.addresses, window.op, handle.topk_phy, shared, out, self._rank, self.max_tokens_per_rank, *window.places,
                handle.num_local_experts, width, TOP_K=top_k, KS=power_of_2(top_k), SIZE=self._size, HEADER=_HEADER, BLOCK=block,
                HAS_SHARED=shared is not None,
            )  # fmt: skip
        return out

    def _meet(self, window: Window) -> None:
        meet_kernel[(1,)](window.flags, window.addresses, window.op, self._rank, self._size, RANKS=32, num_warps=1)


def _words(rows: torch.Tensor) -> torch.Tensor:
    """The same bytes as int32, the last dimension of which is dense."""
    return (rows if rows.stride(-1) == 1 else rows.contiguous()).view(torch.int32)
