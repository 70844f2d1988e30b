"""Fingerprints of a run's inputs."""

from __future__ import annotations

from tests.raising import assert_raises

from whet.errors import WhetValueError
from whet.runs.inputs import check_inputs, read_inputs, write_inputs
from whet.runs.settings import SFTRun


def test_new_file_in_a_data_pattern_is_an_error(files):
    run = SFTRun(model=str(files.folder), data=str(files.folder / "*.jsonl"), eval_data=[str(files.folder / "rows.*")])
    record = files.folder / "inputs.json"
    write_inputs(record, read_inputs(run))
    assert check_inputs(record, read_inputs(run)) == []
    (files.folder / "other.jsonl").write_text("{}\n")
    assert_raises(WhetValueError, ("data", "other.jsonl", "output_dir"), check_inputs, record, read_inputs(run))
