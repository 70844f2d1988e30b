"""The grpo and dpo suites: correct first steps pass, wrong ones do not, and a failing trainer is only an error."""

import importlib.util
import math
import os
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.benchmarks.unruly import broken, waiting
from tests.representatives import cases

from benchmarks.contenders.training import native, workload
from benchmarks.contenders.training.contender import Contender
from benchmarks.contenders.training.workload import DPOShape, GRPOShape, dpo_error, grpo_error, grpo_written_out
from benchmarks.suites import dpo, grpo, impact
from whet.bench import BenchOptions
from whet.bench.case import Timed
from whet.bench.machine import cpu_seconds

torch.set_num_threads(1)

GRPO = GRPOShape(grpo.TINY, n_prompts=2, group_size=4, prompt_length=9, completion_length=12, seed=3)
RAGGED = GRPOShape(grpo.TINY, n_prompts=2, group_size=4, prompt_length=9, completion_length=40, mean_length=8, seed=3)
KL = replace(GRPO, beta=workload.GRPO_BETA)
PAIRS = DPOShape(grpo.TINY, n_pairs=3, prompt_length=9, completion_length=12, seed=3)
CASES = {
    "grpo": (native.serve_grpo, GRPO, grpo_error),
    "ragged grpo": (native.serve_grpo, RAGGED, grpo_error),
    "grpo with KL": (native.serve_grpo, KL, grpo_error),
    "dpo": (native.serve_dpo, PAIRS, dpo_error),
}


@pytest.fixture(scope="module", params=cases(CASES, lambda name: name in ("grpo with KL", "dpo")))
def first_step(request):
    serve, shape, error = CASES[request.param]
    contender = Contender(serve, shape, {"compute": "float32"})
    return contender, contender(), shape, error


def test_first_step_of_whet_equals_the_reference(first_step):
    contender, first, shape, error = first_step
    assert isinstance(first, Timed) and error(first.value, shape) < 1e-4
    assert {"forward", "backward", "optimizer"} <= set(first.parts)
    assert first.peak_bytes is None or 0 < first.peak_bytes < 2 << 30
    started, cpu_s = time.perf_counter(), cpu_seconds()
    again = contender()
    elapsed_s = time.perf_counter() - started
    assert sum(again.parts.values()) <= elapsed_s
    assert cpu_seconds() - cpu_s <= 2 * elapsed_s * len(os.sched_getaffinity(0)) + 0.1


def test_step_reports_all_its_parts():
    names = {"sync", "generation", "reward", "advantages", "forward", "loss", "backward", "optimizer"}
    without, step = (Contender(native.serve_grpo, shape, {"compute": "float32"})() for shape in (GRPO, KL))
    assert set(without.parts) == names and set(step.parts) == names | {"logprobs", "kl"}
    assert all(part_s > 0 for part_s in step.parts.values())
    assert grpo_error(without.value, KL) == pytest.approx(1, rel=1e-3)  # its loss lacks the KL term


@pytest.mark.parametrize("field", ["loss", "grad_norm", "moved"])
def test_error_depends_on_every_figure(first_step, field):
    _, first, shape, error = first_step
    right = getattr(first.value, field)
    for wrong in (right * 1.1 + 0.1 * (field == "loss"), math.nan):
        assert not error(first.value._replace(**{field: wrong}), shape) < 0.05


def test_completions_of_wrong_lengths_are_an_error(first_step):
    _, first, shape, error = first_step
    rows = first.value.completion_ids
    if not rows:
        pytest.skip("DPO samples nothing")
    assert error(first.value._replace(completion_ids=rows[:-1]), shape) == math.inf
    assert error(first.value._replace(completion_ids=[[], *rows[1:]]), shape) == math.inf
    assert error(first.value._replace(completion_ids=[[*rows[0]] * 50, *rows[1:]]), shape) == math.inf


def test_too_probable_tokens_are_not_samples(first_step):
    _, first, shape, _ = first_step
    rows = first.value.completion_ids
    if not rows:
        pytest.skip("DPO samples nothing")
    assert abs(grpo_written_out(rows, shape).surprise) < 4
    policy, tokenizer = workload.policy_of(shape.model), workload.tokenizer_of(shape)
    prompt = torch.tensor([tokenizer(shape.prompts(0)[0])["input_ids"]])
    best = policy(prompt).logits[0, -1].argmax().item()
    likely = [[best, *row[1:]] for row in rows[: shape.group_size]] + list(rows[shape.group_size :])
    assert grpo_written_out(likely, shape).surprise > 2 + grpo_written_out(rows, shape).surprise


def test_prompts_have_the_requested_lengths():
    tokenizer = workload.tokenizer_of(GRPO)
    first, second = ([tokenizer(text)["input_ids"] for text in GRPO.prompts(step)] for step in (0, 1))
    assert [len(row) for row in first] == [9, 9] and first != second
    assert tokenizer.eos_token_id == GRPO.model.config.vocab_size
    pairs, tokenizer = PAIRS.pairs(), workload.tokenizer_of(PAIRS)
    ids = tokenizer(pairs[0]["chosen"] + tokenizer.eos_token)["input_ids"]
    assert len(ids) == 12 and ids[-1] == tokenizer.eos_token_id < PAIRS.model.config.vocab_size


def test_mean_of_geometric_lengths():
    shape = GRPOShape(mean_length=64, completion_length=10_000)
    assert shape.n_tokens == pytest.approx(shape.n_completions * (128 + 64), rel=1e-3)
    assert len(shape.stop_ids) == round(shape.model.config.vocab_size / 64)
    assert GRPOShape().stop_ids == [] and GRPOShape().n_tokens == 32 * 256


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("before", ImportError, "not found"),
        ("raises", ValueError, "the step is broken"),
        ("dies", RuntimeError, "ended with status 3"),
    ],
)
def test_failing_trainer_is_an_error(how, error, message):
    with pytest.raises(error, match=message) as caught:
        Contender(broken, how)()
    assert how != "before" or caught.value.name == "trl"


def test_process_exits_with_the_contender(tmp_path):
    contender = Contender(waiting, tmp_path / "word")
    pid = contender().value
    os.kill(pid, 0)
    del contender
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert (tmp_path / "word").read_text() == "left"


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.parametrize(
    ("suite", "shape", "error", "part"),
    cases(
        [(grpo, GRPO, grpo_error, "forward"), (grpo, KL, grpo_error, "forward"), (dpo, PAIRS, dpo_error, "loss")],
        lambda case: case[1] is KL,
    ),
)
def test_trl_takes_the_same_step(suite, shape, error, part):
    (table,) = suite.tables(BenchOptions(quick=True))
    assert suite.TRL in table.providers
    answer = suite.TRL_FLOAT32.prepare(shape)()
    assert error(answer.value, shape) < 1e-4
    assert {part, "backward", "optimizer"} <= set(answer.parts)


def test_impact_has_the_kl_steps_of_grpo():
    quick, full = (impact.tables(BenchOptions(quick=flag)) for flag in (True, False))
    assert [len(table.cases) for table in quick] == [3] and [len(table.cases) for table in full] == [3, 1]
    assert all(table.providers == [grpo.WHET] for table in (*quick, *full))
    assert full[0].cases[2].n_items == 4 * 8 * (128 + 128) and quick[0].cases[0].n_items == 2 * 2 * (16 + 16)
    (with_kl,) = [table for table in grpo.tables(BenchOptions()) if "KL" in table.title]
    assert with_kl.providers == [grpo.WHET, grpo.TRL]
    # The reference's forward pass in addition to sampling, forward, and twice as much for backward.
    shape = full[0].cases[2].inputs(np.random.default_rng(0))
    assert shape == with_kl.cases[0].inputs(np.random.default_rng(0)) and shape.beta == 0.04
    assert full[0].cases[2].n_flops == pytest.approx(5 / 4 * GRPOShape().n_flops)
