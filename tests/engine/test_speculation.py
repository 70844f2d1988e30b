"""Speculative decoding: several tokens of a step, and the same completions and streams as without it."""

from __future__ import annotations

import pytest
import torch
import transformers
from tests.raising import mentions

from whet.config.sampling import SamplingParams
from whet.engine import Engine
from whet.errors import WhetTypeError

PROMPT = [3, 9, 4, 11, 7, 3, 9, 4, 11, 7, 3, 9]


@pytest.fixture(scope="module")
def engines():
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=400,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    plain = Engine.from_model(model, weights="float32", speculation=False)
    return Engine.from_model(model, weights="float32"), plain


def facts(completion):
    return list(completion.token_ids), list(completion.logprobs), completion.finish_reason


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("n", [1, 3])
def test_completions_are_equal(engines, temperature, n):
    sampling = SamplingParams(max_new_tokens=300, temperature=temperature, top_logprobs=2)
    given, right = (engine.generate([PROMPT, PROMPT[:5]], n, sampling) for engine in engines)
    for a, b in zip([each for row in given for each in row], [each for row in right for each in row], strict=True):
        assert facts(a) == facts(b) and a.top_logprobs == b.top_logprobs


def test_text_that_repeats_itself_takes_fewer_steps(engines):
    speculating, plain = engines
    drafted, right = speculating.drafts
    speculating.generate([PROMPT], 1, SamplingParams(max_new_tokens=300, temperature=0.0))
    more_drafted, more_right = speculating.drafts
    assert more_drafted - drafted >= more_right - right > 30  # a greedy tiny model ends in a loop
    assert plain.drafts == (0, 0)


def test_a_stop_token_within_a_draft_ends_the_completion(engines):
    greedy = SamplingParams(max_new_tokens=300, temperature=0.0)
    tokens = list(engines[1].generate([PROMPT], 1, greedy)[0][0].token_ids)
    late = next(token for token in reversed(tokens) if tokens.index(token) == max(map(tokens.index, set(tokens))))
    stop = SamplingParams(max_new_tokens=300, temperature=0.0, stop_token_ids=[late], min_new_tokens=150)
    given, right = (engine.generate([PROMPT], 1, stop)[0][0] for engine in engines)
    assert facts(given) == facts(right)


def test_a_stream_has_every_token(engines):
    sampling = SamplingParams(max_new_tokens=200, temperature=0.0)
    given, right = (list(engine.stream(PROMPT, sampling)) for engine in engines)
    assert [(t.token_id, t.logprob) for t in given] == [(t.token_id, t.logprob) for t in right] and len(given) == 200


def test_penalties_and_recorded_sets_decode_one_by_one(engines):
    speculating = engines[0]
    before = speculating.drafts
    for settings in ({"repetition_penalty": 1.1}, {"presence_penalty": 0.5}):
        speculating.generate([PROMPT], 1, SamplingParams(max_new_tokens=60, temperature=0.0, **settings))
    assert speculating.drafts == before


def test_another_type_is_rejected():
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(WhetTypeError, match=mentions("speculation", "'no'", "True or False")):
        Engine.from_model(transformers.LlamaForCausalLM(config), speculation="no")
