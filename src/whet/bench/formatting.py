"""Text of figures in the report, the plots and the terminal: durations, sizes, ratios, rates and errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from whet.bench.stats import Ratio

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def significant(value: float) -> str:
    """Format three significant digits, and every digit before the point: "0.0123", "4.00", "12,346"."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    places = 2 - math.floor(math.log10(abs(float(f"{value:.2e}"))))
    return f"{value:,.{max(0, places)}f}" if places < 7 else f"{value:.3g}"


def duration(seconds: float, *more: float) -> str:
    """Format seconds, or a range, in the unit that fits the first value: "2.20 µs", "2.10–2.30 µs"."""
    rounded = float(f"{seconds:.2e}")
    scale, unit = next((pair for pair in _UNITS if rounded >= pair[0]), _UNITS[-1])
    return "–".join(significant(value / scale) for value in (seconds, *more)) + f" {unit}"


def size(n_bytes: float) -> str:
    """Format bytes in the unit that fits: "32 KiB", "1.50 GiB"."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if n_bytes >= 1 << power:
            whole = n_bytes / (1 << power)
            return f"{whole:.0f} {unit}" if whole == int(whole) else f"{significant(whole)} {unit}"
    return f"{n_bytes:.0f} bytes"


def interval(value: Ratio) -> str:
    """Format a ratio with its interval: "5.31× [5.20, 5.40]"."""
    return f"{significant(value.median)}× [{significant(value.low)}, {significant(value.high)}]"


def times(value: Ratio) -> str:
    """Format a ratio with its interval and stars: "5.31× [5.20, 5.40] ***"."""
    return f"{interval(value)} {value.stars}".strip()


def rate(row: Mapping[str, Any]) -> str:
    """Format GFLOP/s if arithmetic bounds the row or no bytes are counted, else GB/s; empty if neither is known."""
    if row["flops"] and ("FMA" in row["bound"] or not row["bandwidth"]):
        return f"{significant(row['flops'] / 1e9)} GFLOP/s"
    return f"{significant(row['bandwidth'] / 1e9)} GB/s" if row["bandwidth"] else ""


def items_rate(row: Mapping[str, Any]) -> str:
    """Format items per second: "1.20 M"; empty if items are not counted."""
    value = row["items_per_s"]
    if not value:
        return ""
    for scale, sign in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= scale:
            return significant(value / scale) + sign
    return significant(value)


def share(row: Mapping[str, Any]) -> str:
    """Format the row's share of the machine's ceiling: "31% of L2 bandwidth"."""
    if row["share"] is None:
        return ""
    percent = 100 * row["share"]
    return f"{percent:.0f}% of {row['bound']}" if percent >= 1 else f"{percent:.1g}% of {row['bound']}"


def error(value: Any) -> str:
    """Format an error or a tolerance: "1.1e-16"; "0" for an exact answer, "–" without an answer."""
    return "–" if value is None else f"{float(value):.2g}"
