"""Suites and contenders of ``whet bench`` that need peers, in a clone of the repository only.

``suites/`` has one module per suite; ``contenders/`` runs Whet and each peer on the same task. The harness, the reports
and the kernel suite are in ``whet.bench``.
"""
