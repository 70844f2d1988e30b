"""Waiting of OpenMP's threads, on which torch computes.

GNU's OpenMP threads spin at barriers. On virtual processors, which the host takes away while they spin, or next to
another program, a step of a small model takes 5 to 40 times as long; passive waiting has no measurable cost.
"""

from __future__ import annotations

import os
import sys


def wait_passively() -> None:
    """Have OpenMP's threads sleep at barriers. No effect if torch is loaded, or if the environment has a setting."""
    if "torch" not in sys.modules and "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def may_spin() -> bool:
    """Whether OpenMP's threads have the default policy, which spins; only meaningful if torch is loaded."""
    return os.environ.keys().isdisjoint(("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"))
