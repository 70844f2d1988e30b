"""Evaluation: sampling and scoring of items, failing, hanging and dying scorers, comparison of two models."""

import os
import time

import numpy as np
import pytest
from tests.raising import assert_raises
from tests.tiny import EOS, ScriptedEngine, letters_tokenizer, tiny_llama

from whet.config.sampling import SamplingParams
from whet.engine import Engine
from whet.errors import WhetValueError
from whet.evaluation import RewardedRows, compare, evaluate, read_items
from whet.evaluation.statistics import proportion

GREEDY = SamplingParams(temperature=0, max_new_tokens=4, stop_token_ids=(EOS,))
A, B, C, D = range(4, 8)
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}h{% endif %}"


class Letters:
    """A completion scores 1 if it is the letter, 0.5 if it contains the letter."""

    name = "letters"
    system_prompt = ""

    def __init__(self, prompts="abcd"):
        self.rows = [{"prompt": prompt, "answer": prompt, "metadata": {}} for prompt in prompts]

    def score(self, completion, row):
        return 1.0 if completion == row["answer"] else 0.5 * (row["answer"] in completion)


@pytest.fixture(scope="module")
def tokenizer():
    return letters_tokenizer()


def run(groups, tokenizer, task=None, **options):
    items = read_items(task or Letters(), tokenizer)
    return evaluate(ScriptedEngine(groups), items, tokenizer, sampling=GREEDY, n=len(groups[0]), **options)


RIGHT = [[A, EOS]], [[B, EOS]], [[C, EOS]], [[D, EOS]]


def test_samples_are_scored_and_counted(tokenizer):
    seen = []
    engine = ScriptedEngine([[[A, EOS]], [[C, EOS]], [[A, C, A, A]], [[D, EOS]]])
    items = read_items(Letters(), tokenizer)
    result = evaluate(engine, items, tokenizer, sampling=GREEDY, on_item=lambda: seen.append(1))
    assert engine.asked == [([[A], [B], [C], [D]], 1, GREEDY)] and len(seen) == 4
    assert result.texts == [["a"], ["c"], ["acaa"], ["d"]]
    assert result.scores.tolist() == [[1], [0], [0.5], [1]] and result.is_graded and not result.failures
    found = result.summary()
    assert found["accuracy"] == proportion(np.array([1.0, 0, 0, 1]))._asdict()
    assert found["score"]["value"] == 0.625 and found["pass_at"] == {"1": found["accuracy"]}
    assert (found["items"], found["samples"], found["truncated"]) == (4, 1, 0.25)
    assert (found["prompt_tokens"], found["completion_tokens"]) == (1, 2.5)
    records = result.records()
    assert records[0] == {
        "item": 0, "prompt": "a", "answer": "a",
        "completions": [{"text": "a", "score": 1.0, "n_tokens": 2, "finish_reason": "stop"}],
    }  # fmt: skip


def test_completions_end_before_stop_strings(tokenizer):
    items = read_items(Letters(), tokenizer)
    whole, cut = (
        SamplingParams(max_new_tokens=12, temperature=2.0, seed=1, **stop) for stop in ({}, {"stop": ["b", "c"]})
    )
    with Engine.from_model(tiny_llama(), weights="float32", tokenizer=tokenizer) as engine:
        texts = [evaluate(engine, items, tokenizer, sampling=sampling, n=2).texts for sampling in (whole, cut)]
    expected = [[min(text.partition(stop)[0] for stop in "bc") for text in group] for group in texts[0]]
    assert texts[1] == expected != texts[0]


@pytest.mark.parametrize("opens", [False, True])
def test_opening_tag_of_thinking_in_the_prompt_is_part_of_the_completion(opens):
    tokenizer = letters_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATE + "{# <think> </think> #}" + "<think>" * opens

    class Chats(Letters):
        def __init__(self):
            self.rows = [{"prompt": [{"role": "user", "content": "a"}], "answer": "a"}]

        def score(self, completion, row):
            return float(completion == ("<think>a" if opens else "a"))

    assert run([[[A, EOS]]], tokenizer, Chats()).scores.tolist() == [[1]]


def test_several_completions_give_pass_at_k(tokenizer):
    groups = [[[A, EOS], [B, EOS], [A, EOS]], [[A, EOS], [A, EOS], [A, EOS]]]
    result = run(groups, tokenizer, Letters("ab"))
    found = result.summary()
    assert not result.is_graded and found["score"] == found["accuracy"]
    assert found["accuracy"]["value"] == pytest.approx(1 / 3)
    assert {k: e["value"] for k, e in found["pass_at"].items()} == pytest.approx({"1": 1 / 3, "2": 0.5})


def test_prompts_equal_those_in_training(tokenizer):
    task = Letters("ab")
    task.system_prompt = "cd"
    assert read_items(task, tokenizer).prompt_ids == [[C, D, 3, 3, A], [C, D, 3, 3, B]]  # a paragraph before it
    chat = Letters()
    chat.system_prompt = "d"
    chat.rows = [{"prompt": [{"role": "user", "content": "a"}]}]
    assert_raises(WhetValueError, ("letters", "no chat template", "--chat-template"), read_items, chat, tokenizer)
    assert read_items(chat, tokenizer, raw=True).prompt_ids == [[D, 3, 3, A]]
    templated = letters_tokenizer()
    templated.chat_template = TEMPLATE
    assert read_items(chat, templated).prompt_ids == [[D, 3, A, 3, 11]]
    chat.rows = []
    assert_raises(WhetValueError, ("eval: ", "letters", "no items"), read_items, chat, tokenizer, where="eval")


def test_prompts_that_exceed_the_context_are_counted(tokenizer):
    items = read_items(Letters(["a", "abc", "abcdefgh"]), tokenizer)
    items.check_context(8, 16, "eval")
    facts = "eval: ", "2 of 3 prompts", "letters", "10 positions", "8 tokens", "Lower max_new_tokens to 2"
    assert_raises(WhetValueError, facts, items.check_context, 8, 10, "eval")
    assert_raises(WhetValueError, ("3 of 3 prompts", "items shorter"), items.check_context, 8, 8, "eval")


def test_evaluation_does_not_depend_on_batch_or_number_of_items():
    task, tokenizer = Letters("abcdefgh"), letters_tokenizer()
    sampling = SamplingParams(max_new_tokens=6, stop_token_ids=(EOS,), seed=5)
    few = Letters("abc")
    model = tiny_llama()
    with Engine.from_model(model, weights="float32") as engine:
        result = evaluate(engine, read_items(task, tokenizer), tokenizer, n=3, sampling=sampling)
        part = evaluate(engine, read_items(few, tokenizer), tokenizer, n=3, sampling=sampling)
    with Engine.from_model(model, weights="float32", max_batch=2) as engine:
        narrow = evaluate(engine, read_items(task, tokenizer), tokenizer, n=3, sampling=sampling)
    assert narrow.texts == result.texts and narrow.completions == result.completions
    assert part.texts == result.texts[:3] and part.scores.tolist() == result.scores[:3].tolist()
    assert len({text for group in result.texts for text in group}) > 3


class Broken(Letters):
    """A scorer that fails in many ways."""

    def score(self, completion, row):
        if row["answer"] == "b":
            raise RuntimeError("no such letter")
        if row["answer"] == "c":
            return float("nan")
        if row["answer"] == "d":
            time.sleep(60)
        if row["answer"] == "e":
            os._exit(3)
        if row["answer"] == "f":
            return "1"
        return super().score(completion, row)


def test_scoring_failure_affects_only_its_completion(tokenizer):
    letters = "abcdeafa"
    groups = [[[4 + "abcdefgh".index(letter), EOS]] for letter in letters]
    result = run(groups, tokenizer, Broken(letters), timeout_s=3)
    assert result.scores[:, 0].tolist() == [1, 0, 0, 0, 0, 1, 0, 1]
    assert result.failures == {
        (1, 0): "it raised RuntimeError: no such letter",
        (2, 0): "it returned nan, which is not a finite number",
        (6, 0): "it returned '1', which is not a finite number",
        (3, 0): "CallTimeout: it did not return within timeout_s=3",
        (4, 0): "its process died with exit code 3",
    }
    assert result.summary()["scoring_failures"] == 5
    assert result.records()[3]["completions"][0]["failure"].startswith("CallTimeout")


def test_more_completions_than_a_child_scores(tokenizer):
    letters = "abcdefgh" * 40
    groups = [[[4 + "abcdefgh".index(letter), EOS], [A, EOS]] for letter in letters]
    result = run(groups, tokenizer, Letters(letters))
    assert result.solved[:, 0].all() and result.solved[:, 1].mean() == 1 / 8


def test_two_models_are_compared_item_by_item(tokenizer):
    first = run([[[A, EOS]], [[A, EOS]], [[A, EOS]], [[A, EOS]]], tokenizer)
    second = run(list(RIGHT), tokenizer)
    found = compare(first, second)
    assert found["accuracy_difference"]["value"] == 0.75 and found["score_difference"] == found["accuracy_difference"]
    assert (found["better"], found["worse"], found["p_value"]) == (3, 0, 0.25)
    half = run([[[A, B, EOS]], [[A, B, EOS]], [[C, EOS]], [[D, EOS]]], tokenizer)
    graded = compare(half, second)
    assert graded["accuracy_difference"]["value"] == 0.5 and graded["score_difference"]["value"] == 0.25
    other = run([[[A, EOS]]], tokenizer, Letters("a"))
    assert_raises(WhetValueError, ("compare", "different items"), compare, first, other)


# --- rows of a file -------------------------------------------------------------------------------------


def length(completions):
    return [len(text) / 2 for text in completions]


def right(completions, answer):
    return [None if a is None else float(c == a) for c, a in zip(completions, answer, strict=True)]


def test_rows_with_reward_functions_are_a_task(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": "a"}\n{"prompt": "b", "answer": null}\n')
    result = run([[[A, EOS]], [[B, EOS]]], tokenizer, RewardedRows(str(path), [length, right]))
    assert result.items.task.name == "rows"
    assert result.scores.tolist() == [[1.5], [0.5]] and not result.failures
    unscored = run([[[A, EOS]], [[B, EOS]]], tokenizer, RewardedRows(str(path), [right]))
    assert unscored.scores.tolist() == [[1], [0]] and unscored.failures == {
        (1, 0): "it returned nan, which is not a finite number"
    }


def test_output_of_a_task_is_redirected_to_standard_error(tokenizer, capfd):
    class Chatty(Letters):
        def score(self, completion, row):
            os.write(1, b"scoring\n")
            return super().score(completion, row)

    result = run(RIGHT, tokenizer, Chatty())
    assert result.scores.all()
    assert capfd.readouterr() == ("", "scoring\n" * 4)


def test_rows_that_cannot_be_scored_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    assert_raises(WhetValueError, ("rows.jsonl:2", "prompt"), RewardedRows, str(path), [length])
    path.write_text('{"prompt": "a"}\n')
    by_ids = lambda completion_ids: [0.0]  # noqa: E731
    assert_raises(WhetValueError, ("<lambda>", "completion_ids"), RewardedRows, str(path), [by_ids])
