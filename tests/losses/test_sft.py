"""sft_loss: by hand, masks, and micro-batches."""

from __future__ import annotations

import math

import pytest
import torch
from tests.raising import assert_raises

from whet.errors import WhetTypeError, WhetValueError
from whet.losses import sft_loss

LOGPROBS = torch.tensor([[math.log(0.5), math.log(0.25)], [math.log(0.125), math.nan]])
MASK = torch.tensor([[True, True], [True, False]])


def test_value_metric_and_gradient_by_hand():
    logprobs = LOGPROBS.clone().requires_grad_()
    loss, metrics = sft_loss(logprobs, MASK)
    assert loss.item() == pytest.approx(2 * math.log(2))  # (1 + 2 + 3) log 2 / 3
    assert metrics == {"token_probability": pytest.approx((0.5 + 0.25 + 0.125) / 3)}
    third = -1 / 3
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == [pytest.approx([third, third]), pytest.approx([third, 0])]


def test_micro_batches_add_up_to_the_whole():
    whole, whole_metrics = sft_loss(LOGPROBS, MASK)
    parts = [sft_loss(LOGPROBS[i : i + 1], MASK[i : i + 1], n_tokens=3) for i in range(2)]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item())
    assert sum(m["token_probability"] for _, m in parts) == pytest.approx(whole_metrics["token_probability"])


def test_a_batch_without_counted_tokens_is_zero():
    assert sft_loss(LOGPROBS, torch.zeros_like(MASK))[0].item() == 0


def test_invalid_arguments_are_rejected():
    assert_raises(WhetTypeError, ("sft_loss", "completion_mask", "bool"), sft_loss, LOGPROBS, MASK.float())
    assert_raises(WhetValueError, ("completion_mask", "(2, 1)"), sft_loss, LOGPROBS, MASK[:, :1])
