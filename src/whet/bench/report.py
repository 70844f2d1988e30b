"""A benchmark's results for a reader: results.json, report.md, a self-contained report.html, and plots as PNGs.

Page and Markdown are written from one list of blocks, so they say the same. Nothing is left out: losses, and rows that
were not measured, failed, answered wrongly or were refused, stand where the others stand, with the reason.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from whet.bench import reading
from whet.bench.csv_files import rows_as_csv
from whet.bench.document import Block, Figures, Grid, Heading, Pairs, Text, body_html, markdown
from whet.bench.plots import draw, part_medians
from whet.bench.reading import duration, measured, rows_of, significant
from whet.bench.stats import Ratio, summary
from whet.errors import MissingExtraError
from whet.files import replace_text
from whet.report.page import Cell, page

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Json = Mapping[str, Any]

_METHOD = (
    "Correctness comes first. Every provider answers every case once before any clock runs, and its answer is "
    "compared with a reference in float64 or wider; one whose error exceeds its tolerance is shown as wrong and not "
    "timed. Some providers define the same thing differently; each is held to its own definition, never to a loose "
    "tolerance.",
    "In every round each provider has one turn, in random order, on the same pinned processors and with the same "
    "number of threads. A turn starts with calls that are not counted, until threads of the provider before it have "
    "come to rest; then calls are timed in batches long enough for the clock, and the median batch is the turn's one "
    "sample. Medians, 20th and 80th percentiles and n in the tables are over these samples.",
    "A ratio is the median over rounds of the peer's sample over the subject's sample of the same round, so that "
    "whatever slowed a whole round down cancels. Its interval is a 95% percentile bootstrap of the rounds. Three "
    "stars: the interval leaves out 1. Above 1 the subject is faster; below 1 it has lost, and that is shown in red.",
    "Warm cases find their inputs as the call before left them in the caches. Before each call of a cold case, "
    "everything is pushed out of the caches.",
    "The ceilings of the machine are measured in the same run, on the same threads: the fastest that it reads, copies "
    "and scales at each cache level and in memory, and its rate of fused multiply-adds per dtype. GB/s counts each "
    "input read once and each result written once, GFLOP/s a multiply-add as two operations. A row faster than its "
    "ceiling allows is impossible, and refused: it cannot have done the work.",
    "What these samples cannot show is how the same program differs from one start to the next; compare two runs with "
    "whet bench compare before believing a small difference.",
)


def write_report(results: Json, folder: str | os.PathLike[str]) -> Path:
    """Writes results.json, rows.csv, report.md, report.html and the plots into ``folder``, made if it is missing.

    report.html is one file without scripts that loads nothing. report.md shows the PNGs beside it.

    Args:
        results: what ``whet bench`` found, as results.json holds it.
        folder: the report's folder.

    Returns:
        The path of report.html.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    replace_text(target / "results.json", json.dumps(_standard(results)) + "\n")
    replace_text(target / "rows.csv", rows_as_csv(results))
    blocks = list(_blocks(results, target))
    replace_text(target / "report.md", markdown(results["title"], blocks))
    path = target / "report.html"
    replace_text(path, page(results["title"], body_html(blocks)))
    return path


def _standard(value: Any) -> Any:
    """With "Infinity" and "NaN" in place of what JSON has no number for, as in the run logs."""
    if isinstance(value, Mapping):
        return {key: _standard(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_standard(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


# --- the whole ------------------------------------------------------------------------------------------


def _blocks(results: Json, folder: Path) -> Iterator[Block]:
    threads = results["threads"]["asked"]
    yield from _top(results)
    slugs: set[str] = set()
    for table in results["tables"]:
        yield from _table_section(table, threads)
        yield from draw(table, threads, folder, _slug(table["title"], slugs))
    yield Heading("Verification")
    yield Text("The largest error of every provider in every table, beside what its tolerance allows there.", "muted")
    headers = ["table", "provider", "largest error", "allowed", "in case", "cases checked"]
    rows = [row for table in results["tables"] for row in _verification(table, threads)]
    yield Grid(headers, ["", "", "number", "number", "", "number"], rows)
    yield Heading("Method")
    yield from (Text(paragraph) for paragraph in _METHOD)
    yield from _machine_section(results)


def _top(results: Json) -> Iterator[Block]:
    threads, machine = results["threads"]["asked"], results["machine"]
    yield Text(results["summary"], "muted")
    facts = [
        machine["processor"],
        f"{threads} thread{'s' if threads != 1 else ''}",
        results["written"].replace("T", " ").replace("+00:00", " UTC"),
        f"commit {results['commit']}" if results["commit"] else f"Whet {results['versions'].get('whet', '')}",
        f"took {significant(results['elapsed_s'])}\u00a0s",
    ]
    yield Text(" · ".join(facts), "muted")
    if results.get("interrupted"):
        yield Text("The run was interrupted: what follows is what had been measured by then.", "bad")
    if results["quick"]:
        yield Text("A quick run: few rounds, so the intervals are wide, and some cases are left out.", "bad")
    yield from (Text(warning, "bad") for warning in _load_warnings(results))
    figures = {}
    for peer, ratios in reading.peer_ratios(results["tables"], threads).items():
        figures[f"against {peer}: {_score(ratios)}"] = f"{significant(reading.geometric_mean(ratios))}×"
    if figures:
        yield Figures(figures)
        yield Text(
            "How many times as fast as each peer: the geometric mean over the warm rows. A row counts as won or lost "
            "where its 95% interval leaves out 1.",
            "muted",
        )


def _score(ratios: list[Ratio]) -> str:
    won, lost = sum(one.low > 1 for one in ratios), sum(one.high < 1 for one in ratios)
    even = len(ratios) - won - lost
    return f"{won} won, {lost} lost" + (f", {even} even" if even else "")


_NOTICEABLE_CPUS = 0.2


def _load_warnings(results: Json) -> Iterator[str]:
    load, cpus = results["load"]["before"], results["machine"]["cpus"]
    if load and load[0] > 0.5 * cpus:
        yield (
            f"The machine was busy: a load of {load[0]:g} on {cpus} processors before the run. Interleaving keeps the "
            "ratios of single-threaded rows fair, but times, rates and shares of the ceilings may be off."
        )
    others = [case.get("others_cpus") or 0.0 for table in results["tables"] for case in table["cases"]]
    disturbed = sum(one > _NOTICEABLE_CPUS for one in others)
    if disturbed:
        yield (
            f"Other processes kept up to {max(others):.1f} processors busy in {disturbed} of {len(others)} cases. "
            "Threads that wait for each other by spinning, as torch's do, then take up to 1,000 times as long: run "
            "again on a quiet machine before believing a ratio of rows that use several threads."
        )


def _slug(title: str, taken: set[str]) -> str:
    """The title as the beginning of a file name that no other table has."""
    base = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60] or "table"
    slug, number = base, 2
    while slug in taken:
        slug, number = f"{base}-{number}", number + 1
    taken.add(slug)
    return slug


# --- a table --------------------------------------------------------------------------------------------


class _Column(NamedTuple):
    header: str
    kind: str
    cell: Callable[[Json, Json], Any]
    """(case, row) -> what it shows; "" for nothing."""


def _columns(table: Json) -> list[_Column]:
    """What is told of a measured row; a column that is empty for every row is left out."""
    subject = reading.subject_of(table)
    columns = [
        _Column("median", "number", lambda case, row: duration(summary(row["samples_s"]).median)),
        _Column("p20–p80", "number", lambda case, row: duration(*summary(row["samples_s"])[1:3])),
        _Column("n", "number", lambda case, row: str(len(row["samples_s"]))),
        _Column(f"{subject} is k× as fast", "number", _ratio_cell),
        _Column("rate", "number", lambda case, row: reading.rate(row)),
        _Column(f"{table['item'] or 'items'}/s", "number", lambda case, row: reading.items_rate(row)),
        _Column("of the ceiling", "number", lambda case, row: reading.share(row)),
        _Column("max error", "number", lambda case, row: reading.error(row["error"])),
        _Column("CPUs", "number", lambda case, row: "" if row["cpus"] is None else f"{row['cpus']:.1f}"),
        _Column("peak memory", "number", lambda case, row: _peak(row)),
        _Column("document (other machine)", "number", _published_cell),
    ]
    timed = [(case, row) for case, row in rows_of(table) if measured(row)]
    always = columns[:4]
    return [column for column in columns if column in always or any(column.cell(*pair) for pair in timed)]


def _ratio_cell(case: Json, row: Json) -> Cell:
    against = reading.ratio(row, case)
    if against is None:
        return Cell("")
    return Cell(reading.times(against), "bad" if against.high < 1 else "" if against.stars else "muted")


def _published_cell(case: Json, row: Json) -> str:
    seconds = case["published"].get(row["provider"])
    return "" if seconds is None else duration(seconds)


def _peak(row: Json) -> str:
    return "" if row["peak_bytes"] is None else reading.size(row["peak_bytes"])


def _table_section(table: Json, threads: int) -> Iterator[Block]:
    yield Heading(table["title"])
    if table["note"]:
        yield Text(table["note"])
    if table["allocation"]:
        yield Text(f"Allocation: {table['allocation']}.".replace("..", "."), "muted")
    columns = _columns(table)
    rows = []
    for case in table["cases"]:
        for row in case["rows"]:
            label = reading.case_label(case, threads) if row is case["rows"][0] else ""
            rows.append([label, row["provider"], *_cells(case, row, columns)])
    yield Grid(
        ["case", "provider", *(column.header for column in columns)],
        ["", "", *(column.kind for column in columns)],
        rows,
    )
    yield from (Text(note, "muted") for note in _notes(table, threads))
    if any(row["parts"] for _, row in rows_of(table)):
        yield _parts_grid(table, threads)


def _cells(case: Json, row: Json, columns: list[_Column]) -> list[Any]:
    if measured(row):
        return [column.cell(case, row) for column in columns]
    why = reading.why_not(row)
    published = _published_cell(case, row)
    if published:
        why += f" (the document, on another machine: {published})"
    return [Cell(why, _css(row), len(columns))]


def _css(row: Json) -> str:
    """How the reason of a row without a time is set: what was not there is no fault."""
    return "muted" if row["status"] == "absent" else "bad"


def _notes(table: Json, threads: int) -> list[str]:
    """What is particular about providers and cases, and figures of the document for what this suite has no row of."""
    notes = {f"{row['provider']}: {row['note']}": None for _, row in rows_of(table) if row["note"]}
    for case in table["cases"]:
        label = reading.case_label(case, threads)
        if case["note"]:
            notes[f"{label}: {case['note']}"] = None
        if (case.get("others_cpus") or 0.0) > _NOTICEABLE_CPUS:
            notes[f"{label}: other processes kept {case['others_cpus']:.1f} processors busy meanwhile"] = None
        others = set(case["published"]) - {row["provider"] for row in case["rows"]}
        if others:
            given = ", ".join(f"{name} {duration(case['published'][name])}" for name in sorted(others))
            notes[f"{label}: the document, on another machine, also gives {given}"] = None
    return list(notes)


def _parts_grid(table: Json, threads: int) -> Grid:
    """A row per part, a column per row of the table that has parts."""
    columns = {
        f"{reading.case_label(case, threads)} · {row['provider']}": part_medians(row)
        for case, row in rows_of(table)
        if row["parts"]
    }
    names = dict.fromkeys(name for parts in columns.values() for name in parts)
    rows = [[name, *(_part(parts, name) for parts in columns.values())] for name in names]
    return Grid(["part", *columns], ["", *["number"] * len(columns)], rows)


def _part(parts: Mapping[str, float], name: str) -> str:
    whole = sum(parts.values()) or 1.0
    return f"{duration(parts[name])} ({_percent(parts[name] / whole)})" if name in parts else ""


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 or not share else f"{100 * share:.1g}%"


def _verification(table: Json, threads: int) -> Iterator[list[Any]]:
    """Per provider the case in which its error came nearest to what was allowed, or went furthest beyond."""
    title = table["title"]
    for provider in dict.fromkeys(row["provider"] for _, row in rows_of(table)):
        mine = [(case, row) for case, row in rows_of(table) if row["provider"] == provider]
        checked = [(case, row) for case, row in mine if row["error"] is not None]
        if checked:
            case, row = max(checked, key=lambda pair: _excess(pair[1]))
            passed = float(row["error"]) <= float(row["tolerance"])
            error = Cell(reading.error(row["error"]), "" if passed else "bad")
            label = reading.case_label(case, threads)
            yield [title, provider, error, reading.error(row["tolerance"]), label, str(len(checked))]
        else:
            row = mine[0][1]
            yield [title, provider, Cell(reading.why_not(row), _css(row), 4)]
        title = ""


def _excess(row: Json) -> float:
    """The error in tolerances; where none is allowed, the error itself."""
    return float(row["error"]) / (float(row["tolerance"]) or 1.0)


# --- the machine ----------------------------------------------------------------------------------------


def _machine_section(results: Json) -> Iterator[Block]:
    machine, load = results["machine"], results["load"]
    caches = ", ".join(f"{level} {reading.size(n)}" for level, n in machine["caches"].items())
    yield Heading("Machine")
    yield Pairs(
        {
            "processor": machine["processor"],
            "processors used": machine["cpus"],
            "caches": caches + (" (L1 and L2 of one core, L3 in all)" if caches else "not told by the system"),
            "memory": reading.size(machine["memory_bytes"]) if machine["memory_bytes"] else "not told by the system",
            "system": machine["system"],
            "load before": _loads(load["before"]),
            "load after": _loads(load["after"]),
            "commit": results["commit"] or "not in a repository",
            "command": results["command"],
        }
    )
    yield Heading("Ceilings measured in this run")
    yield _ceilings(results["ceilings"])
    yield Heading("Threads, as each library tells")
    yield Pairs({name: _plain(value) for name, value in results["threads"].items()})
    yield Heading("Versions")
    yield Pairs(results["versions"])
    yield Heading("Build")
    yield Pairs({name: _plain(value) for name, value in results["build"].items()})


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _loads(load: list[float]) -> str:
    return " ".join(f"{one:g}" for one in load) + " (1, 5, 15 minutes)" if load else "not told by the system"


def _ceilings(ceilings: Mapping[str, Json]) -> Grid:
    """A row per ceiling, a column per number of threads."""
    counts = sorted(ceilings, key=int)
    rows: dict[str, dict[str, str]] = {}
    for count in counts:
        for kind, rates in ceilings[count].items():
            unit = "GFLOP/s" if kind == "flops" else "GB/s"
            for where, value in rates.items():
                name = f"{where} multiply-add" if kind == "flops" else f"{kind}, {where}"
                rows.setdefault(name, {})[count] = f"{significant(value / 1e9)} {unit}"
    headers = ["", *(f"{count} thread{'s' if count != '1' else ''}" for count in counts)]
    body = [[name, *(figures.get(count, "") for count in counts)] for name, figures in rows.items()]
    return Grid(headers, ["", *["number"] * len(counts)], body)


# --- the terminal ---------------------------------------------------------------------------------------


def _terminal_columns(table: Json) -> list[_Column]:
    """The columns that fit into a terminal, shorter."""
    short = {"of the ceiling": "ceiling", "document (other machine)": "document"}
    left_out = {"p20–p80", "n", "max error", "CPUs"}
    columns = [column for column in _columns(table) if column.header not in left_out]
    if any(column.header == "rate" for column in columns):
        columns = [column for column in columns if not column.header.endswith("/s")]
    return [column._replace(header=short.get(column.header, column.header)) for column in columns]


def rich_table(table: Json) -> RichTable:
    """A table for the terminal: the figures that matter, and below it why rows have none.

    Raises:
        MissingExtraError: rich is not installed.
    """
    try:
        from rich.table import Table as RichTable
        from rich.text import Text as RichText
    except ImportError as error:
        raise MissingExtraError("rich_table", "rich", "train") from error

    styles = {"bad": "red", "muted": "dim"}
    threads = max((case["threads"] for case in table["cases"]), default=1)
    columns = _terminal_columns(table)
    reasons = dict.fromkeys(
        f"{row['provider']}: {reading.why_not(row)}" for _, row in rows_of(table) if not measured(row)
    )
    shown = RichTable(
        title=RichText(table["title"]), title_justify="left", box=None, pad_edge=False,
        caption=RichText("\n".join(reasons)), caption_justify="left",
    )  # fmt: skip
    for header, kind in (("case", ""), ("provider", ""), *((column.header, column.kind) for column in columns)):
        justify, whole = ("right" if kind == "number" else "left"), header not in ("case", "provider", "ceiling")
        shown.add_column(RichText(header), justify=justify, no_wrap=whole)
    for case in table["cases"]:
        for row in case["rows"]:
            label = reading.case_label(case, threads) if row is case["rows"][0] else ""
            cells = _cells(case, row, columns) if measured(row) else [Cell(row["status"], _css(row))]
            cells = [cell if isinstance(cell, Cell) else Cell(cell) for cell in cells]
            texts = [
                RichText(str(cell.text).replace(" bandwidth", ""), style=styles.get(cell.css, "")) for cell in cells
            ]
            shown.add_row(RichText(label), RichText(row["provider"]), *texts)
    return shown
