"""Adapters of a run, and the base that they are trained on."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from tests.engine.tiny_models import tiny_model as make_tiny
from tests.raising import assert_raises
from tests.tiny import with_lora
from transformers import AutoModelForCausalLM

from whet import _core
from whet.errors import WhetValueError
from whet.models.export import read_adapters
from whet.models.families import is_skipped
from whet.models.sources.pretrained import open_pretrained
from whet.nn import frozen_model
from whet.runs.adapters import plan_adapters
from whet.runs.models import add_adapters, load_model
from whet.runs.settings import GRPORun, SFTRun

NARROW = "bf16" if "bf16" in _core.isa() else "float32"


def test_sampling_settings_that_need_float_weights(tiny_model):
    source = open_pretrained(tiny_model)

    def plan(on_gpu=False, **settings):
        return plan_adapters(GRPORun(model=str(tiny_model), lora_rank=2, **settings), source, "here", on_gpu)

    assert plan().base == NARROW and plan(engine="torch", lora_layers=["embed_tokens"]).base == NARROW
    assert plan(lora_layers=["embed_tokens"]).floats_reason == "the engine merges adapters outside the layers into them"
    assert plan(rollout_weights="int8").floats_reason == "rollout_weights is 'int8'"
    assert plan(on_gpu=True).base == "none"
    assert plan(lora_layers=["lm_head"], base="q8_0").base == "q8_0"  # torch samples, with a warning
    assert plan_adapters(SFTRun(lora_rank=2, lora_layers=["lm_head"]), source, "here").base == NARROW


def test_dora_needs_float_weights_in_torch(tiny_model, tmp_path):
    with_lora(AutoModelForCausalLM.from_pretrained(tiny_model), use_dora=True, r=2).save_pretrained(tmp_path)
    source, run = open_pretrained(tiny_model), SFTRun(model=str(tiny_model), adapter=str(tmp_path))
    assert plan_adapters(run, source, "here").base == NARROW
    run.backend = "torch"
    facts = "use_dora=True needs float weights as backend is 'torch'"
    assert plan_adapters(run, source, "here").floats_reason == facts
    run.base = "q8_0"
    facts = "base is 'q8_0'", "use_dora=True", "float weights", "backend is 'torch'", "--base none"
    assert_raises(WhetValueError, facts, plan_adapters, run, source, "here")
    run = SFTRun(model=str(tiny_model), lora_rank=2, use_dora=True, lora_dropout=0.1)
    assert "lora_dropout is 0.1" in plan_adapters(run, source, "here").floats_reason


def test_towers_are_neither_trained_nor_adapted(tiny_model, tmp_path):
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    make_tiny("gemma3-vision", vocab_size=open_pretrained(tiny_model).config.vocab_size).save_pretrained(folder)
    model, _ = load_model(str(folder), "float32")
    assert {p.requires_grad for name, p in model.named_parameters() if is_skipped(name)} == {False}
    assert {p.requires_grad for name, p in model.named_parameters() if not is_skipped(name)} == {True}
    add_adapters(model, SFTRun(model=str(folder), lora_rank=2)).save_pretrained(tmp_path / "adapter")
    # Seven matrices in each of two layers, by PEFT's names of the whole model.
    assert len(read_adapters(tmp_path / "adapter", open_pretrained(folder), "here")) == 14
    ids, plain = torch.tensor([[1, 2, 3]]), load_model(str(folder), "float32")[0].eval()
    torch.testing.assert_close(frozen_model(folder, "float32")(ids).logits, plain(ids).logits)
