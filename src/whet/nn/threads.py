"""Running kernels on OpenMP's threads, which torch computes on.

OpenMP threads spin for a while after each torch operation and would compete with a second thread pool for the
processors, so kernels run on OpenMP's threads during a training step.
"""

from __future__ import annotations

import ctypes
import functools
import re

import torch

from whet.system.machine import mapped_files


def openmp_fork() -> int:
    """Return the address of ``GOMP_parallel`` in torch's OpenMP runtime; 0 with one thread or without OpenMP."""
    return _fork_of_torch() if torch.get_num_threads() > 1 else 0


@functools.cache
def _fork_of_torch() -> int:
    paths = [path for path in mapped_files() if re.search(r"/lib[gi]?omp\d*[-.][^/]*$", path)]
    for path in sorted(paths, key=lambda path: "torch" not in path):
        try:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    return 0
