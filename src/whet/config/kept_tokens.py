"""Sets of tokens that filters, bans and grammars leave of a vocabulary: the support of the sampler's distributions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """The tokens of positive probability in the distributions that T tokens were drawn from.

    ``kept[t]`` is the set of token t. A set takes the smallest of three forms, at most V / 8 bytes: nothing for the
    whole vocabulary, a bitmap, or ids.

    Attributes:
        offsets: (T + 1,) int64: set t is ``words[offsets[t] : offsets[t + 1]]``.
        words: (offsets[T],) int32: of each set no number for the whole vocabulary; ceil(V / 32) numbers for a bitmap,
            with token v in bit v % 32 of number v // 32; or fewer numbers for the ids in increasing order.
        vocab_size: V.
    """

    offsets: np.ndarray
    words: np.ndarray
    vocab_size: int

    @classmethod
    def from_ids(cls, sets: Iterable[Sequence[int] | np.ndarray | None], vocab_size: int) -> KeptTokens:
        """Return sets from the ids of each, in increasing order; None: the whole vocabulary."""
        return cls._join([_encode(ids, vocab_size) for ids in sets], vocab_size)

    @classmethod
    def concatenate(cls, parts: Sequence[KeptTokens]) -> KeptTokens:
        """Return the sets of all parts, at least one, end to end."""
        return cls._join([part._words(t) for part in parts for t in range(len(part))], parts[0].vocab_size)

    @classmethod
    def select(
        cls, kept: Sequence[KeptTokens | None], rows: np.ndarray, steps: np.ndarray, vocab_size: int
    ) -> KeptTokens | None:
        """Return the sets of tokens ``steps[i]`` of the completions ``rows[i]``; None if no completion has sets."""
        if all(each is None for each in kept):
            return None
        whole = np.empty(0, np.int32)
        sets = [whole if (each := kept[r]) is None else each._words(t) for r, t in zip(rows, steps, strict=True)]
        return cls._join(sets, vocab_size)

    @classmethod
    def _join(cls, sets: list[np.ndarray], vocab_size: int) -> KeptTokens:
        offsets = np.cumsum([0, *map(len, sets)], dtype=np.int64)
        return cls(offsets, np.concatenate(sets) if sets else np.empty(0, np.int32), vocab_size)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, t: int) -> np.ndarray | None:
        """Return the ids of set t in increasing order, int64; None: the whole vocabulary."""
        if not 0 <= t < len(self):
            raise IndexError(f"KeptTokens: set {t} of {len(self)}")
        words = self._words(t)
        return np.flatnonzero(self.mask(t, t + 1)[0]) if len(words) else None

    def mask(self, start: int, end: int) -> np.ndarray:
        """Return the sets [start, end) as (end - start, V) bool."""
        rows = np.ones((end - start, self.vocab_size), bool)
        for row, t in zip(rows, range(start, end), strict=True):
            words = self._words(t)
            if len(words) == _bitmap_words(self.vocab_size):
                bits = np.unpackbits(words.astype("<i4", copy=False).view(np.uint8), bitorder="little")
                row[:] = bits[: self.vocab_size]
            elif len(words):
                row[:] = False
                row[words] = True
        return rows

    def _words(self, t: int) -> np.ndarray:
        return self.words[self.offsets[t] : self.offsets[t + 1]]


def _encode(ids: Sequence[int] | np.ndarray | None, vocab_size: int) -> np.ndarray:
    if ids is None or len(ids) == vocab_size:
        return np.empty(0, np.int32)
    n_words = _bitmap_words(vocab_size)
    if len(ids) < n_words:
        return np.asarray(ids, np.int32)
    bits = np.zeros(32 * n_words, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)


def _bitmap_words(vocab_size: int) -> int:
    return (vocab_size + 31) // 32
