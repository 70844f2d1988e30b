"""Contenders of the suites: Whet and its peers, set up for the same tasks."""
