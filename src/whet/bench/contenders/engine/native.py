"""Whet's engine. Completions are sampled at temperature 1 with their log-probs, which is what an RL step needs.

A decode of one row is streamed, and timed from its first token to its last. Of several rows it is the time of a
generation of 1 + ``n_steps`` tokens less that of one of 1 token, both of the same prompts, which must be short: what
the steps after the first token add.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from whet.bench.case import Call, Timed
from whet.bench.contenders.engine.workload import Sample, Workload, load_once
from whet.config.sampling import SamplingParams


def engine_of(x: Workload, weights: str) -> Any:
    """The workload's model in an engine."""
    from whet.engine import Engine

    key = (x.files.shape, "whet", weights)
    return load_once(key, lambda: Engine.from_model(x.files.model, weights=weights))


def generate(engine: Any, prompts: Sequence[Sequence[int]], n_tokens: int, n_samples: int = 1) -> Sample:
    """Generate, and return the first completion."""
    completions = engine.generate(prompts, n=n_samples, sampling=SamplingParams(max_new_tokens=n_tokens))
    first = completions[0][0]
    return Sample(prompts[0], first.token_ids, first.logprobs)


def whet_decode(weights: str) -> Callable[[Workload], Call]:
    """``n_steps`` steps after the first token of every row."""

    def prepare(x: Workload) -> Call:
        engine = engine_of(x, weights)
        generate(engine, x.prompts, 1)  # what the engine remembers of these prompts, it remembers in every call

        def one_row() -> Timed:
            stream = engine.stream(x.prompts[0], SamplingParams(max_new_tokens=x.n_tokens))
            tokens = [next(stream)]
            started = time.perf_counter()
            tokens += stream
            decode_s = time.perf_counter() - started
            sample = Sample(x.prompts[0], [t.token_id for t in tokens], [t.logprob for t in tokens])
            return Timed(sample, {"decode": decode_s}, "decode")

        def several() -> Timed:
            started = time.perf_counter()
            generate(engine, x.prompts, 1)
            between = time.perf_counter()
            sample = generate(engine, x.prompts, x.n_tokens)
            decode_s = (time.perf_counter() - between) - (between - started)
            return Timed(sample, {"decode": decode_s}, "decode")

        return one_row if x.n_rows == 1 else several

    return prepare


def whet_prefill(weights: str) -> Callable[[Workload], Call]:
    """Prompts, to the first token of each."""

    def prepare(x: Workload) -> Call:
        engine = engine_of(x, weights)
        return lambda: generate(engine, x.fresh(), 1)

    return prepare


def whet_group(weights: str) -> Callable[[Workload], Call]:
    """A prompt and all its completions."""

    def prepare(x: Workload) -> Call:
        engine = engine_of(x, weights)
        return lambda: generate(engine, x.fresh(), x.n_tokens, x.n_samples)

    return prepare


def whet_load(weights: str) -> Callable[[Workload], Call]:
    """``Engine.from_pretrained``; that it can generate is seen outside the time."""

    def prepare(x: Workload) -> Call:
        from whet.engine import Engine

        folder = x.files.folder

        def call() -> Timed:
            started = time.perf_counter()
            with Engine.from_pretrained(folder, weights=weights) as engine:
                load_s = time.perf_counter() - started
                return Timed(generate(engine, x.prompts[:1], x.n_tokens), {"load": load_s}, "load")

        return call

    return prepare


def whet_lifetime(weights: str) -> Callable[[Workload], Call]:
    """Load, generate, close."""

    def prepare(x: Workload) -> Call:
        from whet.engine import Engine

        folder = x.files.folder

        def call() -> Sample:
            with Engine.from_pretrained(folder, weights=weights) as engine:
                return generate(engine, x.prompts, x.n_tokens)

        return call

    return prepare


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


def whet_sync(weights: str) -> Callable[[Training], Call]:
    """``sync`` after an update; that the new weights are the engine's is seen outside the time."""

    def prepare(x: Training) -> Call:
        from whet.engine import Engine

        engine = Engine.from_model(x.trained, weights=weights)

        def call() -> Timed:
            x.update()
            started = time.perf_counter()
            engine.sync(x.trained)
            sync_s = time.perf_counter() - started
            return Timed(generate(engine, x.workload.prompts, x.n_tokens), {"sync": sync_s}, "sync")

        return call

    return prepare


def copied_parameters(x: Training) -> Call:
    """Copying every parameter into memory that is there; the answer is how many differ afterwards."""
    import torch

    sources = list(x.trained.parameters())
    copies = [torch.zeros_like(parameter) for parameter in sources]

    def call() -> Timed:
        x.update()
        started = time.perf_counter()
        with torch.no_grad():
            for copy, parameter in zip(copies, sources, strict=True):
                copy.copy_(parameter)
        copy_s = time.perf_counter() - started
        return Timed(
            float(sum(not torch.equal(*pair) for pair in zip(copies, sources, strict=True))), {"copy": copy_s}, "copy"
        )

    return call


def read_file(x: Workload) -> Call:
    """Reading the folder's weights into memory that is there; the answer is how many bytes are missing."""
    path = x.files.folder / "model.safetensors"
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
