"""Fused log-probs of the LM head, forward and backward, against their formulas in float64 torch."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch
from tests.nn.definitions import BOUNDS, GENERATOR, capped, compare, normal
from torch import Tensor

from whet.config.kept_tokens import KeptTokens
from whet.nn.linear_logprobs import Head, Kept, linear_logprobs
from whet.nn.scratch import cast_weight


@pytest.mark.parametrize(("n_rows", "vocab_size", "k"), [(1, 5, 0), (7, 300, 0), (520, 2049, 0), (520, 2049, 3)])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_linear_logprobs(n_rows, vocab_size, k, dtype, softcap):
    """Also with more tokens and more vocabulary entries than one tile, and with several targets of a row."""
    targets = torch.randint(0, vocab_size, (n_rows, k) if k else (n_rows,), generator=GENERATOR)

    def definition(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        logprobs = (capped(hidden @ weight.t() + bias, softcap) / 0.7).log_softmax(-1)
        return logprobs.gather(1, targets.view(n_rows, -1)).view(targets.shape)

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        def rows(first: int, n: int) -> Tensor:
            return cast_weight(weight[first : first + n], dtype)

        head = Head(rows, (vocab_size, 40), bias, dtype, weight)
        head.softcap = softcap
        logprobs, entropy, _ = linear_logprobs(hidden, head, targets, 0.7, True)
        every = (capped(hidden @ weight.t() + bias, softcap) / 0.7).double().log_softmax(-1)
        assert entropy is not None
        torch.testing.assert_close(entropy.double(), -(every.exp() * every).sum(1), rtol=1e-3, atol=1e-4)
        return logprobs

    inputs = [normal(n_rows, 40), normal(vocab_size, 40) / 8, normal(vocab_size)]
    compare(function, definition, inputs, {torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype])


@pytest.mark.parametrize(("n_rows", "vocab_size"), [(1, 5), (7, 300), (520, 4100)])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("confidence", "softcap"), [(0.0, 0.0), (12.0, 0.0), (0.0, 1.5), (12.0, 20.0)])
def test_gradient_of_hidden_states_under_a_frozen_head(n_rows, vocab_size, dtype, confidence, softcap):
    """Checked row by row, also for almost certain tokens, whose gradient is a small difference of large numbers."""
    targets = torch.randint(0, vocab_size, (n_rows,), generator=GENERATOR)
    hidden, weight, bias = normal(n_rows, 40), normal(vocab_size, 40) / 8, normal(vocab_size)
    weight, hidden = weight.to(dtype), hidden.to(dtype)
    hidden += confidence * weight[targets]
    scale = normal(n_rows)

    exact = hidden.double().requires_grad_()
    logits = capped(exact @ weight.double().t() + bias.double(), softcap)
    definition = (logits / 0.7).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (definition * scale).sum().backward()

    x = hidden.clone().requires_grad_()
    head = Head(lambda first, n: weight[first : first + n], (vocab_size, 40), bias, dtype)
    head.softcap = softcap
    logprobs, entropy, _ = linear_logprobs(x, head, targets, 0.7, True)
    (logprobs * scale).sum().backward()
    with torch.no_grad():
        again = linear_logprobs(x, head, targets, 0.7, True)
    assert torch.equal(logprobs, again[0]) and torch.equal(cast(Tensor, entropy), cast(Tensor, again[1]))
    torch.testing.assert_close(logprobs.double(), definition.detach(), rtol=1e-4, atol=1e-5)
    error = (cast(Tensor, x.grad).double() - cast(Tensor, exact.grad)).norm(dim=1) / cast(Tensor, exact.grad).norm(
        dim=1
    )
    assert error.max() < {torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]


@pytest.mark.parametrize("trains", [True, False], ids=["head trains", "head is frozen"])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_log_probs_over_kept_tokens(trains, dtype, softcap):
    """Sets of ids, of a bitmap and the whole vocabulary, over several tiles."""
    n_rows, vocab_size = 530, 2100
    rng = np.random.default_rng(2)
    shares = np.array([0.001, 0.3, 1.0])[np.arange(n_rows) % 3]
    mask = rng.random((n_rows, vocab_size)) < shares[:, None]
    targets = torch.randint(0, vocab_size, (n_rows,), generator=GENERATOR)
    mask[np.arange(n_rows), targets.numpy()] = True
    sets = KeptTokens.from_ids([np.flatnonzero(row) for row in mask], vocab_size)
    kept = Kept(torch.from_numpy(sets.offsets), torch.from_numpy(sets.words), vocab_size)
    dropped = ~torch.from_numpy(mask)

    def every(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        logits = capped(hidden @ weight.t() + bias, softcap) / 0.7
        return logits.masked_fill(dropped, -torch.inf).log_softmax(-1)

    def definition(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return every(hidden, weight, bias).gather(1, targets[:, None])[:, 0]

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        fixed = bias if trains else bias.detach()
        head = Head(
            lambda first, n: cast_weight(weight[first : first + n].detach(), dtype), (vocab_size, 40), fixed, dtype,
            weight if trains else None,
        )  # fmt: skip
        head.softcap = softcap
        logprobs, entropy, _ = linear_logprobs(hidden, head, targets, 0.7, True, kept)
        log_p = every(hidden, weight, bias).double().clamp(min=-1e4)
        assert entropy is not None
        torch.testing.assert_close(entropy.double(), -(log_p.exp() * log_p).sum(1), rtol=1e-3, atol=1e-4)
        return logprobs

    inputs = [normal(n_rows, 40), normal(vocab_size, 40) / 8, normal(vocab_size)]
    if not trains:
        inputs[1:] = [x.to(dtype).float() for x in inputs[1:]]
        weight, bias = inputs[1:]
        function_of, definition_of = (
            lambda hidden: function(hidden, weight, bias),
            lambda hidden: definition(hidden, weight.to(hidden), bias.to(hidden)),
        )
        compare(function_of, definition_of, inputs[:1], {torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype])
        return
    compare(function, definition, inputs, {torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype])


@pytest.mark.parametrize("trains", [True, False], ids=["head trains", "head is frozen"])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("softcap", "n_kept"), [(0.0, 0), (1.5, 0), (0.0, 7), (1.5, 7)])
def test_gradient_of_the_entropy(trains, dtype, softcap, n_kept):
    """With the log-probs' gradient, over several tiles of tokens and vocabulary, and over sets of tokens."""
    n_rows, vocab_size = 530, 2100
    targets = torch.randint(0, vocab_size, (n_rows,), generator=GENERATOR)
    dropped, kept = torch.zeros(n_rows, vocab_size, dtype=torch.bool), None
    if n_kept:
        ids = [
            np.unique([target, *range(i % 50, i % 50 + 40 * n_kept, 40)]) for i, target in enumerate(targets.tolist())
        ]
        sets = KeptTokens.from_ids(ids, vocab_size)
        kept = Kept(torch.from_numpy(sets.offsets), torch.from_numpy(sets.words), vocab_size)
        dropped[:] = True
        for row, chosen in zip(dropped, ids, strict=True):
            row[chosen] = False

    def definition(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        logits = capped(hidden @ weight.t() + bias, softcap) / 0.7
        log_p = logits.masked_fill(dropped, -1e9).log_softmax(-1)
        return torch.cat([log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)])

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows, fixed = weight.detach(), bias if trains else bias.detach()
        head = Head(
            lambda first, n: cast_weight(rows[first : first + n], dtype), (vocab_size, 40), fixed, dtype,
            weight if trains else None,
        )  # fmt: skip
        head.softcap = softcap
        logprobs, entropy, _ = linear_logprobs(hidden, head, targets, 0.7, True, kept, differentiable_entropy=True)
        return torch.cat([logprobs, cast(Tensor, entropy)])

    inputs = [normal(n_rows, 40), normal(vocab_size, 40) / 8, normal(vocab_size)]
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    if trains:
        compare(function, definition, inputs, tolerance)
        return
    weight, bias = (x.to(dtype).float() for x in inputs[1:])
    compare(
        lambda hidden: function(hidden, weight, bias),
        lambda hidden: definition(hidden, weight.to(hidden), bias.to(hidden)),
        inputs[:1],
        tolerance,
    )


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("trains", [True, False])
def test_mean_log_probs_of_the_vocabulary(dtype, softcap, trains):
    """Their value, and the gradient of a loss of both, over several tiles of tokens and vocabulary."""
    n_rows, vocab_size = 520, 2049
    targets = torch.randint(0, vocab_size, (n_rows,), generator=GENERATOR)
    scale = normal(n_rows)
    inputs = [normal(n_rows, 40), normal(vocab_size, 40) / 8, normal(vocab_size)]
    inputs[1:] = [x.to(dtype).float() for x in inputs[1:]]
    weight, bias = inputs[1:]

    def definition(hidden: Tensor, weight: Tensor = weight, bias: Tensor = bias) -> Tensor:
        log_p = (capped(hidden @ weight.to(hidden).t() + bias.to(hidden), softcap) / 0.7).log_softmax(-1)
        return 0.9 * log_p.gather(1, targets[:, None])[:, 0] + scale * log_p.mean(-1)

    def function(hidden: Tensor, weight: Tensor = weight, bias: Tensor = bias) -> Tensor:
        head = Head(
            lambda first, n: cast_weight(weight[first : first + n].detach(), dtype), (vocab_size, 40), bias, dtype,
            weight if trains else None,
        )  # fmt: skip
        head.softcap = softcap
        logprobs, _, mean = linear_logprobs(hidden, head, targets, 0.7, False, with_mean=True)
        assert mean is not None
        return 0.9 * logprobs + scale * mean

    compare(function, definition, inputs if trains else inputs[:1], BOUNDS[dtype])
