"""Whet's engine. Completions are sampled at temperature 1 with their log-probs, which is what an RL step needs.

A decode of one row is streamed, and timed from its first token to its last. Of several rows it is the time of a
generation of 1 + ``n_steps`` tokens less that of one of 1 token, both of the same prompts, which must be short: what
the steps after the first token add.
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
    """An engine is from a model in memory, or from its folder."""

    name = "whet"

    def of_model(self, files: ModelFiles, weights: str) -> Any:
        from whet.engine import Engine

        return Engine.from_model(files.model, weights=weights)

    def load(self, path: Path, weights: str) -> Any:
        from whet.engine import Engine

        return Engine.from_pretrained(path, weights=weights)

    def generate(self, model: Any, prompts: Sequence[Sequence[int]], n_tokens: int, n_samples: int = 1) -> Sample:
        completions = model.generate(prompts, n=n_samples, sampling=SamplingParams(max_new_tokens=n_tokens))
        first = completions[0][0]
        return Sample(prompts[0], first.token_ids, first.logprobs)

    def decode(self, weights: str, x: Workload) -> Call:
        engine = self.model(x, weights)
        self.generate(engine, x.prompts, 1)  # what the engine remembers of these prompts, it remembers in every call

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
        """``sync`` after an update; that the new weights are the engine's is seen outside the time."""
        from whet.engine import Engine

        engine = Engine.from_model(x.trained, weights=weights)

        def call() -> Timed:
            x.update()
            _, sync_s = seconds_of(engine.sync, x.trained)
            return Timed(self.generate(engine, x.workload.prompts, x.n_tokens), {"sync": sync_s}, "sync")

        return call


class WhetFromGguf(Whet):
    """An engine is from a GGUF file, and keeps the file's formats."""

    name = "whet from GGUF"

    def of_model(self, files: ModelFiles, weights: str) -> Any:
        return self.load(files.gguf(weights), weights)

    def source(self, files: ModelFiles, weights: str) -> Path:
        return files.gguf(weights)

    def load(self, path: Path, weights: str) -> Any:
        from whet.engine import Engine

        return Engine.from_gguf(path)


class WhetWithTokenizer(WhetFromGguf):
    """The file's tokenizer is read too."""

    def load(self, path: Path, weights: str) -> Any:
        from whet.models.tokenizers.tokenizer import read_tokenizer

        if not len(read_tokenizer(path)):
            raise RuntimeError(f"the tokenizer of {path.name} is empty")
        return super().load(path, weights)


# --- sync -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """A model in training, and a workload to see by that an engine has its weights."""

    workload: Workload
    trained: Any

    @property
    def n_tokens(self) -> int:
        """Tokens of each completion."""
        return self.workload.n_tokens

    @property
    def model(self) -> Any:
        """By which answers are judged: the trained model as it is now, in float32."""
        import copy

        return copy.deepcopy(self.trained).float()

    def update(self) -> None:
        """Change every weight: an update that the next one takes back."""
        import torch

        with torch.no_grad():
            for parameter in self.trained.parameters():
                parameter.neg_()


def training(workload: Workload, dtype: str) -> Training:
    """A copy of the workload's model in a dtype."""
    import copy

    import torch

    trained = copy.deepcopy(workload.model).to(getattr(torch, dtype))
    return Training(workload, trained.requires_grad_(True))


def copied_parameters(x: Training) -> Call:
    """Copying every parameter into memory that is there; the answer is how many differ afterwards."""
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
    """The weights of the workload's folder."""
    return x.files.folder / "model.safetensors"


def read_file(find_path: Callable[[Workload], Path], x: Workload) -> Call:
    """Reading a file into memory that is there; the answer is how many bytes are missing."""
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
