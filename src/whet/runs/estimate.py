"""Estimated memory of a run, from its settings and the lengths of its rows, before its model is loaded."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from whet.errors import WhetValueError
from whet.models.slots import ModelSource
from whet.runs.adapters import plan_adapters
from whet.system.memory import resident_bytes
from whet.training.sizes import Lengths, RunMemory, run_memory


def estimate_run_memory(run: Any, source: ModelSource, lengths: Lengths, *, interpreter: int) -> RunMemory:
    """Return ``run_memory`` for the settings of a run."""
    plan = plan_adapters(run, source, "whet estimate")
    base = "none" if plan.adapters is None else plan.base
    return run_memory(source, run, lengths, interpreter=interpreter, adapters=plan.adapters, base=base)


def measure_interpreter(model: str, tasks: Sequence[Any], has_adapters: bool) -> int:
    """Measure the memory of a process with the imports, tokenizer and tasks of ``whet train``, without the model."""
    code = (
        f"from whet.runs.estimate import print_interpreter_memory as go; go({model!r}, {list(tasks)!r}, {has_adapters})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise WhetValueError(f"whet estimate: importing the modules of whet train failed: {done.stderr.strip()[-300:]}")
    return int(done.stdout)


def print_interpreter_memory(model: str, tasks: Sequence[Any], has_adapters: bool) -> None:
    """Import the modules of ``whet train``, load tokenizer and tasks, and print this process's memory.

    Errors of tokenizer or tasks are left to the run.
    """
    models = ("transformers.models.auto.modeling_auto", "transformers.modeling_utils")
    for name in ("whet.runs.training", *models, *(["peft"] if has_adapters else [])):
        importlib.import_module(name)
    from whet.tasks.mixture import open_tasks
    from whet.text.model import load_transformers_tokenizer

    loaded = []
    if Path(model).exists():
        with suppress(Exception):
            loaded.append(load_transformers_tokenizer(model))
    with suppress(Exception):
        loaded.append(open_tasks(tasks))
    print(resident_bytes())
