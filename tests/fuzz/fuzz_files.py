"""Model files as an enemy writes them: an error that explains, or an engine that runs. Nothing else may come of them.

    make fuzz                                              # 60 s on each kind of file
    python tests/fuzz/fuzz_files.py gguf -max_total_time=60

Coverage guides the bytes (atheris, libFuzzer), from the small whole files that this writes itself. atheris sees no
coverage of the core's parsers: "containers" fuzzes them without Python, under sanitizers (needs Clang).
Where the extension is built with -DWHET_SANITIZE=address and libasan is preloaded, its part is watched here too.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

import whet
from whet.models.sources import folder, gguf, gguf_container, mapped  # noqa: F401  (here before they are instrumented)

WORK = Path(tempfile.mkdtemp(prefix="whet-fuzz-"))
CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
SHAPES = {
    "model.embed_tokens.weight": (16, 32),
    "model.norm.weight": (32,),
    "model.layers.0.input_layernorm.weight": (32,),
    "model.layers.0.post_attention_layernorm.weight": (32,),
    "model.layers.0.self_attn.q_proj.weight": (32, 32),
    "model.layers.0.self_attn.k_proj.weight": (16, 32),
    "model.layers.0.self_attn.v_proj.weight": (16, 32),
    "model.layers.0.self_attn.o_proj.weight": (32, 32),
    "model.layers.0.mlp.gate_proj.weight": (32, 32),
    "model.layers.0.mlp.up_proj.weight": (32, 32),
    "model.layers.0.mlp.down_proj.weight": (32, 32),
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.layers.": "blk.",
}  # fmt: skip


def arrays() -> dict[str, object]:
    """Small weights, by name."""
    import numpy as np

    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype("float32") / 6 for name, shape in SHAPES.items()}


def safetensors_seed() -> bytes:
    """A whole file."""
    import safetensors.numpy

    return safetensors.numpy.save(arrays())


def gguf_seed() -> bytes:
    """A whole file."""
    import gguf as package

    writer = package.GGUFWriter(WORK / "seed.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    for name, array in arrays().items():
        for theirs, short in GGUF_NAMES.items():
            name = name.replace(theirs, short)
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return (WORK / "seed.gguf").read_bytes()


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


TARGETS = {
    "safetensors": (safetensors_file, safetensors_seed),
    "config": (config_file, lambda: json.dumps(CONFIG).encode()),
    "gguf": (gguf_whole, gguf_seed),
}


def fuzz_containers(options: list[str]) -> int:
    """Build ``fuzz_containers.cpp`` and the parsers, and run that on both kinds of file."""
    root, corpus = Path(__file__).parents[2], WORK / "corpus"
    compiler = os.environ.get("CXX") or shutil.which("clang++-19") or "clang++"
    sources = [*(root / "cpp/files").glob("*.cpp"), Path(__file__).with_name("fuzz_containers.cpp")]
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run([compiler, *flags, f"-I{root / 'cpp'}", *sources, "-o", WORK / "fuzz"], check=True)
    corpus.mkdir()
    (corpus / "gguf").write_bytes(gguf_seed())
    (corpus / "safetensors").write_bytes(safetensors_seed())
    return subprocess.run([WORK / "fuzz", *options, corpus], cwd=WORK).returncode


if __name__ == "__main__":
    if sys.argv[1] == "containers":
        sys.exit(fuzz_containers(sys.argv[2:]))
    atheris.instrument_all()  # modules of an editable installation escape instrument_imports
    target, seed = TARGETS[sys.argv.pop(1)]
    (WORK / "config.json").write_text(json.dumps(CONFIG))
    (WORK / "model.safetensors").write_bytes(safetensors_seed())
    whole = seed()
    target(whole)
    corpus = WORK / "corpus"
    corpus.mkdir()
    (corpus / "whole").write_bytes(whole)
    atheris.Setup([*sys.argv, f"-max_len={len(whole) + 64}", str(corpus)], target)
    atheris.Fuzz()
