"""The suite "rounding": files of a tiny model, their perplexity, and programs that are missing or fail."""

from __future__ import annotations

import pytest
import transformers
from tests.cli.conftest import write_tiny_gguf, write_tiny_model
from tests.raising import mentions

from benchmarks.contenders.training.rounded import Rounding
from benchmarks.suites import rounding as suite
from whet.bench.case import NotMeasured
from whet.bench.harness import QUICK, run_case
from whet.models.sources.gguf_container import read_gguf


@pytest.fixture
def rounding(tmp_path):
    pytest.importorskip("reasoning_gym")
    folder = write_tiny_model(tmp_path / "model", max_position=2048)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return Rounding(tmp_path, write_tiny_gguf(model, folder, tmp_path / "tiny.gguf"), n_steps=2)


def test_files_have_their_types_and_perplexities(rounding):
    floats = rounding.perplexity(rounding.floats)
    made = {kind: make("q4_0") for kind, make in (("rounded", rounding.round), ("qat", rounding.train))}
    for each in made.values():
        kinds = {tensor.format for tensor in read_gguf(each.path, "test").tensors.values()}
        assert "q4_0" in kinds and each.seconds > 0
    assert made["rounded"].path.read_bytes() != made["qat"].path.read_bytes()
    assert all(abs(rounding.perplexity(each.path) / floats - 1) < 0.1 for each in made.values())
    assert len(rounding.passages) == 16 and len(set(rounding.passages)) == 16


def test_programs_of_llama_cpp_that_are_missing_or_fail_are_named(rounding, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.contenders.llama_programs.BUILT", tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(NotMeasured, match=mentions("llama-quantize", "tools/llama_server.py")):
        rounding.quantize("q4_0", weighted=False)
    program = tmp_path / "llama-quantize"
    program.write_text("#!/bin/sh\necho $3 is unknown; exit 3\n")
    program.chmod(0o755)
    with pytest.raises(NotMeasured, match="llama-quantize ended with status 3: q4_0 is unknown"):
        rounding.quantize("q4_0", weighted=False)
    with pytest.raises(NotMeasured, match="llama-imatrix is missing"):
        rounding.quantize("q4_0", weighted=True)


def test_a_row_has_the_perplexity_before_and_after(rounding, monkeypatch):
    monkeypatch.setattr(suite, "smollm2_original", lambda given: rounding.model)
    table = suite.tables(suite.RoundingOptions(quick=True))[0]
    providers = [each for each in table.providers if each.name == "whet, rounded"]
    (row,) = run_case(table, table.cases[0], providers, 1, QUICK, 0).rows
    [(before, after)] = row.scores
    assert 1 < before < after * 1.1 and row.status == "measured"
