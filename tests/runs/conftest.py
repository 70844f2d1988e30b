"""Fixtures of the command line's tests: a tiny model, data and reward functions."""

from tests.cli.conftest import files, one_thread, tiny_gguf, tiny_model  # noqa: F401
