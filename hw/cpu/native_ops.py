"""The CPU ops with the kernels of `csrc/` where those take a call, over the ops in torch for the rest."""

from hw.cpu.invariant import InvariantOps
from hw.cpu.native import Kernels
from hw.cpu.native_attention import NativeAttention
from hw.cpu.native_elementwise import NativeElementwise
from hw.cpu.native_experts import NativeExperts
from hw.cpu.ops import CpuOps


class NativeOps(NativeAttention, NativeExperts, NativeElementwise, CpuOps):
    """See `hw.api.Ops`."""

    def __init__(self, kernels: Kernels):
        self.kernels = kernels


class NativeInvariantOps(NativeAttention, NativeExperts, NativeElementwise, InvariantOps):
    """See `hw.api.Ops`. The kernels sum in an order that no batch changes, so they serve this mode as well."""

    def __init__(self, kernels: Kernels):
        self.kernels = kernels
