"""RLOO: the loss and a step against TRL's, by hand, and what separates it from GRPO."""

from __future__ import annotations

import collections
import copy
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.raising import assert_raises
from tests.tiny import EOS, ScriptedEngine, TinyModel, changed, first_is_four, fours, tiny_llama
from tests.trls import grad_norm, trainer_of

from whet.algorithms import GRPO, RLOO, grpo_loss
from whet.config import RLOOConfig
from whet.errors import WhetTypeError, WhetValueError
from whet.learner import Learner
from whet.models.packed_base import pack_base
from whet.models.sources.live import open_module

PROMPTS = [[5, 6], [7, 8]]
GROUPS = [[[4, 4, EOS], [8, EOS], [9, 4, 9, EOS]], [[4, EOS], [EOS], [10, 11, 4, EOS]]]
COMPLETIONS = [completion for group in GROUPS for completion in group]
SCORES = [2.0, 0.0, 1.0, 1.0, 0.5, -3.0]
SETTINGS: dict[str, Any] = {"group_size": 3, "max_new_tokens": 4, "learning_rate": 0.0, "max_grad_norm": 0.0}


def make(model: Any, ref_model: Any = None, **settings: Any) -> RLOO:
    given = {"engine": ScriptedEngine(GROUPS), "reward_fn": lambda completions: SCORES, **SETTINGS, **settings}
    return RLOO(model, ref_model, **given)


def trls_step(
    model: Any, ref_model: Any, scores: list[Any], **settings: Any
) -> tuple[torch.Tensor, list[float], dict[str, float]]:
    """Loss, advantages and metrics of TRL's trainer; of the trainer only the methods that compute them."""
    from trl.trainer.rloo_trainer import RLOOTrainer

    scored = torch.tensor([[math.nan if score is None else score] for score in scores], dtype=torch.float64)
    given = {
        "beta": 0.05,
        "normalize_advantages": False,
        "reward_clip_range": settings.pop("reward_clip", None),
        **settings,
    }
    trainer = trainer_of(
        model, ref_model, epsilon_low=0.2, epsilon_high=0.2, num_generations=3, mask_truncated_completions=False,
        reward_weights=torch.ones(1, dtype=torch.float64), reward_func_names=["f"], pad_to_multiple_of=None,
        _tokenizer=SimpleNamespace(pad_token_id=0), _pending_extra_logs={}, _pending_metrics={}, log_multimodal=False,
        _logs={"rewards": {"f": []}, **{name: [] for name in ("prompt", "completion", "advantages")}},
        _generate=lambda prompts: (prompts, COMPLETIONS, COMPLETIONS), _calculate_rewards=lambda *_: scored, **given,
    )  # fmt: skip
    trainer.args.per_device_train_batch_size = 6
    trainer._logs["extra"] = collections.defaultdict(list)
    trainer._get_per_token_logps_and_entropies = lambda *rows, **options: (
        RLOOTrainer._get_per_token_logps_and_entropies(trainer, *rows, **options)
    )
    rows = [{"prompt": prompt} for prompt in PROMPTS for _ in range(3)]
    inputs = RLOOTrainer._generate_and_score_completions(trainer, rows)
    loss = RLOOTrainer._compute_loss(trainer, trainer.model, inputs)
    return loss, inputs["advantages"].tolist(), {k: v[0] for k, v in trainer._metrics["train"].items() if v}


@pytest.mark.parametrize("micro_batch_size", [0, 2])
@pytest.mark.parametrize("unscored", [[], [1], [0, 2]])
@pytest.mark.parametrize(
    "options",
    [{}, {"beta": 0.7, "normalize_advantages": True}, {"beta": 0.0}, {"reward_clip": [-1.0, 1.5], "beta": 0.2}],
)
def test_a_step_is_trls(options: dict[str, Any], unscored: list[int], micro_batch_size: int) -> None:
    pytest.importorskip("trl", reason="pip install 'whet[peers]'")
    reference = TinyModel()
    model = changed(reference)
    expected_model = copy.deepcopy(model)
    ref_model = None if options.get("beta") == 0 else reference
    scores = [None if i in unscored else score for i, score in enumerate(SCORES)]
    trainer = make(model, ref_model, reward_fn=lambda _: scores, micro_batch_size=micro_batch_size, **options)
    metrics = trainer.train_step(PROMPTS)
    loss, advantages, expected = trls_step(expected_model, reference, scores, **options)
    precision = 1e-7 if options.get("normalize_advantages") else 1e-10  # TRL divides by n - 1 in float32
    found = [row["advantage"] for row in trainer.last_completions]
    assert found == pytest.approx(advantages, rel=precision, abs=1e-14)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=precision, abs=1e-8)
    assert metrics["grad_norm"] == pytest.approx(grad_norm(loss, expected_model), rel=precision)
    assert metrics["mean_reward"] == pytest.approx(expected["reward"])  # without the KL
    assert ("kl" in metrics) is ("kl" in expected) is (ref_model is not None)
    if ref_model is not None and not unscored:  # TRL's metric is of all completions
        assert metrics["kl"] == pytest.approx(expected["kl"], rel=1e-9)


def test_the_loss_is_trls() -> None:
    """Ratios on both sides of the bounds, against ``_compute_loss`` of TRL's trainer."""
    pytest.importorskip("trl", reason="pip install 'whet[peers]'")
    from trl.trainer.rloo_trainer import RLOOTrainer

    rng = np.random.default_rng(0)
    logprobs = torch.tensor(-rng.random((6, 4)), requires_grad=True)
    lengths = torch.tensor([[len(each)] for each in COMPLETIONS])
    mask = torch.arange(4) < lengths
    ratios = torch.tensor([1.5, 0.6, 1.1, 0.9, 1.4, 0.7], dtype=torch.float64)
    old = logprobs.detach() - ratios.log()[:, None] / lengths
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0, -0.5, 3.0], dtype=torch.float64)
    bounds = {"epsilon_low": 0.2, "epsilon_high": 0.3}
    trainer = trainer_of(None, None, **bounds)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.zeros(6, 4), None)
    blank = {name: torch.zeros(6, 4) for name in ("prompt_ids", "prompt_mask", "completion_ids")}
    given = {"completion_mask": mask, "old_logps": (old * mask).sum(1), "advantages": advantages}
    expected = RLOOTrainer._compute_loss(trainer, trainer.model, blank | given)
    loss, metrics = grpo_loss(
        logprobs, old, advantages, mask, loss_type="grpo", level="sequence_product", epsilon_high=0.3
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-14)
    found, wanted = (torch.autograd.grad(each, logprobs)[0] for each in (loss, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    assert (found != 0).any(1).tolist() == [False, False, True, True, True, True]
    assert metrics["clip_ratio/high"] == 3 / 16 and metrics["clip_ratio/low"] == 2 / 16


def test_the_loss_by_hand() -> None:
    # Row 0: rho = 2 * 1.5 = 3, A = 1, clipped: -1.2. Row 1: rho = 0.9, A = -2, not clipped: 1.8, also of each token.
    gaps = np.log([[2.0, 1.5], [0.75, 1.2]])
    mask = np.ones((2, 2), bool)
    loss = grpo_loss(gaps, np.zeros((2, 2)), np.array([1.0, -2.0]), mask, loss_type="grpo", level="sequence_product")
    assert loss.value == pytest.approx((-1.2 + 1.8) / 2)
    np.testing.assert_allclose(loss.gradients["logprobs"], [[0, 0], [0.9, 0.9]])


def test_the_kl_lowers_the_reward_by_hand() -> None:
    """The reference prefers token 4, so that a completion with it has a lower log-ratio, and a higher reward."""
    model, reference = TinyModel(), TinyModel()
    with torch.no_grad():
        for each in (model, reference):
            each.head.weight.zero_()
            each.head.bias.zero_()
        reference.head.bias[4] = math.log(2.0)  # probabilities 2 / 13 and 1 / 13 instead of 1 / 12
    trainer = make(model, reference, beta=0.5, reward_fn=fours)
    metrics = trainer.train_step(PROMPTS)
    ratios = [sum(math.log(13 / 24 if token == 4 else 13 / 12) for token in row) for row in COMPLETIONS]
    shaped = [row.count(4) - 0.5 * ratio for row, ratio in zip(COMPLETIONS, ratios, strict=True)]
    first, second, third = shaped[:3]
    expected = [first - (second + third) / 2, second - (first + third) / 2, third - (first + second) / 2]
    assert [row["advantage"] for row in trainer.last_completions[:3]] == pytest.approx(expected)
    assert [row["reward"] for row in trainer.last_completions] == [row.count(4) for row in COMPLETIONS]
    assert metrics["mean_kl"] == pytest.approx(sum(ratios) / 6) and metrics["kl"] == pytest.approx(sum(ratios) / 16)


def test_unscored_groups_make_no_update() -> None:
    metrics = make(TinyModel(), reward_fn=lambda completions: [None] * 6).train_step(PROMPTS)
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and math.isnan(metrics["mean_reward"])


def test_it_learns_on_a_learner() -> None:
    base = pack_base(open_module(tiny_llama(initializer_range=0.3)), weights="float32")
    learner = Learner(base, lora_rank=4, compute="float32")
    trainer = RLOO(learner, reward_fn=first_is_four, group_size=8, max_new_tokens=2, learning_rate=0.05, beta=0.01)
    history = [trainer.train_step([[5], [6], [7]])["mean_reward"] for _ in range(40)]
    assert np.mean(history[:5]) < 0.2 and np.mean(history[-5:]) > 0.6


def test_settings_of_rloo() -> None:
    assert not issubclass(RLOOConfig, GRPO.config_class)
    assert_raises(WhetTypeError, ("RLOOConfig", "'loss_type'"), make, TinyModel(), loss_type="dapo")
    assert_raises(WhetTypeError, ("RLOO", "kl_coef", "beta"), make, TinyModel(), kl_coef=0.1, beta=0.1)
    assert make(TinyModel(), kl_coef=0.1).config.beta == 0.1
    assert_raises(WhetValueError, ("RLOO", "ref_model"), make, TinyModel(), TinyModel(), beta=0.0)
    assert_raises(
        WhetValueError, ("RLOOConfig", "ref_sync_steps", "no reference"), RLOOConfig, beta=0.0, ref_sync_steps=2
    )
    assert_raises(WhetValueError, ("RLOOConfig", "epsilon", "-1"), RLOOConfig, epsilon=-1.0)
    assert_raises(WhetValueError, ("RLOOConfig", "group_size", ">= 2"), RLOOConfig, group_size=1)
