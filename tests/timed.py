"""The mark of tests that ask a clock."""

import pytest

# A clock tells of the machine too: who is right may be wrong while others have the processors, but not ten times.
timed = pytest.mark.flaky(reruns=9, reruns_delay=1)
