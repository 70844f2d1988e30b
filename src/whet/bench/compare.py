"""Comparison of two runs of a suite: which changes are significant and which are noise.

The samples of a row measure variance within one process, not between runs of the same program, which differ in memory
layout, clock frequency and other load. An interval is therefore not enough: the whole interval of a change has to
exceed a threshold. If peers with an unchanged version were measured in both runs, they estimate the drift of the
machine, and the change corrected for drift has to exceed the threshold too.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from whet.bench import formatting
from whet.bench.results import is_measured, is_ours, rows_of, status_reason
from whet.bench.stats import Ratio, paired_ratio, summary, unpaired_ratio
from whet.errors import WhetTypeError, WhetValueError
from whet.report.terminal import Cell, terminal_table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

THRESHOLD = 0.1
"""Two runs of the same program differ by 5% or more in some rows, with intervals that exclude 1; rarely by 10%."""

_SCHEMA = 1
_LEAST_CONTROLS = 3
_TONES = {"faster": "good", "same": "muted"}
_Verdict = Literal["slower", "faster", "same", "noise", "appeared", "gone", "broken"]


@dataclass(frozen=True)
class Change:
    """One row in both runs.

    Attributes:
        table: title of the table; with case, provider and threads, the key of the row.
        case: name of the case.
        provider: name of the provider.
        threads: number of threads.
        ours: whether the row is the subject of its case or another variant of Whet; else it is a peer.
        ratio: median time after / before, with its 95% interval; None if one of them has no time.
        verdict: "slower" and "faster": significantly, by more than the threshold. "noise": by more than the threshold,
            but not significantly. "same": neither. "appeared" and "gone": only one run has the row, or a time for it.
            "broken": timed before, but now the answer is wrong, or the row failed or was refused.
        why: the reason if the row has no time in the later run.
    """

    table: str
    case: str
    provider: str
    threads: int
    ours: bool
    ratio: Ratio | None
    verdict: _Verdict
    why: str = ""

    @property
    def name(self) -> str:
        """Name of the row with its threads: "Token KL / 8192 / whet (2 threads)"."""
        return f"{self.table} / {self.case} / {self.provider} ({self.threads} thread{'s' if self.threads != 1 else ''})"


@dataclass(frozen=True)
class Comparison:
    """Result of ``compare``.

    Attributes:
        changes: every row of either run, in the order of the later run.
        drift: time of the controls in the later run / the earlier run; None with fewer than three controls.
        n_controls: number of rows of peers whose version did not change.
        threshold: relative change of a time that counts.
        warnings: differences that make the two runs hard to compare.
    """

    changes: list[Change]
    drift: Ratio | None
    n_controls: int
    threshold: float
    warnings: list[str] = field(default_factory=list)

    @property
    def regressions(self) -> list[Change]:
        """Rows of Whet that became slower, and all rows that broke."""
        return [c for c in self.changes if c.verdict == "broken" or (c.verdict == "slower" and c.ours)]

    @property
    def summary(self) -> list[str]:
        """Lines that summarise the comparison."""
        lines = [*self.warnings, self._drift_line()]
        for whose, ours in (("Whet", True), ("peers", False)):
            counts = Counter(change.verdict for change in self.changes if change.ours == ours)
            if counts:
                lines.append(f"{whose}: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common()))
        for change in self.regressions:
            how = f"{formatting.interval(change.ratio)} the time" if change.ratio else change.why
            lines.append(f"regression: {change.name}: {how}")
        if not self.regressions:
            lines.append(f"no regression beyond {self.threshold:.0%}")
        return lines

    def _drift_line(self) -> str:
        if self.drift is None:
            return (
                f"drift of the machine: unknown with {self.n_controls} rows of unchanged peers; "
                f"{_LEAST_CONTROLS} are needed. Changes are not corrected for drift."
            )
        line = (
            f"drift of the machine: {self.n_controls} rows of unchanged peers took {formatting.interval(self.drift)} "
            "the time"
        )
        if _beyond(self.drift.median, self.threshold):
            return f"{line}. The machine changed by more than the threshold: measure again before you trust this."
        return line


def compare(before: Mapping[str, Any], after: Mapping[str, Any], threshold: float = THRESHOLD) -> Comparison:
    """Compare two runs of one suite.

    With t the threshold, r the ratio of medians after / before with its interval, and d the drift (the median r of the
    controls; 1 with fewer than three controls), a row is

        slower  if low(r) > 1 + t and low(r) / d > 1 + t
        faster  if high(r) < 1 - t and high(r) / d < 1 - t
        noise   if r or r / d is beyond the threshold, but the row is neither slower nor faster
        same    otherwise

    A slower machine therefore causes no regression, and a faster machine cannot hide one completely: the row is then
    "noise" and needs another run. Controls are not corrected, since they measure the drift.

    Args:
        before: results of the run before the change, from ``load_results``.
        after: results of the run after the change.
        threshold: 0.1 is ten percent.

    Raises:
        WhetValueError: the runs are of different suites.
    """
    if before["suite"] != after["suite"]:
        raise WhetValueError(
            f"compare: before is of the suite {before['suite']!r} and after of {after['suite']!r}. "
            "Compare two runs of the same suite."
        )
    old, new = dict(_rows(before)), dict(_rows(after))
    packages = [name for name, version in after["versions"].items() if before["versions"].get(name) == version]
    controls = {
        key
        for key in new
        if key in old and not new[key]["ours"] and _belongs_to(key[2], packages)
        and is_measured(old[key]) and is_measured(new[key])
    }  # fmt: skip
    drift = None
    if len(controls) >= _LEAST_CONTROLS:
        medians = [[summary(run[key]["samples_s"]).median for key in sorted(controls)] for run in (new, old)]
        drift = paired_ratio(*medians)
    changes = []
    for key in [*new, *(key for key in old if key not in new)]:
        known_drift = drift.median if drift and key not in controls else 1.0
        changes.append(_change(key, old.get(key), new.get(key), threshold, known_drift))
    return Comparison(changes, drift, len(controls), threshold, _warnings(before, after))


def load_results(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Load results.json of a run from its folder or from the file.

    Raises:
        WhetValueError: there is no such file, or it is not a results.json of this version.
    """
    file = Path(path)
    file = file / "results.json" if file.is_dir() else file
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise WhetValueError(f"load_results: {file} cannot be read: {error.strerror}. Pass a run's folder.") from error
    except ValueError as error:
        raise WhetValueError(f"load_results: {file} is not JSON: {error}. Pass a run's results.json.") from error
    schema = results.get("schema") if isinstance(results, dict) else None
    if schema != _SCHEMA:
        raise WhetValueError(
            f"load_results: {file} has schema {schema!r}, expected {_SCHEMA}. Pass results.json of whet bench."
        )
    try:
        _check(results)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise WhetValueError(
            f"load_results: {file} is incomplete: {type(error).__name__}: {error}. Run the suite again."
        ) from error
    return results


def as_table(comparison: Comparison) -> RichTable:
    """Format the changes for the terminal: a line per row, regressions in red.

    Raises:
        MissingExtraError: rich is not installed.
    """
    headers = ("table", "case", "provider", "threads", "after / before", "verdict")
    rows = []
    for change in comparison.changes:
        tone = "bad" if change in comparison.regressions else _TONES.get(change.verdict, "")
        ratio = formatting.interval(change.ratio) if change.ratio else ""
        verdict = f"{change.verdict}: {change.why}" if change.why else change.verdict
        values = (change.table, change.case, change.provider, str(change.threads), ratio, verdict)
        rows.append([Cell(value, tone) for value in values])
    return terminal_table("as_table", headers, [header in ("threads", "after / before") for header in headers], rows)


# --- verdicts -------------------------------------------------------------------------------------------

_Key = tuple[str, str, str, int, str]
"""Table, case, provider, threads, cache."""


def _rows(results: Mapping[str, Any]) -> Iterator[tuple[_Key, dict[str, Any]]]:
    for table in results["tables"]:
        for case, row in rows_of(table):
            key = (table["title"], case["name"], row["provider"], case["threads"], case["cache"])
            yield key, {**row, "ours": is_ours(row, case)}


def _change(
    key: _Key, old: dict[str, Any] | None, new: dict[str, Any] | None, threshold: float, drift: float
) -> Change:
    table, case, provider, threads, _ = key
    ratio, verdict = None, "same"
    if old is None or new is None:
        verdict = "appeared" if old is None else "gone"
    elif is_measured(old) and is_measured(new):
        ratio = unpaired_ratio(new["samples_s"], old["samples_s"])
        verdict = _judge(ratio, threshold, drift)
    elif is_measured(old):
        verdict = "gone" if new["status"] == "absent" else "broken"
    elif is_measured(new):
        verdict = "appeared"
    why = "" if new is None or is_measured(new) else status_reason(new)
    ours = any(row["ours"] for row in (old, new) if row is not None)
    return Change(table, case, provider, threads, ours, ratio, verdict, why)


def _judge(ratio: Ratio, threshold: float, drift: float) -> _Verdict:
    if min(ratio.low, ratio.low / drift) > 1 + threshold:
        return "slower"
    if max(ratio.high, ratio.high / drift) < 1 - threshold:
        return "faster"
    moved = _beyond(ratio.median, threshold) or _beyond(ratio.median / drift, threshold)
    return "noise" if moved else "same"


def _beyond(ratio: float, threshold: float) -> bool:
    return not 1 - threshold <= ratio <= 1 + threshold


def _belongs_to(provider: str, packages: Sequence[str]) -> bool:
    """Whether the provider's first word names one of the packages: "rlox (loop)", "NumPy", "llama.cpp"."""
    name = _letters(provider.split(" ")[0])
    return any(_letters(package) in (name, f"{name}python") for package in packages)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


# --- warnings and checks --------------------------------------------------------------------------------


def _warnings(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """List differences of machine, settings, load and versions between the runs."""
    found = []
    for what, pick in (
        ("device", lambda run: run["machine"].get("device", "")),
        ("processor", lambda run: run["machine"]["processor"]),
        ("number of processors", lambda run: run["machine"]["cpus"]),
        ("threads", lambda run: run["threads"]["asked"]),
        ("quick", lambda run: run["quick"]),
    ):
        old, new = pick(before), pick(after)
        if old != new:
            found.append(f"warning: the runs differ: {what} was {old} and is {new}")
    for name, run in (("before", before), ("after", after)):
        load, cpus = run["load"]["before"], run["machine"]["cpus"]
        if load and load[0] > 0.5 * cpus:
            found.append(f"warning: the machine was busy in the run {name}: a load of {load[0]:g} on {cpus} processors")
    changed = [
        f"{package} {before['versions'].get(package, 'absent')} to {after['versions'].get(package, 'absent')}"
        for package in dict.fromkeys((*before["versions"], *after["versions"]))
        if before["versions"].get(package) != after["versions"].get(package)
    ]
    return found + ([f"versions changed: {', '.join(changed)}"] if changed else [])


def _check(results: Mapping[str, Any]) -> None:
    """Read every field that ``compare`` needs, so that a missing one is reported with the file's name."""
    _warnings(results, results)
    if not isinstance(results["suite"], str):
        raise WhetTypeError(f"suite is {results['suite']!r}, expected a name")
    for key, row in _rows(results):
        hash(key)
        status_reason(row)
        if is_measured(row) and not all(sample > 0 for sample in row["samples_s"]):
            raise WhetValueError(f"{' / '.join(map(str, key[:3]))} has samples that are not positive times")
