"""Torch tensors in, torch tensors out, without a copy; tensors that require grad raise."""

import numpy as np
import pytest
from tests.raising import assert_raises

import whet

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(0)
P = -RNG.exponential(1, (4, 33))
Q = P + RNG.normal(0, 0.3, P.shape)
MASK = RNG.random(P.shape) < 0.7


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equals_numpy(dtype):
    p, q = P.astype(dtype), Q.astype(dtype)
    tp, tq, tmask = torch.from_numpy(p), torch.from_numpy(q), torch.from_numpy(MASK)
    pairs = [
        (whet.compute_batch_token_kl(tp, tq, mask=tmask), whet.compute_batch_token_kl(p, q, mask=MASK)),
        (whet.compute_batch_token_kl_schulman(tp, tq), whet.compute_batch_token_kl_schulman(p, q)),
        (whet.compute_batch_group_advantages(tp), whet.compute_batch_group_advantages(p)),
        (whet.compute_group_advantages(tp[0]), whet.compute_group_advantages(p[0])),
        (whet.compute_batch_group_advantages(tp, eps=1e-4), whet.compute_batch_group_advantages(p, eps=1e-4)),
        (
            whet.compute_gae(tp, tq, tmask, np.zeros(4), 0.9, 0.9)[0],
            whet.compute_gae(p, q, MASK, np.zeros(4), 0.9, 0.9)[0],
        ),
    ]
    for got, expected in pairs:
        assert isinstance(got, torch.Tensor) and got.dtype == tp.dtype
        np.testing.assert_array_equal(got.numpy(), expected)
    assert whet.compute_token_kl(tp[0], tq[0]) == whet.compute_token_kl(p[0], q[0])
    assert whet.pack_sequences(torch.tensor([3, 5]), 8) == [[1, 0]]


def test_logprobs_in_float32_and_bfloat16():
    logits = torch.randn(7, 3000, generator=torch.Generator().manual_seed(0)) * 3
    ids = torch.arange(7) * 400
    for x in (logits, logits.bfloat16()):
        got, entropy = whet.compute_token_logprobs(x, ids, return_entropy=True)
        wide = torch.log_softmax(x.double(), -1)
        torch.testing.assert_close(got.double(), wide.gather(1, ids[:, None])[:, 0], rtol=1e-6, atol=0)
        torch.testing.assert_close(entropy.double(), -(wide.exp() * wide).sum(1), rtol=1e-6, atol=0)


def test_views_are_read_correctly():
    t = torch.from_numpy(P)
    for view in (t.T, t[:, ::2], t[1:]):
        torch.testing.assert_close(
            whet.compute_batch_group_advantages(view), whet.compute_batch_group_advantages(view.clone()), rtol=0, atol=0
        )
    negated = torch.from_numpy(P + 1j * Q).conj().imag  # a lazily negated view of Q
    assert whet.compute_token_kl(negated[0], t[0]) == whet.compute_token_kl(-Q[0], P[0])


ONE = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
ROW, HEADS, CACHE = ONE[0], ONE[:, None], ONE[:, None, None]
OF_ONE_TENSOR = {
    "softmax": (ONE, whet.softmax),
    "log_softmax": (ONE, whet.log_softmax),
    "silu": (ONE, whet.silu),
    "softcap": (ONE, lambda x: whet.softcap(x, 2.0)),
    "swiglu": (ONE, whet.swiglu),
    "rms_norm": (ONE, whet.rms_norm),
    "layer_norm": (ROW, lambda x: whet.layer_norm(ONE, x)),
    "gemm": (ONE, lambda x: whet.gemm(x, ONE.T)),
    "gemv": (ROW, lambda x: whet.gemv(ONE, x)),
    "linear": (ONE, lambda x: whet.linear(x, whet.pack_weight(ONE))),
    "bias": (ROW[:4], lambda x: whet.linear(ONE, whet.pack_weight(ONE), x)),
    "pack_weight": (ONE, lambda x: whet.linear(ONE, whet.pack_weight(x))),
    "quantize": (ONE, lambda x: torch.from_numpy(whet.quantize(x, "q8_0").dequantize())),
    "attention": (HEADS, lambda x: whet.attention(x, HEADS, HEADS)),
    "decode_attention": (HEADS, lambda x: whet.decode_attention(x, CACHE, CACHE, [1] * 4)),
    "kv_append": (CACHE, lambda x: whet.kv_append(CACHE.clone(), x, [0] * 4)),
    "advantages": (ONE, whet.compute_batch_group_advantages),
    "group advantages": (ROW, whet.compute_group_advantages),
    "token_kl": (ROW, lambda x: torch.tensor(whet.compute_token_kl(x, ROW))),
    "batch_token_kl": (ONE, lambda x: whet.compute_batch_token_kl(x, ONE)),
    "token_logprobs": (ONE, lambda x: whet.compute_token_logprobs(x, [1, 2, 3, 4])),
    "gae": (ROW, lambda x: whet.compute_gae(x, ROW, np.zeros(32, bool), 0.0, 0.9, 0.9)[0]),
    "lora_factor": (ONE[:1], lambda x: whet.lora_forward(ONE, ONE.clone(), x, ONE[:1], 1.0)),
}
WRITTEN_TO = {
    "out": (ONE, lambda x: whet.softmax(ONE, out=x)),
    "residual": (ONE, lambda x: whet.rms_norm(ONE, residual=x)),
    "lora_forward": (ONE, lambda x: whet.lora_forward(ONE, x, ONE[:1], ONE[:1], 1.0)),
    "merge": (ONE, lambda x: whet.MicroLoRA.from_arrays(ONE[:1], ONE[:1, :4], 1.0).merge(x)),
}
IN_PLACE_ONLY = {
    "gemm out": (ONE[:, :4], lambda x: whet.gemm(ONE, ONE.T, out=x)),
    "attention out": (HEADS, lambda x: whet.attention(HEADS, HEADS, HEADS, out=x)),
    "apply_rope": (ONE, lambda x: whet.get_rope(32, max_position=4)(np.arange(4), x)),
    "kv_append cache": (CACHE, lambda x: whet.kv_append(x, CACHE, [0] * 4)),
    "kv_gather": (CACHE, lambda x: whet.kv_gather(x, [0, 1], [1, 1])),
}


@pytest.mark.parametrize("name", OF_ONE_TENSOR)
def test_lazily_negated_inputs_are_read(name):
    """The memory of torch's lazily negated tensors holds the opposite sign."""
    x, function = OF_ONE_TENSOR[name]
    torch.testing.assert_close(function(x.clone()._neg_view()), function(-x), rtol=0, atol=0)


@pytest.mark.parametrize("name", WRITTEN_TO)
def test_lazily_negated_outputs_are_written(name):
    x, function = WRITTEN_TO[name]
    lazy, plain = x.clone()._neg_view(), -x
    function(lazy)
    function(plain)
    torch.testing.assert_close(lazy.resolve_neg(), plain, rtol=0, atol=0)


@pytest.mark.parametrize("name", IN_PLACE_ONLY)
def test_lazily_negated_in_place_arguments_are_rejected(name):
    x, function = IN_PLACE_ONLY[name]
    assert_raises(whet.WhetError, r"lazily negated|memory layout", function, x.clone()._neg_view())


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)  # like FSDP with its parameters
    return x


def fake(x):
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True).from_tensor(x)


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was called")


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("kind", [freed, fake, Wrapper])
@pytest.mark.parametrize("name", [*OF_ONE_TENSOR, *WRITTEN_TO, *IN_PLACE_ONLY])
def test_tensors_without_memory_are_rejected(name, kind):
    x, function = (OF_ONE_TENSOR | WRITTEN_TO | IN_PLACE_ONLY)[name]
    assert_raises(whet.WhetTypeError, ("has no memory",), function, kind(x))


def test_wrapped_tensors_are_rejected():
    rows = torch.zeros(3, 32)
    for function in (whet.softmax, whet.silu, whet.compute_group_advantages):
        assert_raises(whet.WhetTypeError, ("has no memory",), torch.func.vmap(function), rows)
    shrunk = rows.clone()
    shrunk.untyped_storage().resize_(8)
    assert_raises(whet.WhetTypeError, ("weight has no memory",), whet.pack_weight, shrunk)
    ids = torch.zeros(3, dtype=torch.long, device="meta")
    assert_raises(whet.WhetTypeError, ("token_ids has no memory",), whet.compute_token_logprobs, rows, ids)
    assert_raises(whet.WhetTypeError, ("dtype float32", "integers"), whet.compute_token_logprobs, rows, rows[:, 0])
    empty = torch.zeros(0, 5)
    assert whet.softmax(empty).shape == (0, 5)
    assert whet.compute_token_logprobs(empty, []).shape == (0,)
    assert whet.compute_token_logprobs(rows, torch.arange(3)._neg_view()._neg_view()).shape == (3,)


def test_an_expanded_out_is_rejected():
    expanded = torch.zeros(1, 4).expand(4, 4)
    assert_raises(whet.WhetValueError, ("share memory",), whet.gemm, ONE, ONE.T, out=expanded)
    assert_raises(whet.WhetValueError, ("lazily negated",), whet.gemm, ONE, ONE.T, out=torch.zeros(4, 4)._neg_view())


def test_tensors_that_require_grad_are_rejected():
    leaf = torch.zeros(8, requires_grad=True)
    for call in (
        lambda: whet.compute_token_kl(leaf, leaf),
        lambda: whet.compute_token_kl(torch.zeros(8), leaf * 2),
        lambda: whet.compute_batch_token_kl(leaf, leaf, 4),
        lambda: whet.compute_group_advantages(torch.nn.Parameter(torch.zeros(8))),
        lambda: whet.compute_token_logprobs(leaf.reshape(2, 4), [0, 1]),
    ):
        assert_raises(whet.WhetValueError, ("requires grad", ".detach()"), call)
    assert whet.compute_token_kl(leaf.detach(), leaf.detach()) == 0.0


@pytest.mark.parametrize(
    ("tensor", "facts"),
    [
        (torch.zeros(8, dtype=torch.float16), ("dtype float16", ".to(torch.float32)")),
        (torch.zeros(8, dtype=torch.bfloat16), ("dtype bfloat16",)),
        (torch.zeros(8, device="meta"), ("on meta", "CPU tensor", "rewards.cpu()")),
        (torch.zeros(8).to_sparse(), ("to_dense",)),
    ],
)
def test_unsupported_tensors_are_rejected(tensor, facts):
    assert_raises(whet.WhetError, facts, whet.compute_group_advantages, tensor)


def test_a_tensor_and_an_array_agree():
    assert whet.compute_token_kl(torch.from_numpy(P[0]), Q[0]) == whet.compute_token_kl(P[0], Q[0])


def test_no_copy():
    # 64 MB in and a float out: a copy would show in NumPy's peak memory.
    import tracemalloc

    t = torch.zeros(8 * 2**20, dtype=torch.float64)
    tracemalloc.start()
    whet.compute_token_kl(t, t)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
