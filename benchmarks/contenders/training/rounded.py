"""Files of a few bits per weight from one model, by rounding, by QAT and by llama.cpp, and their perplexity.

QAT is the recipe of docs/qat.md: the model in floats teaches itself rounded, on a text that only gives contexts.
llama.cpp weighs the rounding errors by an importance matrix of the same text. Text that both have: Python's language
reference for training, and a story of Jules Verne (reasoning-gym's data) for the perplexity.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.contenders.llama_programs import find_llama_program
from benchmarks.contenders.training.methods import as_flags, run_measured
from whet.bench.case import NotMeasured

PASSAGE = 1000
"""Characters of a passage."""
WINDOW = 512
"""Tokens of a window of the text whose perplexity is measured."""
N_STEPS, BATCH_SIZE, LEARNING_RATE = 40, 8, 5e-5
SEED = 0


@dataclass(frozen=True)
class Made:
    """A file, the seconds of the processes that made it, and the highest of their memory peaks."""

    path: Path
    seconds: float
    peak_bytes: int | None


@dataclass(frozen=True)
class Rounding:
    """Files of a model, in a folder.

    Attributes:
        folder: of the files.
        model: the original, a GGUF file.
        n_steps: steps of QAT.
    """

    folder: Path
    model: Path
    n_steps: int = N_STEPS

    @cached_property
    def floats(self) -> Path:
        """The model's numbers in float32, which all files are made from."""
        path = self.folder / "f32.gguf"
        run_measured(["export", str(self.model), str(path), "--quantize", "f32"])
        return path

    @cached_property
    def perplexity_before(self) -> float:
        """Perplexity of the floats."""
        return self.perplexity(self.floats)

    @cached_property
    def passages(self) -> list[str]:
        """The text for training, in passages."""
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
        passages = [text[at : at + PASSAGE] for at in range(0, len(text) - PASSAGE, PASSAGE)]
        n, step = self.n_steps * BATCH_SIZE, max(1, len(passages) // (self.n_steps * BATCH_SIZE))
        return passages[: n * step : step]

    def round(self, file_type: str) -> Made:
        """Round to nearest by ``whet export``."""
        out = self.folder / f"rounded-{file_type}.gguf"
        seconds, peak, _ = run_measured(["export", str(self.floats), str(out), "--quantize", file_type])
        return Made(out, seconds, peak)

    def train(self, file_type: str) -> Made:
        """Score the text with the model in floats, learn these probabilities with rounded weights, and export."""
        folder = self.folder / f"qat-{file_type}"
        folder.mkdir()
        rows, scored, run, out = (folder / name for name in ("rows.jsonl", "scored.jsonl", "run", "model.gguf"))
        rows.write_text("".join(json.dumps({"text": each}) + "\n" for each in self.passages), encoding="utf-8")
        floats = str(self.floats)
        settings = {
            "model": floats,
            "data": scored,
            "qat": file_type,
            "learning_rate": LEARNING_RATE,
            "batch_size": BATCH_SIZE,
            "steps": self.n_steps,
            "checkpoint_every": self.n_steps,
            "seed": SEED,
            "output_dir": run,
        }
        commands = (
            ["score", floats, "--data", str(rows), "--output", str(scored), "--weights", "float32"],
            ["train", "kd", *as_flags(settings)],
            ["export", str(run / "model"), str(out), "--quantize", file_type],
        )
        measured = [run_measured(command) for command in commands]
        peaks = [peak for _, peak, _ in measured if peak is not None]
        return Made(out, sum(seconds for seconds, _, _ in measured), max(peaks, default=None))

    def quantize(self, file_type: str, *, weighted: bool) -> Made:
        """Round by llama-quantize, weighted by llama-imatrix of the text, or not."""
        quantize = find_llama_program("llama-quantize")
        folder = self.folder / f"{'weighted' if weighted else 'plain'}-{file_type}"
        out, matrix, text = (folder / name for name in ("model.gguf", "imatrix.gguf", "text.txt"))
        commands = [[quantize, str(self.floats), str(out), file_type]]
        if weighted:
            collect = [find_llama_program("llama-imatrix"), "-m", str(self.floats), "-f", str(text), "-o", str(matrix)]
            commands = [collect, [quantize, "--imatrix", str(matrix), str(self.floats), str(out), file_type]]
        folder.mkdir()
        text.write_text("".join(self.passages), encoding="utf-8")
        started = time.perf_counter()
        for command in commands:
            _run_program(command)
        return Made(out, time.perf_counter() - started, None)

    def perplexity(self, path: Path) -> float:
        """Return the perplexity of a file's numbers, multiplied in float32, on text that no file was made with."""
        from reasoning_gym.data import get_data_file_path

        from whet import Engine
        from whet.text.model import find_model, load_chat_tokenizer

        found = find_model(str(path), "whet bench rounding")
        text = get_data_file_path("in_the_year_2889.txt").read_text(encoding="utf-8")
        ids = load_chat_tokenizer(found, "whet bench rounding")(text)["input_ids"]
        windows = [ids[at : at + WINDOW] for at in range(0, len(ids) - 1, WINDOW)]
        engine = Engine.from_pretrained(path, weights="float32")
        rows = engine.logprobs([window for window in windows if len(window) > 1])
        values = [value for row in rows for value in row]
        return math.exp(-math.fsum(values) / len(values))


def _run_program(command: Sequence[str]) -> None:
    """Run a program of llama.cpp.

    Raises:
        NotMeasured: it failed; with the end of its output.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        raise NotMeasured(f"{os.path.basename(command[0])} ended with status {done.returncode}: {done.stdout[-500:]}")
