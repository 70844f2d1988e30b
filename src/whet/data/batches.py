"""Datasets as streams of batches: the arguments of successive training steps.

One rule, ``is_batch``, classifies an item of a dataset:

    row     a mapping of fields; a tuple of fields in the algorithm's order; a text; chat messages; a flat list or
            1-D array of token ids
    batch   a list of rows; a mapping whose fields are columns of one length; (B, T) arrays of token ids: bare,
            under ``input_ids``, or in a tuple, as the arguments of ``train_step``

Only the fields that algorithms read matter: other columns may be arrays of any shape. Rows of a sequence are shuffled;
rows of an iterable keep its order. Does not tokenise or pad.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from whet.data.encoder import FIELDS
from whet.data.messages import drop_nulls, is_messages
from whet.data.rows import epoch_order
from whet.errors import WhetTypeError, WhetValueError

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

AsRow = Callable[[Any], Mapping[str, Any]]
Passes = Callable[[int, int], Iterable[Any]]
"""(epoch, first item) -> the items of that epoch from there on."""
BatchesOf = Callable[[Iterable[Any]], Iterator[tuple[tuple[Any, ...], int]]]
"""Items of a pass -> the arguments of each ``train_step`` and their number of items."""


class Place(NamedTuple):
    """A position in a dataset, independent of the batch size.

    Attributes:
        epoch: completed passes over the dataset.
        item: items of the current pass before the position: rows, or ready batches.
    """

    epoch: int = 0
    item: int = 0


class Rewindable(Iterator[Any]):
    """An iterator that repeats, after ``rewind``, the items that were not forgotten.

    Args:
        source: an iterator, which cannot restart.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self._returned: list[Any] = []
        self._pending: list[Any] = []

    def __next__(self) -> Any:
        item = self._pending.pop(0) if self._pending else next(self.source)
        self._returned.append(item)
        return item

    def forget(self, n_items: int) -> None:
        """Forget the first ``n_items`` of the items that were returned: ``rewind`` does not repeat them."""
        del self._returned[:n_items]

    def rewind(self) -> None:
        """Return again, from now on, the items that were returned and not forgotten."""
        self._returned, self._pending = [], self._returned + self._pending


class BatchStream(NamedTuple):
    """Batches of a dataset, from a position on.

    Attributes:
        batches: the arguments of each ``train_step``, and the position after it.
        n_left: batches to the end of the first batch's epoch; None if unknown.
        per_epoch: batches of a whole epoch; None if unknown.
    """

    batches: Iterator[tuple[tuple[Any, ...], Place]]
    n_left: int | None = None
    per_epoch: int | None = None


def batch_stream(
    dataset: Any, batch_size: int, seed: int, start: Place, fields: tuple[str, ...], as_row: AsRow
) -> BatchStream:
    """Return the infinite stream of ``train_step`` arguments from a position on.

    Args:
        dataset: rows or batches (``is_batch``; the first item decides for all), in one of these forms:

            - a sequence, or anything with ``__len__`` and ``__getitem__``: its epochs are shuffled, keyed by
              (seed, epoch); rows that do not fill a batch at the end of an epoch are dropped from it.
            - an iterable: read in its own order, repeatedly; the last batch of rows in a pass may be smaller.
              ``set_epoch``, if it has one, is called before each pass.
            - torch's ``DataLoader``: likewise, but torch's samplers draw from a generator keyed by (seed, epoch) and
              the seed of the loader's generator; torch's default collate stacks only tensors and does not change rows.
            - an iterator: read from its current item to its end.
        batch_size: rows per batch.
        seed: determines the order.
        start: the position to begin at, or the next epoch if less than a batch remains of this one; an iterator is not
            advanced. A different batch_size begins at the same row.
        fields: names of a tuple's members, in order.
        as_row: converts a row to a dict.

    Raises:
        WhetTypeError: dataset has none of these forms.
        WhetValueError: dataset is empty, or a sequence with fewer rows than batch_size.
    """
    _check_dataset("train", dataset)
    as_row = row_reader(dataset, as_row)
    if is_sequence(dataset):
        n, first = len(dataset), _first("train", dataset)
        size = 1 if is_batch(first, fields) else batch_size
        if n < size:
            raise WhetValueError(
                f"train: the dataset has {n} rows, fewer than batch_size={size}. Pass more rows, or a trainer with "
                f"batch_size={n}."
            )

        def shuffled(epoch: int, first: int) -> Iterator[Any]:
            order = epoch_order(n, seed, epoch)[first:]
            return (dataset[i] for i in order[: len(order) // size * size].tolist())

        batches_of = partial(_one_pass, batch_size=size, fields=fields, as_row=as_row)
        return _stream(shuffled, batches_of, start, n, lambda n_items: n_items // size)
    if isinstance(dataset, Iterator):
        return BatchStream(_with_places(_one_pass(dataset, batch_size, fields, as_row), start))
    passes = _passes(dataset, seed)

    def in_order(epoch: int, first: int) -> Iterator[Any]:
        return itertools.islice(passes(epoch), first, None)

    size = _batch_items(dataset, passes, batch_size, fields)
    batches_of = partial(_one_pass, batch_size=batch_size, fields=fields, as_row=as_row)
    return _stream(in_order, batches_of, start, _length(dataset), lambda n_items: -(-n_items // size))


def batches_in_order(
    dataset: Any, batch_size: int, fields: tuple[str, ...], as_row: AsRow, where: str
) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of ``train_step`` for one pass over a dataset, in order; the last batch may be smaller.

    Args:
        dataset: as for ``batch_stream``; or a single batch or row.
        batch_size: as in ``batch_stream``.
        fields: as in ``batch_stream``.
        as_row: as in ``batch_stream``.
        where: the caller's name, for errors.

    Raises:
        WhetTypeError: dataset has none of these forms.
        WhetValueError: dataset is empty.
    """
    ids = _is_list(dataset) and len(dataset) > 0 and _is_ids(dataset)
    if isinstance(dataset, (str, Mapping)) or ids or is_messages(dataset):
        dataset = [dataset]
    _check_dataset(where, dataset)
    as_row = row_reader(dataset, as_row)
    if is_sequence(dataset):
        _first(where, dataset)
        items: Iterable[Any] = (dataset[i] for i in range(len(dataset)))
    else:
        items = _passes(dataset, 0)(0)
    batches = (arguments for arguments, _ in _one_pass(items, batch_size, fields, as_row))
    first = next(batches, None)
    if first is None:
        raise WhetValueError(f"{where}: the dataset is empty.")
    return itertools.chain([first], batches)


def row_reader(dataset: Any, as_row: AsRow) -> AsRow:
    """Return ``as_row``; for a Hugging Face dataset, also drop the None values that Arrow adds to dicts."""
    source = getattr(dataset, "dataset", dataset)  # the dataset of a DataLoader or Subset
    is_arrow = type(source).__module__.partition(".")[0] == "datasets"
    return (lambda item: drop_nulls(as_row(item))) if is_arrow else as_row


def is_batch(item: Any, fields: tuple[str, ...]) -> bool:
    """Whether an item of a dataset is a batch rather than a row, by the rule at the top of this file.

    Raises:
        WhetTypeError: the item is a list of as many texts as ``fields``, which is ambiguous.
    """
    if isinstance(item, Mapping):
        return _is_column(item.get("input_ids")) or _has_columns(item)
    if _is_fields(item, fields):
        return all(_is_column(member) for name, member in zip(fields, item, strict=True) if name in FIELDS)
    if _is_list(item):
        if len(item) == len(fields) > 1 and all(isinstance(member, str) for member in item):
            raise WhetTypeError(
                f"train: {item!r:.60} may be a row of ({', '.join(fields)}) or a batch of texts. Pass a tuple or a "
                f"dict for the one, a list of dicts for the other."
            )
        return not (_is_ids(item) or is_messages(item))
    return getattr(item, "ndim", 0) >= 2


def as_rows(batch: Any, as_row: AsRow, where: str) -> list[Mapping[str, Any]] | None:
    """Return the rows of a batch or of a single row; None for token ids that ``whet.data.token_rows`` reads.

    Raises:
        WhetTypeError: the batch is not a mapping, list, text or array; ``where`` is the caller's name.
        WhetValueError: the batch is empty.
    """
    if _is_object_array(batch):
        batch = batch.tolist()
    if not (isinstance(batch, (str, Mapping)) or _is_list(batch) or hasattr(batch, "ndim")):
        raise WhetTypeError(
            f"{where}: the batch is {batch!r:.60}, expected a list of rows (dicts), a dict of columns, or token ids in "
            f"a tensor or lists. For an iterator, pass list(batch)."
        )
    if _length(batch) == 0:
        raise WhetValueError(f"{where}: the batch is empty. Pass at least one row.")
    if isinstance(batch, Mapping):
        if _is_column(batch.get("input_ids")):
            return None
        if not _has_columns(batch):
            return [batch]
        return [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    if isinstance(batch, str) or is_messages(batch):
        return [as_row(batch)]
    if not _is_list(batch) or _is_ids(batch) or all(map(_is_ids, batch)):
        return None
    return [as_row(item) for item in batch]


def tokenized_rows(batch: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """Return the rows of a mapping with (B, T) ``input_ids`` and columns of B values, without columns of text fields.

    Raises:
        WhetValueError: a column has another number of values; ``where`` is the algorithm's name.
    """
    n_rows = len(batch["input_ids"])
    columns = {name: column for name, column in batch.items() if name not in FIELDS and column is not None}
    for name, column in columns.items():
        if _length(column) != n_rows:
            raise WhetValueError(
                f"{where}: {name} is {column!r:.40}, expected one value for each of the {n_rows} rows of input_ids."
            )
    return [{name: column[i] for name, column in columns.items()} for i in range(n_rows)]


def columns_as_rows(fields: tuple[str, ...], columns: Sequence[Any], where: str) -> list[Mapping[str, Any]] | None:
    """Return the rows of columns of texts or chats, one column per field; None for columns of token ids."""
    if not any(_has_text(column) for column in columns):
        return None
    lists = [[column] if isinstance(column, str) or is_messages(column) else column for column in columns]
    check_row_counts(where, fields, lists)
    return [dict(zip(fields, row, strict=True)) for row in zip(*lists, strict=True)]


def as_row(item: Any, fields: tuple[str, ...], where: str) -> Mapping[str, Any]:
    """Return a dict unchanged, or a tuple of ``fields`` as a dict; ``where`` is the algorithm's name, for errors."""
    if isinstance(item, Mapping):
        return item
    if isinstance(item, tuple) and len(item) == len(fields):
        return dict(zip(fields, item, strict=True))
    raise WhetTypeError(f"{where}: a row is {item!r:.60}, expected a dict or a tuple of ({', '.join(fields)}).")


def is_sequence(dataset: Any) -> bool:
    """Whether a dataset has random access, as a list, a tensor or torch's map-style Dataset has."""
    indexed = hasattr(dataset, "__getitem__") and _length(dataset) is not None
    return indexed and not isinstance(dataset, (str, bytes, Mapping, *_torch_data("IterableDataset")))


def check_row_counts(where: str, names: Sequence[str], columns: Sequence[Sequence[Any]]) -> None:
    """Reject columns of a batch that are empty or differ in length."""
    counts = [len(column) for column in columns]
    if len(set(counts)) > 1 or counts[0] == 0:
        found = ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=True))
        raise WhetValueError(f"{where}: rows of the batch: {found}. Pass equal numbers, at least one.")


def _torch_data(name: str) -> tuple[type, ...]:
    """Return a class of ``torch.utils.data`` for ``isinstance``; empty if torch is not imported."""
    module = sys.modules.get("torch.utils.data")
    return () if module is None else (getattr(module, name),)


# --- kinds of items ------------------------------------------------------------------------------------


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _is_ids(value: Any) -> bool:
    """Whether ``value`` is one row of token ids: a 1-D array, or a flat list of integers."""
    if hasattr(value, "ndim"):
        return value.ndim == 1 and not _is_object_array(value)
    return _is_list(value) and all(isinstance(v, Integral) or getattr(v, "ndim", 1) == 0 for v in value[:1])


def _is_column(value: Any) -> bool:
    """Whether ``value`` is a column, the values of a field in several rows: texts, chats, or rows of token ids."""
    if hasattr(value, "ndim"):
        return value.ndim == 2 or _is_object_array(value)
    return _is_list(value) and any(isinstance(v, str) or _is_ids(v) or is_messages(v) for v in value[:1])


def _is_object_array(value: Any) -> bool:
    """Whether ``value`` is a 1-D array of texts or other objects, such as a NumPy column."""
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "OUT"


def _has_text(column: Any) -> bool:
    several = (_is_list(column) or _is_object_array(column)) and not is_messages(column)
    values = column[:1] if several else [column]
    return any(isinstance(value, str) or is_messages(value) for value in values)


def _has_columns(item: Mapping[str, Any]) -> bool:
    read = [item[name] for name in FIELDS if item.get(name) is not None]
    lengths = {_length(value) for value in item.values()} if read and all(map(_is_column, read)) else set()
    return len(lengths) == 1 and None not in lengths


def _length(value: Any) -> int | None:
    """Return the number of items; None if ``value`` is not a container, or its length is unknown, as of a stream."""
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__"):
        return None
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def _is_fields(item: Any, fields: tuple[str, ...]) -> bool:
    """Whether ``item`` has one value per field: a tuple, or a list with arrays of token ids, as a loader returns."""
    if not _is_list(item) or len(item) != len(fields) or _is_ids(item):
        return False
    if isinstance(item, tuple):
        return not any(isinstance(member, Mapping) for member in item)
    ids = [member for name, member in zip(fields, item, strict=True) if name in FIELDS]
    return all(getattr(member, "ndim", 0) == 2 for member in ids)


# --- passes over a dataset -----------------------------------------------------------------------------


_TABLES = {"to_pylist": "to_pylist()", "to_dicts": "to_dicts()", "iterrows": "to_dict('records')"}
"""Method that identifies a table of pyarrow, polars or pandas -> call that returns its rows."""


def _check_dataset(where: str, dataset: Any) -> None:
    """Reject an empty dataset, and anything that is not a dataset."""
    if isinstance(dataset, Mapping):
        raise WhetTypeError(
            f"{where}: dataset is a mapping with the keys {', '.join(map(repr, list(dataset)[:5]))}, expected rows or "
            f"batches. Pass one of its values if it holds splits, a list of dicts if it holds columns, or [batch]."
        )
    method = next((name for name in _TABLES if hasattr(dataset, name)), None)
    if method is not None:
        raise WhetTypeError(
            f"{where}: dataset is a {type(dataset).__name__}, whose items are columns, expected rows. Pass "
            f"{_TABLES[method]} of it."
        )
    items = hasattr(dataset, "__iter__") and getattr(dataset, "ndim", 1) > 0
    if isinstance(dataset, (str, bytes)) or not (is_sequence(dataset) or items):
        raise WhetTypeError(
            f"{where}: dataset is {dataset!r:.60}, expected a sequence or iterable of rows or batches (with "
            f"__len__ and __getitem__, or __iter__). whet.data.read_rows reads a file."
        )
    if _length(dataset) == 0:
        raise WhetValueError(f"{where}: the dataset is empty.")


def _first(where: str, dataset: Any) -> Any:
    try:
        return dataset[0]
    except (KeyError, TypeError) as error:
        raise WhetTypeError(
            f"{where}: dataset[0] of the {type(dataset).__name__} raised {error!r}, expected its first row. Pass a "
            f"sequence of rows."
        ) from error


def _one_pass(
    items: Iterable[Any], batch_size: int, fields: tuple[str, ...], as_row: AsRow
) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yield the arguments of each ``train_step`` and their number of items: ready batches, or ``batch_size`` rows."""
    items = iter(items)
    first = list(itertools.islice(items, 1))
    items = itertools.chain(first, items)
    if first and is_batch(first[0], fields):
        for batch in items:
            if _is_fields(batch, fields) and is_batch(batch, fields):
                yield tuple(batch), 1
            else:
                rows = as_rows(batch, as_row, "train")
                yield (batch if rows is None else rows,), 1
    while rows := list(itertools.islice(items, batch_size)):
        for row in rows:
            if is_batch(row, fields):
                raise WhetTypeError(f"train: {row!r:.60} is a batch, but the dataset began with a row. Pass one kind.")
        yield ([as_row(row) for row in rows],), len(rows)


def _batch_items(dataset: Any, passes: Callable[[int], Iterable[Any]], batch_size: int, fields: tuple[str, ...]) -> int:
    """Return the items per batch if the dataset has a length: 1 for ready batches."""
    if _length(dataset) is None:
        return batch_size
    if isinstance(dataset, _torch_data("DataLoader")) and dataset.batch_sampler is not None:
        return 1
    return 1 if any(is_batch(item, fields) for item in itertools.islice(passes(0), 1)) else batch_size


def _stream(
    passes: Passes, batches_of: BatchesOf, start: Place, n_items: int | None, count: Callable[[int], int]
) -> BatchStream:
    """Repeat passes of ``n_items`` (None if unknown); ``count`` maps a number of items to batches."""
    if n_items is None:
        return BatchStream(_repeat(passes, batches_of, start))
    if count(max(0, n_items - start.item)) == 0:
        start = Place(start.epoch + 1)
    return BatchStream(_repeat(passes, batches_of, start), count(n_items - start.item), count(n_items))


def _repeat(passes: Passes, batches_of: BatchesOf, start: Place) -> Iterator[tuple[tuple[Any, ...], Place]]:
    """Yield the batches of pass after pass, from a position on."""
    while True:
        place = start
        for arguments, place in _with_places(batches_of(passes(*start)), start):
            yield arguments, place
        if place.item == 0:
            raise WhetValueError("train: the dataset is empty.")
        start = Place(start.epoch + 1)


def _with_places(
    batches: Iterable[tuple[tuple[Any, ...], int]], place: Place
) -> Iterator[tuple[tuple[Any, ...], Place]]:
    for arguments, n_items in batches:
        place = Place(place.epoch, place.item + n_items)
        yield arguments, place


def _passes(dataset: Any, seed: int) -> Callable[[int], Iterable[Any]]:
    """Return a function from epoch to a pass over an iterable; (seed, epoch) determine a random order."""
    if not isinstance(dataset, _torch_data("DataLoader")):
        return lambda epoch: _at_epoch(dataset, epoch, dataset)
    import torch

    generator = torch.Generator()
    loader = _copy_loader(dataset, generator)
    key = [int(seed) % 2**64, _generator_seed(dataset) % 2**64]

    def one_pass(epoch: int) -> Iterable[Any]:
        generator.manual_seed(int(np.random.SeedSequence([*key, epoch]).generate_state(1)[0]))
        return _at_epoch(loader, epoch, loader.dataset, loader.sampler, loader.batch_sampler)

    return one_pass


def _at_epoch(dataset: Any, epoch: int, *parts: Any) -> Any:
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
    return dataset


def _copy_loader(loader: DataLoader, generator: torch.Generator) -> DataLoader:
    """Copy the loader with another generator for torch's samplers, and without collation of rows.

    In a resumed run, the state of the loader's or torch's generator differs.
    """
    from torch.utils.data import default_collate

    keyed = copy.copy(loader)
    # DataLoader forbids assigning its sampler.
    vars(keyed).update(
        generator=generator,
        sampler=_copy_sampler(loader.sampler, generator),
        batch_sampler=_copy_sampler(loader.batch_sampler, generator),
        collate_fn=_stack_tensors if loader.collate_fn is default_collate else loader.collate_fn,
        _iterator=None,
    )
    return keyed


def _copy_sampler(sampler: Any, generator: torch.Generator) -> Any:
    """Copy a sampler that draws from a generator, or wraps one that does, to draw from ``generator``."""
    wrapped = getattr(sampler, "sampler", None)
    keyed = None if wrapped is None else _copy_sampler(wrapped, generator)
    if not hasattr(sampler, "generator") and keyed is wrapped:
        return sampler
    sampler = copy.copy(sampler)
    if hasattr(sampler, "generator"):
        sampler.generator = generator
    if keyed is not wrapped:
        sampler.sampler = keyed
    return sampler


def _generator_seed(loader: DataLoader) -> int:
    """Return the seed of the generator of a loader or of its sampler; 0 without one."""
    holders = (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    generators = (getattr(holder, "generator", None) for holder in holders)
    return next((generator.initial_seed() for generator in generators if generator is not None), 0)


def _stack_tensors(items: list[Any]) -> Any:
    """Collate tensors and tuples of tensors as torch does; return rows as is, whose lists torch would transpose."""
    from torch.utils.data import default_collate

    members = [member for item in items for member in (item if isinstance(item, tuple) else (item,))]
    return default_collate(items) if all(hasattr(member, "ndim") for member in members) else items
