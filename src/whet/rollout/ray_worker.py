"""Sampling worker: an engine in a Ray process, without torch.

A call includes everything that its result depends on, so that any worker returns the same completions, also a worker
started after another was killed: Ray's retries need no further state.
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
    """Weights that a call samples from.

    Attributes:
        version: policy version of the trainer.
        weights: [reference] to ``Weights``, or to a function that constructs the engine; in a list, so that Ray passes
            the reference without fetching the object.
        weights_version: version of the ``sync`` call that sent the weights; adapters may be newer.
        adapters: [reference] to named adapters, or empty.
    """

    version: int
    weights: list[Any]
    weights_version: int
    adapters: list[Any]


def versions() -> dict[str, str]:
    """Return the versions, by name, that must be equal on driver and workers."""
    return {"Whet": whet.__version__, "Python": ".".join(platform.python_version_tuple()[:2])}


class PackedFile(NamedTuple):
    """A base that each worker packs from the same file.

    Attributes:
        path: path of the model's folder or file, on every node.
        record: ``PackedBase.record`` that the packed base has to match.
    """

    path: str
    record: dict[str, Any]


class Weights(NamedTuple):
    """Weights as sent to workers.

    Attributes:
        config: the model's architecture.
        targets: as in ``ModelSource``.
        options: options of the engine.
        arrays: arrays by name; empty for a base without adapters.
        packed: the packed base; None: the arrays are the weights.
    """

    config: Any
    targets: Any
    options: dict[str, Any]
    arrays: dict[str, Any]
    packed: PackedFile | None


class Worker:
    """Ray actor; see ``whet.rollout.ray_pool``."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._weights_version = 0
        self._loading = threading.Lock()

    def versions(self) -> dict[str, str]:
        return versions()

    def load(self, policy: Policy) -> None:
        """Load the weights, unless already loaded."""
        self._load_engine(policy)

    def generate(
        self, policy: Policy, prompt_ids: Sequence[int], n: int, sampling: SamplingParams, key: StreamKey
    ) -> list[Completion]:
        """Sample ``n`` completions of a prompt. Concurrent calls share the engine's batch."""
        return self._load_engine(policy).generate([prompt_ids], n, sampling, keys=[key])[0]

    def _load_engine(self, policy: Policy) -> Engine:
        import ray  # pyright: ignore[reportMissingImports]

        with self._loading:
            engine = self._engine
            if engine is not None and self._weights_version == policy.weights_version:
                if engine.policy_version != policy.version:
                    if policy.adapters:
                        self._sync(engine, ray.get(policy.adapters[0]), policy.version)
                    else:  # a base without adapters never changes
                        engine.policy_version = policy.version
                return engine
            weights: Any = ray.get(policy.weights[0])
            if not isinstance(weights, Weights):
                self._engine = _call_load(weights)
                return self._engine
            config, targets, options, arrays, packed = weights
            for reference in policy.adapters:
                adapters: Any = ray.get(reference)
                arrays = arrays | adapters
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
            except EngineBusyError:  # a call of another version, abandoned by its driver
                time.sleep(_POLL_S)


def _call_load(load: Callable[[], Engine]) -> Engine:
    """Construct the engine with the driver's function.

    Raises:
        WhetValueError: the model cannot be loaded on this node.
    """
    try:
        return load()
    except WhetError as error:
        raise WhetValueError(
            f"RayPool: a worker on {platform.node()} cannot load the model ({error}) Put it at the same path on "
            f"every node."
        ) from None


def _pack(packed: PackedFile, config: Any) -> PackedBase:
    """Pack the trainer's base.

    Raises:
        WhetValueError: the file does not exist on this node.
        CheckpointError: the file has other weights.
    """
    if not Path(packed.path).exists():
        raise WhetValueError(
            f"RayPool: a worker on {platform.node()} does not find {packed.path!r}, the source of the base. Put the "
            f"model at the same path on every node, or train adapters on floats, with base='none'."
        )
    source = open_pretrained(packed.path)._replace(config=config)
    return pack_recorded(source, packed.record, "RayPool", "the policy")
