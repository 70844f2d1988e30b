"""The loss of distillation: by hand, against autograd of the exact divergence, and invalid arguments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.raising import assert_raises

from whet.errors import WhetTypeError, WhetValueError
from whet.losses import distillation_loss


def test_values_by_hand() -> None:
    logprobs, teacher = np.log([[0.5, 0.2, 0.9]]), np.log([[0.25, 0.4, 0.1]])
    mask = np.array([[True, True, False]])
    found = distillation_loss(logprobs, teacher, mask)
    excess = [math.log(2), -math.log(2)]
    assert found.value == pytest.approx(0) and found.metrics["reverse_kl"] == pytest.approx(0)
    assert found.gradients["logprobs"][0].tolist() == pytest.approx([excess[0] / 2, excess[1] / 2, 0])
    # The sampler drew the first token with 0.1, whose weight of 5 is truncated to 3, and the second with 0.4.
    found = distillation_loss(logprobs, teacher, mask, sampler_logprobs=np.log([[0.1, 0.4, 1.0]]), n_tokens=4)
    assert found.gradients["logprobs"][0].tolist() == pytest.approx([3 * excess[0] / 4, 0.5 * excess[1] / 4, 0])
    assert found.metrics["sampler/importance_weight"] == pytest.approx(3.5 / 4)
    # The student that sampled had 0.25 for the first token: A = log 0.25 - log 0.25, and rho 2.
    found = distillation_loss(logprobs, teacher, mask, old_logprobs=np.log([[0.25, 0.2, 0.9]]))
    assert found.gradients["logprobs"][0].tolist() == pytest.approx([0, excess[1] / 2, 0])


@pytest.mark.parametrize("sampler", [False, True])
def test_the_mean_over_all_tokens_is_the_gradient_of_the_divergence(sampler: bool) -> None:
    """With every token of the vocabulary as a row of one token, weighted by its probability of being sampled."""
    generator = torch.Generator().manual_seed(0)
    logits, teachers, samplers = torch.randn(3, 11, generator=generator, dtype=torch.float64).unbind()
    logits.requires_grad_()
    own, teacher = logits.log_softmax(0), teachers.log_softmax(0)
    (own.exp() * (own - teacher)).sum().backward()
    drawn = (samplers if sampler else logits.detach()).log_softmax(0)
    options: dict[str, Any] = {"sampler_logprobs": drawn[:, None], "sampler_cap": 1e9} if sampler else {}
    rows = own.detach()[:, None].requires_grad_()
    every = torch.ones(11, 1, dtype=torch.bool)
    value, _ = distillation_loss(rows, teacher[:, None], every, n_tokens=1, **options)
    value.backward()
    assert rows.grad is not None
    jacobian = torch.eye(11) - own.detach().exp()  # of each log-prob in the logits
    mean = (drawn.exp() * rows.grad[:, 0]) @ jacobian
    assert torch.allclose(mean, logits.grad, atol=1e-14)  # pyright: ignore[reportArgumentType]


def test_micro_batches_add_up_and_masked_positions_count_nothing() -> None:
    rng = np.random.default_rng(0)
    own, teacher, drawn = -rng.random((3, 5, 4)) * 3
    mask = rng.random((5, 4)) < 0.7
    own[~mask] = teacher[~mask] = np.nan
    whole = distillation_loss(own, teacher, mask, sampler_logprobs=drawn)
    parts = [
        distillation_loss(own[part], teacher[part], mask[part], sampler_logprobs=drawn[part], n_tokens=mask.sum())
        for part in (slice(2), slice(2, 5))
    ]
    assert sum(part.value for part in parts) == pytest.approx(whole.value)
    gradients = np.concatenate([part.gradients["logprobs"] for part in parts])
    assert np.allclose(gradients, whole.gradients["logprobs"], atol=1e-15) and not gradients[~mask].any()


def test_invalid_arguments_are_rejected() -> None:
    own, mask = np.zeros((2, 3)), np.ones((2, 3), bool)
    assert_raises(WhetValueError, ("teacher_logprobs", "(2, 2)", "(2, 3)"), distillation_loss, own, own[:, :2], mask)
    assert_raises(WhetTypeError, ("completion_mask", "bool"), distillation_loss, own, own, own)
    assert_raises(WhetTypeError, ("logprobs", "list"), distillation_loss, [[0.0]], own, mask)
    assert_raises(
        WhetValueError, ("cap", "0"), distillation_loss, own, own, mask, sampler_logprobs=own, sampler_cap=0.0
    )
