"""compute_token_logprobs: worked values, accuracy, extremes, errors."""

import math

import numpy as np
import pytest
from tests.raising import assert_raises

import whet
from whet.ops.logprobs import naive_token_logprobs


def test_worked_values():
    # Probabilities 1/6, 2/6, 3/6; at temperature 1/2 their squares: 1/14, 4/14, 9/14.
    logits = np.log(np.array([[1, 2, 3], [1, 2, 3]], np.float32))
    logprobs, entropy = whet.compute_token_logprobs(logits, [0, 2], return_entropy=True)
    np.testing.assert_allclose(logprobs, np.log([1 / 6, 1 / 2]), rtol=1e-6)
    p = np.array([1, 2, 3]) / 6
    np.testing.assert_allclose(entropy, -np.sum(p * np.log(p)), rtol=1e-6)
    sharper = whet.compute_token_logprobs(logits, [0, 2], temperature=0.5)
    np.testing.assert_allclose(sharper, np.log([1 / 14, 9 / 14]), rtol=1e-6)


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 31, 33, 70, 1023, 1024, 1025, 2049, 49152])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_within_1e_6_of_long_double(vocab_size, temperature):
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(0, 3, (24, vocab_size)).astype(np.float32)
    ids = rng.integers(0, vocab_size, 24)
    ids[:12] = logits[:12].argmax(1)
    logits[np.arange(6), ids[:6]] += 4  # almost certain
    logits[:, : vocab_size // 3] -= np.linspace(0, 60, 24)[:, None].astype(np.float32)  # and far below
    logprobs, entropy = whet.compute_token_logprobs(logits, ids, temperature=temperature, return_entropy=True)
    wide, wide_entropy = naive_token_logprobs(logits.astype(np.longdouble), ids, temperature=temperature)
    # Above a probability of 1 - 1e-8 only tokens 18 nats below contribute, with coarser float32 exponents.
    error = np.abs(logprobs - wide)
    assert np.all(error <= np.where(wide < -1e-8, 1e-6, 1e-5) * np.abs(wide))
    assert np.all(np.abs(entropy - wide_entropy) <= 2e-6 * np.maximum(wide_entropy, 0.05))
    np.testing.assert_array_equal(whet.compute_token_logprobs(logits, ids, temperature=temperature), logprobs)


def test_extremes():
    inf, nan = np.inf, np.nan
    logits = np.array(
        [[0, -inf, 0], [0, -inf, 0], [nan, 0, 0], [inf, 0, 0], [-inf, -inf, -inf], [-inf, 3, -inf]], np.float32
    )
    logprobs, entropy = whet.compute_token_logprobs(logits, [0, 1, 1, 1, 0, 1], return_entropy=True)
    assert logprobs[0] == pytest.approx(-math.log(2)) and entropy[0] == pytest.approx(math.log(2))
    assert logprobs[1] == -inf
    assert np.isnan(logprobs[2:5]).all()
    assert logprobs[5] == 0.0 and entropy[5] == 0.0


def test_large_logits_do_not_overflow():
    logits = np.array([[1e38, -1e38], [1e5, 1e5 - 1]], np.float32)
    np.testing.assert_allclose(whet.compute_token_logprobs(logits, [0, 0]), [0, -math.log1p(math.exp(-1))], rtol=1e-6)


def test_each_row_has_its_own_token():
    logits = np.random.default_rng(0).normal(size=(5, 2100)).astype(np.float32)
    for ids in ([0, 1, 1023, 1024, 2099], [2048, 2047, 0, 16, 15]):
        got = whet.compute_token_logprobs(logits, ids)
        wide, _ = naive_token_logprobs(logits.astype(np.float64), np.array(ids))
        np.testing.assert_allclose(got, wide, rtol=1e-6)


@pytest.mark.parametrize(
    ("logits", "ids", "options", "facts"),
    [
        (np.zeros((2, 3), np.float32), [0], {}, ("logits has shape (2, 3)", "token_ids (1,)")),
        (np.zeros(3, np.float32), [0], {}, ("(N, V)",)),
        (np.zeros((1, 0), np.float32), [0], {}, ("V >= 1",)),
        (np.zeros((2, 3), np.float32), [0, 3], {}, ("token_ids[1] is 3", "vocabulary of 3")),
        (np.zeros((2, 3), np.float32), [-1, 0], {}, ("token_ids[0] is -1",)),
        (np.zeros((2, 3), np.float32), [0.5, 1.0], {}, ("token_ids has dtype float64", "integers")),
        (np.zeros((2, 3)), [0, 1], {}, ("logits has dtype float64", "float32", "astype")),
        (np.zeros((2, 3), np.float32), [0, 1], {"temperature": 0.0}, ("temperature is 0.0",)),
        (np.zeros((2, 3), np.float32), [0, 1], {"temperature": math.nan}, ("temperature is nan",)),
    ],
)
def test_errors_name_the_fix(logits, ids, options, facts):
    assert_raises(whet.WhetError, facts, whet.compute_token_logprobs, logits, ids, **options)


def test_no_rows_give_no_logprobs():
    assert whet.compute_token_logprobs(np.zeros((0, 5), np.float32), np.zeros(0, int)).shape == (0,)
