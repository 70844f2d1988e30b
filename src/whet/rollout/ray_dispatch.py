"""Distribution of calls among the workers of a Ray pool, for several versions of the weights at once.

Jobs wait in the order of their versions. A worker has one version at a time: it gets calls of a newer one when its
calls of the older have ended, while other workers may still sample from the older one, and no worker waits for another.
One thread owns the state, and everything else sends it events.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from whet.config.sampling import Completion
from whet.errors import WhetError
from whet.models.sizes import MAX_BATCH

_ATTEMPTS = 3
"""Maximum attempts of a call that is lost or exceeds its time limit."""


class SampleRange(NamedTuple):
    """Samples [first, first + count) of a prompt."""

    prompt: int
    first: int
    count: int


def split_groups(n_prompts: int, n: int, n_workers: int) -> list[SampleRange]:
    """Split groups into ranges of samples, at least one per worker if there are fewer groups than workers."""
    slices = min(n, max(1, -(-n_workers // max(1, n_prompts))))
    bounds = [n * i // slices for i in range(slices + 1)]
    return [SampleRange(prompt, a, b - a) for prompt in range(n_prompts) for a, b in itertools.pairwise(bounds)]


class Job:
    """Calls that sample from one version.

    Args:
        version: of the weights.
        parts: the samples of each call.
        call: begins a call on a worker, and returns its Ray reference.
    """

    def __init__(self, version: int, parts: Sequence[SampleRange], call: Callable[[Any, SampleRange], Any]) -> None:
        self.version, self.call = version, call
        self.waiting = deque(parts)
        self.attempts = dict.fromkeys(parts, 0)
        self.most_on_one = max((part.count for part in parts), default=1)
        self.n_parts = len(parts)
        self.is_over = False
        self.results: SimpleQueue[tuple[SampleRange, list[Completion]] | BaseException] = SimpleQueue()

    def end(self) -> None:
        """Begin no further calls; results of those in progress are dropped."""
        self.is_over = True
        self.waiting.clear()

    def fail(self, error: BaseException) -> None:
        """End the job with an error."""
        self.end()
        self.results.put(error)


class Placement:
    """Calls of jobs on workers, without the workers: which call begins where.

    Args:
        n_workers: number of workers.
    """

    def __init__(self, n_workers: int) -> None:
        self._jobs: list[Job] = []
        self._load, self._version = [0] * n_workers, [0] * n_workers

    def add(self, job: Job) -> None:
        """Add the waiting parts of a job."""
        if job not in self._jobs:
            self._jobs.append(job)

    def assign(self) -> Iterator[tuple[Job, SampleRange, int]]:
        """Yield waiting parts and the workers that take them, the oldest version first."""
        self._jobs = sorted((job for job in self._jobs if job.waiting), key=lambda job: job.version)
        for job in self._jobs:
            # A free worker takes its share only, as the others will soon be free too.
            share = -(-job.n_parts // len(self._load))
            slots = max(1, min(share, MAX_BATCH // job.most_on_one))
            while job.waiting and (worker := self._find_worker(job.version, slots)) is not None:
                self._load[worker] += 1
                self._version[worker] = job.version
                yield job, job.waiting.popleft(), worker

    def _find_worker(self, version: int, slots: int) -> int | None:
        """Return the least loaded worker that may sample from a version."""
        free = [
            (load, i)
            for i, (load, own) in enumerate(zip(self._load, self._version, strict=True))
            if load == 0 or (own == version and load < slots)
        ]
        return min(free)[1] if free else None

    def end(self, worker: int) -> None:
        """Count the end of a call on a worker."""
        self._load[worker] -= 1

    def clear(self, worker: int) -> None:
        """Count the end of all calls on a worker."""
        self._load[worker] = 0


class _Call(NamedTuple):
    """A call in progress on a worker.

    Attributes:
        end: deadline on the monotonic clock.
    """

    job: Job
    part: SampleRange
    worker: int
    end: float


class Dispatcher:
    """Runs jobs on workers.

    Args:
        ray: the module.
        actors: handles of the workers; a replaced worker's is replaced in this list.
        start: starts a worker and returns its handle; a method of the pool, whose life it does not prolong.
        timeout_s: a worker that exceeds this time for a call is replaced.
    """

    def __init__(self, ray: Any, actors: list[Any], start: Callable[[], Any], timeout_s: float) -> None:
        self._ray, self._actors, self._timeout_s = ray, actors, timeout_s
        self._start = weakref.WeakMethod(start)
        self._placement = Placement(len(actors))
        self._jobs: set[Job] = set()
        self._running: dict[Any, _Call] = {}  # in order of deadline
        self._events: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="whet-ray-dispatch", daemon=True).start()

    def run(self, job: Job) -> Generator[tuple[SampleRange, list[Completion]]]:
        """Yield the parts of a job with their completions, as soon as each is complete.

        Raises:
            WhetError: an error of the engine, or a call that exceeded its time limit on several workers.
        """
        self._events.put(lambda: self._add(job))
        if self._error is not None:  # set before the last events are read
            raise self._error
        try:
            for _ in range(job.n_parts):
                result = job.results.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            self._events.put(job.end)

    def close(self) -> None:
        """End the thread; jobs in progress fail."""
        self._events.put(None)

    def _run(self) -> None:
        try:
            while True:
                event = None
                with contextlib.suppress(Empty):
                    if (event := self._events.get(timeout=self._time_left())) is None:
                        raise WhetError("RayPool.generate: the pool is closed. Construct a new one.")
                    event()
                self._replace_late_workers()
                for job, part, worker in self._placement.assign():
                    self._begin(job, part, worker)
        except BaseException as error:  # also of Ray, which may have been shut down
            self._error = error
            with contextlib.suppress(Empty):
                while True:
                    if (event := self._events.get_nowait()) is not None:
                        event()
            for job in self._jobs:
                job.fail(error)

    def _add(self, job: Job) -> None:
        self._jobs = {each for each in self._jobs if not each.is_over} | {job}
        self._placement.add(job)

    def _time_left(self) -> float | None:
        first = next(iter(self._running.values()), None)
        return None if first is None else max(0.0, first.end - time.monotonic())

    def _begin(self, job: Job, part: SampleRange, worker: int) -> None:
        call = job.call(self._actors[worker], part)
        self._running[call] = _Call(job, part, worker, time.monotonic() + self._timeout_s)

        def end(result: Future[list[Completion]]) -> None:  # on a thread of Ray
            self._events.put(lambda: self._end(call, result))

        call.future().add_done_callback(end)  # not ray.wait, which scans all running calls whenever one completes

    def _end(self, call: Any, result: Future[list[Completion]]) -> None:
        if call not in self._running:  # from a replaced worker
            return
        job, part, worker, _ = self._running.pop(call)
        self._placement.end(worker)
        errors = self._ray.exceptions
        try:
            job.results.put((part, result.result()))
        except errors.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            cause.__suppress_context__ = True
            job.fail(cause)
        except errors.RayActorError:
            self._retry(job, part)
        except Exception as error:
            job.fail(error)

    def _replace_late_workers(self) -> None:
        now = time.monotonic()
        late = {call.worker for call in itertools.takewhile(lambda call: call.end <= now, self._running.values())}
        for worker in late:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(self._actors[worker], no_restart=True)
            if (start := self._start()) is None:  # the pool is gone
                raise WhetError("RayPool.generate: the pool is closed. Construct a new one.")
            self._actors[worker] = start()
            for call in [call for call, (*_, other, _) in self._running.items() if other == worker]:
                job, part, *_ = self._running.pop(call)
                self._retry(job, part)
            self._placement.clear(worker)

    def _retry(self, job: Job, part: SampleRange) -> None:
        job.attempts[part] += 1
        if job.is_over:
            return
        if job.attempts[part] == _ATTEMPTS:
            job.fail(
                WhetError(
                    f"RayPool.generate: prompt {part.prompt} failed on {_ATTEMPTS} workers, which died or exceeded "
                    f"{self._timeout_s:g} s. Check the nodes' memory, or raise call_timeout_s."
                )
            )
            return
        job.waiting.appendleft(part)
        self._placement.add(job)
