"""The changes between two runs of a suite, and which of them are noise.

A row's samples show how one process scatters, not how the same program differs from one start to the next: where its
memory lies, what clock the processor keeps, who else uses the machine. So an interval is not enough. A change
has to be larger than a threshold, with its whole interval; and where peers whose version did not change were measured
in both runs, they show how far the machine itself drifted, and corrected for that the change has to be as large.
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
from whet.bench.results import is_measured, is_ours, rows_of, why_not
from whet.bench.stats import Ratio, paired_ratio, summary, unpaired_ratio
from whet.errors import WhetTypeError, WhetValueError
from whet.report.terminal import Cell, terminal_table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

THRESHOLD = 0.1
"""Two runs of the same program differ by 5% and more in some rows, with intervals that leave out 1; rarely by 10%."""

_SCHEMA = 1
_LEAST_CONTROLS = 3
_TONES = {"faster": "good", "same": "muted"}
_Verdict = Literal["slower", "faster", "same", "noise", "appeared", "gone", "broken"]


@dataclass(frozen=True)
class Change:
    """One row in both runs.

    Attributes:
        table, case, provider, threads: which row.
        ours: it is the subject of its case or another way through Whet; else it is a peer.
        ratio: median time after / before, with its 95% interval; None where one of them has no time.
        verdict: "slower" and "faster": by more than the threshold, surely. "noise": by more, but not surely. "same":
            neither. "appeared" and "gone": only one run has the row, or a time for it. "broken": timed before, and now
            its answer is wrong, it failed, or it was refused.
        why: the reason of a row that has no time now.
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
        """ "Token KL / 8192 / whet", with the threads."""
        return f"{self.table} / {self.case} / {self.provider} ({self.threads} thread{'s' if self.threads != 1 else ''})"


@dataclass(frozen=True)
class Comparison:
    """The result of ``compare``.

    Attributes:
        changes: every row of either run, in the order of the later one.
        drift: how many times as long the controls took in the later run; None with fewer than three of them.
        n_controls: rows of peers whose version did not change.
        threshold: the share by which a time has to change.
        warnings: what makes the two runs hard to compare.
    """

    changes: list[Change]
    drift: Ratio | None
    n_controls: int
    threshold: float
    warnings: list[str] = field(default_factory=list)

    @property
    def regressions(self) -> list[Change]:
        """Whet's rows that became slower, and rows of anybody that broke."""
        return [c for c in self.changes if c.verdict == "broken" or (c.verdict == "slower" and c.ours)]

    @property
    def summary(self) -> list[str]:
        """The comparison in a few lines."""
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
                f"drift of the machine: not known from {self.n_controls} rows of unchanged peers; "
                f"{_LEAST_CONTROLS} are needed. Changes are judged as they are."
            )
        line = (
            f"drift of the machine: {self.n_controls} rows of unchanged peers took {formatting.interval(self.drift)} "
            "the time"
        )
        if _beyond(self.drift.median, self.threshold):
            return (
                f"{line}. The machine itself changed by more than the threshold: measure again before believing this."
            )
        return line


def compare(before: Mapping[str, Any], after: Mapping[str, Any], threshold: float = THRESHOLD) -> Comparison:
    """Compare two runs of one suite.

    With t the threshold, r the ratio of medians after / before with its interval, and d the drift (the median over
    controls of their r, and 1 with fewer than three controls), a row is

        slower  if low(r) > 1 + t and low(r) / d > 1 + t
        faster  if high(r) < 1 - t and high(r) / d < 1 - t
        noise   if r or r / d is beyond the threshold, and it is neither of them
        same    otherwise

    So a machine that became slower makes no regression, and one that became faster does not hide a whole one: the row
    is then "noise", which asks for another run. A control is judged as it is, since it measures the drift itself.

    Args:
        before: what ``load_results`` read from the run before the change.
        after: from the run after it.
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
        if key in old and not new[key]["ours"] and _is_named_after(key[2], packages)
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
    """The results that a run left in a folder, or in a file.

    Raises:
        WhetValueError: there is no such file, or it is no results.json of this version.
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
            f"load_results: {file} has the schema {schema!r}, expected {_SCHEMA}. Pass results.json of whet bench."
        )
    try:
        _check(results)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise WhetValueError(
            f"load_results: {file} is not a whole result: {type(error).__name__}: {error}. Run the suite again."
        ) from error
    return results


def as_table(comparison: Comparison) -> RichTable:
    """The changes for the terminal: a line per row, the regressions in red.

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


# --- how a row is judged --------------------------------------------------------------------------------

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
    why = "" if new is None or is_measured(new) else why_not(new)
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


def _is_named_after(provider: str, packages: Sequence[str]) -> bool:
    """Whether the provider's first word is one of the packages: "rlox (loop)", "NumPy", "llama.cpp"."""
    name = _letters(provider.split(" ")[0])
    return any(_letters(package) in (name, f"{name}python") for package in packages)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


# --- warnings and checks --------------------------------------------------------------------------------


def _warnings(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """How the runs differ other than by what they measured."""
    found = []
    for what, pick in (
        ("processor", lambda run: run["machine"]["processor"]),
        ("number of processors", lambda run: run["machine"]["cpus"]),
        ("threads", lambda run: run["threads"]["asked"]),
        ("quick", lambda run: run["quick"]),
    ):
        old, new = pick(before), pick(after)
        if old != new:
            found.append(f"warning: the runs are not alike: {what} was {old} and is {new}")
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
    """Touches all that ``compare`` needs, so that what is missing shows here, with the file's name."""
    _warnings(results, results)
    if not isinstance(results["suite"], str):
        raise WhetTypeError(f"suite is {results['suite']!r}, expected a name")
    for key, row in _rows(results):
        hash(key)
        why_not(row)
        if is_measured(row) and not all(sample > 0 for sample in row["samples_s"]):
            raise WhetValueError(f"{' / '.join(map(str, key[:3]))} has samples that are no times")
