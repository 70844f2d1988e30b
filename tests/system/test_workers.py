"""The default number of threads: a share of the processors in processes that have siblings."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import whet

N = int(whet.build_info()["processors"])
CODE = "import multiprocessing, os, whet\nprint_threads = lambda: print(whet.get_num_threads(), flush=True)\n"


def threads_of(code: str, **variables: str) -> list[int]:
    """Return the numbers that the code prints; of the variables of threads it gets only these."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    command = [sys.executable, "-c", CODE + code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment | variables)
    assert run.returncode == 0, run.stderr
    return [int(number) for number in run.stdout.split()]


FORK = """
if child := os.fork():
    os.waitpid(child, 0)
print_threads()
"""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, N),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "1,8"}, 1),
        ({"OMP_NUM_THREADS": "1000"}, N),
        ({"OMP_NUM_THREADS": "some"}, N),
        ({"OMP_NUM_THREADS": "1", "WHET_NUM_THREADS": str(N)}, N),
    ],
)
def test_default_is_whets_variable_then_openmps_then_the_processors(variables, expected):
    assert threads_of("print_threads()", **variables) == [expected]


@pytest.mark.parametrize(
    ("before", "variables", "parent", "child"),
    [
        ("", {}, N, 1),
        ("whet.get_num_threads()", {}, N, 1),
        ("", {"WHET_NUM_THREADS": str(N)}, N, N),
        (f"whet.set_num_threads({N})", {}, N, N),
    ],
)
def test_forked_child_has_one_thread_unless_a_number_was_set(before, variables, parent, child):
    assert threads_of(before + FORK, **variables) == [child, parent]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_pools_have_one_thread(method):
    pool = f"""
with multiprocessing.get_context("{method}").Pool(2) as pool:
    print(*(pool.apply(whet.get_num_threads) for _ in range(2)))
print_threads()
"""
    assert threads_of(pool) == [1, 1, N]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader_have_one_thread(method):
    loader = f"""
from torch.utils.data import DataLoader
from tests.system.test_workers import threads_here
loader = DataLoader(range(2), num_workers=2, collate_fn=threads_here, multiprocessing_context="{method}")
print(*loader)
print_threads()
"""
    assert threads_of(loader) == [1, 1, N]


def threads_here(_: object) -> int:
    return whet.get_num_threads()


def test_workers_of_joblib_have_the_share_that_joblib_gives_them():
    pytest.importorskip("joblib")
    code = """
import joblib
print(*joblib.Parallel(n_jobs=2)(joblib.delayed(whet.get_num_threads)() for _ in range(2)))
"""
    assert threads_of(code) == [max(1, joblib_cpus() // 2)] * 2


def joblib_cpus() -> int:
    import joblib

    return joblib.cpu_count()


@pytest.mark.needs("joblib")
def test_workers_of_joblib_share_the_processors():
    code = """
import joblib
print(*joblib.Parallel(n_jobs=2)(joblib.delayed(whet.get_num_threads)() for _ in range(2)))
print_threads()
"""
    assert threads_of(code) == [max(1, N // 2), max(1, N // 2), N]


@pytest.mark.needs("ray")
def test_a_task_of_ray_has_one_thread():
    code = """
import ray
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
print(ray.get(ray.remote(whet.get_num_threads).remote()))
print_threads()
"""
    assert threads_of(code) == [1, N]
