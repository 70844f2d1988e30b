"""``whet best-of-n``: samples and scores completions of each prompt, and writes the best as a line of JSON.

The lines are rows of ``whet train sft``: the completion of a prompt in messages is a message.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from whet.algorithms.best_of_n import BestOfN
from whet.config.settings import BestOfNConfig
from whet.data.messages import is_messages
from whet.data.rows import tokenize_prompt
from whet.data.sources import read_rows
from whet.data.thinking import Replies
from whet.files import open_output
from whet.nn.modules import position_limit
from whet.rollout.choose import make_engine, reward_functions
from whet.rollout.rollout import as_prompt_row, decode_completion
from whet.runs.models import describe_size, load_model
from whet.runs.rows import check_prompts_fit, load_rewards
from whet.runs.settings import BestOfNRun
from whet.tasks.mixture import open_tasks
from whet.training.prefetch import check_forms


def main(run: BestOfNRun) -> int:
    """Write ``prompt``, ``completion`` and ``score`` per prompt, in order; with ``all_candidates`` also those."""
    functions = load_rewards(run.reward, unsafe_local=run.unsafe_local)
    if run.task:
        rows = open_tasks(run.task)
        functions = [*rows.reward_functions(), *functions]
    else:
        rows = [{"prompt": run.prompt}] if run.prompt else read_rows(run.prompts, run.columns)
        check_forms(rows, tokenize_prompt, as_prompt_row, has_tokenizer=True)
    notify = functools.partial(print, file=sys.stderr)
    model, tokenizer = load_model(run.model, run.dtype, chat_template=run.chat_template, notify=notify)
    if run.task:
        check_prompts_fit(position_limit(model), tokenizer, rows, "whet best-of-n")
    notify(f"best of {run.n} of {run.model}: {describe_size(model)}")
    n_kept = 0
    with open_output(run.output, "whet best-of-n") as file:
        for done, row in enumerate(iter_best_completions(run, model, tokenizer, functions, rows), start=1):
            if run.min_score is None or row["score"] >= run.min_score:
                n_kept += 1
                print(json.dumps(row, ensure_ascii=False), file=file, flush=True)
            if run.output and (done % run.batch_size == 0 or done == len(rows)):
                notify(f"{done}/{len(rows)} prompts")
    if run.min_score is not None:
        notify(f"{n_kept} of {len(rows)} prompts have a completion that scores {run.min_score:g} or more")
    return 0


def iter_best_completions(
    run: BestOfNRun, model: torch.nn.Module, tokenizer: Any, functions: list[Any], rows: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield a dict per row, in order. Each batch of ``batch_size`` prompts has its own seed."""
    settings = {field.name: getattr(run, field.name) for field in dataclasses.fields(BestOfNConfig)}
    rewards = reward_functions(run, functions)
    replies = Replies(tokenizer)
    settings["engine"] = make_engine(
        run.engine, model, run.rollout_weights, "whet best-of-n", run.kv_bytes, tokenizer,
        run.rollout_workers, run.ray_address, run.rollout_device,
    )  # fmt: skip
    settings |= {
        "kv_bytes": 0,
        "rollout_workers": 0,
        "ray_address": "",
        "rollout_device": "cpu",
    }  # already in the engine
    for start in range(0, len(rows), run.batch_size):
        batch = rows[start : start + run.batch_size]
        settings["seed"] = int(np.random.SeedSequence([run.seed % 2**64, start]).generate_state(1)[0])
        best_of_n = BestOfN(model, rewards, tokenizer=tokenizer, **settings)
        result: Any = best_of_n.generate(batch, return_scores=True, return_all=True)
        for row, scores, candidates in zip(batch, result.scores.numpy(), result.candidates, strict=True):
            texts = [decode_completion(candidate, replies) for candidate in candidates]
            best = int(np.nanargmax(scores))
            answer = [{"role": "assistant", "content": texts[best]}] if is_messages(row["prompt"]) else texts[best]
            result_row = {"prompt": row["prompt"], "completion": answer, "score": scores[best]}
            if run.all_candidates:
                result_row["candidates"] = [
                    {"completion": text, "score": None if np.isnan(score) else score}
                    for text, score in zip(texts, scores, strict=True)
                ]
            yield result_row
