"""The scale suite, except its parts that need Ray (tests/scale/test_bench.py)."""

import os

import pytest
from tests.benchmarks.unruly import of_all_ranks, of_own_rank
from tests.raising import mentions

from benchmarks.contenders.scale import Sampling, Taken, n_control_groups, tokens_and_logprobs, wrong_steps
from benchmarks.contenders.training.contender import RankedContender
from benchmarks.contenders.training.workload import GRPOShape
from benchmarks.suites import scale as suite
from benchmarks.suites.grpo import TINY
from whet.errors import WhetValueError

SHAPE = GRPOShape(TINY, n_prompts=2, group_size=4, prompt_length=9, completion_length=12, seed=3)


def test_ranks_have_their_environment_and_step_together():
    before = dict(os.environ)
    ranks = RankedContender(2, 3, of_all_ranks)
    assert dict(os.environ) == before
    step = ranks()
    assert step.value.environment == {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "WHET_NUM_THREADS": "3", "OMP_NUM_THREADS": "3"
    }  # fmt: skip
    assert step.peak_bytes is None or step.peak_bytes > 0


def test_differing_ranks_are_an_error():
    with pytest.raises(RuntimeError, match=mentions("ranks differ", "(0.0, 1.0), (1.0, 1.0)")):
        RankedContender(2, 1, of_own_rank)()


def test_wrong_and_missing_steps_are_counted():
    work = Sampling(SHAPE, n_steps=2)
    groups = work.expected()
    assert groups == work.expected() and [len(group) for group in groups] == [4, 4]
    assert all(len(tokens) == len(logprobs) == 12 for group in groups for tokens, logprobs in group)
    assert work.prompts() == work.prompts() and tokens_and_logprobs([]) == []
    good, bad = Taken(True, 1.0), Taken(False, 1.0)
    assert wrong_steps([good, good], work) == 0
    assert wrong_steps([good, bad], work) == wrong_steps([good], work) == 1


def test_scale_suite_has_every_row():
    tables = {table.title: table for table in suite.tables(suite.ScaleOptions())}
    providers = {title: [provider.name for provider in table.providers] for title, table in tables.items()}
    assert providers["GRPO, 135 M Llama"] == ["whet", "whet, 2 ranks", "whet, 2 ranks, bfloat16 all-reduce"]
    sampled = tables["Sampling by 2 workers of one thread, 135 M Llama"].cases[0]
    assert (sampled.name, sampled.n_items) == ("4 x 8, 128 + 128", 32 * 128)
    full, adapters, beside_floats = tables["New weights to 2 workers, 135 M Llama"].cases
    assert full.n_items == pytest.approx(2e-6 * suite.LLAMA_135M.config.n_parameters)
    assert 1 < adapters.n_items < full.n_items / 10
    assert [case.inputs(None).base for case in (full, adapters, beside_floats)] == ["", "bf16", "none"]
    assert n_control_groups(SHAPE) == 2 * 200 * 16
    with pytest.raises(WhetValueError, match=mentions("whet bench scale:", "steps is 1", "at least 2")):
        suite.tables(suite.ScaleOptions(steps=1))
