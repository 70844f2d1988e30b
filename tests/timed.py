"""The mark of tests that measure time."""

import pytest

# Other load on the machine can fail a timing test once, but not ten times in a row.
timed = pytest.mark.flaky(reruns=9, reruns_delay=1)
