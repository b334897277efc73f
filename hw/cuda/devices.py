"""GPUs of this machine, for people and preflight."""

import ctypes

import torch


def list_gpus() -> tuple[list[str], str]:
    """A line for each GPU that torch sees, and the newest CUDA version that the driver takes, empty without a driver."""
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    lines = [f"{card.name}, {card.total_memory / 2**30:.0f} GiB, compute capability {card.major}.{card.minor}" for card in cards]
    return lines, _driver_version()


def _driver_version() -> str:
    """Asked of the driver itself: torch tells which CUDA it was built for."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return ""
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
