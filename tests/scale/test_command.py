"""``whet train --ranks``: equal to one process, and failures of ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.cli.conftest import ROWS, tiny_model  # noqa: F401
from tests.raising import assert_mentions

from whet.cli import main

ROOT = Path(__file__).parents[2]
STEPS = 6


@pytest.fixture
def command(tmp_path, tiny_model):  # noqa: F811
    """Return a function (name, settings) -> arguments of Whet for an SFT run in that folder."""
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))

    def arguments(name, method="sft", **settings):
        given = {"model": tiny_model, "data": tmp_path / "rows.jsonl", "output_dir": tmp_path / name}
        given |= {"steps": STEPS, "batch_size": 6, "learning_rate": 1e-2, "checkpoint_every": 1, "compute": "float32"}
        flags = [
            part for key, value in (given | settings).items() for part in (f"--{key}".replace("_", "-"), str(value))
        ]
        return ["train", method, *flags, "--deterministic-reduction"]

    return arguments


def losses(folder):
    """Return the losses of steps; of a run in progress, or a killed one, the last line may be torn."""
    text = (folder / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def start(arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    return subprocess.Popen(
        [sys.executable, "-m", "whet", *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def test_two_ranks_are_bit_identical_to_one_and_resume_after_a_kill(command, tmp_path):
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


_FAMILY = {
    "lora_rank": 16, "lora_init": "pissa", "optimizer": "adamw_8bit", "label_smoothing": 0.1, "neftune_alpha": 5.0,
}  # fmt: skip


@pytest.mark.parametrize("more", [{"lora_rank": 2}, _FAMILY])
def test_two_ranks_of_a_learner_are_bit_identical_to_one(more, command, tmp_path):
    settings = {"max_tokens_per_step": 24, "backend": "native", **more}
    assert main(command("one", **settings)) == 0
    process = start(command("two", ranks=2, **settings))
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and "trained natively" in output, output[-3000:]
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    adapters = [(tmp_path / name / "model" / "adapter_model.safetensors").read_bytes() for name in ("one", "two")]
    assert adapters[0] == adapters[1]


def test_ranks_exit_if_the_launcher_is_killed(command, tmp_path):
    process = start(command("run", ranks=2, steps=1000, checkpoint_every=1000))
    metrics = tmp_path / "run" / "metrics.jsonl"
    end = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < end:
        time.sleep(0.05)
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    assert len(ranks) >= 2 and psutil.wait_procs(ranks, timeout=30)[1] == []
    assert main(command("run", steps=1)) == 0  # the folder is unlocked


def test_a_rank_that_always_dies_gives_one_line(command, tmp_path):
    (tmp_path / "dying.py").write_text("import os\ndef score(completions):\n    os._exit(7)\n")
    reward = f"{tmp_path / 'dying.py'}:score"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    code = (
        "import sys, whet.training.launch as launch; launch._RESTARTS = 1; "
        "sys.exit(launch._main('2', ['-m', 'whet', *sys.argv[1:]]))"
    )
    arguments = command("run", method="grpo", ranks=2, reward=reward, group_size=2, batch_size=2, max_new_tokens=4)
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("whet: rank 0 ended with exit code 7"), done.stderr
    assert "Traceback" not in done.stderr and "closing signal" not in done.stderr


def test_a_user_error_gives_one_line_and_no_restart(command, tmp_path):
    (tmp_path / "judge.py").write_text("def judge(completions):\n    raise RuntimeError('no judge')\n")
    given = {"reward": f"{tmp_path / 'judge.py'}:judge", "max_new_tokens": 4, "group_size": 2, "batch_size": 2}
    process = start(command("raises", "grpo", ranks=2, **given))
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2, output[-3000:]
    assert output.count("no judge") == 1 and output.count("GRPO of") == 1, output[-3000:]
    [error] = [line for line in output.splitlines() if line.startswith("whet: ") and "warning" not in line]
    assert error.endswith("judge.py, line 2)")


def test_a_missing_model_gives_one_line(command, tmp_path):
    process = start(command("missing", ranks=2, model=tmp_path / "none"))
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2
    assert len([line for line in output.splitlines() if "whet: " in line]) == 1, output[-3000:]


def test_a_port_in_use_gives_one_line(command, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        process = start(command("taken"))
        output, _ = process.communicate(timeout=240)
    assert process.returncode > 0 and "Traceback" not in output, output[-3000:]
    [line] = [line for line in output.splitlines() if line.startswith("whet: ")]
    assert f"cannot connect through 127.0.0.1:{port}" in line and "a free port" in line


def test_ctrl_c_leaves_a_checkpoint_of_all_ranks(command, tmp_path):
    process = start(command("stopped", ranks=2, steps=5000, checkpoint_every=5000))
    metrics = tmp_path / "stopped" / "metrics.jsonl"
    end = time.monotonic() + 120
    while not (metrics.exists() and len(losses(tmp_path / "stopped")) >= 2) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGINT, output[-3000:]
    assert output.count("whet: interrupted") == 1 and output.count("the same command resumes from it") == 1
    [checkpoint] = (tmp_path / "stopped" / "checkpoints").iterdir()
    assert int(checkpoint.name.removeprefix("step-")) == max(losses(tmp_path / "stopped")) < 5000


@pytest.mark.needs("ray")
@pytest.mark.parametrize("ahead", [{}, {"async_lag": 2}])
def test_a_pool_exits_with_its_driver_and_the_run_resumes_exactly(command, tmp_path, ahead):
    (tmp_path / "judge.py").write_text("def judge(completions):\n    return [len(set(text)) for text in completions]\n")
    given = {"reward": f"{tmp_path / 'judge.py'}:judge", "max_new_tokens": 8, "group_size": 4, "batch_size": 2}
    given |= ahead
    assert main(command("native", "grpo", engine="native", **given)) == 0
    pooled = command("pool", "grpo", engine="ray", rollout_workers=2, **given)
    process = start(pooled)
    metrics = tmp_path / "pool" / "metrics.jsonl"
    end = time.monotonic() + 120
    while not (metrics.exists() and len(losses(tmp_path / "pool")) >= 2) and time.monotonic() < end:
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    workers = [child for child in children if "ray::Worker" in " ".join(child.cmdline())]
    assert len(workers) == 2
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(workers, timeout=60)  # Ray's own agents take a minute
    assert not alive and len(losses(tmp_path / "pool")) < STEPS
    process = start(pooled)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and "resuming from" in output, output[-3000:]
    assert losses(tmp_path / "pool") == losses(tmp_path / "native") and any(losses(tmp_path / "native").values())


@pytest.mark.parametrize("ahead", [{"async_lag": 1}, {"async_lag": 3, "async_tokens": 3}])
@pytest.mark.parametrize("lora", [{}, {"lora_rank": 2, "backend": "native"}])
def test_a_killed_run_that_samples_ahead_resumes_exactly(command, tmp_path, ahead, lora):
    (tmp_path / "judge.py").write_text("def judge(completions):\n    return [len(set(text)) for text in completions]\n")
    given = {"reward": f"{tmp_path / 'judge.py'}:judge", "max_new_tokens": 8, "group_size": 4, "batch_size": 2}
    given |= {"steps": 30, "checkpoint_every": 3, **ahead, **lora}
    assert main(command("whole", "grpo", **given)) == 0
    metrics, kills = tmp_path / "killed" / "metrics.jsonl", 0
    while True:
        process = start(command("killed", "grpo", **given))
        aim = max(losses(tmp_path / "killed"), default=0) + 4 if metrics.exists() else 4
        while process.poll() is None and not (metrics.exists() and max(losses(tmp_path / "killed"), default=0) >= aim):
            time.sleep(0.002)
        if kills == 2:
            break
        process.kill()
        process.communicate()
        kills += 1
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and "resuming from" in output, output[-3000:]
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    weights = [(tmp_path / folder / "model" / name).read_bytes() for folder in ("whole", "killed")]
    assert weights[0] == weights[1]


def test_a_number_of_ranks_that_differs_from_the_launcher_is_rejected(command, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main(command("wrong", ranks=2)) == 2
    assert_mentions(capsys.readouterr().err, "whet train sft", "ranks is 2", 3)
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert main(command("wrong", ranks=2)) == 2
    assert_mentions(capsys.readouterr().err, "WORLD_SIZE", "'two'", "a number")
