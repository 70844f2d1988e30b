"""Sets up a virtual environment with Whet, built from this folder: what `make` runs before everything else.

    python3 tools/set_up.py VENV BUILD EXTRA

VENV is made if it is not there; the core is compiled in BUILD; EXTRA names the optional dependencies, as in
pyproject.toml. Whatever the machine lacks is named in one line before anything is downloaded. Runs on the standard
library alone.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
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
# pip too: Ubuntu 22.04 brings 22.0, which has no --dry-run, --report or -C.
BUILD_TOOLS = ["pip", "scikit-build-core", "nanobind", "numpy", "cmake", "ninja"]
TORCH_WITHOUT_CUDA = "https://download.pytorch.org/whl/cpu"


class SetUpError(Exception):
    """What is missing, in one line."""


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
    except subprocess.CalledProcessError as error:  # which has told what went wrong
        return error.returncode
    return 0


# ---------------------------------------------------------------- what the machine must have


def check_machine() -> None:
    """Name everything that is missing at once."""
    missing = [*missing_of_python(), *missing_compiler()]
    if missing:
        packages = " ".join(package for _, package in missing)
        raise SetUpError(
            f"Whet cannot be built here: {' and '.join(what for what, _ in missing)}. "
            f"On Debian or Ubuntu: apt-get install {packages}"
        )


def missing_of_python() -> list[tuple[str, str]]:
    """What this Python lacks, and the package that brings it."""
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
    """The command of the C++ compiler: CXX, or the first that CMake would look for."""
    given = os.environ.get("CXX")
    candidates = [shlex.split(given)] if given else [["c++"], ["g++"], ["clang++"]]
    return next((command for command in candidates if command and shutil.which(command[0])), None)


def missing_compiler() -> list[tuple[str, str]]:
    """The compiler, if there is none or it is too old."""
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
    """The environment's Python."""
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
    """False for an environment that was interrupted while it was made, or whose Python went away."""
    return (
        python.exists() and subprocess.run([str(python), "-c", "import pip"], stderr=subprocess.DEVNULL).returncode == 0
    )


def ask(python: Path, code: str) -> str:
    return subprocess.run([str(python), "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def run(command: list[str], **env: str) -> None:
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **env})


# ---------------------------------------------------------------- what is installed


def pip_install(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", "constraints.txt"]


def install(python: Path, *packages: str) -> None:
    run([*pip_install(python), *packages])


def install_whet(python: Path, build: Path, extra: str) -> None:
    """Editable, with the build tools that are installed: pip would isolate each build, and compile everything anew."""
    whet = f".[{extra}]" if extra else "."
    options = ["--no-build-isolation", "-C", f"build-dir={build}", *index_of_torch()]
    env = {"PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]])}
    env["CXX"] = shlex.join(find_compiler() or [])  # or scikit-build-core would ask for the one that compiled Python
    command = [*pip_install(python), *options, "-e", whet]
    planned = subprocess.run(
        [*command, "--dry-run", "--report", "-"],
        check=True,
        cwd=ROOT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
    )
    told = describe_download(json.loads(planned.stdout))
    if told:
        print(told, flush=True)
    run(command, **env)


def has_nvidia_gpu() -> bool:
    return Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None


def index_of_torch() -> list[str]:
    """PyTorch's index of CPU builds where no NVIDIA GPU is: from PyPI, torch comes with gigabytes of CUDA."""
    if has_nvidia_gpu():
        return []
    try:
        request = urllib.request.Request(f"{TORCH_WITHOUT_CUDA}/torch/", method="HEAD")
        with urllib.request.urlopen(request, timeout=3):
            return ["--extra-index-url", TORCH_WITHOUT_CUDA]
    except OSError:
        return []


def describe_download(report: dict) -> str:
    """What the packages of pip's report take over the network, where the index tells."""
    urls = [package["download_info"]["url"] for package in report["install"]]
    remote = [url for url in urls if url.startswith("http")]
    if not remote:
        return ""
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        sizes = list(pool.map(size_of, remote))
    told = "at least " if None in sizes else ""
    text = f"{len(remote)} packages, {told}{sum(size or 0 for size in sizes) / 1e6:,.0f} MB, are downloaded"
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
