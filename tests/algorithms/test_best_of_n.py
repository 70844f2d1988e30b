"""BestOfN: the best candidate, ragged prompts and results, optional scores and candidates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.raising import assert_raises, mentions
from tests.tiny import EOS, ScriptedEngine, TinyModel, fours, letters_tokenizer, padded, tiny_llama

from whet.algorithms.best_of_n import BestOfN
from whet.errors import RewardError, WhetTypeError, WhetValueError

PROMPTS = [[5, 6], [7]]
GROUPS = [[[4, EOS], [4, 4, 4, EOS], [9]], [[8, EOS], [10], [4, 10]]]


def make(**settings) -> BestOfN:
    settings = {"reward_fn": fours, "n": 3, "engine": ScriptedEngine(GROUPS)} | settings
    return BestOfN(TinyModel(), **settings)


def test_returns_the_best_completion_per_prompt_padded_on_the_right():
    assert make().generate(PROMPTS).tolist() == [[5, 6, 4, 4, 4, EOS], [7, 4, 10, 0, 0, 0]]
    assert make(pad_token_id=11).generate(PROMPTS)[1].tolist() == [7, 4, 10, 11, 11, 11]


def test_returns_scores_and_candidates_if_requested():
    result = make(reward_fn=lambda completions: [1, 2, None, 3, 3, 0]).generate(
        PROMPTS, return_scores=True, return_all=True
    )
    assert result.scores[1].tolist() == [3, 3, 0] and math.isnan(result.scores[0, 2])
    assert [[c.token_ids for c in group] for group in result.candidates] == GROUPS
    assert result.sequences.tolist() == [[5, 6, 4, 4, 4, EOS], [7, 8, EOS, 0, 0, 0]]  # ties: the first completion
    assert make().generate(PROMPTS, return_scores=True).candidates is None


def test_accepts_text_prompts_and_columns():
    def right(completions, answer):
        assert completions == ["a", "aaa", "f", "e", "g", "ag"]
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    rows = [{"prompt": "bc", "answer": "f"}, {"prompt": "d", "answer": "g"}]
    best = make(tokenizer=letters_tokenizer(), reward_fn=right).generate(rows)
    assert best.tolist() == [[5, 6, 9], [7, 10, 0]]


def test_accepts_every_form_of_prompts():
    rows = [{"prompt": ids, "grid": np.zeros((5, 5))} for ids in PROMPTS]
    expected = make().generate(PROMPTS)
    columns = {"prompt": PROMPTS, "grid": np.zeros((2, 5, 5))}
    for prompts in (rows, tuple(rows), columns, [torch.tensor(ids) for ids in PROMPTS]):
        scorer = make(reward_fn=lambda completions, **columns: fours(completions))
        assert torch.equal(scorer.generate(prompts), expected)


def test_evaluation_is_the_mean_best_reward():
    assert make().evaluate(PROMPTS) == 2.0  # the best completions have three fours and one
    model = TinyModel()
    prompts = [{"prompt": [5, 6]}, {"prompt": [7]}, {"prompt": [8]}]
    few, many = (BestOfN(model, fours, n=n, max_new_tokens=6) for n in (1, 16))
    found = [few.evaluate(prompts), many.evaluate(prompts), many.evaluate(iter(prompts)), many.evaluate(prompts)]
    assert found[0] < found[1] == found[2] == found[3]
    result = many.generate(prompts, return_scores=True)
    for size in (1, 2):
        assert isinstance(many.evaluate(prompts, batch_size=size), float)
    assert result.scores.shape == (3, 16)
    assert_raises(WhetValueError, ("BestOfN.evaluate", "empty"), many.evaluate, [])
    assert_raises(WhetValueError, ("batch_size", "0", "an integer >= 1"), many.evaluate, prompts, batch_size=0)


@pytest.mark.parametrize("model", [TinyModel(), tiny_llama()])
def test_more_candidates_score_higher(model):
    prompts = padded(PROMPTS, left=True)
    settings = {"reward_fn": fours, "max_new_tokens": 6, "stop_token_ids": [EOS]}
    results = [BestOfN(model, n=n, **settings).generate(prompts, return_scores=True) for n in (1, 16, 16)]
    best = [result.scores.amax(1) for result in results]
    assert (best[1] >= best[0]).all() and best[1].sum() > best[0].sum()
    assert torch.equal(results[1].sequences, results[2].sequences)  # the same seed
    completions = results[1].sequences[1, 1:]
    assert results[1].sequences[1, 0] == 7 and (completions == 4).sum() == best[1][1]


def test_a_prompt_without_a_scored_candidate_is_an_error():
    with pytest.raises(RewardError, match=mentions("prompt 1", "candidate", "scored")):
        make(reward_fn=lambda completions: [1, 2, 3, None, None, None]).generate(PROMPTS)


def test_invalid_arguments_are_rejected():
    assert_raises(WhetTypeError, ("BestOfN", "reward_fn"), BestOfN, TinyModel())
    assert_raises(WhetValueError, ("n", "0", "an integer >= 1"), make, n=0)
    assert_raises(WhetTypeError, ("'learning_rate'", "setting"), make, learning_rate=0.1)
