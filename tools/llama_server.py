"""Compile llama.cpp's server and quantiser for this machine, from llama-cpp-python's source distribution: the peers of
`whet bench serve` and `whet bench rounding`.

    python3 tools/llama_server.py [FOLDER]

FOLDER is build/llama.cpp unless it is given, and the programs are in its folder bin. Takes a C++ compiler and ten
minutes; the version is that in constraints.txt. Needs only the standard library, pip and CMake.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from set_up import LLAMA_CPP, ROOT, llama_cpp_options

_PROGRAMS = ("llama-server", "llama-quantize", "llama-imatrix")
_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",  # it would be downloaded
    "LLAMA_OPENSSL": "OFF",
}


def main(argv: list[str]) -> int:
    """Build the programs, and return 0, or the status of the command that failed."""
    if len(argv) > 1 or (argv and argv[0].startswith("-")):
        print(__doc__)
        return 0 if argv in (["-h"], ["--help"]) else 2
    try:
        programs = build(Path(argv[0] if argv else ROOT / "build" / "llama.cpp").absolute())
    except subprocess.CalledProcessError as error:  # the command has printed its error
        return error.returncode
    print(programs)
    return 0


def build(folder: Path) -> Path:
    """Compile the programs in a folder, and return the folder that has them."""
    with tempfile.TemporaryDirectory() as scratch:
        source = download(Path(scratch))
        options = [f"-D{name}={value}" for name, value in _OPTIONS.items()]
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        env = {**os.environ, **llama_cpp_options()}
        subprocess.run(["cmake", "-S", str(source), "-B", str(folder), *generator, *options], check=True, env=env)
        jobs = str(os.cpu_count() or 1)
        subprocess.run(["cmake", "--build", str(folder), "--target", *_PROGRAMS, "-j", jobs], check=True, env=env)
    return folder / "bin"


def download(scratch: Path) -> Path:
    """Download and unpack the source distribution, and return the folder of its llama.cpp."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
    chosen = ["--no-binary", ":all:", "--no-deps", "-c", str(ROOT / "constraints.txt"), "-d", str(scratch)]
    subprocess.run([*pip, *chosen, LLAMA_CPP], check=True)
    [archive] = scratch.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(scratch, filter="data")
    return scratch / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
