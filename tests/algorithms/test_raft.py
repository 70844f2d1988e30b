"""RAFT: which completions are kept, the step of SFT on them, learning, resuming, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.raising import assert_raises
from tests.tiny import assert_resumes, fours, tiny_llama

from whet.algorithms import RAFT, SFT
from whet.errors import WhetTypeError, WhetValueError

PROMPTS = [[5, 6], [7], [3, 4, 5]]
SETTINGS: dict[str, Any] = {"n": 4, "max_new_tokens": 6, "batch_size": 3, "compute": "float32", "learning_rate": 0.01}


def sum_of_tokens(completions: Any, **_: Any) -> list[float | None]:
    """Not scored: a first token above 40."""
    return [None if ids[0] > 40 else float(sum(ids)) for ids in completions]


@pytest.mark.parametrize("least", [None, "second best"])
def test_a_step_is_sft_on_the_best_of_each_prompt(least: str | None) -> None:
    settings, min_score = SETTINGS | {"learning_rate": 0.0}, None
    if least is not None:
        first = RAFT(tiny_llama(), reward_fn=sum_of_tokens, **settings)
        first.train_step(PROMPTS)
        min_score = sorted(row["reward"] for row in first.last_completions if row["kept"])[1]
    raft = RAFT(tiny_llama(), reward_fn=sum_of_tokens, min_score=min_score, **settings)
    metrics = raft.train_step(PROMPTS)
    rows = raft.last_completions
    rewards = np.array([np.nan if row["reward"] is None else row["reward"] for row in rows]).reshape(3, 4)
    best = [4 * i + int(np.nanargmax(group)) for i, group in enumerate(rewards)]
    kept = [i for i in best if min_score is None or rewards.flat[i] >= min_score]
    assert [i for i, row in enumerate(rows) if row["kept"]] == kept and len(kept) == (3 if least is None else 2)
    assert metrics["kept/frac"] == pytest.approx(len(kept) / 3)
    assert metrics["kept/mean_reward"] == pytest.approx(rewards.flat[kept].mean())
    examples = [(PROMPTS[i // 4], rows[i]["completion"]) for i in kept]
    expected = SFT(raft.model, learning_rate=0.0, compute="float32", training_mode=False).train_step(examples)
    for name in ("loss", "grad_norm", "token_probability"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-6)


def test_nothing_is_trained_if_nothing_is_kept() -> None:
    raft = RAFT(tiny_llama(), reward_fn=fours, min_score=1e9, **SETTINGS)
    metrics = raft.train_step(PROMPTS)
    assert metrics["loss"] == metrics["grad_norm"] == metrics["kept/frac"] == 0 and raft.n_updates == 0


def test_it_learns() -> None:
    raft = RAFT(tiny_llama(), reward_fn=fours, **SETTINGS)
    before = raft.evaluate(PROMPTS)
    raft.train(PROMPTS * 20, steps=20)
    assert raft.evaluate(PROMPTS) > before + 0.2


def test_a_run_resumes_to_the_bit(tmp_path: Any) -> None:
    assert_resumes(lambda: RAFT(tiny_llama(), reward_fn=fours, **SETTINGS), PROMPTS * 2, tmp_path, reward_fn=fours)


def test_wrong_arguments_are_refused() -> None:
    assert_raises(WhetTypeError, ("reward",), RAFT, tiny_llama())
    assert_raises(WhetValueError, ("n is 1", ">= 2"), RAFT, tiny_llama(), reward_fn=fours, n=1)
    assert_raises(WhetValueError, ("min_score", "nan"), RAFT, tiny_llama(), reward_fn=fours, min_score=float("nan"))
