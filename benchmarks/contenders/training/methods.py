"""Runs of the suite "methods": ``whet train METHOD`` as a whole process, and held-out scores before and after.

All methods learn sums, on adapters of one model. Methods on rows get right answers, or pairs of a right and a wrong
answer of the model (``preference``), methods that sample get the task, and distillation a teacher: the model after
SFT on right answers. A method has the settings of its file in ``examples``.

Files of a bench lie in its folder: the rows, the teacher, the score before training, and a JSON file per finished run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from whet.bench.suites import CLONE
from whet.config.algorithms import ALGORITHMS
from whet.errors import WhetError
from whet.files import replace_text
from whet.system.machine import load_average, machine_cpu_seconds

RANK = 16
RATE_FACTOR = 10.0
"""Learning rate of adapters over the rate of all weights, which the examples train: the factor that Schulman et al.
(2025, "LoRA Without Regret") find for SFT and reinforcement learning."""
N_COMPLETIONS = 64
"""Completions per step of methods that sample."""
N_PAIRS = 8
"""Pairs per step; methods on single rows get as many preferred answers, KTO also the rejected ones."""
MAX_NEW_TOKENS = 24
N_CANDIDATES = 8
"""Answers that the model samples to find a right and a wrong one for a pair."""
PROMPTS_PER_PAIR = 4
"""Sums for each pair: of many, the model's answers are all wrong."""
TEACHER_FACTOR = 4
"""Steps of the teacher's SFT over the steps of a run."""
IDLE_CPUS = 0.2
"""Most processors that others use while a time counts as taken on an idle machine."""
_SIZES = frozenset({"batch_size", "max_new_tokens", "reward_weights"})


@dataclass(frozen=True)
class Method:
    """A method of ``whet train`` with its settings.

    Attributes:
        command: its METHOD.
        variant: name of its variant; "": the settings of its example.
        changes: settings that differ from the example.
    """

    command: str
    variant: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name in tables."""
        return f"{self.command}, {self.variant}" if self.variant else self.command

    @property
    def file_name(self) -> str:
        """Name without characters that are special in paths."""
        return self.name.replace(", ", "-").replace(" ", "-")

    @property
    def samples(self) -> bool:
        """Whether it samples completions."""
        return ALGORITHMS[self.command].config.samples

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings of the example, for adapters and for the sizes of this suite, with the changes."""
        config = ALGORITHMS[self.command].config
        path = CLONE / "examples" / f"{self.command.replace('-', '_')}.toml"
        example = tomllib.loads(path.read_text(encoding="utf-8"))
        own = {each.name for each in dataclasses.fields(config)} - _SIZES
        settings = {name: value for name, value in example.items() if name in own}
        if "lora_rank" not in example:
            settings["learning_rate"] = float(f"{settings['learning_rate'] * RATE_FACTOR:.3g}")
        settings |= self.changes
        if self.samples:
            per_prompt = config(**settings).completions_per_prompt()
            settings |= {"batch_size": N_COMPLETIONS // per_prompt, "max_new_tokens": MAX_NEW_TOKENS}
        else:
            settings["batch_size"] = 2 * N_PAIRS if self.command == "kto" else N_PAIRS
        return settings


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        arguments: of ``whet train``, without paths; a run with other ones is repeated.
        seconds: of the process, from its start to its end.
        peak_bytes: memory peak of the process; None if the system does not report it.
        before, after: held-out score.
        others_cpus: processors that other processes used during the run; None if the system does not report it.
        load: the machine's load averages before the run.
    """

    arguments: Mapping[str, Any]
    seconds: float
    peak_bytes: int | None
    before: float
    after: float
    others_cpus: float | None
    load: Sequence[float]

    @property
    def is_idle(self) -> bool:
        """Whether the time was taken on an idle machine."""
        return self.others_cpus is not None and self.others_cpus <= IDLE_CPUS


@dataclass(frozen=True)
class Bench:
    """Runs on a model and a task, kept in a folder.

    Attributes:
        folder: where rows, teacher and finished runs are kept.
        model: the model of all runs, a path.
        task: sums, as for ``whet train --task``; its rows have an ``answer``.
        n_steps: steps of a run.
        n_held_out: held-out sums, and held-out pairs of the reward model.
        retime: whether to repeat kept runs whose time was taken while other processes used the machine.
    """

    folder: Path
    model: Path
    task: str
    n_steps: int = 60
    n_held_out: int = 500
    retime: bool = False

    def run(self, method: Method, seed: int) -> Run:
        """Return a finished run, from its file if there is one with these settings."""
        path = self.folder / f"{method.file_name}-seed-{seed}.json"
        arguments = {
            **method.settings,
            "method": method.command,
            "model": self.model.stem,
            "task": self.task,
            "steps": self.n_steps,
            "held_out": self.n_held_out,
            "seed": seed,
        }
        kept = _read_run(path)
        is_current = kept is not None and kept.arguments == arguments
        if kept is not None and is_current and (kept.is_idle or not self.retime):
            return kept
        run = self._train(method, seed, arguments)
        if kept is not None and is_current and _disturbance(kept) < _disturbance(run):
            return kept
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(dataclasses.asdict(run), indent=1) + "\n")
        return run

    def _train(self, method: Method, seed: int, arguments: Mapping[str, Any]) -> Run:
        inputs = self._inputs(method)  # not part of the time
        before = self.score_before if method.command != "reward" else 0.5
        with tempfile.TemporaryDirectory(prefix="whet-bench-") as scratch:
            output, load = Path(scratch) / "run", load_average()
            settings = {
                "model": self.model,
                "steps": self.n_steps,
                "seed": seed,
                "lora_rank": RANK,
                "checkpoint_every": self.n_steps,
                "output_dir": output,
            }
            flags = as_flags({**settings, **method.settings, **inputs})
            seconds, peak_bytes, others = run_measured(["train", method.command, *flags])
            after = _last_accuracy(output) if method.command == "reward" else self._score(output / "model")
        return Run(arguments, seconds, peak_bytes, before, after, others, load)

    # --- what runs need -----------------------------------------------------------------------------------------

    def _inputs(self, method: Method) -> dict[str, Any]:
        """Return the settings that name rows, task and teacher, which are made if they do not exist."""
        if method.samples:
            teacher = {"teacher": self.teacher} if method.command == "distill" else {}
            return {"task": f"{self.task},size={20 * self.n_rows}", **teacher}
        if method.command == "kd":
            return {"data": self.scored}
        if method.command == "sft":
            return {"data": self.answers}
        held_out = {"eval_data": self.pairs / "held_out.jsonl"} if method.command == "reward" else {}
        return {"data": self.pairs / ("labels.jsonl" if method.command == "kto" else "pairs.jsonl"), **held_out}

    @property
    def n_rows(self) -> int:
        """Number of pairs: each is used once in a run."""
        return self.n_steps * N_PAIRS

    @property
    def answers(self) -> Path:
        """Rows of right answers."""
        write = partial(self._write_answers, n=self.n_rows)
        return self._made(f"answers-{self.n_rows}", write) / "answers.jsonl"

    @property
    def pairs(self) -> Path:
        """Folder of pairs, of the same answers with labels, and of held-out pairs."""
        return self._made(f"pairs-{self.n_rows}-{self.n_held_out}", self._write_pairs)

    @property
    def teacher(self) -> Path:
        """Folder of the teacher: the model after SFT on right answers, more steps of it than a run has."""
        return self._made(f"teacher-{self.n_steps}", self._write_teacher) / "model"

    @property
    def scored(self) -> Path:
        """Rows of right answers with the teacher's log-probs."""
        return self._made(f"scored-{self.n_steps}", self._write_scored) / "scored.jsonl"

    @property
    def score_before(self) -> float:
        """Held-out score of the model before training."""
        path = self._made(f"before-{self.n_held_out}", lambda folder: self._score(self.model, folder / "eval.json"))
        return _score_in(path / "eval.json")

    def _made(self, name: str, make: Callable[[Path], object]) -> Path:
        """Return a folder of this bench, after ``make`` filled it if it does not exist."""
        path = self.folder / name
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".making-", dir=self.folder) as scratch:
                made = Path(scratch) / name
                made.mkdir()
                make(made)
                made.rename(path)
        return path

    def _write_answers(self, folder: Path, n: int) -> None:
        answers = _results(self.task, n)
        _write_lines(folder / "answers.jsonl", ({"prompt": p, "completion": _message(text)} for p, text in answers[:n]))

    def _write_pairs(self, folder: Path) -> None:
        n, sampled = self.n_rows + self.n_held_out, folder / "sampled.jsonl"
        size = PROMPTS_PER_PAIR * n
        flags = {
            "model": self.model,
            "task": f"{self.task},size={size}",
            "n": N_CANDIDATES,
            "batch_size": 64,
            "temperature": 1.0,
            "max_new_tokens": MAX_NEW_TOKENS,
            "output": sampled,
        }
        run_measured(["best-of-n", *as_flags(flags), "--all-candidates"])
        with sampled.open(encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        pairs = {json.dumps(line["prompt"]): pair for line in lines if (pair := preference(line))}
        found = list(pairs.values())[:n]
        if len(found) < n:
            raise WhetError(
                f"whet bench methods: {len(found)} pairs from {size} sums, expected {n}: the model answers too many or "
                f"too few of them, or sums repeat. Choose another task, or fewer steps."
            )
        trained, held_out = found[: self.n_rows], found[self.n_rows :]
        labels = (
            {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
            for pair in trained
            for side in ("chosen", "rejected")
        )
        for name, lines in (("pairs", trained), ("labels", labels), ("held_out", held_out)):
            _write_lines(folder / f"{name}.jsonl", lines)

    def _write_teacher(self, folder: Path) -> None:
        n_steps = TEACHER_FACTOR * self.n_steps
        self._write_answers(folder, n_steps * N_PAIRS)
        rows = folder / "answers.jsonl"
        settings = {
            "model": self.model,
            "data": rows,
            "steps": n_steps,
            "lora_rank": RANK,
            "output_dir": folder / "run",
        }
        run_measured(["train", "sft", *as_flags({**Method("sft").settings, **settings})])
        run_measured(["merge", str(folder / "run" / "model"), str(folder / "model")])
        shutil.rmtree(folder / "run")

    def _write_scored(self, folder: Path) -> None:
        files = {"data": self.answers, "output": folder / "scored.jsonl"}
        run_measured(["score", str(self.teacher), *as_flags(files)])

    def _score(self, model: Path, out: Path | None = None) -> float:
        """Return the mean score of a model's greedy answers to held-out sums."""
        with tempfile.TemporaryDirectory(prefix="whet-bench-") as scratch:
            out = out or Path(scratch) / "eval.json"
            flags = {"task": self.task, "size": self.n_held_out, "max_new_tokens": MAX_NEW_TOKENS, "out": out}
            run_measured(["eval", str(model), *as_flags(flags)])
            return _score_in(out)


def preference(sampled: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the pair of a sum, for ``whet train dpo``; None if the model's answers are all right or all wrong.

    Both are the model's own: the first with a score of 1 is preferred to the first with a score of 0. A preferred
    answer that the policy hardly writes would lose probability with the rejected one.

    Args:
        sampled: a line of ``whet best-of-n --all-candidates``.
    """
    first: dict[float, str] = {}
    for each in sampled["candidates"]:
        if each["completion"].strip():
            first.setdefault(each["score"], each["completion"])
    if not first.keys() >= {0.0, 1.0}:
        return None
    return {"prompt": sampled["prompt"], "chosen": _message(first[1.0]), "rejected": _message(first[0.0])}


def _message(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": str(text)}]


def _more(n: int) -> int:
    """Return a number of rows with at least n in the training split."""
    return 4 * n // 3 + 8


def _results(task: str, n: int) -> list[tuple[Any, str]]:
    """Return the prompts of at least n sums and their results."""
    from whet.tasks import make_prompt, open_task

    opened = open_task(f"{task},size={_more(n)}")
    return [(make_prompt(opened, row), str(row["answer"])) for row in opened.rows]


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as flags of the command line."""
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", *(map(str, value) if isinstance(value, (list, tuple)) else [str(value)])]
    return flags


# --- processes --------------------------------------------------------------------------------------------------


def run_measured(argv: Sequence[str]) -> tuple[float, int | None, float | None]:
    """Run ``whet`` in a process.

    Returns:
        Its seconds, its memory peak in bytes, and the processors that other processes used at the same time; None for
        what the system does not report.

    Raises:
        WhetError: the process failed; with the end of its output.
    """
    with tempfile.NamedTemporaryFile("r", encoding="utf-8", suffix=".json") as found, _others() as others:
        started_s = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.contenders.training.measured", found.name, *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(CLONE), os.environ.get("PYTHONPATH", "")])},
        )
        seconds = time.perf_counter() - started_s
        if done.returncode:
            raise WhetError(f"whet {' '.join(argv[:2])} ended with status {done.returncode}: {done.stdout[-2000:]}")
        peak_bytes = json.load(found)["peak_bytes"]
    return seconds, peak_bytes, others.get("cpus")


@contextmanager
def _others() -> Iterator[dict[str, float]]:
    """Yield a dict that has ``cpus`` afterwards: the processors that neither this process nor its children used."""
    found: dict[str, float] = {}
    before, own_s, started_s = machine_cpu_seconds(), _own_cpu_seconds(), time.perf_counter()
    yield found
    after, elapsed_s = machine_cpu_seconds(), time.perf_counter() - started_s
    if before is not None and after is not None:
        found["cpus"] = max(0.0, (after - before - (_own_cpu_seconds() - own_s)) / elapsed_s)


def _own_cpu_seconds() -> float:
    return sum(os.times()[:4])  # user and system, of this process and of its children that have ended


def _read_run(path: Path) -> Run | None:
    return Run(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def _disturbance(run: Run) -> float:
    return float("inf") if run.others_cpus is None else run.others_cpus


def _score_in(path: Path) -> float:
    report = json.loads(path.read_text(encoding="utf-8"))
    return report["models"][0]["tasks"][0]["score"]["value"]


def _last_accuracy(output: Path) -> float:
    """Return the accuracy of the last evaluation of a run of ``whet train reward``."""
    with (output / "metrics.jsonl").open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return [line["eval/accuracy"] for line in lines if "eval/accuracy" in line][-1]
