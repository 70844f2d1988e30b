"""Cross-compile wheels with PyPI's ziglang; `make wheels` runs this.

    python tools/wheels.py TARGET ...

Links the core that was compiled in build/TARGET (tools/zig.cmake) into a wheel for Python 3.11 and a wheel on the
stable ABI for Python 3.12 and later, checks them, adds their lists of contents, and prints their sizes. The wheels are
written to build/wheels/dist.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from interpreters import find_interpreters
from sbom import add_sbom
from set_up import BUILD_TOOLS

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheels"
DIST = WORK / "dist"
BIN = Path(sys.executable).parent
ABIS = {"3.11": "cp311", "3.12": "abi3"}


class Target(NamedTuple):
    """A target of zig in the terms of pip and Python."""

    name: str  # of zig
    platform: str  # in the tag of a wheel
    suffix: str  # of an extension, after cpython-3XX-

    @property
    def is_linux(self) -> bool:
        return self.suffix != "darwin"


def parse_target(name: str) -> Target:
    """Translate a target of zig, for example x86_64-linux-gnu.2.28."""
    match = re.fullmatch(r"(x86_64|aarch64)-(linux-gnu|linux-musl|macos)(?:\.(\d+)\.(\d+))?", name)
    if match is None:
        raise SystemExit(f"{name} is not a target of zig for Linux or macOS, such as x86_64-linux-gnu.2.28")
    arch, system, major, minor = match.groups()
    if system == "macos":
        arch = "arm64" if arch == "aarch64" else arch
        return Target(name, f"macosx_{major}_{minor}_{arch}", "darwin")
    label = f"manylinux_{major}_{minor}" if system == "linux-gnu" else "musllinux_1_2"
    return Target(name, f"{label}_{arch}", f"{arch}-{system}")


def main(names: list[str]) -> None:
    targets = [parse_target(name) for name in names]
    installed = find_interpreters()
    if missing := ABIS.keys() - installed:
        raise SystemExit(f"wheels.py: Python {' and '.join(sorted(missing))} is not installed")
    pythons = {version: make_environment(version, installed[version]) for version in ABIS}
    for target in targets:
        unpack_numpy_headers(target)
    DIST.mkdir(parents=True, exist_ok=True)
    jobs = [(target, version, pythons[version]) for target in targets for version in ABIS]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for wheel in pool.map(lambda job: build_wheel(*job), jobs):
            print(f"{wheel.stat().st_size / 1e6:.2f} MB  {wheel.name}", flush=True)


def run(*command: object, **env: object) -> str:
    """Run a command and return its output, which is printed if it fails."""
    given = {**os.environ, **{name: str(value) for name, value in env.items()}}
    text = [str(part) for part in command]
    done = subprocess.run(text, cwd=ROOT, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(text)}: exit status {done.returncode}\n{done.stdout}")
    return done.stdout


def make_environment(version: str, interpreter: str) -> Path:
    """Return the Python of an environment that has the tools of the build; copy the headers of this version."""
    python = WORK / f"venv-{version}" / "bin" / "python"
    if not python.exists():
        run(interpreter, "-m", "venv", python.parent.parent)
    run(python, "-m", "pip", "install", "-q", "-c", "constraints.txt", *BUILD_TOOLS)
    code = "import sysconfig as s; print(s.get_path('include'), s.get_config_var('MULTIARCH'))"
    headers, multiarch = subprocess.check_output([python, "-c", code], text=True).split()
    copied = shutil.copytree(headers, WORK / f"include-{version}", dirs_exist_ok=True)
    # Debian's pyconfig.h includes one of the target's; all 64-bit systems except Windows have the same sizes.
    config = Path(headers).parent / multiarch / f"python{version}" / "pyconfig.h"
    if config.exists():
        shutil.copy(config, copied)
    return python


def unpack_numpy_headers(target: Target) -> Path:
    """Return the folder of NumPy's headers for a target: they define the sizes of its types."""
    folder = WORK / "numpy" / target.name
    include = folder / "numpy" / "_core" / "include"
    if not include.exists():
        where = ["--python-version", "3.12", "--platform", target.platform, "--only-binary", ":all:"]
        pip = [BIN / "python", "-m", "pip", "download", "-q", "--no-deps", "-c", "constraints.txt"]
        run(*pip, *where, "-d", folder, "numpy")
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(folder, [name for name in packed.namelist() if "/_core/include/" in name])
            wheel.unlink()
    return include


def build_wheel(target: Target, version: str, python: Path) -> Path:
    """Build, check and label a wheel, and return its path."""
    tag, abi = f"cp{version.replace('.', '')}", ABIS[version]
    folder = WORK / f"{target.platform}-{abi}"
    platform = f"linux_{target.name.partition('-')[0]}" if target.is_linux else target.platform
    defines = {
        "CMAKE_TOOLCHAIN_FILE": ROOT / "tools/zig.cmake",
        "WHET_ZIG": BIN / "python-zig",
        "WHET_TARGET": target.name,
        "WHET_CORE": ROOT / "build" / target.name / "libwhet_core.a",
        "Python_INCLUDE_DIR": WORK / f"include-{version}",
        "Python_NumPy_INCLUDE_DIR": unpack_numpy_headers(target),
    }
    options = [f"-Ccmake.define.{name}={value}" for name, value in defines.items()]
    options += [f"-Cwheel.tags={tag}-{abi}-{platform}", f"-Cbuild-dir={folder}/build", "-Cinstall.strip=false"]
    path = os.pathsep.join([str(python.parent), str(BIN), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory() as repaired:
        pip = [python, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", made]
        run(*pip, *options, ".", PATH=path, SETUPTOOLS_EXT_SUFFIX=f".cpython-{tag[2:]}-{target.suffix}.so")
        (built,) = Path(made).glob("*.whl")
        if target.is_linux:  # label it by the oldest C library that has its symbols
            run(BIN / "auditwheel", "repair", "--only-plat", "-w", repaired, built, PATH=path)
            (built,) = Path(repaired).glob("*.whl")
        wheel = Path(shutil.move(built, DIST / built.name))
    if abi == "abi3":
        run(BIN / "abi3audit", "--strict", wheel)
    add_sbom(wheel, libcxx=clang_version())
    return wheel


@functools.cache
def clang_version() -> str:
    """Return the version of zig's Clang, and of its C++ library."""
    printed = subprocess.check_output([BIN / "python-zig", "c++", "--version"], text=True)
    return re.findall(r"\d+\.\d+\.\d+", printed)[0]


if __name__ == "__main__":
    main(sys.argv[1:])
