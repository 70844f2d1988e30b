"""Distill: a step by hand on torch modules and on a learner, teachers, learning, evaluation, resuming, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.cli.conftest import tiny_model  # noqa: F401
from tests.raising import assert_raises
from tests.tiny import (
    EOS,
    ScriptedEngine,
    assert_resumes,
    assert_same_weights,
    fours,
    letters_tokenizer,
    tiny_llama,
    token_logprobs,
)

from whet.algorithms import Distill
from whet.engine import Engine
from whet.errors import WhetTypeError, WhetValueError
from whet.learner import Learner
from whet.losses import distillation_loss
from whet.models.packed_base import pack_base
from whet.models.sources.live import open_module
from whet.rollout.teacher import ServerTeacher, open_teacher
from whet.serve import ServedModel, make_app
from whet.serve.threads import serving

PROMPTS = [[5, 6], [7], [8]]
GROUPS = [[[4, EOS], [9, 9, EOS]], [[10], [4, 4]], [[6, EOS], [6, 7, EOS]]]


@pytest.fixture(scope="module")
def teacher() -> Engine:
    return Engine.from_model(tiny_llama(seed=3), weights="float32")


def make(model: Any, teacher: Any, **settings: Any) -> Distill:
    settings = {"learning_rate": 0.02, "engine": ScriptedEngine(GROUPS), "max_new_tokens": 4, "n": 2} | settings
    return Distill(model, teacher=teacher, **settings)


@pytest.mark.parametrize("micro_batch_size", [0, 4])
def test_a_step_is_autograds(teacher: Engine, micro_batch_size: int) -> None:
    model, expected, other = tiny_llama(), tiny_llama(), tiny_llama(seed=3)
    settings = {"learning_rate": 0.0, "compute": "float32", "temperature": 0.7, "micro_batch_size": micro_batch_size}
    metrics = make(model, teacher, **settings).train_step(PROMPTS)
    rows = [(prompt, ids) for prompt, group in zip(PROMPTS, GROUPS, strict=True) for ids in group]
    own = torch.cat([token_logprobs(expected, *row, temperature=0.7) for row in rows])[None].double()
    scored = torch.cat([token_logprobs(other, *row, temperature=0.7) for row in rows])[None].double().detach()
    every = torch.ones_like(own, dtype=torch.bool)
    value, found = distillation_loss(own, scored, every)
    value.backward()
    norm = torch.stack([each.grad.norm() for each in expected.parameters() if each.grad is not None]).norm()
    assert metrics["loss"] == pytest.approx(value.item(), abs=1e-5) == pytest.approx(found["reverse_kl"], abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["teacher_logprob"] == pytest.approx(scored.mean().item(), rel=1e-5)


def kl_on(model: Any, other: Any) -> float:
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 4, 3]])
    with torch.no_grad():
        own, teachers = (each(ids).logits.log_softmax(-1) for each in (model, other))
    return float((own.exp() * (own - teachers)).sum(-1).mean())


def test_it_learns_the_teachers_distribution(teacher: Engine) -> None:
    model, other = tiny_llama(), tiny_llama(seed=3)
    before = kl_on(model, other)
    trainer = make(model, teacher, engine="auto", max_new_tokens=6, n=8, learning_rate=0.01)
    first = trainer.evaluate(PROMPTS)
    history = [trainer.train_step([[5], [6], [7], [8], [9, 10]])["reverse_kl"] for _ in range(60)]
    assert np.mean(history[-5:]) < 0.35 * np.mean(history[:5])
    assert kl_on(model, other) < 0.5 * before
    assert trainer.evaluate(PROMPTS) < 0.5 * first


def test_a_learner_takes_the_step_of_modules(teacher: Engine) -> None:
    model = tiny_llama()
    whole = make(model, teacher, learning_rate=0.0, compute="float32").train_step(PROMPTS)
    learner = Learner(pack_base(open_module(model), weights="float32"), lora_rank=4, compute="float32")
    found = make(learner, teacher, learning_rate=0.05).train_step(PROMPTS)
    assert found["loss"] == pytest.approx(whole["loss"], abs=1e-5) and found["grad_norm"] > 0


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_learner_takes_the_step_of_whole_distributions(beta: float) -> None:
    model, other = tiny_llama(), tiny_llama(seed=3)
    learner, teacher = (
        Learner(pack_base(open_module(each), weights="float32"), lora_rank=4, compute="float32")
        for each in (model, other)
    )
    settings = {"divergence": "full", "beta": beta, "temperature": 0.7}
    trainer = make(learner, teacher, **settings)
    metrics = trainer.train_step(PROMPTS)
    found = []
    for prompt, group in zip(PROMPTS, GROUPS, strict=True):
        for ids in group:
            p, q = (
                (each(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double() / 0.7).log_softmax(-1)
                for each in (model, other)
            )
            m = ((1 - beta) * p.exp() + beta * q.exp()).log()
            sides = beta * q.exp() * (q - m) + (1 - beta) * p.exp() * (p - m)
            found.append({0.0: q.exp() * (q - p), 1.0: p.exp() * (p - q)}.get(beta, sides).sum(-1))
    assert metrics["loss"] == pytest.approx(torch.cat(found).mean().item(), rel=1e-5) and metrics["grad_norm"] > 0
    history = [trainer.train_step(PROMPTS)["divergence"] for _ in range(30)]
    assert history[-1] < 0.7 * metrics["divergence"]
    assert trainer.evaluate(PROMPTS) < 0.9 * make(
        Learner(pack_base(open_module(model), weights="float32"), lora_rank=4, compute="float32"), teacher, **settings
    ).evaluate(PROMPTS)


def test_rewards_are_metrics_only(teacher: Engine) -> None:
    scored, plain = (make(tiny_llama(), teacher, **options) for options in ({"reward_fn": fours}, {}))
    metrics, others = scored.train_step(PROMPTS), plain.train_step(PROMPTS)
    assert metrics["mean_reward"] == pytest.approx(np.mean([1, 0, 0, 2, 0, 0])) and "mean_reward" not in others
    assert_same_weights(scored.model, plain.model)
    assert scored.last_completions[3]["reward"] == 2


@pytest.mark.parametrize("rows", [PROMPTS, [{"prompt": ids} for ids in PROMPTS]])
def test_evaluation_reads_an_iterator_once(teacher: Engine, rows: Any) -> None:
    trainer = make(tiny_llama(), teacher, engine="auto", reward_fn=fours, batch_size=2)
    found = trainer.evaluation_metrics(rows)
    assert list(found) == ["mean_reward", "reverse_kl"] and found["reverse_kl"] != 0
    assert trainer.evaluation_metrics(iter(rows)) == found


def test_a_run_resumes_to_the_bit(teacher: Engine, tmp_path: Any) -> None:
    settings = {"engine": "auto", "batch_size": 2}
    assert_resumes(lambda: make(tiny_llama(), teacher, **settings), PROMPTS, tmp_path, teacher=teacher)


def test_teachers_behind_a_url(tiny_model: Any) -> None:  # noqa: F811
    served = ServedModel.load(str(tiny_model), name="tiny", weights="float32")
    with serving(make_app(served)) as url, Engine.from_pretrained(tiny_model, weights="float32") as engine:
        server = ServerTeacher(f"{url}/v1")
        rows, start = [[5, 6, 7, 9], [8, 4]], [2, 1]
        found = server.logprobs(rows, start=start, temperature=1.0)
        for row, expected in zip(found, engine.logprobs(rows, start=start), strict=True):
            assert np.allclose(row, expected, atol=1e-6) and len(row) == len(expected)
        assert_raises(WhetValueError, ("temperature", "0.5"), server.logprobs, rows, start=start, temperature=0.5)
        assert_raises(WhetValueError, ("serves tiny", "#NAME"), ServerTeacher, f"{url}/v1#other")
        assert_raises(WhetValueError, ("another tokenizer",), open_teacher, f"{url}/v1", letters_tokenizer(), "Distill")
        open_teacher(f"{url}/v1#tiny", served.tokenizer, "Distill")
    assert_raises(WhetValueError, ("does not answer",), ServerTeacher, f"{url}/v1")


def test_teachers_of_another_vocabulary_are_rejected(tiny_model: Any) -> None:  # noqa: F811
    assert_raises(
        WhetValueError, ("another tokenizer", "token "), open_teacher, tiny_model, letters_tokenizer(), "Distill"
    )
    own = open_teacher(tiny_model, None, "Distill")
    assert open_teacher(tiny_model, own.tokenizer, "Distill").tokenizer  # pyright: ignore[reportAttributeAccessIssue]


def test_invalid_arguments_are_rejected(teacher: Engine, tmp_path: Any) -> None:
    assert_raises(WhetTypeError, ("Distill", "teacher is missing"), Distill, tiny_llama())
    assert_raises(WhetTypeError, ("teacher is 3", "whet.Engine"), make, tiny_llama(), 3)
    assert_raises(WhetValueError, ("nothing", "does not exist"), make, tiny_llama(), tmp_path / "nothing")
    assert_raises(WhetValueError, ("ref_model",), Distill, tiny_llama(), tiny_llama(), teacher)
    assert_raises(WhetValueError, ("top_k is 5", "whole distributions"), make, tiny_llama(), teacher, top_k=5)
    assert_raises(WhetValueError, ("regex is", "whole distributions"), make, tiny_llama(), teacher, regex="a+")
    full = {"divergence": "full"}
    assert_raises(WhetValueError, ("'full'", "Learner", "'sampled'"), make, tiny_llama(), teacher, **full)
    learner = Learner(pack_base(open_module(tiny_llama())), lora_rank=2)
    assert_raises(WhetTypeError, ("teacher is", "needs its weights"), make, learner, teacher, **full)
    assert_raises(WhetValueError, ("beta is 0.5", "'sampled'"), make, tiny_llama(), teacher, beta=0.5)
    assert_raises(WhetValueError, ("beta is 2", "0 to 1"), make, learner, learner, beta=2.0, **full)
    assert_raises(WhetValueError, ("reward_policy", "no reward"), make, tiny_llama(), teacher, reward_policy="zero")
