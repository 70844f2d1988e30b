"""``whet`` as a model of lm-evaluation-harness; tests/wide/clients/lm_eval_harness.py tests it with the harness."""

import sys

import pytest
from tests.raising import mentions

from whet.errors import MissingExtraError


def test_the_missing_harness_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "whet.evaluation.lm_eval", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # not installed
    with pytest.raises(MissingExtraError, match=mentions("whet.evaluation.lm_eval", "pip install 'whet[lm-eval]'")):
        import whet.evaluation.lm_eval  # noqa: F401
