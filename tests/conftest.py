"""Set up pytest: torch and BLAS use one thread, since the suite runs one process per core and idle threads spin.

SIGINT has its default handler, because a shell starts background jobs with SIGINT ignored.
"""

import gc
import os
import signal

import hypothesis
import pytest
from tests.needs import missing

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
from whet import _core  # noqa: E402  # imports NumPy, whose BLAS reads these variables

os.environ.setdefault("WHET_NUM_THREADS", str(_core.n_processors()))  # else Whet uses OMP_NUM_THREADS
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it on import, by any package
signal.signal(signal.SIGINT, signal.default_int_handler)
hypothesis.settings.register_profile("any machine", deadline=None)  # a busy machine exceeds the default, 200 ms
hypothesis.settings.load_profile("any machine")


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection: the bench harness collects before every case."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fail-if-missing", action="store_true", help="fail tests with a missing need instead of skipping"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test with a missing need."""
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            if remedy := missing(name):
                (pytest.fail if item.config.getoption("--fail-if-missing") else pytest.skip)(remedy)
