"""Rows of results.json: their status, the reasons of rows without a time, ratios to the subject, and CSV.

Report, plots, terminal tables and ``compare`` all read rows through this module, so that they cannot disagree. It
writes no files; ``formatting`` converts figures to text.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from whet.bench.stats import Ratio, paired_ratio, summary

_STATUS = {"absent": "not measured", "wrong": "wrong answer, not timed"}
"""Descriptions of statuses of rows without a time; other statuses are shown unchanged."""

CSV_COLUMNS = (
    "suite", "table", "case", "threads", "cache", "provider", "status", "why", "median_s", "p20_s", "p80_s", "n",
    "max_error", "bytes_per_s", "flops_per_s", "items_per_s", "share_of_ceiling", "bound",
)  # fmt: skip


def is_measured(row: Mapping[str, Any]) -> bool:
    """Whether the row has a time."""
    return row["status"] == "measured" and bool(row["samples_s"])


def is_ours(row: Mapping[str, Any], case: Mapping[str, Any]) -> bool:
    """Whether the row is the subject of its case or another variant of Whet, not a peer."""
    return row is case["rows"][0] or row["provider"].lower().startswith("whet")


def subject_ratio(row: Mapping[str, Any], case: Mapping[str, Any]) -> Ratio | None:
    """Return the row's time / the subject's time; None for the subject, or if one of them has no time."""
    subject = case["rows"][0]
    if row is subject or not (is_measured(row) and is_measured(subject)):
        return None
    return _paired_ratio(tuple(row["samples_s"]), tuple(subject["samples_s"]))


@lru_cache(maxsize=4096)
def _paired_ratio(others: tuple[float, ...], ours: tuple[float, ...]) -> Ratio:
    return paired_ratio(others, ours)


def peer_ratios(tables: Sequence[Mapping[str, Any]], threads: int) -> dict[str, list[Ratio]]:
    """Collect the ratios of each peer over the warm cases on all threads in which it and the subject were measured."""
    found: dict[str, list[Ratio]] = {}
    for table in tables:
        for case, row in rows_of(table):
            against = subject_ratio(row, case) if case["cache"] == "warm" and case["threads"] == threads else None
            if against is not None and not is_ours(row, case):
                found.setdefault(row["provider"], []).append(against)
    return found


def geometric_mean(ratios: Sequence[Ratio]) -> float:
    """Return the geometric mean of the ratios' medians."""
    return math.exp(sum(math.log(ratio.median) for ratio in ratios) / len(ratios))


def rows_of(table: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield (case, row) of a table in order."""
    for case in table["cases"]:
        for row in case["rows"]:
            yield case, row


def subject_of(table: Mapping[str, Any]) -> str:
    """Return the provider that the table's ratios compare with its peers."""
    return table["cases"][0]["rows"][0]["provider"] if table["cases"] else "whet"


def case_label(case: Mapping[str, Any], threads: int) -> str:
    """Return the case's name, with its threads if fewer than ``threads`` and its cache if cold."""
    parts = [case["name"]]
    if case["cache"] == "cold" and "cold" not in case["name"].lower():
        parts.append("cold")
    if case["threads"] != threads:
        parts.append(f"{case['threads']} thread{'s' if case['threads'] != 1 else ''}")
    return ", ".join(parts)


def status_reason(row: Mapping[str, Any]) -> str:
    """Return why a row has no time: "not measured: rlox is not installed ..."."""
    return ": ".join(part for part in (_STATUS.get(row["status"], row["status"]), row["why"]) if part)


def part_medians(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the median seconds of each part, in the row's order."""
    return {name: summary(samples).median for name, samples in row["parts"].items() if samples}


def rows_as_csv(results: Mapping[str, Any]) -> str:
    """Format every row of a run as CSV, with times in seconds and rates per second, in full precision.

    A row without a time has a line too, with ``status``, ``why`` and empty figures.

    Args:
        results: the results that ``run_suite`` returns and results.json contains.

    Returns:
        A header line (``CSV_COLUMNS``) and one line per row, each ended by a newline.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for table in results["tables"]:
        for case, row in rows_of(table):
            key = results["suite"], table["title"], case["name"], case["threads"], case["cache"], row["provider"]
            writer.writerow([*key, row["status"], row["why"], *_times(row), row["error"], *_rates(row)])
    return text.getvalue()


def _times(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(summary(row["samples_s"])) if is_measured(row) else ("", "", "", "")


def _rates(row: Mapping[str, Any]) -> list[Any]:
    names = ("bandwidth", "flops", "items_per_s", "share", "bound")
    return [row[name] if is_measured(row) else "" for name in names]
