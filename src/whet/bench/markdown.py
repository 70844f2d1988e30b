"""Text and tables in GitHub-flavoured Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from whet.report.page import printable
from whet.report.terminal import Cell


def escape(value: Any) -> str:
    """Escape text for Markdown and join its lines."""
    text = re.sub(r"\s+", " ", printable(value)).strip()
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~$!])", r"\\\1", text)


def span(value: Any, tone: str = "") -> str:
    """Escape a ``Cell`` or any other value, and mark its tone."""
    cell = value if isinstance(value, Cell) else Cell(value, tone)
    text, mark = escape(cell.text), {"bad": "**", "muted": "*"}.get(cell.tone, "")
    return f"{mark}{text}{mark}" if text else ""


def markdown_table(headers: Sequence[str], numeric: Sequence[bool], rows: Sequence[Sequence[Any]]) -> str:
    """Format a table of ``span`` cells; numeric columns are right-aligned."""
    rule = ["---:" if right else "---" for right in numeric]
    lines = [[span(cell) for cell in headers], rule, *([span(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
