"""The parts of a HTML page: no scripts, nothing loaded from elsewhere, light and dark.

``page`` sets the house's style around a body; ``headline_row``, ``table``, ``pairs_table`` and ``line_chart`` are parts
of a body, and ``inline_svg`` makes one of any matplotlib figure drawn in ``SVG_COLORS``. ``markdown_page`` renders a
whole page from Markdown. Every text from outside is escaped. It knows neither runs nor benchmarks.
"""

from __future__ import annotations

import importlib.metadata
import io
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from whet import __version__
from whet.errors import WhetValueError, check_installed

Point = tuple[float, float]

_COLORS = {
    "paper": ("#fcfcfb", "#15171a"),
    "ink": ("#1c1e21", "#e4e5e2"),
    "muted": ("#676c73", "#979ca4"),
    "line": ("#e3e3df", "#2e3237"),
    "bad": ("#b3261e", "#ff8b80"),
    "accent": ("#2a62b8", "#7db0f5"),
    "second": ("#b5542a", "#eb9d6b"),
    "third": ("#2f8062", "#6cc39c"),
    "fourth": ("#8a4fa3", "#c794e0"),
    "fifth": ("#a27b12", "#dcbb55"),
    "sixth": ("#b8407a", "#ef86b4"),
    "seventh": ("#3c8799", "#74c2d6"),
    "eighth": ("#74777c", "#a7abb2"),
}
"""Each colour of the house in light and in dark."""

SERIES = ("accent", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
"""The colours of a chart's series, in order; the first is for what the chart is about."""

LIGHT_COLORS = {name: light for name, (light, _) in _COLORS.items()}
"""For charts outside of a page."""

SVG_COLORS = {name: f"#{number:02x}{number:02x}{number:02x}" for number, name in enumerate(_COLORS, start=1)}
"""Stand-ins that charts in a page are drawn with: ``inline_svg`` makes each the style's colour, light or dark."""

CHART_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 12,
    "axes.unicode_minus": True,
    "text.parse_math": False,
}
"""matplotlib's settings while a chart is drawn and saved."""


def _variables(side: int) -> str:
    return " ".join(f"--{name}: {colors[side]};" for name, colors in _COLORS.items())


_STYLE = (
    f""":root {{ color-scheme: light dark; {_variables(0)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(1)} }} }}
"""
    + """* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 68rem; padding: 3rem 1.5rem 4rem; background: var(--paper); color: var(--ink);
  overflow-wrap: anywhere;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
h1 { margin: 0; font-size: 1.7rem; line-height: 1.25; font-weight: 600; letter-spacing: -0.01em; }
h2 { margin: 3rem 0 1rem; font-size: 1.05rem; font-weight: 600; }
h3 { margin: 0 0 0.3rem; font-size: 0.92rem; font-weight: 600; break-after: avoid; }
p { margin: 0.4rem 0; max-width: 46rem; }
.muted, .note, footer, em { color: var(--muted); font-style: normal; }
strong { color: var(--bad); font-weight: inherit; }
.headline, ul { display: flex; flex-wrap: wrap; gap: 1rem 3rem; margin: 2rem 0 0; padding: 1.2rem 0; list-style: none;
  border: solid var(--line); border-width: 1px 0; }
.headline dt, li { color: var(--muted); font-size: 0.85rem; }
.headline dd, li strong { display: block; margin: 0; color: var(--ink); font-size: 1.6rem; line-height: 1.3;
  font-variant-numeric: tabular-nums; }
.charts, .columns { display: grid; gap: 2rem 2.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(26rem, 100%), 1fr)); }
.columns { row-gap: 0; }
.flow { columns: 2 26rem; column-gap: 2.5rem; }
.flow .wide { overflow: visible; }
.flow tr { break-inside: avoid; }
.flow .wide + h3 { margin-top: 1.5rem; }
.note { margin: -0.6rem 0 1.2rem; font-size: 0.85rem; }
figure { margin: 0; min-width: 0; }
figcaption { display: flex; justify-content: space-between; gap: 1rem; font-weight: 600; font-size: 0.92rem; }
figcaption span { color: var(--muted); font-weight: 400; font-variant-numeric: tabular-nums; white-space: nowrap; }
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
body:has(.dense) { max-width: 84rem; }
.dense table { font-size: 0.83rem; }
.dense th, .dense td { padding: 0.28rem 1.1rem 0.28rem 0; }
.dense { margin: 0.8rem 0; }
.dense + .charts, p + .charts { margin-top: 1.8rem; }
.dense thead th { white-space: normal; vertical-align: bottom; }
.dense th:empty { padding: 0; border: 0; }
.dense td:nth-child(-n+2):not(:last-child) { white-space: nowrap; }
.dense :has(th:empty) + tbody td:first-child { color: var(--muted); width: 1%; }
.number, [style="text-align:right"] { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 0.85rem;
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
footer { margin-top: 3rem; font-size: 0.85rem; }
"""
)


def page(title: str, body_html: str) -> str:
    """A whole HTML document: the house's style around a body. The title is escaped, the body is not."""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{safe(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{safe(title)}</h1>\n{body_html}\n</body>\n</html>\n"
    )


def markdown_page(title: str, text: str, charts: Mapping[str, str]) -> str:
    """A whole HTML document of a text in GitHub's Markdown, below its title.

    Emphasis is muted, strong text is bad news, and a list is a row of large figures, the strong text of its items. HTML
    in the text is shown and not obeyed.

    Args:
        title: plain text.
        text: CommonMark with tables.
        charts: address of a picture in the text -> the SVG that replaces it.

    Raises:
        MissingExtraError: markdown-it-py is not installed.
    """
    check_installed("markdown_page", "markdown_it", extra="bench", package="markdown-it-py")
    from markdown_it import MarkdownIt

    def render_chart(renderer: Any, tokens: Any, i: int, options: Any, env: Any) -> str:
        caption = renderer.renderInlineAsText(tokens[i].children, options, env)
        return f"<figure><figcaption>{safe(caption)}</figcaption>{charts[tokens[i].attrs['src']]}</figure>"

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    markdown.add_render_rule("image", render_chart)
    markdown.add_render_rule("table_open", lambda *_: '<div class="wide dense"><table>\n')
    markdown.add_render_rule("table_close", lambda *_: "</table></div>\n")
    tokens = markdown.parse(text)
    for before, inline, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if any(child.type == "image" for child in inline.children or ()):  # a paragraph cannot contain figures
            before.tag = after.tag = "div"
            before.attrSet("class", "charts")
    return page(title, markdown.renderer.render(tokens, markdown.options, {}))


def headline_row(figures: Mapping[str, str]) -> str:
    """A few large figures side by side: label -> text."""
    items = "".join(f"<div><dt>{safe(label)}</dt><dd>{safe(text)}</dd></div>" for label, text in figures.items())
    return f'<dl class="headline">{items}</dl>'


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], kinds: Sequence[str]) -> str:
    """A table. ``kinds`` says how each column is set: "" plainly, "number" to the right, "text" verbatim.

    Raises:
        ValueError: a row has more or fewer cells than there are columns.
    """
    head = "".join(
        f'<th class="{"number" if kind == "number" else ""}">{safe(name)}</th>'
        for name, kind in zip(headers, kinds, strict=True)
    )
    cells = (
        "".join(f'<td class="{kind}">{safe(value)}</td>' for value, kind in zip(row, kinds, strict=True))
        for row in rows
    )
    body = "".join(f"<tr>{row}</tr>\n" for row in cells)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def pairs_table(pairs: Mapping[str, Any]) -> str:
    """A table of names and their values."""
    rows = "".join(f"<tr><th>{safe(name)}</th><td>{safe(value)}</td></tr>\n" for name, value in pairs.items())
    return f'<div class="wide"><table><tbody>\n{rows}</tbody></table></div>'


def safe(value: Any) -> str:
    """Escaped for HTML; control characters, which HTML forbids, as their visible signs."""
    return escape(printable(value))


def printable(value: Any) -> str:
    """The text with visible signs in place of control characters."""
    text = re.sub(r"[\x00-\x08\x0b-\x1f]", lambda match: chr(0x2400 + ord(match[0])), str(value))
    return re.sub(r"[\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", text)


# --- charts ---------------------------------------------------------------------------------------------


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
    if not 1 <= len(curves) <= 2:
        raise WhetValueError(f"line_chart: curves has {len(curves)} entries, expected 1 or 2.")
    check_installed("line_chart", "matplotlib")
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    with rc_context(CHART_STYLE):
        figure = Figure(figsize=(7.2, 2.9), layout="constrained")
        axes = figure.add_subplot()
        for series, (label, points) in zip(SERIES, curves.items(), strict=False):
            _draw_curve(axes, label, points, SVG_COLORS[series])
        axes.set_xlabel(x_label, color=SVG_COLORS["muted"])
        axes.tick_params(colors=SVG_COLORS["muted"], length=0, pad=6)
        axes.grid(axis="y", color=SVG_COLORS["line"], linewidth=1)
        axes.set_axisbelow(True)
        axes.spines[:].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.margins(x=0.01)
        if percent:
            axes.set_ylim(-0.02, 1.02)
            axes.yaxis.set_major_formatter(PercentFormatter(1))
        if len(curves) > 1:
            axes.legend(frameon=False, labelcolor=SVG_COLORS["ink"], loc="best")
        svg = inline_svg(figure, title)

    values = "; ".join(
        (f"{label} " if len(curves) > 1 else "") + ends(points, percent) for label, points in curves.items()
    )
    return f"<figure><figcaption>{safe(title)}<span>{safe(values)}</span></figcaption>{svg}</figure>"


def _draw_curve(axes: Any, label: str, points: Sequence[Point], color: str) -> None:
    xs = [x for x, _ in points]
    ys = [y if math.isfinite(y) else math.nan for _, y in points]
    if window(points) == 1:
        axes.plot(xs, ys, color=color, linewidth=2, marker="o", markersize=4, label=label)
        return
    means = _moving_mean(points)
    axes.plot(xs, ys, color=color, linewidth=1, alpha=0.35)
    axes.plot([x for x, _ in means], [y for _, y in means], color=color, linewidth=2, label=label)


def window(points: Sequence[Point]) -> int:
    """How many points a thick line takes the mean of; 1 for a short curve, which is drawn as it is."""
    return min(50, len(points) // 20) if len(points) >= 40 else 1


def _moving_mean(points: Sequence[Point]) -> list[Point]:
    """The mean of the finite y of each window, at its last x; NaN where none is finite."""
    width, means = window(points), []
    for end in range(width, len(points) + 1):
        ys = [y for _, y in points[end - width : end] if math.isfinite(y)]
        means.append((points[end - 1][0], sum(ys) / len(ys) if ys else math.nan))
    return means


def ends(points: Sequence[Point], percent: bool) -> str:
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


def inline_svg(figure: Any, title: str) -> str:
    """A matplotlib figure as ``<svg>`` in the page's colours and font.

    Call it under the settings of ``CHART_STYLE``.

    Args:
        figure: drawn in ``SVG_COLORS``.
        title: read out in place of the picture; charts of one page have different titles.
    """
    from matplotlib import rc_context

    drawn = io.StringIO()
    with rc_context({"svg.hashsalt": title}):
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1)
    svg = svg.replace('role="img">', f'role="img" aria-label="{safe(title)}">', 1)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r"'?DejaVu Sans'?[^;\"]*", "inherit", svg)
    for name, stand_in in SVG_COLORS.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    return svg.strip()


def standalone_svg(figure: str, title: str) -> str:
    """Return a chart of ``line_chart`` as an SVG file: titled, light or dark as the reader's system, nothing external.

    Args:
        figure: the ``<figure>`` that ``line_chart`` returned.
        title: the first line, above the chart's own caption.
    """
    pattern = (
        r'<figure><figcaption>(.*?)<span>(.*?)</span>.*?<svg viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>(.*)</svg></figure>'
    )
    caption, values, width, height, drawing = re.fullmatch(pattern, figure, re.DOTALL).groups()  # type: ignore[union-attr]
    top = 46  # two lines of text
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 {-top} {float(width) + 16:g} {float(height) + top:g}" '
        f'width="{float(width) + 16:g}" height="{float(height) + top:g}" role="img" aria-label="{safe(title)}">\n'
        f"<style>:root {{ {_variables(0)} }} @media (prefers-color-scheme: dark) {{ :root {{ {_variables(1)} }} }} "
        f":root {{ font-family: system-ui, sans-serif; }} text {{ fill: var(--ink); }}</style>\n"
        f'<text y="-26" font-size="14" font-weight="600">{safe(title)}</text>\n'
        f'<text y="-6" font-size="13" style="fill: var(--muted)">{caption}</text>\n'
        f'<text x="{width}" y="-6" font-size="13" text-anchor="end">{values}</text>\n{drawing}\n</svg>\n'
    )


# --- what ran -------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """The versions of Whet, Python and the packages a run depends on, the system and the processor."""
    found = {"whet": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "tokenizers", "peft", "safetensors", "numpy", "reasoning-gym"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"system": platform.platform(), "processor": f"{processor()}, {os.cpu_count()} threads"}


def processor() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()
