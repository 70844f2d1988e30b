"""Every switch of ``ModelConfig`` separately: the engine matches the NumPy definition on random weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.engine.tiny_models import VOCAB, tiny_config, token_ids

from whet.engine import Engine
from whet.models.architecture import RowSlice
from whet.models.families import model_config
from whet.models.reference import naive_forward
from whet.models.slots import ModelSource

KNOBS: dict[str, dict[str, Any]] = {
    "none": {},
    "no norms before": {"pre_norm": False, "post_norm": True},
    "norms before and behind": {"post_norm": True},
    "layer norms behind": {"post_norm": True, "norm": "layer"},
    "norms of heads": {"qk_norm": True},
    "one norm of all heads": {"qk_norm": True, "qk_norm_whole": True},
    "norms of rotated heads": {"qk_norm": True, "qk_norm_rotated": True},
    "scaled queries": {"query_log_scale": 0.5, "query_scale_length": 3},
    "sinks": {"sinks": True},
    "layers that do not rotate": {"rope_layers": (False, True)},
    "layers with other frequencies": {"local_layers": (True, False), "local_inv_freq": (1.0, 0.3, 0.1, 0.03)},
    "a factor of cosines": {"attention_factor": 1.2, "local_layers": (True, False), "local_inv_freq": (1.0,) * 4},
    "embedding_scale": {"embedding_scale": 3.0},
    "residual_scale": {"residual_scale": 0.5, "post_norm": True},
    "logits_scale": {"logits_scale": 0.25},
    "attention_softcap": {"attention_softcap": 1.5},
    "logits_softcap": {"logits_softcap": 4.0},
    "a gate of gelu": {"activation": "gelu_tanh"},
    "relu2 without a gate": {"activation": "relu2", "gated": False},
}


@pytest.mark.parametrize("knob", KNOBS)
def test_each_switch_matches_the_definition(knob):
    config = replace(model_config(tiny_config("llama")), **KNOBS[knob])
    rng, ids = np.random.default_rng(0), token_ids()[0].tolist()
    weights = {
        slot: (rng.normal(size=shape) * 0.3 if len(shape) == 2 else rng.uniform(0.5, 1.5, shape)).astype(np.float32)
        for slot, shape in config.slots().items()
    }
    slices = [RowSlice(slot, 0, rows, "float32") for slot, rows in weights.items()]
    right = naive_forward(config, {slot: rows.astype(np.float64) for slot, rows in weights.items()}, ids)
    with Engine(ModelSource(config, lambda: iter(slices), {}), weights="float32") as engine:
        found = engine.logits(ids)
    assert found.shape == (len(ids), VOCAB)
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-4 * np.abs(right).max())
