"""The learner's mixtures of experts against autograd in float64 over transformers' models, and replayed choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.tiny_models import MIXTURES, tiny_model
from tests.isas import assert_isas_agree
from tests.learner.test_learner import (
    COMPLETIONS,
    PROMPTS,
    TEMPERATURE,
    by_autograd,
    check_against_bfloat16,
    gradient_errors,
    new_learner,
    output_gradients,
    run,
)
from tests.raising import assert_raises
from tests.threads import same_on_any_threads

from whet import WhetValueError
from whet.learner.learner import Learner
from whet.models.packed_base import pack_base
from whet.models.sources.live import open_module

EXPERTS = ["all-linear", "experts"]


def learner_of(case: str, weights: str = "float32", **settings: Any) -> Learner:
    return new_learner(pack_base(open_module(tiny_model(case)), weights=weights), **settings)


def check(learner: Learner, model: Any, **options: Any) -> Any:
    """Check log-probs and gradients against autograd in float64."""
    result = run(learner, **options)
    logprobs, entropies, grads = by_autograd(learner, model.double())
    assert result.entropy is not None
    np.testing.assert_allclose(result.logprobs, logprobs, atol=1.5e-5)
    np.testing.assert_allclose(result.entropy, entropies, atol=1.5e-5)
    assert max(gradient_errors(learner, grads)) < 1e-4
    return result


@pytest.mark.parametrize("case", MIXTURES)
def test_every_mixture_matches_autograd(case: str) -> None:
    """Batches of few tokens: some experts have no rows."""
    check(learner_of(case, compute="float32"), tiny_model(case))


@pytest.mark.parametrize("case", MIXTURES)
def test_adapters_of_experts_match_autograd(case: str) -> None:
    learner = learner_of(case, compute="float32", lora_layers=EXPERTS)
    of_experts = [adapter for adapter in learner.adapters if adapter.n_experts > 1]
    assert len(of_experts) == 2 * learner.base.config.n_moe_layers
    check(learner, tiny_model(case))


@pytest.mark.parametrize("case", ["qwen3_moe", "qwen3_5_moe_text"])
def test_dropout_matches_autograd_with_the_same_masks(case: str) -> None:
    check(learner_of(case, compute="float32", lora_dropout=0.3), tiny_model(case))


def test_bfloat16_products_are_as_close_to_float64_as_torchs() -> None:
    check_against_bfloat16(learner_of("qwen3_moe", "bf16", compute="bfloat16"), "qwen3_moe", {}, ratio=1.2)


def test_bfloat16_adapters_of_experts_are_near_float64() -> None:
    learner = learner_of("qwen3_moe", "float32", compute="bfloat16", lora_layers=EXPERTS)
    result = run(learner)
    logprobs, _, grads = by_autograd(learner, tiny_model("qwen3_moe").double())
    np.testing.assert_allclose(result.logprobs, logprobs, atol=0.2)
    assert np.median(gradient_errors(learner, grads)) < 0.03


def test_experts_without_rows_are_not_updated() -> None:
    """Neither moments nor weight decay change them, like parameters of torch without a gradient."""
    learner = learner_of("qwen3_moe", compute="float32", lora_layers=["experts"], modules_to_save=[])
    config = learner.base.config
    ids = np.arange(config.n_used_experts, dtype=np.uint16)
    for used in (ids + 2, ids):  # the moments of the first experts are not zero in the second step
        before = [array.copy() for array in learner.parameters]
        n_inputs = [len(prompt) + len(completion) - 1 for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)]
        experts = [np.tile(used, (n, config.n_moe_layers, 1)) for n in n_inputs]
        run(learner, experts=experts)
        learner.step(0.1, weight_decay=0.5)
        for adapter, a, b in zip(learner.adapters, before[::2], before[1::2], strict=True):
            pairs = zip(adapter.parts(adapter.a, adapter.b), adapter.parts(a, b), strict=True)
            changed = [e for e, (new, old) in enumerate(pairs) if not np.array_equal(new[0], old[0])]
            assert changed == used.tolist(), adapter.name


def test_adapters_of_experts_have_no_dropout() -> None:
    message = ("lora_dropout is 0.1", "as in PEFT", "remove experts from lora_layers")
    assert_raises(WhetValueError, message, learner_of, "qwen3_moe", lora_layers=["experts"], lora_dropout=0.1)


def routers(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def own_experts(model: Any, prompts: Sequence[list[int]], completions: Sequence[list[int]]) -> list[np.ndarray]:
    """Return the choice of a model for the inputs of each row, (T, mixtures, k)."""
    chosen: list[Any] = []
    hooks = [each.register_forward_hook(lambda module, x, out: chosen.append(out[2])) for each in routers(model)]
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        chosen.clear()
        model(torch.tensor([prompt + completion[:-1]]))
        found.append(torch.stack(chosen, 1).numpy().astype(np.uint16))
    for hook in hooks:
        hook.remove()
    return found


@contextmanager
def replay(model: Any, experts: Sequence[np.ndarray]) -> Iterator[None]:
    """Make transformers' routers return these experts, row by row, with weights from their logits."""
    calls = [0] * len(routers(model))

    def hook(layer: int, module: Any, inputs: Any, out: Any) -> Any:
        ids = torch.from_numpy(experts[calls[layer]][:, layer].astype(np.int64))
        ids = torch.cat((ids, ids[-1:]))  # the last token is not an input of the learner
        calls[layer] += 1
        p = out[0].softmax(-1).gather(-1, ids)
        return out[0], p / p.sum(-1, keepdim=True) if module.norm_topk_prob else p, ids

    hooks = [each.register_forward_hook(lambda *args, i=i: hook(i, *args)) for i, each in enumerate(routers(model))]
    yield
    for each in hooks:
        each.remove()


def random_experts(config: Any, seed: int = 4) -> list[np.ndarray]:
    """Return experts of all inputs; rows with one prompt have the same for its tokens."""
    rng, prompts = np.random.default_rng(seed), {}
    found = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        shape = len(prompt) + len(completion) - 1, config.n_moe_layers, config.n_experts
        ids = rng.random(shape).argsort(-1)[..., : config.n_used_experts].astype(np.uint16)
        first = prompts.setdefault(tuple(prompt), ids)
        ids[: len(prompt)] = first[: len(prompt)]
        found.append(ids)
    return found


@pytest.mark.parametrize("case", ["qwen3_moe", "olmoe"])
def test_given_experts_match_autograd_of_the_same_choice(case: str) -> None:
    learner, model = learner_of(case, compute="float32"), tiny_model(case)
    experts = random_experts(learner.base.config)
    with replay(model, experts):
        result = check(learner, model, experts=experts)
    assert result.replaced_experts is not None and 0.3 < result.replaced_experts <= 1


def test_the_own_choice_replayed_gives_the_same_bits() -> None:
    learner, model = learner_of("olmoe", compute="float32"), tiny_model("olmoe")
    for adapter in learner.adapters:
        adapter.b[:] = 0
    for norm in learner.norms:
        norm.parameters = norm._read_base()
    learner.update()
    free = run(learner)
    gradients = [grad.copy() for grad in learner.gradients]
    learner.zero_grad()
    experts = own_experts(model, PROMPTS, COMPLETIONS)
    given = run(learner, experts=experts)
    np.testing.assert_array_equal(given.logprobs, free.logprobs)
    for got, expected in zip(learner.gradients, gradients, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert free.replaced_experts is None and given.replaced_experts == 0


def test_the_share_of_replaced_choices() -> None:
    """One of the mixtures of one given token has another expert; tokens without experts do not count."""
    learner, model = learner_of("olmoe", compute="float32"), tiny_model("olmoe")
    config = learner.base.config
    base = Learner(learner.base, compute="float32")
    experts: list[Any] = own_experts(model, PROMPTS, COMPLETIONS)
    experts = [experts[0][-3:], None, None, None]
    ids = experts[0][1, 0]
    ids[:] = ids[::-1]  # the order does not matter
    assert base.logprobs(PROMPTS, COMPLETIONS, experts=experts).replaced_experts == 0
    ids[0] = next(e for e in range(config.n_experts) if e not in ids)
    share = base.logprobs(PROMPTS, COMPLETIONS, experts=experts).replaced_experts
    assert share is not None and 1 <= round(share * 3 * config.n_moe_layers) <= 1 + 2 * (config.n_moe_layers - 1) + 2


def test_experts_that_do_not_fit_are_refused() -> None:
    learner = learner_of("olmoe", compute="float32")
    config = learner.base.config
    good = random_experts(config)
    assert_raises(WhetValueError, ("experts", "4 rows"), run, learner, experts=good[:3])
    for change, words in (
        (lambda ids: np.concatenate((ids, ids)), "at most its"),
        (lambda ids: ids[:, :1], "expected integers (T"),
        (lambda ids: ids.astype(np.float32), "float32"),
        (lambda ids: ids + config.n_experts, "different ids from 0 to"),
        (lambda ids: np.zeros_like(ids), "different ids"),
    ):
        assert_raises(WhetValueError, ("experts", words), run, learner, experts=[change(good[0]), *good[1:]])
    dense = learner_of("llama", compute="float32")
    assert_raises(WhetValueError, ("not a mixture",), run, dense, experts=good)


DIGEST = """
h = hashlib.sha256()
formats = {"qwen3_moe": "bf16", "lfm2_moe": "q8_0", "qwen3_5_moe_text": "float32", "gpt_oss": "mxfp4"}
for case, weights in formats.items():
    for compute in ("float32", "bfloat16"):
        settings = {"lora_layers": EXPERTS} if case == "qwen3_moe" else {"lora_dropout": 0.2}
        learner = learner_of(case, weights, compute=compute, **settings)
        result = run(learner)
        for x in (result.logprobs, result.entropy, *learner.gradients):
            h.update(x.tobytes())
print(h.hexdigest())
"""


def test_every_instruction_set_gives_the_same_bits() -> None:
    assert_isas_agree("import hashlib, whet\nfrom tests.learner.test_mixtures import *", DIGEST)


def test_bits_do_not_depend_on_threads() -> None:
    def work() -> list[np.ndarray]:
        learner = learner_of("qwen3_5_moe_text", "bf16", compute="bfloat16", lora_layers=EXPERTS)
        result = run(learner)
        return [result.logprobs, *learner.gradients]

    same_on_any_threads(work)


@pytest.mark.parametrize("case", ["lfm2_moe", "qwen3_moe", "gpt_oss"])
def test_results_do_not_depend_on_the_other_rows(case: str) -> None:
    learner = learner_of(case, "bf16", lora_layers=EXPERTS)
    experts = random_experts(learner.base.config)
    whole = learner.logprobs(PROMPTS, COMPLETIONS, temperature=TEMPERATURE, experts=experts, keep=False).logprobs
    for i in range(len(PROMPTS)):
        single = learner.logprobs(
            [PROMPTS[i]], [COMPLETIONS[i]], temperature=TEMPERATURE, experts=[experts[i]], keep=False
        ).logprobs
        np.testing.assert_array_equal(whole[i, : single.shape[1]], single[0])


def test_gradients_do_not_depend_on_the_batches() -> None:
    base = pack_base(open_module(tiny_model("qwen3_moe")), weights="bf16")
    grad, _ = output_gradients()

    def gradients(*batches: list[int]) -> list[np.ndarray]:
        learner = new_learner(base, lora_layers=EXPERTS)
        for rows in batches:
            result = learner.logprobs([PROMPTS[i] for i in rows], [COMPLETIONS[i] for i in rows])
            learner.backward(grad[rows][:, : result.logprobs.shape[1]])
        return learner.gradients

    for got, expected in zip(gradients([1], [0, 2, 3]), gradients([3, 1, 0, 2]), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
