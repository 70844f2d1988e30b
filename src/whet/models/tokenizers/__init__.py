"""Tokenizers and chat templates of GGUF files and folders."""

from __future__ import annotations

from whet.models.tokenizers.backend import BackendTokenizer
from whet.models.tokenizers.tokenizer import GGUFTokenizer, load_tokenizer, open_tokenizer, read_tokenizer
from whet.models.tokenizers.vocabulary import read_vocabulary

__all__ = ["BackendTokenizer", "GGUFTokenizer", "load_tokenizer", "open_tokenizer", "read_tokenizer", "read_vocabulary"]
