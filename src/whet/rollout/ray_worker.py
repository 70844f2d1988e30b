"""A sampling worker: an engine in a process that Ray starts, without torch.

A call carries all that its result depends on, so that any worker gives the same completions, also one that was started
after another was killed: Ray's retries need nothing more.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import whet
from whet.config.sampling import Completion, SamplingParams, StreamKey
from whet.engine import Engine
from whet.engine.session import EngineBusyError
from whet.errors import WhetError, WhetValueError
from whet.models.base_record import pack_recorded
from whet.models.packed_base import PackedBase
from whet.models.sources.arrays import open_arrays
from whet.models.sources.pretrained import open_pretrained

_POLL_S = 0.05


class Policy(NamedTuple):
    """The weights that a call samples from.

    Attributes:
        version: of all, the trainer's.
        weights: [reference] of ``Weights``, or of what makes the engine; in a list, so that Ray passes it on without
            fetching what it refers to.
        weights_version: of these weights, that of the call of ``sync`` which sent them; adapters may be newer.
        adapters: [reference] of named adapters, or none.
    """

    version: int
    weights: list[Any]
    weights_version: int
    adapters: list[Any]


def versions() -> dict[str, str]:
    """By name, those that driver and workers must have alike."""
    return {"Whet": whet.__version__, "Python": ".".join(platform.python_version_tuple()[:2])}


class PackedFile(NamedTuple):
    """A packed base that a worker packs itself, from the same file.

    Attributes:
        path: of the model's folder or file, on every node.
        record: of the base (``PackedBase.record``), which what is packed has to have.
    """

    path: str
    record: dict[str, Any]


class Weights(NamedTuple):
    """Weights as they travel.

    Attributes:
        config, targets: of the model, as in ``ModelSource``.
        options: of the engine.
        arrays: by name; empty where there is a file.
        packed: None: the weights are the arrays.
    """

    config: Any
    targets: Any
    options: dict[str, Any]
    arrays: dict[str, Any]
    packed: PackedFile | None


class Worker:
    """Made by Ray; see ``whet.rollout.ray_pool``."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._weights_version = 0
        self._loading = threading.Lock()

    def versions(self) -> dict[str, str]:
        return versions()

    def load(self, policy: Policy) -> None:
        """Take the weights, unless it has them."""
        self._engine_of(policy)

    def generate(
        self, policy: Policy, prompt_ids: Sequence[int], n: int, sampling: SamplingParams, key: StreamKey
    ) -> list[Completion]:
        """``n`` completions of a prompt. Calls on several threads share the engine's batch."""
        return self._engine_of(policy).generate([prompt_ids], n, sampling, keys=[key])[0]

    def _engine_of(self, policy: Policy) -> Engine:
        import ray  # pyright: ignore[reportMissingImports]

        with self._loading:
            engine = self._engine
            if engine is not None and self._weights_version == policy.weights_version:
                if engine.policy_version != policy.version:
                    if policy.adapters:
                        self._sync(engine, ray.get(policy.adapters[0]), policy.version)
                    else:  # a base alone never changes
                        engine.policy_version = policy.version
                return engine
            weights: Any = ray.get(policy.weights[0])
            if not isinstance(weights, Weights):
                self._engine = _loaded(weights)
                return self._engine
            config, targets, options, arrays, packed = weights
            for reference in policy.adapters:
                arrays = arrays | ray.get(reference)
            if engine is None:
                base = None if packed is None else _pack(packed, config)
                if base is not None and not arrays:
                    source = base.source()
                else:
                    source = open_arrays(arrays, config, targets, base, "RayPool")
                engine = Engine(source, where="RayPool", **options)
                engine.policy_version = policy.version
            else:
                self._sync(engine, arrays, policy.version)
            self._engine, self._weights_version = engine, policy.weights_version
            return engine

    def _sync(self, engine: Engine, arrays: dict[str, Any], version: int) -> None:
        while True:
            try:
                return engine.sync(arrays, version=version)
            except EngineBusyError:  # a call of another version, whose driver has given it up
                time.sleep(_POLL_S)


def _loaded(load: Callable[[], Engine]) -> Engine:
    """The engine of a model that the driver has loaded, or could.

    Raises:
        WhetValueError: it cannot be loaded here.
    """
    try:
        return load()
    except WhetError as error:
        raise WhetValueError(
            f"RayPool: a worker on {platform.node()} cannot load the model ({error}) Put it in the same place on every "
            f"node."
        ) from None


def _pack(packed: PackedFile, config: Any) -> PackedBase:
    """The base that the trainer has.

    Raises:
        WhetValueError: this node has no such file.
        CheckpointError: its weights are others.
    """
    if not Path(packed.path).exists():
        raise WhetValueError(
            f"RayPool: a worker on {platform.node()} finds no {packed.path!r}, from which it packs the base. Put the "
            f"model in the same place on every node, or train beside floats, with base='none'."
        )
    source = open_pretrained(packed.path)._replace(config=config)
    return pack_recorded(source, packed.record, "RayPool", "the policy")
