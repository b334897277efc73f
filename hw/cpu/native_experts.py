"""Gate, SwiGLU and the way to experts and back by the kernels of `csrc/experts.cpp`."""

import torch

from hw.api import Activation, Dispatched, ExpertMode, ExpertRows, ExpertStep, GateRule, Replicas
from hw.cpu.expert_comm import LocalExpertComm, LocalHandle
from hw.cpu.native import Kernels
from hw.cpu.native_products import takes
from hw.quant import QuantTensor, dequantize


class NativeExperts:
    """See `hw.api.Ops`. A mixin like `NativeProducts`; rows are by themselves here, so nothing depends on the batch."""

    kernels: Kernels

    def gate_logits(self, x, weight):
        if x.dtype is not torch.bfloat16 or not x.is_contiguous():
            return super().gate_logits(x, weight)
        wide = torch.empty(x.shape)
        self.kernels.widen(x.data_ptr(), wide.data_ptr(), x.numel())
        return self.linear(wide, weight)

    def gate_topk(self, logits, bias, rule: GateRule, replicas: Replicas):
        num_rows, num_experts = logits.shape
        logits = logits.contiguous()
        idx = torch.empty(num_rows, rule.top_k, dtype=torch.int64)
        physical, weight = torch.empty_like(idx), torch.empty(num_rows, rule.top_k)
        self.kernels.gate_topk(
            logits.data_ptr(), None if bias is None else bias.data_ptr(), num_rows, num_experts, rule.top_k, rule.scoring == "softmax",
            rule.num_groups, rule.topk_groups, rule.group_score == "top2_sum", rule.normalize, rule.scaling,
            replicas.slots.data_ptr(), replicas.slots.shape[1], replicas.counts.data_ptr(),
            idx.data_ptr(), physical.data_ptr(), weight.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return idx, physical, weight

    def silu_mul(self, gate_up, quant=False, counts=None):
        if quant or not takes(gate_up) or not gate_up.is_contiguous():
            return super().silu_mul(gate_up, quant, counts)
        inner = gate_up.shape[-1] // 2
        out = torch.empty(*gate_up.shape[:-1], inner, dtype=gate_up.dtype)
        groups, rows = (1, gate_up.shape[0]) if counts is None else gate_up.shape[:2]
        self.kernels.silu_mul(
            gate_up.dtype is torch.bfloat16, gate_up.data_ptr(), out.data_ptr(), None if counts is None else counts.data_ptr(),
            groups, rows, inner, torch.get_num_threads(),
        )  # fmt: skip
        return out


class NativeExpertComm(LocalExpertComm):
    """ExpertComm of an instance with one rank, by the kernels."""

    def __init__(self, max_tokens_per_rank: int, kernels: Kernels):
        super().__init__(max_tokens_per_rank)
        self.kernels = kernels

    def dispatch(
        self, x: Activation, topk_phy: torch.Tensor, topk_weight: torch.Tensor, step: ExpertStep, num_local_experts: int
    ) -> Dispatched:
        rows = x.smallest
        if isinstance(rows, QuantTensor):
            rows = dequantize(rows, torch.bfloat16)
        rows, topk_phy = rows.contiguous(), topk_phy.contiguous()
        (num_tokens, top_k), width, size = topk_phy.shape, rows.shape[1], rows.element_size()
        masked = step.mode is ExpertMode.LOW_LATENCY
        assert not masked or num_tokens <= self.max_tokens_per_rank, (num_tokens, self.max_tokens_per_rank)
        # A token meets an expert at most once, so num_tokens rows are enough for each expert.
        shape = (num_local_experts, num_tokens, width) if masked else (num_tokens * top_k, width)
        out, counts = torch.empty(shape, dtype=rows.dtype), torch.empty(num_local_experts, dtype=torch.int32)
        home = torch.empty(num_tokens, top_k, dtype=torch.int64)
        self.kernels.to_experts(
            rows.data_ptr(), width * size, topk_phy.data_ptr(), num_tokens, top_k, num_local_experts,
            num_tokens if masked else 0, counts.data_ptr(), home.data_ptr(), out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return Dispatched(step.mode, out, counts, None if masked else ExpertRows(counts.tolist()), LocalHandle(home))

    def combine(
        self, y: torch.Tensor, topk_weight: torch.Tensor, dispatched: Dispatched, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not takes(*((y,) if shared is None else (y, shared))):
            return super().combine(y, topk_weight, dispatched, shared)
        num_tokens, top_k = topk_weight.shape
        y, weight = y.contiguous(), topk_weight.contiguous()
        shared = None if shared is None else shared.contiguous()
        out = torch.empty(num_tokens, y.shape[-1], dtype=y.dtype)
        self.kernels.from_experts(
            y.dtype is torch.bfloat16, y.data_ptr(), dispatched.handle.home.data_ptr(), weight.data_ptr(),
            None if shared is None else shared.data_ptr(), out.data_ptr(), num_tokens, top_k, out.shape[1], torch.get_num_threads(),
        )  # fmt: skip
        return out
