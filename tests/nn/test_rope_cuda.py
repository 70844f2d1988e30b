"""RoPE of CUDA tensors: the kernel in Triton's interpreter, and on a CUDA device if there is one."""

import numpy as np
import pytest
from tests.raising import mentions

import whet
from whet.errors import WhetTypeError, WhetValueError
from whet.ops.rope import naive_rope

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.needs("triton")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
RNG = np.random.default_rng(0)


@pytest.fixture
def rotate():
    """Return the kernel's function, which Triton interprets unless there is a device (conftest)."""
    from whet.nn.rope_cuda import apply_rope_cuda

    return apply_rope_cuda


def tensor(array, dtype=None):
    return torch.from_numpy(array).to(DEVICE, dtype, copy=True)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("inverse", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "rotary_dim", "head_size"), [(5, 2, 6, 10), (3, 0, 32, 32), (1, 9, 80, 96)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_the_reference(rotate, is_neox, inverse, heads, kv_heads, rotary_dim, head_size, dtype):
    rope = whet.get_rope(head_size, rotary_dim, 50, is_neox_style=is_neox)
    positions = RNG.integers(0, 50, (2, 3))
    arrays = [RNG.standard_normal((2, 3, n, head_size), np.float32) for n in (heads, kv_heads) if n]
    x = [tensor(array, dtype) for array in arrays]
    rotate(tensor(positions), *(*x, None)[:2], head_size, tensor(rope.cos_sin_cache), is_neox, inverse=inverse)
    for got, array in zip(x, arrays, strict=True):
        rounded = torch.from_numpy(array).to(dtype).double().numpy()
        table = rope.cos_sin_cache.astype(np.float64)
        expected = naive_rope(positions, rounded, head_size, table, is_neox, inverse=inverse)
        np.testing.assert_allclose(got.double().cpu(), expected, atol=1e-6 if dtype == torch.float32 else 2**-6)
        np.testing.assert_array_equal(got.double().cpu()[..., rotary_dim:], rounded[..., rotary_dim:])


def test_a_slice_of_a_projection_is_written_in_place_and_no_other_element(rotate):
    rope = whet.get_rope(8, 8, 50)
    fused = RNG.standard_normal((7, 5 * 8), np.float32)
    x, positions = tensor(fused), np.arange(7)
    rotate(tensor(positions), x[:, 8:24], x[:, 24:32], 8, tensor(rope.cos_sin_cache))
    expected = fused.copy()
    rope(positions, expected[:, 8:24], expected[:, 24:32])
    np.testing.assert_allclose(x.cpu(), expected, atol=1e-6)


def test_a_position_outside_the_table_gives_nan(rotate):
    rope = whet.get_rope(4, 4, 3)
    x = tensor(np.ones((3, 4), np.float32))
    rotate(tensor(np.array([0, 3, -1])), x, None, 4, tensor(rope.cos_sin_cache))
    assert x.isnan().any(1).tolist() == [False, True, True]


def test_each_call_is_checked_and_rotated_as_the_first(rotate):
    rope = whet.get_rope(4, 4, 50)
    table = tensor(rope.cos_sin_cache)
    for offset in (0, 0, 1, 0):  # 1: the address of query is not a multiple of 16
        array, positions = RNG.standard_normal(3 * 8 + 1, np.float32), RNG.integers(0, 50, 3)
        x = tensor(array)[offset:][:24].view(3, 8)
        rotate(tensor(positions), x, None, 4, table)
        expected = array[offset:][:24].reshape(3, 8).copy()
        rope(positions, expected)
        np.testing.assert_allclose(x.cpu(), expected, atol=1e-6)
    positions, x = tensor(positions), torch.ones(3, 8, device=DEVICE)
    with pytest.raises(WhetValueError, match=mentions("query", "requires grad")):
        rotate(positions, x.clone().requires_grad_(), None, 4, table)
    with pytest.raises(WhetValueError, match=mentions("query", "negated")):
        rotate(positions, torch.ones(3, 8, dtype=torch.complex64, device=DEVICE).conj().imag, None, 4, table)
    x.untyped_storage().resize_(0)
    with pytest.raises(WhetTypeError, match=mentions("query", "no memory")):
        rotate(positions, x, None, 4, table)


def test_tokens_without_one_stride_are_refused(rotate):
    rope, x = whet.get_rope(4, 4, 3), torch.ones(3, 2, 4, device=DEVICE).transpose(0, 1)
    with pytest.raises(WhetValueError, match=mentions("query", "stride", "contiguous")):
        rotate(tensor(np.zeros((2, 3), np.int64)), x, None, 4, tensor(rope.cos_sin_cache))


def test_other_arguments_are_named(rotate):
    table, positions = tensor(whet.get_rope(4, 4, 3).cos_sin_cache), tensor(np.zeros(3, np.int64))
    x = torch.ones(3, 8, device=DEVICE)
    with pytest.raises(WhetTypeError, match=mentions("positions", "ndarray")):
        rotate(np.zeros(3, np.int64), x, None, 4, table)
    with pytest.raises(WhetTypeError, match=mentions("query", "ndarray")):
        rotate(positions, np.ones((3, 8), np.float32), None, 4, table)
    with pytest.raises(WhetTypeError, match=mentions("cos_sin_cache", "float64", "(3, 4)", "float32")):
        rotate(positions, x, None, 4, table.double())
    with pytest.raises(WhetValueError, match=mentions("query", "(3, 2, 8)", "head_size is 4")):
        rotate(positions, x.repeat(1, 2).view(3, 2, 8), None, 4, table)
    with pytest.raises(WhetValueError, match=mentions("query", "share memory")):
        rotate(positions, x[:1].expand(3, 8), None, 4, table)
    with pytest.raises(WhetTypeError, match=mentions("query", "float16", "float32")):
        rotate(positions, x.half(), None, 4, table)
    with pytest.raises(WhetValueError, match=mentions("query", "(3, 8)", "head_size is 5")):
        rotate(positions, x, None, 5, table)
    with pytest.raises(WhetValueError, match=mentions("rotary_dim is 4", "head_size=2")):
        rotate(positions, x, None, 2, table)
    with pytest.raises(WhetValueError, match=mentions("key", "requires grad", "detach")):
        rotate(positions, x, x.clone().requires_grad_(), 4, table)
