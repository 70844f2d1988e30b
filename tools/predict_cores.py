"""Predict a step on more cores than this machine has: the tables of docs/performance.md.

    python -m tools.predict_cores

Every job of the thread pool is divided as for N threads and runs on one (whet.ops.probe.trace_jobs); from the times of
its tasks follows its makespan on N threads. Barriers and shared bandwidth are not included.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from whet.ops.probe import Trace, trace_jobs

THREADS = (1, 2, 4, 8, 16, 64)


def makespan(tasks: Sequence[float], speeds: Sequence[float]) -> float:
    """Return the time of tasks that threads of these speeds claim in order."""
    free = [(0.0, -speed) for speed in speeds]  # when a thread claims its next task; the faster first
    heapq.heapify(free)
    end = 0.0
    for task in tasks:
        at, negative = heapq.heappop(free)
        at -= task / negative
        end = max(end, at)
        heapq.heappush(free, (at, negative))
    return end


class Prediction(NamedTuple):
    """A step on N threads. Times in seconds."""

    n_jobs: float
    serial_s: float
    work_s: float  # of all tasks, on one thread
    even_s: float  # of all tasks, divided evenly among N threads
    parallel_s: float  # of all jobs on N threads
    ideal_s: float  # of all tasks, divided evenly among N threads, one of half speed
    slow_s: float  # of all jobs on them

    @property
    def total_s(self) -> float:
        return self.serial_s + self.parallel_s


def predict(trace: Trace, threads: int) -> Prediction:
    """Predict the step of a trace with jobs divided for this number of threads."""
    work = sum(map(sum, trace.jobs))
    parallel = sum(makespan(job, [1.0] * threads) for job in trace.jobs)
    slow = sum(makespan(job, [1.0] * (threads - 1) + [0.5]) for job in trace.jobs)
    return Prediction(len(trace.jobs), trace.serial_s, work, work / threads, parallel, work / (threads - 0.5), slow)


class Work(NamedTuple):
    """A call, the part of it that is not measured, and the number of steps in the rest."""

    name: str
    call: Callable[[], object]
    without: Callable[[], object] | None = None
    n_steps: int = 1
    repeats: int = 1  # the shortest counts: other load only lengthens a step


def measure(work: Work, threads: int) -> Prediction:
    """Return the prediction of one step."""

    def shortest(call: Callable[[], object]) -> Prediction:
        found = [predict(trace_jobs(call, threads), threads) for _ in range(work.repeats)]
        return min(found, key=lambda prediction: prediction.total_s)

    whole = shortest(work.call)
    if work.without is None:
        return whole
    rest = shortest(work.without)
    return Prediction(*((a - b) / work.n_steps for a, b in zip(whole, rest, strict=True)))


def print_table(work: Work) -> None:
    print(f"\n{work.name}\n\n| threads | jobs | serial | tasks | makespan / even | step | slow thread / ideal |")
    print("|---|---|---|---|---|---|---|")
    for threads in THREADS:
        p = measure(work, threads)
        times = f"{1e3 * p.serial_s:.2f} ms | {1e3 * p.work_s:.1f} ms | {p.parallel_s / p.even_s:.2f}"
        slow = p.slow_s / p.ideal_s
        print(f"| {threads} | {p.n_jobs:.0f} | {times} | {1e3 * p.total_s:.2f} ms | {slow:.2f} |", flush=True)


def decode(model: Any, batch: int) -> Work:
    """Return the work of one token of each of ``batch`` sequences, behind 128 tokens."""
    from whet.config.sampling import SamplingParams
    from whet.engine import Engine

    engine = Engine.from_model(model, weights="bf16", max_batch=batch)
    prompts = [[i + 1] * 128 for i in range(batch)]

    def generate(n: int) -> Callable[[], object]:
        params = SamplingParams(temperature=0.0, max_new_tokens=n, stop_token_ids=[])
        return lambda: engine.generate(prompts, sampling=params)

    generate(1)()
    return Work(f"One token of {batch} sequences", generate(17), generate(1), 16, repeats=5)


def grpo_step(model: Any, name: str) -> Work:
    """Return the work of a GRPO step of a module or a learner."""
    from whet.algorithms.grpo import GRPO

    prompts = [[i + 1] * 40 for i in range(8)]
    trainer = GRPO(model, reward_fn=alternate, max_new_tokens=24, group_size=8, stop_token_ids=[])
    trainer.train_step(prompts)
    return Work(f"A GRPO step, {name}, 8 x 8 completions of 24 tokens", lambda: trainer.train_step(prompts))


def alternate(prompts: Any, completions: Any, **_: Any) -> list[float]:
    return [float(i % 2) for i in range(len(completions))]


def main() -> None:
    import torch

    import whet
    from benchmarks.contenders.engine.models import LLAMA_135M, random_model
    from whet.models.packed_base import pack_base
    from whet.models.sources.live import open_module

    model = random_model(LLAMA_135M)
    for batch in (1, 32):
        print_table(decode(model, batch))
    learner = whet.Learner(pack_base(open_module(model), weights="bf16"), lora_rank=16)
    print_table(grpo_step(learner, "adapters of rank 16"))
    torch.set_num_threads(1)  # torch's operations, which have their own threads, count as serial
    print_table(grpo_step(model.train().requires_grad_(True), "all weights"))


if __name__ == "__main__":
    main()
