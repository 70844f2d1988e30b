# pyright: reportMissingImports=false
"""The work of the suite "scale": what a pool of sampling workers and several ranks cost, each a run of its own.

All of a run's processes start and end with it, so that none is idle beside another contender's.
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
from whet.bench.machine import cpus
from whet.config.sampling import Completion, SamplingParams, StreamKey
from whet.engine import Engine
from whet.models.sizes import MAX_BATCH
from whet.nn.frozen import frozen_model
from whet.rollout.ray_pool import RayPool
from whet.rollout.ray_worker import Policy, versions

WORKERS = 2
SIMULATED_WORKERS = 200
_WORKERS_OF_A_PROCESS = 50
_FORMAT = "bf16"

Groups = Sequence[Sequence[Completion]]


class Taken(NamedTuple):
    """A step of a contender: whether its answer was right, and the seconds that count."""

    is_right: bool
    seconds: float


@dataclass(frozen=True)
class Sampling:
    """A batch that every step samples again.

    Attributes:
        shape: the model, and how many prompts and completions of how many tokens.
        n_steps: the first of which does not count.
        base: of LoRA, whose adapters alone change from step to step: a format in which it is packed from a folder, or
            "none", the float32 model. Empty: all weights change.
    """

    shape: GRPOShape
    n_steps: int
    base: str = ""

    def prompts(self) -> list[list[int]]:
        """Random tokens."""
        shape = self.shape
        return shape.model.prompts(np.random.default_rng(shape.seed), shape.n_prompts, shape.prompt_length)

    @property
    def params(self) -> SamplingParams:
        shape = self.shape
        return SamplingParams(max_new_tokens=shape.completion_length, stop_token_ids=shape.stop_ids, seed=shape.seed)

    def expected(self) -> list[Any]:
        """The samples of an engine in this process."""
        with Engine.from_model(self.policy(), weights=_FORMAT) as engine:
            return said(engine.generate(self.prompts(), self.shape.group_size, self.params))

    def policy(self) -> Any:
        """The model, float32."""
        return workload.policy_of(self.shape.model)


def said(groups: Groups) -> list[Any]:
    """Tokens and log-probs."""
    return [[(completion.token_ids, completion.logprobs) for completion in group] for group in groups]


def run_alone(serve: Callable[..., None], *settings: Any) -> Callable[[Sampling], Callable[[], WholeRun]]:
    """``Provider.prepare`` of steps in a process of their own.

    Raises:
        ImportError: Ray is not installed.
        NotMeasured: fewer processors than workers.
    """

    def prepare(work: Sampling) -> Callable[[], WholeRun]:
        import ray  # noqa: F401

        if len(cpus()) < WORKERS:
            raise NotMeasured(f"{WORKERS} workers need {WORKERS} processors, and there are {len(cpus())}")
        start = partial(Contender, serve, work, *settings)
        return lambda: replace(whole_run(start, work.n_steps), peak_bytes=None)  # of one process among several

    return prepare


def wrong_steps(steps: Sequence[Taken], work: Sampling) -> float:
    """How many steps were wrong, or are missing."""
    return float(sum(not step.is_right for step in steps) + abs(len(steps) - work.n_steps))


@contextmanager
def _pool(model: Any, **options: Any) -> Iterator[Any]:
    """A pool of workers of one thread, with the model's weights."""
    with closing(RayPool(model, workers=WORKERS, threads=1, **options)) as pool:
        pool.sync(model)
        pool.load()
        yield pool


def serve_sampling(session: Session, work: Sampling, workers: bool) -> None:
    """Batches, by a pool or by the engine in this process."""
    policy, expected = work.policy(), work.expected()
    with _pool(policy, weights=_FORMAT) if workers else Engine.from_model(policy, weights=_FORMAT) as engine:
        while True:
            session.begin()
            groups = engine.generate(work.prompts(), work.shape.group_size, work.params)
            seconds = session.elapsed_s
            session.end(Taken(said(groups) == expected, seconds), {})


def serve_weights(session: Session, work: Sampling) -> None:
    """Weights that a step has changed, all of them or LoRA adapters, on their way to all workers.

    Right are completions of the new weights from every worker.
    """
    policy, options = work.policy(), {"weights": _FORMAT}
    with TemporaryDirectory() as folder:
        if work.base:
            import peft

            if work.base != "none":
                policy.save_pretrained(folder)
                policy, options = frozen_model(folder, work.base), {}
            policy = peft.get_peft_model(policy, lora_config())
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
            is_right = said(pool.generate(*sample)) == said(engine.generate(*sample))
            session.end(Taken(is_right, seconds), {"checked and put": sent_s, "taken": seconds - sent_s})


def serve_killed(session: Session, work: Sampling) -> None:
    """The batch undisturbed, a group on every worker, and the batch with a worker killed when half of it is done.

    The seconds are those that the third takes longer than the first.
    """
    policy, expected, shape = work.policy(), work.expected(), work.shape
    prompts = work.prompts()
    with _pool(policy, weights=_FORMAT) as pool:

        def timed(prompts: Sequence[Sequence[int]]) -> tuple[list[Any], float]:
            started_s = time.perf_counter()
            groups = pool.generate(prompts, shape.group_size, work.params)
            return said(groups), time.perf_counter() - started_s

        timed(prompts)  # the first batch is slower, and the worker is killed in the midst of the third
        while True:
            session.begin()
            _, whole_s = timed(prompts)
            _, group_s = timed(prompts[:WORKERS])
            victim = _process_id(pool.actors[0])
            killer = threading.Timer(whole_s / 2, os.kill, [victim, signal.SIGKILL])
            killer.start()
            found, killed_s = timed(prompts)
            killer.join()
            # The batch must have ended neither before the worker did, nor without another worker in its place.
            is_right = found == expected and killed_s > whole_s and _process_id(pool.actors[0]) != victim
            pool.load()  # the new one, for the next step
            parts = {"lost": killed_s - whole_s, "the batch undisturbed": whole_s, "one group": group_s}
            session.end(Taken(is_right, killed_s - whole_s), parts)


def _process_id(actor: Any) -> int:
    import ray

    return ray.get(actor.__ray_call__.remote(_own_process_id))


def _own_process_id(worker: Any) -> int:
    return os.getpid()


# --- the control plane ------------------------------------------------------------------------------------------


def serve_control(session: Session, work: Sampling) -> None:
    """Calls to ``SIMULATED_WORKERS`` workers that sleep as long as a real one took, and return what it returned.

    Each of them gets, twice, as many groups as a worker takes at once.
    """
    import ray

    seconds, groups = _measured_calls(work)
    n_groups = n_control_groups(work.shape)
    real = work.prompts()
    prompts = [real[i % len(real)] for i in range(n_groups)]
    expected = said(groups)
    policy = work.policy()
    # Ray would start a process a processor beforehand.
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
                is_right = all(each == expected[i % len(real)] for i, each in enumerate(said(found)))
                session.end(Taken(is_right, wall_s), {"driver's CPU": cpu_s, "waiting": wall_s - cpu_s})
    finally:
        ray.shutdown()


def n_control_groups(shape: GRPOShape) -> int:
    """Groups of a step of the control plane."""
    return 2 * SIMULATED_WORKERS * (MAX_BATCH // shape.group_size)


def _measured_calls(work: Sampling) -> tuple[list[float], list[list[Completion]]]:
    """The seconds and the results of calls for a group each, as many at once as a worker of one thread takes."""
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
    """The pool itself, with workers that sleep, many of them in a process: 200 real ones would need 20 GB."""

    def __init__(self, model: Any, seconds: Sequence[float], groups: Groups) -> None:
        import ray

        actor = ray.remote(_Sleeper).options(num_cpus=0, max_concurrency=SIMULATED_WORKERS * MAX_BATCH)
        n_processes = SIMULATED_WORKERS // _WORKERS_OF_A_PROCESS
        self._processes = cycle([actor.remote(seconds, groups) for _ in range(n_processes)])
        super().__init__(model, workers=SIMULATED_WORKERS, threads=1, weights=_FORMAT)

    def _start(self) -> Any:
        return next(self._processes)


class _Sleeper:
    """Made by Ray in place of ``whet.rollout.ray_worker.Worker``."""

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
