"""Times in a step's metrics: the phases of each algorithm, which add up to the step."""

from __future__ import annotations

import pytest
import torch
from tests.clock import Clock
from tests.tiny import EOS, ScriptedEngine, TinyModel, fours, token_logprobs

from whet.algorithms import DPO, GRPO, SFT, OnlineDPO
from whet.training.loggers import main_metrics

PROMPTS = [[5, 6], [7]]
GROUPS = [[[4, 4, EOS], [8, EOS]], [[4, EOS], [EOS]]]
UPDATE = {"forward", "loss", "backward", "optimizer", "other"}
SAMPLE = {"sync", "generation"}
CLOCK = Clock()


@pytest.fixture(autouse=True)
def planted_clock(monkeypatch):
    monkeypatch.setattr("whet.training.phases.time", CLOCK)


class SlowEngine(ScriptedEngine):
    """Engine that takes 20 ms to sync and 30 ms to sample."""

    def sync(self, model):
        CLOCK.sleep(0.02)
        super().sync(model)

    def generate(self, prompt_ids, n, sampling):
        CLOCK.sleep(0.03)
        return super().generate(prompt_ids, n, sampling)


def parts(metrics):
    """Return the phases of a step, and check their sum."""
    found = {name[5:-2]: value for name, value in metrics.items() if name.startswith("time/")}
    assert all(name == f"time/{name[5:-2]}_s" for name in metrics if name.startswith("time/"))
    assert sum(found.values()) == pytest.approx(metrics["step_time_s"], rel=0, abs=1e-9)
    assert all(value > 0 for value in found.values())
    return found


def online(algorithm, **settings):
    settings = {"engine": SlowEngine(GROUPS), "max_new_tokens": 4} | settings
    return algorithm(TinyModel(), **settings)


def test_grpo_has_every_phase():
    grpo = online(GRPO, reward_fn=fours, group_size=2, beta=0.1, micro_batch_size=1, num_iterations=2)
    metrics = grpo.train_step(PROMPTS)
    found = parts(metrics)
    assert found.keys() == UPDATE | SAMPLE | {"reward", "advantages", "logprobs", "kl"}
    assert found["sync"] >= 0.02 and found["generation"] >= 0.03
    assert found["other"] < 0.02


def test_without_a_reference_grpo_has_neither_logprobs_nor_kl():
    metrics = online(GRPO, reward_fn=fours, group_size=2).train_step(PROMPTS)
    assert parts(metrics).keys() == UPDATE | SAMPLE | {"reward", "advantages"}


def test_old_logprobs_count_as_logprobs():
    sampled = [
        [token_logprobs(TinyModel(), p, c).detach().tolist() for c in group]
        for p, group in zip(PROMPTS, GROUPS, strict=True)
    ]
    engine = SlowEngine(GROUPS, sampled)
    settings = {"reward_fn": fours, "group_size": 2, "engine": engine}
    metrics = online(GRPO, sampler_correction="token_mask", **settings).train_step(PROMPTS)
    assert parts(metrics).keys() == UPDATE | SAMPLE | {"reward", "advantages", "logprobs"}
    # Truncation rejects nothing: the first update's log-probs serve as old log-probs.
    metrics = online(GRPO, sampler_correction="token_truncate", **settings).train_step(PROMPTS)
    assert parts(metrics).keys() == UPDATE | SAMPLE | {"reward", "advantages"}
    assert metrics["sampler/importance_weight"] == pytest.approx(1, abs=1e-5)


def test_reward_time_is_the_time_of_the_reward_function():
    def slow(completions):
        CLOCK.sleep(0.03)
        return fours(completions)

    found = parts(online(GRPO, reward_fn=slow, group_size=2).train_step(PROMPTS))
    assert found["reward"] >= 0.03 > found["other"]


@pytest.mark.parametrize("judge", [{"reward_fn": fours}, {"preference_fn": lambda pairs: [0] * len(pairs)}])
def test_phases_of_online_dpo(judge):
    metrics = online(OnlineDPO, **judge).train_step(PROMPTS)
    assert parts(metrics).keys() == UPDATE | SAMPLE | {"reward", "logprobs"}


def test_a_step_without_an_update_has_no_update_phases():
    metrics = online(OnlineDPO, preference_fn=lambda pairs: [None] * len(pairs)).train_step(PROMPTS)
    assert parts(metrics).keys() == SAMPLE | {"reward", "other"}


def test_phases_of_dpo_and_sft():
    dpo = DPO(TinyModel()).train_step(PROMPTS, [[4, EOS], [9]], [[10], [4, 4]])
    assert parts(dpo).keys() == UPDATE | {"logprobs"}
    assert parts(SFT(TinyModel()).train_step(PROMPTS, [[4, EOS], [9]])).keys() == UPDATE


def test_the_backward_pass_has_its_phase():
    class SlowBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            CLOCK.sleep(0.03)
            return grad

    class Slow(TinyModel):
        def forward(self, input_ids):
            CLOCK.sleep(0.02)
            return SlowBackward.apply(super().forward(input_ids))

    found = parts(SFT(Slow()).train_step(PROMPTS, [[4, EOS], [9]]))
    assert found["forward"] >= 0.02 and found["backward"] >= 0.03 > found["other"] + found["loss"] + found["optimizer"]


def test_phases_are_not_main_metrics():
    metrics = SFT(TinyModel()).train_step(PROMPTS, [[4, EOS], [9]])
    assert main_metrics(metrics).keys() == {"loss", "lr", "tokens/s"}
