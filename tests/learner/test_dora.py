"""DoRA on a learner: its formula and gradients by autograd in float64, PEFT's modules and files, and engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from tests.engine.tiny_models import tiny_model
from tests.learner.test_learner import (
    COMPLETIONS,
    PROMPTS,
    check_against_autograd,
    check_against_bfloat16,
    new_learner,
    output_gradients,
    run,
)
from tests.raising import assert_raises
from tests.threads import same_on_any_threads

from whet import Engine, SamplingParams, WhetValueError
from whet.learner.learner import Learner
from whet.models.export import read_adapters
from whet.models.packed_base import PackedBase, pack_base
from whet.models.row_reader import RowReader
from whet.models.sources.live import open_module


def packed(case: str, weights: str = "float32") -> PackedBase:
    return pack_base(open_module(tiny_model(case)), weights=weights)


def new_dora(base: PackedBase, **settings: Any) -> Learner:
    return new_learner(base, use_dora=True, modules_to_save=(), **settings)


def test_a_row_worked_out_by_hand(tmp_path: Path) -> None:
    """w = (3, 1, 0, ...), b = 3 and a = (0, 1, 0, ...) give w + b a = (3, 4), of length 5; with m = 10 it is (6, 8)."""
    model = tiny_model("llama")
    weight = model.model.layers[0].self_attn.q_proj.weight.data
    weight[0] = torch.eye(weight.shape[1])[0] * 3 + torch.eye(weight.shape[1])[1]
    source = open_module(model)
    learner = Learner(
        pack_base(source, weights="float32"),
        lora_rank=1,
        lora_alpha=1,
        use_dora=True,
        lora_layers=["layers.0.self_attn.q_proj"],
    )
    [adapter] = learner.adapters
    [row] = np.flatnonzero(adapter.order_outputs(np.arange(adapter.b.shape[1])) == 0)
    adapter.a[:], adapter.b[:] = np.eye(1, adapter.a.shape[1], 1), 0
    adapter.b[0, row], adapter.magnitude[row] = 3, 10
    assert learner._row_lengths(0, adapter)[row] == 5
    learner.save_pretrained(tmp_path, "base")
    [lora] = read_adapters(tmp_path, source, "test")
    rows = RowReader(source._replace(adapters=(lora,)), "test").values("layers.0.qkv", np.array([row]))
    np.testing.assert_allclose(rows[0, :3], [6, 8, 0], rtol=1e-6)


@pytest.mark.parametrize("case", ["llama", "gpt2", "gptj", "qwen3", "gemma4", "qwen3_5_text", "lfm2", "gemma3-vision"])
def test_it_matches_autograd(case: str) -> None:
    check_against_autograd(new_dora(packed(case), compute="float32"), tiny_model(case))


def test_the_projection_of_the_inputs_of_layers_matches_autograd() -> None:
    layers = ["all-linear", "per_layer_model_projection"]
    learner = new_dora(packed("gemma4"), compute="float32", lora_layers=layers)
    check_against_autograd(learner, tiny_model("gemma4"))


def test_some_matrices_of_a_product_have_magnitudes_and_others_no_adapter() -> None:
    learner = new_dora(packed("qwen2"), compute="float32", lora_layers=["k_proj", "up_proj"])
    check_against_autograd(learner, tiny_model("qwen2"))


@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_peft_computes_the_same(case: str, tmp_path: Path) -> None:
    learner = new_dora(packed(case), compute="float32", rank_pattern={"q_proj": 5})
    learner.save_pretrained(tmp_path, "base")
    model = peft.PeftModel.from_pretrained(tiny_model(case), tmp_path, is_trainable=True)
    grad, _ = output_gradients()
    result = learner.logprobs(PROMPTS, COMPLETIONS)
    learner.backward(grad)
    loss = torch.zeros(())
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)[range(len(completion)), completion]
        np.testing.assert_allclose(result.logprobs[i, : len(completion)], logprobs.detach().numpy(), atol=2e-5)
        loss = loss + logprobs @ torch.tensor(grad[i, : len(completion)])
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for adapter in learner.adapters:
        for name, got in adapter.to_peft(adapter.gradients).items():
            expected = grads.pop(name).numpy()
            np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    assert not grads
    again = Learner(packed(case), adapter=tmp_path, compute="float32")
    for got, saved in zip(again.parameters, learner.parameters, strict=True):
        np.testing.assert_array_equal(got, saved)


def test_bfloat16_products_are_as_close_to_float64_as_torchs() -> None:
    learner = new_dora(pack_base(open_module(tiny_model("llama")), weights="bf16"), compute="bfloat16")
    check_against_bfloat16(learner, "llama", {})


@pytest.mark.parametrize("weights", ["q8_0", "q4_k", "bf16"])
def test_the_lengths_are_of_the_packed_weights(weights: str) -> None:
    model = tiny_model("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    base = pack_base(open_module(model), weights=weights)
    learner = Learner(base, lora_rank=2, use_dora=True)
    for adapter in learner.adapters:
        matrix = base.rows(adapter.name, np.empty(adapter.location.shape, np.float32)).astype(np.float64)
        np.testing.assert_allclose(adapter.order_outputs(adapter.magnitude), np.linalg.norm(matrix, axis=1), rtol=1e-6)


def test_new_magnitudes_change_no_bit_of_the_base() -> None:
    base = packed("qwen2", "bf16")
    plain, dora = (Learner(base, lora_rank=2, use_dora=used) for used in (False, True))
    np.testing.assert_array_equal(
        dora.logprobs(PROMPTS, COMPLETIONS).logprobs, plain.logprobs(PROMPTS, COMPLETIONS).logprobs
    )
    assert dora.n_parameters == plain.n_parameters + sum(each.b.shape[1] for each in plain.adapters)


def test_a_row_of_zeros_stays_finite() -> None:
    model = tiny_model("llama")
    model.model.layers[0].self_attn.q_proj.weight.data[0] = 0
    learner = Learner(pack_base(open_module(model), weights="float32"), lora_rank=2, use_dora=True)
    learner.logprobs(PROMPTS, COMPLETIONS)
    learner.backward(output_gradients()[0])
    assert np.isfinite(learner.step(0.1))
    assert np.isfinite(learner.logprobs(PROMPTS, COMPLETIONS).logprobs).all()


def test_bits_do_not_depend_on_threads_batches_or_memory() -> None:
    def gradients(activation_bytes: int) -> list[np.ndarray]:
        learner = new_dora(packed("qwen3", "bf16"), activation_bytes=activation_bytes)
        result = run(learner)
        return [result.logprobs, *learner.gradients]

    same_on_any_threads(lambda: gradients(0))
    for got, right in zip(gradients(1 << 30), gradients(0), strict=True):
        np.testing.assert_array_equal(got, right)


@pytest.mark.parametrize("weights", ["float32", "q8_0"])
def test_engines_sample_with_it(weights: str, tmp_path: Path) -> None:
    learner = new_dora(packed("gpt2", weights), compute="float32")
    learner.save_pretrained(tmp_path, "base")
    prompts, sampling = [[5, 6, 7], [9]], SamplingParams(max_new_tokens=6, seed=1)
    with Engine.from_model(learner) as engine:
        groups = engine.generate(prompts, 2, sampling)
        number = engine.add_adapter(tmp_path)
        again = engine.generate(prompts, 2, sampling, adapter=number)
        assert [c.logprobs for group in again for c in group] == [c.logprobs for group in groups for c in group]
        with_it = engine.memory["adapters_bytes"]
        engine.remove_adapter(number)
        assert engine.memory["adapters_bytes"] < with_it
    completions = [completion for group in groups for completion in group]
    rows = [prompt for prompt in prompts for _ in range(2)], [completion.token_ids for completion in completions]
    tolerance = 1e-5 if weights == "float32" else 0.1  # the engine rounds inputs to 8 bits
    for row, completion in zip(learner.logprobs(*rows).logprobs, completions, strict=True):
        np.testing.assert_allclose(row[: len(completion.token_ids)], completion.logprobs, atol=tolerance)
    with Engine.from_model(tiny_model("gpt2"), weights="float32") as engine:
        merged = read_adapters(tmp_path, open_module(tiny_model("gpt2")), "test")
        number = engine.add_adapter(tmp_path)
        separate = engine.logprobs([[5, 6, 7, 8]], start=1, adapter=number)[0]
        assert len(merged) == len(learner.adapters)
        model = peft.PeftModel.from_pretrained(tiny_model("gpt2"), tmp_path)
        expected = model(torch.tensor([[5, 6, 7, 8]])).logits[0].log_softmax(-1)[range(3), [6, 7, 8]]
        if weights == "float32":
            np.testing.assert_allclose(separate, expected.detach().numpy(), atol=1e-5)


def test_it_learns() -> None:
    learner = Learner(packed("qwen2", "q8_0"), lora_rank=8, use_dora=True)
    before, losses = [each.magnitude.copy() for each in learner.adapters], []
    for _ in range(60):
        result = learner.logprobs(PROMPTS, COMPLETIONS)
        n = result.mask.sum()
        losses.append(-float(result.logprobs.sum()) / n)
        learner.backward(np.where(result.mask, -1 / n, 0))
        learner.step(0.03)
    assert losses[0] > 3 and losses[-1] < 0.5
    assert all((each.magnitude != first).any() for each, first in zip(learner.adapters, before, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    base = packed("llama")
    for facts, settings in (
        (("lora_dropout is 0.1", "DoRA", "torch"), {"lora_dropout": 0.1}),
        (("lora_init is 'pissa'", "use_dora"), {"lora_init": "pissa"}),
    ):
        assert_raises(WhetValueError, facts, Learner, base, use_dora=True, **settings)
    learner = new_dora(base)
    assert learner.adapters[0].magnitude is not None
    learner.adapters[0].magnitude[0] = np.nan
    with Engine.from_base(base) as engine:
        assert_raises(WhetValueError, ("magnitudes of layers.0", "NaN"), engine.add_adapter, learner)
    facts = ("use_dora is True", "experts")
    assert_raises(WhetValueError, facts, Learner, packed("qwen3_moe"), use_dora=True, lora_layers=["experts"])
