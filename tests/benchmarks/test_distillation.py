"""The suite "distillation" on a tiny model: the smaller copy, the teacher's samples, and scores over steps."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from tests.benchmarks.test_methods import TASK
from tests.cli.conftest import write_tiny_model

from benchmarks.contenders.training.distillation import Distillation, remove_layers
from benchmarks.contenders.training.methods import N_COMPLETIONS
from benchmarks.suites import distillation as suite
from whet.bench.harness import QUICK, run_case


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distillation")
    (folder / "sums.py").write_text(TASK)
    model, task = write_tiny_model(folder / "model"), f"{folder / 'sums.py'}:Sums"
    return Distillation(folder / "runs", model, task, n_steps=2, n_held_out=4, every=1, removed=(0,))


def test_a_copy_lacks_the_removed_layers(bench, tmp_path):
    remove_layers(bench.model, tmp_path / "smaller", (0,))
    whole, smaller = map(transformers.AutoModelForCausalLM.from_pretrained, (bench.model, tmp_path / "smaller"))
    assert smaller.config.num_hidden_layers == whole.config.num_hidden_layers - 1
    named = smaller.state_dict()
    for name, tensor in whole.state_dict().items():
        other = name.replace("layers.1.", "layers.0.")
        assert "layers.0." in name or torch.equal(named[other], tensor)


def test_both_methods_are_scored_over_steps(bench):
    for command in ("distill", "sft"):
        curve = bench.train(command, seed=1)
        assert [step for step, _ in curve.points] == [0, 1, 2]
        assert len(curve.step_s) == 2 and min(curve.step_s) > 0 and curve.peak_bytes
    rows = [json.loads(line) for line in bench.samples.read_text().splitlines()]
    assert len(rows) == 2 * N_COMPLETIONS and all(row.keys() == {"prompt", "completion"} for row in rows)
    assert 0 <= bench.teacher_score <= 1


def test_a_row_has_a_curve(bench, monkeypatch):
    monkeypatch.setattr(suite, "smollm2_original", lambda given: bench.model)
    monkeypatch.setattr(suite, "Distillation", lambda *arguments, **settings: bench)
    [table] = suite.tables(suite.DistillationOptions(quick=True))
    (row,) = run_case(table, table.cases[0], table.providers[:1], 1, QUICK, 0).rows
    assert row.status == "measured" and [step for step, _ in row.curve] == [0, 1, 2]
    assert "the teacher's score: " in row.note
