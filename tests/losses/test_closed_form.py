"""Losses of NumPy arrays: the same numbers as of tensors; dtypes, devices and arguments that autograd cannot use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.raising import assert_raises

from whet.errors import WhetTypeError
from whet.losses import Loss, dpo_loss, grpo_loss, sft_loss

MASK = np.arange(6) < np.array([6, 3, 1, 4, 0])[:, None]


def arguments(loss: Any) -> dict[str, Any]:
    """Draw arguments of a loss, the differentiable ones first."""
    rng = np.random.default_rng(0)
    if loss is dpo_loss:
        names = ("chosen_logprobs", "rejected_logprobs", "ref_chosen_logprobs", "ref_rejected_logprobs")
        return {name: -rng.random(7) * 9 for name in names}
    drawn = {"logprobs": -rng.random(MASK.shape), "completion_mask": MASK}
    return (
        drawn if loss is sft_loss else {**drawn, "old_logprobs": -rng.random(MASK.shape), "advantages": rng.random(5)}
    )


def as_tensors(arrays: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}


@pytest.mark.parametrize("loss", [sft_loss, dpo_loss, grpo_loss])
def test_arrays_give_the_numbers_of_tensors(loss: Any) -> None:
    arrays = arguments(loss)
    found = loss(**arrays)
    assert isinstance(found, Loss)
    tensors = as_tensors(arrays)
    at = [tensors[name].requires_grad_() for name in found.gradients]
    value, metrics = loss(**tensors)
    assert (value.item(), metrics) == (found.value, found.metrics)
    (3 * value).backward()
    for name, x in zip(found.gradients, at, strict=True):
        np.testing.assert_allclose(x.grad, 3 * found.gradients[name], rtol=1e-15)


@pytest.mark.parametrize("loss", [sft_loss, dpo_loss, grpo_loss])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_tensor_loss_has_the_dtype_of_the_logprobs(loss: Any, dtype: torch.dtype) -> None:
    tensors = as_tensors(arguments(loss), dtype)
    first = next(iter(tensors.values())).requires_grad_()
    value, _ = loss(**tensors)
    value.backward()
    exact = loss(**{name: x.detach().double() if x.is_floating_point() else x for name, x in tensors.items()})[0]
    assert value.dtype == first.grad.dtype == dtype
    assert value.item() == exact.to(dtype).item()


def test_a_loss_of_arrays_and_tensors_is_a_tensor() -> None:
    arrays = arguments(grpo_loss)
    tensors = {**arrays, "logprobs": torch.from_numpy(arrays["logprobs"])}
    assert grpo_loss(**tensors)[0].item() == grpo_loss(**arrays).value


def test_unusable_arguments_are_rejected() -> None:
    arrays = arguments(sft_loss)
    assert_raises(WhetTypeError, ("logprobs", "list", "array or tensor"), sft_loss, [[0.0]], MASK)
    integers = np.zeros(MASK.shape, np.int64)
    assert_raises(WhetTypeError, ("logprobs", "int64", "floating-point"), sft_loss, integers, MASK)
    fake = torch.empty(MASK.shape, device="meta")
    assert_raises(WhetTypeError, ("logprobs", "no memory"), sft_loss, fake, MASK)
    x = torch.from_numpy(arrays["logprobs"]).requires_grad_()
    [grad] = torch.autograd.grad(sft_loss(x, torch.from_numpy(MASK))[0], x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad.sum().backward()
