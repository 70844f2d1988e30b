"""A teacher's skill in a smaller copy of it, by on-policy distillation and by SFT on the teacher's samples.

The teacher is SmolLM2 after SFT on sums (``methods.Bench.teacher``), the student the teacher without some layers. Both
methods train adapters of the same rank with as many completions per step; held-out sums are scored every few steps.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.contenders.training.methods import (
    MAX_NEW_TOKENS,
    N_COMPLETIONS,
    RANK,
    Bench,
    Method,
    as_flags,
    run_measured,
)

REMOVED_LAYERS = (12, 15, 18)
"""Three of 30 layers, not the first or the last, which change the hidden states most."""


@dataclass(frozen=True)
class Curve:
    """Scores of a run.

    Attributes:
        points: (step, held-out score), the first before training.
        step_s: seconds per step of each process that continued the run, with its start.
        peak_bytes: highest memory peak of these processes; None if the system does not report it.
    """

    points: Sequence[tuple[int, float]]
    step_s: Sequence[float]
    peak_bytes: int | None


@dataclass(frozen=True)
class Distillation(Bench):
    """Runs of both methods on the student.

    Attributes:
        every: steps between scores.
        removed: layers of the teacher that the student lacks.
    """

    every: int = 10
    removed: tuple[int, ...] = REMOVED_LAYERS

    @property
    def student(self) -> Path:
        """Folder of the student."""
        removed = "-".join(map(str, self.removed))
        return self._made(f"student-{self.n_steps}-without-{removed}", self._write_student) / "model"

    @property
    def samples(self) -> Path:
        """Rows of the teacher's answers, as many as the student samples when it is distilled."""
        return self._made(f"samples-{self.n_steps}", self._write_samples) / "rows.jsonl"

    @property
    def teacher_score(self) -> float:
        """Held-out score of the teacher."""
        return self._kept_score("teacher", self.teacher)

    def train(self, command: str, seed: int) -> Curve:
        """Train the student by ``distill``, or by ``sft`` on the teacher's samples."""
        if command == "distill":
            n_prompts = 20 * self.n_steps * N_COMPLETIONS
            inputs = {"task": f"{self.task},size={n_prompts}", "teacher": self.teacher}
        else:
            inputs = {"data": self.samples, "batch_size": N_COMPLETIONS}
        points, times, peaks = [(0, self._kept_score("student", self.student))], [], []
        with tempfile.TemporaryDirectory(prefix="whet-bench-") as scratch:
            output = Path(scratch) / "run"
            settings = {"model": self.student, "lora_rank": RANK, "seed": seed, "output_dir": output}
            settings |= {**Method(command).settings, **inputs, "checkpoint_every": self.every}
            for steps in range(self.every, self.n_steps + 1, self.every):
                seconds, peak, _ = run_measured(["train", command, *as_flags({**settings, "steps": steps})])
                points.append((steps, self._score(output / "model")))
                times.append(seconds / self.every)
                peaks += [] if peak is None else [peak]
        return Curve(points, times, max(peaks, default=None))

    def _kept_score(self, name: str, model: Path) -> float:
        folder = self._made(f"{name}-score-{self.n_steps}", lambda folder: self._write_score(folder, model))
        return json.loads((folder / "score.json").read_text(encoding="utf-8"))

    def _write_score(self, folder: Path, model: Path) -> None:
        (folder / "score.json").write_text(json.dumps(self._score(model)), encoding="utf-8")

    def _write_student(self, folder: Path) -> None:
        remove_layers(self.teacher, folder / "model", self.removed)

    def _write_samples(self, folder: Path) -> None:
        sampled, size = folder / "sampled.jsonl", self.n_steps * N_COMPLETIONS
        flags = {"model": self.teacher, "task": f"{self.task},size={4 * size // 3 + 8}", "n": 1, "batch_size": 64}
        flags |= {"temperature": 1.0, "max_new_tokens": MAX_NEW_TOKENS, "output": sampled}
        run_measured(["best-of-n", *as_flags(flags)])
        with sampled.open(encoding="utf-8") as file:
            lines = [json.loads(line) for line in file][:size]
        rows = ({"prompt": line["prompt"], "completion": line["completion"]} for line in lines)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "rows.jsonl").write_text(text, encoding="utf-8")


def remove_layers(model: Path, out: Path, layers: Sequence[int]) -> None:
    """Write a copy of a Hugging Face folder without some of its layers."""
    from safetensors.torch import load_file, save_file

    out.mkdir(parents=True)
    for path in model.iterdir():
        if path.suffix in (".json", ".jinja", ".txt", ".model") and path.name != "model.safetensors.index.json":
            (out / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    kept = [i for i in range(config["num_hidden_layers"]) if i not in layers]
    config["num_hidden_layers"] = len(kept)
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][i] for i in kept]
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    place = partial(_renumber, {old: new for new, old in enumerate(kept)})
    tensors = {}
    for path in sorted(model.glob("*.safetensors")):
        tensors |= {name: tensor for old, tensor in load_file(path).items() if (name := place(old))}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def _renumber(places: dict[int, int], name: str) -> str:
    """Return the name of a tensor in the smaller model; empty: its layer is removed."""
    if not (match := re.match(r"(.*\.layers\.)(\d+)(\..*)", name)):
        return name
    place = places.get(int(match[2]))
    return "" if place is None else f"{match[1]}{place}{match[3]}"
