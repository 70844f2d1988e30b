"""A user's own tasks, the split of their rows, and several tasks as one data set."""

import re
from pathlib import Path

import pytest

from whet.errors import WhetTypeError, WhetValueError
from whet.rewards.functions import RewardFunctions
from whet.tasks import open_task, open_tasks, prompt_of
from whet.tasks.mixture import Mixture
from whet.tasks.protocol import split_of

OWN = str(Path(__file__).with_name("own.py"))


def prompts(task):
    return [row["prompt"] for row in task.rows]


def test_no_prompt_is_in_both_splits_and_none_is_lost():
    train, held_out = (open_task(f"{OWN}:Doubles,size=400", split=split) for split in ("train", "eval"))
    assert not set(prompts(train)) & set(prompts(held_out))
    assert set(prompts(train)) | set(prompts(held_out)) == set(map(str, range(400)))
    assert 20 <= len(held_out.rows) <= 60
    other = open_task(f"{OWN}:Doubles,size=400,seed=100", split="eval")  # other rows, the same rule
    assert set(prompts(other)) & set(map(str, range(400))) <= set(prompts(held_out))


def test_a_greater_share_holds_out_the_same_and_more():
    held_out = [{n for n in range(1000) if split_of(str(n), share) == "eval"} for share in (0, 0.1, 0.5, 1)]
    assert held_out[0] < held_out[1] < held_out[2] < held_out[3] == set(range(1000))
    assert 70 < len(held_out[1]) < 130 and 440 < len(held_out[2]) < 560
    assert split_of("7", 0.1) == "train" and split_of("18", 0.1) == "eval"  # the same in every process and release


def test_own_rows_are_taken_as_they_are():
    task = open_task(f"{OWN}:Doubles,factor=3,held_out=0")
    assert (task.name, task.system_prompt, len(task.rows)) == ("doubles", "Double it.", 40)
    assert task.rows[-1] == {"prompt": "39", "answer": "117"} and task.rows[:2] == [task.rows[0], task.rows[1]]
    assert task.score("117", task.rows[-1]) == 1 and task.score("1", task.rows[-1]) == 0
    assert len(open_task(f"{OWN}:Doubles", size=5).rows) == 5


@pytest.mark.parametrize(
    ("system_prompt", "text", "first"),
    [
        (None, "Double it.\n\n3", {"role": "system", "content": "Double it."}),
        ("", "3", {"role": "user", "content": "3"}),
    ],
)
def test_a_system_prompt_is_a_message_or_a_paragraph(system_prompt, text, first):
    options = {"held_out": 0} | ({} if system_prompt is None else {"system_prompt": system_prompt})
    task, chats = (open_task({"name": f"{OWN}:{name}", **options}) for name in ("Doubles", "Chats"))
    assert prompt_of(task, task.rows[3]) == text
    messages = prompt_of(chats, chats.rows[3])
    assert messages[0] == first and messages[-1] == {"role": "user", "content": "3"} and len(messages) <= 2


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (f"{OWN}:Nothing", WhetValueError, "nothing callable named 'Nothing'"),
        ("no.such.module:Task", WhetValueError, "cannot import 'no.such.module'"),
        (f"{OWN}:Doubles,factr=2", WhetTypeError, "could not be made with these options"),
        (f"{OWN}:Doubles,partial_credit=true", WhetValueError, "partial_credit is True and has no effect"),
        (f"{OWN}:NoScore", WhetTypeError, "has no score, which a task needs"),
        (f"{OWN}:NoPrompt", WhetTypeError, "rows[0] of doubles is {'question': '1'}, expected a dict with a prompt"),
        (f"{OWN}:OddPrompt", WhetTypeError, "has the prompt [{'role': 'user', 'content': {1, 2}}], expected text or"),
        (f"{OWN}:TokenPrompt", WhetTypeError, "has the prompt [5, 6], expected text or chat messages: it is a list"),
        (f"{OWN}:HalfPrompt", WhetTypeError, "surrogates not allowed"),
        (f"{OWN}:Doubles,size=1,held_out=1", WhetValueError, "none of the 1 rows of doubles belongs to 'train'"),
    ],
)
def test_what_is_refused(spec, error, message):
    with pytest.raises(error) as raised:
        open_task(spec)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("name = 7", "name of FILE:Odd is 7, expected a text"),
        ("system_prompt = 5", "system_prompt of FILE:Odd is 5, expected a text"),
        ("rows = None", "rows of FILE:Odd is None, expected a list"),
        ("rows = (row for row in Plain.rows)", "rows of FILE:Odd is <generator"),
        ("score = 3", "score of FILE:Odd is 3, expected a method (completion, row) -> float"),
    ],
)
def test_a_part_of_another_kind_is_refused_before_the_work(line, message, tmp_path):
    file = tmp_path / "odd.py"
    file.write_text(
        f"""
class Plain:
    name, system_prompt, rows = "plain", "", [{{"prompt": "1"}}]

    def score(self, completion, row):
        return 1.0


class Odd(Plain):
    {line}
"""
    )
    with pytest.raises(WhetTypeError, match=re.escape(message.replace("FILE", str(file)))):
        open_task(f"{file}:Odd,held_out=0")


def test_an_unknown_split():
    with pytest.raises(WhetValueError, match="split is 'test', expected 'train' or 'eval'"):
        open_task(f"{OWN}:Doubles", split="test")


# --- several tasks --------------------------------------------------------------------------------------


def test_weights_are_shares_of_the_rows_and_every_row_occurs():
    tasks = open_tasks([f"{OWN}:Doubles,size=10,held_out=0,weight=3", f"{OWN}:Chats,held_out=0"])
    names = [row["task"] for row in tasks]
    assert len(tasks) == len(names) == 160 and names.count("doubles") == 120 and names.count("chats") == 40
    for start in range(0, 160, 4):  # evenly spaced: three of the one in every four
        assert names[start : start + 4].count("doubles") == 3
    for name, n in (("doubles", 10), ("chats", 40)):
        answers = [row["answer"] for row in tasks if row["task"] == name]
        assert answers == [str(2 * (i % n)) for i in range(len(answers))]


def test_a_row_is_a_function_of_its_index():
    specs = [f"{OWN}:Doubles,weight=2", f"{OWN}:Chats"]
    rows = list(open_tasks(specs))
    again = open_tasks(specs)
    assert [again[i] for i in reversed(range(len(rows)))] == rows[::-1]
    assert again[-1] == rows[-1] and again[2:5] == rows[2:5]


def test_rows_to_evaluate_on_occur_once_whatever_the_weights():
    tasks = open_tasks([f"{OWN}:Doubles,weight=9,held_out=0.5", f"{OWN}:Chats,held_out=0.5"], split="eval", size=12)
    prompts = [str(row["prompt"]) for row in tasks]
    assert len(prompts) == len(set(prompts)) == 24


def test_each_task_scores_its_own_rows():
    tasks = open_tasks([f"{OWN}:Doubles,held_out=0", f"{OWN}:Doubles,factor=3,held_out=0"])
    assert tasks.names == ["doubles", "doubles_2"]
    rows = tasks[:6]
    columns = {name: [row[name] for row in rows] for name in ("task", "item", "answer")}
    completions = [row["answer"] if i else "?" for i, row in enumerate(rows)]
    rewards = RewardFunctions(tasks.reward_functions())
    result = rewards(prompts=completions, completions=completions, completion_ids=completions, columns=columns)
    assert rewards.names == ["doubles", "doubles_2"]
    assert result.rewards.tolist() == [0, 1, 1, 1, 1, 1]
    scored = [name == "doubles" for name in columns["task"]]
    assert (~(result.by_name["doubles"] != result.by_name["doubles"])).tolist() == scored


def test_a_task_is_told_that_the_prompt_has_opened_the_thinking():
    tasks = open_tasks([f"{OWN}:Doubles,held_out=0"])
    rows = tasks[:2]
    columns = {name: [row[name] for row in rows] for name in ("task", "item")} | {"opening_tag": ["<think>", ""]}
    completions = [row["answer"] for row in rows]
    rewards = RewardFunctions(tasks.reward_functions())
    result = rewards(prompts=completions, completions=completions, completion_ids=completions, columns=columns)
    assert result.rewards.tolist() == [0, 1]


def test_a_third_of_a_row_is_a_whole_one():
    task = open_task(f"{OWN}:Doubles,size=2,held_out=0")
    assert sorted(row["answer"] for row in Mixture([task, task], [1, 3])) == ["0"] * 4 + ["2"] * 4
