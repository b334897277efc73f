"""The CUDA backend: one Hopper GPU a rank. Library kernels where their shapes fit, elsewhere Triton kernels of ours and composites."""

import torch
import triton

from hw.api import Backend, Unsupported
from hw.cuda.expert_comm import LocalExpertComm
from hw.cuda.kernel_cache import KernelCache
from hw.cuda.ops import CudaOps
from hw.cuda.rules import FACTS
from hw.cuda.runtime import CudaRuntime
from hw.groups import Groups


def open_cuda(
    groups: Groups,
    *,
    batch_invariant: bool,
    max_dispatch_tokens_per_rank: int,
    num_threads: int | None,
    kernel_cache_dir: str | None,
) -> Backend:
    """One rank on the current GPU. `num_threads` sets torch's thread count of the process.

    Raises Unsupported for what this backend cannot promise, and where the GPU or a library is missing.
    """
    if batch_invariant:
        raise Unsupported("cuda: batch_invariant, since FlashMLA picks its splits, and cuBLAS its kernels, from the batch")
    if groups.world.size > 1:
        raise Unsupported(f"cuda: {groups.world.size} ranks, since this backend has no collectives yet; it runs dp 1, tp 1")
    if not torch.cuda.is_available():
        raise Unsupported("cuda: torch sees no GPU")
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        raise Unsupported(f"cuda: a GPU of compute capability {major}.{minor}; FlashMLA's dense decode and these DeepGEMM calls need 9.0")
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    # Sums run in fp32 whatever the model dtype: no bf16 partial sums where cuBLAS splits K. (TF32 is off unless someone asks for it.)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    flash_mla, deep_gemm = _libraries()
    card = torch.cuda.get_device_properties()
    versions = (torch.__version__, torch.version.cuda, triton.__version__, deep_gemm.__version__)
    kernel_cache = KernelCache(kernel_cache_dir, (card.name, card.multi_processor_count, *versions))
    kernel_cache.use()
    return Backend(
        name="cuda",
        ops=CudaOps(flash_mla=flash_mla, deep_gemm=deep_gemm),
        runtime=CudaRuntime(torch.device("cuda", torch.cuda.current_device()), kernel_cache),
        expert_comm=LocalExpertComm(max_dispatch_tokens_per_rank),
        tp=groups.tp,
        keeps_fp8=FACTS.keeps_fp8,
    )


def _libraries():
    try:
        import deep_gemm
        import flash_mla
    except ImportError as error:
        raise Unsupported(f"cuda: the kernel libraries of the `cuda` extra do not load: {error}") from error
    return flash_mla, deep_gemm
