"""CUDA devices in benchmarks: waiting for them, description, and ceilings of bandwidth and arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from whet.errors import WhetError

_CEILING_CALLS = 5


def synchronize(device: str) -> None:
    """Wait for the work of a CUDA device."""
    import torch

    torch.cuda.synchronize(device)


def check_usable(device: str, provider: str) -> None:
    """Raise unless the device still works after an error of a provider: a fault loses it for the whole process.

    Raises:
        WhetError: the device is lost.
    """
    try:
        synchronize(device)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise WhetError(
            f"{device} cannot be used any more since a call of {provider}, or of a provider before it: {reason}. "
            "Measure this case without it (--only, --peers)."
        ) from error


def describe(device: str) -> str:
    """Describe a device in a line: name, memory, L2 cache, CUDA version of torch.

    Raises:
        RuntimeError: torch does not find the device.
    """
    import torch

    properties = torch.cuda.get_device_properties(device)
    memory, l2 = properties.total_memory / 2**30, properties.L2_cache_size / 2**20
    return f"{properties.name}, {memory:.0f} GiB, L2 {l2:.0f} MiB, CUDA {torch.version.cuda}"


def cache_levels(device: str) -> dict[str, int]:
    """Return the bytes of the device's cache that all of its multiprocessors share."""
    import torch

    return {"L2": torch.cuda.get_device_properties(device).L2_cache_size}


class Replay:
    """A call captured in a CUDA graph: a call replays it ``n_repeats`` times in one launch, without Python between.

    The first call replays it once, so that its answer can be checked.
    """

    n_repeats = 20

    def __init__(self, call: Callable[[], Any], before_first: Callable[[Any], None]) -> None:
        """Capture ``call``; ``before_first`` takes the answer, which the first call writes, and restores its inputs."""
        self._single, self._answer = _capture(call, 1)
        self._graph, _ = _capture(call, self.n_repeats)
        before_first(self._answer)
        self._is_first = True

    def __call__(self) -> Any:
        (self._single if self._is_first else self._graph).replay()
        self._is_first = False
        return self._answer


def _capture(call: Callable[[], Any], n: int) -> tuple[Any, Any]:
    """Capture ``n`` calls in a graph; return it and the answer of the last."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiled kernels and libraries allocate in their first calls
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph, answer = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph):
        for _ in range(n):
            answer = call()
    return graph, answer


def measure_ceilings(device: str, quick: bool) -> dict[str, dict[str, float]]:
    """Measure bytes per second of read, copy and scaling in place in L2 and memory, and products per dtype."""
    import torch

    with torch.cuda.device(device):
        sizes = {"L2": cache_levels(device)["L2"] // 2, "memory": 2 << 30}
        rates: dict[str, dict[str, float]] = {"read": {}, "copy": {}, "scale": {}}
        for level, size in sizes.items():
            x = torch.zeros(size // 4, device=device)
            half, rest = x[: len(x) // 2], x[len(x) // 2 :][: len(x) // 2]
            rates["read"][level] = size / _seconds(lambda x=x: x.amax(), quick)
            rates["copy"][level] = size / _seconds(lambda half=half, rest=rest: rest.copy_(half), quick)
            rates["scale"][level] = 2 * size / _seconds(lambda x=x: x.mul_(1.0), quick)
        n, flops = 4096 if quick else 8192, {}
        for name in ("float32", "bfloat16"):
            a = torch.randn(n, n, device=device, dtype=getattr(torch, name))
            flops[name] = 2 * n**3 / _seconds(lambda a=a: a @ a, quick)
        return {**rates, "flops": flops}


def _seconds(call: Callable[[], Any], quick: bool) -> float:
    """Return the median seconds of a call, by events around replays of a graph."""
    import torch

    graph, _ = _capture(call, _CEILING_CALLS)
    samples = []
    for _ in range(5 if quick else 15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(1e-3 * start.elapsed_time(end) / _CEILING_CALLS)
    return statistics.median(samples)
