"""Reports in HTML and Markdown: every row with its status, losses in red, no external resources, plots of all data."""

from __future__ import annotations

import json
import math
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tests.bench.results import (
    a_case,
    a_row,
    a_table,
    full_results,
    make_results,
    parts_table,
    sized_table,
    statuses_table,
)
from tests.raising import mentions
from tests.report.parsed_page import EVIL, Page

from whet.bench.formatting import duration, items_rate, rate, share, significant, size, times
from whet.bench.plots import learning_figure, parts_figure, ratio_figure, scores_figure, size_figure, threads_figure
from whet.bench.report import rich_table, write_report
from whet.bench.stats import Ratio
from whet.errors import MissingExtraError
from whet.report.page import LIGHT_COLORS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a report with all kinds of rows once."""
    path = tmp_path_factory.mktemp("runs") / "new" / "report"
    assert write_report(full_results(), path) == path / "report.html"
    return path


def grid_cells(markdown, provider):
    """Return the cells of a provider's rows in Markdown."""
    rows = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in markdown.splitlines() if line[:1] == "|"]
    return [row for row in rows if len(row) > 1 and row[1] == provider]


def test_every_status_is_shown_with_its_reason(folder):
    page = Page((folder / "report.html").read_text(encoding="utf-8")).text
    markdown = (folder / "report.md").read_text(encoding="utf-8").replace("\\", "")
    for reason in (
        "not measured: rlox is not installed: pip install 'whet[peers]'",
        "wrong answer, not timed: error 0.5, allowed 1e-12",
        "failed: RuntimeError: planted failure",
        "refused: impossible: 40 times the L1 bandwidth of this machine.",
    ):
        assert reason in page and reason in markdown


def test_loss_is_a_ratio_below_one_in_red(folder):
    html = (folder / "report.html").read_text(encoding="utf-8")
    losses = re.findall(r"<strong>(0\.\d+)× \[0\.\d+, 0\.\d+\] \*\*\*</strong></td>", html)
    assert len(losses) == 6  # whet float32 three times, torch at 256 x 16: warm, cold, and on one thread
    wins = re.findall(r'<td style="text-align:right">(\d+\.\d+)× \[\d+\.\d+, \d+\.\d+\] \*\*\*</td>', html)
    assert len(wins) == 10 and all(float(win) > 1 for win in wins)
    even = re.findall(r"<em>(\d\.\d+)× \[0\.\d+, 1\.\d+\]</em></td>", html)
    assert len(even) == 2
    assert len(re.findall(r"\*\*0\.\d+× ", (folder / "report.md").read_text())) == 6


def test_rows_show_their_figures(folder):
    markdown = (folder / "report.md").read_text(encoding="utf-8")
    first = grid_cells(markdown, "rlox")[0]
    assert first[3].count("µs") == 1 and "–" in first[3] and first[4] == "31"
    assert first[6:] == ["2.30 GB/s", "60.0 M", "6% of L2 bandwidth", "2.2e-16", "1.0", "6.60 µs"]
    assert "published (other machine)" in markdown and "also published, from another machine: TRL 90.0 µs" in markdown
    assert "completions/s" in markdown and "Allocation: inside: the result is a new array." in markdown
    assert "whet float32: computes in float32" in markdown and "256 x 16 cold: inputs come from memory" in markdown
    assert "256 x 16, 1 thread" in markdown and "3 MiB" in markdown


def headlines(folder, tables):
    """Peer -> its large figure, and its rows won, lost and even."""
    write_report(make_results(tables), folder)
    found = re.findall(r"^- \*\*(.*)×\*\* against (.*): (.*)$", (folder / "report.md").read_text(), flags=re.MULTILINE)
    return {peer: (float(ratio), score) for ratio, peer, score in found}


def test_the_headline_counts_wins_and_losses_of_warm_rows_on_all_threads(tmp_path):
    rng = np.random.default_rng(0)

    def case(name, fast, **fields):
        ratios = {"fast": fast, "even": 1.0, "slow": 0.5}
        return a_case(name, [a_row("whet", rng, 1.0), *(a_row(p, rng, k) for p, k in ratios.items())], **fields)

    cases = [case("a", 2.0), case("b", 8.0), case("c cold", 99.0, cache="cold"), case("a", 99.0, threads=1)]
    found = headlines(tmp_path, [a_table("t", cases)])
    assert found["fast"] == (pytest.approx(4.0, rel=0.03), "2 won, 0 lost")  # sqrt(2 * 8)
    assert found["slow"] == (pytest.approx(0.5, rel=0.03), "0 won, 2 lost")
    assert found["even"] == (pytest.approx(1.0, rel=0.03), "0 won, 0 lost, 2 even")


def test_headlines_exclude_other_rows_of_whet_and_unmeasured_subjects(tmp_path):
    rng = np.random.default_rng(0)
    assert set(headlines(tmp_path, [sized_table(rng)])) == {"rlox", "NumPy", "torch"}
    case = a_case("one", [a_row("whet", status="failed", why="x"), a_row("rlox", rng, 1.0)])
    assert headlines(tmp_path, [a_table("t", [case])]) == {}


def test_page_and_markdown_have_no_scripts_or_external_resources(folder):
    shown = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(shown.tags)
    assert not any(name.startswith("on") or "//" in value for name, value in shown.attributes)
    html, markdown = ((folder / name).read_text() for name in ("report.html", "report.md"))
    assert "@import" not in html and "http://" not in html
    assert all(target.startswith("#") for target in re.findall(r"url\((.*?)\)", html))
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", markdown)
    assert len(pictures) == 5 and all((folder / picture).exists() for picture in pictures)


def test_hostile_names_are_escaped(tmp_path):
    rng = np.random.default_rng(0)
    evil = EVIL + " $x^{$ | `a` \x1b[31m \\ " + "y" * 80
    rows = [a_row("whet", rng, 1.0, note=evil), a_row(evil, rng, 2.0), a_row(evil + "2", status="failed", why=evil)]
    table = a_table(evil, [a_case(evil, rows, note=evil, size=n) for n in (1, 2, 4)], note=evil, allocation=evil)
    table["size_label"] = table["item"] = evil
    results = make_results([table, table], title=evil, summary=evil, command=evil, commit=evil)
    html = write_report(results, tmp_path).read_text(encoding="utf-8")
    shown = Page(html)
    assert not {"script", "img", "a"} & set(shown.tags)
    assert shown.text.count(EVIL) > 12 and "\\ y" in shown.text
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "<script" not in markdown and "\x1b" not in markdown + html
    widths = [len(re.findall(r"(?<!\\)\|", line)) for line in markdown.splitlines() if line.startswith("| ")]
    assert widths and min(widths) >= 3
    titles = sorted(path.name for path in tmp_path.glob("*.png"))
    assert len(titles) == 4 and all(re.fullmatch(r"[a-z0-9-]+\.png", name) for name in titles)


def test_colours_follow_light_and_dark(folder):
    html = (folder / "report.html").read_text(encoding="utf-8")
    charts = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(charts) == 5
    assert not any(re.search(r"#[0-9a-f]{6}\b", chart) for chart in charts)
    for name in set(re.findall(r"var\((--\w+)\)", html)):
        assert html.count(f"{name}:") == 2  # defined for light and for dark
    over_size = charts[1]
    assert over_size.count("var(--accent)") > 2  # the subject's line and markers


def test_plots_are_named_after_their_tables(folder):
    names = {path.name for path in folder.glob("*.png")}
    advantages = {f"group-advantages-batched-{kind}.png" for kind in ("ratio", "size", "threads")}
    assert names == advantages | {"one-grpo-step-ratio.png", "one-grpo-step-parts.png"}
    for path in folder.glob("*.png"):
        content = path.read_bytes()
        width, height = struct.unpack(">II", content[16:24])
        assert content.startswith(b"\x89PNG") and width == 1036 and height > 200  # 7.2 inches at 144 dpi
        assert len(content) > 10_000


@pytest.mark.parametrize(
    ("n_cases", "kinds"),
    [(0, set()), (2, {"ratio"}), (3, {"ratio", "size"}), (5, {"ratio", "size", "threads"})],
)
def test_plots_without_data_are_omitted(tmp_path, n_cases, kinds):
    rng = np.random.default_rng(0)
    sized = sized_table(rng, title="sized")
    sized["cases"] = sized["cases"][:n_cases]
    write_report(make_results([statuses_table(rng, title="statuses"), sized]), tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {f"sized-{kind}.png" for kind in kinds}


def test_plots_draw_the_figures_of_the_rows():
    def row(provider, seconds):
        return a_row(provider) | {"samples_s": [seconds] * 5}

    cases = [a_case("c", [row("whet", 1.0), row("a", 4.0), row("b", 0.5)], size=8.0)]
    cases.append(a_case("c", [row("whet", 1.5), row("a", 4.0)], threads=1))
    table = a_table("t", cases)
    bars = ratio_figure(table, 2, LIGHT_COLORS).axes[0].patches
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(1, 3.0), (1, -0.5)]
    lines = threads_figure(table, 2, LIGHT_COLORS).axes[0].lines
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in lines] == [
        ([1, 2], [1, 2]),  # linear speed-up
        ([1, 2], [1.0, 1.0]),
        ([1, 2], [1.0, 1.5]),
    ]
    cases += [a_case(f"{n}", [row("whet", n)], size=n) for n in (1.0, 100.0)]
    lines = size_figure(a_table("t", cases), 2, LIGHT_COLORS).axes[0].lines
    assert [list(line.get_xydata().ravel()) for line in lines][-1] == [1.0, 1.0, 8.0, 1.0, 100.0, 100.0]


def test_parts_are_shown_in_seconds_and_shares(folder):
    markdown = (folder / "report.md").read_text(encoding="utf-8")
    assert re.search(r"\| generation \| 1\.\d\d s \(55\.0%\) \| 1\.\d\d s \(55\.0%\) \|", markdown)
    assert re.search(r"\| kl \| .* µs \(0\.001%\) \|", markdown)
    figure = parts_figure(parts_table(np.random.default_rng(0)), 2, LIGHT_COLORS)
    bars = figure.axes[0].patches
    assert len(bars) == 16 and sum(bar.get_width() for bar in bars) == pytest.approx(2.0)  # seven parts and the rest
    assert "3 smaller" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_whole_run_shows_start_memory_and_scores(tmp_path):
    rng = np.random.default_rng(0)
    memory = {"weights": 3 << 20, "activations": 5 << 20}
    runs = [
        a_row("whet", rng, 1.0, start_s=4.5, memory=memory, curve=[(0, 0.25), (10, 0.5)]),
        a_row("TRL", rng, 9.0, start_s=12.0),
    ]
    again = [a_row("whet", rng, 1.0, start_s=4.5, curve=[(0, 0.35), (10, 0.8)])]
    table = a_table("Runs", [a_case("seed 1", runs), a_case("seed 2", again)])
    write_report(make_results([table]), tmp_path)
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8").replace("\\", "")
    assert grid_cells(markdown, "whet")[0][-2:] == ["4.50 s", "0.250 → 0.500"]
    assert grid_cells(markdown, "TRL")[0][-2:] == ["12.0 s", ""]
    assert "| activations of a training step | 5 MiB |" in markdown and "| total | 8 MiB |" in markdown
    (line,) = learning_figure(table, 2, LIGHT_COLORS).axes[0].lines
    assert line.get_xdata().tolist() == [0, 10] and line.get_ydata() == pytest.approx([0.3, 0.65])
    assert (tmp_path / "runs-learning.png").exists()


def test_training_runs_show_their_scores(tmp_path):
    rng = np.random.default_rng(0)
    rows = {
        "dpo": a_row("whet", rng, 90.0, scores=[(0.25, 0.5), (0.25, 0.75)], note="time under load"),
        "sft": a_row("whet", rng, 60.0, scores=[(0.25, 0.2)]),
    }
    table = a_table("Methods", [a_case(name, [row]) for name, row in rows.items()])
    write_report(make_results([table]), tmp_path)
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8").replace("\\", "")
    assert "times as fast" not in markdown.partition("## Verification")[0]  # one provider
    assert [cells[-1] for cells in grid_cells(markdown, "whet")[:2]] == ["0.250 → 0.625 (0.500–0.750)", "0.250 → 0.200"]
    assert "whet: time under load" in markdown
    axes = scores_figure(table, 2, LIGHT_COLORS).axes[0]
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0.25, 0.375), (0.25, pytest.approx(-0.05))]
    assert [list(line.get_xdata()) for line in axes.lines] == [[0.5, 0.75], [0.2]]
    assert (tmp_path / "methods-scores.png").exists()


def test_verification_has_the_worst_case_of_every_provider(tmp_path):
    rng = np.random.default_rng(0)
    cases = [
        a_case("small", [a_row("whet", rng, 1.0, error=1e-7, tolerance=1e-6), a_row("a", status="failed", why="no")]),
        a_case("large", [a_row("whet", rng, 1.0, error=2e-7, tolerance=1e-5), a_row("a", rng, 1.0)]),
    ]
    cases[0]["rows"][1]["error"] = None
    cases[1]["rows"].append(a_row("b", status="wrong", why="shapes differ", error=math.inf))
    write_report(make_results([a_table("T", cases)]), tmp_path)
    after = (tmp_path / "report.md").read_text().split("## Verification")[1].split("## Method")[0]
    # 1e-7 is closer to its tolerance of 1e-6 than 2e-7 to 1e-5.
    assert [row[2:] for row in grid_cells(after, "whet")] == [["1e-07", "1e-06", "small", "2"]]
    assert [row[2:] for row in grid_cells(after, "a")] == [["2.2e-16", "1e-12", "large", "1"]]
    assert [row[2:] for row in grid_cells(after, "b")] == [["**inf**", "1e-12", "large", "1"]]
    assert (
        json.loads((tmp_path / "results.json").read_text())["tables"][0]["cases"][1]["rows"][2]["error"] == "Infinity"
    )


def test_results_json_equals_the_results(folder):
    assert json.loads((folder / "results.json").read_text(encoding="utf-8")) == full_results()


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        ({"load": {"before": [1.1, 1, 1], "after": []}}, "The machine was busy: load 1.1 on 2 processors"),
        ({"quick": True}, "Quick run: few rounds"),
        ({"interrupted": True}, "The run was interrupted"),
    ],
)
def test_load_quick_and_interrupted_runs_have_a_warning(tmp_path, fields, warning):
    calm = {"load": {"before": [1.0, 1, 1], "after": []}}
    for given, expected in ((fields, True), (calm, False)):
        html = write_report(make_results([], **given), tmp_path).read_text(encoding="utf-8")
        assert (f"<p><strong>{warning}" in html) == expected


def test_report_has_machine_method_and_ceilings(folder):
    text = Page((folder / "report.html").read_text(encoding="utf-8")).text
    for expected in (
        "AMD EPYC 9R14", "32 KiB", "avx512bf16", "b5d2eb3 (modified)", "whet bench llm-ops --threads 2", "0.1 0.2 0.3",
        "read, L2", "220 GB/s", "460 GFLOP/s", "1 thread", "in random order", "95% percentile bootstrap", "rlox",
    ):  # fmt: skip
        assert expected in text


def test_terminal_table_shows_every_row_and_reason():
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    rng = np.random.default_rng(0)
    for table in (sized_table(rng), statuses_table(rng, title="[red]Token KL[/nope]")):
        console.print(rich_table(table))
    text = console.export_text()
    assert "[red]Token KL[/nope]" in text
    assert re.search(r"rlox +10\.\d µs +5\.\d+× \[5\.\d+, 5\.\d+\] \*\*\* +2\.30 GB/s +6% of L2 +6\.60 µs", text)
    for word in ("absent", "wrong", "failed", "refused", "planted failure", "is not installed", "impossible: 40 times"):
        assert word in text


def test_figures_are_formatted_with_units():
    assert [duration(s) for s in (3e-10, 2.2e-6, 9.996e-7, 0.0123, 1.5, 125.0, 0.0)] == [
        "0.300 ns", "2.20 µs", "1.00 µs", "12.3 ms", "1.50 s", "125 s", "0 ns",
    ]  # fmt: skip
    assert duration(2.1e-6, 2.3e-6) == "2.10–2.30 µs" and duration(9.9e-7, 1.2e-6) == "990–1,200 ns"
    assert [significant(x) for x in (0.012345, 4.0, 9.999, 12345.6, 0.0, 1e-9)] == [
        "0.0123", "4.00", "10.0", "12,346", "0", "1e-09",
    ]  # fmt: skip
    assert [size(n) for n in (0, 1023, 32768, 1.5 * 2**30)] == ["0 bytes", "1023 bytes", "32 KiB", "1.50 GiB"]
    assert times(Ratio(0.5, 0.4, 0.6)) == "0.500× [0.400, 0.600] ***"
    assert times(Ratio(1.01, 0.9, 1.2)) == "1.01× [0.900, 1.20]"
    row = a_row("x", bandwidth=2e9, flops=3e9, bound="float32 FMA", share=0.004, items_per_s=1234.0)
    assert (rate(row), share(row), items_rate(row)) == ("3.00 GFLOP/s", "0.4% of float32 FMA", "1.23 k")
    row |= {"bound": "memory bandwidth", "share": 0.314}
    assert (rate(row), share(row)) == ("2.00 GB/s", "31% of memory bandwidth")
    assert (rate(a_row("x")), share(a_row("x")), items_rate(a_row("x"))) == ("", "", "")


def test_case_label_has_cache_and_threads(tmp_path):
    rows = [a_row("whet", np.random.default_rng(0), 1.0)]
    cases = [a_case("8", rows, cache="cold", threads=1), a_case("8 cold", rows, cache="cold"), a_case("8", rows)]
    write_report(make_results([a_table("t", cases)]), tmp_path)
    labels = [row[0] for row in grid_cells((tmp_path / "report.md").read_text(), "whet")]
    assert labels[:3] == ["8, cold, 1 thread", "8 cold", "8"]


def test_missing_package_is_named_with_its_pip_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=mentions("write_report", "matplotlib", "pip install 'whet[train]'")):
        write_report(full_results(), tmp_path)
    assert Path(tmp_path / "results.json").exists()  # the results are kept
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    with pytest.raises(MissingExtraError, match=mentions("markdown_page", "markdown-it-py", "pip install 'whet[")):
        write_report(full_results(), tmp_path)
    monkeypatch.setitem(sys.modules, "rich.table", None)
    with pytest.raises(MissingExtraError, match=mentions("rich_table", "rich", "pip install whet")):
        rich_table(full_results()["tables"][0])
