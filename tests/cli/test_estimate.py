"""``whet estimate`` from the command line."""

import json

import pytest

from whet.cli import main
from whet.cli.estimate import memory_bytes
from whet.estimate import PRESETS, estimate


def test_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["estimate", "llama-2-7b", "--weights", "q4_k", "--context", "4096", "--batch", "8"]) == 0
    out = capsys.readouterr().out
    assert "llama-2-7b: 6,738,415,616 parameters, 8 x 4,096 tokens" in out
    # Layers: 6,476,005,376 weights x 4.5 / 8; KV cache: 32 layers x 4096 x 2 x 2 bytes x 32,768 tokens.
    row = next(line for line in out.splitlines() if line.startswith("│ q4_k"))
    assert "3.64 GB" in row and "KV cache 17.18 GB (bfloat16)" in out
    verdict = "fits" if memory_bytes() >= 21_450_000_000 else "does not fit"
    assert f"21.45 GB in all and {verdict} into" in " ".join(out.split())


def test_json(capsys):
    argv = [
        "estimate",
        "smollm-135m",
        "--weights",
        "int8",
        "--embeddings",
        "float32",
        "--kv-cache",
        "float32",
        "--json",
    ]
    assert main(argv) == 0
    got = json.loads(capsys.readouterr().out)
    right = estimate(PRESETS["smollm-135m"], "int8", embeddings="float32", kv_cache="float32")
    assert got["total_bytes"] == right.total and got["weights_bytes"] == right.weights
    assert got["kv_cache_bytes"] == right.kv_cache and got["fits"] == (right.total <= got["memory_bytes"])
    assert (got["weights"], got["embeddings"], got["context"], got["batch"]) == ("int8", "float32", 4096, 1)
    assert main(["estimate", "smollm-135m", "--weights", "q4_k", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["embeddings"] == "bfloat16"


def test_mistakes(capsys):
    assert main(["estimate", "qwen2-0.6b"]) == 2
    assert "whet: estimate: 'qwen2-0.6b' is no preset" in capsys.readouterr().err
    assert main(["estimate", "llama-2-7b", "--context", "0"]) == 2
    assert "context is 0, expected at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        main(["estimate", "llama-2-7b", "--weights", "q9"])
    assert exit_.value.code == 2
    with pytest.raises(SystemExit) as exit_:
        main(["estimate", "--help"])
    assert exit_.value.code == 0 and "A preset such as llama-2-7b" in capsys.readouterr().out
