"""Quantisation-aware training in a learner: the file's numbers, straight-through gradients, and modules of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.tiny_models import CASES, family_name, tiny_model
from tests.gguf_files import values_by_module
from tests.learner.test_learner import COMPLETIONS, PROMPTS, check_against_autograd, new_learner, run
from tests.models.test_export import N_ROWS, NOT_IN_GGUF, save, tokenizer
from tests.raising import assert_raises
from tests.threads import same_on_any_threads
from tests.tiny import assert_resumes, fours, with_lora

from whet.algorithms import DPO, GRPO, SFT
from whet.errors import WhetValueError
from whet.learner import Learner
from whet.learner.rounding import rounded_bytes
from whet.models.export import export_gguf, read_adapters
from whet.models.families import FAMILIES
from whet.models.packed_base import PackedBase, pack_base
from whet.models.slots import ModelSource
from whet.models.sources.folder import open_folder
from whet.models.sources.gguf import open_gguf
from whet.models.sources.live import open_module

__all__ = ["tokenizer"]  # the fixture
LARGE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
ROWS = [{"prompt": [5, 6, 7], "completion": [1, 2, 3, 4]}, {"prompt": [9, 3], "completion": [7, 7]}]
EXPORTED = [case for case in CASES if case not in NOT_IN_GGUF and FAMILIES[family_name(case)].gguf is not None]
REFUSED = ("gemma4", "qwen3_5", "qwen3-next", "granite4", "nemotron")
"""Beginnings of the cases with a second embedding, or columns in another order in the file."""


def base_of(model: Any) -> PackedBase:
    return pack_base(open_module(model), weights="float32")


def assert_rounded_as_exported(model: Any, file_type: Any, tokenizer: Any, folder: Path, **settings: Any) -> None:
    """Check that a learner's weights are the numbers of the file of the merged adapters."""
    learner = new_learner(base_of(model), qat=file_type, modules_to_save=(), **settings)
    path = save(model, tokenizer, folder / "model")
    learner.save_pretrained(folder / "adapter", "base")
    adapters = read_adapters(folder / "adapter", open_folder(path), "test")
    export_gguf(path, folder / "model.gguf", file_type, adapters=adapters)
    stored, packed = values_by_module(open_gguf(folder / "model.gguf")), learner._trained_base
    for name, location in packed.targets.items():
        if len(location.shape) == 2 and f"{name}.weight" in stored:
            values = packed.rows(name, np.empty(location.shape, np.float32))
            np.testing.assert_array_equal(values, stored[f"{name}.weight"], err_msg=name)


@pytest.mark.parametrize("case", EXPORTED)
def test_every_family_is_rounded_as_its_file(case: str, tokenizer: Any, tmp_path: Path) -> None:
    try:
        assert_rounded_as_exported(tiny_model(case, vocab_size=N_ROWS), "q8_0", tokenizer, tmp_path)
    except WhetValueError as error:
        assert case.startswith(REFUSED) and "--base none" in str(error)


@pytest.mark.parametrize("file_type", ["q4_0", "q4_k_m", "q5_k_s"])
def test_mixtures_are_rounded_as_their_files(file_type: str, tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=N_ROWS, num_hidden_layers=3, **LARGE)
    assert_rounded_as_exported(model, file_type, tokenizer, tmp_path, lora_layers=["q_proj", "down_proj"])


@pytest.mark.parametrize("case", ["llama", "gpt2", "qwen3"])
def test_gradients_are_straight_through(case: str) -> None:
    """Modules with W = Q(W + s B A) - s B A, to which LoRA adds s B A, have the same gradients."""
    norms = [] if case == "gpt2" else ["norm"]
    learner = new_learner(base_of(tiny_model(case)), qat="q4_0", compute="float32", modules_to_save=norms)
    packed, model = learner._trained_base, tiny_model(case).double()
    deltas = {each.name: each.scaling * np.matmul(*each.to_module(each.a, each.b)[::-1]) for each in learner.adapters}
    for name, location in packed.targets.items():
        if len(location.shape) == 2:
            rows = packed.rows(name, np.empty(location.shape, np.float32)).astype(np.float64) - deltas.get(name, 0)
            weight, is_transposed = model.get_submodule(name).weight, location.module.transposed
            weight.data.copy_(torch.tensor(rows.T if is_transposed else rows))
    check_against_autograd(learner, model)


def test_the_reference_is_the_base_before_rounding() -> None:
    base = base_of(tiny_model("llama"))
    learner, plain = new_learner(base, qat="q4_0", compute="float32"), new_learner(base, compute="float32")
    np.testing.assert_array_equal(
        learner.logprobs(PROMPTS, COMPLETIONS, adapters=False).logprobs,
        plain.logprobs(PROMPTS, COMPLETIONS, adapters=False).logprobs,
    )
    difference = learner.logprobs(PROMPTS, COMPLETIONS).logprobs - plain.logprobs(PROMPTS, COMPLETIONS).logprobs
    assert np.abs(difference).max() > 1e-3
    values = learner.divergence(PROMPTS, COMPLETIONS, learner, teacher_adapters=False).values
    assert values.max() > 1e-4
    values = learner.divergence(PROMPTS, COMPLETIONS, learner).values
    np.testing.assert_allclose(values, 0, atol=1e-6)


def test_modules_of_torch_take_the_same_steps() -> None:
    model = tiny_model("llama", vocab_size=N_ROWS, **LARGE)
    layers: Any = ["q_proj", "down_proj"]
    learner = new_learner(base_of(model), qat="q4_0", compute="float32", modules_to_save=(), lora_layers=layers)
    modules = with_lora(model, target_modules=layers, r=3, lora_alpha=5)
    with torch.no_grad():
        named = {name: array for each in learner.adapters for name, array in each.to_peft(each.parameters).items()}
        for name, parameter in modules.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.tensor(named.pop(name)))
    assert not named
    settings: Any = {"qat": "q4_0", "learning_rate": 1e-3, "batch_size": 2, "compute": "float32"}
    runs = SFT(learner, **settings), SFT(modules, **settings)
    for tolerance in (1e-5, 0.03, 0.03):  # weights that are nearly equal may be rounded to different numbers
        native, torchs = (each.train_step(ROWS) for each in runs)
        for name in ("loss", "grad_norm"):
            assert native[name] == pytest.approx(torchs[name], rel=tolerance)


def test_training_halves_the_loss_of_rounding() -> None:
    losses = {}
    for qat in (None, "q4_0"):
        base = base_of(tiny_model("llama", vocab_size=N_ROWS, **LARGE))
        learner = Learner(base, lora_rank=8, qat=qat, compute="float32")
        trainer = SFT(learner, qat=qat, learning_rate=1e-2, batch_size=2)
        for _ in range(30):
            trainer.train_step(ROWS)
        rounded = Learner(base, lora_rank=8, qat="q4_0", compute="float32")
        for own, trained in zip(rounded.parameters, learner.parameters, strict=True):
            own[:] = trained
        rounded.update()
        losses[qat] = SFT(rounded, qat="q4_0", batch_size=2).evaluate(ROWS)
    assert losses["q4_0"] < 0.5 * losses[None]


def test_runs_resume_to_the_bit(tmp_path: Path) -> None:
    def make() -> SFT:
        learner = Learner(base_of(tiny_model("llama", vocab_size=N_ROWS)), lora_rank=2, qat="q8_0")
        return SFT(learner, qat="q8_0", learning_rate=1e-2, batch_size=2)

    assert_resumes(make, ROWS, tmp_path)


def test_bits_do_not_depend_on_threads() -> None:
    def gradients() -> list[np.ndarray]:
        learner = new_learner(base_of(tiny_model("qwen2")), qat="q4_0")
        return [run(learner).logprobs, *learner.gradients]

    same_on_any_threads(gradients)


def test_its_memory_is_predicted() -> None:
    model = tiny_model("llama", vocab_size=N_ROWS, **LARGE)
    source: ModelSource = open_module(model)
    for file_type in ("q4_0", "q4_k_m"):
        learner = Learner(base_of(model), lora_rank=2, qat=file_type)
        [_, (_, _, n_bytes)] = learner.memory_blocks()
        assert rounded_bytes(source, file_type) == pytest.approx(n_bytes, rel=0.02)


def test_what_does_not_fit_is_refused() -> None:
    base = base_of(tiny_model("llama", vocab_size=N_ROWS))
    rounded = Learner(base, lora_rank=2, qat="q4_0")
    assert_raises(WhetValueError, ("qat is None", "'q4_0'"), SFT, rounded)
    assert_raises(WhetValueError, ("qat is 'q8_0'", "'q4_0'", "Learner(qat='q8_0')"), DPO, rounded, qat="q8_0")
    facts = ("qat is 'q4_0'", "samples", "--base none")
    assert_raises(WhetValueError, facts, GRPO, rounded, reward_fn=fours, qat="q4_0")
    for facts, settings in (
        (("qat is 'bf16'", "rounds nothing"), {"qat": "bf16"}),
        (("qat is 'q4'", "q4_0"), {"qat": "q4"}),
        (("DoRA",), {"qat": "q4_0", "use_dora": True}),
        (("lora_dropout 0.1",), {"qat": "q4_0", "lora_dropout": 0.1}),
    ):
        assert_raises(WhetValueError, facts, Learner, base, **settings)
    facts = ("qat is 'q4_0'", "layer_embedding", "--base none")
    assert_raises(WhetValueError, facts, Learner, base_of(tiny_model("gemma4")), qat="q4_0")
