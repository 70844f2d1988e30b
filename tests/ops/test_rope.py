"""apply_rope, apply_rope_freqs, RotaryEmbedding: worked values, accuracy to the bit, views, threads, errors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.raising import assert_raises
from tests.threads import same_on_any_threads

import whet
from whet.ops.rope import naive_cos_sin_cache, naive_rope

RNG = np.random.default_rng(0)
SHAPES = [  # rotary_dim, head_size: half a vector, whole ones, and tails of every kind
    (2, 2), (2, 5), (16, 64), (30, 31), (32, 32), (32, 128), (34, 40), (64, 64), (80, 80), (96, 96), (112, 112),
    (120, 120), (126, 128), (128, 128), (192, 192), (256, 256), (576, 600),
]  # fmt: skip


def normal(*shape):
    return RNG.standard_normal(shape, np.float32)


def by_complex_numbers(positions, x, head_size, inv_freq, is_neox):
    """Rotate every pair as a + bi, times exp(i position theta), in extended precision."""
    angles = (np.asarray(positions, np.longdouble)[..., None] * inv_freq)[..., None, :]
    half = len(inv_freq)
    out = x.reshape(*angles.shape[:-2], -1, head_size).astype(np.longdouble)
    pairs = out[..., : 2 * half]
    if is_neox:
        rotated = (pairs[..., :half] + 1j * pairs[..., half:]) * (np.cos(angles) + 1j * np.sin(angles))
        out[..., :half], out[..., half : 2 * half] = rotated.real, rotated.imag
    else:
        rotated = (pairs[..., 0::2] + 1j * pairs[..., 1::2]) * (np.cos(angles) + 1j * np.sin(angles))
        out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2] = rotated.real, rotated.imag
    return out.reshape(x.shape)


def test_worked_values():
    # Position 1 rotates the first pair by a quarter turn: (a, b) to (-b, a); the second pair is unchanged.
    quarter = np.array([np.pi / 2, 0.0])
    for is_neox, expected in ((True, [-3, 2, 1, 4, 5]), (False, [-2, 1, 3, 4, 5])):
        x = np.array([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]], np.float32)
        whet.RotaryEmbedding(5, 2, quarter, is_neox_style=is_neox)(np.array([1, 0]), x)
        np.testing.assert_allclose(x, [expected, [1, 2, 3, 4, 5]], atol=1e-6)


def test_frequencies_and_table():
    rope = whet.get_rope(8, 4, 3, base=100.0)
    np.testing.assert_allclose(rope.inv_freq, [1, 0.1], rtol=1e-15)
    assert rope.cos_sin_cache.shape == (3, 4) and rope.cos_sin_cache.dtype == np.float32
    np.testing.assert_allclose(rope.cos_sin_cache[2], [np.cos(2), np.cos(0.2), np.sin(2), np.sin(0.2)], rtol=1e-7)
    wide = naive_cos_sin_cache(rope.inv_freq, 3, 1.5)
    doubled = whet.RotaryEmbedding(8, 3, rope.inv_freq, attention_factor=1.5)
    np.testing.assert_allclose(doubled.cos_sin_cache, wide, rtol=1e-7)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("rotary_dim", "head_size"), SHAPES)
def test_against_complex_numbers(rotary_dim, head_size, is_neox):
    rope = whet.get_rope(head_size, rotary_dim, 300, is_neox_style=is_neox)
    positions = RNG.integers(0, 300, 5)
    for skew in (0, 1, 3):
        query, key = normal(5 * 3 * head_size + skew)[skew:].reshape(5, -1), normal(5, 2, head_size)
        expected = [by_complex_numbers(positions, x, head_size, rope.inv_freq, is_neox) for x in (query, key)]
        rest = key[..., rotary_dim:].copy()
        rope(positions, query, key)
        for got, right in zip((query, key), expected, strict=True):
            assert np.abs(got - right).max() < 1e-6
        np.testing.assert_array_equal(key[..., rotary_dim:], rest)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("rotary_dim", "head_size"), SHAPES)
@pytest.mark.parametrize("inverse", [False, True])
def test_to_the_bit(rotary_dim, head_size, is_neox, inverse):
    # The product with cos is rounded, the product with sin added by a fused multiply-add, on every instruction set.
    x, positions, half = normal(9, head_size), np.arange(9), rotary_dim // 2
    table = normal(9, rotary_dim)
    first, second = (slice(half), slice(half, 2 * half)) if is_neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    cos, sin = table[:, :half], table[:, half:] * np.float32(-1 if inverse else 1)
    a, b, wide = x[:, first].copy(), x[:, second].copy(), np.longdouble
    expected = x.copy()
    expected[:, first] = (wide(a * cos) - b.astype(wide) * sin).astype(np.float32)
    expected[:, second] = (wide(b * cos) + a.astype(wide) * sin).astype(np.float32)
    whet.apply_rope(positions, x, None, head_size, table, is_neox, inverse=inverse)
    np.testing.assert_array_equal(x, expected)


def test_equals_the_reference():
    rope, positions = whet.get_rope(64, 32, 100), RNG.integers(0, 100, (2, 7))
    query = normal(2, 7, 3 * 64)
    for is_neox in (True, False):
        for inverse in (True, False):
            got = query.copy()
            whet.apply_rope(positions, got, None, 64, rope.cos_sin_cache, is_neox, inverse=inverse)
            wide = naive_rope(positions, query.astype(float), 64, rope.cos_sin_cache, is_neox, inverse=inverse)
            np.testing.assert_allclose(got, wide, atol=1e-6)


@pytest.mark.parametrize("is_neox", [True, False])
def test_inverse_undoes_forward_and_norms_are_preserved(is_neox):
    rope = whet.get_rope(96, 64, 5000, is_neox_style=is_neox)
    query, key, positions = normal(40, 4, 96), normal(40, 96), RNG.integers(0, 5000, 40)
    rotated, rotated_key = rope(positions, query.copy(), key.copy())
    assert np.abs(rotated - query).max() > 0.1
    np.testing.assert_allclose(np.linalg.norm(rotated, axis=-1), np.linalg.norm(query, axis=-1), rtol=1e-6)
    back, back_key = rope.inverse(positions, rotated, rotated_key)
    assert back is rotated and back_key is rotated_key
    np.testing.assert_allclose(back, query, atol=1e-6)
    np.testing.assert_allclose(back_key, key, atol=1e-6)


def test_products_depend_only_on_distance():
    rope, q, k = whet.get_rope(128, max_position=4096), normal(128), normal(128)
    products = []
    for at in (0, 1000, 4000):
        query, key = rope(np.array([at + 7]), q[None].copy(), None)[0], rope(np.array([at]), k[None].copy())[0]
        products.append(float(query[0].astype(float) @ key[0]))
    np.testing.assert_allclose(products, products[0], atol=1e-4)


def test_inverse_is_the_transpose_under_an_attention_factor():
    rope = whet.RotaryEmbedding(32, 50, whet.get_rope(32).inv_freq, attention_factor=1.25)
    x, positions = normal(50, 32), np.arange(50)
    np.testing.assert_allclose(rope.inverse(positions, rope(positions, x.copy())[0])[0], 1.25**2 * x, atol=1e-6)


# --- layouts of arrays ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_neox", [True, False])
def test_views_of_a_fused_projection(is_neox):
    n_heads, n_kv_heads, size, tokens = 6, 2, 40, 11
    rope = whet.get_rope(size, 32, 64, is_neox_style=is_neox)
    qkv, positions = normal(tokens, (n_heads + 2 * n_kv_heads) * size), RNG.integers(0, 64, tokens)
    before = qkv.copy()
    cuts = n_heads * size, (n_heads + n_kv_heads) * size
    rope(positions, *np.split(qkv, cuts, axis=1)[:2])
    for part, whole in zip(np.split(qkv, cuts, axis=1)[:2], np.split(before, cuts, axis=1)[:2], strict=True):
        right = by_complex_numbers(positions, whole, size, rope.inv_freq, is_neox)
        np.testing.assert_allclose(part, right.astype(float), atol=1e-6)
    np.testing.assert_array_equal(qkv[:, cuts[1] :], before[:, cuts[1] :])


def test_heads_first_layout_and_position_types():
    rope = whet.get_rope(16, max_position=32)
    x = normal(2, 3, 5, 16)  # (B, heads, T, head_size)
    positions = RNG.integers(0, 32, (2, 5))
    right = by_complex_numbers(positions, x.transpose(0, 2, 1, 3), 16, rope.inv_freq, True).astype(float)
    wide = np.zeros((2, 10), np.int64)
    wide[:, ::2] = positions
    for given_positions in (positions, positions.astype(np.int32), wide[:, ::2], positions.tolist()):
        got = x.copy()
        rope(given_positions, got.transpose(0, 2, 1, 3))
        np.testing.assert_allclose(got.transpose(0, 2, 1, 3), right, atol=1e-6)
    flat = np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(2, 5, 48)
    rope(positions.astype(np.uint8), flat)
    np.testing.assert_allclose(flat.reshape(right.shape), right, atol=1e-6)
    reverse = x.transpose(0, 2, 1, 3)[:, ::-1].copy()
    rope(positions[:, ::-1], reverse)
    np.testing.assert_allclose(reverse[:, ::-1], right, atol=1e-6)


def test_rows_of_a_wider_table():
    rope, x, positions = whet.get_rope(16, max_position=8), normal(8, 16), np.arange(8)
    wide = normal(8, 20)
    wide[:, :16] = rope.cos_sin_cache
    columns = np.asfortranarray(rope.cos_sin_cache)
    expected = rope(positions, x.copy())[0]
    for table in (wide[:, :16], columns):
        got = x.copy()
        whet.apply_rope(positions, got, None, 16, table)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("shape", [(0, 32), (0, 2, 16), (3, 0), (3, 0, 16)])
def test_empty_inputs(shape):
    positions, x = np.zeros(shape[0], np.int64), np.zeros(shape, np.float32)
    assert whet.get_rope(16, max_position=4)(positions, x, x.copy())[0] is x
    assert whet.apply_rope(np.zeros((2, 0), int), np.zeros((2, 0, 16), np.float32), None, 16, normal(1, 16)) is None


@settings(max_examples=60)
@given(st.data())
def test_any_shape(data):
    half = data.draw(st.integers(1, 40))
    head_size = 2 * half + data.draw(st.integers(0, 20))
    batch, tokens, heads = (data.draw(st.integers(1, 4)) for _ in range(3))
    is_neox = data.draw(st.booleans())
    rope = whet.get_rope(head_size, 2 * half, 50, is_neox_style=is_neox)
    positions = RNG.integers(0, 50, (batch, tokens))
    x = normal(batch, tokens, heads * head_size + 3)[..., 3:]
    right = by_complex_numbers(positions, x, head_size, rope.inv_freq, is_neox).astype(float)
    rope(positions, x)
    np.testing.assert_allclose(x, right, atol=2e-6)


def test_bits_do_not_depend_on_threads():
    rope, positions = whet.get_rope(128, max_position=3000), RNG.integers(0, 3000, (3, 700))
    query, key = normal(3, 700, 4, 128), normal(3, 700, 128)

    def rotate():
        whet.apply_rope_freqs(positions, computed := key.copy(), None, 128, rope.inv_freq)
        return *rope(positions, query.copy(), key.copy()), computed

    _, by_table, computed = same_on_any_threads(rotate)
    np.testing.assert_array_equal(by_table, computed)


# --- without a table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_neox", [True, False])
def test_computed_angles_equal_the_table(is_neox):
    for rotary_dim, head_size in ((2, 2), (30, 40), (128, 128), (300, 300)):
        rope = whet.get_rope(head_size, rotary_dim, 200, is_neox_style=is_neox)
        positions, x = RNG.integers(0, 200, 50), normal(50, 3 * head_size)
        for inverse in (False, True):
            got, expected = x.copy(), x.copy()
            whet.apply_rope_freqs(positions, got, None, head_size, rope.inv_freq, is_neox, inverse=inverse)
            (rope.inverse if inverse else rope)(positions, expected)
            np.testing.assert_array_equal(got, expected)


def test_far_positions_are_within_float32():
    inv_freq = whet.get_rope(128, max_position=1).inv_freq
    positions = np.array([0, 1, 12345, 131071, 999_999, 10**6, -7, -(10**6), 2**24 + 1, 2**31, -(2**31)])
    x = np.zeros((len(positions), 128), np.float32)
    x[:, :64] = 1  # rotates to (cos, sin)
    whet.apply_rope_freqs(positions, x, None, 128, inv_freq, attention_factor=1.0)
    angles = positions.astype(np.longdouble)[:, None] * inv_freq
    error = np.abs(x - np.concatenate([np.cos(angles), np.sin(angles)], axis=1)).max(1)
    assert error[np.abs(positions) <= 10**6].max() < 1e-7
    assert error.max() < 1e-6
    half = np.array([[1.0, 0.0]], np.float32)
    whet.apply_rope_freqs([3], half, None, 2, np.array([0.5], np.float32), attention_factor=2.0)
    np.testing.assert_allclose(half, [[2 * np.cos(1.5), 2 * np.sin(1.5)]], rtol=1e-6)


# --- errors ---------------------------------------------------------------------------------------------

TABLE = np.zeros((10, 16), np.float32)
READ_ONLY = np.zeros((2, 16), np.float32)
READ_ONLY.flags.writeable = False
X = np.zeros((2, 32), np.float32)


@pytest.mark.parametrize(
    ("positions", "query", "key", "head_size", "table", "facts"),
    [
        ([0, 10], X, None, 16, TABLE, ("positions[1] is 10", "table of 10 positions")),
        ([[0], [-1]], X[:, None], None, 16, TABLE, ("positions[1, 0] is -1",)),
        ([0, 1, 2], X, None, 16, TABLE, ("query has shape (2, 32)", "positions has (3,)", "head_size is 16")),
        ([0, 1], X, X[:1], 16, TABLE, ("key has shape (1, 32)",)),
        ([0, 1], X, None, 24, TABLE, ("query has shape (2, 32)", "head_size is 24", "n_heads * head_size")),
        ([0, 1], X.reshape(2, 1, 32), None, 16, TABLE, ("query has shape (2, 1, 32)",)),
        ([0, 1], X, None, 8, TABLE, ("rotary_dim is 16", "even number from 2 to head_size=8")),
        ([0, 1], X, None, 16, TABLE[:, :15], ("rotary_dim is 15",)),
        ([0, 1], X, None, 0, TABLE, ("head_size is 0", "at least 1")),
        ([0, 1], X, None, 16.0, TABLE, ("head_size is 16.0", "integer")),
        ([0, 1], X, None, 16, TABLE[0], ("cos_sin_cache has shape (16,)", "(max_position, rotary_dim)")),
        ([0, 1], X, None, 16, TABLE.astype(float), ("cos_sin_cache has dtype float64", "astype(np.float32)")),
        ([0.0, 1.0], X, None, 16, TABLE, ("positions has dtype float64", "int64 or int32")),
        ([[[0]], [[1]]], X, None, 16, TABLE, ("positions has shape (2, 1, 1)", "(T,) or (B, T)")),
        ([0, 1], X.astype(float), None, 16, TABLE, ("query has dtype float64", "float32 or bfloat16", "astype")),
        ([0, 1], X.tolist(), None, 16, TABLE, ("query is a list",)),
        ([0, 1], np.ma.array(X), None, 16, TABLE, ("query is a MaskedArray",)),
        ([0, 1], None, X, 16, TABLE, ("query is a NoneType",)),
        ([0, 1], READ_ONLY, None, 16, TABLE, ("query is read-only", "copy")),
        ([0, 1], X, READ_ONLY, 16, TABLE, ("key is read-only",)),
        ([0, 1], np.zeros((2, 64), np.float32)[:, ::2], None, 16, TABLE, ("query has strides (64, 2)", "1")),
        (
            [0, 1],
            np.lib.stride_tricks.as_strided(X, (2, 32), (0, 4)),
            None,
            16,
            TABLE,
            ("query is expanded",),
        ),
    ],
)
def test_errors_name_the_fix(positions, query, key, head_size, table, facts):
    assert_raises(whet.WhetError, ("apply_rope", *facts), whet.apply_rope, positions, query, key, head_size, table)


def test_an_invalid_key_leaves_the_query_unchanged():
    query = normal(2, 16)
    before = query.copy()
    with pytest.raises(whet.WhetValueError):
        whet.apply_rope([1, 2], query, READ_ONLY, 16, normal(5, 16))
    with pytest.raises(whet.WhetValueError):
        whet.apply_rope([1, 5], query, None, 16, normal(5, 16))
    np.testing.assert_array_equal(query, before)


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (lambda: whet.apply_rope_freqs([0, 2**31 + 1], X, None, 16, np.ones(8)), ("positions[1] is 2147483649",)),
        (lambda: whet.apply_rope_freqs([0, 1], X, None, 16, np.ones((2, 4))), ("inv_freq has shape (2, 4)",)),
        (lambda: whet.apply_rope_freqs([0, 1], X, None, 16, np.ones(9)), ("rotary_dim is 18",)),
        (lambda: whet.apply_rope_freqs([0, 1], X, None, 16, np.ones(0)), ("inv_freq has shape (0,)",)),
        (lambda: whet.apply_rope_freqs([0, 1], X, None, 16, np.ones(8, int)), ("inv_freq has dtype int64",)),
        (lambda: whet.RotaryEmbedding(16, 8, [1.0, np.inf]), ("inv_freq holds inf",)),
        (lambda: whet.RotaryEmbedding(16, 0, np.ones(8)), ("max_position is 0", "at least 1")),
        (lambda: whet.RotaryEmbedding(4, 8, np.ones(8)), ("rotary_dim is 16", "head_size=4")),
    ],
)
def test_other_errors(call, facts):
    assert_raises(whet.WhetError, facts, call)


def test_repr_names_the_settings():
    assert repr(whet.get_rope(8, 4, 3, is_neox_style=False)) == (
        "RotaryEmbedding(head_size=8, rotary_dim=4, max_position=3, is_neox_style=False)"
    )
