"""The impact suite: a step that is right passes, and one that is broken in any of its parts does not."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from whet.bench import BenchOptions, Provider, Timed
from whet.bench.harness import Effort, run_case
from whet.bench.suites import load_suite
from whet.bench.suites.impact import (
    Step,
    StepInputs,
    StepShape,
    step_case,
    step_error,
    step_table,
    whet_step,
    written_out,
)
from whet.rollout.torch_engine import TorchEngine
from whet.sampling import SamplingParams

torch.set_num_threads(1)

SHAPE = StepShape(
    hidden_dim=64, n_layers=1, vocab_size=256, n_prompts=2, group_size=4, prompt_length=6, completion_length=12
)


@pytest.fixture(scope="module")
def inputs():
    return StepInputs(SHAPE, np.random.default_rng(0))


@pytest.fixture(scope="module")
def step(inputs):
    return whet_step(inputs)().value


def test_whets_step_is_the_one_written_out(inputs, step):
    assert step_error(step, inputs) < 1e-4
    right = written_out(step.completion_ids, inputs)
    assert right.figures["kl"] > 1e-3 and right.moved > 0
    # Half of the tokens are even: of 96, the share is within 6 standard errors.
    assert right.figures["mean_reward"] == pytest.approx(0.5, abs=6 * 0.5 / 96**0.5)


@pytest.mark.parametrize("name", ["loss", "kl", "entropy", "grad_norm", "mean_reward"])
def test_every_figure_counts(inputs, step, name):
    for wrong in (step.figures[name] * 1.01, float("nan")):
        assert step_error(step._replace(figures={**step.figures, name: wrong}), inputs) > 5e-3


def test_a_step_that_leaves_the_weights_alone_is_wrong(inputs, step):
    assert step_error(step._replace(model=inputs.policy), inputs) == 1.0


def test_completions_of_another_length_are_wrong(inputs, step):
    ids = [list(step.completion_ids[0])[:-1], *step.completion_ids[1:]]
    assert step_error(step._replace(completion_ids=ids), inputs) == float("inf")
    assert step_error(step._replace(completion_ids=step.completion_ids[1:]), inputs) == float("inf")


def test_tokens_sampled_otherwise_are_found(inputs, step):
    assert abs(written_out(step.completion_ids, inputs).surprise) < 4
    sampling = SamplingParams(temperature=0.2, max_new_tokens=SHAPE.completion_length)
    groups = TorchEngine(inputs.policy).generate(inputs.prompt_ids, SHAPE.group_size, sampling)
    ids = [completion.token_ids for group in groups for completion in group]
    right = written_out(ids, inputs)
    assert right.surprise > 6
    assert step_error(Step(ids, right.figures, step.model), inputs) == float("inf")


def test_providers_start_from_the_same_weights(inputs):
    before = [parameter.clone() for parameter in inputs.policy.parameters()]
    first, second = whet_step(inputs)().value, whet_step(inputs)().value
    assert first.completion_ids == second.completion_ids and first.figures == second.figures
    assert all(map(torch.equal, before, inputs.policy.parameters()))


def test_a_group_without_spread_has_no_advantages(monkeypatch):
    monkeypatch.setattr("whet.bench.suites.impact.even_tokens", lambda completions: [0.5] * len(completions))
    inputs = StepInputs(SHAPE, np.random.default_rng(0))
    step = whet_step(inputs)().value
    assert step_error(step, inputs) < 1e-4
    assert written_out(step.completion_ids, inputs).figures["loss"] == pytest.approx(
        0.04 * step.figures["kl"], rel=1e-5
    )


def test_every_call_does_the_same_work(inputs):
    call = whet_step(inputs)
    steps = [call().value for _ in range(3)]
    lengths = [[len(row) for row in step.completion_ids] for step in steps]
    assert lengths == [[SHAPE.completion_length] * SHAPE.n_completions] * 3
    assert steps[0].completion_ids != steps[1].completion_ids


def test_the_parameters_are_counted_right(inputs):
    for shape in (SHAPE, replace(SHAPE, hidden_dim=128, n_layers=2)):
        model = StepInputs(shape, np.random.default_rng(0)).policy
        assert shape.n_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert "1 layers of 64, vocabulary 256; 6 + 12 tokens" in SHAPE.describe()


def test_the_harness_keeps_the_parts_of_every_sample():
    def broken(inputs):
        call = whet_step(inputs)

        def doubled():
            step = call().value
            return Timed(step._replace(figures={**step.figures, "loss": 2 * step.figures["loss"]}), {})

        return doubled

    providers = [Provider("whet", whet_step), Provider("broken", broken)]
    table = step_table("steps", [step_case("small", SHAPE)], providers)
    whet, wrong = run_case(table, table.cases[0], providers, 1, Effort(rounds=2, least_rounds=2, case_s=0.01), 0).rows
    assert whet.status == "measured" and whet.error < 1e-4, whet.why
    names = {"sync", "generation", "reward", "advantages", "logprobs", "forward", "loss", "kl", "backward", "optimizer"}
    assert whet.parts.keys() == names | {"other"}
    for i, sample in enumerate(whet.samples_s):
        assert sum(part[i] for part in whet.parts.values()) == pytest.approx(sample, rel=1e-6)
        assert whet.parts["other"][i] < 0.5 * sample
    assert wrong.status == "wrong" and wrong.error == pytest.approx(1, rel=1e-3)


def test_the_suite_is_found_and_quick_is_smaller():
    suite = load_suite("impact")
    quick, full = (suite.tables(BenchOptions(quick=flag)) for flag in (True, False))
    assert [len(table.cases) for table in quick] == [3] and [len(table.cases) for table in full] == [3, 2]
    assert full[0].cases[2].n_items == 4 * 8 * (64 + 64)
    assert quick[0].cases[0].n_items == 4 * 2 * (16 + 16)
    assert "18.9 M parameters" in full[0].cases[0].note
