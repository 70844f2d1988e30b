"""Predicted memory of runs, and advice for runs that do not fit."""

from __future__ import annotations

import dataclasses

from whet.models.sizes import load_source
from whet.models.sources.pretrained import open_pretrained
from whet.runs.estimate import estimate_run_memory
from whet.runs.memory import suggest_settings
from whet.runs.settings import DPORun, SFTRun
from whet.training.sizes import Lengths


def test_memory_advice_is_the_smallest_change_that_fits(tiny_model):
    source = open_pretrained(tiny_model)
    lengths, options = Lengths(100, 100), {"interpreter": 0}

    def total(run):
        return estimate_run_memory(run, source, lengths, **options).total

    run = DPORun(batch_size=64, max_tokens_per_step=1536)
    recomputed = dataclasses.replace(run, activation_bytes=0)
    fewer = dataclasses.replace(recomputed, max_tokens_per_step=384)
    for available, advice in (
        (total(recomputed), "With --activation-bytes 0 it"),
        (total(dataclasses.replace(recomputed, max_tokens_per_step=768)), "--max-tokens-per-step 768 it"),
        (total(fewer), "With --activation-bytes 0 --max-tokens-per-step 384 it"),
        (total(dataclasses.replace(fewer, precompute_reference=True)), "--precompute-reference"),
        (100, "No setting makes it fit"),
    ):
        assert advice in suggest_settings(run, source, lengths, available, **options)
    rows = DPORun(batch_size=64, micro_batch_size=4)
    least = total(dataclasses.replace(rows, micro_batch_size=1, activation_bytes=0))
    assert "--micro-batch-size 1 it" in suggest_settings(rows, source, lengths, least, **options)
    source, small = load_source("smollm-135m"), SFTRun(batch_size=64, max_tokens_per_step=256)
    least = total(dataclasses.replace(small, lora_rank=16, activation_bytes=0))
    assert "--lora-rank 16 it" in suggest_settings(small, source, lengths, least, **options)


def test_advice_for_a_run_out_of_memory_names_a_smaller_base(tiny_model):
    source, lengths = open_pretrained(tiny_model), Lengths(10, 10)
    run = SFTRun(model=str(tiny_model), lora_rank=2, base="bf16", max_tokens_per_step=256)

    def total(**settings):
        return estimate_run_memory(SFTRun(lora_rank=2, **settings), source, lengths, interpreter=0).total

    available = total(base="bf16", activation_bytes=0)
    assert "With --activation-bytes 0 " in suggest_settings(run, source, lengths, available, interpreter=0)
    available = total(base="q8_0", activation_bytes=0)
    assert "With --activation-bytes 0 --base q8_0 " in suggest_settings(run, source, lengths, available, interpreter=0)
