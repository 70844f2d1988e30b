"""Fixtures of the command line's tests: a tiny model as a folder and as a GGUF file."""

from tests.cli.conftest import files, one_thread, tiny_gguf, tiny_model  # noqa: F401
