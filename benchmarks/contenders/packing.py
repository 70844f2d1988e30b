"""The packing table of the suite "trl": who packs, and what a right packing is at any size.

Right answers come from first-fit and best-fit decreasing a length at a time. That takes far fewer steps than one per
sequence and bin, so a million sequences are checked too. Written apart from the definition in ``whet.ops.packing``,
with which it has to agree.
"""

# The peers are an extra; where one is not installed it is not measured.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import whet
from whet.bench.case import Call, Case, NotMeasured, Provider, Table
from whet.ops.packing import naive_pack_sequences

MAX_LENGTH = 2048
"""Capacity of a bin in tokens."""


class Packing(NamedTuple):
    """The right answer, as far as it is determined.

    Attributes:
        lengths: (n,) tokens per sequence.
        n_bins: how many bins.
        bin_of: (n,) the bin of each sequence; None where the algorithm leaves ties open.
    """

    lengths: np.ndarray
    n_bins: int
    bin_of: np.ndarray | None


def first_fit_decreasing(lengths: np.ndarray) -> Packing:
    """Each bin in turn takes as many of a length as it has room for; equal lengths go in order of their indices.

    Args:
        lengths: (n,) integers in [1, MAX_LENGTH].
    """
    order = np.argsort(-lengths, kind="stable")
    room, bin_of = np.full(len(lengths), MAX_LENGTH), np.empty(len(lengths), np.int64)
    n_bins = start = 0
    for length, count in _longest_first(lengths):
        new = -(-count // (MAX_LENGTH // length))  # as many bins as would do if none had room
        reach = room[: n_bins + new]
        fits = reach // length
        taken = np.clip(count - (np.cumsum(fits) - fits), 0, fits)
        reach -= taken * length
        bin_of[order[start : start + count]] = np.repeat(np.arange(len(reach)), taken)
        n_bins = max(n_bins, int(np.flatnonzero(taken)[-1]) + 1)
        start += count
    return Packing(lengths, n_bins, bin_of)


def best_fit_decreasing(lengths: np.ndarray) -> Packing:
    """The fullest bin that has room takes as many of a length as it can. How many bins are left does not hang on ties.

    Arguments as ``first_fit_decreasing``.
    """
    bins = np.zeros(MAX_LENGTH + 1, np.int64)  # how many there are, by room
    bins[MAX_LENGTH] = len(lengths)
    for length, left in _longest_first(lengths):
        for room in (length + np.flatnonzero(bins[length:])).tolist():
            each = room // length
            taken = min(left, each * int(bins[room]))
            full, rest = divmod(taken, each)
            bins[room] -= full + (rest > 0)
            bins[room - each * length] += full
            bins[room - rest * length] += rest > 0
            left -= taken
            if left == 0:
                break
    return Packing(lengths, len(lengths) - int(bins[MAX_LENGTH]), None)


def _longest_first(lengths: np.ndarray) -> list[tuple[int, int]]:
    values, counts = np.unique(lengths, return_counts=True)
    return list(zip(values.tolist(), counts.tolist(), strict=True))[::-1]


def packing_error(answer: Any, right: Packing) -> float:
    """0 for a right answer; the share of sequences in a wrong bin, or of bins too many or too few.

    Infinite where a sequence is missing or there twice, or a bin holds more than MAX_LENGTH.
    """
    bins = bins_of_indices(answer)
    members = np.array([i for bin_members in bins for i in bin_members], np.int64)
    bin_of = np.repeat(np.arange(len(bins)), [len(bin_members) for bin_members in bins])
    if not np.array_equal(np.sort(members), np.arange(len(right.lengths))):
        return float("inf")
    if np.bincount(bin_of, weights=right.lengths[members]).max() > MAX_LENGTH:
        return float("inf")
    error = abs(len(bins) / right.n_bins - 1)
    return error if right.bin_of is None else max(error, float(np.mean(right.bin_of[members] != bin_of)))


def bins_of_indices(answer: Any) -> list[Any]:
    """Indices by bin: the answer itself, or what rlox and TRL packed, if each sequence begins with its index."""
    if isinstance(answer, list):
        return [row["input_ids"][row["sequence_starts"]] if isinstance(row, dict) else row for row in answer]
    tokens = answer["input_ids"].combine_chunks().flatten().to_numpy()
    lengths = answer["seq_lengths"].to_pylist()
    ends = np.cumsum([length for row in lengths for length in row])
    members = tokens[np.concatenate(([0], ends[:-1]))]
    return np.split(members, np.cumsum([len(row) for row in lengths])[:-1])


# --- the table --------------------------------------------------------------------------------------------


def random_lengths(rng: np.random.Generator, n: int) -> np.ndarray:
    """Geometric with mean 512, cut at MAX_LENGTH."""
    return np.minimum(rng.geometric(1 / 512, n), MAX_LENGTH)


def whet_pack(lengths: np.ndarray) -> Call:
    return lambda: whet.pack_sequences(lengths, MAX_LENGTH)


def naive_pack(lengths: np.ndarray) -> Call:
    if len(lengths) > 10_000:
        raise NotMeasured("quadratic: only up to 10,000")
    as_list = lengths.tolist()
    return lambda: naive_pack_sequences(as_list, MAX_LENGTH)


def rlox_pack(lengths: np.ndarray) -> Call:
    import rlox

    if len(lengths) > 10_000:
        raise NotMeasured("quadratic: only up to 10,000")
    tokens = np.arange(len(lengths) + MAX_LENGTH, dtype=np.uint32)
    sequences = [tokens[i : i + length] for i, length in enumerate(lengths.tolist())]
    return lambda: rlox.pack_sequences(sequences, MAX_LENGTH)


def trl_pack(lengths: np.ndarray) -> Call:
    import pyarrow
    from trl.data_utils import _pack_bfd  # pack_dataset goes by 1000 rows, and writes files

    if len(lengths) > 100_000:
        raise NotMeasured("it copies all tokens, gigabytes here: only up to 100,000")
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    tokens = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    table = pyarrow.table({"input_ids": pyarrow.ListArray.from_arrays(offsets, tokens)})
    return lambda: _pack_bfd(table, MAX_LENGTH)


def packing_table(quick: bool) -> Table:
    """A thousand sequences to a million; to ten thousand if it has to be quick."""

    def case(n: int) -> Case:
        return Case(
            f"{n:,}",
            inputs=lambda rng: random_lengths(rng, n),
            reference=first_fit_decreasing,
            tolerance=0.0,
            n_bytes=16 * n,
            n_items=n,
            size=n,
        )

    return Table(
        "Packing",
        [case(10**power) for power in ((3, 4) if quick else (3, 4, 5, 6))],
        [
            Provider("whet", whet_pack),
            Provider("whet (naive)", naive_pack, note="the definition, in Python"),
            Provider(
                "rlox", rlox_pack, note="takes the tokens, not the lengths, and copies them, with mask and positions"
            ),
            Provider(
                "TRL", trl_pack, best_fit_decreasing, note="best-fit decreasing; takes the tokens and copies them"
            ),
        ],
        allocation="inside: the bins",
        note=f"Lengths are geometric with mean 512, cut at {MAX_LENGTH}, the length of a bin. Whet and rlox pack "
        "first-fit decreasing. The two peers do more than find the bins; neither can be asked for only the bins.",
        item="sequences",
        size_label="sequences",
        error=packing_error,
    )
