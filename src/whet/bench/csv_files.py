"""The rows of results.json as a table of comma-separated values, one line a row. It reads and writes no file."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

from whet.bench.reading import measured
from whet.bench.stats import summary

COLUMNS = (
    "suite", "table", "case", "threads", "cache", "provider", "status", "why", "median_s", "p20_s", "p80_s", "n",
    "max_error", "bytes_per_s", "flops_per_s", "items_per_s", "share_of_ceiling", "bound",
)  # fmt: skip


def rows_as_csv(results: Mapping[str, Any]) -> str:
    """Every row of a run, with times in seconds and rates per second, in full precision.

    A row that has no time keeps its line: ``status`` and ``why`` say what happened, and its figures are empty.

    Args:
        results: what ``run_suite`` returns and results.json holds.

    Returns:
        A heading line and one line a row, each ended by a newline.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for table in results["tables"]:
        for case in table["cases"]:
            for row in case["rows"]:
                place = results["suite"], table["title"], case["name"], case["threads"], case["cache"], row["provider"]
                writer.writerow([*place, row["status"], row["why"], *_times(row), row["error"], *_rates(row)])
    return text.getvalue()


def _times(row: Mapping[str, Any]) -> tuple[Any, ...]:
    if not measured(row):
        return "", "", "", ""
    found = summary(row["samples_s"])
    return found.median, found.p20, found.p80, found.n


def _rates(row: Mapping[str, Any]) -> list[Any]:
    names = ("bandwidth", "flops", "items_per_s", "share", "bound")
    return [row[name] if measured(row) else "" for name in names]
