"""Missing prerequisites of `make demo` and `pip install .`: one line that names them, before any download."""

import functools
import http.server
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HERE = Path(sys.base_prefix) / "bin" / "python3"
STDLIB = Path(sysconfig.get_path("stdlib"))


def load_set_up():
    spec = importlib.util.spec_from_file_location("set_up", ROOT / "tools" / "set_up.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


set_up = load_set_up()


@pytest.fixture
def refusal(tmp_path):
    """Error line of tools/set_up.py, which must exit before it downloads."""

    def line(**env):
        folder = tmp_path / "venv"
        command = [HERE, ROOT / "tools" / "set_up.py", folder, tmp_path / "build", "train"]
        given = {**os.environ, "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_NO_INDEX": "1", **env}
        run = subprocess.run(command, env=given, capture_output=True, text=True, timeout=60)
        assert run.returncode == 1 and run.stdout == "" and not folder.exists(), run
        assert run.stderr.count("\n") == 1, run.stderr
        return run.stderr.strip()

    return line


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), (["-h"], 0), ([], 2), (["venv", "build"], 2)])
def test_other_arguments_print_the_usage_and_create_nothing(arguments, status, tmp_path):
    run = subprocess.run([HERE, ROOT / "tools" / "set_up.py", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == status and "python3 tools/set_up.py VENV BUILD EXTRA" in run.stdout
    assert not list(tmp_path.iterdir())


@pytest.fixture
def bare_home(tmp_path):
    """PYTHONHOME of a distribution without python3-dev and python3-venv: no headers, no ensurepip."""
    home = tmp_path / "home"
    library = home / sys.platlibdir / STDLIB.name
    library.mkdir(parents=True)
    for entry in STDLIB.iterdir():
        if entry.name != "ensurepip":
            (library / entry.name).symlink_to(entry)
    return str(home)


def test_missing_headers_and_ensurepip_are_named_together(refusal, bare_home):
    line = refusal(PYTHONHOME=bare_home)
    assert "has no ensurepip and there is no" in line and "Python.h" in line
    name = f"python{set_up.VERSION}"
    assert line.endswith(f"apt-get install {name}-venv {name}-dev")


def test_missing_compiler_is_named(refusal, tmp_path):
    assert "there is no C++ compiler (c++, g++ or clang++)" in refusal(PATH=str(tmp_path))
    assert "there is no C++ compiler (g++-99)" in refusal(CXX="g++-99")


@pytest.mark.parametrize(
    ("macros", "found"),
    [
        ("#define __GNUC__ 10", "GNU 10"),
        ("#define __GNUC__ 4\n#define __clang_major__ 18", "Clang 18"),
        ("", "neither"),
    ],
)
def test_outdated_compiler_is_named_with_its_version(macros, found, refusal, tmp_path):
    compiler = tmp_path / "old c++"
    compiler.write_text(f"#!/bin/sh\ncat <<'EOF'\n{macros}\nEOF\n")
    compiler.chmod(0o755)
    line = refusal(CXX=f"'{compiler}' -m64")
    assert f"is {found}" in line and "GCC 11 or Clang 19 or later" in line and line.endswith("apt-get install g++")


def test_outdated_python_is_named(tmp_path):
    versions = Path.home() / ".pyenv" / "versions"
    found = (str(python) for minors in ("3.10.*", "3.[6-9].*") for python in versions.glob(f"{minors}/bin/python"))
    old = next(found, None)
    if old is None:
        pytest.skip("no Python below 3.11 is installed")
    command = ["make", "-s", f"PYTHON={old}", f"VENV={tmp_path}/venv", f"{tmp_path}/venv/.installed-train"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    lines = run.stderr.strip().splitlines()
    assert run.returncode and "needs Python 3.11 or later" in lines[0] and len(lines) == 2, (
        run
    )  # the other line is make's
    assert not (tmp_path / "venv").exists()


def cmake_error(tmp_path, path, *options):
    cmake = shutil.which("cmake") or str(Path(sys.executable).parent / "cmake")
    command = [cmake, "-S", ROOT, "-B", tmp_path / "build", "-G", "Unix Makefiles", *options]
    env = {**os.environ, "PATH": path}
    env.pop("CXX", None)
    run = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode
    return " ".join(run.stderr.split())


def test_pip_install_names_a_missing_compiler(tmp_path):
    (tmp_path / "make").symlink_to(shutil.which("make"))
    assert "Whet needs a C++ compiler. Install g++, or name one in CXX." in cmake_error(tmp_path, str(tmp_path))


def test_pip_install_names_missing_headers(tmp_path):
    hidden = f"-DPython_INCLUDE_DIR={tmp_path / 'nowhere'}"
    error = cmake_error(tmp_path, os.environ["PATH"], f"-DPython_EXECUTABLE={sys.executable}", hidden)
    assert f"{sys.executable} lacks Python.h or NumPy. Install python3-dev and NumPy." in error


def test_minimum_versions_agree_in_all_files():
    compilers = set_up.minimum_compilers()
    readme = (ROOT / "README.md").read_text()
    assert re.search(r"`g\+\+` \((\d+)\+\)", readme)[1] == str(compilers["GNU"])
    assert re.search(r"`clang` \((\d+)\+\)", readme)[1] == str(compilers["Clang"])
    declared = re.search(r'requires-python = ">=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert f"sys.version_info < ({declared[1]}, {declared[2]})" in (ROOT / "Makefile").read_text()
    assert f"`python3` ({declared[1]}.{declared[2]}+)" in readme


class Index(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(200 if self.path.startswith("/known") else 404)
        self.send_header("Content-Length", "3000000")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def index():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        thread = threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.01))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_torch_without_cuda_if_its_index_is_reachable(index, monkeypatch):
    monkeypatch.setattr(set_up, "has_nvidia_gpu", lambda: False)
    for folder, options in (("known", ["--extra-index-url", f"{index}/known"]), ("gone", [])):
        monkeypatch.setattr(set_up, "TORCH_WITHOUT_CUDA", f"{index}/{folder}")
        assert set_up.index_of_torch() == options
    monkeypatch.setattr(set_up, "TORCH_WITHOUT_CUDA", "http://127.0.0.1:9")
    assert set_up.index_of_torch() == []


def test_download_size_is_printed_before_the_download(index, monkeypatch):
    monkeypatch.setattr(set_up, "has_nvidia_gpu", lambda: False)

    def describe(*urls):
        return set_up.describe_download({"install": [{"download_info": {"url": url}} for url in urls]})

    assert describe("file:///torch.whl") == ""
    assert describe(f"{index}/known/a.whl", f"{index}/known/b.whl") == "2 packages, 6 MB, are downloaded."
    assert describe(f"{index}/known/a.whl", f"{index}/gone/b.whl") == "2 packages, at least 3 MB, are downloaded."
    assert "CUDA for torch" in describe(f"{index}/known/nvidia_cublas.whl")
