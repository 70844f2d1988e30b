"""The engine beside llama.cpp and transformers: decode, prefill, groups, sync, load and memory.

Every contender runs the same model, of a true shape with random weights, and answers for it: the log-probs it gave
its own first completion are compared with those of transformers in float32. A decode is the steps from the first token
of all rows to the last; the prompt, and the first token after it, are not in its time. llama.cpp and transformers are
read off at these two moments, and so is Whet where there is one row; where there are several it is the time of a
generation less that of one that stops after the first token.

Whet samples at temperature 1 and gives log-probs. The others take the most probable token, which is less work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from whet.bench.case import BenchOptions, Case, Provider, Suite, Table
from whet.bench.contenders.engine import hf, llama_cpp, native
from whet.bench.contenders.engine.models import LLAMA_135M, QWEN2_500M, ModelShape
from whet.bench.contenders.engine.workload import random_workload, sample_error

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
LIBRARIES = {"whet": native.Whet(), "llama.cpp": llama_cpp.LlamaCpp(), "transformers": hf.Transformers()}


WIDTHS: dict[str, Width] = {
    "float32": "float32", "bf16": "bf16", "bfloat16": "bf16", "f16": "bf16", "int8": "8 bits", "q8_0": "8 bits",
    "int4": "4 bits", "q4_k": "4 bits", "q4_0": "4 bits", "q4_K_M": "4 bits",
}  # fmt: skip
"""Of the names that the libraries have for the formats of weights."""
_RATES: dict[Width, Literal["float32", "bfloat16", "int8"]] = {
    "float32": "float32", "bf16": "bfloat16", "8 bits": "int8", "4 bits": "int8",
}  # fmt: skip

Kinds = Mapping[str, str]
"""Contenders: how each is called, by its library first, and what its weights are."""
FLOAT32 = {"whet": "float32", "transformers": "float32"}
WHET_BF16 = {"whet": "bf16"}
PEERS_BF16 = {"llama.cpp bf16": "bf16", "transformers bf16": "bfloat16"}
BF16 = {**WHET_BF16, **PEERS_BF16}
EIGHT = {"whet": "int8", "whet bf16": "bf16", "llama.cpp q8_0": "q8_0"}
FOUR = {"whet": "q4_k", "whet int4": "int4", "llama.cpp q4_K_M": "q4_K_M", "llama.cpp q4_0": "q4_0"}
INT8, Q4_K = {"whet int8": "int8"}, {"whet q4_k": "q4_k"}


def contenders(kinds: Kinds, task: str, note: str = "", llama_note: str = "") -> list[Provider]:
    """A provider of each kind, by the method ``task`` of its library; ``note`` is for all of Whet's, of its weights."""

    def provider(name: str, weights: str) -> Provider:
        library = name.partition(" ")[0]
        plain = "weights in {}" if name == "whet" else ""
        text = {"whet": note or plain, "llama.cpp": llama_note}.get(library, "").format(weights)
        prepare = partial(getattr(LIBRARIES[library], task), weights)
        return Provider(name, prepare, tolerance=TOLERANCE[WIDTHS[weights]], note=text)

    return [provider(*kind) for kind in kinds.items()]


def weight_bytes(shape: ModelShape, width: Width) -> float:
    """Bytes of the matrices in the narrowest format of a width; in 4-bit formats the head has 6.5 bits."""
    head = shape.config.vocab_size * shape.config.hidden_dim
    bits = {"float32": (32, 32), "bf16": (16, 16), "8 bits": (8, 8), "4 bits": (4.5, 6.5)}[width]
    return (bits[0] * (shape.n_weights - head) + bits[1] * head) / 8


def _case(
    name: str,
    shape: ModelShape,
    n_prompts: int,
    length: int,
    n_samples: int = 1,
    n_steps: int = 7,
    width: Width = "bf16",
    **fields: Any,
) -> Case:
    """A workload of random tokens, which is itself what its answer is held against."""
    return Case(
        name,
        inputs=lambda rng: random_workload(rng, shape, n_prompts, length, n_samples, n_steps),
        reference=lambda workload: workload,
        tolerance=TOLERANCE[width],
        **fields,
    )


_table = partial(Table, error=sample_error)
_STEP = "inside: what a step allocates"
_FROM_FILE = "from its GGUF file, read and not mapped"


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
    return _case(
        name,
        shape,
        n_rows,
        length,
        n_steps=N_STEPS,
        width=width,
        n_bytes=N_STEPS * step_bytes,
        n_flops=N_STEPS * shape.forward_flops(n_rows, n_rows, context),
        flop_dtype=_RATES[width],
        footprint=step_bytes,
        n_items=N_STEPS * n_rows,
        size=size,
        thread_scaling=again,
    )


def decode_table(
    shape: ModelShape, width: Width, kinds: Kinds, batches: Sequence[int], again: Sequence[int] = ()
) -> Table:
    """Decode by batch; on fewer threads too for the batches in ``again``."""
    cases = [decode_case(f"batch {n}", shape, width, n, n, again=n in again) for n in batches]
    note = f"Prompts of {PROMPT_LENGTH} tokens, {N_STEPS} steps. {DECODE_NOTE} {NOTE}"
    providers = contenders(kinds, "decode")
    return _table(f"Decode, {shape.name}, {width}", cases, providers, _STEP, note, "tokens", "batch")


def context_table(shape: ModelShape, lengths: Sequence[int]) -> Table:
    """Decode of one row, by the length of its prompt."""
    cases = [decode_case(f"context {n}", shape, "bf16", 1, n, n) for n in lengths]
    note, label = f"One row, {N_STEPS} steps. {DECODE_NOTE}", "tokens before the first step"
    providers = contenders(BF16, "decode")
    return _table(f"Decode by context, {shape.name}, bf16", cases, providers, _STEP, note, "tokens", label)


def prefill_table(shape: ModelShape, n_prompts: Sequence[int], length: int = 512) -> Table:
    """Prompts to their first token."""
    cases = [
        _case(
            f"{n} x {length}",
            shape,
            n,
            length,
            n_steps=0,
            n_bytes=weight_bytes(shape, "bf16"),
            n_flops=shape.forward_flops(n * length, n, (length + 1) / 2),
            flop_dtype="bfloat16",
            n_items=n * length,
            thread_scaling=n == 1 and shape is LLAMA_135M,
        )
        for n in n_prompts
    ]
    note = f"Prompts that are in no cache, to the first token of each. {NOTE}"
    providers = contenders(BF16, "prefill")
    return _table(f"Prefill, {shape.name}, bf16", cases, providers, "inside", note, "tokens")


def group_table(shape: ModelShape, n_samples: int = 32, n_steps: int = 63) -> Table:
    """A prompt and 32 completions of it."""

    def case(length: int) -> Case:
        own = n_samples * shape.kv_bytes((n_steps + 1) // 2)
        step_bytes = weight_bytes(shape, "bf16") + shape.kv_bytes(length) + own
        steps = n_steps * shape.forward_flops(n_samples, n_samples, length + (n_steps + 1) / 2)
        return _case(
            f"prompt of {length}",
            shape,
            1,
            length,
            n_samples,
            n_steps,
            n_bytes=weight_bytes(shape, "bf16") + n_steps * step_bytes,
            n_flops=shape.forward_flops(length, 1, (length + 1) / 2) + steps,
            flop_dtype="bfloat16",
            footprint=step_bytes,
            n_items=n_samples * (1 + n_steps),
            size=length,
        )

    return _table(
        f"A group of {n_samples}, {shape.name}, bf16",
        [case(length) for length in (64, 512)],
        contenders(BF16, "group"),
        "inside",
        f"A prompt that is in no cache and {n_samples} completions of {1 + n_steps} tokens, the prompt's time "
        "included. llama.cpp runs the prompt once and its rows share it, greedily; transformers runs it for every row, "
        f"and samples. {NOTE}",
        "tokens",
        "tokens of the prompt",
    )


def sync_table(shape: ModelShape) -> Table:
    """The engine's weights after an update of the model."""

    def case(dtype: str, size: int) -> Case:
        base = _case(f"from {dtype}", shape, 1, 16, n_bytes=size * shape.n_weights, n_items=shape.n_weights)
        return replace(base, inputs=lambda rng: native.training(base.inputs(rng), dtype))

    copy = Provider("copy", native.copied_parameters, tolerance=0.0, note="torch copies every parameter, same dtype")
    return _table(
        f"Sync after an update, {shape.name}",
        [case("float32", 4), case("bfloat16", 2)],
        [*contenders({**WHET_BF16, **INT8, **Q4_K}, "sync", note="packs {}"), copy],
        "none: the copy is written where one was",
        "Every weight changes before each call. Bytes: every parameter read once. Whet's error is that of a "
        "completion after it, against the changed model.",
        "parameters",
    )


def load_table(shape: ModelShape) -> Table:
    """From the files to an engine that can generate."""
    case = _case("bfloat16 safetensors", shape, 1, 16, n_bytes=2 * shape.n_weights, n_items=shape.n_weights)
    load = partial(contenders, task="load_files", llama_note=_FROM_FILE)
    reading = Provider("reading the file", native.read_file, tolerance=0.0, note="into memory that is there")
    providers = [*load({**WHET_BF16, **INT8, **Q4_K}), reading, *load(PEERS_BF16)]
    note = "The files are in the system's cache: nobody waits for a disk."
    return _table(f"Load, {shape.name}", [case], providers, "inside", note, "parameters")


def memory_table(shape: ModelShape, n_rows: int = 32, n_steps: int = 63) -> Table:
    """Peak memory from loading to freeing: load, generate, free."""
    matrices = {width: f"{weight_bytes(shape, width) / 1e6:.0f} MB in {width}" for width in ("bf16", "8 bits")}
    kv_mb = shape.kv_bytes(n_rows * (PROMPT_LENGTH + n_steps)) / 1e6
    name = f"{n_rows} x ({PROMPT_LENGTH} + {1 + n_steps})"
    beside = f"matrices of {' and '.join(matrices.values())}; keys and values of {kv_mb:.0f} MB"
    n_items = n_rows * (1 + n_steps)
    case = _case(name, shape, n_rows, PROMPT_LENGTH, n_steps=n_steps, n_items=n_items, note=beside)
    providers = contenders({**WHET_BF16, **INT8, **PEERS_BF16}, "lifetime", llama_note=_FROM_FILE)
    note = "Load the files, generate, free everything: how far the memory of the process rose meanwhile."
    return _table(f"Peak memory, {shape.name}", [case], providers, "inside", note, "tokens", peak_memory=True)


def tables(options: BenchOptions) -> list[Table]:
    """All of it; a few rows of the small model if it has to be quick."""
    if options.quick:
        return [decode_table(LLAMA_135M, "bf16", BF16, (8,)), prefill_table(LLAMA_135M, (1,))]
    return [
        decode_table(LLAMA_135M, "bf16", {**BF16, "llama.cpp f16": "f16"}, (1, 2, 4, 8, 16, 32, 64), again=(1, 32)),
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
