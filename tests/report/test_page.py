"""The parts of a page escape what they show, and its charts say what they draw."""

from __future__ import annotations

import math
import re
import sys

import pytest
from tests.report.parsed_page import EVIL, Page

from whet.errors import MissingExtraError, WhetValueError
from whet.report.page import Cell, headline_row, line_chart, page, pairs_table, table, versions


def test_long_curves_give_means_and_short_ones_values():
    def caption(points, **options):
        return re.search(r"<span>(.*?)</span>", line_chart("t", {"a": points}, **options))[1]

    assert caption([(1, 0.125), (2, 5.0)]) == "0.125 → 5.00"
    assert caption([(1, 0.125), (2, 0.5)], percent=True) == "12.5% → 50.0%"
    assert caption([(1, -1e-5), (2, 12345.6)]) == "−1.00e−05 → 12,346"
    assert caption([(1, math.nan), (2, 3.0), (3, math.inf)]) == "3.00 → 3.00"
    assert caption([(1, math.nan)]) == "no finite value"
    # 60 points: means of windows of 60 // 20 = 3; (1 + 2 + 3) / 3 and (58 + 59 + 60) / 3.
    assert caption([(x, float(x)) for x in range(1, 61)]) == "2.00 → 59.0"
    # NaN is left out of its window: (1 + 3) / 2.
    assert caption([(x, math.nan if x == 2 else float(x)) for x in range(1, 61)]) == "2.00 → 59.0"


def test_two_curves_have_a_legend():
    chart = line_chart("t", {"whet": [(1, 1.0), (2, 2.0)], "torch": [(1, 1.0), (2, 4.0)]}, x_label="threads")
    assert all(text in Page(chart).text for text in ("whet 1.00 → 2.00; torch 1.00 → 4.00", "threads"))
    assert "var(--second)" in chart
    for curves in ({}, {name: [(0, 0)] for name in "abc"}):
        with pytest.raises(WhetValueError, match=f"curves has {len(curves)} entries, expected 1 or 2"):
            line_chart("t", curves)


def test_parts_escape_what_they_show():
    html = page(EVIL, headline_row({EVIL: EVIL}) + table([EVIL], [[EVIL]], ["text"]) + pairs_table({EVIL: EVIL}))
    shown = Page(html)
    assert shown.text.count(EVIL) == 8
    assert "script" not in shown.tags and "img" not in shown.tags


def test_characters_that_html_forbids_are_shown_otherwise():
    html = table(["a"], [["\x00\x1b[31m\x7f\ud800\ufffe\ttab\nline"]], ["text"])
    assert "␀␛[31m\ufffd\ufffd\ufffd\ttab\nline" in html
    html.encode("utf-8")


def test_a_missing_matplotlib_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"line_chart needs matplotlib.*whet\[train\]"):
        line_chart("t", {"a": [(1, 1.0)]})


def test_versions_name_what_ran():
    found = versions()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"whet", "numpy", "system", "processor"} <= set(found)


def test_cells_span_columns_and_rows_have_to_fill_the_table():
    html = table(["a", "b", "c"], [["x", Cell("<why>", "muted", 2)], [1, Cell(2, "bad"), 3]], ["", "number", ""])
    assert '<td class="">x</td><td class="muted" colspan="2">&lt;why&gt;</td>' in html
    assert '<td class="">1</td><td class="number bad">2</td><td class="">3</td>' in html
    with pytest.raises(WhetValueError, match=r"table: a row fills 2 columns, and there are 3: \['x', 'y'\]"):
        table(["a", "b", "c"], [["x", "y"]], ["", "", ""])
