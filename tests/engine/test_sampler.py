"""The native sampler: the torch sampler's tokens and log-probs, edges by hand, exact distributions, bits."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.isas import assert_isas_agree
from tests.raising import mentions

from whet import _core
from whet.config.sampling import DISTRIBUTION_SETTINGS, SamplingParams
from whet.rollout.torch_engine import Sampler, token_uniforms

INF, NAN = math.inf, math.nan


def core_settings(model_logprobs: bool = False, **settings: Any) -> dict[str, Any]:
    """Return the core's settings of ``SamplingParams(**settings)``."""
    params = SamplingParams(**settings)
    names = [*DISTRIBUTION_SETTINGS, "top_logprobs"]
    return {name: getattr(params, name) for name in names} | {"model_logprobs": model_logprobs}


def draw_all(
    logits: Any,
    uniforms: Any,
    *,
    seen: np.ndarray | None = None,
    counts: np.ndarray | None = None,
    banned: Any = (),
    **settings: Any,
) -> tuple[np.ndarray, np.ndarray, list[list[tuple[int, float]]]]:
    """Tokens, log-probs and alternatives."""
    ids, logprobs, top_ids, top_logprobs = _core.draw_tokens(
        np.array(logits, dtype=np.float32, ndmin=2),
        np.array(uniforms, dtype=np.float64, ndmin=1),
        sampling=core_settings(**settings),
        seen=seen,
        counts=counts,
        banned=np.array(banned, np.int32),
    )
    n = settings.get("top_logprobs", 0)
    pairs = list(zip(top_ids.tolist(), top_logprobs.tolist(), strict=True))
    tops = [pairs[i : i + n] for i in range(0, len(pairs), n or 1)]
    return ids, logprobs, [[pair for pair in row if pair[0] >= 0] for row in tops]


def draw(logits: Any, uniforms: Any, **settings: Any) -> tuple[np.ndarray, np.ndarray]:
    return draw_all(logits, uniforms, **settings)[:2]


def tokens_over_the_unit(logits: Any, **settings: Any) -> list[int]:
    """Return the distinct tokens at 1000 evenly spaced uniforms from 0 to nearly 1."""
    uniforms = np.append(np.arange(1000) / 1000, np.nextafter(1, 0))
    ids, logprobs = draw(np.tile(np.float32(logits), (1001, 1)), uniforms, **settings)
    assert np.isfinite(logprobs).all() and (np.diff(ids) >= 0).all()
    return [int(token) for token in np.unique(ids)]


# ---------------------------------------------------------------- against the torch sampler

COMBINATIONS: list[dict[str, Any]] = [
    dict(zip(("temperature", "top_k", "top_p", "min_p", "repetition_penalty"), values, strict=True))
    for values in itertools.product((1.0, 0.7, 1.6), (0, 1, 7, 50, 600), (1.0, 0.95, 0.3), (0.0, 0.05), (1.0, 1.3))
]


def rows_of_all_kinds(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    """Draw logits: wide and narrow, bfloat16 (many ties), with excluded tokens."""
    x = rng.normal(size=(n, size)) * rng.choice([0.1, 1.0, 3.0, 6.0], size=(n, 1))
    x[1::4] = torch.from_numpy(x[1::4]).bfloat16().double().numpy()
    x[2::4, 1:][rng.random(x[2::4, 1:].shape) < 0.5] = -INF
    return x.astype(np.float32)


def random_additions(rng: np.random.Generator, size: int) -> dict[str, Any]:
    """Draw settings: optional penalties, bias, banned stop tokens and alternatives."""
    ids = 1 + rng.choice(size - 1, min(size - 1, 6), replace=False)  # token 0 is ruled out nowhere
    additions: dict[str, Any] = {
        "presence_penalty": float(rng.uniform(-2, 2)),
        "frequency_penalty": float(rng.uniform(-2, 2)),
        "logit_bias": {int(i): float(rng.choice([-100, -1.5, 0.25, 3])) for i in ids[:3]},
        "min_new_tokens": int(rng.integers(0, 5)),
        "top_logprobs": int(rng.integers(0, 21)),
    }
    chosen = {name: value for name, value in additions.items() if rng.random() < 0.7}
    return {**chosen, "stop_token_ids": ids[3:].tolist()}


def exact_logprobs(kept: np.ndarray, ids: np.ndarray) -> np.ndarray:
    wide = kept.astype(np.float64)
    top = wide.max(axis=1)
    return wide[np.arange(len(ids)), ids] - top - np.log(np.exp(wide - top[:, None]).sum(axis=1))


def test_sampler_matches_the_torch_sampler() -> None:
    rng = np.random.default_rng(0)
    n_rows = n_other = n_edges = n_tops = n_other_tops = 0
    for i, settings in enumerate(COMBINATIONS):
        size = (5, 33, 500, 1024, 2500)[i % 5]
        logits, uniforms = rows_of_all_kinds(rng, 48, size), rng.random(48)
        seen = rng.random(logits.shape) < 0.2
        settings = settings | random_additions(rng, size) if i % 3 else settings
        sampler = Sampler(SamplingParams(**settings))
        counts = rng.integers(0, 4, logits.shape, dtype=np.int32) * (rng.random(logits.shape) < 0.2)
        history = {"seen": torch.from_numpy(seen), "counts": torch.from_numpy(counts), "n_drawn": i % 5}
        kept = sampler.filtered_logits(torch.from_numpy(logits), **history)
        expected, _ = sampler.draw_from(kept, torch.from_numpy(uniforms))
        banned = settings.get("stop_token_ids", ()) if i % 5 < settings.get("min_new_tokens", 0) else ()
        ids, logprobs, tops = draw_all(
            logits, uniforms, seen=seen, counts=counts.astype(np.int32), banned=banned, **settings
        )
        for row, expected_row in zip(tops, sampler.alternatives(kept), strict=True) if tops else ():
            n_tops += 1
            n_other_tops += [token for token, _ in row] != [token for token, _ in expected_row] or not np.allclose(
                [logprob for _, logprob in row], [logprob for _, logprob in expected_row], atol=2e-5
            )
        kept = kept.numpy()
        n_rows += len(ids)
        n_other += np.count_nonzero(ids != expected.numpy())
        # Rounding may move a token across the cutoff of top-p or min-p, which changes the other log-probs.
        exact = exact_logprobs(kept, ids)
        same = np.abs(logprobs - exact) <= 1e-5
        n_edges += np.count_nonzero(~same)
        assert np.isfinite(exact).mean() > 0.95, settings
    assert n_rows == 180 * 48 and n_tops > 48 * 60
    assert n_other_tops <= 3, n_other_tops
    assert n_other <= 3 and n_edges <= 3, (n_other, n_edges)


@pytest.mark.parametrize("settings", [{}, {"top_k": 50}, {"top_p": 0.95}, {"min_p": 0.02}, {"top_k": 9000}])
def test_vocabulary_of_50_000(settings: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    logits, uniforms = rows_of_all_kinds(rng, 32, 50_257), rng.random(32)
    # Before a token of 0.3%, its cumulative probability was 0.95 - 4.9e-6: rounding, by processor, decided for top-p.
    logits[13] *= 1.01
    sampler = Sampler(SamplingParams(temperature=0.9, **settings))
    expected, _ = sampler.draw(torch.from_numpy(logits), torch.from_numpy(uniforms))
    ids, logprobs = draw(logits, uniforms, temperature=0.9, **settings)
    assert np.count_nonzero(ids != expected.numpy()) <= 1
    kept = sampler.filtered_logits(torch.from_numpy(logits)).numpy()
    # top-p's cutoff may differ by one token: 1e-5 of the mass.
    np.testing.assert_allclose(logprobs, exact_logprobs(kept, ids), atol=3e-5 if "top_p" in settings else 1e-5)


def test_greedy_token_and_logprob_match_the_torch_sampler() -> None:
    rng = np.random.default_rng(2)
    for size, penalty in itertools.product((1, 15, 1025, 3000), (1.0, 1.5)):
        logits = rows_of_all_kinds(rng, 32, size)
        seen = rng.random(logits.shape) < 0.3
        settings: dict[str, Any] = {"temperature": 0.0, "top_k": 3, "repetition_penalty": penalty}
        sampler = Sampler(SamplingParams(**settings))
        expected, expected_logprobs = sampler.draw(
            torch.from_numpy(logits), torch.zeros(32, dtype=torch.float64), seen=torch.from_numpy(seen)
        )
        ids, logprobs = draw(logits, np.zeros(32), seen=seen, **settings)
        np.testing.assert_array_equal(ids, expected.numpy())
        np.testing.assert_allclose(logprobs, expected_logprobs.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.6},
        {"top_k": 20, "min_p": 0.1},
        {"temperature": 1.3, "top_p": 0.8},
        {"repetition_penalty": 1.7},
        {"temperature": 0.0, "repetition_penalty": 1.7},
        {"repetition_penalty": 0.5, "top_k": 5, "temperature": 2.0},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5, "logit_bias": {3: 5.0}},
        {"temperature": 0.0, "frequency_penalty": 2.0},
        {"banned": [1, 5]},
    ],
)
def test_model_logprobs_ignore_sampling_settings(settings: dict[str, Any]) -> None:
    rng = np.random.default_rng(3)
    logits, uniforms = (rng.normal(size=(64, 2100)) * 3).astype(np.float32), rng.random(64)
    seen = rng.random(logits.shape) < 0.4
    counts = rng.integers(0, 3, logits.shape, dtype=np.int32) if "frequency_penalty" in settings else None
    before = logits.copy()
    history = {"seen": seen, "counts": counts}
    ids, logprobs, tops = draw_all(logits, uniforms, **history, model_logprobs=True, **{**settings, "top_logprobs": 5})
    np.testing.assert_array_equal(ids, draw(logits, uniforms, **history, **settings)[0])
    np.testing.assert_array_equal(logits, before)
    np.testing.assert_allclose(logprobs, exact_logprobs(logits, ids), atol=2e-6)
    best = np.argsort(-logits, axis=1, kind="stable")[:, :5]
    np.testing.assert_array_equal([[token for token, _ in row] for row in tops], best)
    for j in range(5):
        np.testing.assert_allclose([row[j][1] for row in tops], exact_logprobs(logits, best[:, j]), atol=2e-6)


def test_logprob_of_a_near_certain_token_is_accurate() -> None:
    _, logprobs = draw([[20.0, 0.0, 0.0]], 0.5)
    np.testing.assert_allclose(logprobs, [-math.log1p(2 * math.exp(-20))], rtol=1e-6)


# ---------------------------------------------------------------- by hand


def test_sample_is_the_inverse_cdf_of_its_uniform() -> None:
    quarter, half = math.log(0.25), math.log(0.5)
    logits = [quarter, -INF, half, quarter, -INF]
    uniforms = [0.0, 0.2499, 0.25, 0.7499, 0.75, np.nextafter(1, 0)]
    choices: list[dict[str, Any]] = [{}, {"top_k": 4}, {"min_p": 0.01}]
    for settings in choices:
        ids, logprobs = draw(np.tile(logits, (6, 1)), uniforms, **settings)
        assert ids.tolist() == [0, 0, 2, 2, 3, 3]
        np.testing.assert_allclose(logprobs, np.log([0.25, 0.25, 0.5, 0.5, 0.25, 0.25]), atol=1e-6)


TIES = [1.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("logits", "settings", "kept"),
    [
        (TIES, {"top_k": 1}, [1]),
        (TIES, {"top_k": 2}, [0, 1]),
        (TIES, {"top_k": 3}, [0, 1, 2]),
        (TIES, {"top_k": 4}, [0, 1, 2, 3]),
        (TIES, {"top_k": 100}, [0, 1, 2, 3]),
        ([0.0] * 4, {"top_p": 0.7}, [0, 1, 2]),
        ([0.0] * 4, {"top_p": 0.5}, [0, 1]),  # what comes before the third is 0.5, not below it
        ([0.0] * 4, {"top_p": 0.51}, [0, 1, 2]),
        ([0.0, -0.0, 0.0, -0.0], {"top_k": 2}, [0, 1]),  # the two zeros are equal
        (TIES, {"top_p": 1e-6}, [1]),
        ([3.0, 3.0, 2.0], {"top_p": 1e-30}, [0]),
        (TIES, {"temperature": 0.0}, [1]),
        ([2.0, 5.0, 5.0], {"temperature": 0.0}, [1]),
        # 0.5, 0.25, 0.125, 0.125: top-k leaves 4/7, 2/7, 1/7 and top-p 0.85 two of them; of all four it keeps three.
        (np.log([0.5, 0.25, 0.125, 0.125]), {"top_p": 0.85}, [0, 1, 2]),
        (np.log([0.5, 0.25, 0.125, 0.125]), {"top_p": 0.85, "top_k": 3}, [0, 1]),
        # min-p after temperature 0.5: the odds are 1, 1/4, 1/16.
        (np.log([0.5, 0.25, 0.125]), {"min_p": 0.3}, [0, 1]),
        (np.log([0.5, 0.25, 0.125]), {"min_p": 0.3, "temperature": 0.5}, [0]),
        (np.log([0.5, 0.25, 0.125]), {"min_p": 0.24}, [0, 1, 2]),
        ([-INF, -INF, 7.0, -INF], {}, [2]),
        ([-INF, -INF, 7.0, -INF], {"top_k": 3}, [2]),
        ([-INF, -INF, 7.0, -INF], {"top_p": 0.99}, [2]),
        ([-INF, -INF, 7.0, -INF], {"min_p": 0.5}, [2]),
        ([-INF, -INF, 7.0, -INF], {"temperature": 0.0}, [2]),
        ([-INF] * 2000 + [-3e38], {}, [2000]),
        ([-INF] * 2000 + [-3e38], {"top_k": 10, "top_p": 0.5}, [2000]),
        ([-3e38, 3e38], {}, [1]),
        ([-3e38, 3e38], {"top_k": 1}, [1]),
        # exp(-200) is 0 in float32: never sampled, even by a uniform of 0.
        ([-200.0, 0.0, 0.0], {}, [1, 2]),
        ([1.0, 1.5], {"temperature": 1e-6}, [1]),
    ],
)
def test_top_k_top_p_and_min_p_filters(logits: Any, settings: dict[str, Any], kept: list[int]) -> None:
    assert tokens_over_the_unit(logits, **settings) == kept


def test_ties_over_a_large_vocabulary_keep_the_lower_ids() -> None:
    logits = np.zeros(3000, np.float32)
    logits[[2999, 1500]] = 1.0
    assert tokens_over_the_unit(logits, top_k=5) == [0, 1, 2, 1500, 2999]
    # 3000 equal tokens: the mass before the 301st is 0.1.
    ids, _ = draw(np.zeros((2, 3000)), [0.0, np.nextafter(1, 0)], top_p=0.1)
    assert ids[0] == 0 and ids[1] in (299, 300)


def test_repetition_penalty_by_hand() -> None:
    seen = np.array([[True, True, False]])
    # 4, -4, 1 become 2, -8, 1.
    ids, logprobs = draw([[4.0, -4.0, 1.0]], 0.0, seen=seen, repetition_penalty=2.0)
    np.testing.assert_allclose(logprobs, [2 - math.log(math.exp(2) + math.exp(-8) + math.exp(1))], atol=1e-6)
    assert ids.tolist() == [0]
    ids, logprobs = draw([[4.0, -4.0, 3.0]], 0.0, seen=seen, repetition_penalty=2.0, temperature=0.0)
    np.testing.assert_allclose(logprobs, [3 - math.log(math.exp(2) + math.exp(-8) + math.exp(3))], atol=1e-6)
    assert ids.tolist() == [2]
    # Seen tokens have no effect without a penalty, and penalties none without seen tokens.
    assert draw([[4.0, -4.0, 3.0]], 0.0, temperature=0.0, seen=seen)[0].tolist() == [0]
    assert draw([[4.0, -4.0, 3.0]], 0.0, temperature=0.0, repetition_penalty=2.0)[0].tolist() == [0]


def test_bias_and_penalties_by_hand_in_their_order() -> None:
    # 1 + 3 = 4 -> / 2 = 2 -> - 2 * 0.5 - 0.25 = 0.75;  -1 * 2 = -2, without a count;  0 banned;  1 unchanged.
    logits = [[1.0, -1.0, 0.0, 1.0]]
    settings: dict[str, Any] = {
        "logit_bias": {0: 3.0}, "repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25,
        "seen": np.array([[True, True, False, False]]), "counts": np.array([[2, 0, 0, 0]], np.int32),
        "banned": [2], "top_logprobs": 4,
    }  # fmt: skip
    total = math.exp(0.75) + math.exp(-2) + math.exp(1)
    expected = [(3, 1 - math.log(total)), (0, 0.75 - math.log(total)), (1, -2 - math.log(total))]
    for temperature, uniform in ((1.0, 0.99), (0.0, 0.0)):
        ids, logprobs, [top] = draw_all(logits, uniform, temperature=temperature, **settings)
        assert ids.tolist() == [3] and [token for token, _ in top] == [3, 0, 1]  # the banned one is not there
        np.testing.assert_allclose([logprob for _, logprob in top], [logprob for _, logprob in expected], atol=1e-6)
        np.testing.assert_allclose(logprobs, [expected[0][1]], atol=1e-6)


def test_a_bias_chooses_at_temperature_0() -> None:
    logits = [[0.0, 5.0, 1.0]]
    assert draw(logits, 0.0, temperature=0.0, logit_bias={2: 4.5})[0].tolist() == [2]
    assert draw(logits, 0.0, temperature=0.0, logit_bias={1: -100.0})[0].tolist() == [2]
    assert draw(logits, 0.0, temperature=0.0, frequency_penalty=2.0, counts=np.array([[0, 3, 0]], np.int32))[0][0] == 2


def test_alternatives_pass_the_filters_with_ties_by_id() -> None:
    logits = [[1.0, 2.0, 1.0, 1.0, -INF]]
    for settings, kept in (
        ({}, [1, 0, 2, 3]), ({"top_k": 2}, [1, 0]), ({"top_p": 0.5}, [1, 0]), ({"min_p": 0.5}, [1]),
        ({"temperature": 0.0, "top_k": 1}, [1, 0, 2, 3]),
    ):  # fmt: skip
        _, logprobs, [top] = draw_all(logits, 0.0, top_logprobs=20, **settings)
        assert [token for token, _ in top] == kept, settings
        total = math.fsum(math.exp(logprob) for _, logprob in top)
        assert abs(total - 1) < 1e-6 and logprobs[0] in [np.float32(logprob) for _, logprob in top]
        _, _, [fewer] = draw_all(logits, 0.0, top_logprobs=1, **settings)
        assert fewer == top[:1]
    assert draw_all([[-INF, 1.0]], 0.0, top_logprobs=3)[2] == [[(1, 0.0)]]
    # A weight of 0 in float32, but a finite log-prob.
    assert [token for token, _ in draw_all([[-200.0, 0.0]], 0.0, top_logprobs=3)[2][0]] == [1, 0]


BROKEN = [[NAN, 1.0, 2.0], [1.0, NAN, -INF], [0.0, INF, 1.0], [INF, INF, 0.0], [-INF] * 3, [NAN] * 3, [INF, NAN, -INF]]


@pytest.mark.parametrize("size", [3, 16, 700, 5000])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.3},
        {"top_k": 2},
        {"top_p": 0.5},
        {"min_p": 0.1},
        {"top_k": 2, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 2.0},
    ],
)
def test_invalid_logits_give_nan(settings: dict[str, Any], size: int) -> None:
    rows = np.full((len(BROKEN), size), -INF, np.float32)
    rows[:, -3:] = BROKEN
    rows[:4, :-3] = 0.5
    seen = np.ones(rows.shape, bool)
    for uniform, model_logprobs in itertools.product((0.0, 0.5, 0.999), (False, True)):
        uniforms = np.full(len(rows), uniform)
        ids, logprobs = draw(rows, uniforms, seen=seen, model_logprobs=model_logprobs, **settings)
        assert np.isnan(logprobs).all() and ((ids >= 0) & (ids < size)).all()


def test_unsupported_inputs_return_not_implemented() -> None:
    x, u = np.zeros((2, 3), np.float32), np.zeros(2)
    rest: dict[str, Any] = {
        "sampling": core_settings(),
        "seen": None,
        "counts": None,
        "banned": np.array([1], np.int32),
    }
    assert _core.draw_tokens(x, u, **rest) is not NotImplemented
    seen = np.zeros((2, 3), bool)
    for bad in (
        {"logits": x.astype(np.float64)},
        {"logits": x[0]},
        {"logits": x[:, ::2]},
        {"uniforms": u[:1]},
        {"uniforms": u.astype(np.float32)},
        {"seen": seen[:1]},
        {"seen": seen.astype(np.int32)},
        {"counts": seen},
        {"counts": np.zeros((2, 4), np.int32)},
        {"banned": np.zeros(1)},
    ):
        assert _core.draw_tokens(**{"logits": x, "uniforms": u, **rest, **bad}) is NotImplemented, bad
    for outside in ({"banned": np.array([3], np.int32)}, {"sampling": core_settings(logit_bias={3: 1.0})}):
        with pytest.raises(ValueError, match=mentions("token id 3 is outside the vocabulary")):
            _core.draw_tokens(x, u, **{**rest, **outside})


# ---------------------------------------------------------------- uniforms


def test_token_uniforms_are_numpy_s_philox() -> None:
    for seed, prompt, sample in [(0, 0, 0), (1, 2, 3), (2**64 - 1, 5, 0), (123456789, 2**40, 2**63 + 1), (-7, 1, 1)]:
        expected = token_uniforms(seed, prompt, sample, 203)
        np.testing.assert_array_equal(_core.token_uniforms(seed % 2**64, prompt, sample, 203), expected)
    assert _core.token_uniforms(1, 2, 3, 0).shape == (0,)


# ---------------------------------------------------------------- distributions

PROBS = np.array([0.30, 0.05, 0.20, 0.25, 0.12, 0.08])


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, PROBS),
        ({"temperature": 0.5}, PROBS**2),
        ({"temperature": 2.0}, PROBS**0.5),
        ({"top_k": 3}, [0.30, 0, 0.20, 0.25, 0, 0]),
        ({"top_p": 0.7}, [0.30, 0, 0.20, 0.25, 0, 0]),
        ({"min_p": 0.35}, [0.30, 0, 0.20, 0.25, 0.12, 0]),
        # Squared, 0.09 0.0625 0.04 0.0144: of the 0.2069 that top-k leaves, 0.1525 come before the third, 74 %.
        ({"temperature": 0.5, "top_k": 4, "top_p": 0.75}, [0.09, 0, 0.04, 0.0625, 0, 0]),
    ],
)
@pytest.mark.parametrize("spread", [1, 700])
def test_frequencies(settings: dict[str, Any], weights: Any, spread: int) -> None:
    """Chi-square at p = 1e-4, five degrees of freedom or fewer: 25.7 (5), 23.5 (4), 21.1 (3), 18.4 (2)."""
    logits = np.full(6 * spread, -INF, np.float32)
    logits[::spread] = np.log(PROBS)
    n = 20_000
    ids, logprobs = draw(np.tile(logits, (n, 1)), token_uniforms(11, spread, 0, n), **settings)
    assert (ids % spread == 0).all()
    probs = np.array(weights) / np.sum(weights)
    counts = np.bincount(ids // spread, minlength=6)
    drawn = probs > 0
    assert counts[~drawn].sum() == 0
    statistic = ((counts - n * probs)[drawn] ** 2 / (n * probs[drawn])).sum()
    assert statistic < {6: 25.7, 5: 23.5, 4: 21.1, 3: 18.4}[int(np.count_nonzero(drawn))]
    np.testing.assert_allclose(logprobs, np.log(probs[ids // spread]), atol=2e-6)


# ---------------------------------------------------------------- bits

IMPORTS = "import hashlib, numpy as np, whet\nfrom whet import _core"
DIGEST = """
digests = set()
for n_threads in (1, 3):
    whet._core.set_num_threads(n_threads, oversubscribe=True)
    rng = np.random.default_rng(0)
    h = hashlib.sha256()
    for size in [*range(1, 35), 127, 300, 1023, 1024, 1025, 5000, 50257]:
        x = (rng.normal(size=(8, size)) * 4).astype(np.float32)
        x[::2][rng.random(x[::2].shape) < .3] = -np.inf
        seen = rng.random(x.shape) < .1
        u = rng.random(8)
        for temperature in (0., 1., .6):
            for k, p, min_p in ((0, 1., 0.), (7, 1., 0.), (0, .9, 0.), (0, 1., .05), (40, .9, .05), (0, .6, .01)):
                for penalty, model_logprobs in ((1., False), (1.2, True)):
                    more = dict(presence_penalty=penalty, frequency_penalty=.3, logit_bias={0: .7}, top_logprobs=4)
                    plain = dict(presence_penalty=0., frequency_penalty=0., logit_bias={}, top_logprobs=0)
                    sampling = dict(
                        temperature=temperature, top_k=k, top_p=p, min_p=min_p, repetition_penalty=penalty,
                        model_logprobs=model_logprobs, **(more if model_logprobs else plain),
                    )
                    counts = seen.astype(np.int32) * 2 if model_logprobs else None
                    for out in _core.draw_tokens(
                        x, u, sampling=sampling, seen=seen, counts=counts, banned=np.zeros(0, np.int32)
                    ):
                        h.update(out.tobytes())
    digests.add(h.hexdigest())
print(*digests)
"""


def test_every_instruction_set_and_number_of_threads_gives_the_same_bits() -> None:
    assert_isas_agree(IMPORTS, DIGEST)
