"""Decode and prefill of recent families compared with llama.cpp, from one GGUF file each.

Weights are random, of a real model's shape or of its first layers; Whet writes the file. The error is against
llama.cpp: the two engines round activations to 8 bits in different places.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.contenders.engine import llamacpp, native
from benchmarks.contenders.engine.models import (
    GEMMA_4_10_LAYERS,
    GPT_OSS_4_LAYERS,
    GRANITE_4_H_350M,
    LFM2_350M,
    OLMOE_4_LAYERS,
    QWEN3_5_800M,
    QWEN3_MOE_8_LAYERS,
    ModelFiles,
    ModelShape,
    write_random_folder,
)
from benchmarks.contenders.engine.workload import random_workload, sample_error
from whet.bench.case import BenchOptions, Case, Provider, Suite, Table
from whet.models.export import export_gguf

N_STEPS = 32
BATCHES = (1, 8, 32)
PROMPT_LENGTH, PREFILL_LENGTH = 64, 512
TOLERANCE = 0.6  # 4 bits
SHAPES = (
    LFM2_350M, QWEN3_5_800M, GRANITE_4_H_350M, GEMMA_4_10_LAYERS, OLMOE_4_LAYERS, QWEN3_MOE_8_LAYERS, GPT_OSS_4_LAYERS
)  # fmt: skip


@dataclass(frozen=True)
class FamilyModel(ModelShape):
    """A model of random weights in a GGUF file.

    Attributes:
        kind: mixture of types of the file.
        folder: folder in which it is kept for later runs.
    """

    kind: str
    folder: Path = field(compare=False)

    def files(self) -> FamilyFiles:
        """Return the file, which is written on demand."""
        return FamilyFiles(self)

    def n_weights_read(self, n_rows: int) -> float:
        """Expected weights of matrices that a step of ``n_rows`` reads: a row's experts are equally probable."""
        config, n = self.config, 0.0
        touched = 1 - (1 - config.n_used_experts / config.n_experts) ** n_rows if config.n_experts else 1.0
        for name, shape in config.slots().items():
            if len(shape) == 2 and "layer_embedding" not in name:
                n += shape[0] * shape[1] * (touched if ".experts_" in name else 1.0)
        return n


class FamilyFiles(ModelFiles):
    """The file of a ``FamilyModel``; its model is llama.cpp's."""

    shape: FamilyModel

    @cached_property
    def model(self) -> Any:
        """The reference: llama.cpp on the file."""
        return llamacpp.Reference(self.gguf(self.shape.kind))

    def gguf(self, kind: str) -> Path:
        """Return the file; it has one mixture only."""
        assert kind == self.shape.kind
        path = self.shape.folder / f"{self.shape.name.replace(' ', '-')}.{kind}.gguf"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=path.parent) as folder:
                write_random_folder(self.shape, Path(folder))
                _tokenizer(self.shape.config.vocab_size).save(f"{folder}/tokenizer.json")
                export_gguf(folder, path, kind, pre="gpt-2")
        return path


def _tokenizer(vocab_size: int) -> Any:
    """Return a tokenizer with a token per byte, one merge, since GGUF has no empty arrays, and unused tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    names += [f"<{i}>" for i in range(len(names), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@dataclass(frozen=True)
class FamilyOptions(BenchOptions):
    """Settings of the suite."""

    models: str = "runs/bench/models"
    """Folder of the GGUF files, kept for later runs: 6 GB."""


def _cases(model: FamilyModel) -> tuple[Case, list[Case]]:
    """Return the case of prefill, and the cases of decode."""
    bits = 4.5  # of the mixtures' main type

    def case(name: str, n_rows: int, length: int, n_steps: int, n_tokens: int) -> Case:
        return Case(
            f"{model.name}, {name}",
            inputs=lambda rng: random_workload(rng, model, n_rows, length, 1, n_steps),
            reference=lambda workload: workload,
            tolerance=TOLERANCE,
            n_bytes=max(1, n_steps) * bits / 8 * model.n_weights_read(n_tokens // max(1, n_steps)),
            n_items=n_tokens,
        )

    prefill = case(f"1 x {PREFILL_LENGTH}", 1, PREFILL_LENGTH, 0, PREFILL_LENGTH)
    return prefill, [case(f"batch {n}", n, PROMPT_LENGTH, N_STEPS, N_STEPS * n) for n in BATCHES]


def tables(options: FamilyOptions) -> list[Table]:
    """Create the tables; if quick, of one family."""
    folder = Path(options.models)
    models = [
        FamilyModel(shape.name, shape.hf_config, "mxfp4_moe" if shape is GPT_OSS_4_LAYERS else "q4_k_m", folder)
        for shape in (SHAPES[:1] if options.quick else SHAPES)
    ]
    cases = [_cases(model) for model in models]

    def providers(task: str) -> list[Provider]:
        libraries = {"whet": native.WhetFromGguf(), "llama.cpp": llamacpp.LlamaCpp()}
        return [Provider(name, partial(_prepare, library, task), note="") for name, library in libraries.items()]

    note = (
        "Both run one file, q4_k_m or, gpt-oss, MXFP4. Random weights, prompts of random tokens. Bytes: matrices at "
        "4.5 bits, of a mixture those that the tokens touch if experts are equally probable. Whet samples at "
        "temperature 1 and returns log-probs; llama.cpp takes the argmax."
    )
    return [
        Table(
            "Prefill by family", [prefill for prefill, _ in cases], providers("prefill"), "inside", note, "tokens",
            error=sample_error,
        ),
        Table(
            "Decode by family", [case for _, decodes in cases for case in decodes], providers("decode"),
            "inside: allocations of a step", f"Prompts of {PROMPT_LENGTH} tokens, {N_STEPS} steps. {note}", "tokens",
            error=sample_error,
        ),
    ]  # fmt: skip


def _prepare(library: Any, task: str, workload: Any) -> Any:
    return getattr(library, task)(workload.files.shape.kind, workload)


SUITE = Suite(
    name="families",
    title="Recent families: Whet and llama.cpp",
    summary="Decode and prefill of LFM2, Qwen3.5, Granite 4 H, Gemma 4, OLMoE, Qwen3-MoE and gpt-oss from GGUF files "
    "with random weights in real shapes, next to llama.cpp.",
    tables=tables,
    options=FamilyOptions,
)
