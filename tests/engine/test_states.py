"""States of convolutions and of the gated delta rule: the same bits in any chunk, batch and order of requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.tiny_models import VOCAB, tiny_model

from whet.config.sampling import SamplingParams, StreamKey
from whet.engine import Engine

CASES = (
    "lfm2",
    "lfm2-taps",
    "qwen3_5_text",
    "qwen3_5_text-sizes",
    "granite4-hybrid",
    "granite4-hybrid-groups",
    "nemotron_h",
    "nemotron_h-experts",
)
LENGTHS = (1, 2, 3, 63, 64, 65, 66, 127, 128, 129, 200)


def make(case: str) -> Any:
    return tiny_model(case, max_position_embeddings=512)


def tokens(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, n).tolist()


def prompts() -> list[list[int]]:
    """Return prompts that share all, some or none of their pages."""
    start = tokens(200, 0)
    return [start[:n] for n in LENGTHS] + [[*start[:n], *tokens(9, n)] for n in LENGTHS]


def results(engine: Engine, rows: list[list[int]], sampling: SamplingParams) -> list[Any]:
    return [[(c.token_ids, c.logprobs) for c in group] for group in engine.generate(rows, 3, sampling)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("weights", ["float32", "bf16", "q8_0"])
def test_bits_do_not_depend_on_chunks_batches_and_neighbours(case, weights):
    model, rows = make(case), prompts()
    sampling = SamplingParams(max_new_tokens=70, seed=5)
    with Engine.from_model(model, weights=weights) as engine:
        right = [results(engine, [row], sampling)[0] for row in rows]
    for chunk, batch in ((1, 2), (7, 64), (64, 3), (100, 16)):
        with Engine.from_model(model, weights=weights, prefill_chunk=chunk, max_batch=batch) as engine:
            keys = [StreamKey(0, 0)] * len(rows)  # as if each were the only prompt
            groups = engine.generate(rows, 3, sampling, keys=keys)
            assert [[(c.token_ids, c.logprobs) for c in group] for group in groups] == right


@pytest.mark.parametrize("case", CASES)
def test_decoding_continues_prefill(case):
    """Log-probs of sampled tokens, past several page boundaries, against transformers on the whole sequence."""
    model = make(case)
    with Engine.from_model(model, weights="float32", prefill_chunk=11) as engine:
        for row, group in zip(prompts(), results(engine, prompts(), SamplingParams(max_new_tokens=140)), strict=True):
            for ids, logprobs in group[:1]:
                with torch.no_grad():
                    expected = model(torch.tensor([[*row, *ids]])).logits[0].log_softmax(-1)
                at = torch.arange(len(row) - 1, len(row) + len(ids) - 1)
                np.testing.assert_allclose(logprobs, expected[at, ids].numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_scores_of_prompts_with_common_pages(case):
    """Scores come from pages of earlier requests, and are computed behind them, to the same bits."""
    model, rows = make(case), [row for row in prompts() if len(row) > 1]
    with Engine.from_model(model, weights="float32") as engine:
        right = [engine.logprobs([row])[0].tolist() for row in rows]
    with Engine.from_model(model, weights="float32", prefill_chunk=13) as engine:
        assert [found.tolist() for found in engine.logprobs(rows)] == right
        assert [found.tolist() for found in engine.logprobs(rows[::-1])] == right[::-1]


def test_states_have_separate_pages():
    memory = {}
    for case in ("lfm2", "llama"):
        with Engine.from_model(tiny_model(case), weights="float32", kv_dtype="float32") as engine:
            memory[case] = engine.memory
    keys = 64 * 2 * (8 + 16) * 4  # 2 heads of 8; a page pads values to 16 columns
    assert memory["llama"]["kv_page_bytes"] == 2 * keys and memory["llama"]["kv_state_bytes"] == 0
    assert memory["lfm2"]["kv_page_bytes"] == keys  # one of four layers attends
    assert memory["lfm2"]["kv_state_bytes"] == keys  # 3 layers of 3 inputs of 32 numbers fit a page


def reused(engine: Engine, prompt: list[int], seed: int = 0) -> int:
    """Stream a reply that stays in the cache; return how many tokens of the prompt were found there."""
    with engine.stream(prompt, SamplingParams(max_new_tokens=9, seed=seed), keep=True) as stream:
        list(stream)
        return stream.n_reused


@pytest.mark.parametrize("case", CASES)
def test_where_a_prompt_continues(case):
    """Every 512 tokens of a prompt, at its last whole page, and at the end of a turn."""
    model = tiny_model(case, max_position_embeddings=2048)
    start = tokens(1100, 0)
    with Engine.from_model(model, weights="float32", prefill_chunk=100) as engine:
        assert reused(engine, start) == 0
        for n, found in ((1099, 1088), (1080, 1024), (700, 512), (511, 0)):
            assert reused(engine, [*start[:n], *tokens(30, n)]) == found


def test_states_are_evicted_before_later_pages():
    with Engine.from_model(make("lfm2"), weights="float32") as engine:
        page, state = engine.memory["kv_page_bytes"], engine.memory["kv_state_bytes"]
    assert page == state
    with Engine.from_model(make("lfm2"), weights="float32", kv_bytes=7 * page) as engine:
        first, second = tokens(100, 1), tokens(100, 2)
        assert reused(engine, first) == 0
        assert engine.memory["kv_kept_bytes"] == 4 * page  # two pages, states after the first and after the last token
        assert reused(engine, second) == 0  # of 7 pages it needs two and two states: one of the first is evicted
        assert reused(engine, second, 1) == 64
        assert engine.memory["kv_used_bytes"] == 0 and engine.memory["kv_kept_bytes"] <= 7 * page
        engine.clear_prefix_cache()
        assert engine.memory["kv_kept_bytes"] == 0 and reused(engine, second) == 0
