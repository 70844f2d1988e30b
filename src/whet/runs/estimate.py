"""Estimated memory of a run, from its settings and the lengths of its rows, before its model is loaded."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from whet.config.toml import read_toml
from whet.errors import WhetValueError
from whet.models.hub import find_on_hub
from whet.models.sizes import estimate
from whet.models.slots import ModelSource
from whet.models.sources.pretrained import open_pretrained
from whet.rollout.server import is_url
from whet.runs.adapters import plan_adapters
from whet.runs.native import uses_learner
from whet.system.memory import resident_bytes
from whet.text.reward_model import open_reward_source
from whet.training.sizes import Lengths, RunMemory, run_memory


def estimate_run_memory(run: Any, source: ModelSource, lengths: Lengths, *, interpreter: int) -> RunMemory:
    """Return ``run_memory`` for the settings of a run."""
    plan = plan_adapters(run, source, "whet estimate")
    base = "none" if plan.adapters is None else plan.base
    learner = uses_learner(run, plan, "whet estimate")
    if run.trains_reward and base == "none":  # without an LM head
        source = source._replace(config=dataclasses.replace(source.config, tied_head=True))
    return run_memory(
        source, run, lengths, interpreter=interpreter, adapters=plan.adapters, base=base, learner=learner,
        others=_other_bytes(run),
    )  # fmt: skip


def _other_bytes(run: Any) -> dict[str, int]:
    """Return the bytes of the weights of other models in this process, by part."""
    specs = [*getattr(run, "reward", []), getattr(run, "preference", "")]
    rewards = sum(estimate(*open_reward_source(spec)).weights for spec in specs if spec and Path(spec).is_dir())
    judges = [read_toml(spec).get("model", "") for spec in specs if spec.endswith(".toml")]
    return {
        "teacher": _model_bytes(getattr(run, "teacher", ""), "teacher"),
        "reward_models": rewards + sum(_model_bytes(model, "judge") for model in judges),
    }


def _model_bytes(model: str, kind: str) -> int:
    """Return the bytes of the weights of a model in this process; 0: there is none, or it is behind a URL."""
    if not model or is_url(model):
        return 0
    return estimate(open_pretrained(find_on_hub(model, f"whet estimate: {kind}"))).weights


def measure_interpreter(model: str, tasks: Sequence[Any], packages: Sequence[str]) -> int:
    """Measure the memory of a process with the imports, tokenizer and tasks of ``whet train``, without the model.

    Args:
        model: a folder, file or name.
        tasks: specifications of tasks.
        packages: packages that the run imports; without transformers, it reads the tokenizer itself.
    """
    arguments = f"{model!r}, {list(tasks)!r}, {list(packages)!r}"
    code = f"from whet.runs.estimate import print_interpreter_memory as go; go({arguments})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise WhetValueError(f"whet estimate: importing the modules of whet train failed: {done.stderr.strip()[-300:]}")
    return int(done.stdout)


def print_interpreter_memory(model: str, tasks: Sequence[Any], packages: Sequence[str]) -> None:
    """Import the modules of ``whet train``, load tokenizer and tasks, and print this process's memory.

    Errors of tokenizer or tasks are left to the run.
    """
    models = ("transformers.models.auto.modeling_auto", "transformers.modeling_utils")
    is_torch = "transformers" in packages
    for name in ("whet.runs.training", *packages, *(models if is_torch else ())):
        importlib.import_module(name)
    from whet.tasks.mixture import open_tasks
    from whet.text.model import load_chat_tokenizer, load_transformers_tokenizer

    loaded = []
    if Path(model).exists():
        with suppress(Exception):
            loaded.append(load_transformers_tokenizer(model) if is_torch else load_chat_tokenizer(model, "estimate"))
    with suppress(Exception):
        loaded.append(open_tasks(tasks))
    print(resident_bytes())
