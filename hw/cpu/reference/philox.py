"""Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

A draw is a pure function of its key and counter, so the noise of one token needs no state and no order. Words are held in int64.
"""

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10


def _mul_hi_lo(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    product = b * a  # wraps beyond 2^63; both halves survive the wrap
    return (product >> 32) & _MASK, product & _MASK


def philox(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Four words of 32 random bits for each counter. All arguments broadcastable int64 in [0, 2^32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        hi0, lo0 = _mul_hi_lo(_MULTIPLIERS[0], c0)
        hi1, lo1 = _mul_hi_lo(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def gumbel_noise(seed: torch.Tensor, sequence_idx: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise `[R, vocab_size]` float64, keyed by (seed, sequence, position, token); the three arguments are `[R]` int64.

    Counter = (token // 4, position, sequence, 0), key = the two halves of the seed; word `token % 4` belongs to the token.
    """
    quads = torch.arange((vocab_size + 3) // 4, device=seed.device)[None, :]
    rows = [word[:, None] & _MASK for word in (position, sequence_idx, seed, seed >> 32)]
    zero = torch.zeros_like(rows[0])
    words = philox((quads + zero, rows[0] + 0 * quads, rows[1] + 0 * quads, zero + 0 * quads), (rows[2], rows[3]))
    bits = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]
    # The half keeps the uniform inside (0, 1) at both ends; float64 so that the upper end does not round to 1.
    uniform = (bits.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform))
