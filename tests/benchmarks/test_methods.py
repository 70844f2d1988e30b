"""The suite "methods": rows by a rule, settings of the examples, runs as processes, kept runs and their times."""

import dataclasses
import json
import sys

import pytest
from tests.cli.conftest import write_tiny_model
from tests.raising import mentions
from tests.representatives import cases

from benchmarks.contenders.training import methods as contender
from benchmarks.contenders.training.methods import Bench, Method, Run, as_flags, preference
from benchmarks.suites import methods as suite
from whet.bench.harness import QUICK, run_case
from whet.config.algorithms import ALGORITHMS
from whet.errors import WhetError, WhetValueError

TASK = """
class Sums:
    name, system_prompt = "sums", "Answer with the number alone."

    def __init__(self, seed=0, size=100):
        self.rows = [{"prompt": [{"role": "user", "content": f"{i} + {i}"}], "answer": str(2 * i)} for i in range(size)]

    def score(self, completion, row):
        return float(len(completion) % 8 == 0)
"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("methods")
    (folder / "sums.py").write_text(TASK)
    model = write_tiny_model(folder / "model")
    return Bench(folder / "runs", model, f"{folder / 'sums.py'}:Sums", n_steps=2, n_held_out=4)


def test_pairs_by_hand():
    prompt = [{"role": "user", "content": "2 - 5"}]
    texts = {" ": 0.0, "2 - 5 = 3": 0.0, "7": 0.0, "is -3": 1.0, "-3": 1.0}
    candidates = [{"completion": text, "score": score} for text, score in texts.items()]
    pair = preference({"prompt": prompt, "candidates": candidates})
    assert pair is not None and pair["prompt"] is prompt
    assert pair["chosen"] == [{"role": "assistant", "content": "is -3"}]
    assert pair["rejected"] == [{"role": "assistant", "content": "2 - 5 = 3"}]  # the first with text
    assert preference({"prompt": prompt, "candidates": candidates[:3]}) is None
    assert preference({"prompt": prompt, "candidates": [candidates[0], *candidates[3:]]}) is None


def test_settings_come_from_the_examples():
    simpo = Method("simpo").settings
    assert simpo == {"learning_rate": 1e-5, "beta": 2.0, "margin": 0.5, "batch_size": 8}
    assert Method("kd").settings["learning_rate"] == 1e-4  # its example trains adapters
    assert Method("kto").settings["batch_size"] == 16
    for command, algorithm in ALGORITHMS.items():
        settings = Method(command).settings
        if algorithm.config.samples:
            assert settings["batch_size"] * algorithm.config(**settings).completions_per_prompt() == 64
        else:
            algorithm.config(**settings)
    for variant in suite.VARIANTS:
        ALGORITHMS["grpo"].config(**variant.settings)
        assert {**variant.settings, **variant.changes} == variant.settings != Method("grpo").settings


def test_flags_of_settings():
    settings = {"lora_rank": 4, "filter_zero_variance": True, "router_replay": False, "stop": ["a", "b"]}
    assert as_flags(settings) == [
        "--lora-rank", "4", "--filter-zero-variance", "--no-router-replay", "--stop", "a", "b"
    ]  # fmt: skip


COMMANDS = ["sft", "dpo", "kto", "reward", "kd", "grpo", "distill"]


@pytest.mark.parametrize("command", cases(COMMANDS, lambda command: command in ("dpo", "grpo")))
def test_run_is_a_process_with_scores(bench, command, monkeypatch):
    monkeypatch.setattr(contender, "N_COMPLETIONS", 8)
    method = Method(command)
    run = bench.run(method, 1)
    assert run.seconds > 0 and (run.peak_bytes is None or run.peak_bytes > 10 << 20)
    assert run.before == (0.5 if command == "reward" else bench.score_before) and 0 <= run.after <= 1
    assert run.arguments["seed"] == 1 and run.arguments["learning_rate"] == method.settings["learning_rate"]
    row = suite.Series(method, (1,), (run,))
    assert suite.series_error(row, suite.Series(method, (1,))) == 0
    assert suite.series_error(row, suite.Series(method, (1, 2))) == 1


def test_held_out_pairs_are_not_trained_on(bench):
    def rows(path):
        return [json.loads(line) for line in path.read_text().splitlines()]

    def prompts(name):
        return [row["prompt"][-1]["content"] for row in rows(bench.pairs / f"{name}.jsonl")]

    assert len(set(prompts("pairs"))) == len(prompts("pairs")) == 16 and len(prompts("held_out")) == 4
    assert not set(prompts("pairs")) & set(prompts("held_out"))
    assert prompts("pairs") == prompts("labels")[::2] == prompts("labels")[1::2]
    for row in rows(bench.pairs / "pairs.jsonl"):  # scored by the task
        assert len(row["chosen"][0]["content"]) % 8 == 0 != len(row["rejected"][0]["content"]) % 8
    for row in rows(bench.answers):
        assert row["completion"][0]["content"] == str(2 * int(row["prompt"][-1]["content"].split()[0]))


def test_kept_run_is_repeated_with_other_settings_or_for_its_time(bench, monkeypatch):
    made = []

    def train(self, method, seed, arguments):
        made.append(len(made))
        return Run(arguments, 1.0 + made[-1], 5, 0.25, 0.75, others_cpus=[1.5, 1.0, 1.2, 0.1][made[-1]], load=[2.0])

    monkeypatch.setattr(Bench, "_train", train)
    bench = dataclasses.replace(bench, folder=bench.folder / "kept")
    again = dataclasses.replace(bench, retime=True)
    orpo = Method("orpo")
    assert bench.run(orpo, 1).seconds == bench.run(orpo, 1).seconds == 1.0
    assert again.run(orpo, 1).seconds == 2.0  # less disturbed
    assert again.run(orpo, 1).seconds == 2.0 and len(made) == 3  # more disturbed than the kept one
    assert again.run(orpo, 1).seconds == again.run(orpo, 1).seconds == 4.0 and len(made) == 4  # idle: kept
    made.clear()
    assert bench.run(Method("orpo", changes={"beta": 0.2}), 1).seconds == 1.0


def a_run(seconds, after, others_cpus):
    return Run({}, seconds, 10, 0.25, after, others_cpus, [0.0])


def test_row_has_idle_times_and_all_scores():
    loaded, idle = a_run(9.0, 0.5, 1.5), a_run(4.0, 0.75, 0.1)
    run = suite.Series(Method("dpo"), (1, 2), (loaded, idle)).as_whole_run()
    assert run.samples_s == [4.0] and run.scores == [(0.25, 0.5), (0.25, 0.75)] and run.note == ""
    run = suite.Series(Method("dpo"), (1,), (loaded,)).as_whole_run()
    assert run.samples_s == [9.0] and "time of dpo under load" in run.note and "1.5 processors" in run.note


def test_rows_of_a_report(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "smollm2_original", lambda given: bench.model)
    monkeypatch.setattr(suite, "TASK", bench.task)
    options = suite.MethodsOptions(runs=str(bench.folder.parent / "suite"), seeds=(1, 2), steps=2)
    table = suite.tables(options)[0]
    (case,) = [case for case in table.cases if case.name == "dpo"]
    monkeypatch.setitem(sys.modules, "reasoning_gym", json)  # installed or not: the task is another one
    (row,) = run_case(table, case, table.providers, 1, QUICK, 0).rows
    assert row.status == "measured" and len(row.scores) == 2 and row.start_s is None, row.why


def test_failed_run_has_the_end_of_its_output():
    with pytest.raises(WhetError, match=mentions("whet train dpo", "status 2", "model is missing")):
        contender.run_measured(["train", "dpo", "--output-dir", "none"])


def test_tables_have_every_method_and_variant():
    rows, sampled = suite.tables(suite.MethodsOptions())
    names = [case.name for table in (rows, sampled) for case in table.cases]
    assert set(names) == {*ALGORITHMS, *(variant.name for variant in suite.VARIANTS)}
    assert len(suite.VARIANTS) == 6 and "grpo, GSPO" in [case.name for case in sampled.cases]
    assert "dpo" in [case.name for case in rows.cases]


def test_settings_that_cannot_be_measured_are_rejected():
    for settings, facts in (
        ({"steps": 0}, ("steps is 0", "at least 1")),
        ({"smollm2": "none"}, ("smollm2 is 'none'",)),
        ({"seeds": ()}, ("seeds are []", "distinct")),
        ({"seeds": (1, 1)}, ("seeds are [1, 1]", "distinct")),
    ):
        with pytest.raises(WhetValueError, match=mentions("whet bench methods:", *facts)):
            suite.tables(suite.MethodsOptions(**settings))
