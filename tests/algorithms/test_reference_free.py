"""CPO, SimPO and ORPO: a step by hand on torch modules and on a learner, evaluation, resuming, ties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.raising import assert_raises
from tests.tiny import assert_resumes, tiny_llama

from whet.algorithms import CPO, ORPO, SimPO
from whet.errors import WhetTypeError, WhetValueError
from whet.learner import Learner
from whet.losses import cpo_loss, orpo_loss, simpo_loss
from whet.models.packed_base import pack_base
from whet.models.sources.live import open_module

ROWS = [([5, 6, 7], [8, 9, 2], [4]), ([3], [7], [6, 6, 5, 2]), ([5, 9], [4, 4], [7, 3]), ([8], [6, 2], [9, 3, 4])]
METHODS = [(CPO, cpo_loss, {"nll_weight": 0.5}), (SimPO, simpo_loss, {"margin": 0.7}), (ORPO, orpo_loss, {"beta": 0.3})]


def sums(model: Any, side: int) -> torch.Tensor:
    found = []
    for row in ROWS:
        prompt, ids = row[0], row[side]
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double()
        found.append(logits.log_softmax(-1)[range(len(ids)), ids].sum())
    return torch.stack(found)


@pytest.mark.parametrize(("method", "loss", "options"), METHODS)
@pytest.mark.parametrize("micro_batch_size", [0, 3])
def test_a_step_is_autograds(method: Any, loss: Any, options: Any, micro_batch_size: int) -> None:
    model, expected = tiny_llama(), tiny_llama()
    trainer = method(model, learning_rate=0.0, compute="float32", micro_batch_size=micro_batch_size, **options)
    metrics = trainer.train_step(ROWS)
    lengths = {
        "chosen_lengths": torch.tensor([3, 1, 2, 2]), "rejected_lengths": torch.tensor([1, 4, 2, 3])
    }  # fmt: skip
    value, expected_metrics = loss(sums(expected, 1), sums(expected, 2), **lengths, **options)
    value.backward()
    assert metrics["loss"] == pytest.approx(value.item(), rel=1e-5)
    norm = torch.stack([each.grad.norm() for each in expected.parameters() if each.grad is not None]).norm()
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert {name: metrics[name] for name in expected_metrics} == pytest.approx(expected_metrics, rel=1e-4)
    assert trainer.evaluate(ROWS) == pytest.approx(value.item(), rel=1e-5)


@pytest.mark.parametrize(("method", "loss", "options"), METHODS)
def test_a_learner_takes_the_step_of_modules(method: Any, loss: Any, options: Any) -> None:
    model = tiny_llama()
    whole = method(model, learning_rate=0.0, compute="float32", **options).train_step(ROWS)
    learner = Learner(pack_base(open_module(model), weights="float32"), lora_rank=2, compute="float32")
    found = method(learner, learning_rate=0.01, **options)
    metrics = found.train_step(ROWS)
    assert metrics["loss"] == pytest.approx(whole["loss"], rel=1e-5) and metrics["grad_norm"] > 0
    losses = [found.train_step(ROWS)["loss"] for _ in range(30)]
    assert losses[-1] < metrics["loss"]


@pytest.mark.parametrize(("method", "loss", "options"), METHODS)
def test_a_run_resumes_to_the_bit(method: Any, loss: Any, options: Any, tmp_path: Any) -> None:
    settings = {"learning_rate": 0.01, "batch_size": 2, **options}
    assert_resumes(lambda: method(tiny_llama(), **settings), ROWS, tmp_path)


def test_ties_are_excluded_and_counted() -> None:
    trainer = SimPO(tiny_llama(), learning_rate=0.0, compute="float32")
    tie = ([5], [6, 7], [6, 7])
    with pytest.warns(UserWarning, match="SimPO: in 1 of the 5 pairs"):
        metrics = trainer.train_step([*ROWS, tie])
    assert metrics["frac_ties"] == 0.2
    assert metrics["loss"] == pytest.approx(trainer.train_step(ROWS)["loss"], rel=1e-6)
    assert_raises(WhetValueError, ("SimPO", "every pair"), trainer.evaluate, [tie])


def test_a_reference_and_wrong_settings_are_rejected() -> None:
    assert_raises(WhetValueError, ("SimPO", "ref_model"), SimPO, tiny_llama(), tiny_llama())
    assert_raises(WhetValueError, ("SimPOConfig", "beta", "0"), SimPO, tiny_llama(), beta=0.0)
    assert_raises(WhetValueError, ("CPOConfig", "'ipo'"), CPO, tiny_llama(), loss_type="ipo", label_smoothing=0.1)
    assert_raises(WhetValueError, ("CPOConfig", "loss_type", "robust"), CPO, tiny_llama(), loss_type="robust")
    assert_raises(WhetTypeError, ("ORPO", "batch"), ORPO(tiny_llama()).train_step, 3)
    assert np.isfinite(ORPO(tiny_llama(), beta=0.0).train_step(ROWS)["loss"])
