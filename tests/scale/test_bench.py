"""Rows of `whet bench scale` run."""

import pytest
from tests.benchmarks.serving import serve_here
from tests.scale.test_ray_pool import cluster  # noqa: F401

from benchmarks.contenders import scale
from benchmarks.contenders.scale import Sampling, wrong_steps
from benchmarks.contenders.training import native
from benchmarks.contenders.training.contender import RankedContender
from benchmarks.contenders.training.lora import Weights, Work, run_error, run_steps, run_whole
from benchmarks.contenders.training.workload import GRPOShape
from benchmarks.suites import scale as suite
from benchmarks.suites.grpo import TINY
from whet.bench.harness import QUICK, run_case

pytestmark = pytest.mark.needs("ray")


def test_two_ranks_compute_the_step_of_one_process():
    shape = GRPOShape(TINY, n_prompts=2, group_size=4, prompt_length=9, completion_length=12, seed=3)
    weights = Weights.random(TINY)  # on disk while referenced
    work = Work.of_shape("grpo", weights, shape, n_steps=2, seed=1)
    settings = {"base": "", "compute": "float32"}
    one = run_whole(native.serve_lora, work, settings)

    def start(*arguments):
        return RankedContender(2, 1, native.serve_lora, *arguments)

    two = run_steps(start, work, {**settings, "deterministic_reduction": True})
    assert run_error(one.value, work) == run_error(two.value, work) == 0
    assert two.value.steps[0].grad_norm == pytest.approx(one.value.steps[0].grad_norm, rel=1e-5)
    assert len(two.samples_s) == 1 and two.start_s > 0 and (two.peak_bytes is None or two.peak_bytes > 0)


@pytest.mark.parametrize("workers", [False, True])
def test_an_engine_and_a_pool_sample_a_batch(cluster, workers):  # noqa: F811
    work = Sampling(GRPOShape(TINY, n_prompts=3, group_size=4, prompt_length=9, completion_length=12), 2)
    steps = serve_here(scale.serve_sampling, 2, work, workers)
    assert wrong_steps(steps, work) == 0 and all(step.seconds > 0 for step in steps)


@pytest.mark.parametrize("base", ["", "bf16", "none"])
def test_weights_are_synced_to_all_workers(cluster, base):  # noqa: F811
    work = Sampling(GRPOShape(TINY, n_prompts=1, group_size=2, prompt_length=9), 2, base)
    steps = serve_here(scale.serve_weights, 2, work)
    assert wrong_steps(steps, work) == 0 and all(step.seconds > 0 for step in steps)


def test_the_cost_of_a_killed_worker_is_measured(cluster):  # noqa: F811
    [table] = [t for t in suite.tables(suite.ScaleOptions(quick=True, steps=2)) if t.title.startswith("Time lost")]
    work = table.cases[0].inputs(None)
    steps = serve_here(scale.serve_killed, 2, work)
    assert wrong_steps(steps, work) == 0
    assert max(step.seconds for step in steps) > 0  # a difference: other load can make one of them negative


def test_simulated_workers_give_a_row():
    [table] = [t for t in suite.tables(suite.ScaleOptions(quick=True, steps=2)) if t.title.startswith("Control")]
    [row] = run_case(table, table.cases[0], table.providers, 2, QUICK, 0).rows
    assert (row.status, row.error) == ("measured", 0), row.why
    [cpu_s], [waiting_s] = row.parts["driver's CPU"], row.parts["waiting"]
    assert cpu_s > 0 and cpu_s + waiting_s == pytest.approx(row.samples_s[0])
