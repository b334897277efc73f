"""The kernels of `csrc/`: compiled once with the machine's own compiler, kept in the folder of compiled kernels, called through ctypes.

They see no torch: a call passes addresses, sizes and the number of threads, and gives up the interpreter's lock meanwhile. Their
threads are of their own (`csrc/threads.h`).
"""

import ctypes
import hashlib
import logging
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from hw.kernel_folder import locked, make_folder

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("g++", "clang++")
# By preference: flags of a CPU that can run it, as Linux names them, and what to tell the compiler.
TARGETS = {
    "AVX512-BF16": (
        {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"},
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
    ),
    "AVX2": ({"avx2", "fma", "bmi2", "f16c", "movbe"}, ("-march=x86-64-v3",)),
}
# No contraction: a product and a sum are two roundings wherever torch makes two.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-pthread", "-fPIC", "-fvisibility=hidden")
_CTYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
# Arguments of each kernel: pointer, int64, float.
_SIGNATURES = {
    "product": "ipipipiippiiiiiiipiiiii",
    "widen": "ppi",
    "gate_topk": "ppiiiiiiiifpippppi",
    "silu_mul": "ipppiiii",
    "to_experts": "pipiiiipppi",
    "from_experts": "ipppppiiii",
    "mla_decode": "ipppipiiiiiifppi",
    "mla_prefill": "ipiipiipiippiiiifippi",
    "add_rms_norm": "ipppfiippi",
    "rope": "ipiippiiipiii",
    "latent_write": "ipipipiifppppppi",
    "sample": "piippppppppi",
    "lay_out": "ppiipipiipiiiiipppp",
    "settle": "ppipipiipp",
    "argmax": "piip",
    "guess": "ipiippiipi",
    "copy_rows": "pipipipiii",
    "add_int": "pipi",
}


class NoKernels(Exception):
    """The kernels cannot be had here; the message says why, in a few words."""


class Kernels:
    """The loaded library; each kernel is an attribute. Addresses are those of tensors in memory, `None` for one that is left out."""

    def __init__(self, path: Path, target: str, has_amx: bool = False):
        """has_amx: whether this CPU has a unit for matrices of bf16, which torch uses and these kernels do not."""
        self.path, self.target, self.has_amx = path, target, has_amx
        self._library = ctypes.CDLL(str(path))
        for name, arguments in {**_SIGNATURES, "repeat_calls": "pi", "begin_calls": "ppi", "finish_calls": "i"}.items():
            function = getattr(self._library, name)
            function.argtypes = [_CTYPES[letter] for letter in arguments]
            function.restype = ctypes.c_int64 if name == "begin_calls" else None
            setattr(self, name, function)

    @contextmanager
    def recorded(self, note: Callable[[list[int]], None]) -> Iterator[None]:
        """Calls made meanwhile are made, and told to `note`, as the words that `repeat_calls` takes."""
        kernels = {name: getattr(self, name) for name in _SIGNATURES}
        for name, kernel in kernels.items():

            def noted(*args, kernel=kernel, name=name) -> None:
                kernel(*args)
                note(self.words(name, args))

            setattr(self, name, noted)
        try:
            yield
        finally:
            vars(self).update(kernels)

    def words(self, name: str, args: tuple) -> list[int]:
        """A call, as `repeat_calls` takes it."""
        again = ctypes.cast(getattr(self._library, f"{name}_again"), ctypes.c_void_p).value
        return [again, len(args), *map(_word, _SIGNATURES[name], args)]


def _word(letter: str, argument: float | None) -> int:
    """An argument as 64 bits."""
    if letter == "f":
        return int.from_bytes(struct.pack("<f", argument), "little")
    return int(argument or 0) & 0xFFFFFFFFFFFFFFFF


def open_kernels(folder: str | None = None, target: str | None = None) -> Kernels:
    """Load the kernels, compiling them first if nobody has. folder: that of compiled kernels; None: the default. target: one of `TARGETS`;
    None: the best that this CPU can run.

    Raises NoKernels. Several processes may call it at once: one compiles, and nobody sees an unfinished file.
    """
    target = target or best_target()
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NoKernels(f"no C++ compiler is here ({' or '.join(COMPILERS)})")
    sources = sorted(SOURCES.iterdir())
    binary = Path(compiler).resolve()  # to ask it for its version would take longer than all the rest
    built_by = str(binary), binary.stat().st_size, binary.stat().st_mtime_ns, _FLAGS, TARGETS[target][1]
    facts = built_by, [(source.name, source.read_bytes()) for source in sources]
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    try:
        kept = make_folder(folder)
        path = kept / "cpu" / f"kernels-{digest}.so"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            with locked(path.parent):
                if not path.exists():
                    logger.info("CPU kernels: %s compiles them, once", compiler)
                    _compile([s for s in sources if s.suffix == ".cpp"], path, compiler, TARGETS[target][1])
        return Kernels(path, target, "amx_bf16" in cpu_flags())
    except OSError as error:
        raise NoKernels(f"they cannot be kept or loaded: {error}") from None


def best_target() -> str:
    """The first of `TARGETS` that this CPU can run. Raises NoKernels."""
    flags = cpu_flags()
    for target, (needed, _) in TARGETS.items():
        if needed <= flags:
            return target
    raise NoKernels("they need a CPU with AVX2")


def cpu_flags() -> set[str]:
    """What this CPU can do, in Linux's words. Raises NoKernels where that cannot be asked."""
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64"):
        raise NoKernels(f"they are for x86-64, this CPU is {machine}")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError as error:
        raise NoKernels(f"the CPU cannot be asked what it can do: {error}") from None
    return set(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def _compile(sources: list[Path], path: Path, compiler: str, target: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        objects = [str(Path(work, source.stem + ".o")) for source in sources]
        commands = [[compiler, *_FLAGS, *target, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)]
        with ThreadPoolExecutor(len(commands)) as pool:
            list(pool.map(_run, commands))
        fresh = Path(work, path.name)
        _run([compiler, "-shared", "-pthread", *objects, "-o", str(fresh)])
        fresh.replace(path)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [f"code {done.returncode}"]
        raise NoKernels(f"{Path(command[0]).name} failed: {lines[0]}")
    return done.stdout
