"""``whet export``, ``merge``, ``convert`` ended by a full disk or a signal: the old output or the complete new one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.torture.common import Ended, Tally, forked, require, scaled
from tests.torture.disk import Disk, small_disk

Commands = dict[str, Callable[[Path], list[str]]]


def torture(scale: float) -> Iterator[Tally]:
    with small_disk(8 << 20) as disk, tempfile.TemporaryDirectory(prefix="whet-torture-") as name:
        commands = _commands(Path(name))
        yield _of_a_full_disk(disk, commands, scale)
        yield _of_signals(disk, commands, scaled(40, scale))


def _commands(folder: Path) -> Commands:
    """Make the commands by name: functions from an output path to arguments of ``whet``; import all modules."""
    from tests.engine.tiny_models import tiny_model
    from tests.models.test_export import N_ROWS, N_TOKENS, PRE_TOKENIZERS, save
    from tests.models.tokenizers import vocab_files
    from tests.tiny import with_lora
    from transformers import AutoModelForCausalLM

    from whet.cli import main

    tokenizer = vocab_files.train_byte_level(list(PRE_TOKENIZERS["qwen2"].patterns), N_TOKENS)
    sizes = {"vocab_size": N_ROWS, "hidden_size": 64, "intermediate_size": 64}
    model = save(tiny_model("qwen3", **sizes), tokenizer, folder / "model")
    adapted = with_lora(AutoModelForCausalLM.from_pretrained(model), b_std=0.1, target_modules=["q_proj"])
    adapted.save_pretrained(folder / "adapter")
    file = folder / "model.gguf"
    require(main(["export", str(model), str(file), "--quantize", "f32"]) == 0, "export failed")

    def of(command: str, source: Path, *options: str | Path) -> Callable[[Path], list[str]]:
        return lambda out: [command, str(source), str(out), *map(str, options), "--overwrite"]

    return {
        "export": of("export", model, "--quantize", "f32"),
        "export --adapter": of("export", model, "--adapter", folder / "adapter", "--quantize", "q8_0"),
        "merge": of("merge", model, "--adapter", folder / "adapter"),
        "convert": of("convert", file),
    }


def _of_a_full_disk(disk: Disk, commands: Commands, scale: float) -> Tally:
    tally = Tally("disk full: export, merge, convert")
    for name, command in commands.items():
        disk.clear()
        out = disk.folder / "out"
        free = disk.free_pages
        end = forked(command(out))
        require(end.status == 0, f"{name} failed: {end}")
        expected, needed = _digest(out), free - disk.free_pages
        for existing in (False, True):
            for pages in range(0, needed, max(1, round(needed / 20 / scale))):
                with tally.case(f"{name}, {pages} of {needed} pages left, replacing an output: {existing}"):
                    disk.clear()
                    _remove(out)
                    if existing:
                        _make_other(out, is_folder=name in ("merge", "convert"))
                    before = _digest(out)
                    disk.leave(pages=pages)
                    end = forked(command(out))
                    lines = [line for line in end.text.splitlines() if line.startswith("whet: ")]
                    require(end.status > 0 and len(lines) == 1 and "the disk is full" in lines[0], f"{end}")
                    require("Traceback" not in end.text, end.text)
                    _require_left(disk, out, before)
                    disk.clear()
                    end = forked(command(out))
                    require(end.status == 0, f"with space again: {end.text}")
                    _require_left(disk, out, expected)
        _remove(out)
    return tally


def _of_signals(disk: Disk, commands: Commands, n: int) -> Tally:
    tally = Tally("SIGKILL, Ctrl-C: export, merge, convert")
    rng, n_ended = random.Random(0), 0
    for name, command in commands.items():
        out = disk.folder / "out"
        _remove(out)
        start_s = time.monotonic()
        end = forked(command(out))
        require(end.status == 0, f"{name} failed: {end}")
        expected, taken_s = _digest(out), time.monotonic() - start_s
        for i in range(n):
            number = (signal.SIGKILL, signal.SIGINT)[i % 2]
            delay_s = rng.uniform(0, taken_s)
            with tally.case(f"{name}, {number.name} after {delay_s:.4f} s"):
                _remove(out)
                _make_other(out, is_folder=name in ("merge", "convert"))
                before = _digest(out)
                end = forked(command(out), lambda delay_s=delay_s, number=number: _send_signal(delay_s, number))
                n_ended += end.status != 0
                _require_ended(end, number)
                if number == signal.SIGINT:
                    _require_left(disk, out, _digest(out))
                require(
                    _digest(out) in ((before, expected) if end.status else (expected,)),
                    "the output is neither the old nor the new one",
                )
                require(forked(command(out)).status == 0, "the command fails afterwards")
                _require_left(disk, out, expected)
    tally.note = f"{n_ended} ended early"
    return tally


def _send_signal(delay_s: float, number: signal.Signals) -> None:
    timer = threading.Timer(delay_s, os.kill, [os.getpid(), number])
    timer.daemon = True
    with contextlib.suppress(KeyboardInterrupt):  # too early: the command runs undisturbed
        timer.start()


def _require_ended(end: Ended, number: signal.Signals) -> None:
    """Require an end by the signal, or a success before it."""
    statuses = (0, -9) if number == signal.SIGKILL else (0, 130)
    require(end.status in statuses and "Traceback" not in end.text, f"{end}")


def _make_other(out: Path, is_folder: bool) -> None:
    """Create an output to be replaced."""
    if is_folder:
        out.mkdir()
    (out / "config.json" if is_folder else out).write_bytes(b"other" * 100)


def _require_left(disk: Disk, out: Path, digest: str | None) -> None:
    require(_digest(out) == digest, "the output is neither the old nor the complete new one")
    names = {path.name for path in disk.folder.iterdir()} - {"fillers", "out"}
    require(not names, f"left behind: {names}")


def _digest(out: Path) -> str | None:
    """Digest a file or all files of a folder, or return None. Cards contain versions but no times."""
    if not out.exists():
        return None
    files = sorted(path for path in out.rglob("*") if path.is_file()) if out.is_dir() else [out]
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


def _remove(out: Path) -> None:
    if out.is_dir():
        shutil.rmtree(out)
    else:
        out.unlink(missing_ok=True)
