"""Mixtures of experts: the definition worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from whet.models.architecture import ModelConfig
from whet.models.reference import naive_forward, naive_route

SIZES: dict[str, Any] = {
    "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "head_dim": 2, "hidden_dim": 2, "ffn_dim": 3, "vocab_size": 5,
    "max_position": 8, "norm": "rms", "norm_eps": 0.0, "windows": (0,), "attention_scale": 1.0, "n_experts": 4,
    "n_used_experts": 2, "expert_dim": 1,
}  # fmt: skip


def route(logits: list[float], correction: list[float] | None = None, **options: Any) -> tuple[list[int], np.ndarray]:
    """Route one token with these logits."""
    config = ModelConfig(**{**SIZES, "n_experts": len(logits), **options})
    layer = {"router": np.array([[logit, 0.0] for logit in logits])}
    if correction is not None:
        layer["router_correction"] = np.array(correction)
    chosen, weights = naive_route(config, layer, np.array([[1.0, 7.0]]))
    return chosen[0].tolist(), weights[0]


def test_softmax_router():
    """e^0, e^(log 2), e^(log 5), e^(log 2): probabilities 0.1, 0.2, 0.5, 0.2; of the equal ones, the first."""
    logits = [0.0, np.log(2), np.log(5), np.log(2)]
    chosen, weights = route(logits)
    assert chosen == [2, 1]
    np.testing.assert_allclose(weights, [0.5, 0.2], rtol=1e-12)
    np.testing.assert_allclose(route(logits, router_normalised=True)[1], [5 / 7, 2 / 7], rtol=1e-12)
    np.testing.assert_allclose(route(logits, n_used_experts=3, router_scale=2.0)[1], [1.0, 0.4, 0.4], rtol=1e-12)


def test_sigmoid_router_is_corrected_for_the_choice_only():
    logits = [np.log(3), 0.0, -np.log(3), -np.log(9)]
    options = {"router": "sigmoid", "router_correction": True, "router_normalised": True, "router_eps": 0.1}
    chosen, weights = route(logits, [-1.0, 0.0, 0.1, 0.35], **options)
    assert chosen == [1, 3]
    np.testing.assert_allclose(weights, [0.5 / 0.7, 0.1 / 0.7], rtol=1e-12)
    assert route(logits, [0.0] * 4, **options)[0] == [0, 1]


@pytest.mark.parametrize("gated", [True, False])
def test_output_of_a_mixture_and_its_shared_expert(gated):
    """One token of (3, 4), normalised to (3, 4) / sqrt(12.5); attention adds 0."""
    config = ModelConfig(
        **SIZES, gated=gated, activation="relu2", shared_dim=1, shared_gate=True, tied_head=True, router_normalised=True
    )
    weights = {slot: np.zeros(shape) for slot, shape in config.slots().items()}
    weights["embedding"][1] = [3.0, 4.0]
    for name in ("layers.0.norm1", "layers.0.norm2", "final_norm"):
        weights[f"{name}.weight"][:] = 1.0
    up = "gate_up" if gated else "up"
    weights["layers.0.router"][:] = [[0, 0], [1, 0], [0, 0], [1, 0]]  # experts 1 and 3, with weight 1/2
    rows = np.array([[1.0, 0.0], [0.0, 1.0]][: 2 if gated else 1])
    weights[f"layers.0.experts_{up}"][:] = np.concatenate([e * rows for e in range(4)])
    weights["layers.0.experts_down"][:] = np.repeat([0.0, 1.0, 10.0, 100.0], 2)[:, None]
    weights[f"layers.0.{up}"][:] = rows
    weights["layers.0.down"][:] = [[1000.0], [0.0]]
    a, b = 3 / np.sqrt(12.5), 4 / np.sqrt(12.5)
    expert = a * a * b if gated else a * a
    powers = {1: 1, 3: 27 if gated else 9}
    mixed = sum(0.5 * powers[e] * down * expert for e, down in ((1, 1.0), (3, 100.0)))
    hidden = np.array([3.0, 4.0]) + mixed + np.array([0.5 * 1000.0 * expert, 0.0])
    expected = hidden / np.sqrt((hidden**2).mean()) @ [3.0, 4.0]
    np.testing.assert_allclose(naive_forward(config, weights, [1])[0, 1], expected, rtol=1e-12)


def test_dense_layers_of_a_mixture_have_the_width_of_the_mlp():
    config = ModelConfig(**{**SIZES, "n_layers": 2, "windows": (0, 0), "moe_layers": (False, True)})
    slots = config.slots()
    assert slots["layers.0.gate_up"] == (6, 2) and "layers.1.gate_up" not in slots
    assert slots["layers.1.experts_gate_up"] == (8, 2) and slots["layers.1.experts_down"] == (8, 1)
    assert not config.is_moe(0) and config.is_moe(1)
    assert dataclasses.replace(config, moe_layers=()).is_moe(0)
