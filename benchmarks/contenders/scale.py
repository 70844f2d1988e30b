# pyright: reportMissingImports=false
"""Contenders of the suite "scale": pools of sampling workers and several ranks, each in a separate run.

All processes of a run start and end with it, so that none is idle while another contender runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, cycle
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from benchmarks.contenders.training import workload
from benchmarks.contenders.training.contender import Contender, Session, whole_run
from benchmarks.contenders.training.lora import lora_config
from benchmarks.contenders.training.workload import GRPOShape
from whet import set_num_threads
from whet.bench.case import NotMeasured, WholeRun
from whet.config.sampling import Completion, SamplingParams, StreamKey
from whet.engine import Engine
from whet.models.sizes import MAX_BATCH
from whet.nn.frozen import frozen_model
from whet.rollout.ray_pool import RayPool
from whet.rollout.ray_worker import Policy, versions
from whet.system.machine import processors

WORKERS = 2
SIMULATED_WORKERS = 200
_WORKERS_OF_A_PROCESS = 50
_FORMAT = "bf16"

Groups = Sequence[Sequence[Completion]]


class Taken(NamedTuple):
    """A step of a contender: whether its answer is correct, and its counted seconds."""

    is_right: bool
    seconds: float


@dataclass(frozen=True)
class Sampling:
    """A batch that every step samples.

    Attributes:
        shape: the model, and numbers and lengths of prompts and completions.
        n_steps: number of steps; the first step does not count.
        base: base of LoRA, of which only adapters change between steps: the format of a packed base, or "none" for the
            float32 model. Empty: all weights change.
    """

    shape: GRPOShape
    n_steps: int
    base: str = ""

    def prompts(self) -> list[list[int]]:
        """Draw prompts of random tokens."""
        shape = self.shape
        return shape.model.prompts(np.random.default_rng(shape.seed), shape.n_prompts, shape.prompt_length)

    @property
    def params(self) -> SamplingParams:
        shape = self.shape
        return SamplingParams(max_new_tokens=shape.completion_length, stop_token_ids=shape.stop_ids, seed=shape.seed)

    def expected(self) -> list[Any]:
        """Sample by an engine in this process."""
        with Engine.from_model(self.policy(), weights=_FORMAT) as engine:
            return tokens_and_logprobs(engine.generate(self.prompts(), self.shape.group_size, self.params))

    def policy(self) -> Any:
        """Create the model in float32."""
        return workload.policy_of(self.shape.model)


def tokens_and_logprobs(groups: Groups) -> list[Any]:
    """Return tokens and log-probs of all completions."""
    return [[(completion.token_ids, completion.logprobs) for completion in group] for group in groups]


def run_alone(serve: Callable[..., None], *settings: Any) -> Callable[[Sampling], Callable[[], WholeRun]]:
    """Make a ``Provider.prepare`` that runs all steps in a separate process.

    Raises:
        ImportError: Ray is not installed.
        NotMeasured: fewer processors than workers.
    """

    def prepare(work: Sampling) -> Callable[[], WholeRun]:
        import ray  # noqa: F401

        if len(processors()) < WORKERS:
            raise NotMeasured(f"{WORKERS} workers need {WORKERS} processors, and there are {len(processors())}")
        start = partial(Contender, serve, work, *settings)
        # A peak would count only one of several processes.
        return lambda: replace(whole_run(start, work.n_steps), peak_bytes=None)

    return prepare


def wrong_steps(steps: Sequence[Taken], work: Sampling) -> float:
    """Count the wrong and missing steps."""
    return float(sum(not step.is_right for step in steps) + abs(len(steps) - work.n_steps))


@contextmanager
def _pool(model: Any, **options: Any) -> Iterator[Any]:
    """Open a pool of single-threaded workers with the model's weights."""
    with closing(RayPool(model, workers=WORKERS, threads=1, **options)) as pool:
        pool.sync(model)
        pool.load()
        yield pool


def serve_sampling(session: Session, work: Sampling, workers: bool) -> None:
    """Sample batches by a pool or by the engine in this process."""
    policy, expected = work.policy(), work.expected()
    with _pool(policy, weights=_FORMAT) if workers else Engine.from_model(policy, weights=_FORMAT) as engine:
        while True:
            session.begin()
            groups = engine.generate(work.prompts(), work.shape.group_size, work.params)
            seconds = session.elapsed_s
            session.end(Taken(tokens_and_logprobs(groups) == expected, seconds), {})


def serve_weights(session: Session, work: Sampling) -> None:
    """Send changed weights, all of them or LoRA adapters, to all workers.

    A step is correct if every worker's completions are of the new weights.
    """
    policy, options = work.policy(), {"weights": _FORMAT}
    with TemporaryDirectory() as folder:
        if work.base:
            import peft

            if work.base != "none":
                policy.save_pretrained(folder)
                policy, options = frozen_model(folder, work.base), {}
            policy = peft.get_peft_model(policy, lora_config(work.shape.model))
        _serve_weights(session, work, policy, options)


def _serve_weights(session: Session, work: Sampling, policy: Any, options: dict[str, Any]) -> None:
    import torch

    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    sample = (work.prompts()[:1] * WORKERS, 1, SamplingParams(max_new_tokens=4))
    with _pool(policy, **options) as pool, Engine.from_model(policy, **options) as engine:
        while True:
            with torch.no_grad():
                for parameter in trained:
                    parameter.add_(torch.randn_like(parameter), alpha=1e-2)
            session.begin()
            pool.sync(policy)
            sent_s = session.elapsed_s
            pool.load()
            seconds = session.elapsed_s
            engine.sync(policy)
            is_right = tokens_and_logprobs(pool.generate(*sample)) == tokens_and_logprobs(engine.generate(*sample))
            session.end(Taken(is_right, seconds), {"check and put": sent_s, "load": seconds - sent_s})


_KILLS = 5
"""Attempts to kill a worker during a batch."""


def serve_killed(session: Session, work: Sampling) -> None:
    """Sample the batch undisturbed, a group on every worker, and the batch with a worker killed at half time.

    The counted seconds are the difference between the last and the first.
    """
    policy, expected, shape = work.policy(), work.expected(), work.shape
    prompts = work.prompts()
    with _pool(policy, weights=_FORMAT) as pool:

        def timed(prompts: Sequence[Sequence[int]]) -> tuple[list[Any], float]:
            started_s = time.perf_counter()
            groups = pool.generate(prompts, shape.group_size, work.params)
            return tokens_and_logprobs(groups), time.perf_counter() - started_s

        def timed_with_a_kill(after_s: float) -> tuple[list[Any], float, bool]:
            """Also return whether the worker died before the end of the batch, and was replaced."""
            victim = _process_id(pool.actors[0])
            killer = threading.Timer(after_s, os.kill, [victim, signal.SIGKILL])
            killer.start()
            found, killed_s = timed(prompts)
            was_killed = not killer.is_alive()
            killer.join()
            is_replaced = _process_id(pool.actors[0]) != victim
            pool.load()  # load the replacement's weights for the next batch
            return found, killed_s, was_killed and is_replaced

        while True:
            timed(prompts)  # warm-up: a worker's first batch is slower, and would misplace the kill
            session.begin()
            was_killed, n_attempts = False, 0
            found, whole_s, group_s, killed_s = [], 0.0, 0.0, 0.0
            while not was_killed and n_attempts < _KILLS:  # other load of the machine can end the batch before the kill
                n_attempts += 1
                whole_s, group_s = timed(prompts)[1], timed(prompts[:WORKERS])[1]
                found, killed_s, was_killed = timed_with_a_kill(whole_s / 2)
            parts = {"lost": killed_s - whole_s, "the batch undisturbed": whole_s, "one group": group_s}
            session.end(Taken(found == expected and was_killed, killed_s - whole_s), parts)


def _process_id(actor: Any) -> int:
    import ray

    return ray.get(actor.__ray_call__.remote(_own_process_id))


def _own_process_id(worker: Any) -> int:
    return os.getpid()


# --- the control plane ------------------------------------------------------------------------------------------


def serve_control(session: Session, work: Sampling) -> None:
    """Call ``SIMULATED_WORKERS`` workers that sleep as long as a real worker took and return its results.

    Each worker gets twice as many groups as it processes at once.
    """
    import ray

    seconds, groups = _measured_calls(work)
    n_groups = n_control_groups(work.shape)
    real = work.prompts()
    prompts = [real[i % len(real)] for i in range(n_groups)]
    expected = tokens_and_logprobs(groups)
    policy = work.policy()
    # By default Ray starts a process per processor in advance.
    ray.init(
        address="local",
        num_cpus=SIMULATED_WORKERS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _system_config={"prestart_worker_first_driver": False},
    )
    try:
        with closing(_SimulatedPool(policy, seconds, groups)) as pool:
            pool.sync(policy)
            while True:
                session.begin()
                started_s = time.process_time()
                found = pool.generate(prompts, work.shape.group_size, work.params)
                cpu_s, wall_s = time.process_time() - started_s, session.elapsed_s
                is_right = all(each == expected[i % len(real)] for i, each in enumerate(tokens_and_logprobs(found)))
                session.end(Taken(is_right, wall_s), {"driver's CPU": cpu_s, "waiting": wall_s - cpu_s})
    finally:
        ray.shutdown()


def n_control_groups(shape: GRPOShape) -> int:
    """Return the number of groups of a control plane step."""
    return 2 * SIMULATED_WORKERS * (MAX_BATCH // shape.group_size)


def _measured_calls(work: Sampling) -> tuple[list[float], list[list[Completion]]]:
    """Measure calls for one group each, as concurrent as in a single-threaded worker; return seconds and results."""
    size = work.shape.group_size
    set_num_threads(1)
    with Engine.from_model(work.policy(), weights=_FORMAT) as engine, ThreadPoolExecutor(MAX_BATCH // size) as calls:

        def call(i: int, prompt: list[int]) -> tuple[float, list[Completion]]:
            started_s = time.perf_counter()
            [group] = engine.generate([prompt], size, work.params, keys=[StreamKey(i)])
            return time.perf_counter() - started_s, group

        found = list(calls.map(call, count(), work.prompts()))
    return [taken_s for taken_s, _ in found], [group for _, group in found]


class _SimulatedPool(RayPool):
    """The real pool with sleeping workers, many per process: 200 real workers would need 20 GB."""

    def __init__(self, model: Any, seconds: Sequence[float], groups: Groups) -> None:
        import ray

        actor = ray.remote(_Sleeper).options(num_cpus=0, max_concurrency=SIMULATED_WORKERS * MAX_BATCH)
        n_processes = SIMULATED_WORKERS // _WORKERS_OF_A_PROCESS
        self._processes = cycle([actor.remote(seconds, groups) for _ in range(n_processes)])
        super().__init__(model, workers=SIMULATED_WORKERS, threads=1, weights=_FORMAT, start_timeout_s=300)

    def _start(self) -> Any:
        return next(self._processes)


class _Sleeper:
    """Actor that replaces ``whet.rollout.ray_worker.Worker``."""

    def __init__(self, seconds: Sequence[float], groups: Groups) -> None:
        self._seconds, self._groups = seconds, groups

    async def versions(self) -> dict[str, str]:
        return versions()

    async def generate(
        self, policy: Policy, prompt_ids: Sequence[int], n: int, sampling: SamplingParams, key: StreamKey
    ) -> Sequence[Completion]:
        i = key.prompt_index % len(self._seconds)
        await asyncio.sleep(self._seconds[i])
        return self._groups[i]
