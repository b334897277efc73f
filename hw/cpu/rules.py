"""What the CPU backend decides without being opened: kernels compiled on this machine where it can have them, torch for the rest."""

from pathlib import Path

import torch

from hw.cpu.native import NoKernels, open_kernels
from hw.rules import Facts, ModelShapes, Provider

# Ops that the kernels serve, if all arguments are dense, fp32 or bf16.
NATIVE = "linear, grouped_linear, grouped_linear_masked, absorb_query, unabsorb, gate_topk, silu_mul"


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
    return [
        Provider(NATIVE, f"native kernels for {kernels.target}", shape="dense weights"),
        Provider("the rest", "torch", shape="all"),
        comm,
    ]


FACTS = Facts(keeps_fp8=False, compute_dtype=compute_dtype, providers=providers)
