"""The balance loss of mixtures of experts in updates."""

from __future__ import annotations

import pytest
import torch
from tests.engine.tiny_models import tiny_model
from tests.raising import assert_raises
from tests.tiny import tiny_llama
from tests.training.trainers import PAIRS, PROMPTS, ROWS, ones

from whet import WhetValueError
from whet.algorithms import DPO, GRPO, SFT
from whet.learner import Learner
from whet.models.packed_base import pack_base
from whet.models.sources.live import open_module

COMPUTE = [pytest.param("torch", id="torch"), pytest.param("float32", id="kernels")]


def mixture(case: str = "qwen3_moe"):
    return tiny_model(case).requires_grad_(True)


def by_transformers(model, parts, coefficient):
    """Return the balance loss and the SFT loss of micro-batches of rows, and the gradients of both together."""
    total, balance, n_tokens = torch.zeros(()), 0.0, sum(len(row["completion"]) for part in parts for row in part)
    for part in parts:
        rows = [[*row["prompt"], *row["completion"]] for row in part]
        ids = torch.tensor([row[:-1] for row in rows])
        out = model(ids, output_router_logits=True)
        for row, each in zip(part, out.logits.log_softmax(-1), strict=True):
            first = len(row["prompt"]) - 1
            total = total - each[range(first, ids.shape[1]), row["completion"]].sum() / n_tokens
        balance = balance + out.aux_loss / len(parts)
    (total + coefficient * balance).backward()
    return balance.item(), total.item()


@pytest.mark.parametrize("setting", [None, 0.7])
@pytest.mark.parametrize("compute", COMPUTE)
def test_an_update_adds_the_mean_over_micro_batches(compute, setting):
    model, expected = mixture(), mixture()
    model.config.router_aux_loss_coef = 0.3
    coefficient = 0.3 if setting is None else setting
    settings = {"learning_rate": 0.0, "max_grad_norm": 0.0, "compute": compute, "training_mode": False}
    trainer = SFT(model, batch_size=4, micro_batch_size=2, router_aux_loss_coef=setting, **settings)
    metrics = trainer.train_step(ROWS[:4])
    balance, loss = by_transformers(expected, [ROWS[:2], ROWS[2:4]], coefficient)
    assert metrics["balance_loss"] == pytest.approx(balance, rel=1e-5)
    assert metrics["loss"] == pytest.approx(loss + coefficient * balance, rel=1e-5)
    norm = torch.nn.utils.get_total_norm([p.grad for p in expected.parameters()]).item()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("compute", COMPUTE)
def test_routers_learn_to_use_the_experts_equally(compute):
    model = mixture()
    trainer = SFT(model, batch_size=8, compute=compute, learning_rate=0.01, router_aux_loss_coef=10.0)
    balances = [trainer.train_step(ROWS[:8])["balance_loss"] for _ in range(20)]
    assert balances[-1] < balances[0] - 0.1


def test_other_algorithms_have_it_too():
    pairs = DPO(mixture(), batch_size=4, compute="float32").train_step(PAIRS[:4])
    k = mixture().config.num_experts_per_tok
    assert 0.5 * k < pairs["balance_loss"] < 3 * k
    grpo = GRPO(mixture(), reward_fn=ones, group_size=4, batch_size=2, max_new_tokens=4, compute="float32")
    assert 0.5 * k < grpo.train_step(PROMPTS[:2])["balance_loss"] < 3 * k


def test_zero_and_models_without_a_coefficient_have_none():
    assert "balance_loss" not in SFT(mixture(), router_aux_loss_coef=0.0).train_step(ROWS[:2])
    assert "balance_loss" not in SFT(mixture("lfm2_moe")).train_step(ROWS[:2])


def test_a_coefficient_without_effect_is_refused():
    words = "router_aux_loss_coef", "no effect"
    assert_raises(WhetValueError, words, SFT, tiny_llama(), router_aux_loss_coef=0.1)
    assert_raises(WhetValueError, words, SFT, mixture("lfm2_moe"), router_aux_loss_coef=0.1)
    learner = Learner(pack_base(open_module(tiny_model("qwen3_moe"))), lora_rank=2)
    assert_raises(WhetValueError, ("router_aux_loss_coef", "Learner"), SFT, learner, router_aux_loss_coef=0.1)
