"""Threads in a real control group with a CPU quota, of version 1 or 2, if it can be created."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

GROUPS = Path("/sys/fs/cgroup")


@pytest.fixture
def group():
    """Create a group of version 2, or of version 1's cpu controller; return its quota and period files."""
    for top, is_new in ((GROUPS, True), (GROUPS / "cpu", False)):
        folder = top / f"whet_test_{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            if (folder / ("cpu.max" if is_new else "cpu.cfs_quota_us")).exists():
                yield folder
                folder.rmdir()
                return
            folder.rmdir()
    pytest.skip("needs a control group with the cpu controller: run as root, outside of a container")


@pytest.mark.parametrize(("cpus", "expected"), [(0.5, 1), (1.9, 1)])
def test_threads_follow_the_quota_of_the_group(cpus, expected, group):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two processors")
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{int(cpus * 100_000)} 100000")
    else:
        (group / "cpu.cfs_quota_us").write_text(str(int(cpus * 100_000)))
    code = "import whet; print(whet.build_info()['processors'], whet.get_num_threads())"
    command = f'echo $$ > {group}/cgroup.procs && exec {sys.executable} -c "{code}"'
    environment = {name: value for name, value in os.environ.items() if name != "WHET_NUM_THREADS"}
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)
    assert run.stdout == f"{expected} {expected}\n", run.stderr
