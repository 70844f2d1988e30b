"""Check this machine's GPU: the tests of it, then its benchmarks, each part once.

    make gpu-check      runs the parts that have not passed yet
    make gpu-check ONLY="tests gpu"

Results are in runs/gpu-check: check.json and index.html of all parts, and the log and report of each. A part that has
passed with the same command is not run again: call it again after an interruption or a repair. Remove the folder to
repeat all parts.
"""

from __future__ import annotations

import argparse
import html
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from whet.bench.machine import describe, versions
from whet.files import replace_text

FOLDER = Path("runs/gpu-check")


def parts(quick: bool) -> dict[str, list[str]]:
    """Return name -> command of the parts that this machine can run."""
    import torch

    def bench(suite: str, *options: str) -> list[str]:
        more = ["--quick"] if quick else []
        return [sys.executable, "-m", "whet", "bench", suite, "--out", str(FOLDER / suite), *options, *more]

    found = {"tests": [sys.executable, "-m", "pytest", "-n", "2", "tests/gpu"], "gpu": bench("gpu")}
    if torch.cuda.is_available():
        found["cuda tests"] = [sys.executable, "-m", "pytest", "tests/nn/test_rope_cuda.py"]
        found["rope"] = bench("rope", "--device", "cuda:0", "--batch-size", "1", "--num-heads", "32")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="names of parts")
    parser.add_argument("--quick", action="store_true", help="quick benchmarks, which a device on the CPU can compute")
    options = parser.parse_args()
    commands = parts(options.quick)
    if unknown := set(options.only) - commands.keys():
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are: {', '.join(commands)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    done: dict[str, Any] = {}
    if (FOLDER / "check.json").exists():
        done = json.loads((FOLDER / "check.json").read_text())["parts"]
    for name, command in commands.items():
        before = done.get(name, {})
        if (options.only and name not in options.only) or (before.get("rc") == 0 and before["command"] == command):
            continue
        print(f"{name}: {shlex.join(command)}", flush=True)
        begin = time.perf_counter()
        with (FOLDER / f"{name}.log").open("w") as log:
            rc = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        done[name] = {"command": command, "rc": rc, "seconds": round(time.perf_counter() - begin, 1)}
        write(done)
    for name in commands:
        print(f"{name}: {state(done.get(name))}")
    print(f"{FOLDER / 'index.html'}")
    return 0 if all(done.get(name, {}).get("rc") == 0 for name in options.only or commands) else 1


def state(part: dict[str, Any] | None) -> str:
    """Return the outcome of a part in words."""
    if part is None:
        return "not run"
    return f"{'passed' if part['rc'] == 0 else 'failed'} in {part['seconds']} s"


def write(done: dict[str, Any]) -> None:
    """Write check.json, with the results of the benchmarks, and index.html."""
    found = {name: FOLDER / name / "results.json" for name in done}
    results = {name: json.loads(file.read_text()) for name, file in found.items() if file.exists()}
    whole = {"machine": describe(), "versions": versions(), "parts": done, "results": results}
    replace_text(FOLDER / "check.json", json.dumps(whole, indent=1, default=str))
    rows = []
    for name, part in done.items():
        report = f' · <a href="{name}/report.html">report</a>' if name in results else ""
        rows.append(
            f'<tr><td>{html.escape(name)}<td>{state(part)}<td><a href="{html.escape(name)}.log">log</a>{report}'
        )
    page = f"<!doctype html><meta charset=utf-8><title>Check of the GPU</title><table>{''.join(rows)}</table>"
    replace_text(FOLDER / "index.html", page)


if __name__ == "__main__":
    sys.exit(main())
