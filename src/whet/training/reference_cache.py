"""A frozen reference's log-probs of preference pairs: kept across epochs and in checkpoints, and cached on disk for
later runs over the same pairs.

The cache has one file per model, keyed by a digest of its weights and settings and by the arithmetic; one line per row,
keyed by a digest of its token ids, so that a hit equals a recomputation. Rows are written as soon as they are added: a
run that is killed loses none.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from whet.errors import WhetValueError
from whet.files import drop_torn_line
from whet.training.distributed import Ranks

TokenRow = tuple[list[int], list[int], list[int]]
"""Token ids of a pair: prompt, chosen and rejected completion."""

Sums = tuple[float, float]
"""Log-probs of the chosen and the rejected completion of a pair, summed over tokens."""


class ReferenceCache:
    """Summed log-probs of one reference, by row.

    Args:
        folder: created if missing.
        digest: of the reference's weights and settings, in hexadecimal.
        arithmetic: backend that computes the sums: "bfloat16", "float32" or "torch".

    Raises:
        WhetValueError: ``folder`` is a file, or its file for this reference is damaged.
    """

    def __init__(self, folder: str | os.PathLike[str], digest: str, arithmetic: str) -> None:
        path = Path(folder)
        if path.exists() and not path.is_dir():
            raise WhetValueError(f"reference_cache: {str(path)!r} is a file. Name a folder.")
        path.mkdir(parents=True, exist_ok=True)
        self._path = path / f"{digest[:32]}-{arithmetic}.jsonl"
        self._sums: dict[str, Sums] = {}
        if self._path.exists():
            drop_torn_line(self._path)
            for number, line in enumerate(self._path.read_text(errors="replace").splitlines(), 1):
                try:
                    key, chosen, rejected = json.loads(line)
                    self._sums[key] = (float(chosen), float(rejected))
                except (TypeError, ValueError):
                    raise WhetValueError(
                        f"reference_cache: line {number} of {str(self._path)!r} is {line[:60]!r}, expected a row's "
                        "digest and two numbers. Delete the line, or the file: missing sums are computed again."
                    ) from None

    def __getitem__(self, row: Sequence[Sequence[int]]) -> Sums | None:
        """Return the sums of a row (prompt, chosen and rejected token ids); None: unknown."""
        return self._sums.get(row_digest(row))

    def add(self, rows: Iterable[tuple[Sequence[Sequence[int]], Sums]]) -> None:
        """Store the sums of rows."""
        new = {row_digest(row): sums for row, sums in rows}
        with self._path.open("a") as file:
            file.writelines(json.dumps([key, *sums]) + "\n" for key, sums in new.items())
        self._sums |= new


def row_digest(row: Sequence[Sequence[int]]) -> str:
    """Return 32 hexadecimal digits that identify a row (prompt, chosen and rejected token ids)."""
    digest = hashlib.sha256()
    for part in row:
        digest.update(array("q", [len(part), *part]).tobytes())
    return digest.hexdigest()[:32]


class ReferenceSums:
    """Summed reference log-probs of pairs, keyed by token ids, kept across epochs and in checkpoints."""

    def __init__(self) -> None:
        self._sums: dict[str, Sums] = {}

    def get(self, row: Sequence[Sequence[int]]) -> Sums | None:
        """Return the sums of a row; None: unknown."""
        return self._sums.get(row_digest(row)) if self._sums else None

    def add(
        self,
        rows: Sequence[TokenRow],
        compute: Callable[[list[TokenRow]], list[Sums]],
        batch_size: int,
        open_cache: Callable[[], ReferenceCache] | None,
        ranks: Ranks,
    ) -> list[Sums]:
        """Return the sums of all rows; ``compute``, called in batches, computes those missing here and in the cache.

        Only rank 0 reads and writes the cache.
        """
        keys = [row_digest(row) for row in rows]
        unknown = {key: row for key, row in zip(keys, rows, strict=True) if key not in self._sums}
        cache: ReferenceCache | None = None

        def look_up(open_cache: Callable[[], ReferenceCache]) -> dict[str, Sums]:
            nonlocal cache
            cache = open_cache()
            return {key: sums for key, row in unknown.items() if (sums := cache[row])}

        if open_cache and unknown:
            self._sums |= ranks.broadcast_from_first(partial(look_up, open_cache))
        missing = [(key, row) for key, row in unknown.items() if key not in self._sums]
        for start in range(0, len(missing), batch_size):
            batch = dict(missing[start : start + batch_size])
            new = compute(list(batch.values()))
            if cache:
                cache.add(zip(batch.values(), new, strict=True))
            self._sums |= zip(batch, new, strict=True)
        return [self._sums[key] for key in keys]

    def tensors(self) -> dict[str, np.ndarray]:
        """Return row digests (N, 16) uint8, and chosen and rejected sums (N, 2) float64, for a checkpoint."""
        if not self._sums:
            return {}
        rows = np.array([list(bytes.fromhex(key)) for key in self._sums], np.uint8)
        return {"rows": rows, "sums": np.array(list(self._sums.values()), np.float64)}

    def load_tensors(self, tensors: Mapping[str, Any]) -> None:
        """Restore the result of ``tensors``."""
        if tensors:
            rows, sums = tensors["rows"].tolist(), tensors["sums"].tolist()
            self._sums = {bytes(key).hex(): (c, r) for key, (c, r) in zip(rows, sums, strict=True)}
