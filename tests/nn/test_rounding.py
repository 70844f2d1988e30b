"""Weights rounded as in a GGUF file: the export's numbers to the bit, gradients, training, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.tiny_models import CASES, family_name, tiny_model, token_ids
from tests.gguf_files import values_by_module, values_by_slot
from tests.models.test_export import N_ROWS, NOT_IN_GGUF, save, tokenizer
from tests.raising import assert_raises
from tests.tiny import assert_resumes, fours, with_lora

from whet.algorithms import GRPO, SFT
from whet.errors import WhetValueError
from whet.models.export import export_gguf, read_adapters
from whet.models.families import FAMILIES
from whet.models.sources.folder import open_folder
from whet.models.sources.gguf import open_gguf
from whet.models.sources.live import open_module
from whet.nn.frozen import frozen_model
from whet.nn.rounding import RoundedWeights

__all__ = ["tokenizer"]  # the fixture
LARGE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
ROWS = [{"prompt": [5, 6, 7], "completion": [1, 2, 3, 4]}, {"prompt": [9, 3], "completion": [7, 7]}]
EXPORTED = [case for case in CASES if case not in NOT_IN_GGUF and FAMILIES[family_name(case)].gguf is not None]


def assert_rounded_as_exported(model: Any, file: Any, file_type: str) -> None:
    source = open_gguf(file)
    values_of = values_by_module if source.config.delta_tiled else values_by_slot
    stored = values_of(source)
    with RoundedWeights(model, file_type, "test").applied():  # pyright: ignore[reportArgumentType]
        rounded = values_of(open_module(model))
    for name, values in rounded.items():
        if values.ndim > 1:
            np.testing.assert_array_equal(values, stored[name], err_msg=name)


@pytest.mark.parametrize("case", EXPORTED)
def test_every_family_is_rounded_as_its_file(case: str, tokenizer: Any, tmp_path: Any) -> None:
    model = tiny_model(case, vocab_size=N_ROWS)
    export_gguf(save(model, tokenizer, tmp_path / "model"), tmp_path / "model.gguf", "q8_0")
    assert_rounded_as_exported(model, tmp_path / "model.gguf", "q8_0")


@pytest.mark.parametrize("file_type", ["q4_0", "q4_k_m", "q5_k_s"])
def test_mixtures_are_rounded_as_their_files(file_type: str, tokenizer: Any, tmp_path: Any) -> None:
    model = tiny_model("llama", vocab_size=N_ROWS, num_hidden_layers=3, **LARGE)
    export_gguf(save(model, tokenizer, tmp_path / "model"), tmp_path / "model.gguf", file_type)
    assert_rounded_as_exported(model, tmp_path / "model.gguf", file_type)


def test_adapters_are_rounded_with_their_matrix(tokenizer: Any, tmp_path: Any) -> None:
    """W + s B A of the model with rounded weights is what the export of the merged model stores."""
    model = with_lora(
        tiny_model("llama", vocab_size=N_ROWS, **LARGE), b_std=0.1, target_modules=["q_proj", "down_proj"]
    )
    path = save(tiny_model("llama", vocab_size=N_ROWS, **LARGE), tokenizer, tmp_path / "model")
    model.save_pretrained(tmp_path / "adapter")
    adapters = read_adapters(tmp_path / "adapter", open_folder(path), "test")
    export_gguf(path, tmp_path / "model.gguf", "q4_0", adapters=adapters)
    stored = values_by_module(open_gguf(tmp_path / "model.gguf"))
    own = [parameter.detach().clone() for parameter in model.parameters()]
    with RoundedWeights(model, "q4_0", "test").applied():
        merged = values_by_module(open_module(model, merged=True))
    for name, values in merged.items():
        np.testing.assert_allclose(values, stored[name], atol=1e-6, err_msg=name)
    assert all(torch.equal(a, b) for a, b in zip(own, model.parameters(), strict=True))


def test_gradients_are_of_the_rounded_weights() -> None:
    """Straight through: the gradient at Q(W) is the gradient of W, for the embedding and tied head too."""
    model, rounded = tiny_model("llama", vocab_size=N_ROWS, **LARGE), tiny_model("llama", vocab_size=N_ROWS, **LARGE)
    ids = token_ids()
    with RoundedWeights(model, "q4_0", "test").applied():
        rounded.load_state_dict({name: values.clone() for name, values in model.state_dict().items()})
        model.requires_grad_(True)(ids).logits.square().mean().backward()
    rounded.requires_grad_(True)(ids).logits.square().mean().backward()
    for (name, own), other in zip(model.named_parameters(), rounded.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad), name  # pyright: ignore[reportArgumentType]
        assert own.ndim == 1 or not torch.equal(own, other)


def test_a_number_by_hand() -> None:
    """q8_0: the scale of 32 weights is the largest / 127 in float16, here 2^-7 for a largest of 127 / 128."""
    model = tiny_model("llama", hidden_size=32, intermediate_size=32)
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data.zero_()
    weight.data[0, :3] = torch.tensor([127 / 128, 0.25 + 0.003, -0.013])
    with RoundedWeights(model, "q8_0", "test").applied():
        assert weight[0, :4].tolist() == [127 / 128, 0.25, -2 / 128, 0.0]


def test_training_halves_the_loss_of_rounding() -> None:
    """SFT with q4_0 overfits a row; without qat the same steps lose more when the result is rounded."""
    losses = {}
    for qat in (None, "q4_0"):
        torch.manual_seed(0)
        model = tiny_model("llama", vocab_size=N_ROWS, **LARGE)
        trainer = SFT(model.requires_grad_(True), qat=qat, learning_rate=1e-3, batch_size=2)
        for _ in range(30):
            trainer.train_step(ROWS)
        rounding = RoundedWeights(model, "q4_0", "test")
        with rounding.applied():
            losses[qat] = SFT(tiny_copy(model), batch_size=2).evaluate(ROWS)
    assert losses["q4_0"] < 0.5 * losses[None]


def tiny_copy(model: Any) -> Any:
    copy = tiny_model("llama", vocab_size=N_ROWS, **LARGE)
    copy.load_state_dict({name: values.clone() for name, values in model.state_dict().items()})
    return copy.requires_grad_(True)


@pytest.mark.parametrize("adapters", [False, True])
def test_samples_are_of_the_rounded_weights(adapters: bool) -> None:
    model = tiny_model("llama", vocab_size=N_ROWS, **LARGE).requires_grad_(True)
    model = with_lora(model, b_std=0.1, target_modules=["q_proj", "down_proj"]) if adapters else model
    grpo: Any = GRPO(
        model, reward_fn=fours, qat="q4_0", compute="float32", group_size=4, max_new_tokens=8, batch_size=2
    )
    metrics = grpo.train_step([[5, 6], [7]])
    assert metrics["sampler/logprob_difference"] < 1e-4
    grpo.engine.sync(model)  # without rounding
    [logprobs] = grpo.engine.logprobs([[5, 6, 7, 8, 9]])
    with RoundedWeights(model, "q4_0", "test").applied():
        grpo.engine.sync(model)
    assert np.abs(grpo.engine.logprobs([[5, 6, 7, 8, 9]])[0] - logprobs).max() > 1e-3


@pytest.mark.parametrize("adapters", [False, True])
def test_runs_resume_to_the_bit(adapters: bool, tmp_path: Any) -> None:
    def make() -> SFT:
        model = tiny_model("llama", vocab_size=N_ROWS).requires_grad_(True)
        model = with_lora(model, target_modules=["q_proj"]) if adapters else model
        return SFT(model, qat="q8_0", learning_rate=1e-2, batch_size=2)

    assert_resumes(make, ROWS, tmp_path)


def test_what_is_not_rounded_is_refused(tmp_path: Any) -> None:
    model = tiny_model("llama", vocab_size=N_ROWS)
    frozen = with_lora(frozen_model(model, "q8_0"), target_modules=["q_proj"])
    assert_raises(WhetValueError, ("qat is 'q4_0'", "packed", "--base none"), SFT, frozen, qat="q4_0")
    dora = with_lora(tiny_model("llama"), target_modules=["q_proj"], use_dora=True)
    assert_raises(WhetValueError, ("qat is 'q4_0'", "plain LoRA", "Dora"), SFT, dora, qat="q4_0", compute="torch")
    assert_raises(WhetValueError, ("qat is 'f16'", "quantised"), SFT, model, qat="f16")
    assert_raises(WhetValueError, ("async_lag is 1", "qat"), GRPO, model, reward_fn=fours, qat="q4_0", async_lag=1)
