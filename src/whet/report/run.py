"""Reports of training runs as HTML pages, made from the files of a run with the parts in ``whet.report.page``."""

from __future__ import annotations

import json
import os
import re
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from whet import __version__
from whet.data.messages import is_messages
from whet.errors import WhetValueError
from whet.files import replace_text
from whet.memory import PARTS
from whet.report.episodes import episode_sections, message_text
from whet.report.page import (
    Point,
    escape_html,
    format_ends,
    headline_row,
    line_chart,
    page,
    pairs_table,
    smoothing_window,
    standalone_svg,
    table,
    versions,
)

_CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("mean_reward", "reward")),
    ("Accuracy", ("eval/accuracy", "accuracy", "rewards/accuracies")),
    ("Margin of rewards", ("eval/rewards/margins", "rewards/margins", "eval/margin", "margin")),
    ("KL to the reference", ("mean_kl", "kl")),
    ("Entropy", ("entropy",)),
    ("Completion length (tokens)", ("completions/mean_length",)),
    ("Loss", ("loss",)),
)
"""Charts of a run: title, and possible names of the metric. Other evaluations follow, and with several tasks or reward
functions the mean of each."""


def write_report(
    run_dir: str | os.PathLike[str],
    *,
    title: str,
    summary: str = "",
    headline: Mapping[str, str] | None = None,
    samples_before: Sequence[Mapping[str, Any]] = (),
    samples_after: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write ``run_dir/report.html`` from a run's files, and its main curve as ``curve.svg``.

    Reads ``metrics.jsonl`` (of ``JSONLLogger``) and, if they exist, ``config.toml`` or ``config.json``, ``memory.json``
    and ``completions.jsonl`` (its first and last step).

    Args:
        run_dir: the run's folder.
        title: the page's heading.
        summary: a sentence below the title.
        headline: large figures, label -> text, "held-out accuracy" -> "34.5% → 91.0%". None: the first and last values
            of evaluations and reward.
        samples_before: rows with prompt, completion and reward from before training.
        samples_after: rows from after training; rows with the same prompt are shown side by side.

    Returns:
        The path of the page.

    Raises:
        WhetValueError: metrics.jsonl is missing or has no metrics, or a file cannot be parsed.
        MissingExtraError: matplotlib is not installed.
    """
    folder = Path(run_dir)
    curves = _curves(_read_rows(folder / "metrics.jsonl"))
    if not curves:
        raise WhetValueError(f"write_report: {folder / 'metrics.jsonl'} has no metrics. Log the run with JSONLLogger.")
    figures = _headline(curves) if headline is None else headline
    body = [
        f'<p class="muted">{escape_html(summary)}</p>' if summary else "",
        headline_row(figures) if figures else "",
    ]
    note = "Thin lines are single steps. Thick lines, and the figures next to the titles, are moving means."
    noisy = any(smoothing_window(points) > 1 for points in curves.values())
    charts = _charts(curves)
    body += [
        "<h2>Curves</h2>",
        f'<p class="note">{note}</p>' if noisy else "",
        f'<div class="charts">{"".join(charts)}</div>',
    ]
    if samples_before or samples_after:
        body += ["<h2>Samples before and after</h2>", _before_and_after(samples_before, samples_after)]
    if (folder / "completions.jsonl").exists():
        rows = _read_rows(folder / "completions.jsonl")
        has_episodes = any("end" in row for row in rows)
        body.append(episode_sections(rows, _shorten) if has_episodes else _training_samples(rows))
    if (folder / "memory.json").exists():
        body += ["<h2>Peak memory</h2>", _memory(_read_json(folder / "memory.json"))]
    if config := _read_config(folder):
        body += ["<h2>Configuration</h2>", _configuration(config)]
    body += ["<h2>Versions</h2>", pairs_table(versions())]
    body.append(f"<footer>Written by Whet {__version__} on {time.strftime('%Y-%m-%d %H:%M')}.</footer>")
    if charts:
        main = next((chart for chart in charts if "<figcaption>Accuracy<" in chart), charts[0])
        replace_text(folder / "curve.svg", standalone_svg(main, title))
    path = folder / "report.html"
    replace_text(path, page(title, "\n".join(part for part in body if part)))
    return path


def _read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        raise WhetValueError(f"write_report: {path} is missing. Pass the folder of a run logged with JSONLLogger.")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            rows.append({"step": int(row["step"]), **row})
        except (ValueError, KeyError, TypeError) as error:
            raise WhetValueError(f"write_report: {path}:{number} is not a JSON object with a step.") from error
    return rows


def _curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Return metric -> (step, value) by increasing step; for a step that was logged twice, the later value."""
    curves: dict[str, dict[float, float]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and value is not None:
                curves.setdefault(name, {})[row["step"]] = float(value)  # "NaN" too
    return {name: sorted(points.items()) for name, points in curves.items()}


def _charts(curves: Mapping[str, list[Point]]) -> list[str]:
    charts = []
    known = {name for _, names in _CHARTS for name in names}
    means = [name for name in curves if name.startswith("rewards/") and name.endswith("/mean")]
    evaluations = [name for name in curves if name.startswith("eval/") and name not in known]
    others = tuple((_label(name), (name,)) for name in [*evaluations, *(means if len(means) > 1 else [])])
    for title, names in _CHARTS + others:
        found = next((name for name in names if name in curves), None)
        if found is not None:
            charts.append(line_chart(title, {found: curves[found]}, percent=_is_share(found)))
    return charts


def _label(metric: str) -> str:
    """Return the label of a metric: mean rewards have short names, and held-out ones a prefix."""
    found = re.fullmatch(r"(eval/)?(?:mean_(reward)|rewards/(.+)/mean)", metric)
    return f"{'held-out ' if found[1] else ''}{found[2] or found[3]}" if found else metric


def _is_share(name: str) -> bool:
    return "accura" in name


def _headline(curves: Mapping[str, list[Point]]) -> dict[str, str]:
    names = [name for name in curves if name.startswith("eval/")]
    names += [name for name in ("mean_reward", "reward") if name in curves][:1]
    figures = {_label(name).removeprefix("eval/"): format_ends(curves[name], _is_share(name)) for name in names[:4]}
    return figures | {"steps": f"{max(points[-1][0] for points in curves.values()):,.0f}"}


_LONGEST_SAMPLE = 1500


def _as_text(value: Any) -> str:
    """Format chat messages as paragraphs with their roles."""
    if not is_messages(value):
        return str(value)
    return "\n\n".join(f"{message['role']}: {message_text(message)}" for message in value)


def _shorten(value: Any) -> str:
    text = _as_text(value)
    more = len(text) - _LONGEST_SAMPLE
    return text if more <= 0 else f"{text[:_LONGEST_SAMPLE]} … ({more:,} more characters)"


def _reward(row: Mapping[str, Any]) -> str:
    reward = row.get("reward")
    return "–" if reward is None else f"{reward:.3g}" if isinstance(reward, float) else str(reward)


def _before_and_after(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a row per prompt and sample, with a dash for missing samples."""
    nothing = {"completion": "–"}
    rows = []
    for prompt in dict.fromkeys(_as_text(row["prompt"]) for row in (*before, *after)):
        sides = [[row for row in side if _as_text(row["prompt"]) == prompt] for side in (before, after)]
        for old, new in zip_longest(*sides, fillvalue=nothing):
            rows.append(
                [_shorten(prompt), _shorten(old["completion"]), _reward(old), _shorten(new["completion"]), _reward(new)]
            )
    headers = ["Prompt", "Before", "Reward", "After", "Reward"]
    return table(headers, rows, ["text", "text", "number", "text", "number"])


def _training_samples(rows: Sequence[Mapping[str, Any]], most: int = 8) -> str:
    """Return tables of the first completions of the first and last step; repeated prompts are blank."""
    parts = []
    steps = sorted({row["step"] for row in rows})
    for step in dict.fromkeys((*steps[:1], *steps[-1:])):
        shown = [row for row in rows if row["step"] == step][:most]
        prompts = [_shorten(row.get("prompt", "")) for row in shown]
        firsts = [prompt if prompt != before else "" for prompt, before in zip(prompts, [None, *prompts], strict=False)]
        cells = [
            [first, _shorten(row.get("completion", "")), _reward(row)] for first, row in zip(firsts, shown, strict=True)
        ]
        samples = table(["Prompt", "Completion", "Reward"], cells, ["text", "text", "number"])
        parts.append(f"<div><h2>Completions of step {step:,}</h2>{samples}</div>")
    return f'<div class="columns">{"".join(parts)}</div>'


def _memory(figures: Mapping[str, Any]) -> str:
    """Return a table of memory by owner, measured and predicted."""
    measured, predicted = figures["measured"], figures["predicted"]
    totals = {"total": (sum(measured.values()), sum(predicted.values()))}
    rows = {PARTS[name]: (measured.get(name, 0), predicted.get(name, 0)) for name in {**measured, **predicted}}
    cells = [[words, *(f"{n_bytes / 1e6:,.0f}" for n_bytes in pair)] for words, pair in (rows | totals).items()]
    return table(["Used by", "MB", "MB predicted"], cells, ["text", "number", "number"])


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WhetValueError(f"write_report: {path} cannot be read: {error}.") from error


def _read_config(folder: Path) -> dict[str, Any]:
    """Read the configuration of a run; empty if it has none."""
    for name, parse in (("config.toml", tomllib.loads), ("config.json", json.loads)):
        if (folder / name).exists():
            try:
                return dict(parse((folder / name).read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                raise WhetValueError(f"write_report: {folder / name} cannot be read: {error}.") from error
    return {}


def _configuration(config: Mapping[str, Any]) -> str:
    """Return a table of top-level settings and a table per section."""
    sections = {name: value for name, value in config.items() if isinstance(value, dict) and value}
    top = {name: value for name, value in config.items() if name not in sections}
    tables = [pairs_table(dict(_flatten(top)))] if top else []
    tables += [
        f"<h3>{escape_html(name)}</h3>{pairs_table(dict(_flatten(section)))}" for name, section in sections.items()
    ]
    return f'<div class="flow">{"".join(tables)}</div>'


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, default=str)
