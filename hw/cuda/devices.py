"""GPUs of this machine, for people and preflight."""

import torch


def list_gpus() -> tuple[list[str], str]:
    """A line for each GPU that torch sees, and the newest CUDA version that the driver takes."""
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    lines = [f"{card.name}, {card.total_memory / 2**30:.0f} GiB, compute capability {card.major}.{card.minor}" for card in cards]
    version = torch._C._cuda_getDriverVersion() if cards else 0
    return lines, f"CUDA {version // 1000}.{version % 1000 // 10}" if version else ""
