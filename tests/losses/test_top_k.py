"""The loss of a teacher's most probable tokens: by hand, against autograd and whole distributions, masks, and parts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.raising import assert_raises

from whet.errors import WhetTypeError, WhetValueError
from whet.losses import top_k_loss


def distributions(vocab: int = 12, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probs of student and teacher, (2, 3, V)."""
    rng = np.random.default_rng(seed)
    return tuple(torch.log_softmax(torch.tensor(rng.normal(size=(2, 3, vocab))), -1).numpy() for _ in range(2))  # pyright: ignore


MASK = np.array([[True, True, False], [False, True, True]])


def test_a_token_by_hand() -> None:
    """p = 1/2, 1/4; q = 1/4, 1/4: 1/2 log 2 + 1/4 log 1 + 1/4 log(1/4 / 1/2) = 1/4 log 2."""
    p, q = np.log([[[0.5, 0.25]]]), np.log([[[0.25, 0.25]]])
    loss = top_k_loss(q, p, np.array([[True]]))
    assert loss.value == pytest.approx(math.log(2) / 4) and loss.metrics["covered"] == pytest.approx(0.75)
    np.testing.assert_allclose(loss.gradients["logprobs"], [[[-0.5 + 0.25 * 0.25 / 0.5, -0.25 + 0.125]]])


def test_all_tokens_give_the_divergence_of_the_distributions() -> None:
    student, teacher = distributions()
    divergence = (np.exp(teacher) * (teacher - student)).sum(-1)
    assert top_k_loss(student, teacher, MASK).value == pytest.approx(divergence[MASK].mean(), abs=1e-6)
    top = np.argsort(-teacher)[..., :4]
    part = top_k_loss(np.take_along_axis(student, top, -1), np.take_along_axis(teacher, top, -1), MASK)
    assert 0 < part.value < divergence[MASK].mean()


def test_gradients_are_autograds() -> None:
    """Gradients of the logits, through the log-probs of the candidates."""
    student, teacher = distributions()
    top = np.argsort(-teacher)[..., :4]
    tops = np.take_along_axis(teacher, top, -1)
    logits = torch.tensor(student, requires_grad=True)
    own = torch.log_softmax(logits, -1).gather(-1, torch.tensor(top))
    loss, _ = top_k_loss(own, torch.tensor(tops), torch.tensor(MASK))
    loss.backward()
    other = torch.tensor(student, requires_grad=True)
    log_q = torch.log_softmax(other, -1)
    q, p = log_q.exp().gather(-1, torch.tensor(top)), torch.tensor(tops).exp()
    rest = (1 - p.sum(-1)) * ((1 - p.sum(-1)).log() - (1 - q.sum(-1)).log())
    ((p * (p.log() - q.log())).sum(-1) + rest)[torch.tensor(MASK)].mean().backward()
    torch.testing.assert_close(logits.grad, other.grad, rtol=1e-12, atol=1e-14)


def test_missing_tokens_and_masked_positions_do_not_count() -> None:
    student, teacher = (x[..., :3].copy() for x in distributions())
    expected = top_k_loss(student, teacher, MASK)
    student[~MASK], teacher[~MASK] = np.nan, np.nan
    wide = [np.concatenate([x, np.full((2, 3, 2), fill)], -1) for x, fill in ((student, -0.5), (teacher, -np.inf))]
    found = top_k_loss(*wide, MASK)
    assert found.value == pytest.approx(expected.value)
    np.testing.assert_allclose(found.gradients["logprobs"][..., :3], expected.gradients["logprobs"])
    assert not found.gradients["logprobs"][..., 3:].any()


def test_parts_add_up() -> None:
    student, teacher = (x[..., :3] for x in distributions())
    whole = top_k_loss(student, teacher, MASK)
    parts = [top_k_loss(student[i : i + 1], teacher[i : i + 1], MASK[i : i + 1], n_tokens=4) for i in range(2)]
    assert sum(part.value for part in parts) == pytest.approx(whole.value)
    gradient = np.concatenate([part.gradients["logprobs"] for part in parts])
    np.testing.assert_allclose(gradient, whole.gradients["logprobs"])


def test_rounded_log_probs_above_1_in_sum_are_finite() -> None:
    logprobs = np.log([[[0.6, 0.4 + 1e-7]]])
    loss = top_k_loss(logprobs, logprobs, np.array([[True]]))
    assert loss.value == 0 and np.isfinite(loss.gradients["logprobs"]).all()


def test_wrong_arguments_are_rejected() -> None:
    student, teacher = distributions()
    assert_raises(WhetTypeError, ("top_k_loss", "logprobs", "3"), top_k_loss, student[0], teacher[0], MASK)
    assert_raises(WhetValueError, ("teacher_logprobs",), top_k_loss, student, teacher[..., :4], MASK)
    assert_raises(WhetValueError, ("completion_mask",), top_k_loss, student, teacher, MASK[:1])
