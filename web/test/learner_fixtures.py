"""Fixtures for the tests of the learner: results of whet.Learner in float32, of its losses and of the trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tests.engine.tiny_models import tiny_model

import whet
from whet.algorithms import GRPO, SFT
from whet.data.rows import tokenize_completion
from whet.errors import WhetValueError
from whet.learner.batch import pack_batch
from whet.losses import grpo_loss, sft_loss
from whet.losses.terms import importance_weights
from whet.models.adapter_files import read_peft
from whet.models.tokenizers import read_tokenizer

PROMPTS = [[3, 9, 4], [7, 2], [3, 9, 4], [5], [3, 9]]
COMPLETIONS = [[8, 6, 2, 11], [1], [8, 3], [12, 4, 9], [4, 4, 4, 1, 2]]
CASES: dict[str, dict[str, Any]] = {
    "f32.gguf": {},
    "q4_0.gguf": {"lora_rank": 4, "lora_alpha": 16, "seed": 5},
    "q4_k.gguf": {"lora_rank": 8, "lora_layers": ["v_proj", "gate_proj", "q_proj"], "seed": 2**63 + 7},
    "folder": {"lora_rank": 3},
    "learner/gemma2": {"lora_rank": 2},
    "learner/gpt_neox": {"lora_rank": 2, "seed": 1},
    "learner/gpt2": {"lora_rank": 2, "lora_layers": ["c_attn", "mlp.c_proj"]},
    "families/qwen3_5_text.gguf": {"lora_rank": 2},
    "families/gemma4.gguf": {"lora_rank": 2, "lora_layers": ["v_proj", "per_layer_model_projection"]},
    "families/nemotron_h-groups.gguf": {"lora_rank": 2},
}
"""Settings of a learner by model; without a rank, the defaults."""
TRAINED = {"lora_rank": 4, "compute": "float32"}


def learning(folder: Path) -> None:
    """Write the fixtures: models into the folder learner, saved adapters next to them, and learner.json."""
    for name in CASES:
        if name.startswith("learner/"):
            tiny_model(name.removeprefix("learner/")).save_pretrained(folder / name)
    cases = [case(folder, name, settings) for name, settings in CASES.items()]
    texts = [
        {"prompt": "The model", "completion": " is in café"},
        {"prompt": "1 + 1 = ", "completion": "2"},
        {"prompt": [{"role": "user", "content": "Why?"}], "completion": "So."},
    ]
    tokenizer = read_tokenizer(folder / "q8_0.gguf")
    encoded = [dict(zip(("prompt", "completion"), tokenize_completion(row, tokenizer), strict=True)) for row in texts]
    found = {
        "prompts": PROMPTS, "completions": COMPLETIONS, "cases": cases, "texts": texts, "encoded": encoded,
        "batch": {name: value.tolist() for name, value in pack_batch(*sorted_rows())._asdict().items()},
        "random": [random(seed) for seed in (0, 1, 2**32, 2**64 - 1)], "losses": losses(),
        "sft": sft(folder / "f32.gguf"), "grpo": [grpo(folder / name) for name in ("f32.gguf", "q4_0.gguf")],
    }  # fmt: skip
    (folder / "learner.json").write_text(json.dumps(found))


def sorted_rows() -> tuple[list[list[int]], list[list[int]]]:
    rows = sorted(zip(PROMPTS, COMPLETIONS, strict=True))
    return [prompt for prompt, _ in rows], [completion for _, completion in rows]


def case(folder: Path, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return log-probs and gradients of one loss, and log-probs after a step; save the initial adapters."""
    learner = whet.Learner(folder / name, **settings, compute="float32")
    learner.save_pretrained(folder / f"learner/{name.replace('/', '-')}-adapter", name)
    for adapter in learner.adapters:  # so that A has a gradient
        adapter.b[:] = np.random.default_rng(0).normal(0, 0.05, adapter.b.shape)
    learner.update()
    learner.save_pretrained(folder / f"learner/{name.replace('/', '-')}-moved", name)
    found = learner.logprobs(PROMPTS, COMPLETIONS, temperature=0.9)
    learner.backward(np.sin(np.arange(found.logprobs.size, dtype=np.float32)).reshape(found.logprobs.shape))
    gradients = {each.name: [x.ravel().tolist() for x in each.to_module(each.grad_a, each.grad_b)]
                 for each in learner.adapters}  # fmt: skip
    norm = learner.step(lr=0.01)
    after = learner.logprobs(PROMPTS, COMPLETIONS, temperature=0.9)
    base = learner.logprobs(PROMPTS, COMPLETIONS, temperature=0.9, adapters=False)
    rank, alpha = len(learner.adapters[0].a), learner.adapters[0].alpha
    return {
        "name": name, "settings": {key: str(value) if key == "seed" else value for key, value in settings.items()},
        "rank": rank, "alpha": alpha, "parameters": learner.n_parameters, "norm": norm, "gradients": gradients,
        **{key: ragged(each) for key, each in (("logprobs", found), ("after", after), ("base", base))},
    }  # fmt: skip


def ragged(found: Any) -> list[list[float]]:
    return [row[mask].tolist() for row, mask in zip(found.logprobs, found.mask, strict=True)]


def random(seed: int) -> dict[str, Any]:
    words = np.random.SeedSequence([seed, 3]).generate_state(4).tolist()
    return {"seed": str(seed), "words": words, "uniforms": np.random.default_rng(seed).random(5).tolist()}


def losses() -> dict[str, Any]:
    """Return arguments and results of the losses, with ratios inside, outside and on the bounds of the clipping."""
    rng = np.random.default_rng(8)
    old = -np.abs(rng.normal(size=(1, 40)))
    logprobs, sampler = old + 0.3 * rng.normal(size=(1, 40)), old + 0.8 * rng.normal(size=(1, 40))
    logprobs[0, :4] = old[0, :4]
    old, logprobs, sampler = (each.astype(np.float32) for each in (old, logprobs, sampler))
    advantages, mask = rng.normal(size=(1, 40)).astype(np.float32), np.ones((1, 40), bool)
    weights, _ = importance_weights(old, sampler, mask, correction="token_truncate", cap=1.5)
    options: dict[str, Any] = {"sampler_logprobs": sampler, "sampler_correction": "token_truncate", "sampler_cap": 1.5}
    found = grpo_loss(logprobs, old, advantages, mask, epsilon=0.2, n_tokens=97, **options)
    supervised = sft_loss(logprobs, mask, n_tokens=97)
    rewards = np.array([1, 0, 0.25, 1, 2, 2, 2, 2], np.float64)
    arrays = {
        "old": old, "logprobs": logprobs, "sampler": sampler, "advantages": advantages, "weights": weights,
        "rewards": rewards, "groups": whet.compute_batch_group_advantages(rewards, 4),
        "grpo": found.gradients["logprobs"], "sft": supervised.gradients["logprobs"],
    }  # fmt: skip
    values = {"grpoValue": found.value, "sftValue": supervised.value}
    return {name: array.ravel().tolist() for name, array in arrays.items()} | values


def sft(path: Path) -> list[dict[str, float]]:
    """Return metrics of steps of SFT on the rows, two micro-batches each."""
    trainer = SFT(whet.Learner(path, **TRAINED), learning_rate=0.01, max_tokens_per_step=12)
    steps = [trainer.train_step(PROMPTS, COMPLETIONS) for _ in range(3)]
    return [{"loss": step["loss"], "gradNorm": step["grad_norm"]} for step in steps]


def even(completion_ids: list[list[int]]) -> list[float]:
    """Share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def grpo(path: Path) -> dict[str, Any]:
    """Return metrics of steps of GRPO with two updates each, of which the second is clipped."""
    learner = whet.Learner(path, **TRAINED)
    trainer = GRPO(
        learner, reward_fn=even, group_size=4, max_new_tokens=6, num_iterations=2, learning_rate=0.02, seed=11,
        adam_epsilon=0.01, epsilon=0.1, stop_token_ids=[5],
    )  # fmt: skip
    steps = [trainer.train_step(PROMPTS[:4]) for _ in range(2)]
    names = {"loss": "loss", "grad_norm": "gradNorm", "mean_reward": "meanReward"}
    return {"file": path.name, "steps": [{to: step[name] for name, to in names.items()} for step in steps]}


def read_adapter(model: str, adapter: str, rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """Return what native Whet computes with adapters that the package has saved, for tests.

    Raises:
        WhetValueError: the model is missing.
    """
    if not Path(model).exists():
        raise WhetValueError(f"read_adapter: there is no {model}. Generate the fixtures.")
    engine = whet.Engine.from_pretrained(model)
    number = engine.add_adapter(adapter)
    ids = [[*row["prompt"], *row["completion"]] for row in rows]
    prompts, completions = ([row[name] for row in rows] for name in ("prompt", "completion"))
    learner = whet.Learner(model, adapter=adapter, compute="float32")
    is_folder = Path(model).is_dir()
    return {
        "peft": is_read_by_peft(model, adapter) if is_folder else None,
        "engine": [scores.tolist() for scores in engine.logprobs(ids, adapter=number)],
        "learner": ragged(learner.logprobs(prompts, completions)),
        "modules": list(learner.factors()),
    }


def is_read_by_peft(model: str, adapter: str) -> bool:
    """Whether PEFT loads the adapters, each with the factors and the scaling in the files."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    loaded = read_peft(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter))
    saved = read_peft(adapter)
    return loaded.keys() == saved.keys() and all(
        np.array_equal(mine, its) for name in saved for mine, its in zip(loaded[name], saved[name], strict=True)
    )
