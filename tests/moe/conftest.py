"""Small tensors: a second thread only waits for the first."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(seed: int) -> None:
    """After `seed`, which sets two."""
    torch.set_num_threads(1)
