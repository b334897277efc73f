"""Small host lists to the device without waiting for it."""

import torch


def send(values: torch.Tensor | list[int], device: torch.device) -> torch.Tensor:
    """A copy as int32 (of a list) or as it is (of a tensor), queued behind earlier work. From pageable memory torch would wait for that."""
    tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.int32)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
