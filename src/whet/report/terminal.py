"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from whet.errors import MissingExtraError

if TYPE_CHECKING:
    from rich.table import Table


class Cell(NamedTuple):
    """Text with a tone: "bad" is strong in Markdown, "muted" is emphasised, "" is neither."""

    text: str
    tone: str = ""


_STYLES = {"bad": "red", "good": "green", "muted": "dim"}


def terminal_table(
    function: str,
    headers: Sequence[str],
    numeric: Sequence[bool],
    rows: Sequence[Sequence[Any]],
    title: str | None = None,
    caption: str | None = None,
) -> Table:
    """Return a table of cells in the styles of their tones, and of other values as text, never as markup.

    Args:
        function: the public function that makes the table, for errors.
        numeric: the columns that are right-aligned and not wrapped.
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
