"""NEON kernels, cross-compiled and run under qemu: the C++ tests, and bit-identical results."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")


@pytest.mark.needs("aarch64")
def test_cpp_tests_pass_on_neon(tmp_path):
    assert COMPILER and EMULATOR
    options = [
        "-DWHET_PYTHON=OFF",
        "-DWHET_CPP_TESTS=ON",
        f"-DCMAKE_CXX_COMPILER={COMPILER}",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DCMAKE_EXE_LINKER_FLAGS=-static",
        f"-DCMAKE_CROSSCOMPILING_EMULATOR={EMULATOR}",
    ]
    cmake = shutil.which("cmake") or str(Path(__import__("sys").executable).parent / "cmake")
    subprocess.run([cmake, "-S", ROOT, "-B", tmp_path, *options], check=True, capture_output=True, timeout=300)
    built = subprocess.run([cmake, "--build", tmp_path, "-j", "2"], capture_output=True, text=True, timeout=900)
    assert built.returncode == 0, built.stdout[-3000:]
    for program in sorted(tmp_path.glob("*_test*")):
        # Kernels allocate nothing, so allocation_test runs only on the native instruction set; its
        # thousands of threads would take ten minutes in an emulator.
        if program.is_file() and not program.suffix and program.name != "allocation_test":
            run = subprocess.run([EMULATOR, program], capture_output=True, text=True, timeout=900)
            assert run.returncode in (0, 77), run.stdout[-3000:] + run.stderr[-3000:]
