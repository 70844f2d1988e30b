"""lm-evaluation-harness: a served model, Whet's engine in process, and transformers give the same results.

python lm_eval_harness.py URL FACTS, with WHET_MODEL, a folder, in the environment
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
import lm_eval
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

import whet.evaluation.lm_eval  # noqa: F401  # registers whet

URL, FACTS, MODEL = sys.argv[1], json.loads(sys.argv[2]), os.environ["WHET_MODEL"]
TOLERANCE = 1e-3
SPELL = {"until": ["b"], "max_gen_toks": 12}
bits = random.Random(1)


def letters(n: int) -> str:
    return "".join(bits.choice("abcdefgh é") for _ in range(n))


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


def check_methods() -> None:
    """Compare all methods of the model in process, and texts beyond the context, with the harness' own."""
    whet = get_model("whet")(pretrained=MODEL, weights="float32")
    hf = get_model("hf")(pretrained=MODEL, dtype="float32", device="cpu", max_length=whet.max_length)
    contexts = ["", "a", *(letters(bits.randrange(1, 200)) for _ in range(4)), letters(whet.max_length)]
    pairs = instances("loglikelihood", [(text, letters(bits.randrange(1, 20))) for text in contexts for _ in range(2)])
    for found, right in zip(whet.loglikelihood(pairs), hf.loglikelihood(pairs), strict=True):
        assert abs(found[0] - right[0]) < TOLERANCE and found[1] == right[1], (found, right)
    texts = instances("loglikelihood_rolling", [(letters(3 * whet.max_length),), ("abc",)])
    for text, found, right in zip(
        texts, whet.loglikelihood_rolling(texts), hf.loglikelihood_rolling(texts), strict=True
    ):
        assert abs(found - right) < TOLERANCE * max(1, len(text.args[0]) / 1000), (found, right)
    asked = instances("generate_until", [(letters(30), SPELL), (letters(whet.max_length), SPELL | {"until": "\n"})])
    assert whet.generate_until(asked) == hf.generate_until(asked)
    sampled = SPELL | {"do_sample": True, "temperature": 1.0}
    assert len(set(whet.generate_until(instances("generate_until", [("a", sampled)] * 8)))) > 1


def write_tasks(folder: Path) -> None:
    """Write a task of multiple choice, and one of greedy completions, of which every second is right."""
    whet = get_model("whet")(pretrained=MODEL, weights="float32")
    rows = [{"q": letters(40), "choices": [" " + letters(6) for _ in range(3)], "gold": i % 3} for i in range(8)]
    texts = whet.generate_until(instances("generate_until", [(row["q"], SPELL) for row in rows]))
    rows = [row | {"target": text if i % 2 else "none"} for i, (row, text) in enumerate(zip(rows, texts, strict=True))]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {"dataset_path": "json", "dataset_kwargs": {"data_files": str(folder / "rows.jsonl")}}
    shared |= {"test_split": "train", "doc_to_text": "{{q}}"}
    choices = {"task": "choices", "output_type": "multiple_choice", "metric_list": [{"metric": "acc"}]}
    choices |= {"doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}"}
    spell = {"task": "spell", "output_type": "generate_until", "metric_list": [{"metric": "exact_match"}]}
    spell |= {"doc_to_target": "{{target}}", "generation_kwargs": SPELL}
    for task in (choices, spell):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(shared | task))


def run(tasks: TaskManager, names: list[str], kind: str, /, chat: bool = False, **arguments: str) -> dict:
    return lm_eval.simple_evaluate(
        kind, arguments, names, task_manager=tasks, apply_chat_template=chat, bootstrap_iters=0, device="cpu"
    )


def check_tasks(folder: Path) -> None:
    """Compare the results of tasks."""
    write_tasks(folder)
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    both = ["choices", "spell"]
    right = run(tasks, both, "hf", pretrained=MODEL, dtype="float32")
    served = {"model": "tiny", "base_url": URL + "/v1/completions"}
    for found in (
        run(tasks, both, "whet", pretrained=MODEL, weights="float32"),
        run(tasks, both, "local-completions", **served),
        run(tasks, both, "local-completions", **served, batch_size="4", num_concurrent="2"),
    ):
        for mine, theirs in zip(found["samples"]["choices"], right["samples"]["choices"], strict=True):
            for (a, a_greedy), (b, b_greedy) in zip(mine["filtered_resps"], theirs["filtered_resps"], strict=True):
                assert abs(float(a) - float(b)) < TOLERANCE and a_greedy == b_greedy
        for mine, theirs in zip(found["samples"]["spell"], right["samples"]["spell"], strict=True):
            assert mine["filtered_resps"] == theirs["filtered_resps"]
        for name, metric in (("choices", "acc,none"), ("spell", "exact_match,none")):
            assert found["results"][name][metric] == right["results"][name][metric]
    assert right["results"]["spell"]["exact_match,none"] == 0.5

    chat = {"model": "tiny", "base_url": URL + "/v1/chat/completions"}
    found = run(tasks, ["spell"], "local-chat-completions", chat=True, **chat)
    right = run(tasks, ["spell"], "whet", chat=True, pretrained=MODEL, weights="float32")
    for mine, theirs in zip(found["samples"]["spell"], right["samples"]["spell"], strict=True):
        assert mine["filtered_resps"] == theirs["filtered_resps"]


def check_commands(folder: Path) -> None:
    """The documented command, and ``whet eval`` on the same rows."""
    from whet.cli import main

    given = ["--model", "whet", "--model_args", f"pretrained={MODEL},weights=float32", "--tasks", "spell"]
    given += ["--include_path", str(folder), "--output_path", str(folder / "out")]
    subprocess.run([sys.executable, "-m", "whet.evaluation.lm_eval", *given], check=True)
    [written] = (folder / "out").rglob("results_*.json")
    accuracy = json.loads(written.read_text())["results"]["spell"]["exact_match,none"]

    reward = "def score(completions, target):\n    return [float(a == b) for a, b in zip(completions, target)]\n"
    (folder / "score.py").write_text(reward)
    argv = ["eval", MODEL, "--weights", "float32", "--data", str(folder / "rows.jsonl"), "--columns", "prompt=q"]
    argv += ["--reward", f"{folder / 'score.py'}:score", "--stop", "b", "--max-new-tokens", "12", "--raw"]
    assert main([*argv, "--out", str(folder / "eval.json")]) == 0
    [side] = json.loads((folder / "eval.json").read_text())["models"]
    assert side["tasks"][0]["accuracy"]["value"] == accuracy == 0.5


with tempfile.TemporaryDirectory() as name:
    check_methods()
    check_tasks(Path(name))
    check_commands(Path(name))
