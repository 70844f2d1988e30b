"""attention and decode_attention of torch tensors, against torch's own scaled_dot_product_attention."""

import os

import pytest
from tests.raising import mentions

if os.environ.get("WHET_ISA"):  # the same kernels as in test_attention.py; torch's import takes longer than the tests
    pytest.skip("instruction sets are tested without torch", allow_module_level=True)

import whet

torch = pytest.importorskip("torch")
sdpa = torch.nn.functional.scaled_dot_product_attention


def tensors(n_queries, n_keys, heads, kv_heads, head_dim, dtype=torch.float32, batch=2):
    generator = torch.Generator().manual_seed(n_queries)
    shapes = [(batch, n_queries, heads, head_dim), *[(batch, n_keys, kv_heads, head_dim)] * 2]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def of_torch(q, k, v, **options):
    """Return torch's attention in float64, which expects heads before tokens."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    return sdpa(q, k, v, enable_gqa=True, **options).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (8, 1)])
@pytest.mark.parametrize("length", [1, 33, 300])
def test_equals_torch(dtype, heads, kv_heads, length):
    q, k, v = tensors(length, length, heads, kv_heads, 64, dtype)
    tolerance = 3e-6 if dtype == torch.float32 else 2**-8 * float(v.abs().max())
    for causal in (True, False):
        got = whet.attention(q, k, v, causal=causal)
        assert isinstance(got, torch.Tensor) and got.dtype == dtype and got.shape == q.shape
        torch.testing.assert_close(got.double(), of_torch(q, k, v, is_causal=causal), rtol=0, atol=tolerance)


def test_windows_and_cached_keys():
    q, k, v = tensors(40, 100, 6, 2, 80)
    position, key = torch.arange(60, 100)[:, None], torch.arange(100)[None]
    mask = (key <= position) & (key > position - 25)
    torch.testing.assert_close(
        whet.attention(q, k, v, window=25).double(), of_torch(q, k, v, attn_mask=mask), rtol=0, atol=3e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 72])
def test_decode(dtype, head_dim):
    q, k, v = tensors(1, 300, 12, 3, head_dim, dtype, batch=3)
    lengths = torch.tensor([300, 77, 1])
    got = whet.decode_attention(q[:, 0], k, v, lengths)
    assert got.dtype == dtype
    for b, n in enumerate(lengths.tolist()):
        expected = of_torch(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n])[0, 0]
        tolerance = 3e-6 if dtype == torch.float32 else 2**-8 * float(expected.abs().max())
        torch.testing.assert_close(got[b].double(), expected, rtol=0, atol=tolerance)


def test_views_out_and_numpy():
    q, k, v = tensors(20, 20, 4, 2, 32, batch=1)
    expected = whet.attention(q, k, v)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(whet.attention(*views), expected)
    assert torch.equal(whet.attention(q[0], k[0], v[0]), expected[0])
    assert (whet.attention(q[0].numpy(), k[0].numpy(), v[0].numpy()) == expected[0].numpy()).all()
    out = torch.zeros_like(q)
    assert whet.attention(q, k, v, out=out) is out and torch.equal(out, expected)
    offsets = torch.tensor([0, 7, 20], dtype=torch.int32)
    packed = whet.attention(q[0], k[0], v[0], cu_seqlens=offsets)
    assert torch.equal(packed[:7], expected[0, :7])
    with pytest.raises(whet.WhetTypeError, match=mentions("out is a ndarray")):
        whet.attention(q, k, v, out=out.numpy())


def test_unsupported_tensors_are_rejected():
    q, k, v = tensors(4, 4, 2, 1, 32)
    with pytest.raises(whet.WhetValueError, match=mentions("attention", "q requires grad", ".detach()")):
        whet.attention(q.requires_grad_(), k, v)
    with pytest.raises(whet.WhetValueError, match=mentions("k is on meta", "CPU tensor")):
        whet.attention(q.detach(), k.to("meta"), v)
    with pytest.raises(whet.WhetTypeError, match=mentions("v has dtype torch.bfloat16", "q has torch.float32")):
        whet.attention(q.detach(), k, v.bfloat16())
    with pytest.raises(whet.WhetTypeError, match=mentions("dtype float16", "float32 or bfloat16")):
        whet.decode_attention(q.detach()[:, 0].half(), k, v, [1, 1])
