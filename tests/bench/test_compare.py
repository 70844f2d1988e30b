"""Comparison of runs: planted regressions are found, equal runs have none, and drift of the machine is corrected."""

from __future__ import annotations

import json

import numpy as np
import pytest
from rich.console import Console
from tests.bench.results import a_case, a_row, a_table, full_results, make_results, save
from tests.raising import mentions

from whet.bench.compare import THRESHOLD, as_table, compare, load_results
from whet.errors import WhetValueError

PEERS = ("rlox", "rlox (loop)", "NumPy", "torch float32")


def a_run(seed, scale=None, statuses=None, peers=PEERS, **fields):
    """Make a run of two cases; ``scale`` multiplies the time of a (case, provider), or of a provider in both cases."""
    rng, cases = np.random.default_rng(seed), []
    for case, base in (("small", 1e-6), ("large", 1e-4)):
        rows = []
        for provider in ("whet", "whet float32", *peers):
            factor = (scale or {}).get((case, provider), (scale or {}).get(provider, 1.0))
            row = a_row(provider, rng, base * factor)
            rows.append(row | (statuses or {}).get((case, provider), {}))
        cases.append(a_case(case, rows))
    return make_results([a_table("Token KL", cases)], **fields)


def verdicts(comparison):
    return {(change.case, change.provider): change.verdict for change in comparison.changes}


def test_equal_runs_give_no_regression():
    for seed in range(8):
        comparison = compare(a_run(2 * seed), a_run(2 * seed + 1), threshold=0.05)
        assert comparison.regressions == []
        assert set(verdicts(comparison).values()) == {"same"}
        assert "no regression beyond 5%" in comparison.summary
    assert comparison.drift.low < 1.02 and comparison.drift.high > 0.98 and comparison.n_controls == 8


def test_planted_regression_is_found_and_named():
    after = a_run(2, {("large", "whet"): 1.1, ("small", "whet float32"): 0.8})
    comparison = compare(a_run(1), after, threshold=0.05)
    (regression,) = comparison.regressions
    assert (regression.case, regression.provider, regression.verdict) == ("large", "whet", "slower")
    assert regression.ratio.median == pytest.approx(1.1, abs=0.02)
    assert regression.ratio.low > 1.05
    named = [line for line in comparison.summary if line.startswith("regression: ")]
    assert len(named) == 1 and named[0].startswith("regression: Token KL / large / whet (2 threads): 1.")
    assert verdicts(comparison)["small", "whet float32"] == "faster"
    assert compare(a_run(1), after).regressions == []  # 10% is within the default threshold
    assert THRESHOLD == 0.1


def test_slower_peer_is_not_a_regression():
    comparison = compare(a_run(1), a_run(2, {"rlox": 1.5}))
    assert verdicts(comparison)["large", "rlox"] == "slower" and comparison.regressions == []


def test_change_within_the_variance_is_noise():
    def half_slow(n_slow):  # a single sample moves the median between the fast and the slow half
        return {("large", "whet"): {"samples_s": [1.0] * (31 - n_slow) + [1.6] * n_slow}}

    comparison = compare(a_run(1, statuses=half_slow(15)), a_run(2, statuses=half_slow(16)))
    assert [c.ratio.median for c in comparison.changes if (c.case, c.provider) == ("large", "whet")] == [1.6]
    assert verdicts(comparison)["large", "whet"] == "noise" and comparison.regressions == []


def test_drift_of_the_machine_is_not_a_regression():
    slow = dict.fromkeys(("whet", "whet float32", *PEERS), 1.3)
    comparison = compare(a_run(1), a_run(2, slow))
    assert comparison.drift.median == pytest.approx(1.3, abs=0.03) and comparison.regressions == []
    assert verdicts(comparison)["large", "whet"] == "noise"
    assert verdicts(comparison)["large", "rlox"] == "slower"
    assert any("machine changed by more than the threshold" in line for line in comparison.summary)
    found = compare(a_run(1), a_run(2, slow | {"whet": 1.3 * 1.3})).regressions
    assert [change.case for change in found] == ["small", "large"]


def test_regression_hidden_by_a_faster_machine_is_noise():
    comparison = compare(a_run(1), a_run(2, dict.fromkeys(PEERS, 0.8)))
    assert verdicts(comparison)["large", "whet"] == "noise"


def test_peer_with_a_changed_version_is_not_a_control():
    versions = make_results([])["versions"]
    after = a_run(2, {"torch float32": 2.0}, versions=versions | {"torch": "2.14.0"})
    comparison = compare(a_run(1), after)
    assert comparison.n_controls == 6
    assert "versions changed: torch 2.13.0 to 2.14.0" in comparison.summary
    assert compare(a_run(1, peers=("handwritten",)), a_run(2, peers=("handwritten",))).n_controls == 0


def test_rows_without_controls_are_not_corrected_for_drift():
    comparison = compare(a_run(1, peers=("rlox",)), a_run(2, {"whet": 1.3}, peers=("rlox",)))
    assert comparison.drift is None and comparison.n_controls == 2 and len(comparison.regressions) == 2
    assert any("2 rows of unchanged peers; 3 are needed" in line for line in comparison.summary)


@pytest.mark.parametrize("status", ["wrong", "failed", "refused"])
@pytest.mark.parametrize("provider", ["whet", "rlox"])
def test_broken_row_is_a_regression(status, provider):
    broken = {("small", provider): {"status": status, "why": "planted"}}
    comparison = compare(a_run(1), a_run(2, statuses=broken))
    (regression,) = comparison.regressions
    assert (regression.verdict, regression.provider, regression.ratio) == ("broken", provider, None)
    assert "planted" in comparison.summary[-1] and f"Token KL / small / {provider}" in comparison.summary[-1]
    assert compare(a_run(2, statuses=broken), a_run(1)).regressions == []


def test_rows_of_only_one_run_are_appeared_or_gone():
    absent = {("small", "rlox"): {"status": "absent", "why": "not installed", "samples_s": []}}
    gone = compare(a_run(1), a_run(2, statuses=absent))
    assert verdicts(gone)["small", "rlox"] == "gone" and gone.regressions == []
    assert verdicts(compare(a_run(1, statuses=absent), a_run(2)))["small", "rlox"] == "appeared"
    assert verdicts(compare(a_run(1, statuses=absent), a_run(2, statuses=absent)))["small", "rlox"] == "same"
    fewer, more = a_run(1, peers=("rlox",)), a_run(2)
    assert verdicts(compare(fewer, more))["large", "NumPy"] == "appeared"
    assert verdicts(compare(more, fewer))["large", "NumPy"] == "gone"


def test_differences_of_machine_and_settings_give_warnings():
    other = make_results([])["machine"] | {"processor": "Another", "cpus": 8}
    after = a_run(2, machine=other, threads={"asked": 8}, quick=True, load={"before": [5.0, 1, 1], "after": []})
    warnings = compare(a_run(1), after).warnings
    for expected in (
        "processor was AMD EPYC 9R14 and is Another", "threads was 2 and is 8", "quick was False and is True",
        "number of processors was 2 and is 8", "busy in the run after: a load of 5 on 8 processors",
    ):  # fmt: skip
        assert any(expected in warning for warning in warnings)
    assert compare(a_run(1), a_run(2)).warnings == []
    older = {name: value for name, value in make_results([])["machine"].items() if name != "device"}
    assert compare(a_run(1, machine=older), a_run(2)).warnings == []
    on_gpu = make_results([])["machine"] | {"device": "A GPU"}
    assert any("device was A GPU" in line for line in compare(a_run(1, machine=on_gpu), a_run(2)).warnings)


def test_runs_of_different_suites_are_rejected():
    with pytest.raises(WhetValueError, match=mentions("compare", "before", "'llm-ops'", "after", "'trl'")):
        compare(a_run(1), a_run(2, suite="trl"))


def test_table_shows_every_row():
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    statuses = {("small", "rlox"): {"status": "failed", "why": "[bold]planted[/x]"}}
    console.print(as_table(compare(a_run(1), a_run(2, {"whet": 1.5}, statuses))))
    text = console.export_text()
    assert text.count("Token KL") == 12 and "broken: failed: [bold]planted[/x]" in text
    assert text.count("slower") == 2 and "1.5" in text


def test_results_are_loaded_from_a_folder_or_a_file(tmp_path):
    results = full_results()
    folder = save(results, tmp_path / "run")
    assert load_results(folder) == results == load_results(folder / "results.json")


def test_invalid_file_is_named(tmp_path):
    file = tmp_path / "results.json"
    with pytest.raises(WhetValueError, match=mentions("load_results", file, "No such file")):
        load_results(file)
    for text, facts in (
        ("{", ("not JSON",)),
        ("[]", ("schema None", "expected 1")),
        ('{"schema": 2}', ("schema 2", "expected 1")),
        ('{"schema": 1}', ("KeyError: 'machine'",)),
    ):
        file.write_text(text)
        with pytest.raises(WhetValueError, match=mentions("load_results", file, *facts)):
            load_results(file)
    results = a_run(1)
    results["tables"][0]["cases"][0]["rows"][0]["samples_s"][0] = -1.0
    file.write_text(json.dumps(results))
    with pytest.raises(WhetValueError, match=mentions(file, "Token KL / small / whet", "samples", "positive")):
        load_results(file)
    del results["tables"][0]["cases"][0]["rows"][0]["provider"]
    file.write_text(json.dumps(results))
    with pytest.raises(WhetValueError, match=mentions(file, "KeyError: 'provider'")):
        load_results(file)
