"""Reward: a step and an evaluation against TRL's, on torch modules and on a learner, resuming, rows, and errors."""

from __future__ import annotations

import collections
import copy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.raising import assert_raises
from tests.tiny import EOS, LLAMA, assert_resumes, tiny_llama, with_lora
from tests.trls import grad_norm

from whet.algorithms import DPO, SFT, Reward
from whet.engine import Engine
from whet.errors import CheckpointError, WhetError, WhetTypeError, WhetValueError
from whet.learner import Learner
from whet.models.packed_base import pack_base
from whet.models.sources.live import open_module
from whet.text.reward_model import RewardHead

ROWS = [
    {"prompt": [5, 6, 7], "chosen": [8, 9, 2], "rejected": [4, 2], "margin": 0.5},
    {"prompt": [3], "chosen": [7], "rejected": [9, 9, 9, 2]},
    {"prompt": [5, 9], "chosen": [4, 4], "rejected": [4, 5], "margin": 2.0},
]
GOOD = [{"prompt": [3 + i % 5], "chosen": [7, 4, 2], "rejected": [7, 5, 2]} for i in range(20)]
"""The token 4 or 5 decides."""


def classifier(seed: int = 0, head_std: float = 0.5, **options: Any) -> Any:
    """A random sequence classifier of Llama with one label."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForSequenceClassification(LlamaConfig(**{**LLAMA, "num_labels": 1, **options}))
        model.score.weight.normal_(std=head_std)
    return model


def learner_of(model: Any, **options: Any) -> Learner:
    settings = {"lora_rank": 4, "modules_to_save": ["score"], "compute": "float32", **options}
    return Learner(pack_base(open_module(model), weights="float32"), **settings)


def trls(model: Any, coefficient: float | None) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss and metrics of TRL's trainer on ROWS; of the trainer only the method that computes them."""
    from trl.trainer.reward_trainer import DataCollatorForPreference, RewardTrainer

    trainer = SimpleNamespace(
        model=model, args=SimpleNamespace(center_rewards_coefficient=coefficient), _total_train_tokens=0, _tp_size=1,
        accelerator=SimpleNamespace(gather_for_metrics=lambda x: x, gather=lambda x: x),
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
    )  # fmt: skip
    rows = [
        {
            **{f"{side}_ids": row["prompt"] + row[side] for side in ("chosen", "rejected")},
            "margin": row.get("margin", 0.0),
        }
        for row in ROWS
    ]
    inputs = DataCollatorForPreference(pad_token_id=model.config.pad_token_id)(rows)
    inputs["margin"] = inputs["margin"].double()
    loss: Any = RewardTrainer.compute_loss(trainer, model.train(), inputs)  # pyright: ignore[reportArgumentType]
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
@pytest.mark.parametrize("micro_batch_size", [0, 2])
@pytest.mark.parametrize("pad_token_id", [0, EOS])
def test_a_step_is_trls(coefficient: float, micro_batch_size: int, pad_token_id: int) -> None:
    """The last token that is not padding is scored: the one before EOS, if that is the padding token."""
    pytest.importorskip("trl", reason="pip install 'whet[peers]'")
    model = classifier(seed=3, pad_token_id=pad_token_id).double()
    expected_model = copy.deepcopy(model)
    settings = {"micro_batch_size": micro_batch_size, "center_rewards_coefficient": coefficient}
    trainer = Reward(model, learning_rate=0.0, **settings)
    metrics = trainer.train_step(ROWS)
    loss, expected = trls(expected_model, coefficient or None)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert metrics["grad_norm"] == pytest.approx(grad_norm(loss, expected_model), rel=1e-10)
    names = ("accuracy", "margin", "mean_reward", "min_reward", "max_reward", "num_tokens")
    found = {name: metrics[name] for name in names}
    assert found == pytest.approx({name: expected[name] for name in names}, rel=1e-7)  # TRL's accuracy is float32
    assert 0 < metrics["accuracy"] < 1
    assert trainer.evaluation_metrics(ROWS) == pytest.approx(
        {name: metrics[name] for name in ("accuracy", "margin", "mean_reward", "loss")}, rel=1e-12
    )
    assert trainer.evaluate(ROWS) == metrics["accuracy"]


@pytest.mark.parametrize("kind", ["whole", "lora"])
@pytest.mark.parametrize("pad_token_id", [0, EOS])
def test_kernels_compute_the_step_of_torch(kind: str, pad_token_id: int) -> None:
    """The LM head of a classifier is absent; the packed batch shares prompts."""
    model = classifier(pad_token_id=pad_token_id)
    if kind == "lora":
        model = with_lora(model, b_std=0.1, target_modules=["v_proj", "down_proj"], task_type="SEQ_CLS")
    names, norms = [], []
    for compute in ("torch", "float32"):
        trainer = Reward(copy.deepcopy(model), learning_rate=0.0, compute=compute)
        metrics = trainer.train_step(ROWS)
        names.append({name: metrics[name] for name in ("loss", "min_reward", "max_reward", "accuracy")})
        norms.append(metrics["grad_norm"])
    assert names[0] == pytest.approx(names[1], rel=1e-5) and norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0]


def test_a_learner_takes_the_step_of_modules() -> None:
    """Head and adapters of PEFT's model have the learner's values: so do rewards, loss and norm of the gradient."""
    base = tiny_llama()
    learner = learner_of(base)
    rng = np.random.default_rng(0)
    for parameter in learner.parameters:
        parameter[:] = rng.normal(size=parameter.shape) * 0.3
    learner.update()
    model = classifier()
    model.model.load_state_dict(base.model.state_dict())
    whole = with_lora(
        model, r=4, lora_alpha=4, task_type="SEQ_CLS",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    )  # fmt: skip
    named = {name: value for each in learner.trained for name, value in each.to_peft(each.parameters).items()}
    parameters = dict(whole.named_parameters())
    assert {name for name, parameter in parameters.items() if parameter.requires_grad} == set(named)
    with torch.no_grad():
        for name, value in named.items():
            parameters[name].copy_(torch.from_numpy(np.ascontiguousarray(value)))
    found = [Reward(each, learning_rate=0.0, compute="float32").train_step(ROWS) for each in (whole, learner)]
    for name in ("loss", "grad_norm", "accuracy", "margin", "min_reward", "mean_reward", "max_reward"):
        assert found[0][name] == pytest.approx(found[1][name], rel=2e-5), name


@pytest.mark.parametrize("kind", ["whole", "learner"])
def test_training_separates_two_kinds_of_rows(kind: str) -> None:
    model = classifier(head_std=0.0) if kind == "whole" else learner_of(tiny_llama())
    trainer = Reward(model, learning_rate=0.01, batch_size=5, compute="float32", center_rewards_coefficient=0.01)
    before = trainer.evaluation_metrics(GOOD)
    assert before["accuracy"] == 0 and before["loss"] == pytest.approx(np.log(2))  # a head of zeros
    trainer.train(GOOD, 30)
    after = trainer.evaluation_metrics(GOOD)
    assert after["accuracy"] == 1 and after["margin"] > 1 and after["loss"] < 0.3 and abs(after["mean_reward"]) < 1


@pytest.mark.parametrize("kind", ["whole", "learner"])
def test_a_run_resumes_to_the_bit(kind: str, tmp_path: Path) -> None:
    def make() -> Reward:
        options = {"lora_dropout": 0.2, "modules_to_save": ["norm", "score"]}
        model = classifier() if kind == "whole" else learner_of(tiny_llama(), **options)
        return Reward(model, learning_rate=0.01, batch_size=2, training_mode=True, compute="float32")

    assert_resumes(make, ROWS, tmp_path)


def test_saved_models_have_the_trainers_rewards(tmp_path: Path) -> None:
    """transformers opens the folder of modules, PEFT the folder of a learner on its base."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    base = tiny_llama()
    base.save_pretrained(tmp_path / "base")
    rows = [row["prompt"] + row["chosen"] for row in ROWS]

    def rewards(model: Any) -> list[float]:
        with torch.no_grad():
            return [model.eval()(torch.tensor([row])).logits.item() for row in rows]

    for kind, model in (("whole", classifier()), ("learner", learner_of(base))):
        trainer = Reward(model, learning_rate=0.01, compute="float32")
        trainer.train_step(ROWS)
        trainer.train_step(ROWS)
        trainer.save_pretrained(tmp_path / kind)
        expected = trainer.rewards([row["prompt"] for row in ROWS], [row["chosen"] for row in ROWS])
        opened = AutoModelForSequenceClassification.from_pretrained(
            tmp_path / ("whole" if kind == "whole" else "base"), num_labels=1
        )
        if kind == "learner":
            opened = PeftModel.from_pretrained(opened, tmp_path / kind)
        assert rewards(opened) == pytest.approx(expected.tolist(), abs=1e-5) and np.ptp(expected) > 1e-3
    again = Learner(pack_base(open_module(base), weights="float32"), adapter=tmp_path / "learner", compute="float32")
    found = Reward(again).rewards([row["prompt"] for row in ROWS], [row["chosen"] for row in ROWS])
    assert found.tolist() == expected.tolist()


def test_rows_without_information() -> None:
    """Ties are excluded; rows that are too long are errors, or dropped."""
    trainer = Reward(classifier(), learning_rate=0.0)
    ties = [{**ROWS[0], "rejected": ROWS[0]["chosen"]}, ROWS[1]]
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        metrics = trainer.train_step(ties)
    assert metrics["frac_ties"] == 0.5
    only = Reward(classifier(), learning_rate=0.0).train_step([ROWS[1]])
    assert metrics["loss"] == pytest.approx(only["loss"], rel=1e-6)
    assert_raises(WhetValueError, ("Reward", "65 tokens"), trainer.train_step, [{**ROWS[0], "chosen": [4] * 62}])
    exact = [{**ROWS[0], "chosen": [4] * 61}]  # the last token is an input, at the last position
    assert np.isfinite(trainer.train_step(exact)["loss"])
    assert np.isfinite(Reward(learner_of(tiny_llama())).train_step(exact)["loss"])


def test_wrong_models_and_settings_are_rejected() -> None:
    assert_raises(WhetTypeError, ("Reward", "LlamaForCausalLM", "num_labels=1"), Reward, tiny_llama())
    assert_raises(WhetTypeError, ("Reward", "2 labels"), Reward, classifier(num_labels=2))
    plain = learner_of(tiny_llama(), modules_to_save=())
    assert_raises(WhetValueError, ("Reward", "score"), Reward, plain)
    assert_raises(WhetValueError, ("score",), plain.rewards, [[3]], [[4]])
    assert_raises(WhetValueError, ("DPO", "Reward"), DPO, learner_of(tiny_llama()))
    for compute in ("torch", "float32"):
        step = SFT(classifier(), compute=compute).train_step
        assert_raises(WhetError, ("causal language model",), step, [[3, 4]], [[5]])
    trainer = Reward(classifier())
    assert_raises(WhetValueError, ("margin", "'big'"), trainer.train_step, [{**ROWS[0], "margin": "big"}])
    assert_raises(
        WhetValueError, ("RewardConfig", "center", "-1"), Reward, classifier(), center_rewards_coefficient=-1.0
    )
    assert_raises(WhetValueError, ("router_aux_loss_coef",), Reward, classifier(), router_aux_loss_coef=0.1)
    learner = learner_of(tiny_llama())
    learner.rewards([[3], [4]], [[4], []])
    assert_raises(WhetValueError, ("(3,)", "(2,)"), learner.backward, np.ones(3))


def test_adapters_of_a_reward_model_have_one_use(tmp_path: Path) -> None:
    base = tiny_llama()
    packed = pack_base(open_module(base), weights="float32")
    learner_of(base).save_pretrained(tmp_path / "reward")
    engine = Engine.from_base(packed)
    assert_raises(CheckpointError, ("reward model", "/score"), engine.add_adapter, tmp_path / "reward")


@pytest.mark.parametrize("case", ["llama", "gemma2", "granite"])
def test_rewards_of_families_are_the_engines_and_have_their_gradient(case: str) -> None:
    """Granite scales logits, which a reward model's head does not see: learner and engine agree."""
    from tests.engine.tiny_models import tiny_model

    learner = learner_of(tiny_model(case))
    rng = np.random.default_rng(0)
    for parameter in learner.parameters:
        parameter[:] = rng.normal(size=parameter.shape) * 0.3
    learner.update()
    prompts, completions = [[5, 6, 7], [5, 6, 7], [3]], [[8, 9], [4], [1, 2]]
    assert learner.head is not None
    engine = Engine.from_model(learner)
    rows = [prompt + ids for prompt, ids in zip(prompts, completions, strict=True)]
    expected = RewardHead(learner.head.parameters[0]).scores(engine.embed(rows))
    weight = rng.normal(size=3)

    def loss() -> float:
        return float(learner.rewards(prompts, completions, keep=False) @ weight)

    assert learner.rewards(prompts, completions).tolist() == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-4)
    learner.backward(weight)
    trained = learner.adapters[0]
    pairs = (trained.b, trained.grad_b), (learner.head.parameters[0], learner.head.gradients[0])
    for parameter, gradient in pairs:
        at = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
        values, step = [], 2e-3
        for sign in (1, -1):
            parameter[at] += sign * step
            learner.update()
            values.append(loss())
            parameter[at] -= sign * step
        assert (values[0] - values[1]) / (2 * step) == pytest.approx(gradient[at], rel=0.02)
