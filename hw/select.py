"""Name to backend. The only file that names one; nothing is imported before it is asked for."""

from hw.api import Backend

NAMES = ("cpu",)


def open_backend(
    name: str, *, batch_invariant: bool = False, max_dispatch_tokens_per_rank: int = 128, num_threads: int | None = None
) -> Backend:
    """Load a backend for this rank. Raises ValueError for an unknown name, Unsupported for a flag that it cannot promise."""
    if name == "cpu":
        from hw.cpu.backend import open_cpu

        return open_cpu(batch_invariant=batch_invariant, max_dispatch_tokens_per_rank=max_dispatch_tokens_per_rank, num_threads=num_threads)
    raise ValueError(f"unknown device {name!r}, known are: {', '.join(NAMES)}")
