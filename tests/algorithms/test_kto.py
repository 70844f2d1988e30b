"""KTO: a step and an evaluation against TRL's, on torch modules and on a learner, resuming, rows, and errors."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from tests.raising import assert_raises
from tests.tiny import TinyModel, assert_resumes, changed, tiny_llama
from tests.trls import grad_norm, trainer_of

from whet.algorithms import KTO
from whet.errors import WhetTypeError, WhetValueError
from whet.learner import Learner
from whet.models.packed_base import pack_base
from whet.models.sources.live import open_module

ROWS = [
    ([5, 6, 7], [8, 9, 2], True),
    ([3], [7], False),
    ([5, 9], [4, 4], False),
    ([8], [6, 2], True),
    ([4], [3, 5, 2], True),
]
OPTIONS: list[dict[str, Any]] = [
    {"beta": 0.8},
    {"beta": 0.3, "desirable_weight": 0.5, "undesirable_weight": 2.0},
    {"loss_type": "apo_zero_unpaired", "beta": 0.6},
]


def trls(model: Any, ref_model: Any, options: dict[str, Any]) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss and metrics of TRL's trainer on ROWS; of the trainer only the methods that compute them."""
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference, KTOTrainer

    settings = {"loss_type": "kto", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0} | options
    trainer = trainer_of(model, ref_model, calculate_KL=settings["loss_type"] == "kto", **settings)
    trainer._compute_kl_logps = lambda *given: KTOTrainer._compute_kl_logps(trainer, *given)
    examples = [
        {"prompt_ids": prompt, "completion_ids": ids, "label": label, "KL_completion_ids": ROWS[i - 1][1]}
        for i, (prompt, ids, label) in enumerate(ROWS)
    ]
    inputs = DataCollatorForUnpairedPreference(pad_token_id=0)(examples)
    loss = KTOTrainer._compute_loss(trainer, trainer.model, inputs, False)
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("micro_batch_size", [0, 2])
def test_a_step_is_trls(options: dict[str, Any], micro_batch_size: int) -> None:
    pytest.importorskip("trl", reason="pip install 'whet[peers]'")
    reference = TinyModel()
    model = changed(reference)
    expected_model = copy.deepcopy(model)
    trainer = KTO(model, reference, learning_rate=0.0, micro_batch_size=micro_batch_size, **options)
    metrics = trainer.train_step(ROWS)
    loss, expected = trls(expected_model, reference, options)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert metrics["grad_norm"] == pytest.approx(grad_norm(loss, expected_model), rel=1e-10)
    names = [name for name in expected if name in metrics and name.startswith(("rewards/", "logps/", "kl"))]
    assert len(names) >= 5 and ("kl" in metrics) is ("loss_type" not in options)
    assert {name: metrics[name] for name in names} == pytest.approx({name: expected[name] for name in names}, rel=1e-12)
    assert trainer.evaluation_metrics(ROWS) == pytest.approx(
        {name: metrics[name] for name in ("loss", "rewards/margins", "kl") if name in metrics}, rel=1e-12
    )


def test_a_learner_takes_the_step_of_modules() -> None:
    model = tiny_llama()
    whole = KTO(model, learning_rate=0.0, compute="float32").train_step(ROWS)
    learner = Learner(pack_base(open_module(model), weights="float32"), lora_rank=2, compute="float32")
    found = KTO(learner, learning_rate=0.02)
    metrics = found.train_step(ROWS)
    assert metrics["loss"] == pytest.approx(whole["loss"], rel=1e-5) == 0.5 and metrics["grad_norm"] > 0
    last = [found.train_step(ROWS) for _ in range(30)][-1]
    assert last["loss"] < 0.49 and last["rewards/margins"] > 0 and last["kl"] > 0


def test_a_run_resumes_to_the_bit(tmp_path: Any) -> None:
    settings = {"learning_rate": 0.01, "batch_size": 2, "beta": 1.0}
    assert_resumes(lambda: KTO(tiny_llama(), **settings), ROWS, tmp_path)


def test_forms_of_a_batch_are_equal() -> None:
    columns = tuple(map(list, zip(*ROWS, strict=True)))
    names = ("prompt", "completion", "label")
    forms = [(ROWS,), columns, (dict(zip(names, columns, strict=True)),), (*columns[:2], np.array(columns[2]))]
    forms.append((*columns[:2], torch.tensor(columns[2]).int()))
    model = tiny_llama()
    found = [KTO(model, learning_rate=0.0, compute="float32").train_step(*form) for form in forms]
    assert len({each["logps/chosen"] for each in found}) == 1 and found[0]["frac_desirable"] == 0.6
    loader = [columns, tuple(each[:2] for each in columns)]  # ready batches
    assert KTO(model, learning_rate=0.0, compute="float32").train(loader)["frac_desirable"] in (0.5, 0.6)


def test_baselines_fit_into_the_models_positions() -> None:
    """The prompt of one row and the completion of the other have more than 8 tokens together."""
    model = tiny_llama(max_position_embeddings=8)
    rows = [([3] * 6, [4, 2], True), ([5], [6] * 7, False)]
    assert KTO(model, compute="float32").train_step(rows)["loss"] == pytest.approx(0.5)
    assert_raises(WhetValueError, ("KTO", "9 tokens"), KTO(model).train_step, [([3] * 7, [4, 2], True), rows[1]])
    trainer = KTO(model, truncation="drop")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        metrics = trainer.train_step([([3] * 7, [4, 2], True), rows[1]])
    assert metrics["frac_dropped"] == 0.5 and metrics["loss"] == 0 and trainer.n_updates == 0


def test_wrong_rows_and_settings_are_rejected() -> None:
    trainer = KTO(tiny_llama())
    assert_raises(WhetValueError, ("KTO", "single row", "apo_zero_unpaired"), trainer.train_step, ROWS[:1])
    assert_raises(WhetValueError, ("KTO", "1 rows", "at least 2"), trainer.evaluate, ROWS[:1])
    assert KTO(tiny_llama(), loss_type="apo_zero_unpaired").train_step(ROWS[:1])["loss"] == pytest.approx(0.5)
    assert_raises(WhetValueError, ("label", "'good'"), trainer.train_step, [([3], [4], "good"), ROWS[0]])
    assert_raises(WhetValueError, ("label", "None"), trainer.train_step, [{"prompt": [3], "completion": [4]}])
    assert_raises(WhetTypeError, ("KTO", "batch"), trainer.train_step, [[3]], [[4]])
    assert_raises(WhetValueError, ("label 1",), trainer.train_step, [[3], [4]], [[4], [5]], True)
    assert_raises(WhetValueError, ("KTOConfig", "batch_size", "1", ">= 2"), KTO, tiny_llama(), batch_size=1)
    assert_raises(WhetValueError, ("KTOConfig", "beta", "0"), KTO, tiny_llama(), beta=0.0)
    assert_raises(WhetValueError, ("KTOConfig", "loss_type", "bco"), KTO, tiny_llama(), loss_type="bco")
