"""Training runs, as ``whet train`` does them, from Python.

    from whet.runs import SFTRun, train

    result = train(SFTRun(model="models/base", data=["rows.jsonl"], output_dir="runs/sft"))

Settings are the dataclasses that the command parses. This module does not import torch before ``train`` is accessed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whet.runs.settings import (
    CPORun,
    DistillRun,
    DPORun,
    GRPORun,
    KDRun,
    KTORun,
    OnlineDPORun,
    ORPORun,
    RAFTRun,
    RewardRun,
    RLOORun,
    RunConfig,
    SDPORun,
    SFTRun,
    SimPORun,
)

if TYPE_CHECKING:
    from whet.runs.training import RunResult, train

__all__ = [
    "CPORun",
    "DPORun",
    "DistillRun",
    "GRPORun",
    "KDRun",
    "KTORun",
    "ORPORun",
    "OnlineDPORun",
    "RAFTRun",
    "RLOORun",
    "RewardRun",
    "RunConfig",
    "RunResult",
    "SDPORun",
    "SFTRun",
    "SimPORun",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in ("RunResult", "train"):
        raise AttributeError(f"module 'whet.runs' has no attribute {name!r}")
    from whet.runs import training

    return getattr(training, name)
