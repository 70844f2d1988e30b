"""The report of a run is a self-contained, well-formed, escaped page."""

from __future__ import annotations

import json
import math
import re
from xml.etree import ElementTree

import pytest
from tests.raising import assert_raises
from tests.report.parsed_page import EVIL, Page

from whet.errors import WhetValueError
from whet.memory import PARTS
from whet.report.run import write_report
from whet.training.loggers import JSONLLogger


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


def test_report_shows_the_run(run):
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


def test_main_curve_is_a_standalone_svg(run):
    write_report(run, title=EVIL)
    text = (run / "curve.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    words = ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert root.get("aria-label") == EVIL and words[:3] == [EVIL, "Accuracy", "25.0% → 87.5%"] and "100%" in words
    assert "prefers-color-scheme: dark" in text and text.count("http://") == 3  # xmlns, and EVIL twice


def test_report_shows_peak_memory_by_owner(run):
    figures = {"measured": {"weights": 3_000_000, "activations": 7e6}, "resident": 10_000_000, "peak": 11_000_000}
    (run / "memory.json").write_text(json.dumps({**figures, "predicted": {"weights": 3e6, "allocator": 5e5}}))
    html = write_report(run, title="t").read_text()
    assert "Peak memory" in Page(html).text
    cells = [re.findall(r'<td class="\w*">(.*?)</td>', row) for row in re.findall(r"<tr>(.*?)</tr>", html)]
    for words, measured, predicted in (
        (PARTS["weights"], "3", "3"),
        (PARTS["activations"], "7", "0"),
        (PARTS["allocator"], "0", "0"),
        ("total", "10", "4"),
    ):
        assert [words, measured, predicted] in cells
    (run / "memory.json").write_text("{")
    assert_raises(WhetValueError, ("memory.json",), write_report, run, title="t")


def test_report_has_no_scripts_and_no_external_resources(run):
    shown = Page(write_report(run, title="t", samples_after=[{"prompt": EVIL, "completion": EVIL}]).read_text())
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(shown.tags)
    for name, value in shown.attributes:
        assert not name.startswith("on")
        assert "//" not in value and not value.startswith("javascript:")
        assert name != "src" and (name != "href" or value.startswith("#"))
    html = (run / "report.html").read_text()
    assert "@import" not in html
    assert all(target.startswith("#") for target in re.findall(r"url\((.*?)\)", html))


def test_report_is_deterministic(run):
    strip = re.compile(r"<footer>.*</footer>")
    pages = [strip.sub("", write_report(run, title="t").read_text()) for _ in range(2)]
    assert pages[0] == pages[1]
    ids = re.findall(r' id="([^"]+)"', pages[0])
    drawn = [i for i in ids if re.match(r"[mp][0-9a-f]{10}", i)]
    assert len(drawn) > 4 and len(drawn) == len(set(drawn))  # unique ids of markers and clip paths


def test_charts_use_the_colours_of_the_page(run):
    html = write_report(run, title="t").read_text()
    svgs = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(svgs) == 4
    assert all("var(--accent)" in svg and "var(--muted)" in svg for svg in svgs)
    assert not any(re.search(r"#[0-9a-f]{6}\b", svg) for svg in svgs)
    assert "prefers-color-scheme: dark" in html
    for name in re.findall(r"var\((--\w+)\)", html):
        assert html.count(f"{name}:") == 2  # defined for light and for dark


def test_report_of_one_step_without_other_files(tmp_path):
    JSONLLogger(tmp_path / "metrics.jsonl").log({"loss": 0.5}, 1)
    shown = Page(write_report(tmp_path, title="t").read_text())
    assert "0.500 → 0.500" in shown.text and "Configuration" not in shown.text


def test_chat_prompts_are_shown_as_messages(tmp_path):
    JSONLLogger(tmp_path / "metrics.jsonl").log({"loss": 0.5}, 1)
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    row = {"step": 1, "prompt": prompt, "completion": "2", "reward": 1.0}
    JSONLLogger(tmp_path / "completions.jsonl").write(row)
    text = Page(write_report(tmp_path, title="t", samples_after=[row]).read_text()).text
    assert text.count("system: Be brief.\n\nuser: 1+1?") == 2 and "'role'" not in text


def test_empty_table_of_the_configuration_is_a_setting(tmp_path):
    JSONLLogger(tmp_path / "metrics.jsonl").log({"loss": 0.5}, 1)
    (tmp_path / "config.toml").write_text("seed = 3\n[logit_bias]\n")
    html = write_report(tmp_path, title="t").read_text()
    assert "<tr><th>logit_bias</th><td>{}</td></tr>" in html and "<h3>" not in html


def test_headline_has_held_out_and_training_rewards(tmp_path):
    metrics = JSONLLogger(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        metrics.log({"eval/mean_reward": 0.25 * step, "mean_reward": 0.125 * step}, step)
    html = write_report(tmp_path, title="t").read_text()
    assert "<dt>held-out reward</dt><dd>0.250 → 0.500</dd>" in html
    assert "<dt>reward</dt><dd>0.125 → 0.250</dd>" in html


def test_prompts_are_shown_once_per_group_of_completions(tmp_path):
    JSONLLogger(tmp_path / "metrics.jsonl").log({"loss": 0.5}, 1)
    completions = JSONLLogger(tmp_path / "completions.jsonl")
    for prompt in ("p1", "p1", "p2", "p1"):
        completions.write({"step": 1, "prompt": prompt, "completion": "c", "reward": 1.0})
    html = write_report(tmp_path, title="t").read_text()
    assert re.findall(r'<td class="text">(p\d|)</td>', html) == ["p1", "", "p2", "p1"]


def test_means_of_several_tasks_have_charts(tmp_path):
    for names, n_charts in ((["a"], 2), (["a", "b"], 4)):
        folder = tmp_path / str(n_charts)
        metrics = JSONLLogger(folder / "metrics.jsonl")
        for step in (1, 2):
            means = {f"rewards/{name}/mean": math.nan for name in names}
            metrics.log({"mean_reward": 0.5, "eval/rewards/a/mean": 0.5, **means}, step)
        html = write_report(folder, title="t").read_text()
        captions = re.findall("<figcaption>(.*?)<span>", html)
        assert captions == ["Reward", "held-out a", *(names if len(names) > 1 else [])] and len(captions) == n_charts


def test_long_samples_are_truncated(tmp_path):
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
    assert_raises(WhetValueError, ("config.json",), write_report, tmp_path, title="t")
    assert "<dt>held-out accuracy</dt><dd>34.5% → 91.0%</dd>" in html


def test_missing_and_damaged_files_are_named(run):
    (run / "config.toml").write_text("= 3")
    assert_raises(WhetValueError, ("config.toml", "read"), write_report, run, title="t")
    (run / "completions.jsonl").write_text("{}\n")
    assert_raises(WhetValueError, ("completions.jsonl:1", "step"), write_report, run, title="t")
    (run / "metrics.jsonl").write_text("")
    assert_raises(WhetValueError, ("metrics.jsonl", "no metrics", "JSONLLogger"), write_report, run, title="t")
    (run / "metrics.jsonl").unlink()
    assert_raises(WhetValueError, ("metrics.jsonl is missing",), write_report, run, title="t")
    assert not (run / "report.html").exists()


def test_episodes_have_transcripts(run):
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": EVIL}}}

    def episode(step, reward, end, error=""):
        turns = [
            {"role": "assistant", "content": f"I add {step}.", "reasoning_content": "so", "tool_calls": [call]},
            {"role": "tool", "name": "add", "content": EVIL},
            {"role": "assistant", "content": f"It is {reward}."},
        ]
        prompt = [{"role": "user", "content": "one and two"}]
        return {"step": step, "prompt": prompt, "completion": turns, "reward": reward, "end": end, "error": error,
                "turn_rewards": [0.0, 0.5]}  # fmt: skip

    (run / "completions.jsonl").unlink()
    rows = JSONLLogger(run / "completions.jsonl")
    for row in (
        episode(1, 0.5, "done"), episode(1, 2.0, "turns"), episode(1, 1.0, "turns"), episode(2, 3.0, "done"),
        episode(9, 4.0, "done"), episode(9, float("nan"), "error", f"ValueError: {EVIL}"),
    ):  # fmt: skip
        rows.write(row)
    html = write_report(run, title="Game").read_text(encoding="utf-8")
    shown = Page(html)
    cells = [
        re.findall(r'<td class="\w*">(.*?)</td>', row, re.DOTALL)
        for row in re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL)
    ]
    assert ["done", "1", "1", "3"] in cells and ["turns", "2", "0", "2"] in cells and ["error", "0", "1", "1"] in cells
    for text in ("Episodes of step 1", "Episodes of step 9", "Reward 2, ended by turns", "Reward 0.5, ended by done",
                 "No reward, ended by error: ValueError: " + EVIL, "It is 4.0."):  # fmt: skip
        assert text in shown.text, text
    assert "It is 1.0." not in shown.text and "It is 3.0." not in shown.text  # of four transcripts
    assert ["user", "one and two", ""] in cells and ["assistant", "It is 2.0.", "0.5"] in cells
    turn = next(row for row in cells if row[:1] == ["assistant"] and "I add 9." in row[1])
    assert turn[2] == "0" and "(so)" in turn[1] and "→ add(a=1, b=" in turn[1]
    assert "script" not in shown.tags and shown.text.count(EVIL) > 4
