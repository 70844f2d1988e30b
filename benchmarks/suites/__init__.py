"""Suites that need peers, one module each with a ``SUITE``: found by ``whet.bench.suites``."""
