"""The prefix cache of retained streams: later prompts compute only new tokens, to the same bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from tests.engine.tiny_models import VOCAB, tiny_model
from tests.raising import assert_raises
from tests.tiny import with_lora

from whet.config.sampling import SamplingParams, StreamKey
from whet.engine import Engine, EngineBusyError
from whet.engine.session import Session

SAMPLING = SamplingParams(max_new_tokens=9, seed=4)


@pytest.fixture
def model() -> Any:
    return tiny_model("llama", max_position_embeddings=512)


@pytest.fixture(params=["llama", "lfm2"])
def any_model(request) -> Any:
    """Attention only, and with the state of convolutions, which is not kept at every token."""
    return tiny_model(request.param, max_position_embeddings=512)


def within_page(model: Any, n: int) -> int:
    """Return how many tokens of a retained sequence a prompt reuses if it shares the first n and then diverges."""
    return n if model.config.model_type == "llama" else n // 64 * 64


def engine_of(model: Any, **options: Any) -> Engine:
    return Engine.from_model(model, weights="float32", **options)


def tokens(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, n).tolist()


def stream(engine: Engine, prompt: list[int], sampling: SamplingParams = SAMPLING, **options: Any) -> tuple[Any, int]:
    """Return the tokens and log-probs of a retained stream, and the number of reused prompt tokens."""
    with engine.stream(prompt, sampling, keep=True, **options) as drawn:
        return list(drawn), drawn.n_reused


def fresh_tokens(model: Any, prompt: list[int], sampling: SamplingParams = SAMPLING) -> Any:
    with engine_of(model) as engine:
        return list(engine.stream(prompt, sampling))


@pytest.mark.parametrize("weights", ["float32", "bf16", "int8"])
def test_chat_turn_computes_only_its_new_tokens(any_model, weights, monkeypatch):
    """Each step computes one prompt token here, and one more step samples the first token of the reply."""
    steps = [0]
    step = Session.step
    monkeypatch.setattr(Session, "step", lambda self, job: (steps.__setitem__(0, steps[0] + 1), step(self, job))[1])
    with (
        Engine.from_model(any_model, weights=weights, prefill_chunk=1) as engine,
        Engine.from_model(any_model, weights=weights) as other,
    ):
        history: list[int] = []
        for turn, n_new in enumerate((70, 5, 64, 1, 30)):
            prompt = [*history, *tokens(n_new, turn)]
            sampling = dataclasses.replace(SAMPLING, seed=turn)
            steps[0] = 0
            with engine.stream(prompt, sampling, keep=True) as drawn:
                first = next(drawn)
                n_computed = steps[0] - 1
                reply = [first, *drawn]
            # The last token of the previous reply is computed with the next message.
            assert n_computed == (n_new + 1 if history else n_new) == len(prompt) - drawn.n_reused
            assert reply == list(other.stream(prompt, sampling))
            history = [*prompt, *(token.token_id for token in reply)]


def test_prefix_cache_at_diverging_conversations(any_model):
    model = any_model
    with engine_of(model) as engine:
        prompt = tokens(100, 0)
        first, _ = stream(engine, prompt)
        again = dataclasses.replace(SAMPLING, seed=5)
        second, n_reused = stream(engine, prompt, again)
        assert n_reused == within_page(model, 99) and second == fresh_tokens(model, prompt, again) != first
        other = [*prompt[:90], *tokens(20, 1)]
        assert stream(engine, other) == (fresh_tokens(model, other), within_page(model, 90))
        # The first conversation continues too: its pages are retained as well.
        history = [*prompt, *(token.token_id for token in first), 7]
        assert stream(engine, history) == (fresh_tokens(model, history), len(history) - 2)


def test_cancelled_stream_retains_its_pages(any_model):
    model = any_model
    with engine_of(model) as engine:
        prompt = tokens(80, 0)
        with engine.stream(prompt, SAMPLING, keep=True) as drawn:
            history = [*prompt, next(drawn).token_id, next(drawn).token_id]
        assert stream(engine, [*history, 5]) == (fresh_tokens(model, [*history, 5]), len(history) - 1)
    with engine_of(model, prefill_chunk=1) as engine:
        with engine.stream(prompt, SAMPLING, keep=True) as drawn:
            for _ in range(70):  # in the middle of its prompt
                drawn._call.step()
        assert engine.memory["kv_kept_bytes"] == 0
        assert stream(engine, prompt) == (fresh_tokens(model, prompt), 0)


def test_retained_pages_are_reported_and_evicted(model):
    with engine_of(model) as engine:
        page = engine.memory["kv_page_bytes"]
    with engine_of(model, kv_bytes=4 * page) as engine:
        prompt = tokens(100, 0)
        engine.generate([prompt], 1, SAMPLING)
        list(engine.stream(prompt, SAMPLING))
        assert engine.memory["kv_kept_bytes"] == engine.memory["kv_used_bytes"] == 0
        stream(engine, prompt)
        assert engine.memory["kv_kept_bytes"] == 2 * page and engine.memory["kv_used_bytes"] == 0
        for row in (tokens(110, 1), tokens(110, 2)):  # each needs three pages, with a copy of its last one
            [[completion]] = engine.generate([row], 1, SAMPLING)
            assert completion.token_ids == [token.token_id for token in fresh_tokens(model, row)]
        assert engine.memory["kv_kept_bytes"] == page  # the first of the two, which is evicted last
        assert stream(engine, prompt) == (fresh_tokens(model, prompt), 64)


def test_prefix_cache_is_per_weights_and_adapter(model):
    lora = with_lora(model, 1, b_std=0.5, r=2, target_modules=["q_proj"]).eval()
    with engine_of(lora) as engine:
        number = engine.add_adapter(random_adapter(2))
        prompt = tokens(100, 0)
        own, _ = stream(engine, prompt)
        other, n_reused = stream(engine, prompt, adapter=number)
        assert n_reused == 0 and other != own
        assert stream(engine, prompt) == (own, 99)
        engine.remove_adapter(number)
        assert engine.memory["kv_kept_bytes"] == 0
        stream(engine, prompt)
        for name, parameter in lora.named_parameters():
            if "up_proj" in name:
                parameter.data.mul_(1.5)
        engine.sync(lora)
        assert engine.memory["kv_kept_bytes"] == 0
        after, n_reused = stream(engine, prompt)
        assert n_reused == 0 and after != own
        assert after == fresh_tokens(lora, prompt)


def random_adapter(seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {"model.layers.0.self_attn.q_proj": (draw.normal(size=(2, 32)), draw.normal(size=(32, 2)), 1.0)}


def test_release_memory_preserves_retained_pages_and_calls(model):
    with engine_of(model) as engine:
        prompt = tokens(150, 0)
        history, _ = stream(engine, prompt)
        other = tokens(200, 1)
        engine.release_memory()
        with engine.stream(other, SAMPLING) as running:
            first = next(running)
            assert engine.memory["workspace_committed_bytes"] == engine.memory["workspace_bytes"] > 0
            assert engine.release_memory() == engine.memory["workspace_bytes"]
            assert [first, *running] == fresh_tokens(model, other)
        memory = engine.memory
        assert memory["kv_committed_bytes"] > memory["kv_kept_bytes"] > 0
        freed = memory["kv_committed_bytes"] - memory["kv_kept_bytes"]
        assert engine.release_memory() == freed + memory["workspace_bytes"]
        assert engine.memory["kv_committed_bytes"] == memory["kv_kept_bytes"]
        assert engine.release_memory() == engine.memory["workspace_committed_bytes"] == 0
        again = [*prompt, *(token.token_id for token in history), 5]
        assert stream(engine, again) == (fresh_tokens(model, again), len(again) - 2)


def test_retained_pages_can_be_evicted(model):
    with engine_of(model) as engine:
        prompt = tokens(100, 0)
        right, _ = stream(engine, prompt)
        assert engine.memory["kv_kept_bytes"] > 0
        running = engine.stream(tokens(10, 1), SAMPLING)
        next(running)
        assert_raises(EngineBusyError, ("Engine.clear_prefix_cache", "1 calls"), engine.clear_prefix_cache)
        running.close()
        engine.clear_prefix_cache()
        assert engine.memory["kv_kept_bytes"] == 0
        assert stream(engine, prompt) == (right, 0)


@pytest.mark.parametrize("case", ["olmoe", "lfm2_moe"])
def test_the_experts_of_reused_tokens_are_reported(case):
    """The first completions compute their prompts together, the next reuse pages, and a part of one."""
    model = tiny_model(case, max_position_embeddings=512)
    sampling = dataclasses.replace(SAMPLING, experts=True)
    shared = tokens(150, 1)
    prompts = [[*shared, 5, 6], [*shared[:70], 9, 9], [*shared, 7], [3, 4]]
    with engine_of(model) as engine:
        together = engine.generate(prompts, 3, sampling)
        kept, _ = stream(engine, prompts[0])
        turn = [*prompts[0], *(token.token_id for token in kept[:-1]), *tokens(5, 2)]
        call = engine.open_prompt(turn, 2, sampling, keep=True)
        while not call.is_done():
            call.step()
        assert call.n_reused >= (159 if case == "olmoe" else 128)
        together.append(engine.completions(call, 2, sampling))
        call.close()
    for i, (prompt, group) in enumerate(zip([*prompts, turn], together, strict=True)):
        with engine_of(model) as engine:
            fresh = engine.generate([prompt], len(group), sampling, keys=[StreamKey(0 if prompt is turn else i, 0)])[0]
        for found, expected in zip(group, fresh, strict=True):
            assert found == expected
            assert found.experts is not None and len(found.experts) == len(prompt) + len(found.token_ids) - 1
            np.testing.assert_array_equal(found.experts, expected.experts)
