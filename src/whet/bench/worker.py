"""Measuring process, ``python -m whet.bench.worker JSON``, started by ``whet bench``.

A separate process sets the number of threads before any library is loaded. It shows progress and saves the results
after every case, so that a stopped run loses nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from whet.bench import cuda, machine
from whet.bench.case import BenchOptions, Case, Provider, Suite, Table
from whet.bench.harness import QUICK, CaseResult, Effort, run_case
from whet.bench.machine import Ceilings
from whet.bench.report import rich_table
from whet.bench.suites import load_suite
from whet.files import replace_text
from whet.rewards.processes import set_parent_death_signal


def choose(suite: Suite, options: BenchOptions) -> Iterator[tuple[Table, list[Case], list[Provider]]]:
    """Yield the tables with the cases and providers that the options select."""
    peers = tuple(peer.lower() for peer in options.peers)
    for table in suite.tables(options):
        cases = [case for case in table.cases if options.only.lower() in f"{table.title} / {case.name}".lower()]
        ours = [p for p in table.providers if p is table.providers[0] or p.name.startswith("whet")]
        providers = [p for p in table.providers if p in ours or not peers or p.name.lower().startswith(peers)]
        if cases:
            yield table, cases, providers


class Findings:
    """Results so far, saved to a file after every case.

    Args:
        path: path of the JSON file.
        threads: requested number of threads.
        ceilings: ceilings of the device, for rating results.
        device: "cpu", or the CUDA device of all cases.
    """

    def __init__(self, path: Path, threads: int, ceilings: Ceilings, device: str = "cpu") -> None:
        self._path, self._threads, self._ceilings = path, threads, ceilings
        self._device = cuda.describe(device) if device != "cpu" else ""
        self._results: list[tuple[Table, list[CaseResult]]] = []

    def add(self, table: Table, result: CaseResult) -> None:
        """Rate and save a case of the last table or of a new one."""
        result.rate(self._ceilings)
        if not self._results or self._results[-1][0] is not table:
            self._results.append((table, []))
        self._results[-1][1].append(result)
        self._save()

    def raise_ceilings(self, ceilings: Ceilings) -> None:
        """Rate all cases again by the higher of these ceilings and the previous ceilings."""
        self._ceilings = machine.highest(self._ceilings, ceilings)
        for _, results in self._results:
            for result in results:
                result.rate(self._ceilings)
        self._save()

    def tables(self) -> list[dict[str, Any]]:
        """Convert the tables to the form of results.json."""
        names = ("title", "allocation", "note", "item", "size_label")
        return [
            {**{name: getattr(table, name) for name in names}, "cases": [result.as_dict() for result in results]}
            for table, results in self._results
        ]

    def _save(self) -> None:
        threads = machine.used_threads(self._threads)
        found = {"ceilings": self._ceilings, "threads": threads, "device": self._device, "tables": self.tables()}
        replace_text(self._path, json.dumps(found))


@contextmanager
def show_progress(console: Console, n_cases: int) -> Iterator[Callable[[str], Callable[[float], None]]]:
    """Show a progress bar; yield ``begin(name)``, which starts a case and returns a setter of its completed share."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task, n_started = progress.add_task("ceilings of the machine", total=n_cases), count()

        def begin(name: str) -> Callable[[float], None]:
            n_done = next(n_started)
            progress.update(task, description=name[:60], completed=n_done)
            return lambda share: progress.update(task, completed=n_done + share)

        yield begin


def main(order: dict[str, Any]) -> None:
    """Measure a suite, or only its thread-scaling cases, and write the results to ``order["out"]``."""
    set_parent_death_signal(
        order["parent"]
    )  # else it would continue for an hour, unnoticed, and disturb the next measurement
    suite = load_suite(order["suite"])
    options = suite.options(**{**order["options"], "peers": tuple(order["options"]["peers"])})
    threads, effort, console = order["threads"], QUICK if options.quick else Effort(), Console()
    work = list(choose(suite, options))
    if order["scaling"]:
        work = [(table, [case for case in cases if case.thread_scaling], providers) for table, cases, providers in work]
    with show_progress(console, sum(len(cases) for _, cases, _ in work)) as begin:
        (device,) = {case.device for _, cases, _ in work for case in cases} or {"cpu"}
        findings = Findings(Path(order["out"]), threads, machine.measure_ceilings(options.quick, device), device)
        for table, cases, providers in work:
            for case in cases:
                on_round = begin(f"{table.title} / {case.name}")
                findings.add(table, run_case(table, case, providers, threads, effort, options.seed, on_round))
            if cases and not order["scaling"]:
                console.print(rich_table(findings.tables()[-1]))
        # The machine may have been slower at the start: keep the higher ceilings.
        findings.raise_ceilings(machine.measure_ceilings(options.quick, device))


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)
