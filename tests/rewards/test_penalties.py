"""Rewards of length and repetition: by hand, against TRL's, and in a run that names them with options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.raising import assert_raises
from tests.tiny import TinyModel

from whet.algorithms import GRPO
from whet.errors import RewardError, WhetTypeError, WhetValueError
from whet.rewards.functions import RewardFunctions
from whet.rewards.penalties import CosineScaled, Repetition, SoftOverlong
from whet.runs.rows import load_rewards

ROWS = [np.random.default_rng(i).integers(0, 3, size=i).tolist() for i in range(25)]


def test_values_by_hand() -> None:
    # 0 up to 80 tokens, -1/20 for each token from there to 100.
    punish = SoftOverlong(max_length=100, buffer=20)
    assert punish([[1] * n for n in (0, 80, 81, 90, 100, 101)]) == pytest.approx([0, 0, -0.05, -0.5, -1, -1])
    # (5, 5, 5, 5, 5) has four pairs, of which one is distinct; (1, 2, 1, 2, 3) has the pair (1, 2) twice.
    repeat = Repetition(ngram_size=2, max_penalty=-2.0)
    assert repeat([[1, 2, 3, 4], [5] * 5, [1, 2, 1, 2, 3], [7], []]) == pytest.approx([0, -1.5, -0.5, 0, 0])


@pytest.mark.parametrize("options", [{}, {"ngram_size": 1}, {"ngram_size": 4, "max_penalty": -0.3}])
def test_repetition_is_trls(options: dict[str, Any]) -> None:
    trl = pytest.importorskip("trl.rewards", reason="pip install 'whet[peers]'")
    assert Repetition(**options)(ROWS) == pytest.approx(trl.get_repetition_penalty_reward(**options)(ROWS), rel=1e-14)


@pytest.mark.parametrize(("max_length", "buffer"), [(20, 5), (20, 20), (24, 1)])
def test_soft_overlong_is_trls(max_length: int, buffer: int) -> None:
    trl = pytest.importorskip("trl.rewards", reason="pip install 'whet[peers]'")
    expected = trl.get_soft_overlong_punishment(max_length, buffer)(ROWS)
    assert SoftOverlong(max_length=max_length, buffer=buffer)(ROWS) == pytest.approx(expected, rel=1e-14)


def test_they_are_named_with_options(tmp_path: Any) -> None:
    where = "whet.rewards.penalties"
    loaded = load_rewards([f"{where}:SoftOverlong,max_length=9,buffer=4", f"{where}:Repetition"])
    assert loaded == [SoftOverlong(max_length=9, buffer=4), Repetition()]
    file = tmp_path / "own.py"
    file.write_text(
        "def score(completions):\n    return [0.0 for _ in completions]\n"
        "def above(level=1):\n    return lambda completions: [float(len(c) > level) for c in completions]\n"
        "def number(level):\n    return level\n"
    )
    plain, made = load_rewards([f"{file}:score", f"{file}:above,level=2"])
    assert plain(["a"]) == [0.0] and made(["a", "abc"]) == [0.0, 1.0]
    trl = pytest.importorskip("trl.rewards", reason="pip install 'whet[peers]'")
    [trls] = load_rewards(["trl.rewards:get_repetition_penalty_reward,ngram_size=2"])
    assert trls(ROWS) == trl.get_repetition_penalty_reward(2)(ROWS)
    assert_raises(WhetTypeError, ("Repetition", "'size'", "ngram_size"), load_rewards, [f"{where}:Repetition,size=4"])
    assert_raises(WhetTypeError, ("SoftOverlong", "max_length"), load_rewards, [f"{where}:SoftOverlong"])
    assert_raises(WhetTypeError, ("number", "int", "level"), load_rewards, [f"{file}:number,level=2"])
    assert_raises(WhetValueError, ("max_penalty", "is 1", "<= 0"), load_rewards, [f"{where}:Repetition,max_penalty=1"])
    assert_raises(WhetValueError, ("buffer", "9", "at most max_length=8"), SoftOverlong, max_length=8, buffer=9)
    assert_raises(WhetValueError, ("ngram_size", "0"), Repetition, ngram_size=0)


async def is_even(completion_ids: list[list[int]], label: list[int | None]) -> list[float | None]:
    return [
        None if of_row is None else float(len(ids) % 2 == of_row)
        for ids, of_row in zip(completion_ids, label, strict=True)
    ]


def test_cosine_scaled_by_hand() -> None:
    # c = (1 + cos(pi p)) / 2 is 1, (2 + sqrt 2) / 4, 1/2 and 0 at the shares 0, 1/4, 1/2 and 1 of 8 tokens.
    lengths = [0, 2, 4, 8, 12]
    right = [1.0, 0.5 + 0.5 * 0.8535533905932737, 0.75, 0.5, 0.5]
    wrong = [-1.0, -0.5 - 0.5 * 0.8535533905932737, -0.75, -0.5, -0.5]
    ids = [[7] * n for n in lengths]
    texts = ["x" * n for n in lengths]

    def score(label: list[int | None], **options: Any) -> list[float]:
        scale = RewardFunctions(CosineScaled(correct=is_even, max_length=8, **options))
        found = scale(prompts=texts, completions=texts, completion_ids=ids, columns={"label": label})
        return found.by_name["CosineScaled"].tolist()

    assert score([0] * 5) == pytest.approx(right, abs=1e-12)
    assert score([1] * 5) == pytest.approx(wrong, abs=1e-12)
    options = {"min_value_wrong": -10.0, "max_value_wrong": 0.0, "min_value_correct": 1.0, "max_value_correct": 2.0}
    assert score([0, 1, 0, 1, None], **options) == pytest.approx([2, -8.535533905932737, 1.5, 0, np.nan], nan_ok=True)


def test_cosine_scaled_is_named_with_options(tmp_path: Any) -> None:
    file = tmp_path / "own.py"
    file.write_text("def right(completions, answer):\n    return [c == a for c, a in zip(completions, answer)]\n")
    spec = f"whet.rewards.penalties:CosineScaled,correct={file}:right,max_length=4"
    [scale] = load_rewards([f"{spec},min_value_wrong=-2"])
    found = RewardFunctions(scale, timeout_s=60.0)(
        prompts=["p"] * 2, completions=["a", "b"], completion_ids=[[1, 2], []], columns={"answer": ["a", "a"]}
    )
    assert found.rewards.tolist() == [0.75, -2.0]
    columns: Any = {"prompts": ["p"], "completions": ["a"], "completion_ids": [[1]], "columns": {}}
    assert_raises(RewardError, ("right", "'answer'"), RewardFunctions(scale), **columns)
    wrong: Any = {"correct": 3, "max_length": 4}
    assert_raises(WhetTypeError, ("CosineScaled", "correct is 3", "file.py:function"), CosineScaled, **wrong)
    assert_raises(WhetValueError, ("no callable 'none'",), load_rewards, [spec.replace(":right", ":none")])
    assert_raises(WhetValueError, ("max_length is 0",), CosineScaled, correct=is_even, max_length=0)
    high: Any = {"correct": is_even, "max_length": 4, "min_value_correct": 2.0}
    assert_raises(WhetValueError, ("max_value_correct is 1.0", "at least min_value_correct=2"), CosineScaled, **high)
    assert_raises(WhetValueError, ("min_value_wrong", "inf"), CosineScaled, **high | {"min_value_wrong": float("inf")})


def test_grpo_adds_them_to_the_reward() -> None:
    def ten(completions: list[Any]) -> list[float]:
        return [10.0] * len(completions)

    rewards = [ten, SoftOverlong(max_length=6, buffer=4), Repetition(ngram_size=1)]
    trainer = GRPO(TinyModel(), reward_fn=rewards, reward_weights=[1, 2, 3], group_size=4, max_new_tokens=6)
    metrics = trainer.train_step([[5, 6], [7]])
    for row in trainer.last_completions:
        ids = row["completion"]
        expected = 10 + 2 * -max(0, (len(ids) - 2) / 4) - 3 * (1 - len(set(ids)) / len(ids))
        assert row["reward"] == pytest.approx(expected)
    assert metrics["rewards/SoftOverlong/mean"] < 0 and metrics["rewards/Repetition/mean"] < 0


def test_rewards_are_clipped_before_the_advantages() -> None:
    def lengths(completion_ids: list[list[int]]) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    settings: dict[str, Any] = {"group_size": 8, "max_new_tokens": 6, "stop_token_ids": [2, 3, 4, 5]}
    trainer = GRPO(TinyModel(), reward_fn=lengths, scale_rewards="none", reward_clip=[2, 4.5], **settings)
    metrics = trainer.train_step([[5, 6], [7]])
    rewards = np.array([len(row["completion"]) for row in trainer.last_completions], float).reshape(2, 8)
    assert rewards.min() < 2 and rewards.max() > 4.5 and metrics["mean_reward"] == rewards.mean()
    clipped = rewards.clip(2, 4.5)
    expected = (clipped - clipped.mean(1, keepdims=True)).ravel().tolist()
    assert [row["advantage"] for row in trainer.last_completions] == pytest.approx(expected, abs=1e-12)
    assert metrics["reward_std"] == pytest.approx(clipped.std(1).mean())
    for wrong in ([1.0], [2.0, 1.0], [1.0, 1.0]):
        assert_raises(
            WhetValueError, ("reward_clip", str(wrong), "a lower and a higher number"), GRPO, TinyModel(),
            reward_fn=lengths, reward_clip=wrong,
        )  # fmt: skip
    assert_raises(
        WhetValueError, ("reward_clip", "per_reward", "sums no rewards"), GRPO, TinyModel(), reward_fn=lengths,
        reward_clip=[0, 1], advantage="per_reward",
    )  # fmt: skip
