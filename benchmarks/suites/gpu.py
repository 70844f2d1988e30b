"""The engine on the GPU of this machine, through WebGPU, next to its CPU engine: decode and prefill.

Models have random weights in the shape of a real model; log-probs of the first completion are compared with
transformers in float32. Rows have no ceilings, since the bandwidth of the GPU's memory is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.contenders.engine.models import LLAMA_135M, QWEN3_600M, ModelFiles, ModelShape
from benchmarks.contenders.engine.native import Whet
from benchmarks.contenders.engine.workload import Workload, sample_error
from benchmarks.suites.engine import N_STEPS, NOTE, PROMPT_LENGTH, WIDTH_OF, WIDTHS, decode_case, prefill_case
from benchmarks.suites.grpo import TINY
from whet.bench.case import BenchOptions, Call, Case, NotMeasured, Provider, Suite, Table
from whet.errors import WhetError


class WhetOnGpu(Whet):
    """Engine whose steps a GPU computes."""

    name = "whet on a GPU"

    def __init__(self, on_software: bool) -> None:
        self._on_software = on_software

    def of_model(self, files: ModelFiles, weights: str) -> Any:
        from whet.engine import Engine
        from whet.gpu.device import open_device

        try:
            info = open_device("whet bench gpu").adapter.info
        except WhetError as error:
            raise NotMeasured(str(error)) from error
        if info["adapter_type"] == "CPU" and not self._on_software:
            raise NotMeasured(f"there is no GPU: {info['device']} computes on the CPU")
        return Engine.from_model(files.model, weights=weights, speculation=False, device="gpu")


def _of_gpu(case: Case) -> Case:
    """Return a case without the ceilings of a CPU."""
    return replace(case, n_bytes=0, n_flops=0, footprint=0, thread_scaling=False)


def _provider(name: str, library: Whet, task: str, weights: str) -> Provider:
    def prepare(x: Workload) -> Call:
        return getattr(library, task)(weights, x)

    return Provider(name, prepare, tolerance=WIDTHS[WIDTH_OF[weights]].tolerance, note=f"weights in {weights}")


def _providers(task: str, on_software: bool) -> list[Provider]:
    gpu = WhetOnGpu(on_software)
    return [
        _provider("whet", gpu, task, "bf16"),
        _provider("whet q4_k", gpu, task, "q4_k"),
        _provider("whet on the CPU", Whet(), task, "bf16"),
        _provider("whet q4_k on the CPU", Whet(), task, "q4_k"),
    ]


def shape_tables(
    shape: ModelShape, batches: Sequence[int], lengths: Sequence[int], on_software: bool = False
) -> list[Table]:
    """Create the tables of decode by batch, and of prefill by length; ``on_software``: a GPU may be emulated."""
    bf16 = WIDTHS["bf16"]
    decodes = [_of_gpu(decode_case(f"batch {n}", shape, bf16, n)) for n in batches]
    prefills = [_of_gpu(prefill_case(f"1 x {n}", shape, bf16, 1, n)) for n in lengths]
    note = f"Prompts of {PROMPT_LENGTH} tokens, {N_STEPS} steps, without the prompt's time. {NOTE}"
    of = partial(_providers, on_software=on_software)
    return [
        Table(f"Decode, {shape.name}", decodes, of("decode"), "inside", note, "tokens", error=sample_error),
        Table(f"Prefill, {shape.name}", prefills, of("prefill"), "inside", NOTE, "tokens", error=sample_error),
    ]


def tables(options: BenchOptions) -> list[Table]:
    """Create all tables; if quick, a row of each of a tiny model, which a device on the CPU can compute."""
    if options.quick:
        return shape_tables(TINY, (1,), (64,), on_software=True)
    return [*shape_tables(LLAMA_135M, (1, 8, 32), (512,)), *shape_tables(QWEN3_600M, (1, 8), (512,))]


SUITE = Suite(
    name="gpu",
    title="The engine on a GPU and on the CPU",
    summary="Decode and prefill through WebGPU (Metal, Vulkan or Direct3D 12), next to the CPU engine of this machine.",
    tables=tables,
)
