"""Trainer: optimizer steps, schedules, skipped steps, the loop over data, and bit-identical resumption."""

from __future__ import annotations

import itertools
import math
import random
import signal
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from tests.raising import assert_raises, mentions
from tests.tiny import (
    VOCAB,
    Items,
    OwnGenerate,
    Streamed,
    TinyModel,
    assert_same_weights,
    tiny_llama,
    weights,
    with_lora,
)

from whet.algorithms import DPO, GRPO, SFT, BestOfN, OnlineDPO
from whet.checkpoint.folder import latest_checkpoint, load_checkpoint, save_checkpoint
from whet.config import SFTConfig, learning_rate_at
from whet.data.rows import epoch_order, shuffled_batches
from whet.errors import CheckpointError, NonFiniteError, WhetTypeError, WhetValueError
from whet.models.base_record import pack_recorded, read_record
from whet.models.sources.live import open_module
from whet.nn.accelerate import acceleration_of
from whet.nn.causal_lm import completion_logprobs
from whet.nn.frozen import base_of, frozen_model
from whet.nn.modules import module_mode, stop_token_ids
from whet.training.callbacks import Callback, CheckpointCallback, EvaluationCallback
from whet.training.loggers import CSVLogger

ROWS = [{"prompt": [4 + i % 5, 5], "completion": [6 + i % 6, 4 + i % 3, 2]} for i in range(10)]
PAIRS = [{"prompt": [4 + i % 5], "chosen": [6 + i % 6, 2], "rejected": [5, 4 + i % 7, 2]} for i in range(10)]
PROMPTS = [{"prompt": [4 + i % 5, 5][: 1 + i % 2]} for i in range(10)]


class Net(TinyModel):
    """Trainer in float32."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout, dtype=torch.float32)


class Sampling(Net, OwnGenerate):
    pass


def llama():
    return tiny_llama(num_key_value_heads=2, tie_word_embeddings=True)


def lora():
    return with_lora(llama(), r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.2, task_type=None)


def narrow():
    return llama().bfloat16()


def packed():
    return with_lora(frozen_model(llama(), "q8_0"), r=2, target_modules="all-linear", lora_dropout=0.2)


def ones(completions):
    return [float((c == 4).sum() + 0.1 * c[0]) for c in completions]


def sft(model=None, **settings) -> SFT:
    return SFT(model if model is not None else Net(), **{"learning_rate": 0.01, "batch_size": 3} | settings)


# --- the update -----------------------------------------------------------------------------------------


def test_the_schedule_by_hand():
    linear = SFTConfig(learning_rate=1.0, lr_schedule="linear", warmup_steps=2)
    rates = [learning_rate_at(step, linear, 6) for step in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    cosine = SFTConfig(learning_rate=2.0, lr_schedule="cosine")
    assert [learning_rate_at(s, cosine, 4) for s in range(5)] == pytest.approx(
        [2, 1 + math.sqrt(0.5), 1, 1 - math.sqrt(0.5), 0]
    )
    constant = SFTConfig(learning_rate=3.0, warmup_steps=3)
    assert [learning_rate_at(step, constant, 0) for step in range(5)] == pytest.approx([1, 2, 3, 3, 3])


def test_updates_use_the_scheduled_rate():
    trainer = sft(lr_schedule="linear", warmup_steps=1, learning_rate=0.4)
    seen = []

    class Watch(Callback):
        def on_step_end(self, trainer, metrics):
            seen.append((metrics["learning_rate"], trainer.optimizer.param_groups[0]["lr"]))

    trainer.callbacks.append(Watch())
    trainer.train(ROWS, steps=5)
    assert [rate for rate, _ in seen] == pytest.approx([0.4, 0.4, 0.3, 0.2, 0.1])
    assert all(reported == used for reported, used in seen)


def test_a_decaying_schedule_requires_a_length():
    with pytest.raises(WhetValueError, match=mentions("lr_schedule", "'cosine'", "schedule_steps")):
        sft(lr_schedule="cosine").train_step(ROWS[:2])
    assert sft(lr_schedule="cosine", schedule_steps=4).train_step(ROWS[:2])["learning_rate"] == 0.01


@pytest.mark.parametrize("make_model", [Net, llama])
@pytest.mark.parametrize("compute", ["auto", "torch"])
def test_weight_decay_applies_to_the_same_parameters_as_transformers(make_model, compute):
    runs = [sft(make_model(), weight_decay=decay, compute=compute) for decay in (0.0, 0.5)]
    for trainer in runs:
        trainer.train_step(ROWS[:2])
    before, after = (dict(trainer.model.named_parameters()) for trainer in runs)
    decayed = {name for name, parameter in after.items() if not torch.equal(parameter, before[name])}
    expected = set(transformers.Trainer.get_decay_parameter_names(cast(Any, None), runs[0].model)) & set(after)
    assert decayed == expected and expected and expected != set(after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_train_with_master_weights(dtype):
    """Updates are smaller than half a unit in the last place of most weights."""
    runs = [sft(llama().to(kind), learning_rate=1e-4, compute="torch") for kind in (dtype, torch.float32)]
    narrow, wide = runs
    with torch.no_grad():  # equal initial weights
        for mine, theirs in zip(wide.trainable.values(), narrow.trainable.values(), strict=True):
            mine.copy_(theirs)
    start = weights(wide.model)
    curves = []
    for trainer in runs:
        losses = []
        trainer.callbacks.append(recorder(losses))
        trainer.train(ROWS, steps=15)
        curves.append(losses)
    moved = [(w.detach() - start[name]).norm() for name, w in wide.trainable.items()]
    for (name, p), distance in zip(narrow.trainable.items(), moved, strict=True):
        master = narrow.optimizer.state[p]["master"]
        assert torch.equal(master.to(dtype), p)
        assert (master - wide.trainable[name]).norm() < 0.2 * distance
    assert curves[0] == pytest.approx(curves[1], rel=5e-3)


def test_master_weights_count_as_moments():
    trainer = sft(narrow(), compute="torch")
    trainer.train_step(ROWS[:2])
    parts = [(part, n_bytes) for part, _, n_bytes in trainer.memory_blocks()]
    n_weights = sum(p.numel() for p in trainer.trainable.values())
    assert sum(n for part, n in parts if part == "moments") == 12 * n_weights + 4 * len(trainer.trainable)
    assert sum(n for part, n in parts if part == "weights") >= 2 * n_weights


def recorder(losses):
    class Losses(Callback):
        def on_step_end(self, trainer, metrics):
            losses.append(metrics["loss"])

    return Losses()


def test_gradients_are_clipped_to_the_norm():
    """With betas 0 and a large epsilon, AdamW's step is lr * gradient / epsilon, which reveals the gradient."""
    model = Net()
    trainer = sft(model, adam_beta1=0.0, adam_beta2=0.0, adam_epsilon=1e6, learning_rate=1e6, max_grad_norm=0.01)
    before = weights(model)
    metrics = trainer.train_step(ROWS[:3])
    step = torch.cat([(before[name] - value).ravel() for name, value in weights(model).items()])
    assert metrics["grad_norm"] > 0.05  # before clipping
    assert step.norm().item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("algorithm", [SFT, DPO])
def test_accumulated_micro_batches_equal_one_batch(algorithm):
    rows = (ROWS if algorithm is SFT else PAIRS)[:8]
    runs = []
    for micro_batch_size in (0, 1, 3):
        trainer = algorithm(Net().double(), learning_rate=0.01, micro_batch_size=micro_batch_size)
        losses = [trainer.train_step(rows)["loss"] for _ in range(4)]
        runs.append((losses, weights(trainer.model)))
    for losses, values in runs[1:]:
        assert losses == pytest.approx(runs[0][0], rel=1e-10)
        for name, value in values.items():
            torch.testing.assert_close(value, runs[0][1][name], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_steps_are_skipped(where, bad):
    class Poisoned(Net):
        poison = False

        def forward(self, input_ids):
            logits = super().forward(input_ids)
            if self.poison and where == "loss":
                return logits + bad
            if self.poison:
                logits.register_hook(lambda gradient: gradient * bad)
            return logits

    model, clean = Poisoned(), Net()
    trainer, reference = sft(model), sft(clean)
    trainer.train_step(ROWS[:3])
    reference.train_step(ROWS[:3])
    model.poison = True
    metrics = trainer.train_step(ROWS[3:6])
    assert metrics["skipped_steps"] == 1 and trainer.step == 2 and trainer.n_updates == 1
    assert_same_weights(model, clean)
    model.poison = False
    trainer.train_step(ROWS[6:9])
    reference.train_step(ROWS[6:9])
    assert_same_weights(model, clean)  # moments are unchanged too


def test_too_many_consecutive_skipped_steps_are_an_error():
    model = Net()
    trainer = sft(model, max_skipped_steps=3)
    good = weights(model)
    for _ in range(2):
        with torch.no_grad():
            model.head.bias.fill_(math.nan)
        trainer.train_step(ROWS[:3])
        trainer.train_step(ROWS[:3])
        with torch.no_grad():
            model.head.bias.copy_(good["head.bias"])
        trainer.train_step(ROWS[:3])  # a finite step resets the count
    with torch.no_grad():
        model.head.bias.fill_(math.nan)
    trainer.train_step(ROWS[:3])
    trainer.train_step(ROWS[:3])
    with pytest.raises(NonFiniteError, match=mentions("SFT", "3 updates", "not finite")):
        trainer.train_step(ROWS[:3])
    assert trainer.skipped_steps == 7


def test_only_parameters_that_require_grad_are_trained():
    model = Net()
    model.embedding.requires_grad_(False)
    before = weights(model)
    sft(model).train_step(ROWS[:3])
    after = weights(model)
    assert torch.equal(before["embedding.weight"], after["embedding.weight"])
    assert not torch.equal(before["head.weight"], after["head.weight"])
    assert_raises(WhetValueError, ("SFT", "requires grad"), sft, Net().requires_grad_(False))


def test_rows_are_independent_of_the_batch():
    for make in (Net, llama):
        model, trainer = make(), sft(make(), compute="float32" if make is llama else "auto")
        with torch.no_grad():
            logprobs = [completion_logprobs(model, [r["prompt"]], [r["completion"]]).logprobs for r in ROWS[:4]]
            together = trainer.logprobs(
                trainer.model, [r["prompt"] for r in ROWS[:4]], [r["completion"] for r in ROWS[:4]]
            )
        torch.testing.assert_close(together, torch.cat(logprobs), rtol=1e-5, atol=1e-6)


# --- the loop -------------------------------------------------------------------------------------------


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


class Diary(Callback):
    def __init__(self, stop_at=None):
        self.entries = []
        self.stop_at = stop_at

    def on_train_begin(self, trainer, total_steps):
        self.entries.append(("begin", trainer.step, total_steps))

    def on_step_end(self, trainer, metrics):
        self.entries.append(("step", trainer.step))
        trainer.should_stop = trainer.step == self.stop_at

    def on_train_end(self, trainer):
        self.entries.append(("end", trainer.step))


class Ledger:
    total_steps = None

    def __init__(self):
        self.rows = []

    def log(self, metrics, step):
        self.rows.append((step, dict(metrics)))

    def close(self):
        pass


def test_loggers_and_callbacks_are_called():
    diary, ledgers = Diary(), [Ledger(), Ledger()]
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
    diary = Diary(stop_at=2)
    trainer = sft(callbacks=[diary])
    trainer.train(ROWS, steps=5)
    assert trainer.step == 2 and diary.entries[-1] == ("end", 2)
    trainer.train(ROWS, steps=1)
    assert trainer.step == 3


def test_evaluations_are_logged():
    evaluation = EvaluationCallback(lambda trainer: {"accuracy": trainer.step / 4}, every=2)
    ledger = Ledger()
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
    trainer.acceleration._originals = InterruptedList()


PLACES = {
    "in the optimizer": lambda t: interrupt_in(t.optimizer, "_native_step", 2 * len(t.trainable) + 10),
    "after the optimizer": lambda t: interrupt_in(t.optimizer, "zero_grad", 2 * 3),
    "before the count": lambda t: interrupt_in(t, "_count_step", 2, before=True),
    "in the log": lambda t: interrupt_in(t, "log", 3),
    "during removal of the kernels": interrupt_removal,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("algorithm", "rows", "settings"),
    [(SFT, ROWS, {}), (GRPO, PROMPTS, {"reward_fn": ones, "max_new_tokens": 3, "group_size": 2, "num_iterations": 2})],
    ids=["sft", "grpo"],
)
def test_steps_are_atomic_under_interrupts(algorithm, rows, settings, place):
    trainer, whole = (algorithm(llama(), batch_size=3, learning_rate=0.01, **settings) for _ in range(2))
    PLACES[place](trainer)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(rows, steps=4)
    assert 3 * trainer.step == trainer.position + 9 * trainer.epoch < 12
    if place == "during removal of the kernels":
        assert acceleration_of(trainer.model) is None and not trainer.acceleration._originals
        trainer.acceleration._originals = []
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
    trainer.optimizer.param_groups[1]["lr"] = 0.5
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


# --- checkpoints ----------------------------------------------------------------------------------------

RESUMED = {
    "sft": (SFT, ROWS, {}),
    "dpo": (DPO, PAIRS, {"loss_type": "ipo"}),
    "dpo-free": (DPO, PAIRS, {"reference_free": True}),
    "grpo": (GRPO, PROMPTS, {"reward_fn": ones, "beta": 0.1, "num_iterations": 2, "group_size": 3}),
    "grpo-free": (GRPO, PROMPTS, {"reward_fn": ones, "group_size": 3}),
    "online-dpo": (OnlineDPO, PROMPTS, {"reward_fn": ones}),
}


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("make", [lambda: Net(dropout=0.3), lambda: Sampling(dropout=0.3), llama, lora, packed, narrow])
@pytest.mark.filterwarnings("ignore:.*torch computes the step")
def test_a_resumed_run_is_bit_identical(name, make, tmp_path):
    algorithm, dataset, own = RESUMED[name]
    settings = {"learning_rate": 0.01, "batch_size": 3, "warmup_steps": 2, "lr_schedule": "cosine"}
    settings |= {"schedule_steps": 8, "micro_batch_size": 2, "training_mode": algorithm is SFT} | own
    if algorithm in (GRPO, OnlineDPO):
        settings["max_new_tokens"] = 4

    def seed_all():
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)  # noqa: NPY002

    seed_all()
    whole = algorithm(make(), **settings)
    whole.train(dataset, steps=7)

    seed_all()
    first = algorithm(make(), **settings)
    first.train(dataset, steps=4)
    first.save(tmp_path / "checkpoint")
    torch.manual_seed(99)  # random states of a new process differ
    given = {"model": make()} if make in (lora, packed) else {}
    callables = {"reward_fn": ones} if "reward_fn" in own else {}
    resumed = algorithm.from_checkpoint(tmp_path / "checkpoint", **given, **callables)
    assert resumed.step == 4 and (resumed.epoch, resumed.position) == (1, 3) and resumed.config == first.config
    metrics = resumed.train(dataset, steps=3)
    assert_same_weights(whole.model, resumed.model)
    assert resumed.num_tokens == whole.num_tokens == metrics["num_tokens"]
    assert metrics["learning_rate"] == whole.optimizer.param_groups[0]["lr"]
    for parameter, mine in zip(whole.trainable.values(), resumed.trainable.values(), strict=True):
        theirs, ours = whole.optimizer.state[parameter], resumed.optimizer.state[mine]
        assert all(torch.equal(theirs[key], ours[key]) for key in theirs)


def test_a_schedule_continues_after_resuming(tmp_path):
    whole, stopped = (sft(lr_schedule="linear", callbacks=[Diary(stop_at)]) for stop_at in (None, 4))
    whole.train(ROWS, steps=8)
    stopped.train(ROWS, steps=8)
    stopped.save(tmp_path / "c")
    resumed = SFT.from_checkpoint(tmp_path / "c")
    rates = [resumed.train(ROWS, steps=steps)["learning_rate"] for steps in (1, 3)]
    assert rates == pytest.approx([0.005, 0.00125])
    assert_same_weights(resumed.model, whole.model)


def test_the_reference_is_restored_from_the_checkpoint(tmp_path):
    ref_model = Net()
    with torch.no_grad():
        ref_model.head.bias += torch.arange(VOCAB)
    trainer = DPO(Net(), ref_model, learning_rate=0.01)
    trainer.train_step(PAIRS[:3])
    trainer.save(tmp_path / "c")
    for arguments in ({}, {"model": Net()}, {"model": Net(), "ref_model": Net()}):
        loaded = DPO.from_checkpoint(tmp_path / "c", **arguments)
        assert_same_weights(loaded.ref_model, ref_model)
        assert not any(p.requires_grad for p in loaded.ref_model.parameters())
    assert loaded.train_step(PAIRS[:3])["loss"] == trainer.train_step(PAIRS[:3])["loss"]


def test_models_of_local_classes_are_passed_as_arguments(tmp_path):
    class Local(Net):
        pass

    trainer = DPO(Local(), learning_rate=0.01)
    trainer.train_step(PAIRS[:3])
    trainer.save(tmp_path / "c")
    assert_raises(CheckpointError, ("model=",), DPO.from_checkpoint, tmp_path / "c")
    loaded = DPO.from_checkpoint(tmp_path / "c", model=Local())
    assert_same_weights(loaded.ref_model, Local())
    assert loaded.train_step(PAIRS[:3])["loss"] == trainer.train_step(PAIRS[:3])["loss"]


def test_settings_can_change_on_resuming(tmp_path):
    trainer = sft()
    trainer.save(tmp_path / "c")
    assert SFT.from_checkpoint(tmp_path / "c", learning_rate=0.5).train_step(ROWS[:3])["learning_rate"] == 0.5


def test_callbacks_and_loggers_resume_from_a_checkpoint(tmp_path):
    def make_callbacks():
        evaluation = EvaluationCallback(lambda trainer: {"x": trainer.step}, every=2)
        return [evaluation, CheckpointCallback(tmp_path / "run", every=2)]

    logger = CSVLogger(tmp_path / "log.csv")
    trainer = sft(callbacks=make_callbacks(), logger=logger)
    trainer.train(ROWS, steps=5)
    trainer.train_step(ROWS[:3])
    path = latest_checkpoint(tmp_path / "run")
    assert path is not None and path.name == "step-000006"
    callbacks = make_callbacks()
    resumed = SFT.from_checkpoint(tmp_path / "run" / "step-000005", callbacks=callbacks, logger=logger)
    assert resumed.step == 5 and [row["x"] for row in callbacks[0].history] == [0, 2, 4, 5]
    rows = (tmp_path / "log.csv").read_text().splitlines()[1:]
    assert max(int(row.split(",")[0]) for row in rows) == 5  # later rows are removed
    resumed.train(ROWS, steps=1)
    assert [row["x"] for row in callbacks[0].history] == [0, 2, 4, 5, 6]


def test_only_trained_parameters_are_saved(tmp_path):
    from safetensors.torch import load_file

    trainer = SFT(lora(), learning_rate=0.01)
    trainer.train_step(ROWS[:3])
    trainer.save(tmp_path / "c")
    assert all("lora" in name for name in load_file(tmp_path / "c" / "model.safetensors"))
    assert_raises(CheckpointError, ("trained part", "model="), SFT.from_checkpoint, tmp_path / "c")
    with pytest.raises(CheckpointError, match=mentions("from_checkpoint", "trained parameters", "differ")):
        SFT.from_checkpoint(tmp_path / "c", model=llama())


def test_adapters_resume_on_and_are_saved_with_their_base(tmp_path):
    trainer = SFT(packed(), learning_rate=0.01)
    trainer.train_step(ROWS[:3])
    trainer.save(tmp_path / "c")
    trainer.save_pretrained(tmp_path / "model")
    record = read_record(tmp_path / "model", "test")
    assert record == base_of(trainer.model).record() and record["weights"] == "q8_0"

    def on(base, model=None):
        return with_lora(frozen_model(model or llama(), base), r=2, target_modules="all-linear")

    again = SFT.from_checkpoint(tmp_path / "c", model=on(pack_recorded(open_module(llama()), record, "t", "c")))
    assert again.step == 1
    for model, names in (
        (on("bf16"), r"a base in int8, q8_0 \(\w{12}\), and this model is on a base in bf16 \(\w{12}\)"),
        (
            on("q8_0", tiny_llama(1, num_key_value_heads=2)),
            r"a base in int8, q8_0 \(\w{12}\), and .* a base in int8, q8_0 \(\w{12}\)",
        ),
        (lora(), r"a base in int8, q8_0 \(\w{12}\), and this model is on floats"),
    ):
        assert_raises(CheckpointError, f"c was trained on {names}", SFT.from_checkpoint, tmp_path / "c", model=model)
    other = tiny_llama(1, num_key_value_heads=2, tie_word_embeddings=True)
    for model, asked, names in (
        (other, record, r"a base in int8, q8_0 \(\w{12}\), and this model is on a base in int8, q8_0"),
        (llama(), {**record, "weights": "bf16"}, "a base in int8, q8_0, and this one is in bf16"),
    ):
        args = open_module(model), asked, "load", "model"
        assert_raises(CheckpointError, f"load: model was trained on {names}", pack_recorded, *args)
    (tmp_path / "model" / "whet_base.json").write_text('{"formats": "int8"}')
    assert_raises(CheckpointError, ("record", "base"), read_record, tmp_path / "model", "test")
    on_floats = SFT(lora(), learning_rate=0.01)
    on_floats.save(tmp_path / "f")
    assert_raises(CheckpointError, ("trained", "floats"), SFT.from_checkpoint, tmp_path / "f", model=packed())
    on_floats.save_pretrained(tmp_path / "model2")
    assert read_record(tmp_path / "model2", "test") is None


@pytest.mark.parametrize(
    ("part", "value", "facts"),
    [
        ("counters", {}, ("KeyError", "'step'")),
        ("counters", dict.fromkeys(("step", "epoch"), 0.5), ("TypeError", "'float' object")),
        ("callbacks", 0.5, ("TypeError",)),
        ("ref_model", 3, ("TypeError", "'int' object")),
        ("config", {"depth": 1}, ("TypeError", "'depth'")),
        ("optimizer", torch.zeros(2), ("exp_avg", "head.bias", "(2,)")),
        ("optimizer", None, ("KeyError", "'body'")),
    ],
)
def test_a_malformed_checkpoint_is_rejected(part, value, facts, tmp_path):
    trainer = sft()
    trainer.train_step(ROWS[:3])
    trainer.save(tmp_path / "c")
    tensors, state = load_checkpoint(tmp_path / "c")
    if part != "optimizer":
        state[part] = value
    elif value is None:
        tensors["optimizer"]["body.step"] = torch.zeros(1)
    else:
        tensors["optimizer"]["head.bias.exp_avg"] = value
    save_checkpoint(tmp_path / "c", tensors, state)
    assert_raises(CheckpointError, ("c is malformed", *facts), SFT.from_checkpoint, tmp_path / "c")


def test_a_checkpoint_that_counts_batches_is_rejected(tmp_path):
    sft().save(tmp_path / "c")
    tensors, state = load_checkpoint(tmp_path / "c")
    del state["counters"]["epoch"]
    save_checkpoint(tmp_path / "c", tensors, state)
    assert_raises(CheckpointError, ("from_checkpoint", "batches", "rows"), SFT.from_checkpoint, tmp_path / "c")


def test_a_checkpoint_of_another_algorithm_is_rejected(tmp_path):
    sft().save(tmp_path / "c")
    assert_raises(CheckpointError, ("DPO.from_checkpoint", "SFT"), DPO.from_checkpoint, tmp_path / "c")
    assert_raises(CheckpointError, ("checkpoint",), SFT.from_checkpoint, tmp_path / "nothing")


def test_save_pretrained(tmp_path):
    from transformers import AutoModelForCausalLM

    trainer = sft(llama())
    trainer.train_step(ROWS[:3])
    trainer.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(torch.tensor([[4, 5]])).logits, trainer.model.eval()(torch.tensor([[4, 5]])).logits)
    assert_raises(WhetTypeError, ("Net", "Hugging Face"), sft().save_pretrained, tmp_path)


# --- small parts ----------------------------------------------------------------------------------------


def test_invalid_constructor_arguments_are_rejected():
    assert_raises(WhetTypeError, ("SFT", "model", "function", "an nn.Module"), SFT, ones)
    assert_raises(WhetTypeError, ("'lerning_rate'", "learning_rate"), sft, lerning_rate=1.0)
    assert_raises(WhetTypeError, ("learning_rate", "'1e-4'", "float"), sft, learning_rate="1e-4")
    assert_raises(WhetValueError, ("learning_rate", "-1", "a finite number >= 0"), sft, learning_rate=-1)
    assert_raises(WhetTypeError, ("config", "SFTConfig", "DPOConfig"), DPO, Net(), config=SFTConfig())
    assert sft(config=SFTConfig(weight_decay=0.1), learning_rate=0.5).config.weight_decay == 0.1


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"logger": "wandb"}, ("SFT", "logger", "'wandb'", "method log")),
        ({"logger": [Ledger(), print]}, ("SFT", "logger", "<built-in function print>")),
        ({"callbacks": len}, ("SFT", "callbacks", "<built-in function len>", "on_step_end")),
    ],
)
def test_invalid_loggers_and_callbacks_are_rejected(arguments, facts):
    assert_raises(WhetTypeError, facts, sft, **arguments)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [(SFT, {}), (GRPO, {"reward_fn": ones, "beta": 0.0}), (DPO, {"reference_free": True}), (DPO, {"loss_type": "sft"}),
     (OnlineDPO, {"reward_fn": ones, "reference_free": True})],
)  # fmt: skip
def test_a_reference_without_effect_is_rejected(algorithm, settings):
    with pytest.raises(WhetValueError, match=mentions(algorithm.__name__, "ref_model", "no effect")):
        algorithm(Net(), Net(), **settings)


def test_a_resumed_run_may_drop_its_reference(tmp_path):
    GRPO(Net(), Net(), reward_fn=ones, beta=0.1, kl_estimator="k1").save(tmp_path / "c")
    kept = GRPO.from_checkpoint(tmp_path / "c", reward_fn=ones)
    assert kept.ref_model is not None and kept.config.beta == 0.1
    plain = GRPO.from_checkpoint(tmp_path / "c", reward_fn=ones, beta=0.0, kl_estimator="k3")
    assert plain.ref_model is None and plain.config.beta == 0.0


def test_modes_are_restored_per_module():
    model = Net()
    model.dropout.eval()
    with module_mode(model, training=False):
        assert not any(member.training for member in model.modules())
    assert model.training and model.mixer.training and not model.dropout.training


def test_stop_tokens_of_model_and_tokenizer():
    class Tokenizer:
        eos_token_id = 9

    model = llama()
    assert stop_token_ids(model, None) == [2]
    assert stop_token_ids(model, Tokenizer()) == [9]
    model.generation_config.eos_token_id = [2, 9]
    assert stop_token_ids(model, Tokenizer()) == [2, 9]
    assert stop_token_ids(Net(), None) == [] and stop_token_ids(Net(), Tokenizer()) == [9]
    assert stop_token_ids(model, Tokenizer(), [5, 6]) == stop_token_ids(Net(), None, (5, 6)) == [5, 6]


def test_stop_tokens_outside_the_vocabulary_are_rejected():
    class Tokenizer:
        eos_token_id = 500

        def decode(self, ids, skip_special_tokens):
            return str(ids)

    model = llama()
    n_tokens = model.config.vocab_size
    with pytest.raises(WhetValueError, match=mentions("tokenizer", "eos_token_id", 500, n_tokens)):
        GRPO(model, reward_fn=ones, tokenizer=Tokenizer(), max_new_tokens=2).train_step([[4, 5]])
    with pytest.raises(WhetValueError, match=mentions("stop_token_ids", 500, n_tokens)):
        BestOfN(model, reward_fn=ones, stop_token_ids=[2, 500], max_new_tokens=2).generate([[4, 5]])
    model.generation_config.eos_token_id = [2, 500]
    with pytest.raises(WhetValueError, match=mentions("model", "eos_token_id", 500, n_tokens, "generation_config")):
        stop_token_ids(model, None)
    assert stop_token_ids(model, None, [n_tokens - 1]) == [n_tokens - 1]
    model.resize_token_embeddings(501)
    assert stop_token_ids(model, None) == [2, 500]
