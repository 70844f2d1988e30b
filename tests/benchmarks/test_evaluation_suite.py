"""Contenders of the evaluation suite, on a tiny model and a task without extras."""

from functools import partial

import numpy as np
import pytest
from tests.cli.conftest import tiny_model, write_tiny_gguf  # noqa: F401  (a fixture)
from tests.raising import mentions
from tests.tiny import tiny_llama

from benchmarks.contenders.evaluation import Evaluation, share_of_other_scores, transformers, whet

TASK = """
class Words:
    name = "words"
    system_prompt = "Go on."

    def __init__(self, size):
        self.rows = [{"prompt": [{"role": "user", "content": "x" * (1 + 7 * i % 23)}]} for i in range(size)]

    def score(self, completion, row):
        return float(sum(map(ord, completion)) % 97) / 97
"""


@pytest.fixture(scope="module")
def work(tiny_model, tmp_path_factory):  # noqa: F811
    """Evaluation with weights so large that every token of a prompt matters."""
    folder = tmp_path_factory.mktemp("evaluation")
    (folder / "words.py").write_text(TASK)
    model = tiny_llama(vocab_size=258, max_position_embeddings=256, initializer_range=0.5, eos_token_id=1)
    path = write_tiny_gguf(model, tiny_model, folder / "tiny.gguf")
    return Evaluation(lambda: path, f"{folder / 'words.py'}:Words,held_out=1,size=19", 19, 6)


def test_contenders_give_equal_scores(work):
    """Compare batches of four rows of ragged lengths with all rows at once."""
    ours, theirs = whet("float32", work)(), transformers("float32", 4, work)()
    assert ours.shape == (19,) and len(set(ours)) > 8
    assert share_of_other_scores(ours, theirs) == 0
    assert share_of_other_scores(ours, transformers("float32", 1, work)()) == 0


def test_different_scores_are_an_error():
    scores = np.array([0.0, 1, 1, 0])
    assert share_of_other_scores(scores, np.array([0.0, 1, 0, 0])) == 0.25
    assert share_of_other_scores(scores[:3], scores) == np.inf


def test_missing_task_package_is_an_import_error(work, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", partial(lambda name, package=None: None))
    with pytest.raises(ImportError, match=mentions("whet[gym]")):
        whet("bf16", Evaluation(work.find_model, "reasoning_gym:chain_sum", 4, 6))()
