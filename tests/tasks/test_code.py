"""Programs of the model: the sandbox keeps network and files away and holds its limits; the tool, and the reward."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.raising import assert_mentions, assert_raises

from whet.errors import WhetTypeError, WhetValueError
from whet.rewards.functions import RewardFunctions, load_function
from whet.system import sandbox as module
from whet.system.sandbox import Sandbox
from whet.tasks.code import Interpreter, passes_tests, prepare, program_in, python, runs_programs
from whet.tasks.schemas import tool_schema

sandboxed = pytest.mark.needs("bwrap")
LOCAL = Sandbox(unsafe_local=True)
BOTH = [pytest.param(Sandbox(timeout_s=8.0), marks=sandboxed, id="sandbox"), pytest.param(LOCAL, id="local")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Any) -> Path:
    """A folder that holds the folders of programs, by which ``n_left`` finds their processes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def count_processes(folder: Path) -> int:
    """Return the number of processes with files in ``folder``."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += f"{folder}/whet-code" in (process / "mountinfo").read_text() + os.readlink(process / "cwd")
    return found


def n_left(folder: Path) -> int:
    """Return the number of processes after time for killed ones to end."""
    for _ in range(100):
        if not count_processes(folder):
            break
        time.sleep(0.05)
    return count_processes(folder)


# --- the sandbox ----------------------------------------------------------------------------------------


@sandboxed
def test_a_program_has_no_network() -> None:
    with subprocess.Popen(
        [sys.executable, "-u", "-c", "import socket\ns = socket.create_server(('127.0.0.1', 0))\n"
         "print(s.getsockname()[1])\nwhile True: s.accept()[0].sendall(b'secret')"], stdout=subprocess.PIPE,
    ) as server:  # fmt: skip
        assert server.stdout is not None
        port = int(server.stdout.readline())
        connect = f"import socket\nprint(socket.create_connection(('127.0.0.1', {port}), 3).recv(9))"
        assert LOCAL.run(connect).output == "b'secret'\n"  # there is something to reach
        found = Sandbox().run(connect)
        server.kill()
    assert found.status == 1 and "b'secret'" not in found.output and "ConnectionRefusedError" in found.output
    names = Sandbox().run("import socket\nprint([name for _, name in socket.if_nameindex()])").output
    assert "eth" not in names and "lo" in names


@sandboxed
def test_a_program_sees_neither_home_nor_files_nor_environment(tmp_path: Path, monkeypatch: Any) -> None:
    secret, home = tmp_path / "secret.txt", Path.home() / f".whet-test-{os.getpid()}"
    monkeypatch.setenv("WHET_SECRET", "hidden")
    for file in (secret, home):
        file.write_text("hidden")
    try:
        code = f"""
import os
for file in {[str(secret), str(home), "/etc/passwd", "/proc/1/environ"]!r}:
    try:
        print(open(file).read())
    except OSError as error:
        print(type(error).__name__)
print(dict(os.environ), os.path.expanduser("~"), os.listdir("."), len([p for p in os.listdir("/proc") if p.isdigit()]))
"""
        assert LOCAL.run(code).output.count("hidden") == 2
        found = Sandbox().run(code)
    finally:
        home.unlink()
    assert found.status == 0 and "hidden" not in found.output and "WHET_SECRET" not in found.output
    assert found.output.count("FileNotFoundError") >= 3 and "/tmp ['main.py'] " in found.output
    assert int(found.output.split()[-1]) <= 4  # its own processes only


@sandboxed
def test_a_program_writes_to_its_folder_only(tmp_path: Path) -> None:
    assert Sandbox().run("open('x', 'w').write('1')\nprint(open('/tmp/x').read())").output == "1\n"
    assert Sandbox().run("import os\nprint(os.listdir())").output == "['main.py']\n"  # each has a new one
    for path in ("/x", "/usr/x", "/dev/x", "/root/x", f"{sys.prefix}/x", f"{tmp_path}/x"):
        assert Sandbox().run(f"open({path!r}, 'w').write('1')").status == 1, path
    assert not (tmp_path / "x").exists() and not Path("/tmp/x").exists()
    large = Sandbox(folder_bytes=1 << 20).run("for i in range(4): open(str(i), 'wb').write(bytes(400_000))")
    assert_mentions(large.output, "No space left")
    assert Sandbox().run("open('/dev/shm/x', 'wb').write(bytes(1 << 20))").status == 1


@sandboxed
@pytest.mark.parametrize("way", ["fork", "double"])
def test_a_fork_bomb_ends_with_its_program(way: str, folder: Path) -> None:
    act = {"fork": "os.fork()", "double": "os.fork() or os.setsid()"}[way]
    bomb = f"import os\nwhile True:\n    try: {act}\n    except OSError: pass"
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(Sandbox(timeout_s=3.0).run, bomb)
        time.sleep(2.0)
        assert count_processes(folder) >= 16
        found = running.result()
    assert found.status is None and time.monotonic() - begin < 10
    assert n_left(folder) == 0 and not list(folder.glob("whet-code*"))
    count = "import os, time\nn = 0\ntry:\n    while True:\n        n += 1\n        os.fork() or time.sleep(60)\n"
    found = Sandbox(timeout_s=10.0).run(f"{count}except OSError:\n    print(n)")
    assert 0 < int(found.output) <= 16


@pytest.mark.parametrize("sandbox", BOTH)
def test_limits(sandbox: Sandbox, folder: Path) -> None:
    begin = time.monotonic()
    short = Sandbox(timeout_s=1.0, unsafe_local=sandbox.unsafe_local)
    for code in ("while True: pass", "import time\ntime.sleep(60)", "input()\nimport time\ntime.sleep(60)"):
        found = short.run(f"print('begun', flush=True)\n{code}")
        assert found.output.startswith("begun\n") and found.status in (None, 1)  # there is no input
    assert time.monotonic() - begin < 15
    large = sandbox.run("print('x' * 10_000_000)")
    assert large.status == 0 and large.n_bytes == 10_000_001 and large.output == "x" * sandbox.output_bytes
    assert large.tail.endswith("x\n") and len(large.tail) == 256
    for hog in ("x = bytearray(1 << 30)", "x = []\nwhile True: x.append(bytearray(1 << 20))"):
        assert_mentions(sandbox.run(hog).output, "MemoryError")
    left = sandbox.run("import os, time\nif not os.fork(): time.sleep(60)\nelse: print('parent')")
    assert left.output == "parent\n" and left.status == 0 and n_left(folder) == 0
    assert sandbox.run("raise SystemExit(3)").status == 3
    assert sandbox.run("import os\nos.kill(os.getpid(), 9)").status != 0
    assert sandbox.run("print('é', end='')").output == "é"
    assert sandbox.run("print('\ud800')").status == 0  # replaced, since it cannot be encoded
    assert sandbox.run("import numpy\nprint(numpy.ones(3).sum())").output == "3.0\n"


def test_without_a_sandbox_programs_are_refused(monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    module._find_way.cache_clear()
    try:
        facts = ("bubblewrap", "there is none", "apt-get install bubblewrap", "--unsafe-local")
        assert_raises(WhetValueError, facts, Sandbox().run, "print(1)")
        assert_raises(WhetValueError, facts, prepare, [len, python])
        [tool] = prepare([python], unsafe_local=True)
        assert tool(code="print(1)") == "1"
    finally:
        monkeypatch.undo()
        module._find_way.cache_clear()


def test_a_sandbox_that_does_not_work_is_refused(monkeypatch: Any, tmp_path: Path) -> None:
    """A bwrap that runs the program without limiting its processes, and one that fails."""
    scripts = {"63": f"exec {sys.executable} -c 'print(63)'", "no namespaces": "echo 'no namespaces' >&2; exit 1"}
    for fact, script in scripts.items():
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bwrap").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        module._find_way.cache_clear()
        try:
            assert_raises(WhetValueError, ("does not work here", fact), Sandbox().check)
        finally:
            module._find_way.cache_clear()


# --- the tool and the reward ----------------------------------------------------------------------------


@pytest.fixture(params=BOTH)
def interpreter(request: Any) -> Interpreter:
    return Interpreter(request.param)


def test_the_tool_returns_what_is_printed(interpreter: Interpreter) -> None:
    assert interpreter.python("print(2 ** 10)\nprint('é')") == "1024\né"
    assert interpreter.python("x = 1") == "(no output)"
    failed = interpreter.python("print('a')\n1 / 0")
    assert failed.startswith("a\nTraceback") and failed.endswith("ZeroDivisionError: division by zero\n[exit status 1]")
    short = Interpreter(Sandbox(timeout_s=0.5, output_bytes=3, unsafe_local=interpreter.sandbox.unsafe_local))
    assert short.python("print('abcdef', flush=True)\nwhile True: pass") == (
        "abc\n[truncated: the first 3 of 7 bytes]\n[ended after the time limit of 0.5 s]"
    )
    schema = tool_schema(interpreter.python)["function"]
    assert schema["name"] == "python" and schema["parameters"]["required"] == ["code"]
    assert load_function("whet.tasks.code:python") is python
    assert runs_programs(["a.py:f", "whet.tasks.code:python"]) and not runs_programs(["a.py:python"])


DOUBLE = "def double(x):\n    return 2 * x\n"
TESTS = ["assert double(2) == 4", "assert double('a') == 'aa'"]


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (f"Here:\n```python\n{DOUBLE}```\nDone.", 1),
        (DOUBLE, 1),
        (f"<think>```python\n1 / 0\n```</think>```py\n{DOUBLE}```", 1),
        (f"```python\n1 / 0\n```\nBetter:\n```\n{DOUBLE}```", 1),
        (f"```python\n{DOUBLE}", 1),
        ([{"role": "tool", "content": "1 / 0"}, {"role": "assistant", "content": f"```python\n{DOUBLE}```"}], 1),
        ("def double(x):\n    return 2 + x\n", 0),
        ("def double(x):\n    return 4", 0),
        ("<think>" + DOUBLE, 0),
        ("", 0),
        ("```python\nraise SystemExit(0)\n```", 0),
        ("import os\nos._exit(0)", 0),
        (DOUBLE + "import os\nos.fork()\nos._exit(0)", 0),
        ("def double(x):", 0),
        ("def double(x):\n    while True: pass", 0),
        ("import atexit\n" + DOUBLE + "atexit.register(print, 'x' * 1000)", 0),  # the tests come last
        ([], 0),
    ],
)
def test_programs_that_pass_their_tests_score(completion: Any, score: float) -> None:
    interpreter = Interpreter(Sandbox(timeout_s=3.0, unsafe_local=True))
    assert interpreter.passes_tests([completion], [TESTS]) == [score]


@sandboxed
def test_the_reward_scores_a_batch() -> None:
    completions = [DOUBLE, "pass", f"```python\nprint('x' * 100_000)\n{DOUBLE}```", "import time\ntime.sleep(60)"]
    functions = RewardFunctions([load_function("whet.tasks.code:passes_tests")])
    begin = time.monotonic()
    scored = functions(
        prompts=[""] * 4, completions=completions, completion_ids=[[]] * 4,
        columns={"tests": ["\n".join(TESTS)] * 3 + [TESTS]},
    )  # fmt: skip
    assert scored.rewards.tolist() == [1, 0, 1, 0] and scored.by_name.keys() == {"passes_tests"}
    assert time.monotonic() - begin < 20


def test_tests_of_another_type_are_rejected() -> None:
    assert_raises(WhetTypeError, ("tests[1]", "3", "list of texts"), passes_tests, ["a", "b"], ["x", 3])
    assert_raises(WhetTypeError, ("tests[0]", "[]"), passes_tests, ["a"], [[]])
    assert program_in("no code") == "no code" and program_in([{"role": "assistant", "content": None}]) == ""
