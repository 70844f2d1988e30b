"""Arrays for the tests of row-wise kernels."""

import numpy as np


def normal(shape, mean=0.0, spread=1.0, seed=0):
    return np.random.default_rng([seed, *np.atleast_1d(shape)]).normal(mean, spread, shape).astype(np.float32)


def views():
    """Yield views of one array with many kinds of strides."""
    base = normal((4, 6, 5, 40), spread=2.0)
    indices = (
        np.s_[...],
        np.s_[0, 0, 0],
        np.s_[:, ::-1, 1:3],
        np.s_[::2, ::-1, 2],
        np.s_[..., ::2],
        np.s_[None, 1:, None],
    )
    yield from (base[index] for index in indices)
    yield from (base.T, base.transpose(2, 0, 1, 3), np.broadcast_to(base[0, 0, 0], (3, 40)), base.astype(">f4"))
