"""Trained reward models on the native engine: scores of texts, and a reward function for the algorithms that sample.

A reward model is a folder that ``whet train reward`` or TRL wrote: a sequence classifier with one label, or PEFT's
adapters of one. Its score is the product of the head and the final hidden state of the last token.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet.data.messages import is_messages
from whet.data.rows import tokenize_completion
from whet.engine import Engine
from whet.errors import WhetValueError
from whet.learner.batch import count_unpadded
from whet.memory import register_holder, unregister_holder
from whet.models.adapter_files import (
    SCORE,
    base_name,
    check_reward_head,
    has_reward_head,
    is_adapter_folder,
    read_peft_modules,
)
from whet.models.base_record import read_binding
from whet.models.hub import find_on_hub
from whet.models.slots import ModelSource
from whet.models.sources.folder import is_classifier_folder, open_classifier
from whet.models.sources.pretrained import open_pretrained
from whet.text.model import find_model, load_chat_tokenizer, load_engine


def is_reward_model(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the folder of a reward model."""
    return is_classifier_folder(path) or has_reward_head(path)


class RewardHead(NamedTuple):
    """The head of a reward model.

    Attributes:
        weight: (1, hidden_dim) float32.
        pad_token_id: token that does not count at the end of a row; None: all count.
    """

    weight: np.ndarray
    pad_token_id: int | None = None

    def inputs(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens of a row up to the one whose hidden state is scored."""
        return ids[: max(1, count_unpadded(ids, self.pad_token_id))]

    def scores(self, hidden: np.ndarray) -> np.ndarray:
        """Return the scores (n,) float64 of hidden states (n, hidden_dim) float32."""
        return (hidden * self.weight).sum(1, dtype=np.float64)


def open_reward_source(path: str) -> tuple[ModelSource, str | None]:
    """Return the model of a reward model, whose weights are not read, and the format of its packed weights."""
    if not is_adapter_folder(path):
        return open_classifier(path).source, None
    source = open_pretrained(find_on_hub(base_name(path, "RewardModel"), "RewardModel"))
    record = read_binding(path, source, False, "RewardModel")
    return source, record["weights"] if record else None


def read_reward_head(folder: str | os.PathLike[str]) -> RewardHead:
    """Return the head of a sequence classifier's folder."""
    found = open_classifier(folder)
    return RewardHead(found.head, found.pad_token_id)


def add_reward_adapter(engine: Engine, folder: str | os.PathLike[str], where: str) -> tuple[int, RewardHead]:
    """Add the adapters of a reward model to an engine of their base, and return their number and the head.

    Raises:
        CheckpointError: the adapters do not fit the model, or are damaged.
    """
    modules: dict[str, Any] = read_peft_modules(folder, head=True)
    head = check_reward_head(modules.pop(SCORE), engine.config.hidden_dim, where, folder)
    return engine.add_adapter(modules), RewardHead(head)


def tokenize_answer(prompt: Any, completion: Any, tokenizer: Any) -> list[int]:
    """Return the tokens of a prompt and an answer to score, tokenised as a row of ``whet train reward``.

    Args:
        prompt: text, messages or token ids.
        completion: the answer in the same form; also a text after messages.
        tokenizer: the reward model's.

    Raises:
        WhetValueError: as ``tokenize_completion``.
        WhetTypeError: as ``tokenize_completion``.
    """
    if is_messages(prompt) and isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    prompt_ids, completion_ids = tokenize_completion({"prompt": prompt, "completion": completion}, tokenizer)
    return prompt_ids + completion_ids


class RewardModel:
    """A trained reward model, and a reward function: ``GRPO(model, reward_fn=RewardModel("runs/rm/model"))``.

    Args:
        path: folder of the reward model. Its base model, if it has adapters, is read from the path that they record.
        weights: format of the packed weights, as for ``Engine``. Default: bf16; for adapters their base's.

    Attributes:
        engine: computes hidden states.
        tokenizer: of the reward model.
        head: its head.

    Raises:
        WhetValueError: the folder is not a reward model, or the engine does not support it.
        CheckpointError: adapters are damaged, or of another base.
    """

    def __init__(self, path: str | os.PathLike[str], *, weights: str | None = None) -> None:
        path, where = os.fspath(path), "RewardModel"
        if not is_reward_model(path):
            raise WhetValueError(
                f"{where}: {path!r} is not the folder of a reward model. Pass the folder model of a run of whet train "
                f"reward, or a sequence classifier with one label."
            )
        folder = Path(path).resolve()
        self.__name__ = folder.parent.name if folder.name == "model" else folder.name  # in metrics: of the run
        self._adapter: int | None = None
        if is_adapter_folder(path):
            model = find_model(find_on_hub(base_name(path, where), where), where)
            self.engine = load_engine(model, weights, None, where, adapter=path)
            self._adapter, self.head = add_reward_adapter(self.engine, path, where)
            self.tokenizer = load_chat_tokenizer(model, where, adapter=path)
        else:
            self.engine = load_engine(path, weights, None, where, scores=True)
            self.head = read_reward_head(path)
            self.tokenizer = load_chat_tokenizer(path, where)
        unregister_holder(self.engine)
        register_holder(self)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """Return the score of each completion, in the forms that reward functions get."""
        pairs = zip(prompts, completions, strict=True)
        return self.score([tokenize_answer(*pair, self.tokenizer) for pair in pairs]).tolist()

    def score(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the scores (n,) float64 of rows of token ids, each a prompt and an answer with its EOS.

        A score depends only on its row, to the bit.

        Raises:
            WhetValueError: as ``Engine.embed``.
        """
        return self.head.scores(self.engine.embed(list(map(self.head.inputs, rows)), adapter=self._adapter))

    def memory_blocks(self) -> Iterator[tuple[str, Hashable, int]]:
        """Yield the memory of the engine, for ``whet.memory_report``."""
        for _, key, n_bytes in self.engine.memory_blocks():
            yield "reward_models", key, n_bytes
