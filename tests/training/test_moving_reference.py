"""References that follow the policy: the weights after a sync, on modules, adapters and a learner; resuming; errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.raising import assert_raises
from tests.tiny import TinyModel, assert_resumes, tiny_llama, with_lora

from whet.algorithms import DPO, GRPO, KTO
from whet.errors import WhetValueError
from whet.learner import Learner
from whet.models.packed_base import pack_base
from whet.models.sources.live import open_module

ROWS = [([5, 6, 7], [8, 9, 2], [4]), ([3], [7], [6, 6, 5, 2]), ([5, 9], [4, 4], [7, 3]), ([8], [6, 2], [9, 3, 4])]


def learner() -> Learner:
    return Learner(pack_base(open_module(tiny_llama()), weights="float32"), lora_rank=2, compute="float32")


def test_the_reference_moves_by_alpha_after_every_second_step() -> None:
    trainer = DPO(tiny_llama(), ref_sync_steps=2, ref_sync_alpha=0.25, learning_rate=0.01)
    first = [p.clone() for p in trainer.ref_model.parameters()]
    trainer.train_step(ROWS)
    assert all(map(torch.equal, first, trainer.ref_model.parameters()))
    trainer.train_step(ROWS)
    for before, own, moved in zip(first, trainer.model.parameters(), trainer.ref_model.parameters(), strict=True):
        torch.testing.assert_close(moved, 0.75 * before + 0.25 * own, rtol=1e-5, atol=1e-7)
        assert not moved.requires_grad


@pytest.mark.parametrize("make", [tiny_llama, lambda: with_lora(tiny_llama()), learner], ids=["all", "peft", "learner"])
def test_after_a_whole_move_the_policy_is_its_reference(make: Any) -> None:
    trainer = DPO(make(), ref_sync_steps=3, ref_sync_alpha=1.0, learning_rate=0.02, compute="float32")
    losses = [trainer.train_step(ROWS)["loss"] for _ in range(5)]
    assert losses[0] == pytest.approx(math.log(2)) == losses[3]
    assert max(losses[1], losses[2], losses[4]) < math.log(2) - 1e-4


@pytest.mark.parametrize("make", [tiny_llama, learner], ids=["all", "learner"])
def test_a_run_resumes_to_the_bit(make: Any, tmp_path: Any) -> None:
    settings = {"learning_rate": 0.01, "batch_size": 2, "ref_sync_steps": 2, "ref_sync_alpha": 1.0}
    assert_resumes(lambda: DPO(make(), **settings), ROWS, tmp_path, (3, 2))


def test_settings_without_effect_are_rejected() -> None:
    assert_raises(
        WhetValueError, ("ref_sync_alpha", "0.5", "ref_sync_steps is 0"), KTO, tiny_llama(), ref_sync_alpha=0.5
    )
    assert_raises(
        WhetValueError, ("ref_sync_steps", "no reference"), DPO, tiny_llama(), ref_sync_steps=2, reference_free=True
    )
    assert_raises(WhetValueError, ("ref_sync_steps", "no reference"), GRPO, tiny_llama(), beta=0.0, ref_sync_steps=2)
    precomputed = {"precompute_reference": True, "ref_sync_steps": 2}
    assert_raises(WhetValueError, ("ref_sync_steps", "precompute_reference"), DPO, tiny_llama(), **precomputed)
    for model in (learner(), with_lora(tiny_llama())):
        assert_raises(WhetValueError, ("DPO", "ref_sync_alpha", "0.6", "adapters"), DPO, model, ref_sync_steps=2)
    assert_raises(WhetValueError, ("ref_model", "parameter"), DPO, TinyModel(), tiny_llama(), ref_sync_steps=2)
