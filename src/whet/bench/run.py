"""Run a suite from start to report: a worker process per number of threads, and one merged result."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import whet
from whet.bench import machine
from whet.bench.case import BenchOptions, Suite
from whet.bench.report import write_report
from whet.bench.suites import CLONE, in_clone
from whet.bench.worker import choose
from whet.errors import WhetError, WhetValueError
from whet.system.machine import load_average, pinning, processors


def run_suite(suite: Suite, options: BenchOptions, command: str) -> tuple[dict[str, Any], Path]:
    """Measure a suite and write its report; after Ctrl-C, of the cases measured so far.

    Returns:
        The results, and the path of report.html.

    Raises:
        WhetValueError: the options select no row, or more threads than there are processors.
        WhetError: the measuring process died.
        KeyboardInterrupt: after the report of the cases measured so far.
    """
    threads = _check(suite, options)
    folder = Path(options.out or f"runs/bench/{suite.name}")
    folder.mkdir(parents=True, exist_ok=True)
    load_before, started_s = load_average(), time.perf_counter()
    found, interrupted = {}, False
    for n in _thread_counts(suite, options, threads):
        status, part = _measure(suite, options, n, scaling=n != threads)
        if part:
            found[n] = part
        interrupted = status != 0
        if interrupted:
            break
    if threads not in found:
        raise KeyboardInterrupt
    results = {
        "schema": 1,
        "suite": suite.name,
        "title": suite.title,
        "summary": suite.summary,
        "quick": options.quick,
        "interrupted": interrupted,
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "elapsed_s": time.perf_counter() - started_s,
        "machine": {**machine.describe(), "device": found[threads]["device"]},
        "versions": machine.versions(),
        "commit": machine.commit(),
        "build": whet.build_info(),
        "load": {"before": load_before, "after": load_average()},
        "threads": found[threads]["threads"],
        "ceilings": {str(n): part["ceilings"] for n, part in found.items()},
        "tables": _merge([found[n]["tables"] for n in found]),
    }
    path = write_report(results, folder)
    if interrupted:
        print(f"stopped; partial results are in {path}")
        raise KeyboardInterrupt
    return results, path


def _check(suite: Suite, options: BenchOptions) -> int:
    """Validate the options and return the number of threads."""
    where, available = f"whet bench {suite.name}", len(processors())
    threads = options.threads or available
    if not 1 <= threads <= available:
        raise WhetValueError(
            f"{where}: threads is {options.threads}, but this process may use {available} processors. "
            f"Pass 1 to {available}: oversubscribed threads measure the scheduler."
        )
    tables = suite.tables(options)
    if not list(choose(suite, options)):
        names = [f"{table.title} / {case.name}" for table in tables for case in table.cases]
        raise WhetValueError(f"{where}: no row contains {options.only!r}. There are: {'; '.join(names)}.")
    providers = sorted({provider.name for table in tables for provider in table.providers})
    for peer in options.peers:
        if not any(name.lower().startswith(peer.lower()) for name in providers):
            raise WhetValueError(f"{where}: there is no provider {peer!r}. There are: {', '.join(providers)}.")
    return threads


def _thread_counts(suite: Suite, options: BenchOptions, threads: int) -> list[int]:
    """Return all threads, then 1, 2, 4 ... for the cases that are measured on fewer threads, unless quick."""
    scaling = any(case.thread_scaling for _, cases, _ in choose(suite, options) for case in cases)
    fewer = [1 << k for k in range(threads.bit_length()) if 1 << k < threads]
    return [threads, *(fewer if scaling and not options.quick else [])]


def _measure(suite: Suite, options: BenchOptions, threads: int, scaling: bool) -> tuple[int, dict[str, Any]]:
    """Run a worker with ``threads`` threads; return its exit status and its results, empty if it measured nothing."""
    if scaling:
        print(f"on {threads} thread{'s' if threads > 1 else ''}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "found.json"
        order = {
            "suite": suite.name,
            "options": dataclasses.asdict(options),
            "threads": threads,
            "scaling": scaling,
            "out": str(out),
            "parent": os.getpid(),
        }
        worker = subprocess.Popen(
            [sys.executable, "-m", "whet.bench.worker", json.dumps(order)],
            env=_environment(threads),
            preexec_fn=pinning(processors()[:threads]),
        )
        try:
            status = worker.wait()
        except KeyboardInterrupt:
            status = worker.wait() or 130
        found = json.loads(out.read_text()) if out.exists() else {}
    if status not in (0, 130):
        raise WhetError(f"whet bench {suite.name}: the measuring process ended with status {status}; see above.")
    return status, found


def _environment(threads: int) -> dict[str, str]:
    """Environment of a worker: the number of threads, and an import path on which the clone's suites are found."""
    environment = machine.environment(threads)
    paths = [str(CLONE), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | ({"PYTHONPATH": os.pathsep.join(paths)} if in_clone() else {})


def _merge(parts: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge lists of tables; cases of further parts, measured on fewer threads, follow the cases of the first part."""
    tables = {table["title"]: table for table in parts[0]}
    for table in (table for part in parts[1:] for table in part):
        tables[table["title"]]["cases"] += table["cases"]
    return list(tables.values())
