"""``whet.runs.train`` from Python."""

from __future__ import annotations

import gc
import json
import shutil
import signal
import threading
import weakref

import pytest
import torch
from safetensors.torch import load_file
from tests.cli.conftest import write_tiny_model
from tests.models.test_delta import with_predicting
from tests.processes import printed_by
from tests.raising import assert_mentions, assert_raises, mentions
from tests.representatives import cases
from tests.rollout.test_tool_episodes import HERMES
from transformers import AutoModelForCausalLM

import whet.tasks.code
from whet.algorithms import DPO
from whet.cli import main
from whet.config import DPOConfig
from whet.errors import WhetValueError
from whet.runs import GRPORun, SFTRun, train
from whet.runs.training import add_reference_logprobs
from whet.system.sandbox import Sandbox
from whet.tasks.code import Interpreter


def settings_of(files, tiny_model, name="run", **settings):
    rows = [str(files.folder / "rows.jsonl")]
    common = {"model": str(tiny_model), "data": rows, "output_dir": str(files.folder / name), "batch_size": 2}
    return SFTRun(**common | settings)


def test_result_of_a_run(files, tiny_model):
    settings = settings_of(files, tiny_model, eval_data=[str(files.folder / "rows.jsonl")], learning_rate=1e-2)
    notes = []
    result = train(settings, notify=notes.append)
    assert settings.steps == 0 and result.steps == 4  # the settings are not changed: one pass over 8 rows
    assert result.folder == files.folder / "run" and (result.model_folder / "model.safetensors").is_file()
    assert [row["step"] for row in result.evaluations] == [0, 4] and result.trainer.step == 4
    assert [row["step"] for row in result.metrics if "grad_norm" in row] == [1, 2, 3, 4]
    assert_mentions(result.summary, "SFT", "4 steps", "held-out loss", result.model_folder)
    assert len(notes) == 2 and "parameters" in notes[0] and "packed" in notes[1]
    saved = AutoModelForCausalLM.from_pretrained(result.model_folder).state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in result.trainer.model.state_dict().items())


def test_blocks_for_further_tokens_are_kept(files, tiny_model):
    folder = shutil.copytree(tiny_model, files.folder / "with-mtp")
    more = with_predicting(folder)
    result = train(settings_of(files, folder, steps=1))
    saved = load_file(result.model_folder / "model-mtp.safetensors")
    assert saved.keys() == more.keys() and all(torch.equal(saved[name], more[name]) for name in more)
    assert AutoModelForCausalLM.from_pretrained(result.model_folder).config.model_type == "llama"


def test_run_equals_the_command_and_resumes(files, tiny_model, capsys):
    argv = files("command", steps=4, learning_rate=1e-2)
    assert main(["train", "sft", *argv]) == 0
    for steps in (2, 4):
        notes = []
        train(settings_of(files, tiny_model, steps=steps, learning_rate=1e-2), notify=notes.append)
    assert_mentions(notes[-1], "resuming from", "step-000002")
    weights = [files.folder / name / "model" / "model.safetensors" for name in ("run", "command")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    capsys.readouterr()
    train(settings_of(files, tiny_model, "silent", steps=1))
    assert capsys.readouterr().out == ""


def test_run_in_a_thread(files, tiny_model):
    results = []
    handler = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=lambda: results.append(train(settings_of(files, tiny_model, steps=1))))
    thread.start()
    thread.join()
    assert results[0].steps == 1 and signal.getsignal(signal.SIGINT) is handler


def test_reward_functions_are_named_in_settings(files, tiny_model):
    rows = [str(files.folder / "rows.jsonl")]
    reward = [f"{files.folder / 'letters.py'}:share"]
    common = {"model": str(tiny_model), "data": rows, "output_dir": str(files.folder / "run"), "batch_size": 2}
    result = train(GRPORun(**common, reward=reward, group_size=2, max_new_tokens=4, steps=1))
    rows = [json.loads(line) for line in (result.folder / "completions.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and all("rewards/share" in row for row in rows)


def test_missing_settings_are_named(files, tiny_model):
    assert_raises(WhetValueError, ("whet train sft", "model is missing"), train, SFTRun())
    assert_raises(WhetValueError, ("ranks is 2", "1 were launched"), train, settings_of(files, tiny_model, ranks=2))


@pytest.mark.parametrize("name", ["data", "eval_data"])
def test_empty_paths_are_named(name):
    assert_raises(WhetValueError, (f"{name} is ['']", "not empty"), SFTRun, **{name: ""})


def test_settings_are_imported_without_torch():
    assert printed_by("import sys, whet.runs; print('torch' in sys.modules)") == "False\n"
    with pytest.raises(AttributeError, match=mentions("nothing")):
        from whet import runs

        _ = runs.nothing


def test_trainer_of_the_reference_is_freed_before_the_run(tiny_model):
    """Otherwise its bfloat16 copy of all weights stays allocated."""
    made = []

    class Watched(DPO):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            made.extend(map(weakref.ref, (self, self.policy.acceleration)))

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    rows = [{"prompt": [5], "chosen": [6], "rejected": [7]}]
    arguments = {"config": DPOConfig(precompute_reference=True, compute="bfloat16", batch_size=1)}
    gc.disable()  # reference counting must suffice
    try:
        found, none = add_reference_logprobs(Watched, model, arguments, rows, [])
        assert len(made) == 2 and [reference() for reference in made] == [None, None]
    finally:
        gc.enable()
    assert none == [] and found[0]["ref_chosen_logprobs"] < 0


GAME = """
from whet.tasks.environment import Step

class Game:
    def reset(self, row, seed):
        return str(row.get("prompt", seed)) + "?"

    def step(self, message):
        return Step("no", reward=len(message["content"]) % 3)
"""


AGENT = """
import openai

def play(row, server):
    with openai.OpenAI() as client:
        messages = [{"role": "user", "content": str(row.get("prompt", server.seed)) + "?"}]
        for _ in range(3):
            found = client.chat.completions.create(model=server.model, messages=messages)
            messages += [found.choices[0].message, {"role": "user", "content": "no"}]
    return sum(len(message.content) % 3 for message in messages[1::2])
"""


KINDS = [("env", "Game", GAME), ("agent", "play", AGENT)]


@pytest.mark.parametrize(("kind", "name", "text"), cases(KINDS, lambda case: case[0] == "agent"))
def test_episodes(kind, name, text, files, tiny_model):
    (files.folder / "game.py").write_text(text)
    (files.folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": letter}) + "\n" for letter in "abcdefgh"))
    data = [str(files.folder / "prompts.jsonl")]

    def run(output, steps, **settings):
        common = {"model": str(tiny_model), "data": data, kind: f"{files.folder / 'game.py'}:{name}", "group_size": 2}
        limits = {"max_new_tokens": 12, "max_turn_tokens": 4, "max_turns": 3, "batch_size": 2, "env_timeout_s": 60.0}
        folder = str(files.folder / output)
        return train(GRPORun(**common | limits | {"output_dir": folder, "steps": steps} | settings))

    whole = run("whole", 2, eval_data=data, eval_every=2)
    assert len(whole.evaluations) == 2 and "mean_reward" in whole.summary
    table = [json.loads(line) for line in (whole.folder / "completions.jsonl").read_text().splitlines()]
    assert [message["role"] for message in table[0]["completion"]] == ["assistant", "user"] * 2 + ["assistant"]
    assert table[0]["prompt"][-1]["role"] == "user"
    for steps in (1, 2):
        parts = run("parts", steps)
    weights = [result.model_folder / "model.safetensors" for result in (whole, parts)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    empty = run("empty", 1, data=[])
    assert "game.py" in (empty.model_folder / "README.md").read_text()
    both = run("both", 1, data=[], task=["tests/tasks/own.py:Doubles"], eval_items=2)
    first = json.loads((both.folder / "completions.jsonl").read_text().splitlines()[0])
    assert first["reward"] == first["rewards/environment_reward"] + first["rewards/doubles"]
    assert_raises(WhetValueError, (kind, "tools"), run, "twice", 1, tools=["file.py:f"])
    assert_raises(WhetValueError, ("env", "agent"), run, "twice", 1, env="a:A", agent="a:a")


TOOLS = """
def add(a: int, b: int) -> int:
    \"\"\"Add.

    Args:
        a: one
        b: two
    \"\"\"
    return a + b

def letter(code: int) -> str:
    \"\"\"Return a letter.

    Args:
        code: of the letter
    \"\"\"
    return chr(code)

class Digits:
    name, system_prompt = "digits", "Answer A and the digit."

    def __init__(self):
        self.rows = [{"prompt": f"{i} and {j}", "answer": f"A{(i + j) % 3}"} for i in range(9) for j in range(9)]

    def score(self, completion, row):
        return float(completion == row["answer"])
"""


def test_a_task_scores_the_last_turn_of_episodes_with_tools(files, tmp_path):
    model = write_tiny_model(tmp_path / "model", HERMES, max_position=2048)
    file = files.folder / "tools.py"
    file.write_text(TOOLS)
    call = r'<tool_call>\{"name": "add", "arguments": \{"a": [1-3], "b": 2\}\}</tool_call>'
    settings = {
        "model": str(model), "task": [f"{file}:Digits"], "tools": [f"{file}:add,letter"], "regex": f"A[0-2]|{call}",
        "group_size": 4, "batch_size": 2, "max_new_tokens": 300, "max_turns": 3, "env_timeout_s": 60.0, "eval_items": 3,
        "eval_every": 2,
    }  # fmt: skip

    def run(name, steps, **more):
        return train(GRPORun(**settings | more | {"output_dir": str(files.folder / name), "steps": steps}))

    whole = run("whole", 2)
    assert len(whole.evaluations) == 2
    rows = [json.loads(line) for line in (whole.folder / "completions.jsonl").read_text().splitlines()]
    answers = {row["prompt"][-1]["content"].split("\n\n")[-1]: [] for row in rows}
    for row in rows:
        question, last = row["prompt"][-1]["content"].split("\n\n")[-1], row["completion"][-1]
        expected = f"A{sum(map(int, question.split(' and '))) % 3}"
        assert row["reward"] == row["rewards/digits"] == float(last["content"] == expected)
        answers[question].append(row["reward"])
    assert any(row["completion"][0].get("tool_calls") for row in rows) and {0.0, 1.0} == {r["reward"] for r in rows}
    metrics = whole.metrics[1]
    assert metrics["episodes/mean_calls"] > 0 and metrics["episodes/mean_failed_calls"] == 0
    for steps in (1, 2):
        parts = run("parts", steps)
    weights = [result.model_folder / "model.safetensors" for result in (whole, parts)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    file.write_text(TOOLS + "\n")
    assert_raises(WhetValueError, (str(file), "has changed"), run, "parts", 3)


@pytest.mark.parametrize("unsafe", [pytest.param(False, marks=pytest.mark.needs("bwrap")), True])
def test_programs_are_a_reward_and_a_tool(unsafe, files, tmp_path, monkeypatch):
    patient = Interpreter(Sandbox(timeout_s=60.0))  # a loaded machine takes seconds to start Python
    for name in ("python", "passes_tests"):
        monkeypatch.setattr(whet.tasks.code, name, getattr(patient, name))
    model = write_tiny_model(tmp_path / "model", HERMES, max_position=2048)
    rows = [{"prompt": f"x > {i}", "tests": f"assert x > {i}"} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    call = r'<tool_call>\{"name": "python", "arguments": \{"code": "print\([0-9] \* 2\)"\}\}</tool_call>'
    settings = {
        "model": str(model), "data": [str(tmp_path / "rows.jsonl")], "reward": ["whet.tasks.code:passes_tests"],
        "tools": ["whet.tasks.code:python"], "regex": f"x = [0-9]|{call}", "group_size": 4, "batch_size": 4,
        "max_new_tokens": 200, "max_turns": 2, "env_timeout_s": 60.0, "steps": 1, "unsafe_local": unsafe,
    }  # fmt: skip
    result = train(GRPORun(**settings, output_dir=str(tmp_path / "run")))
    table = [json.loads(line) for line in (result.folder / "completions.jsonl").read_text().splitlines()]
    results = 0
    for row in table:
        last, low = row["completion"][-1]["content"], int(row["prompt"][0]["content"][-1])
        assert row["reward"] == row["rewards/passes_tests"] == float(last.startswith("x = ") and int(last[-1]) > low)
        for call, answer in zip(row["completion"], row["completion"][1:], strict=False):
            if answer["role"] == "tool":
                digit = call["tool_calls"][0]["function"]["arguments"]["code"][6]
                results += answer["content"] == str(2 * int(digit))
    assert results and {row["reward"] for row in table} == {0.0, 1.0}
    settings |= {"unsafe_local": True, "reward": [f"{files.folder / 'letters.py'}:share"], "tools": []}
    assert_raises(WhetValueError, ("unsafe_local", "runs programs"), train, GRPORun(**settings, output_dir="x"))
