"""softmax, log_softmax, silu, gelu, relu2, swiglu and softcap: worked values, float64 references, extremes, errors."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.arrays import normal
from tests.raising import assert_raises

import whet
from whet.ops.activations import (
    naive_gelu,
    naive_log_softmax,
    naive_silu,
    naive_softcap,
    naive_softmax,
    naive_swiglu,
)

LENGTHS = [*range(1, 36), 63, 64, 65, 100, 1000, 4099]
LEAST = 2.0**-119
"""Below this size the absolute error counts: an exponential is subnormal there, and has fewer digits."""


def ulps(got, expected):
    """Return the greatest error in ULP of float32, at least of LEAST."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    unit = np.spacing(np.maximum(np.abs(expected), LEAST).astype(np.float32)).astype(np.float64)
    return (np.abs(got - expected) / unit).max(initial=0.0)


# ---------------------------------------------------------------- softmax


def test_softmax_worked_values():
    # exp(log k) = k: 1, 2, 5 of 8.
    x = np.log(np.array([1, 2, 5], np.float32))
    np.testing.assert_allclose(whet.softmax(x), [1 / 8, 2 / 8, 5 / 8], rtol=2e-7)
    np.testing.assert_allclose(whet.log_softmax(x), np.log([1 / 8, 2 / 8, 5 / 8]), rtol=2e-7)
    # scale 2 squares: 1, 4, 25 of 30
    np.testing.assert_allclose(whet.softmax(x, scale=2.0), np.array([1, 4, 25]) / 30, rtol=5e-7)


@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
@pytest.mark.parametrize("scale", [1.0, 0.125, 0.7])
def test_softmax_against_float64(spread, scale):
    for n in LENGTHS:
        x = normal((3, n + 1), spread=spread)[:, 1:]
        wide, wide_scale = x.astype(np.float64), float(np.float32(scale))
        assert ulps(whet.softmax(x, scale=scale), naive_softmax(wide, wide_scale)) <= 3, n
        expected = naive_log_softmax(x.astype(np.longdouble), wide_scale)
        got = whet.log_softmax(x, scale=scale)
        np.testing.assert_allclose(got, expected, rtol=2.0**-23, atol=1e-15, err_msg=f"{n=}")


def test_log_softmax_is_accurate_close_to_0():
    x = np.array([0, -5, -9, -14, -15, -16] + 20 * [-18], np.float32)
    wide = x.astype(np.float64)
    expected = -np.log1p(np.exp(wide[1:]).sum())
    assert ulps(whet.log_softmax(x)[0], expected) <= 2


def test_softmax_extremes():
    inf, nan = np.inf, np.nan
    x = np.array([[0, -inf, 0], [-inf, -inf, -inf], [nan, 0, 0], [0, inf, 1], [3e38, -3e38, 0]], np.float32)
    soft, log = whet.softmax(x), whet.log_softmax(x)
    np.testing.assert_array_equal(soft[0], [0.5, 0, 0.5])
    np.testing.assert_allclose(log[0], [-math.log(2), -inf, -math.log(2)], rtol=1e-7)
    assert np.isnan(soft[1:4]).all() and np.isnan(log[1:4]).all()
    np.testing.assert_array_equal(soft[4], [1, 0, 0])
    np.testing.assert_array_equal(log[4], np.array([0, -inf, -3e38], np.float32))
    assert whet.softmax(np.zeros((2, 0), np.float32)).shape == (2, 0)


# ---------------------------------------------------------------- activations

LINE = np.concatenate([np.linspace(-120, 120, 60001), np.geomspace(1e-44, 1, 5000), -np.geomspace(1e-44, 1, 5000)])
LINE = LINE.astype(np.float32)


def test_activations_worked_values():
    one = np.ones(1, np.float32)
    assert whet.silu(one)[0] == pytest.approx(1 / (1 + math.exp(-1)), rel=2e-7)
    assert whet.gelu(one)[0] == pytest.approx(0.8413447460685429, rel=2e-7)  # P(N <= 1)
    assert whet.gelu(-one)[0] == pytest.approx(-0.15865525393145707, rel=5e-7)
    assert whet.gelu(one, "tanh")[0] == pytest.approx(
        0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * 1.044715)), rel=2e-7
    )
    assert whet.swiglu(one, 3 * one)[0] == pytest.approx(3 / (1 + math.exp(-1)), rel=2e-7)


def test_relu2_is_correctly_rounded():
    expected = np.maximum(LINE, 0).astype(np.float64) ** 2
    np.testing.assert_array_equal(whet.relu2(LINE), expected.astype(np.float32))
    extremes = whet.relu2(np.array([-np.inf, np.inf, np.nan, -3e38, 3e38, -0.0], np.float32))
    np.testing.assert_array_equal(extremes, np.array([0, np.inf, np.nan, 0, np.inf, 0], np.float32))


def test_silu_within_4_ulp():
    wide = LINE.astype(np.float64)
    assert ulps(whet.silu(LINE), naive_silu(wide)) <= 4


def test_gelu_within_8_ulp():
    wide = LINE.astype(np.float64)
    assert ulps(whet.gelu(LINE), naive_gelu(wide)) <= 8


def test_gelu_tanh():
    wide = LINE.astype(np.float64)
    u = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
    with np.errstate(over="ignore"):
        exact = wide / (1 + np.exp(-2 * u))  # (1 + tanh u) / 2 without its cancellation
    got = whet.gelu(LINE, "tanh")
    np.testing.assert_allclose(got, naive_gelu(wide, "tanh"), rtol=1e-6, atol=1e-6)
    near = LINE > -1
    assert ulps(got[near], exact[near]) <= 8
    # Below, the rounding of the exponent dominates.
    below = (LINE <= -1) & (exact < -LEAST)
    assert (np.abs(got - exact)[below] <= (8 + 6 * np.abs(u[below])) * 2.0**-24 * np.abs(exact[below])).all()


@pytest.mark.parametrize("cap", [0.03, 1.0, 30.0, 50.0])
def test_softcap_within_6_ulp(cap):
    """Also close to 0, where tanh as 1 - 2 / (exp(2 x) + 1) cancels."""
    wide = LINE.astype(np.float64)
    assert ulps(whet.softcap(LINE, cap), naive_softcap(wide, np.float64(np.float32(cap)))) <= 6
    extremes = whet.softcap(np.array([0, -0.0, np.inf, -np.inf, np.nan], np.float32), cap)
    np.testing.assert_array_equal(extremes, np.array([0, 0, cap, -cap, np.nan], np.float32))
    assert whet.softcap(np.full(1, 2, np.float32), 2.0)[0] == pytest.approx(1.5231883119115297, rel=3e-7)  # 2 tanh 1


@pytest.mark.parametrize("f", [whet.silu, whet.gelu, lambda x: whet.gelu(x, "tanh")])
def test_activation_extremes(f):
    got = f(np.array([-np.inf, np.inf, np.nan, -3e38, 3e38, 0.0, -0.0], np.float32))
    np.testing.assert_array_equal(got, np.array([-0.0, np.inf, np.nan, -0.0, 3e38, 0.0, -0.0], np.float32))
    np.testing.assert_array_equal(np.signbit(got[[0, 3, 5, 6]]), [True, True, False, True])


@pytest.mark.parametrize("n", [1, 7, 16, 33, 500])
def test_swiglu(n):
    both = normal((3, 5, 2 * n), spread=3.0)
    gate, up = both[..., :n], both[..., n:]
    expected = naive_swiglu(gate.astype(np.float64), up.astype(np.float64))
    np.testing.assert_allclose(whet.swiglu(gate, up), expected, rtol=5e-7, atol=1e-30)
    np.testing.assert_array_equal(whet.swiglu(both), whet.swiglu(gate, up))
    np.testing.assert_array_equal(whet.swiglu(both[:, ::-1]), whet.swiglu(gate, up)[:, ::-1])
    np.testing.assert_array_equal(whet.swiglu(both.astype(">f4")), whet.swiglu(gate, up))
    expected = whet.swiglu(gate, up)
    for out in (gate, up):
        saved = both.copy()
        np.testing.assert_array_equal(whet.swiglu(gate, up, out=out), expected)
        both[...] = saved
    whet.swiglu(both, out=both[..., n // 2 : n // 2 + n])
    np.testing.assert_array_equal(both[..., n // 2 : n // 2 + n], expected)


@given(st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=50))
def test_softmax_sums_to_1(row):
    x = np.array(row, np.float32)
    assert whet.softmax(x).sum(dtype=np.float64) == pytest.approx(1, abs=5e-7)
    np.testing.assert_allclose(np.exp(whet.log_softmax(x).astype(np.float64)).sum(), 1, atol=5e-7)


X = np.ones((2, 7), np.float32)


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (lambda: whet.softmax(X.astype(np.float64)), ("softmax", "x has dtype float64", "float32")),
        (lambda: whet.softmax(X, scale=0.0), ("scale is 0.0", "number above 0")),
        (lambda: whet.log_softmax(X, scale=math.nan), ("log_softmax", "scale is nan")),
        (lambda: whet.softmax(X, scale=1e39), ("scale is 1e+39",)),
        (lambda: whet.silu(np.float32(1)), ("silu", "scalar")),
        (lambda: whet.gelu(X, "fast"), ("approximate is 'fast'",)),
        (lambda: whet.gelu(X, out=X[:1]), ("out is float32 (1, 7)", "float32 (2, 7)")),
        (lambda: whet.silu(X, out=np.broadcast_to(X[0], X.shape)), ("out is read-only",)),
        (lambda: whet.softcap(X, 0.0), ("cap is 0.0", "number above 0")),
        (lambda: whet.softcap(X, float("nan")), ("cap is nan",)),
        (lambda: whet.swiglu(X), ("gate has shape (2, 7)", "up")),
        (lambda: whet.swiglu(X, X[:1]), ("up has shape",)),
        (lambda: whet.swiglu(X, X, out=X[:, :6].copy()), ("out is float32 (2, 6)",)),
    ],
)
def test_errors(call, facts):
    assert_raises(whet.WhetError, facts, call)


def test_lists_are_accepted():
    np.testing.assert_array_equal(whet.softmax([0.0, 0.0]), np.array([0.5, 0.5], np.float32))
    assert naive_softmax(np.zeros(2))[0] == 0.5
