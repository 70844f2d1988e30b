"""Weights beyond the range of the format that they are packed in: rejected on every path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.engine.tiny_models import tiny_model
from tests.gguf_files import write_gguf
from tests.raising import assert_raises, mentions

from whet.engine import Engine
from whet.errors import WhetValueError
from whet.models.formats import TABLE
from whet.models.loading import RangeCheck, encoding_loss
from whet.models.packed_base import pack_base
from whet.models.row_reader import RowReader
from whet.models.sources.live import open_module
from whet.ops.linear import pack_weight
from whet.ops.quant import CORE_TABLE

BLOCKS = [name for name in CORE_TABLE if TABLE[name].block_length > 1 and name != "mxfp4"]
"""Formats with a range below float32's."""
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "tie_word_embeddings": False}
K = 256


def llama(**weights):
    """Make a model with ``value`` in a whole weight, or only at [3, 5] if it is large."""
    model = tiny_model("llama", **SIZES)
    with torch.no_grad():
        for name, value in weights.items():
            weight = {"head": model.lm_head, "embedding": model.model.embed_tokens}[name].weight
            (weight if value < 1 else weight[3:4, 5:6]).fill_(value)
    return model


def lost(values, format):
    """Return the share of the norm that packing loses."""
    values = np.asarray(values, np.float32)
    return np.linalg.norm(values - pack_weight(values, format).unpack().dequantize()) / np.linalg.norm(values)


def check(values, format):
    check = RangeCheck("f")
    check.add("w", "head", 0, len(values), encoding_loss(np.asarray(values, np.float32), format))
    check.finish()


@pytest.mark.parametrize("slot", ["embedding", "head"])
@pytest.mark.parametrize("format", BLOCKS)
def test_vanishing_and_overflowing_blocks_are_rejected(format, slot):
    name = TABLE[format].display_name
    for value, facts in ((1e-9, ("100%", "1e-09")), (1e38, ("1e+38",))):
        with pytest.raises(WhetValueError, match=mentions("from_model", slot, "rows 0 to 47", name, "bf16", *facts)):
            Engine.from_model(llama(**{slot: value}), weights="float32", **{slot: format})
    for wide in ("float32", "bf16", "int8", "mxfp4"):
        Engine.from_model(llama(**{slot: 1e-9}), weights="float32", **{slot: wide}).close()


def test_overflow_of_bf16_is_rejected():
    largest = float(np.array(0x7F7FFFFF, np.uint32).view(np.float32))
    assert_raises(WhetValueError, ("head", "3.403e+38", "bf16", "float32"), Engine.from_model, llama(head=largest))
    Engine.from_model(llama(head=3.38e38)).close()
    Engine.from_model(llama(head=largest), weights="float32").close()


def test_overflow_of_float64_is_rejected():
    model = llama().double()
    with torch.no_grad():
        model.lm_head.weight[3, 5] = 1e300
    assert_raises(WhetValueError, ("head", "1e+300", "float32"), Engine.from_model, model, weights="float32")


def test_sync_rejects_before_any_weight_changes():
    with Engine.from_model(llama(), weights="q8_0") as engine:
        before = engine.logits([1, 2, 3])
        assert_raises(WhetValueError, ("Engine.sync", "head", "q8_0"), engine.sync, llama(head=1e-9, embedding=0.5))
        assert (engine.logits([1, 2, 3]) == before).all()


def test_bases_and_files_reject(tmp_path):
    model = llama(head=1e-9)
    source = open_module(model)
    assert_raises(WhetValueError, ("pack_base", "head", "q8_0"), pack_base, source, weights="q8_0")
    path = write_gguf(model, tmp_path / "model.gguf")
    assert_raises(WhetValueError, ("from_gguf", "head", "q6_k"), Engine.from_gguf, path, weights="q6_k")
    Engine.from_gguf(path).close()


@pytest.mark.parametrize("format", [*BLOCKS, "float16"])
def test_export_rejects(format):
    source = open_module(llama(head=1e-9))
    rows = RowReader(source, "export_gguf")
    place = next(place for place in source.targets.values() if place.weight == "head")
    with pytest.raises(WhetValueError, match=mentions("export_gguf", "head", "1e-09", TABLE[format].display_name)):
        list(rows.iter_chunks(place, "head", format))
    list(rows.iter_chunks(place, "head", "bfloat16"))


def test_tensors_of_one_slot_are_judged_separately():
    model = llama()
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.fill_(1e-9)
    with pytest.raises(WhetValueError, match=mentions("layers.0.qkv", "rows 256 to 383", "q8_0")):
        Engine.from_model(model, weights="q8_0")


@pytest.mark.parametrize("format", BLOCKS)
def test_vanishing_rows_of_an_ordinary_tensor_are_packed(format):
    values = np.random.default_rng(0).standard_normal((64, K)).astype(np.float32) * 0.02
    values[8:60] = 1e-9
    check(values, format)


@pytest.mark.parametrize("format", BLOCKS)
@pytest.mark.parametrize("exponent", range(-44, 0, 2))
def test_rejected_as_packing_loses_half(format, exponent):
    values = np.random.default_rng(exponent + 99).standard_normal((16, K)) * 2.0**exponent
    loss = lost(values, format)
    assert loss < 0.38 or exponent < -10
    if loss > 0.5:
        assert_raises(WhetValueError, ("f", "head", "rows 0 to 15"), check, values, format)
    else:
        check(values, format)


@pytest.mark.parametrize("format", BLOCKS)
def test_limit_is_the_largest_representable(format):
    limit = encoding_loss(np.ones((1, K), np.float32), format)[2]
    for sign in (1.0, -1.0):
        values = np.zeros((1, K), np.float32)
        values[0, ::32] = sign * np.float32(limit)
        check(values, format)
        assert lost(values, format) < 0.2
        assert_raises(WhetValueError, ("rows 0 to 0", TABLE[format].display_name), check, values * 1.01, format)
