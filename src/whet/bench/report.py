"""Reports of benchmarks: results.json, report.md, a self-contained report.html, and plots as PNGs.

The report is written in Markdown and rendered to HTML. It is complete: losses, and rows that were not measured, failed,
gave a wrong answer or were refused, are in the tables, with the reasons below.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from whet.bench import formatting
from whet.bench.formatting import duration, significant
from whet.bench.markdown import escape, markdown_table, span
from whet.bench.plots import draw
from whet.bench.results import (
    case_label,
    geometric_mean,
    is_measured,
    part_medians,
    peer_ratios,
    rows_as_csv,
    rows_of,
    status_reason,
    subject_of,
    subject_ratio,
)
from whet.bench.stats import Ratio, summary
from whet.files import replace_text
from whet.memory import PARTS
from whet.report.page import markdown_page
from whet.report.terminal import Cell, terminal_table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Json = Mapping[str, Any]

_METHOD = (
    "Correctness: every provider answers every case once before anything is timed, and its answer is compared with a "
    "reference in float64 or wider. A provider whose error exceeds its tolerance is listed as wrong and not timed. A "
    "provider with a different definition is compared with that definition, not by a looser tolerance.",
    "Timing: in every round each provider has one turn, in random order, on the same pinned processors and with the "
    "same number of threads. A turn waits for threads of the previous provider to stop spinning and makes warm-up "
    "calls; then calls are timed in batches long enough for the clock's resolution, and the median batch is the turn's "
    "sample. Medians, 20th and 80th percentiles and n in the tables are over these samples.",
    "Ratios: a ratio is the median over rounds of the peer's sample / the subject's sample of the same round, so that "
    "slowdowns of a whole round cancel. Its interval is a 95% percentile bootstrap of the rounds. Three stars: the "
    "interval excludes 1. Above 1 the subject is faster; below 1 it is slower, shown in red.",
    "Caches: inputs of warm cases were used by the previous call. The caches are evicted before each call of a cold "
    "case.",
    "Ceilings: measured in the same run on the same threads: the highest rates of reading, copying and scaling at each "
    "cache level and in memory, and of fused multiply-adds per dtype. GB/s counts each input read once and each result "
    "written once; GFLOP/s counts a multiply-add as two operations. A row faster than its ceiling is refused: it "
    "cannot have done the work.",
    "Limits: these samples do not measure the variance between runs of a program; compare two runs with whet bench "
    "compare before you trust a small difference.",
)


def write_report(results: Json, folder: str | os.PathLike[str]) -> Path:
    """Write results.json, rows.csv, report.md, report.html and the plots into ``folder``.

    report.html is one file without scripts or external resources. report.md embeds the PNGs in the same folder.

    Args:
        results: the results that ``run_suite`` returns and results.json contains.
        folder: the report's folder, created if missing.

    Returns:
        The path of report.html.

    Raises:
        MissingExtraError: matplotlib or markdown-it-py is not installed.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    replace_text(target / "results.json", json.dumps(_as_json(results)) + "\n")
    replace_text(target / "rows.csv", rows_as_csv(results))
    charts: dict[str, str] = {}
    text = "\n\n".join(_paragraphs(results, target, charts)) + "\n"
    replace_text(target / "report.md", f"# {escape(results['title'])}\n\n{text}")
    path = target / "report.html"
    replace_text(path, markdown_page(results["title"], text, charts))
    return path


def _as_json(value: Any) -> Any:
    """Replace non-finite floats, which JSON does not have, by the strings "Infinity" and "NaN", as in run logs."""
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


# --- the whole ------------------------------------------------------------------------------------------


def _paragraphs(results: Json, folder: Path, svgs: dict[str, str]) -> Iterator[str]:
    """Yield the report below its title, in Markdown; store the SVG of every plot in ``svgs`` by the name of its PNG."""
    threads = results["threads"]["asked"]
    yield from _top(results)
    slugs: set[str] = set()
    for table in results["tables"]:
        yield from _table_section(table, threads)
        charts = list(draw(table, threads, folder, _slug(table["title"], slugs)))
        svgs.update({chart.png: chart.svg for chart in charts})
        if charts:
            yield "\n".join(f"![{escape(chart.title)} ({escape(chart.note)})]({chart.png})" for chart in charts)
    yield "## Verification"
    yield span("Largest error of every provider in every table, with its tolerance in that case.", "muted")
    headers = ["table", "provider", "largest error", "allowed", "in case", "cases checked"]
    body = [row for table in results["tables"] for row in _verification(table, threads)]
    yield markdown_table(headers, [False, False, True, True, False, True], body)
    yield "## Method"
    yield from map(escape, _METHOD)
    yield from _machine_section(results)


def _top(results: Json) -> Iterator[str]:
    threads, machine = results["threads"]["asked"], results["machine"]
    yield span(results["summary"], "muted")
    facts = [
        machine["device"] or machine["processor"],
        *([] if machine["device"] else [f"{threads} thread{'s' if threads != 1 else ''}"]),
        results["written"].replace("T", " ").replace("+00:00", " UTC"),
        f"commit {results['commit']}" if results["commit"] else f"Whet {results['versions'].get('whet', '')}",
        f"took {significant(results['elapsed_s'])} s",
    ]
    yield span(" · ".join(facts), "muted")
    if results.get("interrupted"):
        yield span("The run was interrupted: only cases that were measured by then are listed.", "bad")
    if results["quick"]:
        yield span("Quick run: few rounds, so the intervals are wide, and some cases are omitted.", "bad")
    yield from (span(warning, "bad") for warning in _load_warnings(results))
    figures = [
        f"- **{significant(geometric_mean(ratios))}×** against {escape(peer)}: {_score(ratios)}"
        for peer, ratios in peer_ratios(results["tables"], threads).items()
    ]
    if figures:
        yield "\n".join(figures)
        yield span(
            "Speed relative to each peer: geometric mean over the warm rows. A row counts as won or lost if its 95% "
            "interval excludes 1.",
            "muted",
        )


def _score(ratios: list[Ratio]) -> str:
    won, lost = sum(ratio.low > 1 for ratio in ratios), sum(ratio.high < 1 for ratio in ratios)
    even = len(ratios) - won - lost
    return f"{won} won, {lost} lost" + (f", {even} even" if even else "")


_NOTICEABLE_CPUS = 0.2


def _load_warnings(results: Json) -> Iterator[str]:
    load, cpus = results["load"]["before"], results["machine"]["cpus"]
    if load and load[0] > 0.5 * cpus:
        yield (
            f"The machine was busy: load {load[0]:g} on {cpus} processors before the run. Ratios of single-threaded "
            "rows are still fair because turns are interleaved; times, rates and shares of the ceilings may be off."
        )
    others = [case.get("others_cpus") or 0.0 for table in results["tables"] for case in table["cases"]]
    disturbed = sum(n_cpus > _NOTICEABLE_CPUS for n_cpus in others)
    if disturbed:
        yield (
            f"Other processes used up to {max(others):.1f} processors in {disturbed} of {len(others)} cases. "
            "Spinning barriers, as in torch, then take up to 1,000 times as long: run again on a quiet machine before "
            "you trust ratios of multi-threaded rows."
        )


def _slug(title: str, taken: set[str]) -> str:
    """Make a unique file name prefix from a table's title."""
    base = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60] or "table"
    slug, number = base, 2
    while slug in taken:
        slug, number = f"{base}-{number}", number + 1
    taken.add(slug)
    return slug


# --- a table --------------------------------------------------------------------------------------------


class _Column(NamedTuple):
    header: str
    cell: Callable[[Json, Json], str | Cell]
    """(case, measured row) -> text of the cell; "" if empty."""


_PUBLISHED = "published (other machine)"


def _columns(table: Json) -> list[_Column]:
    """Return the columns after case and provider, all numeric, except those that are empty in every row."""
    columns = [
        _Column("median", lambda case, row: duration(summary(row["samples_s"]).median)),
        _Column("p20–p80", lambda case, row: duration(*summary(row["samples_s"])[1:3])),
        _Column("n", lambda case, row: str(len(row["samples_s"]))),
        _Column(f"{subject_of(table)} is k× as fast", _ratio_cell),
        _Column("rate", lambda case, row: formatting.rate(row)),
        _Column(f"{table['item'] or 'items'}/s", lambda case, row: formatting.items_rate(row)),
        _Column("of the ceiling", lambda case, row: formatting.share(row)),
        _Column("max error", lambda case, row: formatting.error(row["error"])),
        _Column("CPUs", lambda case, row: "" if row["cpus"] is None else f"{row['cpus']:.1f}"),
        _Column("peak memory", _peak_cell),
        _Column("to the first step", _start_cell),
        _Column("score", _score_cell),
        _Column(_PUBLISHED, _published_cell),
    ]
    always = columns[: 4 if any(len(case["rows"]) > 1 for case in table["cases"]) else 3]
    return [column for column in columns if column in always or any(_cell(column, *pair) for pair in rows_of(table))]


def _ratio_cell(case: Json, row: Json) -> str | Cell:
    against = subject_ratio(row, case)
    if against is None:
        return ""
    return Cell(formatting.times(against), "bad" if against.high < 1 else "" if against.stars else "muted")


def _peak_cell(case: Json, row: Json) -> str:
    return "" if row["peak_bytes"] is None else formatting.size(row["peak_bytes"])


def _start_cell(case: Json, row: Json) -> str:
    return "" if row["start_s"] is None else duration(row["start_s"])


def _score_cell(case: Json, row: Json) -> str:
    """Format the scores before and after training; of several runs the means, and the range after training."""
    if row["scores"]:
        first, last = (statistics.mean(scores) for scores in zip(*row["scores"], strict=True))
        after = [score for _, score in row["scores"]]
        return f"{first:.3f} → {last:.3f}" + (f" ({min(after):.3f}–{max(after):.3f})" if len(after) > 1 else "")
    if not row["curve"]:
        return ""
    (_, first), (_, last) = row["curve"][0], row["curve"][-1]
    return f"{first:.3f} → {last:.3f}"


def _published_cell(case: Json, row: Json) -> str:
    seconds = case["published"].get(row["provider"])
    return "" if seconds is None else duration(seconds)


def _cell(column: _Column, case: Json, row: Json) -> str | Cell:
    """Format a cell; a row without a time has only its status, in the median column, and its published time."""
    if is_measured(row) or column.header == _PUBLISHED:
        return column.cell(case, row)
    return _status(row) if column.header == "median" else ""


def _status(row: Json) -> Cell:
    """Status of a row without a time, muted if the provider is only absent."""
    return Cell(row["status"], "muted" if row["status"] == "absent" else "bad")


def _table_section(table: Json, threads: int) -> Iterator[str]:
    yield f"## {escape(table['title'])}"
    if table["note"]:
        yield escape(table["note"])
    if table["allocation"]:
        yield span(f"Allocation: {table['allocation']}.".replace("..", "."), "muted")
    columns = _columns(table)
    headers, body = _grid(table, columns, threads)
    yield markdown_table(headers, [False, False, *[True] * len(columns)], body)
    yield from (span(reason, tone) for reason, tone in _reasons(table, threads))
    yield from (span(note, "muted") for note in _notes(table, threads))
    if any(row["parts"] for _, row in rows_of(table)):
        yield _parts_table(table, threads)
    if any(row["memory"] for _, row in rows_of(table)):
        yield span("Memory of the process by owner at its peak step, as reported by Whet.", "muted")
        yield _memory_table(table, threads)


def _grid(table: Json, columns: list[_Column], threads: int) -> tuple[list[str], list[list[str | Cell]]]:
    """Build headers and rows of a table; a case is named only in its first row."""
    body = []
    for case, row in rows_of(table):
        label = case_label(case, threads) if row is case["rows"][0] else ""
        body.append([label, row["provider"], *(_cell(column, case, row) for column in columns)])
    return ["case", "provider", *(column.header for column in columns)], body


def _reasons(table: Json, threads: int) -> Iterator[Cell]:
    """Yield the distinct reasons of rows without a time, with their cases unless they apply to all cases."""
    found: dict[Cell, list[str]] = {}
    for case, row in rows_of(table):
        if not is_measured(row):
            reason = Cell(f"{row['provider']}: {status_reason(row)}", _status(row).tone)
            found.setdefault(reason, []).append(case_label(case, threads))
    for reason, labels in found.items():
        cases = f"{', '.join(labels)}: " if len(labels) < len(table["cases"]) else ""
        yield Cell(cases + reason.text, reason.tone)


def _notes(table: Json, threads: int) -> list[str]:
    """List notes of providers and cases, and published figures without a row in this suite."""
    notes = {f"{row['provider']}: {row['note']}": None for _, row in rows_of(table) if row["note"]}
    for case in table["cases"]:
        label = case_label(case, threads)
        if case["note"]:
            notes[f"{label}: {case['note']}"] = None
        if (case.get("others_cpus") or 0.0) > _NOTICEABLE_CPUS:
            notes[f"{label}: other processes used {case['others_cpus']:.1f} processors during this case"] = None
        others = set(case["published"]) - {row["provider"] for row in case["rows"]}
        if others:
            given = ", ".join(f"{name} {duration(case['published'][name])}" for name in sorted(others))
            notes[f"{label}: also published, from another machine: {given}"] = None
    return list(notes)


def _parts_table(table: Json, threads: int) -> str:
    """Format the parts' times: a row per part, a column per row of the table that has parts."""
    columns = {
        f"{case_label(case, threads)} · {row['provider']}": part_medians(row)
        for case, row in rows_of(table)
        if row["parts"]
    }
    names = dict.fromkeys(name for parts in columns.values() for name in parts)
    body = [[name, *(_part(parts, name) for parts in columns.values())] for name in names]
    return markdown_table(["part", *columns], [False, *[True] * len(columns)], body)


def _memory_table(table: Json, threads: int) -> str:
    """Format memory by owner: a row per part, a column per row of the table whose memory is known."""
    columns = {
        f"{case_label(case, threads)} · {row['provider']}": row["memory"]
        for case, row in rows_of(table)
        if row["memory"]
    }
    names = [name for name in PARTS if any(name in memory for memory in columns.values())]
    body = [[PARTS[n], *(formatting.size(m[n]) if n in m else "" for m in columns.values())] for n in names]
    body.append(["total", *(formatting.size(sum(memory.values())) for memory in columns.values())])
    return markdown_table(["memory", *columns], [False, *[True] * len(columns)], body)


def _part(parts: Mapping[str, float], name: str) -> str:
    whole = sum(parts.values()) or 1.0
    return f"{duration(parts[name])} ({_percent(parts[name] / whole)})" if name in parts else ""


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 or not share else f"{100 * share:.1g}%"


def _verification(table: Json, threads: int) -> Iterator[list[Any]]:
    """Yield for each provider the case with the largest error relative to its tolerance."""
    title = table["title"]
    for provider in dict.fromkeys(row["provider"] for _, row in rows_of(table)):
        own = [(case, row) for case, row in rows_of(table) if row["provider"] == provider]
        checked = [(case, row) for case, row in own if row["error"] is not None]
        if checked:
            case, row = max(checked, key=lambda pair: _excess(pair[1]))
            passed = float(row["error"]) <= float(row["tolerance"])
            error = Cell(formatting.error(row["error"]), "" if passed else "bad")
            label = case_label(case, threads)
            yield [title, provider, error, formatting.error(row["tolerance"]), label, str(len(checked))]
        else:
            yield [title, provider, _status(own[0][1]), "", "", "0"]
        title = ""


def _excess(row: Json) -> float:
    """Return error / tolerance, or the error if the tolerance is 0."""
    return float(row["error"]) / (float(row["tolerance"]) or 1.0)


# --- the machine ----------------------------------------------------------------------------------------


def _machine_section(results: Json) -> Iterator[str]:
    machine, load = results["machine"], results["load"]
    caches = ", ".join(f"{level} {formatting.size(n)}" for level, n in machine["caches"].items())
    yield "## Machine"
    yield _pairs_table(
        {
            **({"device": machine["device"]} if machine["device"] else {}),
            "processor": machine["processor"],
            "processors used": machine["cpus"],
            "caches": caches + (" (L1 and L2 per core, L3 in total)" if caches else "not reported"),
            "memory": formatting.size(machine["memory_bytes"]) if machine["memory_bytes"] else "not reported",
            "system": machine["system"],
            "load before": _loads(load["before"]),
            "load after": _loads(load["after"]),
            "commit": results["commit"] or "not in a repository",
            "command": results["command"],
        }
    )
    yield "## Ceilings measured in this run"
    yield _ceilings(results["ceilings"])
    yield "## Threads, as each library reports them"
    yield _pairs_table({name: _plain(value) for name, value in results["threads"].items()})
    yield "## Versions"
    yield _pairs_table(results["versions"])
    yield "## Build"
    yield _pairs_table({name: _plain(value) for name, value in results["build"].items()})


def _pairs_table(pairs: Mapping[str, Any]) -> str:
    return markdown_table(["", ""], [False, False], list(pairs.items()))


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _loads(load: list[float]) -> str:
    return " ".join(f"{average:g}" for average in load) + " (1, 5, 15 minutes)" if load else "not reported"


def _ceilings(ceilings: Mapping[str, Json]) -> str:
    """Format the ceilings: a row per ceiling, a column per number of threads."""
    counts = sorted(ceilings, key=int)
    found: dict[str, dict[str, str]] = {}
    for count in counts:
        for kind, rates in ceilings[count].items():
            unit = "GFLOP/s" if kind == "flops" else "GB/s"
            for level, value in rates.items():
                name = f"{level} multiply-add" if kind == "flops" else f"{kind}, {level}"
                found.setdefault(name, {})[count] = f"{significant(value / 1e9)} {unit}"
    headers = ["ceiling", *(f"{count} thread{'s' if count != '1' else ''}" for count in counts)]
    body = [[name, *(figures.get(count, "") for count in counts)] for name, figures in found.items()]
    return markdown_table(headers, [False, *[True] * len(counts)], body)


# --- the terminal ---------------------------------------------------------------------------------------


def _terminal_columns(table: Json) -> list[_Column]:
    """Return the columns that fit into a terminal, with shorter headers."""
    short = {"of the ceiling": "ceiling", _PUBLISHED: "published"}
    omitted = {"p20–p80", "n", "max error", "CPUs"}
    columns = [column for column in _columns(table) if column.header not in omitted]
    if any(column.header == "rate" for column in columns):
        columns = [column for column in columns if not column.header.endswith("/s")]
    return [column._replace(header=short.get(column.header, column.header)) for column in columns]


def rich_table(table: Json) -> RichTable:
    """Format a table for the terminal, with the reasons of rows without a time below.

    Raises:
        MissingExtraError: rich is not installed.
    """
    threads = max((case["threads"] for case in table["cases"]), default=1)
    columns = _terminal_columns(table)
    headers, body = _grid(table, columns, threads)
    rows = [[_without_bandwidth(cell) for cell in row] for row in body]
    numeric = [False, False, *(column.header != "ceiling" for column in columns)]
    reasons = "\n".join(reason.text for reason in _reasons(table, threads))
    return terminal_table("rich_table", headers, numeric, rows, title=table["title"], caption=reasons)


def _without_bandwidth(value: Any) -> Cell:
    cell = value if isinstance(value, Cell) else Cell(value)
    return cell._replace(text=cell.text.replace(" bandwidth", ""))
