"""Runs code or tests once per instruction set of this processor.

A process selects its kernels at the first kernel call, by WHET_ISA. One new process therefore does the imports (or
collects the tests) once, and forks for each instruction set.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import whet

_FORKS = """
import json, os, sys
imports, work, sets = json.load(sys.stdin)
names = {}
exec(imports, names)
for isa in sets:
    print(isa, end=" ", flush=True)
    child = os.fork()
    if child == 0:
        os.environ["WHET_ISA"] = isa
        assert names["whet"].isa() == isa, f"the imports call a kernel: {names['whet'].isa()}"
        exec(work, names)
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"failed under {isa}")
"""


def usable_isas() -> list[str]:
    """Return the instruction sets that this processor supports; the first is the default without WHET_ISA."""
    return whet.build_info()["usable_instruction_sets"].split()


def assert_isas_agree(imports: str, work: str) -> None:
    """Check that ``work``, which prints one digest after ``imports``, prints the same one under each instruction set.

    ``imports`` must import whet.
    """
    isas = usable_isas()
    if len(isas) < 2:
        pytest.skip("this processor has only one of Whet's instruction sets")
    command, given = [sys.executable, "-c", _FORKS], json.dumps([imports, work, isas])
    run = subprocess.run(command, input=given, capture_output=True, text=True, env=_environment(), timeout=600)
    assert run.returncode == 0, run.stderr
    digests = dict(line.split(" ", 1) for line in run.stdout.splitlines())
    assert set(digests) == set(isas)
    assert len(set(digests.values())) == 1 and " " not in min(digests.values()), digests


def run_tests(isas: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with these arguments: tests are collected once, and run under each instruction set."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "tests.isas", *arguments]
    # WHET_ISA is set during collection because marks can depend on it.
    env = _environment(WHET_ISA=isas[0], WHET_TESTED_ISAS=" ".join(isas))
    root = Path(__file__).parents[1]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=root, timeout=900)


def pytest_runtestloop(session) -> bool | None:
    """Fork for each instruction set, as a pytest plugin: the child runs the tests, and the parent waits."""
    for isa in os.environ["WHET_TESTED_ISAS"].split():
        child = os.fork()
        if child == 0:
            os.environ["WHET_ISA"] = isa
            assert whet.isa() == isa, "a test module calls a kernel while it is imported"
            return None
        if os.waitpid(child, 0)[1]:
            session.testsfailed += 1
            session.shouldfail = f"failed under {isa}"
            break
    return True


def _environment(**settings: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if name != "WHET_ISA"}, **settings}
