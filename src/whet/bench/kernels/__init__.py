"""Benchmark tables of kernels, a module per family; ``suites/kernels.py`` combines them."""
