"""The wheels of `make wheels`, installed and run; `make wheels-test` runs this.

x86-64: empty environments of every installed interpreter, then the tests of primitives and engine on the wheel, and its
bits on each instruction set. AArch64: the tests of primitives in Debian's Python under qemu. macOS: the headers for the
dynamic linker.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from interpreters import find_interpreters  # noqa: E402
from wheels import DIST, run  # noqa: E402

WORK = DIST.parent / "tests"
MAX_BYTES = {"x86_64": 3_000_000, "arm64": 3_300_000}
"""By processor: AArch64 has three instruction sets of full-width kernels."""
SMOKE = ROOT / "tests" / "wheel_smoke.py"


def main() -> None:
    wheels = sorted(DIST.glob("*.whl"))
    assert wheels, f"{DIST} has no wheels; run `make wheels`"
    for wheel in wheels:
        limit = MAX_BYTES["x86_64" if "x86_64" in wheel.name else "arm64"]
        assert wheel.stat().st_size <= limit, f"{wheel.name} has {wheel.stat().st_size} bytes"
    for step in (check_macos, check_x86_64, check_bits, check_package_managers, check_aarch64):
        step()


def wheel_for(version: str, platform: str) -> Path:
    tag = "cp311-cp311" if version == "3.11" else "cp312-abi3"
    (wheel,) = DIST.glob(f"*-{tag}-{platform}.whl")
    return wheel


# ---------------------------------------------------------------- macOS


def check_macos() -> None:
    """Check the oldest system, the libraries and the exported symbol of each extension for macOS."""
    objdump = shutil.which("llvm-objdump-19")
    assert objdump, "llvm-objdump-19 is missing: apt-get install llvm-19"
    for wheel in sorted(DIST.glob("*-macosx_*.whl")):
        major, minor, arch = re.findall(r"macosx_(\d+)_(\d+)_(\w+)\.whl", wheel.name)[0]
        extension = unpack_extension(wheel)
        headers = run(objdump, "--macho", "--private-headers", extension)
        libraries = re.findall(r"^\s+name (\S+\.dylib)", headers, re.MULTILINE)
        oldest = re.findall(r"(?:LC_VERSION_MIN_MACOSX\s+cmdsize \d+\s+version|minos) (\d+\.\d+)", headers)
        exported = re.findall(r"\s(_\S+)$", run(objdump, "--macho", "--exports-trie", extension), re.MULTILINE)
        machine = {"arm64": "ARM64", "x86_64": "X86_64"}[arch]
        assert machine in headers and oldest[0] == f"{major}.{minor}", (wheel.name, oldest)
        assert libraries == ["/usr/lib/libSystem.B.dylib"], (wheel.name, libraries)
        # zig also exports its Mach-O header and the allocation operators.
        assert [name for name in exported if not re.match("__Z(n|d)|__mh_|___dso", name)] == ["_PyInit__core"], exported
        print(f"{wheel.name}: macOS {oldest[0]}, {', '.join(libraries)}", flush=True)


def unpack_extension(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".so"))
        return Path(packed.extract(name, WORK / wheel.stem))


# ---------------------------------------------------------------- x86-64


def check_x86_64() -> None:
    """Install the wheel into empty environments; run the tests of primitives and engine on it."""
    for version, interpreter in find_interpreters().items():
        python = WORK / f"x86_64-{version}" / "bin" / "python"
        shutil.rmtree(python.parent.parent, ignore_errors=True)
        run(interpreter, "-m", "venv", python.parent.parent)
        run(python, "-m", "pip", "install", "-q", wheel_for(version, "manylinux_*_x86_64"))
        pip = run(python, "-m", "pip", "--version").split()[1]
        print(f"Python {version}, pip {pip}: {run(python, SMOKE)}", end="", flush=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert version == "3.11", f"Python {version} has no packages for tests; 3.11 has"
    python = WORK / "x86_64-3.11" / "bin" / "python"
    # The packages of the tests follow the wheel on the path, without .pth files: the editable Whet is not found.
    (site,) = (python.parent.parent / "lib").glob("python*/site-packages")
    (site / "tests.pth").write_text(f"{next(Path(sys.prefix, 'lib').glob('python*/site-packages'))}\n")
    assert str(site) in run(python, "-c", "import whet; print(whet.__file__)")
    print(run(python, "-m", "pytest", "-n", "auto", "-m", "not timing", "tests/ops", "tests/engine").splitlines()[-1])


def check_bits() -> None:
    """Compare logits, tokens and a LoRA run of the wheel and of the compiler's build, on each instruction set."""
    wheel, built = WORK / "x86_64-3.11" / "bin" / "python", Path(sys.executable)
    compilers = [
        run(each, "-c", "import whet; print(whet.build_info()['compiler'])").strip() for each in (wheel, built)
    ]
    assert compilers[0] != compilers[1], compilers
    for isa in run(built, "-c", "import whet; print(whet.build_info()['usable_instruction_sets'])").split():
        results = []
        for name, python in (("wheel", wheel), ("built", built)):
            folder = WORK / "bits" / isa / name
            shutil.rmtree(folder, ignore_errors=True)
            env = {"WHET_ISA": isa, "PYTHONPATH": ROOT, "PYTHONHASHSEED": 0}  # the order of sets in files
            run(python, "web/test/fixtures.py", folder, **env)
            run(python, "-m", "whet", "train", "sft", *lora_run(folder), **env)
            files = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if is_result(path)}
            results.append({name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()})
        wheel_has, built_has = results
        different = sorted(
            str(name) for name in wheel_has.keys() | built_has if wheel_has.get(name) != built_has.get(name)
        )
        assert not different, f"{isa}: {compilers[0]} and {compilers[1]} have different results in {different}"
        print(f"{isa}: {len(wheel_has)} files with the same bits from {' and '.join(compilers)}", flush=True)


def lora_run(folder: Path) -> list[object]:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": [5, {i}], "completion": [{i + 1}, 7, 9]}}\n' for i in range(10, 30)))
    return [
        "--model",
        folder / "folder",
        "--data",
        rows,
        "--lora-rank",
        "4",
        "--steps",
        "4",
        "--output-dir",
        folder / "run",
    ]


def is_result(path: Path) -> bool:
    """Whether a file contains only numbers: no times, no names of folders."""
    return path.is_file() and ("run" not in path.parts or path.name == "adapter_model.safetensors")


def check_package_managers() -> None:
    """Run the command by uv and pipx, which create environments for it."""
    venv = WORK / "managers"
    run(sys.executable, "-m", "venv", venv)
    run(venv / "bin" / "python", "-m", "pip", "install", "-q", "uv", "pipx")
    wheel = wheel_for("3.11", "manylinux_*_x86_64")
    home = {"PIPX_HOME": WORK / "pipx", "UV_CACHE_DIR": WORK / "uv", "UV_PYTHON": sys.executable}
    run(venv / "bin" / "uv", "venv", "-q", "--clear", WORK / "uv-venv", **home)
    run(venv / "bin" / "uv", "pip", "install", "-q", "--python", WORK / "uv-venv", wheel, **home)
    for command in (
        [WORK / "uv-venv" / "bin" / "whet"],
        [venv / "bin" / "uvx", "--from", wheel, "whet"],
        [venv / "bin" / "pipx", "run", "--spec", wheel, "whet"],
    ):
        printed = run(*command, "--version", **home).splitlines()[-1]
        assert printed.startswith("whet "), printed
        print(f"{Path(command[0]).name}: {printed}", flush=True)


# ---------------------------------------------------------------- AArch64

PACKAGES = ("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libssl3", "libffi8", "libbz2-1.0", "liblzma5")
PYTHON_PACKAGES = ("libsqlite3-0", "libuuid1", "libpython3.11-minimal", "libpython3.11-stdlib", "python3.11-minimal")
TEST_PACKAGES = ("numpy", "pytest", "pytest-rerunfailures", "hypothesis")


def check_aarch64() -> None:
    """Run the tests of the primitives in Debian's Python for AArch64, under qemu, on each instruction set."""
    root = WORK / "aarch64"
    if not (root / "usr" / "bin" / "python3.11").exists():
        unpack_debian(root, *PACKAGES, *PYTHON_PACKAGES)
    site = WORK / "aarch64-site"
    shutil.rmtree(site, ignore_errors=True)
    wheel = wheel_for("3.11", "manylinux_*_aarch64")
    platforms = {
        wheel.stem.rpartition("-")[2],
        "manylinux_2_28_aarch64",
        "manylinux2014_aarch64",
    }  # pip does not expand them
    where = [option for platform in sorted(platforms) for option in ("--platform", platform)]
    where += ["--python-version", "3.11", "--only-binary", ":all:"]
    run(sys.executable, "-m", "pip", "install", "-q", *where, "--target", site, wheel, *TEST_PACKAGES)
    env = {"PYTHONPATH": site, "PYTHONHOME": root / "usr", "PYTHONDONTWRITEBYTECODE": 1}
    tests = [str(path) for path in sorted((ROOT / "tests" / "ops").glob("test_*.py")) if not needs_torch(path)]
    for model, unit in {"cortex-a72": "neon", "cortex-a76": "neon_dot", "max,sve=off,sme=off": "neon_i8mm"}.items():
        python = WORK / f"python-{unit}"  # also for the processes that tests start
        python.write_text(
            f'#!/bin/sh\nexec qemu-aarch64-static -cpu {model} -L {root} {root}/usr/bin/python3.11 "$@"\n'
        )
        python.chmod(0o755)
        assert run(python, "-c", "import whet; print(whet.isa())", **env) == f"{unit}\n"
        arguments = ["-m", "not timing", *tests]
        code = f"import pytest, sys; sys.executable = {str(python)!r}; sys.exit(pytest.main({arguments}))"
        print(f"{unit}: {run(python, '-c', code, **env).splitlines()[-1]}", flush=True)


def needs_torch(path: Path) -> bool:
    return re.search("^(import|from) torch", path.read_text(), re.MULTILINE) is not None


def unpack_debian(root: Path, *packages: str) -> None:
    """Unpack Debian packages for arm64 into a folder, with its own package lists and status file."""
    lists = WORK / "apt"
    (lists / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (lists / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    (lists / "status").touch()
    places = {"State::lists": lists / "lists", "State::status": lists / "status", "Cache": lists}
    options = [option for name, place in places.items() for option in ("-o", f"Dir::{name}={place}")]
    options += ["-o", "APT::Architecture=arm64", "-o", "APT::Architectures=arm64", "-o", "APT::Sandbox::User=root"]
    run("apt-get", *options, "-q", "update")
    run("apt-get", *options, "-q", "-y", "-d", "--no-install-recommends", "install", *packages)
    for package in (lists / "archives").glob("*.deb"):
        run("dpkg-deb", "-x", package, root)


if __name__ == "__main__":
    main()
