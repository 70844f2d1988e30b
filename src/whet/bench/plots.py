"""Plots of a benchmark: ratios with intervals, time over size, speed-up over threads, parts of a call, learning.

Each is drawn twice: as SVG in the page's colours for report.html, and as a PNG on a light background. Plots without
data are omitted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from whet.bench.formatting import duration, significant
from whet.bench.results import case_label, is_measured, part_medians, rows_of, subject_of, subject_ratio
from whet.bench.stats import Ratio, summary
from whet.errors import MissingExtraError
from whet.report.page import CHART_STYLE, LIGHT_COLORS, SERIES, SVG_COLORS, inline_svg, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Table = Mapping[str, Any]
Colors = Mapping[str, str]

_WIDTH = 7.2
_MOST_PARTS = 7
_MARKERS = "osD^v<>PX"
"""One more than the number of colours: providers that share a colour have different markers."""


class Chart(NamedTuple):
    """Caption, SVG and name of the PNG of a plot."""

    title: str
    note: str
    svg: str
    png: str


def draw(table: Table, threads: int, folder: Path, slug: str) -> Iterator[Chart]:
    """Draw the plots of a table that have data; write ``folder/SLUG-KIND.png`` of each.

    Args:
        table: a table of results.json.
        threads: threads of the run; cases on fewer threads are only in the plot over threads.
        folder: the folder of the PNGs.
        slug: prefix of their names.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise MissingExtraError("write_report", "matplotlib", "train") from error

    with rc_context(CHART_STYLE):
        for kind, title, note, figure_of in _PLOTS:
            figure = figure_of(table, threads, SVG_COLORS)
            if figure is None:
                continue
            title = title.format(subject=_label(subject_of(table)))
            png = f"{slug}-{kind}.png"
            on_paper = figure_of(table, threads, LIGHT_COLORS)
            _give_title(on_paper, f"{_label(table['title'], 50)}: {title[0].lower()}{title[1:]}")
            on_paper.savefig(folder / png, dpi=144, facecolor=LIGHT_COLORS["paper"])
            yield Chart(title, note, inline_svg(figure, f"{table['title']}: {title}"), png)


# --- the plots ------------------------------------------------------------------------------------------


def ratio_figure(table: Table, threads: int, colors: Colors) -> Figure | None:
    """Draw the subject's speed relative to each peer: a bar per peer from 1 to the ratio, in a group per case."""
    groups = []
    for case in _full_cases(table, threads):
        bars = [(row["provider"], against) for row in case["rows"] if (against := subject_ratio(row, case)) is not None]
        if bars:
            groups.append((_label(case_label(case, threads), 28), bars))
    if not groups:
        return None
    n_bars = sum(len(bars) for _, bars in groups)
    series = _series(table)
    figure = _new_figure(0.9 + 0.24 * n_bars + 0.14 * len(groups) + _legend_height(len(series) - 1))
    axes = figure.add_subplot()
    y, ticks = 0.0, []
    for label, bars in groups:
        ticks.append((y + (len(bars) - 1) / 2, label))
        for provider, against in bars:
            _ratio_bar(axes, y, against, colors[series[provider][0]], colors)
            y += 1
        y += 0.6
    ratios = [against for _, bars in groups for _, against in bars]
    low, high = min(1.0, *(r.low for r in ratios)), max(1.0, *(r.high for r in ratios))
    # Space for the figures at the ends of the bars: a sixth of the width on each side that has bars.
    sides = (low < 1) + (high > 1)
    room = math.exp(max(math.log(high / low), 0.05) * 0.17 / (1 - 0.17 * sides))
    _log_axis(axes.xaxis, low / (room if low < 1 else 1.02), high * room, lambda value: f"{value:g}×")
    axes.axvline(1, color=colors["ink"], linewidth=1)
    axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks])
    axes.set_ylim(y - 0.9, -0.7)
    _set_style(axes, colors, grid="x")
    axes.tick_params(axis="y", colors=colors["ink"])
    axes.set_xlabel(f"{_label(subject_of(table))} is … times as fast", color=colors["muted"])
    drawn = {provider for _, bars in groups for provider, _ in bars}
    _legend(figure, {name: style for name, style in series.items() if name in drawn}, colors, "bar")
    return figure


def size_figure(table: Table, threads: int, colors: Colors) -> Figure | None:
    """Draw time over size, both logarithmic: a line through the medians with a band from p20 to p80."""
    lines: dict[str, list[tuple[float, Any]]] = {}
    for case in _full_cases(table, threads):
        if case["size"] and case["cache"] == "warm":
            for row in filter(is_measured, case["rows"]):
                lines.setdefault(row["provider"], []).append((case["size"], summary(row["samples_s"])))
    sizes = sorted({size for points in lines.values() for size, _ in points})
    if len(sizes) < 3:
        return None
    series = _series(table)
    figure = _new_figure(3.3 + _legend_height(len(lines)))
    axes = figure.add_subplot()
    for provider, points in reversed(lines.items()):  # the subject last, on top
        points.sort(key=lambda point: point[0])
        color, marker = colors[series[provider][0]], series[provider][1]
        xs, times = [size for size, _ in points], [time for _, time in points]
        axes.fill_between(xs, [t.p20 for t in times], [t.p80 for t in times], color=color, alpha=0.2, linewidth=0)
        axes.plot(xs, [t.median for t in times], color=color, linewidth=2, marker=marker, markersize=4.5)
    seconds = [value for points in lines.values() for _, time in points for value in (time.p20, time.p80)]
    _log_axis(axes.xaxis, sizes[0] / 1.1, sizes[-1] * 1.1, _count, _thin_out(sizes))
    _log_axis(axes.yaxis, min(seconds) / 1.2, max(seconds) * 1.2, _short_duration)
    _set_style(axes, colors, grid="y")
    axes.set_xlabel(_label(table["size_label"] or "size", 60), color=colors["muted"])
    axes.set_ylabel("time per call", color=colors["muted"])
    _legend(figure, {name: series[name] for name in lines}, colors, "line")
    return figure


def threads_figure(table: Table, threads: int, colors: Colors) -> Figure | None:
    """Draw the speed-up over the fewest threads: a panel per case, a line per provider, a dashed line if linear."""
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for case, row in rows_of(table):
        if is_measured(row):
            lines = panels.setdefault(case["name"], {})
            lines.setdefault(row["provider"], {})[case["threads"]] = summary(row["samples_s"]).median
    panels = {name: kept for name, lines in panels.items() if (kept := {p: x for p, x in lines.items() if len(x) > 1})}
    if not panels:
        return None
    series, columns = _series(table), min(3, len(panels))
    drawn = {provider: series[provider] for provider in series if any(provider in lines for lines in panels.values())}
    n_rows = -(-len(panels) // columns)
    figure = _new_figure(2.9 * n_rows + _legend_height(len(drawn)))
    grid = figure.subplots(n_rows, columns, squeeze=False, sharey=True)
    for axes, (name, lines) in zip(grid.flat, panels.items(), strict=False):
        counts = sorted({n for medians in lines.values() for n in medians})
        axes.plot(counts, [n / counts[0] for n in counts], color=colors["muted"], linewidth=1, linestyle="--")
        for provider, medians in reversed(lines.items()):
            xs = sorted(medians)
            ys = [medians[xs[0]] / medians[n] * xs[0] / counts[0] for n in xs]
            color, marker = series[provider]
            axes.plot(xs, ys, color=colors[color], linewidth=2, marker=marker, markersize=4.5)
        axes.set_title(_label(name, 30), fontsize=11, color=colors["ink"])
        axes.set_xticks(counts)
        axes.set_xlabel("threads", color=colors["muted"])
        _set_style(axes, colors, grid="y")
        axes.margins(x=0.08)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    _legend(figure, drawn, colors, "line")
    return figure


def parts_figure(table: Table, threads: int, colors: Colors) -> Figure | None:
    """Draw the shares of a call's parts in its time: a bar per row with parts, the smallest parts merged."""
    bars = [
        (f"{case_label(case, threads)} · {row['provider']}", summary(row["samples_s"]).median, part_medians(row))
        for case, row in rows_of(table)
        if is_measured(row) and row["parts"]
    ]
    if not bars:
        return None
    totals: dict[str, float] = {}
    for _, _, parts in bars:
        for name, seconds in parts.items():
            totals[name] = totals.get(name, 0.0) + seconds / (sum(parts.values()) or 1.0)
    largest = sorted(totals, key=lambda name: -totals[name])[
        : len(SERIES) if len(totals) <= len(SERIES) else _MOST_PARTS
    ]
    shown = [name for name in totals if name in largest]
    rest = f"{len(totals) - len(shown)} smaller" if len(totals) > len(shown) else ""
    series = {name: (SERIES[i], "s") for i, name in enumerate(shown)} | ({rest: (SERIES[-1], "s")} if rest else {})
    figure = _new_figure(0.75 + 0.55 * len(bars) + _legend_height(len(series)))
    axes = figure.add_subplot()
    for y, (_, seconds, parts) in enumerate(bars):
        widths = {name: parts.get(name, 0.0) for name in shown}
        widths |= {rest: sum(parts.values()) - sum(widths.values())} if rest else {}
        _parts_bar(axes, y, widths, series, colors)
        axes.text(1.01, y, duration(seconds), va="center", color=colors["ink"], fontsize=11)
    axes.set_yticks(range(len(bars)), [_label(label, 36) for label, _, _ in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, 1.12)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    _set_style(axes, colors, grid="")
    axes.tick_params(axis="y", colors=colors["ink"])
    _legend(figure, series, colors, "bar")
    return figure


def learning_figure(table: Table, threads: int, colors: Colors) -> Figure | None:
    """Draw score over steps: a line through the means of a provider's runs, with a band from minimum to maximum."""
    runs: dict[str, list[dict[int, float]]] = {}
    for case in _full_cases(table, threads):
        for row in case["rows"]:
            if is_measured(row) and row["curve"]:
                runs.setdefault(row["provider"], []).append(dict(row["curve"]))
    if not runs:
        return None
    series = _series(table)
    figure = _new_figure(3.6 + _legend_height(len(runs)))
    axes = figure.add_subplot()
    for provider, curves in reversed(runs.items()):
        steps = sorted(set.intersection(*map(set, curves)))
        scores = [[curve[step] for curve in curves] for step in steps]
        color, marker = colors[series[provider][0]], series[provider][1]
        axes.fill_between(steps, list(map(min, scores)), list(map(max, scores)), color=color, alpha=0.15, linewidth=0)
        means = [sum(each) / len(each) for each in scores]
        axes.plot(steps, means, color=color, linewidth=2, marker=marker, markersize=4.5)
    _set_style(axes, colors, grid="y")
    axes.set_xlabel("steps", color=colors["muted"])
    axes.set_ylabel("held-out score", color=colors["muted"])
    _legend(figure, {name: series[name] for name in runs}, colors, "line")
    return figure


def scores_figure(table: Table, threads: int, colors: Colors) -> Figure | None:
    """Draw the scores of training runs: a bar per row from the mean before to the mean after, and a dot per run."""
    rows = [(case, row) for case, row in rows_of(table) if is_measured(row) and row["scores"]]
    if not rows:
        return None
    series = _series(table)
    figure = _new_figure(0.8 + 0.36 * len(rows) + _legend_height(len(series)))
    axes = figure.add_subplot()
    for y, (_, row) in enumerate(rows):
        before, after = zip(*row["scores"], strict=True)
        first, last = statistics.mean(before), statistics.mean(after)
        axes.barh(y, last - first, left=first, height=0.6, color=colors[series[row["provider"]][0]])
        axes.plot(after, [y] * len(after), color=colors["ink"], linestyle="", marker="o", markersize=4.5)
    axes.set_yticks(range(len(rows)), [_label(case_label(case, threads), 36) for case, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    _set_style(axes, colors, grid="x")
    axes.tick_params(axis="y", colors=colors["ink"])
    axes.set_xlabel("held-out score", color=colors["muted"])
    _legend(figure, series, colors, "bar")
    return figure


_PLOTS: tuple[tuple[str, str, str, Callable[[Table, int, Colors], Any]], ...] = (
    ("ratio", "Speed of {subject} relative to its peers", "lines: 95% interval", ratio_figure),
    ("size", "Time over size", "bands: p20 to p80", size_figure),
    ("threads", "Speed-up over threads", "dashed: linear", threads_figure),
    ("parts", "Breakdown of the time", "medians of the parts", parts_figure),
    ("learning", "Score over steps", "lines: means of the runs, bands: minimum to maximum", learning_figure),
    ("scores", "Score before and after training", "bars: to the mean of the runs, dots: runs", scores_figure),
)
"""Kind, title, note, and function that draws it."""


# --- shared parts ---------------------------------------------------------------------------------------


def _full_cases(table: Table, threads: int) -> list[Mapping[str, Any]]:
    return [case for case in table["cases"] if case["threads"] == threads]


def _series(table: Table) -> dict[str, tuple[str, str]]:
    """Return colour and marker of each provider, the same in all plots of a table; the subject has the accent."""
    providers = dict.fromkeys(row["provider"] for _, row in rows_of(table))
    return {name: (SERIES[i % len(SERIES)], _MARKERS[i % len(_MARKERS)]) for i, name in enumerate(providers)}


def _label(text: str, most: int = 24) -> str:
    text = printable(text)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _new_figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH, height), layout="constrained")


def _set_style(axes: Axes, colors: Colors, grid: str) -> None:
    axes.tick_params(colors=colors["muted"], length=0, pad=6)
    axes.tick_params(which="minor", length=0)
    if grid:
        axes.grid(axis=grid, color=colors["line"], linewidth=1)  # pyright: ignore[reportArgumentType]
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    axes.spines[:].set_visible(False)


_LEGEND_COLUMNS = 4


def _legend_height(entries: int) -> float:
    return 0.26 * -(-entries // _LEGEND_COLUMNS) if entries > 0 else 0.0


def _legend(figure: Figure, series: Mapping[str, tuple[str, str]], colors: Colors, kind: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(color=colors[color]) if kind == "bar" else Line2D([], [], color=colors[color], marker=marker, linewidth=2)
        for color, marker in series.values()
    ]
    figure.legend(
        handles, [_label(name) for name in series], loc="outside upper left", ncols=min(_LEGEND_COLUMNS, len(series)),
        frameon=False, labelcolor=colors["ink"], fontsize=11, handlelength=1.2, columnspacing=1.4, borderaxespad=0.2,
    )  # fmt: skip


def _give_title(figure: Figure, title: str) -> None:
    """Set a title above the legend, for which the layout reserves space."""
    from matplotlib.font_manager import FontProperties

    figure.set_figheight(figure.get_figheight() + 0.35)
    legend = figure.legends[0]
    legend.set_title(title, prop=FontProperties(size=12, weight="bold"))
    legend.get_title().set_color(LIGHT_COLORS["ink"])
    legend.set_alignment("left")


def _ratio_bar(axes: Axes, y: float, against: Ratio, color: str, colors: Colors) -> None:
    axes.barh(y, against.median - 1, left=1, height=0.78, color=color)
    axes.plot([against.low, against.high], [y, y], color=colors["ink"], linewidth=1.3, solid_capstyle="butt")
    is_loss = against.median < 1
    axes.annotate(
        f"{significant(against.median)}×{' ' + against.stars if against.stars else ''}",
        (against.low if is_loss else against.high, y), xytext=(-5 if is_loss else 5, 0), textcoords="offset points",
        ha="right" if is_loss else "left", va="center", fontsize=10.5,
        color=colors["bad"] if against.high < 1 else colors["ink"],
    )  # fmt: skip


def _parts_bar(
    axes: Axes, y: float, widths: Mapping[str, float], series: Mapping[str, tuple[str, str]], colors: Colors
) -> None:
    left, whole = 0.0, sum(widths.values()) or 1.0
    for name, seconds in widths.items():
        width = seconds / whole
        axes.barh(y, width, left=left, height=0.62, color=colors[series[name][0]])
        if width >= 0.055:
            middle = left + width / 2
            axes.text(middle, y, f"{width:.0%}", ha="center", va="center", color=colors["paper"], fontsize=10)
        left += width


def _log_axis(
    axis: Any, low: float, high: float, text: Callable[[float], str], ticks: Sequence[float] | None = None
) -> None:
    from matplotlib.ticker import NullLocator

    axes, side = axis.axes, axis.axis_name
    getattr(axes, f"set_{side}scale")("log")
    getattr(axes, f"set_{side}lim")(low, high)
    ticks = [tick for tick in ticks or _log_ticks(low, high) if low <= tick <= high]
    axis.set_ticks(ticks, [text(tick) for tick in ticks])
    axis.set_minor_locator(NullLocator())


def _log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten, with their multiples by 2 and 5 if at most eight fit; tenths within a narrow range."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**power for power in decades for step in steps]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= 8:
            break
    if len(inside) >= 3:
        return inside
    step = 10.0 ** math.floor(math.log10(high - low)) / 2
    step *= next(factor for factor in (1, 2, 4, 10) if (high - low) / (factor * step) <= 6)
    return [step * k for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _thin_out(values: Sequence[float]) -> list[float]:
    """Thin out ascending values, from the end, to distances of at least a tenth of the logarithmic range."""
    least = math.log(values[-1] / values[0]) / 10
    ticks = [values[-1]]
    for value in reversed(values[:-1]):
        if math.log(ticks[-1] / value) >= least:
            ticks.append(value)
    return ticks


def _count(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g} M"
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _short_duration(seconds: float) -> str:
    number, _, unit = duration(seconds).partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"
