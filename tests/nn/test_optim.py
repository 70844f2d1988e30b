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
    """Assert equality up to torch's square root, which MKL does not always round to nearest."""
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
        # Both get the same gradients: the test compares only the step.
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            b.grad = a.grad.clone()
        reference.step()
        assert_close(ours.parameters(), theirs.parameters())
        theirs.load_state_dict(ours.state_dict())
        for a, b in zip(mine.state.values(), reference.state.values(), strict=True):
            assert all(torch.equal(a[key], b[key]) for key in b)


def test_state_dicts_load_into_torch_and_back():
    (ours, mine), (theirs, reference) = pair(lr=1e-2)
    x = torch.randn(5, 37)
    for _ in range(3):
        step(ours, mine, x)
    theirs.load_state_dict(ours.state_dict())
    reference.load_state_dict(copy.deepcopy(mine.state_dict()))
    step(ours, mine, x)
    step(theirs, reference, x)
    assert_close(ours.parameters(), theirs.parameters())


def test_grad_scale_multiplies_the_gradients():
    (ours, mine), (theirs, reference) = pair(lr=1e-2)
    x = torch.randn(5, 37)
    step(ours, mine, x, grad_scale=0.25)
    theirs(x).square().mean().mul(0.25).backward()
    reference.step()
    assert_close(ours.parameters(), theirs.parameters(), rtol=1e-6, atol=1e-7)


def test_other_dtypes_and_layouts_use_torchs_step():
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


def test_closure_and_parameters_without_gradient():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([p, torch.nn.Parameter(torch.ones(2))], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = p.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert torch.allclose(p, torch.full((3,), 0.9 - 1e-3))


def test_a_step_increments_the_version_counter():
    """Autograd then rejects a backward through the changed parameter."""
    p = torch.nn.Parameter(torch.ones(3))
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    AdamW([p], lr=0.1).step()
    assert_raises(RuntimeError, "modified by an inplace operation", loss.backward)


def test_a_state_of_another_shape_raises_before_the_kernel_runs():
    module = torch.nn.Linear(64, 64)
    optimizer = AdamW(module.parameters())
    step(module, optimizer, torch.randn(3, 64))
    optimizer.state[module.weight]["exp_avg"] = torch.zeros(2)
    assert_raises(RuntimeError, "size", step, module, optimizer, torch.randn(3, 64))


# --- 16-bit parameters and their masters ----------------------------------------------------------------

HALF_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
PATHS = pytest.mark.parametrize("path", ["native", "a layout for torch", "amsgrad"])


def half_pair(dtype, path="native"):
    """Return a 16-bit and a float32 parameter of the same values, larger than a chunk, each with its optimizer."""
    torch.manual_seed(0)
    values = torch.randn(601, 449).to(dtype)
    half = torch.nn.Parameter(values.t() if path == "a layout for torch" else values)
    full = torch.nn.Parameter(half.detach().float())
    settings = {"lr": 1e-5, "weight_decay": 0.1, "amsgrad": path == "amsgrad"}
    return (half, AdamW([half], **settings)), (full, AdamW([full], **settings))


def step_both(half, mine, full, reference, scale=1.0):
    half.grad = torch.randn(half.shape).to(half.dtype).as_strided(half.shape, half.stride())
    full.grad = half.grad.float()
    mine.step(grad_scale=scale)
    reference.step(grad_scale=scale)


@HALF_DTYPES
@PATHS
def test_a_16_bit_parameter_is_its_rounded_float32_master(dtype, path):
    (half, mine), (full, reference) = half_pair(dtype, path)
    start = half.detach().clone()
    for _ in range(20):
        step_both(half, mine, full, reference, scale=0.5)
        assert torch.equal(half, full.to(dtype))
    state, expected = mine.state[half], reference.state[full]
    assert set(state) == {*expected, "master"} and torch.equal(state["master"], full)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert (state["master"] != start).float().mean() > 0.99 and set(mine.state) == {half}
    assert mine.param_groups[0]["params"][0] is half and half.grad is not None


def test_updates_below_half_an_ulp_accumulate():
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = AdamW([p], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert torch.allclose(p.float(), torch.tensor(1 - 100 * 1e-4), atol=2**-9)


@HALF_DTYPES
@PATHS
def test_an_edited_parameter_overrides_its_master(dtype, path):
    (half, mine), (full, reference) = half_pair(dtype, path)
    step_both(half, mine, full, reference)
    half.data[:3] = 0.25
    full.data[:3] = 0.25
    step_both(half, mine, full, reference)
    assert torch.equal(mine.state[half]["master"], full), "the masters of the other weights are unchanged"
    assert torch.equal(half, full.to(dtype))


@HALF_DTYPES
@PATHS
def test_the_state_of_a_16_bit_parameter_loads_without_rounding(dtype, path):
    (half, mine), (full, reference) = half_pair(dtype, path)
    step_both(half, mine, full, reference)
    saved = copy.deepcopy((half.detach().clone(memory_format=torch.preserve_format), mine.state_dict()))
    again = torch.nn.Parameter(saved[0])
    resumed = AdamW([again])
    resumed.load_state_dict(saved[1])
    again.grad = torch.ones_like(again)
    half.grad = torch.ones_like(half)
    resumed.step()
    mine.step()
    assert all(torch.equal(resumed.state[again][name], value) for name, value in mine.state[half].items())
    assert torch.equal(half, again)


@HALF_DTYPES
def test_the_state_of_torchs_optimizer_converts_to_float32(dtype):
    p = torch.nn.Parameter(torch.randn(5, 3).to(dtype))
    p.grad = torch.ones_like(p)
    theirs, mine = torch.optim.AdamW([p]), AdamW([p])
    theirs.step()
    mine.load_state_dict(theirs.state_dict())
    mine.step()
    assert {value.dtype for value in mine.state[p].values()} == {torch.float32}


def test_allocate_moments_precedes_the_first_step():
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = AdamW([p])
    optimizer.allocate_moments()
    assert {name: value.dtype for name, value in optimizer.state[p].items()} == dict.fromkeys(
        ("step", "exp_avg", "exp_avg_sq", "master"), torch.float32
    )
