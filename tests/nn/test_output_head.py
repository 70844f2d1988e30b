"""Log-probs from hidden states, as on a device: equal to those from the logits of the model, in chunks of logits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.tiny_models import tiny_model
from tests.tiny import tiny_llama, with_lora
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whet.config.kept_tokens import KeptTokens
from whet.nn import causal_lm, torch_logprobs
from whet.nn.causal_lm import completion_logprobs
from whet.nn.output_head import output_head

PROMPTS = [[1, 5, 9], [2], [3, 4, 5, 6, 7, 8]]
COMPLETIONS = [[10, 11], [12, 13, 14, 15], []]
KEPT = [None, KeptTokens.from_ids([[3, 12], [13], [5, 7, 14], None], 48), None]
VALUES: dict[str, dict[str, Any]] = {
    "log-probs": {},
    "all": {"temperature": 0.7, "return_entropy": True, "differentiable_entropy": True, "return_mean": True},
    "candidates": {"candidates": [np.array([[3, 4], [5, 6]]), np.array([[1, 2]] * 4), np.zeros((0, 2), int)]},
    "kept tokens": {"kept_tokens": KEPT, "return_entropy": True, "differentiable_entropy": True},
    "some tokens": {"completion_mask": [[True, False], [False, True, True, False], []]},
}


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Models on the CPU are computed as on a device."""
    with monkeypatch.context() as patched:
        patched.setattr(causal_lm, "splits_head", lambda device: True)
        patched.setattr(torch_logprobs, "_CHUNK_ELEMENTS", 100)
        yield patched


def values_and_gradients(model: torch.nn.Module, **options: Any) -> list[torch.Tensor]:
    model.zero_grad()
    out = completion_logprobs(model, PROMPTS, COMPLETIONS, **options)
    values = [x for x in (out.logprobs, out.entropy, out.mean) if x is not None]
    weights = torch.Generator().manual_seed(0)
    loss = sum(
        (x * torch.randn(x.shape, generator=weights, dtype=torch.float64)).sum() for x in values if x.requires_grad
    )
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    return [*values, *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_equal_to_logits(model: torch.nn.Module, patch: pytest.MonkeyPatch, tolerance: float, **options: Any) -> None:
    ours = values_and_gradients(model, **options)
    with patch.context() as patched:
        patched.setattr(causal_lm, "splits_head", lambda device: False)
        theirs = values_and_gradients(model, **options)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", ["llama", "gemma2", "granite", "gpt2", "phi-rotary", "qwen3_moe", "gemma4"])
def test_a_family_has_the_values_and_gradients_of_its_logits(case, on_device):
    model = tiny_model(case).double().requires_grad_(True)
    assert output_head(model) is not None
    assert_equal_to_logits(model, on_device, 1e-9)


@pytest.mark.parametrize("name", VALUES)
def test_every_value_and_its_gradient(name, on_device):
    model = tiny_model("gemma2").double().requires_grad_(True)  # soft-capped, with a head that is the embedding
    assert_equal_to_logits(model, on_device, 1e-9, **VALUES[name])


def test_no_token_counts(on_device):
    model = tiny_model("phi-rotary").requires_grad_(True)  # whose head has a bias
    out = completion_logprobs(model, [[1, 2], [3]], [[], []], return_entropy=True)
    assert out.logprobs.shape == (2, 0)
    out.logprobs.sum().backward()
    assert not model.lm_head.bias.grad.any() and not model.lm_head.weight.grad.any()


def test_adapters_and_frozen_weights(on_device):
    assert_equal_to_logits(with_lora(tiny_model("llama"), target_modules=["q_proj"]).double(), on_device, 1e-9)


def test_bfloat16(on_device):
    model = tiny_model("llama").bfloat16().requires_grad_(True)
    ours = values_and_gradients(model, return_entropy=True)
    exact = values_and_gradients(copy.deepcopy(model).float(), return_entropy=True)
    assert ours[0].dtype == torch.float32 and ours[-1].dtype == torch.bfloat16
    on_device.setattr(causal_lm, "splits_head", lambda device: False)
    theirs = values_and_gradients(model, return_entropy=True)
    for one, other, right in zip(ours, theirs, exact, strict=True):
        errors = [((x.detach().float() - right.detach()).norm() / right.detach().norm()).item() for x in (one, other)]
        assert errors[0] < 1.2 * errors[1] + 1e-3


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operator returns."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.n = max([self.n, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


def test_only_a_chunk_of_logits_exists(on_device):
    model = tiny_llama()
    model.resize_token_embeddings(1001, mean_resizing=False)
    model.requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    on_device.setattr(torch_logprobs, "_CHUNK_ELEMENTS", 2002)
    with Largest() as largest:
        out = completion_logprobs(model, [[1, 2]] * 4, [[3] * 10] * 4, return_entropy=True)
        out.logprobs.sum().backward()
    assert 2002 <= largest.n < 40 * 1001 // 2  # 40 tokens; the weight is as large as 32


def test_another_computation_of_logits_is_detected(on_device):
    model = tiny_model("llama").double().requires_grad_(True)
    forward = model.forward

    def divided(*given: Any, **options: Any) -> Any:
        output = forward(*given, **options)
        output.logits = output.logits / 3
        return output

    model.forward = divided
    assert output_head(model) is not None
    assert_equal_to_logits(model, on_device, 1e-9)


def test_heads_that_are_not_computed_apart(on_device):
    assert output_head(with_lora(tiny_llama(), target_modules=["lm_head"])) is None
    hooked = tiny_llama()
    hooked.lm_head.register_forward_hook(lambda module, inputs, output: output * 2)
    assert output_head(hooked) is None
    assert output_head(torch.nn.Linear(2, 2)) is None
    model = tiny_model("llama")
    before = vars(model.lm_head).copy()
    completion_logprobs(model, PROMPTS, COMPLETIONS)
    assert vars(model.lm_head).keys() == before.keys()
