"""Checkpoints and runs used as models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.cli.conftest import ROWS, write_rows
from tests.engine.tiny_models import tiny_model
from tests.models.test_export import N_ROWS, N_TOKENS, PRE_TOKENIZERS, save
from tests.models.tokenizers import vocab_files

from whet.checkpoint.unpack import unpack_model
from whet.cli import main
from whet.models.sources.gguf_container import read_gguf

RUNS: dict[str, list[str]] = {
    "all weights": [],
    "adapters": ["--lora-rank", "2", "--base", "none"],
    "adapters on a packed base": ["--lora-rank", "2", "--use-rslora", "--base", "q8_0"],
    "and whole modules": ["--lora-rank", "2", "--modules-to-save", "norm", "--lora-layers", "q_proj", "embed_tokens"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    tokenizer = vocab_files.train_byte_level(list(PRE_TOKENIZERS["qwen2"].patterns), N_TOKENS)
    model = tiny_model("qwen3", vocab_size=N_ROWS, hidden_size=64, intermediate_size=64)
    return save(model, tokenizer, tmp_path_factory.mktemp("checkpoints") / "model")


@pytest.fixture(params=RUNS)
def run(request, folder, tmp_path) -> Path:
    """A run of two steps, with a checkpoint for each."""
    rows, out = tmp_path / "rows.jsonl", tmp_path / "run"
    write_rows(rows, ROWS)
    arguments = ["--model", str(folder), "--data", str(rows), "--output-dir", str(out), "--steps", "2"]
    more = ["--checkpoint-every", "1", "--learning-rate", "0.1", *RUNS[request.param]]
    assert main(["train", "sft", *arguments, *more]) == 0
    return out


def test_last_checkpoint_equals_the_model_of_the_run(run, tmp_path):
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    unpack_model(run / "checkpoints" / "step-000002", unpacked)
    [name] = [path.name for path in unpacked.glob("*.safetensors")]
    found, right = (load_file(folder / name) for folder in (unpacked, run / "model"))
    assert found.keys() == right.keys()
    assert all(found[key].equal(right[key]) for key in right)
    for path in run.glob("model/*.json"):
        if path.name.startswith(("adapter", "whet", "config")):
            assert read_sorted(unpacked / path.name) == read_sorted(path), path.name


def read_sorted(path: Path) -> dict[str, Any]:
    """Read a JSON object with sorted lists, which PEFT writes in set order."""
    content = json.loads(path.read_text())
    return {key: sorted(map(str, value)) if isinstance(value, list) else value for key, value in content.items()}


def test_merge_of_a_checkpoint(run, tmp_path):
    """The merged weights are the checkpoint's, not the run's."""
    if (run / "model" / "config.json").is_file():
        pytest.skip("there are no adapters")
    sources = {"ended": run, "last": run / "checkpoints" / "step-000002", "first": run / "checkpoints" / "step-000001"}
    for name, source in sources.items():
        assert main(["merge", str(source), str(tmp_path / name)]) == 0
    right, last, first = (load_file(tmp_path / name / "model.safetensors") for name in sources)
    assert all(last[key].equal(right[key]) for key in right)
    assert not all(first[key].equal(right[key]) for key in right)


def test_export_of_a_checkpoint(run, tmp_path, capsys):
    files = []
    for name, source in {"ended": run, "last": run / "checkpoints" / "step-000002"}.items():
        files.append(tmp_path / f"{name}.gguf")
        if main(["export", str(source), str(files[-1]), "--quantize", "f32"]):
            assert "whet merge" in capsys.readouterr().err and "norm" in (run / "config.toml").read_text()
            return
    a, b = (read_gguf(path, "here").tensors for path in files)
    assert a.keys() == b.keys()
    assert all((a[key].tensor == b[key].tensor).all() for key in a)


def test_error_of_an_unfinished_run_names_its_newest_checkpoint(run, tmp_path, capsys):
    shutil.rmtree(run / "model")
    assert main(["merge", str(run), str(tmp_path / "out")]) == 2
    assert "checkpoints/step-000002" in capsys.readouterr().err
    shutil.rmtree(run / "checkpoints")
    assert main(["generate", str(run), "--prompt", "a"]) == 2
    assert "no checkpoint" in capsys.readouterr().err
