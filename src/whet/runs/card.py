"""Model cards: method, data and settings of a run; origin of a merged folder or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whet import __version__
from whet.config.algorithms import ALGORITHMS
from whet.report.page import versions

_CARD = """\
---
library_name: {library}
tags: [{tags}]
{base}---

# {name}

{origin} by Whet {version}.

{facts}
{more}
## Use

{use}

## Versions

{versions}
"""

_TRANSFORMERS = """\
```python
from transformers import {kind}, AutoTokenizer

model = {kind}.from_pretrained("{folder}"{options})
tokenizer = AutoTokenizer.from_pretrained("{folder}")
```"""
_CAUSAL = {"kind": "AutoModelForCausalLM", "options": ""}
_CLASSIFIER = {"kind": "AutoModelForSequenceClassification", "options": ", num_labels=1"}


def render_run_card(
    algorithm: str, run: Any, n_rows: int, n_tokens: int, evaluations: Sequence[Mapping[str, float]]
) -> str:
    """Return the card in Markdown, with the hub's metadata as front matter.

    Args:
        algorithm: name of its class.
        run: the settings, an instance of one of the classes in ``whet.runs.settings``.
        n_rows: number of rows of the data.
        n_tokens: number of tokens of prompts and completions, over all steps.
        evaluations: a ``{"step": 0, "loss": 2.3}`` each; the card has the first and the last.
    """
    facts = {
        "Method": next(each.title for each in ALGORITHMS.values() if each.class_name == algorithm),
        "Loss": _describe_losses(getattr(run, "loss_weights", {})) or getattr(run, "loss_type", None),
        "beta": getattr(run, "beta", None),
        "Reward functions": ", ".join(getattr(run, "reward", [])),
        "Preference function": getattr(run, "preference", None),
        "Sampler correction": getattr(run, "sampler_correction", None),
        "Trained": _describe_trained_weights(run),
        "Base model": run.model,
        "Base packed in": run.base if run.has_adapters() and run.base != "none" else None,
        "Data": f"{run.trained_on()}, {n_rows:,} rows",
        "Steps": f"{run.steps:,} of {run.batch_size} rows, {n_tokens:,} tokens in total",
        "Learning rate": f"{run.learning_rate:g}, {run.lr_schedule}",
        "Seed": run.seed,
    }
    evaluation = _render_evaluation(run.evaluated_on(), evaluations)
    return _render_card(
        Path(run.output_dir).resolve().name,
        "Post-trained",
        facts,
        _TRANSFORMERS.format(folder="model", **(_CLASSIFIER if run.trains_reward else _CAUSAL)),
        more=f"\nAll settings are in `config.toml` of the run.\n{evaluation}",
        library="peft" if run.has_adapters() else "transformers",
        tags=f"whet, {algorithm.lower()}",
        base="" if Path(run.model).exists() else f"base_model: {run.model}\n",
    )


def render_folder_card(folder: Path, origin: str, facts: Mapping[str, Any]) -> str:
    """Return the card (README.md) of a Hugging Face folder that is not a run's.

    Args:
        origin: the operation, such as "Merged".
        facts: name -> value; None and "" are omitted.
    """
    name = folder.resolve().name
    use = _TRANSFORMERS.format(folder=name, **_CAUSAL)
    return _render_card(name, origin, facts, use, library="transformers", tags="whet")


def render_file_card(file: Path, model: str, facts: Mapping[str, Any], *, is_adapter: bool) -> str:
    """Return the card of a GGUF file.

    Args:
        model: the exported model; for adapters, the model that they are loaded with.
        facts: as for ``render_folder_card``.
        is_adapter: whether the file contains only adapters.
    """
    flags = f"-m {Path(model).name if model.endswith('.gguf') else 'MODEL.gguf'} --lora" if is_adapter else "-m"
    commands = [f"llama-cli {flags} {file.name}", *([] if is_adapter else [f"whet chat {file.name}"])]
    use = "\n".join(f"    {command}" for command in commands)
    return _render_card(file.stem, "Exported", facts, use, library="gguf", tags="whet, gguf")


def _render_card(
    name: str, origin: str, facts: Mapping[str, Any], use: str, *, more: str = "", library: str, tags: str,
    base: str = "",
) -> str:  # fmt: skip
    """Return a card; ``facts`` that are None or "" are omitted, and ``more`` follows them."""
    return _CARD.format(
        library=library,
        tags=tags,
        base=base,
        name=name,
        origin=origin,
        version=__version__,
        facts=_table(("Setting", "Value"), [(key, text) for key, text in facts.items() if text not in (None, "")]),
        more=more,
        use=use,
        versions=_table(("Package", "Version"), versions().items()),
    )


def _describe_trained_weights(run: Any) -> str:
    if run.adapter:
        return f"the LoRA adapters of {run.adapter}"
    return f"LoRA adapters of rank {run.lora_rank}" if run.lora_rank else "every weight"


def _render_evaluation(data: str, evaluations: Sequence[Mapping[str, float]]) -> str:
    if not evaluations:
        return ""
    first, last = evaluations[0], evaluations[-1]
    rows = [(name, f"{first[name]:.4g}", f"{last[name]:.4g}") for name in last if name != "step" and name in first]
    headers = ("Metric", f"Step {first['step']}", f"Step {last['step']}")
    return f"\n## Evaluation on {data}\n\n{_table(headers, rows)}\n"


def _table(headers: Sequence[str], rows: Any) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _describe_losses(weights: Mapping[str, float]) -> str:
    return " + ".join(f"{weight:g} {name}" for name, weight in weights.items())
