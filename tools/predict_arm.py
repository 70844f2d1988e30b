"""Predicts cycles of the quantised products on AArch64, next to llama.cpp's, by llvm-mca.

    python tools/predict_arm.py [FOLDER]     FOLDER: llama.cpp's sources (in vendor/ of llama-cpp-python's sdist)

Compiles the kernels of each unit with clang-19 and prints a table: cycles for a block of 32 inputs x 16 outputs and one
row. The loop over blocks and the loops around it count, each divided by how often it runs. llvm-mca models pipelines,
but no caches and no branches: ratios are worth more than cycles. Needs clang-19 and llvm-19.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FLAGS = [
    "--target=aarch64-linux-gnu",
    "-O3",
    "-DNDEBUG",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-Wno-unused-function",
]
UNITS = {
    "neon_dot": "-mcpu=generic+dotprod",
    "neon_i8mm": "-mcpu=generic+dotprod+i8mm+bf16",
}
FORMATS = {"q8_0": "kQ8_0Layout", "q4_0": "kQ4_0Layout", "q4_k": "kQ4_KLayout"}
PROCESSORS = {"neon_dot": ["neoverse-n1", "neoverse-v2", "apple-m1"], "neon_i8mm": ["neoverse-v2", "apple-m2"]}
KERNELS = """
#include "kernels/linear_quantised.h"
namespace whet::WHET_ISA {
extern void (*const table[])(const LinearTask&);
void (*const table[])(const LinearTask&) = {linear_q8_0, linear_q4_0, linear_q4_k};
}
"""


class Loop(NamedTuple):
    """A loop of a function: its addresses, its own instructions (without the inner loops), and its inner loops."""

    first: int
    last: int
    instructions: list[str]
    inner: list["Loop"]

    @property
    def products(self) -> int:
        """Number of dot and matrix products, of inner loops too."""
        own = sum(1 for text in self.instructions if re.match(r"[su]+dot|[su]+mmla", text))
        return own + sum(loop.products for loop in self.inner)


def compile_unit(unit: str, folder: Path) -> Path:
    """Compile the kernels of a unit to an object file."""
    source, program = folder / "kernels.cpp", folder / f"{unit}.o"
    source.write_text(KERNELS)
    options = [
        "-std=c++20",
        "-ffp-contract=off",
        "-fno-math-errno",
        f"-DWHET_ISA={unit}",
        UNITS[unit],
        "-I",
        ROOT / "cpp",
    ]
    subprocess.run(["clang++-19", *FLAGS, *options, "-c", source, "-o", program], check=True)
    return program


def _functions(program: Path) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    command = ["llvm-objdump-19", "-d", "-C", "--no-show-raw-insn", program]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for part in re.split(r"\n\n(?=[0-9a-f]+ <)", listing):
        lines = re.findall(r"^\s*([0-9a-f]+):\s+(\S.*)$", part, re.MULTILINE)
        if name := re.search(r"^[0-9a-f]+ <(.*)>:$", part, re.MULTILINE):
            yield name[1], [(int(at, 16), text) for at, text in lines]


def _loops(code: list[tuple[int, str]]) -> list[Loop]:
    """The outermost loops of a function: ranges that end in a branch back to their first address."""
    start, end = code[0][0], code[-1][0]
    ranges: dict[int, int] = {}
    for at, text in code:
        if (target := re.match(r"(?:b|b\.\w+|cbn?z|tbn?z)\s.*?0x([0-9a-f]+)", text)) and start <= int(
            target[1], 16
        ) < at:
            ranges[int(target[1], 16)] = max(at, ranges.get(int(target[1], 16), 0))

    def nest(within: list[tuple[int, int]]) -> list[Loop]:
        outer = [r for r in within if not any(o != r and o[0] <= r[0] and r[1] <= o[1] for o in within)]
        loops = []
        for first, last in outer:
            inner = nest([r for r in within if r != (first, last) and first <= r[0] and r[1] <= last])
            own = [
                re.sub(r"\s*(//|<).*", "", text)
                for at, text in code
                if first <= at <= last and not any(loop.first <= at <= loop.last for loop in inner)
            ]
            loops.append(Loop(first, last, own, inner))
        return loops

    return nest([(a, b) for a, b in ranges.items() if b <= end])


def innermost_products(program: Path, function: str, products: int | None = None) -> list[Loop]:
    """The path from the outermost to the innermost loop with the most products, in the function whose name matches.

    ``products`` selects the innermost loop by its number of products.
    """

    def paths(loops: list[Loop]) -> Iterator[list[Loop]]:
        for loop in loops:
            if not any(each.products for each in loop.inner):
                yield [loop]
            yield from ([loop, *path] for path in paths(loop.inner))

    for name, code in _functions(program):
        if re.search(function, name):
            found = [path for path in paths(_loops(code)) if path[-1].products]
            if found and products is None:
                return max(found, key=lambda path: path[-1].products)
            return next(path for path in found if path[-1].products == products)
    raise LookupError(f"{program.name} has no function {function} with a loop of products")


def kernel_loops(program: Path, format: str, rows: int) -> list[Loop]:
    """The loops of one of Whet's tiles of ``rows`` rows."""
    return innermost_products(program, rf"quantised_tile<.*{FORMATS[format]}.*, {rows}, 1>\(")


def cycles(instructions: list[str], processor: str) -> float:
    """Cycles of one iteration, by llvm-mca."""
    text = "\n".join(
        re.sub(r"0x[0-9a-f]+$", "." if re.match(r"(b|cb|tb)", each) else r"\g<0>", each) for each in instructions
    )
    command = [
        "llvm-mca-19",
        "-mtriple=aarch64-linux-gnu",
        f"-mcpu={processor}",
        "-mattr=+i8mm,+bf16",
        "-iterations=100",
    ]
    run = subprocess.run(command, input=text + "\n", check=True, capture_output=True, text=True)
    return int(re.search(r"Total Cycles:\s+(\d+)", run.stdout)[1]) / 100


def _innermost(loop: Loop) -> int:
    inner = [each for each in loop.inner if each.products]
    return sum(map(_innermost, inner)) or 1


def _cycles_of_blocks(loop: Loop, processor: str) -> float:
    """Cycles of 8 iterations of each innermost loop, and one of those around them."""
    inner = [each for each in loop.inner if each.products]
    own = cycles(loop.instructions, processor)
    return own + sum(_cycles_of_blocks(each, processor) for each in inner) if inner else 8 * own


def _whet(program: Path, format: str, rows: int, processor: str) -> float:
    """Cycles per block and row: a pass has 8 blocks and, with 8 rows, 4 parts, in a loop or unrolled."""
    loop = kernel_loops(program, format, rows)[0]
    parts, unrolled = {1: 1, 8: 4}[rows], _innermost(loop)
    total = cycles(loop.instructions, processor)
    for each in loop.inner:
        if each.products:
            total += parts / unrolled * _cycles_of_blocks(each, processor)
    return total / (8 * rows)


def _llama(program: Path, processor: str, name: str, runs: int, scale: float, products: int | None = None) -> float:
    """Cycles scaled to 32 inputs x 16 outputs x 1 row; the loop around the innermost one counts once in ``runs``."""
    *outer, inner = innermost_products(program, name, products)
    total = cycles(inner.instructions, processor)
    if runs > 1:
        total += cycles(outer[-1].instructions, processor) / runs
    return total * scale


# Name of the function, innermost iterations per outer one (1: the innermost loop goes over all blocks), and the factor
# from one iteration to 32 x 16 x 1 products. q4_0 has a tile of 16 rows too; 8 rows take the one of 4, by its products.
_LLAMA = {
    ("q8_0", 1): [("gemv_q8_0_4x4_q8_0", 1, 4.0), ("gemv_q8_0_4x8_q8_0", 1, 4.0)],
    ("q4_0", 1): [("gemv_q4_0_4x4_q8_0", 1, 4.0), ("gemv_q4_0_4x8_q8_0", 1, 4.0)],
    ("q4_k", 1): [("gemv_q4_K_8x4_q8_K", 4, 1.0), ("gemv_q4_K_8x8_q8_K", 4, 1.0)],
    ("q8_0", 8): [("gemm_q8_0_4x4_q8_0", 1, 1.0), ("gemm_q8_0_4x8_q8_0", 1, 1.0)],
    ("q4_0", 8): [("gemm_q4_0_4x4_q8_0", 1, 1.0, 32), ("gemm_q4_0_4x8_q8_0", 1, 1.0, 16)],
    ("q4_k", 8): [("gemm_q4_K_8x4_q8_K", 4, 0.25), ("gemm_q4_K_8x8_q8_K", 4, 0.25)],
}


def _compile_llama(unit: str, sources: Path, folder: Path) -> Path:
    ggml = next(sources.rglob("ggml-cpu/arch/arm/repack.cpp")).parents[4]
    program = folder / f"llama-{unit}.o"
    paths = [f"-I{ggml / each}" for each in ("include", "src", "src/ggml-cpu")]
    source = ggml / "src/ggml-cpu/arch/arm/repack.cpp"
    subprocess.run(
        ["clang++-19", *FLAGS, "-std=c++17", UNITS[unit] + "+fp16", *paths, "-c", source, "-o", program], check=True
    )
    return program


def main() -> None:
    """Print the table."""
    sources = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    print("| format | rows | unit | processor | Whet | llama.cpp |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        programs = {unit: compile_unit(unit, folder) for unit in UNITS}
        peers = {unit: _compile_llama(unit, sources, folder) for unit in UNITS} if sources else {}
        for rows in (1, 8):
            for format in FORMATS:
                for unit, program in programs.items():
                    for processor in PROCESSORS[unit]:
                        whet = _whet(program, format, rows, processor)
                        builds = _LLAMA[format, rows][: 2 if unit == "neon_i8mm" else 1] if peers else []
                        best = min((_llama(peers[unit], processor, *build) for build in builds), default=None)
                        print(f"| {format} | {rows} | {unit} | {processor} | {whet:.1f} | {best and f'{best:.1f}'} |")


if __name__ == "__main__":
    main()
