"""LoRA+: matrices B of adapters have another learning rate, in torch and in a learner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.raising import assert_raises
from tests.tiny import assert_resumes, tiny_llama, weights, with_lora

from whet.algorithms.sft import SFT
from whet.errors import WhetValueError
from whet.learner import Learner
from whet.models.packed_base import pack_base
from whet.models.sources.live import open_module

ROWS = [([5, 6], [7, 8, 9]), ([4], [6, 5])]


def changes(trainer: Any, parameters: Any) -> dict[str, float]:
    """The largest change of A and of B in a step; AdamW's first step changes a parameter by about its rate."""
    before = {name: value.copy() for name, value in parameters().items()}
    trainer.train_step(ROWS)
    found = {name: float(np.abs(value - before[name]).max()) for name, value in parameters().items()}
    return {part: max(found[name] for name in found if part in name) for part in ("lora_A", "lora_B")}


def test_rates_of_a_and_b() -> None:
    settings = {"learning_rate": 1e-3, "loraplus_lr_ratio": 16.0, "compute": "float32"}
    model = with_lora(tiny_llama(), b_std=0.1)
    of_torch = changes(
        SFT(model, **settings), lambda: {name: p.numpy() for name, p in weights(model).items() if "lora" in name}
    )
    assert of_torch == {"lora_A": pytest.approx(1e-3, rel=1e-3), "lora_B": pytest.approx(16e-3, rel=1e-3)}
    learner = Learner(pack_base(open_module(tiny_llama()), weights="float32"), lora_rank=2, compute="float32")
    for each in learner.adapters:
        each.b[:] = 0.1
    learner.update()
    names = {"lora_A": "a", "lora_B": "b"}
    of_learner = changes(
        SFT(learner, **settings),
        lambda: {f"{each.name}.{name}": getattr(each, at) for each in learner.adapters for name, at in names.items()},
    )
    assert of_learner == of_torch or of_learner == pytest.approx(of_torch, rel=1e-3)


def test_a_run_resumes_to_the_bit(tmp_path: Any) -> None:
    settings = {"learning_rate": 1e-3, "loraplus_lr_ratio": 4.0, "batch_size": 1}
    assert_resumes(lambda: SFT(with_lora(tiny_llama(), b_std=0.1), **settings), ROWS, tmp_path)


def test_it_needs_adapters() -> None:
    assert_raises(
        WhetValueError, ("loraplus_lr_ratio is 4", "no LoRA adapters"), SFT, tiny_llama(), loraplus_lr_ratio=4
    )
    assert_raises(WhetValueError, ("loraplus_lr_ratio", "0"), SFT, tiny_llama(), loraplus_lr_ratio=0.0)
