"""Low-rank adapters on torch tensors, against autograd and torch.optim."""

import numpy as np
import pytest
from tests.ops.test_lora import adapter_of, arrays, close, wide
from tests.raising import assert_raises, mentions

import whet
from whet.ops.lora import naive_lora_forward, naive_lora_gradients

torch = pytest.importorskip("torch")


def test_tensors_are_written_in_place():
    x, y, a, b = arrays(5, 40, 33, 3)
    tensor = torch.from_numpy(y.copy())
    assert whet.lora_forward(torch.from_numpy(x), tensor, torch.from_numpy(a), b, 0.5) is tensor
    np.testing.assert_array_equal(tensor.numpy(), whet.lora_forward(x, y.copy(), a, b, 0.5))
    columns = torch.from_numpy(y.copy()).T.contiguous().T
    whet.lora_forward(torch.from_numpy(x).T.contiguous().T, columns, a, b, 0.5)
    np.testing.assert_array_equal(columns.numpy(), tensor.numpy())


@pytest.mark.parametrize("n", [1, 15, 16, 17, 33, 100, 600])
@pytest.mark.parametrize("rank", [1, 2, 3, 8])
def test_bfloat16_is_rounded_once(n, rank):
    x, y, a, b = arrays(6, n, n, rank)
    half_x, half_y = torch.from_numpy(x).bfloat16(), torch.from_numpy(y).bfloat16()
    x, y = half_x.float().numpy(), half_y.float().numpy()
    # Computed from the same numbers in float32 and then rounded.
    expected = torch.from_numpy(whet.lora_forward(x, y.copy(), a, b, 0.25)).bfloat16()
    torch.testing.assert_close(whet.lora_forward(half_x, half_y.clone(), a, b, 0.25), expected, rtol=0, atol=0)
    mixed = whet.lora_forward(half_x, torch.from_numpy(y.copy()), a, b, 0.25)
    close(mixed.numpy(), naive_lora_forward(*wide(x, y, a, b), 0.25), n)
    grad_a, grad_b = np.zeros_like(a), np.zeros_like(b)
    whet.lora_accumulate(half_x, half_y, a, b, 0.25, grad_a, grad_b)
    exact_a, exact_b = naive_lora_gradients(*wide(x, y, a, b), 0.25)
    close(grad_a, exact_a, 6 * n)
    close(grad_b, exact_b, 6 * n)
    adapter = whet.MicroLoRA.from_arrays(a, b, 1.0)
    out = whet.lora_batch(half_x, half_y.clone(), [adapter], torch.tensor([0, -1, 0, 0, -1, 0]))
    single = adapter.forward(half_x, half_y.clone())
    for i in range(6):
        assert torch.equal(out[i], half_y[i] if i in (1, 4) else single[i])


def test_gradients_equal_autograd():
    x, target, a, b = (torch.from_numpy(z).double() for z in arrays(7, 30, 20, 4))
    a.requires_grad_(), b.requires_grad_()
    y = 0.5 * (x @ a.T) @ b
    y.retain_grad()
    ((y - target) ** 2).mean().backward()
    adapter = whet.MicroLoRA.from_arrays(a.detach().float(), b.detach().float(), alpha=2.0)
    adapter.accumulate(x.float(), y.grad.float())
    for got, exact in zip(adapter.gradients, (a.grad, b.grad), strict=True):
        np.testing.assert_allclose(got, exact.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_steps_equal_torch_optim(kind):
    adapter = adapter_of(17, 9, 3)
    a, b = (torch.nn.Parameter(torch.from_numpy(z.copy()).double()) for z in (adapter.A, adapter.B))
    optimizer = {
        "SGD": lambda: torch.optim.SGD([a, b], lr=0.05),
        "Adam": lambda: torch.optim.Adam([a, b], lr=0.05, betas=(0.8, 0.95), eps=1e-6),
        "AdamW": lambda: torch.optim.AdamW([a, b], lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    }[kind]()
    rng = np.random.default_rng(0)
    for _ in range(6):
        optimizer.zero_grad()
        for _ in range(2):  # the mean over two losses
            x, g = (rng.standard_normal((4, n)).astype(np.float32) for n in (17, 9))
            adapter.accumulate(x, g)
            y = adapter.scale * (torch.from_numpy(x).double() @ a.T) @ b
            (y * torch.from_numpy(g)).sum().div(2).backward()
        optimizer.step()
        if kind == "SGD":
            adapter.sgd_step(0.05)
        else:
            adapter.adam_step(0.05, (0.8, 0.95), 1e-6, 0.1 if kind == "AdamW" else 0.0)
    np.testing.assert_allclose(adapter.A, a.detach().numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(adapter.B, b.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_merge_into_a_linear_layer():
    adapter = adapter_of(17, 9, 3)
    layer = torch.nn.Linear(17, 9)
    before = layer.weight.detach().clone()
    assert_raises(whet.WhetValueError, ("weight requires grad", "weight.detach()"), adapter.merge, layer.weight)
    adapter.merge(layer.weight.detach())
    delta = adapter.scale * adapter.B.T.astype(np.float64) @ adapter.A
    np.testing.assert_allclose((layer.weight.detach() - before).numpy(), delta, atol=1e-5)
    half = before.bfloat16()
    adapter.merge(half)
    exact = torch.from_numpy(before.bfloat16().double().numpy() + delta)
    assert (half.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


def test_invalid_tensors_are_named():
    x, y, a, b = (torch.from_numpy(z) for z in arrays(4, 10, 7, 3))
    for call, facts in (
        (lambda: whet.lora_forward(x.requires_grad_(), y, a, b, 1.0), ("x requires grad",)),
        (lambda: whet.lora_forward(x.detach(), y[:1].expand(4, 7), a, b, 1.0), ("y is expanded",)),
        (lambda: whet.lora_forward(x.detach(), y.to("meta"), a, b, 1.0), ("y is on meta",)),
    ):
        assert_raises(whet.WhetValueError, facts, call)
    with pytest.raises(whet.WhetTypeError, match=mentions("y has dtype float16", "float32 or bfloat16")):
        whet.lora_forward(x.detach(), y.half(), a, b, 1.0)
