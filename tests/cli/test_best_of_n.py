"""``whet best-of-n`` from the command line: JSON lines, reproducible sampling, errors."""

import json

import pytest
from tests.raising import assert_mentions
from transformers import AutoTokenizer

from whet.cli import main
from whet.data.rows import tokenize_turns
from whet.data.sources import read_rows

CONFIG = "examples/best_of_n.toml"


@pytest.fixture
def best_of_n(tmp_path, tiny_model, capsys):
    """Return a function that runs the command on the tiny model, by default with a reward for length."""
    (tmp_path / "size.py").write_text(
        "def size(completions, prompts):\n    return [None if len(c) == 3 else len(c) for c in completions]\n"
    )

    def run(*argv, reward=f"{tmp_path / 'size.py'}:size"):
        rewards = [f"--reward={reward}"] if reward else []
        status = main(["best-of-n", f"--model={tiny_model}", "--max-new-tokens=6", *rewards, *map(str, argv)])
        out, err = capsys.readouterr()
        return status, [json.loads(line) for line in out.splitlines()], err

    return run


def test_example_runs(best_of_n):
    status, rows, err = best_of_n(CONFIG, "--n=2", reward=None)
    assert status == 0 and "best of 2 of" in err
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in read_rows("examples/data/best_of_n.jsonl")]
    assert all(set(row) == {"prompt", "completion", "score"} and row["score"] in (0.0, 1.0) for row in rows)


def test_best_candidate_is_the_first_of_the_highest_score(best_of_n):
    _, rows, _ = best_of_n("--prompts=examples/data/best_of_n.jsonl", "--n=5", "--all-candidates", "--batch-size=5")
    assert len(rows) == 12
    for row in rows:
        assert len(row["candidates"]) == 5
        for candidate in row["candidates"]:
            length = len(candidate["completion"])
            assert candidate["score"] == (None if length == 3 else length)
        best = max((c for c in row["candidates"] if c["score"] is not None), key=lambda c: c["score"])
        assert {"completion": row["completion"], "score": row["score"]} == best
    # Prompts of one batch, and of different batches, are sampled for independently.
    assert len({json.dumps(row["candidates"]) for row in rows}) == 12


def test_completions_end_before_a_stop_string(best_of_n):
    argv = ["--prompts=examples/data/best_of_n.jsonl", "--n=2", "--all-candidates", "--max-new-tokens=40", "--seed=1"]
    texts = [[c["completion"] for c in row["candidates"]] for row in best_of_n(*argv)[1]]
    stop = next(character for character in texts[0][0][1:] if character.isalnum())
    cut = [[c["completion"] for c in row["candidates"]] for row in best_of_n(*argv, "--stop", stop)[1]]
    assert cut == [[text.partition(stop)[0] for text in row] for row in texts]


def test_seed_determines_the_candidates(best_of_n):
    argv = ["--prompt=Say something:", "--n=4", "--all-candidates"]
    (_, [first], _), (_, [again], _) = best_of_n(*argv), best_of_n(*argv)
    _, [other], _ = best_of_n(*argv, "--seed=1")
    assert first == again and first["prompt"] == other["prompt"] and first["candidates"] != other["candidates"]


def test_output_file_and_chat_prompts(best_of_n, tmp_path):
    prompts, output = tmp_path / "chat.jsonl", tmp_path / "new" / "out.jsonl"
    chat = [{"role": "user", "content": "é?"}]
    prompts.write_text(json.dumps({"prompt": chat}))
    status, rows, err = best_of_n(f"--prompts={prompts}", f"--output={output}", "--n=2")
    assert (status, rows) == (0, []) and "1/1 prompts" in err
    [row] = read_rows(output)
    assert row["prompt"] == chat and row["completion"][0]["role"] == "assistant"


def test_rows_above_a_score_are_rows_of_sft(best_of_n, tmp_path, tiny_model):
    rows = best_of_n("--prompts=examples/data/best_of_n.jsonl", "--n=2")[1]
    least, output = sorted(row["score"] for row in rows)[6], tmp_path / "kept.jsonl"
    expected = [row for row in rows if row["score"] >= least]
    argv = ["--prompts=examples/data/best_of_n.jsonl", "--n=2", f"--min-score={least}", f"--output={output}"]
    status, _, err = best_of_n(*argv)
    assert status == 0 and f"{len(expected)} of 12 prompts" in err
    assert read_rows(output) == expected and 0 < len(expected) < 12
    chat = {"prompt": [{"role": "user", "content": "é?"}], "completion": [{"role": "assistant", "content": "a"}]}
    assert len(tokenize_turns(chat, AutoTokenizer.from_pretrained(tiny_model))[1]) > 0
    assert len(tokenize_turns(expected[0], AutoTokenizer.from_pretrained(tiny_model))[1]) > 0


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], ("--prompts", "--prompt", "--task")),
        (["--prompt=a", "--prompts=examples/data/best_of_n.jsonl"], ("--prompts", "--prompt", "--task")),
        (["--prompts=nosuch.jsonl"], ("'nosuch.jsonl'",)),
        (["--prompt=a", "--output=README.md/x"], ("output", "'README.md/x'")),
        (["--prompt=a", "--unsafe-local"], ("unsafe_local", "no reward function runs programs")),
        (["--prompt=a", "--reward-weights", "1", "2"], ("weights is [1.0, 2.0]", "1 finite number")),
    ],
)
def test_invalid_arguments_are_named(argv, expected, best_of_n):
    status, rows, err = best_of_n(*argv)
    assert status == 2 and rows == []
    assert_mentions(err.splitlines()[-1], *expected)


def test_row_without_a_prompt_is_named(best_of_n, tmp_path):
    prompts = tmp_path / "rows.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"question": "b"}\n')
    status, rows, err = best_of_n(f"--prompts={prompts}")
    assert status == 2 and rows == []
    assert_mentions(err, "rows.jsonl:2: tokenize_prompt", "'prompt'")


def test_reward_is_required_and_prompts_need_a_score(best_of_n, tmp_path):
    assert_mentions(best_of_n("--prompt=a", reward="")[2], "reward is missing", "--reward")
    (tmp_path / "no.py").write_text("def no(completions):\n    return [None] * len(completions)\n")
    status, _, err = best_of_n("--prompt=a", reward=f"{tmp_path / 'no.py'}:no")
    assert status == 2
    assert_mentions(err, "candidate", "prompt 0")
