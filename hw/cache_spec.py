"""What a model caches, declared layer by layer. The page allocator, prefix cache and transfers work from this alone.

A *page* holds `page_size` consecutive tokens of one sequence, in every layer at once, so one page id is valid for all layers.
"""

from dataclasses import dataclass
from math import prod

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}


@dataclass(frozen=True)
class PagedEntry:
    """One tensor that grows with the sequence: an entry of `shape` values for every `tokens_per_entry` tokens."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    tokens_per_entry: int = 1

    @property
    def entry_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class StateEntry:
    """One tensor of fixed size per sequence, such as a sliding window."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def state_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class LayerCache:
    """Everything one layer caches."""

    paged: tuple[PagedEntry, ...] = ()
    state: tuple[StateEntry, ...] = ()


@dataclass(frozen=True)
class CacheSpec:
    """All layers of a model, in order."""

    layers: tuple[LayerCache, ...]

    @property
    def bytes_per_token(self) -> float:
        return sum(entry.entry_bytes / entry.tokens_per_entry for layer in self.layers for entry in layer.paged)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's fixed-size state over all layers."""
        return sum(entry.state_bytes for layer in self.layers for entry in layer.state)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page over all layers. Raises ValueError if a page does not hold whole entries."""
        total = 0
        for layer in self.layers:
            for entry in layer.paged:
                if page_size % entry.tokens_per_entry:
                    raise ValueError(f"page size {page_size} is no multiple of {entry.tokens_per_entry}, one entry of {entry.name!r}")
                total += page_size // entry.tokens_per_entry * entry.entry_bytes
        return total
