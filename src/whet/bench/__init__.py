"""Benchmarks: every figure that Whet claims, measured together with its peers.

A suite is tables of cases. The harness checks every provider's answer against a float64 reference before timing it, and
rejects rows that are faster than the machine allows. The command line is ``whet bench``.
"""

from whet.bench.case import BenchOptions, Case, NotMeasured, Provider, Suite, Table, Timed

__all__ = ["BenchOptions", "Case", "NotMeasured", "Provider", "Suite", "Table", "Timed"]
