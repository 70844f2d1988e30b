"""A run, or a benchmark, as one HTML page: no scripts, nothing loaded from elsewhere, light and dark.

``write_report`` makes the page of a training run from what the run left in its folder. ``page``,
``headline_row``, ``table`` and ``line_chart`` are its parts and serve other pages too. Every text from
outside is escaped.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import math
import os
import platform
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any

from whet import __version__
from whet.errors import MissingExtraError, WhetValueError
from whet.logging import replace_text

try:
    import tomllib  # pyright: ignore[reportMissingImports]
except ImportError:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

Point = tuple[float, float]

_STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fcfcfb; --ink: #1c1e21; --muted: #676c73; --line: #e3e3df;
  --accent: #2a62b8; --second: #b5542a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15171a; --ink: #e4e5e2; --muted: #979ca4; --line: #2e3237;
    --accent: #7db0f5; --second: #eb9d6b;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 68rem; padding: 3rem 1.5rem 4rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
h1 { margin: 0; font-size: 1.7rem; line-height: 1.25; font-weight: 600; letter-spacing: -0.01em; }
h2 { margin: 3rem 0 1rem; font-size: 1.05rem; font-weight: 600; }
h3 { margin: 0 0 0.3rem; font-size: 0.92rem; font-weight: 600; break-after: avoid; }
p { margin: 0.4rem 0; max-width: 46rem; }
.muted, .note, footer { color: var(--muted); }
.headline { display: flex; flex-wrap: wrap; gap: 1rem 3rem; margin: 2rem 0 0; padding: 1.2rem 0;
  border: solid var(--line); border-width: 1px 0; }
.headline dt { color: var(--muted); font-size: 0.85rem; }
.headline dd { margin: 0; font-size: 1.6rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.charts, .columns { display: grid; gap: 2rem 2.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(26rem, 100%), 1fr)); }
.columns { row-gap: 0; }
.flow { columns: 2 26rem; column-gap: 2.5rem; }
.flow tr { break-inside: avoid; }
.flow .wide + h3 { margin-top: 1.5rem; }
.note { margin: -0.6rem 0 1.2rem; font-size: 0.85rem; }
figure { margin: 0; min-width: 0; }
figcaption { display: flex; justify-content: space-between; gap: 1rem; font-weight: 600; font-size: 0.92rem; }
figcaption span { color: var(--muted); font-weight: 400; font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: inherit; }
.wide { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 0.92rem; }
th, td { padding: 0.45rem 2rem 0.45rem 0; border-bottom: 1px solid var(--line);
  text-align: left; vertical-align: top; }
th:last-child, td:last-child { padding-right: 0; }
thead th { color: var(--muted); font-weight: 400; font-size: 0.85rem; white-space: nowrap; }
tbody th { color: var(--muted); font-weight: 400; white-space: nowrap; width: 1%; }
tbody th, tbody th + td { padding-block: 0.25rem; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 0.85rem;
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
footer { margin-top: 3rem; font-size: 0.85rem; }
"""


def page(title: str, body_html: str) -> str:
    """A whole HTML document: the house's style around a body. The title is escaped, the body is not."""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_safe(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{_safe(title)}</h1>\n{body_html}\n</body>\n</html>\n"
    )


def headline_row(figures: Mapping[str, str]) -> str:
    """A few large figures side by side: label -> text."""
    items = "".join(f"<div><dt>{_safe(label)}</dt><dd>{_safe(text)}</dd></div>" for label, text in figures.items())
    return f'<dl class="headline">{items}</dl>'


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], kinds: Sequence[str]) -> str:
    """A table. ``kinds`` says how each column is set: "" plainly, "number" to the right, "text" verbatim."""
    head = "".join(
        f'<th class="{_number_class(kind)}">{_safe(name)}</th>' for name, kind in zip(headers, kinds, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{kind}">{_safe(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))
        + "</tr>\n"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _number_class(kind: str) -> str:
    return kind if kind == "number" else ""


def pairs_table(pairs: Mapping[str, Any]) -> str:
    """A table of names and their values."""
    rows = "".join(f"<tr><th>{_safe(name)}</th><td>{_safe(value)}</td></tr>\n" for name, value in pairs.items())
    return f'<div class="wide"><table><tbody>\n{rows}</tbody></table></div>'


def _safe(value: Any) -> str:
    """Escaped for HTML; control characters, which HTML forbids, as their visible signs."""
    text = re.sub(r"[\x00-\x08\x0b-\x1f]", lambda match: chr(0x2400 + ord(match[0])), str(value))
    return escape(re.sub(r"[\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", text))


# --- charts ---------------------------------------------------------------------------------------------

_INK, _MUTED, _LINE = "#010101", "#020202", "#030303"
_SERIES = ("#040404", "#050505")
_PAINT = {_INK: "--ink", _MUTED: "--muted", _LINE: "--line", _SERIES[0]: "--accent", _SERIES[1]: "--second"}
"""Stand-ins that matplotlib draws with, and the style's colour that each becomes in light and in dark."""


def line_chart(
    title: str, curves: Mapping[str, Sequence[Point]], *, percent: bool = False, x_label: str = "step"
) -> str:
    """Curves over a common x as a ``<figure>`` with inline SVG; the caption gives the first and last value.

    A curve of 40 points or more is drawn thin, with the mean of the last few points over it. NaN and infinite
    values leave gaps.

    Args:
        title: the caption.
        curves: label -> points (x, y), two curves at most. Labels are shown if there are two.
        percent: y is a share of 1 and shown in percent.
        x_label: the name of x.

    Raises:
        WhetValueError: no curve, or more than two.
        MissingExtraError: matplotlib is not installed.
    """
    if not 1 <= len(curves) <= len(_SERIES):
        raise WhetValueError(f"line_chart: curves has {len(curves)} entries, expected 1 or {len(_SERIES)}.")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator, PercentFormatter
    except ImportError as error:
        raise MissingExtraError("line_chart", "matplotlib", "train") from error

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 12, "axes.unicode_minus": True}):
        figure = Figure(figsize=(7.2, 2.9), layout="constrained")
        axes = figure.add_subplot()
        for color, (label, points) in zip(_SERIES, curves.items(), strict=False):
            _draw_curve(axes, label, points, color)
        axes.set_xlabel(x_label, color=_MUTED)
        axes.tick_params(colors=_MUTED, length=0, pad=6)
        axes.grid(axis="y", color=_LINE, linewidth=1)
        axes.set_axisbelow(True)
        axes.spines[:].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.margins(x=0.01)
        if percent:
            axes.set_ylim(-0.02, 1.02)
            axes.yaxis.set_major_formatter(PercentFormatter(1))
        if len(curves) > 1:
            axes.legend(frameon=False, labelcolor=_INK, loc="best")
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})

    ends = "; ".join(
        (f"{label} " if len(curves) > 1 else "") + _ends(points, percent) for label, points in curves.items()
    )
    caption = f"<figcaption>{_safe(title)}<span>{_safe(ends)}</span></figcaption>"
    return f"<figure>{caption}{_inline_svg(drawn.getvalue(), title)}</figure>"


def _draw_curve(axes: Any, label: str, points: Sequence[Point], color: str) -> None:
    xs = [x for x, _ in points]
    ys = [y if math.isfinite(y) else math.nan for _, y in points]
    if _window(points) == 1:
        axes.plot(xs, ys, color=color, linewidth=2, marker="o", markersize=4, label=label)
        return
    means = _moving_mean(points)
    axes.plot(xs, ys, color=color, linewidth=1, alpha=0.35)
    axes.plot([x for x, _ in means], [y for _, y in means], color=color, linewidth=2, label=label)


def _window(points: Sequence[Point]) -> int:
    """How many points a thick line takes the mean of; 1 for a short curve, which is drawn as it is."""
    return min(50, len(points) // 20) if len(points) >= 40 else 1


def _moving_mean(points: Sequence[Point]) -> list[Point]:
    """The mean of the finite y of each window, at its last x; NaN where none is finite."""
    width, means = _window(points), []
    for end in range(width, len(points) + 1):
        ys = [y for _, y in points[end - width : end] if math.isfinite(y)]
        means.append((points[end - 1][0], sum(ys) / len(ys) if ys else math.nan))
    return means


def _ends(points: Sequence[Point], percent: bool) -> str:
    """First and last value, "0.312 → 0.884", of the thick line where there is one."""
    finite = [y for _, y in _moving_mean(points) if math.isfinite(y)]
    if not finite:
        return "no finite value"
    return " → ".join(_figure(y, percent) for y in (finite[0], finite[-1]))


def _figure(y: float, percent: bool) -> str:
    if percent:
        return f"{y:.1%}"
    text = f"{y:#.3g}".rstrip(".") if abs(y) < 1000 else f"{y:,.0f}"
    return text.replace("-", "−")  # as the axes have it


def _inline_svg(document: str, title: str) -> str:
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1)
    svg = svg.replace('role="img">', f'role="img" aria-label="{_safe(title)}">', 1)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r"'?DejaVu Sans'?[^;\"]*", "inherit", svg)
    for stand_in, color in _PAINT.items():
        svg = svg.replace(stand_in, f"var({color})")
    return svg.strip()


# --- the page of a run ----------------------------------------------------------------------------------

_CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("mean_reward", "reward")),
    ("Accuracy", ("eval/accuracy", "accuracy", "rewards/accuracies")),
    ("KL to the reference", ("mean_kl", "kl")),
    ("Entropy", ("entropy",)),
    ("Completion length (tokens)", ("completions/mean_length",)),
    ("Loss", ("loss",)),
)
"""The charts of a run: title, and the names that the metric goes by. Other evaluations follow them."""


def write_report(
    run_dir: str | os.PathLike[str],
    *,
    title: str,
    summary: str = "",
    headline: Mapping[str, str] | None = None,
    samples_before: Sequence[Mapping[str, Any]] = (),
    samples_after: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Writes ``run_dir/report.html`` from what a run left there.

    Read are ``metrics.jsonl`` (as ``JSONLLogger`` writes it), and where they are there ``config.toml`` or
    ``config.json`` and ``completions.jsonl`` (of which the first and the last step are shown).

    Args:
        run_dir: the run's folder.
        title: the page's heading.
        summary: a sentence under it.
        headline: a few large figures, label -> text, "held-out accuracy" -> "34.5% → 91.0%". None: the
            first and last value of evaluations and reward.
        samples_before: rows with prompt, completion and reward from before the run.
        samples_after: the same from after it; rows with the same prompt are shown side by side.

    Returns:
        The path of the page.

    Raises:
        WhetValueError: metrics.jsonl is missing or holds no metrics, or a file is not what its name says.
        MissingExtraError: matplotlib is not installed.
    """
    folder = Path(run_dir)
    curves = _curves(_read_rows(folder / "metrics.jsonl"))
    if not curves:
        raise WhetValueError(
            f"write_report: {folder / 'metrics.jsonl'} holds no metrics. Log the run with JSONLLogger there."
        )
    figures = _headline(curves) if headline is None else headline
    body = [
        f'<p class="muted">{_safe(summary)}</p>' if summary else "",
        headline_row(figures) if figures else "",
    ]
    note = "Thin lines are single steps; thick lines, and the figures beside the titles, are moving means."
    noisy = any(_window(points) > 1 for points in curves.values())
    body += [
        "<h2>Curves</h2>",
        f'<p class="note">{note}</p>' if noisy else "",
        f'<div class="charts">{"".join(_charts(curves))}</div>',
    ]
    if samples_before or samples_after:
        body += ["<h2>Samples before and after</h2>", _before_and_after(samples_before, samples_after)]
    if (folder / "completions.jsonl").exists():
        body.append(_training_samples(_read_rows(folder / "completions.jsonl")))
    if config := _read_config(folder):
        body += ["<h2>Configuration</h2>", _configuration(config)]
    body += ["<h2>Versions</h2>", pairs_table(versions())]
    body.append(f"<footer>Written by Whet {__version__} on {time.strftime('%Y-%m-%d %H:%M')}.</footer>")
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
    """Metric -> (step, value) by rising step; of a step logged twice the later value."""
    curves: dict[str, dict[float, float]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and value is not None:
                curves.setdefault(name, {})[row["step"]] = float(value)  # "NaN" too
    return {name: sorted(points.items()) for name, points in curves.items()}


def _charts(curves: Mapping[str, list[Point]]) -> list[str]:
    charts = []
    known = {name for _, names in _CHARTS for name in names}
    others = tuple((name, (name,)) for name in curves if name.startswith("eval/") and name not in known)
    for title, names in _CHARTS + others:
        found = next((name for name in names if name in curves), None)
        if found is not None:
            charts.append(line_chart(title, {found: curves[found]}, percent=_is_share(found)))
    return charts


def _is_share(name: str) -> bool:
    return "accura" in name


def _headline(curves: Mapping[str, list[Point]]) -> dict[str, str]:
    names = [name for name in curves if name.startswith("eval/")]
    names += [name for name in ("mean_reward", "reward") if name in curves][:1]
    figures = {
        name.removeprefix("eval/").removeprefix("mean_"): _ends(curves[name], _is_share(name)) for name in names[:4]
    }
    return figures | {"steps": f"{max(points[-1][0] for points in curves.values()):,.0f}"}


_LONGEST_SAMPLE = 1500


def _cut(text: Any) -> str:
    text = str(text)
    more = len(text) - _LONGEST_SAMPLE
    return text if more <= 0 else f"{text[:_LONGEST_SAMPLE]} … ({more:,} more characters)"


def _reward(row: Mapping[str, Any]) -> str:
    reward = row.get("reward")
    return "–" if reward is None else f"{reward:.3g}" if isinstance(reward, float) else str(reward)


def _before_and_after(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> str:
    """One row per prompt and sample, with an empty place where one side has no such sample."""
    nothing = {"completion": "–"}
    rows = []
    for prompt in dict.fromkeys(str(row["prompt"]) for row in (*before, *after)):
        sides = [[row for row in side if str(row["prompt"]) == prompt] for side in (before, after)]
        for old, new in zip_longest(*sides, fillvalue=nothing):
            rows.append([_cut(prompt), _cut(old["completion"]), _reward(old), _cut(new["completion"]), _reward(new)])
    headers = ["Prompt", "Before", "Reward", "After", "Reward"]
    return table(headers, rows, ["text", "text", "number", "text", "number"])


def _training_samples(rows: Sequence[Mapping[str, Any]], most: int = 8) -> str:
    """The first completions of the first step and of the last."""
    parts = []
    steps = sorted({row["step"] for row in rows})
    for step in dict.fromkeys((*steps[:1], *steps[-1:])):
        shown = [row for row in rows if row["step"] == step][:most]
        cells = [[_cut(row.get("prompt", "")), _cut(row.get("completion", "")), _reward(row)] for row in shown]
        samples = table(["Prompt", "Completion", "Reward"], cells, ["text", "text", "number"])
        parts.append(f"<div><h2>Completions of step {step:,}</h2>{samples}</div>")
    return f'<div class="columns">{"".join(parts)}</div>'


def _read_config(folder: Path) -> dict[str, Any]:
    """The run's configuration; empty if it left none."""
    for name, parse in (("config.toml", tomllib.loads), ("config.json", json.loads)):
        if (folder / name).exists():
            try:
                return dict(parse((folder / name).read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                raise WhetValueError(f"write_report: {folder / name} cannot be read: {error}.") from error
    return {}


def _configuration(config: Mapping[str, Any]) -> str:
    """A table for the settings at the top, and one for each section."""
    top = {name: value for name, value in config.items() if not isinstance(value, dict)}
    sections = {name: value for name, value in config.items() if isinstance(value, dict)}
    tables = [pairs_table(dict(_flat(top)))] if top else []
    tables += [f"<h3>{_safe(name)}</h3>{pairs_table(dict(_flat(section)))}" for name, section in sections.items()]
    return f'<div class="flow">{"".join(tables)}</div>'


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, default=str)


def versions() -> dict[str, str]:
    """What ran and on what: Whet, Python, the packages a run depends on, the system and the processor."""
    found = {"whet": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "peft", "safetensors", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"system": platform.platform(), "processor": f"{_processor()}, {os.cpu_count()} threads"}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()
