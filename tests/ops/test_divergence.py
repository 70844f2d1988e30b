"""Token KL: worked values, accuracy against long double, masks, shapes, errors."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.raising import assert_raises, mentions

import whet
from whet.ops.divergence import naive_token_kl, naive_token_kl_schulman

SINGLE = {whet.compute_token_kl: naive_token_kl, whet.compute_token_kl_schulman: naive_token_kl_schulman}
BATCH = {
    whet.compute_batch_token_kl: whet.compute_token_kl,
    whet.compute_batch_token_kl_schulman: whet.compute_token_kl_schulman,
}
LENGTHS = [*range(71), 4095, 4096, 4097, 10**6]


def logprobs(n, dtype, spread, seed=0):
    rng = np.random.default_rng([seed, n])
    p = -rng.exponential(2.0, n).astype(dtype)
    return p, (p + rng.normal(0, spread, n)).astype(dtype)


def wide_terms(function, p, q):
    """Return the terms in long double; k3 near 0 by its series, because exp(r) - 1 - r cancels there."""
    p, q = p.astype(np.longdouble), q.astype(np.longdouble)
    if function is whet.compute_token_kl:
        return np.exp(p) * (p - q)
    r = q - p
    series, power = np.zeros_like(r), np.ones_like(r)
    for k in range(1, 25):
        power = power * r / k
        if k > 1:
            series += power
    return np.where(np.abs(r) < 0.5, series, np.exp(r) - 1 - r)


def test_worked_values():
    # p = log 1/2, q = log 1/4: exp(p)(p - q) = 1/2 log 2; r = -log 2: 1/2 + log 2 - 1.
    p, q = np.log([0.5]), np.log([0.25])
    assert whet.compute_token_kl(p, q) == pytest.approx(0.5 * math.log(2), rel=1e-15)
    assert whet.compute_token_kl_schulman(p, q) == pytest.approx(math.log(2) - 0.5, rel=1e-15)


def test_schulman_points_from_policy_to_reference():
    # Tokens drawn from pi = (3/4, 1/4): the mean of k3 is KL(pi, ref) for ref = (1/2, 1/2).
    pi, ref = np.array([0.75, 0.25]), np.array([0.5, 0.5])
    p, q = np.log(pi)[[0, 0, 0, 1]], np.log(ref)[[0, 0, 0, 1]]
    assert whet.compute_token_kl_schulman(p, q) / 4 == pytest.approx(np.sum(pi * np.log(pi / ref)), rel=1e-14)


@pytest.mark.parametrize("spread", [1e-4, 0.1, 3.0])
@pytest.mark.parametrize("function", SINGLE)
def test_float64_within_4_ulp_of_long_double(function, spread):
    for n in LENGTHS:
        p, q = logprobs(n, np.float64, spread)
        terms = wide_terms(function, p, q)
        # The terms of the exact KL have both signs, so the bound is relative to the sum of |terms|.
        assert abs(function(p, q) - terms.sum()) <= 4 * np.spacing(np.float64(np.abs(terms).sum())), n


@pytest.mark.parametrize("spread", [1e-4, 0.1, 3.0])
@pytest.mark.parametrize("function", SINGLE)
def test_float32_within_1e_6(function, spread):
    for n in LENGTHS:
        p, q = logprobs(n, np.float32, spread)
        # The reference takes q - p rounded to float32, because that rounding is not the kernel's.
        terms = wide_terms(function, p, p.astype(np.float64) + (q - p).astype(np.float64))
        assert abs(function(p, q) - terms.sum()) <= 1e-6 * np.abs(terms).sum(), n


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extremes(dtype):
    inf, nan = np.inf, np.nan
    kl, k3 = whet.compute_token_kl, whet.compute_token_kl_schulman

    def one(f, p, q):
        return f(np.array([p], dtype), np.array([q], dtype))

    assert one(kl, -inf, -1.0) == 0.0
    assert one(kl, -inf, -inf) == 0.0
    assert one(kl, -1.0, -inf) == inf
    assert math.isnan(one(kl, nan, -1.0)) and math.isnan(one(k3, nan, -1.0)) and math.isnan(one(k3, -1.0, nan))
    assert one(k3, -1.0, -inf) == inf  # r = -inf: -1 - r
    assert one(k3, -inf, -1.0) == inf  # r = +inf
    assert one(k3, 0.0, -1e6) == pytest.approx(1e6 - 1)
    assert one(k3, -2.0, -2.0) == 0.0
    assert one(k3, -85.0, 0.0) == pytest.approx(math.exp(85) - 86, rel=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("function", SINGLE)
@pytest.mark.parametrize("n", [0, 1, 7, 8, 15, 16, 17, 33, 64, 65, 200, 5000])
def test_masked_tokens_are_ignored(function, n, dtype):
    p, q = logprobs(n, dtype, 0.3)
    mask = np.random.default_rng(n).random(n) < 0.5
    clean = function(np.where(mask, p, 0).astype(dtype), np.where(mask, q, 0).astype(dtype))
    for junk in (np.nan, np.inf, -np.inf):
        p[~mask], q[~mask] = junk, -junk
        assert function(p, q, mask) == clean


@pytest.mark.parametrize("function", SINGLE)
def test_equals_the_reference(function):
    p, q = logprobs(300, np.float64, 1.0)
    mask = np.random.default_rng(0).random(300) < 0.5
    p[7] = -np.inf if function is whet.compute_token_kl else p[7]
    assert function(p, q, mask) == pytest.approx(SINGLE[function](p, q, mask), rel=1e-12)


@pytest.mark.parametrize("batch", BATCH)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 16), (5, 127), (100, 33), (2, 9000)])
def test_batch_rows_equal_single_calls(batch, dtype, shape):
    p, q = (x.reshape(shape) for x in logprobs(shape[0] * shape[1], dtype, 0.5))
    mask = np.random.default_rng(1).random(shape) < 0.8
    expected = np.array([BATCH[batch](a, b, m) for a, b, m in zip(p, q, mask, strict=True)], dtype)
    for out in (batch(p, q, mask=mask), batch(p.ravel(), q.ravel(), shape[1], mask.ravel())):
        assert out.dtype == dtype
        np.testing.assert_array_equal(out, expected)


def test_f32_names():
    p, q = logprobs(64, np.float32, 0.5)
    assert whet.compute_token_kl_f32(p, q) == whet.compute_token_kl(p, q)
    assert whet.compute_token_kl_schulman_f32(p, q) == whet.compute_token_kl_schulman(p, q)
    np.testing.assert_array_equal(whet.compute_batch_token_kl_f32(p, q, 8), whet.compute_batch_token_kl(p, q, 8))
    np.testing.assert_array_equal(
        whet.compute_batch_token_kl_schulman_f32(p, q, 8), whet.compute_batch_token_kl_schulman(p, q, 8)
    )
    for f, extra in (
        (whet.compute_token_kl_f32, ()),
        (whet.compute_token_kl_schulman_f32, ()),
        (whet.compute_batch_token_kl_f32, (8,)),
        (whet.compute_batch_token_kl_schulman_f32, (8,)),
    ):
        with pytest.raises(whet.WhetTypeError, match=mentions(f.__name__, "log_probs_policy", "float64", "astype")):
            f(p.astype(np.float64), q.astype(np.float64), *extra)


def test_views_are_read_correctly():
    p, q = logprobs(400, np.float64, 0.5)
    for view in (np.s_[::2], np.s_[::-1], np.s_[3:100]):
        assert whet.compute_token_kl(p[view], q[view]) == whet.compute_token_kl(p[view].copy(), q[view].copy())
    square = p.reshape(20, 20)
    np.testing.assert_array_equal(
        whet.compute_batch_token_kl(square.T, square), whet.compute_batch_token_kl(square.T.copy(), square)
    )
    misaligned = np.frombuffer(b"x" + p.tobytes(), np.uint8)[1:].view(np.float64)
    assert whet.compute_token_kl(misaligned, q) == whet.compute_token_kl(p, q)
    assert whet.compute_token_kl(p.astype(">f8"), q) == whet.compute_token_kl(p, q)


P = logprobs(12, np.float64, 0.5)[0]
ONE, BATCH_OF = whet.compute_token_kl, whet.compute_batch_token_kl


@pytest.mark.parametrize(
    ("function", "arguments", "error", "facts"),
    [
        (ONE, (P, P[:3]), whet.WhetValueError, ("log_probs_ref has shape (3,)", "(12,)")),
        (ONE, (P, P.astype(np.float32)), whet.WhetTypeError, ("log_probs_ref has dtype float32",)),
        (ONE, (P.astype(int), P), whet.WhetTypeError, ("dtype int64", "float32 or float64")),
        (ONE, (P.reshape(3, 4), P.reshape(3, 4)), whet.WhetValueError, ("(3, 4)", "(T,)")),
        (ONE, (P, P, P), whet.WhetTypeError, ("mask has dtype float64", "bool")),
        (ONE, (P, P, np.ones(3, bool)), whet.WhetValueError, ("mask has shape (3,)",)),
        (ONE, ("abc", P), whet.WhetTypeError, ("log_probs_policy is a str",)),
        (ONE, (np.ma.masked_array(P), P), whet.WhetTypeError, ("masked array",)),
        (BATCH_OF, (P, P), whet.WhetValueError, ("12 elements", "Pass seq_len")),
        (BATCH_OF, (P, P, 5), whet.WhetValueError, ("12 elements", "seq_len=5")),
        (BATCH_OF, (P, P, 0), whet.WhetValueError, ("seq_len is 0", "at least 1")),
        (BATCH_OF, (P, P, -4), whet.WhetValueError, ("seq_len is -4",)),
        (BATCH_OF, (P, P, 2.5), whet.WhetTypeError, ("seq_len is 2.5", "integer")),
        (BATCH_OF, (P[:0], P[:0], 4), whet.WhetValueError, ("log_probs_policy", "empty")),
        (BATCH_OF, (P.reshape(3, 4), P.reshape(3, 4), 3), whet.WhetValueError, ("(3, 4)", "seq_len=3")),
        (BATCH_OF, (P.reshape(3, 2, 2), P.reshape(3, 2, 2)), whet.WhetValueError, ("3 axes",)),
    ],
)
def test_errors_name_the_fix(function, arguments, error, facts):
    assert_raises(error, facts, function, *arguments)


@given(st.lists(st.tuples(st.floats(-50, 0), st.floats(-50, 0)), max_size=60))
def test_k3_is_not_negative_and_0_only_where_equal(pairs):
    p, q = (np.array([pair[i] for pair in pairs], np.float64) for i in (0, 1))
    k3 = whet.compute_token_kl_schulman(p, q)
    # (q - p)^2 underflows for differences below 1e-154.
    assert k3 > 0 if np.any(np.abs(p - q) > 1e-150) else k3 >= 0


@given(st.integers(1, 300), st.integers(0, 2**32))
def test_exact_kl_over_a_vocabulary_is_the_divergence(n, seed):
    rng = np.random.default_rng(seed)
    a, b = (np.log(rng.dirichlet(np.ones(n)) + 1e-12) for _ in range(2))
    kl = whet.compute_token_kl(a, b)
    assert kl == pytest.approx(float(np.sum(np.exp(a) * (a - b))), rel=1e-9, abs=1e-13)
