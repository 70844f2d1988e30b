"""Speculative decoding: several tokens of a step, and the same completions and streams as without it."""

from __future__ import annotations

import dataclasses
from itertools import chain

import pytest
import torch
import transformers
from tests.raising import mentions

from whet.config.sampling import SamplingParams
from whet.engine import Engine
from whet.errors import WhetTypeError, WhetValueError
from whet.models.packed_base import pack_base
from whet.models.sources.live import open_module

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


class TestDraftModels:
    """A draft model proposes tokens; completions equal the completions of decoding one by one."""

    @staticmethod
    def model(seed, vocab_size=40, hidden_size=32):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=400,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)

    @pytest.fixture
    def plain(self):
        return Engine.from_model(self.model(5), weights="float32", speculation=False)

    def drafting(self, draft, **options):
        return Engine.from_model(self.model(5), weights="float32", draft=pack_base(open_module(draft)), **options)

    @pytest.mark.parametrize("draft", [(5, 40, 32), (6, 40, 16), (7, 33, 16), (8, 47, 16)])
    @pytest.mark.parametrize("n", [1, 3])
    def test_completions_are_equal(self, plain, draft, n):
        settings = SamplingParams(max_new_tokens=200, min_new_tokens=90, stop_token_ids=[39, 2], logit_bias={39: 1.5})
        with self.drafting(self.model(*draft), prefill_chunk=4) as engine:
            for temperature in (0.0, 1.0):
                sampling = dataclasses.replace(settings, temperature=temperature, top_logprobs=2)
                given, right = (each.generate([PROMPT, PROMPT[:5]], n, sampling) for each in (engine, plain))
                for a, b in zip(chain(*given), chain(*right), strict=True):
                    assert facts(a) == facts(b) and a.top_logprobs == b.top_logprobs

    @pytest.mark.timing
    def test_drafts_of_a_faster_model_are_computed(self):
        def model(n_layers):
            torch.manual_seed(5)
            config = transformers.LlamaConfig(
                vocab_size=400, hidden_size=256, intermediate_size=1024, num_hidden_layers=n_layers,
                num_attention_heads=4, max_position_embeddings=400, initializer_range=0.2,
            )  # fmt: skip
            return transformers.LlamaForCausalLM(config)

        large, small = model(20), model(1)
        small.load_state_dict(large.state_dict(), strict=False)
        for layer in large.model.layers[1:]:  # which add nothing: the model computes what its first layer does
            layer.self_attn.o_proj.weight.data.zero_()
            layer.mlp.down_proj.weight.data.zero_()
        plain = Engine.from_model(large, weights="float32", speculation=False)
        engine = Engine.from_model(large, weights="float32", draft=pack_base(open_module(small)))
        sampling = SamplingParams(max_new_tokens=300, temperature=1.0)
        given, right = (each.generate([PROMPT], 1, sampling)[0][0] for each in (engine, plain))
        assert facts(given) == facts(right)
        assert engine.drafts[1] > 50  # right tokens of drafts

    def test_memory(self):
        with self.drafting(self.model(6)) as engine:
            before = engine.memory["draft_bytes"]
            assert before == engine.draft.nbytes
            engine.generate([PROMPT], 1, SamplingParams(max_new_tokens=100))
            assert engine.memory["draft_bytes"] > before
            engine.clear_prefix_cache()
            assert engine.release_memory() > 0
            assert engine.memory["draft_bytes"] == before

    def test_refusals(self, tmp_path):
        with pytest.raises(WhetTypeError, match=mentions("draft", "3", "folder or .gguf")):
            Engine.from_model(self.model(5), draft=3)
        base = pack_base(open_module(self.model(5)))
        with pytest.raises(WhetValueError, match=mentions("draft", "speculation is False")):
            Engine.from_model(self.model(5), draft=base, speculation=False)
        config = transformers.Lfm2Config(
            vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, layer_types=["conv", "full_attention"], conv_L_cache=3,
        )  # fmt: skip
        recurrent = transformers.Lfm2ForCausalLM(config)
        with pytest.raises(WhetValueError, match=mentions("the draft model has convolutions")):
            Engine.from_model(self.model(5), draft=pack_base(open_module(recurrent)))
        with pytest.raises(WhetValueError, match=mentions("the model has convolutions")):
            Engine.from_model(recurrent, draft=base)
        with pytest.raises(WhetValueError, match=mentions("nothing")):
            Engine.from_model(self.model(5), draft=tmp_path / "nothing")
        self.model(6).save_pretrained(tmp_path / "draft")
        with pytest.raises(WhetValueError, match=mentions("draft model", "no tokenizer.json")):
            Engine.from_model(self.model(5), draft=tmp_path / "draft", tokenizer=tmp_path)
