"""Compare ids of 10,000 texts, and stop tokens, of GGUF tokenizers with llama.cpp.

    python -m tests.real.compare_tokenizers                        # tokenizers trained on the spot
    python -m tests.real.compare_tokenizers FILE.gguf ...          # files
    python -m tests.real.compare_tokenizers --write FILE.gguf ...  # stores hashes for a test without llama.cpp

Needs llama-cpp-python. ``tests/real/tokenizer_ids.json`` has a hash of llama.cpp's ids for every hundred texts. The
exit status is 1 if more than one text in a hundred differs (``whet.models.tokenizers.algorithms`` documents which may),
or the stop tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.models.tokenizers import vocab_files
from tests.models.tokenizers.texts import make_texts

from whet.models.tokenizers import GGUFTokenizer, read_tokenizer
from whet.models.tokenizers.pre_tokenizers import PRE_TOKENIZERS

N_TEXTS = 10_000
HASHES = Path(__file__).with_name("tokenizer_ids.json")


def texts_of(tokenizer: GGUFTokenizer) -> list[str]:
    """Return the texts for a file, including its first special tokens."""
    tokens, types = tokenizer.vocabulary.tokens, tokenizer.vocabulary.types
    special = [token for token, type in zip(tokens, types, strict=True) if type in (3, 4)]
    return make_texts(N_TEXTS, special[:20])


def hashes(texts: list[str], encode: Callable[[str], list[int]]) -> list[str]:
    """Hash the ids of every hundred texts to eight digits."""
    ids = [json.dumps([encode(text) for text in texts[i : i + 100]]) for i in range(0, len(texts), 100)]
    return [hashlib.sha256(each.encode()).hexdigest()[:8] for each in ids]


def open_in_llama_cpp(path: Path) -> tuple[Callable[[str], list[int]], list[int]]:
    """Return llama.cpp's encoder, with special tokens parsed and none added, and its stop tokens."""
    import llama_cpp

    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    vocab = llama_cpp.llama_model_get_vocab(model.model)
    stops = [i for i in range(model.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocab, i)]
    return lambda text: model.tokenize(text.encode(), add_bos=False, special=True), stops


def train_files(folder: Path) -> list[Path]:
    """Train byte-level BPE of several pre-tokenizers, and SentencePiece as far as llama.cpp follows it."""
    made = {}
    for pre in ("default", "gpt-2", "llama-bpe", "qwen2", "smollm", "deepseek-v3", "qwen35", "bailingmoe", "falcon"):
        trained = vocab_files.train_byte_level(list(PRE_TOKENIZERS[pre].patterns))
        made[pre] = vocab_files.byte_level_metadata(trained, pre)
    for prefix in (True, False):
        for kind in ("bpe", "unigram"):
            options = {"add_dummy_prefix": prefix, "byte_fallback": kind == "bpe"}
            model = vocab_files.train_sentencepiece(kind, **options)
            made[f"{kind}-{prefix}"] = vocab_files.sentencepiece_metadata(model)
    return [vocab_files.write_file(folder / f"{name}.gguf", metadata) for name, metadata in made.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    found = json.loads(HASHES.read_text()) if HASHES.exists() else {}
    folder = tempfile.TemporaryDirectory()
    most = 0
    for path in asked.files or train_files(Path(folder.name)):
        tokenizer = read_tokenizer(path)
        theirs, stops = open_in_llama_cpp(path)
        texts = texts_of(tokenizer)
        different = [text for text in texts if tokenizer.encode(text, add_special_tokens=False) != theirs(text)]
        print(f"{path.name}: {len(different)} of {len(texts)} texts differ")
        if stops != tokenizer.stop_token_ids:
            most = N_TEXTS
            print(f"    a generation ends with {tokenizer.stop_token_ids}, in llama.cpp with {stops}")
        for text in sorted(different, key=len)[:5]:
            print(f"    {text!r}: {tokenizer.encode(text, add_special_tokens=False)}, llama.cpp {theirs(text)}")
        most = max(most, len(different))
        if asked.write:
            found[path.name] = hashes(texts, theirs)
    if asked.write:
        HASHES.write_text(json.dumps(found, indent=0) + "\n")
    return int(most > N_TEXTS // 100)


if __name__ == "__main__":
    sys.exit(main())
