"""Invalid rows are reported before their step, and the run that they end leaves a checkpoint."""

from __future__ import annotations

import random
import sys
from itertools import count

import pytest
import torch
from tests.raising import assert_raises
from tests.tiny import assert_same_weights, letters_tokenizer, make_trainer, tiny_llama

from whet.algorithms.dpo import DPO
from whet.algorithms.grpo import GRPO
from whet.algorithms.sft import SFT
from whet.checkpoint import latest_checkpoint
from whet.data.rows import epoch_order
from whet.data.sources import Part, Rows
from whet.errors import RewardError, RowError, WhetTypeError, WhetValueError
from whet.training import prefetch
from whet.training.callbacks import Callback, CheckpointCallback
from whet.training.prefetch import PREFETCH, Prefetcher

GOOD = {"prompt": "ab", "completion": "c"}


def sft(**settings):
    return make_trainer(SFT, tiny_llama(), **{"tokenizer": letters_tokenizer(), "batch_size": 1, **settings})


class Unused:
    """Tokenizer that is never used."""


@pytest.mark.parametrize(
    ("algorithm", "good", "bad", "facts"),
    [
        (SFT, GOOD, {"prompt": "ab", "completion": None}, ("'prompt'", "'completion'", "'messages'")),
        (SFT, GOOD, {"prompt": "ab", "completion": 5}, ("'ab'", "5")),
        (SFT, GOOD, {"messages": [{"role": "user", "content": "a"}]}, ("chat messages",)),
        (SFT, {"text": "a"}, {"text": 5}, ("field", "5")),
        (DPO, {"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b"}, ("'rejected'",)),
        (GRPO, {"prompt": "a"}, {"question": "a"}, ("'prompt'", "'question'")),
    ],
)
def test_the_form_of_every_row_is_checked_before_the_first_step(algorithm, good, bad, facts):
    more = {"reward_fn": len} if algorithm is GRPO else {}
    trainer = make_trainer(algorithm, tiny_llama(), tokenizer=Unused(), batch_size=1, **more)
    for rows in ([good] * 30 + [bad], tuple([good] * 30 + [bad])):
        assert_raises(RowError, ("row 30 of the dataset", *facts), trainer.train, rows, steps=1)
    named = Rows([good] * 30 + [{**bad, "id": "x7"}], [Part("a.jsonl:", range(1, 32))])
    assert_raises(RowError, ("a.jsonl:31", "'x7'", *facts), trainer.train, named, steps=1)


def test_in_memory_datasets_are_checked_and_transformed_ones_are_not():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{**GOOD, "completion": None if i == 7 else "c"} for i in range(9)])
    assert_raises(RowError, ("row 7 of the dataset",), sft(tokenizer=Unused()).train, rows, steps=1)
    assert not prefetch.is_in_memory(rows.with_transform(lambda batch: batch))


def test_rows_are_checked_once():
    class Counts(SFT):
        def tokenize_row(self, row, tokenizer):
            seen.append(tokenizer)
            return super().tokenize_row(row, tokenizer)

    seen, rows = [], [GOOD] * 20
    trainer = make_trainer(Counts, tiny_llama(), tokenizer=letters_tokenizer(), batch_size=2)
    for _ in range(2):
        trainer.train(rows, steps=1)
    assert len(seen) == 20 + 2 * 2
    trainer.train(rows, steps=8)
    assert len(seen) == 20 + 2 * 10  # each row is tokenised once for its step


@pytest.mark.parametrize("kind", [list, iter])
def test_a_row_that_the_tokenizer_rejects_is_reported_before_its_step(kind):
    """The row is in the fifth batch: no batch is trained before the error."""
    rows = [GOOD] * 8
    order = epoch_order(len(rows), 0, 0).tolist()
    rows[order[PREFETCH + 1]] = {"prompt": "ab", "completion": "c" * 70, "id": 3}
    place = f"row {order[PREFETCH + 1]} of the dataset"
    if kind is iter:
        rows, place = iter([rows[i] for i in order]), "row 0 of the batch of step 3"
    trainer = sft()
    assert_raises(RowError, (place, "id 3", "SFT", "tokens"), trainer.train, rows, steps=8)
    assert trainer.step == 2


def test_prefetched_batches_of_an_iterator_are_kept_for_the_next_call():
    class Stops(Callback):
        def on_step_end(self, trainer, metrics):
            trainer.should_stop = trainer.step == 1

    class Seen(SFT):
        def train_step(self, rows, completion=None):
            seen.append(rows[0]["prompt"])
            return super().train_step(rows, completion)

    seen = []
    rows = iter([{"prompt": letter, "completion": "c"} for letter in "abcdefgh"])
    trainer = make_trainer(Seen, tiny_llama(), tokenizer=letters_tokenizer(), batch_size=1, callbacks=Stops())
    trainer.train(rows, steps=6)
    trainer.train(rows, steps=2)
    assert seen == ["a", "b", "c"] and next(rows)["prompt"] == "e"  # drawn at most as many as a call trains


def test_prefetching_is_limited_to_the_remaining_steps():
    numbers = count()
    stream = Prefetcher(numbers, lambda n: -n)
    assert [stream.take(n) for n in (2, 1)] == [(0, 0), (1, -1)] and next(numbers) == 2
    assert [stream.take(9) for _ in range(2)] == [(3, -3), (4, -4)] and next(numbers) == 8
    assert Prefetcher([], print).take(3) is None


def test_a_long_check_shows_its_progress(monkeypatch, capsys):
    monkeypatch.setattr(prefetch, "_QUIET_S", -1)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(prefetch._show_progress(range(8192))) == list(range(8192))
    assert capsys.readouterr().err == "\rchecking rows: 49%\rchecking rows: 99%\r\x1b[K"


# --- the checkpoint of a run that an error ends -------------------------------------------------------


class Flaky:
    """Reward that draws random numbers, and raises in one of its calls."""

    def __init__(self, fails_at):
        self.n_calls, self.fails_at = 0, fails_at

    def __call__(self, completions):
        self.n_calls += 1
        scores = [random.random() for _ in completions]
        if self.n_calls == self.fails_at:
            raise ConnectionError("the judge is gone")
        return scores


def grpo(folder, fails_at=0, checkpoint=None):
    arguments = {"reward_fn": Flaky(fails_at), "callbacks": CheckpointCallback(folder, every=100), "batch_size": 1}
    arguments |= {"max_new_tokens": 3, "group_size": 2, "learning_rate": 1e-2, "lr_schedule": "constant"}
    if checkpoint:
        return GRPO.from_checkpoint(checkpoint, **arguments)
    return GRPO(tiny_llama(), **arguments)


def test_a_failing_reward_leaves_a_checkpoint_that_resumes_exactly(tmp_path):
    rows = [{"prompt": [i]} for i in range(4, 10)]
    random.seed(0)
    torch.manual_seed(0)
    whole = grpo(tmp_path / "whole")
    whole.train(rows, steps=4)
    random.seed(0)
    torch.manual_seed(0)
    failing = grpo(tmp_path / "parts", fails_at=3)
    assert_raises(RewardError, ("the judge is gone",), failing.train, rows, steps=4)
    checkpoint = latest_checkpoint(tmp_path / "parts")
    assert checkpoint.name == "step-000002"
    random.seed(5)
    continued = grpo(tmp_path / "parts", checkpoint=checkpoint)
    continued.train(rows, steps=2)
    assert_same_weights(continued.model, whole.model)


def test_a_step_that_fails_after_an_update_leaves_no_checkpoint(tmp_path):
    class Twice(SFT):
        def prepare(self, *batch):
            return batch

        def train_step(self, *batch):
            with self.update() as update:
                logprobs, _, mask, *_ = self.policy.logprobs([[5]], [[6]])
                update.add(float(logprobs.sum()), mask * 1.0, {})
            raise WhetValueError("between two updates")

    trainer = make_trainer(Twice, callbacks=CheckpointCallback(tmp_path, every=100))
    assert_raises(WhetValueError, ("between two updates",), trainer.train, [[[5, 6]]], steps=1)
    assert latest_checkpoint(tmp_path) is None


def test_row_errors_are_value_and_type_errors():
    assert issubclass(RowError, WhetValueError) and issubclass(RowError, WhetTypeError)
