# pyright: reportMissingImports=false
"""OpenVINO GenAI's continuous batching: one ``step`` per token of all rows, tokens by argmax.

Its models are exported by ``optimum-cli`` of optimum-intel, which needs an older transformers than Whet's other peers:
the program is searched on PATH and runs in its own environment. Products are in bfloat16, keys and values in 8 bits,
its default. Only row 0, whose answer is checked, computes log-probs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import whet
from benchmarks.contenders.engine.library import Library
from benchmarks.contenders.engine.models import ModelFiles
from benchmarks.contenders.engine.workload import Sample, Workload
from whet.bench.case import Call, NotMeasured, Timed

_EXPORTED_AS = {"bf16": "fp16", "int8": "int8"}
"""Formats of optimum-cli; float16 becomes bfloat16 when the model is loaded."""
_CACHE_GB = 2
_PROMPT_TOKENS = 4096
"""Tokens per step, enough for the prompts of 64 rows."""
_NO_EXPORTER = (
    "optimum-cli, which exports models for OpenVINO, is not on PATH. Install it in a separate environment: "
    "python -m venv exporter && exporter/bin/pip install 'optimum-intel[openvino]'; PATH=$PATH:exporter/bin"
)


class OpenVino(Library):
    """OpenVINO; ``weights`` is bf16 or int8: 8 bits, asymmetric, with a scale per output row."""

    name = "OpenVINO"

    def of_model(self, files: ModelFiles, weights: str) -> Any:
        return self.load(self.source(files, weights), weights)

    def source(self, files: ModelFiles, weights: str) -> Path:
        path = files.path / f"openvino-{weights}"
        if not path.exists():
            _export(files.folder, path, _EXPORTED_AS[weights])
        return path

    def load(self, path: Path, weights: str) -> Any:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_batched_tokens = _CACHE_GB, _PROMPT_TOKENS
        scheduler.max_num_seqs = 64
        settings = {"INFERENCE_NUM_THREADS": whet.get_num_threads(), "INFERENCE_PRECISION_HINT": "bf16"}
        return openvino_genai.ContinuousBatchingPipeline(str(path), scheduler, "CPU", settings)

    def generate(self, model: Any, prompts: Sequence[Sequence[int]], n_tokens: int, n_samples: int = 1) -> Sample:
        """Generate one completion of each prompt."""
        return _generate(model, prompts, n_tokens)[0]

    def decode(self, weights: str, x: Workload) -> Call:
        """Time the steps after the last step of the prompts."""
        import openvino_genai  # noqa: F401  # fail before the export, which takes a minute

        pipeline = self.model(x, weights)

        def call() -> Timed:
            sample, decode_s = _generate(pipeline, x.prompts, x.n_tokens)
            return Timed(sample, {"decode": decode_s}, "decode")

        return call


def _generate(pipeline: Any, prompts: Sequence[Sequence[int]], n_tokens: int) -> tuple[Sample, float]:
    """Generate greedy completions of prompts of equal length.

    Returns:
        The first completion, and the seconds from the first tokens of all rows to their last tokens.
    """
    import openvino

    handles = [
        pipeline.add_request(row, openvino.Tensor(np.array([prompt], np.int64)), _config(n_tokens, logprobs=row == 0))
        for row, prompt in enumerate(prompts)
    ]
    while not all(handle.can_read() for handle in handles):
        pipeline.step()
    started, n_steps = time.perf_counter(), 0
    while pipeline.has_non_finished_requests():
        pipeline.step()
        n_steps += 1
    decode_s = time.perf_counter() - started
    if n_steps != n_tokens - 1:
        raise RuntimeError(f"OpenVINO took {n_steps} steps after the prompts for {n_tokens - 1} tokens")
    [first] = handles[0].read_all()
    return Sample(prompts[0], list(first.generated_ids), list(first.generated_log_probs)), decode_s


def _config(n_tokens: int, logprobs: bool) -> Any:
    import openvino_genai

    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = n_tokens
    config.ignore_eos, config.do_sample, config.logprobs = True, False, int(logprobs)
    return config


def _export(folder: Path, path: Path, weight_format: str) -> None:
    """Export a Hugging Face folder to OpenVINO by optimum-cli.

    Raises:
        NotMeasured: optimum-cli is missing or failed.
    """
    program = shutil.which("optimum-cli")
    if program is None:
        raise NotMeasured(_NO_EXPORTER)
    task = ["--task", "text-generation-with-past", "--weight-format", weight_format]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [program, "export", "openvino", "--model", str(folder), *task, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        shutil.rmtree(path, ignore_errors=True)
        raise NotMeasured(f"optimum-cli failed: {done.stderr.strip().splitlines()[-1:]}")
