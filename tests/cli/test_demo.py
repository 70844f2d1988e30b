"""The demo with a few steps: its files, its last line, and reproducibility."""

import json
import re

import pytest

from whet.cli import main
from whet.cli.arithmetic import exact_match, make_problems, make_tokenizer

SHORT = ["--sft-max-steps", "3", "--grpo-max-steps", "2", "--n-held-out", "12"]


def test_problems_are_all_sums_and_held_out_problems_are_disjoint():
    rows, held_out = make_problems(0, 400)
    prompts = {row["prompt"] for row in rows}
    assert len(prompts) == 9600 and not prompts & {row["prompt"] for row in held_out}
    assert all(int(r["answer"]) == sum(map(int, r["prompt"].rstrip("=").split("+"))) for r in rows + held_out)


def test_tokenizer_round_trip():
    tokenizer = make_tokenizer()
    ids = tokenizer("12+93=105")["input_ids"]
    assert len(ids) == 9
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "12+93=105"


def test_reward_is_exact_match():
    assert exact_match(["105", "1055", "", "104"], ["105"] * 4) == [1.0, 0.0, 0.0, 0.0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folders = [tmp_path_factory.mktemp("demo") / name for name in ("first", "second")]
    for folder in folders:
        # Three steps do not reach the accuracy, so the exit status is 1.
        assert main(["demo", "--output-dir", str(folder), *SHORT]) == 1
    return folders


def test_demo_writes_records_and_a_model_that_transformers_loads(runs):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = runs[0]
    for name in ("config.toml", "completions.jsonl", "report.html", "checkpoints/step-000002/manifest.json"):
        assert (folder / name).is_file(), name
    assert AutoTokenizer.from_pretrained(folder / "model")("1+1=")["input_ids"]
    assert AutoModelForCausalLM.from_pretrained(folder / "model").num_parameters() > 1_000_000
    report = (folder / "report.html").read_text()
    assert "held-out accuracy" in report and "<script" not in report


def test_same_seed_repeats_the_run(runs):
    def records(folder):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        timing = {"step_time_s", "tokens_per_s"}
        return [{k: v for k, v in row.items() if k not in timing and "time" not in k} for row in rows]

    first, second = map(records, runs)
    assert first == second and len(first) >= 2
    assert (runs[0] / "completions.jsonl").read_text() == (runs[1] / "completions.jsonl").read_text()


def test_last_line_has_accuracies_and_times(tmp_path, capsys):
    assert main(["demo", "--output-dir", str(tmp_path / "run"), *SHORT]) == 1
    printed = capsys.readouterr()
    line = r"held-out accuracy: \d+\.\d% -> \d+\.\d% \(SFT \d+ s, GRPO \d+ s, total \d+ s\)"
    assert re.fullmatch(line, printed.out.rstrip().splitlines()[-1])
    assert "90%" in printed.err and "--grpo-max-steps" in printed.err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--sft-until", "nan"], "sft_until is nan"),
        (["--grpo-until", "90"], "grpo_until is 90.0"),
        (["--n-held-out", "0"], "n_held_out is 0"),
        (["--seed", "-1"], "seed is -1"),
        (["--engine", "torch", "--rollout-weights", "int8"], "rollout_weights is 'int8'"),
    ],
)
def test_invalid_settings_are_named(flags, expected, tmp_path, capsys):
    try:
        assert main(["demo", "--output-dir", str(tmp_path / "run"), *flags]) == 2
    except SystemExit as exit_:  # tyro prints errors of a config in a box
        assert exit_.code == 2
    assert expected in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_demo_deletes_only_its_own_files(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    main(["demo", "--output-dir", str(tmp_path), *SHORT])
    assert (tmp_path / "mine.txt").read_text() == "keep"
