"""Heads of the native learner against autograd in float64: candidates, mean log-probs, divergences, hidden states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.learner.test_learner import (
    COMPLETIONS,
    PROMPTS,
    SHAPE,
    TEMPERATURE,
    in_module_order,
    new_learner,
    relative_error,
)
from tests.raising import assert_raises

pytest.importorskip("transformers")
from tests.engine.tiny_models import tiny_model

from whet import Learner, WhetTypeError, WhetValueError, set_num_threads
from whet.models.packed_base import pack_base
from whet.models.sources.live import open_module

LENGTHS = list(map(len, COMPLETIONS))


def learner_of(case: str, **options: Any) -> Learner:
    base = pack_base(open_module(tiny_model(case, **options)), weights="float32")
    return new_learner(base, compute="float32", modules_to_save=())


def adapted(
    learner: Learner, model: Any
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Return the weights of a float64 model with the learner's adapters, and the factors by module."""
    factors, weights = {}, {}
    for adapter in learner.adapters:
        b = in_module_order(learner, adapter, adapter.b)
        a, b = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (adapter.a, b))
        weights[f"{adapter.name}.weight"] = model.get_submodule(adapter.name).weight + adapter.scaling * b.T @ a
        factors[adapter.name] = a, b
    return weights, factors


def log_distributions(model: Any, weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the log-probs (T, V) that predict each completion's tokens."""
    found = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        out = torch.func.functional_call(model, weights, (torch.tensor([prompt + completion]),))
        found.append((out.logits[0] / TEMPERATURE).log_softmax(-1)[len(prompt) - 1 : -1])
    return found


def check_gradients(learner: Learner, factors: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    for adapter in learner.adapters:
        right = [x.grad.numpy() for x in factors[adapter.name]]  # pyright: ignore[reportOptionalMemberAccess]
        got = adapter.grad_a, in_module_order(learner, adapter, adapter.grad_b)
        assert max(map(relative_error, got, right)) < 2e-5


def padded(rows: list[torch.Tensor]) -> np.ndarray:
    out = np.zeros((*SHAPE, *rows[0].shape[1:]))
    for i, row in enumerate(rows):
        out[i, : len(row)] = row.detach().numpy()
    return out


@pytest.mark.parametrize("case", ["llama", "gemma2"])
def test_candidates_entropies_and_means(case: str) -> None:
    learner, model = learner_of(case), tiny_model(case).double()
    rng = np.random.default_rng(2)
    vocab_size = learner.base.config.vocab_size
    candidates = [rng.integers(0, vocab_size, (n, 3)) for n in LENGTHS]
    result = learner.logprobs(
        PROMPTS, COMPLETIONS, candidates=candidates, temperature=TEMPERATURE, return_entropy=True, return_mean=True
    )
    weights, factors = adapted(learner, model)
    rows = log_distributions(model, weights)
    chosen = [row.gather(1, torch.tensor(ids)) for row, ids in zip(rows, candidates, strict=True)]
    entropies, means = [-(row.exp() * row).sum(1) for row in rows], [row.mean(1) for row in rows]
    assert result.entropy is not None and result.mean is not None
    for got, right in ((result.logprobs, chosen), (result.entropy, entropies), (result.mean, means)):
        np.testing.assert_allclose(got, padded(right), atol=2e-5)
    grads = [rng.normal(size=shape) for shape in ((*SHAPE, 3), SHAPE, SHAPE)]
    loss = torch.zeros((), dtype=torch.float64)
    for i, n in enumerate(LENGTHS):
        for values, grad in zip((chosen, entropies, means), grads, strict=True):
            loss = loss + (values[i] * torch.tensor(grad[i, :n])).sum()
    loss.backward()
    learner.backward(*grads)
    check_gradients(learner, factors)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("teacher_is_wider", [True, False])
def test_divergence_from_a_teacher(beta: float, teacher_is_wider: bool) -> None:
    """The teacher is another model, or the learner's own base, as in self-distillation."""
    learner, model = learner_of("llama", initializer_range=0.3), tiny_model("llama", initializer_range=0.3).double()
    weights, factors = adapted(learner, model)
    p = log_distributions(model, weights)
    if teacher_is_wider:
        options = {"hidden_size": 64, "num_hidden_layers": 1, "initializer_range": 0.3}
        teacher = learner_of("llama", **options)
        other = tiny_model("llama", **options).double()
        q = log_distributions(other, adapted(teacher, other)[0])
    else:
        teacher, q = learner, log_distributions(model, {})
    got = learner.divergence(
        PROMPTS, COMPLETIONS, teacher, beta=beta, temperature=TEMPERATURE, teacher_adapters=teacher_is_wider
    )
    right = []
    for lp, lq in zip(p, q, strict=True):
        lq = lq.detach()
        if beta in (0.0, 1.0):
            right.append((lq.exp() * (lq - lp) if beta == 0 else lp.exp() * (lp - lq)).sum(1))
            continue
        m = ((1 - beta) * lp.exp() + beta * lq.exp()).log()
        right.append((beta * lq.exp() * (lq - m) + (1 - beta) * lp.exp() * (lp - m)).sum(1))
    np.testing.assert_allclose(got.values, padded(right), rtol=2e-5, atol=2e-6)
    grad = np.random.default_rng(3).normal(size=SHAPE)
    sum((row * torch.tensor(grad[i, : len(row)])).sum() for i, row in enumerate(right)).backward()  # pyright: ignore
    learner.backward(grad)
    check_gradients(learner, factors)


def test_a_scalar_head_on_hidden_states() -> None:
    learner, model = learner_of("llama"), tiny_model("llama").double()
    rng = np.random.default_rng(4)
    w, g = rng.normal(size=learner.base.config.hidden_dim), rng.normal(size=len(PROMPTS))
    hidden = learner.hidden_states(PROMPTS, COMPLETIONS)
    weights, factors = adapted(learner, model)
    right = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        ids = torch.tensor([prompt + completion])
        out = torch.func.functional_call(model, weights, (ids,), {"output_hidden_states": True})
        right.append(out.hidden_states[-1][0, -1])
    np.testing.assert_allclose(hidden, torch.stack(right).detach().numpy(), atol=2e-5)
    (torch.stack(right) @ torch.tensor(w) @ torch.tensor(g)).backward()
    learner.backward(g[:, None] * w)
    check_gradients(learner, factors)


def test_bits_do_not_depend_on_threads_or_the_order_of_rows() -> None:
    found = []
    for threads, order in ((1, [0, 1, 2, 3]), (3, [2, 0, 3, 1])):
        set_num_threads(threads)
        learner, teacher = learner_of("llama"), learner_of("llama", hidden_size=64)
        rows = [PROMPTS[i] for i in order], [COMPLETIONS[i] for i in order]
        values = learner.divergence(*rows, teacher).values
        learner.backward(np.ones_like(values))
        hidden = learner.hidden_states(*rows)
        learner.backward(np.ones_like(hidden))
        found.append([values[np.argsort(order)], hidden[np.argsort(order)], *(a.grad_a for a in learner.adapters)])
    for first, second in zip(*found, strict=True):
        assert np.array_equal(first, second)


def test_refusals() -> None:
    learner, other = learner_of("llama"), learner_of("llama", vocab_size=56)
    refuse = assert_raises
    size = learner.base.config.vocab_size
    refuse(WhetValueError, ("vocabulary", size, 56), learner.divergence, [[1]], [[2]], other)
    refuse(WhetTypeError, ("teacher", "str"), learner.divergence, [[1]], [[2]], "model")
    refuse(WhetValueError, ("beta", 1.5), learner.divergence, [[1]], [[2]], learner, beta=1.5)
    for candidates, facts in (
        ([[[1, 2]]], ["(1, 2)", "[2]"]),
        ([[[], []]], ["at least 1"]),
        ([[[1], [size]]], ["candidates[0]", f"0 to {size - 1}"]),
        ([[[1.0], [2.0]]], ["candidates[0]", "token ids"]),
    ):
        refuse(WhetValueError, ("candidates", *facts), learner.logprobs, [[1]], [[2, 3]], candidates=candidates)
    kept = [None]
    refuse(WhetValueError, ("return_mean",), learner.logprobs, [[1]], [[2]], kept_tokens=kept, return_mean=True)
    learner.hidden_states([[1]], [[2]])
    refuse(WhetValueError, ("grad", "(1, 1)", "hidden"), learner.backward, np.ones((1, 1)))
    width = learner.base.config.hidden_dim
    refuse(WhetValueError, ("grad_mean", "hidden_states"), learner.backward, np.ones((1, width)), None, np.ones((1, 1)))
    learner.backward(np.ones((1, width)))
    refuse(WhetTypeError, ("once",), learner.backward, np.ones((1, width)))
