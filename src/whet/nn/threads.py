"""OpenMP's threads, on which torch computes.

They spin for a while after each of torch's operations. Kernels that come next and have threads of their own find the
processors taken, so for the time of a training step they run on OpenMP's too.
"""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

import torch


def openmp_fork() -> int:
    """Address of ``GOMP_parallel`` in the runtime that torch computes on; 0 where it has one thread or no OpenMP."""
    return _fork_of_torch() if torch.get_num_threads() > 1 else 0


@functools.cache
def _fork_of_torch() -> int:
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return 0
    paths = set(re.findall(r"\S+/lib[gi]?omp\d*[-.][^/\s]*$", maps, re.MULTILINE))
    for path in sorted(paths, key=lambda path: "torch" not in path):
        try:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    return 0
