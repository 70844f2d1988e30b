"""Malicious model files: each gives a WhetError or a working engine, and nothing else.

    make fuzz                                              # 60 s on each kind of file
    python tests/fuzz/fuzz_files.py gguf -max_total_time=60

Mutations are guided by coverage (atheris, libFuzzer) and start from small valid files. atheris does not instrument the
core's parsers: "containers" fuzzes them without Python, under sanitizers (needs Clang). With an extension built with
-DWHET_SANITIZE=address and a preloaded libasan, its errors are found here too.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import atheris
import numpy as np

import whet
from whet.models import tokenizers
from whet.models.formats import TABLE, Format
from whet.models.reference import slice_values
from whet.models.sources import folder, gguf, gguf_container, mapped  # noqa: F401  (imported before instrumentation)

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
WORK = Path(tempfile.mkdtemp(prefix="whet-fuzz-"))
TYPES = [format for format in TABLE.values() if format.gguf_type is not None]


def write_seeds() -> None:
    """Write a small model in every kind of file to ``WORK``; in GGUF, matrices cycle through all types."""
    import gguf
    from tests.gguf_files import write_gguf
    from tests.models.tokenizers.vocab_files import write_file
    from tests.tiny import tiny_llama

    sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = tiny_llama(**sizes, tie_word_embeddings=True)
    model.save_pretrained(WORK)
    write_gguf(model, WORK / "model.gguf")
    # Rows of the down projection are one super-block; q, k, v, gate and up have slices of several types.
    typed = tiny_llama(**sizes | {"intermediate_size": 256}, tie_word_embeddings=True)
    names = [name for name, _ in typed.named_parameters()]
    for first in range(len(TYPES)):
        kinds = {
            name: gguf.GGMLQuantizationType(types_for(256 if "down" in name else 32)[first + i].gguf_type)
            for i, name in enumerate(names)
        }
        write_gguf(typed, WORK / f"typed-{first}.gguf", kinds.__getitem__)
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


def types_for(width: int) -> list[Format]:
    """List the types whose block length divides a width, repeated so that any byte is an index."""
    return [format for format in TYPES if width % format.block_length == 0] * 256


def try_engine(open_engine: Callable[[Path], whet.Engine], path: Path) -> None:
    """Open the file and generate a few tokens; a WhetError is accepted."""
    with contextlib.suppress(whet.WhetError), open_engine(path) as engine:
        generate(engine)


def generate(engine: whet.Engine) -> None:
    engine.generate([[1, 2, 3]], n=2, sampling=whet.SamplingParams(max_new_tokens=3))


SMALL = {"kv_bytes": 1 << 20}
FOLDER = partial(whet.Engine.from_pretrained, weights="int8", **SMALL)


def safetensors_file(data: bytes) -> None:
    """Use the bytes as model.safetensors with a valid config."""
    (WORK / "model.safetensors").write_bytes(data)
    try_engine(FOLDER, WORK)


def config_file(data: bytes) -> None:
    """Use the bytes as config.json with valid weights."""
    (WORK / "config.json").write_bytes(data)
    try_engine(FOLDER, WORK)


def gguf_whole(data: bytes) -> None:
    """Use the bytes as a GGUF file, in its formats and converted to int8."""
    (WORK / "model.gguf").write_bytes(data)
    for weights in (None, "int8"):
        try_engine(partial(whet.Engine.from_gguf, weights=weights, **SMALL), WORK / "model.gguf")


def gguf_blocks(data: bytes) -> None:
    """Build a valid GGUF file whose matrices have types and blocks from the bytes: it works or has NaN or infinity."""
    from gguf import GGMLQuantizationType, GGUFWriter

    path, template = WORK / "blocks.gguf", gguf_container.read_gguf(WORK / "typed-0.gguf", "here")
    numbers = np.frombuffer(data.ljust(64, b"\0"), np.uint8)
    writer = GGUFWriter(path, "llama")
    for key, value in template.metadata.items():
        if key.startswith("llama."):
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for i, (name, stored) in enumerate(template.tensors.items()):
        if len(stored.shape) == 1:
            writer.add_tensor(name, stored.tensor)
            continue
        n, width = stored.shape
        format = types_for(width)[numbers[i]]
        row_bytes = width // format.block_length * format.block_bytes
        blocks = np.resize(np.roll(numbers, -i - 16), (n, row_bytes))
        writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType(format.gguf_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    try:
        engine = whet.Engine.from_gguf(path, **SMALL)
    except whet.WhetError as error:
        assert "holds NaN or infinity" in str(error), error
        return
    assert all(np.isfinite(slice_values(row_slice)).all() for row_slice in gguf.open_gguf(path).slices())
    with contextlib.suppress(whet.WhetError), engine:  # logits may hold NaN
        generate(engine)


def tokenizer_file(data: bytes) -> None:
    """Use the bytes as a GGUF file with a tokenizer, whose token ids must decode."""
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
           "gguf": (gguf_whole, "typed-*.gguf"), "blocks": (gguf_blocks, "typed-*.gguf"),
           "tokenizer": (tokenizer_file, "tokenizer.gguf")}  # fmt: skip


def fuzz_containers(options: list[str]) -> int:
    """Build ``fuzz_containers.cpp`` with the parsers, and run it on both kinds of file."""
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
    target, pattern = TARGETS[sys.argv.pop(1)]
    seeds = {path.name: path.read_bytes() for path in WORK.glob(pattern)}
    corpus = WORK / "corpus"
    corpus.mkdir()
    for name, data in seeds.items():
        target(data)
        (corpus / name).write_bytes(data)
    atheris.Setup([*sys.argv, f"-max_len={max(map(len, seeds.values())) + 64}", str(corpus)], target)
    atheris.Fuzz()
