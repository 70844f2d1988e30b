"""The process that measures: ``python -m whet.bench.worker JSON``, started by ``whet bench``.

It has its own process so that the number of threads is set before any library is loaded. It shows its progress, and
leaves what it has measured in a file after every case, so that a run that is stopped loses nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from whet.bench import machine
from whet.bench.case import BenchOptions, Case, Provider, Suite, Table
from whet.bench.harness import QUICK, CaseResult, Effort, run_case
from whet.bench.report import rich_table
from whet.bench.suites import load_suite
from whet.files import replace_text


def chosen(suite: Suite, options: BenchOptions) -> Iterator[tuple[Table, list[Case], list[Provider]]]:
    """The tables with those of their cases and providers that the options ask for."""
    peers = tuple(peer.lower() for peer in options.peers)
    for table in suite.tables(options):
        cases = [case for case in table.cases if options.only.lower() in f"{table.title} / {case.name}".lower()]
        ours = [p for p in table.providers if p is table.providers[0] or p.name.startswith("whet")]
        providers = [p for p in table.providers if p in ours or not peers or p.name.lower().startswith(peers)]
        if cases:
            yield table, cases, providers


def main(order: dict[str, Any]) -> None:
    """Measure a suite, or only its thread-scaling cases, and leave the findings in ``order["out"]``."""
    suite = load_suite(order["suite"])
    options = suite.options(**{**order["options"], "peers": tuple(order["options"]["peers"])})
    threads, effort, console = order["threads"], QUICK if options.quick else Effort(), Console()
    work = list(chosen(suite, options))
    if order["scaling"]:
        work = [(table, [c for c in cases if c.thread_scaling], providers) for table, cases, providers in work]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("ceilings of the machine", total=sum(len(cases) for _, cases, _ in work))
        ceilings = machine.measure_ceilings(options.quick)
        findings: list[tuple[Table, list[CaseResult]]] = []

        def save() -> dict[str, Any]:
            found = {
                "ceilings": ceilings,
                "threads": machine.used_threads(threads),
                "tables": [_as_dict(table, results) for table, results in findings],
            }
            replace_text(Path(order["out"]), json.dumps(found))
            return found

        done = 0
        for table, cases, providers in work:
            findings.append((table, []))
            for case in cases:
                progress.update(task, description=f"{table.title} / {case.name}"[:60], completed=done)

                def on_round(share: float, done: int = done) -> None:
                    progress.update(task, completed=done + share)

                result = run_case(table, case, providers, threads, effort, options.seed, on_round)
                result.rate(ceilings)
                findings[-1][1].append(result)
                save()
                done += 1
            if cases and not order["scaling"]:
                console.print(rich_table(_as_dict(*findings[-1])))
        # The machine may have been slower at the start: the better of the two judges.
        ceilings = machine.highest(ceilings, machine.measure_ceilings(options.quick))
        for _, results in findings:
            for result in results:
                result.rate(ceilings)
        save()


def _as_dict(table: Table, results: list[CaseResult]) -> dict[str, Any]:
    shown = {name: getattr(table, name) for name in ("title", "allocation", "note", "item", "size_label")}
    return {**shown, "cases": [result.as_dict() for result in results]}


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)
