"""OnlineDPO: a step is a DPO step on sampled pairs; judges, rewards and ties."""

from __future__ import annotations

import pytest
import torch
from tests.raising import assert_raises, mentions
from tests.tiny import (
    EOS,
    ScriptedEngine,
    TinyModel,
    assert_same_weights,
    fours,
    letters_tokenizer,
    tiny_llama,
    with_lora,
)

from whet.algorithms.dpo import DPO
from whet.algorithms.online_dpo import OnlineDPO
from whet.errors import RewardError, WhetTypeError, WhetValueError

PROMPTS = [[5, 6], [7], [8]]
GROUPS = [[[4, EOS], [9, 9, EOS]], [[10], [4, 4]], [[6, EOS], [6, EOS]]]


def longer(pairs):
    return [0 if len(a) > len(b) else 1 for a, b in pairs]


def make(model=None, **settings) -> OnlineDPO:
    settings = {"learning_rate": 0.02, "engine": ScriptedEngine(GROUPS), "max_new_tokens": 4} | settings
    return OnlineDPO(model if model is not None else TinyModel(), **settings)


def dpo_on(pairs, **settings) -> DPO:
    dpo = DPO(TinyModel(), learning_rate=0.02, **settings)
    dpo.train_step(*pairs)
    return dpo


def test_a_step_is_a_dpo_step_on_the_preferred_pairs():
    online = make(preference_fn=longer, beta=0.3, micro_batch_size=1)
    metrics = online.train_step(PROMPTS)
    dpo = dpo_on(([[5, 6], [7]], [[9, 9, EOS], [4, 4]], [[4, EOS], [10]]), beta=0.3, micro_batch_size=1)
    assert_same_weights(online.model, dpo.model)
    assert metrics["frac_ties"] == pytest.approx(1 / 3)  # two identical completions
    assert metrics["num_tokens"] == 2 * 4 + 12
    assert [row["chosen"] for row in online.last_completions] == [False, True, False, True, None, None]


def test_ties_are_excluded():
    online = make(preference_fn=lambda pairs: [1, None, 0])
    assert online.train_step(PROMPTS)["frac_ties"] == pytest.approx(2 / 3)
    assert_same_weights(online.model, dpo_on(([[5, 6]], [[9, 9, EOS]], [[4, EOS]])).model)


def test_a_batch_of_ties_leaves_the_weights_unchanged():
    online = make(preference_fn=lambda pairs: [None] * 3)
    metrics = online.train_step(PROMPTS)
    assert metrics["loss"] == 0 and metrics["frac_ties"] == 1 and online.step == 1
    assert_same_weights(online.model, TinyModel())


def test_the_higher_reward_wins_and_equal_or_missing_rewards_tie():
    def score(completions):
        return [1.0, 0.5, 2.0, None, 3.0, 4.0]

    groups = [*GROUPS[:2], [[6, EOS], [11, EOS]]]
    online = make(reward_fn=score, engine=ScriptedEngine(groups))
    metrics = online.train_step(PROMPTS)
    expected = dpo_on(([[5, 6], [8]], [[4, EOS], [11, EOS]], [[9, 9, EOS], [6, EOS]]))
    assert_same_weights(online.model, expected.model)
    assert metrics["frac_ties"] == pytest.approx(1 / 3)
    assert metrics["mean_reward"] == pytest.approx(10.5 / 5) == metrics["rewards/score/mean"]
    level = make(reward_fn=lambda completions: [1.0] * 6)
    assert level.train_step(PROMPTS)["frac_ties"] == 1


def test_the_judge_gets_tensors_or_text_without_prompts():
    seen = []

    def oracle(pairs):
        seen.append(pairs)
        return [0] * len(pairs)

    make(preference_fn=oracle).train_step(PROMPTS)
    assert all(isinstance(side, torch.Tensor) for pair in seen[0] for side in pair)
    assert [[side.tolist() for side in pair] for pair in seen[0]] == GROUPS
    make(preference_fn=oracle, tokenizer=letters_tokenizer()).train_step(PROMPTS)
    assert seen[1] == [("a", "ff"), ("g", "aa"), ("c", "c")]


@pytest.mark.parametrize("make_model", [TinyModel, tiny_llama, lambda: with_lora(tiny_llama())])
def test_it_learns(make_model):
    online = make(make_model(), reward_fn=fours, engine="auto", learning_rate=0.05, beta=0.02, max_new_tokens=3)
    history = [online.train_step([[5], [6], [7], [8]] * 2)["mean_reward"] for _ in range(40)]
    assert sum(history[-5:]) / 5 > 3 * (sum(history[:3]) / 3) and sum(history[-5:]) / 5 > 1.0


def test_evaluation_is_the_mean_reward():
    groups = [[[4, 4]], [[4]], [[5]]]
    assert make(reward_fn=fours, engine=ScriptedEngine(groups)).evaluate(PROMPTS) == 1.0
    judged = make(preference_fn=longer, engine=ScriptedEngine(groups))
    assert judged.evaluate(PROMPTS, reward_fn=fours) == 1.0
    with pytest.raises(WhetTypeError, match=mentions("OnlineDPO.evaluate", "preference_fn", "reward_fn")):
        judged.evaluate(PROMPTS)


def test_invalid_arguments_and_judges_are_rejected():
    assert_raises(WhetTypeError, ("preference_fn", "reward_fn"), make)
    assert_raises(WhetTypeError, ("preference_fn", "reward_fn"), make, preference_fn=longer, reward_fn=len)
    with pytest.raises(WhetValueError, match=mentions("reward_policy", "'skip'", "effect", "preference_fn")):
        make(preference_fn=longer, reward_policy="skip")
    assert_raises(RewardError, ("2", "pair 1"), make(preference_fn=lambda pairs: [0, 2, 1]).train_step, PROMPTS)
    with pytest.raises(RewardError, match=mentions("2", "3 pairs")):
        make(preference_fn=lambda pairs: [0, 1]).train_step(PROMPTS)
