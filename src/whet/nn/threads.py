"""Running kernels on OpenMP's threads, which torch computes on.

OpenMP threads spin for a while after each torch operation and would compete with a second thread pool for the
processors, so kernels run on OpenMP's threads during a training step.
"""

from __future__ import annotations

import ctypes
import functools
import re
import warnings

import torch

from whet.system.machine import mapped_files
from whet.system.openmp import may_spin

_MANY_THREADS = 8


def openmp_fork() -> int:
    """Return the address of ``GOMP_parallel`` in torch's OpenMP runtime; 0 with one thread or without OpenMP."""
    return _fork_of_torch() if torch.get_num_threads() > 1 else 0


def warn_of_spinning() -> None:
    """Warn if torch computes on many OpenMP threads that spin; measured in docs/performance.md."""
    n = torch.get_num_threads()
    if n > _MANY_THREADS and _fork_of_torch() and may_spin():
        warnings.warn(
            f"accelerate: torch's {n} OpenMP threads spin at barriers; on virtual processors, a step can take five "
            "times as long. Set OMP_WAIT_POLICY=PASSIVE before torch is imported, or import whet.nn first.",
            stacklevel=4,
        )


@functools.cache
def _fork_of_torch() -> int:
    paths = [path for path in mapped_files() if re.search(r"/lib[gi]?omp\d*[-.][^/]*$", path)]
    for path in sorted(paths, key=lambda path: "torch" not in path):
        try:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    return 0
