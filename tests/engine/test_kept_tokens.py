"""The tokens that each token was drawn from, as the engines record them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.byte_tokenizer import EOS, byte_tokenizer
from tests.raising import assert_raises

pytest.importorskip("transformers")
from tests.engine.tiny_models import tiny_model

from whet import Engine, SamplingParams, WhetValueError
from whet.config.kept_tokens import KeptTokens
from whet.learner.batch import check_rows, select_kept
from whet.rollout.torch_engine import Sampler, TorchEngine

PROMPTS = [[5, 6, 7, 8], [9, 3]]
SETTINGS = {
    "top-k": {"top_k": 5},
    "top-k of one": {"top_k": 1},
    "top-p": {"top_p": 0.6},
    "min-p": {"min_p": 0.3},
    "all filters": {"top_k": 40, "top_p": 0.9, "min_p": 0.05, "temperature": 0.7},
    "bans": {"min_new_tokens": 3, "stop_token_ids": [2, 7]},
    "bans and a filter": {"min_new_tokens": 8, "stop_token_ids": [2, 7], "top_p": 0.99},
    "greedy": {"temperature": 0.0, "top_k": 3},
    "nothing": {},
}


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", initializer_range=0.3)


@pytest.fixture(scope="module")
def engine(model):
    return Engine.from_model(model, weights="float32")


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_recorded_sets_are_the_support_of_each_distribution(engine, model, settings):
    sampling = SamplingParams(max_new_tokens=8, kept_tokens=True, seed=4, **settings)
    groups = engine.generate(PROMPTS, 3, sampling)
    sampler = Sampler(sampling)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            kept, ids = completion.kept_tokens, completion.token_ids
            assert len(kept) == len(ids) and kept.vocab_size == engine.config.vocab_size
            logits = torch.from_numpy(engine.logits(prompt + ids))[len(prompt) - 1 : -1]
            for t, token in enumerate(ids):
                z = sampler.filtered_logits(logits[t : t + 1], n_drawn=t)[0]
                expected = np.flatnonzero(z > -torch.inf)
                found = np.arange(len(z)) if kept[t] is None else kept[t]
                assert found.tolist() == expected.tolist()
                assert z.log_softmax(-1)[token] == pytest.approx(completion.logprobs[t], abs=2e-5)
    of_torch = TorchEngine(model).generate(PROMPTS, 3, sampling)
    for group, others in zip(groups, of_torch, strict=True):
        for own, other in zip(group, others, strict=True):
            assert own.token_ids == other.token_ids
            n = len(own.token_ids)
            assert np.array_equal(own.kept_tokens.mask(0, n), other.kept_tokens.mask(0, n))


def test_sets_of_a_grammar():
    model = tiny_model("llama", vocab_size=EOS + 4)
    tokenizer = byte_tokenizer()
    engine = Engine.from_model(model, weights="float32", tokenizer=tokenizer)
    [a], [b], [x] = (tokenizer.encode(letter).ids for letter in "abx")
    sampling = SamplingParams(regex="[ab]x?", stop_token_ids=[EOS], max_new_tokens=9, kept_tokens=True)
    for [completion] in engine.generate([[5]] * 6, 1, sampling):
        sets = [completion.kept_tokens[t].tolist() for t in range(len(completion.token_ids))]
        assert sets[0] == [a, b] and sets[1] == [x, EOS] and sets[2:] in ([], [[EOS]])


def test_nothing_is_recorded_unless_requested(engine):
    [[completion]] = engine.generate([[5]], 1, SamplingParams(top_k=2, max_new_tokens=3))
    assert completion.kept_tokens is None
    with pytest.raises(WhetValueError, match="kept_tokens"):
        engine.stream([5], SamplingParams(kept_tokens=True))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 97, 4096])
def test_every_form_of_a_set(vocab_size):
    rng = np.random.default_rng(vocab_size)
    sets = [np.flatnonzero(rng.random(vocab_size) < share) for share in (0.01, 0.02, 0.5, 0.99)]
    sets = [ids if len(ids) else np.array([vocab_size - 1]) for ids in sets] + [None, np.array([0])]
    kept = KeptTokens.from_ids(sets, vocab_size)
    mask = kept.mask(0, len(sets))
    assert len(kept) == len(sets) and len(kept.words) <= len(sets) * ((vocab_size + 31) // 32)
    for t, ids in enumerate(sets):
        expected = np.arange(vocab_size) if ids is None else ids
        assert np.flatnonzero(mask[t]).tolist() == expected.tolist()
        assert (list(range(vocab_size)) if kept[t] is None else kept[t].tolist()) == expected.tolist()
    twice = KeptTokens.concatenate([kept, kept])
    assert np.array_equal(twice.mask(0, len(twice)), np.concatenate([mask, mask]))
    selected = KeptTokens.select([None, kept], np.array([1, 0, 1]), np.array([2, 0, 1]), vocab_size)
    assert selected is not None
    assert np.array_equal(selected.mask(0, 3), np.stack([mask[2], np.ones(vocab_size, bool), mask[1]]))
    with pytest.raises(IndexError):
        kept[len(sets)]


def test_sets_that_do_not_fit_are_refused():
    one = np.array([0])
    kept = KeptTokens.from_ids([[3, 5]], 640)
    offsets = kept.offsets
    assert select_kept([kept], one, one, np.array([5]), 640, "f") is not None
    for given, target, size, facts in (
        (kept, 4, 640, ["token id 4", "kept tokens"]),
        (kept, 5, 65, ["vocabulary of 640", "65"]),
        (KeptTokens(offsets, np.array([5, 3], np.int32), 640), 5, 640, ["not a set", "640"]),
        (KeptTokens(offsets, np.array([3, 3], np.int32), 640), 3, 640, ["not a set"]),
        (KeptTokens(offsets, np.array([-1, 3], np.int32), 640), 3, 640, ["not a set"]),
        (KeptTokens(offsets, np.array([3, 640], np.int32), 640), 3, 640, ["not a set"]),
        (KeptTokens(offsets, np.array([-1, -1], np.int32), 40), 33, 40, ["not a set", "40"]),
    ):
        assert_raises(WhetValueError, ("f:", *facts), select_kept, [given], one, one, np.array([target]), size, "f")
    facts = ("kept_tokens[0]", "1 sets", "2 tokens")
    assert_raises(WhetValueError, facts, check_rows, "f", [[1]], [[1, 2]], None, [kept])
    facts = ("kept_tokens", "1 entries", "2 completions")
    assert_raises(WhetValueError, facts, check_rows, "f", [[1], [2]], [[1], [2]], None, [kept])
