"""Model files as an enemy writes them: an error that explains, or an engine that runs. Nothing else may come of them.

    make fuzz                                              # 60 s on each kind of file
    python tests/fuzz/fuzz_files.py gguf -max_total_time=60

Coverage guides the bytes (atheris, libFuzzer), from the small whole files that this writes itself. atheris sees no
coverage of the core's parsers: "containers" fuzzes them without Python, under sanitizers (needs Clang).
Where the extension is built with -DWHET_SANITIZE=address and libasan is preloaded, its part is watched here too.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

import whet
from whet.models import tokenizers
from whet.models.sources import folder, gguf, gguf_container, mapped  # noqa: F401  (here before they are instrumented)

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
WORK = Path(tempfile.mkdtemp(prefix="whet-fuzz-"))


def write_seeds() -> None:
    """A small model in every kind of file, into ``WORK``."""
    from tests.gguf_files import write_gguf
    from tests.models.tokenizers.vocab_files import write_file
    from tests.tiny import tiny_llama

    sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = tiny_llama(**sizes, tie_word_embeddings=True)
    model.save_pretrained(WORK)
    write_gguf(model, WORK / "model.gguf")
    write_file(
        WORK / "tokenizer.gguf",
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "b", "ab", "Ġ", "Ġab"],
            "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 4],
            "tokenizer.ggml.scores": [-0.5 * i for i in range(8)],
            "tokenizer.ggml.merges": ["a b", "Ġ ab"],
            "tokenizer.ggml.precompiled_charsmap": (1024).to_bytes(4, "little") + bytes(1024) + b"a\0",
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.add_space_prefix": True,
            "tokenizer.chat_template": "{% for m in messages %}{{ m['role'] + ': ' ~ m.content | trim }}{% endfor %}",
        },
    )


def tried(open_engine: Callable[..., whet.Engine], path: Path) -> None:
    """An engine over the file says a few tokens, or there is an error that explains."""
    try:
        with open_engine(path, weights="int8", kv_bytes=1 << 20) as engine:
            engine.generate([[1, 2, 3]], n=2, sampling=whet.SamplingParams(max_new_tokens=3))
    except whet.WhetError:
        pass


def safetensors_file(data: bytes) -> None:
    """The bytes as model.safetensors beside a config that is right."""
    (WORK / "model.safetensors").write_bytes(data)
    tried(whet.Engine.from_pretrained, WORK)


def config_file(data: bytes) -> None:
    """The bytes as config.json beside weights that are right."""
    (WORK / "config.json").write_bytes(data)
    tried(whet.Engine.from_pretrained, WORK)


def gguf_whole(data: bytes) -> None:
    """The bytes as a GGUF file."""
    (WORK / "model.gguf").write_bytes(data)
    tried(whet.Engine.from_gguf, WORK / "model.gguf")


def tokenizer_file(data: bytes) -> None:
    """The bytes as a GGUF file with a tokenizer: what it makes of a text it can read again."""
    (WORK / "tokenizer.gguf").write_bytes(data)
    try:
        tokenizer = tokenizers.read_tokenizer(WORK / "tokenizer.gguf")
        ids = tokenizer.encode("ab </s>\u00e9 \ufb01 ab")
        assert all(0 <= token < len(tokenizer) for token in ids)
        tokenizer.decode(ids)
        tokenizer.apply_chat_template([{"role": "user", "content": " ab "}])
    except whet.WhetError:
        pass


TARGETS = {"safetensors": (safetensors_file, "model.safetensors"), "config": (config_file, "config.json"),
           "gguf": (gguf_whole, "model.gguf"), "tokenizer": (tokenizer_file, "tokenizer.gguf")}  # fmt: skip


def fuzz_containers(options: list[str]) -> int:
    """Build ``fuzz_containers.cpp`` and the parsers, and run that on both kinds of file."""
    corpus = WORK / "corpus"
    compiler = os.environ.get("CXX") or shutil.which("clang++-19") or "clang++"
    sources = [*(ROOT / "cpp/files").glob("*.cpp"), Path(__file__).with_name("fuzz_containers.cpp")]
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run([compiler, *flags, f"-I{ROOT / 'cpp'}", *sources, "-o", WORK / "fuzz"], check=True)
    corpus.mkdir()
    for name in ("model.gguf", "model.safetensors"):
        shutil.copy(WORK / name, corpus)
    return subprocess.run([WORK / "fuzz", *options, corpus], cwd=WORK).returncode


if __name__ == "__main__":
    if sys.argv[1] == "containers":
        write_seeds()
        sys.exit(fuzz_containers(sys.argv[2:]))
    atheris.instrument_all()  # modules of an editable installation escape instrument_imports
    write_seeds()
    target, name = TARGETS[sys.argv.pop(1)]
    whole = (WORK / name).read_bytes()
    target(whole)
    corpus = WORK / "corpus"
    corpus.mkdir()
    (corpus / "whole").write_bytes(whole)
    atheris.Setup([*sys.argv, f"-max_len={len(whole) + 64}", str(corpus)], target)
    atheris.Fuzz()
