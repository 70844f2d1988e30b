"""A document as a list of blocks, written as HTML and as GitHub's Markdown: the same content in both.

The HTML parts are ``whet.report.page``'s. It knows no benchmark.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from whet.report.page import Cell, headline_row, pairs_table, printable, safe, table


@dataclass(frozen=True)
class Heading:
    """The heading of a section."""

    text: str

    def html(self) -> str:
        return f"<h2>{safe(self.text)}</h2>"

    def markdown(self) -> str:
        return f"## {_literal(self.text)}"


@dataclass(frozen=True)
class Text:
    """A paragraph; ``css`` is "", "muted" or "bad"."""

    text: str
    css: str = ""

    def html(self) -> str:
        return f'<p class="{self.css}">{safe(self.text)}</p>'

    def markdown(self) -> str:
        return f"**{_literal(self.text)}**" if self.css == "bad" else _literal(self.text)


@dataclass(frozen=True)
class Figures:
    """A few large figures: label -> text."""

    figures: Mapping[str, str]

    def html(self) -> str:
        return headline_row(self.figures)

    def markdown(self) -> str:
        return "\n".join(f"- {_literal(label)}: **{_literal(text)}**" for label, text in self.figures.items())


@dataclass(frozen=True)
class Grid:
    """A table, as ``whet.report.page.table`` takes it."""

    headers: Sequence[str]
    kinds: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def html(self) -> str:
        return f'<div class="dense">{table(self.headers, self.rows, self.kinds)}</div>'

    def markdown(self) -> str:
        rule = ["---:" if kind == "number" else "---" for kind in self.kinds]
        body = [[text for cell in row for text in _markdown_cells(cell)] for row in self.rows]
        return "\n".join(f"| {' | '.join(row)} |" for row in ([_literal(h) for h in self.headers], rule, *body))


@dataclass(frozen=True)
class Pairs:
    """A table of names and values."""

    pairs: Mapping[str, Any]

    def html(self) -> str:
        return pairs_table(self.pairs)

    def markdown(self) -> str:
        return Grid(["", ""], ["", ""], list(self.pairs.items())).markdown()


@dataclass(frozen=True)
class Chart:
    """A picture: ``svg`` for the page, the name of a PNG beside the document for Markdown."""

    title: str
    note: str
    svg: str
    png: str

    def html(self) -> str:
        caption = f"<figcaption>{safe(self.title)}<span>{safe(self.note)}</span></figcaption>"
        return f"<figure>{caption}{self.svg}</figure>"

    def markdown(self) -> str:
        return f"![{_literal(self.title)} ({_literal(self.note)})]({self.png})"


Block = Heading | Text | Figures | Grid | Pairs | Chart


def body_html(blocks: Sequence[Block]) -> str:
    """The blocks as the body of a page; charts that follow each other stand side by side where there is room."""
    parts = []
    for is_chart, run in groupby(blocks, lambda block: isinstance(block, Chart)):
        inner = "\n".join(block.html() for block in run)
        parts.append(f'<div class="charts">{inner}</div>' if is_chart else inner)
    return "\n".join(parts)


def markdown(title: str, blocks: Sequence[Block]) -> str:
    """A whole Markdown document."""
    return "\n\n".join([f"# {_literal(title)}", *(block.markdown() for block in blocks)]) + "\n"


def _markdown_cells(value: Any) -> list[str]:
    """The cell, bold if it is bad news, and an empty one for each further column that it spans."""
    cell = value if isinstance(value, Cell) else Cell(value)
    text = _literal(cell.text)
    return [f"**{text}**" if cell.css == "bad" and text else text, *[""] * (cell.span - 1)]


def _literal(value: Any) -> str:
    """Text that Markdown shows as it is, on one line."""
    text = re.sub(r"\s+", " ", printable(value)).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~$!])", r"\\\1", text)
