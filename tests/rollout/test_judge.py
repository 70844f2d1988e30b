"""Judges behind a real server and in this process: replies, failures, cache, preferences, and settings."""

from __future__ import annotations

import json
import math
import string
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from tests.cli.conftest import files, one_thread, tiny_gguf, tiny_model, write_tiny_model  # noqa: F401
from tests.raising import assert_raises
from transformers import AutoModelForCausalLM

from whet.cli import main
from whet.errors import RewardError, WhetTypeError, WhetValueError
from whet.rewards.functions import RewardFunctions
from whet.rollout.judge import Judge
from whet.serve import ServedModel, make_app
from whet.serve.threads import serving

RUBRIC = "A good answer is short."
PROMPTS, ANSWERS = ["give a", "give b", "give c"], ["a", "bb", "ccc"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """The random model's replies have no spaces, with which it would fill the JSON that its grammar permits."""
    folder = write_tiny_model(tmp_path_factory.mktemp("judge") / "tiny", max_position=1024)
    model = ServedModel.load(str(folder), weights="float32")
    defaults: Any = model.defaults
    defaults["logit_bias"] = {model.tokenizer.encode(text)[0]: -100.0 for text in " \t\n\r"}
    return model


@pytest.fixture(scope="module")
def varied(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a model whose replies differ between prompts: a random one with large weights."""
    folder = write_tiny_model(tmp_path_factory.mktemp("judge") / "varied", max_position=1024)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 30 if parameter.ndim > 1 else 1
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def url(served: ServedModel) -> Iterator[str]:
    with serving(make_app(served)) as address:
        yield f"{address}/v1"


@pytest.mark.parametrize("reasons", [False, True])
def test_scores_are_the_servers_replies(url: str, reasons: bool) -> None:
    judge = Judge(model=url, rubric=RUBRIC, lowest=0, highest=3, reasons=reasons)
    found = judge(PROMPTS, ANSWERS)
    reason = '"reason": "a sentence or two", ' if reasons else ""
    names = ["reason", "score"] if reasons else ["score"]
    properties = {"reason": {"type": "string", "maxLength": 300}, "score": {"type": "integer", "enum": [0, 1, 2, 3]}}
    schema: Any = {
        "type": "object", "properties": {name: properties[name] for name in names}, "required": names,
        "additionalProperties": False,
    }  # fmt: skip
    expected = []
    with openai.OpenAI(base_url=url, api_key="any") as client:
        for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
            text = (
                f"{RUBRIC}\n\n<prompt>\n{prompt}\n</prompt>\n\n<answer>\n{answer}\n</answer>\n\n"
                f'Score the answer from 0 (worst) to 3 (best). Reply with JSON: {{{reason}"score": ...}}'
            )
            reply = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": text}], temperature=0,
                max_tokens=64 + 300 * reasons,
                response_format={"type": "json_schema", "json_schema": {"name": "judgement", "schema": schema}},
            )  # fmt: skip
            expected.append(json.loads(reply.choices[0].message.content or "")["score"])
    assert found == expected and {type(each) for each in found} == {float}


def test_a_failed_request_is_unscored_and_counted(url: str) -> None:
    """The second prompt is longer than the server's context."""
    rewards = RewardFunctions(Judge(model=url, rubric=RUBRIC))
    given = {"prompts": ["give a", "x" * 1100, "give c"], "completions": ANSWERS, "completion_ids": [[1]] * 3}
    with pytest.warns(UserWarning, match=r"1 of 3 requests failed.*1024"):
        batch = rewards(**given, columns={})
    assert batch.n_errors == 1 and list(batch.by_name) == ["judge"]
    assert np.isnan(batch.rewards).tolist() == [False, True, False]
    single = {**given, **{name: values[1:2] for name, values in given.items()}}
    assert_raises(RewardError, ("all of 1 requests failed", "1024"), rewards, **single, columns={})


def test_a_busy_server_is_asked_again(served: ServedModel) -> None:
    """A server that accepts one request at once answers the others 429."""
    with serving(make_app(served, max_requests=1)) as address, warnings.catch_warnings():
        warnings.simplefilter("error")
        several = Judge(model=f"{address}/v1", rubric=RUBRIC)(PROMPTS[:2], ANSWERS[:2])
        one = [Judge(model=f"{address}/v1", rubric=RUBRIC)([p], [a]) for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    assert several == [each for [each] in one[:2]] and len(one) == 3


def test_replies_are_kept_on_disk(served: ServedModel, tiny_gguf: Path, tmp_path: Path) -> None:  # noqa: F811
    settings: Any = {"rubric": RUBRIC, "cache": str(tmp_path / "judge.sqlite"), "attempts": 1}
    with serving(make_app(served)) as address:
        judge = Judge(model=f"{address}/v1", **settings)
        found = judge(PROMPTS, ANSWERS)
        other = Judge(model=f"{address}/v1", **{**settings, "rubric": "A good answer is long."})
    assert judge(PROMPTS[::-1], ANSWERS[::-1]) == found[::-1]  # nobody answers any more
    with pytest.warns(UserWarning, match="1 of 2 requests failed.*does not answer"):
        mixed = judge([PROMPTS[0], "new"], ["a", "b"])
    assert mixed[0] == found[0] and isinstance(mixed[1], RewardError)
    assert_raises(RewardError, ("all of 3", "does not answer"), other, PROMPTS, ANSWERS)
    assert_raises(WhetValueError, ("judge", "does not answer"), Judge, model=f"{address}/v1", **settings)
    bad = Judge(model=str(tiny_gguf), rubric=RUBRIC, cache=str(tmp_path / "none" / "judge.sqlite"))
    assert_raises(WhetValueError, ("cache", "judge.sqlite"), bad, PROMPTS, ANSWERS)


@pytest.mark.parametrize("reasons", [False, True])
def test_a_file_judges_in_this_process(tiny_gguf: Path, tmp_path: Path, reasons: bool) -> None:  # noqa: F811
    cache = tmp_path / "judge.sqlite"
    judge = Judge(model=str(tiny_gguf), rubric=RUBRIC, highest=4, reasons=reasons, cache=str(cache))
    found = judge(PROMPTS, ANSWERS)
    assert all(each in (1.0, 2.0, 3.0, 4.0) for each in found)
    again = Judge(model=str(tiny_gguf), rubric=RUBRIC, highest=4, reasons=reasons)
    assert again(PROMPTS, ANSWERS) == found == judge(PROMPTS, ANSWERS)
    messages = [{"role": "user", "content": "give a"}]
    turns = [*messages, {"role": "assistant", "content": "a"}]
    assert again([messages], [turns[1:]])[0] in (1.0, 2.0, 3.0, 4.0)
    assert_raises(WhetTypeError, ("judge", "tokenizer"), again, [np.arange(3)], ["a"])


def test_a_preference_does_not_depend_on_the_order(varied: str) -> None:
    judge = Judge(model=varied, rubric=RUBRIC)
    pairs = [(letter * 2, letter * 5 + "!") for letter in string.ascii_letters] + [("a", "a")]
    prompts = [f"give {first}" for first, _ in pairs]
    found = judge.prefer(pairs, prompts)
    mirrored = judge.prefer([(second, first) for first, second in pairs], prompts)
    assert [None if each is None else 1 - each for each in mirrored] == found and found[-1] is None
    assert {*found, *mirrored} == {0, 1, None}
    scores: Any = judge(prompts, [first for first, _ in pairs])
    assert all(1 <= each <= 10 for each in scores)


@pytest.mark.parametrize("method", ["grpo", "online-dpo"])
def test_a_table_names_a_judge(method: str, files: Any, varied: str) -> None:  # noqa: F811
    table = files.folder / "short.toml"
    table.write_text(f'model = "{varied}"\nrubric = "{RUBRIC}"\ncache = "{files.folder / "judge.sqlite"}"\n')
    given = {**files.online, "steps": 3, "batch_size": 8} | ({"group_size": 2} if method == "grpo" else {})
    given |= {"reward": table} if method == "grpo" else {"preference": table}
    given = {name: value for name, value in given.items() if name != "reward" or method == "grpo"}
    assert main(["train", method, *files("run", **given)]) == 0
    rows = [json.loads(line) for line in (files.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and all(math.isfinite(row["loss"]) for row in rows)
    if method == "online-dpo":
        assert any(row["frac_ties"] < 1 for row in rows) and any(row["grad_norm"] > 0 for row in rows)
    else:
        assert all(1 <= row["rewards/short/mean"] <= 10 and row["reward_errors"] == 0 for row in rows)
    memory = json.loads((files.folder / "run" / "memory.json").read_text())
    assert memory["measured"]["reward_models"] >= memory["predicted"]["reward_models"] > 0
    inputs = json.loads((files.folder / "run" / "inputs.json").read_text())
    assert str(table) in inputs["reward" if method == "grpo" else "preference"]


def test_wrong_settings_are_named(url: str, tmp_path: Path) -> None:
    for wrong, facts in (
        ({"rubric": " "}, ("rubric", "text")),
        ({"model": ""}, ("model", "URL")),
        ({"lowest": 3, "highest": 3}, ("highest", "3", "lowest + 1")),
        ({"attempts": 0}, ("attempts", "0")),
        ({"model": "none.gguf"}, ("none.gguf",)),
        ({"model": f"{url}#other"}, ("tiny", "#NAME")),
    ):
        assert_raises(WhetValueError, facts, Judge, **{"model": url, "rubric": RUBRIC, **wrong})
    table = tmp_path / "judge.toml"
    for text, facts in (
        (f'model = "{url}"', ("judge.toml", "rubric is missing")),
        (f'model = "{url}"\nrubric = "a"\nprompt = "b"', ("judge.toml", "prompt", "highest")),
    ):
        table.write_text(text)
        assert_raises(WhetValueError, facts, Judge.read, str(table))
    assert_raises(WhetValueError, ("none.toml", "does not exist"), Judge.read, str(tmp_path / "none.toml"))
