"""attention and decode_attention: worked values, accuracy at ragged sizes, masks, layouts, bits, errors."""

import math
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.isas import assert_isas_agree
from tests.raising import assert_raises

import whet
from whet.ops.attention import naive_attention, naive_decode_attention

LENGTHS = [0, 1, 2, 15, 16, 17, 63, 64, 65, 130]
HEAD_DIMS = [32, 40, 64, 72, 96, 128, 256]


def arrays(seed, n_queries, n_keys, heads, kv_heads, head_dim, scale=1.0):
    rng = np.random.default_rng(seed)
    shapes = [(n_queries, heads, head_dim), (n_keys, kv_heads, head_dim), (n_keys, kv_heads, head_dim)]
    return [(scale * rng.normal(size=shape)).astype(np.float32) for shape in shapes]


def wide(*arrays) -> Any:
    return [a.astype(np.float64) for a in arrays]


def as_dtype(dtype, *arrays):
    """Return float32 arrays that the dtype represents exactly."""
    if dtype == "float32":
        return arrays
    return [(np.ascontiguousarray(a).view(np.uint32) & 0xFFFF0000).view(np.float32) for a in arrays]


def in_dtype(dtype, function, *arrays, **options):
    """Call the function on the arrays in this dtype (bfloat16: torch tensors), and return float32."""
    if dtype == "float32":
        return function(*arrays, **options)
    torch = pytest.importorskip("torch")
    tensors = [torch.tensor(a).bfloat16() if isinstance(a, np.ndarray) else a for a in arrays]
    result = function(*tensors, **options)
    assert result.dtype == torch.bfloat16
    return result.float().numpy()


def test_worked_values():
    # Scores 0, ln 2 and ln 4 at scale 1: weights 1/7, 2/7, 4/7 of values 7, 14, 21. Causally 7, then (7 + 28) / 3.
    q, k, v = np.zeros((3, 1, 32), np.float32), np.zeros((3, 1, 32), np.float32), np.zeros((3, 1, 32), np.float32)
    q[:, 0, 0] = 1
    k[:, 0, 0] = np.log([1, 2, 4])
    v[:, 0] = np.array([7, 14, 21])[:, None]
    np.testing.assert_allclose(whet.attention(q, k, v, scale=1)[:, 0, 5], [7, 35 / 3, 17], rtol=1e-6)
    np.testing.assert_allclose(whet.attention(q, k, v, scale=1, causal=False)[:, 0, 31], 17, rtol=1e-6)
    np.testing.assert_allclose(whet.attention(q, k, v, scale=1, window=2)[2, 0, 0], (14 + 42) / 3, rtol=1e-6)
    decoded = whet.decode_attention(q[:1], k[None], v[None], [2], scale=1.0)
    np.testing.assert_allclose(decoded[0, 0], 35 / 3, rtol=1e-6)


@pytest.mark.parametrize("n_queries", LENGTHS)
@pytest.mark.parametrize("more_keys", [-3, 0, 1, 140])
def test_lengths(n_queries, more_keys):
    # Fewer keys than queries: the first queries have no keys and return zeros.
    q, k, v = arrays(n_queries, n_queries, max(0, n_queries + more_keys), 6, 2, 40)
    cases: list[dict[str, Any]] = [
        {},
        {"causal": False},
        {"window": 1},
        {"window": 33, "block_size": 64, "scale": -0.3},
    ]
    for options in cases:
        got = whet.attention(q, k, v, **options)
        options.pop("block_size", None)
        np.testing.assert_allclose(got, naive_attention(*wide(q, k, v), **options), rtol=0, atol=2e-6)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (4, 2), (9, 3), (5, 1), (8, 2), (13, 1)])
def test_heads_and_head_dims(head_dim, heads, kv_heads):
    q, k, v = arrays(head_dim, 37, 70, heads, kv_heads, head_dim)
    np.testing.assert_allclose(whet.attention(q, k, v), naive_attention(*wide(q, k, v)), rtol=0, atol=2e-6)
    k_cache, v_cache, lengths = k.reshape(2, 35, kv_heads, head_dim), v.reshape(2, 35, kv_heads, head_dim), [35, 18]
    expected = naive_decode_attention(*wide(q[:2], k_cache, v_cache), lengths=lengths)
    np.testing.assert_allclose(whet.decode_attention(q[:2], k_cache, v_cache, lengths), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("length", [*LENGTHS, 255, 256, 257, 700])
@pytest.mark.parametrize("window", [None, 1, 65, 300])
def test_decode_lengths(length, window):
    q, k, v = arrays(length, 3, 3 * 700, 4, 2, 48)
    k, v = k.reshape(3, 700, 2, 48), v.reshape(3, 700, 2, 48)
    lengths = np.array([length, 700 - length, 3], np.int32)
    got = whet.decode_attention(q, k, v, lengths, window=window)
    np.testing.assert_allclose(
        got, naive_decode_attention(*wide(q, k, v), lengths=lengths, window=window), rtol=0, atol=2e-6
    )


@pytest.mark.parametrize("head_dim", [32, 40, 72, 80, 128])
@pytest.mark.parametrize("length", [1, 2, 17, 64, 131, 300])
def test_bfloat16(head_dim, length):
    q, k, v = as_dtype("bfloat16", *arrays(length, length, length, 6, 2, head_dim))
    for options in ({}, {"window": 7}):
        got = in_dtype("bfloat16", whet.attention, q, k, v, **options)
        error = np.abs(got - naive_attention(*wide(q, k, v), **options))
        assert error.max() <= 2**-8 * np.abs(v).max()  # half the bound: two roundings seldom add up
        decoded = in_dtype("bfloat16", whet.decode_attention, q[-1:], k[None], v[None], [length], **options)
        expected = naive_decode_attention(*wide(q[-1:], k[None], v[None]), lengths=[length], **options)
        # One rounding of the result, and float32 sums.
        assert np.all(np.abs(decoded - expected) <= 2**-8 * np.abs(expected) + 3e-6)


def test_packed_sequences_are_independent():
    lengths, key_lengths = [5, 0, 130, 1, 64], [5, 3, 200, 17, 64]
    q, k, v = arrays(1, sum(lengths), sum(key_lengths), 6, 3, 64)
    offsets, key_offsets = np.cumsum([0, *lengths]), np.cumsum([0, *key_lengths])
    got = whet.attention(q, k, v, cu_seqlens=offsets.astype(np.int32), cu_seqlens_k=key_offsets)
    expected = naive_attention(*wide(q, k, v), cu_seqlens=offsets, cu_seqlens_k=key_offsets)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6)
    for a, b, c, d in zip(offsets, offsets[1:], key_offsets, key_offsets[1:], strict=False):
        np.testing.assert_array_equal(got[a:b], whet.attention(q[a:b], k[c:d], v[c:d]))
    same = whet.attention(q, q[:, :3], q[:, 3:], cu_seqlens=offsets.tolist())
    np.testing.assert_allclose(
        same, naive_attention(*wide(q, q[:, :3], q[:, 3:]), cu_seqlens=offsets), rtol=0, atol=2e-6
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_querys_bits_do_not_depend_on_other_queries(dtype):
    def attend(*operands):
        return in_dtype(dtype, whet.attention, *operands, window=100)

    def decode(*operands):
        return in_dtype(dtype, whet.decode_attention, *operands)

    q, k, v = as_dtype(dtype, *arrays(2, 300, 300, 6, 2, 40))
    whole = attend(q, k, v)
    for begin in (299, 250, 123):  # only the end of the prompt, as with a cached prefix
        np.testing.assert_array_equal(attend(q[begin:], k, v), whole[begin:])
    batch = attend(np.stack([q, q[::-1]]), np.stack([k, k]), np.stack([v, v]))
    np.testing.assert_array_equal(batch[0], whole)
    for head in range(6):
        single = attend(q[:, head : head + 1], k[:, head // 3 :][:, :1], v[:, head // 3 :][:, :1])
        np.testing.assert_array_equal(single, whole[:, head : head + 1])
    decoded = decode(q[:3], np.stack([k] * 3), np.stack([v] * 3), [300, 10, 0])
    np.testing.assert_array_equal(decode(q[:1], k[None], v[None], [300]), decoded[:1])
    np.testing.assert_array_equal(decode(q[1:2], k[None, :10], v[None, :10], [10]), decoded[1:2])


IMPORTS = """
import hashlib, numpy as np, whet
try:
    import torch
except ImportError:
    torch = None
"""
DIGEST = """
rng = np.random.default_rng(0)
digests = set()
sizes = [(1, 2, 1, 32), (70, 3, 1, 40), (600, 4, 2, 64), (33, 9, 3, 128)]
inputs = [
    [rng.normal(size=(n, heads, head_dim)).astype(np.float32) for heads in (heads, kv_heads, kv_heads)]
    for n, heads, kv_heads, head_dim in sizes
]
for n_threads in (1, 2, 5):
    whet._core.set_num_threads(n_threads, oversubscribe=True)
    h = hashlib.sha256()
    for q, k, v in inputs:
        h.update(whet.attention(q, k, v).tobytes())
        h.update(whet.decode_attention(q[:1], k[None], v[None], [len(k)]).tobytes())
        if torch is not None:
            q, k, v = (torch.from_numpy(a).bfloat16() for a in (q, k, v))
            h.update(whet.attention(q, k, v).float().numpy().tobytes())
            h.update(whet.decode_attention(q[:1], k[None], v[None], [len(k)]).float().numpy().tobytes())
    digests.add(h.hexdigest())
print(*digests)
"""


@pytest.mark.skipif("WHET_ISA" in os.environ, reason="tests every instruction set itself")
def test_bits_do_not_depend_on_threads_or_instruction_set():
    # One digest per instruction set: threads give the same bits.
    assert_isas_agree(IMPORTS, DIGEST)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_masked_keys_and_values_do_not_leak(dtype, poison):
    def attend(*operands):
        return in_dtype(dtype, whet.attention, *operands, window=20)

    q, k, v = as_dtype(dtype, *arrays(3, 90, 90, 6, 2, 40))
    clean = attend(q, k, v)
    for key in (0, 1, 16, 45, 88, 89):
        bad_k, bad_v = k.copy(), v.copy()
        bad_k[key], bad_v[key] = poison, poison
        for poisoned in (attend(q, bad_k, v), attend(q, k, bad_v)):
            attends = (np.arange(90) >= key) & (np.arange(90) < key + 20)
            np.testing.assert_array_equal(poisoned[~attends], clean[~attends])
        assert not np.isfinite(attend(q, k, bad_v)[attends]).any()
        caches, bad_caches = [np.stack([a, a]) for a in (k, v)], [np.stack([a, a]) for a in (bad_k, bad_v)]
        decoded = in_dtype(dtype, whet.decode_attention, q[:2], *bad_caches, [key, 90])
        expected = in_dtype(dtype, whet.decode_attention, q[:2], *caches, [key, 90])
        np.testing.assert_array_equal(decoded[0], expected[0])
        assert not np.isfinite(decoded[1]).any()


def test_large_scores_and_minus_infinity():
    q, k, v = arrays(4, 40, 40, 2, 1, 32, scale=1e15)  # scores of 1e30: one key has all the weight
    v /= 1e15
    got = whet.attention(q, k, v)
    np.testing.assert_allclose(got, naive_attention(*wide(q, k, v)), rtol=1e-6)
    k[5:9], q = -np.inf, np.abs(q)  # scores of -inf have weight 0
    got = whet.attention(q, k, v, causal=False)
    others = [i for i in range(40) if not 5 <= i < 9]
    np.testing.assert_array_equal(
        got, whet.attention(q, np.where(np.isinf(k), np.float32(-3e38 / 1e17), k), v, causal=False)
    )
    np.testing.assert_allclose(got, naive_attention(*wide(q, k[others], v[others]), causal=False), rtol=1e-6)
    only = np.full((1, 3, 1, 32), -np.inf, np.float32)
    assert not whet.attention(q, only[0], v[:3], causal=False).any()
    assert not whet.decode_attention(q[:1], only, v[None, :3], [3]).any()


def test_strides_and_out():
    q, k, v = arrays(5, 50, 50, 6, 2, 64)
    expected = whet.attention(q, k, v)
    fused = np.concatenate([q, k, v], axis=1)  # the output of a fused projection
    np.testing.assert_array_equal(whet.attention(fused[:, :6], fused[:, 6:8], fused[:, 8:]), expected)
    heads_first = [np.ascontiguousarray(a.swapaxes(0, 1)).swapaxes(0, 1) for a in (q, k, v)]
    np.testing.assert_array_equal(whet.attention(*heads_first), expected)
    strided = np.zeros((50, 6, 128), np.float32)[:, :, ::2]  # the last axis is not contiguous: copied
    strided[:] = q
    np.testing.assert_array_equal(whet.attention(strided, k, v), expected)
    odd = np.zeros(q.size + 1, np.float32)[1:].reshape(q.shape)
    odd[:] = q
    assert whet.attention(odd, k, v, out=odd) is odd  # in place, and misaligned
    np.testing.assert_array_equal(odd, expected)
    wide_out = np.zeros((50, 8, 64), np.float32)
    whet.attention(q, k, v, out=wide_out[:, 1:7])
    np.testing.assert_array_equal(wide_out[:, 1:7], expected)
    assert not wide_out[:, 0].any() and not wide_out[:, 7].any()
    np.testing.assert_array_equal(whet.attention(q.tolist(), k, v), expected)

    cache_k, cache_v = np.stack([k, k * 2]), np.stack([v, v + 1])
    decoded = whet.decode_attention(q[:2], cache_k, cache_v, [50, 33])
    heads_first = [np.ascontiguousarray(c.swapaxes(1, 2)).swapaxes(1, 2) for c in (cache_k, cache_v)]
    np.testing.assert_array_equal(whet.decode_attention(q[:2], *heads_first, lengths=[50, 33]), decoded)
    out = np.zeros_like(decoded)
    assert whet.decode_attention(q[:2], cache_k, cache_v, np.array([50, 33]), out=out) is out
    np.testing.assert_array_equal(out, decoded)


@settings(max_examples=40)
@given(st.data())
def test_any_shape(data):
    head_dim, kv_heads = data.draw(st.integers(4, 12)) * 8, data.draw(st.integers(1, 3))
    heads = kv_heads * data.draw(st.integers(1, 5))
    n_queries, n_keys = data.draw(st.integers(0, 80)), data.draw(st.integers(0, 150))
    options = {"window": data.draw(st.none() | st.integers(1, 90))}
    q, k, v = arrays(data.draw(st.integers(0, 99)), n_queries, n_keys, heads, kv_heads, head_dim)
    got = whet.attention(q, k, v, block_size=data.draw(st.sampled_from([None, 32, 96])), **options)
    np.testing.assert_allclose(got, naive_attention(*wide(q, k, v), **options), rtol=0, atol=5e-6)


def zeros(*shape, dtype: type = np.float32):
    return np.zeros(shape, dtype)


GOOD = (zeros(4, 4, 32), zeros(4, 2, 32), zeros(4, 2, 32))


@pytest.mark.parametrize(
    ("operands", "options", "facts"),
    [
        ((zeros(4, 32), *GOOD[1:]), {}, ("attention", "q has shape (4, 32)", "k (4, 2, 32)", "(T, H, D)")),
        ((zeros(1, 4, 4, 32), zeros(2, 4, 2, 32), zeros(2, 4, 2, 32)), {}, ("(1, 4, 4, 32)", "(2, 4, 2, 32)")),
        ((GOOD[0], GOOD[1], zeros(5, 2, 32)), {}, ("v has shape (5, 2, 32)", "k has (4, 2, 32)")),
        ((zeros(4, 3, 32), *GOOD[1:]), {}, ("q has 3 heads", "k 2", "multiple")),
        ((zeros(4, 4, 40), *GOOD[1:]), {}, ("q has head_dim 40", "k has 32")),
        ((zeros(4, 4, 36), zeros(4, 2, 36), zeros(4, 2, 36)), {}, ("head_dim is 36", "multiple of 8 from 32")),
        ((zeros(4, 4, 24), zeros(4, 2, 24), zeros(4, 2, 24)), {}, ("head_dim is 24",)),
        ((zeros(4, 4, 520), zeros(4, 2, 520), zeros(4, 2, 520)), {}, ("head_dim is 520",)),
        (
            (zeros(4, 4, 32, dtype=np.float64), *GOOD[1:]),
            {},
            ("q has dtype float64", "float32 or bfloat16", "astype"),
        ),
        (GOOD, {"window": 0}, ("window is 0", "at least 1")),
        (GOOD, {"window": 3, "causal": False}, ("window is 3",)),
        (GOOD, {"block_size": 48}, ("block_size is 48", "multiple of 32 up to 256")),
        (GOOD, {"block_size": 512}, ("block_size is 512",)),
        (GOOD, {"scale": math.nan}, ("scale is nan", "finite")),
        (GOOD, {"scale": "big"}, ("scale is 'big'", "number")),
        (GOOD, {"cu_seqlens": [0, 3]}, ("cu_seqlens is [0, 3]", "offsets", "4 tokens of q")),
        (GOOD, {"cu_seqlens": [0, 3, 2, 4]}, ("cu_seqlens is [0, 3, 2, 4]",)),
        (GOOD, {"cu_seqlens": [0.0, 4.0]}, ("cu_seqlens has", "float64")),
        (GOOD, {"cu_seqlens": [0, 4], "cu_seqlens_k": [0, 2, 4]}, ("cu_seqlens has 2", "cu_seqlens_k 3")),
        (GOOD, {"cu_seqlens_k": [0, 4]}, ("cu_seqlens_k", "without cu_seqlens")),
        (tuple(a[None] for a in GOOD), {"cu_seqlens": [0, 4]}, ("q is a batch",)),
        (GOOD, {"out": zeros(4, 4, 40)}, ("out has shape (4, 4, 40)", "q has (4, 4, 32)")),
        (GOOD, {"out": zeros(4, 4, 32, dtype=np.float64)}, ("out has dtype float64", "q has float32")),
        (GOOD, {"out": [0.0]}, ("out is a list",)),
        (GOOD, {"out": zeros(4, 4, 64)[:, :, ::2]}, ("out", "contiguous")),
    ],
)
def test_errors_name_the_fix(operands, options, facts):
    assert_raises(whet.WhetError, facts, whet.attention, *operands, **options)


CACHE = zeros(2, 9, 2, 32)


@pytest.mark.parametrize(
    ("q", "k", "lengths", "options", "facts"),
    [
        (zeros(2, 4, 32), CACHE, [1, 10], {}, ("decode_attention", "lengths[1] is 10", "0 to T_max=9")),
        (zeros(2, 4, 32), CACHE, [-1, 1], {}, ("lengths[0] is -1",)),
        (zeros(2, 4, 32), CACHE, [1], {}, ("lengths has shape (1,)", "(2,)")),
        (zeros(2, 4, 32), CACHE, [1.0, 2.0], {}, ("lengths has", "float64")),
        (zeros(3, 4, 32), CACHE, [1, 1, 1], {}, ("q has shape (3, 4, 32)", "k_cache (2, 9, 2, 32)")),
        (zeros(2, 3, 32), CACHE, [1, 1], {}, ("q has 3 heads", "k_cache 2")),
        (zeros(2, 4, 32), CACHE.astype(np.float64), [1, 1], {}, ("k_cache has dtype float64",)),
        (zeros(2, 4, 32), CACHE, [1, 1], {"window": -1}, ("window is -1",)),
        (zeros(2, 4, 32), CACHE, [1, 1], {"out": zeros(2, 4, 40)}, ("out has shape",)),
    ],
)
def test_decode_errors_name_the_fix(q, k, lengths, options, facts):
    assert_raises(whet.WhetError, facts, whet.decode_attention, q, k, k, lengths, **options)


def test_a_window_beyond_the_length_has_no_effect():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((9, 2, 32), dtype=np.float32) for _ in range(3))
    right = whet.attention(q, k, v)
    for window in (9, 2**62, 2**63, 2**70):
        np.testing.assert_array_equal(whet.attention(q, k, v, window=window), right)
