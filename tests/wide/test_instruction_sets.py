"""Instruction sets under qemu: detection of features, the C++ tests on AArch64, and the size of its inner loops."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tools.predict_arm import UNITS, compile_unit, kernel_loops

ROOT = Path(__file__).parents[2]
COMPILERS = {"x86_64": "x86_64-linux-gnu-g++", "aarch64": "aarch64-linux-gnu-g++"}

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


# A processor for each unit. neon_dot differs from neon in the products only: there, only their tests run.
PROCESSORS = {"cortex-a72": "neon", "cortex-a76": "neon_dot", "max,sve=off,sme=off": "neon_i8mm"}


CMAKE = shutil.which("cmake") or str(Path(sys.executable).parent / "cmake")


def configure(folder: Path, *options: str | Path) -> None:
    options = ("-DWHET_PYTHON=OFF", "-DWHET_CPP_TESTS=ON", *options)
    subprocess.run([CMAKE, "-S", ROOT, "-B", folder, *options], check=True, capture_output=True, timeout=300)


def build(folder: Path, target: str = "all") -> None:
    command = [CMAKE, "--build", folder, "--target", target, "-j", "2"]
    built = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert built.returncode == 0, built.stdout[-3000:]


def run(*command: str | Path) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert ended.returncode in (0, 77), ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


@pytest.fixture(scope="module")
def aarch64_tests(tmp_path_factory):
    folder = tmp_path_factory.mktemp("aarch64")
    configure(
        folder,
        f"-DCMAKE_CXX_COMPILER={COMPILERS['aarch64']}",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DCMAKE_EXE_LINKER_FLAGS=-static",
    )
    build(folder)
    # Kernels allocate nothing, so allocation_test runs only on the native instruction set; its thousands of threads
    # would take ten minutes in an emulator.
    programs = {each.name: each for each in folder.glob("*_test*") if each.is_file() and not each.suffix}
    del programs["allocation_test"]
    return programs


@pytest.mark.needs("aarch64")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_cpp_tests_pass_on_aarch64(processor, aarch64_tests):
    unit, of_products = PROCESSORS[processor], ("linear_test", "weights_test")
    for name, program in aarch64_tests.items():
        if name.startswith("simd_test_"):
            if name == f"simd_test_{unit}":
                assert f"{unit}: 0 failures" in run("qemu-aarch64-static", "-cpu", processor, program)
        elif unit != "neon_dot" or name in of_products:
            printed = run("qemu-aarch64-static", "-cpu", processor, program)
            assert "instruction set" not in printed or f"instruction set: {unit}\n" in printed


@pytest.mark.needs("aarch64")
def test_products_have_the_same_bits_on_x86_and_aarch64(aarch64_tests, tmp_path):
    folder = ROOT / "build" / "release"  # in which make cpp-test-release compiles the tests
    if not (folder / "linear_test").exists():
        configure(folder := tmp_path, f"-DCMAKE_CXX_COMPILER={COMPILERS['x86_64']}")
    build(folder, "linear_test")
    expected = results_of(run(folder / "linear_test"))
    for processor in PROCESSORS:
        emulated = run("qemu-aarch64-static", "-cpu", processor, aarch64_tests["linear_test"])
        assert results_of(emulated) == expected, processor


@pytest.mark.needs("aarch64")
def test_matrix_products_of_bfloat16_have_other_bits(aarch64_tests):
    """WHET_BFMMLA=1 selects them, and is refused where they are missing."""
    program = aarch64_tests["linear_test"]
    for processor, unit in PROCESSORS.items():
        printed = run("qemu-aarch64-static", "-cpu", processor, "-E", "WHET_BFMMLA=1", program)
        if unit == "neon_i8mm":
            assert "0 failures" in printed
            assert results_of(printed) != results_of(run("qemu-aarch64-static", "-cpu", processor, program))
        else:
            assert "WHET_BFMMLA=1 is not available" in printed and f"this one has {unit}." in printed


def results_of(printed: str) -> str:
    (hash,) = re.findall("^results: (.*)$", printed, re.MULTILINE)
    return hash


# Instructions of the loop over blocks, as compiled by clang-19, by format and rows of a tile.
INSTRUCTIONS = {
    "neon_dot": {
        ("q8_0", 1): 86,
        ("q4_0", 1): 120,
        ("q4_k", 1): 160,
        ("q8_0", 8): 168,
        ("q4_0", 8): 195,
        ("q4_k", 8): 220,
    },
    "neon_i8mm": {
        ("q8_0", 1): 86,
        ("q4_0", 1): 121,
        ("q4_k", 1): 162,
        ("q8_0", 8): 128,
        ("q4_0", 8): 136,
        ("q4_k", 8): 166,
    },
}


@pytest.mark.needs("clang")
@pytest.mark.parametrize("unit", UNITS)
def test_inner_loops_do_not_grow(unit, tmp_path):
    program = compile_unit(unit, tmp_path)
    for (format, rows), limit in INSTRUCTIONS[unit].items():
        loop = kernel_loops(program, format, rows)[-1]
        assert 0.5 * limit < len(loop.instructions) <= limit, (format, rows, len(loop.instructions))
        assert not [text for text in loop.instructions if text.startswith(("bl", "fmov"))], (format, rows)
