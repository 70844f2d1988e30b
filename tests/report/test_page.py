"""Parts of a page escape their text, and captions of charts have their values."""

from __future__ import annotations

import math
import re
import sys

from tests.raising import assert_raises
from tests.report.parsed_page import EVIL, Page

from whet.errors import MissingExtraError, WhetValueError
from whet.report.page import headline_row, line_chart, markdown_page, page, pairs_table, table, versions


def test_captions_have_means_of_long_curves_and_values_of_short_curves():
    def caption(points, **options):
        return re.search(r"<span>(.*?)</span>", line_chart("t", {"a": points}, **options))[1]

    assert caption([(1, 0.125), (2, 5.0)]) == "0.125 → 5.00"
    assert caption([(1, 0.125), (2, 0.5)], percent=True) == "12.5% → 50.0%"
    assert caption([(1, -1e-5), (2, 12345.6)]) == "−1.00e−05 → 12,346"
    assert caption([(1, math.nan), (2, 3.0), (3, math.inf)]) == "3.00 → 3.00"
    assert caption([(1, math.nan)]) == "no finite value"
    # 60 points: means of windows of 60 // 20 = 3; (1 + 2 + 3) / 3 and (58 + 59 + 60) / 3.
    assert caption([(x, float(x)) for x in range(1, 61)]) == "2.00 → 59.0"
    # NaN is excluded from its window: (1 + 3) / 2.
    assert caption([(x, math.nan if x == 2 else float(x)) for x in range(1, 61)]) == "2.00 → 59.0"


def test_two_curves_have_a_legend():
    chart = line_chart("t", {"whet": [(1, 1.0), (2, 2.0)], "torch": [(1, 1.0), (2, 4.0)]}, x_label="threads")
    assert all(text in Page(chart).text for text in ("whet 1.00 → 2.00; torch 1.00 → 4.00", "threads"))
    assert "var(--second)" in chart
    for curves in ({}, {name: [(0, 0)] for name in "abc"}):
        assert_raises(WhetValueError, (f"curves has {len(curves)} entries", "1 or 2"), line_chart, "t", curves)


def test_parts_escape_their_text():
    html = page(EVIL, headline_row({EVIL: EVIL}) + table([EVIL], [[EVIL]], ["text"]) + pairs_table({EVIL: EVIL}))
    shown = Page(html)
    assert shown.text.count(EVIL) == 8
    assert "script" not in shown.tags and "img" not in shown.tags


def test_control_characters_are_replaced_by_symbols():
    html = table(["a"], [["\x00\x1b[31m\x7f\ud800\ufffe\ttab\nline"]], ["text"])
    assert "␀␛[31m\ufffd\ufffd\ufffd\ttab\nline" in html
    html.encode("utf-8")


def test_missing_matplotlib_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    facts = "line_chart", "matplotlib", "whet[train]"
    assert_raises(MissingExtraError, facts, line_chart, "t", {"a": [(1, 1.0)]})


def test_versions_of_packages_and_system():
    found = versions()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"whet", "numpy", "system", "processor"} <= set(found)


def test_rows_must_have_a_cell_per_column():
    html = table(["a", "b"], [["x", "<y>"]], ["", "number"])
    assert '<td class="">x</td><td class="number">&lt;y&gt;</td>' in html
    assert_raises(ValueError, ("zip()",), table, ["a", "b", "c"], [["x", "y"]], ["", "", ""])


def test_markdown_page():
    text = """
*quiet* **bad**

- **5.3×** against a: 1 won

| case | t |
| --- | ---: |
| a \\| b | 1 |

![A chart \\[1\\] (note)](a.png)
![Another](b.png)

<b>no tag</b> <javascript:alert(1)> [link](javascript:alert(1))
"""
    charts = {"a.png": "<svg>A</svg>", "b.png": "<svg>B</svg>"}
    html = markdown_page("T & t", text, charts)
    shown = Page(html)
    assert shown.tags.count("h1") == 1 and "T & t" in shown.text
    assert "<em>quiet</em> <strong>bad</strong>" in html and "<li><strong>5.3×</strong> against a: 1 won</li>" in html
    assert '<td>a | b</td>\n<td style="text-align:right">1</td>' in html
    assert '<div class="charts"><figure><figcaption>A chart [1] (note)</figcaption><svg>A</svg></figure>' in html
    assert "<figcaption>Another</figcaption><svg>B</svg></figure></div>" in html
    assert "b" not in shown.tags and "<b>no tag</b>" in shown.text
    assert not any(name == "href" and "javascript" in value for name, value in shown.attributes)
