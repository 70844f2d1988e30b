"""Whet's kernels and torch compute equal steps, for any micro-batches."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.raising import assert_raises, mentions

pytest.importorskip("transformers")
from tests.engine.tiny_models import foreign_model, tiny_model
from tests.tiny import TinyModel

from whet import WhetTypeError, WhetValueError
from whet.algorithms import DPO, GRPO, SFT
from whet.nn import accelerate

PROMPTS = [[5, 6, 7], [8, 9], [5, 6, 7, 10]]
PAIRS = [([5, 6, 7], [3, 4, 2], [9, 2]), ([5, 6, 7], [11], [12, 13, 14]), ([8], [3, 3, 3, 3], [4, 2])]


def even(completions):
    return [float(sum(token % 2 for token in row.tolist())) for row in completions]


def steps(kind, **settings):
    """Return losses, gradient norms and weights of three steps."""
    model = tiny_model("llama").requires_grad_(True)
    common = {"learning_rate": 1e-3, **settings}
    if kind == "grpo":
        trainer = GRPO(model, reward_fn=even, group_size=4, max_new_tokens=6, engine="torch", beta=0.1, **common)
        history = [trainer.train_step(PROMPTS) for _ in range(3)]
    elif kind == "dpo":
        trainer = DPO(model, beta=0.5, **common)
        history = [trainer.train_step(*map(list, zip(*PAIRS, strict=True))) for _ in range(3)]
    else:
        trainer = SFT(model, **common)
        history = [trainer.train_step([p for p, _, _ in PAIRS], [c for _, c, _ in PAIRS]) for _ in range(3)]
    return history, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("kind", ["grpo", "dpo", "sft"])
def test_kernels_and_torch_make_equal_steps(kind):
    expected, weights = steps(kind, compute="torch")
    for settings in ({"max_tokens_per_step": 0}, {"max_tokens_per_step": 9}, {"micro_batch_size": 2}):
        history, moved = steps(kind, compute="float32", **settings)
        assert history[0]["loss"] == pytest.approx(expected[0]["loss"], rel=1e-5, abs=1e-6)
        assert history[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=1e-5)
        # An Adam update whose sign flips moves a weight by the learning rate.
        assert (moved - weights).abs().mean() < 2e-5


def test_bfloat16_is_close_to_float32():
    expected, _ = steps("dpo", compute="torch")
    history, _ = steps("dpo", compute="bfloat16")
    for step, exact in zip(history, expected, strict=True):
        assert step["loss"] == pytest.approx(exact["loss"], rel=0.06)
        assert step["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.06)


@pytest.mark.parametrize("kind", ["grpo", "dpo", "sft"])
def test_steps_have_the_same_bits_if_layers_are_computed_again(kind):
    for training_mode in (False, True):
        (first, kept), (second, again) = (
            steps(kind, compute="float32", activation_bytes=n, training_mode=training_mode) for n in (None, 0)
        )
        assert torch.equal(kept, again) and [h["loss"] for h in first] == [h["loss"] for h in second]


def test_activation_bytes_without_effect_are_refused():
    relu = tiny_model("llama", hidden_act="relu").requires_grad_(True)
    SFT(relu, training_mode=False).train_step([[5, 6]], [[7]])  # torch computes the activation
    for model, part in ((TinyModel(), "torch computes the step"), (relu, "torch computes a part of the model")):
        assert_raises(WhetValueError, f"SFT: activation_bytes is 9 and has no effect, because {part}", SFT, model,
                      activation_bytes=9)  # fmt: skip


def test_auto_uses_kernels_for_supported_models():
    model = tiny_model("llama").requires_grad_(True)
    assert SFT(model, training_mode=False).policy.acceleration is not None
    assert SFT(TinyModel()).policy.acceleration is None
    assert SFT(model, compute="torch").policy.acceleration is None
    dropping = tiny_model("llama", attention_dropout=0.1).requires_grad_(True)
    assert SFT(dropping, training_mode=True).policy.acceleration is None
    assert SFT(dropping, training_mode=False).policy.acceleration is not None
    with pytest.warns(UserWarning, match=mentions("torch", "model_type", "'opt'", "compute='torch'")):
        assert SFT(foreign_model()).policy.acceleration is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SFT(foreign_model(), compute="torch")


def test_policy_and_reference_use_the_same_backend():
    policy, rounded = (tiny_model("llama").requires_grad_(True) for _ in range(2))
    both = DPO(policy, rounded)
    assert both.policy.acceleration is not None and list(both.policy.accelerations) == [policy, rounded]
    with pytest.warns(UserWarning, match=mentions("torch", "weights", "bfloat16")):
        neither = DPO(policy, rounded.bfloat16())
    assert neither.policy.acceleration is None and not neither.policy.accelerations
    neither.train_step([[1, 2]], [[3, 4]], [[5]])


def test_an_explicit_backend_has_no_fallback():
    assert_raises(WhetTypeError, ("Hugging Face",), SFT, TinyModel(), compute="bfloat16")
    assert_raises(WhetValueError, ("model_type", "'opt'"), SFT, foreign_model(), compute="float32")
    assert_raises(WhetValueError, ("'fast'", "compute"), SFT, TinyModel(), compute="fast")


def test_accelerated_models_are_rejected():
    model = tiny_model("llama").requires_grad_(True)
    for compute in ("auto", "torch"):
        with accelerate(model), pytest.raises(WhetValueError, match=mentions("SFT: model", "accelerated", "remove()")):
            SFT(model, compute=compute)
    with accelerate(model), pytest.raises(WhetValueError, match=mentions("DPO: ref_model", "accelerated")):
        DPO(tiny_model("llama").requires_grad_(True), ref_model=model)
    SFT(model).train_step([[1, 2]], [[3, 4]])


@pytest.mark.parametrize("compute", ["torch", "float32"])
def test_existing_gradients_are_cleared(compute):
    trainers = [SFT(tiny_model("llama").requires_grad_(True), compute=compute) for _ in range(2)]
    for p in trainers[1].model.parameters():
        p.grad = torch.ones_like(p)
    clean, other = (trainer.train_step([[1, 2]], [[3, 4]]) for trainer in trainers)
    assert other["grad_norm"] == clean["grad_norm"]


def test_the_model_is_unpatched_after_training():
    model = tiny_model("llama").requires_grad_(True)
    attention = model.config._attn_implementation
    trainer = SFT(model, compute="bfloat16")
    trainer.train_step([[1, 2]], [[3, 4]])
    assert model.config._attn_implementation == attention
    assert "forward" not in vars(model.model.layers[0].mlp)
