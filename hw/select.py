"""Name to backend. The only file that names one; nothing is imported before it is asked for."""

from collections.abc import Sequence

import torch

from hw.api import Backend, Unsupported
from hw.groups import Groups, open_groups
from hw.rules import Facts
from hw.topology import ParallelConfig
from hw.transfer import KVTransfer

NAMES = ("cpu", "cuda")


def open_backend(
    name: str,
    groups: Groups | None = None,
    *,
    batch_invariant: bool = False,
    max_dispatch_tokens_per_rank: int = 128,
    num_threads: int | None = None,
    kernel_cache_dir: str | None = None,
    cpu_kernels: str = "auto",
) -> Backend:
    """Load a backend for this rank; without groups it is alone. kernel_cache_dir: where compiled kernels are kept; None: its own choice.
    cpu_kernels: of the CPU backend, "native" (compiled here), "torch", or "auto": native where they can be had.

    Raises ValueError for an unknown name, Unsupported for a flag that it cannot promise and for what is missing here.
    """
    groups = groups or open_groups(ParallelConfig(), 0)
    options = {
        "batch_invariant": batch_invariant,
        "max_dispatch_tokens_per_rank": max_dispatch_tokens_per_rank,
        "num_threads": num_threads,
        "kernel_cache_dir": kernel_cache_dir,
    }
    if name == "cpu":
        from hw.cpu.backend import open_cpu

        return open_cpu(groups, cpu_kernels=cpu_kernels, **options)
    if name == "cuda":
        try:
            from hw.cuda.backend import open_cuda
        except ModuleNotFoundError as error:
            raise Unsupported(f"cuda: {error.name} is not installed; it comes with a torch that is built for CUDA") from None

        return open_cuda(groups, **options)
    raise ValueError(_unknown(name))


def open_transfer(role: str, caches: Sequence[torch.Tensor]) -> KVTransfer:
    """This rank's end of transfers between instances, of pages `[num_pages, ...]` in each of `caches`; role: a readable part of its name.

    Raises Unsupported where what moves pages is not installed or does not know their device.
    """
    from hw.nixl_transfer import NixlTransfer

    return NixlTransfer(role, caches)


def backend_facts(name: str) -> Facts:
    """What a backend decides whether or not its device is here. Raises ValueError for an unknown name."""
    if name == "cpu":
        from hw.cpu.rules import FACTS

        return FACTS
    if name == "cuda":
        from hw.cuda.rules import FACTS

        return FACTS
    raise ValueError(_unknown(name))


def list_devices(name: str) -> tuple[list[str] | None, str]:
    """A line for each device of a backend on this machine, and its driver's version; None: its ranks share the machine.

    Raises ValueError for an unknown name, and whatever a broken driver raises.
    """
    if name == "cpu":
        return None, ""
    if name == "cuda":
        from hw.cuda.devices import list_gpus

        return list_gpus()
    raise ValueError(_unknown(name))


def _unknown(name: str) -> str:
    return f"unknown device {name!r}, known are: {', '.join(NAMES)}"
