"""Compatibility with library versions; tests/wide/test_versions.py runs this in one environment per version set.

    python -m tests.wide.promises write FOLDER        write a folder of every family by this environment's libraries
    python -m tests.wide.promises use FOLDER OUT      load the folders, train, and write the trained models
    python -m tests.wide.promises read OUT            load models trained in another environment

Each folder includes logits, with which a reader verifies the model. Any error ends the process.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import peft
import torch
import transformers
from tests.engine.tiny_models import tiny_model
from tests.tiny import letters_tokenizer

import whet
from whet.algorithms import DPO, GRPO, SFT
from whet.models.written_folder import complete_folder

CASES = [
    "llama", "llama-llama3", "llama-yarn", "llama-longrope", "mistral", "qwen2-windows", "qwen3", "smollm3", "granite",
    "olmo2", "gemma2", "gemma3", "starcoder2", "stablelm", "phi-rotary", "phi3", "phi3-longrope", "gpt_neox-serial",
    "gpt2", "gptj",
]  # fmt: skip
IDS = [1, 5, 6, 9, 10, 11, 4, 7, 8, 3]
TOLERANCE = 1e-4


def main(what: str, *folders: str) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    {"write": write, "use": use, "read": read}[what](*map(Path, folders))


def write(folder: Path) -> None:
    for case in CASES:
        model = tiny_model(case)
        model.save_pretrained(folder / case)
        save_rest(model, folder / case)


def use(folder: Path, out: Path) -> None:
    for case in CASES:
        train(load(folder / case), out / case)
    train_adapters(load(folder / "llama"), folder / "llama", out / "adapter")


def read(out: Path) -> None:
    for case in CASES:
        load(out / case)
    check(peft.PeftModel.from_pretrained(load(out / "llama-base"), out / "adapter"), out / "adapter")


def save_rest(model: Any, folder: Path) -> None:
    tokenizer = letters_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<call>"]})
    tokenizer.save_pretrained(folder)
    complete_folder(folder)
    np.save(folder / "logits.npy", logits_of(model))


def logits_of(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.tensor([IDS])).logits[0].numpy()


def load(folder: Path) -> Any:
    """Load the model of a folder and check that transformers and Whet's engine reproduce its logits."""
    # In transformers 4, Gemma 2 on sdpa ignores its soft-cap of scores.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    check(model, folder)
    # longrope depends on the sequence length.
    with whet.Engine.from_pretrained(folder, weights="float32", max_position=16) as engine:
        np.testing.assert_allclose(engine.logits(IDS), np.load(folder / "logits.npy"), rtol=0, atol=TOLERANCE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("ab<call>")["input_ids"] == [4, 5, 12], folder
    return model


def check(model: Any, folder: Path) -> None:
    np.testing.assert_allclose(
        logits_of(model), np.load(folder / "logits.npy"), rtol=0, atol=TOLERANCE, err_msg=folder.name
    )


def train(model: Any, out: Path) -> None:
    """Take a step of each algorithm on the kernels, with rollouts of the native engine."""
    tokenizer = letters_tokenizer()
    # StableLM's attention in transformers 4 does not support custom attention functions.
    is_old = transformers.__version__.startswith("4.") and model.config.model_type == "stablelm"
    compute = "torch" if is_old else "float32"
    rows = datasets.Dataset.from_list([{"prompt": "ab", "completion": "cd"}, {"prompt": "ef", "completion": "g"}])
    options = {"tokenizer": tokenizer, "learning_rate": 1e-3, "compute": compute, "training_mode": False}
    SFT(model, batch_size=2, **options).train(rows, steps=1)
    DPO(model, batch_size=1, **options).train([{"prompt": "ab", "chosen": "cd", "rejected": "gh"}], steps=1)
    grpo = GRPO(
        model, reward_fn=count_letters, group_size=4, batch_size=2, max_new_tokens=6, engine="native", **options
    )
    metrics = grpo.train([{"prompt": "ab"}, {"prompt": "cd"}], steps=1)
    assert metrics["sampler/logprob_difference_max"] < 1e-3, (out.name, metrics)
    grpo.save_pretrained(out)
    save_rest(model, out)


def train_adapters(model: Any, base: Path, out: Path) -> None:
    model.save_pretrained(out.parent / "llama-base")
    save_rest(model, out.parent / "llama-base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    options = {"tokenizer": letters_tokenizer(), "learning_rate": 1e-2, "compute": "float32"}
    SFT(adapted, batch_size=1, **options).train([{"prompt": "ab", "completion": "cd"}], steps=2)
    trainer = GRPO(
        adapted,
        reward_fn=count_letters,
        group_size=4,
        max_new_tokens=6,
        engine="native",
        beta=0.1,
        batch_size=1,
        **options,
    )
    metrics = trainer.train([{"prompt": "ab"}], steps=1)
    assert metrics["sampler/logprob_difference_max"] < 1e-3, metrics
    trainer.save_pretrained(out)
    np.save(out / "logits.npy", logits_of(adapted))
    with whet.Engine.from_pretrained(base, weights="float32") as engine:
        for adapter in (adapted, out):
            own = engine.logits(IDS, adapter=engine.add_adapter(adapter))
            np.testing.assert_allclose(own, np.load(out / "logits.npy"), rtol=0, atol=TOLERANCE)
    json.loads((out / "adapter_config.json").read_text())


def count_letters(completions: list[str]) -> list[float]:
    return [float(sum(letter in "ace" for letter in text)) for text in completions]


if __name__ == "__main__":
    main(*sys.argv[1:])
