"""The engine beside llama.cpp and transformers: decode, prefill, groups, sync, load and memory.

Every contender runs the same model, of a true shape with random weights, and answers for it: the log-probs it gave
its own first completion are compared with those of transformers in float32. A decode is the steps from the first token
of all rows to the last; the prompt, and the first token after it, are not in its time. llama.cpp and transformers are
read off at these two moments, and so is Whet where there is one row; where there are several it is the time of a
generation less that of one that stops after the first token.

Whet samples at temperature 1 and gives log-probs. The others take the most probable token, which is less work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from whet.bench.case import BenchOptions, Call, Case, Provider, Suite, Table
from whet.bench.contenders.engine import hf, llama_cpp, native
from whet.bench.contenders.engine.models import LLAMA_135M, QWEN2_500M, ModelShape
from whet.bench.contenders.engine.workload import Workload, random_workload, sample_error

PROMPT_LENGTH = 64
N_STEPS = 16
TOLERANCE = {"float32": 1e-3, "bf16": 0.05, "8 bits": 0.2, "4 bits": 0.6}
"""Of log-probs, relative to their deviation (``sample_error``), by the format of the weights."""

NOTE = (
    "Random weights of the true shape, rounded to bfloat16; prompts of random tokens; no stop tokens. The error is "
    "that of the log-probs that a contender gave its own first completion, against transformers in float32, relative "
    "to the standard deviation of log-probs over the vocabulary: a model that has nothing to do with it has 1 or more."
)
DECODE_NOTE = (
    "The steps from the first token of every row to the last; the prompt's time is not in it. Whet samples at "
    "temperature 1 and gives log-probs, the others take the most probable token. Bytes: the matrices in the narrowest "
    "of the table's formats and the keys and values in 16 bits, read once a step."
)

Width = Literal["float32", "bf16", "8 bits", "4 bits"]


class Kind(NamedTuple):
    """A contender, by how it is called and what its weights are."""

    name: str
    library: Literal["whet", "llama.cpp", "transformers"]
    weights: str
    width: Width


def contenders(*kinds: Kind, make: dict[str, Callable[[str], Callable[[Workload], Call]]]) -> list[Provider]:
    """A provider of each kind, by what ``make`` has for its library."""
    return [
        Provider(kind.name, make[kind.library](kind.weights), tolerance=TOLERANCE[kind.width], note=_note(kind))
        for kind in kinds
    ]


def _note(kind: Kind) -> str:
    return f"weights in {kind.weights}" if kind.name == "whet" else ""


DECODE = {"whet": native.whet_decode, "llama.cpp": llama_cpp.llama_decode, "transformers": hf.hf_decode}
PREFILL = {"whet": native.whet_prefill, "llama.cpp": llama_cpp.llama_prefill, "transformers": hf.hf_prefill}
GROUP = {"whet": native.whet_group, "llama.cpp": llama_cpp.llama_group, "transformers": hf.hf_group}

FLOAT32 = (Kind("whet", "whet", "float32", "float32"), Kind("transformers", "transformers", "float32", "float32"))
BF16 = (
    Kind("whet", "whet", "bf16", "bf16"),
    Kind("llama.cpp bf16", "llama.cpp", "bf16", "bf16"),
    Kind("transformers bf16", "transformers", "bfloat16", "bf16"),
)
F16 = Kind("llama.cpp f16", "llama.cpp", "f16", "bf16")
EIGHT = (
    Kind("whet", "whet", "int8", "8 bits"),
    Kind("whet bf16", "whet", "bf16", "bf16"),
    Kind("llama.cpp q8_0", "llama.cpp", "q8_0", "8 bits"),
)
FOUR = (
    Kind("whet", "whet", "q4_k", "4 bits"),
    Kind("whet int4", "whet", "int4", "4 bits"),
    Kind("llama.cpp q4_K_M", "llama.cpp", "q4_K_M", "4 bits"),
    Kind("llama.cpp q4_0", "llama.cpp", "q4_0", "4 bits"),
)
_RATES: dict[Width, Literal["float32", "bfloat16", "int8"]] = {
    "float32": "float32", "bf16": "bfloat16", "8 bits": "int8", "4 bits": "int8",
}  # fmt: skip


def weight_bytes(shape: ModelShape, width: Width) -> float:
    """Bytes of the matrices in the narrowest format of a width; in 4-bit formats the head has 6.5 bits."""
    head = shape.config.vocab_size * shape.config.hidden_dim
    bits = {"float32": (32, 32), "bf16": (16, 16), "8 bits": (8, 8), "4 bits": (4.5, 6.5)}[width]
    return (bits[0] * (shape.n_weights - head) + bits[1] * head) / 8


def decode_case(
    name: str,
    shape: ModelShape,
    width: Width,
    n_rows: int,
    size: float,
    length: int = PROMPT_LENGTH,
    again: bool = False,
) -> Case:
    """``N_STEPS`` steps of so many rows, after prompts of so many tokens."""
    context = length + (N_STEPS + 1) / 2
    step_bytes = weight_bytes(shape, width) + n_rows * shape.kv_bytes(round(context))
    return Case(
        name,
        inputs=lambda rng: random_workload(rng, shape, n_rows, length, n_steps=N_STEPS),
        reference=lambda workload: workload,
        tolerance=TOLERANCE[width],
        n_bytes=N_STEPS * step_bytes,
        n_flops=N_STEPS * shape.forward_flops(n_rows, n_rows, context),
        flop_dtype=_RATES[width],
        footprint=step_bytes,
        n_items=N_STEPS * n_rows,
        size=size,
        thread_scaling=again,
    )


def decode_table(
    shape: ModelShape, width: Width, kinds: Sequence[Kind], batches: Sequence[int], again: Sequence[int] = ()
) -> Table:
    """Decode by batch; on fewer threads too for the batches in ``again``."""
    return Table(
        f"Decode, {shape.name}, {width}",
        [decode_case(f"batch {n}", shape, width, n, n, again=n in again) for n in batches],
        contenders(*kinds, make=DECODE),
        allocation="inside: what a step allocates",
        note=f"Prompts of {PROMPT_LENGTH} tokens, {N_STEPS} steps. {DECODE_NOTE} {NOTE}",
        item="tokens",
        size_label="batch",
        error=sample_error,
    )


def context_table(shape: ModelShape, lengths: Sequence[int]) -> Table:
    """Decode of one row, by the length of its prompt."""
    return Table(
        f"Decode by context, {shape.name}, bf16",
        [decode_case(f"context {n}", shape, "bf16", 1, n, n) for n in lengths],
        contenders(*BF16, make=DECODE),
        allocation="inside: what a step allocates",
        note=f"One row, {N_STEPS} steps. {DECODE_NOTE}",
        item="tokens",
        size_label="tokens before the first step",
        error=sample_error,
    )


def prefill_table(shape: ModelShape, n_prompts: Sequence[int], length: int = 512) -> Table:
    """Prompts to their first token."""

    def case(n: int) -> Case:
        return Case(
            f"{n} x {length}",
            inputs=lambda rng: random_workload(rng, shape, n, length, n_steps=0),
            reference=lambda workload: workload,
            tolerance=TOLERANCE["bf16"],
            n_bytes=weight_bytes(shape, "bf16"),
            n_flops=shape.forward_flops(n * length, n, (length + 1) / 2),
            flop_dtype="bfloat16",
            n_items=n * length,
            thread_scaling=n == 1 and shape is LLAMA_135M,
        )

    return Table(
        f"Prefill, {shape.name}, bf16",
        [case(n) for n in n_prompts],
        contenders(*BF16, make=PREFILL),
        allocation="inside",
        note=f"Prompts that are in no cache, to the first token of each. {NOTE}",
        item="tokens",
        error=sample_error,
    )


def group_table(shape: ModelShape, n_steps: int = 63) -> Table:
    """A prompt and 32 completions of it."""
    n_samples = 32

    def case(length: int) -> Case:
        own = n_samples * shape.kv_bytes((n_steps + 1) // 2)
        step_bytes = weight_bytes(shape, "bf16") + shape.kv_bytes(length) + own
        steps = n_steps * shape.forward_flops(n_samples, n_samples, length + (n_steps + 1) / 2)
        return Case(
            f"prompt of {length}",
            inputs=lambda rng: random_workload(rng, shape, 1, length, n_samples, n_steps),
            reference=lambda workload: workload,
            tolerance=TOLERANCE["bf16"],
            n_bytes=weight_bytes(shape, "bf16") + n_steps * step_bytes,
            n_flops=shape.forward_flops(length, 1, (length + 1) / 2) + steps,
            flop_dtype="bfloat16",
            footprint=step_bytes,
            n_items=n_samples * (1 + n_steps),
            size=length,
        )

    return Table(
        f"A group of {n_samples}, {shape.name}, bf16",
        [case(length) for length in (64, 512)],
        contenders(*BF16, make=GROUP),
        allocation="inside",
        note=f"A prompt that is in no cache and {n_samples} completions of {1 + n_steps} tokens, the prompt's time "
        "included. llama.cpp runs the prompt once and its rows share it, greedily; transformers runs it for every row, "
        f"and samples. {NOTE}",
        item="tokens",
        size_label="tokens of the prompt",
        error=sample_error,
    )


def sync_table(shape: ModelShape) -> Table:
    """The engine's weights after an update of the model."""

    def case(dtype: str, size: int) -> Case:
        def inputs(rng: np.random.Generator) -> native.Training:
            return native.training(random_workload(rng, shape, 1, 16, n_steps=7), dtype)

        return Case(
            f"from {dtype}",
            inputs=inputs,
            reference=lambda training: training,
            tolerance=TOLERANCE["bf16"],
            n_bytes=size * shape.n_weights,
            n_items=shape.n_weights,
        )

    whets = [("whet", "bf16", "bf16"), ("whet int8", "int8", "8 bits"), ("whet q4_k", "q4_k", "4 bits")]
    return Table(
        f"Sync after an update, {shape.name}",
        [case("float32", 4), case("bfloat16", 2)],
        [
            *(
                Provider(name, native.whet_sync(weights), tolerance=TOLERANCE[width], note=f"packs {weights}")
                for name, weights, width in whets
            ),
            Provider("copy", native.copied_parameters, tolerance=0.0, note="torch copies every parameter, same dtype"),
        ],
        allocation="none: the copy is written where one was",
        note="Every weight changes before each call. Bytes: every parameter read once. Whet's error is that of a "
        "completion after it, against the changed model.",
        item="parameters",
        error=sample_error,
    )


def load_table(shape: ModelShape) -> Table:
    """From the files to an engine that can generate."""
    case = Case(
        "bfloat16 safetensors",
        inputs=lambda rng: random_workload(rng, shape, 1, 16, n_steps=7),
        reference=lambda workload: workload,
        tolerance=TOLERANCE["bf16"],
        n_bytes=2 * shape.n_weights,
        n_items=shape.n_weights,
    )
    return Table(
        f"Load, {shape.name}",
        [case],
        [
            Provider("whet", native.whet_load("bf16"), note="weights in bf16"),
            Provider("whet int8", native.whet_load("int8"), tolerance=TOLERANCE["8 bits"]),
            Provider("whet q4_k", native.whet_load("q4_k"), tolerance=TOLERANCE["4 bits"]),
            Provider("reading the file", native.read_file, tolerance=0.0, note="into memory that is there"),
            Provider("llama.cpp bf16", llama_cpp.llama_load, note="from its GGUF file, read and not mapped"),
            Provider("transformers bf16", hf.hf_load),
        ],
        allocation="inside",
        note="The files are in the system's cache: nobody waits for a disk.",
        item="parameters",
        error=sample_error,
    )


def memory_table(shape: ModelShape, n_rows: int = 32, n_steps: int = 63) -> Table:
    """Peak memory from loading to freeing: load, generate, free."""
    matrices = {width: f"{weight_bytes(shape, width) / 1e6:.0f} MB in {width}" for width in ("bf16", "8 bits")}
    kv_mb = shape.kv_bytes(n_rows * (PROMPT_LENGTH + n_steps)) / 1e6
    case = Case(
        f"{n_rows} x ({PROMPT_LENGTH} + {1 + n_steps})",
        inputs=lambda rng: random_workload(rng, shape, n_rows, PROMPT_LENGTH, n_steps=n_steps),
        reference=lambda workload: workload,
        tolerance=TOLERANCE["bf16"],
        n_items=n_rows * (1 + n_steps),
        note=f"matrices of {' and '.join(matrices.values())}; keys and values of {kv_mb:.0f} MB",
    )
    return Table(
        f"Peak memory, {shape.name}",
        [case],
        [
            Provider("whet", native.whet_lifetime("bf16"), note="weights in bf16"),
            Provider("whet int8", native.whet_lifetime("int8"), tolerance=TOLERANCE["8 bits"]),
            Provider("llama.cpp bf16", llama_cpp.llama_lifetime, note="from its GGUF file, read and not mapped"),
            Provider("transformers bf16", hf.hf_lifetime),
        ],
        allocation="inside",
        note="Load the files, generate, free everything: how far the memory of the process rose meanwhile.",
        item="tokens",
        peak_memory=True,
        error=sample_error,
    )


def tables(options: BenchOptions) -> list[Table]:
    """All of it; a few rows of the small model if it has to be quick."""
    if options.quick:
        return [decode_table(LLAMA_135M, "bf16", BF16, (8,)), prefill_table(LLAMA_135M, (1,))]
    return [
        decode_table(LLAMA_135M, "bf16", (*BF16, F16), (1, 2, 4, 8, 16, 32, 64), again=(1, 32)),
        decode_table(LLAMA_135M, "8 bits", EIGHT, (1, 8, 32)),
        decode_table(LLAMA_135M, "4 bits", FOUR, (1, 8, 32)),
        decode_table(LLAMA_135M, "float32", FLOAT32, (1, 32)),
        context_table(LLAMA_135M, (64, 1024, 4096)),
        prefill_table(LLAMA_135M, (1, 8)),
        group_table(LLAMA_135M),
        sync_table(LLAMA_135M),
        load_table(LLAMA_135M),
        memory_table(LLAMA_135M),
        decode_table(QWEN2_500M, "bf16", BF16, (1, 16)),
        decode_table(QWEN2_500M, "8 bits", EIGHT, (1, 16)),
        decode_table(QWEN2_500M, "4 bits", FOUR, (1, 16)),
        prefill_table(QWEN2_500M, (1,)),
    ]


SUITE = Suite(
    name="engine",
    title="The engine beside llama.cpp and transformers",
    summary="Decode, prefill, groups, sync, load and memory of models of true shapes with random weights, every "
    "contender's completion checked before it is timed.",
    tables=tables,
)
