"""The native AdamW against torch's."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.raising import assert_raises

from whet.nn import AdamW


def pair(**settings):
    torch.manual_seed(0)
    ours = torch.nn.Sequential(torch.nn.Linear(37, 53), torch.nn.LayerNorm(53), torch.nn.Linear(53, 3001))
    theirs = copy.deepcopy(ours)
    return (
        (ours, AdamW(ours.parameters(), **settings)),
        (theirs, torch.optim.AdamW(theirs.parameters(), foreach=False, **settings)),
    )


def assert_close(ours, theirs, rtol=3e-7, atol=1e-8):
    """As torch's but for its square root, which MKL does not always round to nearest."""
    torch.testing.assert_close(list(ours), list(theirs), rtol=rtol, atol=atol)


def step(module, optimizer, x, **options):
    optimizer.zero_grad()
    module(x).square().mean().backward()
    optimizer.step(**options)


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 1e-3},
        {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
        {"lr": 1e-4, "betas": (0.0, 0.5), "weight_decay": 0.0},
    ],
)
def test_the_moments_are_torchs_to_the_bit(settings):
    (ours, mine), (theirs, reference) = pair(**settings)
    x = torch.randn(11, 37)
    for _ in range(7):
        step(ours, mine, x)
        # The same gradients for both: what is compared is the step.
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            b.grad = a.grad.clone()
        reference.step()
        assert_close(ours.parameters(), theirs.parameters())
        theirs.load_state_dict(ours.state_dict())
        for a, b in zip(mine.state.values(), reference.state.values(), strict=True):
            assert all(torch.equal(a[key], b[key]) for key in b)


def test_states_are_exchanged():
    (ours, mine), (theirs, reference) = pair(lr=1e-2)
    x = torch.randn(5, 37)
    for _ in range(3):
        step(ours, mine, x)
    theirs.load_state_dict(ours.state_dict())
    reference.load_state_dict(copy.deepcopy(mine.state_dict()))
    step(ours, mine, x)
    step(theirs, reference, x)
    assert_close(ours.parameters(), theirs.parameters())


def test_a_scale_multiplies_the_gradients():
    (ours, mine), (theirs, reference) = pair(lr=1e-2)
    x = torch.randn(5, 37)
    step(ours, mine, x, grad_scale=0.25)
    theirs(x).square().mean().mul(0.25).backward()
    reference.step()
    assert_close(ours.parameters(), theirs.parameters(), rtol=1e-6, atol=1e-7)


def test_other_dtypes_and_layouts_take_torchs_step():
    torch.manual_seed(0)
    doubles = torch.nn.Linear(5, 4).double()
    strided = torch.nn.Parameter(torch.randn(4, 6).t())
    parameters = [*doubles.parameters(), strided, torch.nn.Parameter(torch.randn(9))]
    copies = [torch.nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in parameters]
    ours, theirs = AdamW(parameters, lr=0.1), torch.optim.AdamW(copies, lr=0.1)
    for _ in range(3):
        for a, b in zip(parameters, copies, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad * 0.5
        ours.step(grad_scale=0.5)
        theirs.step()
    assert_close(parameters, copies)


def test_a_closure_and_no_gradient():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([p, torch.nn.Parameter(torch.ones(2))], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = p.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert torch.allclose(p, torch.full((3,), 0.9 - 1e-3))


def test_a_changed_parameter_is_noticed():
    """By autograd, which refuses a backward through what has changed."""
    p = torch.nn.Parameter(torch.ones(3))
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    AdamW([p], lr=0.1).step()
    assert_raises(RuntimeError, "modified by an inplace operation", loss.backward)


def test_a_state_of_another_shape_is_refused_and_no_memory_beyond_it_touched():
    module = torch.nn.Linear(64, 64)
    optimizer = AdamW(module.parameters())
    step(module, optimizer, torch.randn(3, 64))
    optimizer.state[module.weight]["exp_avg"] = torch.zeros(2)
    assert_raises(RuntimeError, "size", step, module, optimizer, torch.randn(3, 64))
