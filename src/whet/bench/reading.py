"""What the rows of results.json say: which were measured, how they compare, and their figures in words.

Report, plots and the terminal's tables all read through here, so that they cannot differ. It writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from whet.bench.stats import Ratio, paired_ratio

STATUS = {
    "absent": "not measured",
    "wrong": "wrong answer, not timed",
    "failed": "failed",
    "refused": "refused",
}
"""How a row that has no time is announced, before its reason."""

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def measured(row: Mapping[str, Any]) -> bool:
    """Whether the row has a time to be shown."""
    return row["status"] == "measured" and bool(row["samples_s"])


def is_ours(row: Mapping[str, Any], case: Mapping[str, Any]) -> bool:
    """Whether the row is the subject of its case, or another way through Whet, and not a peer."""
    return row is case["rows"][0] or row["provider"].lower().startswith("whet")


def ratio(row: Mapping[str, Any], case: Mapping[str, Any]) -> Ratio | None:
    """How many times as long as the subject the row took; None for the subject, and where one has no time."""
    subject = case["rows"][0]
    if row is subject or not (measured(row) and measured(subject)):
        return None
    return _paired_ratio(tuple(row["samples_s"]), tuple(subject["samples_s"]))


@lru_cache(maxsize=4096)
def _paired_ratio(others: tuple[float, ...], ours: tuple[float, ...]) -> Ratio:
    return paired_ratio(others, ours)


def peer_ratios(tables: Sequence[Mapping[str, Any]], threads: int) -> dict[str, list[Ratio]]:
    """Peer -> its ratio in every warm case on all threads where it and the subject were measured."""
    found: dict[str, list[Ratio]] = {}
    for table in tables:
        for case, row in rows_of(table):
            against = ratio(row, case) if case["cache"] == "warm" and case["threads"] == threads else None
            if against is not None and not is_ours(row, case):
                found.setdefault(row["provider"], []).append(against)
    return found


def geometric_mean(ratios: Sequence[Ratio]) -> float:
    """Of the medians of the ratios."""
    return math.exp(sum(math.log(one.median) for one in ratios) / len(ratios))


def rows_of(table: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(case, row) of a table, in its order."""
    for case in table["cases"]:
        for row in case["rows"]:
            yield case, row


def subject_of(table: Mapping[str, Any]) -> str:
    """The provider whose speed the table's ratios tell."""
    return table["cases"][0]["rows"][0]["provider"] if table["cases"] else "whet"


def case_label(case: Mapping[str, Any], threads: int) -> str:
    """The case's name, with what sets it apart: fewer threads than ``threads``, a cold cache."""
    parts = [case["name"]]
    if case["cache"] == "cold" and "cold" not in case["name"].lower():
        parts.append("cold")
    if case["threads"] != threads:
        parts.append(f"{case['threads']} thread{'s' if case['threads'] != 1 else ''}")
    return ", ".join(parts)


def why_not(row: Mapping[str, Any]) -> str:
    """Why a row has no time: "not measured: rlox is not installed ..."."""
    return ": ".join(part for part in (STATUS.get(row["status"], row["status"]), row["why"]) if part)


# --- figures in words -----------------------------------------------------------------------------------


def significant(value: float) -> str:
    """Three significant digits, and every digit before the point: "0.0123", "4.00", "12,346"."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    places = 2 - math.floor(math.log10(abs(float(f"{value:.2e}"))))
    return f"{value:,.{max(0, places)}f}" if places < 7 else f"{value:.3g}"


def duration(seconds: float, *more: float) -> str:
    """Seconds in the unit that fits the first, ends of a range with a dash: "2.20 µs", "2.10–2.30 µs"."""
    rounded = float(f"{seconds:.2e}")
    scale, unit = next((pair for pair in _UNITS if rounded >= pair[0]), _UNITS[-1])
    return "–".join(significant(one / scale) for one in (seconds, *more)) + f" {unit}"


def size(n_bytes: float) -> str:
    """Bytes in the unit that fits: "32 KiB", "1.50 GiB"."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if n_bytes >= 1 << power:
            whole = n_bytes / (1 << power)
            return f"{whole:.0f} {unit}" if whole == int(whole) else f"{significant(whole)} {unit}"
    return f"{n_bytes:.0f} bytes"


def interval(value: Ratio) -> str:
    """A ratio with its interval: "5.31× [5.20, 5.40]"."""
    return f"{significant(value.median)}× [{significant(value.low)}, {significant(value.high)}]"


def times(value: Ratio) -> str:
    """A ratio with its interval and stars: "5.31× [5.20, 5.40] ***"."""
    return f"{interval(value)} {value.stars}".strip()


def rate(row: Mapping[str, Any]) -> str:
    """GFLOP/s where arithmetic bounds the row or nothing is moved, GB/s else; empty where neither is known."""
    if row["flops"] and ("FMA" in row["bound"] or not row["bandwidth"]):
        return f"{significant(row['flops'] / 1e9)} GFLOP/s"
    return f"{significant(row['bandwidth'] / 1e9)} GB/s" if row["bandwidth"] else ""


def items_rate(row: Mapping[str, Any]) -> str:
    """Items per second: "1.20 M"; empty where they are not counted."""
    value = row["items_per_s"]
    if not value:
        return ""
    for scale, sign in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= scale:
            return significant(value / scale) + sign
    return significant(value)


def share(row: Mapping[str, Any]) -> str:
    """The row's share of the machine's ceiling, and what that is: "31% of L2 bandwidth"."""
    if row["share"] is None:
        return ""
    percent = 100 * row["share"]
    return f"{percent:.0f}% of {row['bound']}" if percent >= 1 else f"{percent:.1g}% of {row['bound']}"


def error(value: Any) -> str:
    """An error or a tolerance: "1.1e-16"; "0" for a perfect answer, "–" where there was none."""
    return "–" if value is None else f"{float(value):.2g}"
