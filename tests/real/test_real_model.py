"""A real model: its log-probs against llama.cpp's, stored in logprobs.json, and against the exact model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from tests.gguf_files import F32, add
from tests.real.compare_model import LOGPROBS, STORED
from tests.real.model import PROSE, SHIPPED, real_model

from whet.engine import Engine
from whet.models.architecture import RowSlice
from whet.models.formats import TABLE, Format
from whet.models.reference import slice_values
from whet.models.sources.gguf import open_gguf
from whet.models.sources.gguf_container import read_gguf
from whet.models.tokenizers import read_tokenizer

N_TOKENS = STORED.stop + 1
EXACT = {"weights": "float32", "embedding": "float32", "head": "float32"}


def logprobs(path: Path, ids: list[int], **options: str) -> np.ndarray:
    with Engine.from_gguf(path, kv_bytes=1 << 26, **options) as engine:
        return engine.logprobs([ids])[0][STORED]


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return read_tokenizer(real_model()).encode(PROSE.read_text())[:N_TOKENS]


@pytest.fixture(scope="module")
def exact(ids) -> np.ndarray:
    return logprobs(real_model(), ids, **EXACT)


def test_float32_logprobs_match_llama_cpp(exact):
    assert np.abs(exact - json.loads(LOGPROBS.read_text())["F32"]).mean() < 1e-3


def test_logprobs_of_the_file_as_stored_match_llama_cpp(ids, exact):
    own, theirs = logprobs(real_model(), ids), np.array(json.loads(LOGPROBS.read_text())[SHIPPED])
    assert np.abs(own - theirs).mean() < 0.08
    assert abs((own - theirs).mean()) < 0.02
    assert np.abs(own - exact).mean() < 0.08


def test_keys_and_values_in_8_bits_change_little():
    """Over all 1,139 tokens of the prose, 0.0085; bfloat16: 0.0072."""
    ids = read_tokenizer(real_model()).encode(PROSE.read_text())
    rows = []
    for kv_dtype in ("float32", "q8"):
        with Engine.from_gguf(real_model(), kv_bytes=1 << 27, kv_dtype=kv_dtype, **EXACT) as engine:
            [row] = engine.logprobs([ids])
            rows.append(row.astype(float))
    difference = rows[1] - rows[0]
    assert np.abs(difference).mean() < 0.01
    assert abs(np.exp(-difference.mean()) - 1) < 1e-3


BOUNDS = {"F16": 0.03, "Q8_0": 0.12, "Q6_K": 0.17, "Q5_0": 0.4}
"""Mean absolute difference of the log-probs from the exact model's: the rounding of the type and of the engine."""
LAYER_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


@pytest.mark.parametrize("name", BOUNDS)
def test_other_types_are_close_to_the_exact_model(name, ids, exact, tmp_path):
    path = write_in_types(tmp_path / "model.gguf", lambda _: name)
    assert np.abs(logprobs(path, ids) - exact).mean() < BOUNDS[name]


def test_file_with_every_type_is_close_to_the_exact_model(ids, exact, tmp_path):
    """Assign one type to q, k and v of a layer, and the next types to its MLP."""

    def type_of(name: str) -> str:
        layer = re.search(r"blk\.(\d+)\.(attn)?", name)
        return LAYER_TYPES[(int(layer[1]) + 5 * (not layer[2])) % len(LAYER_TYPES)] if layer else "Q8_0"

    path = write_in_types(tmp_path / "model.gguf", type_of)
    assert {row_slice.format for row_slice in open_gguf(path).slices()} == {
        format_of(name).name for name in LAYER_TYPES
    }
    assert np.abs(logprobs(path, ids) - exact).mean() < 0.35


def write_in_types(path: Path, type_of: Callable[[str], str]) -> Path:
    """Write the real model with matrices in other types, or llama.cpp's fallbacks."""
    file = read_gguf(real_model(), "here")
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in file.metadata.items():
        if key.startswith("llama."):
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name, (tensor, format, shape) in file.tensors.items():
        kind = type_for(type_of(name), shape[-1]) if len(shape) == 2 else F32
        add(writer, name, slice_values(RowSlice("", 0, tensor, format)), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def type_for(name: str, width: int) -> gguf.GGMLQuantizationType:
    format = format_of(name)
    while width % format.block_length:
        format = TABLE[format.next]
    return gguf.GGMLQuantizationType[format.gguf_name]


def format_of(name: str) -> Format:
    return next(format for format in TABLE.values() if format.gguf_name == name)
