"""Programmatic dependent launch: a kernel is set up while the one before it ends, and waits for its results when it needs them.

Between the short kernels of a decode step that hides most of the time from one to the next.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """First in a kernel: everything queued before it is done and seen from here on. The kernel after it may be set up from now on."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


def early(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that begins with `wait_for_inputs`.

    Off: FlashMLA's kernel does not wait for the one before it, and read queries that were not all there (16 and 64 sequences).
    """
    return {"EARLY": False}
