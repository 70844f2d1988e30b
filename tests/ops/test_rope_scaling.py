"""Scaled frequencies: transformers' ROPE_INIT_FUNCTIONS, values by hand, and invalid settings."""

import math
import os

import numpy as np
import pytest
from tests.raising import assert_raises

import whet
from whet.ops.rope_scaling import rope_frequencies

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}
LONG = {
    "short_factor": [1.0 + 0.05 * i for i in range(32)],
    "long_factor": [1.0 + 0.7 * i for i in range(32)],
    "original_max_position_embeddings": 4096,
}
SCALINGS = {
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 2.0, "original_max_position_embeddings": 4096},
    "yarn": YARN,
    "yarn ramp": {**YARN, "beta_fast": 20, "beta_slow": 2, "truncate": False},
    "yarn mscale": {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn attention_factor": {**YARN, "attention_factor": 1.3},
    "llama3": LLAMA3,
    "longrope": LONG,
    "longrope factor": {**LONG, "factor": 8.0},
    "longrope attention_factor": {**LONG, "attention_factor": 1.19},
    "proportional": {"partial_rotary_factor": 0.25, "factor": 8.0},
    "proportional whole": {},
}


@pytest.mark.skipif("WHET_ISA" in os.environ, reason="uses only NumPy, on every instruction set")
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("base", "max_position"), [(10000.0, 16384), (500000.0, 16384), (10000.0, 2048)])
def test_equals_transformers(name, base, max_position):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = name.partition(" ")[0]
    given = {"rope_type": kind, **SCALINGS[name]}
    theirs = {"factor": 1.0 if kind == "proportional" else None, **given, "rope_theta": base}
    original = given.get("original_max_position_embeddings", max_position)
    # Dynamic scaling in transformers uses the model's maximum as the original length, and seq_len as the sequence.
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=2, head_dim=64, rope_parameters=theirs,
        max_position_embeddings=original if kind == "dynamic" else max_position,
    )  # fmt: skip
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=max_position)
    inv_freq, attention_factor = rope_frequencies(64, None, max_position, base, given)
    np.testing.assert_allclose(inv_freq, expected.double().numpy(), rtol=3e-6, atol=0)
    assert attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.skipif("WHET_ISA" in os.environ, reason="uses only NumPy, on every instruction set")
def test_rotation_equals_transformers():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    scaling = {"rope_type": "llama3", **LLAMA3}
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=16384,
                         rope_parameters={**scaling, "rope_theta": 500000.0})  # fmt: skip
    q, k, positions = torch.randn(2, 4, 9, 64), torch.randn(2, 2, 9, 64), torch.randint(0, 1000, (2, 9))
    cos, sin = LlamaRotaryEmbedding(config)(q, positions)
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    rope = whet.get_rope(64, max_position=16384, base=500000.0, scaling=scaling)
    rope(positions, q.transpose(1, 2), k.transpose(1, 2))
    for got, right in zip((q, k), expected, strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=5e-4)  # transformers' angles are float32: 1000 x 2^-24


# --- by hand --------------------------------------------------------------------------------------------


def test_linear_by_hand():
    inv_freq, factor = rope_frequencies(4, None, 16, 100.0, {"type": "linear", "factor": 2})
    np.testing.assert_allclose(inv_freq, [0.5, 0.05], rtol=1e-15)
    assert factor == 1.0


def test_dynamic_by_hand():
    # d = 4: the exponent d / (d - 2) is 2. Twice the length with factor 3: (6 - 2)^2 = 16 times the base.
    scaling = {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 8}
    inv_freq, _ = rope_frequencies(4, None, 16, 100.0, scaling)
    np.testing.assert_allclose(inv_freq, [1, 1600**-0.5], rtol=1e-15)
    np.testing.assert_allclose(rope_frequencies(4, None, 8, 100.0, scaling)[0], [1, 0.1], rtol=1e-15)


def test_llama3_by_hand():
    # Rotations over L = 200 pi: 100 theta. theta = 1, 0.1, 0.01, 0.001 rotate 100, 10, 1 and 0.1 times. Ends: 19 and 1.
    scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 19.0}
    scaling["original_max_position_embeddings"] = 200 * math.pi
    inv_freq, _ = rope_frequencies(8, None, 4096, 10000.0, scaling)
    np.testing.assert_allclose(inv_freq, [1, 0.1 * (0.5 / 4 + 0.5), 0.0025, 0.00025], rtol=1e-12)


def test_yarn_by_hand():
    # Pairs 0 .. 3 of d = 8 with base 10^4 rotate 10^(2 - i) times over L = 200 pi.
    scaling = {"rope_type": "yarn", "factor": math.e, "original_max_position_embeddings": 200 * math.pi}
    inv_freq, factor = rope_frequencies(8, None, 4096, 10000.0, {**scaling, "beta_fast": 100, "beta_slow": 1})
    low = 1 / math.e
    expected = [1, 0.1 * (low / 2 + 0.5), 0.01 * low, 0.001 * low]
    np.testing.assert_allclose(inv_freq, expected, rtol=1e-12)
    assert factor == pytest.approx(1.1)


def test_longrope_by_hand():
    scaling = {"rope_type": "longrope", "short_factor": [1, 2], "long_factor": [4, 5]}
    scaling["original_max_position_embeddings"] = 16
    inv_freq, factor = rope_frequencies(4, None, 16, 100.0, scaling)
    np.testing.assert_allclose(inv_freq, [1, 0.05], rtol=1e-15)
    assert factor == 1.0
    inv_freq, factor = rope_frequencies(4, None, 256, 100.0, scaling)  # 16 times as long: ln 16 / ln 16 = 1
    np.testing.assert_allclose(inv_freq, [1 / 4, 0.02], rtol=1e-15)
    assert factor == pytest.approx(math.sqrt(2))


def test_proportional_by_hand():
    scaling = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}
    inv_freq, _ = rope_frequencies(8, None, 16, 10000.0, scaling)
    np.testing.assert_allclose(inv_freq, [0.5, 0.05, 0, 0], rtol=1e-15)


def test_plain_settings_in_the_dict():
    plain = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    np.testing.assert_allclose(rope_frequencies(8, None, 16, 10000.0, plain)[0], [1, 0.1], rtol=1e-15)
    assert whet.get_rope(8, scaling={}).rotary_dim == 8
    rope = whet.get_rope(64, max_position=8192, scaling={"rope_type": "yarn", **YARN})
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    np.testing.assert_allclose(rope.cos_sin_cache[0, :32], rope.attention_factor, rtol=1e-7)


# --- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"scaling": {"rope_type": "ntk"}}, ("rope_type 'ntk'", "one of 'default', 'linear'")),
        ({"scaling": {"rope_type": []}}, ("rope_type []", "one of 'default', 'linear'")),
        ({"scaling": {"factor": 2.0}}, ("rope_type None",)),
        ({"scaling": "linear"}, ("scaling is a str", "dict")),
        ({"scaling": {"rope_type": "linear"}}, ("no 'factor'", "linear")),
        ({"scaling": {"rope_type": "linear", "factor": "2"}}, ("scaling['factor'] is '2'", "number")),
        ({"scaling": {"rope_type": "linear", "factor": 0}}, ("is 0", "number above 0")),
        ({"scaling": {"rope_type": "linear", "factor": math.nan}}, ("is nan", "number above 0")),
        ({"scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 3}}, ("'beta_fast'", "linear")),
        ({"scaling": {"rope_type": "dynamic", "factor": 2}}, ("no 'original_max_position_embeddings'", "trained for")),
        ({"scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, ("high_freq_factor 1.0",)),
        ({"scaling": {"rope_type": "longrope", **LONG, "long_factor": [1]}}, ("['long_factor'] has shape (1,)",)),
        ({"scaling": {"rope_type": "default", "rope_theta": 5.0}, "base": 7.0}, ("base is 7.0", "rope_theta 5.0")),
        ({"scaling": {"rope_type": "proportional"}, "rotary_dim": 32}, ("rotary_dim is 32", "head_size=64")),
        ({"scaling": {"rope_type": "default", "partial_rotary_factor": 1.5}}, ("partial_rotary_factor", "1.5")),
        ({"scaling": {"rope_type": "dynamic", "factor": 2, "original_max_position_embeddings": 8}, "rotary_dim": 2},
         ("rotary_dim is 2", "dynamic", "at least 4")),
        ({"rotary_dim": 33}, ("rotary_dim is 33", "even number up to head_size=64")),
        ({"rotary_dim": 66}, ("rotary_dim is 66",)),
        ({"base": 1.0}, ("base is 1.0", "number above 1")),
        ({"max_position": 0}, ("max_position is 0",)),
    ],
)  # fmt: skip
def test_errors_name_the_fix(settings, facts):
    assert_raises(whet.WhetError, ("get_rope", *facts), whet.get_rope, 64, **settings)
