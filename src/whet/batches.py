"""From a data set to the arguments of one training step after another.

Takes sequences of rows, which it batches in shuffled order, and sequences or iterables of ready batches. The
stream is a function of (data set, batch size, seed), and starts at any batch of it. Does not tokenise or pad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from whet.data import shuffled_batches
from whet.errors import WhetTypeError, WhetValueError


def batch_stream(
    dataset: Any, batch_size: int, seed: int, start: int, as_row: Callable[[Any], Mapping[str, Any]]
) -> tuple[Iterator[tuple[Any, ...]], int | None]:
    """The arguments of ``train_step`` for batch ``start`` and those that follow, without end.

    Args:
        dataset: a sequence (of rows, or of ready batches: items that hold a (B, T) tensor or array), whose
            epochs are shuffled; or an iterable of ready batches, taken in its own order, again and again.
            An iterator cannot start again: it goes on where it stands, and ends.
        batch_size: rows per batch.
        seed: keys the order.
        start: batches to leave out.
        as_row: makes a dict of an item of the sequence.

    Returns:
        The stream, and batches per epoch, or None where that is not known.

    Raises:
        WhetTypeError: dataset is none of these.
        WhetValueError: it is empty, or has fewer rows than batch_size.
    """
    n = len(dataset) if hasattr(dataset, "__len__") else None
    if isinstance(dataset, (str, bytes, Mapping)) or (n is None and not hasattr(dataset, "__iter__")):
        raise WhetTypeError(
            f"train: dataset is {dataset!r:.60}, expected a sequence of rows, or an iterable of batches."
        )
    if n == 0:
        raise WhetValueError("train: the dataset is empty.")
    if n is not None and hasattr(dataset, "__getitem__"):
        if is_batch(dataset[0]):
            return (_arguments(dataset[i]) for [i] in shuffled_batches(n, 1, seed, start)), n
        order = shuffled_batches(n, batch_size, seed, start)
        return (([as_row(dataset[i]) for i in batch],) for batch in order), n // batch_size
    if iter(dataset) is dataset:
        return map(_arguments, dataset), None
    return map(_arguments, islice(_endless(dataset), start, None)), n


def as_row(item: Any, fields: tuple[str, ...], where: str) -> Mapping[str, Any]:
    """A dict as it is, or a tuple of ``fields`` as a dict; ``where`` is the algorithm's name, for errors."""
    if isinstance(item, Mapping):
        return item
    if isinstance(item, tuple) and len(item) == len(fields):
        return dict(zip(fields, item, strict=True))
    raise WhetTypeError(f"{where}: a row is {item!r:.60}, expected a dict or a tuple of ({', '.join(fields)}).")


def is_batch(item: Any) -> bool:
    """Whether an item is, or directly holds, a (B, T) tensor or array, and so is a batch and no row."""
    members = item.values() if isinstance(item, Mapping) else item if isinstance(item, (list, tuple)) else ()
    return any(getattr(member, "ndim", 0) == 2 for member in (item, *members))


def is_rows(batch: Any) -> bool:
    """Whether a batch is a list of rows, each a dict."""
    return isinstance(batch, (list, tuple)) and len(batch) > 0 and all(isinstance(r, Mapping) for r in batch)


def check_row_counts(where: str, names: Sequence[str], columns: Sequence[Sequence[Any]]) -> None:
    """Refuse columns of a batch that are empty or not all of one length."""
    counts = [len(column) for column in columns]
    if len(set(counts)) > 1 or counts[0] == 0:
        found = ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=True))
        raise WhetValueError(f"{where}: rows of the batch: {found}. Pass as many of each, at least one.")


def _arguments(batch: Any) -> tuple[Any, ...]:
    """What ``train_step`` is called with: rows made of columns, the members of a tuple, or the batch."""
    if isinstance(batch, Mapping) and "input_ids" not in batch:
        return ([dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)],)
    return tuple(batch) if isinstance(batch, (list, tuple)) and is_batch(batch) else (batch,)


def _endless(dataset: Iterable[Any]) -> Iterator[Any]:
    empty = False
    while not empty:
        empty = True
        for batch in dataset:
            empty = False
            yield batch
    raise WhetValueError("train: the dataset is empty.")
