"""Products against float64, on ragged sizes, odd strides, NumPy and torch; bits do not depend on the batch."""

import math

import numpy as np
import pytest
import torch
from tests.raising import assert_raises, mentions
from tests.threads import same_on_any_threads

import whet
from whet import WhetTypeError, WhetValueError
from whet.ops.linear import naive_gemm, naive_linear
from whet.ops.quant import CORE_FORMATS, FORMATS, bf16_bits, bf16_values

RAGGED = [
    (1, 1, 1),
    (1, 15, 2),
    (2, 16, 3),
    (3, 17, 31),
    (4, 33, 32),
    (5, 47, 33),
    (8, 48, 64),
    (9, 49, 65),
    (23, 100, 257),
]
FLOAT_SUM = 2e-7  # of the sum of |products|: sequential float32 sums of a few hundred terms stay far below


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def bf16(x):
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16()


def close(got, x, w, extra=0.0, bias=0.0):
    """Assert float32 summation accuracy, plus ``extra`` relative, against x w^T + bias in float64."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    exact = naive_linear(x, w, bias)
    size = np.abs(x) @ np.abs(w).T + np.abs(bias)
    terms = x.shape[-1]
    assert np.all(
        np.abs(np.asarray(got, np.float64) - exact) <= size * (FLOAT_SUM + terms * 3e-9) + extra * np.abs(exact)
    )


@pytest.mark.parametrize(("m", "n", "k"), RAGGED)
def test_gemm_in_every_layout(m, n, k):
    a, b = normal(0, m, k), normal(1, k, n)
    flipped_a, flipped_b = np.asfortranarray(a), np.asfortranarray(b)
    results = [
        whet.gemm(a, b),
        whet.gemm(flipped_a, flipped_b),
        whet.gemm(a.T.copy(), b, transpose_a=True),
        whet.gemm(a, b.T.copy(), transpose_b=True),
        whet.gemm(np.repeat(a, 2, axis=1)[:, ::2], np.repeat(b, 3, axis=0)[::3]),
        whet.gemm(torch.from_numpy(a), torch.from_numpy(b)).numpy(),
    ]
    close(results[0], a, b.T)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize(("m", "n", "k"), RAGGED)
def test_gemm_bfloat16_is_rounded_once(m, n, k):
    a, b = bf16(normal(0, m, k)), bf16(normal(1, k, n))
    got = whet.gemm(a, b)
    assert got.dtype == torch.bfloat16
    close(got.double().numpy(), a.double().numpy(), b.double().numpy().T, extra=2**-8)
    wide = whet.gemm(a.float(), b.float())
    assert (got.float() - wide).abs().max() <= wide.abs().max() * 2**-8
    for result in (whet.gemm(a.T.contiguous(), b, transpose_a=True), whet.gemm(a, b.T.contiguous(), transpose_b=True)):
        assert torch.equal(result, got)


def test_gemm_alpha_beta_and_out():
    a, b, c = normal(0, 7, 20), normal(1, 20, 37), normal(2, 7, 40)
    out = c[:, :37].copy()
    assert whet.gemm(a, b, out=out, alpha=0.5, beta=-2.0) is out
    expected = naive_gemm(a.astype(np.float64), b, 0.5, -2.0, c[:, :37].astype(np.float64))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    strided = np.full((7, 40), np.nan, np.float32)
    whet.gemm(a, b, out=strided[:, :37])  # beta = 0 does not read out, so no NaN propagates
    np.testing.assert_array_equal(strided[:, :37], whet.gemm(a, b))
    assert np.isnan(strided[:, 37:]).all()
    half = bf16(c[:, :37])
    whet.gemm(bf16(a), bf16(b), out=half, alpha=2.0, beta=1.0)
    expected = 2 * bf16(a).double() @ bf16(b).double() + bf16(c[:, :37]).double()
    np.testing.assert_allclose(half.double(), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 5), (4, 16), (5, 17), (130, 33), (257, 300)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gemv(m, n, dtype):
    a, x, y = (torch.from_numpy(normal(i, *s)).to(getattr(torch, dtype)) for i, s in enumerate([(m, n), (n,), (m,)]))
    extra = 0.0 if dtype == "float32" else 2**-8
    got = whet.gemv(a, x)
    close(got.double().numpy(), x.double().numpy(), a.double().numpy(), extra)
    by_columns = whet.gemv(a.T.contiguous(), x, transpose=True)
    close(by_columns.double().numpy(), x.double().numpy(), a.double().numpy(), extra)
    assert torch.equal(whet.gemv(a.T.contiguous().T, x), by_columns)
    out = y.clone()
    assert whet.gemv(a, x, alpha=2.0, beta=0.5, out=out) is out
    expected = 2 * a.double() @ x.double() + 0.5 * y.double()
    np.testing.assert_allclose(out.double(), expected, rtol=2e-2 if extra else 1e-4, atol=2e-2 if extra else 1e-4)


def test_empty_products():
    assert whet.gemm(np.ones((0, 3), np.float32), np.ones((3, 4), np.float32)).shape == (0, 4)
    np.testing.assert_array_equal(whet.gemm(np.ones((2, 0), np.float32), np.ones((0, 3), np.float32)), np.zeros((2, 3)))
    np.testing.assert_array_equal(whet.gemv(np.ones((2, 0), np.float32), np.ones(0, np.float32)), np.zeros(2))


@pytest.mark.parametrize("format", ["float32", "bfloat16"])
@pytest.mark.parametrize(("m", "n", "k"), RAGGED)
def test_linear_on_float_weights(m, n, k, format):
    x, w, bias = normal(0, m, k), normal(1, n, k), normal(2, n)
    packed = whet.pack_weight(w, format)
    assert packed.shape == (n, k)
    got = whet.linear(x, packed, bias)
    if format == "bfloat16":
        x, w = bf16_values(bf16_bits(x)), bf16_values(bf16_bits(w))
    close(got, x, w, bias=bias)
    np.testing.assert_array_equal(got[0], whet.linear(x[0].copy(), packed, bias))
    half = whet.linear(bf16(x), packed, torch.from_numpy(bias))
    assert half.dtype == torch.bfloat16
    close(half.double().numpy(), bf16(x).double().numpy(), w, extra=2**-8, bias=bias)


def quantised_bound(x, w):
    """Error bound of rounding x to int8 in blocks of 32: half a step of each block, times |weights|."""
    k = x.shape[1]
    padded = np.pad(np.abs(x), ((0, 0), (0, -k % 32))).reshape(len(x), -1, 32)
    steps = np.repeat(padded.max(axis=2) / 127, 32, axis=1)[:, :k]
    return 0.5001 * steps @ np.abs(w).T + 1e-5 * (np.abs(x) @ np.abs(w).T)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize(("n", "k"), [(1, 256), (17, 512), (48, 256), (50, 768)])
def test_linear_on_quantised_weights(m, n, k, format):
    x, w, bias = normal(0, m, k), normal(1, n, k), normal(2, n)
    quantised = whet.quantize(w, format)
    packed = whet.pack_weight(quantised)
    exact = x.astype(np.float64) @ quantised.dequantize().T.astype(np.float64) + bias
    got = whet.linear(x, packed, bias)
    assert np.all(np.abs(got - exact) <= quantised_bound(x, quantised.dequantize()))
    # Inputs that int8 represents exactly have only float32 rounding errors.
    whole = np.round(np.clip(x, -3, 3) * 42).astype(np.float32)
    whole[:, ::32] = 127
    exact = whole.astype(np.float64) @ quantised.dequantize().T.astype(np.float64)
    np.testing.assert_allclose(whet.linear(whole, packed), exact, rtol=1e-5, atol=1e-4 * np.abs(exact).max())


@pytest.mark.parametrize("k", [1, 3, 31, 33, 100])
def test_int8_supports_any_row_length(k):
    x, w = normal(0, 3, k), normal(1, 20, k)
    quantised = whet.quantize(w, "int8")
    got = whet.linear(x, whet.pack_weight(quantised))
    exact = x.astype(np.float64) @ quantised.dequantize().T.astype(np.float64)
    assert np.all(np.abs(got - exact) <= quantised_bound(x, quantised.dequantize()))


@pytest.mark.parametrize("format", CORE_FORMATS)
def test_a_rows_bits_do_not_depend_on_batch_or_threads(format):
    x, packed = normal(0, 67, 512), whet.pack_weight(normal(1, 300, 512), format)
    whole = same_on_any_threads(lambda: whet.linear(x, packed))
    for rows in (slice(0, 1), slice(3, 4), slice(5, 8), slice(66, 67), slice(11, 42)):
        np.testing.assert_array_equal(whet.linear(x[rows], packed), whole[rows])


@pytest.mark.parametrize("format", CORE_FORMATS)
def test_packing_is_lossless(format):
    w = normal(3, 37, 512)
    packed = whet.pack_weight(w, format)
    if format == "float32":
        np.testing.assert_array_equal(packed.unpack(), w)
    elif format == "bfloat16":
        np.testing.assert_array_equal(packed.unpack(), torch.from_numpy(w).bfloat16().view(torch.uint16).numpy())
    else:
        np.testing.assert_array_equal(packed.unpack().data, whet.quantize(w, format).data)


def test_nan_inputs_propagate():
    x = normal(0, 3, 64)
    x[1, 40] = np.nan
    for format in ("float32", "bfloat16", "int8", "q8_0", "q4_0"):
        got = whet.linear(x, whet.pack_weight(normal(1, 20, 64), format))
        assert np.isnan(got[1]).all()
        assert np.isfinite(got[[0, 2]]).all()


def test_leading_axes_out_and_strides():
    packed = whet.pack_weight(normal(1, 20, 24))
    x = normal(0, 2, 3, 30)
    expected = whet.linear(np.ascontiguousarray(x[..., :24]).reshape(6, 24), packed).reshape(2, 3, 20)
    np.testing.assert_array_equal(whet.linear(x[..., :24], packed), expected)
    np.testing.assert_array_equal(whet.linear(x.transpose(1, 0, 2)[..., :24], packed), expected.transpose(1, 0, 2))
    out = np.empty((2, 3, 20), np.float32)
    assert whet.linear(x[..., :24], packed, out=out) is out
    np.testing.assert_array_equal(out, expected)
    assert whet.linear(x[:0, :, :24], packed).shape == (0, 3, 20)


def test_products_split_over_threads():
    a, b = normal(0, 300, 200), normal(1, 200, 500)
    close(whet.gemm(a, b), a, b.T)
    x, w = normal(2, 600, 130), normal(3, 200, 130)
    close(whet.linear(x, whet.pack_weight(w)), x, w)


SQUARE, WIDE = normal(0, 2, 2), normal(0, 2, 3)


@pytest.mark.parametrize(
    ("call", "error", "facts"),
    [
        (lambda: whet.gemm(WIDE, normal(0, 4, 5)), WhetValueError, ("gemm", "a is (2, 3)", "b (4, 5)")),
        (lambda: whet.gemm(WIDE, normal(0, 3)), WhetValueError, ("gemm", "b has shape (3,)", "two")),
        (lambda: whet.gemm(SQUARE, SQUARE, beta=1.0), WhetValueError, ("beta is 1.0", "out is None")),
        (lambda: whet.gemm(SQUARE.astype(int), SQUARE), WhetTypeError, ("gemm", "a has dtype int64")),
        (
            lambda: whet.gemm(SQUARE, SQUARE, out=np.empty((2, 3), np.float32)),
            WhetValueError,
            ("out is ndarray float32 (2, 3)", "NumPy array of float32", "shape (2, 2)"),
        ),
        (
            lambda: whet.gemm(SQUARE, SQUARE, out=np.empty((2, 2), np.float32).T),
            WhetValueError,
            ("out", "contiguous"),
        ),
        (lambda: whet.gemv(WIDE, normal(0, 4)), WhetValueError, ("x has shape (4,)", "(3,)")),
        (lambda: whet.linear(WIDE, WIDE), WhetTypeError, ("pack_weight(weight)",)),
        (
            lambda: whet.linear(WIDE, whet.pack_weight(normal(0, 4, 5))),
            WhetValueError,
            ("x has shape (2, 3)", "(..., 5)"),
        ),
        (
            lambda: whet.linear(normal(0, 2, 5), whet.pack_weight(normal(0, 4, 5)), normal(0, 3)),
            WhetValueError,
            ("bias has shape (3,)", "(4,)"),
        ),
        (lambda: whet.pack_weight(normal(0, 4, 5), "fp8"), WhetValueError, ("format is 'fp8'", "one of float32")),
        (lambda: whet.pack_weight(normal(0, 4, 33), "q8_0"), WhetValueError, ("rows of 33", "32", "q8_0")),
        (
            lambda: whet.pack_weight(whet.quantize(normal(0, 4, 32), "q8_0"), "q4_0"),
            WhetValueError,
            ("quantised as q8_0", "format is 'q4_0'", "weight.dequantize()"),
        ),
    ],
)
def test_invalid_arguments_are_named(call, error, facts):
    assert_raises(error, facts, call)


@pytest.mark.parametrize("kind", ["numpy", "torch", "bfloat16"])
def test_out_may_alias_an_input(kind):
    """Entirely, or shifted by a row: like NumPy's matmul, which reads before it writes."""
    rng = np.random.default_rng(3)

    def fresh(*shape):
        values = rng.integers(-3, 4, shape).astype(np.float32)  # every sum is exact
        tensor = torch.from_numpy(values)
        return values if kind == "numpy" else tensor.bfloat16() if kind == "bfloat16" else tensor

    n = 80
    a, b, x = fresh(n, n), fresh(n, n), fresh(n)
    packed = whet.pack_weight(fresh(n, n), "float32" if kind != "bfloat16" else "bfloat16")
    for call, inputs in (
        (lambda out, a, b: whet.gemm(a, b, out=out), (a, b)),
        (lambda out, a, b: whet.gemm(a, b, transpose_b=True, alpha=0.5, out=out), (b, a)),
        (lambda out, x, a: whet.gemv(a, x, out=out), (x, a)),
        (lambda out, x: whet.linear(x, packed, out=out), (a,)),
    ):
        for own in range(len(inputs)):
            right = call(None, *inputs)
            memory = np.zeros(2 * n * n, np.float32) if kind == "numpy" else torch.zeros(2 * n * n, dtype=a.dtype)
            for shift in (0, 1, n):
                here = list(inputs)
                size = math.prod(here[own].shape)
                view = memory[:size].reshape(here[own].shape)
                view[...] = here[own]
                here[own] = view
                out = memory[shift : shift + math.prod(right.shape)].reshape(right.shape)
                assert call(out, *here) is out
                np.testing.assert_array_equal(
                    np.asarray(out.float() if kind != "numpy" else out),
                    np.asarray(right.float() if kind != "numpy" else right),
                )


def test_bias_may_alias_out():
    x, weight = np.eye(20, dtype=np.float32), np.ones((20, 20), np.float32)
    out = np.zeros((20, 20), np.float32)
    out[7] = np.arange(20)
    right = 1 + np.arange(20, dtype=np.float32)[None].repeat(20, 0)
    np.testing.assert_array_equal(whet.linear(x, whet.pack_weight(weight), out[7], out=out), right)


@pytest.mark.parametrize("shape", [(2**33, 2**31), (2**62, 8), (0, 2**62), (8, -1)])
def test_invalid_weight_sizes_are_rejected(shape):
    with pytest.raises(WhetValueError, match=mentions("PackedWeight", "2^46")):
        whet.PackedWeight("float32", shape)
