"""DPO's divergences, several losses, losses that sort the batch, and weights of tokens: steps against TRL's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.raising import assert_raises
from tests.tiny import TinyModel, changed, tiny_llama
from tests.trls import grad_norm, trainer_of

from whet.algorithms import DPO
from whet.errors import WhetValueError
from whet.learner import Learner
from whet.models.packed_base import pack_base
from whet.models.sources.live import open_module

ROWS = [([5, 6, 7], [8, 9, 2], [4]), ([3], [7], [6, 6, 5, 2]), ([5, 9], [4, 4], [7, 3]), ([8], [6, 2], [9, 3, 4])]
OPTIONS: list[dict[str, Any]] = [
    {"ld_alpha": 0.3},
    {"ld_alpha": 0.0, "loss_type": "ipo"},
    {"loss_weights": {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.5}},
    {"f_divergence_type": "js_divergence"},
    {"f_divergence_type": "forward_kl", "loss_type": "robust", "label_smoothing": 0.1},
    {"loss_type": "aot"},
    {"use_weighting": True, "loss_weights": {"sigmoid": 0.5, "nca_pair": 1.0}},
    {"loss_type": "aot_unpaired", "label_smoothing": 0.2},
]


def trls(model: Any, ref_model: Any, options: dict[str, Any]) -> torch.Tensor:
    from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer

    losses = options.get("loss_weights", {options.get("loss_type", "sigmoid"): 1.0})
    settings = {"ld_alpha": None, "f_divergence_type": "reverse_kl", "label_smoothing": 0.0, "use_weighting": False}
    settings = {name: options.get(name, value) for name, value in settings.items()}
    trainer = trainer_of(
        model, ref_model, loss_types=list(losses), loss_weights=list(losses.values()), beta=0.7, **settings
    )
    rows = [dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), row, strict=True)) for row in ROWS]
    return DPOTrainer._compute_loss(trainer, trainer.model, DataCollatorForPreference(pad_token_id=0)(rows), False)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("micro_batch_size", [0, 3])
def test_a_step_is_trls(options: dict[str, Any], micro_batch_size: int) -> None:
    pytest.importorskip("trl", reason="pip install 'whet[peers]'")
    reference = TinyModel()
    model = changed(reference)
    expected_model = copy.deepcopy(model)
    trainer = DPO(model, reference, learning_rate=0.0, beta=0.7, micro_batch_size=micro_batch_size, **options)
    metrics = trainer.train_step(ROWS)
    loss = trls(expected_model, reference, options)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert metrics["grad_norm"] == pytest.approx(grad_norm(loss, expected_model), rel=1e-10)
    trainer.config.batch_size = 3  # the last batch of the evaluation has one row
    assert trainer.evaluate(ROWS) == pytest.approx(loss.item(), rel=1e-12)


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[5], OPTIONS[6]])
def test_a_learner_takes_the_step_of_modules(options: dict[str, Any]) -> None:
    model = tiny_llama()
    learner = Learner(pack_base(open_module(model), weights="float32"), lora_rank=2, compute="float32")
    trainer = DPO(learner, learning_rate=0.02, beta=0.7, **options)
    whole = DPO(model, learning_rate=0.0, compute="float32", beta=0.7, **options).train_step(ROWS)
    first = trainer.train_step(ROWS)
    assert first["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert [trainer.train_step(ROWS)["loss"] for _ in range(20)][-1] < first["loss"]


def test_options_without_effect_are_rejected() -> None:
    model = tiny_llama()
    assert_raises(
        WhetValueError, ("loss_type", "loss_weights"), DPO, model, loss_type="ipo", loss_weights={"nca_pair": 1}
    )
    assert_raises(
        WhetValueError, ("loss_weights", "factors >= 0"), DPO, model, loss_weights={"ipo": -1.0, "sigmoid": 1.0}
    )
    assert_raises(WhetValueError, ("loss_type", "'dpo'"), DPO, model, loss_weights={"dpo": 1.0})
    assert_raises(
        WhetValueError, ("ld_alpha", "'sft'"), DPO, model, loss_weights={"sft": 1.0, "sigmoid": 1.0}, ld_alpha=0.5
    )
    assert_raises(WhetValueError, ("use_weighting", "'aot'"), DPO, model, loss_type="aot", use_weighting=True)
    assert_raises(WhetValueError, ("ld_alpha", "precompute"), DPO, model, ld_alpha=0.5, precompute_reference=True)
    assert_raises(WhetValueError, ("f_alpha_divergence_coef", "'reverse_kl'"), DPO, model, f_alpha_divergence_coef=0.3)
    row = {"prompt": [3], "chosen": [4], "rejected": [5], "ref_chosen_logprobs": -1.0, "ref_rejected_logprobs": -2.0}
    assert_raises(WhetValueError, ("ref_chosen_logprobs", "ld_alpha"), DPO(model, ld_alpha=0.5).train_step, [row])
    assert not DPO(model, loss_weights={"sft": 2.0}).config.has_reference()
