"""Errors of invalid arguments name the function, the argument and its value, and are never another library's."""

import numpy as np
import pytest
from tests.raising import assert_raises

import whet

X = np.random.default_rng(0).standard_normal((4, 32), np.float32)


@pytest.mark.parametrize("name", ["softmax", "silu", "swiglu", "rms_norm", "quantize", "pack_weight"])
def test_none_is_not_an_array(name):
    given = {"quantize": ("q8_0",)}.get(name, ())
    assert_raises(whet.WhetTypeError, f"{name}: (x|gate|weight) is None", getattr(whet, name), None, *given)


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (lambda: whet.compute_token_kl(None, X[0]), ("log_probs_policy is None",)),
        (lambda: whet.attention(X[:, None], None, None), ("k is None",)),
        (lambda: whet.softmax(X, scale="a"), ("softmax", "scale is 'a'", "number")),
        (lambda: whet.softmax(X, scale=[1.0, 2.0]), ("softmax", "scale is", "number")),
        (lambda: whet.softmax(X, scale=1e-300), ("scale is 1e-300", "float32")),
        (lambda: whet.softcap(X, None), ("softcap", "cap is None", "number")),
        (lambda: whet.rms_norm(X, eps="a"), ("rms_norm", "eps is 'a'", "number")),
        (lambda: whet.gemm(X, X.T, alpha="a"), ("gemm", "alpha is 'a'", "number")),
        (lambda: whet.gemv(X, X[0], alpha=None), ("gemv", "alpha is None", "number")),
        (lambda: whet.lora_forward(X, X.copy(), X[:1], X[:1], "a"), ("lora_forward", "scale is 'a'")),
        (lambda: whet.compute_group_advantages(X[0], ddof="a"), ("ddof is 'a'", "number")),
        (lambda: whet.compute_group_advantages(X[0], eps="a"), ("eps is 'a'", "number")),
        (lambda: whet.compute_group_advantages(X[0], scale=["group"]), ("scale is ['group']", "'group'")),
        (lambda: whet.compute_gae(X[0], X[0], X[0] > 9, 0.0, "a", 0.9), ("compute_gae", "gamma is 'a'", "number")),
        (lambda: whet.compute_gae(X[0], X[0], X[0] > 9, "a", 0.9, 0.9), ("last_value is 'a'", "numbers")),
        (lambda: whet.compute_token_logprobs(X, [0] * 4, temperature="a"), ("temperature is 'a'", "number")),
        (lambda: whet.compute_token_logprobs(X, [0] * 4, temperature=1e-300), ("temperature is 1e-300",)),
        (lambda: whet.compute_token_logprobs(X, [[0], [1, 2]]), ("token_ids", "array")),
        (lambda: whet.compute_token_logprobs(X, None), ("token_ids has dtype object", "integers")),
        (lambda: whet.pack_sequences([2**70], 2**71), ("dtype object",)),
        (lambda: whet.MicroLoRA(4, 4, alpha="a"), ("MicroLoRA", "alpha is 'a'", "number")),
        (lambda: whet.MicroLoRA(4, 4).sgd_step("a"), ("sgd_step", "lr is 'a'", "number")),
    ],
)
def test_invalid_arguments_are_named(call, facts):
    assert_raises(whet.WhetError, facts, call)


def test_flags_and_limits_of_any_type():
    for flag in (1, np.True_):
        np.testing.assert_array_equal(whet.gemm(X, X, transpose_a=flag), whet.gemm(X, X, transpose_a=True))
    np.testing.assert_array_equal(whet.gemm(X, X.T, transpose_a=None), whet.gemm(X, X.T))
    assert whet.pack_sequences([3, 4], 2**70) == [[1, 0]]
    assert whet.compute_token_logprobs(np.zeros((0, 5), np.float32), []).shape == (0,)
    assert whet.softmax(X, scale=np.float32(2)).shape == X.shape
