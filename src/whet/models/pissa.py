"""PiSSA: adapters that begin as the principal part of their matrix (Meng et al. 2024, arXiv 2404.02948).

With the singular values W = U S V^T, s the scaling, and the largest r components:

    A_0 = sqrt(S_r / s) V_r^T,    B_0 = U_r sqrt(S_r / s),    W x = (W - s B_0 A_0) x + s B_0 A_0 x

The residual W - s B_0 A_0 is not stored: W is unchanged, also packed, and the adapter has twice the rank, [A; A_0] and
[B, -B_0], of which the second half does not train. The function and the gradients of A and B are PiSSA's, the base
without the adapter is still the model, and the file is plain LoRA, as PEFT's conversion of PiSSA writes it. On a
quantised base the residual keeps the rounding error of W, which QPiSSA reduces.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_OVERSAMPLED, _ITERATIONS = 8, 16


def principal_factors(
    matrix: np.ndarray, rank: int, scaling: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return A (r, k) and B (n, r), float32: scaling B A is the part of the r largest singular values of a matrix.

    By subspace iteration (Halko et al. 2011, algorithm 4.4, 16 iterations as PEFT's "pissa_niter_16"): components whose
    singular values are close may be mixed. At the start, and for the residual, that has no effect.

    Args:
        matrix: (n, k) float32.
        rank: r, at most min(n, k).
        scaling: above 0.
        rng: draws the first subspace.
    """
    n, k = matrix.shape
    basis = matrix @ rng.standard_normal((k, min(rank + _OVERSAMPLED, n, k)), np.float32)
    for _ in range(_ITERATIONS):
        basis = matrix @ np.linalg.qr(matrix.T @ np.linalg.qr(basis)[0])[0]
    basis = np.linalg.qr(basis)[0]
    u, values, vt = np.linalg.svd(basis.T @ matrix, full_matrices=False)
    root = np.sqrt(values[:rank] / np.float32(scaling))
    return root[:, None] * vt[:rank], (basis @ u[:, :rank]) * root


def is_zero(a: Any, b: Any) -> bool:
    """Whether b a is zero because a factor is, or the two halves cancel: a (r, k) and b (n, r), NumPy or torch."""
    half = len(a) // 2
    halves = 2 * half == len(a) and bool((a[:half] == a[half:]).all() and (b[:, :half] == -b[:, half:]).all())
    return halves or not bool(b.any())
