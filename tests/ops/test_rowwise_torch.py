"""Norms, activations and the KV cache on torch tensors and in bfloat16: rounded once, in place, and errors."""

import numpy as np
import pytest
from tests.raising import assert_raises

import whet

torch = pytest.importorskip("torch")

SHAPES = [(3, 1), (3, 15), (2, 3, 16), (3, 17), (1, 40), (2, 2, 2, 300), (1, 2, 1, 2, 33), (5, 0)]
UNARY = [whet.rms_norm, whet.layer_norm, whet.softmax, whet.log_softmax, whet.silu, whet.gelu]


def normal(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("f", UNARY)
def test_tensors_equal_arrays_and_bfloat16_is_rounded_once(f, shape):
    x = normal(shape) * 3
    same(f(x), torch.from_numpy(f(x.numpy())))
    half = x.bfloat16()
    same(f(half), f(half.float()).bfloat16())
    for tensor in (x, half):
        expected, out = f(tensor), torch.empty_like(tensor)
        assert f(tensor, out=out) is out
        same(out, expected)
        transposed = tensor.transpose(0, -1)
        same(f(transposed), f(transposed.contiguous()))
        assert f(tensor, out=tensor) is tensor
        same(tensor, expected)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 300])
def test_bfloat16_weights_and_residuals(n):
    x, residual, weight, bias = (normal(shape, i).bfloat16() for i, shape in enumerate([(4, n), (4, n), n, n]))
    total = x + residual
    for w, b in ((weight, bias), (weight.float(), bias.float()), (weight.float(), bias), (None, bias)):
        wide_w, wide_b = (None if v is None else v.float() for v in (w, b))
        total_out = residual.clone()
        expected = whet.layer_norm(total.float(), wide_w, wide_b).bfloat16()
        same(whet.layer_norm(x, w, b, residual=total_out), expected)
        same(total_out, total)
        total_out = residual.clone()
        same(whet.rms_norm(x, w, residual=total_out), whet.rms_norm(total.float(), wide_w).bfloat16())
        same(total_out, total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_and_gelu_tanh(dtype):
    both = (normal((3, 4, 66)) * 3).to(dtype)
    gate, up = both.chunk(2, -1)
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    torch.testing.assert_close(
        whet.swiglu(gate, up).double(), expected, rtol=4e-3 if dtype.itemsize == 2 else 1e-6, atol=0
    )
    same(whet.swiglu(both), whet.swiglu(gate, up))
    same(whet.swiglu(both), whet.swiglu(both.float()).to(dtype))
    same(whet.gelu(both, "tanh"), whet.gelu(both.float(), "tanh").to(dtype))


def test_against_torch():
    x, weight, bias = normal((7, 513)), normal(513, 1), normal(513, 2)
    f = torch.nn.functional
    torch.testing.assert_close(whet.rms_norm(x, weight), f.rms_norm(x, (513,), weight, 1e-6))
    torch.testing.assert_close(whet.layer_norm(x, weight, bias), f.layer_norm(x, (513,), weight, bias))
    torch.testing.assert_close(whet.softmax(x), x.softmax(-1))
    torch.testing.assert_close(whet.log_softmax(x, scale=0.5), (0.5 * x).log_softmax(-1))
    torch.testing.assert_close(whet.gelu(x), f.gelu(x))
    torch.testing.assert_close(whet.gelu(x, "tanh"), f.gelu(x, approximate="tanh"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn])
def test_kv_cache(dtype):
    cache, new = (normal(shape).mul(50).to(dtype) for shape in ((3, 9, 2, 4), (3, 2, 2, 4)))
    expected = cache.clone()
    for b, position in enumerate((0, 7, 3)):
        expected[b, position : position + 2] = new[b]
    assert whet.kv_append(cache, new, torch.tensor([0, 7, 3])) is cache
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))
    packed = whet.kv_gather(cache, torch.tensor([2, 1]), torch.tensor([5, 9], dtype=torch.int32))
    assert packed.dtype == dtype
    assert torch.equal(packed.view(torch.uint8), torch.cat([cache[2, :5], cache[1]]).view(torch.uint8))


def test_unsupported_tensors_are_rejected():
    x = torch.ones(2, 8)
    leaf = torch.ones(2, 8, requires_grad=True)
    for call, facts in (
        (lambda: whet.rms_norm(leaf), ("x requires grad", "x.detach()")),
        (lambda: whet.rms_norm(x, torch.nn.Parameter(torch.ones(8))), ("weight requires grad", "weight.detach()")),
        (lambda: whet.rms_norm(x, x[0].bfloat16()), ("weight is bfloat16", "x is float32")),
        (lambda: whet.silu(x, out=leaf), ("out requires grad",)),
        (lambda: whet.silu(x, out=x.bfloat16()), ("out is bfloat16 (2, 8)", "float32")),
        (lambda: whet.silu(x, out=np.ones((2, 8), np.float32)), ("out is a ndarray", "torch tensor")),
        (lambda: whet.softmax(torch.empty(2, 8, device="meta")), ("x is on meta", "CPU tensor")),
        (lambda: whet.gelu(x.half()), ("x has dtype float16", "float32 or bfloat16")),
        (lambda: whet.layer_norm(x, residual=x.T), ("residual is float32 (8, 2)",)),
        (lambda: whet.kv_append(leaf.reshape(1, 2, 2, 4), x.reshape(1, 2, 2, 4), [0]), ("cache requires grad",)),
    ):
        assert_raises(whet.WhetError, facts, call)
