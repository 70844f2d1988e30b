"""Defaults < config file < flags, and what mistakes in either are answered with."""

import pytest

from whet.cli import main
from whet.cli.settings import read_toml, write_toml


def test_defaults_then_file_then_flags(files):
    write_toml(files.folder / "c.toml", {"steps": 2, "learning_rate": 0.5, "beta": 0.25, "max_grad_norm": 2})
    argv = ["train", "dpo", "--learning-rate", "1e-3", str(files.folder / "c.toml"), *files("run", "pairs.jsonl")]
    assert main(argv) == 0
    settings = read_toml(files.folder / "run" / "config.toml")
    assert (settings["learning_rate"], settings["beta"], settings["max_grad_norm"]) == (1e-3, 0.25, 2)
    assert settings["label_smoothing"] == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("learning_rte = 1e-3", "there is no setting 'learning_rte'. Did you mean learning_rate?"),
        ("[grpo]\nsteps = 3", "there is no setting 'grpo'."),
        ('learning_rate = "1e-3"', "learning_rate is '1e-3', expected float."),
        ("reward = 'a.py:f'", "reward is 'a.py:f', expected a list of str values."),
        ("loss_type = 'ppo'", "loss_type is 'ppo', expected one of 'grpo', "),
        ("group_size = 0", "group_size is 0, expected an integer >= 1."),
        ("steps = ", "not TOML: "),
    ],
)
def test_mistakes_in_a_file_are_named(text, expected, tmp_path, error_of):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    error = error_of("train", "grpo", file)
    assert error.startswith(f"whet: {file}: {expected}")


def test_other_mistakes_with_files(tmp_path, error_of):
    assert f"{tmp_path}/no.toml: there is no such config file" in error_of("train", "sft", tmp_path / "no.toml")
    assert "two config files, a.toml and b.toml" in error_of("train", "sft", "a.toml", "b.toml")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--learning-rte", "1"], "--learning-rate"),
        (["--learning-rate", "fast"], "could not convert string to float: 'fast'"),
        (["--learning-rate", "-1"], "learning_rate is -1.0, expected a finite number >= 0"),
        (["config.tml"], "config.tml"),
    ],
)
def test_mistakes_in_flags_are_named(flags, expected, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["train", "sft", *flags])
    text = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert exit_.value.code == 2 and expected in text


def test_toml_round_trip(tmp_path):
    settings = {
        "text": 'quote " slash \\ line\n tab\t del\x7f é 🎈', "empty": "", "yes": True, "n": -3, "small": 1e-30,
        "infinite": float("inf"), "names": ["a", 'b"'], "numbers": [0.1, 2.0], "table": {"deep": False},
    }  # fmt: skip
    write_toml(tmp_path / "new" / "x.toml", {"left_out": None, **settings})
    assert read_toml(tmp_path / "new" / "x.toml") == settings
