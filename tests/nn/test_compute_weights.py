"""Accelerated models always compute with their current weights, however the weights were written."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from tests.engine.tiny_models import VOCAB, tiny_model
from tests.raising import assert_raises
from tests.tiny import letters_tokenizer, with_lora

from whet import WhetValueError
from whet.nn import AdamW, accelerate, completion_logprobs, scratch
from whet.nn.accelerate import acceleration_of

TOKENS = torch.randint(0, VOCAB, (1, 24), generator=torch.Generator().manual_seed(3))
PROMPT, COMPLETION = TOKENS[0, :9].tolist(), TOKENS[0, 9:].tolist()


def trained(case: str = "llama", **options: Any) -> Any:
    return tiny_model(case, **options).requires_grad_(True)


def outputs(model: Any) -> list[torch.Tensor]:
    """Return outputs for a packed batch, a padded one, and few rows, as in generation."""
    result = completion_logprobs(model, [PROMPT], [COMPLETION]).logprobs.detach()
    with torch.no_grad():
        return [result, model(TOKENS).logits, model(TOKENS[:, :3]).logits, model(TOKENS[:, :1]).logits]


def assert_fresh(model: Any, dtype: str) -> None:
    """Assert that the outputs equal those that a new model with these weights computes."""
    seen = outputs(model)
    fresh = type(model)(copy.deepcopy(model.config)).eval()
    fresh.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    with accelerate(fresh, dtype):
        for output, right in zip(seen, outputs(fresh), strict=True):
            assert torch.equal(output, right)


def weights_of(model: Any) -> list[torch.Tensor]:
    """Return the projections of one layer, and the head."""
    return [p for name, p in model.named_parameters() if p.ndim == 2 and ("layers.1" in name or "h.1" in name)] + [
        model.get_output_embeddings().weight
    ]


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "an element of .data": lambda p: p.data.view(-1)[p.numel() // 2].add_(3),
    "the last element of .data": lambda p: p.data.view(-1)[-1].add_(3),
    "an alias taken before": lambda p: p.alias.view(-1)[0].add_(3),
    ".data.copy_": lambda p: p.data.copy_(p.data * 1.25),
    ".data =": lambda p: setattr(p, "data", p.data * 1.25),
    "no_grad": lambda p: p.requires_grad_(False).mul_(1.25).requires_grad_(True),
    "numpy": lambda p: p.detach().numpy().__setitem__((0, 0), 3.0),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("write", WRITES)
def test_every_kind_of_write_takes_effect(write, case, dtype):
    model = trained(case)
    weights = weights_of(model)
    for weight in weights:
        weight.alias = weight.data
    with accelerate(model, dtype):
        before = outputs(model)
        for weight in weights:
            WRITES[write](weight)
            assert_fresh(model, dtype)
        assert not any(torch.equal(one, other) for one, other in zip(before, outputs(model), strict=True))


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_a_weight_in_another_layout(case):
    """Its rows are not contiguous, so torch rounds the whole matrix."""
    model, scaled = trained(case), trained(case)
    with accelerate(model, "bfloat16"):
        for weight in weights_of(model):
            outputs(model)
            weight.data = (weight.data * 1.25).t().contiguous().t()
        seen = outputs(model)
    for weight in weights_of(scaled):
        weight.data.mul_(1.25)
    with accelerate(scaled, "bfloat16"):
        for output, right in zip(seen, outputs(scaled), strict=True):
            torch.testing.assert_close(output, right, rtol=0.02, atol=0.05)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "Adagrad, fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
    "Whet's AdamW": lambda p: AdamW(p, lr=0.1),
}


def loss_of(model: Any) -> torch.Tensor:
    return -completion_logprobs(model, [PROMPT], [COMPLETION]).logprobs.mean()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_of_every_optimizer_take_effect(name):
    model = trained()
    optimizer = OPTIMIZERS[name](list(model.parameters()))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    with accelerate(model, "bfloat16"):
        for _ in range(2):
            optimizer.step(closure)
            assert_fresh(model, "bfloat16")


def test_products_hold_no_copies_of_weights(monkeypatch):
    """Memory for one matrix and one tile of the head; writing a weight between forward and backward raises."""
    monkeypatch.setattr(scratch._scratch, "buffer", torch.empty(0))
    model = trained("llama-biases-tied")
    with accelerate(model, "bfloat16") as acceleration:
        loss = loss_of(model)
        n_bytes = sum(size for _, _, size in acceleration.memory_blocks())
        largest = max(p.numel() for p in model.parameters())
        assert 0 < n_bytes <= 2 * largest + 2 * VOCAB * model.config.hidden_size
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(1.25)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_state_dicts_and_averaged_weights():
    model, other = trained(), trained(initializer_range=0.2)
    with accelerate(model, "bfloat16"):
        own = outputs(model)
        saved = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.load_state_dict(other.state_dict())
        assert_fresh(model, "bfloat16")
        for name, p in model.named_parameters():  # like a callback that swaps in averages for an evaluation
            p.data.copy_(saved[name])
        for output, right in zip(outputs(model), own, strict=True):
            assert torch.equal(output, right)


def test_adapters_can_be_merged_and_unmerged_while_accelerated():
    model = with_lora(trained(), r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    with accelerate(model, "float32"):
        right = outputs(model)
    with accelerate(model, "bfloat16"):
        for change in (model.merge_adapter, model.unmerge_adapter):
            change()
            for output, exact in zip(outputs(model), right, strict=True):
                assert (output - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize("case", ["gpt_neox", "gpt2", "phi3", "llama"])
def test_models_that_share_a_config_are_accelerated_independently(case):
    """For example a policy and its reference."""
    model = trained(case)
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    assert other.config is model.config
    implementation = model.config._attn_implementation
    plain = outputs(model)
    first, second = accelerate(model, "float32"), accelerate(other, "float32")
    first.remove()
    for output, right in zip([*outputs(model), *outputs(other)], [*plain, *plain], strict=True):
        torch.testing.assert_close(output, right, rtol=1e-4, atol=1e-4)
    second.remove()
    assert model.config._attn_implementation == implementation
    assert all(torch.equal(output, right) for output, right in zip(outputs(other), plain, strict=True))


@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_embeddings_of_any_dtype(given, wanted):
    model = trained("llama")
    x = model.get_input_embeddings()(TOKENS).detach()
    with torch.no_grad():
        right = model(inputs_embeds=x.to(given).float()).logits
        with accelerate(model, wanted):
            logits = model(inputs_embeds=x.to(given)).logits.float()
    assert (logits - right).abs().max() < (1e-5 if wanted == given is torch.float32 else 0.06) * right.abs().max()


def test_a_weight_of_another_dtype_is_rejected():
    model = trained("llama")
    with accelerate(model, "bfloat16"):
        assert_raises(WhetValueError, ("torch.float64", "remove()"), loss_of, model.double())


def test_an_interrupted_installation_restores_the_model(monkeypatch):
    model = trained("gpt_neox")
    before = outputs(model)
    module, n = importlib.import_module("whet.nn.accelerate"), 0
    original = module.choose_forward

    def interrupt(*arguments: Any) -> Any:
        nonlocal n
        n += 1
        if n == 9:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(module, "choose_forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        accelerate(model, "bfloat16")
    assert acceleration_of(model) is None
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(torch.equal(output, right) for output, right in zip(outputs(model), before, strict=True))


def hf_dataset() -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(3, VOCAB, (16, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]


def hf_loss(model: Any) -> float:
    rows = torch.stack([row["input_ids"] for row in hf_dataset()])
    with torch.no_grad():
        return model(rows, labels=rows).loss.item()


TOLERANCES = {"float32": 1e-4, "bfloat16": 0.02}


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_hugging_face_trainer_reaches_the_same_loss_as_on_torch(dtype, tmp_path):
    """Its fused optimizer changes weights without changing their version counters."""
    from transformers import Trainer, TrainingArguments

    def train(model: Any) -> None:
        arguments = TrainingArguments(
            str(tmp_path), max_steps=25, per_device_train_batch_size=4, learning_rate=5e-3, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        assert arguments.optim.value == "adamw_torch_fused"
        Trainer(model=model, args=arguments, train_dataset=hf_dataset()).train()

    check_training(train, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_trl_trainer_reaches_the_same_loss_as_on_torch(dtype, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")

    def train(model: Any) -> None:
        arguments = trl.SFTConfig(
            str(tmp_path), max_steps=25, per_device_train_batch_size=4, learning_rate=5e-3, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True, logging_strategy="no", bf16=False, gradient_checkpointing=False,
        )  # fmt: skip
        rows = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in hf_dataset()])
        trl.SFTTrainer(model, args=arguments, train_dataset=rows, processing_class=letters_tokenizer()).train()

    check_training(train, dtype)


def check_training(train: Callable[[Any], None], dtype: str) -> None:
    plain, fast = trained(initializer_range=0.1), trained(initializer_range=0.1)
    start = hf_loss(plain)
    train(plain)
    acceleration = accelerate(fast, dtype)  # type: ignore[arg-type]
    train(fast)
    seen = hf_loss(fast)
    acceleration.remove()
    right = hf_loss(plain.eval())
    assert right < 0.8 * start
    for loss in (seen, hf_loss(fast.eval())):
        assert abs(loss - right) < TOLERANCES[dtype] * right
