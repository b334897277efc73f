"""The CUDA backend: one Hopper GPU a rank, all on one machine.

Library kernels where their shapes fit, elsewhere Triton kernels of ours and composites.
"""

from collections.abc import Callable
from types import ModuleType

import torch
import triton

from hw.api import Backend, Collectives, ExpertComm, Unsupported
from hw.cuda.deep_ep import DeepEpComm
from hw.cuda.ep_comm import NcclExpertComm
from hw.cuda.expert_comm import LocalExpertComm
from hw.cuda.kernel_cache import KernelCache
from hw.cuda.nccl import NcclGroup
from hw.cuda.ops import CudaOps
from hw.cuda.peers import PeerExpertComm
from hw.cuda.ranks_comm import RanksExpertComm
from hw.cuda.rules import DEEP_EP, FACTS, NCCL, PEERS, PEERS_MOST_RANKS
from hw.cuda.runtime import CudaRuntime
from hw.groups import Groups
from hw.moves import ExpertMoves


def open_cuda(
    groups: Groups,
    *,
    batch_invariant: bool,
    max_dispatch_tokens_per_rank: int,
    num_threads: int | None,
    kernel_cache_dir: str | None,
) -> Backend:
    """One rank, on the current GPU if it is alone, else on the one with its number among the ranks of its machine. Collective.

    `num_threads` sets torch's thread count of the process. Raises Unsupported for what this backend cannot promise, and where a GPU or a
    library is missing.
    """
    if batch_invariant:
        raise Unsupported("cuda: batch_invariant, since FlashMLA picks its splits, and cuBLAS its kernels, from the batch")
    if not torch.cuda.is_available():
        raise Unsupported("cuda: torch sees no GPU")
    if groups.world.size > 1:
        _take_gpu(groups)
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
    comm, tp, moves = _over_ranks(groups, max_dispatch_tokens_per_rank)
    return Backend(
        name="cuda",
        ops=CudaOps(flash_mla=flash_mla, deep_gemm=deep_gemm),
        runtime=CudaRuntime(
            torch.device("cuda", torch.cuda.current_device()), kernel_cache, groups.world if groups.world.size > 1 else None
        ),
        expert_comm=comm,
        tp=tp,
        moves=moves,
        keeps_fp8=FACTS.keeps_fp8,
    )


def _libraries():
    try:
        import deep_gemm
        import flash_mla
    except ImportError as error:
        raise Unsupported(f"cuda: the kernel libraries of the `cuda` extra do not load: {error}") from error
    return flash_mla, deep_gemm


def _take_gpu(groups: Groups) -> None:
    parallel, rank = groups.parallel, groups.rank
    if parallel.nodes > 1:
        raise Unsupported(f"cuda: ranks on {parallel.nodes} machines, since experts are reached over NVLink only")
    if parallel.num_ranks > torch.cuda.device_count():
        raise Unsupported(f"cuda: {parallel.num_ranks} ranks on a machine with {torch.cuda.device_count()} GPUs, each rank needs its own")
    torch.cuda.set_device(rank)


def _over_ranks(groups: Groups, max_dispatch_tokens_per_rank: int) -> tuple[ExpertComm, Collectives, ExpertMoves | None]:
    """How this rank reaches experts, the other ranks of its TP group, and how experts move."""
    if groups.world.size == 1:
        return LocalExpertComm(max_dispatch_tokens_per_rank), groups.tp, None
    everyone = NcclGroup("ep", groups.ep.ranks, groups.rank, groups.rendezvous)
    same = groups.tp.ranks == groups.ep.ranks
    tp = everyone if same else NcclGroup(groups.tp.name, groups.tp.ranks, groups.rank, groups.rendezvous)
    # NVLink and one 400 Gb/s card a rank, by their data sheets and less a third; products as measured in bench/results.
    moves = ExpertMoves(everyone, node_bytes_per_s=300e9, network_bytes_per_s=35e9, expert_flops_per_s=1100e12)
    cap = max_dispatch_tokens_per_rank
    openers: dict[str, Callable[[], ExpertComm]] = {
        PEERS: lambda: PeerExpertComm(groups.ep, cap),
        DEEP_EP: lambda: DeepEpComm(import_deep_ep(), groups.ep, cap, low_latency=groups.ep.size > PEERS_MOST_RANKS),
        NCCL: lambda: NcclExpertComm(everyone, cap),
    }
    return RanksExpertComm(openers, groups.ep.size, cap), tp, moves


def import_deep_ep() -> ModuleType:
    try:
        import deep_ep
    except ImportError as error:
        raise Unsupported(f"cuda: DeepEP, or the NVSHMEM that it needs, of the `cuda` extra does not load: {error}") from error
    return deep_ep
