"""Reference policies with every kind of PEFT adapter: new, trained, and loaded to continue training."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import peft
import pytest
import torch
from tests.tiny import make_trainer, tiny_llama

from whet.algorithms.dpo import DPO
from whet.nn.causal_lm import completion_logprobs

ROWS = [
    {"prompt": [5, 6], "chosen": [4, 8, 2], "rejected": [9, 2]},
    {"prompt": [7], "chosen": [9], "rejected": [10, 10, 10, 2]},
]
_TARGETS = {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
_lora = partial(peft.LoraConfig, r=4, **_TARGETS)
_ia3 = {"target_modules": ["v_proj", "down_proj"], "feedforward_modules": ["down_proj"], "task_type": "CAUSAL_LM"}

KINDS: dict[str, Callable[..., Any]] = {
    "lora": _lora,
    "dora": partial(_lora, use_dora=True),
    "rslora": partial(_lora, use_rslora=True),
    "lora bias": partial(_lora, lora_bias=True),
    "pissa": partial(_lora, init_lora_weights="pissa"),
    "olora": partial(_lora, init_lora_weights="olora"),
    "orthogonal": partial(_lora, init_lora_weights="orthogonal"),
    "all biases": partial(_lora, bias="all"),
    "biases of its layers": partial(_lora, bias="lora_only"),
    "head": partial(_lora, modules_to_save=["lm_head"]),
    "norm": partial(_lora, modules_to_save=["norm"]),
    "embedding": partial(_lora, target_modules=["embed_tokens", "q_proj"]),
    "some tokens": partial(_lora, trainable_token_indices=[4, 5]),
    "adalora": partial(peft.AdaLoraConfig, r=4, total_step=10, **_TARGETS),
    "loha": partial(peft.LoHaConfig, r=4, **_TARGETS),
    "lokr": partial(peft.LoKrConfig, r=4, **_TARGETS),
    "ia3": partial(peft.IA3Config, **_ia3),
    "oft": partial(peft.OFTConfig, oft_block_size=4, r=0, **_TARGETS),
    "boft": partial(peft.BOFTConfig, boft_block_size=4, **_TARGETS),
    "hra": partial(peft.HRAConfig, r=4, **_TARGETS),
    "vera": partial(peft.VeraConfig, r=4, **_TARGETS),
    "vblora": partial(peft.VBLoRAConfig, r=4, num_vectors=10, vector_length=4, topk=2, **_TARGETS),
    "fourierft": partial(peft.FourierFTConfig, n_frequency=20, **_TARGETS),
    "randlora": partial(peft.RandLoraConfig, r=4, **_TARGETS),
    "miss": partial(peft.MissConfig, r=4, **_TARGETS),
    "road": partial(peft.RoadConfig, group_size=4, **_TARGETS),
    "norms": partial(peft.LNTuningConfig, target_modules=["input_layernorm", "norm"], task_type="CAUSAL_LM"),
    "tokens": partial(peft.TrainableTokensConfig, token_indices=[4, 5], task_type="CAUSAL_LM"),
    "prompt tuning": partial(peft.PromptTuningConfig, num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "prefix tuning": partial(peft.PrefixTuningConfig, num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "adaption prompt": partial(peft.AdaptionPromptConfig, adapter_layers=1, adapter_len=3, task_type="CAUSAL_LM"),
}
_LOADED_FROZEN = ("prompt tuning", "prefix tuning")
"""Kinds that PEFT cannot load for training."""


def base():
    return tiny_llama(attention_bias=True)


def move(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.mark.parametrize("state", ["new", "trained", "loaded"])
@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_the_initial_policy(kind, state, tmp_path):
    torch.manual_seed(0)
    model = peft.get_peft_model(base(), KINDS[kind]())
    if state != "new":
        move(model)
    if state == "loaded":
        if kind in _LOADED_FROZEN:
            pytest.skip("PEFT does not load it to be trained")
        model.save_pretrained(tmp_path)
        model = peft.PeftModel.from_pretrained(base(), str(tmp_path), is_trainable=True)
    before = copy.deepcopy(model)
    trainer = make_trainer(DPO, model, batch_size=2, beta=0.5, compute="torch")
    assert trainer.train_step(ROWS)["loss"] == pytest.approx(math.log(2), abs=1e-6)
    move(model)
    row = [[5, 6]], [[4, 8, 2]]
    with torch.no_grad():
        expected = completion_logprobs(before.eval(), *row).logprobs
    np.testing.assert_allclose(trainer.logprobs(*row, reference=True), expected, rtol=0, atol=1e-6)
    assert not np.allclose(trainer.logprobs(*row), expected, atol=1e-4)
