"""What the CPU backend decides without being opened: kernels compiled on this machine where it can have them, torch for the rest."""

from pathlib import Path

import torch

from hw.api import Ops
from hw.cpu.native import NoKernels, open_kernels
from hw.cpu.native_ops import NativeOps
from hw.cpu.ops import CpuOps
from hw.rules import Facts, ModelShapes, Provider


def compute_dtype(checkpoint_dtype: str) -> str:
    # Without native bf16 instructions a bf16 product is emulated and slower than fp32.
    native = torch.backends.cpu.get_cpu_capability() == "AVX512" and "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    return "bfloat16" if native and checkpoint_dtype != "float32" else "float32"


def providers(model: ModelShapes) -> list[Provider]:
    """The kernels are compiled, if they have not been: only so can it be told whether they work."""
    comm = Provider("dispatch, combine", "in this process" if model.num_ranks == 1 else "gloo", shape="all")
    try:
        kernels = open_kernels()
    except NoKernels as error:
        return [Provider("all of Ops", "torch", f"native kernels: {error}", shape="all"), comm]
    names = [name for name in vars(Ops) if not name.startswith("_")]
    served = [name for name in names if getattr(NativeOps, name) is not getattr(CpuOps, name)]
    amx = "products of 8 rows and more in bf16 are torch's: this CPU has AMX" if kernels.has_amx else ""
    native = Provider(
        ", ".join(served), f"native kernels for {kernels.target}", amx, shape="rows in fp32 and bf16, weights in block-FP8 too"
    )
    return [native, Provider("the rest", "torch", shape="all"), comm]


FACTS = Facts(keeps_fp8=False, compute_dtype=compute_dtype, providers=providers)
