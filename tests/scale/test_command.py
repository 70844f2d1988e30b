"""``whet train --ranks``: the run of one process, and of several of which one is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.cli.conftest import ROWS, tiny_model  # noqa: F401

from whet.cli import main

ROOT = Path(__file__).parents[2]
STEPS = 6


@pytest.fixture
def command(tmp_path, tiny_model):  # noqa: F811
    """(name, settings) -> the arguments of Whet for a run of SFT in that folder."""
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))

    def arguments(name, **settings):
        given = {"model": tiny_model, "data": tmp_path / "rows.jsonl", "output_dir": tmp_path / name}
        given |= {"steps": STEPS, "batch_size": 6, "learning_rate": 1e-2, "checkpoint_every": 1, "compute": "float32"}
        flags = [
            part for key, value in (given | settings).items() for part in (f"--{key}".replace("_", "-"), str(value))
        ]
        return ["train", "sft", *flags, "--deterministic-reduction"]

    return arguments


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def start(arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    return subprocess.Popen(
        [sys.executable, "-m", "whet", *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def test_two_ranks_give_the_bits_of_one_and_go_on_where_one_is_killed(command, tmp_path):
    assert main(command("one")) == 0
    process = start(command("two", ranks=2))
    metrics = tmp_path / "two" / "metrics.jsonl"
    end = time.monotonic() + 120
    while not (metrics.exists() and len(losses(tmp_path / "two")) >= 2) and time.monotonic() < end:
        time.sleep(0.05)
    ranks = [p for p in psutil.Process(process.pid).children() if "whet" in " ".join(p.cmdline())]
    assert len(ranks) == 2
    os.kill(ranks[1].pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output[-3000:]
    assert losses(tmp_path / "two") == losses(tmp_path / "one") and len(losses(tmp_path / "one")) == STEPS
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]


def test_a_number_of_ranks_that_were_not_launched_is_refused(command, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main(command("wrong", ranks=2)) == 2
    assert "whet train sft: ranks is 2, and 3 were launched" in capsys.readouterr().err
