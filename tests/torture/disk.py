"""Full disks: at every page and file of a checkpoint, and in the middle of a run.

The disk is a private tmpfs of this process, which a filler fills up to a number of free pages or files.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.torture.common import N_STEPS, Tally, Workshop, finished, forked, require, require_same, scaled, workshop

_PAGE = os.sysconf("SC_PAGESIZE")
_N_FILES = 1000
_NEWNS, _NEWUSER, _PRIVATE, _DETACH = 0x20000, 0x10000000, 0x44000, 2  # sched.h, sys/mount.h


class Disk:
    """A small file system."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fillers = folder / "fillers"
        self.fillers.mkdir()

    @property
    def free_pages(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize // _PAGE

    @property
    def free_files(self) -> int:
        return os.statvfs(self.folder).f_favail

    def leave(self, pages: int | None = None, files: int | None = None) -> None:
        """Fill the disk except for this number of pages, or files."""
        self.clear()
        if pages is not None:
            with (self.fillers / "pages").open("wb") as filler:
                os.posix_fallocate(filler.fileno(), 0, max(1, (self.free_pages - pages) * _PAGE))
        if files is not None:
            for i in range(self.free_files - files):
                (self.fillers / str(i)).touch()

    def clear(self) -> None:
        """Free all space."""
        for path in self.fillers.iterdir():
            path.unlink()


@contextlib.contextmanager
def small_disk(size_bytes: int) -> Iterator[Disk]:
    """Mount a private tmpfs; it needs no root if the kernel allows user namespaces."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: Any) -> None:
        if getattr(libc, name)(*arguments):
            raise OSError(ctypes.get_errno(), f"{name}: a private tmpfs needs root or user namespaces")

    user = os.getuid()
    call("unshare", _NEWNS if user == 0 else _NEWNS | _NEWUSER)
    if user:
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    call("mount", b"none", b"/", None, _PRIVATE, None)
    with tempfile.TemporaryDirectory(prefix="whet-torture-disk-") as name:
        options = f"size={size_bytes},nr_inodes={_N_FILES}".encode()
        call("mount", b"tmpfs", name.encode(), b"tmpfs", 0, options)
        try:
            yield Disk(Path(name))
        finally:
            call("umount2", name.encode(), _DETACH)


def torture(scale: float) -> Iterator[Tally]:
    with small_disk(8 << 20) as disk, workshop() as shop:
        yield _of_a_checkpoint(disk, shop, scale)
        yield _of_a_run(disk, shop, scale)


def _of_a_checkpoint(disk: Disk, shop: Workshop, scale: float) -> Tally:
    """Save with any number of free pages, from none to enough."""
    from whet.algorithms.sft import SFT
    from whet.checkpoint.folder import latest_checkpoint, load_checkpoint
    from whet.data.sources import read_rows
    from whet.runs.models import load_model

    tally = Tally("disk full: pages and files of a checkpoint")
    model, tokenizer = load_model(str(shop.model), "float32")
    trainer = SFT(model, tokenizer=tokenizer, batch_size=4)
    trainer.train(read_rows(str(shop.rows)), steps=1)
    folder = disk.folder / "checkpoints"
    trainer.save(folder / "step-000001")
    earlier = load_checkpoint(folder / "step-000001")
    used = disk.free_pages
    trainer.save(folder / "step-000002")
    needed = used - disk.free_pages
    shutil.rmtree(folder / "step-000002")
    limits = [{"pages": n} for n in range(0, needed + 1, max(1, round(1 / scale)))] + [{"files": n} for n in range(7)]
    for name in ("step-000002", "step-000001"):  # in addition to the earlier checkpoint, and replacing it
        for limit in limits:
            with tally.case(f"{name}, left {limit}"):
                disk.leave(**limit)
                with contextlib.suppress(OSError):
                    trainer.save(folder / name)
                    if limit.get("pages", needed) < needed:
                        raise AssertionError("save returned although the disk is too full")
                if name == "step-000001" or not (folder / name).exists():
                    require(latest_checkpoint(folder) == folder / "step-000001", "the earlier checkpoint is gone")
                    _require_equal(load_checkpoint(folder / "step-000001"), earlier)
                disk.clear()
                trainer.save(folder / name)
                require(latest_checkpoint(folder) == folder / name, "no checkpoint is saved after space is free again")
                _require_equal(load_checkpoint(folder / name), earlier)
                require({p.name for p in folder.iterdir()} == {"step-000001", name}, "files are left behind")
                shutil.rmtree(folder / "step-000002", ignore_errors=True)
    shutil.rmtree(folder)
    tally.note = f"{needed} pages"
    return tally


def _require_equal(found: Any, expected: Any) -> None:
    tensors, state = found
    require(
        all(tensor.equal(expected[0][g][name]) for g, group in tensors.items() for name, tensor in group.items()),
        "weights differ",
    )
    require(state["counters"] == expected[1]["counters"], "the state differs")


def _of_a_run(disk: Disk, shop: Workshop, scale: float) -> Tally:
    """Run with a disk that fills up when a step is saved; the same command continues after space is free."""
    tally = Tally("disk full: train, and the same command")
    expected: dict[str, str] = {}
    with tally.case("undisturbed"):
        expected = finished(shop, "grpo")
    tally.cases = 0
    limits = [{"pages": n} for n in (0, 1, 2, 5, 12, 20, 30, 45)] + [{"files": n} for n in (0, 1, 2, 3, 4)]
    for limit in limits[: scaled(len(limits), scale) if expected else 0]:
        for step in (1, 4):
            with tally.case(f"at step {step}, left {limit}"):
                folder = disk.folder / "run"
                shutil.rmtree(folder, ignore_errors=True)
                command = shop.command("grpo", folder)
                end = forked(command, lambda step=step, limit=limit: _fill_at(disk, step, limit))
                if end.status == 0:
                    require_same(folder, expected)
                    raise AssertionError("the disk was not full")
                is_reported = "the disk is full" in end.text or "No space left" in end.text
                require(end.status > 0 and is_reported, f"status {end.status}: {end.text}")
                checkpoints = sorted(p.name for p in (folder / "checkpoints").glob("step-*"))
                require(checkpoints == ["step-000002"] if step == 4 else not checkpoints, f"there are {checkpoints}")
                disk.clear()
                again = forked(command)
                require(again.status == 0, f"the same command failed: {again.text}")
                require_same(folder, expected)
    tally.note = f"{N_STEPS} steps"
    return tally


def _fill_at(disk: Disk, step: int, limit: dict[str, int]) -> None:
    """Fill the disk once this process has taken a step."""
    from whet.training.trainer import Trainer

    log: Any = Trainer.log

    def fill_and_log(trainer: Any, metrics: Any) -> None:
        if trainer.step == step and not any(disk.fillers.iterdir()):
            disk.leave(**limit)
        log(trainer, metrics)

    Trainer.log = fill_and_log
