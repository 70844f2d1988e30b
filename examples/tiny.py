"""A small Llama, a byte-level tokenizer and rows of sums: the notebooks' stand-in for a real model and its data."""

from __future__ import annotations

import random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, <eos> and <pad>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = "\u0120"  # how byte-level BPE writes a space; GGUF files need one merge at least
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *alphabet, space + space])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[(space, space)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> LlamaForCausalLM:
    """Return a Llama of 0.5 million random parameters."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        **sizes,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def make_sums(n_held_out: int = 80, limit: int = 20, seed: int = 0) -> tuple[list[dict], list[dict]]:
    """Return training rows and held-out rows: all sums of two numbers below ``limit``, shuffled."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(limit) for b in range(limit)]
    random.Random(seed).shuffle(rows)
    return rows[n_held_out:], rows[:n_held_out]
