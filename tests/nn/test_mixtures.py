"""Mixtures of experts on Whet's kernels: frozen and trained experts, and the balance loss, against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.tiny_models import MIXTURES, tiny_model
from tests.learner.test_mixtures import random_experts, replay
from tests.models.test_expert_adapters import adapt

from whet import Engine, WhetValueError
from whet.learner.learner import Learner
from whet.models.packed_base import pack_base
from whet.models.sources.live import open_module
from whet.nn.accelerate import accelerate
from whet.nn.causal_lm import completion_logprobs
from whet.nn.frozen import FrozenExperts, base_of, frozen_model, parameter_values

PROMPTS = [[5, 6, 7, 8], [9, 3], [5, 6, 7, 8], [5, 6, 7, 8]]  # three completions share a prompt
COMPLETIONS = [[1, 2, 3, 4, 10, 11], [7, 7, 7], [1], [40, 30, 20, 12, 13]]
TRAINED = ("self_attn", "conv.", "linear_attn", "mixer.q_proj", "mixer.in_proj")
CASES = [case for case in MIXTURES if not case.endswith("-vision")]


def gradients_of(model: Any, train_all: bool, **options: Any) -> tuple[np.ndarray, float | None, dict[str, np.ndarray]]:
    """Return log-probs, the balance loss and the gradients of the trained parameters."""
    for name, parameter in model.named_parameters():
        trained = ("lora_",) if hasattr(model, "peft_config") else TRAINED
        parameter.requires_grad_(train_all or any(part in name for part in trained)).grad = None
    found = completion_logprobs(model, PROMPTS, COMPLETIONS, **options)
    grad = np.random.default_rng(5).normal(size=found.logprobs.shape)
    loss = (found.logprobs * torch.tensor(grad).to(found.logprobs)).sum()
    if found.balance is not None:
        loss = loss + 3 * found.balance
    loss.backward()
    grads = {name: p.grad.double().numpy() for name, p in model.named_parameters() if p.grad is not None}
    balance = None if found.balance is None else found.balance.item()
    return found.logprobs.detach().double().numpy(), balance, grads


def relative_errors(got: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> dict[str, float]:
    assert got.keys() == right.keys() and got
    return {name: float(np.linalg.norm(got[name] - x) / max(np.linalg.norm(x), 1e-8)) for name, x in right.items()}


@pytest.mark.parametrize("train_all", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_match_transformers(case: str, train_all: bool) -> None:
    expected, _, right = gradients_of(tiny_model(case).double(), train_all)
    with accelerate(model := tiny_model(case), "float32"):
        logprobs, _, grads = gradients_of(model, train_all)
    np.testing.assert_allclose(logprobs, expected, atol=2e-5)
    assert max(relative_errors(grads, right).values()) < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_adapters_of_experts_match_peft(case: str) -> None:
    expected, _, right = gradients_of(adapt(tiny_model(case)).double(), False)
    assert any("experts.lora_A" in name for name in right)
    assert any("experts.base_layer.lora_A" in name for name in right)
    with accelerate(model := adapt(tiny_model(case)), "float32"):
        logprobs, _, grads = gradients_of(model, False)
        with model.disable_adapter(), torch.no_grad():
            plain = completion_logprobs(model, PROMPTS, COMPLETIONS).logprobs.numpy()
    np.testing.assert_allclose(logprobs, expected, atol=2e-5)
    np.testing.assert_allclose(plain, gradients_of(tiny_model(case).double(), False)[0], atol=2e-5)
    assert max(relative_errors(grads, right).values()) < 1e-4


@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss"])
def test_packed_experts_have_adapters(case: str) -> None:
    """The packed base in float32 has the bits of the weights."""
    _, _, right = gradients_of(adapt(tiny_model(case)).double(), False)
    packed = adapt(frozen_model(tiny_model(case), "float32"))
    assert not any("proj" in name and "experts" in name for name in packed.state_dict() if "lora_" not in name)
    with accelerate(packed, "float32"):
        _, _, grads = gradients_of(packed, False)
    assert max(relative_errors(grads, right).values()) < 1e-4
    ids = list(range(5, 15))
    with torch.no_grad(), accelerate(packed, "float32"):
        expected = packed(torch.tensor([ids])).logits[0].numpy()
    found = Engine.from_model(packed).logits(ids)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("train_all", [False, True], ids=["frozen", "trained"])
def test_bfloat16_products_are_close(train_all: bool) -> None:
    expected, _, right = gradients_of(tiny_model("qwen3_moe").double(), train_all)
    with accelerate(model := tiny_model("qwen3_moe"), "bfloat16"):
        logprobs, _, grads = gradients_of(model, train_all)
    np.testing.assert_allclose(logprobs, expected, atol=0.2)
    got, exact = (np.concatenate([x.ravel() for _, x in sorted(each.items())]) for each in (grads, right))
    assert got @ exact / np.linalg.norm(got) / np.linalg.norm(exact) > 0.99


@pytest.mark.parametrize("case", ["qwen3_moe", "olmoe"])
def test_balance_loss_is_transformers(case: str) -> None:
    """Rows of several lengths, with prompts that the kernels compute once: each row counts."""
    model = tiny_model(case).double()
    _, balance, right = gradients_of(model, True, return_balance=True)
    rows = [prompt + completion[:-1] for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)]
    ids = torch.zeros((len(rows), max(map(len, rows))), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
    expected = model(ids, attention_mask=mask, output_router_logits=True).aux_loss
    assert balance == pytest.approx(expected.item(), rel=1e-6)
    with accelerate(model := tiny_model(case), "float32") as acceleration:
        for limit in (None, 0):
            acceleration.activation_bytes = limit
            _, balance, grads = gradients_of(model, True, return_balance=True)
            assert balance == pytest.approx(expected.item(), rel=1e-5)
            assert max(relative_errors(grads, right).values()) < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_replayed_experts_are_the_learners(case: str) -> None:
    """Log-probs for random experts of some rows, and the own choice of others."""
    base = pack_base(open_module(tiny_model(case)), weights="float32")
    learner = Learner(base, lora_rank=2, compute="float32", lora_layers=["k_proj"])
    experts: list[Any] = random_experts(base.config)
    experts = [experts[0], None, experts[2][-2:], experts[3]]
    expected = learner.logprobs(PROMPTS, COMPLETIONS, experts=experts)
    plain = learner.logprobs(PROMPTS, COMPLETIONS, keep=False).logprobs
    assert np.abs(expected.logprobs - plain).max() > 1e-2
    with accelerate(tiny_model(case), "float32") as acceleration, torch.no_grad():
        found = completion_logprobs(acceleration._model, PROMPTS, COMPLETIONS, experts=experts)
    np.testing.assert_allclose(found.logprobs.numpy(), expected.logprobs, atol=2e-5)
    assert found.replaced_experts == pytest.approx(expected.replaced_experts)
    with pytest.raises(WhetValueError, match="torch computes the model"):
        completion_logprobs(tiny_model(case), PROMPTS, COMPLETIONS, experts=experts)


def test_gradients_of_replayed_experts() -> None:
    """Through the routers' own probabilities of the given experts."""
    model = tiny_model("qwen3_moe").double()
    experts = random_experts(open_module(model).config)
    with replay(model, experts):
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        grad, total = np.random.default_rng(5).normal(size=(4, 6)), torch.zeros((), dtype=torch.float64)
        for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            total = total + logits[range(len(completion)), completion] @ torch.tensor(grad[i, : len(completion)])
        total.backward()
    right = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    with accelerate(model := tiny_model("qwen3_moe"), "float32") as acceleration:
        for limit in (None, 0):  # layers that are computed again replay the experts again
            acceleration.activation_bytes = limit
            _, _, grads = gradients_of(model, True, experts=experts)
            assert max(relative_errors(grads, right).values()) < 1e-4


@pytest.mark.parametrize("format", ["bf16", "q8_0"])
@pytest.mark.parametrize("case", CASES)
def test_packed_experts_match_floats(case: str, format: str) -> None:
    """A frozen model, and the same model with the base's dequantised values, without the kernels and with them."""
    frozen = frozen_model(tiny_model(case), format)
    model, base = tiny_model(case), base_of(frozen)
    assert base is not None and any(isinstance(module, FrozenExperts) for module in frozen.modules())
    for name in base.targets:
        holder, _, parameter = name.rpartition(".")
        module = dict(model.named_modules()).get(name)
        if module is not None:
            module.weight.data = parameter_values(base, name, module.weight.shape)
        else:
            vector = getattr(model.get_submodule(holder), parameter)
            vector.data = parameter_values(base, name, vector.shape)
    with torch.no_grad():
        expected = completion_logprobs(model.double(), PROMPTS, COMPLETIONS).logprobs.numpy()
        found = completion_logprobs(frozen, PROMPTS, COMPLETIONS).logprobs.numpy()
        np.testing.assert_allclose(found, expected, atol=2e-5)
        with accelerate(frozen, "float32"):
            found = completion_logprobs(frozen, PROMPTS, COMPLETIONS).logprobs.numpy()
        np.testing.assert_allclose(found, expected, atol=2e-5)
