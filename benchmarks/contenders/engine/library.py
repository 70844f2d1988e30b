"""Interface of an inference library: the shared parts of the engines, and the calls of each task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.contenders.engine.models import ModelFiles
from benchmarks.contenders.engine.workload import Sample, Workload, close, load_once
from whet.bench.case import Call, Timed, seconds_of


class Library:
    """Loader and generator of models in a weight format; ``decode``, ``prefill`` etc. prepare a provider's call.

    Attributes:
        name: key of its models among loaded models.
    """

    name: str

    def of_model(self, files: ModelFiles, weights: str) -> Any:
        """Create a model from the files."""
        raise NotImplementedError

    def source(self, files: ModelFiles, weights: str) -> Path:
        """Return the file or folder to load."""
        return files.folder

    def load(self, path: Path, weights: str) -> Any:
        """Load a model from its file or folder."""
        raise NotImplementedError

    def generate(self, model: Any, prompts: Sequence[Sequence[int]], n_tokens: int, n_samples: int = 1) -> Sample:
        """Generate ``n_samples`` completions of every prompt, and return the first."""
        raise NotImplementedError

    def model(self, x: Workload, weights: str) -> Any:
        """Return the workload's model, loaded once."""
        return load_once((x.files.shape, self.name, weights), lambda: self.of_model(x.files, weights))

    def decode(self, weights: str, x: Workload) -> Call:
        """Time ``n_steps`` steps after the first token of every row."""
        raise NotImplementedError

    def prefill(self, weights: str, x: Workload) -> Call:
        """Time prompts up to the first token of each."""
        model = self.model(x, weights)
        return lambda: self.generate(model, x.fresh(), 1)

    def group(self, weights: str, x: Workload) -> Call:
        """Time a prompt and all its completions."""
        model = self.model(x, weights)
        return lambda: self.generate(model, x.fresh(), x.n_tokens, x.n_samples)

    def load_files(self, weights: str, x: Workload) -> Call:
        """Time loading a model from its files; a completion outside of the timing checks it."""
        path = self.source(x.files, weights)

        def call() -> Timed:
            sample, load_s = self._run(path, weights, x.prompts[:1], x.n_tokens)
            return Timed(sample, {"load": load_s}, "load")

        return call

    def lifetime(self, weights: str, x: Workload) -> Call:
        """Time loading, generating and freeing."""
        path = self.source(x.files, weights)
        return lambda: self._run(path, weights, x.prompts, x.n_tokens)[0]

    def _run(self, path: Path, weights: str, prompts: Sequence[Sequence[int]], n_tokens: int) -> tuple[Sample, float]:
        """Load a model, generate and free it; return the sample and the seconds of loading."""
        model, load_s = seconds_of(self.load, path, weights)
        try:
            return self.generate(model, prompts, n_tokens), load_s
        finally:
            close(model)
