"""Packages and programs that some tests need beyond the extra ``test``, and how to install them.

A test with ``@pytest.mark.needs(NAME)`` is skipped if NAME is missing. ``make wide`` installs all of them and runs
these tests with ``--fail-if-missing``, so that no test is skipped everywhere.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from typing import NamedTuple


class Need(NamedTuple):
    """A prerequisite of tests: whether it is met, and how to install it."""

    is_met: Callable[[], bool]
    remedy: str


def _module(name: str, extra: str) -> Need:
    return Need(lambda: importlib.util.find_spec(name) is not None, f"{name}: pip install 'whet[{extra}]'")


def _has_page() -> bool:
    from benchmarks.contenders.web.page import missing_part

    return not missing_part()


def _has_sandbox() -> bool:
    from whet.errors import WhetError
    from whet.system.sandbox import Sandbox

    try:
        Sandbox().check()
    except WhetError:
        return False
    return True


def _has_gpu() -> bool:
    from whet.errors import WhetError
    from whet.gpu.device import open_device

    try:
        open_device("tests")
    except WhetError:
        return False
    return True


NEEDS = {
    "gpu": Need(_has_gpu, "a GPU: pip install 'whet[gpu]'; apt-get install mesa-vulkan-drivers libvulkan1"),
    "reasoning_gym": _module("reasoning_gym", "gym"),
    "llama_cpp": _module("llama_cpp", "real"),
    "ray": _module("ray", "ray"),
    "joblib": _module("joblib", "wide"),
    "wandb": _module("wandb", "wandb"),
    "schedulefree": _module("schedulefree", "schedulefree"),
    "onnxruntime": _module("onnxruntime", "wide"),
    "triton": _module("triton", "wide"),
    "bwrap": Need(_has_sandbox, "bubblewrap and user namespaces: apt-get install bubblewrap"),
    "aarch64": Need(
        lambda: bool(shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64-static")),
        "a compiler and an emulator: apt-get install g++-aarch64-linux-gnu qemu-user-static",
    ),
    "clang": Need(
        lambda: bool(shutil.which("clang++-19") and shutil.which("llvm-objdump-19")),
        "a compiler for AArch64 and its disassembler: apt-get install clang-19 llvm-19 g++-aarch64-linux-gnu",
    ),
    "page": Need(_has_page, "the npm package and a browser: make web; apt-get install chromium"),
}


def missing(name: str) -> str:
    """Return how to install NAME; empty if it is installed."""
    need = NEEDS[name]
    return "" if need.is_met() else f"needs {need.remedy}"
