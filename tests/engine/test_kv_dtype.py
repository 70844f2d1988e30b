"""Keys and values in 8 bits: against transformers, on every instruction set, and their memory."""

import copy

import numpy as np
import pytest
from tests.engine.tiny_models import logits_of, tiny_model, token_ids
from tests.isas import assert_isas_agree
from tests.raising import assert_raises

import whet
from whet import _core
from whet.engine import Engine
from whet.models.formats import KV_DTYPES
from whet.models.sizes import cache_bytes

# Heads of 8 (one power of two), 12 (blocks of 4), 10 (of 2), windows, soft-caps, and heads of 64 and 256.
CASES = [
    ("llama", {}),
    ("llama-biases-tied", {}),
    ("qwen3", {}),
    ("mistral", {}),
    ("gemma2", {}),
    ("llama", {"head_dim": 64}),
    ("llama", {"head_dim": 80, "num_attention_heads": 8}),
    ("llama", {"head_dim": 256, "num_key_value_heads": 1}),
]


@pytest.mark.parametrize(("case", "options"), CASES)
def test_logits_match_transformers(case, options):
    model, ids = tiny_model(case, **{"max_position_embeddings": 256, **options}), token_ids(200)
    expected = logits_of(copy.deepcopy(model).double(), ids)
    scale = np.abs(expected).max()
    errors = {}
    for kv_dtype in KV_DTYPES:
        with Engine.from_model(model, weights="float32", kv_dtype=kv_dtype) as engine:
            errors[kv_dtype] = np.sqrt(np.mean((engine.logits(ids[0].tolist()) - expected) ** 2)) / scale
    assert errors["float32"] < 2e-6
    assert errors["q8"] < 3 * errors["bfloat16"], errors


def test_outliers_of_single_dimensions_are_spread():
    """A key with one dimension of a hundred times the others' size keeps their precision within a factor of 4."""
    model, ids = tiny_model("llama", head_dim=64, max_position_embeddings=256), token_ids(100)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data[20] *= 100
        layer.self_attn.q_proj.weight.data[20::64] /= 100
    expected = logits_of(copy.deepcopy(model).double(), ids)
    with Engine.from_model(model, weights="float32", kv_dtype="q8") as engine:
        error = np.sqrt(np.mean((engine.logits(ids[0].tolist()) - expected) ** 2))
    assert error < 0.02 * np.abs(expected).max()


def test_infinite_values_are_reported():
    """The scale of a row with infinity is NaN, and so are the logits."""
    model = tiny_model("llama")
    for weight in (model.model.layers[0].input_layernorm.weight, model.model.layers[0].self_attn.v_proj.weight):
        weight.data.fill_(3e38)
    with Engine.from_model(model, weights="float32", kv_dtype="q8") as engine:
        assert np.isnan(engine.logits([1, 2, 3])).all()


DIGEST = """
model = tiny_model("llama", max_position_embeddings=512, head_dim=20)
with Engine.from_model(model, weights="float32", kv_dtype="q8") as engine:
    rows = [[(7 * i + j) % 40 for i in range(n)] for j, n in enumerate((3, 64, 65, 150))]
    found = [engine.logits(row).tobytes() for row in rows]
    found += [str(engine.generate(rows, 3, whet.SamplingParams(max_new_tokens=40, seed=5))).encode()]
print(hashlib.sha256(b"".join(found)).hexdigest())
"""


def test_every_instruction_set_gives_the_same_bits():
    assert_isas_agree("import hashlib, whet\nfrom tests.engine.test_kv_dtype import *", DIGEST)


@pytest.mark.parametrize(("head_dim", "share"), [(64, 0.55), (128, 0.54), (80, 0.56)])
def test_memory_is_about_half_of_bfloat16(head_dim, share):
    model = tiny_model("llama", head_dim=head_dim)
    sizes = {}
    for kv_dtype in KV_DTYPES:
        with Engine.from_model(model, kv_dtype=kv_dtype) as engine:
            sizes[kv_dtype] = engine.memory["kv_page_bytes"]
            assert sizes[kv_dtype] == cache_bytes(engine.config, kv_dtype, 1, 0)
    assert sizes["q8"] <= share * sizes["bfloat16"] and sizes["float32"] == 2 * sizes["bfloat16"]


def test_names_are_the_cores():
    assert tuple(_core.KvType.__members__) == KV_DTYPES
    assert_raises(
        whet.WhetValueError,
        ("Engine.from_model", "kv_dtype is 'int8'", "float32, bfloat16, q8"),
        Engine.from_model,
        tiny_model("llama"),
        kv_dtype="int8",
    )
