"""Embeddings equal the hidden states of transformers, whatever else is in the batch."""

import numpy as np
import pytest
import torch
from tests.raising import assert_raises
from tests.tiny import tiny_llama, with_lora

from whet import Engine
from whet.errors import WhetTypeError, WhetValueError

SIZES = {"vocab_size": 97, "hidden_size": 32, "max_position_embeddings": 256}
ROWS = [[3, 5, 8], [7], list(range(1, 96)) * 2, [3, 5, 8, 13]]


@pytest.fixture(scope="module")
def model():
    return tiny_llama(**SIZES).eval()


def expected(model, rows, pooling):
    with torch.no_grad():
        states = [model.model(torch.tensor([row])).last_hidden_state[0].double().numpy() for row in rows]
    return np.stack([each[-1] if pooling == "last" else each.mean(0) for each in states])


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_pooled_hidden_states(model, pooling):
    with Engine.from_model(model, weights="float32") as engine:
        found = engine.embed(ROWS, pooling=pooling)
        assert found.dtype == np.float32 and found.shape == (4, model.config.hidden_size)
        np.testing.assert_allclose(found, expected(model, ROWS, pooling), rtol=0, atol=3e-6)
        assert engine.embed([]).shape == (0, model.config.hidden_size)
        assert engine.memory["kv_used_bytes"] == 0


@pytest.mark.parametrize("weights", ["float32", "bf16", "q8_0"])
def test_an_embedding_depends_only_on_its_sequence(model, weights):
    with Engine.from_model(model, weights=weights, prefill_chunk=50) as engine:
        for pooling in ("last", "mean"):
            batch = engine.embed(ROWS, pooling=pooling)
            stream = engine.stream(ROWS[2], keep=True)
            next(stream)
            singles = [engine.embed([row], pooling=pooling)[0] for row in ROWS]
            stream.close()
            assert np.array_equal(batch, singles)
            assert np.array_equal(batch[::-1], engine.embed(ROWS[::-1], pooling=pooling))


def test_adapters_change_embeddings(model):
    lora = with_lora(tiny_llama(**SIZES), 1, b_std=0.5, r=2, target_modules=["q_proj", "down_proj"]).eval()
    with Engine.from_model(model, weights="float32") as engine:
        number = engine.add_adapter(lora)
        found = engine.embed(ROWS[:2] * 2, adapter=[None, number, number, None])
        right = expected(lora.get_base_model(), ROWS[:2], "last")  # with the adapter
        np.testing.assert_allclose(found[[2, 1]], right, rtol=0, atol=1e-5)
        assert np.abs(found[[0, 3]] - right).max() > 1e-2
        assert np.array_equal(found[[0, 3]], engine.embed(ROWS[:2]))


def test_logits_scale_is_not_part_of_embeddings():
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(
        **SIZES, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        logits_scaling=3.0, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = GraniteForCausalLM(config).eval()
    with Engine.from_model(model, weights="float32") as engine:
        assert engine.config.logits_scale != 1
        np.testing.assert_allclose(engine.embed(ROWS[:2]), expected(model, ROWS[:2], "last"), rtol=0, atol=3e-6)


def test_mistakes_are_named(model):
    with Engine.from_model(model) as engine:
        assert_raises(
            WhetValueError, ("Engine.embed", "pooling", "cls", "last, mean"), engine.embed, [[1]], pooling="cls"
        )
        assert_raises(WhetValueError, ("Engine.embed", "sequences[1]", "empty"), engine.embed, [[1], []])
        assert_raises(WhetTypeError, ("Engine.embed", "sequences[0]"), engine.embed, [["a"]])
        assert_raises(WhetValueError, ("Engine.embed", "adapter"), engine.embed, [[1]], adapter=3)
    with torch.no_grad():
        broken = tiny_llama(**SIZES)
        broken.model.norm.weight.fill_(3e38)
    with Engine.from_model(broken, weights="float32") as engine:
        assert_raises(WhetValueError, ("Engine.embed", "infinity"), engine.embed, [[1, 2]])
