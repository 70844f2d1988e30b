"""The loop over a dataset: order, steps and epochs, callbacks, interrupts and failures."""

from __future__ import annotations

import itertools
import math
import signal

import numpy as np
import pytest
import torch
from tests.raising import assert_raises, mentions
from tests.tiny import (
    Items,
    Streamed,
    assert_same_weights,
)
from tests.training.trainers import (
    PAIRS,
    PROMPTS,
    ROWS,
    Net,
    RecordingCallback,
    RecordingLogger,
    llama,
    lora,
    ones,
    sft,
)

from whet.algorithms import DPO, GRPO, SFT, OnlineDPO
from whet.data.rows import epoch_order, shuffled_batches
from whet.errors import WhetTypeError, WhetValueError
from whet.nn.accelerate import acceleration_of
from whet.training.callbacks import Callback, EvaluationCallback


def prompts_of(trainer, dataset, *calls):
    """Return the prompts of the batches that ``train`` passes to ``train_step``."""
    seen = []
    step = trainer.train_step

    def recording(*batch):
        seen.append(batch)
        return step(*batch)

    trainer.train_step = recording
    for steps in calls:
        trainer.train(dataset, steps=steps)
    return seen


def test_seed_and_epoch_determine_the_order_of_rows():
    runs = [prompts_of(sft(seed=seed), ROWS, *calls) for seed, calls in ((0, [9]), (0, [2, 4, 3]), (1, [9]))]
    assert runs[0] == runs[1] != runs[2]
    epoch = [id(row) for batch in runs[0][:3] for row in batch[0]]
    assert len(epoch) == len(set(epoch)) == 9  # every row once
    assert runs[0][:3] != runs[0][3:6]


def test_without_steps_the_epoch_is_completed():
    trainer = sft()
    trainer.train(ROWS, steps=4)
    trainer.train(ROWS)
    assert (trainer.step, trainer.epoch, trainer.position) == (6, 1, 9)


def test_datasets_of_batches():
    batches = [(torch.full((2, 1), 4 + i), torch.full((2, 2), 5 + i)) for i in range(4)]
    first_tokens = lambda seen: [batch[0][0, 0].item() - 4 for batch in seen]  # noqa: E731
    shuffled = first_tokens(prompts_of(sft(), batches, 4, 4))
    assert sorted(shuffled[:4]) == sorted(shuffled[4:]) == [0, 1, 2, 3]

    class Loader:
        def __iter__(self):
            return iter(batches)

        def __len__(self):
            return 4

    assert first_tokens(prompts_of(sft(), Loader(), 3, 3)) == [0, 1, 2, 3, 0, 1]
    assert first_tokens(prompts_of(sft(), Loader(), None, None)) == [0, 1, 2, 3] * 2
    assert first_tokens(prompts_of(sft(), iter(batches), 3, 3)) == [0, 1, 2, 3]  # an iterator is exhausted
    columns = [{"prompt": a, "completion": b} for a, b in batches]
    rows = prompts_of(sft(), columns, 1)[0][0]
    assert len(rows) == 2 and set(rows[0]) == {"prompt", "completion"}


def hugging_face(rows):
    return pytest.importorskip("datasets").Dataset.from_list(
        [{name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in r.items()} for r in rows]
    )


DATA_SETS = {
    "generator": lambda rows: (row for row in rows),
    "iterable dataset": Streamed,
    "loader, default collate": lambda rows: torch.utils.data.DataLoader(Items(rows), batch_size=3),
    "loader, own collate": lambda rows: torch.utils.data.DataLoader(Items(rows), batch_size=3, collate_fn=list),
    "loader of single rows": lambda rows: torch.utils.data.DataLoader(Items(rows), batch_size=None),
    "columns": lambda rows: iter(
        {name: [row[name] for row in rows[i : i + 3]] for name in rows[0]} for i in range(0, len(rows), 3)
    ),
    "hugging face, iterable": lambda rows: hugging_face(rows).to_iterable_dataset(),
    "hugging face, columns": lambda rows: hugging_face(rows).iter(batch_size=3),
}
ALGORITHMS = {
    SFT: (ROWS, {}),
    DPO: (PAIRS, {}),
    GRPO: (PROMPTS, {"reward_fn": lambda completions, grid: ones(completions), "group_size": 2, "max_new_tokens": 3}),
    OnlineDPO: (PROMPTS, {"reward_fn": lambda completions, grid: ones(completions), "max_new_tokens": 3}),
}


def rows_and_trainers(algorithm):
    rows, settings = ALGORITHMS[algorithm]
    trainers = (algorithm(Net(), learning_rate=0.01, batch_size=3, **settings) for _ in range(2))
    return [{**row, "grid": np.full((5, 5), i)} for i, row in enumerate(rows)], *trainers


@pytest.mark.parametrize("kind", DATA_SETS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rows_of_every_form_in_iterables(algorithm, kind):
    rows, trainer, expected = rows_and_trainers(algorithm)
    trainer.train(DATA_SETS[kind](rows), steps=4)
    for start in (0, 3, 6, 9):
        expected.train_step(rows[start : start + 3])
    assert trainer.step == 4 and trainer.num_tokens == expected.num_tokens
    assert_same_weights(trainer.model, expected.model)


@pytest.mark.parametrize("kind", [Items, hugging_face, tuple, list])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rows_of_every_form_in_sequences(algorithm, kind):
    rows, trainer, expected = rows_and_trainers(algorithm)
    trainer.train(kind(rows), n_epochs=2)
    for batch in itertools.islice(shuffled_batches(10, 3, 0), 6):
        expected.train_step([rows[i] for i in batch])
    assert trainer.step == 6
    assert_same_weights(trainer.model, expected.model)


def test_a_shuffled_data_loader_resumes_exactly(tmp_path):
    def run(steps, trainer=None):
        trainer = trainer or sft(Net(dropout=0.3))
        trainer.train(torch.utils.data.DataLoader(Items(ROWS), batch_size=2, shuffle=True), steps=steps)
        return trainer

    torch.manual_seed(7)
    whole = run(8)
    torch.manual_seed(7)
    run(3).save(tmp_path / "c")
    torch.manual_seed(99)
    assert_same_weights(run(5, SFT.from_checkpoint(tmp_path / "c")).model, whole.model)


@pytest.mark.parametrize(("batch_size", "steps"), [(1, 4), (2, 2), (3, 1), (4, 1)])
def test_resuming_with_another_batch_size_completes_the_epoch(batch_size, steps, tmp_path):
    first = prompts_of(trainer := sft(), ROWS, 2)
    trainer.save(tmp_path / "c")
    resumed = SFT.from_checkpoint(tmp_path / "c", batch_size=batch_size)
    rest = prompts_of(resumed, ROWS, None)
    assert len(rest) == steps and {len(batch[0]) for batch in rest} == {batch_size}
    order = [ROWS.index(row) for batch in first + rest for row in batch[0]]
    assert order == epoch_order(10, 0, 0)[: len(order)].tolist()


def test_n_epochs_counts_the_current_epoch():
    trainer = sft()
    trainer.train(ROWS, n_epochs=np.int64(2))
    assert trainer.step == 6
    trainer.train(ROWS, steps=np.int32(1))
    trainer.train(ROWS, n_epochs=2)  # the current epoch and another
    assert (trainer.step, trainer.epoch, trainer.position) == (12, 3, 9)
    trainer.train(Streamed(ROWS), steps=0)
    assert trainer.step == 12
    prompts = torch.tensor([[4, 5], [5, 5], [6, 5]])
    grpo = GRPO(Net(), reward_fn=ones, group_size=2, max_new_tokens=2, batch_size=3)
    assert grpo.train(prompts, n_epochs=3)["num_tokens"] > 0 and grpo.step == 3


@pytest.mark.parametrize(
    ("arguments", "error", "facts"),
    [
        ({"steps": 2, "n_epochs": 1}, WhetTypeError, ("train", "steps is 2", "n_epochs 1")),
        ({"steps": 2.0}, WhetValueError, ("steps", "2.0", ">= 0")),
        ({"steps": "2"}, WhetValueError, ("steps", "'2'", "integer")),
        ({"steps": -1}, WhetValueError, ("steps", "-1", ">= 0")),
        ({"n_epochs": 0}, WhetValueError, ("n_epochs", "0", ">= 1")),
        ({"n_epochs": torch.tensor(1.5)}, WhetValueError, ("n_epochs", "tensor(1.5000)", ">= 1")),
    ],
)
def test_invalid_steps_and_epochs_are_rejected(arguments, error, facts):
    assert_raises(error, facts, sft().train, ROWS, **arguments)
    with pytest.raises(WhetValueError, match=mentions("train", "length", "epoch", "steps")):
        sft().train(iter(ROWS), n_epochs=1)


def test_data_loader_of_rows():
    loader = torch.utils.data.DataLoader(ROWS, batch_size=5, collate_fn=list)
    trainer = sft()
    trainer.train(loader)
    assert trainer.step == 2


def test_invalid_datasets_are_rejected():
    assert_raises(WhetValueError, ("dataset", "empty"), sft().train, [])
    assert_raises(WhetValueError, ("dataset", "length", "steps"), sft().train, iter(ROWS))
    assert_raises(WhetTypeError, ("dataset", "5", "a sequence or iterable of rows"), sft().train, 5, steps=1)
    assert_raises(WhetValueError, ("2 rows", "batch_size=3"), sft().train, ROWS[:2], steps=1)
    assert_raises(WhetValueError, ("steps", -1), sft().train, ROWS, steps=-1)
    with pytest.raises(WhetTypeError, match=mentions("DPO", "row", "5", "dict")):
        DPO(Net(), batch_size=1).train([5], steps=1)

    class Nothing:
        def __iter__(self):
            return iter(())

    assert_raises(WhetValueError, ("dataset", "empty"), sft().train, Nothing(), steps=1)


def test_loggers_and_callbacks_are_called():
    diary, ledgers = RecordingCallback(), [RecordingLogger(), RecordingLogger()]
    trainer = sft(logger=ledgers, callbacks=diary)
    trainer.train_step(ROWS[:2])
    metrics = trainer.train(ROWS, steps=2)
    assert diary.entries == [("step", 1), ("begin", 1, 3), ("step", 2), ("step", 3), ("end", 3)]
    assert [step for step, _ in ledgers[0].rows] == [1, 2, 3] and ledgers[0].total_steps == 3
    assert trainer.position == 6  # a manual step does not consume the dataset
    assert ledgers[0].rows == ledgers[1].rows and ledgers[0].rows[-1][1] == metrics
    assert metrics["num_tokens"] == 8 * 5  # cumulative
    trainer.log({"eval/accuracy": 0.5})
    assert ledgers[1].rows[-1] == (3, {"eval/accuracy": 0.5})


def test_should_stop_ends_the_run_and_the_next_run_continues():
    diary = RecordingCallback(stop_at=2)
    trainer = sft(callbacks=[diary])
    trainer.train(ROWS, steps=5)
    assert trainer.step == 2 and diary.entries[-1] == ("end", 2)
    trainer.train(ROWS, steps=1)
    assert trainer.step == 3


def test_evaluations_are_logged():
    evaluation = EvaluationCallback(lambda trainer: {"accuracy": trainer.step / 4}, every=2)
    ledger = RecordingLogger()
    metrics = sft(callbacks=[evaluation], logger=ledger).train(ROWS, steps=4)
    assert metrics["eval/accuracy"] == 1.0
    assert [step for step, row in ledger.rows if "eval/accuracy" in row] == [0, 2, 4]


def test_training_continues_exactly_after_an_interrupt():
    interrupt = True

    def reward(completions):
        nonlocal interrupt
        if interrupt and trainer.step == 2:
            interrupt = False
            raise KeyboardInterrupt
        return ones(completions)

    settings = {"batch_size": 3, "group_size": 2, "max_new_tokens": 3, "learning_rate": 0.01}
    trainer = GRPO(Net(), reward_fn=reward, **settings)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(PROMPTS, steps=4)
    assert trainer.step == 2 and trainer.position == 6
    trainer.train(PROMPTS, steps=2)
    whole = GRPO(Net(), reward_fn=ones, **settings)
    whole.train(PROMPTS, steps=4)
    assert_same_weights(trainer.model, whole.model)


def test_an_interrupt_between_two_updates_of_a_step_repeats_no_update():
    class Interrupted(Net):
        n_left = None

        def forward(self, input_ids):
            if self.training and self.n_left is not None:
                if self.n_left == 0:
                    self.n_left = None
                    raise KeyboardInterrupt
                self.n_left -= 1
            return super().forward(input_ids)

    settings = {"reward_fn": ones, "batch_size": 3, "group_size": 2, "max_new_tokens": 3, "num_iterations": 3}
    settings |= {"learning_rate": 0.01, "training_mode": True}
    trainer, whole = GRPO(Interrupted(), **settings), GRPO(Net(), **settings)
    trainer.train(PROMPTS, steps=1)
    trainer.model.n_left = 2  # in the third update
    with pytest.raises(KeyboardInterrupt):
        trainer.train(PROMPTS, steps=2)
    assert trainer.step == 1 and trainer.n_updates == 3 + 2
    trainer.train(PROMPTS, steps=2)
    metrics = whole.train(PROMPTS, steps=3)
    assert trainer.n_updates == whole.n_updates == 9 and trainer.num_tokens == metrics["num_tokens"]
    assert_same_weights(trainer.model, whole.model)
    trainer.model.n_left = 1
    with pytest.raises(KeyboardInterrupt):
        trainer.train(PROMPTS, steps=1)
    trainer.train_step([{"prompt": [7, 7, 7]}])  # other prompts begin a new step
    assert trainer.n_updates == 9 + 1 + 3 and {tuple(r["prompt"]) for r in trainer.last_completions} == {(7, 7, 7)}


def interrupt_in(owner, name, call, before=False):
    """Make a method raise SIGINT during its call."""
    method, calls = getattr(owner, name), itertools.count(1)

    def interrupted(*args, **options):
        is_this = next(calls) == call
        if is_this and before:
            signal.raise_signal(signal.SIGINT)
        result = method(*args, **options)
        if is_this and not before:
            signal.raise_signal(signal.SIGINT)
        return result

    setattr(owner, name, interrupted)


class InterruptedList(list):
    """List whose fifth pop raises SIGINT."""

    def pop(self, *args):
        if len(self) == 5:
            signal.raise_signal(signal.SIGINT)
        return super().pop(*args)


def interrupt_removal(trainer):
    trainer.policy.acceleration._originals = InterruptedList()


PLACES = {
    "in the optimizer": lambda t: interrupt_in(t.policy.optimizer, "_native_step", 2 * len(t.policy.trainable) + 10),
    "after the optimizer": lambda t: interrupt_in(t.policy.optimizer, "zero_grad", 2 * 3),
    "before the count": lambda t: interrupt_in(t, "_count_step", 2, before=True),
    "in the log": lambda t: interrupt_in(t, "log", 3),
    "during removal of the kernels": interrupt_removal,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("algorithm", "rows", "settings"),
    [
        (SFT, ROWS, {}),
        (GRPO, PROMPTS, {"reward_fn": ones, "max_new_tokens": 3, "group_size": 2, "num_iterations": 2}),
        (GRPO, PROMPTS, {"reward_fn": ones, "max_new_tokens": 3, "group_size": 2, "steps_per_generation": 2}),
    ],
    ids=["sft", "grpo", "mini-batches"],
)
def test_steps_are_atomic_under_interrupts(algorithm, rows, settings, place):
    trainer, whole = (algorithm(llama(), batch_size=3, learning_rate=0.01, **settings) for _ in range(2))
    PLACES[place](trainer)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(rows, steps=4)
    assert 3 * trainer.step == trainer.position + 9 * trainer.epoch < 12
    if place == "during removal of the kernels":
        assert acceleration_of(trainer.model) is None and not trainer.policy.acceleration._originals
        trainer.policy.acceleration._originals = []
    trainer.train(rows, steps=4 - trainer.step)
    metrics = whole.train(rows, steps=4)
    assert trainer.n_updates == whole.n_updates and trainer.num_tokens == metrics["num_tokens"]
    assert_same_weights(trainer.model, whole.model)


def test_the_batch_of_a_step_interrupted_in_a_callback_is_not_trained_again():
    class Interrupts(Callback):
        def on_step_end(self, trainer, metrics):
            if trainer.step == 2:
                raise KeyboardInterrupt

    class Seen(SFT):
        def train_step(self, rows, completion=None):
            seen.append(rows[0]["prompt"])
            return super().train_step(rows, completion)

    seen = []
    trainer = Seen(Net(), batch_size=1, callbacks=Interrupts())
    batches = iter([[row] for row in ROWS[:4]])
    with pytest.raises(KeyboardInterrupt):
        trainer.train(batches, steps=4)
    trainer.train(batches, steps=2)
    assert seen == [row["prompt"] for row in ROWS[:4]] and trainer.step == 4


def test_parameters_frozen_after_construction_are_rejected():
    trainer = sft(llama())
    trainer.model.model.layers[1].requires_grad_(False)
    assert_raises(WhetValueError, ("SFT", "model.layers.1", "no longer requires grad"), trainer.train, ROWS, steps=1)


def test_parameters_unfrozen_after_construction_are_rejected():
    model = llama()
    model.model.layers[0].requires_grad_(False)
    trainer = sft(model)
    model.model.layers[0].requires_grad_(True)
    assert_raises(WhetValueError, ("SFT", "model.layers.0", "requires grad", "did not"), trainer.train, ROWS, steps=1)
    model.model.layers[0].requires_grad_(False)
    model.model.norm.weight = torch.nn.Parameter(torch.ones(16))
    assert_raises(WhetValueError, ("norm.weight", "requires grad", "did not"), trainer.train, ROWS, steps=1)


def test_a_changed_active_adapter_is_rejected():
    model = lora()
    model.add_adapter("second", model.peft_config["default"])
    trainer = SFT(model)
    model.set_adapter("second")
    assert_raises(WhetValueError, ("SFT", "default", "no longer requires grad"), trainer.train_step, ROWS[:2])
    model.set_adapter("default")
    trainer.train_step(ROWS[:2])


def test_changed_rates_of_optimizer_groups_are_rejected():
    trainer = sft()
    trainer.policy.optimizer.param_groups[1]["lr"] = 0.5
    assert_raises(WhetValueError, ("[0.01, 0.5]", "no effect", "config.learning_rate"), trainer.train_step, ROWS[:3])
    trainer = sft(warmup_steps=3)
    trainer.train(ROWS, steps=2)
    trainer.config.learning_rate = 0.5
    assert trainer.train(ROWS, steps=2)["learning_rate"] == 0.5


@pytest.mark.parametrize("algorithm", [SFT, GRPO])
def test_changed_settings_that_are_fixed_at_construction_are_rejected(algorithm):
    model, settings = Net(), {"reward_fn": ones, "max_new_tokens": 2} if algorithm is GRPO else {}
    batch = [[4, 5]] if algorithm is GRPO else ROWS[:2]
    for name in algorithm.config_class.fixed_at_construction:
        trainer = algorithm(model, **settings)
        setattr(trainer.config, name, "changed")
        assert_raises(WhetValueError, (f"config.{name}", "'changed'", "no effect"), trainer.train_step, batch)


def test_a_reference_needed_only_later_is_rejected():
    trainer = GRPO(Net(), reward_fn=ones, max_new_tokens=2, group_size=2)
    trainer.train_step([[4, 5]])
    trainer.config.beta = 0.1
    assert_raises(WhetValueError, ("GRPO", "reference", "did not"), trainer.train_step, [[4, 5]])
    adapters = GRPO(lora(), reward_fn=ones, max_new_tokens=2, group_size=2)
    adapters.config.beta = 0.1  # its reference is the model with adapters off
    assert "kl" in adapters.train_step([[4, 5]])


def test_a_failed_step_does_not_consume_the_dataset():
    trainer = sft()
    assert_raises(WhetTypeError, ("tokenizer",), trainer.train, [{"text": "a"}] * 3, steps=1)
    trainer.train_step(ROWS[:3])
    assert trainer.position == 0


@pytest.mark.parametrize("failed", [0, 2])
def test_an_iterator_keeps_the_batch_of_a_failed_step(failed):
    class Failing(Net):
        n_left = failed

        def forward(self, input_ids):
            self.n_left -= 1
            if self.n_left == -1:
                raise KeyboardInterrupt
            return super().forward(input_ids)

    trainer, whole, rows = sft(Failing()), sft(), iter(ROWS)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(rows, steps=3)
    assert trainer.step == failed
    trainer.train(ROWS, steps=0)  # another dataset is independent of it
    trainer.train(rows, steps=5)
    whole.train(iter(ROWS), steps=5)
    assert trainer.step == whole.step == 4
    assert_same_weights(trainer.model, whole.model)


def test_an_iterator_keeps_the_rows_of_a_batch_interrupted_while_drawn():
    class Slow:
        def __init__(self):
            self.rows = iter(ROWS)
            self.n_left = 5

        def __iter__(self):
            return self

        def __next__(self):
            self.n_left -= 1
            if self.n_left == 0:  # in the second row of the second batch
                raise KeyboardInterrupt
            return next(self.rows)

    trainer, rows = sft(), Slow()
    with pytest.raises(KeyboardInterrupt):
        trainer.train(rows, steps=3)
    assert trainer.step == 0  # batches are drawn ahead of their steps
    assert [r["prompt"] for batch in prompts_of(trainer, rows, 2) for r in batch[0]] == [r["prompt"] for r in ROWS[:6]]


def test_log_probs_are_computed_without_dropout():
    model = Net(dropout=0.5)
    trainer = DPO(model, learning_rate=0.01)
    assert trainer.train_step(PAIRS[:3])["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert model.training and trainer.ref_model.training  # unchanged
