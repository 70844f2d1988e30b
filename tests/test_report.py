"""The report is one self-contained, well-formed, escaped page that shows what the run left."""

from __future__ import annotations

import math
import re
import sys
from html.parser import HTMLParser

import pytest

from whet.errors import MissingExtraError, WhetValueError
from whet.logging import JSONLLogger
from whet.report import headline_row, line_chart, page, pairs_table, table, versions, write_report


class Page(HTMLParser):
    """Collects a page's text, tags and attributes, and insists that every element is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data


EVIL = "</td><script>alert('x')</script> & \"q\" <img src=http://evil/x>"


def make_run(folder, n_steps=60):
    metrics = JSONLLogger(folder / "metrics.jsonl")
    metrics.log({"eval/accuracy": 0.25, "eval/pass@4": 0.5}, 0)
    for step in range(1, n_steps + 1):
        metrics.log({"mean_reward": step / 100, "loss": math.nan if step == 7 else 1 / step, EVIL: 1.0}, step)
    metrics.log({"eval/accuracy": 0.875, "eval/pass@4": 1.0}, n_steps)
    completions = JSONLLogger(folder / "completions.jsonl")
    for step in (1, 30, n_steps):
        for sample in range(20):
            completions.write({"step": step, "prompt": f"p{step}", "completion": f"c{step}.{sample}", "reward": 0.5})
    (folder / "config.toml").write_text('seed = 3\n[model]\nname = "<b>tiny</b>"\nids = [1, 2]\n')


@pytest.fixture
def run(tmp_path):
    make_run(tmp_path)
    return tmp_path


def test_the_report_shows_the_run(run):
    before = [{"prompt": "1+1=", "completion": "3", "reward": 0.0}, {"prompt": "only before", "completion": "z"}]
    after = [{"prompt": "1+1=", "completion": "2", "reward": 1.0}, {"prompt": EVIL, "completion": EVIL}]
    path = write_report(run, title=EVIL, summary=EVIL, samples_before=before, samples_after=after)
    assert path == run / "report.html"
    html = path.read_text(encoding="utf-8")
    shown = Page(html)
    assert shown.text.count(EVIL) == 5  # <title>, <h1>, summary, prompt, completion
    for text in ("25.0% → 87.5%", "Reward", "Accuracy", "Loss", "eval/pass@4", "only before", "c1.7", "c60.0"):
        assert text in shown.text
    for text in ("c1.8", "c30.0", "Entropy", "KL to the reference"):
        assert text not in shown.text
    assert [name in shown.text for name in ("<b>tiny</b>", "[1, 2]", "seed", "torch")] == [True] * 4
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    cells = [re.findall(r'<td class="\w*">(.*?)</td>', row) for row in rows]
    assert ["1+1=", "3", "0", "2", "1"] in cells
    assert ["only before", "z", "–", "–", "–"] in cells


def test_the_report_loads_and_runs_nothing(run):
    shown = Page(write_report(run, title="t", samples_after=[{"prompt": EVIL, "completion": EVIL}]).read_text())
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(shown.tags)
    for name, value in shown.attributes:
        assert not name.startswith("on")
        assert "//" not in value and not value.startswith("javascript:")
        assert name != "src" and (name != "href" or value.startswith("#"))
    html = (run / "report.html").read_text()
    assert "@import" not in html
    assert all(target.startswith("#") for target in re.findall(r"url\((.*?)\)", html))


def test_the_same_run_gives_the_same_page(run):
    strip = re.compile(r"<footer>.*</footer>")
    pages = [strip.sub("", write_report(run, title="t").read_text()) for _ in range(2)]
    assert pages[0] == pages[1]
    ids = re.findall(r' id="([^"]+)"', pages[0])
    drawn = [i for i in ids if re.match(r"[mp][0-9a-f]{10}", i)]
    assert len(drawn) > 4 and len(drawn) == len(set(drawn))  # markers and clips of one chart are not another's


def test_charts_use_the_colours_of_the_page(run):
    html = write_report(run, title="t").read_text()
    svgs = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(svgs) == 4
    assert all("var(--accent)" in svg and "var(--muted)" in svg for svg in svgs)
    assert not any(re.search(r"#[0-9a-f]{6}\b", svg) for svg in svgs)
    assert "prefers-color-scheme: dark" in html
    for name in re.findall(r"var\((--\w+)\)", html):
        assert html.count(f"{name}:") == 2  # defined for light and for dark


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


def test_a_run_of_one_step_and_nothing_else_has_a_report(tmp_path):
    JSONLLogger(tmp_path / "metrics.jsonl").log({"loss": 0.5}, 1)
    shown = Page(write_report(tmp_path, title="t").read_text())
    assert "0.500 → 0.500" in shown.text and "Configuration" not in shown.text


def test_long_samples_are_cut(tmp_path):
    JSONLLogger(tmp_path / "metrics.jsonl").log({"loss": 0.5}, 1)
    samples = [{"prompt": "p", "completion": "x" * 4000, "reward": None}]
    text = Page(write_report(tmp_path, title="t", samples_after=samples).read_text()).text
    assert "x" * 1500 + " … (2,500 more characters)" in text and "x" * 1501 not in text


def test_config_json_is_read_and_headline_is_shown(tmp_path):
    JSONLLogger(tmp_path / "metrics.jsonl").log({"loss": 0.5}, 1)
    (tmp_path / "config.json").write_text('{"a": {"b": {"c": null}, "d": "x"}}')
    html = write_report(tmp_path, title="t", headline={"held-out accuracy": "34.5% → 91.0%"}).read_text()
    assert re.search(r"<h3>a</h3>.*<th>b.c</th><td>null</td>.*<th>d</th><td>x</td>", html, flags=re.DOTALL)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(WhetValueError, match=r"config\.json cannot be read"):
        write_report(tmp_path, title="t")
    assert "<dt>held-out accuracy</dt><dd>34.5% → 91.0%</dd>" in html


def test_what_is_missing_or_spoilt_is_named(run):
    (run / "config.toml").write_text("= 3")
    with pytest.raises(WhetValueError, match=r"config\.toml cannot be read"):
        write_report(run, title="t")
    (run / "completions.jsonl").write_text("{}\n")
    with pytest.raises(WhetValueError, match=r"completions\.jsonl:1 is not a JSON object with a step"):
        write_report(run, title="t")
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(WhetValueError, match=r"metrics\.jsonl holds no metrics\. Log the run with JSONLLogger"):
        write_report(run, title="t")
    (run / "metrics.jsonl").unlink()
    with pytest.raises(WhetValueError, match=r"metrics\.jsonl is missing"):
        write_report(run, title="t")
    assert not (run / "report.html").exists()


def test_a_missing_matplotlib_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"line_chart needs matplotlib.*whet\[train\]"):
        line_chart("t", {"a": [(1, 1.0)]})


def test_versions_name_what_ran():
    found = versions()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"whet", "numpy", "system", "processor"} <= set(found)
