"""Model of ``async_lag`` on 1 to 1,000 sampling workers: the table and the plot of docs/scale.md.

    python -m tools.scale_model [--check] [--plot docs/images/async-lag.svg]

Discrete events: workers decode a token of all their sequences at once, trainer and workers wait for each other as the
plan of ``whet.rollout.plan`` has it, and calls are placed by the pool's own ``Placement``. ``--check`` samples on two
real workers, next to a trainer that sleeps, and prints the measured time of a step next to the model's.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from whet.rollout.plan import share_of
from whet.rollout.ray_dispatch import Job, Placement, SampleRange, split_groups

WORKERS, LAGS = (1, 3, 10, 30, 100, 300, 1000), (0, 1, 2, 4, 8)


@dataclass(frozen=True)
class Fleet:
    """Workers, and the trainer.

    Attributes:
        token_s: seconds in which a worker decodes a token of each sequence, and more per sequence.
        prefill_s: seconds in which a worker computes a token of a prompt.
        call_s: seconds that a call costs its worker.
        load_s: seconds until a worker has another version.
        train_s: seconds of a training step.
        failure_s: mean time between failures of a worker; 0: never.
        restart_s: seconds until it works again.
    """

    n_workers: int
    token_s: tuple[float, float]
    prefill_s: float
    call_s: float
    load_s: float
    train_s: float
    failure_s: float = 0.0
    restart_s: float = 20.0


@dataclass(eq=False)
class _Planned:
    """Share of a step that a version samples."""

    step: int
    job: Job
    lengths: np.ndarray
    n_left: int
    n_prompt: int
    chain: deque[list[_Planned]] = field(default_factory=deque)


@dataclass(eq=False)
class _Sequences:
    """Sequences of a call on a worker."""

    job: Job
    part: SampleRange
    lengths: list[int]
    n_prompt: int  # tokens before them
    n_left: int = 0


@dataclass(eq=False)
class _Worker:
    version: int = -1
    calls: list[_Sequences] = field(default_factory=list)
    running: list[tuple[float, int, _Sequences]] = field(default_factory=list)  # (token at which it ends, ...)
    token: float = 0.0
    debt_s: float = 0.0  # of prompts that are not computed yet
    since_s: float = 0.0
    stamp: int = 0
    loading: int | None = None  # number of the event at which it has its version


class Simulation:
    """A run; ``step_s`` is its result.

    Args:
        fleet: workers and trainer.
        lengths: (steps, prompts, samples) tokens of the completions.
        lag: ``async_lag``.
        tokens: ``async_tokens``.
        prompt: tokens of a prompt.
    """

    def __init__(self, fleet: Fleet, lengths: np.ndarray, lag: int, tokens: int = 0, prompt: int = 128) -> None:
        self._fleet, self._lengths, self._lag, self._tokens = fleet, lengths, lag, tokens
        self._prompt = prompt
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers, self._now = itertools.count(), 0.0
        self._placement = Placement(fleet.n_workers)
        self._workers = [_Worker() for _ in range(fleet.n_workers)]
        self._rng = np.random.default_rng(0)
        self._left: dict[int, int] = {}  # parts of a step that are planned and not sampled
        self._chain: deque[list[_Planned]] = deque()
        self._planned: dict[Job, _Planned] = {}
        self._step, self._is_training = 0, False
        self._ends: list[float] = []
        self.lag_sum = self.n_tokens = 0

    def run(self) -> Simulation:
        """Simulate until the last step is trained."""
        if self._fleet.failure_s:
            for worker in range(self._fleet.n_workers):
                self._fail_later(worker)
        self._extend()
        while len(self._ends) < len(self._lengths):
            self._now, _, event = heapq.heappop(self._events)
            event()
        return self

    @property
    def step_s(self) -> float:
        """Mean seconds of a step, without the first quarter of the run."""
        first = len(self._ends) // 4
        return (self._ends[-1] - self._ends[first]) / (len(self._ends) - 1 - first)

    @property
    def mean_lag(self) -> float:
        return self.lag_sum / self.n_tokens

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), event))

    # --- the plan ---------------------------------------------------------------------------------------

    def _extend(self) -> None:
        """Begin what the weights of this step sample, and train if its completions are there."""
        n_steps, n_prompts, n = self._lengths.shape
        version, groups = self._step, []
        for step in range(version, min(version + self._lag + 1, n_steps)):
            of_step = self._lengths[step]
            first = max(0, step - self._lag)
            end = share_of(step, first, version, self._tokens, int(of_step.max()))
            if end is None:
                continue
            start = self._tokens * (version - first)
            own = np.clip(of_step, start, end) - start
            self.lag_sum += int(own.sum()) * (step - version)
            self.n_tokens += int(own.sum())
            parts = split_groups(n_prompts, n, self._fleet.n_workers)
            if version > first:  # continued one by one
                parts = [SampleRange(int(i), int(j), 1) for i, j in zip(*np.nonzero(own), strict=True)]
            if parts:
                self._left[step] = self._left.get(step, 0) + len(parts)
                planned = _Planned(step, Job(version, parts, lambda *_: None), own, len(parts), self._prompt + start)
                if self._tokens and len(groups) and step > version + 1:
                    groups[-1].append(planned)
                else:
                    groups.append([planned])
        if self._tokens:  # one group after the other
            is_idle = not self._chain
            self._chain.extend(groups)
            if is_idle:
                self._begin(self._chain)
        else:
            for group in groups:
                self._begin(deque([group]))
        self._place()
        self._train()

    def _begin(self, chain: deque[list[_Planned]]) -> None:
        """Begin the first group of a chain; the next follows when it is sampled."""
        for planned in chain[0] if chain else ():
            planned.chain = chain
            self._planned[planned.job] = planned
            self._placement.add(planned.job)

    def _end_part(self, job: Job) -> None:
        planned = self._planned[job]
        planned.n_left -= 1
        self._left[planned.step] -= 1
        if all(each.n_left == 0 for each in planned.chain[0]):
            planned.chain.popleft()
            self._begin(planned.chain)

    def _is_complete(self, step: int) -> bool:
        return self._left.get(step, 0) == 0

    def _train(self) -> None:
        if not self._is_training and self._step < len(self._lengths) and self._is_complete(self._step):
            self._is_training = True
            self._at(self._now + self._fleet.train_s, self._end_training)

    def _end_training(self) -> None:
        self._is_training = False
        self._ends.append(self._now)
        self._step += 1
        if self._step < len(self._lengths):
            self._extend()

    # --- the workers ------------------------------------------------------------------------------------

    def _place(self) -> None:
        for job, part, i in self._placement.assign():
            worker = self._workers[i]
            planned = self._planned[job]
            of_prompt = planned.lengths[part.prompt]
            call = _Sequences(job, part, of_prompt[part.first : part.first + part.count].tolist(), planned.n_prompt)
            worker.calls.append(call)
            if worker.version != job.version:
                worker.version = job.version
                self._load(i, self._fleet.load_s)
            elif worker.loading is None:
                self._start(i, [call])

    def _load(self, i: int, seconds: float) -> None:
        """Begin the calls of a worker when it has its version."""
        self._workers[i].loading = number = next(self._numbers)

        def end() -> None:
            if self._workers[i].loading == number:
                self._workers[i].loading = None
                self._start(i, self._workers[i].calls)

        self._at(self._now + seconds, end)

    def _start(self, i: int, calls: Sequence[_Sequences]) -> None:
        worker = self._workers[i]
        self._advance(worker)
        for call in calls:
            call.n_left = len(call.lengths)
            worker.debt_s += self._fleet.call_s + self._fleet.prefill_s * call.n_prompt
            for length in call.lengths:
                heapq.heappush(worker.running, (worker.token + max(1, length), next(self._numbers), call))
        self._wake(i)

    def _advance(self, worker: _Worker) -> None:
        """Decode up to now."""
        if worker.running:
            fixed, each = self._fleet.token_s
            elapsed_s = self._now - worker.since_s
            paid_s = min(elapsed_s, worker.debt_s)
            worker.debt_s -= paid_s
            worker.token += (elapsed_s - paid_s) / (fixed + each * len(worker.running))
        worker.since_s = self._now

    def _wake(self, i: int) -> None:
        """Continue when the next sequence of a worker ends."""
        worker = self._workers[i]
        worker.stamp += 1
        if worker.running:
            fixed, each = self._fleet.token_s
            left_s = (worker.running[0][0] - worker.token) * (fixed + each * len(worker.running))
            self._at(
                self._now + worker.debt_s + max(0.0, left_s), lambda stamp=worker.stamp: self._end_sequences(i, stamp)
            )

    def _end_sequences(self, i: int, stamp: int) -> None:
        worker = self._workers[i]
        if worker.stamp != stamp:
            return
        self._advance(worker)
        worker.token = worker.running[0][0]
        while worker.running and worker.running[0][0] <= worker.token:
            *_, call = heapq.heappop(worker.running)
            call.n_left -= 1
            if not call.n_left:
                worker.calls.remove(call)
                self._placement.end(i)
                self._end_part(call.job)
        self._wake(i)
        self._place()
        self._train()

    def _fail_later(self, i: int) -> None:
        self._at(self._now + self._rng.exponential(self._fleet.failure_s), lambda: self._fail(i))

    def _fail(self, i: int) -> None:
        """End a worker: its calls begin again when it has restarted."""
        worker = self._workers[i]
        self._advance(worker)
        worker.running, worker.stamp = [], worker.stamp + 1
        self._load(i, self._fleet.restart_s + self._fleet.load_s)
        self._fail_later(i)


def draw_lengths(n_steps: int, n_prompts: int, n: int, longest: int, seed: int = 0) -> np.ndarray:
    """Draw lengths with a long tail: log-normal with median 300 and sigma 1, at most ``longest``."""
    drawn = np.random.default_rng(seed).lognormal(np.log(300), 1.0, (n_steps, n_prompts, n))
    return np.clip(drawn, 1, longest).astype(int)


def fleet_of(n_workers: int, failure_s: float = 0.0) -> Fleet:
    """The fleet of the documentation: a model of 135 M parameters on workers of two cores, and adapters of 10 MB that
    all workers fetch through a network card of 10 Gbit/s."""
    return Fleet(n_workers, (0.013, 0.0002), 0.00015, 0.002, 0.05 + n_workers * 10e6 * 8 / 10e9, 10.0, failure_s)


def model_table(n_steps: int) -> dict[tuple[str, int, float], list[Simulation]]:
    """Return simulations by name, tokens and failures, one for each number of workers."""
    lengths = draw_lengths(n_steps, 64, 8, 4000)
    plans = [(f"K = {lag}", lag, 0) for lag in LAGS] + [("K = 8, M = 500", 8, 500)]
    found = {}
    for failure_s in (0.0, 3600.0):
        for name, lag, tokens in plans:
            runs = [Simulation(fleet_of(n, failure_s), lengths, lag, tokens).run() for n in WORKERS]
            found[name, lag, failure_s] = runs
            cells = " | ".join(f"{3600 / run.step_s:.0f}" for run in runs)
            failing = "a failure per worker and hour" if failure_s else "no failures"
            print(f"| {name} | {failing} | {cells} | {runs[-1].mean_lag:.1f} |", flush=True)
    return found


def plot(found: dict[tuple[str, int, float], list[Simulation]], path: str) -> None:
    """Draw steps per hour over workers, and the mean lag of a token."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "whet"
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.9), width_ratios=(2, 1), layout="constrained")
    shown = {name: runs for (name, _, failure_s), runs in found.items() if not failure_s}
    colors = dict(zip(shown, plt.get_cmap("viridis")(np.linspace(0, 0.85, len(shown))), strict=True))
    for name, runs in shown.items():
        style = "--" if "M" in name else "-"
        left.plot(WORKERS, [3600 / run.step_s for run in runs], style, marker="o", ms=4, color=colors[name], label=name)
    left.axhline(360, color="0.6", lw=1, ls=":")
    left.text(1, 363, "the trainer's limit", color="0.35", fontsize=8, va="bottom")
    left.set(xscale="log", xlabel="workers", ylabel="steps per hour", ylim=(0, 400))
    left.set_xticks(WORKERS, [f"{n:,}" for n in WORKERS])
    left.minorticks_off()
    left.legend(frameon=False, fontsize=8)
    names = list(shown)
    right.barh(names, [shown[name][-1].mean_lag for name in names], color=[colors[name] for name in names])
    right.invert_yaxis()
    right.set(xlabel="mean lag of a token, steps")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.endswith("svg") else None, dpi=130)


# --- two real workers -----------------------------------------------------------------------------------------------


def check(n_steps: int = 12, n_rounds: int = 3) -> None:
    """Print the measured and the modelled time of a step on two workers of one thread, and the ratios' medians."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from whet.rollout.ray_pool import RayPool

    torch.manual_seed(0)
    os.environ.setdefault("RAY_worker_niceness", "0")  # as the trainer: other programs slow both down alike
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
    sizes |= {"num_attention_heads": 4, "vocab_size": 8192, "max_position_embeddings": 1024}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    with closing(RayPool(model, workers=2, threads=1)) as pool:
        pool.sync(model)
        pool.load()
        fleet = _calibrate(pool, model)
        fleet = replace(fleet, train_s=150 * sum(fleet.token_s))  # of the order of sampling a batch
        ratios: dict[str, list[float]] = {}
        for _ in range(n_rounds):
            # Other programs slow down the workers: the run without a lag shows by how much.
            step_s, lengths = _run_real(pool, model, 0, 0, n_steps, fleet.train_s)
            modelled_s = Simulation(fleet, lengths, 0, prompt=1).run().step_s
            slower = (step_s - fleet.train_s) / (modelled_s - fleet.train_s)
            print(f"K = 0: a step takes {step_s:.2f} s, {fleet.train_s:.2f} s of it training", flush=True)
            fixed, each = fleet.token_s
            now = replace(
                fleet,
                token_s=(slower * fixed, slower * each),
                prefill_s=slower * fleet.prefill_s,
                call_s=slower * fleet.call_s,
                load_s=slower * fleet.load_s,
            )
            for lag, tokens in ((1, 0), (2, 0), (3, 60)):
                own_s, lengths = _run_real(pool, model, lag, tokens, n_steps, fleet.train_s)
                modelled_s = Simulation(now, lengths, lag, tokens, prompt=1).run().step_s
                name = f"K = {lag}" + (f", M = {tokens}" if tokens else "")
                ratios.setdefault(name, []).append(own_s / modelled_s)
                print(f"{name}: a step takes {own_s:.2f} s, modelled {modelled_s:.2f} s", flush=True)
        for name, found in ratios.items():
            print(f"{name}: measured / modelled, median of {n_rounds}: {np.median(found):.2f}")


def _calibrate(pool: Any, model: Any) -> Fleet:
    """Measure the seconds of a token on a worker for 1 and 16 sequences, of a prompt's token, and of loading."""
    from whet.config.sampling import SamplingParams

    params = SamplingParams(max_new_tokens=64)

    def median(call: Callable[[], object]) -> float:
        times = []
        for _ in range(3):
            start_s = time.perf_counter()
            call()
            times.append(time.perf_counter() - start_s)
        return float(np.median(times))

    one, many = (median(lambda n=n: pool.generate([[5], [6]], n, params)) / 64 for n in (1, 16))
    each = max(0.0, (many - one) / 15)
    weights = [pool.snapshot(model) for _ in range(3)]
    left = iter(weights)
    loading = median(lambda: pool.generate([[5], [6]], 1, params, weights=next(left))) - 64 * one
    prompt = [[5] * 256, [6] * 256]
    prefill = median(lambda: pool.generate(prompt, 1, SamplingParams(max_new_tokens=1))) / 256
    calls = median(lambda: pool.generate([[5]] * 64, 1, SamplingParams(max_new_tokens=1))) / 32
    return Fleet(2, (one - each, each), prefill, calls, max(0.0, loading), 0.0)


def _run_real(pool: Any, model: Any, lag: int, tokens: int, n_steps: int, train_s: float) -> tuple[float, np.ndarray]:
    """Return the mean seconds of a step, without the first quarter of the run, and the lengths of its completions."""
    from whet.config.sampling import SamplingParams
    from whet.rollout.ahead import AheadSampler
    from whet.rollout.plan import Request
    from whet.training.distributed import Ranks

    # A stop token for each 80 of the vocabulary: geometric lengths, of a mean of about 80.
    stops = list(range(0, 8192, 80))
    requests = [
        Request([[100 + i] for i in range(8)], 4, SamplingParams(max_new_tokens=400, stop_token_ids=stops, seed=step))
        for step in range(n_steps)
    ]
    ahead, ends, lengths = AheadSampler(tokens, 1024, 0, 1), [], []
    for step, request in enumerate(requests):
        ahead.extend(pool, model, step, requests[step : step + lag + 1])
        groups = ahead.collect(step, request, Ranks())
        lengths.append([[len(completion.token_ids) for completion in group] for group in groups])
        time.sleep(train_s)
        ends.append(time.perf_counter())
    first = n_steps // 4
    return (ends[-1] - ends[first]) / (n_steps - 1 - first), np.array(lengths)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with two real workers")
    parser.add_argument("--plot", default="", help="file of the plot")
    parser.add_argument("--steps", type=int, default=40, help="steps of a simulated run")
    options = parser.parse_args(argv)
    print(f"| plan | failures | {' | '.join(f'{n:,} workers' for n in WORKERS)} | mean lag |")
    found = model_table(options.steps)
    if options.plot:
        plot(found, options.plot)
    if options.check:
        check()


if __name__ == "__main__":
    main(sys.argv[1:])
