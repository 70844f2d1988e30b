"""Early detection of invalid rows, and prefetching of batches.

The form of all rows in memory is checked before the first step, without a tokenizer; batches are tokenised, and their
lengths checked, a few steps ahead. An error names the row: file and line, or index, and its ``id``.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from whet.data.batches import is_sequence
from whet.data.sources import Rows
from whet.errors import RowError, WhetTypeError, WhetValueError

Drawn = TypeVar("Drawn")
Row = Mapping[str, Any]
Tokenize = Callable[[Row, Any], object]

PREFETCH = 4
"""Maximum number of batches tokenised ahead, including the next one."""
_QUIET_S = 1.0
"""Delay before a check of all rows shows its progress."""


class Prefetcher(Generic[Drawn]):
    """Prefetched items of a stream, prepared a few ahead.

    Args:
        stream: items in order.
        prepare: called once with each item.
        depth: maximum number of items prepared ahead, including the next one.
    """

    def __init__(self, stream: Iterable[Drawn], prepare: Callable[[Drawn], Any], depth: int = PREFETCH) -> None:
        self._stream, self._prepare, self._depth = iter(stream), prepare, depth
        self._waiting: deque[tuple[Drawn, Any]] = deque()

    def take(self, n_left: int) -> tuple[Drawn, Any] | None:
        """Return the next item and the result of ``prepare``; None at the end. Draw at most ``n_left`` items."""
        for drawn in itertools.islice(self._stream, max(0, min(n_left, self._depth) - len(self._waiting))):
            self._waiting.append((drawn, self._prepare(drawn)))
        return self._waiting.popleft() if self._waiting else None

    def upcoming(self, n: int) -> list[Any]:
        """Return the results of ``prepare`` for at most ``n`` of the items after the last one, which were drawn."""
        return [prepared for _, prepared in itertools.islice(self._waiting, n)]


class _TokenizerReached(BaseException):
    """The form of a row is valid as far as can be checked without a tokenizer."""


class _NoTokenizer:
    """Placeholder for a tokenizer that interrupts any use of it."""

    def __getattr__(self, name: str) -> Any:
        raise _TokenizerReached

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise _TokenizerReached


def check_forms(dataset: Any, tokenize: Tokenize, as_row: Callable[[Any], Row], has_tokenizer: bool) -> None:
    """Check the form of all rows in memory: their fields, and the types of their values, up to the first text.

    Raises:
        RowError: names the first row of invalid form.
    """
    tokenizer = _NoTokenizer() if has_tokenizer else None
    for i, item in enumerate(_show_progress(dataset)):
        try:
            tokenize(as_row(item), tokenizer)
        except _TokenizerReached:
            pass
        except (WhetValueError, WhetTypeError) as error:
            raise RowError(f"{_describe(_place(dataset, i), item)}: {error}") from error


def is_in_memory(dataset: Any) -> bool:
    """Whether all rows are cheap to read: a list, or a Hugging Face dataset without a transform."""
    if isinstance(dataset, (list, tuple)):
        return True
    is_table = hasattr(dataset, "column_names") and is_sequence(dataset)
    return is_table and getattr(dataset, "format", {}).get("type") is None


def locate_error(
    error: Exception, dataset: Any, rows: Any, prepare: Callable[[Any], Any], as_row: Callable[[Any], Row], step: int
) -> Exception:
    """Return the error of the first row of a batch that fails on its own, with its place; ``error`` if none fails.

    Args:
        step: step of the batch, which identifies it in a dataset without indices.
    """
    for i, row in enumerate(rows if isinstance(rows, list) else []):
        try:
            prepare([row])
        except (WhetValueError, WhetTypeError) as own:
            place = _find(dataset, row, as_row) or f"row {i} of the batch of step {step}"
            return RowError(f"{_describe(place, row)}: {own}")
    return error


def _describe(place: str, row: Any) -> str:
    name = row.get("id") if isinstance(row, Mapping) else None
    return place if name is None else f"{place} (id {name!r:.60})"


def _place(dataset: Any, i: int) -> str:
    return dataset.place(i) if isinstance(dataset, Rows) else f"row {i} of the dataset"


def _find(dataset: Any, row: Row, as_row: Callable[[Any], Row]) -> str | None:
    """Return the place of a row in an in-memory dataset."""
    for i, item in enumerate(dataset if is_in_memory(dataset) else []):
        other = as_row(item)
        if other is row or (other.keys() == row.keys() and repr(other) == repr(row)):
            return _place(dataset, i)
    return None


def _show_progress(items: Sequence[Any]) -> Iterator[Any]:
    """Yield the items, and show the progress on a terminal if they take longer than a second."""
    start_s, shown = time.monotonic(), False
    for i, item in enumerate(items):
        yield item
        if i % 4096 == 4095 and time.monotonic() - start_s > _QUIET_S and sys.stderr.isatty():
            shown = True
            print(f"\rchecking rows: {100 * i // len(items)}%", end="", file=sys.stderr, flush=True)
    if shown:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
