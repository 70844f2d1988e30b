"""Mutated files of every kind that Whet reads: a WhetError or a working object, in time and without a crash.

In addition to bytes, numbers and lengths, values of JSON are mutated, which parsers accept and readers may not handle.
A case depends only on its number: ``python -m tests.torture.files gguf 123`` repeats it with its traceback.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.torture.common import Tally, make_data, make_model, scaled

_LIMIT_S = 20
_ADDRESSES = 64 << 30
"""Limit of the address space, since sizes in a mutated file may be absurd."""

_NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**32, 2**53, 2**63, 2**64, 10**30, -(2**31), 0.0, 0.5, -1.5, 1e300,
    float("nan"), float("inf"), "", "x", "1", "silu", "\ud800", "../../x", "F32", "BF16", "F64", "U8", [], [0], [1, 2],
    [2**40, 2**40], [[]], {}, {"a": 1}, [None], "a" * 5000,
)  # fmt: skip


@dataclass
class Kind:
    """Files of one kind: a valid folder, the names of the mutated files, and the function that opens them."""

    name: str
    cases: int
    make: Callable[[Path], None]
    names: tuple[str, ...]
    use: Callable[[Path], object]


# --- readers --------------------------------------------------------------------------------------------


def _try_engine(engine: Any) -> None:
    import whet

    with engine:
        engine.generate([[1, 2, 3]], 2, whet.SamplingParams(max_new_tokens=3))


def _open_folder(folder: Path) -> None:
    import whet

    _try_engine(whet.Engine.from_pretrained(folder, weights="int8", kv_bytes=1 << 20))


def _open_gguf(folder: Path) -> None:
    import whet

    _try_engine(whet.Engine.from_gguf(folder / "model.gguf", kv_bytes=1 << 20))


def _load_model(folder: Path) -> None:
    from whet.runs.models import load_model

    _, tokenizer = load_model(str(folder), "float32")
    tokenizer("12+3=")


def _add_adapter(folder: Path) -> None:
    import whet

    with whet.Engine.from_pretrained(folder / "model", weights="float32", kv_bytes=1 << 20) as engine:
        number = engine.add_adapter(folder)
        engine.generate([[1, 2, 3]], 1, whet.SamplingParams(max_new_tokens=2), adapter=number)


def _load_adapters(folder: Path) -> None:
    from whet.models.adapter_files import load_adapters

    load_adapters(folder / "adapters.safetensors")


def _load_checkpoint(folder: Path) -> None:
    from whet.algorithms.sft import SFT

    SFT.from_checkpoint(folder).train_step([[1, 2], [1, 3]], [[3, 4], [5]])


def _load_forged(folder: Path) -> None:
    """Load a checkpoint whose manifest has the sizes and digests of the mutated files, as written by an attacker."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("sha256")
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        manifest["files"][name] = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["sha256"] = hashlib.sha256((json.dumps(manifest, indent=1) + "\n").encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    _load_checkpoint(folder)


# --- valid files ----------------------------------------------------------------------------------------


def _make_model(folder: Path) -> None:
    make_model(folder)


def _make_gguf(folder: Path) -> None:
    from tests.gguf_files import write_gguf
    from tests.tiny import tiny_llama

    sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = tiny_llama(**sizes, num_key_value_heads=2, num_hidden_layers=1, tie_word_embeddings=True)
    write_gguf(model, folder / "model.gguf")


def _make_peft(folder: Path) -> None:
    from tests.tiny import with_lora
    from transformers import AutoModelForCausalLM

    make_model(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    with_lora(model, r=2, target_modules=["q_proj", "down_proj"]).save_pretrained(folder)


def _make_adapters(folder: Path) -> None:
    from whet import MicroLoRA
    from whet.models.adapter_files import save_adapters

    save_adapters(folder / "adapters.safetensors", {"a.b": MicroLoRA(8, 4), "c": MicroLoRA(6, 6)})


def _make_checkpoint(folder: Path) -> None:
    from whet.algorithms.sft import SFT
    from whet.data.sources import read_rows
    from whet.runs.models import load_model

    with tempfile.TemporaryDirectory() as name:
        model, tokenizer = load_model(str(make_model(Path(name) / "model")), "float32")
        trainer = SFT(model, tokenizer=tokenizer, batch_size=2)
        trainer.train(read_rows(str(make_data(Path(name))[0])), steps=1)
    trainer.save(folder)


_CHECKPOINT = ("state.json", "model.safetensors", "optimizer.safetensors")
KINDS = (
    Kind("folder", 3500, _make_model, ("model.safetensors", "config.json"), _open_folder),
    Kind("gguf", 3500, _make_gguf, ("model.gguf",), _open_gguf),
    Kind(
        "tokenizer",
        900,
        _make_model,
        ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json", "model.safetensors"),
        _load_model,
    ),
    Kind("peft", 600, _make_peft, ("adapter_config.json", "adapter_model.safetensors"), _add_adapter),
    Kind("adapters", 500, _make_adapters, ("adapters.safetensors",), _load_adapters),
    Kind("checkpoint", 400, _make_checkpoint, (*_CHECKPOINT, "manifest.json"), _load_checkpoint),
    Kind("forged", 600, _make_checkpoint, _CHECKPOINT, _load_forged),
)


# --- mutation -------------------------------------------------------------------------------------------


def mutate(data: bytes, name: str, rng: random.Random) -> bytes:
    """Return a file's bytes with one or a few changes."""
    if name.endswith(".safetensors") and rng.random() < 0.5:
        length = int.from_bytes(data[:8], "little")
        header = _mutate_json(data[8 : 8 + length], rng)
        return len(header).to_bytes(8, "little") + header + data[8 + length :]
    if name.endswith(".json") and rng.random() < 0.7:
        return _mutate_json(data, rng)
    return _mutate_bytes(data, rng)


def _mutate_json(text: bytes, rng: random.Random) -> bytes:
    whole = json.loads(text)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        holder: Any = whole
        while True:
            keys = list(holder) if isinstance(holder, dict) else range(len(holder))
            key = rng.choice(keys) if keys else None
            inner = holder[key] if keys else None
            if not (isinstance(inner, (dict, list)) and inner) or rng.random() < 0.3:
                break
            holder = inner
        action = rng.random()
        if not keys or action < 0.05:
            if isinstance(holder, dict):
                holder["x"] = copy.deepcopy(rng.choice(_NASTY))
            else:
                holder.append(copy.deepcopy(rng.choice(_NASTY)))
        elif action < 0.2:
            del holder[key]
        elif isinstance(inner, (int, float)) and action < 0.5:
            holder[key] = type(inner)(inner * rng.choice([-1, 2, 3]) + rng.choice([-1, 0, 1]))
        else:
            holder[key] = copy.deepcopy(rng.choice(_NASTY))
    return json.dumps(whole).encode()


def _mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    head = min(len(out), 6000)  # metadata
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(out) if rng.random() < 0.1 else head)
        if rng.random() < 0.3:
            number = rng.choice([0, 1, 2**31, 2**32, 2**62, 2**63, 2**64 - 1, 2**64 - 32, rng.randrange(2**20)])
            out[at : at + 8] = struct.pack("<Q", number)
        else:
            out[at] = rng.choice([0, 1, 255, 128, rng.randrange(256), *b'0123456789-,[]{}":.en'])
    if rng.random() < 0.05:
        out = out[: rng.randrange(len(out))]
    return bytes(out)


# --- the cases ------------------------------------------------------------------------------------------


def torture(scale: float) -> Iterator[Tally]:
    for kind in KINDS:
        tally = Tally(f"mutated files: {kind.name}")
        with tempfile.TemporaryDirectory(prefix="whet-torture-") as name:
            whole = Path(name) / "whole"
            whole.mkdir()
            with tally.case("whole"):
                kind.make(whole)
                _use(kind, whole, Path(name) / "tried", {})
            if not tally.failures:
                tally.cases = 0
                _run_cases(kind, whole, Path(name), scaled(kind.cases, scale), tally)
        yield tally


def _run_cases(kind: Kind, whole: Path, folder: Path, n: int, tally: Tally) -> None:
    """Run all cases in child processes; a new process continues after a crash."""
    reached = mmap.mmap(-1, 8)
    log, counts = folder / "log", Counter[str]()
    first = 0
    while first < n:
        log.write_text("")
        with tally.case(f"cases from {first}"):
            pid = os.fork()
            if pid == 0:
                _be_worker(kind, whole, folder, range(first, n), reached, log)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            at = struct.unpack("q", reached[:8])[0]
        for line in log.read_text().splitlines():
            row = json.loads(line)
            counts[row["outcome"]] += 1
            if row["failure"]:
                tally.failures.append(f"case {row['case']}: {row['failure']}")
        if status:
            tally.failures.append(f"case {at}: the process ended with status {status}")
        first = at + 1 if status else n
    tally.cases = n
    tally.note = ", ".join(f"{count:,} {outcome}" for outcome, count in counts.most_common())


def _be_worker(kind: Kind, whole: Path, folder: Path, cases: range, reached: mmap.mmap, log: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, _ADDRESSES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    status = 1
    try:
        with log.open("w") as file:
            for case in cases:
                reached[:8] = struct.pack("q", case)
                outcome, failure = _try_case(kind, whole, folder / "tried", case)
                file.write(json.dumps({"case": case, "outcome": outcome, "failure": failure}) + "\n")
                file.flush()
        status = 0
    finally:
        os._exit(status)


def _try_case(kind: Kind, whole: Path, tried: Path, case: int) -> tuple[str, str]:
    """Run a case; return its outcome, and its failure if the outcome is wrong."""
    from whet.errors import WhetError

    try:
        with warnings.catch_warnings(), _time_limit():
            warnings.simplefilter("ignore")
            _use(kind, whole, tried, _changes(kind, whole, case))
        return "opened", ""
    except WhetError:
        return "refused", ""
    except BaseException as error:
        return "wrong", f"{type(error).__name__}: {str(error)[:300]}"


def _changes(kind: Kind, whole: Path, case: int) -> dict[str, bytes]:
    rng = random.Random(f"{kind.name} {case}")
    name = rng.choice(kind.names)
    return {name: mutate((whole / name).read_bytes(), name, rng)}


def _use(kind: Kind, whole: Path, tried: Path, changes: dict[str, bytes]) -> None:
    """Open a copy of the folder with changed files."""
    shutil.rmtree(tried, ignore_errors=True)
    shutil.copytree(whole, tried, copy_function=os.link)
    for name in {*changes, *(["manifest.json"] if kind.name == "forged" else [])}:
        content = changes.get(name, (whole / name).read_bytes())
        (tried / name).unlink()  # a link
        (tried / name).write_bytes(content)
    kind.use(tried)


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def over(*_: object) -> None:
        raise TimeoutError(f"it took more than {_LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(_LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    chosen = next(kind for kind in KINDS if kind.name == sys.argv[1])
    with tempfile.TemporaryDirectory() as folder_name:
        original = Path(folder_name) / "whole"
        original.mkdir()
        chosen.make(original)
        changed = _changes(chosen, original, int(sys.argv[2]))
        for changed_name, content in changed.items():
            digest = hashlib.sha256(content).hexdigest()[:12]
            print(changed_name, digest, content[:3000] if changed_name.endswith("json") else content[:300])
        _use(chosen, original, Path(folder_name) / "tried", changed)
