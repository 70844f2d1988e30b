"""Formats against the gguf package, which reads the same bytes, and against error bounds of their step sizes."""

import gguf
import numpy as np
import pytest
import torch
from tests.raising import assert_raises, mentions

import whet
from whet import WhetTypeError, WhetValueError
from whet.ops.quant import CORE_TABLE, bf16_bits, bf16_values

BITS = {
    "int8": 8 + 32 / 512,
    "q8_0": 8.5,
    "q4_0": 4.5,
    "q4_1": 5.0,
    "q5_0": 5.5,
    "q5_1": 6.0,
    "q4_k": 4.5,
    "q5_k": 5.5,
    "q6_k": 6.5625,
    "mxfp4": 4.25,
}
GGUF = {name: gguf.GGMLQuantizationType[name.upper()] for name in BITS if name != "int8"}
SCALES = {"q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
"""Offsets of a block's float16 numbers."""


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("format", GGUF)
def test_dequantisation_equals_gguf(format):
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (5, whet.quantize(normal(0, 1, 512), format).data.shape[1]), dtype=np.uint8)
    # Random scales could be NaN or infinite: overwrite them with finite float16 numbers.
    for at in range(0, data.shape[1], CORE_TABLE[format].block_bytes):
        for offset in SCALES.get(format, (0,)):
            if format == "mxfp4":  # whose scale is an exponent
                data[:, at] = rng.integers(1, 253, 5)
                continue
            data[:, at + offset : at + offset + 2] = rng.normal(0, 0.1, (5, 1)).astype(np.float16).view(np.uint8)
    ours = whet.Quantized(format, (5, 512), data).dequantize()
    np.testing.assert_array_equal(ours, gguf.quants.dequantize(data, GGUF[format]))
    # Packing to panels and unpacking is lossless.
    np.testing.assert_array_equal(whet.pack_weight(whet.Quantized(format, (5, 512), data)).unpack().data, data)


@pytest.mark.parametrize("format", BITS)
def test_bits_and_error_per_weight(format):
    w = normal(1, 40, 512)
    quantised = whet.quantize(w, format)
    assert quantised.bits_per_weight == BITS[format]
    error = np.abs(quantised.dequantize() - w)
    if format in ("int8", "q8_0"):
        width = 512 if format == "int8" else 32
        step = np.repeat(np.abs(w).reshape(40, -1, width).max(axis=2) / 127, width, axis=1)
        assert np.all(error <= 0.51 * step + 1e-3 * np.abs(w))
    limits = {
        "int8": 8e-5,
        "q8_0": 3.3e-5,
        "q4_0": 6.66e-3,
        "q4_1": 4.9e-3,
        "q5_0": 1.675e-3,
        "q5_1": 1.13e-3,
        "q4_k": 5.01e-3,
        "q5_k": 1.25e-3,
        "q6_k": 3.1e-4,
        "mxfp4": 1.27e-2,
    }
    assert (error**2).sum() < limits[format] * (w**2).sum()


@pytest.mark.parametrize(("format", "limit"), [("q4_1", 1e-7), ("q4_k", 2e-4), ("q5_k", 4.7e-4)])
def test_mins_are_refitted_to_rounded_scales(format, limit):
    """q4_1 represents these weights exactly, so a K-quant's error comes only from its scales."""
    w = whet.quantize(normal(5, 40, 512), "q4_1").dequantize()
    assert ((whet.quantize(w, format).dequantize() - w) ** 2).sum() < limit * (w**2).sum()


@pytest.mark.parametrize("format", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4"])
def test_error_is_not_above_the_gguf_quantiser(format):
    w = normal(2, 30, 512)
    ours = whet.quantize(w, format).dequantize()
    theirs = gguf.quants.dequantize(gguf.quants.quantize(w, GGUF[format]), GGUF[format])
    assert ((ours - w) ** 2).sum() <= 1.001 * ((theirs - w) ** 2).sum()


def test_exactly_representable_weights_are_exact():
    grid = np.tile(np.arange(16, dtype=np.float32), 32).reshape(1, 512)
    e2m1 = np.array([0, 0.5, -1, 1.5, 2, -3, 4, 6], np.float32).repeat(4).reshape(1, 32)
    for scale in (2.0**-120, 1.0, 2.0**124):
        np.testing.assert_array_equal(whet.quantize(scale * e2m1, "mxfp4").dequantize(), scale * e2m1)
    np.testing.assert_array_equal(whet.quantize(grid - 8, "q4_0").dequantize(), grid - 8)
    np.testing.assert_allclose(whet.quantize(grid - 7, "q4_k").dequantize(), grid - 7, atol=0.02)
    np.testing.assert_allclose(whet.quantize(np.full((1, 256), 0.5, np.float32), "q4_k").dequantize(), 0.5, rtol=1e-3)
    np.testing.assert_allclose(whet.quantize(np.full((1, 256), -0.5, np.float32), "q4_k").dequantize(), -0.5, rtol=1e-3)


@pytest.mark.parametrize("format", BITS)
def test_zeros_tiny_and_huge_numbers(format):
    zeros = np.zeros((3, 256), np.float32)
    np.testing.assert_array_equal(whet.quantize(zeros, format).dequantize(), zeros)
    tiny = whet.quantize(np.full((1, 256), 1e-30, np.float32), format).dequantize()
    assert np.all(np.isfinite(tiny)) and np.abs(tiny).max() <= 2e-30
    huge = whet.quantize(np.full((1, 256), 1e30, np.float32), format).dequantize()
    assert np.all(np.isfinite(huge))


def test_tensors_and_bfloat16():
    w = torch.from_numpy(normal(0, 4, 64))
    np.testing.assert_array_equal(whet.quantize(w, "q8_0").data, whet.quantize(w.numpy(), "q8_0").data)
    half = w.bfloat16()
    np.testing.assert_array_equal(whet.quantize(half, "q8_0").data, whet.quantize(half.float(), "q8_0").data)


def test_bfloat16_bits_equal_torchs():
    x = np.concatenate([normal(0, 1000), [0.0, -0.0, np.inf, -np.inf, 1e-40, 3.4e38, np.nan]]).astype(np.float32)
    bits = bf16_bits(x)
    expected = torch.from_numpy(x).bfloat16()
    np.testing.assert_array_equal(bits[:-1], expected.view(torch.uint16).numpy()[:-1])
    assert np.isnan(bf16_values(bits[-1:]))[0]
    np.testing.assert_array_equal(bf16_values(bits[:-1]), expected.float().numpy()[:-1])


@pytest.mark.parametrize(
    ("call", "error", "facts"),
    [
        (lambda: whet.quantize(normal(0, 2, 32), "q3_k"), WhetValueError, ("format is 'q3_k'", "one of int8")),
        (lambda: whet.quantize(normal(0, 2, 100), "q4_k"), WhetValueError, ("rows of 100", "256", "q4_k")),
        (lambda: whet.quantize(normal(0, 32), "q8_0"), WhetValueError, ("weight has shape (32,)", "two axes")),
        (lambda: whet.quantize(np.ones((2, 32)), "q8_0"), WhetTypeError, ("weight has dtype float64",)),
        (
            lambda: whet.quantize(np.array([[1.0] * 31 + [np.nan]], np.float32), "q8_0"),
            WhetValueError,
            ("weight[0, 31] is nan",),
        ),
        (
            lambda: whet.Quantized("q8_0", (2, 32), np.zeros((2, 33), np.uint8)),
            WhetValueError,
            ("data has shape (2, 33)", "(2, 34)"),
        ),
        (
            lambda: whet.Quantized("q8_0", (1, 32), np.zeros((1, 34))),
            WhetTypeError,
            ("ndarray of float64", "uint8"),
        ),
    ],
)
def test_invalid_arguments_are_named(call, error, facts):
    assert_raises(error, facts, call)


def test_equality_compares_bytes():
    weight = np.random.default_rng(0).standard_normal((3, 32), np.float32)
    a, b = whet.quantize(weight, "q8_0"), whet.quantize(weight.tolist(), "q8_0")
    assert a == b and a != whet.quantize(-weight, "q8_0") and a != whet.quantize(weight, "int8") and a != "q8_0"
    with pytest.raises(TypeError, match=mentions("unhashable")):
        hash(a)
