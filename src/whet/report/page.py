"""Parts of self-contained HTML pages, without scripts, for light and dark mode.

``page`` adds Whet's style to a body. ``headline_row``, ``table``, ``pairs_table`` and ``line_chart`` make parts of a
body, and ``inline_svg`` embeds a matplotlib figure that is drawn in ``SVG_COLORS``. ``markdown_page`` renders a page
from Markdown. All external text is escaped. This module is independent of runs and benchmarks.
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
from typing import Any

from whet import __version__
from whet.errors import WhetValueError, check_installed
from whet.system.machine import processor_name

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
"""Colour -> values in light and dark mode."""

SERIES = ("accent", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
"""Colours of a chart's series, in order; the first is for the main series."""

LIGHT_COLORS = {name: light for name, (light, _) in _COLORS.items()}
"""Colours of charts outside of a page."""

SVG_COLORS = {name: f"#{number:02x}{number:02x}{number:02x}" for number, name in enumerate(_COLORS, start=1)}
"""Placeholder colours of charts in a page, which ``inline_svg`` replaces by variables of the style."""

CHART_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 12,
    "axes.unicode_minus": True,
    "text.parse_math": False,
}
"""Settings of matplotlib for drawing and saving charts."""


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
    """Return an HTML document with Whet's style. The title is escaped, the body is not."""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape_html(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{escape_html(title)}</h1>\n{body_html}\n</body>\n</html>\n"
    )


def markdown_page(title: str, text: str, charts: Mapping[str, str]) -> str:
    """Return an HTML document from a title and a text in GitHub's Markdown.

    Emphasis is muted, strong text marks failures, and a list becomes a row of large figures, which are the strong texts
    of its items. HTML in the text is escaped.

    Args:
        title: plain text.
        text: CommonMark with tables.
        charts: address of an image in the text -> the SVG that replaces it.

    Raises:
        MissingExtraError: markdown-it-py is not installed.
    """
    check_installed("markdown_page", "markdown_it", extra="bench", package="markdown-it-py")
    from markdown_it import MarkdownIt

    def render_chart(renderer: Any, tokens: Any, i: int, options: Any, env: Any) -> str:
        caption = renderer.renderInlineAsText(tokens[i].children, options, env)
        return f"<figure><figcaption>{escape_html(caption)}</figcaption>{charts[tokens[i].attrs['src']]}</figure>"

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
    """Return a row of large figures: label -> text."""
    items = "".join(
        f"<div><dt>{escape_html(label)}</dt><dd>{escape_html(text)}</dd></div>" for label, text in figures.items()
    )
    return f'<dl class="headline">{items}</dl>'


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], kinds: Sequence[str]) -> str:
    """Return a table. ``kinds`` has the style of each column: "" plain, "number" right-aligned, "text" verbatim.

    Raises:
        ValueError: a row has more or fewer cells than there are columns.
    """
    head = "".join(
        f'<th class="{"number" if kind == "number" else ""}">{escape_html(name)}</th>'
        for name, kind in zip(headers, kinds, strict=True)
    )
    cells = (
        "".join(f'<td class="{kind}">{escape_html(value)}</td>' for value, kind in zip(row, kinds, strict=True))
        for row in rows
    )
    body = "".join(f"<tr>{row}</tr>\n" for row in cells)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def pairs_table(pairs: Mapping[str, Any]) -> str:
    """Return a table of names and values."""
    rows = "".join(
        f"<tr><th>{escape_html(name)}</th><td>{escape_html(value)}</td></tr>\n" for name, value in pairs.items()
    )
    return f'<div class="wide"><table><tbody>\n{rows}</tbody></table></div>'


def escape_html(value: Any) -> str:
    """Escape a value for HTML, with visible symbols for control characters, which HTML forbids."""
    return escape(printable(value))


def printable(value: Any) -> str:
    """Return the text with visible symbols instead of control characters."""
    text = re.sub(r"[\x00-\x08\x0b-\x1f]", lambda match: chr(0x2400 + ord(match[0])), str(value))
    return re.sub(r"[\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", text)


# --- charts ---------------------------------------------------------------------------------------------


def line_chart(
    title: str, curves: Mapping[str, Sequence[Point]], *, percent: bool = False, x_label: str = "step"
) -> str:
    """Return curves as a ``<figure>`` with inline SVG; the caption has the first and last values.

    Curves of 40 points or more are drawn as thin lines with thick moving means. NaN and infinite values leave gaps.

    Args:
        title: the caption.
        curves: label -> points (x, y), one or two curves. Two curves have a legend.
        percent: whether y is a fraction, shown in percent.
        x_label: label of the x axis.

    Raises:
        WhetValueError: there are no curves, or more than two.
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
        (f"{label} " if len(curves) > 1 else "") + format_ends(points, percent) for label, points in curves.items()
    )
    return f"<figure><figcaption>{escape_html(title)}<span>{escape_html(values)}</span></figcaption>{svg}</figure>"


def _draw_curve(axes: Any, label: str, points: Sequence[Point], color: str) -> None:
    xs = [x for x, _ in points]
    ys = [y if math.isfinite(y) else math.nan for _, y in points]
    if smoothing_window(points) == 1:
        axes.plot(xs, ys, color=color, linewidth=2, marker="o", markersize=4, label=label)
        return
    means = _moving_mean(points)
    axes.plot(xs, ys, color=color, linewidth=1, alpha=0.35)
    axes.plot([x for x, _ in means], [y for _, y in means], color=color, linewidth=2, label=label)


def smoothing_window(points: Sequence[Point]) -> int:
    """Return the number of points per moving mean; 1 for short curves, which are not smoothed."""
    return min(50, len(points) // 20) if len(points) >= 40 else 1


def _moving_mean(points: Sequence[Point]) -> list[Point]:
    """Return the mean of the finite y of each window, at its last x; NaN without any."""
    width, means = smoothing_window(points), []
    for end in range(width, len(points) + 1):
        ys = [y for _, y in points[end - width : end] if math.isfinite(y)]
        means.append((points[end - 1][0], sum(ys) / len(ys) if ys else math.nan))
    return means


def format_ends(points: Sequence[Point], percent: bool) -> str:
    """Format the first and last value, "0.312 → 0.884", of the moving mean if there is one."""
    finite = [y for _, y in _moving_mean(points) if math.isfinite(y)]
    if not finite:
        return "no finite value"
    return " → ".join(_format_value(y, percent) for y in (finite[0], finite[-1]))


def _format_value(y: float, percent: bool) -> str:
    if percent:
        return f"{y:.1%}"
    text = f"{y:#.3g}".rstrip(".") if abs(y) < 1000 else f"{y:,.0f}"
    return text.replace("-", "−")  # as on the axes


def inline_svg(figure: Any, title: str) -> str:
    """Return a matplotlib figure as ``<svg>`` in the page's colours and font.

    Call it within an ``rc_context`` of ``CHART_STYLE``.

    Args:
        figure: drawn in ``SVG_COLORS``.
        title: text for screen readers; must be unique within a page.
    """
    from matplotlib import rc_context

    drawn = io.StringIO()
    with rc_context({"svg.hashsalt": title}):
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1)
    svg = svg.replace('role="img">', f'role="img" aria-label="{escape_html(title)}">', 1)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r"'?DejaVu Sans'?[^;\"]*", "inherit", svg)
    for name, stand_in in SVG_COLORS.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    return svg.strip()


def standalone_svg(figure: str, title: str) -> str:
    """Return a chart of ``line_chart`` as a self-contained SVG file with a title, for light and dark mode.

    Args:
        figure: the ``<figure>`` that ``line_chart`` returned.
        title: first line, above the chart's caption.
    """
    pattern = (
        r'<figure><figcaption>(.*?)<span>(.*?)</span>.*?<svg viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>(.*)</svg></figure>'
    )
    caption, values, width, height, drawing = re.fullmatch(pattern, figure, re.DOTALL).groups()  # type: ignore[union-attr]
    top = 46  # two lines of text
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 {-top} {float(width) + 16:g} {float(height) + top:g}" '
        f'width="{float(width) + 16:g}" height="{float(height) + top:g}" role="img" '
        f'aria-label="{escape_html(title)}">\n'
        f"<style>:root {{ {_variables(0)} }} @media (prefers-color-scheme: dark) {{ :root {{ {_variables(1)} }} }} "
        f":root {{ font-family: system-ui, sans-serif; }} text {{ fill: var(--ink); }}</style>\n"
        f'<text y="-26" font-size="14" font-weight="600">{escape_html(title)}</text>\n'
        f'<text y="-6" font-size="13" style="fill: var(--muted)">{caption}</text>\n'
        f'<text x="{width}" y="-6" font-size="13" text-anchor="end">{values}</text>\n{drawing}\n</svg>\n'
    )


# --- versions -------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return the versions of Whet, Python and packages, the system and the processor."""
    found = {"whet": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "tokenizers", "peft", "safetensors", "numpy", "reasoning-gym"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"system": platform.platform(), "processor": f"{processor_name()}, {os.cpu_count()} threads"}
