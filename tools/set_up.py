"""Set up a virtual environment with Whet, built from this folder; `make` runs this first.

    python3 tools/set_up.py VENV BUILD EXTRA

VENV is created if it does not exist; the core is compiled in BUILD; EXTRA names the optional dependencies, as in
pyproject.toml. Missing prerequisites are printed in one line before anything is downloaded. Needs only the standard
library.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = "{}.{}".format(*sys.version_info)
# pip too: Debian 12 has 23.0, which lacks -C.
BUILD_TOOLS = ["pip", "scikit-build-core", "nanobind", "numpy", "cmake", "ninja"]
LLAMA_CPP = "llama-cpp-python"
TORCH_WITHOUT_CUDA = "https://download.pytorch.org/whl/cpu"


class SetUpError(Exception):
    """Missing prerequisites, in one line."""


def main(argv: list[str]) -> int:
    if len(argv) != 3 or argv[0].startswith("-"):
        print(__doc__)
        return 0 if argv in (["-h"], ["--help"]) else 2
    try:
        check_machine()
        venv = Path(argv[0]).absolute()
        python = make_venv(venv)
        install(python, *BUILD_TOOLS)
        install_whet(python, Path(argv[1]).absolute(), argv[2])
    except SetUpError as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:  # the command has printed its error
        return error.returncode
    return 0


# ---------------------------------------------------------------- prerequisites


def check_machine() -> None:
    """Raise a SetUpError that lists all missing prerequisites."""
    missing = [*missing_of_python(), *missing_compiler()]
    if missing:
        packages = " ".join(package for _, package in missing)
        raise SetUpError(
            f"Whet cannot be built here: {' and '.join(what for what, _ in missing)}. "
            f"On Debian or Ubuntu: apt-get install {packages}"
        )


def missing_of_python() -> list[tuple[str, str]]:
    """Return the missing parts of this Python, each with its Debian package."""
    missing = []
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        missing.append((f"{sys.executable} has no ensurepip", f"python{VERSION}-venv"))
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        missing.append((f"there is no {header}", f"python{VERSION}-dev"))
    return missing


def find_compiler() -> list[str] | None:
    """Return the command of the C++ compiler: CXX, or the first that CMake would find; None: there is none."""
    given = os.environ.get("CXX")
    candidates = [shlex.split(given)] if given else [["c++"], ["g++"], ["clang++"]]
    return next((command for command in candidates if command and shutil.which(command[0])), None)


def missing_compiler() -> list[tuple[str, str]]:
    """Return the compiler with its Debian package, if it is missing or too old."""
    command = find_compiler()
    if command is None:
        return [(f"there is no C++ compiler ({os.environ.get('CXX') or 'c++, g++ or clang++'})", "g++")]
    macros = subprocess.run(
        [*command, "-dM", "-E", "-x", "c++", os.devnull], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout
    defined = dict(re.findall(r"#define (__clang_major__|__GNUC__) (\d+)", macros))
    kind, macro = ("Clang", "__clang_major__") if "__clang_major__" in defined else ("GNU", "__GNUC__")
    minimum = minimum_compilers()
    if int(defined.get(macro, 0)) >= minimum[kind]:
        return []
    found = f"{kind} {defined[macro]}" if macro in defined else "neither GCC nor Clang"
    return [(f"{' '.join(command)} is {found}, not GCC {minimum['GNU']} or Clang {minimum['Clang']} or later", "g++")]


def minimum_compilers() -> dict[str, int]:
    lines = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    return {kind: int(version) for kind, version in re.findall(r"set\(WHET_MINIMUM_(\w+) (\d+)\)", lines)}


# ---------------------------------------------------------------- the environment


def make_venv(folder: Path) -> Path:
    """Create the environment unless it exists, and return its Python."""
    python = folder / "bin" / "python"
    if not has_pip(python):
        run([sys.executable, "-m", "venv", "--clear", str(folder)])
    found = ask(python, "import sys; print('{}.{}'.format(*sys.version_info))")
    if found != VERSION:
        raise SetUpError(
            f"{folder} has Python {found}, and {sys.executable} is {VERSION}. "
            "Remove the folder first (make clean), or name its Python: make PYTHON=..."
        )
    return python


def has_pip(python: Path) -> bool:
    """Whether the environment is usable: its creation was not interrupted, and its Python still exists."""
    return (
        python.exists() and subprocess.run([str(python), "-c", "import pip"], stderr=subprocess.DEVNULL).returncode == 0
    )


def ask(python: Path, code: str) -> str:
    return subprocess.run([str(python), "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def run(command: list[str], **env: str) -> None:
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **env})


# ---------------------------------------------------------------- installation


def pip_install(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", "constraints.txt"]


def install(python: Path, *packages: str) -> None:
    run([*pip_install(python), *packages])


def install_whet(python: Path, build: Path, extra: str) -> None:
    """Install Whet editable, with the installed build tools: an isolated build would recompile everything."""
    whet = f".[{extra}]" if extra else "."
    options = ["--no-build-isolation", "-C", f"build-dir={build}", *index_of_torch()]
    env = {"PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]])}
    env["CXX"] = shlex.join(find_compiler() or [])  # otherwise scikit-build-core requires the compiler of Python
    command = [*pip_install(python), *options, "-e", whet]
    planned = subprocess.run(
        [*command, "--dry-run", "--report", "-"],
        check=True,
        cwd=ROOT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
    )
    report = json.loads(planned.stdout)
    download = describe_download(report)
    if download:
        print(download, flush=True)
    if any(package["metadata"]["name"].replace("_", "-") == LLAMA_CPP for package in report["install"]):
        run([*pip_install(python), LLAMA_CPP], **env, **llama_cpp_options())
    run(command, **env)


def llama_cpp_options() -> dict[str, str]:
    """Return the environment that compiles llama.cpp without AMX: GCC 12 compiles its AMX products to instructions that
    the processor rejects.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return {}
    flags = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    return {"CFLAGS": flags, "CXXFLAGS": flags}


def has_nvidia_gpu() -> bool:
    return Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None


def index_of_torch() -> list[str]:
    """Return pip's option for PyTorch's CPU builds if there is no NVIDIA GPU: PyPI's torch has gigabytes of CUDA."""
    if has_nvidia_gpu():
        return []
    try:
        request = urllib.request.Request(f"{TORCH_WITHOUT_CUDA}/torch/", method="HEAD")
        with urllib.request.urlopen(request, timeout=3):
            return ["--extra-index-url", TORCH_WITHOUT_CUDA]
    except OSError:
        return []


def describe_download(report: dict) -> str:
    """Return a line with the download size of the packages in pip's report, as far as the index reports sizes."""
    urls = [package["download_info"]["url"] for package in report["install"]]
    remote = [url for url in urls if url.startswith("http")]
    if not remote:
        return ""
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        sizes = list(pool.map(size_of, remote))
    bound = "at least " if None in sizes else ""
    text = f"{len(remote)} packages, {bound}{sum(size or 0 for size in sizes) / 1e6:,.0f} MB, are downloaded"
    if any("/nvidia_" in url for url in remote) and not has_nvidia_gpu():
        text += f", CUDA for torch among them: {TORCH_WITHOUT_CUDA} has no torch for this Python, or does not answer"
    return text + "."


def size_of(url: str) -> int | None:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, TypeError):
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
