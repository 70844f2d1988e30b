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


# --- 16-bit parameters and their masters ----------------------------------------------------------------

NARROW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
PLACES = pytest.mark.parametrize("place", ["native", "a layout for torch", "amsgrad"])


def narrow_pair(dtype, place="native"):
    """A 16-bit parameter and a float32 one of the same values, larger than a piece, and an optimizer of each."""
    torch.manual_seed(0)
    values = torch.randn(601, 449).to(dtype)
    narrow = torch.nn.Parameter(values.t() if place == "a layout for torch" else values)
    wide = torch.nn.Parameter(narrow.detach().float())
    settings = {"lr": 1e-5, "weight_decay": 0.1, "amsgrad": place == "amsgrad"}
    return (narrow, AdamW([narrow], **settings)), (wide, AdamW([wide], **settings))


def step_both(narrow, mine, wide, reference, scale=1.0):
    narrow.grad = torch.randn(narrow.shape).to(narrow.dtype).as_strided(narrow.shape, narrow.stride())
    wide.grad = narrow.grad.float()
    mine.step(grad_scale=scale)
    reference.step(grad_scale=scale)


@NARROW
@PLACES
def test_a_16_bit_parameter_is_the_rounded_float32_one(dtype, place):
    (narrow, mine), (wide, reference) = narrow_pair(dtype, place)
    start = narrow.detach().clone()
    for _ in range(20):
        step_both(narrow, mine, wide, reference, scale=0.5)
        assert torch.equal(narrow, wide.to(dtype))
    state, expected = mine.state[narrow], reference.state[wide]
    assert set(state) == {*expected, "master"} and torch.equal(state["master"], wide)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert (state["master"] != start).float().mean() > 0.99 and set(mine.state) == {narrow}
    assert mine.param_groups[0]["params"][0] is narrow and narrow.grad is not None


def test_updates_smaller_than_half_a_unit_add_up():
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = AdamW([p], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert torch.allclose(p.float(), torch.tensor(1 - 100 * 1e-4), atol=2**-9)


@NARROW
@PLACES
def test_an_edited_parameter_wins_over_its_master(dtype, place):
    (narrow, mine), (wide, reference) = narrow_pair(dtype, place)
    step_both(narrow, mine, wide, reference)
    narrow.data[:3] = 0.25
    wide.data[:3] = 0.25
    step_both(narrow, mine, wide, reference)
    assert torch.equal(mine.state[narrow]["master"], wide), "the other weights keep what their masters had"
    assert torch.equal(narrow, wide.to(dtype))


@NARROW
@PLACES
def test_the_state_of_a_16_bit_parameter_is_loaded_unrounded(dtype, place):
    (narrow, mine), (wide, reference) = narrow_pair(dtype, place)
    step_both(narrow, mine, wide, reference)
    saved = copy.deepcopy((narrow.detach().clone(memory_format=torch.preserve_format), mine.state_dict()))
    again = torch.nn.Parameter(saved[0])
    resumed = AdamW([again])
    resumed.load_state_dict(saved[1])
    again.grad = torch.ones_like(again)
    narrow.grad = torch.ones_like(narrow)
    resumed.step()
    mine.step()
    assert all(torch.equal(resumed.state[again][name], value) for name, value in mine.state[narrow].items())
    assert torch.equal(narrow, again)


@NARROW
def test_the_state_of_torchs_optimizer_becomes_float32(dtype):
    p = torch.nn.Parameter(torch.randn(5, 3).to(dtype))
    p.grad = torch.ones_like(p)
    theirs, mine = torch.optim.AdamW([p]), AdamW([p])
    theirs.step()
    mine.load_state_dict(theirs.state_dict())
    mine.step()
    assert {value.dtype for value in mine.state[p].values()} == {torch.float32}


def test_moments_and_masters_are_made_before_the_first_step():
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = AdamW([p])
    optimizer.make_moments()
    assert {name: value.dtype for name, value in optimizer.state[p].items()} == dict.fromkeys(
        ("step", "exp_avg", "exp_avg_sq", "master"), torch.float32
    )
