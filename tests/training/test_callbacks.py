"""Callbacks run at the right steps, stop for the right reasons, and resume."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys

import pytest
import torch
from tests.raising import assert_raises, mentions

from whet.checkpoint.folder import latest_checkpoint, load_checkpoint, save_checkpoint
from whet.errors import FolderInUseError, WhetTypeError, WhetValueError
from whet.training.callbacks import (
    Callback,
    CheckpointCallback,
    CompletionsCallback,
    EarlyStoppingCallback,
    EvaluationCallback,
)


class CountingTrainer:
    """Minimal trainer: a step adds a random number."""

    def __init__(self, callbacks: list[Callback], step: int = 0) -> None:
        self.callbacks = callbacks
        self.step = step
        self.should_stop = False
        self.total = 0.0
        self.last_completions: list[dict] = []
        self.logged: list[tuple[int, dict]] = []

    def log(self, metrics) -> None:
        self.logged.append((self.step, dict(metrics)))

    def save(self, path) -> None:
        save_checkpoint(path, {"model": {"total": torch.tensor(self.total)}}, {"step": self.step})

    def train(self, steps: int, metric=lambda step: {}) -> CountingTrainer:
        try:
            for callback in self.callbacks:
                callback.on_train_begin(self, steps)
            while self.step < steps and not self.should_stop:
                self.step += 1
                self.total += random.random()
                self.last_completions = [{"prompt": f"p{i}", "completion": "x", "reward": i} for i in range(2)]
                metrics = {"loss": self.total, **metric(self.step)}
                for callback in self.callbacks:
                    callback.on_step_end(self, metrics)
            for callback in self.callbacks:
                callback.on_train_end(self)
        finally:
            for callback in self.callbacks:
                callback.on_train_exit(self)
        return self


def test_evaluates_at_the_start_periodically_and_at_the_end():
    callback = EvaluationCallback(lambda trainer: {"accuracy": trainer.step / 10}, every=4)
    trainer = CountingTrainer([callback]).train(10)
    steps = [0, 4, 8, 10]
    assert callback.history == [{"step": step, "accuracy": step / 10} for step in steps]
    assert trainer.logged == [(step, {"eval/accuracy": step / 10}) for step in steps]

    callback = EvaluationCallback(lambda trainer: {"n": 1}, every=5, at_start=False)
    CountingTrainer([callback]).train(10)
    assert [row["step"] for row in callback.history] == [5, 10]


def test_evaluation_does_not_change_the_run():
    def evaluate(trainer):
        random.random()
        torch.rand(3)
        return {"accuracy": 0.5}

    random.seed(3)
    expected = CountingTrainer([]).train(6).total
    random.seed(3)
    assert CountingTrainer([EvaluationCallback(evaluate, every=2)]).train(6).total == expected


def test_evaluation_continues_after_resuming():
    def make():
        return EvaluationCallback(lambda trainer: {"a": trainer.step}, every=2)

    whole = make()
    CountingTrainer([whole]).train(6)
    first, second = make(), make()
    CountingTrainer([first]).train(4)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    CountingTrainer([second], step=4).train(6)
    assert second.history == whole.history


@pytest.mark.parametrize("result", [0.5, {"accuracy": "high"}, None])
def test_an_evaluation_without_numbers_is_an_error(result):
    with pytest.raises(WhetTypeError, match=r"evaluate returned|'accuracy' is 'high'"):
        CountingTrainer([EvaluationCallback(lambda trainer: result, every=1)]).train(1)


def stopped_at(values: list[float], **options) -> int:
    callback = EarlyStoppingCallback("m", **options)
    return CountingTrainer([callback]).train(len(values), lambda step: {"m": values[step - 1]}).step


NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "options", "step"),
    [
        ([1, 2, 3, 3, 3, 9], {"patience": 2}, 5),
        ([1, 2, 3, 2, 4, 3, 3, 9], {"patience": 2}, 7),
        ([3, 2, 1, 1, 1, 0], {"patience": 2, "mode": "min"}, 5),
        ([3, 2, 1, 0], {"patience": 1, "mode": "max"}, 2),
        ([1.0, 1.4, 1.8, 2.2], {"patience": 2, "min_delta": 0.5}, 4),
        ([1.0, 1.4, 1.5, 9], {"patience": 2, "min_delta": 0.5}, 3),
        ([1, NAN, NAN, 9], {"patience": 2}, 3),
        ([NAN, 1, 2, 3], {"patience": 2}, 4),
        ([0.1, 0.9, 1], {"patience": 9, "target": 0.9}, 2),
        ([0.5, 0.1, 0.2], {"patience": 9, "mode": "min", "target": 0.1}, 2),
        ([1, 2, 3], {"patience": 1}, 3),
    ],
)
def test_early_stopping(values, options, step):
    assert stopped_at(values, **options) == step


def test_early_stopping_reads_evaluations_and_records_the_reason():
    evaluation = EvaluationCallback(lambda trainer: {"accuracy": trainer.step / 10}, every=3)
    stopping = EarlyStoppingCallback("eval/accuracy", patience=1, target=0.6)
    assert CountingTrainer([evaluation, stopping]).train(30).step == 6
    assert stopping.reason == "eval/accuracy reached 0.6 (target 0.6) at step 6"
    stopping = EarlyStoppingCallback("m", patience=2)
    CountingTrainer([stopping]).train(9, lambda step: {"m": -step})
    assert stopping.reason == "m was not better than -1 2 times in a row at step 3"


def test_early_stopping_continues_after_resuming():
    values = [1, 5, 4, 3, 9]
    first, second = (EarlyStoppingCallback("m", patience=2) for _ in range(2))
    CountingTrainer([first]).train(3, lambda step: {"m": values[step - 1]})
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    trainer = CountingTrainer([second], step=3).train(5, lambda step: {"m": values[step - 1]})
    assert trainer.step == 4


def test_a_missing_metric_is_warned_about():
    with pytest.warns(UserWarning, match=mentions("EarlyStoppingCallback", "'reward'", "loss, m")):
        CountingTrainer([EarlyStoppingCallback("reward", 1)]).train(2, lambda step: {"m": 1})


def test_checkpoints_are_kept_and_pruned(tmp_path):
    folder = tmp_path / "checkpoints"
    CountingTrainer([CheckpointCallback(folder, every=3, keep=2)]).train(11)
    assert sorted(entry.name for entry in folder.iterdir()) == ["step-000009", "step-000011"]
    assert latest_checkpoint(folder) == folder / "step-000011"
    assert load_checkpoint(folder / "step-000009")[1] == {"step": 9}
    CountingTrainer([CheckpointCallback(folder, every=3, keep=2)], step=11).train(12)
    assert sorted(entry.name for entry in folder.iterdir()) == ["step-000011", "step-000012"]


def test_old_checkpoints_survive_a_failed_save(tmp_path):
    class FailingTrainer(CountingTrainer):
        def save(self, path) -> None:
            if self.step == 4:
                raise OSError("No space left on device")
            super().save(path)

    assert_raises(OSError, ("space",), FailingTrainer([CheckpointCallback(tmp_path, every=1, keep=1)]).train, 5)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000003"


HOLDER = """
import sys
from whet.training.callbacks import CheckpointCallback
CheckpointCallback(sys.argv[1], every=1).on_train_begin(type("Trainer", (), {"step": 0}), 1)
print("held", flush=True)
sys.stdin.read()
"""


def test_the_folder_is_locked_while_a_process_trains(tmp_path):
    callback = CheckpointCallback(tmp_path, every=1)
    CountingTrainer([callback]).train(1)
    with pytest.raises(ZeroDivisionError):
        CountingTrainer([callback]).train(1, lambda step: 1 / 0)
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"  # every run here has released the lock
        trainer = CountingTrainer([callback], step=1)
        assert_raises(FolderInUseError, ("in use", f"process {other.pid}", "folder"), trainer.train, 2)
        assert trainer.step == 1
        other.kill()
    assert trainer.train(2).step == 2


def test_an_interrupted_evaluation_restores_random_states(tmp_path):
    def evaluate(trainer):
        random.random()
        raise KeyboardInterrupt

    random.seed(3)
    expected = random.random()
    random.seed(3)
    with pytest.raises(KeyboardInterrupt):
        CountingTrainer([EvaluationCallback(evaluate, every=1)]).train(1)
    assert random.random() == expected


def test_a_run_without_steps_saves_nothing(tmp_path):
    CountingTrainer([CheckpointCallback(tmp_path, every=1)], step=5).train(5)
    assert list(tmp_path.iterdir()) == []


def test_completions_of_later_steps_are_rewritten_after_resuming(tmp_path):
    path = tmp_path / "run" / "completions.jsonl"
    CountingTrainer([CompletionsCallback(path)]).train(3)
    CountingTrainer([CompletionsCallback(path)], step=2).train(4)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["reward"]) for row in rows] == [(s, r) for s in (1, 2, 3, 4) for r in (0, 1)]
    assert rows[0] == {"step": 1, "prompt": "p0", "completion": "x", "reward": 0}


def test_completions_have_texts_and_unscored_rewards(tmp_path):
    trainer = CountingTrainer([])
    callback = CompletionsCallback(tmp_path / "c.jsonl")
    callback.on_train_begin(trainer, 1)
    trainer.last_completions = [{"completion": "a\n\ud800ü", "reward": None, "rewards": {"f": NAN}, "ids": [1, 2]}]
    callback.on_step_end(trainer, {})
    (line,) = (tmp_path / "c.jsonl").read_text().splitlines()
    expected = {"step": 0, "completion": "a\n\ud800ü", "reward": None, "rewards": {"f": "NaN"}, "ids": [1, 2]}
    assert json.loads(line) == expected


def test_a_trainer_without_completions_is_rejected(tmp_path):
    trainer = CountingTrainer([CompletionsCallback(tmp_path / "c.jsonl")])
    del trainer.last_completions
    assert_raises(WhetTypeError, ("CountingTrainer", "last_completions"), trainer.train, 1)


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda: EvaluationCallback(dict, every=0), ("EvaluationCallback", "every", "0")),
        (lambda: CheckpointCallback("x", every=0), ("CheckpointCallback", "every", "0")),
        (lambda: CheckpointCallback("x", every=1, keep=0), ("CheckpointCallback", "keep", "0")),
        (lambda: EarlyStoppingCallback("m", 0), ("EarlyStoppingCallback", "patience", "0")),
        (lambda: EarlyStoppingCallback("m", 1, mode="up"), ("mode", "'up'", "'max' or 'min'")),
        (lambda: EarlyStoppingCallback("m", 1, min_delta=-1), ("min_delta", "-1")),
        (lambda: EarlyStoppingCallback("m", 1, min_delta=NAN), ("min_delta", "nan")),
        (lambda: EarlyStoppingCallback("m", 1, min_delta=math.inf), ("min_delta", "inf")),
        (lambda: EarlyStoppingCallback("m", 1, target=NAN), ("target", "nan", "a finite number, or None")),
        (lambda: EarlyStoppingCallback("m", 1.5), ("patience", "1.5", "an integer >= 1")),
        (lambda: EvaluationCallback(dict, every=True), ("every", "True", "an integer >= 1")),
        (lambda: CheckpointCallback("x", every=2.5), ("every", "2.5", "an integer >= 1")),
    ],
)
def test_invalid_arguments_are_rejected(make, facts):
    assert_raises(WhetValueError, facts, make)


def test_evaluate_must_be_callable():
    with pytest.raises(WhetTypeError, match=mentions("EvaluationCallback", "evaluate", "{}", "a callable")):
        EvaluationCallback({}, every=1)
