"""AdamW's moments in 8 bits, without torch: which parameters have them, their arrays, and the seeds of their rounding.

The core (cpp/engine/training.h) defines the codes. Two bytes per weight, and two float32 scales per block of weights.
"""

from __future__ import annotations

import numpy as np

MOMENT_BLOCK = 256
"""Weights that share a scale."""
_LEAST = 4096
"""Elements of the smallest parameter with 8-bit moments, as in bitsandbytes: norms and biases keep float32 ones."""


def is_in_8_bits(n: int) -> bool:
    """Whether a parameter of n elements has 8-bit moments."""
    return n >= _LEAST


def n_blocks(n: int) -> int:
    """Return the number of blocks of n weights."""
    return -(-n // MOMENT_BLOCK)


def moment_bytes(n: int) -> int:
    """Return the bytes of the moments of a parameter of n elements."""
    return 2 * (n + 4 * n_blocks(n)) if is_in_8_bits(n) else 8 * n


def moment_seed(index: int, step: int, part: int = 0) -> int:
    """Return the seed of the stochastic rounding of a part of a parameter, by its index, in a step."""
    return int(np.random.SeedSequence([index, step, part]).generate_state(1, np.uint64)[0])


def make_moments(parameter: np.ndarray, n_parts: int, in_8_bits: bool) -> tuple[np.ndarray, ...]:
    """Return moments of zeros: m and v, float32; or in 8 bits codes of m and v, and their scales by part and block.

    Args:
        n_parts: equal parts of the rows that are updated separately, with blocks that begin at theirs.
    """
    if not (in_8_bits and is_in_8_bits(parameter.size)):
        return np.zeros_like(parameter), np.zeros_like(parameter)
    blocks = n_parts, n_blocks(parameter.size // n_parts)
    codes = [np.zeros(parameter.shape, np.uint8) for _ in range(2)]
    return *codes, *(np.zeros(blocks, np.float32) for _ in range(2))
