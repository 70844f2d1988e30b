"""``whet estimate`` from the command line."""

import json

import pytest
from tests.raising import assert_mentions

from whet.cli import main
from whet.config.algorithms import ALGORITHMS
from whet.models.sizes import estimate, load_source, training
from whet.runs.estimate import measure_interpreter
from whet.system.memory import machine_bytes


def test_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["estimate", "llama-2-7b", "--weights", "q4_k", "--context", "4096", "--batch", "8"]) == 0
    out = capsys.readouterr().out
    assert "llama-2-7b: 6,738,415,616 parameters, 8 x 4,096 tokens" in out
    # Layers: 6,476,005,376 weights x 4.5 / 8; embeddings: 2 x 131,072,000 x 8.5 / 8; norms: 266,240 x 4.
    row = next(line for line in out.splitlines() if line.startswith("│ q4_k"))
    assert "3.64 GB" in row and "278.53 MB" in row and "3.92 GB" in row
    # Keys and values: 32 layers x 4096 x 2 x 2 bytes x 8 x 65 pages of 64.
    assert "17.45 GB (bfloat16)" in out
    whole = estimate(load_source("llama-2-7b"), "q4_k", 4096, 8).total
    verdict = "fits" if machine_bytes() >= whole else "does not fit"
    assert f"q4_k takes 21.46 GB in total and {verdict} into" in " ".join(out.split())
    assert "weights 26.95 GB, gradients 26.95 GB, AdamW moments 53.91 GB" in " ".join(out.split())


def test_json(capsys):
    assert main(["estimate", "smollm-135m", "--weights", "int8", "--embeddings", "float32", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    right = estimate(load_source("smollm-135m"), "int8", embeddings="float32")
    assert got["total_bytes"] == right.total and got["weights_bytes"] == right.weights
    assert got["kv_cache_bytes"] == right.kv_cache and got["fits"] == (right.total <= got["memory_bytes"])
    assert (got["weights"], got["embeddings"], got["context"], got["batch"]) == ("int8", "float32", 4096, 1)
    assert main(["estimate", "smollm-135m", "--weights", "q4_k", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert (got["embeddings"], got["kv_cache"]) == ("q8_0", "bfloat16")
    trained = training(load_source("smollm-135m").config)
    assert got["training_bytes"]["total"] == trained.total


def test_estimate_and_info_agree_on_a_folder(tiny_model, capsys):
    assert main(["info", str(tiny_model), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    for weights, n_bytes in info["weights_bytes"].items():
        assert main(["estimate", str(tiny_model), "--weights", weights, "--json"]) == 0
        got = json.loads(capsys.readouterr().out)
        assert got["weights_bytes"] == n_bytes and got["context"] == 512
        kv = {"float32": "float32"}.get(weights, "bf16")
        assert got["kv_cache_bytes"] == 9 * 64 * info["kv_bytes_per_token"][kv]


def test_invalid_arguments_are_named(capsys):
    for arguments, facts in (
        (["qwen2-0.6b"], ("'qwen2-0.6b'", "preset", "qwen2-0.5b")),
        (["llama-2-7b", "--context", "0"], ("context is 0", ">= 1")),
        (["llama-2-7b", "--context", "4097"], ("context is 4097", 4096)),
        (["llama-2-7b", "--batch", "-1"], ("batch is -1", ">= 1")),
        (["llama-2-7b", "--weights", "q9"], ("weights is 'q9'", "float32, bfloat16")),
        (["llama-2-7b", "--embeddings", "float16"], ("embeddings is 'float16'", "float32, bfloat16")),
    ):
        assert main(["estimate", *arguments]) == 2
        assert_mentions(capsys.readouterr().err, *facts)
    with pytest.raises(SystemExit) as exit_:  # the format of the KV cache follows the weights
        main(["estimate", "llama-2-7b", "--kv-cache", "float32"])
    assert exit_.value.code == 2
    with pytest.raises(SystemExit) as exit_:
        main(["estimate", "--help"])
    assert exit_.value.code == 0 and "A preset such as llama-2-7b" in capsys.readouterr().out


def test_run_memory_as_table_and_json(tiny_model, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "run.toml").write_text(f'model = "{tiny_model}"\nbatch_size = 4\nlora_rank = 2\n')
    argv = ["estimate", "--train", "grpo", str(tmp_path / "run.toml"), "--group-size", "4", "--prompt-tokens", "9"]
    assert main([*argv, "--max-new-tokens", "30", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["total_bytes"] == sum(got["parts"].values()) and got["parts"]["interpreter"] > 3e7
    # q, k, v and o of 32 to 32, 16, 16 and 32; gate, up and down of 32 to 64, in 2 layers: two matrices of rank 2 each.
    n_trained = 2 * 2 * (2 * (32 + 32) + 2 * (16 + 32) + 3 * (64 + 32))
    assert got["parts"]["gradients"] == 4 * n_trained and got["parts"]["moments"] == 8 * n_trained
    assert main(["estimate", "smollm-135m", "--train=dpo", "--completion-tokens", "64"]) == 0
    out = capsys.readouterr().out
    assert "whet train dpo of smollm-135m" in out and "weights of the reference model" in out
    assert "538.06 MB" in out and "1.08 GB" in out  # weights, gradients, reference; moments
    parts = {}
    for method in ("dpo", "reward"):
        assert main(["estimate", "llama-2-7b", f"--train={method}", "--json"]) == 0
        parts[method] = json.loads(capsys.readouterr().out)["parts"]
    assert "reference" not in parts["reward"]
    assert parts["dpo"]["weights"] - parts["reward"]["weights"] == 4 * 32000 * 4096  # no LM head
    assert parts["reward"]["activations"] < parts["dpo"]["activations"]


@pytest.mark.parametrize("method", ALGORITHMS)
def test_every_method_has_an_estimate(method, tiny_model, capsys):
    """Adapters of a learner; only methods that sample have memory for it."""
    teacher = ["--teacher", str(tiny_model)] if method == "distill" else []
    assert main(["estimate", "smollm-135m", "--train", method, "--lora-rank=4", "--json", *teacher]) == 0
    got = json.loads(capsys.readouterr().out)
    parts = got["parts"]
    assert got["total_bytes"] == sum(parts.values()) and parts["weights"] > 2e8 and parts["moments"] > 0
    assert (got["sampling_bytes"] > 0) == ALGORITHMS[method].config.samples


def test_invalid_settings_of_run_memory_are_named(capsys):
    for arguments, facts in (
        (["smollm-135m", "--train", "rlhf"], ("--train is 'rlhf'", ", ".join(ALGORITHMS))),
        (["smollm-135m", "--train"], ("--train is ''", ", ".join(ALGORITHMS))),
        (["--train", "sft"], ("model is missing",)),
        (["smollm-135m", "--train", "sft", "--compute", "torch"], ("compute is 'torch'",)),
        (["smollm-135m", "--train", "sft", "--lora-rank", "8", "--lora-layers", "c_attn"], ("'c_attn'", "q_proj")),
    ):
        assert main(["estimate", *arguments]) == 2
        assert_mentions(capsys.readouterr().err, *facts)
    with pytest.raises(SystemExit):  # sft does not sample
        main(["estimate", "smollm-135m", "--train", "sft", "--group-size", "8"])


def test_run_memory_includes_the_packages_of_tasks():
    """Errors of missing tasks or tokenizers are left to the run."""
    pytest.importorskip("reasoning_gym")
    task = ["reasoning_gym:chain_sum"]
    native, with_task, modules = (
        measure_interpreter("nowhere", tasks, packages)
        for tasks, packages in (([], []), (task, []), ([], ["torch", "transformers"]))
    )
    assert 2**25 < native < with_task - 2**23 and native < 2**27 < modules
