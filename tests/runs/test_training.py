"""``whet.runs.train`` from Python."""

from __future__ import annotations

import gc
import json
import signal
import threading
import weakref

import pytest
import torch
from tests.processes import printed_by
from tests.raising import assert_mentions, assert_raises, mentions
from transformers import AutoModelForCausalLM

from whet.algorithms import DPO
from whet.cli import main
from whet.config import DPOConfig
from whet.errors import WhetValueError
from whet.runs import GRPORun, SFTRun, train
from whet.runs.training import add_reference_logprobs


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
    assert len(notes) == 1 and "parameters" in notes[0]
    saved = AutoModelForCausalLM.from_pretrained(result.model_folder).state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in result.trainer.model.state_dict().items())


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
        return row["prompt"] + "?"

    def step(self, message):
        return Step("no", reward=len(message["content"]) % 3)
"""


AGENT = """
import openai

def play(row, server):
    with openai.OpenAI() as client:
        messages = [{"role": "user", "content": row["prompt"] + "?"}]
        for _ in range(3):
            found = client.chat.completions.create(model=server.model, messages=messages)
            messages += [found.choices[0].message, {"role": "user", "content": "no"}]
    return sum(len(message.content) % 3 for message in messages[1::2])
"""


@pytest.mark.parametrize(("kind", "name", "text"), [("env", "Game", GAME), ("agent", "play", AGENT)])
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
    assert_raises(WhetValueError, (kind, "task"), run, "both", 1, data=[], task=["reasoning_gym:chain_sum"])
    assert_raises(WhetValueError, ("env", "agent"), run, "both", 1, env="a:A", agent="a:a")
