"""Models, rows and trainers of the tests of the trainer."""

from __future__ import annotations

import torch
from tests.tiny import (
    OwnGenerate,
    TinyModel,
    tiny_llama,
    with_lora,
)

from whet.algorithms import SFT
from whet.nn.frozen import frozen_model
from whet.training.callbacks import Callback

ROWS = [{"prompt": [4 + i % 5, 5], "completion": [6 + i % 6, 4 + i % 3, 2]} for i in range(10)]
PAIRS = [{"prompt": [4 + i % 5], "chosen": [6 + i % 6, 2], "rejected": [5, 4 + i % 7, 2]} for i in range(10)]
PROMPTS = [{"prompt": [4 + i % 5, 5][: 1 + i % 2]} for i in range(10)]


class Net(TinyModel):
    """Model in float32."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout, dtype=torch.float32)


class Sampling(Net, OwnGenerate):
    pass


def llama():
    return tiny_llama(num_key_value_heads=2, tie_word_embeddings=True)


def lora():
    return with_lora(llama(), r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.2, task_type=None)


def narrow():
    return llama().bfloat16()


def packed():
    return with_lora(frozen_model(llama(), "q8_0"), r=2, target_modules="all-linear", lora_dropout=0.2)


def ones(completions):
    return [float((c == 4).sum() + 0.1 * c[0]) for c in completions]


def sft(model=None, **settings) -> SFT:
    return SFT(model if model is not None else Net(), **{"learning_rate": 0.01, "batch_size": 3} | settings)


class RecordingLogger:
    total_steps = None

    def __init__(self):
        self.rows = []

    def log(self, metrics, step):
        self.rows.append((step, dict(metrics)))

    def close(self):
        pass


class RecordingCallback(Callback):
    def __init__(self, stop_at=None):
        self.entries = []
        self.stop_at = stop_at

    def on_train_begin(self, trainer, total_steps):
        self.entries.append(("begin", trainer.step, total_steps))

    def on_step_end(self, trainer, metrics):
        self.entries.append(("step", trainer.step))
        trainer.should_stop = trainer.step == self.stop_at

    def on_train_end(self, trainer):
        self.entries.append(("end", trainer.step))
