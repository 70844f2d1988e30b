"""The registry of training algorithms agrees with their classes, configs, examples and docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.methods_table import PAGE, render_table

from whet import algorithms, runs
from whet.config.algorithms import ALGORITHMS
from whet.runs.settings import RUNS
from whet.training.trainer import Trainer

ROOT = Path(__file__).parents[2]


def test_registry_has_every_trainer():
    trainers = [getattr(algorithms, name) for name in algorithms.__all__]
    trainers = [each for each in trainers if isinstance(each, type) and issubclass(each, Trainer)]
    assert {algorithm.load() for algorithm in ALGORITHMS.values()} == set(trainers)


def test_settings_of_every_run_are_exported():
    assert {each.__name__ for each in RUNS.values()} <= set(runs.__all__)


def test_documents_list_every_algorithm():
    page = PAGE.read_text(encoding="utf-8")
    assert render_table() in page, "run python tools/methods_table.py"
    words = re.findall(r"\w+", (ROOT / "README.md").read_text(encoding="utf-8").partition("pip install")[0])
    assert {algorithm.class_name for algorithm in ALGORITHMS.values()} <= set(words)


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_entries_agree_with_the_class(algorithm):
    loaded = algorithm.load()
    assert loaded.__name__ == algorithm.class_name and loaded.config_class is algorithm.config
    assert ("prompt" in loaded.row_fields) and (loaded.row_fields == ("prompt",)) is algorithm.config.samples
    assert issubclass(RUNS[algorithm.name], algorithm.config)
    example = ROOT / "examples" / f"{algorithm.name.replace('-', '_')}.toml"
    assert example.read_text().startswith(f"# whet train {algorithm.name} ")
    assert (ROOT / "docs" / "algorithms" / f"{algorithm.name}.md").is_file()
