"""Checkpoints load whole or not at all: kills, full disks, damage, pickles; and random states come back."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import random
import resource
import shutil
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.processes import printed_by, run_python
from tests.raising import assert_raises, mentions
from torch import nn

from whet.checkpoint.folder import (
    capture_rng,
    latest_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    restore_rng,
    save_checkpoint,
    step_folder,
)
from whet.checkpoint.modules import build_module, describe_module, load_module_tensors, module_tensors
from whet.errors import CheckpointError, DiskFullError, WhetTypeError, WhetValueError


def small(value: float = 1.0) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((2, 2), value)}, "optimizer": {}}


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_tensors_and_state_round_trip(tmp_path):
    tensors = {
        "model": {
            "f32": torch.randn(3, 4),
            "bf16": torch.randn(3).to(torch.bfloat16),
            "transposed": torch.arange(6).reshape(2, 3).t(),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
            "empty": torch.zeros(0, 3),
            "flags": torch.tensor([True, False]),
            "parameter": nn.Parameter(torch.ones(2)),
        },
        "optimizer.main": {},
    }
    state = {"step": 3, "best": math.nan, "worst": -math.inf, "betas": (0.9, 0.95), "groups": {0: [1, 2]}}
    save_checkpoint(tmp_path / "a" / "b.pt", tensors, state)
    loaded, loaded_state = load_checkpoint(str(tmp_path / "a" / "b.pt"))
    assert repr(loaded_state) == repr(state)
    assert {g: set(members) for g, members in loaded.items()} == {g: set(m) for g, m in tensors.items()}
    for name, tensor in tensors["model"].items():
        assert loaded["model"][name].dtype == tensor.dtype
        assert torch.equal(loaded["model"][name], tensor)
    assert names(tmp_path / "a") == ["b.pt"]
    expected = ["manifest.json", "model.safetensors", "optimizer.main.safetensors", "state.json"]
    assert names(tmp_path / "a" / "b.pt") == expected
    json.loads((tmp_path / "a" / "b.pt" / "state.json").read_text(), parse_constant=pytest.fail)


def test_loaded_tensors_do_not_map_the_file(tmp_path):
    save_checkpoint(tmp_path / "c", small(5), {})
    tensors, _ = load_checkpoint(tmp_path / "c")
    file = tmp_path / "c" / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert tensors["model"]["w"].tolist() == [[5, 5], [5, 5]]


def test_shared_tensors_are_stored_once_and_stay_shared(tmp_path):
    big = torch.randn(100, 100)
    row = big[1]
    tensors = {"model": {"embed": big, "head": big, "row": row, "flat": big.view(-1)}, "ema": {"embed": big}}
    save_checkpoint(tmp_path / "c", tensors, {})
    size_bytes = sum(file.stat().st_size for file in (tmp_path / "c").iterdir())
    assert 80_400 < size_bytes < 83_000  # "embed" and "flat", 40,000 bytes each, and "row" with 400
    loaded, _ = load_checkpoint(tmp_path / "c")
    assert loaded["model"]["head"] is loaded["model"]["embed"] is loaded["ema"]["embed"]
    assert torch.equal(loaded["model"]["embed"], big)
    assert torch.equal(loaded["model"]["row"], row)
    assert torch.equal(loaded["model"]["flat"], big.view(-1))


def test_conjugate_views_are_not_aliases(tmp_path):
    z = torch.tensor([1 + 2j, 3 - 1j])
    save_checkpoint(tmp_path / "c", {"g": {"z": z, "conjugate": z.conj()}}, {})
    loaded, _ = load_checkpoint(tmp_path / "c")
    assert loaded["g"]["conjugate"].tolist() == [1 - 2j, 3 + 1j]


def test_a_tied_model_stays_tied(tmp_path):
    model = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 50, bias=False))
    model[1].weight = model[0].weight
    save_checkpoint(tmp_path / "c", {"model": module_tensors(model)}, {"model": describe_module(model)})
    assert (tmp_path / "c" / "model.safetensors").stat().st_size < 1000  # 800 bytes once
    tensors, state = load_checkpoint(tmp_path / "c")
    copy = build_module(state["model"])
    load_module_tensors(copy, tensors["model"])
    ids = torch.arange(50)
    assert torch.equal(copy(ids), model(ids))
    assert copy[1].weight is copy[0].weight


def test_the_error_names_a_value_that_cannot_be_stored_and_writes_nothing(tmp_path):
    for tensors, state, error, message in (
        ({"a/b": {}}, {}, WhetValueError, r"the group 'a/b' is not a file name"),
        ({"": {}}, {}, WhetValueError, "the group ''"),
        ({"m": {"x": [1.0]}}, {}, WhetTypeError, r"m\['x'\] is a list, expected a torch.Tensor"),
        ({"m": {"x": torch.zeros(2, device="meta")}}, {}, WhetTypeError, r"m\['x'\] is .* on meta"),
        ({"m": {"x": torch.eye(2).to_sparse()}}, {}, WhetTypeError, r"m\['x'\] is torch.sparse_coo"),
        ({"m": {"x": torch.zeros(1, dtype=torch.complex128)}}, {}, WhetTypeError, r"is of dtype torch.complex128"),
        ({}, {"a": {"b": object()}}, WhetTypeError, r"state\['a'\]\['b'\] is of type builtins.object"),
    ):
        assert_raises(error, f"save_checkpoint: .*{message}", save_checkpoint, tmp_path / "c", tensors, state)
        assert names(tmp_path) == []


# --- kills ----------------------------------------------------------------------------------------------

KILLED_SAVES = """
    import os, signal, sys
    from pathlib import Path
    import torch
    from whet import files
    from whet.checkpoint import folder as module
    from whet.checkpoint.folder import latest_checkpoint, load_checkpoint, save_checkpoint

    folder, path = Path(sys.argv[1]), Path(sys.argv[1]) / "step-000007"
    operations = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.listdir", "os.scandir")

    def save(value):
        save_checkpoint(path, {"model": {"w": torch.full((3,), float(value))}}, {"value": value})

    def load():
        tensors, state = load_checkpoint(path)
        assert tensors["model"]["w"].tolist() == [state["value"]] * 3
        assert latest_checkpoint(folder) == path
        return state["value"]

    def killed(value, count, by_line):
        # A child saves, and is killed before its count-th file operation, or line of folder.py or files.py.
        child = os.fork()
        if child:
            return os.WIFSIGNALED(os.waitpid(child, 0)[1])
        left = [count]
        def strike():
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        def trace(frame, event, arg):
            if frame.f_code.co_filename in (module.__file__, files.__file__):
                strike()
            return trace
        if by_line:
            sys.settrace(trace)
        else:
            sys.addaudithook(lambda event, args: strike() if event in operations else None)
        save(value)
        sys.settrace(None)
        os._exit(0)

    for by_line in (False, True):
        count, seen = 0, set()
        while True:
            save(1)
            assert [entry.name for entry in folder.iterdir()] == ["step-000007"]
            if not killed(2, count, by_line):
                assert load() == 2
                break
            seen.add(load())
            # And once more, from whatever state the first kill left.
            killed(3, count * 7 % 23, by_line)
            assert load() in (1, 2, 3)
            count += 5 if by_line else 1
        assert count > (150 if by_line else 15) and seen == {1, 2}, (count, seen)
"""


def test_a_save_killed_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path):
    printed_by(textwrap.dedent(KILLED_SAVES), tmp_path)


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path):
    save_checkpoint(tmp_path / "c", small(1), {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # larger files fail as on a full disk
    try:
        for tensors, state in (({"model": {"w": torch.zeros(50_000)}}, {}), (small(2), {"log": "x" * 60_000})):
            with pytest.raises(DiskFullError, match=mentions("/c", "limit", "newest checkpoint")):
                save_checkpoint(tmp_path / "c", tensors, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert load_checkpoint(tmp_path / "c")[0]["model"]["w"].tolist() == [[1, 1], [1, 1]]
    assert names(tmp_path) == ["c"]


def test_other_files_are_not_replaced(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "manifest.json").write_text('{"mine": 1}')
    save_checkpoint(tmp_path / "mixed", small(), {})
    (tmp_path / "mixed" / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for path, message in (
        (file, "is not a Whet checkpoint"),
        (folder, "is not a Whet checkpoint"),
        (tmp_path / "mixed", "notes.txt"),
    ):
        with pytest.raises(CheckpointError, match=mentions("save_checkpoint", message, "elsewhere")):
            save_checkpoint(path, small(2), {})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_saving_into_an_empty_folder_and_through_a_link(tmp_path):
    (tmp_path / "empty").mkdir()
    save_checkpoint(tmp_path / "empty", small(1), {})
    (tmp_path / "link").symlink_to("empty")
    save_checkpoint(tmp_path / "link", small(2), {})
    assert (tmp_path / "link").is_symlink()
    assert load_checkpoint(tmp_path / "empty")[0]["model"]["w"][0, 0] == 2


# --- damage ---------------------------------------------------------------------------------------------


def test_a_checkpoint_truncated_or_altered_at_any_byte_does_not_load(tmp_path):
    save_checkpoint(tmp_path / "c", {"m": {"w": torch.ones(2), "tied": torch.ones(1)}}, {"step": 1})
    n_faults = 0
    for file in (tmp_path / "c").iterdir():
        whole = file.read_bytes()
        spoilt = [whole[:length] for length in range(len(whole))]
        spoilt += [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(len(whole))]
        for content in spoilt:
            file.write_bytes(content)
            assert_raises(CheckpointError, file.name, load_checkpoint, tmp_path / "c")
            n_faults += 1
        file.write_bytes(whole)
    assert n_faults > 1000
    load_checkpoint(tmp_path / "c")


def test_errors_name_missing_and_extra_files(tmp_path):
    save_checkpoint(tmp_path / "c", small(), {})
    for name in names(tmp_path / "c"):
        shutil.copytree(tmp_path / "c", tmp_path / "d")
        (tmp_path / "d" / name).unlink()
        assert_raises(CheckpointError, f"{name} is missing", load_checkpoint, tmp_path / "d")
        shutil.rmtree(tmp_path / "d")
    (tmp_path / "c" / "extra.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=mentions("extra.bin", "not part")):
        load_checkpoint(tmp_path / "c")
    assert_raises(CheckpointError, r"there is no checkpoint at .*/nowhere", load_checkpoint, tmp_path / "nowhere")
    (tmp_path / "run").mkdir()
    save_checkpoint(step_folder(tmp_path / "run", 5), small(), {})
    with pytest.raises(CheckpointError, match=mentions("manifest.json", "missing", "Pass")):
        load_checkpoint(tmp_path / "run")


def forge(folder: Path, **changes) -> None:
    """Rewrites the manifest with other contents and the right hash, as a stranger can."""
    content = json.loads((folder / "manifest.json").read_text())
    content.pop("sha256")
    content.update(changes)
    text = json.dumps(content, indent=1) + "\n"
    content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(content, indent=1) + "\n")


def fingerprint(file: Path) -> dict:
    content = file.read_bytes()
    return {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "is not the manifest of a Whet checkpoint"),
        ({"version": 2}, "is of format version 2; this Whet reads 1"),
        ({"files": {"../outside.safetensors": {"size_bytes": 1, "sha256": ""}}}, r"names '\.\./outside\.safetensors'"),
        ({"files": {"/etc/passwd": {"size_bytes": 1, "sha256": ""}}}, "names '/etc/passwd'"),
        ({"files": {"model.pt": {"size_bytes": 1, "sha256": ""}}}, r"names 'model\.pt', expected only state\.json"),
        ({"files": {"state.json": 3}}, r"names 'state\.json'"),
        ({"files": 3}, "lists no files"),
        ({"aliases": math.nan}, "was altered"),
        ({"aliases": {"model": {"x": ["model", "nothing"]}}}, "malformed"),
        ({"aliases": {"model": 3}}, "malformed"),
    ],
)
def test_a_forged_manifest_is_rejected(tmp_path, changes, message):
    save_checkpoint(tmp_path / "c", small(), {})
    forge(tmp_path / "c", **changes)
    assert_raises(CheckpointError, message, load_checkpoint, tmp_path / "c")


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_pickles_are_rejected_without_running(tmp_path):
    marker, bomb = tmp_path / "exploded", tmp_path / "model.pt"
    torch.save(Bomb(marker), bomb)
    assert_raises(CheckpointError, r"model\.pt is a file.*Pickles", load_checkpoint, bomb)
    save_checkpoint(tmp_path / "c", small(), {})
    for content in (bomb.read_bytes(), pickle.dumps(Bomb(marker))):
        for name in ("model.safetensors", "state.json"):
            shutil.copytree(tmp_path / "c", tmp_path / "d")
            (tmp_path / "d" / name).write_bytes(content)
            files = {file.name: fingerprint(file) for file in (tmp_path / "d").glob("*[!t].*[sn]")}
            forge(tmp_path / "d", files={n: f for n, f in files.items() if n != "manifest.json"})
            assert_raises(CheckpointError, r"cannot be read|malformed", load_checkpoint, tmp_path / "d")
            shutil.rmtree(tmp_path / "d")
    assert not marker.exists()
    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.exists()  # the bomb is live: loading it would have been seen


# --- many checkpoints -----------------------------------------------------------------------------------


def test_latest_skips_checkpoints_that_do_not_verify(tmp_path):
    assert latest_checkpoint(tmp_path / "nowhere") is None
    assert latest_checkpoint(tmp_path) is None
    for step in (100, 200, 1_000_000):
        save_checkpoint(step_folder(tmp_path, step), small(step), {})
    (tmp_path / "step-junk").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1000000"
    (tmp_path / "step-1000000" / "state.json").write_text("{")
    with pytest.warns(UserWarning, match=mentions("step-1000000", "skipped", "state.json has 1 bytes", "expected 2")):
        assert latest_checkpoint(str(tmp_path)) == tmp_path / "step-000200"
    os.rename(tmp_path / "step-000200", tmp_path / ".step-000200.previous")  # as a killed save leaves it
    (tmp_path / "step-1000000" / "manifest.json").unlink()
    with pytest.warns(UserWarning, match=mentions("manifest.json", "missing")):
        path = latest_checkpoint(tmp_path)
    assert path == tmp_path / "step-000200"
    assert load_checkpoint(path)[0]["model"]["w"][0, 0] == 200


def test_pruning_keeps_the_newest_and_removes_remains_of_killed_saves(tmp_path):
    for step in (10, 20, 30, 40, 99):
        save_checkpoint(step_folder(tmp_path, step), small(), {})
    (tmp_path / "step-000015").mkdir()  # someone else's
    (tmp_path / "step-000015" / "notes.txt").write_text("mine")
    shutil.copytree(tmp_path / "step-000030", tmp_path / ".step-000030.previous")
    shutil.copytree(tmp_path / "step-000030", tmp_path / ".step-000035.previous")  # all that is left of step 35
    (tmp_path / ".step-000050.saving").mkdir()
    prune_checkpoints(tmp_path, newest=tmp_path / "step-000040", keep=2)
    kept = ["step-000015", "step-000030", "step-000040", "step-000099"]
    assert names(tmp_path) == [".step-000035.previous", *kept]
    prune_checkpoints(tmp_path, newest=tmp_path / "step-000040", keep=9)
    assert names(tmp_path) == [".step-000035.previous", *kept]


# --- random state ---------------------------------------------------------------------------------------


def draw() -> list:
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.normal(size=3).tolist(),  # noqa: NPY002
        torch.randn(3).tolist(),
        torch.randperm(10).tolist(),
    ]


def test_random_states_round_trip():
    draw()  # an odd number of normal deviates: random and NumPy keep a second one for the next call
    state = json.loads(json.dumps(capture_rng(), allow_nan=False))
    expected = [draw(), draw()]
    assert expected[0] != expected[1]
    draw()
    restore_rng(state)
    assert [draw(), draw()] == expected


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s.clear(),
        lambda s: s.update(torch={"dtype": "uint8", "base64": "AAAA"}),
        lambda s: s["python"].__setitem__(1, {"dtype": "uint32", "base64": "AAAA"}),
        lambda s: s["numpy"].update(bit_generator="PCG64"),
        lambda s: s.update(torch={"dtype": "what", "base64": "AAAA"}),
    ],
)
def test_a_corrupt_random_state_is_an_error(spoil):
    good = capture_rng()
    state = json.loads(json.dumps(good))
    spoil(state)
    assert_raises(CheckpointError, ("restore_rng", "random state"), restore_rng, state)
    restore_rng(good)


def test_loading_does_not_warn(tmp_path):
    save_checkpoint(tmp_path / "c", small(), {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(tmp_path / "c")


@pytest.mark.parametrize("package", ["torch", "safetensors"])
def test_the_error_for_a_missing_extra_is_one_line(package, tmp_path):
    path = tmp_path / "c"
    save_checkpoint(path, small(), {})
    code = f"import sys; sys.modules[{package!r}] = None; from whet.checkpoint import *; load_checkpoint({str(path)!r})"
    done = run_python(code)
    source = "whet" if package == "safetensors" else "'whet[train]'"
    message = f"whet.checkpoint needs {package}. Install it with: pip install {source}"
    assert done.stderr.splitlines()[-1] == f"whet.errors.MissingExtraError: {message}"
