"""``whet train reward``, and the trained model as a reward: native and torch, whole and adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tests.raising import assert_mentions

from whet.cli import main
from whet.rewards.functions import RewardFunctions
from whet.text.reward_model import RewardModel

LORA = {"data": "pairs.jsonl", "lora_rank": 2, "learning_rate": 1e-2, "compute": "float32", "base": "float32"}


def tensors(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model" / "adapter_model.safetensors")


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def reward_model(files: Any) -> Path:
    """A reward model that prefers answers of letters to "z", with adapters on the tiny model."""
    assert main(["train", "reward", *files("rm", **LORA, steps=24, center_rewards_coefficient=0.01)]) == 0
    return files.folder / "rm" / "model"


def test_backends_agree_resume_and_save_what_peft_opens(files: Any, tiny_model: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    pairs = files.folder / "pairs.jsonl"
    for name, steps, more in (
        ("whole", 4, {"eval_data": pairs, "eval_every": 4}),
        ("parts", 2, {}),
        ("parts", 4, {}),
        ("torch", 4, {"backend": "torch", "base": "none"}),
    ):
        assert main(["train", "reward", *files(name, **{**LORA, **more, "steps": steps})]) == 0
    whole, parts, other = (tensors(files.folder / name) for name in ("whole", "parts", "torch"))
    assert whole.keys() == parts.keys() == other.keys() and "base_model.model.score.weight" in whole
    assert all((whole[name] == parts[name]).all() for name in whole)
    steps, torchs = ([row for row in metrics(files.folder / name) if "loss" in row] for name in ("whole", "torch"))
    assert steps[0]["loss"] == torchs[0]["loss"] == pytest.approx(np.log(2)), "the head begins at 0"
    assert steps[1]["loss"] != steps[0]["loss"]
    first, last = ([row for row in metrics(files.folder / "whole") if "eval/accuracy" in row][i] for i in (0, -1))
    assert first["eval/accuracy"] == 0 and last["eval/accuracy"] == 1 and last["eval/margin"] > 0.1
    card = (files.folder / "whole" / "model" / "README.md").read_text()
    assert "AutoModelForSequenceClassification" in card and "num_labels=1" in card

    folder = files.folder / "whole" / "model"
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    opened = PeftModel.from_pretrained(base, folder).eval()
    model = RewardModel(folder)
    ids = [[*model.tokenizer.encode(text), 1] for text in ("spell a:aa", "spell a:z")]
    with torch.no_grad():
        expected = [opened(torch.tensor([row])).logits.item() for row in ids]
    assert model.score(ids).tolist() == pytest.approx(expected, abs=1e-4)
    assert model(["spell a:"] * 2, ["aa", "z"]) == model.score(ids).tolist() and expected[0] > expected[1] + 0.1


def test_all_weights_give_a_classifier(files: Any) -> None:
    from transformers import AutoModelForSequenceClassification

    given = {"data": "pairs.jsonl", "steps": 4, "learning_rate": 1e-3, "compute": "float32"}
    assert main(["train", "reward", *files("whole", **given)]) == 0
    for steps in (2, 4):
        assert main(["train", "reward", *files("parts", **{**given, "steps": steps})]) == 0
    names = [files.folder / name / "model" / "model.safetensors" for name in ("whole", "parts")]
    assert names[0].read_bytes() == names[1].read_bytes() and "score.weight" in load_file(names[0])
    folder = files.folder / "whole" / "model"
    opened = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert opened.config.num_labels == 1 and opened.config.pad_token_id == 0
    model = RewardModel(folder, weights="float32")
    rows = [[*model.tokenizer.encode(text), 1] for text in ("spell a:aa", "spell b:z!")]
    with torch.no_grad():
        expected = opened(torch.tensor(rows)).logits[:, 0].tolist()
    assert model.score(rows).tolist() == pytest.approx(expected, abs=1e-5) and expected[0] > expected[1]
    opened.config.pad_token_id = 1  # as TRL sets it for a tokenizer without padding token
    opened.save_pretrained(folder)
    with torch.no_grad():
        expected = opened(torch.tensor(rows)).logits[:, 0].tolist()
    model = RewardModel(folder, weights="float32")
    assert model.score(rows).tolist() == pytest.approx(expected, abs=1e-5)
    assert model.score([row[:-1] for row in rows]).tolist() == model.score(rows).tolist()
    again = {**given, "model": folder, "steps": 1, "learning_rate": 0}
    assert main(["train", "reward", *files("again", **again)]) == 0  # keeps the head
    [row] = [row for row in metrics(files.folder / "again") if "loss" in row]
    assert row["margin"] > 0.01


def test_adapters_of_a_gguf_file_are_trained_and_continued(files: Any, tiny_gguf: Path, error_of: Any) -> None:
    given = {**LORA, "model": tiny_gguf, "steps": 2, "base": "q8_0"}
    assert main(["train", "reward", *files("rm", **given)]) == 0
    folder = files.folder / "rm" / "model"
    found = RewardModel(folder)(["spell a:"], ["aa"])
    assert (
        np.isfinite(found).all() and json.loads((folder / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    )
    more = {"model": tiny_gguf, "data": "pairs.jsonl", "adapter": folder, "steps": 1, "learning_rate": 0}
    assert main(["train", "reward", *files("more", **more)]) == 0
    assert (tensors(files.folder / "more")["base_model.model.score.weight"]).any()
    error = error_of("train", "sft", *files("sft", model=tiny_gguf, adapter=folder))
    assert_mentions(error, folder, "reward model", "whet train reward")
    error = error_of("train", "reward", *files("torch", **{**given, "backend": "torch"}))
    assert_mentions(error, "q8_0", "torch", "--base none")


@pytest.mark.parametrize("method", ["grpo", "online-dpo"])
def test_a_folder_is_a_reward(method: str, files: Any, reward_model: Path) -> None:
    given = {**files.online, "reward": reward_model, "steps": 2, "eval_data": files.folder / "rows.jsonl"}
    given |= {"group_size": 2} if method == "grpo" else {}
    assert main(["train", method, *files("run", **given)]) == 0
    steps = [row for row in metrics(files.folder / "run") if "rewards/rm/mean" in row]
    assert len(steps) >= 2 and all(np.isfinite(row["mean_reward"]) for row in steps)
    parts = json.loads((files.folder / "run" / "memory.json").read_text())
    assert parts["measured"]["reward_models"] >= parts["predicted"]["reward_models"] > 0
    inputs = json.loads((files.folder / "run" / "inputs.json").read_text())["reward"]
    assert str(reward_model / "adapter_model.safetensors") in inputs


def test_best_of_n_keeps_the_best_answer_of_the_reward_model(files: Any, tiny_model: Path, reward_model: Path) -> None:
    out = files.folder / "best.jsonl"
    flags = ["--model", tiny_model, "--prompt", "spell a:", "--reward", reward_model, "--n", "4", "--output", out]
    assert main(["best-of-n", *map(str, flags), "--max-new-tokens", "4", "--all-candidates"]) == 0
    [row] = [json.loads(line) for line in out.read_text().splitlines()]
    scores = RewardModel(reward_model)(["spell a:"] * 4, [each["completion"] for each in row["candidates"]])
    assert [each["score"] for each in row["candidates"]] == scores and row["score"] == max(scores)


def test_eval_and_a_child_process_score_with_the_reward_model(
    files: Any, tiny_model: Path, reward_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = files.folder / "rows.jsonl"
    flags = ["--reward", reward_model, "--max-new-tokens", "4", "--size", "2"]
    assert main(["eval", *map(str, [tiny_model, "--data", rows, *flags])]) == 0
    assert "2 items" in capsys.readouterr().out
    model = RewardModel(reward_model)
    batch = {"prompts": ["spell a:"] * 2, "completions": ["aa", "z"], "completion_ids": [[1], [2]]}
    here, there = (RewardFunctions(model, timeout_s=limit)(**batch, columns={}) for limit in (None, 60.0))
    assert here.rewards.tolist() == there.rewards.tolist() and list(there.by_name) == ["rm"]


def test_a_reward_model_writes_no_texts(files: Any, tiny_model: Path, reward_model: Path, error_of: Any) -> None:
    out = files.folder / "merged"
    for command in (
        ["merge", tiny_model, out, "--adapter", reward_model],
        ["train", "sft", *files("run", model=reward_model)],
        ["generate", tiny_model, "--adapter", reward_model, "--prompt", "a"],
    ):
        assert_mentions(error_of(*command), "reward model", "--reward")
    assert not out.exists()


def test_other_folders_are_refused(files: Any, tiny_model: Path, error_of: Any) -> None:
    error = error_of("train", "grpo", *files("run", **{**files.online, "reward": tiny_model}))
    assert_mentions(error, tiny_model, "reward model", "whet train reward")
