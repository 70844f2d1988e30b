"""The reference is the initial policy, for every kind of trained parameters, also after a checkpoint."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, TrainableTokensConfig, get_peft_model
from tests.raising import assert_raises
from tests.tiny import assert_close_weights, assert_same_weights, make_trainer, timeless, tiny_llama, with_lora

from whet.algorithms.dpo import DPO
from whet.algorithms.grpo import GRPO
from whet.errors import CheckpointError, WhetValueError
from whet.memory import memory_report
from whet.nn import frozen_model
from whet.nn.causal_lm import completion_logprobs

ROWS = [
    {"prompt": [5, 6], "chosen": [4, 8, 2], "rejected": [9, 2]},
    {"prompt": [7], "chosen": [9], "rejected": [10, 10, 10, 2]},
]
make = partial(make_trainer, DPO, batch_size=2, beta=0.5)
_lora = partial(LoraConfig, r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")

NEW_AND_ALONE = {
    "lora": _lora(),
    "dora": _lora(use_dora=True),
    "modules_to_save": _lora(modules_to_save=["norm"]),
    "embedding": _lora(target_modules=["embed_tokens"]),
}
OTHERS = {
    "pissa": _lora(init_lora_weights="pissa"),
    "bias": _lora(bias="all"),
    "tokens": TrainableTokensConfig(token_indices=[4, 5], task_type="CAUSAL_LM"),
    "ia3": IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
    "virtual tokens": PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
}


def peft_model(config):
    torch.manual_seed(0)
    return get_peft_model(tiny_llama(attention_bias=True), copy.deepcopy(config))


def move(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))


def check_reference(model, expected):
    """Assert that the reference's log-probs equal ``expected``, however the policy is trained."""
    trainer = make(model, compute="torch")
    assert trainer.train_step(ROWS)["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert trainer.train_step(ROWS)["loss"] < math.log(2) - 1e-6
    move(model)
    before = copy.deepcopy(model)
    prompts, completions = [[5, 6], [7]], [[4, 8, 2], [9]]
    found = trainer.logprobs(prompts, completions, reference=True)
    with torch.no_grad():
        right = completion_logprobs(expected.eval(), prompts, completions).logprobs
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-6)
    assert_same_weights(model, before)
    return trainer


@pytest.mark.parametrize("kind", [*NEW_AND_ALONE, *OTHERS])
def test_new_adapters_of_every_kind(kind):
    model = peft_model({**NEW_AND_ALONE, **OTHERS}[kind])
    trainer = check_reference(model, copy.deepcopy(model))
    assert trainer.ref_model is None
    reference, trainable = trainer.policy.reference, trainer.policy.trainable
    assert reference.adapters_off == (kind in NEW_AND_ALONE)
    assert reference.first_values.keys() == (set() if kind in NEW_AND_ALONE else trainable.keys())


@pytest.mark.parametrize("kind", [*NEW_AND_ALONE, *OTHERS])
def test_previously_trained_adapters(kind, tmp_path):
    model = peft_model({**NEW_AND_ALONE, **OTHERS}[kind])
    move(model)
    if kind not in ("virtual tokens", "pissa"):  # PEFT loads virtual tokens frozen, and pissa on another base
        model.save_pretrained(tmp_path)
        model = PeftModel.from_pretrained(tiny_llama(attention_bias=True), tmp_path, is_trainable=True)
    assert not check_reference(model, copy.deepcopy(model)).policy.reference.adapters_off


def test_a_mixed_peft_model():
    model = get_peft_model(tiny_llama(), _lora(init_lora_weights=False), mixed=True)
    losses = [
        [make(copy.deepcopy(model), compute=compute).train_step(ROWS)["loss"]] for compute in ("torch", "float32")
    ]
    assert losses[0] == losses[1] == pytest.approx([math.log(2)], abs=1e-6)
    check_reference(model, copy.deepcopy(model))


def test_trained_norms_next_to_new_adapters():
    model = peft_model(_lora())
    model.base_model.model.model.norm.weight.requires_grad_(True)
    assert not check_reference(model, copy.deepcopy(model)).policy.reference.adapters_off


def test_a_trained_adapter_on_a_frozen_adapter():
    model = peft_model(_lora())
    move(model)
    model.add_adapter("second", _lora())
    model.base_model.set_adapter(["default", "second"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".second." in name)
    assert not check_reference(model, copy.deepcopy(model)).policy.reference.adapters_off


def test_a_trained_copy_of_a_tied_embedding():
    base = tiny_llama(tie_word_embeddings=True)
    model = get_peft_model(base, _lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True))
    check_reference(model, copy.deepcopy(model))
    move(model)
    check_reference(model, copy.deepcopy(model))


@pytest.mark.parametrize("compute", ["float32", "torch"])
def test_trained_adapters_of_a_packed_base(compute):
    def model():
        return with_lora(frozen_model(tiny_llama(), "q8_0"), b_std=0.2)

    trainer, given = make(model(), compute=compute), make(model(), ref_model=model(), compute=compute)
    for _ in range(3):
        assert trainer.train_step(ROWS)["loss"] == pytest.approx(given.train_step(ROWS)["loss"], abs=1e-6)


def test_the_kl_of_a_trained_adapter_starts_at_zero():
    def grpo(model, **arguments):
        score = lambda completions: [float(c.sum() % 7) for c in completions]  # noqa: E731
        settings = {"group_size": 4, "max_new_tokens": 6, "beta": 0.1, "learning_rate": 0.02, "compute": "float32"}
        return GRPO(model, reward_fn=score, **settings, **arguments)

    own = grpo(with_lora(tiny_llama(), b_std=0.2))
    copied = grpo(with_lora(tiny_llama(), b_std=0.2), ref_model=with_lora(tiny_llama(), b_std=0.2))
    steps = [[trainer.train_step([[5, 6], [7]])["kl"] for _ in range(3)] for trainer in (own, copied)]
    assert steps[0] == steps[1] and abs(steps[0][0]) < 1e-6 < steps[0][2]


def test_manually_frozen_adapters_stay_frozen():
    model = peft_model(_lora())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name and "lora" in name)
    trainer = make(model)
    assert trainer.policy.reference.adapters_off
    trainer.train_step(ROWS)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trainer.policy.trainable.keys()


def test_the_reference_is_in_the_checkpoint(tmp_path):
    """The model passed on loading may have the trained or the initial adapters."""

    def trained_before():
        return with_lora(tiny_llama(), b_std=0.2)

    trainer = make(trained_before())
    trainer.train_step(ROWS)
    trainer.save(tmp_path / "c")
    models = trained_before(), copy.deepcopy(trainer.model), with_lora(tiny_llama())
    expected = trainer.train_step(ROWS)
    assert expected["rewards/margins"] > 1e-3
    for model in models:
        again = DPO.from_checkpoint(tmp_path / "c", model=model)
        assert timeless(again.train_step(ROWS)) == timeless(expected)


def test_new_adapters_stay_off_in_a_resumed_run(tmp_path):
    trainer = make(with_lora(tiny_llama()))
    trainer.train_step(ROWS)
    trainer.save(tmp_path / "c")
    again = DPO.from_checkpoint(tmp_path / "c", model=copy.deepcopy(trainer.model))  # no longer new
    assert again.policy.reference.adapters_off and not again.policy.reference.first_values
    assert timeless(again.train_step(ROWS)) == timeless(trainer.train_step(ROWS))


def test_a_checkpoint_without_a_reference_uses_the_model(tmp_path):
    grpo: Any = partial(GRPO.from_checkpoint, tmp_path / "c", reward_fn=len, beta=0.1)
    GRPO(with_lora(tiny_llama(), b_std=0.2), reward_fn=len, group_size=2, max_new_tokens=4).save(tmp_path / "c")
    assert grpo(model=with_lora(tiny_llama(), b_std=0.2)).policy.reference.first_values
    assert_raises(CheckpointError, ("already trained", "initial"), grpo, model=with_lora(tiny_llama()))


def test_precomputed_log_probs_of_trained_adapters(tmp_path):
    def precomputed(b_std=0.2, **settings):
        model = with_lora(tiny_llama(), b_std=b_std, **settings)
        return make(model, precompute_reference=True, reference_cache=str(tmp_path / "cache"))

    def n_files():
        return len(list((tmp_path / "cache").iterdir()))

    live, known = make(with_lora(tiny_llama(), b_std=0.2)), precomputed()
    for trainer in (live, known):
        trainer.train(ROWS, steps=3)
    assert_close_weights(live.model, known.model, rtol=1e-5, atol=1e-6)
    assert not known.policy.reference.first_values and n_files() == 1
    new = [{**ROWS[0], "prompt": [8]}]
    assert_raises(WhetValueError, ("precompute_reference", "already been trained"), known.add_reference_logprobs, new)
    precomputed().add_reference_logprobs(ROWS)
    assert n_files() == 1
    for n_others, settings in enumerate(({"b_std": 0.1}, {"lora_alpha": 3}), 1):
        precomputed(**settings).add_reference_logprobs(ROWS)
        assert n_files() == 1 + n_others


def test_a_reference_that_shares_trained_parameters_is_rejected():
    base = tiny_llama()
    model = with_lora(base)
    for ref_model in (base, copy.copy(model)):
        assert_raises(WhetValueError, ("DPO", "ref_model", "lora_A"), DPO, model, ref_model)
    plain = tiny_llama()
    tied: Any = tiny_llama(1)
    tied.lm_head.weight.data = plain.lm_head.weight.data[:]
    assert_raises(WhetValueError, ("ref_model", "lm_head.weight"), DPO, plain, tied)
    assert_raises(WhetValueError, ("ref_model", "itself"), DPO, plain, plain)
    frozen = with_lora(tiny_llama())
    ref_model = with_lora(tiny_llama())
    ref_model.base_model.model.model.norm.weight = frozen.base_model.model.model.norm.weight
    DPO(frozen, ref_model)  # frozen parameters may be shared


def test_initial_values_are_counted_in_memory():
    trainer = make(with_lora(tiny_llama(), b_std=0.2))
    n_bytes = sum(value.nbytes for value in trainer.policy.reference.first_values.values())
    held = {part: size for part, _, size in trainer.memory_blocks() if part == "reference"}
    assert n_bytes and held
    assert memory_report().parts["reference"] >= n_bytes
