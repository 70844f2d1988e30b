"""Torch tensors in, torch tensors out, without a copy, and never silently cut from a graph."""

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


def test_views_are_read_right():
    t = torch.from_numpy(P)
    for view in (t.T, t[:, ::2], t[1:]):
        torch.testing.assert_close(
            whet.compute_batch_group_advantages(view), whet.compute_batch_group_advantages(view.clone()), rtol=0, atol=0
        )
    negated = torch.from_numpy(P + 1j * Q).conj().imag  # a lazy minus sign on memory that holds Q
    assert whet.compute_token_kl(negated[0], t[0]) == whet.compute_token_kl(-Q[0], P[0])


def test_gradients_are_refused():
    leaf = torch.zeros(8, requires_grad=True)
    for call in (
        lambda: whet.compute_token_kl(leaf, leaf),
        lambda: whet.compute_token_kl(torch.zeros(8), leaf * 2),
        lambda: whet.compute_batch_token_kl(leaf, leaf, 4),
        lambda: whet.compute_group_advantages(torch.nn.Parameter(torch.zeros(8))),
        lambda: whet.compute_token_logprobs(leaf.reshape(2, 4), [0, 1]),
    ):
        assert_raises(whet.WhetValueError, r"requires grad.*\.detach\(\)", call)
    assert whet.compute_token_kl(leaf.detach(), leaf.detach()) == 0.0


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(8, dtype=torch.float16), r"dtype float16.*\.to\(torch.float32\)"),
        (torch.zeros(8, dtype=torch.bfloat16), "dtype bfloat16"),
        (torch.zeros(8, device="meta"), r"on meta, expected a CPU tensor. Pass rewards.cpu\(\)"),
        (torch.zeros(8).to_sparse(), "to_dense"),
    ],
)
def test_other_tensors_are_refused(tensor, message):
    assert_raises(whet.WhetError, message, whet.compute_group_advantages, tensor)


def test_a_tensor_and_an_array_agree():
    assert whet.compute_token_kl(torch.from_numpy(P[0]), Q[0]) == whet.compute_token_kl(P[0], Q[0])


def test_no_copy():
    # 64 MB in and a float out: a copy would show in torch's or NumPy's peak, so time's stand-in is the address.
    import tracemalloc

    t = torch.zeros(8 * 2**20, dtype=torch.float64)
    tracemalloc.start()
    whet.compute_token_kl(t, t)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
