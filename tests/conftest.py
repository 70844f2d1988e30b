"""One thread each for torch and BLAS: the suite runs one process per core, and idle threads spin.

And Ctrl-C heard as at a terminal: a shell starts what it runs in the background deaf to it.
"""

import gc
import os
import signal

import pytest
from tests.needs import missing

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Take what the imports made out of garbage collection: the bench harness collects before every case."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fail-if-missing", action="store_true", help="fail, not skip, what lacks what it needs")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose need is not met."""
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            if remedy := missing(name):
                (pytest.fail if item.config.getoption("--fail-if-missing") else pytest.skip)(remedy)
