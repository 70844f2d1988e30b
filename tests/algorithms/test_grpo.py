"""GRPO: against a step in plain torch, options, inputs and invariants."""

from __future__ import annotations

import math
import warnings
from typing import get_args

import numpy as np
import pytest
import torch
from tests.raising import assert_raises, mentions
from tests.tiny import (
    EOS,
    Recorded,
    ScriptedEngine,
    TinyModel,
    assert_close_weights,
    assert_same_weights,
    first_is_four,
    fours,
    letters_tokenizer,
    padded,
    timeless,
    tiny_llama,
    token_logprobs,
    weights,
    with_lora,
)
from torch.utils.data import DataLoader

from whet.algorithms import GRPO, grpo_loss
from whet.config import GRPOConfig, GRPOLossType
from whet.engine import Engine
from whet.errors import NonFiniteError, RewardError, WhetTypeError, WhetValueError
from whet.rewards.functions import RewardFunctions
from whet.rollout.rollout import read_prompts
from whet.rollout.torch_engine import TorchEngine

PROMPTS = [[5, 6], [7]]
GROUPS = [[[4, 4, EOS], [8, EOS], [9, 4, 9, 9]], [[4, EOS], [EOS], [10, 11, 4]]]
ROWS = [(prompt, completion) for prompt, group in zip(PROMPTS, GROUPS, strict=True) for completion in group]
SAMPLED = [[[token != 4 for token in completion] for completion in group] for group in GROUPS]


def make(model=None, **settings) -> GRPO:
    settings = {"learning_rate": 0.02, "max_grad_norm": 0.0, "group_size": 3, "max_new_tokens": 4} | settings
    settings.setdefault("engine", ScriptedEngine(GROUPS))
    settings.setdefault("reward_fn", fours)
    return GRPO(model if model is not None else TinyModel(), **settings)


def by_hand(model, ref_model, n_updates, *, beta, temperature, loss_type="dapo", is_context=lambda token: False):
    """Make the same updates in plain torch, one row at a time."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    rewards = np.array([c.count(4) for _, c in ROWS], dtype=float).reshape(2, 3)
    advantages = ((rewards - rewards.mean(1, keepdims=True)) / rewards.std(1, keepdims=True)).ravel()
    old = [token_logprobs(model, p, c, temperature).detach() for p, c in ROWS]
    ref = [token_logprobs(ref_model, p, c, temperature).detach() for p, c in ROWS]
    losses = []
    for _ in range(n_updates):
        total = torch.zeros((), dtype=torch.float64)
        counts = [torch.tensor([not is_context(token) for token in c]) for _, c in ROWS]
        n_tokens = sum(int(counted.sum()) for counted in counts)
        for i, (p, c) in enumerate(ROWS):
            logprobs = token_logprobs(model, p, c, temperature)
            ratio = (logprobs - old[i]).exp()
            row = -torch.minimum(ratio * advantages[i], ratio.clamp(0.8, 1.2) * advantages[i])
            gap = ref[i] - logprobs
            row = (row + beta * (gap.exp() - gap - 1) * ratio)[counts[i]]
            total = total + (row.sum() / n_tokens if loss_type == "dapo" else row.mean() / len(ROWS))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return sum(losses) / len(losses)


@pytest.mark.parametrize("num_iterations", [1, 3])
@pytest.mark.parametrize("micro_batch_size", [0, 1, 4])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_steps_match_plain_torch(num_iterations, micro_batch_size, loss_type):
    model, ref_model, own = TinyModel(), TinyModel(seed=1), TinyModel()
    grpo = make(
        model, ref_model=ref_model, beta=0.3, temperature=0.7, num_iterations=num_iterations, loss_type=loss_type,
        micro_batch_size=micro_batch_size,
    )  # fmt: skip
    metrics = grpo.train_step(PROMPTS)
    expected = by_hand(own, ref_model, num_iterations, beta=0.3, temperature=0.7, loss_type=loss_type)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-9)
    assert_close_weights(model, own, rtol=1e-7, atol=1e-9)
    if num_iterations == 3:
        assert metrics["clip_ratio/region"] > 0  # later updates clip


@pytest.mark.parametrize("micro_batch_size", [0, 2])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_only_sampled_tokens_count(loss_type, micro_batch_size):
    model, ref_model, own = TinyModel(), TinyModel(seed=1), TinyModel()
    engine = ScriptedEngine(GROUPS, sampled=SAMPLED)
    settings = {"beta": 0.3, "temperature": 0.7, "loss_type": loss_type, "micro_batch_size": micro_batch_size}
    metrics = make(model, ref_model=ref_model, engine=engine, num_iterations=2, **settings).train_step(PROMPTS)
    settings.pop("micro_batch_size")
    expected = by_hand(own, ref_model, 2, **settings, is_context=lambda token: token == 4)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-9)
    assert_close_weights(model, own, rtol=1e-7, atol=1e-9)
    assert metrics["completions/mean_length"] == (1 + 2 + 3 + 1 + 1 + 2) / 6
    assert metrics["num_tokens"] == 15 + 3 * 2 + 3 * 1
    distributions = [
        TinyModel()(torch.tensor([p + c]))[0, len(p) - 1 : -1][[token != 4 for token in c]].div(0.7).softmax(-1)
        for p, c in ROWS
    ]
    first = make(engine=ScriptedEngine(GROUPS, sampled=SAMPLED), temperature=0.7).train_step(PROMPTS)
    assert first["entropy"] == pytest.approx(sum(-(p * p.log()).sum().item() for p in distributions) / 10)


def test_metrics_by_hand():
    ref_model = TinyModel(seed=1)
    metrics = make(ref_model=ref_model, beta=0.1).train_step(PROMPTS)
    gaps = [token_logprobs(ref_model, p, c) - token_logprobs(TinyModel(), p, c) for p, c in ROWS]
    k3 = [(gap.exp() - gap - 1).sum().item() for gap in gaps]
    probs = [TinyModel()(torch.tensor([p + c]))[0, len(p) - 1 : -1].softmax(-1) for p, c in ROWS]
    expected = {
        "mean_reward": (2 + 0 + 1 + 1 + 0 + 1) / 6,
        "reward_std": (math.sqrt(2 / 3) + math.sqrt(2 / 9)) / 2,
        "frac_reward_zero_std": 0.0,
        "rewards/fours/mean": 5 / 6,
        "rewards/fours/std": math.sqrt((4 + 3) / 6 - (5 / 6) ** 2),
        "reward_errors": 0,
        "mean_kl": sum(k3) / 6,
        "kl": sum(k3) / 15,
        "entropy": sum(-(p * p.log()).sum().item() for p in probs) / 15,
        "clip_ratio/low": 0.0,
        "clip_ratio/high": 0.0,
        "clip_ratio/region": 0.0,
        "completions/mean_length": 15 / 6,
        "completions/min_length": 1,
        "completions/max_length": 4,
        "completions/clipped_ratio": 2 / 6,
        "num_tokens": 15 + 3 * 2 + 3 * 1,
        "learning_rate": 0.02,
        "skipped_steps": 0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert metrics["step_time_s"] > 0
    assert metrics["tokens_per_s"] == pytest.approx(24 / metrics["step_time_s"])
    assert all(isinstance(value, (int, float)) for value in metrics.values())


def test_last_completions_are_a_table():
    grpo = make()
    grpo.train_step(PROMPTS)
    table = grpo.last_completions
    assert len(table) == 6
    spread = math.sqrt(2 / 3)
    assert table[0] == {
        "step": 1, "prompt": [5, 6], "completion": [4, 4, EOS], "rewards/fours": 2.0, "reward": 2.0,
        "advantage": pytest.approx(1 / spread),
    }  # fmt: skip
    assert table[5]["prompt"] == [7] and table[5]["completion"] == [10, 11, 4]


@pytest.mark.parametrize("loss_type", get_args(GRPOLossType))
@pytest.mark.parametrize("correction", ["off", "token_truncate", "sequence_mask"])
def test_accumulated_micro_batches_trace_the_same_curve(loss_type, correction):
    model, ref_model = TinyModel(), TinyModel(seed=1)
    sampler = [
        [(token_logprobs(model, p, c).detach() + 0.1 * (-1) ** len(c)).tolist() for c in group]
        for p, group in zip(PROMPTS, GROUPS, strict=True)
    ]
    settings = {"loss_type": loss_type, "sampler_correction": correction, "beta": 0.1}
    settings |= {} if correction == "off" else {"sampler_cap": 1.15}
    settings |= {"epsilon_high": 0.2} if loss_type == "cispo" else {}
    runs = []
    for micro_batch_size in (0, 1, 4):
        run = make(
            TinyModel(), ref_model=ref_model, engine=ScriptedEngine(GROUPS, sampler), num_iterations=2,
            micro_batch_size=micro_batch_size, **settings,
        )  # fmt: skip
        runs.append([run.train_step(PROMPTS) for _ in range(2)] + [weights(run.model)])
    for run in runs[1:]:
        for name, value in runs[0][-1].items():
            torch.testing.assert_close(run[-1][name], value, rtol=1e-8, atol=1e-10)
        for got, expected in zip(run[:-1], runs[0][:-1], strict=True):
            assert timeless(got) == pytest.approx(timeless(expected), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("threshold", "is_masked"), [(0.5, True), (0.7, False)])
def test_the_off_policy_mask_measures_from_the_sampler(threshold, is_masked):
    """The sampler's log-probs are 0.6 nats above the policy's: completions below the mean of their group are masked."""
    model, bare = TinyModel(), TinyModel()
    sampler = [
        [(token_logprobs(model, p, c).detach() + 0.6).tolist() for c in group]
        for p, group in zip(PROMPTS, GROUPS, strict=True)
    ]
    settings = {"off_policy_mask_threshold": threshold, "sampler_correction": "off"}
    with pytest.warns(UserWarning, match="logprob_difference"):
        masked = make(model, engine=ScriptedEngine(GROUPS, sampler), **settings)
        metrics = masked.train_step(PROMPTS)
    plain = make(bare)
    plain.train_step(PROMPTS)
    below = [row["advantage"] < 0 for row in masked.last_completions]
    n_below = sum(len(c) for (_, c), is_below in zip(ROWS, below, strict=True) if is_below)
    assert n_below == 3 and metrics["clip_ratio/off_policy"] == pytest.approx(n_below / 15 * is_masked)
    if not is_masked:
        assert_same_weights(model, bare)
    else:
        assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), bare.parameters(), strict=True))


@pytest.mark.parametrize("num_iterations", [1, 2])
@pytest.mark.parametrize("micro_batch_size", [0, 2])
def test_mini_batches_match_plain_torch(num_iterations, micro_batch_size):
    """Each update takes the group of one prompt; all ratios are to the policy that sampled."""
    model, own = TinyModel(), TinyModel()
    settings = {"steps_per_generation": 2, "num_iterations": num_iterations, "learning_rate": 0.05}
    grpo = make(model, micro_batch_size=micro_batch_size, **settings)
    metrics = grpo.train_step(PROMPTS)
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.05, weight_decay=0.0)
    advantages = [row["advantage"] for row in grpo.last_completions]
    old = [token_logprobs(own, p, c).detach() for p, c in ROWS]
    losses, n_clipped = [], 0
    for _ in range(num_iterations):
        for rows in (range(3), range(3, 6)):
            total = torch.zeros((), dtype=torch.float64)
            for i in rows:
                ratio = (token_logprobs(own, *ROWS[i]) - old[i]).exp()
                terms = ratio * advantages[i], ratio.clamp(0.8, 1.2) * advantages[i]
                total = total - torch.minimum(*terms).sum() / sum(len(ROWS[j][1]) for j in rows)
                n_clipped += int((terms[1] < terms[0]).sum())
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            losses.append(total.item())
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-9, abs=1e-12) and n_clipped > 0
    assert grpo.n_updates == 2 * num_iterations and grpo.step == 1
    assert_close_weights(model, own, rtol=1e-7, atol=1e-9)


def test_mini_batches_without_completions_are_skipped():
    grpo = make(steps_per_generation=2, filter_zero_variance=True, reward_fn=lambda _: [1, 1, 1, 0, 1, 2])
    grpo.train_step(PROMPTS)
    assert grpo.n_updates == 1
    more = make(steps_per_generation=4)  # than prompts
    more.train_step(PROMPTS)
    assert more.n_updates == 2
    assert_raises(
        WhetValueError, ("steps_per_generation", "3", "batch_size=2"), make, steps_per_generation=3, batch_size=2
    )


@pytest.mark.parametrize("micro_batch_size", [0, 1, 4])
@pytest.mark.parametrize("settings", [{"entropy_coef": 0.3}, {"top_entropy_quantile": 0.4},
                                      {"entropy_coef": 0.3, "top_entropy_quantile": 0.4}], ids=str)  # fmt: skip
def test_entropy_settings_match_plain_torch(settings, micro_batch_size):
    """A step in plain torch: the bonus has the gradient of the entropy, the quantile is of the batch."""
    model, own = TinyModel(), TinyModel()
    grpo = make(model, temperature=0.7, micro_batch_size=micro_batch_size, **settings)
    metrics = grpo.train_step(PROMPTS)
    logprobs, entropies = [], []
    for p, c in ROWS:
        log_p = (own(torch.tensor([p + c]))[0, len(p) - 1 : -1] / 0.7).log_softmax(-1)
        logprobs.append(log_p.gather(-1, torch.tensor(c)[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    values, every = torch.cat(entropies), torch.cat(logprobs)
    advantages = torch.tensor([row["advantage"] for row in grpo.last_completions for _ in row["completion"]])
    chosen = values >= values.quantile(1 - settings.get("top_entropy_quantile", 1.0))
    assert int(chosen.sum()) == (6 if "top_entropy_quantile" in settings else 15)
    loss = -(advantages * (every - every.detach()).exp())[chosen].sum() / 15
    loss = loss - settings.get("entropy_coef", 0.0) * values[chosen].mean()
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.02, weight_decay=0.0)
    loss.backward()
    optimizer.step()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert metrics["entropy"] == pytest.approx(values.mean().item())
    assert_close_weights(model, own, rtol=1e-6, atol=1e-8)


def test_an_uncorrected_sampler_mismatch_is_warned_about_once():
    far = [[[-9.0] * len(completion) for completion in group] for group in GROUPS]
    trainer = make(engine=ScriptedEngine(GROUPS, far))
    with pytest.warns(UserWarning, match=mentions("GRPO", "sampler/logprob_difference", "sampler_correction")):
        trainer.train_step(PROMPTS)
    corrected = make(engine=ScriptedEngine(GROUPS, far), sampler_correction="token_truncate")
    for again in (trainer, corrected):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*logprob_difference")
            assert again.train_step(PROMPTS)["sampler/logprob_difference"] > 0.1


def test_explicit_old_logprobs_change_nothing_on_policy():
    """With a sampler that agrees with the policy every importance weight is 1."""
    model = TinyModel()
    exact = [
        [token_logprobs(model, p, c).detach().tolist() for c in group] for p, group in zip(PROMPTS, GROUPS, strict=True)
    ]
    plain, corrected = make(), make(engine=ScriptedEngine(GROUPS, exact), sampler_correction="token_truncate")
    metrics, corrected_metrics = plain.train_step(PROMPTS), corrected.train_step(PROMPTS)
    assert corrected_metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-6)
    assert corrected_metrics["sampler/importance_weight"] == pytest.approx(1.0, rel=1e-6)
    assert corrected_metrics["sampler/logprob_difference"] == pytest.approx(0.0, abs=1e-6)
    assert_close_weights(corrected.model, plain.model, rtol=1e-4, atol=1e-6)


def test_a_batch_rejected_by_the_correction_makes_no_update():
    far = [[[-50.0] * len(c) for c in group] for group in GROUPS]
    grpo = make(engine=ScriptedEngine(GROUPS, far), sampler_correction="sequence_mask")
    assert grpo.train_step(PROMPTS)["loss"] == 0
    assert grpo.step == 1 and grpo.n_updates == 0
    assert_same_weights(grpo.model, TinyModel())


def test_correction_requires_an_engine_that_records_logprobs():
    with pytest.raises(WhetValueError, match=mentions("sampler_correction", "log-probs")):
        make(sampler_correction="token_mask").train_step(PROMPTS)


@pytest.mark.parametrize("make_model", [TinyModel, tiny_llama])
def test_results_do_not_depend_on_padding(make_model):
    forms = [padded(PROMPTS, left=True), padded(PROMPTS, left=False), [torch.tensor(p) for p in PROMPTS], PROMPTS]
    results = []
    for batch in (*forms, [{"prompt": p} for p in PROMPTS]):
        grpo = GRPO(
            make_model(), reward_fn=fours, group_size=4, max_new_tokens=5, learning_rate=0.01, stop_token_ids=[EOS]
        )
        metrics = [grpo.train_step(batch) for _ in range(2)]
        results.append(([(m["loss"], m["mean_reward"]) for m in metrics], grpo.model))
    for metrics, model in results[1:]:
        assert metrics == results[0][0]
        assert_same_weights(model, results[0][1])


def test_zero_variance_groups_are_counted_or_filtered():
    same = [GROUPS[0], [[4, EOS], [4, EOS], [4, 9]]]
    counted = make(engine=ScriptedEngine(same), reward_fn=fours)
    filtered = make(engine=ScriptedEngine(same), reward_fn=fours, filter_zero_variance=True)
    single = make(engine=ScriptedEngine(same[:1]), reward_fn=fours)
    losses = [m["loss"] for m in (counted.train_step(PROMPTS), filtered.train_step(PROMPTS))]
    assert counted.last_completions[3]["advantage"] == 0
    assert losses[1] == pytest.approx(single.train_step(PROMPTS[:1])["loss"])
    assert losses[0] == pytest.approx(losses[1] * 9 / 15)  # the 6 tokens of the other group count in the mean
    assert_same_weights(filtered.model, single.model)


def test_a_batch_of_zero_variance_groups_leaves_the_weights_unchanged():
    grpo = make(reward_fn=lambda completions: [1.0] * 6, filter_zero_variance=True)
    metrics = grpo.train_step(PROMPTS)
    assert metrics["loss"] == 0 and metrics["frac_reward_zero_std"] == 1 and metrics["skipped_steps"] == 0
    assert grpo.step == 1 and grpo.n_updates == 0
    assert_same_weights(grpo.model, TinyModel())


def test_group_size_one_is_rejected():
    with pytest.raises(WhetValueError, match=mentions("group_size", 1, "an integer >= 2")):
        make(group_size=1)


def test_truncated_completions_can_be_excluded():
    ended = [[c for c in group if c[-1] == EOS] for group in GROUPS]
    masked = make(mask_truncated_completions=True, scale_rewards="none")
    metrics = masked.train_step(PROMPTS)
    advantages = [row["advantage"] for row in masked.last_completions if row["completion"][-1] == EOS]
    rows = [(p, c) for p, group in zip(PROMPTS, ended, strict=True) for c in group]
    n_tokens = sum(len(c) for _, c in rows)
    assert metrics["loss"] == pytest.approx(
        -sum(a * len(c) for a, (_, c) in zip(advantages, rows, strict=True)) / n_tokens
    )
    assert metrics["completions/clipped_ratio"] == 2 / 6


def test_many_truncated_completions_give_one_warning():
    truncated = [[[4, 4, 4, 4], [8, EOS], [9, 4, 9, 9]], [[4, EOS], [EOS], [10, 11, 4, EOS]]]
    trainer = make(engine=ScriptedEngine(truncated))
    with pytest.warns(UserWarning, match=mentions("max_new_tokens=4", "33%")):
        trainer.train_step(PROMPTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.train_step(PROMPTS)
        make(engine=ScriptedEngine([[[4, 4, EOS]] * 3, [[4, EOS], [EOS], [9, 4, 9, 9]]])).train_step(PROMPTS)


def test_rewards_get_columns_and_apply_weights():
    def matches(prompts, completions, completion_ids, answer):
        assert [p.tolist() for p in prompts[::3]] == PROMPTS
        assert completion_ids == [c.tolist() for c in completions]
        return [None if a == "unknown" else float(c[0] == a) for c, a in zip(completions, answer, strict=True)]

    async def length(completions):
        return [len(c) for c in completions]

    rows = [{"prompt": PROMPTS[0], "answer": 4}, {"prompt": PROMPTS[1], "answer": "unknown"}]
    grpo = make(reward_fn=[matches, length], reward_weights=[10.0, 0.5])
    metrics = grpo.train_step(rows)
    assert [row["reward"] for row in grpo.last_completions] == [11.5, 1.0, 2.0, 1.0, 0.5, 1.5]
    assert metrics["rewards/matches/mean"] == pytest.approx(1 / 3) and metrics["rewards/length/mean"] == 2.5
    prepared = RewardFunctions([matches, length], weights=[10.0, 0.5])
    for settings in ({}, {"reward_weights": [10.0, 0.5]}):
        assert make(reward_fn=prepared, **settings).train_step(rows)["mean_reward"] == metrics["mean_reward"]


@pytest.mark.parametrize(
    ("setting", "own"),
    [
        ({"reward_weights": [1.0]}, "[2.0]"),
        ({"reward_policy": "skip"}, "'zero'"),
        ({"reward_timeout_s": 5.0}, "None"),
    ],
)
def test_reward_settings_that_contradict_reward_functions_are_rejected(setting, own):
    prepared = RewardFunctions(fours, weights=[2.0], on_error="zero")
    with pytest.raises(WhetValueError, match=mentions("GRPOConfig", next(iter(setting)), "RewardFunctions", own)):
        make(reward_fn=prepared, **setting)


def test_unscored_completions_have_advantage_zero():
    grpo = make(reward_fn=lambda completions: [1.0, 3.0, None, None, None, None])
    metrics = grpo.train_step(PROMPTS)
    assert [row["advantage"] for row in grpo.last_completions] == pytest.approx([-1, 1, 0, 0, 0, 0])
    assert metrics["mean_reward"] == 2.0 and metrics["frac_reward_zero_std"] == 0.5
    silent = make(reward_fn=lambda completions: [None] * 6).train_step(PROMPTS)
    assert math.isnan(silent["mean_reward"]) and silent["loss"] == 0


def test_advantage_options_match_trl():
    grpo = make(advantage_ddof=1, advantage_eps=1e-4)
    grpo.train_step(PROMPTS)
    rewards = np.array([2.0, 0.0, 1.0])
    expected = (rewards - 1) / (rewards.std(ddof=1) + 1e-4)
    assert [row["advantage"] for row in grpo.last_completions[:3]] == pytest.approx(expected.tolist())


def test_text_prompts_give_text_completions_to_rewards():
    seen = {}

    def reward(prompts, completions, answer):
        seen.update(prompts=prompts, completions=completions)
        return [float(c.startswith(a)) for c, a in zip(completions, answer, strict=True)]

    engine = ScriptedEngine([[[4, 5, EOS], [6, EOS]], [[4, EOS], [7, 7]]])
    grpo = make(engine=engine, group_size=2, tokenizer=letters_tokenizer(), reward_fn=reward)
    metrics = grpo.train_step([{"prompt": "ab", "answer": "a"}, {"prompt": "h", "answer": "dd"}])
    assert seen == {"prompts": ["ab", "ab", "h", "h"], "completions": ["ab", "c", "a", "dd"]}
    assert engine.asked[0][0] == [[4, 5], [11]]
    assert engine.asked[0][2].stop_token_ids == (EOS,)
    assert metrics["mean_reward"] == 0.5
    assert grpo.last_completions[3]["completion"] == "dd"


def test_equal_seeds_give_equal_runs():
    runs = []
    for seed in (0, 0, 1):
        grpo = make(engine="auto", seed=seed)
        runs.append([grpo.train_step(PROMPTS)["mean_reward"] for _ in range(3)] + grpo.last_completions)
    assert runs[0] == runs[1] != runs[2]


def test_each_step_samples_new_completions_with_current_weights():
    engine = ScriptedEngine(GROUPS)
    grpo = make(engine=engine)
    for _ in range(3):
        grpo.train_step(PROMPTS)
    assert len({asked[2].seed for asked in engine.asked}) == 3
    assert engine.policy_version == 3


CHATS = [[{"role": "user", "content": "ab"}], [{"role": "user", "content": "h"}]]


@pytest.mark.parametrize(
    ("batch", "columns"),
    [
        (["ab", "h"], {}),
        (("ab", "h"), {}),
        (np.array(["ab", "h"]), {}),
        ({"prompt": np.array(["ab", "h"]), "n": np.array([1, 2])}, {"n": [1, 2]}),
        ([{"prompt": "ab", "n": 1}, {"prompt": "h"}], {"n": [1, None]}),
        ({"prompt": ["ab", "h"], "n": torch.tensor([1, 2])}, {"n": [1, 2]}),
        ([{"input_ids": [0, 4, 5], "attention_mask": [0, 1, 1]}, {"input_ids": [11]}], {}),
        ({"input_ids": [[4, 5], [11]], "n": [1, 2]}, {"n": [1, 2]}),
        ([("ab",), ("h",)], {}),
        ([[4, 5], [11]], {}),
        (
            [{"prompt": CHATS[0], "chat_template_kwargs": {}}, {"prompt": CHATS[1]}],
            {"chat_template_kwargs": [{}, None]},
        ),
        (CHATS, {}),
    ],
    ids=repr,
)
def test_accepts_every_form_of_a_batch_of_prompts(batch, columns):
    tokenizer = letters_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    prompts = read_prompts(batch, tokenizer, "Test")
    assert prompts.ids == [[4, 5], [11]] and prompts.columns == columns
    chats = isinstance(prompts.decoded[0], list)
    assert prompts.decoded == (CHATS if chats else ["ab", "h"])
    assert read_prompts("ab", tokenizer, "Test").ids == read_prompts(CHATS[0], tokenizer, "Test").ids == [[4, 5]]


def test_tools_reach_the_chat_template_and_the_reward_functions():
    seen = []

    def reward(completions, tools):
        seen.extend(tools)
        return [0.0] * len(completions)

    tokenizer = letters_tokenizer()
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.name }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}{{ end }}"
    )
    rows = [
        {"prompt": CHATS[0], "tools": [{"name": "a"}], "chat_template_kwargs": {"end": "c"}},
        {"prompt": CHATS[1], "tools": None, "chat_template_kwargs": None},
    ]
    grpo = make(tokenizer=tokenizer, reward_fn=reward)
    grpo.train_step(rows)
    assert grpo.engine.asked[0][0] == [[4, 4, 5, 6], [11]] and seen == [[{"name": "a"}]] * 3 + [None] * 3


@pytest.mark.parametrize(
    ("batch", "error", "facts"),
    [
        ([], WhetValueError, ("Test", "empty")),
        (torch.zeros(0, 3).long(), WhetValueError, ("Test", "empty")),
        ("", WhetTypeError, ("tokenizer",)),
        (None, WhetTypeError, ("Test", "None", "list of rows", "dict of columns", "token")),
        (5, WhetTypeError, ("Test", "5", "list of rows")),
        (iter([[5]]), WhetTypeError, ("Test", "<list_iterator", "list(batch)")),
        ({"input_ids": "ab"}, WhetTypeError, ("field", "'ab'")),
        (torch.tensor(5), WhetValueError, ("row 0", "0 axes")),
        (torch.ones(2, 2), WhetTypeError, ("row 0", "float64", "token ids")),
        ([1.5, 2.5], WhetTypeError, ("field", "1.5")),
        ([None, "a"], WhetValueError, ("'prompt'",)),
        (["a", 5], WhetTypeError, ("tokenizer",)),
        ([{"prompt": []}], WhetValueError, ("prompt", "empty")),
        ({"input_ids": [[4], [5]], "n": [1]}, WhetValueError, ("Test", "n has", 1, "2 prompts")),
        ({"prompt": ["a", "b"], "n": [1]}, WhetTypeError, ("field", "['a', 'b']", "per row")),
        ({"question": ["a"]}, WhetValueError, ("'prompt'", "'question'")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_invalid_batches_of_prompts_are_rejected(batch, error, facts):
    assert_raises(error, facts, read_prompts, batch, None, "Test")


@pytest.mark.parametrize("make_model", [TinyModel, tiny_llama])
def test_evaluation_is_the_mean_reward_of_one_completion_per_prompt_and_changes_nothing(make_model):
    prompts = torch.tensor([[5, 6], [7, 8], [9, 5], [5, 5], [6, 4]])
    settings = {"engine": "auto", "batch_size": 2, "max_new_tokens": 6}
    evaluated, plain = make(make_model(), **settings), make(make_model(), **settings)
    scores = []

    def recording(completions):
        scores.extend(fours(completions))
        return fours(completions)

    state = torch.get_rng_state()
    found = evaluated.evaluate(prompts, reward_fn=recording)
    assert isinstance(found, float) and found == pytest.approx(sum(scores) / 5) and len(scores) == 5
    assert evaluated.evaluate(prompts) == found == evaluated.evaluate(p for p in prompts)
    assert evaluated.evaluate(DataLoader(prompts, batch_size=2)) == found
    assert evaluated.evaluate(prompts, temperature=0) == evaluated.evaluate(prompts, temperature=0)
    counters = (evaluated.step, evaluated.position, evaluated.num_tokens, evaluated.n_updates)
    assert counters == (0, 0, 0, 0) and evaluated.last_completions == [] and not evaluated.policy.optimizer.state
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_weights(evaluated.model, make_model())
    for _ in range(3):
        plain.train(prompts, steps=1)
        evaluated.train(prompts, steps=1)
        evaluated.evaluate(prompts)
    assert_same_weights(evaluated.model, plain.model)


def test_evaluation_calls_the_engine_with_its_temperature():
    engine = Recorded(make(engine="auto").engine)
    grpo = make(engine=engine, batch_size=2, temperature=0.7)
    grpo.evaluate([[5], [6], [7]])
    grpo.evaluate([5, 6], temperature=0)
    assert engine.asked == [(2, 1, 0.7), (1, 1, 0.7), (1, 1, 0)] and engine.policy_version == 2


def test_evaluation_metrics():
    def half(completions):
        return [0.5 if (c == 4).any() else None for c in completions]

    grpo = make(reward_fn=[fours, half], engine=ScriptedEngine([[[4, 4]], [[4]], [[5]]]))
    found = grpo.evaluation_metrics([[5], [6], [7]])
    assert found == {"mean_reward": 4 / 3, "rewards/fours/mean": 1.0, "rewards/half/mean": 0.5}
    unscored = make(reward_fn=lambda completions: [None], engine=ScriptedEngine([[[4, 4]]]))
    assert math.isnan(unscored.evaluate([[5]]))
    assert_raises(WhetValueError, ("GRPO.evaluate", "empty"), grpo.evaluate, [])
    with pytest.raises(WhetTypeError, match=mentions("GRPO.evaluate", "dataset", "None", "a sequence or iterable")):
        grpo.evaluate(None)
    assert_raises(WhetValueError, ("temperature", -1), grpo.evaluate, [[5]], temperature=-1)


def test_beta_zero_needs_no_reference():
    assert make().ref_model is None
    grpo = make(beta=0.1)
    assert grpo.ref_model is not grpo.model
    assert not any(p.requires_grad for p in grpo.ref_model.parameters())
    assert "kl" not in make().train_step(PROMPTS)


def test_the_reference_of_a_peft_model_is_its_base():
    base, model = tiny_llama(), with_lora(tiny_llama())
    grpo = make(model, kl_coef=0.5)
    assert grpo.ref_model is None
    first = grpo.train_step(PROMPTS)
    assert first["mean_kl"] == pytest.approx(0.0, abs=1e-6)  # adapters start at zero
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    second = grpo.train_step(PROMPTS)
    assert second["mean_kl"] > 1e-6
    expected = []
    with torch.no_grad():
        for p, c in ROWS:
            gap = token_logprobs(base, p, c) - token_logprobs(model, p, c)
            expected.append((gap.exp() - gap - 1).sum().item())
    third = grpo.train_step(PROMPTS)
    assert third["mean_kl"] == pytest.approx(sum(expected) / 6, rel=1e-3)
    for name, value in frozen.items():
        assert torch.equal(dict(model.named_parameters())[name], value)


@pytest.mark.parametrize("make_model", [TinyModel, tiny_llama, lambda: with_lora(tiny_llama())])
def test_it_learns(make_model):
    """Hugging Face models train on the native engine."""
    torch.manual_seed(0)
    grpo = GRPO(
        make_model(), reward_fn=first_is_four, group_size=8, max_new_tokens=2, learning_rate=0.05, loss_type="dr_grpo"
    )
    assert isinstance(grpo.engine, TorchEngine if make_model is TinyModel else Engine)
    history = [grpo.train_step([[5], [6], [7]])["mean_reward"] for _ in range(40)]
    assert history[0] < 0.4 and np.mean(history[-5:]) > 0.9


def test_a_failing_reward_function_leaves_the_trainer_unchanged():
    def broken(completions):
        raise KeyError("no such answer")

    grpo = make(reward_fn=broken)
    assert_raises(RewardError, ("broken", "failed"), grpo.train_step, PROMPTS)
    assert grpo.step == 0
    assert_same_weights(grpo.model, TinyModel())
    skipping = make(reward_fn=broken, reward_policy="skip")
    with pytest.warns(UserWarning, match=mentions("broken", "failed")):
        assert skipping.train_step(PROMPTS)["reward_errors"] == 6


def test_invalid_arguments_are_rejected():
    assert_raises(WhetTypeError, ("GRPO", "reward_fn"), GRPO, TinyModel())
    assert_raises(WhetTypeError, ("kl_coef", "beta", "setting"), make, kl_coef=0.1, beta=0.1)
    assert_raises(WhetTypeError, ("'group_sise'", "group_size"), make, group_sise=4)
    assert_raises(WhetValueError, ("engine", "'vllm'", "one of 'auto', 'native'"), make, engine="vllm")
    with pytest.raises(WhetTypeError, match=mentions("GRPO", "engine", "3", "'auto', 'native', 'torch', 'ray'")):
        make(engine=3)
    assert_raises(WhetValueError, ("loss_type", "'ppo'", "one of 'grpo'"), make, loss_type="ppo")
    assert_raises(WhetValueError, ("temperature", "0.0", "a finite number > 0"), GRPOConfig, temperature=0.0)
    assert_raises(WhetValueError, ("GRPO", "batch", "empty"), make().train_step, [])
    for settings in ({"level": "sequence"}, {"level": "sequence_product"}, {"loss_type": "gmpo"}):
        assert_raises(WhetValueError, ("top_entropy_quantile", "0.2"), make, top_entropy_quantile=0.2, **settings)
    assert_raises(WhetValueError, ("entropy_coef", "-0.1"), make, entropy_coef=-0.1)


def test_nan_weights_end_in_an_error():
    model = TinyModel()
    with torch.no_grad():
        model.head.bias[0] = math.nan
    grpo = make(model, max_skipped_steps=2)
    assert math.isnan(grpo.train_step(PROMPTS)["loss"])
    assert_raises(NonFiniteError, ("2 updates", "row"), grpo.train_step, PROMPTS)


def test_the_loss_of_a_step_is_grpo_loss():
    model = TinyModel()
    parts = [token_logprobs(model, p, c) for p, c in ROWS]
    logprobs = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    mask = torch.arange(4) < torch.tensor([[len(c)] for _, c in ROWS])
    grpo = make(model, loss_type="dr_grpo", level="sequence")
    metrics = grpo.train_step(PROMPTS)
    advantages = torch.tensor([row["advantage"] for row in grpo.last_completions], dtype=torch.float64)
    expected_loss, _ = grpo_loss(
        logprobs.detach(), None, advantages, mask, loss_type="dr_grpo", level="sequence", max_completion_length=4
    )
    assert metrics["loss"] == pytest.approx(expected_loss.item(), rel=1e-9)
