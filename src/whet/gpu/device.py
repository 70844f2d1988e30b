"""A GPU, opened by the package ``wgpu``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from whet.errors import WhetError


def open_device(where: str) -> Any:
    """Return the fastest GPU, with the largest buffers that it has: one for all engines of a process.

    Raises:
        WhetError: ``wgpu`` is missing, it finds no GPU, or the process was forked after its parent had opened it.
    """
    try:
        pid, device = _open()
    except ImportError:
        raise WhetError(f"{where}: device is 'gpu', which needs wgpu. Install it: pip install 'whet[gpu]'.") from None
    except RuntimeError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise WhetError(
            f"{where}: device is 'gpu', and there is no GPU with Metal, Vulkan or Direct3D 12 ({reason}). Install its "
            f"driver, or omit device."
        ) from None
    if pid != os.getpid():
        raise WhetError(
            f"{where}: device is 'gpu', which this process's parent opened before the fork. Start processes with the "
            f"method 'spawn', or omit device."
        )
    return device


@cache
def _open() -> tuple[int, Any]:
    import wgpu
    from wgpu.backends.wgpu_native.extras import set_instance_extras

    with suppress(RuntimeError):  # WebGPU is in use
        set_instance_extras(backends=["Vulkan", "Metal", "DX12"])  # OpenGL prints an error where there is no screen
    with _runtime_folder():
        adapter = wgpu.gpu.request_adapter_sync(power_preference="high-performance")
    names = ("max-buffer-size", "max-storage-buffer-binding-size")
    return os.getpid(), adapter.request_device_sync(required_limits={name: adapter.limits[name] for name in names})


@contextmanager
def _runtime_folder() -> Iterator[None]:
    """Set XDG_RUNTIME_DIR while drivers are listed: without it, Mesa's print an error, though they need no screen."""
    if "XDG_RUNTIME_DIR" in os.environ:
        yield
        return
    os.environ["XDG_RUNTIME_DIR"] = tempfile.gettempdir()
    try:
        yield
    finally:
        del os.environ["XDG_RUNTIME_DIR"]
