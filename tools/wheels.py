"""Build the wheels of every platform that Zig can link without a vendor's SDK; `make wheels` runs this.

    python tools/wheels.py [PLATFORM ...]

PyPI's ziglang compiles the core once per platform and links it into two extensions: one for Python 3.11, and one on the
stable ABI for Python 3.12 and later. auditwheel checks the symbols of the C library and sets the tag of the platform.
The wheels are written to dist/, with their size and an SBOM in each. The default is every platform in PLATFORMS.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import ziglang
from sbom import add_sbom
from set_up import find_interpreters

ROOT = Path(__file__).resolve().parent.parent
WORK, DIST = ROOT / "build" / "wheels", ROOT / "dist"
BUILD_TOOLS = ("scikit-build-core", "nanobind", "numpy")
STABLE_ABI = ("3.12", "3.13", "3.14")  # any of these interpreters builds the wheel for all of them


@dataclass(frozen=True)
class Platform:
    """A platform: its tag in the name of a wheel, and how Zig, CMake and CPython call it."""

    tag: str
    target: str  # Zig's, with the oldest version of the C library
    processor: str
    soabi: str  # in the name of an extension for one version of Python

    @property
    def folder(self) -> Path:
        return WORK / self.tag


PLATFORMS = {
    platform.tag: platform
    for platform in (
        Platform("manylinux_2_28_x86_64", "x86_64-linux-gnu.2.28", "x86_64", "x86_64-linux-gnu"),
        Platform("manylinux_2_28_aarch64", "aarch64-linux-gnu.2.28", "aarch64", "aarch64-linux-gnu"),
        Platform("musllinux_1_2_x86_64", "x86_64-linux-musl", "x86_64", "x86_64-linux-musl"),
    )
}


def main(argv: list[str]) -> int:
    unknown = [name for name in argv if name not in PLATFORMS]
    if unknown:
        print(f"wheels.py: {unknown[0]} is not a platform; choose from {', '.join(PLATFORMS)}.", file=sys.stderr)
        return 2
    interpreters = find_interpreters(("3.11", *STABLE_ABI))
    stable = next((interpreters[version] for version in STABLE_ABI if version in interpreters), None)
    if "3.11" not in interpreters or stable is None:
        missing = "Python 3.11" if "3.11" not in interpreters else "Python 3.12 or later, for the stable ABI,"
        print(f"wheels.py: {missing} is not installed; install it with uv or pyenv.", file=sys.stderr)
        return 1
    pythons = [make_environment(interpreter) for interpreter in (interpreters["3.11"], stable)]
    DIST.mkdir(exist_ok=True)
    for name in argv or PLATFORMS:
        core = build_core(PLATFORMS[name])
        for python in pythons:
            wheel = build_wheel(PLATFORMS[name], python, core)
            print(f"{wheel.stat().st_size / 1e6:5.2f} MB  {wheel.relative_to(ROOT)}", flush=True)
    return 0


def run(*command: object, env: dict[str, str] | None = None) -> None:
    """Run a command; print its output only if it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **(env or {})},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{done.stdout}")


def make_environment(interpreter: str) -> Path:
    """Return the Python of an environment with the build tools for this interpreter."""
    folder = WORK / f"python-{Path(interpreter).resolve().name}"
    python = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        run(interpreter, "-m", "venv", "--clear", folder)
        run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", "constraints.txt", *BUILD_TOOLS)
        (folder / ".installed").touch()
    return python


def write_toolchain(platform: Platform) -> Path:
    """Write the CMake toolchain file of a platform, and return its path."""
    zig = Path(ziglang.__file__).with_name("zig")
    file = platform.folder / "zig.cmake"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        # A library: to link a program, Zig first compiles the C++ library.
        f"""set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR {platform.processor})
set(CMAKE_CXX_COMPILER {zig} c++)
set(CMAKE_CXX_COMPILER_TARGET {platform.target})
set(CMAKE_CXX_ARCHIVE_CREATE "{zig} ar qc <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "{zig} ranlib <TARGET>")
"""
    )
    return file


def build_core(platform: Platform, *options: str, target: str = "whet_core") -> Path:
    """Compile the core of a platform, and return its library."""
    folder = platform.folder / "core"
    toolchain = f"-DCMAKE_TOOLCHAIN_FILE={write_toolchain(platform)}"
    run("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", toolchain, "-DWHET_PYTHON=OFF", *options)
    run("cmake", "--build", folder, "--target", target)
    return folder / "libwhet_core.a"


def build_wheel(platform: Platform, python: Path, core: Path) -> Path:
    """Build the wheel of a platform for a Python and what it stands for, and return it."""
    folder = platform.folder / python.parent.parent.name
    shutil.rmtree(folder / "wheel", ignore_errors=True)
    defines = {"CMAKE_TOOLCHAIN_FILE": write_toolchain(platform), "WHET_CORE": core}
    options = [f"-Ccmake.define.{name}={value}" for name, value in defines.items()]
    cross = {
        "_PYTHON_HOST_PLATFORM": f"linux-{platform.processor}",
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-311-{platform.soabi}.so",
    }
    pip = [python, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    run(*pip, f"-Cbuild-dir={folder}", *options, "-w", folder / "wheel", ".", env=cross)
    [built] = (folder / "wheel").glob("*.whl")
    repaired = folder / "wheel" / "repaired"
    run("auditwheel", "repair", "--plat", platform.tag, "--only-plat", "-w", repaired, built)
    [wheel] = repaired.glob("*.whl")
    add_sbom(wheel, version("ziglang"))
    return Path(shutil.move(wheel, DIST / wheel.name))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
