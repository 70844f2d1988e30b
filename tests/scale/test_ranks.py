"""Training on several ranks equals training in one process."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.raising import assert_mentions
from tests.scale.ranks import LOSS_TYPES

from whet.rollout.sharded_engine import split_samples
from whet.training.reduction import shard_by_cost

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def run_ranks(
    folder: Path, n: int, launcher: Sequence[str] = TORCHRUN, cases: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Results of each of n ranks; one rank runs without a launcher."""
    out = folder / f"results-{n}"
    command = [*launcher, str(n)] if n > 1 else [sys.executable]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(
        [*command, "-m", "tests.scale.ranks", str(out), *cases],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(n)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    return {n: run_ranks(folder, n) for n in (1, 2, 4)}


def cosine(a: list[list[float]], b: list[list[float]]) -> float:
    flat = [torch.tensor([x for part in side for x in part], dtype=torch.float64) for side in (a, b)]
    return torch.nn.functional.cosine_similarity(*flat, dim=0).item()


def assert_close_runs(one: dict[str, Any], several: dict[str, Any]) -> None:
    assert len(one["gradients"]) == len(several["gradients"]) > 0
    for a, b in zip(one["gradients"], several["gradients"], strict=True):
        a, b = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5 * a.abs().max().item() + 1e-9)
    for a, b in zip(one["metrics"], several["metrics"], strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert b[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(
    "name",
    [
        "sft",
        "dpo",
        "cpo",
        "simpo",
        "orpo",
        "kto",
        "reward",
        "rloo",
        "online-dpo",
        "distill",
        "sdpo",
        "kl, two updates",
        "entropy",
        "mini-batches",
        "correction",
        "packed",
        *LOSS_TYPES,
    ],
)
def test_gradients_and_metrics_of_every_loss_equal_one_process(results, name, n):
    assert_close_runs(results[1][0]["losses"][name], results[n][0]["losses"][name])


@pytest.mark.parametrize("name", ["one row", "one prompt", "custom module"])
def test_ranks_without_rows_and_a_split_group(results, name):
    for n in (2, 4):
        assert_close_runs(results[1][0]["uneven"][name], results[n][0]["uneven"][name])


@pytest.mark.parametrize("n", [2, 4])
def test_adapters_and_a_cached_reference(results, n):
    one, several = results[1][0], results[n][0]
    assert one["adapters"]["exact"] == several["adapters"]["exact"]
    for name in ("sft", "grpo"):
        assert_close_runs(one["adapters"][name], several["adapters"][name])
    cached = several["cached"]
    assert cached["first"] == cached["again"] and len(cached["lines"]) == 3  # one per pair
    torch.testing.assert_close(torch.tensor(cached["first"]), torch.tensor(one["cached"]["first"]), rtol=1e-5, atol=0)


def test_accelerate_can_launch_ranks(results, tmp_path):
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1"]
    accelerate += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "--num_processes"]
    launched = run_ranks(tmp_path, 2, accelerate, ["exact"])
    assert [rank["exact"] for rank in launched] == [results[1][0]["exact"]] * 2


def test_all_ranks_have_bit_identical_weights(results):
    for n in (2, 4):
        for rank in results[n][1:]:
            for name in ("losses", "adapters", "cached", "uneven", "exact", "bfloat16_reduction", "evaluations"):
                assert rank[name] == results[n][0][name]


@pytest.mark.parametrize("name", ["grpo", "sft", "dropout"])
def test_deterministic_reduction_is_bit_identical_to_one_process(results, name):
    assert results[1][0]["exact"][name] == results[2][0]["exact"][name] == results[4][0]["exact"][name]


@pytest.mark.parametrize("name", ["all weights", "adapters"])
def test_ranks_that_sample_ahead_are_bit_identical_to_one_process(results, name):
    runs = [rank["ahead"][name] for n in (1, 2, 4) for rank in results[n]]
    assert all(run == runs[0] for run in runs)
    assert runs[0]["metrics"][5:] == runs[0]["resumed"] and runs[0]["metrics"][4]["sampler/lag_max"] > 0


def test_deterministic_reduction_is_close_to_the_plain_sum(results):
    exact, plain = results[2][0]["exact"]["sft"], results[1][0]["losses"]["sft"]
    assert_close_runs(plain, exact)
    assert exact["gradients"] != plain["gradients"]  # it rounds


def test_a_bfloat16_all_reduce_keeps_the_gradient_direction(results):
    plain, rounded = (
        results[1][0]["losses"]["sft"]["gradients"],
        results[2][0]["bfloat16_reduction"]["sft"]["gradients"],
    )
    assert plain != rounded
    assert 0.9999 < cosine(plain, rounded) <= 1.0 + 1e-12
    assert results[1][0]["bfloat16_reduction"]["sft"]["gradients"] == plain  # one process sends nothing


def test_evaluations_equal_one_process(results):
    for n in (2, 4):
        assert results[n][0]["evaluations"] == pytest.approx(results[1][0]["evaluations"], rel=1e-6)


@pytest.mark.parametrize("n", [2, 4])
def test_failure_reaches_all_ranks(results, n):
    for rank, errors in enumerate(one["failures"] for one in results[n]):
        for name, failing, error in (("reward", 0, "RewardError"), ("sampling", 1, "MemoryError")):
            assert_mentions(errors[name], error, *([] if rank == failing else ["RankError", f"rank {failing}"]))
        assert "no judge" in errors["reward"]
        assert errors["skipped"] == 1 and errors["unchanged"]
        for name in ("data", "order"):  # the order, with equal token counts
            assert_mentions(errors[name], "ranks", "batches")
        assert_mentions(errors["settings"], "batch_size")
        assert_mentions(errors["weights"], "weights", "same model")


def test_costs_are_balanced_over_ranks():
    assert shard_by_cost([5, 1, 1, 1, 4], 2) == [[0, 2], [1, 3, 4]]
    assert shard_by_cost([3], 3) == [[0], [], []]
    assert shard_by_cost([], 2) == [[], []]


@pytest.mark.parametrize(("n_prompts", "n", "size"), [(3, 4, 2), (1, 5, 3), (4, 2, 2), (2, 2, 7), (5, 1, 4), (1, 2, 5)])
def test_ranks_share_all_samples_evenly(n_prompts, n, size):
    shares = []
    for rank in range(size):
        pieces = split_samples(n_prompts, n, rank, size).items()
        shares.append([(k.prompt_index, k.first_sample + j) for c, keys in pieces for k in keys for j in range(c)])
    assert sorted(itertools.chain(*shares)) == [(i, j) for i in range(n_prompts) for j in range(n)]
    assert all(count > 0 for rank in range(size) for count in split_samples(n_prompts, n, rank, size))
    assert max(map(len, shares)) <= math.ceil(n_prompts * n / size)
