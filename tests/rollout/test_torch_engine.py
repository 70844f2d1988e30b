"""TorchEngine: exact distributions, log-probs, batch invariance, stopping, limits and invalid input."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import peft
import pytest
import torch
from tests.raising import assert_raises, mentions
from tests.tiny import tiny_llama
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from whet.config.sampling import Completion, SamplingParams
from whet.errors import WhetTypeError, WhetValueError
from whet.nn.causal_lm import completion_logprobs
from whet.rollout import RolloutEngine
from whet.rollout.torch_engine import Sampler, TorchEngine, token_uniforms

PROBS = [0.30, 0.05, 0.20, 0.25, 0.12, 0.08]


def small_llama(seed: int = 0, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return tiny_llama(seed, vocab_size=16, max_position_embeddings=32, initializer_range=0.3, **options)


class Wrapped(nn.Module):
    """Bare module with the same logits: forward(input_ids) -> logits, no mask, no cache, no generate."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids).logits


class Constant(nn.Module):
    """Module with equal logits at every position."""

    def __init__(self, probs: list[float]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(probs).log())

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(*input_ids.shape, -1)


class Counter(nn.Module):
    """Module that counts: token t is followed by t + 1 (mod V)."""

    def __init__(self, vocab_size: int = 8) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return 50.0 * nn.functional.one_hot((input_ids + 1) % self.vocab_size, self.vocab_size).float()


class OwnGenerate(Counter):
    """Module with its own generate, as in the guide."""

    def __init__(self, **kept: Any) -> None:
        super().__init__()
        self.calls: list[tuple[int, ...]] = []

    def generate(self, input_ids: torch.Tensor, max_new_tokens: int = 4) -> torch.Tensor:
        self.calls.append(tuple(input_ids.shape))
        for _ in range(max_new_tokens):
            following = (input_ids[:, -1:] + 1 + torch.randint(0, 3, (len(input_ids), 1))) % 8
            input_ids = torch.cat([input_ids, following], dim=1)
        return input_ids


def every(groups: list[list[Completion]]) -> list[Completion]:
    return list(itertools.chain(*groups))


def flat(groups: list[list[Completion]]) -> list[list[int]]:
    return [completion.token_ids for completion in every(groups)]


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """Return Pearson's statistic over tokens of nonzero probability; infinite if another token occurred."""
    possible = probs > 0
    if counts[~possible].any():
        return math.inf
    expected = counts.sum() * probs[possible]
    return float(((counts[possible] - expected) ** 2 / expected).sum())


# Computed by hand from PROBS; the 0.999 quantile of chi-square with 5 degrees of freedom is 20.5.
FILTERS: list[tuple[dict[str, Any], list[float]]] = [
    ({}, PROBS),
    ({"temperature": 0.5}, [p * p for p in PROBS]),
    ({"top_k": 3}, [0.30, 0, 0.20, 0.25, 0, 0]),
    ({"top_k": 50}, PROBS),
    ({"top_p": 0.5}, [0.30, 0, 0, 0.25, 0, 0]),
    ({"top_p": 0.56}, [0.30, 0, 0.20, 0.25, 0, 0]),
    ({"top_p": 0.01}, [1, 0, 0, 0, 0, 0]),
    ({"min_p": 0.5}, [0.30, 0, 0.20, 0.25, 0, 0]),
    # top-k keeps 0.30, 0.25, 0.20 of 0.75; top-p 0.8 of that keeps all three, 0.7 keeps two.
    ({"top_k": 3, "top_p": 0.8}, [0.30, 0, 0.20, 0.25, 0, 0]),
    ({"top_k": 3, "top_p": 0.7}, [0.30, 0, 0, 0.25, 0, 0]),
    ({"top_k": 4, "min_p": 0.7}, [0.30, 0, 0, 0.25, 0, 0]),
    # T = 0.5 squares the odds before min-p, which keeps (0.25/0.3)^2 = 0.69 and not (0.2/0.3)^2.
    ({"temperature": 0.5, "min_p": 0.5}, [0.09, 0, 0, 0.0625, 0, 0]),
]


@pytest.mark.parametrize(("settings", "weights"), FILTERS)
def test_frequencies_and_logprobs_match_every_filter(settings: dict[str, Any], weights: list[float]) -> None:
    probs = np.array(weights) / np.sum(weights)
    engine = TorchEngine(Constant(PROBS))
    [group] = engine.generate([[0]], 40, SamplingParams(max_new_tokens=100, seed=3, **settings))
    tokens = np.array([completion.token_ids for completion in group])
    assert tokens.shape == (40, 100)
    assert chi_square(np.bincount(tokens.ravel(), minlength=6), probs) < 20.5
    # Also per column: a draw shared by a group would show in the first.
    assert np.mean([chi_square(np.bincount(c, minlength=6), probs) for c in tokens.T]) < 8
    logprobs = np.array([completion.logprobs for completion in group])
    np.testing.assert_allclose(logprobs, np.log(probs[tokens]), atol=2e-6)


def test_ties_at_the_threshold_keep_lower_ids() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0]])
    kept = Sampler(SamplingParams(top_k=2)).filtered_logits(logits)
    assert kept.tolist() == [[1.0, 2.0, -math.inf, -math.inf]]
    kept = Sampler(SamplingParams(top_p=0.7)).filtered_logits(torch.zeros(1, 4))
    assert kept.tolist() == [[0.0, 0.0, 0.0, -math.inf]]


def test_repetition_penalty_by_hand() -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=2.0))
    logits = torch.tensor([[4.0, -4.0, 1.0]])
    seen = torch.tensor([[True, True, False]])
    assert sampler.filtered_logits(logits, seen).tolist() == [[2.0, -8.0, 1.0]]


@pytest.mark.parametrize("wrap", [lambda m: m, Wrapped])
def test_repetition_penalty_covers_prompt_and_completion(wrap: Any) -> None:
    model = small_llama().eval()
    sampling = SamplingParams(repetition_penalty=3.0, temperature=0.0, max_new_tokens=6)
    sequence = [3, 9, 0, 1, 2, 7, 8, 5]
    [[completion], _] = TorchEngine(wrap(model)).generate([sequence, [1] * 10], 1, sampling)
    for token in completion.token_ids:
        with torch.no_grad():
            logits = model(torch.tensor([sequence])).logits[0, -1]
        for old in set(sequence):
            logits[old] = logits[old] / 3 if logits[old] > 0 else logits[old] * 3
        assert token == int(logits.argmax())
        sequence.append(token)


def test_draws_are_the_inverse_cdf_of_their_uniform() -> None:
    logits = torch.tensor([[0.25, 0.0, 0.5, 0.25, 0.0]]).log().expand(6, -1)
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, np.nextafter(1, 0)], dtype=torch.float64)
    token_ids, _ = Sampler(SamplingParams()).draw(logits, uniforms)
    assert token_ids.tolist() == [0, 0, 2, 2, 3, 3]


def test_uniforms_depend_only_on_their_key() -> None:
    long = token_uniforms(7, 2, 5, 100)
    assert np.array_equal(token_uniforms(7, 2, 5, 10), long[:10])
    others = [token_uniforms(*key, 100) for key in [(8, 2, 5), (7, 3, 5), (7, 2, 6), (7, 5, 2), (-7, 2, 5)]]
    for a, b in [(a, b) for i, a in enumerate([long, *others]) for b in others[i:]]:
        assert not np.intersect1d(a, b).size


@pytest.mark.parametrize("wrap", [lambda m: m, Wrapped])
def test_logprobs_equal_completion_logprobs_of_the_same_tokens(wrap: Any) -> None:
    model = wrap(small_llama()).eval()
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8]]
    sampling = SamplingParams(temperature=0.7, max_new_tokens=12, seed=1, stop_token_ids=(0, 15))
    groups = TorchEngine(model).generate(prompts, 3, sampling)
    repeated = [prompt for prompt in prompts for _ in range(3)]
    scored = completion_logprobs(model, repeated, flat(groups), temperature=0.7)
    for row, mask, completion in zip(scored.logprobs, scored.mask, every(groups), strict=True):
        torch.testing.assert_close(torch.tensor(completion.logprobs), row[mask].detach(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("wrap", [lambda m: m, Wrapped])
def test_greedy_reports_the_distribution_at_temperature_one(wrap: Any) -> None:
    model = wrap(small_llama()).eval()
    sampling = SamplingParams(temperature=0, top_k=2, top_p=0.3, max_new_tokens=6)
    groups = TorchEngine(model).generate([[1, 2], [3]], 2, sampling)
    assert groups[0][0].token_ids == groups[0][1].token_ids
    scored = completion_logprobs(model, [[1, 2], [3]], [g[0].token_ids for g in groups]).logprobs
    ours = torch.tensor([g[0].logprobs for g in groups])
    torch.testing.assert_close(ours, scored.detach(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("wrap", [lambda m: m, Wrapped])
def test_samples_do_not_depend_on_batch_order_size_or_padding(wrap: Any) -> None:
    model = wrap(small_llama())
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10], [11, 12, 13]]
    sampling = SamplingParams(max_new_tokens=10, seed=5, stop_token_ids=(0,))
    together = TorchEngine(model).generate(prompts, 4, sampling)
    for max_batch in (1, 3):
        assert flat(TorchEngine(model, max_batch=max_batch).generate(prompts, 4, sampling)) == flat(together)
    # The key is the prompt's index: only prompt 0, and two of four samples.
    assert flat(TorchEngine(model).generate(prompts[:1], 4, sampling)) == flat(together[:1])
    assert flat(TorchEngine(model).generate(prompts, 2, sampling)) == flat([g[:2] for g in together])
    # A prompt at two indices, or with another seed, gives different samples.
    twice = TorchEngine(model).generate([[1, 2, 3]] * 2, 4, sampling)
    assert flat(twice[:1]) != flat(twice[1:])
    other = SamplingParams(max_new_tokens=10, seed=6, stop_token_ids=(0,))
    assert flat(TorchEngine(model).generate(prompts, 4, other)) != flat(together)


def test_cached_and_recomputed_decoding_agree() -> None:
    model = small_llama()
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10]]
    sampling = SamplingParams(max_new_tokens=10, seed=5, top_p=0.9, stop_token_ids=(0, 3))
    cached = TorchEngine(model, pad_token_id=15).generate(prompts, 4, sampling)
    recomputed = TorchEngine(Wrapped(model)).generate(prompts, 4, sampling)
    assert flat(cached) == flat(recomputed)
    assert any(c.finish_reason == "stop" and len(c.token_ids) < 10 for c in every(cached))


def test_rows_of_a_group_have_different_first_tokens() -> None:
    # Known bug in other libraries: the first sampled token is broadcast to the whole group.
    [group] = TorchEngine(small_llama()).generate([[1, 2]], 64, SamplingParams(max_new_tokens=1))
    assert len({completion.token_ids[0] for completion in group}) > 4


@pytest.mark.parametrize("model", [Counter(), OwnGenerate()])
def test_ends_at_the_first_stop_token_and_includes_it(model: nn.Module) -> None:
    torch.manual_seed(0)
    sampling = SamplingParams(max_new_tokens=7, stop_token_ids=(4, 5))
    groups = TorchEngine(model).generate([[0], [1, 2], [6]], 3, sampling)
    assert any(completion.finish_reason == "stop" for group in groups for completion in group)
    for completion in every(groups):
        stops = [token in (4, 5) for token in completion.token_ids]
        assert not any(stops[:-1])
        assert completion.finish_reason == ("stop" if stops[-1] else "length")
        assert stops[-1] or len(completion.token_ids) == 7


def test_counting_by_hand_with_ragged_prompts() -> None:
    sampling = SamplingParams(max_new_tokens=5, stop_token_ids=[4])
    groups = TorchEngine(Counter()).generate([[0], [7, 3], [1, 2], [5]], 2, sampling)
    assert flat(groups) == [[1, 2, 3, 4]] * 2 + [[4]] * 2 + [[3, 4]] * 2 + [[6, 7, 0, 1, 2]] * 2
    assert [group[0].finish_reason for group in groups] == ["stop", "stop", "stop", "length"]


@pytest.mark.parametrize("model", [Constant([0.0, 1.0]), small_llama()])
def test_all_rows_stop_at_the_same_step(model: nn.Module) -> None:
    everything = SamplingParams(max_new_tokens=9, stop_token_ids=range(16))
    groups = TorchEngine(model).generate([[1], [0, 1]], 3, everything)
    assert all(len(tokens) == 1 for tokens in flat(groups))
    assert all(completion.finish_reason == "stop" for completion in every(groups))


def test_finished_rows_leave_the_batch() -> None:
    sizes = []
    model = Counter()
    model.register_forward_hook(lambda module, args, output: sizes.append(len(args[0])))
    TorchEngine(model).generate([[3], [2], [0]], 1, SamplingParams(max_new_tokens=9, stop_token_ids=[4]))
    assert sizes == [3, 2, 1, 1]


def test_the_generation_config_is_ignored_and_unchanged() -> None:
    model = small_llama()
    sampling = SamplingParams(max_new_tokens=8, seed=2)
    expected = flat(TorchEngine(model).generate([[1, 2], [3]], 3, sampling))
    config = model.generation_config
    config.update(
        eos_token_id=list(range(16)), do_sample=True, temperature=0.1, top_k=1, repetition_penalty=5.0,
        suppress_tokens=[1, 2, 3], min_new_tokens=3, max_length=4, num_beams=2, num_return_sequences=2,
    )  # fmt: skip
    before = config.to_dict()
    assert flat(TorchEngine(model).generate([[1, 2], [3]], 3, sampling)) == expected
    assert model.generation_config is config and config.to_dict() == before


def test_a_peft_model_samples_from_its_adapters() -> None:
    base = small_llama()
    sampling = SamplingParams(max_new_tokens=8, seed=2)
    plain = flat(TorchEngine(base).generate([[1, 2], [3]], 3, sampling))
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    assert flat(TorchEngine(adapted).generate([[1, 2], [3]], 3, sampling)) == plain
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.normal_()
    changed = TorchEngine(adapted).generate([[1, 2], [3]], 3, sampling)
    assert flat(changed) != plain
    repeated = [[1, 2]] * 3 + [[3]] * 3
    scored = completion_logprobs(adapted.eval(), repeated, flat(changed)).logprobs.detach()
    ours = torch.tensor([completion.logprobs for completion in every(changed)])
    torch.testing.assert_close(ours, scored, atol=2e-5, rtol=0)


@pytest.mark.parametrize("model", [small_llama(attention_dropout=0.9), Wrapped(small_llama()), OwnGenerate()])
def test_runs_in_eval_mode_without_gradients_and_restores_every_mode(model: nn.Module) -> None:
    model.train()
    frozen = next(iter(model.children()), None)
    if frozen is not None:
        frozen.eval()
    modes = [module.training for module in model.modules()]
    sampling = SamplingParams(max_new_tokens=4)
    first = flat(TorchEngine(model).generate([[1, 2]], 2, sampling))
    assert flat(TorchEngine(model).generate([[1, 2]], 2, sampling)) == first
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters()) and torch.is_grad_enabled()


def test_modes_are_restored_after_an_error() -> None:
    model = Constant([math.nan, 1.0]).train()
    with pytest.raises(WhetValueError):
        TorchEngine(model).generate([[0]], 1, SamplingParams())
    assert model.training


def test_sync_uses_the_live_module_and_counts_versions() -> None:
    first, second = small_llama(0), small_llama(1)
    sampling = SamplingParams(max_new_tokens=6)
    engine: RolloutEngine = TorchEngine(first)
    [[before]] = engine.generate([[1]], 1, sampling)
    engine.sync(second)
    [[after]] = engine.generate([[1]], 1, sampling)
    assert (before.policy_version, after.policy_version, engine.policy_version) == (0, 1, 1)
    assert after.token_ids == TorchEngine(second).generate([[1]], 1, sampling)[0][0].token_ids
    with torch.no_grad():
        second.lm_head.weight.copy_(first.lm_head.weight.flip(0))
    assert engine.generate([[1]], 1, sampling)[0][0].logprobs != after.logprobs


@pytest.mark.parametrize("model", [small_llama(), Constant(PROBS)])
def test_one_sample_and_no_prompts(model: nn.Module) -> None:
    assert [len(group) for group in TorchEngine(model).generate([[1], [2]], 1, SamplingParams())] == [1, 1]
    assert TorchEngine(model).generate([], 4, SamplingParams()) == []


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1))


def test_completions_end_at_the_position_limit_independent_of_the_batch() -> None:
    sampling = SamplingParams(max_new_tokens=6)
    groups = TorchEngine(gpt2()).generate([[1] * 7, [2], [3] * 4], 2, sampling)
    assert [len(tokens) for tokens in flat(groups)] == [1, 1, 6, 6, 4, 4]
    assert {completion.finish_reason for completion in every(groups)} == {"length"}


@pytest.mark.parametrize("length", [8, 9])
def test_a_prompt_at_the_position_limit_is_rejected(length: int) -> None:
    with pytest.raises(WhetValueError, match=mentions("prompt_ids[1]", f"{length} tokens", "limit is 8")):
        TorchEngine(gpt2()).generate([[1], [1] * length], 1, SamplingParams())


def test_own_generate_gets_groups_of_equal_length() -> None:
    model = OwnGenerate()
    groups = TorchEngine(model).generate([[0], [1, 2], [5]], 2, SamplingParams(max_new_tokens=3))
    assert sorted(model.calls) == [(2, 2), (4, 1)]
    assert [len(tokens) for tokens in flat(groups)] == [3] * 6
    assert all(completion.logprobs is None for completion in every(groups))
    assert 1 <= (groups[1][0].token_ids[0] - 2) % 8 <= 3  # continues its prompt's last token


def test_own_generate_uses_the_seed_and_restores_torchs_generator() -> None:
    engine = TorchEngine(OwnGenerate())
    torch.manual_seed(11)
    state = torch.get_rng_state()
    a = flat(engine.generate([[0]] * 4, 4, SamplingParams(seed=1)))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(12)
    assert flat(engine.generate([[0]] * 4, 4, SamplingParams(seed=1))) == a
    assert flat(engine.generate([[0]] * 4, 4, SamplingParams(seed=2))) != a


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.1}]
)
def test_own_generate_must_support_the_settings(settings: dict[str, float]) -> None:
    [name] = settings
    with pytest.raises(WhetValueError, match=mentions(name, "OwnGenerate.generate", "parameter")):
        TorchEngine(OwnGenerate()).generate([[0]], 1, SamplingParams(**settings))  # pyright: ignore


def test_own_generate_gets_the_settings_it_declares() -> None:
    got: list[dict[str, Any]] = []

    class Declares(nn.Module):
        def generate(
            self, ids: torch.Tensor, max_new_tokens: int, temperature: float = 0.8, top_k: int | None = None
        ) -> torch.Tensor:
            got.append({"temperature": temperature, "top_k": top_k})
            return torch.cat([ids, ids.new_zeros(len(ids), max_new_tokens)], dim=1)

    class TakesAny(Declares):
        def generate(self, ids: torch.Tensor, *, max_new_tokens: int, **settings: Any) -> torch.Tensor:  # pyright: ignore
            got.append(settings)
            return torch.cat([ids, ids.new_zeros(len(ids), max_new_tokens)], dim=1)

    TorchEngine(Declares()).generate([[0]], 1, SamplingParams())
    TorchEngine(Declares()).generate([[0]], 1, SamplingParams(temperature=0.5, top_k=7))
    TorchEngine(TakesAny()).generate([[0]], 1, SamplingParams(top_p=0.9))
    assert got == [{"temperature": 1.0, "top_k": None}, {"temperature": 0.5, "top_k": 7}, {"top_p": 0.9}]


@pytest.mark.parametrize(
    ("output", "error", "facts"),
    [
        ([[0, 1]], WhetTypeError, ("list", "(1, 2 + up to 3)")),
        (torch.zeros(1, 2, 3), WhetTypeError, ("(1, 2, 3)",)),
        (torch.zeros(1, 3, dtype=torch.int64), WhetValueError, ("prompt followed by its completion",)),
        (torch.tensor([[1, 2, 0, 0, 0, 0]]), WhetValueError, ("(1, 6)",)),
        (torch.tensor([[1, 2, 0]] * 2), WhetValueError, ("(2, 3)",)),
    ],
)
def test_invalid_outputs_of_own_generate_are_rejected(
    output: Any, error: type[Exception], facts: tuple[str, ...]
) -> None:
    class Returns(nn.Module):
        def generate(self, input_ids: torch.Tensor, max_new_tokens: int) -> Any:
            return output

    assert_raises(error, facts, TorchEngine(Returns()).generate, [[1, 2]], 1, SamplingParams(max_new_tokens=3))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0}, {"top_k": 2}, {"top_p": 0.5}])
def test_logits_that_are_not_a_distribution_are_reported(bad: float, settings: dict[str, Any]) -> None:
    class BadAfterSeven(Counter):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            logits = super().forward(input_ids)
            return logits.masked_fill((input_ids == 7)[..., None], bad)

    sampling = SamplingParams(max_new_tokens=4, **settings)
    with pytest.raises(WhetValueError, match=mentions("prompt 1", "sample 0", "token 2", "NaN")):
        TorchEngine(BadAfterSeven()).generate([[0], [5]], 1, sampling)


def test_nan_weights_of_a_hugging_face_model_are_reported_and_its_config_restored() -> None:
    model = small_llama()
    config = model.generation_config
    with torch.no_grad():
        model.lm_head.weight[3] = math.nan
    with pytest.raises(WhetValueError, match=mentions("prompt 0", "sample 0", "token 0", "NaN")):
        TorchEngine(model).generate([[1]], 2, SamplingParams())
    assert model.generation_config is config


def test_invalid_arguments_are_rejected() -> None:
    engine = TorchEngine(Counter())
    assert_raises(WhetValueError, ("TorchEngine.generate", "n is 0"), engine.generate, [[1]], 0, SamplingParams())
    assert_raises(WhetValueError, ("prompt_ids[1]", "empty"), engine.generate, [[1], []], 1, SamplingParams())
    with pytest.raises(WhetTypeError, match=mentions("prompt_ids[0]", "'ab'")):
        engine.generate(["ab"], 1, SamplingParams())  # pyright: ignore[reportArgumentType]
    with pytest.raises(WhetValueError, match=mentions("n", "2.5", "an integer >= 1")):
        engine.generate([[1]], 2.5, SamplingParams())  # pyright: ignore[reportArgumentType]
    for settings in ({"max_batch": 0}, {"max_batch": 1.5}, {"pad_token_id": -1}, {"pad_token_id": True}):
        [(name, value)] = settings.items()
        with pytest.raises(WhetValueError, match=mentions("TorchEngine", name, value, "integer")):
            TorchEngine(Counter(), **settings)
    with pytest.raises(WhetTypeError, match=mentions("TorchEngine", "model", "function")):
        TorchEngine(lambda ids: ids)  # pyright: ignore[reportArgumentType]
    with pytest.raises(WhetTypeError, match=mentions("TorchEngine.sync", "NoneType")):
        engine.sync(None)  # pyright: ignore[reportArgumentType]
