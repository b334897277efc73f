"""A head in 8 bits, by the kernel of `csrc/guesses.cpp`."""

from collections.abc import Callable

import torch

from hw.cpu.native import Kernels

_COLUMNS, _INNER, _ZERO = 64, 4, 128  # see the kernel
_TILE = 4096  # rows that are wide at a time


class NativeGuessHead:
    """See `hw.guess_head.GuessHead`. Each row is rounded to 255 steps between plus and minus its largest value, inputs alike."""

    def __init__(self, kernels: Kernels, empty: Callable[[tuple[int, ...], torch.dtype], torch.Tensor], weight: torch.Tensor):
        """empty: allocates what is read in every step."""
        self._kernels, self._shape = kernels, weight.shape
        groups, steps = -(-weight.shape[0] // _COLUMNS), -(-weight.shape[1] // _INNER)
        self._data = empty((groups, steps, _COLUMNS, _INNER), torch.uint8)
        self._scales = empty((groups * _COLUMNS,), torch.float32)
        self.fill(weight)

    def fill(self, weight: torch.Tensor) -> None:
        assert weight.shape == self._shape, (weight.shape, self._shape)
        steps = self._data.shape[1]
        for low in range(0, len(self._scales), _TILE):
            tile = weight[low : low + _TILE].float()
            num = -(-len(tile) // _COLUMNS) * _COLUMNS
            tile = torch.nn.functional.pad(tile, (0, steps * _INNER - tile.shape[1], 0, num - len(tile)))
            scales = tile.abs().amax(1).clamp(min=2.0**-100) / 127
            stored = (tile / scales[:, None]).round().add(_ZERO).to(torch.uint8)
            self._scales[low : low + num] = scales
            self._data[low // _COLUMNS : (low + num) // _COLUMNS] = stored.view(-1, _COLUMNS, steps, _INNER).transpose(1, 2)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert hidden.stride(1) == 1 and hidden.shape[1] == self._shape[1], (hidden.shape, hidden.stride())
        out = torch.empty(hidden.shape[0], self._shape[0])
        self._kernels.guess(
            hidden.dtype is torch.bfloat16, hidden.data_ptr(), hidden.stride(0), hidden.shape[0], self._data.data_ptr(),
            self._scales.data_ptr(), *self._shape, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out
