"""Expert dispatch over the GPUs of a machine through DeepEP's `Buffer`.

throughput    its normal mode: a token goes once to each rank that holds some of its experts, where it is copied to each of them; their
              outputs are weighed and summed there, and the source sums what ranks send. So a sum depends on where experts live, and it is
              rounded to bf16 on each rank, at the source, and once more with the shared rows.
low latency   its low-latency mode: bf16 rows are quantised while they are sent, where experts want that; every output comes home and the
              source sums in top-k order, rounded to bf16 before the shared rows are added. A result lies in one of two buffers that take
              turns, so it is gone after the next but one dispatch.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from hw.api import Activation, Dispatched, ExpertMode, ExpertStep, Rows
from hw.cuda.expert_comm import LocalExpertComm, expected_rows
from hw.groups import Group
from hw.quant import QuantTensor

# The library's own masked layout is whole tiles of DeepGEMM only for such a number of rows for each expert.
_ALIGN_ROWS = 128
# Multiprocessors that the normal mode holds: alone, and beside another micro-batch that computes.
_NUM_SMS, _NUM_SMS_BESIDE = 48, 20


@dataclass(frozen=True)
class NormalHandle:
    """How to send partial sums home."""

    received: Any  # the library's
    config: Any  # the library's, of the way back
    local: Dispatched  # what was received, copied to each local expert
    weight: torch.Tensor  # [num_received, k] fp32, of the local experts


@dataclass(frozen=True)
class LowLatencyHandle:
    """How to send expert outputs home."""

    received: Any  # the library's
    topk_phy: torch.Tensor  # [T, k] int64


class DeepEpComm:
    """ExpertComm of several ranks on one machine, of the shapes that `hw.cuda.rules` leave to it."""

    def __init__(self, library: ModuleType, control: Group, max_tokens_per_rank: int, *, low_latency: bool):
        """control: the ranks over gloo, to exchange where the library's buffers are. low_latency: with room for that mode."""
        self._library, self._control, self._low_latency = library, control, low_latency
        self._size = control.size
        self.max_tokens_per_rank = max_tokens_per_rank
        self._rows_per_rank = _round_up(max_tokens_per_rank, _ALIGN_ROWS // self._size if _ALIGN_ROWS % self._size == 0 else _ALIGN_ROWS)
        self._local = LocalExpertComm(max_tokens_per_rank)
        self._buffers: dict[tuple[int, int], Any] = {}  # by hidden size and local experts
        # By whether the step is overlapped.
        self._configs = {beside: _configs(library, self._size, num) for beside, num in ((False, _NUM_SMS), (True, _NUM_SMS_BESIDE))}

    def reserve(self, hidden_size: int, num_local_experts: int, dtype: torch.dtype) -> None:
        """Make the buffer, once: its size is set by the mode and the cap, not by the tokens of a step."""
        if (hidden_size, num_local_experts) not in self._buffers:
            self._buffers[hidden_size, num_local_experts] = self._make(hidden_size, num_local_experts)

    def _make(self, hidden_size: int, num_local_experts: int) -> Any:
        buffer = self._library.Buffer
        num_experts = num_local_experts * self._size
        configs = (config for pair in self._configs.values() for config in pair)
        num_rdma_bytes = buffer.get_low_latency_rdma_size_hint(self._rows_per_rank, hidden_size, self._size, num_experts)
        return buffer(
            None,
            num_nvl_bytes=max(config.get_nvl_buffer_size_hint(2 * hidden_size, self._size) for config in configs),
            num_rdma_bytes=num_rdma_bytes if self._low_latency else 0,
            low_latency_mode=self._low_latency,
            num_qps_per_rank=num_local_experts,
            comm=_Exchange(self._control),
        )

    def dispatch(
        self, x: Activation, topk_phy: torch.Tensor, topk_weight: torch.Tensor, step: ExpertStep, num_local_experts: int
    ) -> Dispatched:
        dense = x.rows(quantized=False)
        self.reserve(dense.shape[1], num_local_experts, dense.dtype)
        buffer = self._buffers[dense.shape[1], num_local_experts]
        topk_phy = topk_phy.contiguous()
        if step.mode is ExpertMode.THROUGHPUT:
            return self._normal(buffer, x.smallest, topk_phy, topk_weight, step, num_local_experts)
        assert dense.shape[0] <= self.max_tokens_per_rank, (dense.shape, self.max_tokens_per_rank)
        received, counts, handle, _, _ = buffer.low_latency_dispatch(
            dense.contiguous(), topk_phy, self._rows_per_rank, num_local_experts * self._size, use_fp8=x.quant is not None
        )
        rows = received if x.quant is None else QuantTensor(*received, block=(1, 128))
        expected = expected_rows(topk_phy, num_local_experts, self.max_tokens_per_rank)
        return Dispatched(step.mode, rows, counts, None, LowLatencyHandle((buffer, handle), topk_phy), expected)

    def _normal(self, buffer: Any, x: Rows, topk_phy, topk_weight, step: ExpertStep, num_local: int) -> Dispatched:
        there, back = self._configs[step.overlapped]
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_phy, num_local * self._size)
        wire = (x.data, x.scale.contiguous()) if isinstance(x, QuantTensor) else x.contiguous()
        rows, local_idx, weight, counts, handle, _ = buffer.dispatch(
            wire,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_phy,
            topk_weights=topk_weight.contiguous(),
            config=there,
        )
        arrived = Activation(rows) if isinstance(rows, torch.Tensor) else Activation(None, QuantTensor(*rows, block=(1, 128)))
        local = self._local.dispatch(arrived, local_idx, weight, step, num_local, counts)
        return Dispatched(step.mode, local.x, local.counts, local.layout, NormalHandle((buffer, handle), back, local, weight))

    def combine(
        self, y: torch.Tensor, topk_weight: torch.Tensor, dispatched: Dispatched, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        handle = dispatched.handle
        if isinstance(handle, NormalHandle):
            buffer, received = handle.received
            partial = self._local.combine(y, handle.weight, handle.local)
            total, _, _ = buffer.combine(partial, received, config=handle.config)
        else:
            buffer, received = handle.received
            total, _, _ = buffer.low_latency_combine(y, handle.topk_phy, topk_weight.contiguous(), received)
        return total if shared is None else total + shared


def _configs(library: ModuleType, size: int, num_sms: int) -> tuple[Any, Any]:
    """The library's own for so many ranks and multiprocessors, of the normal mode: there, and back."""
    library.Buffer.set_num_sms(num_sms)
    return library.Buffer.get_dispatch_config(size), library.Buffer.get_combine_config(size)


class _Exchange:
    """What the library needs of a communicator, over gloo."""

    def __init__(self, group: Group):
        self._group = group

    def Get_rank(self) -> int:
        return self._group.rank

    def Get_size(self) -> int:
        return self._group.size

    def allgather(self, value: int | bytearray | None) -> list:
        """Device numbers, or handles of memory, of which a rank may have none."""
        group = self._group
        if isinstance(value, int):
            return [found for (found,) in group.all_gather_ints([value])]
        data = b"" if value is None else bytes(value)
        found = [group.broadcast_bytes(data if root == group.rank else None, root) for root in range(group.size)]
        return [bytearray(each) if each else None for each in found]


def _round_up(num: int, multiple: int) -> int:
    return -(-num // multiple) * multiple
