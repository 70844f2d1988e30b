"""Settings from defaults, config files and flags, and errors in them."""

import dataclasses

import pytest
from tests.raising import assert_mentions

from whet.cli import main
from whet.cli.eval import EvalConfig
from whet.cli.export import ExportConfig
from whet.cli.settings import parse, parse_flags
from whet.config import DPOConfig
from whet.config.toml import read_toml, write_toml
from whet.runs.settings import DPORun, GRPORun, OnlineDPORun, SFTRun


def test_flags_override_the_file_and_the_file_overrides_defaults(files):
    write_toml(files.folder / "c.toml", {"steps": 2, "learning_rate": 0.5, "beta": 0.25, "max_grad_norm": 2})
    argv = ["train", "dpo", "--learning-rate", "1e-3", str(files.folder / "c.toml"), *files("run", "pairs.jsonl")]
    assert main(argv) == 0
    settings = read_toml(files.folder / "run" / "config.toml")
    assert (settings["learning_rate"], settings["beta"], settings["max_grad_norm"]) == (1e-3, 0.25, 2)
    assert settings["label_smoothing"] == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("learning_rte = 1e-3", ("'learning_rte'", "Did you mean learning_rate?")),
        ("[grpo]\nsteps = 3", ("'grpo'",)),
        ('learning_rate = "1e-3"', ("learning_rate is '1e-3'", "float")),
        ("lora_layers = 'q_proj'", ("lora_layers is 'q_proj'", "list of str")),
        ("loss_type = 'ppo'", ("loss_type is 'ppo'", "'grpo'")),
        ("group_size = 0", ("group_size is 0", ">= 2")),
        ("eval_temperature = inf", ("eval_temperature is inf", "finite", ">= 0")),
        ("checkpoint_every = 0", ("checkpoint_every is 0", ">= 1")),
        ("steps = ", ("not TOML: ",)),
    ],
)
def test_errors_in_a_file_are_named(text, expected, tmp_path, error_of):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    error = error_of("train", "grpo", file)
    assert error.startswith(f"whet: {file}: ")
    assert_mentions(error, *expected)


def test_missing_and_repeated_files_are_named(tmp_path, error_of):
    assert_mentions(error_of("train", "sft", tmp_path / "no.toml"), f"{tmp_path}/no.toml", "config file")
    assert_mentions(error_of("train", "sft", "a.toml", "b.toml"), "two config files", "a.toml", "b.toml")


@pytest.mark.parametrize("flag", ["--task", "--reward", "--lora-layers", "--stop_token_ids"])
def test_flags_with_several_values_cannot_be_repeated(flag, error_of):
    name = flag.replace("_", "-")
    error = error_of("train", "grpo", "--model", "m", flag, "1", "2", f"{flag}=3")
    assert_mentions(error, "whet train grpo", f"{name} is repeated", f"{name} A B.")


@pytest.mark.parametrize("command", ["generate", "chat", "eval"])
@pytest.mark.parametrize("flag", ["--stop", "--logit-bias"])
def test_flags_with_several_values_cannot_be_repeated_without_a_file(command, flag, error_of):
    error = error_of(command, "m", flag, "1", "2", flag, "3", "4")
    assert_mentions(error, f"whet {command}", f"{flag} is repeated", f"{flag} A B.")


def test_table_of_a_file_is_one_flag(tmp_path, capsys):
    file = tmp_path / "c.toml"
    file.write_text('model = "m"\n[logit_bias]\n5 = 1.5\n7 = -2\n')

    def bias(*flags):
        return parse(GRPORun, [str(file), *flags], "whet train grpo", "").logit_bias

    assert bias() == bias("--steps", "3") == {5: 1.5, 7: -2}
    assert bias("--logit-bias", "5", "3", "9", "-1") == {5: 3.0, 9: -1.0}  # replaces the table, like a list
    for words, expected in (
        (["5"], "expected pairs of a key and its value"),
        (["5", "1", "5", "2"], "each key once, not '5 1 5 2'"),
        (["x", "1"], "invalid literal for int() with base 10: 'x'"),
    ):
        with pytest.raises(SystemExit) as exit_:
            bias("--logit-bias", *words)
        assert exit_.value.code == 2 and expected in " ".join(capsys.readouterr().err.replace("│", " ").split())
    with pytest.raises(SystemExit) as exit_:
        bias("--help")
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert exit_.value.code == 0 and "--logit-bias [INT FLOAT [INT FLOAT ...]]" in shown and "5 1.5 7 -2" in shown


@dataclasses.dataclass
class Described:
    """A description."""

    size: int = 4
    """Number of ``items``, in a docstring of
    two lines.

    Zero: all,
    which is usual."""


def test_docstrings_of_fields_are_wrapped_at_the_width_of_the_terminal(monkeypatch, capsys):
    def lines(columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit):
            parse_flags(Described, ["--help"], "whet described")
        lines = [line.strip("│| ") for line in capsys.readouterr().out.splitlines()]
        return lines[lines.index("-h, --help  show this help message and exit") + 1 :]

    text = "Number of items, in a docstring of two lines."
    assert lines(80)[:3] == [f"--size INT  {text}", "", "Zero: all, which is usual. (default: 4)"]
    first, second = lines(48)[:2]
    assert f"{first} {second}" == f"--size INT  {text}" and len(second) < len(first) <= 48


def test_columns_are_pairs_with_equals_signs(tmp_path):
    file = tmp_path / "c.toml"
    write_toml(file, {"columns": {"prompt": "question", "completion": "an answer"}})

    def columns(*flags):
        return parse(SFTRun, flags, "whet train sft", "").columns

    assert columns(str(file)) == {"prompt": "question", "completion": "an answer"}
    expected = {"prompt": "question", "completion": "answer"}
    assert columns("--columns", "prompt=question,completion=answer") == expected
    assert columns(str(file), "--columns", "prompt=question", "completion=answer") == expected


def test_tilde_in_paths_of_files_and_flags(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "c.toml"
    settings = {"model": "~/m", "data": "~/a.jsonl", "output_dir": "~/run", "adapter": "~", "preference": "~/j.py:f"}
    write_toml(file, {**settings, "eval_data": ["~/b.jsonl", "c"], "reward": ["~/r.py:f"], "task": ["~/t.py:T"]})
    run = parse(OnlineDPORun, [str(file), "--stop", "~/"], "whet train online-dpo", "")
    assert (run.model, run.data, run.output_dir) == ("/home/me/m", ["/home/me/a.jsonl"], "/home/me/run")
    assert (run.adapter, run.eval_data, run.preference) == ("/home/me", ["/home/me/b.jsonl", "c"], "/home/me/j.py:f")
    assert (run.reward, run.task, run.stop) == (["/home/me/r.py:f"], ["/home/me/t.py:T"], ["~/"])
    assert parse(DPORun, ["--output-dir=~/x"], "whet train dpo", "").output_dir == "/home/me/x"
    assert DPOConfig(precompute_reference=True, reference_cache="~/cache").reference_cache == "/home/me/cache"
    options = parse_flags(EvalConfig, ["~/m", "--out=~/o.json", "--data=~/a.csv", "--chat-template=~/t"], "whet eval")
    assert (options.out, options.data, options.chat_template) == ("/home/me/o.json", ["/home/me/a.csv"], "/home/me/t")
    options = parse_flags(ExportConfig, ["~/m", "~/m.gguf", "--adapter=~/a"], "whet export")
    assert (options.model, options.output, options.adapter) == ("/home/me/m", "/home/me/m.gguf", "/home/me/a")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--learning-rte", "1"], "--learning-rate"),
        (["--learning-rate", "fast"], "could not convert string to float: 'fast'"),
        (["--learning-rate", "-1"], "learning_rate is -1.0"),
        (["--seed", "-1"], "seed is -1"),
        (["--steps", "-1"], "steps is -1"),
        (["config.tml"], "config.tml"),
    ],
)
def test_errors_in_flags_are_named(flags, expected, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["train", "sft", *flags])
    text = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert exit_.value.code == 2 and expected in text


@pytest.mark.parametrize(
    ("method", "settings", "expected"),
    [
        ("sft", {"lora_alpha": 8}, ("SFTRun", "lora_alpha is 8", "lora_rank is 0")),
        ("sft", {"lora_layers": "q_proj"}, ("lora_layers is ['q_proj']", "lora_rank is 0")),
        ("sft", {"eval_every": 5}, ("eval_every is 5", "eval_data", 100)),
        ("sft", {"wandb_project": "mine"}, ("wandb_project is 'mine'", "loggers")),
        ("grpo", {"reward": "a.b:c", "eval_temperature": 0.5}, ("eval_temperature is 0.5", "eval_data")),
        ("online-dpo", {"preference": "a.b:c", "reward": "a.b:c"}, ("reward is ['a.b:c']", "preference")),
        ("online-dpo", {"preference": "a.b:c", "reward_policy": "skip"}, ("reward_policy is 'skip'", "preference")),
    ],
)
def test_ineffective_settings_are_rejected(method, settings, expected, files, error_of):
    assert_mentions(error_of("train", method, *files("run", **settings)), "no effect", *expected)


def test_repeated_logger_is_rejected(files, tmp_path, error_of):
    path = tmp_path / "run.toml"
    path.write_text('loggers = ["csv", "csv"]\n')
    assert_mentions(error_of("train", "sft", path, *files("run")), "loggers is ['csv', 'csv']", "once")
