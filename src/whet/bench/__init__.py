"""Benchmarks: every figure that Whet claims, with its peers measured beside it.

A suite (``suites/``) is tables of cases; the harness checks every provider's answer against a float64 reference
before it times it, and refuses a row that the machine cannot have done. ``whet bench`` is its command line.
"""

from whet.bench.case import BenchOptions, Case, NotMeasured, Provider, Suite, Table, Timed

__all__ = ["BenchOptions", "Case", "NotMeasured", "Provider", "Suite", "Table", "Timed"]
