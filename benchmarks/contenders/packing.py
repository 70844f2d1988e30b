"""Packing table of the suite "trl": its providers, and reference packings of any size.

References are first-fit and best-fit decreasing with all sequences of one length in one step. This takes far fewer
steps than one per sequence and bin, so that a million sequences can be checked. Tests compare it with the independent
definition in ``whet.ops.packing``.
"""

# The peers are extras; a missing peer is not measured.
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
    """Reference packing.

    Attributes:
        lengths: (n,) tokens per sequence.
        n_bins: number of bins.
        bin_of: (n,) bin of each sequence; None if the algorithm does not specify ties.
    """

    lengths: np.ndarray
    n_bins: int
    bin_of: np.ndarray | None


def first_fit_decreasing(lengths: np.ndarray) -> Packing:
    """Fill bins in order, each with as many sequences of a length as fit; equal lengths in order of their indices.

    Args:
        lengths: (n,) integers in [1, MAX_LENGTH].
    """
    order = np.argsort(-lengths, kind="stable")
    room, bin_of = np.full(len(lengths), MAX_LENGTH), np.empty(len(lengths), np.int64)
    n_bins = start = 0
    for length, count in _longest_first(lengths):
        new = -(-count // (MAX_LENGTH // length))  # enough bins even if no existing bin has space
        reach = room[: n_bins + new]
        fits = reach // length
        taken = np.clip(count - (np.cumsum(fits) - fits), 0, fits)
        reach -= taken * length
        bin_of[order[start : start + count]] = np.repeat(np.arange(len(reach)), taken)
        n_bins = max(n_bins, int(np.flatnonzero(taken)[-1]) + 1)
        start += count
    return Packing(lengths, n_bins, bin_of)


def best_fit_decreasing(lengths: np.ndarray) -> Packing:
    """Fill the fullest bin that fits, with as many sequences of a length as possible; ties do not change the number.

    Arguments as ``first_fit_decreasing``.
    """
    bins = np.zeros(MAX_LENGTH + 1, np.int64)  # number of bins by free space
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
    """Return the share of sequences in a wrong bin, or the relative error of the number of bins; 0 if correct.

    Infinity if a sequence is missing or duplicated, or a bin exceeds MAX_LENGTH.
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
    """Return the indices by bin: the answer itself, or of rlox and TRL the first tokens, which are the indices."""
    if isinstance(answer, list):
        return [row["input_ids"][row["sequence_starts"]] if isinstance(row, dict) else row for row in answer]
    tokens = answer["input_ids"].combine_chunks().flatten().to_numpy()
    lengths = answer["seq_lengths"].to_pylist()
    ends = np.cumsum([length for row in lengths for length in row])
    members = tokens[np.concatenate(([0], ends[:-1]))]
    return np.split(members, np.cumsum([len(row) for row in lengths])[:-1])


# --- the table --------------------------------------------------------------------------------------------


def random_lengths(rng: np.random.Generator, n: int) -> np.ndarray:
    """Draw geometric lengths with mean 512, truncated at MAX_LENGTH."""
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
    from trl.data_utils import _pack_bfd  # pack_dataset processes 1000 rows at a time and writes files

    if len(lengths) > 100_000:
        raise NotMeasured("it copies all tokens, gigabytes here: only up to 100,000")
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    tokens = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    table = pyarrow.table({"input_ids": pyarrow.ListArray.from_arrays(offsets, tokens)})
    return lambda: _pack_bfd(table, MAX_LENGTH)


def packing_table(quick: bool) -> Table:
    """Create a table of a thousand to a million sequences; if quick, to ten thousand."""

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
            Provider("rlox", rlox_pack, note="takes tokens, not lengths, and copies them with mask and positions"),
            Provider("TRL", trl_pack, best_fit_decreasing, note="best-fit decreasing; takes tokens and copies them"),
        ],
        allocation="inside: the bins",
        note=f"Lengths are geometric with mean 512, truncated at {MAX_LENGTH}, the length of a bin. Whet and rlox pack "
        "first-fit decreasing. Both peers also copy tokens; neither can return only the bins.",
        item="sequences",
        size_label="sequences",
        error=packing_error,
    )
