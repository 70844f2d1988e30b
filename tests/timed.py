"""The mark of tests that measure time, excluded from `make test` and run by `make wide`."""

import pytest


def timed(test):
    """Mark a test as ``timing``, with reruns: other load can fail a timing test once, but not ten times in a row."""
    return pytest.mark.timing(pytest.mark.flaky(reruns=9, reruns_delay=1)(test))
