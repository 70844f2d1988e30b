"""Loads of the suite "serve": requests of one case, and the times that are taken from their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders.engine.models import ModelFiles
from benchmarks.contenders.engine.workload import Sample, Workload, load_once
from benchmarks.contenders.serve.client import Answer, Body
from benchmarks.contenders.serve.servers import Open, Server
from whet.bench.case import Call, Timed
from whet.config.sampling import SamplingParams
from whet.engine import Engine
from whet.system.machine import main_thread_cpu_seconds

_TRIAL_STEPS = 31
"""Steps of the completions by which a server's settings are chosen."""

Task = Callable[[Server, Workload], Mapping[str, float]]
"""Sends the requests of a workload, and returns the seconds of parts, of which the first counts."""


def file_of(files: ModelFiles) -> Path:
    """Return the GGUF file of a stored model."""
    return files.gguf(files.shape.kind)  # type: ignore[attr-defined]


def request(x: Workload, prompt: Sequence[int], **fields: Any) -> Body:
    """Return the body of a greedy completion that does not end early."""
    return {"prompt": prompt, "max_tokens": x.n_tokens, "temperature": 0, "ignore_eos": True, **fields}


def ask(server: Server, x: Workload, prompts: Sequence[Sequence[int]], **fields: Any) -> list[Answer]:
    """Return the completions of all prompts, requested at the same time.

    Raises:
        RuntimeError: the server counts other tokens.
    """
    answers = server.complete([request(x, prompt, **fields) for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        if (answer.n_prompt, answer.n_tokens) != (len(prompt), x.n_tokens):
            raise RuntimeError(
                f"the server counts {answer.n_prompt} + {answer.n_tokens} tokens, expected {len(prompt)} + {x.n_tokens}"
            )
    return answers


STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def elapsed_s(answers: Sequence[Answer]) -> float:
    """Return the seconds from the first request to the end of the last answer."""
    return max(answer.ended_s for answer in answers) - min(answer.started_s for answer in answers)


def stream_all(server: Server, x: Workload) -> Mapping[str, float]:
    """Stream all completions at once."""
    answers = ask(server, x, x.fresh(), **STREAM)
    first_s = float(np.median([answer.first_s for answer in answers]))
    return {"all streams": elapsed_s(answers), "of it to the first token (median)": first_s}


def first_token(server: Server, x: Workload) -> Mapping[str, float]:
    """Stream all completions at once; the median time to a first token counts."""
    answers = ask(server, x, x.fresh(), **STREAM)
    return {"first token (median)": float(np.median([answer.first_s for answer in answers]))}


def longest_gaps(server: Server, x: Workload) -> Mapping[str, float]:
    """Stream all completions at once; the 99th percentile of the time between tokens counts.

    Tokens of one chunk arrive at the same time: their gaps are 0. The 99th percentile between chunks is a part too.
    """
    answers = ask(server, x, x.fresh(), **STREAM)
    tokens = np.concatenate([answer.gaps_s for answer in answers])
    chunks = np.concatenate([np.diff(answer.arrivals_s) for answer in answers])
    found = {"p99 between tokens": tokens, "p99 between chunks": chunks}
    return {name: float(np.quantile(gaps, 0.99)) for name, gaps in found.items()}


def whole(server: Server, x: Workload) -> Mapping[str, float]:
    """Request all completions at once, without streams."""
    return {"all answers": elapsed_s(ask(server, x, x.fresh()))}


def in_turn(server: Server, x: Workload) -> Mapping[str, float]:
    """Stream prompts with a common prefix one after the other; the mean of the others' first tokens counts."""
    first, *others = x.fresh()
    return _after_the_first(ask(server, x, [first], **STREAM), [ask(server, x, [each], **STREAM)[0] for each in others])


def at_once(server: Server, x: Workload) -> Mapping[str, float]:
    """Stream a prompt, then all others with the same prefix at once; their mean time to the first token counts."""
    first, *others = x.fresh()
    return _after_the_first(ask(server, x, [first], **STREAM), ask(server, x, others, **STREAM))


def _after_the_first(first: Sequence[Answer], others: Sequence[Answer]) -> Mapping[str, float]:
    return {"first token": float(np.mean([answer.first_s for answer in others])), "of the first": first[0].first_s}


def on_server(open_server: Open, task: Task, x: Workload) -> Call:
    """Open a server, check its completion of the first prompt, and return a call of ``task``."""

    server = open_server_for(open_server, task, x)
    sample = server.sample(request(x, x.prompts[0]))

    def call() -> Timed:
        parts = task(server, x)
        return Timed(sample, parts, next(iter(parts)), server.note)

    return call


def open_server_for(open_server: Open, task: Task, x: Workload) -> Server:
    """Open a server for as many prompts and tokens, in the setting in which a task takes the least time."""
    short = replace(x, n_steps=min(x.n_steps, _TRIAL_STEPS))

    def trial(server: Server) -> float:
        return next(iter(task(server, short).values()))

    return open_server(file_of(x.files), len(x.prompts), x.prompt_length + x.n_tokens, trial)


# --- completions that follow a schema -------------------------------------------------------------------


def whole_again(server: Server, x: Workload) -> Mapping[str, float]:
    """Request all completions at once, without streams, of prompts that are in the prefix cache."""
    return {"all answers": elapsed_s(ask(server, x, x.prompts))}


def with_schema(open_server: Open, schema: Mapping[str, Any], x: Workload) -> Call:
    """Request the completions of ``whole_again`` with a schema, which they follow anyway.

    Raises:
        RuntimeError: the schema changes a completion.
    """
    server = open_server_for(open_server, whole_again, x)
    fields = server.follow(schema)
    sample = server.sample(request(x, x.prompts[0], **fields))
    expected = [answer.text for answer in ask(server, x, x.prompts)]

    def call() -> Timed:
        answers = ask(server, x, x.prompts, **fields)
        for right, answer in zip(expected, answers, strict=True):
            if answer.text != right:
                raise RuntimeError(f"the schema changes a completion from {right!r:.200} to {answer.text!r:.200}")
        return Timed(sample, {"all answers": elapsed_s(answers)}, "all answers", server.note)

    return call


# --- the engine without a server ------------------------------------------------------------------------


def generate(x: Workload, prompts: Sequence[Sequence[int]]) -> Sample:
    """Sample all completions by the engine in this process, and return the first."""
    engine = load_once(("engine", file_of(x.files)), lambda: Engine.from_gguf(file_of(x.files)))
    found = engine.generate(prompts, 1, SamplingParams(temperature=0, max_new_tokens=x.n_tokens))
    return Sample(prompts[0], found[0][0].token_ids, found[0][0].logprobs)


def in_process(x: Workload) -> Call:
    """Time ``Engine.generate``."""
    return lambda: generate(x, x.fresh())


def server_cpu(open_server: Open, x: Workload) -> Call:
    """Count the CPU time of a server's main thread, which runs no engine, while it streams all completions."""
    server = open_server_for(open_server, stream_all, x)
    sample = server.sample(request(x, x.prompts[0]))

    def call() -> Timed:
        before_s = main_thread_cpu_seconds(server.process_id)
        stream_all(server, x)
        spent_s = main_thread_cpu_seconds(server.process_id) - before_s
        return Timed(sample, {"CPU of the main thread": spent_s}, "CPU of the main thread")

    return call
