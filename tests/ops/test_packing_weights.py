"""Weights packed from any float dtype and strides: the same bits as packing rows of the format's own layout."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from tests.raising import assert_raises
from tests.threads import same_on_any_threads

import whet
from whet import WhetTypeError, WhetValueError
from whet.ops.quant import CORE_TABLE
from whet.ops.quant import FORMATS as QUANTISED

FORMATS = tuple(CORE_TABLE)
SOURCES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYOUTS = {
    "rows": lambda w: w,
    "columns": lambda w: w.T.contiguous().T,
    "every third": lambda w: w.repeat_interleave(3, 0).repeat_interleave(3, 1)[::3, ::3],
    "part of rows": lambda w: torch.cat([w, w, w], 1)[:, w.shape[1] : 2 * w.shape[1]],
    "part of columns": lambda w: torch.cat([w, w, w]).T.contiguous().T[len(w) : 2 * len(w)],
}


def numbers(seed, n, k, dtype=torch.float32):
    """Return blocks of very different sizes, zeros, and ties between two bfloat16 numbers."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(n, k)) * np.exp(rng.normal(0, 2, (n, (k + 31) // 32)).repeat(32, axis=1)[:, :k])
    w[rng.random((n, k)) < 0.1] = 0.0
    w[:, ::7] = (rng.integers(-300, 300, w[:, ::7].shape) * 2 + 1) * 2.0**-8  # 9 or 10 bits
    return torch.from_numpy(w.astype(np.float32)).to(dtype)


def stored(packed):
    """Return the rows' bytes in the format's own layout."""
    rows = packed.unpack()
    return (rows.data if isinstance(rows, whet.Quantized) else rows).view(np.uint8)


def expected(w, format):
    """Return the bytes from torch's rounding or ``quantize``, without a packing kernel."""
    if format == "float32":
        return w.float().numpy().copy().view(np.uint8)
    if format == "bfloat16":
        return w.float().bfloat16().view(torch.uint16).numpy().view(np.uint8)
    return whet.quantize(w.float(), format).data


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_dtype_and_strides(format, source, layout):
    for n, k in ((1, 1), (16, 32), (17, 33), (50, 256), (37, 512)):
        k = k // CORE_TABLE[format].block_length * CORE_TABLE[format].block_length
        if k == 0:
            continue
        w = numbers(n, n, k, SOURCES[source])
        np.testing.assert_array_equal(stored(whet.pack_weight(LAYOUTS[layout](w), format)), expected(w, format))


@pytest.mark.parametrize("format", FORMATS)
def test_update_changes_only_its_rows(format):
    n, k = 70, 256
    before, after = numbers(1, n, k), numbers(2, n, k)
    for first, count in ((0, 70), (0, 1), (69, 1), (16, 16), (16, 32), (5, 3), (5, 11), (5, 12), (15, 50), (64, 6)):
        packed = whet.pack_weight(before, format)
        mixed = before.clone()
        mixed[first : first + count] = after[first : first + count]
        for rows in (after, after.T.contiguous().T):
            packed.update(rows[first : first + count], first)
            np.testing.assert_array_equal(stored(packed), expected(mixed, format))
        x = numbers(3, 2, k).numpy()
        np.testing.assert_array_equal(whet.linear(x, packed), whet.linear(x, whet.pack_weight(mixed, format)))
    packed.update(after[:0], 70)  # no rows: nothing to do


@pytest.mark.parametrize("format", FORMATS)
def test_update_from_own_format(format):
    w = numbers(4, 40, 256)
    if format in ("float32", "bfloat16"):
        w = w.to(SOURCES[format])
        own = w
    else:
        own = whet.quantize(w, format)
    packed = whet.PackedWeight(format, (50, 256))
    assert not any(packed.row(i).any() for i in range(50))
    packed.update(own, 7)
    np.testing.assert_array_equal(stored(packed)[7:47], expected(w, format))
    assert not any(packed.row(i).any() for i in (*range(7), 47, 48, 49))


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_dequantised_weights(format):
    for n, k in ((1, 1), (19, 33), (35, 256)):
        k = k // CORE_TABLE[format].block_length * CORE_TABLE[format].block_length
        if k == 0:
            continue
        w = numbers(n, n, k)
        packed = whet.pack_weight(w, format)
        if format in ("float32", "bfloat16"):
            wide = w.to(SOURCES[format]).float().numpy()
        else:
            wide = whet.quantize(w, format).dequantize()
        for i in (0, n // 2, n - 1):
            row = packed.row(i)
            assert row.dtype == np.float32
            np.testing.assert_array_equal(row, wide[i])


@pytest.mark.parametrize("format", FORMATS)
def test_bits_do_not_depend_on_threads(format):
    w = numbers(5, 333, 512)
    same_on_any_threads(lambda: stored(whet.pack_weight(w, format)))


@pytest.mark.parametrize("format", QUANTISED)
def test_special_values_are_quantised_like_the_reference(format):
    k = 256
    rng = np.random.default_rng(6)
    rows = [
        np.zeros(k),
        np.full(k, -0.0),
        np.full(k, 0.5),
        np.full(k, -0.5),
        np.full(k, 1e-40),
        rng.normal(0, 1e-41, k),
        rng.normal(0, 1e-7, k),  # scales that are subnormal in float16
        rng.normal(0, 1e30, k),  # scales that float16 does not reach
        np.abs(rng.normal(0, 1, k)),
        -np.abs(rng.normal(0, 1, k)),
        np.where(np.arange(k) == 100, 1.0, 0.0),
        np.tile(np.arange(-8, 8), k // 16),
        np.tile(np.arange(16) - 0.5, k // 16),  # halfway
        np.where(np.arange(k) % 64 < 32, 0.0, rng.normal(0, 1, k)),
    ]
    w = torch.from_numpy(np.array(rows, np.float32))
    np.testing.assert_array_equal(stored(whet.pack_weight(w, format)), expected(w, format))


def test_bfloat16_bits_are_unchanged_and_nan_stays():
    bits = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    for given in (
        torch.from_numpy(bits.copy()).view(torch.bfloat16),
        torch.from_numpy(bits.T.copy()).view(torch.bfloat16).T,
    ):
        np.testing.assert_array_equal(whet.pack_weight(given).unpack(), bits)
    w = np.array([[np.nan, np.inf, -np.inf, 3.4e38, 1e-40, -1e-45, 1.00390625, 1.01171875]], np.float32)
    got = torch.from_numpy(whet.pack_weight(w, "bfloat16").unpack()).view(torch.bfloat16)
    assert got[0, 0].isnan() and torch.equal(got[0, 1:], torch.from_numpy(w).bfloat16()[0, 1:])


def test_float16_is_widened_exactly():
    bits = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(256, 256)
    finite = np.where(np.isfinite(bits), bits, np.float16(0))
    for given in (finite, np.asfortranarray(finite), torch.from_numpy(finite)):
        np.testing.assert_array_equal(whet.pack_weight(given, "float32").unpack(), finite.astype(np.float32))


def test_numpy_arrays_in_every_order():
    w = numbers(7, 33, 64).numpy()
    for given in (w, np.asfortranarray(w), w[::-1][::-1], np.repeat(w, 2, axis=1)[:, ::2], w.astype(">f4"), w.tolist()):
        np.testing.assert_array_equal(whet.pack_weight(given, "float32").unpack(), w)
    np.testing.assert_array_equal(whet.pack_weight(w[::-1, ::-1]).unpack(), w[::-1, ::-1])
    shifted = np.frombuffer(b"\0" + w.tobytes(), np.uint8)[1:].view(np.float32).reshape(w.shape)
    np.testing.assert_array_equal(whet.pack_weight(shifted).unpack(), w)
    one = np.broadcast_to(w[:1], (20, 64))
    np.testing.assert_array_equal(whet.pack_weight(one).unpack(), one)


def test_empty_weights():
    assert whet.pack_weight(np.empty((0, 32), np.float32), "q8_0").unpack().data.shape == (0, 34)
    for format in ("float32", "bfloat16"):
        assert whet.pack_weight(np.empty((3, 0), np.float32), format).row(2).shape == (0,)


PACKED = whet.PackedWeight("q8_0", (20, 64))
TWO, INFINITE = np.ones((2, 64), np.float32), torch.tensor([[1.0] * 63 + [math.inf]])
NOT_A_NUMBER = np.array([[1.0] * 31 + [np.nan]], np.float32)


@pytest.mark.parametrize(
    ("call", "error", "facts"),
    [
        (
            lambda: PACKED.update(TWO[:, :32]),
            WhetValueError,
            ("PackedWeight.update", "weight is (2, 32)", "row 0", "(20, 64)"),
        ),
        (lambda: PACKED.update(TWO, 19), WhetValueError, ("weight is (2, 64)", "row 19")),
        (lambda: PACKED.update(TWO, -1), WhetValueError, ("weight is (2, 64)", "row -1")),
        (lambda: PACKED.update(np.ones(64, np.float32)), WhetValueError, ("weight has shape (64,)", "two")),
        (lambda: PACKED.update(np.ones((2, 64))), WhetTypeError, ("weight has dtype float64",)),
        (
            lambda: PACKED.update(whet.quantize(TWO, "q4_0")),
            WhetValueError,
            ("quantised as q4_0", "format is 'q8_0'", "weight.dequantize()"),
        ),
        (
            lambda: PACKED.update(INFINITE.bfloat16()),
            WhetValueError,
            ("PackedWeight.update", "weight[0, 63] is inf"),
        ),
        (lambda: whet.pack_weight(NOT_A_NUMBER, "q8_0"), WhetValueError, ("pack_weight", "weight[0, 31] is nan")),
        (
            lambda: PACKED.update(torch.ones(2, 64, requires_grad=True)),
            WhetValueError,
            ("requires grad", "weight.detach()"),
        ),
        (lambda: whet.pack_weight(np.ones((2, 64), np.float16)), WhetValueError, ("format is 'float16'", "one")),
        (
            lambda: whet.PackedWeight("q4_k", (2, 64)),
            WhetValueError,
            ("PackedWeight", "rows of 64", "256"),
        ),
        (lambda: whet.PackedWeight("q5", (2, 64)), WhetValueError, ("PackedWeight", "format is 'q5'", "one of")),
        (lambda: PACKED.row(20), WhetValueError, ("PackedWeight.row", "i is 20", "0 to 19")),
        (lambda: PACKED.row(-1), WhetValueError, ("i is -1", "0 to 19")),
    ],
)
def test_invalid_arguments_are_named(call, error, facts):
    assert_raises(error, facts, call)


@pytest.mark.parametrize("format", CORE_TABLE)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda weight: pickle.loads(pickle.dumps(weight))])
def test_copies_have_the_same_bits_and_their_own_memory(copied, format):
    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((19, 256), np.float32), rng.standard_normal((2, 256), np.float32)
    packed = whet.pack_weight(weight, format)
    expected, twin = whet.linear(x, packed), copied(packed)
    packed.update(np.zeros_like(weight))
    np.testing.assert_array_equal(whet.linear(x, twin), expected)
    assert (twin.format, twin.shape, twin.size_bytes) == (packed.format, packed.shape, packed.size_bytes)
