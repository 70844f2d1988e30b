"""Whet's engine, without speculation. Completions are sampled at temperature 1 with their log-probs, for an RL step.

Decode of one row is streamed and timed from the first token to the last. Decode of several rows is the time of
generating 1 + ``n_steps`` tokens minus the time of generating 1 token for the same prompts, which must be short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders.engine.library import Library
from benchmarks.contenders.engine.models import ModelFiles
from benchmarks.contenders.engine.workload import Sample, Workload
from whet.bench.case import Call, Timed, seconds_of
from whet.config.sampling import SamplingParams


class Whet(Library):
    """Engine of a model in memory or in a folder."""

    name = "whet"

    def of_model(self, files: ModelFiles, weights: str) -> Any:
        from whet.engine import Engine

        return Engine.from_model(files.model, weights=weights, speculation=False)

    def load(self, path: Path, weights: str) -> Any:
        from whet.engine import Engine

        return Engine.from_pretrained(path, weights=weights, speculation=False)

    def generate(self, model: Any, prompts: Sequence[Sequence[int]], n_tokens: int, n_samples: int = 1) -> Sample:
        completions = model.generate(prompts, n=n_samples, sampling=SamplingParams(max_new_tokens=n_tokens))
        first = completions[0][0]
        return Sample(prompts[0], first.token_ids, first.logprobs)

    def decode(self, weights: str, x: Workload) -> Call:
        engine = self.model(x, weights)
        self.generate(engine, x.prompts, 1)  # fill the prefix cache, so that all calls hit it

        def one_row() -> Timed:
            stream = engine.stream(x.prompts[0], SamplingParams(max_new_tokens=x.n_tokens))
            first = next(stream)
            rest, decode_s = seconds_of(list, stream)
            tokens = [first, *rest]
            sample = Sample(x.prompts[0], [t.token_id for t in tokens], [t.logprob for t in tokens])
            return Timed(sample, {"decode": decode_s}, "decode")

        def several() -> Timed:
            _, first_s = seconds_of(self.generate, engine, x.prompts, 1)
            sample, all_s = seconds_of(self.generate, engine, x.prompts, x.n_tokens)
            return Timed(sample, {"decode": all_s - first_s}, "decode")

        return one_row if x.n_rows == 1 else several

    def sync(self, weights: str, x: Training) -> Call:
        """Time ``sync`` after an update; a completion outside of the timing checks the engine's new weights."""
        from whet.engine import Engine

        engine = Engine.from_model(x.trained, weights=weights)

        def call() -> Timed:
            x.update()
            _, sync_s = seconds_of(engine.sync, x.trained)
            return Timed(self.generate(engine, x.workload.prompts, x.n_tokens), {"sync": sync_s}, "sync")

        return call


class WhetFromGguf(Whet):
    """Engine of a GGUF file, in the file's formats."""

    name = "whet from GGUF"

    def of_model(self, files: ModelFiles, weights: str) -> Any:
        return self.load(files.gguf(weights), weights)

    def source(self, files: ModelFiles, weights: str) -> Path:
        return files.gguf(weights)

    def load(self, path: Path, weights: str) -> Any:
        from whet.engine import Engine

        return Engine.from_gguf(path, speculation=False)


class WhetWithTokenizer(WhetFromGguf):
    """Engine of a GGUF file, whose tokenizer is loaded too."""

    def load(self, path: Path, weights: str) -> Any:
        from whet.models.tokenizers.tokenizer import read_tokenizer

        if not len(read_tokenizer(path)):
            raise RuntimeError(f"the tokenizer of {path.name} is empty")
        return super().load(path, weights)


# --- sync -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """A model in training, and a workload that checks the weights of an engine."""

    workload: Workload
    trained: Any

    @property
    def n_tokens(self) -> int:
        """Number of tokens of each completion."""
        return self.workload.n_tokens

    @property
    def model(self) -> Any:
        """Reference model: the current trained model in float32."""
        import copy

        return copy.deepcopy(self.trained).float()

    def update(self) -> None:
        """Negate every weight; the next update reverts it."""
        import torch

        with torch.no_grad():
            for parameter in self.trained.parameters():
                parameter.neg_()


def training(workload: Workload, dtype: str) -> Training:
    """Copy the workload's model in a dtype for training."""
    import copy

    import torch

    trained = copy.deepcopy(workload.model).to(getattr(torch, dtype))
    return Training(workload, trained.requires_grad_(True))


def copy_parameters(x: Training) -> Call:
    """Copy every parameter into allocated memory; the answer is the number of differing parameters."""
    import torch

    sources = list(x.trained.parameters())
    copies = [torch.zeros_like(parameter) for parameter in sources]

    def copy_all() -> None:
        with torch.no_grad():
            for copy, parameter in zip(copies, sources, strict=True):
                copy.copy_(parameter)

    def call() -> Timed:
        x.update()
        _, copy_s = seconds_of(copy_all)
        n_different = sum(not torch.equal(*pair) for pair in zip(copies, sources, strict=True))
        return Timed(float(n_different), {"copy": copy_s}, "copy")

    return call


def safetensors_path(x: Workload) -> Path:
    """Return the weight file of the workload's folder."""
    return x.files.folder / "model.safetensors"


def read_file(find_path: Callable[[Workload], Path], x: Workload) -> Call:
    """Read a file into allocated memory; the answer is the number of missing bytes."""
    path = find_path(x)
    buffer = bytearray(path.stat().st_size)

    def call() -> float:
        with path.open("rb", buffering=0) as file:
            return float(len(buffer) - _read(file, memoryview(buffer)))

    return call


def _read(file: Any, room: memoryview) -> int:
    n = 0
    while n < len(room) and (step := file.readinto(room[n:])):
        n += step
    return n
