"""Commands and training on a GPU next to the CPU."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tests.cli.conftest import files, tiny_model  # noqa: F401
from tests.raising import assert_raises
from tests.tiny import TinyModel, fours, tiny_llama, with_lora

from whet import Learner
from whet.algorithms.grpo import GRPO
from whet.cli import main
from whet.config.sampling import SamplingParams
from whet.errors import WhetValueError
from whet.serve.model import ServedModel

pytestmark = pytest.mark.needs("gpu")

PROMPTS = [[5], [6, 4], [7]]


def grpo(model: Any, device: str, **settings: Any) -> GRPO:
    given = {
        "reward_fn": fours,
        "group_size": 4,
        "max_new_tokens": 5,
        "learning_rate": 0.01,
        "kv_bytes": 1 << 20,
        "compute": "float32",
    }
    return GRPO(model, rollout_device=device, **{**given, **settings})


@pytest.mark.parametrize("kind", ["all weights", "adapters", "learner"])
def test_training_samples_on_a_gpu(kind, tmp_path):
    def make() -> Any:
        if kind == "all weights":
            return tiny_llama()
        if kind == "adapters":
            return with_lora(tiny_llama(), target_modules=["q_proj", "down_proj"])
        tiny_llama().save_pretrained(tmp_path / "model")
        return Learner(str(tmp_path / "model"), weights="float32", lora_rank=4)

    ours, theirs = grpo(make(), "gpu"), grpo(make(), "cpu")
    for _ in range(3):
        step, other = ours.train_step(PROMPTS), theirs.train_step(PROMPTS)
        assert ours.last_completions == theirs.last_completions
        assert step["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert step["sampler/logprob_difference_max"] < 1e-4
    assert ours.engine._program is not None


def test_a_gpu_is_refused_where_torch_samples():
    facts = ("GRPO", "device", "'gpu'", "torch samples")
    assert_raises(WhetValueError, facts, grpo, TinyModel(), "gpu", compute="auto")
    assert_raises(WhetValueError, ("rollout_device", "engine is 'torch'"), grpo, tiny_llama(), "gpu", engine="torch")


def test_commands_give_the_results_of_the_cpu(tiny_model, tmp_path, capsys):  # noqa: F811
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "hello", "completion": " there"}\n', encoding="utf-8")
    texts, scores = [], []
    for device in ("cpu", "gpu"):
        given = ["--weights", "float32", "--device", device]
        argv = ["generate", str(tiny_model), "--prompt", "Say é", "--max-new-tokens", "8", "--seed", "3"]
        assert main([*argv, *given]) == 0
        texts.append(capsys.readouterr().out)
        assert main(["score", str(tiny_model), "--data", str(rows), "--top-logprobs", "3", *given]) == 0
        scores.append(json.loads(capsys.readouterr().out))
    assert texts[0] == texts[1]
    assert scores[0].keys() == scores[1].keys()
    for name, value in scores[0].items():
        if "logprobs" in name:
            np.testing.assert_allclose(scores[1][name], value, atol=3e-5)


def test_a_server_computes_on_a_gpu(tiny_model):  # noqa: F811
    with ServedModel.load(str(tiny_model), weights="float32", device="gpu").engine as engine:
        assert engine._program is not None
        assert engine.generate([[5, 6]], 1, SamplingParams(max_new_tokens=2))
