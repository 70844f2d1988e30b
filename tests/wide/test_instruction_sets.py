"""Instruction sets under qemu: detection of features, and the C++ tests on NEON, cross-compiled."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILERS = {"x86_64": "x86_64-linux-gnu-g++", "aarch64": "aarch64-linux-gnu-g++"}
EMULATOR = shutil.which("qemu-aarch64-static")

PRINT_FEATURES = """
#include <cstdio>
#include "runtime/processor_features.h"
int main() {
    const whet::ProcessorFeatures has = whet::read_processor_features();
#define PRINT(name) if (has.name) std::puts(#name);
    PRINT(avx2) PRINT(fma) PRINT(f16c) PRINT(avx512f) PRINT(avx512bw) PRINT(avx512dq) PRINT(avx512vl)
    PRINT(avx512bf16) PRINT(avx512vnni) PRINT(dotprod) PRINT(i8mm) PRINT(bf16)
}
"""
FEATURES = {
    "x86_64": {
        "max": "avx2 fma f16c",
        "max,-fma": "avx2 f16c",
        "max,-avx2": "fma f16c",
        "max,-xsave": "",  # the operating system saves no vectors
        "Haswell": "avx2 fma f16c",
        "Nehalem": "",
    },
    "aarch64": {
        "cortex-a72": "",
        "cortex-a76": "dotprod",
        "neoverse-n1": "dotprod",
        "max": "dotprod i8mm bf16",
    },
}


@pytest.mark.needs("aarch64")
@pytest.mark.parametrize("architecture", FEATURES)
def test_features_match_the_processor(architecture, tmp_path):
    (tmp_path / "features.cpp").write_text(PRINT_FEATURES)
    program, source = tmp_path / "features", ROOT / "cpp/runtime/processor_features.cpp"
    arguments = ["-std=c++20", "-static", "-I", ROOT / "cpp", tmp_path / "features.cpp", source, "-o", program]
    subprocess.run([COMPILERS[architecture], *arguments], check=True, timeout=300)
    for model, expected in FEATURES[architecture].items():
        command = [f"qemu-{architecture}-static", "-cpu", model, program]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (run.returncode, run.stdout.split()) == (0, expected.split()), (model, run.stderr)


@pytest.mark.needs("aarch64")
def test_cpp_tests_pass_on_neon(tmp_path):
    options = [
        "-DWHET_PYTHON=OFF",
        "-DWHET_CPP_TESTS=ON",
        f"-DCMAKE_CXX_COMPILER={COMPILERS['aarch64']}",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DCMAKE_EXE_LINKER_FLAGS=-static",
        f"-DCMAKE_CROSSCOMPILING_EMULATOR={EMULATOR}",
    ]
    cmake = shutil.which("cmake") or str(Path(sys.executable).parent / "cmake")
    subprocess.run([cmake, "-S", ROOT, "-B", tmp_path, *options], check=True, capture_output=True, timeout=300)
    built = subprocess.run([cmake, "--build", tmp_path, "-j", "2"], capture_output=True, text=True, timeout=900)
    assert built.returncode == 0, built.stdout[-3000:]
    for program in sorted(tmp_path.glob("*_test*")):
        # Kernels allocate nothing, so allocation_test runs only on the native instruction set; its
        # thousands of threads would take ten minutes in an emulator.
        if program.is_file() and not program.suffix and program.name != "allocation_test":
            run = subprocess.run([EMULATOR, program], capture_output=True, text=True, timeout=900)
            assert run.returncode in (0, 77), run.stdout[-3000:] + run.stderr[-3000:]
