"""``whet score``: computes log-probs of the tokens of rows, and of a model's most probable tokens in their place.

The lines of JSON are rows of ``whet train kd``: ``input_ids`` and ``completion_mask`` of the tokenised row, its
``logprobs`` and ``top_logprobs`` from the first token that counts on, and a digest of the model's ``vocabulary``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from whet.cli.settings import parse_flags
from whet.cli.text_options import ModelSettings
from whet.config.fields import Paths, PathText, Positive, check_types
from whet.data.rows import tokenize_turns
from whet.data.sources import read_rows
from whet.engine import Engine
from whet.errors import WhetValueError
from whet.files import open_output
from whet.models.tokenizers.token_texts import vocabulary_digest
from whet.runs.settings import Columns
from whet.text.checkpoint_model import resolve_adapter
from whet.text.model import find_model, load_chat_tokenizer, load_engine

_WHERE = "whet score"


@dataclasses.dataclass(kw_only=True)
class ScoreConfig(ModelSettings):
    """Write the log-probs that a model gives to rows, with its most probable tokens, as lines of JSON."""

    data: Paths
    """Rows as for whet train sft."""
    columns: Columns = dataclasses.field(default_factory=dict)
    """Field names and their columns in the data: prompt=question,completion=answer."""
    output: PathText = ""
    """The .jsonl file to write; empty: standard output."""
    top_logprobs: int = 16
    """Most probable tokens of each position, from 1 to 20."""
    chat_template: PathText = ""
    """A file with a Jinja chat template; empty: the one saved with the adapters, or else the tokenizer's."""
    batch_size: Positive = 32
    """Rows that are computed at once."""

    def check(self) -> None:
        """Raise a WhetValueError that names the setting and the fix."""
        check_types(self)
        if not 1 <= self.top_logprobs <= 20:
            raise WhetValueError(f"{_WHERE}: top_logprobs is {self.top_logprobs}, expected a number from 1 to 20.")


def main(argv: Sequence[str]) -> int:
    """Write the rows and return 0."""
    options = parse_flags(ScoreConfig, argv, _WHERE)
    options.check()
    rows = read_rows(options.data, options.columns)
    path, adapter_path = resolve_adapter(options.model, options.adapter, _WHERE)
    model = find_model(path, _WHERE)
    tokenizer = load_chat_tokenizer(model, _WHERE, options.chat_template, adapter_path)
    engine = load_engine(
        model, options.weights, None, _WHERE, adapter_path, expert_bytes=options.expert_bytes, device=options.device
    )
    with engine, open_output(options.output, _WHERE) as file:
        adapter = engine.add_adapter(adapter_path) if adapter_path else None
        vocabulary = vocabulary_digest(tokenizer, _WHERE)
        for done, row in enumerate(score_rows(engine, tokenizer, rows, options, adapter), start=1):
            print(json.dumps({**row, "vocabulary": vocabulary}), file=file, flush=True)
            if options.output and (done % options.batch_size == 0 or done == len(rows)):
                print(f"{done}/{len(rows)} rows", file=sys.stderr)
    return 0


def score_rows(
    engine: Engine, tokenizer: Any, rows: Sequence[Mapping[str, Any]], options: ScoreConfig, adapter: int | None
) -> Iterator[dict[str, Any]]:
    """Yield a tokenised row with its log-probs per row, in order."""
    for first in range(0, len(rows), options.batch_size):
        batch = [tokenize_turns(row, tokenizer) for row in rows[first : first + options.batch_size]]
        logprobs, tops = engine.logprobs(
            [prompt + completion for prompt, completion, _ in batch], start=[len(prompt) for prompt, *_ in batch],
            top_logprobs=options.top_logprobs, adapter=adapter,
        )  # fmt: skip
        for (prompt, completion, mask), values, pairs in zip(batch, logprobs, tops, strict=True):
            yield {
                "input_ids": [*prompt, *completion],
                "completion_mask": [0] * len(prompt) + [int(counts) for counts in mask],
                "logprobs": [round(float(value), 5) for value in values],
                "top_logprobs": [[[token, round(value, 5)] for token, value in each] for each in pairs],
            }
