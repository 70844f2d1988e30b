"""Model cards: of a run, what was trained, how, on what; of a merged folder or a GGUF file, what it was made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whet import __version__
from whet.report.page import versions

_METHODS = {
    "SFT": "supervised fine-tuning",
    "DPO": "Direct Preference Optimization (Rafailov et al. 2023)",
    "GRPO": "Group Relative Policy Optimization (Shao et al. 2024)",
    "OnlineDPO": "online Direct Preference Optimization (Guo et al. 2024)",
}

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
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
```"""


def model_card(algorithm: str, run: Any, n_rows: int, n_tokens: int, evaluations: Sequence[Mapping[str, float]]) -> str:
    """The card in Markdown, with the metadata that the hub reads on top.

    Args:
        algorithm: the class's name.
        run: the settings, of one of the classes in ``whet.cli.runs``.
        n_rows: rows of the data.
        n_tokens: tokens of prompts and completions in all steps.
        evaluations: ``{"step": 0, "loss": 2.3}`` each; the first and the last are shown.
    """
    facts = {
        "Method": _METHODS[algorithm],
        "Loss": getattr(run, "loss_type", None),
        "beta": getattr(run, "beta", None),
        "Reward functions": ", ".join(getattr(run, "reward", [])),
        "Preference function": getattr(run, "preference", None),
        "Correction of the sampler's log-probabilities": getattr(run, "sampler_correction", None),
        "Trained": _trained(run),
        "Base model": run.model,
        "Base packed in": run.base if run.has_adapters() and run.base != "none" else None,
        "Data": f"{run.trained_on()}, {n_rows:,} rows",
        "Steps": f"{run.steps:,} of {run.batch_size} rows, {n_tokens:,} tokens in all",
        "Learning rate": f"{run.learning_rate:g}, {run.lr_schedule}",
        "Seed": run.seed,
    }
    evaluation = _evaluation(run.evaluated_on(), evaluations)
    return _card(
        Path(run.output_dir).resolve().name,
        "Post-trained",
        facts,
        _TRANSFORMERS.format(folder="model"),
        more=f"\nEvery setting is in `config.toml` of the run.\n{evaluation}",
        library="peft" if run.has_adapters() else "transformers",
        tags=f"whet, {algorithm.lower()}",
        base="" if Path(run.model).exists() else f"base_model: {run.model}\n",
    )


def folder_card(folder: Path, origin: str, facts: Mapping[str, Any]) -> str:
    """The card of a Hugging Face folder that is no run's: README.md in it.

    Args:
        origin: what was done, such as "Merged".
        facts: by name; None and "" are left out.
    """
    name = folder.resolve().name
    return _card(name, origin, facts, _TRANSFORMERS.format(folder=name), library="transformers", tags="whet")


def file_card(file: Path, model: str, facts: Mapping[str, Any], *, is_adapter: bool) -> str:
    """The card of a GGUF file.

    Args:
        model: what it was made from; of adapters, what they are loaded beside.
        facts: as of ``folder_card``.
        is_adapter: it holds adapters alone.
    """
    beside = f"-m {Path(model).name if model.endswith('.gguf') else 'MODEL.gguf'} --lora" if is_adapter else "-m"
    commands = [f"llama-cli {beside} {file.name}", *([] if is_adapter else [f"whet chat {file.name}"])]
    use = "\n".join(f"    {command}" for command in commands)
    return _card(file.stem, "Exported", facts, use, library="gguf", tags="whet, gguf")


def _card(
    name: str, origin: str, facts: Mapping[str, Any], use: str, *, more: str = "", library: str, tags: str,
    base: str = "",
) -> str:  # fmt: skip
    """A card; ``facts`` that are None or "" are left out, and ``more`` follows them."""
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


def _trained(run: Any) -> str:
    if run.adapter:
        return f"the LoRA adapters of {run.adapter}"
    return f"LoRA adapters of rank {run.lora_rank}" if run.lora_rank else "every weight"


def _evaluation(data: str, evaluations: Sequence[Mapping[str, float]]) -> str:
    if not evaluations:
        return ""
    first, last = evaluations[0], evaluations[-1]
    rows = [(name, f"{first[name]:.4g}", f"{last[name]:.4g}") for name in last if name != "step" and name in first]
    headers = ("Metric", f"Step {first['step']}", f"Step {last['step']}")
    return f"\n## Evaluation on {data}\n\n{_table(headers, rows)}\n"


def _table(headers: Sequence[str], rows: Any) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
