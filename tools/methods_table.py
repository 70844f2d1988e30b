"""Write the table of methods in docs/algorithms/index.md from the registry: ``python tools/methods_table.py``."""

from __future__ import annotations

import re
from pathlib import Path

from whet.config.algorithms import ALGORITHMS, Algorithm

PAGE = Path(__file__).parent.parent / "docs" / "algorithms" / "index.md"
_HEAD = "| | | samples | reference model |\n|---|---|---|---|\n"
_NOT_TRAINED = "| [BestOfN](best-of-n.md) | no training: the best of several completions | `n` per prompt | no |\n"


def render_table() -> str:
    """Return the table in Markdown, a line per method."""
    return _HEAD + "".join(map(_render_row, ALGORITHMS.values())) + _NOT_TRAINED


def replace_table(text: str) -> str:
    """Return the text of the page with its table replaced."""
    return re.sub(re.escape(_HEAD) + r"(\|.*\n)*", lambda _: render_table(), text)


def _render_row(algorithm: Algorithm) -> str:
    config = algorithm.config()
    samples = f"{config.completions_per_prompt()} per prompt" if config.samples else "no"
    reference = "yes" if config.has_reference() else "no"
    if reference == "no" and getattr(config, "beta", 0) is None:
        reference = "if `beta` is set"
    return f"| [{algorithm.class_name}]({algorithm.name}.md) | {algorithm.summary} | {samples} | {reference} |\n"


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
