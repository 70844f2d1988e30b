"""``--task`` in ``whet train`` and ``whet best-of-n``: real commands on a tiny model."""

import importlib.metadata
import json
import runpy
import signal
import subprocess
from pathlib import Path

import pytest
from tests.cli.conftest import write_tiny_model
from tests.processes import WHET
from tests.raising import assert_mentions

from whet.cli import main
from whet.config.toml import read_toml
from whet.data.sources import read_rows
from whet.rewards.functions import load_function
from whet.tasks import open_task, open_tasks

ROOT = Path(__file__).parents[2]
OWN = "examples/tasks.py:SortLetters"
SUMS = 'reasoning_gym:chain_sum,size=40,max_terms=2,max_digits=1,system_prompt=""'
gym = pytest.mark.needs("reasoning_gym")


@pytest.fixture
def flags(tmp_path, tiny_model):
    """Return a function that makes the flags of a named run."""

    def given(name, *tasks, **settings):
        settings = {"batch_size": 2, "max_new_tokens": 4, "learning_rate": 1e-3, **settings}
        pairs = {"model": tiny_model, "output_dir": tmp_path / name, **settings}
        return ["--task", *tasks, *(f"--{key.replace('_', '-')}={value}" for key, value in pairs.items())]

    return given


def metrics_of(folder):
    return read_rows(folder / "metrics.jsonl")


# --- results of a run -----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ["custom_task.toml", pytest.param("task.toml", marks=gym)])
def test_example_runs(config, tmp_path, tiny_model, capsys):
    argv = ["--model", tiny_model, "--output-dir", tmp_path / "run", "--max-new-tokens", "4"]
    argv += ["--steps", "2", "--batch-size", "4", "--eval-items", "3"]
    assert main(["train", "grpo", f"examples/{config}", *map(str, argv)]) == 0
    tables = read_toml(ROOT / "examples" / config)["task"]
    names = [table["name"] for table in tables]
    assert all(name in capsys.readouterr().out.strip().splitlines()[-1] for name in names[:1])
    card = (tmp_path / "run" / "README.md").read_text()
    assert names[-1] in card and "## Evaluation on 3 held-out items of each task" in card
    assert [open_tasks([text]).names for text in read_toml(tmp_path / "run" / "config.toml")["task"]] == [
        open_tasks([table]).names for table in tables
    ]
    assert [row["step"] for row in metrics_of(tmp_path / "run") if "eval/mean_reward" in row] == [0, 2]


@gym
def test_example_of_a_calculator(tmp_path, monkeypatch, capsys):
    model, example = write_tiny_model(tmp_path / "model", max_position=2048), ROOT / "examples" / "calculator"
    for file in (model / "tokenizer.json", model / "tokenizer_config.json"):
        file.write_text(file.read_text().replace("<eos>", "<|im_end|>"))
    monkeypatch.syspath_prepend(example)
    runpy.run_path(str(example / "rows.py"), run_name="__main__")
    (tmp_path / "calls.jsonl").write_text(capsys.readouterr().out)
    rows = read_rows(tmp_path / "calls.jsonl")
    assert len(rows) == 200 and all(row["messages"][-1] == {**row["messages"][-2], "role": "assistant"} for row in rows)
    sft, grpo = tmp_path / "sft", tmp_path / "grpo"
    tiny = ["--model", str(model), "--steps", "1", "--batch-size", "1"]
    data = ["--data", str(tmp_path / "calls.jsonl"), "--output-dir", str(sft)]
    assert main(["train", "sft", str(example / "sft.toml"), *tiny, *data]) == 0
    run = ["--adapter", str(sft / "model"), "--output-dir", str(grpo)]
    run += ["--max-new-tokens", "4", "--group-size", "2"]
    assert main(["train", "grpo", str(example / "grpo.toml"), *tiny, *run]) == 0
    assert metrics_of(grpo)[-1]["episodes/ended_by_error"] == 0
    task = ["--task", "reasoning_gym:chain_sum", "--size", "2", "--max-new-tokens", "4"]
    assert main(["eval", str(grpo / "model"), "--tools", f"{example / 'calculator.py'}:calculate", *task]) == 0


def test_example_task():
    task = open_task(OWN)
    row = {"prompt": [], "answer": "abcd"}
    scores = {"abcd": 1, " abcd\n": 1, "abdc": 0.5, "ab": 0.5, "abcdefgh": 0.5, "": 0}
    assert {text: task.score(text, row) for text in scores} == scores
    assert all(row["answer"] == "".join(sorted(row["prompt"][0]["content"])) for row in task.rows[:20])


def test_means_of_each_task_and_of_held_out_items_are_logged(flags, tmp_path):
    run = flags("run", OWN, f"{OWN},letters=2,weight=2", steps=4, group_size=2, batch_size=3, eval_items=5)
    assert main(["train", "grpo", *run]) == 0
    rows = metrics_of(tmp_path / "run")
    steps = [row for row in rows if "mean_reward" in row]
    completions = read_rows(tmp_path / "run" / "completions.jsonl")
    for row in steps:
        for name in ("sort_letters", "sort_letters_2"):
            of_step = [c[f"rewards/{name}"] for c in completions if c["step"] == row["step"]]
            scored = [score for score in of_step if score != "NaN"]
            mean = pytest.approx(sum(scored) / len(scored)) if scored else "NaN"
            assert len(of_step) == 6 and row[f"rewards/{name}/mean"] == mean
    evaluations = [row for row in rows if "eval/mean_reward" in row]
    assert [row["step"] for row in evaluations] == [0, 4]
    for row in evaluations:
        means = [row[f"eval/rewards/{name}/mean"] for name in ("sort_letters", "sort_letters_2")]
        assert row["eval/mean_reward"] == pytest.approx(sum(means) / 2)
    prompts = {json.dumps(c["prompt"][1:]) for c in completions}
    held_out = {json.dumps(row["prompt"][1:]) for row in open_tasks([OWN], split="eval")}
    assert held_out and not prompts & held_out
    assert all(c["prompt"][0]["content"] == open_task(OWN).system_prompt for c in completions)


def test_flags_and_tables_are_the_same_run(flags, tmp_path):
    settings = {"steps": 2, "group_size": 2}
    assert main(["train", "grpo", *flags("flags", f"{OWN},seed=3,letters=2", **settings)]) == 0
    toml = tmp_path / "run.toml"
    toml.write_text(f'[[task]]\nname = "{OWN}"\nseed = 3\n[task.options]\nletters = 2\n')
    assert main(["train", "grpo", str(toml), *flags("file", **settings)[1:]]) == 0
    one, other = (tmp_path / name for name in ("flags", "file"))
    assert read_toml(one / "config.toml")["task"] == read_toml(other / "config.toml")["task"]
    assert (one / "completions.jsonl").read_bytes() == (other / "completions.jsonl").read_bytes()


def test_additional_reward_gets_the_columns_of_the_task(flags, tmp_path):
    (tmp_path / "bonus.py").write_text("def bonus(completions, answer):\n    return [float(len(a)) for a in answer]\n")
    run = flags("run", OWN, steps=1, group_size=2, reward=f"{tmp_path / 'bonus.py'}:bonus")
    assert main(["train", "grpo", *run, "--reward-weights", "1", "0.5"]) == 0
    for row in read_rows(tmp_path / "run" / "completions.jsonl"):
        assert row["rewards/bonus"] == 4 and row["reward"] == row["rewards/sort_letters"] + 2


def test_reward_time_limit_applies_to_tasks(flags, tmp_path, error_of):
    text = (ROOT / "examples" / "tasks.py").read_text()
    (tmp_path / "slow.py").write_text(text.replace("return sum(", "__import__('time').sleep(600)\n        return sum("))
    run = flags("run", f"{tmp_path / 'slow.py'}:SortLetters", steps=1, group_size=2, reward_timeout_s=0.2)
    assert_mentions(error_of("train", "grpo", *run), "sort_letters", "samples 0 to 3")


def test_online_dpo_with_and_without_a_preference_function(flags, tmp_path):
    assert main(["train", "online-dpo", *flags("scored", OWN, steps=2)]) == 0
    assert "rewards/sort_letters/mean" in metrics_of(tmp_path / "scored")[-1]
    (tmp_path / "judge.py").write_text("def first(pairs):\n    return [0 for _ in pairs]\n")
    judge = {"preference": f"{tmp_path / 'judge.py'}:first", "steps": 2, "eval_items": 2}
    assert main(["train", "online-dpo", *flags("judged", OWN, **judge)]) == 0
    rows = metrics_of(tmp_path / "judged")
    assert not any("rewards/sort_letters/mean" in row for row in rows) and "eval/mean_reward" in rows[0]


def test_best_of_n_is_scored_by_the_task(tiny_model, capsys):
    argv = [f"--model={tiny_model}", f"--task={OWN},size=6,letters=2", "--n=3", "--max-new-tokens=4"]
    assert main(["best-of-n", *argv, "--all-candidates"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    tasks = open_tasks([f"{OWN},size=6,letters=2"])
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in tasks]
    for row, item in zip(rows, tasks, strict=True):
        scores = [tasks.tasks[0].score(c["completion"], item["item"]) for c in row["candidates"]]
        assert [c["score"] for c in row["candidates"]] == scores and row["score"] == max(scores)


# --- resuming -------------------------------------------------------------------------------------------


KILLER = """
import os
from pathlib import Path

calls = 0

def share(completions, answer):
    global calls
    calls += 1
    if calls == 4 and not Path({mark!r}).exists():
        Path({mark!r}).touch()
        os.kill(os.getpid(), 9)
    return [sum(map(ord, text)) % 97 / 97 for text in completions]
"""


@pytest.mark.parametrize("tasks", [[OWN, f"{OWN},letters=2,weight=2"], pytest.param([SUMS, OWN], marks=gym)])
def test_killed_run_resumes_bitwise_identically(tasks, flags, tmp_path, capsys):
    (tmp_path / "killer.py").write_text(KILLER.format(mark=str(tmp_path / "mark")))
    settings = {"reward": f"{tmp_path / 'killer.py'}:share", "steps": 6, "group_size": 2, "checkpoint_every": 2}
    argv = ["train", "grpo", *flags("killed", *tasks, **settings)]
    assert subprocess.run([*WHET, *argv], capture_output=True, timeout=300).returncode == -signal.SIGKILL
    assert main(argv) == 0
    assert "step-000002" in capsys.readouterr().out
    assert main(["train", "grpo", *flags("whole", *tasks, **settings)]) == 0
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    assert (killed / "completions.jsonl").read_bytes() == (whole / "completions.jsonl").read_bytes()
    weights = [folder / "model" / "model.safetensors" for folder in (killed, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_task_of_a_run_cannot_change(flags, tmp_path, error_of):
    file = tmp_path / "tasks.py"
    file.write_text((ROOT / "examples" / "tasks.py").read_text())
    settings = {"steps": 1, "group_size": 2}
    assert main(["train", "grpo", *flags("run", f"{file}:SortLetters", **settings)]) == 0
    settings["steps"] = 2
    error = error_of("train", "grpo", *flags("run", f"{file}:SortLetters,letters=3", **settings))
    assert_mentions(error, f"task = ['{file}:SortLetters']", f"['{file}:SortLetters,letters=3']", "output_dir")
    file.write_text(file.read_text() + "\n")
    error = error_of("train", "grpo", *flags("run", f"{file}:SortLetters", **settings))
    assert f"{file} (task) has changed" in error


def test_package_of_a_task_is_an_input(flags, tmp_path, error_of, monkeypatch, capsys):
    """The inputs have an installed package's version and the module's file. The package of a reward may change."""
    site = tmp_path / "site"
    info = site / "letters_tasks-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "top_level.txt").write_text("letters_tasks\n")
    (site / "letters_tasks.py").write_text(
        (ROOT / "examples" / "tasks.py").read_text() + "\ndef one(completions):\n    return [1.0] * len(completions)\n"
    )

    def install(version):
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: letters-tasks\nVersion: {version}\n")

    install("1.0")
    monkeypatch.syspath_prepend(str(site))
    settings = {"group_size": 2, "reward": "letters_tasks:one"}
    argv = ["train", "grpo", *flags("run", "letters_tasks:SortLetters", steps=1, **settings)]
    assert main(argv) == 0
    inputs = json.loads((tmp_path / "run" / "inputs.json").read_text())
    assert list(inputs["task"]) == ["letters-tasks", str(site / "letters_tasks.py")]
    assert inputs["task"]["letters-tasks"] == inputs["reward"]["letters-tasks"] == {"version": "1.0"}
    install("1.1")
    error = error_of("train", "grpo", *flags("run", "letters_tasks:SortLetters", steps=2, **settings))
    assert_mentions(error, "letters-tasks (task) has changed", "version 1.0", "version 1.1 now", "output_dir")
    (tmp_path / "run" / "inputs.json").write_text(json.dumps({"reward": inputs["reward"]}))  # without the task
    capsys.readouterr()
    assert main(["train", "grpo", *flags("run", "letters_tasks:SortLetters", steps=2, **settings)]) == 0
    assert_mentions(capsys.readouterr().out, "letters-tasks (reward) has changed", "version 1.0", "version 1.1 now")


@gym
def test_version_of_reasoning_gym_is_an_input(flags, tmp_path, error_of):
    assert main(["train", "grpo", *flags("run", SUMS, steps=1, group_size=2)]) == 0
    file = tmp_path / "run" / "inputs.json"
    inputs = json.loads(file.read_text())
    [name] = [name for name in inputs["task"] if "version" in inputs["task"][name]]
    assert name.replace("_", "-") == "reasoning-gym"
    assert inputs["task"][name] == {"version": importlib.metadata.version("reasoning-gym")}
    inputs["task"][name]["version"] = "0.0.1"
    file.write_text(json.dumps(inputs))
    error = error_of("train", "grpo", *flags("run", SUMS, steps=2, group_size=2))
    assert_mentions(error, f"{name} (task) has changed: version 0.0.1", "Install the old version")


def test_run_of_an_older_version_without_tasks_resumes(files, tmp_path):
    settings = {**files.online, "group_size": 2}
    assert main(["train", "grpo", *files("run", steps=1, **settings)]) == 0
    config = files.folder / "run" / "config.toml"
    lines = config.read_text().splitlines()
    config.write_text("\n".join(line for line in lines if not line.startswith(("task =", "eval_items ="))) + "\n")
    assert main(["train", "grpo", *files("run", steps=2, **settings)]) == 0


# --- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--task", OWN, "--data=x"], ("GRPORun", "data is ['x']", "no effect", "task")),
        (["--task", OWN, "--eval-data=x"], ("eval_data is ['x']", "no effect", "task")),
        (["--data=x", "--reward=y", "--eval-items=3"], ("eval_items is 3", "no effect", "no task")),
        (["--task", OWN, "--eval-every=3"], ("eval_every is 3", "no effect", "no eval_items")),
        (["--task", f"{OWN},size=1,held_out=1"], ("1 rows", "sort_letters", "'train'")),
        (["--task", f"{OWN},size=9,held_out=0.5", "--eval-items=20"], ("eval_items is 20", "sort_letters", "held_out")),
        pytest.param(["--task", "reasoning_gym:chainsum"], ("Did you mean reasoning_gym:chain_sum",), marks=gym),
    ],
)
def test_invalid_task_settings_are_named(argv, expected, tmp_path, tiny_model, error_of):
    argv = ["train", "grpo", f"--model={tiny_model}", f"--output-dir={tmp_path / 'run'}", *argv]
    assert_mentions(error_of(*argv), *expected)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("chain_sum", ("name is 'chain_sum'", "reasoning_gym:NAME")),
        (f"{OWN},letters", ("'letters'", "option")),
    ],
)
def test_invalid_task_specs_are_named(task, expected, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["train", "grpo", "--model=x", "--output-dir=y", "--task", task])
    assert exit_.value.code == 2
    assert_mentions(" ".join(capsys.readouterr().err.replace("│", " ").split()), *expected)


def test_error_in_a_task_table_names_the_file(tmp_path, error_of):
    toml = tmp_path / "run.toml"
    toml.write_text('[[task]]\nname = "a:B"\nseed = -1\n')
    error = error_of("train", "grpo", toml)
    assert_mentions(error, toml, "seed is -1")


LONG = """
class Long:
    name, system_prompt = "long", ""
    rows = [{"prompt": "a" * (40 * i + 1)} for i in range(20)]

    def score(self, completion, row):
        return 0.0
"""


@pytest.mark.parametrize("command", ["train", "best-of-n"])
def test_prompts_longer_than_the_context_are_rejected_before_the_run(command, flags, tmp_path, tiny_model, error_of):
    (tmp_path / "long.py").write_text(LONG)
    spec = f"{tmp_path / 'long.py'}:Long,held_out=0"
    commands = {
        "train": ["train", "grpo", *flags("run", spec, steps=1)],
        "best-of-n": ["best-of-n", f"--model={tiny_model}", f"--task={spec}"],
    }
    error = error_of(*commands[command])
    assert_mentions(error, "7 of the first 20 prompts", "512 positions", "long;", "761 tokens")


def test_best_of_n_needs_exactly_one_source_of_prompts(tiny_model, error_of):
    for more in (["--prompt=a"], ["--prompts=x"]):
        error = error_of("best-of-n", f"--model={tiny_model}", f"--task={OWN}", *more)
        assert_mentions(error, "one of --prompts", "--prompt ", "--task")


def test_example_task_is_loaded_like_reward_functions():
    assert load_function(OWN).name == "sort_letters"
