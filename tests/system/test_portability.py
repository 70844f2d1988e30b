"""Python and C++ outside of the code for operating systems name nothing that only some systems have, and import and run
without it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from tests.processes import printed_by

ROOT = Path(__file__).parents[2]
NAMES = {
    "O_DIRECT", "SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "fork", "getloadavg", "getpgid", "killpg",
    "madvise", "mallinfo2", "posix_fadvise", "prctl", "pread", "pwrite", "register_at_fork", "sched_getaffinity",
    "sched_setaffinity", "setsid", "sysconf", "uname",
}  # fmt: skip
MODULES = {"fcntl", "grp", "msvcrt", "posix", "pwd", "resource", "termios", "winreg"}


def system_names(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found |= NAMES & {node.attr}
        elif isinstance(node, ast.Import):
            found |= MODULES & {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= (NAMES | MODULES) & {str(node.module), *(name.name for name in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"^/(?:proc|sys|dev)/", node.value))
            found |= NAMES & {node.value} - {"fork"}  # a start method of multiprocessing
    return found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import os\nos.fork()", {"fork"}),
        ("from os import pread as p", {"pread"}),
        ("import fcntl", {"fcntl"}),
        ("from pathlib import Path\nPath('/proc/stat')", {"/proc/"}),
        ("getattr(signal, 'SIGKILL')", {"SIGKILL"}),
        ("import json\n'see /proc'", set()),
    ],
)
def test_names_are_found(code, found):
    assert system_names(ast.parse(code)) == found


def test_only_whet_system_names_what_systems_do_not_share():
    files = [path for path in (ROOT / "src/whet").rglob("*.py") if path.parent.name != "system"]
    assert len(files) > 100
    found = {str(path.relative_to(ROOT)): system_names(ast.parse(path.read_text(encoding="utf-8"))) for path in files}
    assert {path: names for path, names in found.items() if names} == {}


def test_only_runtime_system_knows_an_operating_system():
    pattern = r"__linux__|_WIN32|__APPLE__|__GLIBC__|__unix__|<(?:sys/|mach/|unistd|pthread|sched|windows|malloc)"
    cpp = ROOT / "cpp"
    files = [path for path in cpp.rglob("*") if path.suffix in (".h", ".cpp")]
    found = {str(path.relative_to(cpp)) for path in files if re.search(pattern, path.read_text(encoding="utf-8"))}
    # Features of processors are system calls of a different kind; the test of allocations wraps functions of Linux.
    others = {"runtime/processor_features.cpp", "tests/allocation_test.cpp"}
    assert {path for path in found - others if not path.startswith("runtime/system/")} == set()


WITHOUT = """
import os, signal, sys
for name in ("fcntl", "grp", "pwd", "resource", "termios", "readline"):
    sys.modules[name] = None
for module in (os, signal):
    for name in %r:
        if hasattr(module, name):
            delattr(module, name)
"""
IMPORTED = """
import whet, whet.ops, whet.engine, whet.files, whet.memory, whet.signals, whet.cli, whet.evaluation
import whet.models.published, whet.rewards.functions, whet.data.rows, whet.report.page, whet.training.launch
import whet.system.files, whet.system.machine, whet.system.memory, whet.system.processes
"""
WORK = """
import warnings
from pathlib import Path
from whet.errors import WhetError
from whet.files import FolderLock, replace_folder, replace_text, temporary_next_to, write_new

folder = Path(sys.argv[1])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    FolderLock(folder).acquire()
assert "no locks" in str(caught[0].message), caught
replace_text(folder / "text", "x")
assert write_new(folder / "new", [b"abc" * 5000])["size_bytes"] == 15000
with temporary_next_to(folder / "saved", "saving", folder=True) as temporary:
    (temporary / "content").write_text("y")
    replace_folder(temporary, folder / "saved")
assert (folder / "saved/content").read_text() == "y"
assert whet.system.memory.resident_bytes() > 0 and whet.memory_report().resident > 0
assert whet.compute_token_kl([-1.0], [-1.0]) == 0.0 and whet.report.page.versions()["processor"]
try:
    whet.cli.main(["--help"])
except SystemExit as ended:
    assert not ended.code
for refused in (lambda: whet.rewards.functions.RewardFunctions(len, timeout_s=1.0),
                lambda: whet.training.launch.start_ranks(2, [])):
    try:
        refused()
    except WhetError as error:
        print(error)
"""


def test_whet_runs_without_the_modules_and_functions_that_windows_lacks(tmp_path):
    without = WITHOUT % sorted(NAMES - {"uname"})  # NumPy needs os.uname if sys.platform is linux
    printed = printed_by(without + IMPORTED + WORK, tmp_path).splitlines()
    assert "timeout_s is 1.0" in printed[-2] and "Pass None" in printed[-2]
    assert "--ranks 2" in printed[-1] and "without it" in printed[-1]
