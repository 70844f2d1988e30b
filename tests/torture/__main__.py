"""Run the kinds of torture, two in parallel, and print the table; see docs/reliability.md.

make torture
python -m tests.torture --scale 0.1 kills disk
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from tests.torture.common import ROOT, Tally

KINDS = (
    "serving", "hostile", "kills", "files", "disk", "rewards", "environments", "signals", "agents", "memory",
    "allocations", "engines", "exports",
)  # fmt: skip
"""The longest first, since two run in parallel."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS], help="default: all")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the documented number of cases")
    parser.add_argument("--into", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.into:
        run_here(args.kinds[0], args.scale, Path(args.into))
        return 0
    start_s = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        tallies = [tally for part in pool.map(lambda k: run_kind(k, args.scale), args.kinds or KINDS) for tally in part]
    print_table(tallies, time.monotonic() - start_s)
    return 1 if any(tally.failures for tally in tallies) else 0


def run_here(kind: str, scale: float, into: Path) -> None:
    """Run a kind of torture in this process; write a line of JSON for each row of the table."""
    with into.open("w") as file:
        for tally in importlib.import_module(f"tests.torture.{kind}").torture(scale):
            file.write(json.dumps(asdict(tally)) + "\n")
            file.flush()


def run_kind(kind: str, scale: float) -> list[Tally]:
    """Run a kind of torture in a separate process, which may die."""
    print(f"{kind}: started", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="whet-torture-") as folder:
        into = Path(folder) / "tallies.jsonl"
        command = [sys.executable, "-m", "tests.torture", kind, f"--scale={scale}", f"--into={into}"]
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
        tallies = read_tallies(into)
    if status:
        tallies.append(Tally(kind, 1, [f"its process ended with status {status}"]))
    print(f"{kind}: finished", flush=True)
    return tallies


def read_tallies(file: Path) -> list[Tally]:
    """Read the rows that ``run_here`` wrote before it ended."""
    return [Tally(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def print_table(tallies: list[Tally], seconds: float) -> None:
    """Print the table of cases, failures and seconds, and then all failures."""
    width = max(len(tally.what) for tally in tallies)
    print(f"\n{'what':{width}}  {'cases':>6}  {'failures':>8}  {'seconds':>7}")
    for t in tallies:
        print(f"{t.what:{width}}  {t.cases:6,}  {len(t.failures):8}  {t.seconds:7.0f}  {t.note}".rstrip())
    n_failures = sum(len(tally.failures) for tally in tallies)
    print(f"{'all':{width}}  {sum(t.cases for t in tallies):6,}  {n_failures:8}  {seconds:7.0f}")
    for tally in tallies:
        for failure in tally.failures[:10]:
            print(f"\n{tally.what}: {failure}")


if __name__ == "__main__":
    sys.exit(main())
