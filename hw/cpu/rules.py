"""What the CPU backend decides without being opened. Everything is torch: the reference, or whole batches of it where that is faster."""

from pathlib import Path

import torch

from hw.rules import Facts, ModelShapes, Provider


def compute_dtype(checkpoint_dtype: str) -> str:
    # Without native bf16 instructions a bf16 product is emulated and slower than fp32.
    native = torch.backends.cpu.get_cpu_capability() == "AVX512" and "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    return "bfloat16" if native and checkpoint_dtype != "float32" else "float32"


def providers(model: ModelShapes) -> list[Provider]:
    """One for all ops."""
    comm = "in this process" if model.num_ranks == 1 else "gloo"
    return [Provider("all of Ops", "torch (reference)", shape="all"), Provider("dispatch, combine", comm, shape="all")]


FACTS = Facts(keeps_fp8=False, compute_dtype=compute_dtype, providers=providers)
