"""Sampling ahead of training: the completions of later steps are sampled on threads while a step trains.

``whet.rollout.plan`` assigns the versions of the weights, so that completions do not depend on the speed of sampler and
trainer, the number of workers, or deaths. An engine that has one version at a time samples version by version; a pool
samples several at once.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import threading
import time
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from whet.config.sampling import Completion, StreamKey
from whet.models.slots import ModelSource
from whet.models.sources.frozen import source_bytes
from whet.rollout.plan import Request, join_segments, share_of
from whet.rollout.sharded_engine import split_samples
from whet.rollout.stored_completions import load_completions, store_completions

if TYPE_CHECKING:
    from whet.training.distributed import Ranks

Found = dict[tuple[int, int], Completion]
"""Completions by the indices of their prompt and sample."""


@dataclass(eq=False)
class _Batch:
    """Completions of a step, complete or begun.

    Attributes:
        digest: of its request.
        first: version that begins.
        last: newest version that has its share of the plan; None: there is none.
        found: completions; of this rank, or of all.
        parts: planned work.
    """

    digest: str
    first: int
    last: int | None = None
    found: Found = field(default_factory=dict)
    parts: list[Future[None]] = field(default_factory=list)


class _Part(NamedTuple):
    """The share of a batch that a version samples: every completion up to ``limit`` tokens, or to its end."""

    batch: _Batch
    request: Request
    limit: int
    done: Future[None]


@dataclass(eq=False)
class _Item:
    """The work of one version: groups of parts, one group after the other.

    Attributes:
        version: number of completed steps.
        engine: the engine that samples.
        weights: for the engine; None: it has them, and its lock.
    """

    version: int
    engine: Any
    weights: Any
    groups: list[list[_Part]]


class AheadSampler:
    """Samples the completions of later steps on threads, next to training.

    Args:
        tokens: M; 0: one version samples the whole completion.
        max_position: number of positions of the model.
        rank: of this process.
        n_ranks: number of ranks; each samples its share of the completions.
    """

    def __init__(self, tokens: int, max_position: int, rank: int, n_ranks: int) -> None:
        self._tokens, self._max_position, self._rank, self._n_ranks = tokens, max_position, rank, n_ranks
        self._batches: dict[int, _Batch] = {}
        self._waiting: list[_Item] = []
        self._lock = threading.Lock()  # of an engine that has one version at a time
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._clock = _IdleClock()

    def extend(self, engine: Any, model: Any, step: int, requests: Sequence[Request]) -> None:
        """Begin what the weights of ``model``, after ``step`` steps, sample. Idempotent.

        Args:
            engine: has ``snapshot``, see ``RolloutEngine``.
            requests: of this step and those after it, at most K + 1.
        """
        batches = {}
        for later, request in enumerate(requests):
            batch, digest = self._batches.get(step + later), request.digest()
            if batch is None or batch.digest != digest:  # begun for other rows
                batch = _Batch(digest, first=step)
            batches[step + later] = batch
        self._batches = batches
        groups = [
            [part for at in group if (part := self._plan(at, requests[at - step], step))]
            for group in self._groups(step)
        ]
        if groups := [group for group in groups if group]:
            self._begin(engine, model, step, groups)

    def has(self, step: int, request: Request) -> bool:
        """Whether the completions of a step were begun."""
        batch = self._batches.get(step)
        return batch is not None and batch.digest == request.digest()

    def has_failed(self) -> bool:
        """Whether sampling has failed, after waiting for what is planned."""
        return any(part.exception() is not None for batch in self._batches.values() for part in batch.parts)

    def _groups(self, version: int) -> list[list[int]]:
        """Return the steps in the order of sampling: several at once only with tokens between versions."""
        if not self._tokens:
            return [[step] for step in self._batches]
        return [[version], [step for step in self._batches if step > version]]

    def _plan(self, step: int, request: Request, version: int) -> _Part | None:
        """Return the share of a version in a step's completions; None: it has none, or is sampled."""
        batch = self._batches[step]
        if batch.last is not None and version <= batch.last:
            return None
        limit = share_of(step, batch.first, version, self._tokens, request.sampling.max_new_tokens)
        if limit is None:
            return None
        batch.last = version
        part = _Part(batch, request, limit, Future())
        batch.parts.append(part.done)
        return part

    def _begin(self, engine: Any, model: Any, version: int, groups: list[list[_Part]]) -> None:
        is_concurrent = getattr(engine, "samples_snapshots", False)
        try:
            weights = self._take_weights(engine, model, is_concurrent)
        except BaseException:  # such as weights with NaN
            for part in itertools.chain(*groups):
                part.batch.parts.remove(part.done)
                part.batch.last = None if version == part.batch.first else version - 1
            raise
        if is_concurrent and not self._tokens:
            for group in groups:
                item = self._add(_Item(version, engine, weights, [group]))
                threading.Thread(target=self._run, args=(item,), name="whet-ahead", daemon=True).start()
            return
        item = self._add(_Item(version, engine, weights, groups))
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run_all, args=(weakref.WeakMethod(self._run), self._queue), name="whet-ahead", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)
            atexit.register(_close_at_exit, weakref.ref(self))
        self._queue.put(item)

    def _take_weights(self, engine: Any, model: Any, is_concurrent: bool) -> Any:
        """Return a copy of the weights; None: the engine was idle, and has them and its lock."""
        if is_concurrent or self._waiting or not self._lock.acquire(blocking=False):
            return engine.snapshot(model)
        try:
            engine.sync(model)
        except BaseException:
            self._lock.release()
            raise
        return None

    def _add(self, item: _Item) -> _Item:
        self._waiting.append(item)
        self._clock.begin()
        return item

    def _run(self, item: _Item) -> None:
        try:
            if getattr(item.engine, "samples_snapshots", False):
                self._run_groups(item, {"weights": item.weights})
            else:
                if item.weights is not None:
                    self._lock.acquire()
                try:
                    if item.weights is not None:
                        item.engine.sync(item.weights)
                        item.weights = None  # free the copy
                    self._run_groups(item, {})
                finally:
                    self._lock.release()
        except BaseException as error:
            for part in itertools.chain(*item.groups):
                if not part.done.done():
                    part.done.set_exception(error)
        finally:
            self._waiting.remove(item)
            self._clock.end()

    def _run_groups(self, item: _Item, options: dict[str, Any]) -> None:
        def run(part: _Part) -> None:
            try:
                self._sample(item, part, options)
                part.done.set_result(None)
            except BaseException as error:
                part.done.set_exception(error)

        for first, *others in item.groups:
            # Concurrent calls share the engine's batch.
            threads = [threading.Thread(target=run, args=(part,), daemon=True) for part in others]
            for thread in threads:
                thread.start()
            run(first)
            for thread in threads:
                thread.join()

    def _sample(self, item: _Item, part: _Part, options: dict[str, Any]) -> None:
        """Sample new completions in groups, which share their prompt, and continue begun ones one by one."""
        (prompts, n, sampling), found = part.request, part.batch.found
        own = split_samples(len(prompts), n, self._rank, self._n_ranks)
        begun: list[StreamKey] = []
        for count, keys in own.items():
            members = [StreamKey(i, first + j) for i, first in keys for j in range(count)]
            begun += [key for key in members if key in found]
            if members[0] in found:
                continue
            params = dataclasses.replace(sampling, max_new_tokens=part.limit)
            rows = [prompts[key.prompt_index] for key in keys]
            for key, group in zip(keys, item.engine.generate(rows, count, params, keys=keys, **options), strict=True):
                for j, completion in enumerate(group):
                    completion.policy_version = item.version
                    found[key.prompt_index, key.first_sample + j] = completion
        going = [key for key in begun if self._goes_on(found[key], len(prompts[key.prompt_index]), part.limit)]
        if not going:
            return
        done = len(found[going[0]].token_ids)
        seed = int(np.random.SeedSequence([sampling.seed, done // self._tokens]).generate_state(1)[0])
        params = dataclasses.replace(sampling, max_new_tokens=part.limit - done, seed=seed)
        rows = [[*prompts[key.prompt_index], *found[key].token_ids] for key in going]
        for key, [more] in zip(going, item.engine.generate(rows, 1, params, keys=going, **options), strict=True):
            more.policy_version = item.version
            found[key] = join_segments(found[key], more, len(prompts[key.prompt_index]))

    def _goes_on(self, completion: Completion, n_prompt: int, limit: int) -> bool:
        n = len(completion.token_ids)
        return completion.finish_reason == "length" and n < limit and n_prompt + n < self._max_position

    def collect(self, step: int, request: Request, ranks: Ranks) -> list[list[Completion]]:
        """Wait for the completions of a step, and return them: ``result[prompt][sample]``.

        Raises:
            WhetError: sampling failed.
        """
        [found] = self._gather([self._batches[step]], ranks)
        return [[found[i, j] for j in range(request.n)] for i in range(len(request.prompt_ids))]

    def _gather(self, batches: Sequence[_Batch], ranks: Ranks) -> list[Found]:
        """Wait for what is planned of batches, and return the completions of all ranks."""

        def wait() -> list[Found]:
            for batch in batches:
                for part in batch.parts:
                    part.result()
            return [batch.found for batch in batches]

        shares = ranks.gather_results(wait)
        return [{key: c for found in of_batch for key, c in found.items()} for of_batch in zip(*shares, strict=True)]

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context in which no thread uses an engine that has one version at a time."""
        with self._lock:
            yield

    def idle_s(self) -> float:
        """Return the seconds without work for the sampler since the last call."""
        return self._clock.take()

    # --- checkpoints ------------------------------------------------------------------------------------

    def state(self, step: int, ranks: Ranks) -> dict[str, np.ndarray]:
        """Wait for what is planned, and return the completions of steps from ``step`` on as arrays, for a checkpoint.

        The older weights that the plan needs have then sampled their share, and need not be saved. All ranks call this.
        """
        batches = {at: batch for at, batch in self._batches.items() if at >= step}
        arrays = {}
        for (at, batch), found in zip(batches.items(), self._gather(list(batches.values()), ranks), strict=True):
            header = {"digest": batch.digest, "first": batch.first, "last": batch.last}
            arrays |= {f"ahead.{at}.{name}": array for name, array in store_completions(found, header).items()}
        return arrays

    def load_state(self, arrays: Mapping[str, Any]) -> None:
        """Restore the result of ``state``."""
        by_step: dict[int, dict[str, np.ndarray]] = {}
        for name, array in arrays.items():
            if name.startswith("ahead."):
                _, step, part = name.split(".", 2)
                by_step.setdefault(int(step), {})[part] = np.asarray(array)
        for step, stored in sorted(by_step.items()):
            found, header = load_completions(stored)
            self._batches[step] = _Batch(header["digest"], header["first"], header["last"], found)

    def memory_blocks(self) -> Iterator[tuple[str, Hashable, int]]:
        """Yield the memory of weights that wait for the sampler, for ``whet.memory_report``."""
        for item in list(self._waiting):
            if isinstance(item.weights, ModelSource):
                yield "kept_versions", id(item.weights), source_bytes(item.weights)


class _IdleClock:
    """Seconds in which nothing is in progress."""

    def __init__(self) -> None:
        self._lock, self._n_running = threading.Lock(), 0
        self._since_s, self._idle_s = time.perf_counter(), 0.0

    def begin(self) -> None:
        with self._lock:
            self._charge()
            self._n_running += 1

    def end(self) -> None:
        with self._lock:
            self._charge()
            self._n_running -= 1

    def take(self) -> float:
        with self._lock:
            self._charge()
            idle_s, self._idle_s = self._idle_s, 0.0
            return idle_s

    def _charge(self) -> None:
        now_s = time.perf_counter()
        if not self._n_running:
            self._idle_s += now_s - self._since_s
        self._since_s = now_s


def _run_all(run: Any, queue: SimpleQueue[_Item | None]) -> None:
    """Run items in their order, until there is None or the sampler is gone."""
    while (item := queue.get()) is not None and (method := run()) is not None:
        method(item)
        del method, item


def _close_at_exit(reference: weakref.ref[AheadSampler]) -> None:
    """End sampling at the end of the process: an engine in use by a thread must not outlive the interpreter."""
    sampler = reference()
    if sampler is None or sampler._thread is None:
        return
    for item in list(sampler._waiting):
        with suppress(Exception):
            item.engine.close()
    sampler._queue.put(None)
    sampler._thread.join()
