"""The record of a packed base in a folder of adapters: adapters trained on a quantised base fit that base only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.errors import CheckpointError
from whet.files import replace_text
from whet.models.formats import choose_formats, is_quantised, summarise
from whet.models.packed_base import PackedBase, pack_base
from whet.models.slots import ModelSource

_RECORD = "whet_base.json"


def write_record(folder: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Write the ``PackedBase.record`` of the base of adapters into their folder."""
    replace_text(Path(folder) / _RECORD, json.dumps(record, indent=1) + "\n")


def read_record(folder: str | os.PathLike[str], where: str) -> dict[str, Any] | None:
    """Read the record in a folder of adapters; None: they were trained on floats, or not by Whet.

    Raises:
        CheckpointError: the record is damaged.
    """
    path = Path(folder) / _RECORD
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        for name, kind in (("formats", str), ("is_quantised", bool), ("digest", str)):
            if not isinstance(record[name], kind):
                raise ValueError(f"{name} is {record[name]!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{where}: {path} is not a record of a base: {error}. Save the adapters again.") from None
    return record


def read_binding(
    folder: str | os.PathLike[str], source: ModelSource, is_named: bool, where: str
) -> dict[str, Any] | None:
    """Read the record of the only base that a folder of adapters fits; None: they fit the model in any format.

    Adapters compensate for the rounding of a quantised base, and fit no other. Adapters of a float base fit any format
    that is requested, or in which a file is stored.

    Args:
        source: the model of the adapters.
        is_named: whether a format was requested.
        where: prefix of error messages.

    Raises:
        CheckpointError: the record is damaged.
    """
    record = read_record(folder, where)
    if record is None or record["is_quantised"]:
        return record
    return None if is_named or is_quantised(source) else record


def pack_recorded(source: ModelSource, record: Mapping[str, Any], where: str, adapters: str) -> PackedBase:
    """Pack the recorded base from a source.

    Raises:
        CheckpointError: the source has different weights.
    """
    asked = {name: record.get(name) for name in ("weights", "embedding", "head")}
    check_formats(source, asked, record, where, adapters)
    base = pack_base(source, **asked, where=where)
    check_record(record, base, where, adapters)
    return base


def check_formats(
    source: ModelSource, asked: Mapping[str, str | None], record: Mapping[str, Any], where: str, adapters: str
) -> None:
    """Raise if a model packed as ``asked`` has other formats than the recorded base; nothing is packed.

    Raises:
        CheckpointError: naming the formats of both.
    """
    if source.base is not None:
        formats = source.base.summary
    else:
        weights, embedding, head = (asked.get(name) for name in ("weights", "embedding", "head"))
        formats = summarise(choose_formats(source, weights, embedding, head, where))
    if formats != record["formats"]:
        raise CheckpointError(
            f"{where}: {adapters} was trained on a base in {record['formats']}, and this one is in {formats}. Omit "
            f"the format, and name the model that the adapters were trained on."
        )


def check_record(record: Mapping[str, Any] | None, base: PackedBase | None, where: str, adapters: str) -> None:
    """Raise if adapters were trained on another base.

    Args:
        record: from ``PackedBase.record``; None: the adapters were trained on floats.
        base: the model's base; None: its weights are floats.
        where: prefix of error messages.
        adapters: the checkpoint or folder of the adapters.

    Raises:
        CheckpointError: naming the formats of both.
    """
    then, now = record and record["digest"], base and base.digest()
    if then != now:
        names = [
            f"a base in {known['formats']} ({known['digest'][:12]})" if known else "floats"
            for known in (record, base and base.record())
        ]
        raise CheckpointError(
            f"{where}: {adapters} was trained on {names[0]}, and this model is on {names[1]}. Use the same "
            f"weights in the same format."
        )
