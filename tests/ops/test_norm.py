"""RMSNorm and LayerNorm: worked values, float64 references at ragged sizes, residuals, errors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.arrays import normal, views
from tests.raising import assert_raises, mentions

import whet
from whet.ops.norm import naive_layer_norm, naive_rms_norm

LENGTHS = [*range(1, 36), 255, 256, 257, 511, 513, 1000, 4099]


def close(got, expected, ulps=4):
    """Assert equality within some ULP of numbers of at least 1, the size of the terms of the formula."""
    np.testing.assert_array_less(np.abs(got - expected), ulps * 2.0**-24 * np.maximum(1, np.abs(expected)))


def test_worked_values():
    # mean(x^2) = 12.5; mean 3.5, variance 0.25
    x = np.array([3.0, 4.0], np.float32)
    np.testing.assert_allclose(whet.rms_norm(x, eps=0.0), x / np.sqrt(12.5), rtol=1e-7)
    np.testing.assert_array_equal(whet.layer_norm(x, eps=0.0), np.array([-1, 1], np.float32))
    weight, bias = np.array([2, 4], np.float32), np.array([10, 20], np.float32)
    np.testing.assert_array_equal(whet.layer_norm(x, weight, bias, eps=0.0), np.array([8, 24], np.float32))


@pytest.mark.parametrize("skew", [0, 1, 3])
def test_against_float64_at_every_tail(skew):
    for n in LENGTHS:
        x = normal((3, n + skew), 0.3)[:, skew:]
        weight, bias = normal(n, 1.0, 1), normal(n, 0.0, 2)
        wide = x.astype(np.float64)
        close(whet.rms_norm(x), naive_rms_norm(wide))
        close(whet.rms_norm(x, weight, 1e-3), naive_rms_norm(wide, weight, 1e-3), 8)
        close(whet.layer_norm(x), naive_layer_norm(wide), 8)
        for w, b in ((weight, None), (None, bias), (weight, bias)):
            expected = naive_layer_norm(wide, 1.0 if w is None else w, 0.0 if b is None else b)
            close(whet.layer_norm(x, w, b), expected, 16)


@pytest.mark.parametrize("n", [768, 8192, 100_000])
def test_sums_are_within_1e_6_at_any_length(n):
    x = np.abs(normal((2, n), 3.0))  # all terms of a sum have one sign
    wide = x.astype(np.float64)
    scale = naive_rms_norm(wide) / wide
    np.testing.assert_allclose(whet.rms_norm(x) / x, scale, rtol=3e-7)


def test_a_large_mean_does_not_cancel():
    x = (1000 + np.random.default_rng(0).normal(0, 1, (4, 777))).astype(np.float32)
    np.testing.assert_allclose(whet.layer_norm(x), naive_layer_norm(x.astype(np.float64)), atol=1e-6)
    constant = np.full((1, 100), 0.1, np.float32)
    np.testing.assert_array_equal(whet.layer_norm(constant), 0)


def test_extremes():
    nan, inf = np.nan, np.inf
    x = np.array([[0, 0, 0], [nan, 1, 1], [1e30, 1, 1], [inf, 1, 1]], np.float32)
    rms = whet.rms_norm(x)
    np.testing.assert_array_equal(rms[0], 0)
    assert np.isnan(rms[1]).all()
    np.testing.assert_array_equal(rms[2], 0)  # the square overflows
    assert np.isnan(rms[3, 0]) and (rms[3, 1:] == 0).all()
    assert np.isnan(whet.rms_norm(x[:1], eps=0.0)).all()
    assert whet.rms_norm(np.zeros((3, 0), np.float32)).shape == (3, 0)
    assert whet.layer_norm(np.zeros((0, 5), np.float32)).shape == (0, 5)


@pytest.mark.parametrize("n", [1, 16, 31, 300])
@pytest.mark.parametrize("norm", [whet.rms_norm, whet.layer_norm])
def test_residual_equals_two_steps(norm, n):
    x, residual, weight = normal((5, n)), normal((5, n), seed=1), normal(n, seed=2)
    total = x + residual
    expected = norm(total, weight)
    before = x.copy()
    np.testing.assert_array_equal(norm(x, weight, residual=residual), expected)
    np.testing.assert_array_equal(residual, total)
    np.testing.assert_array_equal(x, before)
    # In place, and a residual that is x itself.
    residual = total - before
    expected = norm(x + residual, weight)
    assert norm(x, weight, residual=residual, out=x) is x
    np.testing.assert_array_equal(x, expected)
    x = normal((5, n))
    twice = x + x
    np.testing.assert_array_equal(norm(x, residual=x), norm(twice))
    np.testing.assert_array_equal(x, twice)


@pytest.mark.parametrize("norm", [whet.rms_norm, whet.layer_norm])
def test_residuals_in_any_strides(norm):
    for x in views():
        whole = np.array(x, np.float32)
        residual = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), np.float32)[..., ::2]
        np.testing.assert_array_equal(norm(x, residual=residual), norm(whole))
        np.testing.assert_array_equal(residual, whole)


@pytest.mark.parametrize("skew", [0, 1, 5])
def test_streaming_stores(skew):
    rows, n = 2100, 4101  # more than 32 MiB, rows that begin anywhere in a line
    x = normal(rows * n + skew)[skew:].reshape(rows, n)
    memory = np.zeros(rows * n + skew + 1, np.float32)
    out = memory[skew:-1].reshape(rows, n)
    whet.rms_norm(x, out=out)
    for row in (0, 1, 1000, rows - 1):
        np.testing.assert_array_equal(out[row], whet.rms_norm(x[row]))
    assert not memory[:skew].any() and memory[-1] == 0


@settings(max_examples=60)
@given(st.integers(1, 70), st.integers(0, 4), st.floats(-3, 3), st.floats(0.01, 100), st.floats(0, 1))
def test_any_size_mean_and_spread(n, skew, mean, spread, eps):
    x = (normal(n + skew) * spread + mean).astype(np.float32)[skew:]
    wide = x.astype(np.float64)
    np.testing.assert_allclose(whet.rms_norm(x, eps=eps + 1e-6), naive_rms_norm(wide, eps=eps + 1e-6), rtol=5e-7)
    close(whet.layer_norm(x, eps=eps + 1e-5), naive_layer_norm(wide, eps=eps + 1e-5), 16)


X = np.ones((2, 8), np.float32)


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (lambda: whet.rms_norm(X.astype(np.float64)), ("x has dtype float64", "astype(np.float32)")),
        (lambda: whet.rms_norm(np.float32(1)), ("x is a scalar",)),
        (lambda: whet.rms_norm(X, X[0, :7]), ("weight has shape (7,)", "(8,)")),
        (lambda: whet.layer_norm(X, None, X), ("bias has shape (2, 8)",)),
        (lambda: whet.rms_norm(X, np.ones(8)), ("weight has dtype float64",)),
        (lambda: whet.rms_norm(X, eps=-1.0), ("eps is -1.0", "finite number of at least 0")),
        (lambda: whet.layer_norm(X, eps=np.nan), ("eps is nan",)),
        (lambda: whet.rms_norm(X, residual=X[:1].copy()), ("residual is float32 (1, 8)", "float32 (2, 8)")),
        (lambda: whet.rms_norm(X, out=np.ones((2, 8))), ("out is float64 (2, 8)", "float32")),
        (lambda: whet.rms_norm(X, out=[1.0]), ("out is a list", "NumPy array")),
        (lambda: whet.rms_norm(X, residual=np.broadcast_to(X[0], (2, 8))), ("residual is read-only",)),
        (lambda: whet.rms_norm(np.ma.array(X)), ("masked array",)),
    ],
)
def test_errors(call, facts):
    assert_raises(whet.WhetError, facts, call)


def test_out_aliasing_the_residual_is_rejected():
    residual = X.copy()
    with pytest.raises(whet.WhetValueError, match=mentions("out shares memory with residual")):
        whet.layer_norm(X, residual=residual, out=residual)
    np.testing.assert_array_equal(residual, X)
