"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from whet.bench.markdown import Cell
from whet.errors import MissingExtraError

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {"bad": "red", "good": "green", "muted": "dim"}


def terminal_table(
    function: str,
    headers: Sequence[str],
    numeric: Sequence[bool],
    rows: Sequence[Sequence[Any]],
    title: str | None = None,
    caption: str | None = None,
) -> Table:
    """Cells in their tones and other values as text, never as markup; numeric columns to the right, on one line.

    Args:
        function: the public function that makes the table.
        title: above the table; ``caption`` below it.

    Raises:
        MissingExtraError: rich is not installed.
    """
    try:
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise MissingExtraError(function, "rich", "train") from error

    above, below = (None if text is None else Text(text) for text in (title, caption))
    table = Table(title=above, caption=below, title_justify="left", caption_justify="left", box=None, pad_edge=False)
    for header, right in zip(headers, numeric, strict=True):
        table.add_column(Text(header), justify="right" if right else "left", no_wrap=right)
    for row in rows:
        cells = (value if isinstance(value, Cell) else Cell(str(value)) for value in row)
        table.add_row(*(Text(cell.text, style=_STYLES.get(cell.tone, "")) for cell in cells))
    return table
