"""User tasks, the split of their rows, and several tasks as one data set."""

from pathlib import Path

import pytest
from tests.raising import assert_raises

from whet.errors import WhetTypeError, WhetValueError
from whet.rewards.functions import RewardFunctions
from whet.tasks import make_prompt, open_task, open_tasks
from whet.tasks.mixture import Mixture
from whet.tasks.protocol import assign_split

OWN = str(Path(__file__).with_name("own.py"))


def prompts(task):
    return [row["prompt"] for row in task.rows]


def test_splits_are_disjoint_and_complete():
    train, held_out = (open_task(f"{OWN}:Doubles,size=400", split=split) for split in ("train", "eval"))
    assert not set(prompts(train)) & set(prompts(held_out))
    assert set(prompts(train)) | set(prompts(held_out)) == set(map(str, range(400)))
    assert 20 <= len(held_out.rows) <= 60
    other = open_task(f"{OWN}:Doubles,size=400,seed=100", split="eval")  # other rows, the same rule
    assert set(prompts(other)) & set(map(str, range(400))) <= set(prompts(held_out))


def test_larger_held_out_fraction_only_adds_prompts():
    held_out = [{n for n in range(1000) if assign_split(str(n), share) == "eval"} for share in (0, 0.1, 0.5, 1)]
    assert held_out[0] < held_out[1] < held_out[2] < held_out[3] == set(range(1000))
    assert 70 < len(held_out[1]) < 130 and 440 < len(held_out[2]) < 560
    assert assign_split("7", 0.1) == "train" and assign_split("18", 0.1) == "eval"  # must never change


def test_rows_of_a_user_task_are_unchanged():
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
def test_system_prompt_is_a_message_or_a_paragraph(system_prompt, text, first):
    options = {"held_out": 0} | ({} if system_prompt is None else {"system_prompt": system_prompt})
    task, chats = (open_task({"name": f"{OWN}:{name}", **options}) for name in ("Doubles", "Chats"))
    assert make_prompt(task, task.rows[3]) == text
    messages = make_prompt(chats, chats.rows[3])
    assert messages[0] == first and messages[-1] == {"role": "user", "content": "3"} and len(messages) <= 2


@pytest.mark.parametrize(
    ("spec", "error", "facts"),
    [
        (f"{OWN}:Nothing", WhetValueError, (OWN, "'Nothing'")),
        ("no.such.module:Task", WhetValueError, ("'no.such.module'", "path/file.py:name")),
        (f"{OWN}:Doubles,factr=2", WhetTypeError, ("open_task", f"{OWN}:Doubles", "'factr'")),
        (f"{OWN}:Doubles,partial_credit=true", WhetValueError, ("partial_credit is True", "no effect")),
        (f"{OWN}:NoScore", WhetTypeError, (f"{OWN}:NoScore", "no score")),
        (f"{OWN}:NoPrompt", WhetTypeError, ("rows[0] of doubles is {'question': '1'}", "prompt")),
        (f"{OWN}:OddPrompt", WhetTypeError, ("rows[0] of doubles", "[{'role': 'user', 'content': {1, 2}}]")),
        (f"{OWN}:TokenPrompt", WhetTypeError, ("rows[0] of doubles", "[5, 6]", "list")),
        (f"{OWN}:HalfPrompt", WhetTypeError, ("rows[0] of doubles", "surrogates not allowed")),
        (f"{OWN}:Doubles,size=1,held_out=1", WhetValueError, ("1 rows", "doubles", "'train'", "held_out = 1")),
    ],
)
def test_invalid_tasks_are_named(spec, error, facts):
    assert_raises(error, facts, open_task, spec)


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ("name = 7", "name of FILE:Odd is 7"),
        ("system_prompt = 5", "system_prompt of FILE:Odd is 5"),
        ("rows = None", "rows of FILE:Odd is None"),
        ("rows = (row for row in Plain.rows)", "rows of FILE:Odd is <generator"),
        ("score = 3", "score of FILE:Odd is 3"),
    ],
)
def test_attributes_of_wrong_types_are_named(line, fact, tmp_path):
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
    assert_raises(WhetTypeError, (fact.replace("FILE", str(file)),), open_task, f"{file}:Odd,held_out=0")


def test_unknown_split():
    assert_raises(WhetValueError, ("split is 'test'", "'train'", "'eval'"), open_task, f"{OWN}:Doubles", split="test")


# --- several tasks --------------------------------------------------------------------------------------


def test_rows_are_interleaved_by_weight_and_every_row_occurs():
    tasks = open_tasks([f"{OWN}:Doubles,size=10,held_out=0,weight=3", f"{OWN}:Chats,held_out=0"])
    names = [row["task"] for row in tasks]
    assert len(tasks) == len(names) == 160 and names.count("doubles") == 120 and names.count("chats") == 40
    for start in range(0, 160, 4):  # evenly spaced: three of every four
        assert names[start : start + 4].count("doubles") == 3
    for name, n in (("doubles", 10), ("chats", 40)):
        answers = [row["answer"] for row in tasks if row["task"] == name]
        assert answers == [str(2 * (i % n)) for i in range(len(answers))]


def test_rows_depend_only_on_their_index():
    specs = [f"{OWN}:Doubles,weight=2", f"{OWN}:Chats"]
    rows = list(open_tasks(specs))
    again = open_tasks(specs)
    assert [again[i] for i in reversed(range(len(rows)))] == rows[::-1]
    assert again[-1] == rows[-1] and again[2:5] == rows[2:5]


def test_evaluation_rows_occur_once_for_any_weights():
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


def test_task_gets_the_opening_tag_of_thinking_in_the_prompt():
    tasks = open_tasks([f"{OWN}:Doubles,held_out=0"])
    rows = tasks[:2]
    columns = {name: [row[name] for row in rows] for name in ("task", "item")} | {"opening_tag": ["<think>", ""]}
    completions = [row["answer"] for row in rows]
    rewards = RewardFunctions(tasks.reward_functions())
    result = rewards(prompts=completions, completions=completions, completion_ids=completions, columns=columns)
    assert result.rewards.tolist() == [0, 1]


def test_fractional_counts_are_rounded_up():
    task = open_task(f"{OWN}:Doubles,size=2,held_out=0")
    assert sorted(row["answer"] for row in Mixture([task, task], [1, 3])) == ["0"] * 4 + ["2"] * 4
