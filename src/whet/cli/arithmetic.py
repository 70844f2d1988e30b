"""The demo's task, generated: sums of two numbers, a character tokenizer, a small random Llama.

``12+93=`` is a prompt and ``105`` its completion, numbers are 0 to 99. Held-out problems never occur in training.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Row = dict[str, str]

_CHARACTERS = "0123456789+="
_SPECIAL = ("<pad>", "<eos>")


def make_problems(seed: int, n_held_out: int) -> tuple[list[Row], list[Row]]:
    """Return all sums of two numbers below 100, shuffled and split into (training, held-out) rows."""
    rows = [
        {"prompt": f"{a}+{b}=", "completion": str(a + b), "answer": str(a + b)} for a in range(100) for b in range(100)
    ]
    random.Random(seed).shuffle(rows)
    return rows[n_held_out:], rows[:n_held_out]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character."""
    vocabulary = {token: i for i, token in enumerate((*_SPECIAL, *_CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def make_model(tokenizer: Any, seed: int) -> LlamaForCausalLM:
    """Return a Llama with 1.9 million random parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def exact_match(completions: list[str], answer: list[str]) -> list[float]:
    """Return 1 for each completion that equals the answer, otherwise 0."""
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]
