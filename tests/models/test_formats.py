"""The table of formats: against the core's, the gguf package's, and the lists that type checkers need written out."""

import re
from pathlib import Path
from typing import get_args

import gguf
import pytest

from whet.config import RolloutWeights
from whet.models.formats import (
    FILE_TYPES,
    FORMATS,
    MIXTURES,
    TABLE,
    FileType,
    FormatSpan,
    Weights,
    choose_formats,
    core_format,
)
from whet.models.sizes import source_of_config
from whet.ops.quant import CORE_TABLE


def test_core_packs_all_formats_except_float16_and_float64():
    assert {name for name, format in TABLE.items() if format.packed_as in ("", name)} == CORE_TABLE.keys()
    assert {format.packed_as for format in TABLE.values()} <= {"", *CORE_TABLE}
    assert [core_format(name, "weights", "here") for name in FORMATS if name not in MIXTURES] == list(CORE_TABLE)


@pytest.mark.parametrize("format", [f for f in TABLE.values() if f.gguf_type is not None], ids=lambda f: f.name)
def test_types_and_blocks_match_the_gguf_package(format):
    kind = gguf.GGMLQuantizationType(format.gguf_type)
    assert format.gguf_name == kind.name
    assert (format.block_length, format.block_bytes) == gguf.GGML_QUANT_SIZES[kind]


@pytest.mark.parametrize("name", CORE_TABLE)
def test_row_length_follows_from_its_bytes(name):
    row = CORE_TABLE[name]
    for k in (row.block_length, 7 * row.block_length):
        assert row.row_length(row.row_bytes(k)) == k
    assert CORE_TABLE["int8"].row_bytes(100) == 104 and CORE_TABLE["bfloat16"].row_bytes(100) == 200


def test_fallbacks_end_in_a_format_for_any_row_length():
    for format in TABLE.values():
        lengths = [format.block_length]
        while lengths[-1] > 1:
            format = TABLE[format.next]
            lengths.append(format.block_length)
        assert lengths == sorted(lengths, reverse=True) and len(lengths) <= 3


def test_literals_list_the_formats_of_the_tables():
    assert set(get_args(Weights)) == set(FORMATS) and len(get_args(Weights)) == len(FORMATS)
    assert get_args(FileType) == tuple(FILE_TYPES)
    assert get_args(RolloutWeights) == ("auto", *get_args(Weights))


def test_documentation_lists_every_file_type():
    text = (Path(__file__).parents[2] / "docs" / "export.md").read_text("utf-8")
    listed = re.findall(r"^\*\*Types\.\*\* (.*?), mixed", text, re.MULTILINE)
    assert [re.split(", | and ", types) for types in listed] == [list(FILE_TYPES)]


@pytest.mark.parametrize("name", FILE_TYPES)
def test_file_types_match_the_gguf_package(name):
    prefix = "ALL" if name == "f32" else "MOSTLY"
    assert FILE_TYPES[name].file_type == gguf.LlamaFileType[f"{prefix}_{name.upper()}"]


LLAMA_CPPS = {
    1: [0],
    3: [2],
    6: [2, 5],
    12: [0, 3, 6, 9, 10, 11],
    28: [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27],
}
"""Layers of a model -> those whose values and down projections its quantiser (0.3.36) made q6_k in its mixtures."""


@pytest.mark.parametrize("n_layers", LLAMA_CPPS)
@pytest.mark.parametrize(("mixture", "base"), [("q4_k_m", "q4_k"), ("q5_k_m", "q5_k")])
def test_mixtures_match_llama_cpp_files(mixture, base, n_layers):
    sizes = {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = {"model_type": "qwen3", "num_hidden_layers": n_layers, **sizes, **heads}
    formats = choose_formats(source_of_config(config), mixture, None, None, "here")
    for i in range(n_layers):
        more = "q6_k" if i in LLAMA_CPPS[n_layers] else base
        assert formats[f"layers.{i}.down"] == (FormatSpan(256, more),)
        assert formats[f"layers.{i}.qkv"] == (
            (FormatSpan(384, base), FormatSpan(128, "q6_k")) if more != base else (FormatSpan(512, base),)
        )
        assert formats[f"layers.{i}.o"] == (FormatSpan(256, base),)
    assert formats["embedding"] == (FormatSpan(96, base),) and formats["head"] == (FormatSpan(96, "q6_k"),)
    tied = choose_formats(source_of_config({**config, "tie_word_embeddings": True}), mixture, None, None, "here")
    assert tied["embedding"] == (FormatSpan(96, "q6_k"),)
