"""rows_as_csv: one line per row, full precision, empty figures for rows without a time."""

import csv
import io

import numpy as np
from tests.bench.results import a_case, a_row, a_table, make_results

from whet.bench.results import CSV_COLUMNS, rows_as_csv


def test_csv_has_full_precision_and_empty_figures_of_absent_rows():
    fast = a_row("whet", bandwidth=2.5e10, share=0.5, bound="L2 bandwidth", items_per_s=1e6) | {
        "samples_s": [3e-6, 1e-6, 2e-6, 4e-6, 5e-6]
    }
    absent = a_row("vLLM", status="absent", why='needs CUDA, not "cpu"') | {"error": None}
    results = make_results([a_table("RoPE, prefill", [a_case("1 x 64, 32 heads", [fast, absent])])], suite="rope")
    rows = list(csv.DictReader(io.StringIO(rows_as_csv(results))))
    assert len(rows) == 2 and tuple(rows[0]) == CSV_COLUMNS
    first, second = rows
    assert (first["suite"], first["table"], first["case"]) == ("rope", "RoPE, prefill", "1 x 64, 32 heads")
    assert (first["threads"], first["cache"], first["provider"], first["n"]) == ("2", "warm", "whet", "5")
    assert float(first["median_s"]) == 3e-6
    np.testing.assert_allclose([float(first["p20_s"]), float(first["p80_s"])], [1.8e-6, 4.2e-6], rtol=1e-12)
    assert (first["bytes_per_s"], first["share_of_ceiling"], first["bound"]) == ("25000000000.0", "0.5", "L2 bandwidth")
    assert first["flops_per_s"] == ""
    assert (second["status"], second["why"]) == ("absent", 'needs CUDA, not "cpu"')
    assert all(second[name] == "" for name in ("median_s", "p20_s", "p80_s", "n", "max_error", "bytes_per_s"))


def test_refused_row_has_a_line_without_figures():
    refused = a_row("vLLM", status="refused", why="faster than the machine", bandwidth=1e15) | {"samples_s": [1e-9]}
    text = rows_as_csv(make_results([a_table("t", [a_case("c", [a_row("whet"), refused])])]))
    line = list(csv.DictReader(io.StringIO(text)))[1]
    assert line["status"] == "refused" and line["median_s"] == line["bytes_per_s"] == ""
    assert text.endswith("\n") and text.count("\n") == 3
