"""The registry of training algorithms agrees with their classes, configs, examples and docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from whet import algorithms
from whet.config.algorithms import ALGORITHMS
from whet.runs.settings import RUNS
from whet.training.trainer import Trainer

ROOT = Path(__file__).parents[2]


def test_registry_has_every_trainer():
    trainers = [getattr(algorithms, name) for name in algorithms.__all__]
    trainers = [each for each in trainers if isinstance(each, type) and issubclass(each, Trainer)]
    assert {algorithm.load() for algorithm in ALGORITHMS.values()} == set(trainers)


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_entries_agree_with_the_class(algorithm):
    loaded = algorithm.load()
    assert loaded.__name__ == algorithm.class_name and loaded.config_class is algorithm.config
    assert ("prompt" in loaded.row_fields) and (loaded.row_fields == ("prompt",)) is algorithm.config.samples
    assert issubclass(RUNS[algorithm.name], algorithm.config)
    example = ROOT / "examples" / f"{algorithm.name.replace('-', '_')}.toml"
    assert example.read_text().startswith(f"# whet train {algorithm.name} ")
    assert (ROOT / "docs" / "algorithms" / f"{algorithm.name}.md").is_file()
