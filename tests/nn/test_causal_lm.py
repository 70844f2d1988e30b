"""completion_logprobs against values by hand, a float64 definition row by row, and autograd."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import peft
import pytest
import torch
from tests.raising import assert_raises
from tests.tiny import tiny_llama
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from whet.config.kept_tokens import KeptTokens
from whet.errors import WhetTypeError, WhetValueError
from whet.nn import torch_logprobs
from whet.nn.accelerate import accelerate
from whet.nn.causal_lm import completion_logprobs
from whet.nn.modules import inner_module

PROMPTS = [[1, 5, 9], [2], [3, 4, 5, 6, 7, 8]]
COMPLETIONS = [[10, 11], [12, 13, 14, 15], []]


class Bigram(nn.Module):
    """Model with logits[t] = table[input_ids[t]], whose log-probs are known by hand."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table[input_ids]


def thirds() -> Bigram:
    """Return a model in which 0, 1, 2 follow token 0 with 1/8, 2/8, 5/8, and token 2 with 3/8, 1/8, 4/8."""
    return Bigram(torch.tensor([[1.0, 2, 5], [1, 1, 2], [3, 1, 4]]).log())


def small_llama(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return tiny_llama(vocab_size=32, initializer_range=0.3, **options).eval()


def by_definition(model: nn.Module, prompt: list[int], completion: list[int], t: float) -> torch.Tensor:
    """Return float64 log-probs (len(completion), V): one row, no padding, logits of every position."""
    output = model(torch.tensor([prompt + completion]))
    logits = getattr(output, "logits", output)[0].double() / t
    return logits.log_softmax(-1)[len(prompt) - 1 :][: len(completion)]


def entropy_of(*p: float) -> float:
    return -sum(q * math.log(q) for q in p)


def test_values_by_hand() -> None:
    out = completion_logprobs(thirds(), [[1, 0], [2]], [[2, 1], [0]], return_entropy=True)
    expected = [[math.log(5 / 8), math.log(1 / 8)], [math.log(3 / 8), 0.0]]
    torch.testing.assert_close(out.logprobs, torch.tensor(expected))
    assert out.mask.dtype == torch.bool and out.mask.tolist() == [[True, True], [True, False]]
    h0, h2 = entropy_of(1 / 8, 2 / 8, 5 / 8), entropy_of(3 / 8, 1 / 8, 4 / 8)
    torch.testing.assert_close(out.entropy, torch.tensor([[h0, h2], [h2, 0.0]]))
    assert out.entropy is not None and not out.entropy.requires_grad


def test_temperature_by_hand() -> None:
    # T = 1/2 squares the weights: 1, 4, 25.
    out = completion_logprobs(thirds(), [[0]], [[2]], temperature=0.5)
    assert out.logprobs.item() == pytest.approx(math.log(25 / 30))
    assert out.entropy is None


def test_candidates_by_hand() -> None:
    out = completion_logprobs(thirds(), [[0]], [[2, 1]], candidates=[[[0, 1], [2, 2]]])
    expected = [[[math.log(1 / 8), math.log(2 / 8)], [math.log(4 / 8)] * 2]]
    torch.testing.assert_close(out.logprobs, torch.tensor(expected))


@pytest.mark.parametrize("compute", ["torch", "kernels", "kernels, frozen head"])
def test_candidates_entropies_and_gradients_equal_the_definition(compute: str) -> None:
    """Also a token that occurs twice among the candidates, and not the completion's own."""
    model = small_llama().to(torch.float64 if compute == "torch" else torch.float32)
    model.lm_head.weight.requires_grad_("frozen" not in compute)
    candidates = [[[3, 3, 30], [0, 31, 7]], [[t, t + 1, 30] for t in range(4)], np.empty((0, 3), int)]
    mask = [[True, True], [True, False, True, True], []]
    rows = {"candidates": candidates, "completion_mask": mask, "temperature": 0.7, "return_entropy": True}
    factors = torch.randn(2, 3, 4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    parameters = [p for p in model.parameters() if p.requires_grad]
    with nullcontext() if compute == "torch" else accelerate(model, "float32"):
        out = completion_logprobs(model, PROMPTS, COMPLETIONS, **rows, differentiable_entropy=True)
        assert out.entropy is not None
        total = (factors[0] * out.logprobs).sum() + (factors[1, ..., 0] * out.entropy).sum()
        found = torch.autograd.grad(total, parameters)
    exact, total = model.double(), torch.zeros((), dtype=torch.float64)
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        log_p = by_definition(exact, prompt, completion, 0.7)
        for t in (t for t in range(len(completion)) if mask[i][t]):
            chosen = log_p[t][torch.as_tensor(candidates[i][t])]
            torch.testing.assert_close(out.logprobs[i, t].double(), chosen, atol=2e-6, rtol=0)
            total = total + (factors[0, i, t] * chosen).sum() - factors[1, i, t, 0] * (log_p[t].exp() * log_p[t]).sum()
    assert not out.logprobs[2].any() and not out.logprobs[1, 1].any()
    expected = torch.autograd.grad(total, [p for p in exact.parameters() if p.requires_grad])
    tolerance = {"rtol": 1e-9, "atol": 1e-12} if compute == "torch" else {"rtol": 1e-4, "atol": 2e-5}
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, **tolerance)


def test_wrong_candidates_are_rejected() -> None:
    arguments = thirds(), [[0]], [[2, 1]]
    for candidates, facts in (
        ([[[0]]], ["candidates", "(1, 1)", "[2]"]),
        ([[[0], [3]]], ["candidates[0]", "0 to 2"]),
        ([[[0.0], [1.0]]], ["candidates[0]", "token ids"]),
    ):
        assert_raises(WhetValueError, facts, completion_logprobs, *arguments, candidates=candidates)
    options = {"candidates": [[[0], [1]]], "return_mean": True}
    assert_raises(WhetValueError, ["candidates", "return_mean"], completion_logprobs, *arguments, **options)


@pytest.mark.parametrize("accelerated", [False, True])
def test_completion_mask_excludes_tokens(accelerated: bool) -> None:
    model = small_llama()
    mask = [[False, True], [True, False, False, True], []]
    with accelerate(model, "float32") if accelerated else nullcontext():
        every = completion_logprobs(model, PROMPTS, COMPLETIONS, return_entropy=True)
        some = completion_logprobs(model, PROMPTS, COMPLETIONS, completion_mask=mask, return_entropy=True)
        gradient = torch.autograd.grad(some.logprobs.sum(), model.lm_head.weight)[0]
        expected = torch.autograd.grad((every.logprobs * some.mask).sum(), model.lm_head.weight)[0]
    assert some.mask.tolist() == [[False, True, False, False], [True, False, False, True], [False] * 4]
    assert every.entropy is not None and some.entropy is not None
    assert torch.equal(some.logprobs, every.logprobs * some.mask)
    assert torch.equal(some.entropy, every.entropy * some.mask)
    torch.testing.assert_close(gradient, expected)


def test_a_mask_of_other_lengths_is_rejected() -> None:
    facts = "completion_mask", [2, 4], "completion_ids", [2, 4, 0]
    mask = [[True, True], [True] * 4]
    assert_raises(WhetValueError, facts, completion_logprobs, thirds(), PROMPTS, COMPLETIONS, completion_mask=mask)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_definition_row_by_row(temperature: float, dtype: torch.dtype) -> None:
    model = small_llama().to(dtype)
    out = completion_logprobs(model, PROMPTS, COMPLETIONS, temperature=temperature, return_entropy=True)
    assert out.logprobs.dtype == dtype and out.entropy is not None
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        logp = by_definition(model, prompt, completion, temperature)
        n = len(completion)
        assert out.mask[i].tolist() == [True] * n + [False] * (4 - n)
        chosen = logp.gather(-1, torch.tensor(completion, dtype=torch.int64)[:, None])[:, 0]
        torch.testing.assert_close(out.logprobs[i, :n].double(), chosen, atol=tolerance, rtol=0)
        entropy = -(logp.exp() * logp).sum(-1)
        torch.testing.assert_close(out.entropy[i, :n].double(), entropy, atol=tolerance * 10, rtol=0)
        assert not out.logprobs[i, n:].any() and not out.entropy[i, n:].any()


@pytest.mark.parametrize("kept", [False, True])
def test_gradients_of_log_probs_and_entropy_equal_the_definition(kept: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    model, temperature = Bigram(torch.randn(32, 32, generator=generator, dtype=torch.float64)), 0.7
    sets = [KeptTokens.from_ids([[0, 1, token] for token in completion], 32) for completion in COMPLETIONS]
    options: dict[str, Any] = {"kept_tokens": sets} if kept else {}
    wanted: dict[str, Any] = {"return_entropy": True, "differentiable_entropy": True, "temperature": temperature}
    out = completion_logprobs(model, PROMPTS, COMPLETIONS, **wanted, **options)
    assert out.entropy is not None
    factors = torch.randn(2, *out.logprobs.shape, generator=generator, dtype=torch.float64)
    parameters = list(model.parameters())
    found = torch.autograd.grad((factors * torch.stack([out.logprobs, out.entropy])).sum(), parameters)
    total = torch.zeros((), dtype=torch.float64)
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        for t, token in enumerate(completion):
            z = model(torch.tensor([prompt + completion[:t]]))[0, -1] / temperature
            log_p = (z[sorted({0, 1, token})] if kept else z).log_softmax(-1)
            chosen = sorted({0, 1, token}).index(token) if kept else token
            total = total + factors[0, i, t] * log_p[chosen] - factors[1, i, t] * (log_p.exp() * log_p).sum()
    for a, b in zip(found, torch.autograd.grad(total, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-13)
    detached = completion_logprobs(model, PROMPTS, COMPLETIONS, return_entropy=True)
    assert detached.entropy is not None and not detached.entropy.requires_grad


def test_a_row_does_not_depend_on_other_rows_or_padding() -> None:
    model = small_llama()
    together = completion_logprobs(model, PROMPTS, COMPLETIONS)
    for i in range(2):
        single = completion_logprobs(model, PROMPTS[i : i + 1], COMPLETIONS[i : i + 1])
        torch.testing.assert_close(together.logprobs[i, : len(COMPLETIONS[i])], single.logprobs[0], atol=1e-6, rtol=0)


def test_gradient_equals_autograd_of_the_definition() -> None:
    model = small_llama().double()
    weights = torch.tensor([[0.3, -1.2, 0.0, 0.0], [2.0, 0.5, -0.1, 1.0], [0.0] * 4], dtype=torch.float64)
    (completion_logprobs(model, PROMPTS, COMPLETIONS, temperature=0.7).logprobs * weights).sum().backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    for i in range(2):
        logp = by_definition(model, PROMPTS[i], COMPLETIONS[i], 0.7)
        for t, token in enumerate(COMPLETIONS[i]):
            loss = loss + weights[i, t] * logp[t, token]
    loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(ours[name], p.grad, atol=1e-12, rtol=1e-9)


def test_results_do_not_depend_on_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        model = thirds()
        out = completion_logprobs(model, [[0], [1]], [[2, 1, 0], [1, 2]], return_entropy=True)
        (out.logprobs * torch.tensor([[1.0, 2, 3], [4, 5, 6]])).sum().backward()
        assert model.table.grad is not None and out.entropy is not None
        return out.logprobs.detach(), out.entropy, model.table.grad

    whole = run()
    monkeypatch.setattr(torch_logprobs, "_CHUNK_ELEMENTS", 7)  # two tokens of three logits at a time
    for one_chunk, many_chunks in zip(whole, run(), strict=True):
        assert torch.equal(one_chunk, many_chunks)


def test_bf16_logits_are_reduced_in_float32() -> None:
    torch.manual_seed(0)
    table = torch.randn(4, 1000).to(torch.bfloat16)
    model = Bigram(table)
    out = completion_logprobs(model, [[0], [3]], [[1, 2], [2, 1]], return_entropy=True)
    wide = completion_logprobs(Bigram(table.double()), [[0], [3]], [[1, 2], [2, 1]], return_entropy=True)
    assert out.logprobs.dtype == torch.float32 and out.entropy is not None and wide.entropy is not None
    torch.testing.assert_close(out.logprobs.double(), wide.logprobs, atol=2e-6, rtol=0)
    torch.testing.assert_close(out.entropy.double(), wide.entropy, atol=2e-5, rtol=0)
    out.logprobs.sum().backward()
    assert model.table.grad is not None and model.table.grad.dtype == torch.bfloat16


def test_impossible_tokens_leave_entropy_and_gradient_finite() -> None:
    model = Bigram(torch.tensor([[0.0, 0.0, -math.inf]]).repeat(3, 1))
    out = completion_logprobs(model, [[0]], [[1, 2]], return_entropy=True)
    assert out.logprobs.tolist() == [[pytest.approx(-math.log(2)), -math.inf]]
    torch.testing.assert_close(out.entropy, torch.full((1, 2), math.log(2)))
    out.logprobs[0, 0].backward()
    assert model.table.grad is not None
    torch.testing.assert_close(model.table.grad[0], torch.tensor([-0.5, 0.5, 0.0]))


def test_nan_logits_give_nan_in_their_own_row_only() -> None:
    model = thirds()
    with torch.no_grad():
        model.table[1] = math.nan
    out = completion_logprobs(model, [[1], [0]], [[0], [0]], return_entropy=True)
    assert out.logprobs.isnan().tolist() == [[True], [False]]
    assert out.entropy is not None and out.entropy.isnan().tolist() == [[True], [False]]


def test_only_empty_completions_still_differentiate() -> None:
    model = small_llama()
    out = completion_logprobs(model, [[1, 2], [3]], [[], []], return_entropy=True)
    assert out.logprobs.shape == out.mask.shape == (2, 0)
    out.logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_logits_to_keep_excludes_prompt_positions() -> None:
    model = small_llama()
    positions = []
    model.lm_head.register_forward_hook(lambda module, args, output: positions.append(output.shape[1]))
    completion_logprobs(model, [[1] * 20, [2] * 18], [[3, 4, 5], [6, 7]])
    assert positions == [5]  # of 22 inputs; token 18 of the shorter prompt is the first that predicts a completion


def test_forward_gets_only_the_options_in_its_signature() -> None:
    class Named(Bigram):
        def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, use_cache: Any = None) -> torch.Tensor:
            self.got = (input_ids, attention_mask, use_cache)
            return super().forward(input_ids)

    model = Named(torch.zeros(3, 3))
    completion_logprobs(model, [[1, 2], [2]], [[0], [1, 1, 0]])
    input_ids, attention_mask, use_cache = model.got
    assert input_ids.tolist() == [[1, 2, 0], [2, 1, 1]] and use_cache is False
    assert attention_mask.tolist() == [[1, 1, 0], [1, 1, 1]]


def test_the_models_mode_is_used_and_unchanged() -> None:
    model = small_llama(attention_dropout=0.5)
    steady = completion_logprobs(model, PROMPTS, COMPLETIONS).logprobs
    assert not model.training
    model.train()
    noisy = completion_logprobs(model, PROMPTS, COMPLETIONS).logprobs
    assert model.training and not torch.equal(steady, noisy)


def test_peft_and_compiled_wrappers_expose_the_inner_model() -> None:
    model = small_llama()
    plain = completion_logprobs(model, PROMPTS, COMPLETIONS).logprobs
    positions = []
    model.lm_head.register_forward_hook(lambda module, args, output: positions.append(output.shape[1]))
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    out = completion_logprobs(adapted, [[1] * 20], [[3, 4]])
    assert positions == [2]
    out.logprobs.sum().backward()
    trained = [name for name, p in adapted.named_parameters() if p.grad is not None]
    assert trained and all("lora_" in name for name in trained)
    torch.testing.assert_close(completion_logprobs(adapted, PROMPTS, COMPLETIONS).logprobs, plain)
    compiled = torch.compile(model, backend="eager")
    assert inner_module(compiled) is model  # pyright: ignore[reportArgumentType]


def test_tensors_are_accepted_as_rows() -> None:
    model = thirds()
    lists = completion_logprobs(model, [[1, 0]], [[2, 1]]).logprobs
    tensors = completion_logprobs(model, torch.tensor([[1, 0]]), torch.tensor([[2, 1]])).logprobs  # pyright: ignore
    assert torch.equal(lists, tensors)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_bad_temperature(temperature: float) -> None:
    facts = f"temperature is {temperature}", "> 0"
    assert_raises(WhetValueError, facts, completion_logprobs, thirds(), [[0]], [[1]], temperature=temperature)


@pytest.mark.parametrize(
    ("prompts", "completions", "error", "facts"),
    [
        ([[0]], [[1], [2]], WhetValueError, ("prompt_ids has 1 rows", "completion_ids has 2")),
        ([], [], WhetValueError, ("prompt_ids has 0 rows", "at least one")),
        ([[0], []], [[1], [2]], WhetValueError, ("prompt_ids[1]", "empty", "BOS")),
        ([[0]], [[1, -100]], WhetValueError, ("completion_ids[0]", -100)),
        ([[0]], [[1, 1.5]], WhetTypeError, ("completion_ids[0]", [1, 1.5])),
        ([[[0]]], [[1]], WhetTypeError, ("prompt_ids[0]", [[0]])),
        ([0], [1], WhetTypeError, ("prompt_ids[0] is 0", "flat sequence")),
        ([[0]], [[1, 3]], WhetValueError, ("completion_ids", "token 3", "3 tokens")),
        ([[7]], [[1]], WhetValueError, ("embedding", "token id 7")),
    ],
)
def test_bad_rows(prompts: Any, completions: Any, error: type[Exception], facts: tuple[object, ...]) -> None:
    assert_raises(error, facts, completion_logprobs, thirds(), prompts, completions)


def test_a_row_beyond_the_position_limit_is_rejected() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    assert completion_logprobs(model, [[1] * 5], [[2] * 4]).mask.all()  # the last token is not an input
    facts = "row 0 has 10 tokens", "last position is 8"
    assert_raises(WhetValueError, facts, completion_logprobs, model, [[1] * 5], [[2] * 5])


class Returns(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.output


@pytest.mark.parametrize(
    ("output", "error", "facts"),
    [
        ((torch.zeros(1, 1, 3),), WhetTypeError, ("Returns", "tuple")),
        (torch.zeros(1, 1, 3, dtype=torch.int64), WhetTypeError, ("Returns", "torch.int64")),
        (torch.zeros(1, 3), WhetValueError, ("Returns", (1, 3), "(B, T, V) = (1, 1, V)")),
        (torch.zeros(1, 4, 3), WhetValueError, ("Returns", (1, 4, 3))),
        (torch.zeros(2, 1, 3), WhetValueError, ("Returns", (2, 1, 3))),
    ],
)
def test_outputs_that_are_not_logits(output: Any, error: type[Exception], facts: tuple[object, ...]) -> None:
    assert_raises(error, facts, completion_logprobs, Returns(output), [[0]], [[1]])
