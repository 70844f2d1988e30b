"""The waiting policy of torch's OpenMP threads."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from tests.engine.tiny_models import tiny_model
from tests.processes import printed_by

from whet.nn import accelerate


@pytest.mark.parametrize(
    ("imports", "environment", "expected"),
    [
        ("whet.nn", {}, "PASSIVE"),
        ("whet", {}, None),  # primitives do not change the environment
        ("torch, whet.nn", {}, None),  # too late
        ("whet.nn", {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
        ("whet.nn", {"GOMP_SPINCOUNT": "1000"}, None),
    ],
)
def test_threads_wait_passively_unless_the_environment_has_a_setting(imports, environment, expected, monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    code = f"import {imports}, os; print(os.environ.get('OMP_WAIT_POLICY'))"
    assert printed_by(code, **environment) == f"{expected}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="torch has no GNU OpenMP here")
def test_many_spinning_threads_are_reported(monkeypatch, recwarn):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for n, policy, is_reported in ((8, None, False), (12, None, True), (12, "PASSIVE", False)):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=n: n)
        if policy is not None:
            monkeypatch.setenv("OMP_WAIT_POLICY", policy)
        recwarn.clear()
        accelerate(tiny_model("llama")).remove()
        found = [str(warning.message) for warning in recwarn if "OMP_WAIT_POLICY=PASSIVE" in str(warning.message)]
        assert [f"{n} OpenMP threads" in text for text in found] == [True] * is_reported, os.environ.get(
            "OMP_WAIT_POLICY"
        )
