"""KD: the loss of a file's rows, learning, resuming, the vocabulary, what is refused, and the command."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tests.cli.conftest import write_tiny_model
from tests.raising import assert_raises
from tests.tiny import assert_resumes, changed, tiny_llama

from whet import Engine
from whet.algorithms import KD
from whet.cli import main
from whet.errors import WhetTypeError, WhetValueError
from whet.learner import Learner
from whet.losses import top_k_loss
from whet.models.packed_base import pack_base
from whet.models.sources.live import open_module
from whet.models.tokenizers import load_tokenizer
from whet.models.tokenizers.token_texts import vocabulary_digest

ROWS = [([5, 6, 7], [8, 9, 2]), ([3], [7, 4]), ([5, 9], [4, 4, 6, 2])]


def learner(rank: int = 4) -> Learner:
    return Learner(pack_base(open_module(tiny_llama()), weights="float32"), lora_rank=rank, compute="float32")


def student(path: str) -> Any:
    """Return an untrained model: adapters of a learner, or all weights of a module."""
    return learner() if path == "learner" else tiny_llama()


def scored(k: int = 5, teacher: Any = None) -> list[dict[str, Any]]:
    """Return rows with the log-probs of another model."""
    with Engine.from_model(teacher or changed(tiny_llama()), weights="float32") as engine:
        _, tops = engine.logprobs([x + y for x, y in ROWS], start=[len(x) for x, _ in ROWS], top_logprobs=k)
    return [
        {"input_ids": x + y, "completion_mask": [0] * len(x) + [1] * len(y), "top_logprobs": pairs}
        for (x, y), pairs in zip(ROWS, tops, strict=True)
    ]


@pytest.mark.parametrize("micro_batch_size", [0, 1])
@pytest.mark.parametrize("path", ["learner", "modules"])
def test_a_step_is_the_loss_of_the_rows(path: str, micro_batch_size: int) -> None:
    rows, reference = scored(), learner()
    total = covered = 0.0
    for (prompt, completion), row in zip(ROWS, rows, strict=True):
        tops = np.array(row["top_logprobs"])
        own = reference.logprobs([prompt], [completion], candidates=[tops[..., 0].astype(int)], keep=False).logprobs
        found = top_k_loss(own, tops[None, ..., 1], np.ones((1, len(completion)), bool), n_tokens=9)
        total, covered = total + found.value, covered + found.metrics["covered"]
    trainer = KD(student(path), learning_rate=0.0, micro_batch_size=micro_batch_size, compute="float32")
    metrics = trainer.train_step(rows)
    assert metrics["loss"] == pytest.approx(total, rel=1e-6) and metrics["covered"] == pytest.approx(covered, rel=1e-6)
    assert trainer.evaluate(rows) == pytest.approx(total, rel=1e-6) and metrics["grad_norm"] > 0


@pytest.mark.parametrize("path", ["learner", "modules"])
def test_the_student_learns_the_teachers_distribution(path: str) -> None:
    trainer, rows = KD(student(path), learning_rate=0.02, batch_size=3), scored(20)
    before = trainer.evaluate(rows)
    trainer.train(rows, steps=60)
    assert trainer.evaluate(rows) < 0.75 * before


def test_rounded_weights_learn_what_their_export_loses() -> None:
    """The loss with qat is the loss of the rounded model, and training lowers it."""
    model = tiny_llama(initializer_range=0.3)
    rows = scored(20, model)
    assert KD(model, compute="float32").evaluate(rows) < 1e-6
    trainer = KD(model, qat="q4_0", compute="float32", learning_rate=3e-3, batch_size=3)
    before = trainer.evaluate(rows)
    trainer.train(rows, steps=40)
    assert before > 1e-5 and trainer.evaluate(rows) < 0.5 * before


@pytest.mark.parametrize("path", ["learner", "modules"])
def test_a_run_resumes_to_the_bit(path: str, tmp_path: Any) -> None:
    assert_resumes(lambda: KD(student(path), learning_rate=0.01, batch_size=2), scored(), tmp_path)


def test_truncated_rows_keep_their_tops() -> None:
    rows = scored()
    trainer = KD(learner(), max_length=5, truncation="truncate", learning_rate=0.0)
    with pytest.warns(UserWarning, match="truncated"):
        metrics = trainer.train_step(rows)
    assert metrics["frac_truncated"] == pytest.approx(2 / 3) and np.isfinite(metrics["loss"])


def test_wrong_rows_and_models_are_refused() -> None:
    trainer, rows = KD(learner()), scored()
    for change, facts in (
        ({"top_logprobs": None}, ("top_logprobs", "None", "3 completion tokens", "whet score")),
        ({"top_logprobs": rows[0]["top_logprobs"][:2]}, ("2 entries", "3 completion tokens")),
        ({"top_logprobs": [[[1, 0.5]]] * 3}, ("top_logprobs", "0.5", "log-prob")),
        ({"top_logprobs": [[1, -0.5]] * 3}, ("pairs",)),
        ({"top_logprobs": [None] * 3}, ("None", "pairs")),
        ({"top_logprobs": [[[1, -1.0], [1, -2.0]]] * 3}, ("twice",)),
        ({"top_logprobs": [[[100_000, -1.0]]] * 3}, ("token ids",)),
    ):
        assert_raises(WhetValueError, facts, trainer.train_step, [{**rows[0], **change}])
    assert_raises(WhetTypeError, ("KD", "batch"), trainer.train_step, 3)


def test_the_command_writes_rows_and_trains_on_them(tmp_path: Any, capsys: Any) -> None:
    folder, data = write_tiny_model(tmp_path / "model"), tmp_path / "rows.jsonl"
    rows = [{"prompt": "abc", "completion": "def"}, {"prompt": "b", "completion": "cde"}]
    data.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "scored.jsonl"
    assert main(["score", str(folder), "--data", str(data), "--output", str(out), "--top-logprobs", "4"]) == 0
    written = [json.loads(line) for line in out.read_text().splitlines()]
    tokenizer = load_tokenizer(str(folder))
    assert {row["vocabulary"] for row in written} == {vocabulary_digest(tokenizer, "test")}
    for row in written:
        n = sum(row["completion_mask"])
        assert len(row["logprobs"]) == len(row["top_logprobs"]) == n and len(row["top_logprobs"][0]) == 4
        start = len(row["input_ids"]) - n
        with Engine.from_pretrained(str(folder)) as engine:
            np.testing.assert_allclose(engine.logprobs([row["input_ids"]], start=start)[0], row["logprobs"], atol=2e-5)
    run = [
        "--model",
        str(folder),
        "--lora-rank",
        "2",
        "--steps",
        "2",
        "--batch-size",
        "2",
        "--output-dir",
        str(tmp_path / "run"),
    ]
    assert main(["train", "kd", "examples/kd.toml", "--data", str(out), *run]) == 0
    assert (
        main(["train", "kd", "--data", str(out), "--qat", "q4_0", *run[:2], *run[4:-1], str(tmp_path / "rounded")]) == 0
    )
    out.write_text("\n".join(json.dumps({**row, "vocabulary": "0"}) for row in written))
    assert main(["train", "kd", "--data", str(out), *run[:-1], str(tmp_path / "other")]) == 2
    assert "vocabulary '0'" in capsys.readouterr().err
    assert main(["score", str(folder), "--data", str(data), "--top-logprobs", "21"]) == 2
    assert "top_logprobs is 21" in capsys.readouterr().err
