"""``whet bench``: runs benchmark suites and compares the results of two runs."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from whet.bench.case import BenchOptions, Suite
from whet.bench.compare import THRESHOLD, as_table, compare, load_results
from whet.bench.run import run_suite
from whet.bench.suites import in_clone, load_suite, suite_names
from whet.cli.settings import parse_flags
from whet.errors import WhetValueError

_USAGE = """\
usage: whet bench SUITE [--quick] [--only ROW] [--peers NAME ...] [--threads N] [--out DIR]
       whet bench all [...]
       whet bench compare BEFORE AFTER [--threshold 0.1]

Measures Whet and its peers, and writes results.json, report.md, report.html and plots
to runs/bench/SUITE. Peers that are not installed are listed and skipped:
pip install 'whet[peers]' installs them.

SUITE is one of:
"""


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 1 for a wrong result of Whet or a regression, otherwise 0."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE + "".join(f"  {name:12} {load_suite(name).title}\n" for name in suite_names()), end="")
        if not in_clone():
            print("\nFurther suites, which measure peers too, run in a clone of the repository (pip install -e CLONE).")
        print("\nwhet bench SUITE --help lists its settings.")
        return 0 if argv else 2
    if argv[0] == "compare":
        return _compare(argv[1:])
    names = suite_names() if argv[0] == "all" else [argv[0]]
    suites = [load_suite(name) for name in names]
    options_class = BenchOptions if len(suites) > 1 else suites[0].options
    description = "Every suite, one after the other." if argv[0] == "all" else suites[0].summary
    options = parse_flags(options_class, argv[1:], f"whet bench {argv[0]}", description=description)
    statuses = [_run(suite, options, argv) for suite in suites]
    return max(statuses)


def _run(suite: Suite, options: BenchOptions, argv: Sequence[str]) -> int:
    if argv[0] == "all":
        given = dataclasses.asdict(options)
        folder = Path(options.out or "runs/bench") / suite.name
        options = suite.options(**{**given, "out": str(folder)})
    print(f"\n{suite.title}", flush=True)
    results, path = run_suite(suite, options, shlex.join(["whet", "bench", suite.name, *argv[1:]]))
    print(f"{path} ({results['elapsed_s']:.0f} s)")
    return 1 if _list_failures(results) else 0


def _list_failures(results: dict[str, Any]) -> list[str]:
    """Return the rows in which Whet's result is wrong or missing."""
    return [
        f"{table['title']} / {case['name']} / {row['provider']}: {row['why']}"
        for table in results["tables"]
        for case in table["cases"]
        for row in case["rows"]
        if row["status"] in ("wrong", "failed") and row["provider"].startswith("whet")
    ]


@dataclasses.dataclass(frozen=True)
class _Compare:
    """Compare two runs: changes and their significance. A regression makes the exit status 1."""

    before: tyro.conf.Positional[Path]
    """results.json of the run before the change, or its folder."""
    after: tyro.conf.Positional[Path]
    """results.json of the run after the change, or its folder."""
    threshold: Annotated[float, tyro.conf.arg(metavar="SHARE")] = THRESHOLD
    """Report only larger changes: 0.1 is ten percent."""


def _compare(argv: Sequence[str]) -> int:
    options = parse_flags(_Compare, argv, "whet bench compare")
    if not 0 < options.threshold < 10:
        raise WhetValueError(
            f"whet bench compare: threshold is {options.threshold}, expected a share above 0, such as 0.1."
        )
    comparison = compare(load_results(options.before), load_results(options.after), options.threshold)
    console = Console()
    console.print(as_table(comparison))
    for line in comparison.summary:
        console.print(line)
    return 1 if comparison.regressions else 0
