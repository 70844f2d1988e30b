"""Whet post-trains language models on the machine you have, and runs what comes out.

The primitives, the engine and the learner of adapters are at top level and depend only on NumPy. Algorithms are
imported from their modules (``from whet.algorithms.grpo import GRPO``); to train PyTorch modules they need the
``train`` extra.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from whet import _core, ops
from whet.errors import WhetError, WhetTypeError, WhetValueError
from whet.ops import *  # noqa: F403
from whet.ops import inputs as _inputs
from whet.system.processes import has_siblings as _has_siblings

if TYPE_CHECKING:
    from whet.config.sampling import Completion, SamplingParams, StreamKey
    from whet.engine import Engine
    from whet.learner import Learner
    from whet.memory import memory_report

__version__ = "0.1.0"

if _has_siblings():
    _core.expect_siblings()


def isa() -> str:
    """Return the instruction set of the kernels.

    On x86-64 "scalar", "avx2", "avx512" or "avx512bf16"; on AArch64 "neon", "neon_dot" (dot products) or "neon_i8mm"
    (matrix products, bfloat16). Default: the widest that this processor supports. The environment variable WHET_ISA
    selects another at start; WHET_BFMMLA=1 selects faster bfloat16 products of "neon_i8mm", with other bits.
    """
    return _core.isa()


def build_info() -> dict[str, str]:
    """Return build settings of the native core and properties of this machine.

    ``compiler`` with its version, ``build_type`` ("Release" is optimised), compiled ``instruction_sets`` and
    ``usable_instruction_sets`` of this processor, both separated by spaces and ordered by preference. ``processors``:
    number that this process may use, by its affinity and the CPU quota of its control groups (Docker's ``--cpus``,
    Kubernetes' ``limits``), rounded down.
    """
    return _core.build_info()


def get_num_threads() -> int:
    """Return the number of threads of a native call, including the calling thread: at most one per processor."""
    return _core.num_threads()


def set_num_threads(n: int) -> None:
    """Set the number of threads of native calls, for the whole process. Results do not depend on it.

    Default: the environment variable WHET_NUM_THREADS. Without it, OMP_NUM_THREADS, by which torchrun, joblib and Ray
    divide the processors among their workers. Without both, 1 in a forked process and in a worker of multiprocessing,
    such as torch's DataLoader's, and else ``processors`` of ``build_info``. A forked process keeps a number
    that its parent has set by this function. At most one thread per processor is started (a fractional quota is
    rounded up), with a warning if n is larger: more would wait for a processor.

    Raises:
        WhetValueError: n is not in [1, 1024].
    """
    n = _inputs.as_positive_int("set_num_threads", "n", n)
    if n > 1024:
        raise WhetValueError(f"set_num_threads: n is {n}, expected at most 1024.")
    _core.set_num_threads(n)
    _warn_of_surplus_threads(f"set_num_threads: n is {n}", n)


def _warn_of_surplus_threads(setting: str, n: int) -> None:
    usable = _core.max_processors()
    if n > usable:
        warnings.warn(
            f"{setting}, but this process may use {usable} {'processor' if usable == 1 else 'processors'}: that many "
            f"threads run, with the same results.",
            stacklevel=3,
        )


# A value that is not a number is an error of the first native call.
if (_wanted := os.environ.get("WHET_NUM_THREADS", "")).isdecimal():
    _warn_of_surplus_threads(f"WHET_NUM_THREADS is {_wanted}", int(_wanted))


_LAZY = {
    "Engine": "whet.engine",
    "Learner": "whet.learner",
    "Completion": "whet.config.sampling",
    "SamplingParams": "whet.config.sampling",
    "StreamKey": "whet.config.sampling",
    "memory_report": "whet.memory",
}
"""Names that are imported on first access."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'whet' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


__all__ = ["WhetError", "WhetTypeError", "WhetValueError", "build_info", "get_num_threads", "isa", "set_num_threads"]
__all__ += ["Completion", "Engine", "Learner", "SamplingParams", "StreamKey", "memory_report"]
__all__ += ops.__all__
