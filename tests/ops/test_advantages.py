"""Group advantages and GAE: worked values, accuracy against exact arithmetic, unscored rewards, errors."""

import inspect
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.raising import assert_raises

import whet
from whet.ops.advantages import naive_gae, naive_group_advantages

OPTIONS = [
    {},
    {"eps": 1e-4, "ddof": 1},
    {"scale": "batch"},
    {"scale": "batch", "eps": 1e-4, "ddof": 1},
    {"scale": "none"},
]


def test_worked_values():
    # mean 2.5, population variance 1.25
    expected = np.array([-1.5, -0.5, 0.5, 1.5]) / math.sqrt(1.25)
    np.testing.assert_allclose(whet.compute_group_advantages(np.array([1.0, 2.0, 3.0, 4.0])), expected, rtol=1e-15)


def test_trl_options():
    # sample variance 5/3
    expected = np.array([-1.5, -0.5, 0.5, 1.5]) / (math.sqrt(5 / 3) + 1e-4)
    out = whet.compute_group_advantages(np.array([1.0, 2.0, 3.0, 4.0]), eps=1e-4, ddof=1)
    np.testing.assert_allclose(out, expected, rtol=1e-15)


def test_scales():
    r = np.array([[0.0, 2.0], [0.0, 6.0]])  # centred: -1 1, -3 3; all rewards: mean 2, variance 6
    np.testing.assert_array_equal(whet.compute_batch_group_advantages(r, scale="none"), [[-1, 1], [-3, 3]])
    np.testing.assert_allclose(whet.compute_batch_group_advantages(r), [[-1, 1], [-1, 1]], rtol=1e-15)
    out = whet.compute_batch_group_advantages(r, scale="batch")
    np.testing.assert_allclose(out, np.array([[-1, 1], [-3, 3]]) / math.sqrt(6), rtol=1e-15)


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 5, 8, 9, 16, 33])
@pytest.mark.parametrize("eps", [None, 1e-4])
def test_zero_variance_gives_zero_advantages(group_size, eps):
    r = np.full(3 * group_size, 0.1)
    np.testing.assert_array_equal(whet.compute_batch_group_advantages(r, group_size, eps=eps), np.zeros(3 * group_size))


def exact_advantages(group):
    """Return the advantages of one group in rationals, with the square root to 40 digits."""
    rewards = [Fraction(float(x)) for x in group]
    mean = sum(rewards) / len(rewards)
    variance = sum((x - mean) ** 2 for x in rewards) / len(rewards)
    scaled = variance * Fraction(10) ** 80
    deviation = Fraction(math.isqrt(scaled.numerator // scaled.denominator), 10**40)
    if deviation < Fraction(1, 10**8):
        return np.zeros(len(rewards), np.longdouble)
    ratios = [(x - mean) / deviation for x in rewards]
    return np.array([np.longdouble(float(r)) + np.longdouble(float(r - Fraction(float(r)))) for r in ratios])


def test_float64_within_4_ulp():
    for group_size in [*range(1, 71), 1000]:
        rng = np.random.default_rng(group_size)
        r = rng.normal(3, 1, (4, group_size))
        out = whet.compute_batch_group_advantages(r)
        for got, group in zip(out, r, strict=True):
            expected = exact_advantages(group)
            assert np.all(np.abs(got - expected) <= 4 * np.spacing(np.abs(got))), group_size


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 7, 8, 12, 64, 70, 5000])
def test_equals_the_reference_with_unscored_rewards(group_size, options, dtype):
    rng = np.random.default_rng(group_size)
    r = rng.normal(1, 2, (13, group_size)).astype(dtype)
    r[rng.random(r.shape) < 0.2] = np.nan
    r[0] = np.nan
    expected = naive_group_advantages(r.astype(np.longdouble), **options)
    out = whet.compute_batch_group_advantages(r, **options)
    assert out.dtype == dtype and out.shape == r.shape
    assert np.all(out[np.isnan(r)] == 0)
    np.testing.assert_allclose(
        out, expected.astype(np.float64), rtol=1e-6 if dtype == np.float32 else 1e-10, atol=1e-13
    )
    np.testing.assert_array_equal(whet.compute_batch_group_advantages(r.ravel(), group_size, **options), out.ravel())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_group_of_a_million(dtype):
    r = np.random.default_rng(0).normal(5, 1, 10**6).astype(dtype)
    mean = Fraction(math.fsum(r)) / len(r)
    centred = (r.astype(np.longdouble) - np.longdouble(float(mean))) - np.longdouble(
        float(mean - Fraction(float(mean)))
    )
    expected = centred / np.sqrt((centred * centred).sum() / len(r))
    np.testing.assert_allclose(
        whet.compute_group_advantages(r), expected.astype(np.float64), rtol=1e-6 if dtype == np.float32 else 1e-9
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 16, 33])
def test_one_group_equals_a_batch_of_one_to_the_bit(size, dtype):
    r = np.random.default_rng(size).normal(size=size).astype(dtype)
    unscored = np.where(np.arange(size) % 3 == 1, np.nan, r).astype(dtype)
    for rewards in (r, unscored, r[::-1]):
        one, batch = whet.compute_group_advantages(rewards), whet.compute_batch_group_advantages(rewards[None])[0]
        assert one.dtype == dtype
        assert one.tobytes() == batch.tobytes() == whet.compute_group_advantages(rewards=rewards).tobytes()


def test_native_function_has_signature_and_docstring():
    function = whet.compute_group_advantages
    assert str(inspect.signature(function)) == "(rewards, *, scale='group', ddof=0, eps=None)"
    assert inspect.getdoc(function).startswith("Return the advantages of one group: ")
    assert (function.__module__, function.__name__) == ("whet.ops.advantages", "compute_group_advantages")
    assert pickle.loads(pickle.dumps(function)) is function
    for call in (lambda: function(), lambda: function([1.0], 2), lambda: function([1.0], std=1)):
        assert_raises(TypeError, ("compute_group_advantages()",), call)


def test_infinite_reward_affects_only_its_group():
    r = np.array([[1.0, np.inf], [1.0, 2.0]])
    out = whet.compute_batch_group_advantages(r)
    assert np.isnan(out[0]).all()
    np.testing.assert_array_equal(out[1], [-1, 1])


@given(
    st.integers(1, 40).flatmap(
        lambda g: st.lists(st.lists(st.floats(-1e6, 1e6), min_size=g, max_size=g), min_size=1, max_size=9)
    )
)
def test_advantages_of_a_group_have_mean_0_and_deviation_1_or_0(groups):
    out = whet.compute_batch_group_advantages(np.array(groups))
    np.testing.assert_allclose(out.mean(axis=1), 0, atol=1e-7)
    deviation = out.std(axis=1)
    assert np.all((deviation == 0) | (np.abs(deviation - 1) < 1e-7))


def test_lists_and_views():
    np.testing.assert_array_equal(whet.compute_group_advantages([0.0, 2.0]), [-1, 1])
    np.testing.assert_array_equal(whet.compute_group_advantages([0, 2]), [-1, 1])
    np.testing.assert_array_equal(whet.compute_group_advantages([0, None, 2]), [-1, 0, 1])
    r = np.random.default_rng(0).normal(size=(6, 8))
    np.testing.assert_array_equal(
        whet.compute_batch_group_advantages(r[:, ::2]), whet.compute_batch_group_advantages(r[:, ::2].copy())
    )


ERRORS = [
    (
        lambda: whet.compute_batch_group_advantages(np.zeros(30), 8),
        ("rewards", 30, "group_size=8"),
    ),
    (lambda: whet.compute_batch_group_advantages(np.zeros(30)), ("30 elements", "Pass group_size")),
    (lambda: whet.compute_batch_group_advantages(np.zeros(30), 0), ("group_size is 0", "at least 1")),
    (lambda: whet.compute_batch_group_advantages(np.zeros(0), 8), ("rewards has shape", "at least one reward")),
    (lambda: whet.compute_batch_group_advantages(np.zeros((0, 8))), ("rewards has shape", "at least one reward")),
    (lambda: whet.compute_batch_group_advantages(np.float64(1.0), 1), ("rewards has shape", "at least one reward")),
    (lambda: whet.compute_group_advantages(np.zeros((2, 4))), ("(2, 4)", "compute_batch_group_advantages")),
    (lambda: whet.compute_group_advantages(np.zeros(4), scale="std"), ("scale is 'std'",)),
    (lambda: whet.compute_group_advantages(np.zeros(4), eps=-1.0), ("eps is -1.0",)),
    (lambda: whet.compute_group_advantages(np.zeros(4), ddof=-1), ("ddof is -1",)),
    (lambda: whet.compute_group_advantages(np.zeros(4, int)), ("dtype int64", "astype")),
    (lambda: whet.compute_group_advantages(["good", "bad"]), ("rewards is a list",)),
]


@pytest.mark.parametrize(("call", "facts"), ERRORS)
def test_errors_name_the_fix(call, facts):
    assert_raises(whet.WhetError, facts, call)


# ---------------------------------------------------------------- GAE


def test_gae_worked_values():
    # gamma = lam = 1/2, V_T = 4; backwards: delta_1 = 2 + 2 - 1 = 3; delta_0 = 1 + 1/2 - 1 = 1/2, A_0 = 1/2 + 3/4.
    advantages, returns = whet.compute_gae(np.array([1.0, 2.0]), np.ones(2), np.zeros(2, bool), 4.0, 0.5, 0.5)
    np.testing.assert_array_equal(advantages, [1.25, 3.0])
    np.testing.assert_array_equal(returns, [2.25, 4.0])


def test_gae_ends_at_done():
    r, v = np.array([1.0, 2.0]), np.ones(2)
    advantages, _ = whet.compute_gae(r, v, np.array([True, True]), np.nan, 0.9, 0.9)
    np.testing.assert_array_equal(advantages, r - v)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 2, 7, 70, 1000, 10**6])
def test_gae_equals_the_reference(n, dtype):
    rng = np.random.default_rng(n)
    r, v = rng.normal(size=(2, n)).astype(dtype)
    d = rng.random(n) < 0.05
    wide = naive_gae(r.astype(np.longdouble), v.astype(np.longdouble), d, 0.5, np.longdouble(0.99), np.longdouble(0.95))
    for got, expected in zip(whet.compute_gae(r, v, d, 0.5, 0.99, 0.95), wide, strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(
            got, expected.astype(np.float64), rtol=0, atol=3e-6 if dtype == np.float32 else 1e-14
        )


def test_gae_batch_rows_equal_single_calls():
    rng = np.random.default_rng(0)
    r, v = rng.normal(size=(2, 5, 33))
    d, last = rng.random((5, 33)) < 0.1, rng.normal(size=5)
    advantages, returns = whet.compute_gae(r, v, d, last, 0.99, 0.95)
    for i in range(5):
        a, ret = whet.compute_gae(r[i], v[i], d[i].astype(float), float(last[i]), 0.99, 0.95)
        np.testing.assert_array_equal(advantages[i], a)
        np.testing.assert_array_equal(returns[i], ret)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"gamma": 1.5}, ("gamma is 1.5",)),
        ({"lam": -0.1}, ("lam is -0.1",)),
        ({"values": np.zeros(3)}, ("values has shape (3,)",)),
        ({"values": np.zeros(4, np.float32)}, ("values has dtype float32",)),
        ({"dones": np.full(4, 0.5)}, ("dones", "0 and 1")),
        ({"dones": np.zeros(3, bool)}, ("dones has shape (3,)",)),
        ({"last_value": np.zeros(2)}, ("last_value has shape",)),
        ({"rewards": np.zeros(0)}, ("rewards has shape (0,)",)),
    ],
)
def test_gae_errors(change, facts):
    good = {"rewards": np.zeros(4), "values": np.zeros(4), "dones": np.zeros(4, bool)}
    good |= {"last_value": 0.0, "gamma": 0.9, "lam": 0.9}
    assert_raises(whet.WhetError, facts, whet.compute_gae, **{**good, **change})
