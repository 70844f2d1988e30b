"""The native learner against autograd in float64 over transformers' models, and its bits on any threads and batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.gguf_files import write_gguf
from tests.isas import assert_isas_agree
from tests.raising import assert_raises
from tests.threads import same_on_any_threads

pytest.importorskip("transformers")
from tests.engine.tiny_models import CASES, own_precision, tiny_model

from whet import Engine, SamplingParams, WhetTypeError, WhetValueError
from whet.config.kept_tokens import KeptTokens
from whet.learner.learner import Learner, Logprobs
from whet.models.adapter_files import read_peft
from whet.models.packed_base import PackedBase, pack_base
from whet.models.slots import is_norm, keep_order
from whet.models.sources.gguf import open_gguf
from whet.models.sources.live import open_module
from whet.models.sources.pretrained import open_pretrained
from whet.ops.quant import CORE_FORMATS

PROMPTS = [[5, 6, 7, 8], [9, 3], [5, 6, 7, 8], [5, 6, 7, 8]]  # three completions share a prompt
COMPLETIONS = [[1, 2, 3, 4, 10, 11], [7, 7, 7], [1], [40, 30, 20, 12, 13]]
TEMPERATURE, RANK, ALPHA = 1.3, 3, 5.0
LARGE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "initializer_range": 0.08}
"""Sizes with row lengths that are multiples of 256, for the K-quants."""
SHAPE = (4, 6)
SEED = 11


def norm_names(base: PackedBase) -> list[str]:
    return [name for name, location in base.targets.items() if is_norm(location)]


def new_learner(base: Any, **settings: Any) -> Learner:
    """Make a learner of adapters with random B, and of all norms, with random changes."""
    settings = {"lora_rank": RANK, "lora_alpha": ALPHA, "modules_to_save": norm_names(base), **settings}
    learner = Learner(base, **settings)
    rng = np.random.default_rng(3)
    for adapter in learner.adapters:
        adapter.b[:] = rng.normal(size=adapter.b.shape) * 0.1
        if adapter.magnitude is not None:
            adapter.magnitude *= rng.uniform(0.7, 1.3, adapter.magnitude.shape).astype(np.float32)
    for vector in (vector for norm in learner.norms for vector in norm.parameters):
        vector += 0.1 * rng.normal(size=vector.shape)
    learner.update()
    return learner


def output_gradients() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return rng.normal(size=SHAPE).astype(np.float32), rng.normal(size=SHAPE).astype(np.float32)


def in_module_order(learner: Learner, adapter: Any, b: np.ndarray) -> np.ndarray:
    """Return b (r, n), whose columns are in the order of the slot, in the order of the module."""
    order, out = adapter.location.module.row_order, b.copy()
    if order is not keep_order:
        for first, view in order(learner.base.config, np.arange(b.shape[1])):
            out[:, view] = b[:, first : first + len(view)]
    return out


def dropout_mask(adapter: int, ids: Sequence[int], k: int, dropout: float) -> np.ndarray:
    """Return (tokens, k), True where the input of an adapter is kept: NumPy's Philox in place of the core's."""
    path, rows = 0, []
    for token in ids:
        path = (path + (token + 1) * 0xC2B2AE3D27D4EB4F) % 2**64
        path = (path << 31 | path >> 33) * 0x9E3779B185EBCA87 % 2**64
        before = path * 2**128 - 1  # NumPy increments the counter before each block
        words = np.random.Philox(key=SEED + adapter * 2**64, counter=before).random_raw(4 * -(-k // 8))
        rows.append(words.view(np.uint32)[:k] >= round(dropout * 2**32))
    return np.array(rows)


def by_autograd(
    learner: Learner,
    model: Any,
    prompts: Sequence[list[int]] = PROMPTS,
    completions: Sequence[list[int]] = COMPLETIONS,
    kept: Sequence[KeptTokens | None] | None = None,
) -> tuple[np.ndarray, np.ndarray, dict[str, tuple[np.ndarray, ...]]]:
    """Return log-probs, entropies and the gradients of each module by autograd, row by row, in the model's dtype."""
    dtype, dropout = next(model.parameters()).dtype, learner.lora_dropout
    trained, weights, hooks, ids = {}, {}, [], []

    def add_adapter(
        i: int, scaling: float, a: torch.Tensor, b: torch.Tensor, magnitude: torch.Tensor | None = None
    ) -> Any:
        def add(module: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(()) if not dropout else torch.tensor(dropout_mask(i, ids, a.shape[1], dropout))
            out = out + scaling * (inputs[0] * mask / (1 - dropout)) @ a.T @ b
            if magnitude is None:
                return out
            weight = module.weight.mT if type(module).__name__ == "Conv1D" else module.weight
            lengths = (weight + scaling * b.T @ a).norm(dim=1).detach()  # section 4.3 of the paper
            bias = 0 if module.bias is None else module.bias
            return (out - bias) * magnitude / lengths + bias

        return add

    for i, adapter in enumerate(learner.adapters):
        a, rows = adapter.to_module(adapter.a, adapter.b)
        scaled = [] if adapter.magnitude is None else [adapter.order_outputs(adapter.magnitude)]
        a, b, *scaled = (torch.tensor(x, dtype=dtype, requires_grad=True) for x in (a, rows.T, *scaled))
        trained[adapter.name] = a, b, *scaled
        if (n := adapter.n_experts) > 1:  # as PEFT's ParamWrapper
            delta = torch.einsum("reo,eri->eoi", b.view(-1, n, len(rows)), a.view(n, adapter.rank, -1))
            base = model.get_parameter(adapter.name).detach()
            is_transposed = model.get_submodule(adapter.name.rpartition(".")[0]).is_transposed
            weights[adapter.name] = base + adapter.scaling * (delta.mT if is_transposed else delta)
            continue
        hook = add_adapter(i, adapter.scaling, a, b, *scaled)
        hooks.append(model.get_submodule(adapter.name).register_forward_hook(hook))
    for norm in learner.norms:
        trained[norm.name] = tuple(torch.tensor(x, dtype=dtype, requires_grad=True) for x in norm.parameters)
        weights |= {f"{norm.name}.{part}": x for part, x in zip(norm.parts, trained[norm.name], strict=True)}
    grads, loss = [torch.tensor(g).to(dtype) for g in output_gradients()], torch.zeros((), dtype=dtype)
    logprobs, entropies = np.zeros(SHAPE), np.zeros(SHAPE)
    with own_precision(model):
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            ids[:] = prompt + completion
            out = torch.func.functional_call(model, weights, (torch.tensor([ids]),))
            z, n = (out.logits[0] / TEMPERATURE)[len(prompt) - 1 : -1], len(completion)
            if kept is not None and (sets := kept[i]) is not None:
                z = z.masked_fill(~torch.from_numpy(sets.mask(0, n)), -1e30)
            log_p = z.log_softmax(-1)
            chosen = log_p[range(n), completion]
            entropy = -(log_p.exp() * log_p).sum(-1)
            logprobs[i, :n], entropies[i, :n] = chosen.detach().double(), entropy.detach().double()
            loss = loss + chosen @ grads[0][i, :n] + entropy @ grads[1][i, :n]
    loss.backward()
    for hook in hooks:
        hook.remove()
    found = {name: tuple(x.grad.double().numpy() for x in arrays) for name, arrays in trained.items()}
    return logprobs, entropies, found


def run(learner: Learner, **settings: Any) -> Logprobs:
    settings = {"dropout_seed": SEED if learner.lora_dropout else None, **settings}
    result = learner.logprobs(PROMPTS, COMPLETIONS, temperature=TEMPERATURE, return_entropy=True, **settings)
    learner.backward(*output_gradients())
    return result


def relative_error(got: np.ndarray, right: np.ndarray) -> float:
    return float(np.linalg.norm(got - right) / np.linalg.norm(right))


def gradient_errors(learner: Learner, right: Mapping[str, tuple[np.ndarray, ...]]) -> list[float]:
    found = []
    for adapter in learner.adapters:
        a, rows = adapter.to_module(adapter.grad_a, adapter.grad_b)
        scaled = [] if adapter.grad_magnitude is None else [adapter.order_outputs(adapter.grad_magnitude)]
        found.append((adapter, (a, rows.T, *scaled)))
    pairs = [(norm, norm.gradients) for norm in learner.norms]
    return [
        relative_error(got, expected)
        for each, grads in (*found, *pairs)
        for got, expected in zip(grads, right[each.name], strict=True)
    ]


def check_against_autograd(learner: Learner, model: Any) -> None:
    """Check in float64; the gradients of a few cases are ill-conditioned, and float32 autograd is as far away."""
    result = run(learner)
    logprobs, entropies, grads = by_autograd(learner, model.double())
    np.testing.assert_allclose(result.logprobs, logprobs, atol=1.5e-5)
    np.testing.assert_allclose(result.entropy, entropies, atol=1.5e-5)
    errors = gradient_errors(learner, grads)
    if max(errors) > 1e-5:
        *_, single = by_autograd(learner, model.float())
        pairs = zip(single.values(), grads.values(), strict=True)
        single_errors = [relative_error(x, y) for got, right in pairs for x, y in zip(got, right, strict=True)]
        assert max(errors) < 4 * max(single_errors)  # which depends on the kernels that torch has for this processor


@pytest.mark.parametrize("case", CASES)
def test_every_family_matches_autograd(case: str) -> None:
    source = open_module(tiny_model(case), max_position=16 if "longrope" in case else None)
    learner = new_learner(pack_base(source, weights="float32"), compute="float32")
    assert learner.norms
    check_against_autograd(learner, tiny_model(case))


@pytest.mark.parametrize("norms", [{}, {"modules_to_save": ()}])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_projection_of_the_inputs_of_layers_matches_autograd(norms: dict[str, Any], dropout: float) -> None:
    base = pack_base(open_module(tiny_model("gemma4")), weights="float32")
    layers = ["all-linear", "per_layer_model_projection"]
    learner = new_learner(base, compute="float32", lora_layers=layers, lora_dropout=dropout, **norms)
    assert "model.per_layer_model_projection" in [each.name for each in learner.adapters]
    check_against_autograd(learner, tiny_model("gemma4"))


def test_value_heads_in_the_order_of_a_file_match_autograd(tmp_path: Path) -> None:
    model = tiny_model("qwen3_5_text")
    base = pack_base(open_gguf(write_gguf(model, tmp_path / "model.gguf")), weights="float32")
    assert base.config.delta_tiled
    check_against_autograd(new_learner(base, compute="float32"), model)


def test_ranks_above_the_number_of_heads_match_autograd() -> None:
    """The gates of linear attention have a row for each of 6 heads."""
    model = tiny_model("qwen3_5_text")
    base = pack_base(open_module(model), weights="float32")
    check_against_autograd(new_learner(base, compute="float32", lora_rank=9), model)


@pytest.mark.parametrize("case", ["llama", "gptj", "gpt2", "gemma2", "qwen3", "gemma4"])
def test_dropout_matches_autograd_with_the_same_masks(case: str) -> None:
    learner = new_learner(pack_base(open_module(tiny_model(case)), weights="float32"), compute="float32",
                          lora_dropout=0.3)  # fmt: skip
    check_against_autograd(learner, tiny_model(case))
    dropped = run(learner).logprobs
    assert not np.array_equal(dropped, run(learner, dropout_seed=SEED + 1).logprobs)
    kept = run(learner, dropout_seed=None).logprobs
    learner.lora_dropout = 0.0
    np.testing.assert_array_equal(kept, run(learner).logprobs)


@pytest.mark.parametrize("dropout", [0.05, 0.5])
def test_masks_are_independent_draws(dropout: float) -> None:
    masks = np.array([dropout_mask(adapter, range(100), 500, dropout) for adapter in range(4)])
    n, deviation = masks.size, (dropout * (1 - dropout)) ** 0.5
    assert abs(masks.mean() - (1 - dropout)) < 4 * deviation / n**0.5
    z = (masks - (1 - dropout)) / deviation
    for axis in range(3):  # neighbours in adapter, token and element
        first, second = np.moveaxis(z, axis, 0)[:-1], np.moveaxis(z, axis, 0)[1:]
        assert abs((first * second).mean()) < 4 / first.size**0.5


@pytest.mark.parametrize(("case", "options"), [("llama", {"head_dim": 6}), ("gpt2", {"n_embd": 20})])
def test_heads_of_any_size_match_torch(case: str, options: dict[str, int]) -> None:
    learner = new_learner(pack_base(open_module(tiny_model(case, **options)), weights="float32"), compute="float32")
    check_against_autograd(learner, tiny_model(case, **options))
    learner = new_learner(pack_base(open_module(tiny_model(case, **options)), weights="bf16"), compute="bfloat16")
    check_against_bfloat16(learner, case, options)


@pytest.mark.parametrize("case", ["llama", "gemma2"])
def test_kept_tokens_are_the_support_of_the_distributions(case: str) -> None:
    """Some completions with sets of ids, of bitmaps and whole vocabularies, others with none."""
    model, rng = tiny_model(case), np.random.default_rng(1)
    learner = new_learner(pack_base(open_module(model), weights="float32"), compute="float32")
    vocab_size = learner.base.config.vocab_size
    kept: list[KeptTokens | None] = []
    for i, ids in enumerate(COMPLETIONS):
        sets = [
            np.union1d([token], np.flatnonzero(rng.random(vocab_size) < (0.02, 0.5)[t % 2]))
            for t, token in enumerate(ids)
        ]
        kept.append(None if i == 1 else KeptTokens.from_ids([*sets[:2], None, *sets[3:]][: len(ids)], vocab_size))
    result = run(learner, kept_tokens=kept)
    logprobs, entropies, grads = by_autograd(learner, model.double(), kept=kept)
    np.testing.assert_allclose(result.logprobs, logprobs, atol=1.5e-5)
    np.testing.assert_allclose(result.entropy, entropies, atol=1.5e-5)
    assert max(gradient_errors(learner, grads)) < 1e-5
    whole = learner.logprobs(PROMPTS, COMPLETIONS, temperature=TEMPERATURE, keep=False)
    assert (result.logprobs >= whole.logprobs - 1e-6).all() and (result.logprobs > whole.logprobs + 0.1).any()
    assert_raises(
        WhetValueError, ("kept_tokens", "vocabulary"), learner.logprobs, [[1]], [[2]],
        kept_tokens=[KeptTokens.from_ids([[2]], vocab_size + 1)],
    )  # fmt: skip


@pytest.mark.parametrize("format", [name for name in CORE_FORMATS if name != "float32"])
def test_every_format_matches_autograd_on_its_dequantised_weights(format: str) -> None:
    base = pack_base(open_module(tiny_model("llama", **LARGE)), weights=format)
    model = tiny_model("llama", **LARGE)
    with torch.no_grad():
        for name, module in model.named_modules():
            if name in base.targets and getattr(module, "weight", None) is not None:
                base.rows(name, module.weight.detach())
    check_against_autograd(new_learner(base, compute="float32"), model)


def test_bfloat16_products_are_as_close_to_float64_as_torchs() -> None:
    options = {**LARGE, "num_hidden_layers": 3}
    learner = new_learner(pack_base(open_module(tiny_model("qwen2", **options)), weights="bf16"), compute="bfloat16")
    check_against_bfloat16(learner, "qwen2", options)


def check_against_bfloat16(learner: Learner, case: str, options: Mapping[str, Any], ratio: float = 1.0) -> None:
    """Check that log-probs are at most as far from float64 as torch's in bfloat16, and gradients times a ratio."""
    model = tiny_model(case, **options).bfloat16()
    result = run(learner)
    logprobs, _, grads = by_autograd(learner, model.double())
    by_torch, _, torch_grads = by_autograd(learner, model.bfloat16())
    assert np.abs(result.logprobs - logprobs).max() <= np.abs(by_torch - logprobs).max()
    errors = gradient_errors(learner, grads)
    torch_errors = [
        relative_error(got, right) for name in grads for got, right in zip(torch_grads[name], grads[name], strict=True)
    ]
    assert np.mean(errors) <= ratio * np.mean(torch_errors)


DIGEST = """
h = hashlib.sha256()
for case, weights in (("llama", "bf16"), ("gemma2", "q8_0"), ("gptj", "float32"), ("qwen3_5_text", "bf16"),
                      ("granite4-hybrid", "q8_0"), ("nemotron_h", "bf16")):  # fmt: skip
    base = pack_base(open_module(tiny_model(case)), weights=weights)
    for compute in ("float32", "bfloat16"):
        learner = new_learner(base, compute=compute, lora_dropout=0.2)
        result = run(learner)
        for x in (result.logprobs, result.entropy, *learner.gradients):
            h.update(x.tobytes())
print(h.hexdigest())
"""


def test_every_instruction_set_gives_the_same_bits() -> None:
    assert_isas_agree("import hashlib, whet\nfrom tests.learner.test_learner import *", DIGEST)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_threads(compute: str) -> None:
    base = pack_base(open_module(tiny_model("llama", **LARGE)), weights="bf16")

    def work() -> list[np.ndarray]:
        learner = new_learner(base, compute=compute, lora_dropout=0.2)
        result = run(learner)
        return [result.logprobs, *learner.gradients]

    same_on_any_threads(work)


@pytest.mark.parametrize("case", ["llama", "phi", "qwen3", "qwen3_5_text", "granite4-hybrid", "nemotron_h"])
def test_gradients_do_not_depend_on_the_order_of_rows_or_on_the_batches(case: str) -> None:
    base = pack_base(open_module(tiny_model(case)), weights="bf16")
    grad, _ = output_gradients()

    def gradients(*batches: list[int]) -> list[np.ndarray]:
        learner = new_learner(base, lora_dropout=0.2)
        for rows in batches:
            result = learner.logprobs([PROMPTS[i] for i in rows], [COMPLETIONS[i] for i in rows], dropout_seed=SEED)
            learner.backward(grad[rows][:, : result.logprobs.shape[1]])
        return learner.gradients

    right = gradients([0, 1, 2, 3])
    for batches in ([[3, 1, 0, 2]], [[2, 3, 0], [1]]):
        for got, expected in zip(gradients(*batches), right, strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("case", "options", "n_prompt", "lengths"),
    [
        ("llama", {"intermediate_size": 4096, "initializer_range": 0.1}, 700, [600]),  # tiles of 512 rows
        ("qwen3_5_text", {}, 150, [130, 1, 70]),  # blocks of 64 tokens
        ("granite4-hybrid", {}, 150, [130, 1, 70]),
        ("granite4-hybrid-groups", {}, 64, [129]),
        ("nemotron_h", {}, 70, [130, 1]),
    ],
)
def test_long_groups_are_cut_without_changing_their_gradient(
    case: str, options: dict[str, Any], n_prompt: int, lengths: list[int]
) -> None:
    model, rng = tiny_model(case, max_position_embeddings=4096, **options), np.random.default_rng(0)
    prompt, *completions = ([int(x) for x in rng.integers(0, 48, n)] for n in (n_prompt, *lengths))
    learner = new_learner(pack_base(open_module(model), weights="float32"), compute="float32")
    grad = rng.normal(size=(len(lengths), max(lengths))).astype(np.float32)
    result = learner.logprobs([prompt] * len(lengths), completions)
    learner.backward(grad)
    model = model.double()
    weights, factors = {}, {}
    for adapter in learner.adapters:
        a, b = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in adapter.parameters)
        weights[f"{adapter.name}.weight"] = model.get_submodule(adapter.name).weight + adapter.scaling * b.T @ a
        factors[adapter.name] = a, b
    for norm in learner.norms:
        [weight] = factors[norm.name] = (torch.tensor(norm.parameters[0], dtype=torch.float64, requires_grad=True),)
        weights[f"{norm.name}.weight"] = weight
    loss = torch.zeros(())
    with own_precision(model):
        for i, completion in enumerate(completions):
            logits = torch.func.functional_call(model, weights, (torch.tensor([prompt + completion]),)).logits[0]
            chosen = logits.log_softmax(-1)[len(prompt) - 1 : -1][range(len(completion)), completion]
            np.testing.assert_allclose(result.logprobs[i, : len(completion)], chosen.detach(), atol=2e-5)
            loss = loss + chosen @ torch.tensor(grad[i, : len(completion)]).double()
        loss.backward()
    right = {name: tuple(x.grad.double().numpy() for x in arrays) for name, arrays in factors.items()}
    assert max(gradient_errors(learner, right)) < (1e-4 if case.startswith("qwen3_5") else 1e-5)


def test_tiled_value_heads_have_the_gradients_of_grouped_ones(tmp_path: Path) -> None:
    model = tiny_model("qwen3_5_text")
    file = open_pretrained(write_gguf(model, tmp_path / "model.gguf"))
    grouped, tiled = (
        new_learner(pack_base(source, weights="float32"), compute="float32") for source in (open_module(model), file)
    )
    assert tiled.base.config.delta_tiled and not grouped.base.config.delta_tiled
    adapters, norms = ({each.name: each for each in found} for found in (grouped.adapters, grouped.norms))
    for adapter in tiled.adapters:
        other = adapters[adapter.name]
        adapter.a[:], adapter.b[:] = adapter.from_module(*other.to_module(other.a, other.b))
    for norm in tiled.norms:
        norm.parameters[0][:] = norms[norm.name].parameters[0]
    tiled.update()
    np.testing.assert_allclose(run(tiled).logprobs, run(grouped).logprobs, atol=1e-5)
    for adapter in tiled.adapters:
        other = adapters[adapter.name]
        pairs = zip(*(each.to_module(each.grad_a, each.grad_b) for each in (adapter, other)), strict=True)
        assert all(relative_error(got, right) < 1e-4 for got, right in pairs)


def test_without_adapters_it_is_the_base() -> None:
    base = pack_base(open_module(tiny_model("llama")), weights="float32")
    learner = new_learner(base)
    result = learner.logprobs(PROMPTS, COMPLETIONS, adapters=False)
    untrained = Learner(base, lora_rank=RANK).logprobs(PROMPTS, COMPLETIONS)  # B is zero
    np.testing.assert_array_equal(result.logprobs, untrained.logprobs)
    assert np.abs(result.logprobs - learner.logprobs(PROMPTS, COMPLETIONS).logprobs).max() > 0.1
    learner.logprobs(PROMPTS, COMPLETIONS, adapters=False)
    assert_raises(WhetTypeError, ("logprobs()",), learner.backward, result.logprobs)


def test_masked_tokens_have_no_gradient() -> None:
    base = pack_base(open_module(tiny_model("llama")), weights="float32")
    mask = [[i % 2 == 0 for i in range(len(row))] for row in COMPLETIONS]
    masked, learner = new_learner(base), new_learner(base)
    result = masked.logprobs(PROMPTS, COMPLETIONS, completion_mask=mask)
    grad, _ = output_gradients()
    masked.backward(grad)
    whole = learner.logprobs(PROMPTS, COMPLETIONS)
    learner.backward(np.where(result.mask, grad, 0))
    np.testing.assert_array_equal(result.logprobs, np.where(result.mask, whole.logprobs, 0))
    for got, right in zip(masked.adapters, learner.adapters, strict=True):
        np.testing.assert_allclose(got.grad_a, right.grad_a, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(got.grad_b, right.grad_b, rtol=1e-4, atol=1e-7)


def test_a_step_is_torchs_adamw() -> None:
    learner = new_learner(pack_base(open_module(tiny_model("llama")), weights="float32"))
    parameters = list(map(torch.tensor, learner.parameters))
    matrices, vectors = ([p for p in parameters if p.ndim == n] for n in (2, 1))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95))
    for _ in range(3):
        run(learner)
        for p, grad in zip(parameters, learner.gradients, strict=True):
            p.grad = torch.tensor(grad)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        got = learner.step(0.01, betas=(0.8, 0.95), weight_decay=0.1, max_grad_norm=0.5)
        assert got == pytest.approx(float(norm), rel=1e-6)
        for p, adapted in zip(parameters, learner.parameters, strict=True):
            np.testing.assert_allclose(adapted, p.numpy(), rtol=1e-5, atol=1e-7)
    assert not any(grad.any() for grad in learner.gradients)


def test_an_engine_samples_with_the_adapters_of_a_learner() -> None:
    learner = new_learner(pack_base(open_module(tiny_model("llama")), weights="float32"), compute="float32")
    prompts, sampling = [[5, 6, 7], [9]], SamplingParams(max_new_tokens=6, seed=1)
    with Engine.from_model(learner) as engine:
        assert engine.base is learner.base
        before = engine.generate(prompts, 2, sampling)
        number = engine.add_adapter(learner)
        for adapter in learner.adapters:
            adapter.b *= -2
        for norm in learner.norms:
            norm.parameters[0][:] *= 1.5
        learner.update()
        assert [[c.token_ids for c in group] for group in engine.generate(prompts, 2, sampling)] == [
            [c.token_ids for c in group] for group in before
        ]
        engine.sync(learner)
        groups = engine.generate(prompts, 2, sampling)
        again = engine.generate(prompts, 2, sampling, adapter=number)
        assert [c.logprobs for group in again for c in group] == [c.logprobs for group in before for c in group]
    completions = [completion for group in groups for completion in group]
    rows = [prompt for prompt in prompts for _ in range(2)], [completion.token_ids for completion in completions]
    found = learner.logprobs(*rows).logprobs
    for row, completion in zip(found, completions, strict=True):
        np.testing.assert_allclose(row[: len(completion.token_ids)], completion.logprobs, atol=1e-5)
    other = Learner(pack_base(open_module(tiny_model("llama")), weights="bf16"), lora_rank=2)
    with Engine.from_base(learner.base) as engine:
        assert_raises(WhetValueError, ("Engine.sync", "base"), engine.sync, other)
    assert_raises(WhetValueError, ("merge_adapters",), Engine.from_model, learner, merge_adapters=True)
    assert_raises(WhetValueError, ("max_position", "7"), Engine.from_model, learner, max_position=7)


def test_it_learns() -> None:
    learner = Learner(pack_base(open_module(tiny_model("qwen2")), weights="q8_0"), lora_rank=8)
    losses = []
    for _ in range(60):
        result = learner.logprobs(PROMPTS, COMPLETIONS)
        n = result.mask.sum()
        losses.append(-float(result.logprobs.sum()) / n)
        learner.backward(np.where(result.mask, -1 / n, 0))
        learner.step(0.03)
    assert losses[0] > 3 and losses[-1] < 0.5


@pytest.mark.parametrize("case", ["llama", "gpt_neox", "gemma3-vision"])
def test_peft_reads_the_saved_folder(case: str, tmp_path: Any) -> None:
    learner = new_learner(pack_base(open_module(tiny_model(case)), weights="float32"), modules_to_save=())
    learner.save_pretrained(tmp_path, "base")
    saved = read_peft(tmp_path)
    assert set(saved) == {adapter.name for adapter in learner.adapters}
    for adapter in learner.adapters:
        a, b, scaling = saved[adapter.name]
        np.testing.assert_array_equal(a, adapter.a)
        np.testing.assert_array_equal(b.T, in_module_order(learner, adapter, adapter.b))
        assert scaling == pytest.approx(adapter.scaling)


def test_peft_folders_have_any_rank(tmp_path: Any) -> None:
    base = pack_base(open_module(tiny_model("llama")), weights="float32")
    Learner(base, lora_rank=16).save_pretrained(tmp_path, "base")
    assert {len(a) for a, _, _ in read_peft(tmp_path).values()} == {16}


def test_wrong_input_is_refused_and_changes_nothing() -> None:
    base = pack_base(open_module(tiny_model("llama")), weights="float32")
    learner = new_learner(base)
    right = run(learner).logprobs
    rows = PROMPTS, COMPLETIONS
    for facts, arguments, settings in (
        (("prompt_ids[0]", "BOS"), ([[]], [[1]]), {}),
        (("row 0", 48, "tokenizer"), ([[1]], [[48]]), {}),
        (("row 0", -1), ([[-1]], [[1]]), {}),
        (("row 0", 66, 64), ([[1] * 60], [[1] * 6]), {}),
        (("prompt_ids", 1, "completion_ids", 0), ([[1]], []), {}),
        (("completion_mask",), rows, {"completion_mask": [[True]] * 4}),
        (("temperature",), rows, {"temperature": 0}),
    ):
        assert_raises(WhetValueError, facts, learner.logprobs, *arguments, **settings)
    assert_raises(WhetTypeError, ("logprobs()",), learner.backward, np.zeros(SHAPE))
    learner.logprobs(*rows)
    assert_raises(WhetValueError, ("grad", (3,)), learner.backward, np.zeros(3))
    assert_raises(WhetValueError, ("grad", "NaN"), learner.backward, np.full(SHAPE, np.nan))
    assert_raises(WhetValueError, ("weights", "q8_0"), Learner, base, weights="q8_0")
    assert_raises(WhetValueError, ("lm_head", "torch"), Learner, base, lora_layers=["lm_head"])
    assert_raises(WhetValueError, ("modules_to_save", "lm_head", "torch"), Learner, base, modules_to_save=["lm_head"])
    assert_raises(WhetValueError, ("modules_to_save", "nrom", "norm"), Learner, base, modules_to_save=["nrom"])
    for dropout in (1.0, -0.1, float("nan"), True):
        assert_raises(WhetValueError, ("lora_dropout", dropout, "[0, 1)"), Learner, base, lora_dropout=dropout)
    assert_raises(WhetValueError, ("dropout_seed is 3", "lora_dropout is 0"), learner.logprobs, *rows, dropout_seed=3)
    dropping = Learner(base, lora_dropout=0.1)
    assert_raises(WhetValueError, ("dropout_seed is 3", "adapters is False"), dropping.logprobs, *rows, dropout_seed=3,
                  adapters=False)  # fmt: skip
    assert_raises(WhetValueError, ("lora_rank", 64, 32), Learner, base, lora_rank=64)
    assert_raises(WhetValueError, ("compute", "int8"), Learner, base, compute="int8")
    learner.zero_grad()
    learner.adapters[0].grad_a[:] = np.inf
    before = learner.adapters[0].a.copy()
    assert_raises(WhetValueError, ("NaN or infinity", "zero_grad"), learner.step)
    np.testing.assert_array_equal(learner.adapters[0].a, before)
    learner.zero_grad()
    np.testing.assert_array_equal(run(learner).logprobs, right)


def test_norms_are_saved_as_peft_saves_them(tmp_path: Any) -> None:
    peft = pytest.importorskip("peft")
    base = pack_base(open_module(tiny_model("gemma2")), weights="float32")
    for settings in ({}, {"modules_to_save": ["model.norm"], "lora_dropout": 0.25}):
        learner = new_learner(base, compute="float32", **settings)
        learner.save_pretrained(tmp_path, "base")
        again = Learner(base, adapter=tmp_path, compute="float32")
        assert again.lora_dropout == learner.lora_dropout
        for got, saved in zip(again.parameters, learner.parameters, strict=True):
            np.testing.assert_array_equal(got, saved)
        [[logprob]] = learner.logprobs([[5, 6, 7]], [[4]]).logprobs
        model = peft.PeftModel.from_pretrained(tiny_model("gemma2"), tmp_path).eval()
        found = [model(torch.tensor([[5, 6, 7, 4]])).logits[0, 2].log_softmax(-1)[4].item()]
        with Engine.from_base(base) as engine:
            for adapter in (learner, tmp_path):
                number = engine.add_adapter(adapter)
                found += list(engine.logprobs([[5, 6, 7, 4]], start=3, adapter=number)[0])
            [[unchanged]] = engine.logprobs([[5, 6, 7, 4]], start=3)
            mixed = engine.logprobs([[5, 6, 7, 4]] * 3, start=3, adapter=[number, None, number])
            assert [row[0] for row in mixed] == [found[-1], unchanged, found[-1]]
        np.testing.assert_allclose(found, logprob, atol=1e-5)
        assert abs(unchanged - logprob) > 0.01
