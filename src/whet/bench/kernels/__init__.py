"""The kernels' benchmark tables, a module for each family; ``suites/kernels.py`` puts them together."""
