"""GGUF files that hold a tokenizer and nothing else, made from what tokenizers and sentencepiece have trained."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import gguf
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tests.gguf_files import add_keys
from tests.models.tokenizers.texts import make_texts
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from whet.models.tokenizers.pre_tokenizers import PRE_TOKENIZERS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


CHAT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_file(path: Path, metadata: dict[str, Any]) -> Path:
    """Write a GGUF file with these keys."""
    writer = gguf.GGUFWriter(path, "llama")
    add_keys(writer, metadata)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def train_byte_level(patterns: list[str], n: int = 900) -> Tokenizer:
    """Train byte-level BPE with two special tokens and a user-defined one."""
    tokenizer = Tokenizer(models.BPE())
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=n,
        special_tokens=["<s>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(make_texts(400, seed=1), trainer)
    tokenizer.add_tokens([AddedToken("<|tool|>", normalized=False)])
    return tokenizer


def byte_level_metadata(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """Return the keys that llama.cpp's converter writes."""
    made = json.loads(tokenizer.to_str())
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    special = {token["content"]: CONTROL if token["special"] else USER_DEFINED for token in made["added_tokens"]}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [special.get(token, NORMAL) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in made["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def _training_texts() -> list[str]:
    """Texts of a few alphabets that a small vocabulary covers, different from ``make_texts``."""
    return [
        text for text in make_texts(4000, seed=1) if text and 0x20 <= min(map(ord, text)) <= max(map(ord, text)) < 0x500
    ]


def train_sentencepiece(kind: str, **options: Any) -> bytes:
    """Train a "bpe" or "unigram" model."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_training_texts()),
        model_writer=made,
        **{
            "model_type": kind,
            "vocab_size": 1200,
            "hard_vocab_limit": False,
            "user_defined_symbols": ["<tool>"],
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "num_threads": 1,
            "minloglevel": 2,
            **options,
        },
    )
    return made.getvalue()


def sentencepiece_metadata(model: bytes) -> dict[str, Any]:
    """Return the keys that llama.cpp's converter writes."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    is_unigram = proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM
    return {
        "tokenizer.ggml.model": "t5" if is_unigram else "llama",
        "tokenizer.ggml.tokens": [piece.piece for piece in proto.pieces],
        "tokenizer.ggml.scores": [piece.score for piece in proto.pieces],
        "tokenizer.ggml.token_type": [piece.type for piece in proto.pieces],
        "tokenizer.ggml.unknown_token_id": proto.trainer_spec.unk_id,
        "tokenizer.ggml.bos_token_id": proto.trainer_spec.bos_id,
        "tokenizer.ggml.eos_token_id": proto.trainer_spec.eos_id,
        "tokenizer.ggml.add_space_prefix": proto.normalizer_spec.add_dummy_prefix,
        "tokenizer.ggml.remove_extra_whitespaces": proto.normalizer_spec.remove_extra_whitespaces,
        "tokenizer.ggml.precompiled_charsmap": proto.normalizer_spec.precompiled_charsmap,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
    }


def byte_level_keys(pre: str = "gpt-2", **keys: Any) -> dict[str, Any]:
    """Metadata of a small trained tokenizer, with a chat template."""
    made = byte_level_metadata(train_byte_level(list(PRE_TOKENIZERS[pre].patterns), 400), pre)
    return made | {"tokenizer.chat_template": CHAT} | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
