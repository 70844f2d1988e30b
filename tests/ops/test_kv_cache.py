"""KV cache: append and gather against their references, all item sizes, strides, and no writes on errors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.raising import assert_raises

import whet
from whet.ops.kv_cache import naive_kv_append, naive_kv_gather

DTYPES = [np.float32, np.float16, np.int8, np.uint8, np.int32, np.uint16, np.float64]


def numbers(shape, dtype, seed=0):
    return np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_append_and_gather(dtype):
    cache, new = numbers((3, 10, 2, 5), dtype), numbers((3, 4, 2, 5), dtype, 1)
    expected = naive_kv_append(cache.copy(), new, [0, 6, 3])
    assert whet.kv_append(cache, new, [0, 6, 3]) is cache
    np.testing.assert_array_equal(cache, expected)
    rows, lengths = [2, 0, 2, 1], [7, 0, 10, 1]
    packed = whet.kv_gather(cache, np.array(rows), np.array(lengths, np.int32))
    assert packed.dtype == dtype and packed.shape == (18, 2, 5)
    np.testing.assert_array_equal(packed, naive_kv_gather(cache, rows, lengths))
    out = np.zeros((18, 4, 5), dtype)[:, ::2]
    assert whet.kv_gather(cache, rows, lengths, out=out) is out
    np.testing.assert_array_equal(out, packed)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_strided_caches(dtype):
    # (H_kv, B, T_max, D) in memory, a cache of some sequences, keys and values interleaved.
    memory = numbers((2, 4, 9, 6), dtype)
    for view in (lambda m: m.transpose(1, 2, 0, 3), lambda m: m[:, :, ::2], lambda m: m[::-1], lambda m: m[..., 1:4]):
        whole = memory.copy()
        cache, expected = view(whole), view(memory).copy()
        b, _, heads, dim = cache.shape
        new = numbers((heads, b, 2, 2 * dim), dtype, 1).transpose(1, 2, 0, 3)[..., :dim]
        naive_kv_append(expected, new, range(b))
        whet.kv_append(cache, new, range(b))
        np.testing.assert_array_equal(cache, expected)
        restored = whole.copy()
        view(restored)[...] = view(memory)
        np.testing.assert_array_equal(restored, memory)  # nothing outside the cache changed
        np.testing.assert_array_equal(
            whet.kv_gather(cache, [b - 1, 0], [2, 1]), naive_kv_gather(expected, [b - 1, 0], [2, 1])
        )


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=8))
def test_gather_any_rows(pairs):
    cache = numbers((5, 12, 3, 7), np.float32)
    rows, lengths = [p[0] for p in pairs], [p[1] for p in pairs]
    np.testing.assert_array_equal(whet.kv_gather(cache, rows, lengths), naive_kv_gather(cache, rows, lengths))


def test_large_copies_on_several_threads():
    cache, new = numbers((16, 64, 8, 64), np.float32), numbers((16, 32, 8, 64), np.float32, 1)
    positions = np.arange(16)
    expected = naive_kv_append(cache.copy(), new, positions)
    np.testing.assert_array_equal(whet.kv_append(cache, new, positions), expected)
    np.testing.assert_array_equal(
        whet.kv_gather(cache, positions, positions), naive_kv_gather(expected, positions, positions)
    )


def test_new_tokens_may_alias_the_cache():
    cache = numbers((2, 8, 2, 3), np.float32)
    expected = naive_kv_append(cache.copy(), cache[:, :6].copy(), [2, 2])
    whet.kv_append(cache, cache[:, :6], [2, 2])
    np.testing.assert_array_equal(cache, expected)


def test_empty():
    cache = numbers((2, 8, 2, 3), np.float16)
    before = cache.copy()
    whet.kv_append(cache, cache[:, :0], [8, 0])
    whet.kv_append(cache[:0], cache[:0], [])
    np.testing.assert_array_equal(cache, before)
    assert whet.kv_gather(cache, [], []).shape == (0, 2, 3)
    assert whet.kv_gather(cache, [1], [0]).shape == (0, 2, 3)


CACHE = numbers((2, 8, 2, 3), np.float32)
NEW = numbers((2, 4, 2, 3), np.float32, 1)


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (lambda: whet.kv_append(CACHE, NEW, [0, 5]), ("positions[1] is 5", "4 tokens", "cache of 8 positions")),
        (lambda: whet.kv_append(CACHE, NEW, [-1, 0]), ("positions[0] is -1",)),
        (lambda: whet.kv_append(CACHE, NEW, [0]), ("new (2, 4, 2, 3)", "positions (1,)")),
        (lambda: whet.kv_append(CACHE, NEW[:, :, :1], [0, 0]), ("(B, T_max, H_kv, D)",)),
        (lambda: whet.kv_append(CACHE, NEW.astype(np.float16), [0, 0]), ("new is float16", "cache float32")),
        (lambda: whet.kv_append(CACHE, NEW.tolist(), [0, 0]), ("new is list",)),
        (lambda: whet.kv_append(CACHE, NEW, [0.0, 1.0]), ("positions has dtype float64", "integers")),
        (lambda: whet.kv_append(CACHE[0], NEW, [0, 0]), ("cache has 3 axes",)),
        (lambda: whet.kv_append(CACHE.tolist(), NEW, [0, 0]), ("cache is a list",)),
        (lambda: whet.kv_append(np.broadcast_to(CACHE, CACHE.shape), NEW, [0, 0]), ("cache is read-only",)),
        (lambda: whet.kv_append(CACHE.T, CACHE.T, [0, 0, 0]), ("last axis", "contiguous")),
        (lambda: whet.kv_gather(CACHE, [2], [1]), ("rows[0] is 2", "0 to 1")),
        (lambda: whet.kv_gather(CACHE, [0, -1], [1, 1]), ("rows[1] is -1",)),
        (lambda: whet.kv_gather(CACHE, [0], [9]), ("lengths[0] is 9", "0 to 8")),
        (lambda: whet.kv_gather(CACHE, [0, 1], [9]), ("rows has shape (2,)", "lengths (1,)")),
        (
            lambda: whet.kv_gather(CACHE, [0], [3], out=CACHE[0]),
            ("out is float32 (8, 2, 3)", "float32 (3, 2, 3)"),
        ),
    ],
)
def test_errors_write_nothing(call, facts):
    before = CACHE.copy()
    assert_raises(whet.WhetError, facts, call)
    np.testing.assert_array_equal(CACHE, before)
