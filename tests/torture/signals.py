"""Runs that are suspended and resumed (SIGSTOP, SIGCONT) or terminated (SIGTERM, Ctrl-C), as by a shell."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.torture.common import N_STEPS, Tally, Workshop, finished, require, require_same, scaled, started, workshop

_PATIENCE_S = 300.0
_SLOW = 0.2
"""Seconds of a step's rewards, which leave time for signals."""


def torture(scale: float) -> Iterator[Tally]:
    with workshop() as shop:
        slow = shop.folder / "slow.py"
        slow.write_text(
            "import time\nfrom tests.torture.functions import share\n"
            f"def slow_share(completions, answer):\n    time.sleep({_SLOW})\n    return share(completions, answer)\n"
        )
        reward = f"{slow}:slow_share"
        expected: dict[str, str] = {}
        setup = Tally("signals")
        with setup.case("undisturbed"):
            expected = finished(shop, "grpo", reward=reward)
        if not expected:
            yield setup
            return
        yield _stopped(shop, reward, expected, scaled(4, scale))
        yield _terminated(shop, reward, expected, scaled(4, scale))


def _stopped(shop: Workshop, reward: str, expected: dict[str, str], n: int) -> Tally:
    """Suspend runs repeatedly."""
    tally = Tally("SIGSTOP, SIGCONT")
    rng = random.Random(0)
    for i in range(n):
        with tally.case(f"run {i}"):
            folder = shop.folder / f"stopped-{i}"
            run = started(shop.command("grpo", folder, reward=reward))
            n_stops = 0
            while run.poll() is None:
                time.sleep(rng.uniform(0.05, 0.5))
                run.send_signal(signal.SIGSTOP)
                time.sleep(rng.uniform(0.05, 0.3))
                run.send_signal(signal.SIGCONT)
                n_stops += 1
            text, _ = run.communicate(timeout=_PATIENCE_S)
            require(run.returncode == 0, f"status {run.returncode}: {text}")
            require(n_stops > 5, "it was suspended too few times")
            require_same(folder, expected)
    return tally


def _terminated(shop: Workshop, reward: str, expected: dict[str, str], n: int) -> Tally:
    """Terminate runs: the step is finished, a checkpoint is saved, and the same command continues."""
    tally = Tally("SIGTERM, and Ctrl-C")
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        for step in range(1, 1 + min(n, N_STEPS - 1)):
            with tally.case(f"{number.name} after step {step}"):
                folder = shop.folder / f"ended-{number.name}-{step}"
                command = shop.command("grpo", folder, reward=reward)
                run = started(command, preexec_fn=_restore_sigint)
                _wait_for_step(run, folder, step)
                run.send_signal(number)
                text, _ = run.communicate(timeout=_PATIENCE_S)
                require(run.returncode == status, f"status {run.returncode}, not {status}: {text}")
                saved, logged = _saved_step(folder), _logged_step(folder)
                require(saved == logged, f"the checkpoint is of step {saved}, the last step was {logged}")
                require(step <= logged < N_STEPS, f"signalled after step {step}, it ran to step {logged}")
                again = started(command)
                text, _ = again.communicate(timeout=_PATIENCE_S)
                require(again.returncode == 0, f"the same command failed: {text}")
                require_same_but_checkpoints(folder, expected)
    return tally


def _restore_sigint() -> None:
    """Restore SIGINT's default handler: a shell starts background jobs with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _wait_for_step(run: subprocess.Popen[str], folder: Path, step: int) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while _logged_step(folder) < step:
        require(run.poll() is None and time.monotonic() < deadline_s, f"step {step} was not reached")
        time.sleep(0.01)


def _logged_step(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    lines = [line for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def _saved_step(folder: Path) -> int:
    return max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def require_same_but_checkpoints(folder: Path, expected: dict[str, str]) -> None:
    """Compare results without earlier checkpoints, which the additional checkpoint may have replaced."""
    last = f"checkpoints/step-{N_STEPS:06d}/"
    kept = {name: digest for name, digest in expected.items() if "checkpoints/" not in name or name.startswith(last)}
    for path in (folder / "checkpoints").glob("step-*"):
        if path.name != last.split("/")[1]:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    require_same(folder, kept)
