"""RolloutEngine over a Ray pool of sampling workers on one machine or many.

Completions are bit-identical to the engine in this process, for any number of workers and any schedule, and if workers
die: a call is a pure function of (weights, version, prompt, key, sampling), which Ray retries if its worker is lost.
Weights are sent once per version; if only adapters have changed, only adapters are sent.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from whet import _core
from whet.config.sampling import Completion, SamplingParams, StreamKey, stream_keys
from whet.engine import Engine
from whet.engine.checks import check_same_model
from whet.errors import MissingExtraError, WhetError, WhetValueError, check_integer
from whet.models.formats import choose_formats
from whet.models.loading import check_finite, checksums, list_slices
from whet.models.sizes import MAX_BATCH
from whet.models.slots import ModelSource
from whet.models.sources.arrays import adapter_arrays, weight_arrays
from whet.models.sources.live import open_module
from whet.rollout.ray_dispatch import Dispatcher, Job, SampleRange, split_groups
from whet.rollout.ray_worker import PackedFile, Policy, Weights, Worker, versions

_CONNECT_S = 5


class RayPool:
    """Pool of workers that sample from the weights of the last ``sync``.

    Args:
        model: a live Hugging Face module, optionally with PEFT LoRA. Its weights are floats, or a base packed from a
            folder or file at the same path on every node. None: workers load their model with ``load``.
        load: function that constructs a worker's engine in the worker, instead of a model and ``sync``.
        workers: number of sampling processes.
        address: address of a Ray cluster for ``ray.init`` ("auto": this machine's cluster); empty: the cluster that
            this process is connected to, or ``RAY_ADDRESS``, or else a new one, which ends with ``close``.
        threads: threads per worker; 0: the cluster's processors divided by the workers.
        start_timeout_s: time limit for the start of all workers.
        call_timeout_s: a worker that exceeds this time for a group is replaced.
        options: options of ``whet.Engine``.

    Attributes:
        policy_version: number of ``sync`` and ``snapshot`` calls.
        actors: Ray handles of the workers.

    Raises:
        MissingExtraError: Ray is not installed.
        WhetValueError: the model is not supported.
        WhetError: no cluster at the address, too few processors, or workers that do not start or have another version
            of Whet or Python.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        load: Callable[[], Engine] | None = None,
        workers: int,
        address: str = "",
        threads: int = 0,
        start_timeout_s: float = 60,
        call_timeout_s: float = 600,
        **options: Any,
    ) -> None:
        try:
            import ray  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingExtraError("RayPool", "Ray", "ray") from error
        workers = check_integer("RayPool", "workers", workers, 1)
        if (model is None) == (load is None):
            raise WhetValueError(
                "RayPool: expected either model (whose weights sync sends) or load (constructs engines)."
            )
        max_position = options.pop("max_position", None)
        self._describe = lambda model: open_module(model, max_position=max_position)
        source = None if model is None else self._describe(model)
        self._config: Any = source and source.config
        self._narrow = _bfloat16_slots(source, options) if source else set()
        self._ray: Any = ray
        self._options, self.policy_version = options, 0
        self._policy: Policy | None = None
        self._sent: Policy | None = None
        self._stored: Any = None
        if not ray.is_initialized() and _starts_own(address):
            _check_cpus(
                workers, threads or 1, _core.n_processors(), "this machine"
            )  # before the start of Ray, which takes seconds
        self._is_own = _connect(ray, address)
        cpus = ray.cluster_resources().get("CPU", 0)
        self._threads = threads or max(1, int(cpus) // workers)
        self.actors: list[Any] = []
        try:
            _check_cpus(workers, self._threads, cpus, "the cluster")
            self.actors = [self._start() for _ in range(workers)]
            self._dispatcher = Dispatcher(ray, self.actors, self._start, call_timeout_s)
            weakref.finalize(self, self._dispatcher.close)
            self._check_workers(start_timeout_s)
            self._load = load
            if load is not None:
                self._policy = Policy(0, [ray.put(load)], 0, [])
        except BaseException:
            self.close()
            raise

    def _start(self) -> Any:
        actor = self._ray.remote(Worker).options(
            num_cpus=self._threads,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=MAX_BATCH,
            runtime_env={"env_vars": self._environment()},
        )
        return actor.remote()

    def _environment(self) -> dict[str, str]:
        """Return the environment variables of a new worker."""
        return {"WHET_NUM_THREADS": str(self._threads)}

    def _check_workers(self, timeout_s: float) -> None:
        try:
            found = self._ray.get([worker.versions.remote() for worker in self.actors], timeout=timeout_s)
        except self._ray.exceptions.GetTimeoutError:
            free = self._ray.available_resources().get("CPU", 0)
            raise WhetError(
                f"RayPool: after {timeout_s:g} s not all of {len(self.actors)} workers have started. They need "
                f"{self._threads} CPUs each, and {free:g} are free. Use fewer workers, or free CPUs."
            ) from None
        own = versions()
        for other in found:
            for name, version in own.items():
                if other[name] != version:
                    raise WhetError(
                        f"RayPool: a worker has {name} {other[name]}, and this process {version}. Install the same "
                        f"version on every node."
                    )

    # ------------------------------------------------------------------ the protocol

    def sync(self, model: Any) -> None:
        """Load weights for later calls, atomically; calls in progress keep their weights.

        Weights that fail a check change nothing. New weights replace the old in Ray's object store: if storing them
        fails, there are no weights until the next ``sync``.

        Raises:
            WhetValueError: as ``Engine.sync``.
        """
        self._policy = self._send(model, "RayPool.sync", replaces=True)

    samples_snapshots = True
    """Whether ``generate`` takes weights, so that several versions are sampled at once."""

    def snapshot(self, model: Any) -> Policy:
        """Store weights for ``generate(weights=...)``, until the result is no longer referenced.

        Raises:
            WhetValueError: as ``Engine.sync``.
        """
        return self._send(model, "RayPool.snapshot", replaces=False)

    def _send(self, model: Any, where: str, replaces: bool) -> Policy:
        """Store weights in Ray's object store; of a base that was sent before, only the adapters."""
        if self._load is not None:
            raise WhetValueError(f"{where}: the workers load their own model. Construct a pool with model instead.")
        source = self._describe(model)
        check_same_model(self._config, source.config, where)
        slices = list_slices(source, where)
        version = self.policy_version + 1
        stored = checksums(slices) if source.adapters or source.base is not None else None
        policy = self._sent if stored is not None and stored == self._stored else None
        if policy is None:
            for _ in check_finite(slices, where):
                pass
        on_base = source.base is not None
        adapters = [self._ray.put(adapter_arrays(model, source, norms=on_base))] if source.adapters else []
        if policy is None:
            # Ray reuses the memory of a freed object of the same size, in a tenth of the time: free the old weights
            # first.
            self._sent = None
            if replaces:
                self._policy = None
            policy = Policy(version, [self._ray.put(self._weights(model, source))], version, [])
        self._sent = policy._replace(version=version, adapters=adapters)
        self._stored, self.policy_version = stored, version
        return self._sent

    def _weights(self, model: Any, source: ModelSource) -> Weights:
        base = source.base
        packed = None if base is None else PackedFile(base.path, base.record())
        arrays = {} if base is not None else weight_arrays(model, source, self._narrow)
        return Weights(source.config, source.targets, self._options, arrays, packed)

    def load(self) -> None:
        """Make all workers load the weights of the last ``sync`` now, instead of at their next call."""
        policy = self._require_policy("RayPool.load")
        self._ray.get([actor.load.remote(policy) for actor in self.actors])

    def _require_policy(self, where: str) -> Policy:
        if self._policy is None:
            raise WhetValueError(f"{where}: there are no weights. Call sync(model) first.")
        return self._policy

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        n: int,
        sampling: SamplingParams,
        *,
        keys: Sequence[StreamKey] | None = None,
        weights: Policy | None = None,
    ) -> list[list[Completion]]:
        """Sample completions, see ``Engine.generate``.

        Args:
            weights: from ``snapshot``. Default: of the last ``sync``. Calls in several threads may sample from several
                versions: a worker begins with a newer one when its calls of the older have ended.

        Raises:
            WhetError: an error of the engine, or a call that exceeded its time limit on several workers.
        """
        return list(self.generate_each(prompt_ids, n, sampling, keys=keys, weights=weights))

    def generate_each(
        self,
        prompt_ids: Sequence[Sequence[int]],
        n: int,
        sampling: SamplingParams,
        *,
        keys: Sequence[StreamKey] | None = None,
        weights: Policy | None = None,
    ) -> Iterator[list[Completion]]:
        """Yield the results of ``generate`` in order, each as soon as it and its predecessors are complete."""
        where = "RayPool.generate"
        n = check_integer(where, "n", n, 1)
        if not self.actors:
            raise WhetValueError(f"{where}: the pool is closed. Construct a new one.")
        chosen = stream_keys(keys, len(prompt_ids), where)
        policy = self._require_policy(where) if weights is None else weights
        parts = split_groups(len(prompt_ids), n, len(self.actors))

        def call(actor: Any, part: SampleRange) -> Any:
            prompt, first = chosen[part.prompt]
            key = StreamKey(prompt, first + part.first)
            return actor.generate.remote(policy, list(map(int, prompt_ids[part.prompt])), part.count, sampling, key)

        run = self._dispatcher.run(Job(policy.version, parts, call))
        with contextlib.closing(run):
            found: dict[SampleRange, list[Completion]] = {}
            for _, of_prompt in itertools.groupby(parts, key=lambda part: part.prompt):
                own = list(of_prompt)
                while not found.keys() >= set(own):
                    part, completions = next(run)
                    found[part] = completions
                yield [completion for part in own for completion in found.pop(part)]

    def close(self) -> None:
        """End the workers, and Ray if the pool started it."""
        if self.actors:
            self._dispatcher.close()
        for worker in self.actors:
            with contextlib.suppress(Exception):
                self._ray.kill(worker, no_restart=True)
        self.actors = []
        if self._is_own and self._ray.is_initialized():
            self._ray.shutdown()
            self._is_own = False


def _bfloat16_slots(source: ModelSource, options: Mapping[str, Any]) -> set[str]:
    """Return the slots whose weights may be sent as bfloat16.

    Raises:
        WhetValueError: workers cannot pack the base.
    """
    if source.base is not None:
        if not source.base.path:
            raise WhetValueError(
                "RayPool: the model's packed base is not from a folder or file, so that workers cannot pack it. Give "
                "frozen_model a path, or load the model in floats, with base='none'."
            )
        return set()
    names = {name: options.get(name) for name in ("embedding", "head")}
    formats = choose_formats(source, options.get("weights", "bf16"), where="RayPool", **names)
    return {slot for slot, parts in formats.items() if all(part.format == "bfloat16" for part in parts)}


def _check_cpus(workers: int, threads: int, cpus: float, where: str) -> None:
    if workers * threads > cpus:
        raise WhetError(
            f"RayPool: {workers} workers of {threads} threads need {workers * threads} CPUs, and {where} has {cpus:g}. "
            f"Use fewer workers, or start more nodes."
        )


def _starts_own(address: str) -> bool:
    """Whether a pool with this address starts a private Ray cluster."""
    return (address or os.environ.get("RAY_ADDRESS", "")) in ("", "local")  # set by `ray job submit`


def _connect(ray: Any, address: str) -> bool:
    """Connect to Ray; return whether a private cluster was started."""
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"log_to_driver": False, "logging_level": "error"}
    if _starts_own(address):
        # Without "local" Ray joins any cluster that another process has started on this machine.
        ray.init(address="local", num_cpus=_core.n_processors(), include_dashboard=False, **quiet)
        return True
    address = address or os.environ["RAY_ADDRESS"]
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdigit():  # Ray's timeout is minutes
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        ray.init(address=address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        if "AuthenticationError" in f"{error}{error.__cause__}":
            raise WhetError(
                f"RayPool: the Ray cluster at {address!r} requires a token. Set RAY_AUTH_MODE=token, with the head's "
                f"~/.ray/auth_token on this machine (docs/scale.md)."
            ) from None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WhetError(
            f"RayPool: there is no Ray cluster at {address!r} ({reason}). Start one with `ray start --head`, or omit "
            f"the address for a cluster on this machine."
        ) from None
    return True
