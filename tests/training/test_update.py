"""Optimizer updates: schedules, clipping, master weights, skipped steps, accumulated micro-batches."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from tests.raising import assert_raises, mentions
from tests.tiny import (
    assert_same_weights,
    weights,
)
from tests.training.trainers import PAIRS, ROWS, Net, llama, narrow, sft

from whet.algorithms import DPO, SFT
from whet.config import SFTConfig, learning_rate_at
from whet.errors import NonFiniteError, WhetValueError
from whet.nn.causal_lm import completion_logprobs
from whet.training.callbacks import Callback


def test_the_schedule_by_hand():
    linear = SFTConfig(learning_rate=1.0, lr_schedule="linear", warmup_steps=2)
    rates = [learning_rate_at(step, linear, 6) for step in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    cosine = SFTConfig(learning_rate=2.0, lr_schedule="cosine")
    assert [learning_rate_at(s, cosine, 4) for s in range(5)] == pytest.approx(
        [2, 1 + math.sqrt(0.5), 1, 1 - math.sqrt(0.5), 0]
    )
    constant = SFTConfig(learning_rate=3.0, warmup_steps=3)
    assert [learning_rate_at(step, constant, 0) for step in range(5)] == pytest.approx([1, 2, 3, 3, 3])


def test_updates_use_the_scheduled_rate():
    trainer = sft(lr_schedule="linear", warmup_steps=1, learning_rate=0.4)
    seen = []

    class Watch(Callback):
        def on_step_end(self, trainer, metrics):
            seen.append((metrics["learning_rate"], trainer.policy.optimizer.param_groups[0]["lr"]))

    trainer.callbacks.append(Watch())
    trainer.train(ROWS, steps=5)
    assert [rate for rate, _ in seen] == pytest.approx([0.4, 0.4, 0.3, 0.2, 0.1])
    assert all(reported == used for reported, used in seen)


def test_a_decaying_schedule_requires_a_length():
    with pytest.raises(WhetValueError, match=mentions("lr_schedule", "'cosine'", "schedule_steps")):
        sft(lr_schedule="cosine").train_step(ROWS[:2])
    assert sft(lr_schedule="cosine", schedule_steps=4).train_step(ROWS[:2])["learning_rate"] == 0.01


@pytest.mark.parametrize("make_model", [Net, llama])
@pytest.mark.parametrize("compute", ["auto", "torch"])
def test_weight_decay_applies_to_the_same_parameters_as_transformers(make_model, compute):
    runs = [sft(make_model(), weight_decay=decay, compute=compute) for decay in (0.0, 0.5)]
    for trainer in runs:
        trainer.train_step(ROWS[:2])
    before, after = (dict(trainer.model.named_parameters()) for trainer in runs)
    decayed = {name for name, parameter in after.items() if not torch.equal(parameter, before[name])}
    expected = set(transformers.Trainer.get_decay_parameter_names(cast(Any, None), runs[0].model)) & set(after)
    assert decayed == expected and expected and expected != set(after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_train_with_master_weights(dtype):
    """Updates are smaller than half a unit in the last place of most weights."""
    runs = [sft(llama().to(kind), learning_rate=1e-4, compute="torch") for kind in (dtype, torch.float32)]
    narrow, wide = runs
    with torch.no_grad():  # equal initial weights
        for mine, theirs in zip(wide.policy.trainable.values(), narrow.policy.trainable.values(), strict=True):
            mine.copy_(theirs)
    start = weights(wide.model)
    curves = []
    for trainer in runs:
        losses = []
        trainer.callbacks.append(recorder(losses))
        trainer.train(ROWS, steps=15)
        curves.append(losses)
    moved = [(w.detach() - start[name]).norm() for name, w in wide.policy.trainable.items()]
    for (name, p), distance in zip(narrow.policy.trainable.items(), moved, strict=True):
        master = narrow.policy.optimizer.state[p]["master"]
        assert torch.equal(master.to(dtype), p)
        assert (master - wide.policy.trainable[name]).norm() < 0.2 * distance
    assert curves[0] == pytest.approx(curves[1], rel=5e-3)


def test_master_weights_count_as_moments():
    trainer = sft(narrow(), compute="torch")
    trainer.train_step(ROWS[:2])
    parts = [(part, n_bytes) for part, _, n_bytes in trainer.memory_blocks()]
    n_weights = sum(p.numel() for p in trainer.policy.trainable.values())
    assert sum(n for part, n in parts if part == "moments") == 12 * n_weights + 4 * len(trainer.policy.trainable)
    assert sum(n for part, n in parts if part == "weights") >= 2 * n_weights


def recorder(losses):
    class Losses(Callback):
        def on_step_end(self, trainer, metrics):
            losses.append(metrics["loss"])

    return Losses()


def test_gradients_are_clipped_to_the_norm():
    """With betas 0 and a large epsilon, AdamW's step is lr * gradient / epsilon, which reveals the gradient."""
    model = Net()
    trainer = sft(model, adam_beta1=0.0, adam_beta2=0.0, adam_epsilon=1e6, learning_rate=1e6, max_grad_norm=0.01)
    before = weights(model)
    metrics = trainer.train_step(ROWS[:3])
    step = torch.cat([(before[name] - value).ravel() for name, value in weights(model).items()])
    assert metrics["grad_norm"] > 0.05  # before clipping
    assert step.norm().item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("algorithm", [SFT, DPO])
def test_accumulated_micro_batches_equal_one_batch(algorithm):
    rows = (ROWS if algorithm is SFT else PAIRS)[:8]
    runs = []
    for micro_batch_size in (0, 1, 3):
        trainer = algorithm(Net().double(), learning_rate=0.01, micro_batch_size=micro_batch_size)
        losses = [trainer.train_step(rows)["loss"] for _ in range(4)]
        runs.append((losses, weights(trainer.model)))
    for losses, values in runs[1:]:
        assert losses == pytest.approx(runs[0][0], rel=1e-10)
        for name, value in values.items():
            torch.testing.assert_close(value, runs[0][1][name], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_steps_are_skipped(where, bad):
    class Poisoned(Net):
        poison = False

        def forward(self, input_ids):
            logits = super().forward(input_ids)
            if self.poison and where == "loss":
                return logits + bad
            if self.poison:
                logits.register_hook(lambda gradient: gradient * bad)
            return logits

    model, clean = Poisoned(), Net()
    trainer, reference = sft(model), sft(clean)
    trainer.train_step(ROWS[:3])
    reference.train_step(ROWS[:3])
    model.poison = True
    metrics = trainer.train_step(ROWS[3:6])
    assert metrics["skipped_steps"] == 1 and trainer.step == 2 and trainer.n_updates == 1
    assert_same_weights(model, clean)
    model.poison = False
    trainer.train_step(ROWS[6:9])
    reference.train_step(ROWS[6:9])
    assert_same_weights(model, clean)  # moments are unchanged too


def test_too_many_consecutive_skipped_steps_are_an_error():
    model = Net()
    trainer = sft(model, max_skipped_steps=3)
    good = weights(model)
    for _ in range(2):
        with torch.no_grad():
            model.head.bias.fill_(math.nan)
        trainer.train_step(ROWS[:3])
        trainer.train_step(ROWS[:3])
        with torch.no_grad():
            model.head.bias.copy_(good["head.bias"])
        trainer.train_step(ROWS[:3])  # a finite step resets the count
    with torch.no_grad():
        model.head.bias.fill_(math.nan)
    trainer.train_step(ROWS[:3])
    trainer.train_step(ROWS[:3])
    with pytest.raises(NonFiniteError, match=mentions("SFT", "3 updates", "not finite")):
        trainer.train_step(ROWS[:3])
    assert trainer.skipped_steps == 7


def test_only_parameters_that_require_grad_are_trained():
    model = Net()
    model.embedding.requires_grad_(False)
    before = weights(model)
    sft(model).train_step(ROWS[:3])
    after = weights(model)
    assert torch.equal(before["embedding.weight"], after["embedding.weight"])
    assert not torch.equal(before["head.weight"], after["head.weight"])
    assert_raises(WhetValueError, ("SFT", "requires grad"), sft, Net().requires_grad_(False))


def test_rows_are_independent_of_the_batch():
    for make in (Net, llama):
        model, trainer = make(), sft(make(), compute="float32" if make is llama else "auto")
        with torch.no_grad():
            logprobs = [completion_logprobs(model, [r["prompt"]], [r["completion"]]).logprobs for r in ROWS[:4]]
        together = trainer.logprobs([r["prompt"] for r in ROWS[:4]], [r["completion"] for r in ROWS[:4]])
        np.testing.assert_allclose(together, torch.cat(logprobs), rtol=1e-5, atol=1e-6)
