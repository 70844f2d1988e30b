"""Checkpoints of a trainer: bit-identical resumption, saved parameters, malformed checkpoints."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from tests.raising import assert_raises, mentions
from tests.representatives import cases
from tests.tiny import (
    VOCAB,
    assert_same_weights,
    tiny_llama,
    with_lora,
)
from tests.training.trainers import (
    PAIRS,
    PROMPTS,
    ROWS,
    Net,
    RecordingCallback,
    Sampling,
    llama,
    lora,
    narrow,
    ones,
    packed,
    sft,
)

from whet.algorithms import DPO, GRPO, RLOO, SFT, OnlineDPO
from whet.checkpoint.folder import latest_checkpoint, load_checkpoint, save_checkpoint
from whet.errors import CheckpointError, WhetTypeError
from whet.models.base_record import pack_recorded, read_record
from whet.models.sources.live import open_module
from whet.nn.frozen import base_of, frozen_model
from whet.training.callbacks import CheckpointCallback, EvaluationCallback
from whet.training.loggers import CSVLogger

RESUMED = {
    "sft": (SFT, ROWS, {}),
    "dpo": (DPO, PAIRS, {"loss_type": "ipo"}),
    "dpo-free": (DPO, PAIRS, {"reference_free": True}),
    "grpo": (GRPO, PROMPTS, {"reward_fn": ones, "beta": 0.1, "num_iterations": 2, "group_size": 3}),
    "grpo-free": (GRPO, PROMPTS, {"reward_fn": ones, "group_size": 3}),
    "rloo": (RLOO, PROMPTS, {"reward_fn": ones, "num_iterations": 2, "steps_per_generation": 2}),
    "online-dpo": (OnlineDPO, PROMPTS, {"reward_fn": ones}),
}


MODELS = [lambda: Net(dropout=0.3), lambda: Sampling(dropout=0.3), llama, lora, packed, narrow]


@pytest.mark.parametrize(
    ("make", "name"),
    cases(itertools.product(MODELS, RESUMED), lambda case: case[0] is llama or case[1] == "grpo"),
)
@pytest.mark.filterwarnings("ignore:.*torch computes the step")
def test_a_resumed_run_is_bit_identical(make, name, tmp_path):
    algorithm, dataset, own = RESUMED[name]
    settings = {"learning_rate": 0.01, "batch_size": 3, "warmup_steps": 2, "lr_schedule": "cosine"}
    settings |= {"schedule_steps": 8, "micro_batch_size": 2, "training_mode": algorithm is SFT} | own
    if algorithm.config_class.samples:
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
    assert metrics["learning_rate"] == whole.policy.optimizer.param_groups[0]["lr"]
    for parameter, mine in zip(whole.policy.trainable.values(), resumed.policy.trainable.values(), strict=True):
        theirs, ours = whole.policy.optimizer.state[parameter], resumed.policy.optimizer.state[mine]
        assert all(torch.equal(theirs[key], ours[key]) for key in theirs)


def test_a_schedule_continues_after_resuming(tmp_path):
    whole, stopped = (sft(lr_schedule="linear", callbacks=[RecordingCallback(stop_at)]) for stop_at in (None, 4))
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
    # torch computes an LSTM with frozen parameters by another path.
    expected = trainer.train_step(PAIRS[:3])["loss"]
    assert loaded.train_step(PAIRS[:3])["loss"] == pytest.approx(expected, rel=1e-6)


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
