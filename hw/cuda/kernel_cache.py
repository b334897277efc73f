"""The folder in which compiled kernels outlast the process: `deep_gemm/`, with a note of what has been compiled ahead, and `triton/`.

A copy serves on another machine with the same GPU and compiler and the libraries in the same place: DeepGEMM makes the name of a kernel
from, among others, the path of its own header files.
"""

import hashlib
import json
import os
from contextlib import AbstractContextManager

from hw.api import Unsupported
from hw.kernel_folder import locked, make_folder


class KernelCache:
    """Kernels by product and row count. Several processes may share a folder."""

    def __init__(self, folder: str | None, facts: tuple):
        """`folder` None: the default. facts: the GPU and the versions of libraries, which a kernel is compiled for.

        Raises Unsupported if the folder cannot be made.
        """
        try:
            self.folder = make_folder(folder)
        except OSError as error:
            raise Unsupported(f"cuda: the kernel cache {error.filename} cannot be made: {error.strerror}") from None
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
        self._kernels = self.folder / "deep_gemm"
        self._note = self._kernels / "cache" / f"compiled-{digest}.json"  # beside the kernels it speaks of

    def use(self) -> None:
        """Point the libraries to the folder. DeepGEMM reads the environment, once a process, when it first compiles."""
        import triton

        os.environ["DG_JIT_CACHE_DIR"] = str(self._kernels)
        triton.knobs.cache.dir = str(self.folder / "triton")

    def locked(self) -> AbstractContextManager[None]:
        """One process at a time; the others wait, and then find what the first one compiled."""
        return locked(self.folder)

    def lacking(self, wanted: dict[str, set[int]]) -> dict[str, set[int]]:
        """What of `wanted`, row counts by product, has not been compiled yet."""
        done = self._noted()
        missing = {product: rows - set(done.get(product, ())) for product, rows in wanted.items()}
        return {product: rows for product, rows in missing.items() if rows}

    def note(self, compiled: dict[str, set[int]]) -> None:
        """Remember what has been compiled. The caller holds the lock."""
        done = self._noted()
        for product, rows in compiled.items():
            done[product] = sorted(rows | set(done.get(product, ())))
        self._note.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._note.with_suffix(".new")
        fresh.write_text(json.dumps(done))
        fresh.replace(self._note)

    def _noted(self) -> dict[str, list[int]]:
        try:
            return json.loads(self._note.read_text())
        except (OSError, ValueError):  # none, or one that was cut off: what is there is found again
            return {}
