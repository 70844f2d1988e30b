"""Loggers write standard formats, survive kills and resumption, and write no escape codes to pipes."""

from __future__ import annotations

import csv
import json
import math
import os
import pty
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from tests.processes import run_python
from tests.raising import assert_raises, mentions

from whet.errors import MissingExtraError, WhetTypeError, WhetValueError
from whet.training.loggers import (
    ConsoleLogger,
    CSVLogger,
    JSONLLogger,
    ProgressLogger,
    TensorBoardLogger,
    WandbLogger,
    main_metrics,
)


def rows(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


# --- files ----------------------------------------------------------------------------------------------


def test_jsonl_has_numbers_of_every_type(tmp_path):
    with JSONLLogger(tmp_path / "deep" / "m.jsonl") as logger:
        logger.log({"loss": 0.5, "n": np.int64(3), "kl": torch.tensor(0.25), "nan": math.nan, "inf": -math.inf}, 1)
        logger.log({"loss": np.float32(0.25)}, 2)
        assert rows(tmp_path / "deep" / "m.jsonl") == [  # on disk before close
            {"step": 1, "loss": 0.5, "n": 3, "kl": 0.25, "nan": "NaN", "inf": "-Infinity"},
            {"step": 2, "loss": 0.25},
        ]
    logger.close()
    first = (tmp_path / "deep" / "m.jsonl").read_text().splitlines()[0]
    assert first.startswith('{"step": 1, "loss": 0.5, "n": 3,')
    assert math.isnan(float(json.loads(first)["nan"]))


@pytest.mark.parametrize("value", ["0.5", None, [1.0], torch.zeros(2), {}])
@pytest.mark.parametrize("make", [JSONLLogger, CSVLogger])
def test_non_numbers_are_rejected(tmp_path, make, value):
    logger = make(tmp_path / "m")
    before = (tmp_path / "m").read_text()
    with pytest.raises(WhetTypeError, match=mentions("'bad'", "metric")):
        logger.log({"loss": 1.0, "bad": value}, 1)
    assert (tmp_path / "m").read_text() == before


def test_jsonl_resumes_at_the_checkpoint(tmp_path):
    path = tmp_path / "m.jsonl"
    logger = JSONLLogger(path)
    for step in (1, 2, 2, 3):
        logger.log({"loss": step / 2}, step)
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # torn by a kill
    logger = JSONLLogger(path)
    assert [row["step"] for row in rows(path)] == [1, 2, 2, 3]
    logger.truncate_after(2)
    logger.log({"loss": 7}, 3)
    assert [(row["step"], row["loss"]) for row in rows(path)] == [(1, 0.5), (2, 1), (2, 1), (3, 7)]
    logger.truncate_after(0)
    assert path.read_text() == ""
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.jsonl"]


def test_foreign_jsonl_is_unchanged(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"loss": 2}\n')
    with pytest.raises(WhetValueError, match=mentions("truncate_after", "m.jsonl:2", "JSON")):
        JSONLLogger(path).truncate_after(1)
    assert path.read_text() == '{"step": 1}\n{"loss": 2}\n'


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_csv_adds_columns(tmp_path):
    path = tmp_path / "m.csv"
    with CSVLogger(path) as logger:
        logger.log({"loss": 0.5, "a,b": 1}, 1)
        logger.log({"eval/accuracy": 0.25}, 1)
        logger.log({"a,b": math.nan, "loss": math.inf}, 2)
    assert read_csv(path) == [
        ["step", "loss", "a,b", "eval/accuracy"],
        ["1", "0.5", "1", ""],
        ["1", "", "", "0.25"],
        ["2", "inf", "nan", ""],
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.csv"]


def test_csv_resumes_at_the_checkpoint(tmp_path):
    path = tmp_path / "m.csv"
    logger = CSVLogger(path)
    for step in (1, 2, 3):
        logger.log({"loss": step / 2}, step)
    with path.open("a") as file:
        file.write("4,0.")  # torn by a kill
    logger = CSVLogger(path)
    logger.truncate_after(2)
    logger.log({"lr": 0.1, "loss": 9.0}, 3)
    assert read_csv(path) == [["step", "loss", "lr"], ["1", "0.5", ""], ["2", "1.0", ""], ["3", "9.0", "0.1"]]


def test_csv_with_a_torn_header_restarts_and_a_foreign_file_is_rejected(tmp_path):
    path = tmp_path / "m.csv"
    path.write_text("step,lo")
    CSVLogger(path).log({"loss": 1.0}, 1)
    assert read_csv(path) == [["step", "loss"], ["1", "1.0"]]
    path.write_text("name,value\na,1\n")
    assert_raises(WhetValueError, ("'name'", "begins", "column"), CSVLogger, path)


# --- terminals ------------------------------------------------------------------------------------------

STEP = {
    "completions/mean_length": 12.5,
    "mean_kl": 0.00012,
    "loss": -0.25,
    "clip_ratio/low": 0.5,
    "mean_reward": 0.75,
    "learning_rate": 1e-5,
    "tokens_per_second": 1234.5,
}


def test_main_metrics_are_ordered():
    assert main_metrics(STEP) == {
        "loss": "-0.2500",
        "reward": "0.7500",
        "kl": "1.20e-04",
        "length": "12.5000",
        "lr": "1.00e-05",
        "tokens/s": "1,234",
    }
    assert main_metrics({"loss": 123.456, "eval/accuracy": 0.5}) == {"loss": "123.5", "eval/accuracy": "0.5000"}
    assert main_metrics({"x": math.nan, "n": 12345}) == {"x": "nan", "n": "12,345"}


def test_console_prints_the_first_step_intervals_evaluations_and_the_last(capsys):
    with ConsoleLogger(log_interval=10) as logger:
        for step in range(1, 26):
            logger.log({"loss": step / 100, "unknown": 1.0}, step)
            if step == 13:
                logger.log({"eval/accuracy": 0.5}, step)
    assert capsys.readouterr().out.splitlines() == [
        "step      1  loss 0.0100",
        "step     10  loss 0.1000",
        "step     13  eval/accuracy 0.5000",
        "step     20  loss 0.2000",
        "step     25  loss 0.2500",
    ]
    logger.close()
    assert capsys.readouterr().out == ""
    for interval in (0, 2.5, True):
        assert_raises(WhetValueError, ("log_interval", interval, ">= 1"), ConsoleLogger, interval)


@pytest.mark.parametrize(
    "settings", [{"total_steps": 2.5}, {"total_steps": -1}, {"interval_s": math.nan}, {"interval_s": -1}]
)
def test_invalid_arguments_of_the_progress_bar_are_rejected(settings):
    assert_raises(WhetValueError, ("ProgressLogger", next(iter(settings))), ProgressLogger, **settings)


def test_progress_without_a_terminal_prints_periodic_lines(capsys):
    with ProgressLogger(30, description="GRPO", interval_s=3600) as logger:
        for step in range(1, 31):
            logger.log(STEP, step)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2  # the first and, at close, the last
    assert lines[0].startswith("GRPO 1/30  loss -0.2500  reward 0.7500  kl 1.20e-04")
    assert re.fullmatch(r"GRPO 30/30  .*tokens/s 1,234  in 0:00", lines[1])
    with ProgressLogger(interval_s=0) as logger:
        logger.log({"loss": 1}, 7)
    assert capsys.readouterr().out == "train 7  loss 1\n"


def test_evaluations_are_shown_with_the_metrics_of_their_step(capsys):
    with ProgressLogger(interval_s=3600) as logger:
        logger.log({"loss": 0.5}, 1)
        logger.log({"loss": 0.25}, 2)
        logger.log({"eval/accuracy": 0.75}, 2)
        logger.log({"loss": 0.125}, 3)
    assert capsys.readouterr().out.splitlines() == [
        "train 1  loss 0.5000",
        "train 2  loss 0.2500  eval/accuracy 0.7500",
        "train 3  loss 0.1250",
    ]


def test_progress_shows_the_remaining_time(capsys, monkeypatch):
    now_s = iter([0.0, 10.0, 30.0, 4000.0])
    monkeypatch.setattr("whet.training.loggers.time.monotonic", lambda: next(now_s))
    logger = ProgressLogger(1000, interval_s=0)
    for step in (100, 101, 102, 500):  # resumed at 100
        logger.log({"loss": 1.0}, step)
    ends = [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()]
    # Nothing yet; 899 steps at 10 s; 898 steps at 15 s; 500 steps at 10 s.
    assert ends == ["loss 1.0000", "eta 2:29:50", "eta 3:44:30", "eta 1:23:20"]


PROGRESS = textwrap.dedent("""
    from whet.training.loggers import ProgressLogger
    with ProgressLogger(description="GRPO") as logger:
        logger.total_steps = 20
        logger.log({"eval/accuracy": 0.345}, 0)
        for step in range(1, 21):
            logger.log({"mean_reward": step / 20, "mean_kl": 0.01, "tokens_per_second": 321.0}, step)
            if step == 10:
                print("a line from elsewhere")
""")


def test_progress_on_a_terminal_draws_a_bar():
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "24"}
    process = subprocess.Popen([sys.executable, "-c", PROGRESS], stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    shown = b""
    try:
        while block := os.read(leader, 1 << 16):
            shown += block
    except OSError:  # end of the terminal on Linux
        pass
    os.close(leader)
    assert process.wait() == 0, shown.decode()
    assert b"\x1b[" in shown
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()).replace("\r", "\n").strip().splitlines()[-1]
    assert re.search(r"GRPO ━+ 20/20 +reward 1\.0000  kl 0\.0100  tokens/s 321  accuracy 0\.3450 +in 0:0\d", last)
    assert b"a line from elsewhere\r\n" in shown
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h") == 1  # the cursor is restored


def test_progress_in_a_pipe_has_no_escape_codes():
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color", "CLICOLOR_FORCE": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRESS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "GRPO 20/20" in done.stdout


# --- services -------------------------------------------------------------------------------------------


def test_tensorboard_reads_logged_metrics(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with TensorBoardLogger(tmp_path) as logger:
        for step in (1, 2, 3):
            logger.log({"loss": step / 2, "rewards/mean": torch.tensor(0.5)}, step)
        logger.truncate_after(2)
        logger.log({"loss": 9.0}, 3)
    events = accumulators.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 0.5), (2, 1.0), (3, 9.0)]
    assert [(e.step, e.value) for e in events.Scalars("rewards/mean")] == [(1, 0.5), (2, 0.5)]


@pytest.mark.needs("wandb")
def test_wandb_has_logged_metrics(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger("whet-test", mode="offline", dir=str(tmp_path), name="a run")
    for step in (1, 2, 3):
        logger.log({"loss": torch.tensor(step / 2)}, step)
    assert logger._run.summary["loss"] == 1.0  # wandb completes a step when the next begins
    logger.close()
    logger.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.needs("wandb")
def test_wandb_without_a_key_gives_one_line(tmp_path):
    code = "import sys; from whet.training.loggers import WandbLogger; WandbLogger('whet-test', dir=sys.argv[1])"
    empty = {"WANDB_API_KEY": "", "WANDB_MODE": "online", "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    done = run_python(code, tmp_path, **empty)
    assert "whet.errors.WhetError: WandbLogger: " in done.stderr.splitlines()[-1]
    assert "wandb login" in done.stderr and "WANDB_MODE=offline" in done.stderr


@pytest.mark.parametrize(
    ("package", "make", "extra"),
    [
        ("tensorboard", lambda: TensorBoardLogger("unused"), "tensorboard"),
        ("wandb", lambda: WandbLogger("unused"), "wandb"),
    ],
)
def test_a_missing_extra_names_the_pip_command(monkeypatch, package, make, extra):
    monkeypatch.setitem(sys.modules, package, None)  # not installed
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    message = rf"\w+Logger needs {package}\. Install it with: pip install 'whet\[{extra}\]'"
    assert_raises(MissingExtraError, f"^{message}$", make)
