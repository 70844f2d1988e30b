"""All data sets of reasoning-gym as tasks, their rows, and workarounds for their verifiers."""

import json
import random

import numpy as np
import pytest

reasoning_gym = pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: pip install 'whet[gym]'")

from reasoning_gym.factory import DATASETS, create_dataset  # noqa: E402
from tests.processes import printed_by  # noqa: E402
from tests.raising import assert_raises, mentions  # noqa: E402

from whet.errors import MissingExtraError, WhetValueError  # noqa: E402
from whet.tasks import open_task  # noqa: E402
from whet.tasks.reasoning_gym import _UNORDERED, _UNUSABLE  # noqa: E402

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def open_gym(name, split="train", **settings):
    return open_task({"name": f"reasoning_gym:{name}", **settings}, split=split)


def score(task, completion, **row):
    return task.score(completion, {**task.rows[0], **row})


# --- every data set -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DATASETS)
def test_every_data_set_is_a_task_or_rejected_with_a_reason(name, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    if name in _UNUSABLE:
        assert_raises(WhetValueError, (f"reasoning_gym:{name}", _UNUSABLE[name]), open_gym, name)
        return
    task = open_gym(name, size=2, system_prompt="")
    rows = [task.rows[i] for i in (1, 0)]
    assert [str(task.rows[i]) for i in (0, 1)] == [str(row) for row in rows[::-1]]
    for row in rows:
        assert row["prompt"] == [{"role": "user", "content": row["question"]}]
        for junk in ("", " ", "?", "junk", "1", None, 3, "[]", "{}", "C4", "<answer></answer>"):
            assert task.score(junk, row) == (junk is not None and junk == row["answer"]), junk
        if row["answer"] is not None:
            assert task.score(row["answer"], row) == 1


def test_data_sets_of_the_pinned_release():
    assert len(DATASETS) == 106 and set(_UNUSABLE) <= set(DATASETS)


# --- rows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", _UNORDERED)
def test_data_sets_that_depend_on_set_order_need_a_hash_seed(name, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert_raises(WhetValueError, (f"reasoning_gym:{name}", "PYTHONHASHSEED=0"), open_gym, name)


def test_rows_are_the_same_in_every_process():
    names = ["list_functions", "pool_matrix", "chain_sum", "letter_jumble", "family_relationships"]
    code = f"from whet.tasks import open_task\nfor name in {names}:"
    code += "\n print(open_task('reasoning_gym:' + name + ',size=3').rows[:])"
    here = [str(open_gym(name, size=3).rows[:]) for name in names]
    assert printed_by(code, PYTHONHASHSEED="1").splitlines() == here


def test_rows_without_held_out_items_equal_reasoning_gyms():
    theirs = create_dataset("chain_sum", seed=7, size=50, **SUMS)
    task = open_gym("chain_sum", seed=7, size=50, held_out=0, options=SUMS)
    assert len(task.rows) == 50
    for row, item in zip(task.rows, theirs, strict=True):
        assert {key: row[key] for key in ("question", "answer", "metadata")} == item
    every = open_gym("chain_sum", "eval", seed=7, size=50, held_out=1, options=SUMS)
    assert list(every.rows) == list(task.rows)


def test_evaluation_questions_never_occur_in_training():
    """There are only 200 one-digit sums, so that different seeds repeat them."""
    options = {**SUMS, "max_digits": 1}
    train = {row["question"] for seed in (0, 5) for row in open_gym("chain_sum", size=2000, seed=seed, **options).rows}
    held_out = {row["question"] for row in open_gym("chain_sum", "eval", size=200, seed=1, **options).rows}
    assert not train & held_out and len(train | held_out) > 190 and len(held_out) > 10
    theirs = {item["question"] for item in create_dataset("chain_sum", seed=10**6, size=2000, **options)}
    assert held_out < theirs


def test_rows_depend_only_on_their_index_and_global_generators_are_restored():
    for name in ("chain_sum", "pool_matrix", "gsm_symbolic", "list_functions"):
        task = open_gym(name, "eval", size=6)
        rows = [str(row) for row in task.rows]
        random.seed(5), np.random.seed(5)  # noqa: NPY002
        again = open_gym(name, "eval", size=6)
        assert [str(again.rows[i]) for i in (5, 2, -1, 0, -6)] == [rows[i] for i in (5, 2, 5, 0, 0)]
        assert again.rows[1:3] == [again.rows[1], again.rows[2]]
        drawn = random.random(), np.random.random()  # noqa: NPY002
        random.seed(5), np.random.seed(5)  # noqa: NPY002
        assert drawn == (random.random(), np.random.random())  # noqa: NPY002
        with pytest.raises(IndexError):
            task.rows[6]


def test_too_few_questions_and_empty_splits():
    options = {"min_terms": 1, "max_terms": 1, "max_digits": 1}
    with pytest.raises(WhetValueError, match=mentions("3000 items", "row 0", "'eval'", "held_out = 0.01")):
        open_gym("chain_sum", "eval", held_out=0.01, **options)
    for split, share in (("eval", 0), ("train", 1)):
        assert_raises(
            WhetValueError, (f"held_out is {share}", f"'{split}'"), open_gym, "chain_sum", split, held_out=share
        )


# --- system prompts and answers -------------------------------------------------------------------------


def test_default_prompt_and_scoring_by_the_last_number():
    task = open_gym("chain_sum")
    assert task.system_prompt == "Answer with the number alone."
    row = {"answer": "1041"}
    for text in ("1041", "1,041", "The sum is 1041.", "3 + 1038 = 1041\n", "1041.0", "<think>7</think>1041"):
        assert score(task, text, **row) == 1, text
    for text in ("", "none", "1042", "1041 or 7", "-1041", "11041", "1041 </think> 7", "<think>1041"):
        assert score(task, text, **row) == 0, text
    assert score(open_gym("chain_sum", partial_credit=True), "11041", **row) == 0.8


@pytest.mark.parametrize("space", ["\u00a0", "\u202f", "\u2009"])
def test_typographic_minus_signs_and_spaces_in_numbers(space):
    task = open_gym("chain_sum")
    assert score(task, "It is \u22121041.", answer="-1041") == 1
    assert score(task, "It is \u20131041.", answer="-1041") == 1
    assert score(task, "between 5\u20131041", answer="1041") == 1
    assert score(task, f"It is 1{space}041.", answer="1041") == 1
    assert score(task, f"It is {space}12 of 1{space}04.", answer="104") == 0
    assert score(task, "\u22121041", answer="1041") == 0


@pytest.mark.parametrize("text", ["[THINK]1041", "<|START_THINKING|>1041", "<seed:think>1041", "<think>\nhm 1041"])
def test_truncated_thinking_is_not_an_answer(text):
    assert score(open_gym("chain_sum"), text, answer="1041") == 0


def test_answers_that_are_not_numbers_are_the_whole_text():
    task = open_gym("spell_backward")
    assert task.system_prompt == "Answer with the final answer alone."
    assert score(task, " cba\n", answer="cba") == 1 and score(task, "It is cba", answer="cba") == 0


@pytest.mark.parametrize("name", ["default", "direct"])
def test_prompts_with_answer_tags_are_scored_by_tags(name):
    task = open_gym("chain_sum", system_prompt=name)
    assert task.system_prompt == reasoning_gym.utils.SYSTEM_PROMPTS[name]
    assert score(task, "So <answer> 12 </answer>", answer="12") == 1
    assert score(task, "<answer>7</answer> no: <answer>12</answer>", answer="12") == 1
    assert score(task, "12", answer="12") == 0


def test_system_prompt_is_a_text_or_a_known_name():
    assert open_gym("chain_sum", system_prompt="Add these.").system_prompt == "Add these."
    assert open_gym("chain_sum", system_prompt="").system_prompt == ""
    assert_raises(WhetValueError, ("system_prompt is 'drect'", "direct"), open_gym, "chain_sum", system_prompt="drect")


# --- workarounds for verifiers --------------------------------------------------------------------------


def test_items_without_an_answer_are_scored_by_the_verifier():
    """Many colourings are right, and the item contains none."""
    task = open_gym("graph_color", size=1)
    row = task.rows[0]
    assert row["answer"] is None
    assert task.score('{"0": 1}', row) == 0 and task.score("none", row) == 0
    assert task.score(json.dumps(row["metadata"]["possible_answer"]), row) == 1


def test_verifier_that_raises_scores_zero():
    task = open_gym("prime_factorization", size=1)
    row = task.rows[0]
    with pytest.raises(ValueError):
        create_dataset("prime_factorization", seed=0, size=1).score_answer("two × three", row)
    assert task.score("two × three", row) == 0 and task.score(row["answer"], row) == 1


@pytest.mark.parametrize(("name", "junk"), [("countdown", "no idea"), ("puzzle24", "1"), ("tsumego", "C4")])
def test_score_for_the_form_of_an_answer_is_zero(name, junk):
    task = open_gym(name, size=1, partial_credit=True)
    row = task.rows[0]
    theirs = create_dataset(name, seed=0, size=1).score_answer(junk, row)
    assert 0 < theirs <= 0.05 and task.score(junk, row) == 0


def test_answers_with_code_are_not_evaluated(tmp_path):
    row, mark = open_gym("countdown", size=1).rows[0], tmp_path / "mark"
    for name in ("countdown", "puzzle24", "spiral_matrix", "string_insertion", "n_queens", "binary_matrix"):
        task = open_gym(name, size=1)
        row = task.rows[0]
        for program in (f"open('{mark}', 'w')", f"__import__('os').mkdir('{mark}')", "exec(chr(49))", "().__class__"):
            assert task.score(program, row) == 0
        assert not mark.exists()
    task = open_gym("simple_integration", size=1)
    assert task.score(task.rows[0]["answer"], task.rows[0]) == 1


def test_scoring_does_not_change_the_row(monkeypatch):
    """The verifier of knight_swap writes the boards of a right answer into the item."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    task = open_gym("knight_swap", size=1, max_nodes=6, min_pieces=1, max_pieces=1, system_prompt="")
    row = task.rows[0]
    before = str(row)
    task.score(row["answer"], row)
    assert str(row) == before


# --- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "facts"),
    [
        ("reasoning_gym:chainsum", ("'chainsum'", "Did you mean reasoning_gym:chain_sum or")),
        ("reasoning_gym:zzzzzz", ("'zzzzzz'", "chain_sum, ")),
        ("reasoning_gym:chain_sum,max_term=2", ("'max_term'", "Did you mean max_terms?")),
        ("reasoning_gym:chain_sum,sede=2", ("'sede'", "Did you mean seed?")),
        ("reasoning_gym:chain_sum,xyz=2", ("'xyz'", "min_terms, max_terms, ")),
        ("reasoning_gym:chain_sum,max_terms=0", ("reasoning_gym:chain_sum", "AssertionError: max_terms must be")),
        ("reasoning_gym:chain_sum,max_terms=two", ("reasoning_gym:chain_sum", "TypeError")),
        ("reasoning_gym:game_of_life_halting", ("reasoning_gym:game_of_life_halting", "verifier")),
    ],
)
def test_invalid_specs_are_named(spec, facts):
    assert_raises(WhetValueError, facts, open_task, spec)


def test_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    facts = "reasoning_gym:chain_sum", "reasoning-gym", "whet[gym]"
    assert_raises(MissingExtraError, facts, open_task, "reasoning_gym:chain_sum")


def test_package_is_imported_only_for_its_tasks():
    code = "import sys, whet.tasks, whet.runs.settings; print('reasoning_gym' in sys.modules, 'torch' in sys.modules)"
    assert printed_by(code) == "False False\n"
