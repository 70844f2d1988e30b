"""``whet eval`` from the command line: tables, the JSON file, two models, and errors."""

import json
import os
import re
import shutil
import signal
import subprocess
import time

import pytest
from tests.cli.conftest import CHAT_TEMPLATE
from tests.processes import WHET
from tests.raising import assert_mentions
from tests.rollout.test_tool_episodes import HERMES
from tests.tiny import with_lora

import whet
from whet.cli import main

TASK = """
class Letters:
    name = "letters"
    system_prompt = "Say one letter."

    def __init__(self, size=12, weight=1, template=True):
        prompts = [f"word {i}" for i in range(size)]
        self.rows = [{"prompt": [{"role": "user", "content": p}] if template else p, "parity": i % 2}
                     for i, p in enumerate(prompts)]

    def score(self, completion, row):
        return float(sum(map(ord, completion)) % 2 == row["parity"])


class Graded(Letters):
    name = "graded"

    def score(self, completion, row):
        if "bad" in row:
            raise ValueError("bad")
        return sum(map(ord, completion)) % 5 / 4


class Failing(Letters):
    name = "failing"

    def score(self, completion, row):
        return 1 / row["parity"]
"""


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / "tasks.py"
    path.write_text(TASK)
    return lambda name: f"{path}:{name},held_out=1"


@pytest.fixture
def run(capsys):
    def run(*argv, status=0):
        capsys.readouterr()
        assert main(["eval", *map(str, argv)]) == status
        return capsys.readouterr()

    return run


SHORT = ["--max-new-tokens", "5"]


def test_table_and_json_file(run, tasks, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    file = tmp_path / "found.json"
    out, err = run(tiny_model, "--task", tasks("Letters"), *SHORT, "--size", "10", "--out", file, "--records")
    assert "letters: 10 items" in out and tiny_model.name in out and "pass@" not in out and "score" not in out
    assert err.startswith("model: letters, 10 items in ") and err.count("\n") == 1
    found = json.loads(file.read_text())
    assert found["schema"] == 1 and found["comparison"] == [] and found["settings"]["temperature"] == 0
    assert found["versions"]["whet"] == whet.__version__ and found["isa"] == whet.isa()
    [model] = found["models"]
    [task] = model["tasks"]
    assert (model["model"], task["task"], task["items"], task["samples"]) == (str(tiny_model), "letters", 10, 1)
    scores = [record["completions"][0]["score"] for record in task["records"]]
    assert task["accuracy"]["value"] == sum(scores) / 10 and 0 < task["accuracy"]["low"] < task["accuracy"]["high"] < 1
    assert f"{10 * sum(scores):.1f}% ({100 * task['accuracy']['low']:.1f} to" in out
    for record in task["records"]:
        text = record["completions"][0]["text"]
        assert record["completions"][0]["score"] == float(sum(map(ord, text)) % 2 == record["parity"])


def test_json_file_has_no_records_by_default(run, tasks, tiny_model, tmp_path):
    run(tiny_model, "--task", tasks("Letters"), *SHORT, "--out", tmp_path / "found.json")
    assert "records" not in json.loads((tmp_path / "found.json").read_text())["models"][0]["tasks"][0]


def test_completions_equal_direct_sampling(run, tasks, tiny_model, tmp_path):
    """With system prompt and chat template as in training, greedy, up to the model's stop tokens."""
    from transformers import AutoTokenizer

    from whet import SamplingParams
    from whet.engine import Engine

    file = tmp_path / "found.json"
    options = ["--weights", "float32", *SHORT, "--out", file, "--records"]
    run(tiny_model, "--task", tasks("Letters"), "--size", "2", *options)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = "<system>Say one letter.<eos><user>word {}<eos><assistant>"
    ids = [tokenizer(text.format(i), add_special_tokens=False)["input_ids"] for i in range(2)]
    with Engine.from_pretrained(tiny_model, weights="float32") as engine:
        sampling = SamplingParams(temperature=0, max_new_tokens=5, stop_token_ids=[1])
        groups = engine.generate(ids, 1, sampling)
    expected = [tokenizer.decode(group[0].token_ids, skip_special_tokens=True) for group in groups]
    records = json.loads(file.read_text())["models"][0]["tasks"][0]["records"]
    assert [record["completions"][0]["text"] for record in records] == expected


def records_of(file):
    return [r["completions"] for r in json.loads(file.read_text())["models"][0]["tasks"][0]["records"]]


def test_sampling_settings_reach_the_engine(run, tasks, tiny_model, tiny_gguf, tmp_path):
    """Stop strings, penalties, bias and minimum length give the engine's completions."""
    from whet import SamplingParams
    from whet.engine import Engine
    from whet.models.tokenizers import read_tokenizer

    tokenizer = read_tokenizer(tiny_gguf)
    settings = {
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5, "min_new_tokens": 3, "top_k": 50,
        "top_p": 0.9, "min_p": 0.01, "temperature": 0.8, "seed": 7, "max_new_tokens": 12,
    }  # fmt: skip
    [token] = tokenizer.encode("q", add_special_tokens=False)
    argv = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]
    argv += ["--logit-bias", token, 4, "--stop", "q", "never", "-n", "2", "--weights", "float32"]
    run(tiny_gguf, "--task", tasks("Letters"), "--size", "4", *argv, "--out", tmp_path / "a.json", "--records")
    prompts = [tokenizer.encode(f"<system>Say one letter.<eos><user>word {i}<eos><assistant>") for i in range(4)]
    with Engine.from_gguf(tiny_gguf, weights="float32") as engine:
        sampling = SamplingParams(**settings, logit_bias={token: 4.0}, stop=["q", "never"], stop_token_ids=[1])
        expected = [[c.text for c in group] for group in engine.generate(prompts, 2, sampling)]
    found = [[c["text"] for c in group] for group in records_of(tmp_path / "a.json")]
    assert found == expected
    assert any(c["finish_reason"] == "stop" for group in records_of(tmp_path / "a.json") for c in group)
    settings = json.loads((tmp_path / "a.json").read_text())["settings"]
    assert settings["stop"] == ["q", "never"] and settings["logit_bias"] == {str(token): 4.0}


def test_several_completions_and_several_tasks(run, tasks, tiny_gguf, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    file = tmp_path / "found.json"
    options = ["-n", "3", *SHORT, "--out", file]
    out, err = run(tiny_gguf, "--task", tasks("Letters"), "--task", tasks("Graded") + ",size=4", *options)
    assert "letters: 12 items, 3 completions each" in out and "graded: 4 items" in out
    letters, graded = out.split("graded: ")
    assert "pass@2" in letters and "score" not in letters and "score" in graded and err.count("\n") == 2
    found = json.loads(file.read_text())
    assert found["settings"]["temperature"] == 1
    by_task = found["models"][0]["tasks"]
    assert [list(task["pass_at"]) for task in by_task] == [["1", "2"]] * 2
    assert by_task[0]["pass_at"]["1"] == by_task[0]["accuracy"]


def test_comparison_of_two_models(run, tasks, tiny_model, tiny_gguf, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "found.json"
    out, _ = run(tiny_model, tiny_gguf, "--task", tasks("Letters"), *SHORT, "-n", "4", "--out", file)
    assert out.splitlines()[1].split() == [tiny_model.name, tiny_gguf.name, "difference"]
    [found] = json.loads(file.read_text())["comparison"]
    difference = found["accuracy_difference"]
    first, second = (m["tasks"][0]["accuracy"]["value"] for m in json.loads(file.read_text())["models"])
    assert difference["value"] == pytest.approx(second - first)
    assert difference["low"] < difference["value"] < difference["high"]
    line = next(line for line in out.splitlines() if line.startswith("accuracy"))
    assert f"{100 * difference['value']:+.1f}% ({100 * difference['low']:+.1f} to" in line and "(sign test)" in out
    assert f"better on {found['better']} items and worse on {found['worse']}" in out


def test_one_model_in_two_formats_and_with_adapters(run, tasks, tiny_model, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("COLUMNS", "240")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with_lora(model, b_std=0.5, target_modules=["v_proj", "down_proj"]).save_pretrained(tmp_path / "lora")
    task = ["--task", tasks("Letters"), *SHORT]
    out, _ = run(tiny_model, tiny_model, *task, "--weights", "float32", "--weights", "int8")
    assert "model float32" in out and "model int8" in out
    both = ["--adapter", "none", "--adapter", tmp_path / "lora", "--weights", "float32"]
    out, _ = run(tiny_model, tiny_model, *task, *both, "--out", tmp_path / "a.json", "--records")
    assert f"model float32 with {tmp_path / 'lora'}" in out
    one_model = [tiny_model, *task, "--adapter", tmp_path / "lora", "--weights", "float32"]
    run(*one_model, "--out", tmp_path / "b.json", "--records")
    base, adapted = (m["tasks"][0]["records"] for m in json.loads((tmp_path / "a.json").read_text())["models"])
    assert adapted == json.loads((tmp_path / "b.json").read_text())["models"][0]["tasks"][0]["records"] != base


def test_rows_with_a_reward(run, files, tiny_model):
    out, _ = run(tiny_model, "--data", files.folder / "rows.jsonl", "--reward", files.online["reward"], *SHORT)
    assert "rows: 8 items" in out and "score" in out


def test_failed_scoring_is_a_warning(run, tasks, tiny_model):
    out, err = run(tiny_model, "--task", tasks("Failing"), *SHORT)
    assert "not scored" in out and "50.0%" in out
    assert_mentions(err, "whet: warning: failing", "6 completions", "count as 0", "item 0", "ZeroDivisionError")


def test_model_without_a_chat_template_names_the_flags(run, error_of, tasks, tiny_model, tiny_gguf, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model, bare)
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((bare / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    argv = ["eval", bare, "--task", tasks("Letters"), *SHORT]
    assert_mentions(error_of(*argv), "chat template", "--raw")
    run(*argv[1:], "--raw")
    template = tmp_path / "template.jinja"
    template.write_text(CHAT_TEMPLATE)
    for i, more in enumerate((["--tokenizer", tiny_gguf], ["--chat-template", template])):
        run(*argv[1:], *more, "--out", tmp_path / f"{i}.json", "--records")
    assert records_of(tmp_path / "0.json") == records_of(tmp_path / "1.json")
    error = error_of(*argv, "--raw", "--chat-template", template)
    assert_mentions(error, f"chat_template is '{template}'", "no effect", "raw")


def test_ctrl_c_leaves_no_file_and_no_child_process(tasks, tiny_model, tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text(
        TASK + "    def score(self, completion, row):\n"
        "        import os, pathlib, time\n"
        f"        pathlib.Path({str(tmp_path)!r}, 'child').write_text(str(os.getpid()))\n"
        "        time.sleep(60)\n"
    )
    argv = [
        "eval",
        str(tiny_model),
        "--task",
        f"{slow}:Failing,held_out=1",
        *SHORT,
        "--out",
        str(tmp_path / "out.json"),
    ]
    process = subprocess.Popen([*WHET, *argv], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child = tmp_path / "child"
    while process.poll() is None and not (child.exists() and child.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "whet: interrupted\n")
    assert not (tmp_path / "out.json").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(child.read_text()), 0)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ([], ("--task", "--data")),
        (["--task", "chain_sum"], ("name is 'chain_sum'", "reasoning_gym:NAME")),
        (["--task="], ("task is ['']", "not empty")),
        (["--task", "TASKS:Leters"], ("TASKS", "'Leters'")),
        (["--task", "TASKS:Letters", "-n", "0"], ("n is 0", ">= 1")),
        (["--task", "TASKS:Letters", "--size", "0"], ("size is 0", ">= 1")),
        (["--task", "TASKS:Letters,size=0"], ("size is 0", ">= 1")),
        (["--task", "TASKS:Letters,held_out=0"], ("12 rows", "letters", "'eval'")),
        (["--task", "TASKS:Letters", "--temperature", "0", "-n", "2"], ("n is 2", "no effect", "temperature is 0")),
        (["--task", "TASKS:Letters", "--seed", "1"], ("seed is 1", "no effect", "temperature is 0")),
        (["--task", "TASKS:Letters", "--stop", ""], ("stop is ['']", "64")),
        (["--task", "TASKS:Letters", "--logit-bias", "5", "101"], ("logit_bias is {5: 101.0}", "100")),
        (["--task", "TASKS:Letters,held_out=1", "--logit-bias", "258", "1"], ("logit_bias", "258", "257")),
        (["--task", "TASKS:Letters", "--chat-template", "nope"], ("chat_template 'nope'",)),
        (["--task", "TASKS:Letters", "--records"], ("records is True", "no effect", "out")),
        (["--task", "TASKS:Letters", "--out", "TASKS"], ("TASKS", "exists", "--out")),
        (["--task", "TASKS:Letters", "--out", "no/such/found.json"], ("folder 'no/such'", "no/such/found.json")),
        (["--task", "TASKS:Letters", "--out", "/proc/found.json"], ("/proc/found.json", "No such file", "--out")),
        (["--task", "TASKS:Letters", "--out", "x" * 300], ("xxx", "File name too long", "--out")),
        (["--task", "TASKS:Letters,weight=2"], ("weight is 2", "no effect")),
        (["--task", "TASKS:Letters", "--data", "rows.jsonl"], ("--task", "--data")),
        (["--data", "rows.jsonl"], ("--data", "--reward")),
        (["--task", "TASKS:Letters", "--score-timeout-s", "0"], ("score_timeout_s is 0.0", "> 0")),
        (["--task", "TASKS:Letters", "--weights", "int8", "--weights", "bf16"], ("--weights", "2 times", "1 models")),
        (["MODEL", "--task", "TASKS:Letters"], ("both models", "--weights", "--adapter")),
        (["MODEL", "MODEL", "--task", "TASKS:Letters"], ("one model", "two", 3)),
        (["--task", "TASKS:Letters,held_out=1", "--max-new-tokens", "480"], ("12 of 12 prompts", "letters")),
        (["--task", "TASKS:Letters,held_out=1", "--adapter", "nowhere"], ("nowhere",)),
        (["nowhere", "--task", "TASKS:Letters,held_out=1"], ("'nowhere'", ".gguf")),
    ],
)
def test_invalid_options_are_named(error_of, tiny_model, tmp_path, options, facts):
    (tmp_path / "tasks.py").write_text(TASK)
    names = {"TASKS": str(tmp_path / "tasks.py"), "MODEL": str(tiny_model)}
    given = [re.sub("TASKS|MODEL", lambda found: names[found[0]], option) for option in options]
    models = [tiny_model] if given[:1] != ["nowhere"] else []
    assert_mentions(error_of("eval", *models, *given), *(names.get(fact, fact) for fact in facts))


def test_second_model_is_checked_before_the_first_is_evaluated(error_of, tasks, tiny_model, monkeypatch):
    from whet.cli import eval as command

    monkeypatch.setattr(command, "_evaluate", None)
    assert_mentions(error_of("eval", tiny_model, "nowhere", "--task", tasks("Letters")), "'nowhere'", ".gguf")


GAME = """
from whet.tasks.environment import Step

class Game:
    def reset(self, row, seed):
        self.seed = seed
        return row.get("prompt") or "begin"

    def step(self, message):
        return Step(f"on {self.seed}", reward=0.5)

def add(a: int) -> int:
    \"\"\"Add one.

    Args:
        a: a number
    \"\"\"
    return a + 1

def length(completions):
    return [float(len(completion)) for completion in completions]
"""


def test_episodes_of_an_environment(run, tasks, tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"n": i}) + "\n" for i in range(4)))
    env = [f"--env={tmp_path / 'game.py'}:Game", "--env-timeout-s=60", "--max-turns=3", "--max-turn-tokens=2"]
    file, limit = tmp_path / "found.json", ["--max-new-tokens=60"]
    data = ["--data", tmp_path / "rows.jsonl", "--success=1.2"]
    out, _ = run(tiny_model, *data, *env, *limit, "--out", file, "--records")
    assert "rows: 4 items" in out and "accuracy" in out and "1.500 (1.500 to 1.500)" in out
    assert "turns" in out and "3.0 (3.0 to 3.0)" in out and "ended by turns" in out and "ended by done" not in out
    [model] = json.loads(file.read_text())["models"]
    [found] = model["tasks"]
    assert found["accuracy"]["value"] == 1 and found["score"]["value"] == 1.5 and found["success_reward"] == 1.2
    assert found["ended_by"]["turns"] == 1 and len(found["records"]) == 4
    with_reward = ["--reward", f"{tmp_path / 'game.py'}:length"]
    out, _ = run(tiny_model, *data, *env, *limit, *with_reward)
    assert "6.500 (6.500 to 6.500)" in out  # and the messages: three turns and two answers
    games = [tiny_model, *env, *limit, "--size=3", "--success=1.5", "--temperature=0", "--records"]
    assert main(["eval", *map(str, [*games, "--seed=1", "--out", tmp_path / "one.json"])]) == 0
    assert main(["eval", *map(str, [*games, "--seed=2", "--out", tmp_path / "other.json"])]) == 0
    one, other = (json.loads((tmp_path / name).read_text())["models"] for name in ("one.json", "other.json"))
    assert one[0]["tasks"][0]["records"] != other[0]["tasks"][0]["records"]  # a seed determines the episodes
    out = capsys.readouterr().out
    assert "game.py:Game: 3 items" in out and "100.0%" in out and "1.500 (1.500 to 1.500)" in out
    out, _ = run(tiny_model, tiny_model, "--weights=bf16", "--weights=q8_0", "--task", tasks("Letters"), *env, *limit)
    assert "letters: 12 items" in out and "difference" in out and "sign test" in out


def test_tools_need_a_template_that_calls_them(error_of, tasks, tiny_model, tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    tools = ["--tools", f"{tmp_path / 'game.py'}:add"]
    command = ["eval", tiny_model, "--task", tasks("Letters"), *SHORT, *tools]
    assert_mentions(error_of(*command), "tools", "--chat-template")
    assert_mentions(error_of(*command, "--raw"), "raw", "chat template")
    assert_mentions(error_of(*command, "--env", "a.py:B"), "env", "tools")
    assert_mentions(error_of(*command, "--unsafe-local"), "unsafe_local", "runs programs")
    plain = ["eval", tiny_model, "--task", tasks("Letters"), *SHORT]
    assert_mentions(error_of(*plain, "--success=2"), "success", "no environment")
    assert_mentions(error_of(*plain, "--max-turns=2"), "max_turns", "no tools")
    template = tmp_path / "hermes.jinja"
    template.write_text(HERMES)
    assert main(["eval", *map(str, command[1:]), "--chat-template", str(template), "--max-turns=2"]) == 0
