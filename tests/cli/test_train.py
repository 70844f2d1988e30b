"""``whet train`` from the command line: runs on a tiny model, their files, resuming, and errors."""

import csv
import gzip
import itertools
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.cli.conftest import write_rows
from tests.processes import WHET, run_python
from tests.raising import assert_mentions
from tests.representatives import cases
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from whet.cli import main
from whet.config.algorithms import ALGORITHMS
from whet.config.toml import read_toml
from whet.data.rows import epoch_order
from whet.rewards.functions import load_function

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
METHODS = {name: name.replace("-", "_") for name in ALGORITHMS if name != "kd"}  # KD: test_kd.py


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def gradients(folder):
    return [(row["step"], row["grad_norm"]) for row in read_jsonl(folder / "metrics.jsonl") if "grad_norm" in row]


def same_weights(folder, other, name="model.safetensors"):
    return (folder / "model" / name).read_bytes() == (other / "model" / name).read_bytes()


# --- results of a run -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_example_runs(method, tmp_path, tiny_model, capsys):
    flags = ["--model", tiny_model, "--output-dir", tmp_path / "run", "--steps", "2"]
    online = ["--max-new-tokens", "4"] if ALGORITHMS[method].config.samples else []
    online += ["--teacher", str(tiny_model)] if method == "distill" else []
    config = EXAMPLES / f"{METHODS[method]}.toml"
    assert main(["train", method, str(config), *map(str, flags), *online]) == 0

    folder = tmp_path / "run"
    last_line = capsys.readouterr().out.strip().splitlines()[-1]
    assert str(folder / "model") in last_line and "2 steps" in last_line
    assert [step for step, _ in gradients(folder)] == [1, 2]
    assert (folder / "completions.jsonl").exists() == bool(online)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000002"]
    assert "<svg" in (folder / "report.html").read_text()
    card = (folder / "README.md").read_text()
    settings, example = read_toml(folder / "config.toml"), read_toml(config)
    assert f"{example['data']}, 12 rows" in card and "| torch | 2." in card
    assert settings["steps"] == 2 and settings["learning_rate"] == example["learning_rate"]

    trains_reward = ALGORITHMS[method].config.trains_reward
    kind = AutoModelForSequenceClassification if trains_reward else AutoModelForCausalLM
    assert kind.__name__ in card
    model = kind.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    config = model.config if trains_reward else model.generation_config
    assert config.eos_token_id == tokenizer.eos_token_id == 1
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<user>hi<eos>"
    ids = tokenizer("a", return_tensors="pt")["input_ids"]
    assert torch.isfinite(model(ids).logits).all()


def test_sft_learns_and_reports_the_held_out_loss(files, tiny_model, capsys):
    run = files(
        "run", eval_data=files.folder / "rows.jsonl", steps=40, learning_rate=1e-2, eval_every=20, compute="float32"
    )
    assert main(["train", "sft", *run]) == 0
    rows = read_jsonl(files.folder / "run" / "metrics.jsonl")
    measured = {row["step"]: row["eval/loss"] for row in rows if "eval/loss" in row}
    assert sorted(measured) == [0, 20, 40] and measured[40] < 2 < 5 < measured[0]
    assert f"held-out loss {measured[0]:.4g} -> {measured[40]:.4g}" in capsys.readouterr().out

    # The same loss from transformers: prompt tokens labelled -100, EOS after the completion.
    for folder, step in ((tiny_model, 0), (files.folder / "run" / "model", 40)):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        total, n_tokens = 0.0, 0
        for row in files.rows:
            prompt = tokenizer(row["prompt"])["input_ids"]
            completion = [*tokenizer(row["completion"])["input_ids"], 1]
            labels = torch.tensor([[-100] * len(prompt) + completion])
            total += model(torch.tensor([prompt + completion]), labels=labels).loss.item() * len(completion)
            n_tokens += len(completion)
        assert measured[step] == pytest.approx(total / n_tokens, rel=1e-5)


KEEPS_LAST_THOUGHT = (
    "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content if loop.last else m.content.split('>')[-1] }}"
    "{{ eos_token }}{% endgeneration %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_custom_chat_template(files, tiny_model, error_of):
    contents = ["a", "<t>hm</t>b", "c", "<t>so</t>d"]
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    write_rows(files.folder / "chats.jsonl", [{"messages": messages}] * 2)
    own, marked = files.folder / "own.jinja", files.folder / "marked.jinja"
    marked.write_text(
        KEEPS_LAST_THOUGHT.replace("{% generation %}", "{% if m.role == 'assistant' %}{% generation %}", 1).replace(
            "{% endgeneration %}", "{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}{% endif %}"
        )
    )
    own.write_text(KEEPS_LAST_THOUGHT.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    run = files("run", "chats.jsonl", steps=1, lora_rank=2)
    assert_mentions(error_of("train", "sft", *run, f"--chat-template={own}"), "--chat-template")
    run = [*run, f"--chat-template={marked}"]
    assert main(["train", "sft", *run]) == 0
    assert AutoTokenizer.from_pretrained(files.folder / "run" / "model").chat_template == marked.read_text()
    error = error_of("train", "sft", *run[:-1], f"--chat-template={own}")
    assert_mentions(error, f"chat_template = '{marked}'", f"'{own}'", "output_dir")
    marked.write_text(marked.read_text() + "{# other #}")
    assert "marked.jinja (chat_template) has changed" in error_of("train", "sft", *run)
    error = error_of("train", "sft", *files("other", steps=1, chat_template="none.jinja"))
    assert_mentions(error, "chat_template 'none.jinja'", "read")


def test_dpo_reports_accuracy_and_margins(files):
    run = files("run", "pairs.jsonl", eval_data=files.folder / "pairs.jsonl", steps=12, learning_rate=1e-2)
    assert main(["train", "dpo", *run, "--checkpoint-every=5"]) == 0
    measured = [row for row in read_jsonl(files.folder / "run" / "metrics.jsonl") if "eval/loss" in row]
    # Before training, policy and reference are equal: the loss is -log(1/2), and the margin 0.
    assert measured[0]["eval/loss"] == pytest.approx(0.6931472, abs=1e-6)
    assert measured[0]["eval/rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert measured[-1]["eval/rewards/accuracies"] == 1 and measured[-1]["eval/loss"] < 0.5
    names = sorted(path.name for path in (files.folder / "run" / "checkpoints").iterdir())
    assert names == ["step-000010", "step-000012"]


def test_precomputed_reference_gives_the_same_run_and_resumes(files):
    common = {"data": "pairs.jsonl", "eval_data": files.folder / "pairs.jsonl", "learning_rate": 1e-2}
    assert main(["train", "dpo", *files("live", **common, steps=6)]) == 0
    assert main(["train", "dpo", *files("known", **common, steps=3), "--precompute-reference"]) == 0
    assert main(["train", "dpo", *files("known", **common, steps=6), "--precompute-reference"]) == 0
    live, known = (read_jsonl(files.folder / name / "metrics.jsonl")[-1] for name in ("live", "known"))
    assert live["eval/loss"] == pytest.approx(known["eval/loss"], rel=1e-4) and live["step"] == known["step"] == 6
    first, second = (load_file(files.folder / name / "model" / "model.safetensors") for name in ("live", "known"))
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


def test_grpo_logs_the_greedy_reward_of_held_out_rows(files, tiny_model):
    run = files("run", eval_data=files.folder / "rows.jsonl", steps=2, group_size=2, **files.online)
    assert main(["train", "grpo", *run]) == 0
    measured = [row for row in read_jsonl(files.folder / "run" / "metrics.jsonl") if "eval/mean_reward" in row]
    assert [row["step"] for row in measured] == [0, 2]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    rewards = []
    for row in files.rows:
        prompt = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        whole = model.generate(prompt, max_new_tokens=4, do_sample=False)
        text = tokenizer.decode(whole[0, prompt.shape[1] :], skip_special_tokens=True)
        rewards.append(text.count(row["answer"]) + sum(map(ord, text)) % 97 / 97)
    assert measured[0]["eval/mean_reward"] == pytest.approx(sum(rewards) / len(rewards))


def test_preference_function_instead_of_rewards(files):
    (files.folder / "judge.py").write_text("def longer(pairs):\n    return [int(len(b) > len(a)) for a, b in pairs]\n")
    judge = {"preference": f"{files.folder / 'judge.py'}:longer", "max_new_tokens": 4}
    assert main(["train", "online-dpo", *files("run", steps=2, **judge)]) == 0
    assert "judge.py:longer" in (files.folder / "run" / "README.md").read_text()


def test_sdpo_learns_from_demonstrations_and_feedback(files, error_of):
    """A column of the rows, or a function that reads completions; without rewards, on modules and on a learner."""
    (files.folder / "check.py").write_text("def first(completions):\n    return [c[:1] or None for c in completions]\n")
    given = {"steps": 2, "max_new_tokens": 4, "n": 2, "learning_rate": 1e-3, "eval_data": files.folder / "rows.jsonl"}
    assert main(["train", "sdpo", *files("read", demonstration="completion", eval_every=1, **given)]) == 0
    rows = read_jsonl(files.folder / "read" / "metrics.jsonl")
    assert [row["taught/frac"] for row in rows if "taught/frac" in row] == [1, 1]
    assert sum("eval/reverse_kl" in row for row in rows) == 3 and not any("mean_reward" in row for row in rows)
    del given["eval_data"]
    feedback = files("checked", feedback=f"{files.folder / 'check.py'}:first", lora_rank=2, **given)
    assert main(["train", "sdpo", *feedback]) == 0
    checked = read_jsonl(files.folder / "checked" / "metrics.jsonl")
    assert all(row["taught/feedback_frac"] > 0 and row["grad_norm"] > 0 for row in checked if "grad_norm" in row)
    assert (files.folder / "checked" / "model" / "adapter_model.safetensors").is_file()
    assert "reward is missing" in error_of("train", "sdpo", *files("none", **given))
    wrong = files("wrong", feedback=f"{files.folder / 'check.py'}:first", taught="failed", **given)
    assert "taught is 'failed'" in error_of("train", "sdpo", *wrong)


def test_lora_run_saves_adapters_that_the_next_run_loads(files, tiny_model, error_of, capsys):
    run = files(
        "run", steps=4, learning_rate=1e-2, lora_rank=2, eval_data=files.folder / "rows.jsonl", compute="float32"
    )
    assert main(["train", "sft", *run]) == 0
    assert " trained natively), packed in float32" in capsys.readouterr().out
    model_folder = files.folder / "run" / "model"
    assert (model_folder / "adapter_model.safetensors").exists() and not (model_folder / "model.safetensors").exists()
    assert "LoRA adapters of rank 2" in (model_folder / "README.md").read_text()
    last = [row for row in read_jsonl(files.folder / "run" / "metrics.jsonl") if "eval/loss" in row][-1]

    again = {"model": model_folder, "eval_data": files.folder / "rows.jsonl", "steps": 1, "compute": "float32"}
    assert main(["train", "sft", *files("again", **again)]) == 0
    first = read_jsonl(files.folder / "again" / "metrics.jsonl")[0]
    assert first["eval/loss"] == pytest.approx(last["eval/loss"], rel=1e-5)
    capsys.readouterr()
    error = error_of("train", "sft", *files("more", model=model_folder, lora_rank=2))
    assert_mentions(error, "adapters", f"--adapter {model_folder}", "lora_rank=0")
    error = error_of("train", "sft", *files("more", lora_rank=2), "--lora-layers", "nosuch_proj")
    assert_mentions(error, "lora_layers", "'nosuch_proj'")


def test_bfloat16_and_stored_dtype(files):
    assert main(["train", "sft", *files("half", steps=1, dtype="bfloat16")]) == 0
    model = files.folder / "half" / "model"
    assert {t.dtype for t in load_file(model / "model.safetensors").values()} == {torch.bfloat16}
    for dtype, stored in (("auto", torch.bfloat16), ("float32", torch.float32)):
        assert main(["train", "sft", *files(dtype, model=model, steps=1, dtype=dtype)]) == 0
        assert {t.dtype for t in load_file(files.folder / dtype / "model" / "model.safetensors").values()} == {stored}


def test_example_rewards():
    answer = load_function("examples/rewards.py:right_answer")
    texts = ["14 + 27 = 41", "41 or 42", "It is 1,041.50 euros.", "-3", "none", ""]
    assert answer(texts, ["41", "41", "1041.5", "-3", "0", "0"]) == [1, 0, 1, 1, 0, 0]
    assert load_function("examples/rewards.py:short")(["", "a b", "a " * 20, "a " * 40, "a " * 90]) == [0, 1, 1, 0.5, 0]


def test_loggers(files):
    assert main(["train", "sft", *files("run", steps=2), "--loggers", "csv", "tensorboard"]) == 0
    lines = (files.folder / "run" / "metrics.csv").read_text().splitlines()
    assert lines[0].startswith("step,") and [line.split(",")[0] for line in lines[1:]] == ["1", "2"]
    assert any((files.folder / "run" / "tensorboard").iterdir())


TALK = {"messages": [{"role": role, "content": content} for role, content in (
    ("user", "two"), ("assistant", "four"), ("user", "one"), ("assistant", "five"))]}  # fmt: skip


def test_whole_conversations(files, tiny_model):
    (files.folder / "talk.jsonl").write_text(f"{json.dumps(TALK)}\n" * 4)
    run = files("run", "talk.jsonl", eval_data=files.folder / "talk.jsonl", steps=1, compute="float32")
    assert main(["train", "sft", *run]) == 0
    measured = read_jsonl(files.folder / "run" / "metrics.jsonl")[0]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    parts = [("<user>two<eos><assistant>", False), ("four<eos>", True), ("<user>one<eos><assistant>", False)]
    parts = [(tokenizer(text)["input_ids"], counts) for text, counts in [*parts, ("five<eos>", True)]]
    ids = torch.tensor([[token for part, _ in parts for token in part]])
    labels = torch.tensor([[token if counts else -100 for part, counts in parts for token in part]])
    assert measured["eval/loss"] == pytest.approx(model(ids, labels=labels).loss.item(), rel=1e-5)


def test_error_of_indistinguishable_turns_names_loss_on(files, tiny_model, error_of):
    """Qwen3's template writes thinking only before the last answer."""
    model = shutil.copytree(tiny_model, files.folder / "qwen3")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (ROOT / "tests/fixtures/templates/Qwen-Qwen3-0.6B.jinja").read_text()
    tokenizer.save_pretrained(model)
    (files.folder / "talk.jsonl").write_text(f"{json.dumps(TALK)}\n" * 4)
    argv = ["train", "sft", *files("run", "talk.jsonl", model=model, steps=1)]
    error = error_of(*argv)
    assert_mentions(error, "messages[1]", "assistant", "loss_on='last_turn'")
    assert main([*argv, "--loss-on=last_turn"]) == 0


def test_steps_default_to_one_pass(files):
    assert main(["train", "sft", *files("run", batch_size=3)]) == 0
    assert read_toml(files.folder / "run" / "config.toml")["steps"] == 2  # 8 rows


@pytest.mark.parametrize(("batch_size", "steps"), [(4, 2), (2, 3), (1, 5), (3, 2)])
def test_one_pass_is_one_pass_with_another_batch_size(files, batch_size, steps):
    """After a batch of 4 of 8 rows, smaller batches end the pass after 8 rows, or when no whole batch is left."""
    assert main(["train", "sft", *files("run", batch_size=4), "--checkpoint-every=1"]) == 0
    shutil.rmtree(files.folder / "run" / "checkpoints" / "step-000002")
    assert main(["train", "sft", *files("run", batch_size=batch_size)]) == 0
    assert read_toml(files.folder / "run" / "config.toml")["steps"] == steps
    assert main(["train", "sft", *files("run", batch_size=batch_size)]) == 0, "a finished pass has no more steps"
    assert len(read_jsonl(files.folder / "run" / "metrics.jsonl")) == steps


def test_resolved_config_repeats_the_run(files):
    assert main(["train", "grpo", *files("first", steps=3, group_size=2, seed=5, **files.online)]) == 0
    config = str(files.folder / "first" / "config.toml")
    assert main(["train", "grpo", config, f"--output-dir={files.folder / 'second'}"]) == 0
    assert same_weights(files.folder / "first", files.folder / "second")
    assert main(["train", "grpo", config, f"--output-dir={files.folder / 'third'}", "--seed=6"]) == 0
    assert not same_weights(files.folder / "first", files.folder / "third")


def test_stop_strings_and_logit_biases_in_flags_and_files(files, tiny_model, capsys):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    [a, b] = tokenizer("ab", add_special_tokens=False)["input_ids"]
    flags = ["--logit-bias", str(a), "5", str(b), "100", "--stop", "bb", "never", "--min-new-tokens=1"]
    online = {**files.online, "group_size": 2}
    assert main(["train", "grpo", *files("run", steps=1, **online), *flags]) == 0
    completions = [row["completion"] for row in read_jsonl(files.folder / "run" / "completions.jsonl")]
    assert completions and set(completions) == {""}  # "bb": min_new_tokens is 1
    config = read_toml(files.folder / "run" / "config.toml")
    assert config["logit_bias"] == {str(a): 5.0, str(b): 100.0} and config["stop"] == ["bb", "never"]
    capsys.readouterr()
    given = [str(files.folder / "run" / "config.toml"), f"--output-dir={files.folder / 'run'}", "--steps=2"]
    assert main(["train", "grpo", *given]) == 0
    assert " changes from " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lora_rank", "method"), cases(itertools.product([0, 2], ["rloo", "grpo"]), lambda case: case == (0, "rloo"))
)
def test_options_of_groups_in_flags_resume_to_the_bit(lora_rank, method, files, capsys):
    """Penalties named with options, and every setting of updates; with adapters on a learner."""
    penalty = "whet.rewards.penalties:SoftOverlong,max_length=4,buffer=3"
    rewards = [
        "--reward",
        files.online["reward"],
        penalty,
        "--reward-weights",
        "1",
        "0.5",
        "--reward-clip",
        "-1",
        "0.9",
    ]
    given = {"max_new_tokens": 4, "learning_rate": 1e-2, "group_size": 4, "num_iterations": 2, "lora_rank": lora_rank}
    given |= {"steps_per_generation": 2, "off_policy_mask_threshold": 0.5, "entropy_coef": 0.01, "beta": 0.05}
    given |= {"top_entropy_quantile": 0.5, "loss_type": "dppo_tv"} if method == "grpo" else {}
    assert main(["train", method, *files("whole", steps=3, checkpoint_every=1, **given), *rewards]) == 0
    assert main(["train", method, *files("parts", steps=1, checkpoint_every=1, **given), *rewards]) == 0
    assert main(["train", method, *files("parts", steps=3, checkpoint_every=1, **given), *rewards]) == 0
    folders = [files.folder / name for name in ("whole", "parts")]
    assert same_weights(*folders, "adapter_model.safetensors" if lora_rank else "model.safetensors")
    rows = read_jsonl(folders[0] / "completions.jsonl")
    assert all(-1 <= row["rewards/SoftOverlong"] <= 0 for row in rows) and len(rows) == 3 * 2 * 4
    metrics = [row for row in read_jsonl(folders[0] / "metrics.jsonl") if "grad_norm" in row]
    for row in metrics:
        assert {"rewards/SoftOverlong/mean", "clip_ratio/off_policy", "kl", "mean_kl", "entropy"} <= row.keys()
    config = read_toml(folders[0] / "config.toml")
    assert config["reward"] == rewards[1:3] and config["reward_clip"] == [-1.0, 0.9]


# --- missing and invalid inputs -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model", "data", "output_dir", "reward"])
def test_required_settings(name, error_of):
    given = [f"--{n.replace('_', '-')}=x" for n in ("model", "data", "output_dir", "reward") if n != name]
    error = error_of("train", "grpo", *given)
    assert_mentions(error, name, f"--{name.replace('_', '-')}", "--help")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"reward": "nocolon"}, ("'nocolon'", "file.py:name")),
        ({"reward": "nosuchfile.py:score"}, ("no file", "nosuchfile.py")),
        ({"reward": "examples/rewards.py:nothing"}, ("'nothing'", "right_answer")),
        ({"data": "nosuch.jsonl"}, ("nosuch.jsonl'",)),
        ({"data": "EMPTY"}, ("empty.jsonl", "no rows")),
        ({"data": "BROKEN"}, ("broken.jsonl:2: not JSON",)),
        ({"model": "./nosuch"}, ("'./nosuch'", "folder", "file")),
        ({"model": "EMPTY_FOLDER"}, ("empty_folder", "cannot be loaded")),
        ({"batch_size": 100}, ("8 rows", "batch_size=100")),
        ({"output_dir": "EMPTY/x"}, ("output_dir", "empty.jsonl/x", "created")),
        ({"reward_weights": "1"}, None),
    ],
)
def test_missing_and_invalid_inputs(settings, expected, files, error_of):
    (files.folder / "empty.jsonl").write_text("\n")
    (files.folder / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    (files.folder / "empty_folder").mkdir()
    paths = {"EMPTY_FOLDER": "empty_folder", "EMPTY": "empty.jsonl", "BROKEN": "broken.jsonl"}
    for mark, name in paths.items():
        settings = {key: str(value).replace(mark, str(files.folder / name)) for key, value in settings.items()}
    argv = ["train", "grpo", *files("run", **{**files.online, "steps": 1, "group_size": 2, **settings})]
    if expected is None:
        assert main(argv) == 0
    else:
        assert_mentions(error_of(*argv), *expected)


def test_gguf_file_trains_like_its_original_folder(files, tiny_gguf, capsys):
    settings = {"steps": 3, "learning_rate": 1e-2, "compute": "float32"}
    assert main(["train", "sft", *files("folder", **settings)]) == 0
    assert "F32 to float32" not in capsys.readouterr().out
    assert main(["train", "sft", *files("file", **settings, model=tiny_gguf)]) == 0
    n = sum(tensor.numel() for tensor in load_file(files.folder / "file" / "model" / "model.safetensors").values())
    assert_mentions(capsys.readouterr().out, tiny_gguf, "F32 to float32", f"{4 * n / 1e3:.2f} kB")
    folder, file = (load_file(files.folder / name / "model" / "model.safetensors") for name in ("folder", "file"))
    torch.testing.assert_close(file, folder, rtol=0, atol=1e-6)
    prompt = ["--prompt", "spell a:", "--seed", "1", "--max-new-tokens", "8", "--raw"]
    texts = []
    for name in ("folder", "file"):
        assert main(["generate", str(files.folder / name / "model"), *prompt]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != "\n"
    assert "base_model" not in (files.folder / "file" / "README.md").read_text()  # not a hub name


def test_gguf_file_of_a_run_cannot_change(files, tiny_gguf, error_of):
    model = files.folder / "model.gguf"
    shutil.copy(tiny_gguf, model)
    assert main(["train", "sft", *files("run", model=model, steps=1)]) == 0
    model.write_bytes(model.read_bytes() + b"\0")
    assert f"{model} (model) has changed" in error_of("train", "sft", *files("run", model=model, steps=2))


def test_adapters_of_a_gguf_file(files, tiny_gguf, capsys):
    """The adapters record the file, and other commands load both."""
    settings = {"model": tiny_gguf, "steps": 4, "learning_rate": 1e-1, "lora_rank": 2, "compute": "float32"}
    assert main(["train", "sft", *files("run", **settings)]) == 0
    folder = files.folder / "run" / "model"
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny_gguf)
    prompt = ["--prompt=spell a:", "--max-new-tokens=8", "--temperature", "0"]
    capsys.readouterr()
    assert main(["generate", str(tiny_gguf), *prompt, "--adapter", str(folder), "--raw"]) == 0
    text = capsys.readouterr().out.removesuffix("\n")
    reward = f"--reward={files.folder / 'letters.py'}:share"
    (files.folder / "one.jsonl").write_text('{"prompt": "spell a:", "answer": "a"}\n')
    best_of_n = ["best-of-n", f"--prompts={files.folder / 'one.jsonl'}", reward, "--n=2", "--max-new-tokens=8"]
    assert main([*best_of_n, f"--model={folder}", "--temperature=0.001"]) == 0
    assert json.loads(capsys.readouterr().out)["completion"] == text
    assert main([*best_of_n, f"--model={tiny_gguf}", "--temperature=0.001"]) == 0
    assert json.loads(capsys.readouterr().out)["completion"] != text


def test_missing_gguf_file(files, error_of):
    error = error_of("train", "sft", *files("run", model="nothing.gguf"))
    assert_mentions(error, "load_model", "'nothing.gguf'", "folder", "file")


def test_hub_name_without_a_network(files):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(files.folder)}
    command = [*WHET, "train", "sft", *files("run", model="nobody/nothing")]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 2 and run.stderr.count("\n") == 1
    assert_mentions(run.stdout, "'nobody/nothing'", "hub")
    assert_mentions(run.stderr, "load_model", "'nobody/nothing'", "network")


def test_missing_weights_are_named(files, tiny_model, error_of):
    folder = files.folder / "deeper"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": None}))
    assert_mentions(error_of("train", "sft", *files("run", model=folder)), folder, "model.layers.2.")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("config.json", {"intermediate_size": "x"}),
        ("tokenizer_config.json", {"pad_token": 3}),
        ("tokenizer_config.json", {"model_max_length": "long"}),
        ("tokenizer.json", {"model": None}),
    ],
)
def test_damaged_model_folder_is_one_line(name, changes, files, tiny_model, error_of):
    folder = files.folder / "damaged"
    shutil.copytree(tiny_model, folder)
    (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **changes}))
    error = error_of("train", "sft", *files("run", model=folder))
    assert_mentions(error, "load_model", folder, "save_pretrained")


def test_failing_reward_names_function_sample_and_line(files, capsys):
    (files.folder / "bad.py").write_text("def half(completions):\n    return [1 / 0 for _ in completions]\n")
    online = {**files.online, "reward": f"{files.folder / 'bad.py'}:half"}
    assert main(["train", "grpo", *files("run", steps=1, group_size=2, **online)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert_mentions(error, "half", "sample 0", "ZeroDivisionError", "bad.py, line 2)")


# --- stopping and resuming ------------------------------------------------------------------------------

KILLER = """
import os, signal
from pathlib import Path

calls = 0

def share(completions, answer):
    global calls
    calls += 1
    if calls == {call} and not Path({mark!r}).exists():
        Path({mark!r}).touch()
        for _ in range({times}):
            os.kill(os.getpid(), signal.{signal})
    return [text.count(right) + sum(map(ord, text)) % 97 / 97 for text, right in zip(completions, answer)]
"""


def with_killer(files, **how):
    text = KILLER.format(mark=str(files.folder / "mark"), **{"call": 4, "times": 1, "signal": "SIGINT", **how})
    (files.folder / "killer.py").write_text(text)
    reward = f"{files.folder / 'killer.py'}:share"
    return {**files.online, "reward": reward, "steps": 6, "group_size": 2, "checkpoint_every": 2}


def assert_same_run(folder, other):
    assert same_weights(folder, other)
    assert all(norm > 0 for _, norm in gradients(folder))  # every step has a gradient
    assert gradients(folder) == gradients(other)
    assert (folder / "completions.jsonl").read_bytes() == (other / "completions.jsonl").read_bytes()


def test_killed_run_resumes_bitwise_identically(files, capsys):
    settings = with_killer(files, signal="SIGKILL")
    argv = ["train", "grpo", *files("killed", **settings)]
    assert subprocess.run([*WHET, *argv], capture_output=True, timeout=300).returncode == -signal.SIGKILL
    assert [step for step, _ in gradients(files.folder / "killed")] == [1, 2, 3]
    assert not (files.folder / "killed" / "model").exists()
    assert main(argv) == 0
    assert f"resuming from {files.folder / 'killed' / 'checkpoints' / 'step-000002'}" in capsys.readouterr().out
    assert main(["train", "grpo", *files("whole", **settings)]) == 0
    assert_same_run(files.folder / "killed", files.folder / "whole")


def test_run_killed_before_the_first_checkpoint_starts_again(files):
    settings = {**with_killer(files, call=2, times=2), "eval_data": files.folder / "rows.jsonl"}
    argv = ["train", "grpo", *files("run", **settings)]
    assert main(argv) == 130 and main(argv) == 0
    steps = [row["step"] for row in read_jsonl(files.folder / "run" / "metrics.jsonl")]
    assert steps == [0, 1, 2, 3, 4, 5, 6, 6]  # evaluated before the first step and after the last


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_signal_writes_a_checkpoint_and_the_same_command_resumes(name, status, files, capsys):
    settings = with_killer(files, call=3, signal=name) | {"checkpoint_every": 100, "lr_schedule": "linear"}
    argv = ["train", "online-dpo", *(f for f in files("run", **settings) if "group" not in f)]
    assert main(argv) == status
    out = capsys.readouterr().out
    assert_mentions(out, files.folder / "run" / "checkpoints" / "step-000003", "the same command resumes")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert main(argv) == 0
    assert main([*argv, f"--output-dir={files.folder / 'whole'}"]) == 0
    assert_same_run(files.folder / "run", files.folder / "whole")


@pytest.mark.parametrize(("name", "status", "error"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_second_signal_stops_at_once(name, status, error, files, capsys):
    assert main(["train", "grpo", *files("run", **with_killer(files, times=2, signal=name))]) == status
    assert [step for step, _ in gradients(files.folder / "run")] == [1, 2, 3]
    assert [path.name for path in (files.folder / "run" / "checkpoints").iterdir()] == ["step-000002"]
    assert error in capsys.readouterr().err


def test_run_stopped_in_its_last_step_is_finished_by_the_same_command(files, capsys):
    argv = ["train", "grpo", *files("run", **with_killer(files, call=6, signal="SIGTERM"))]
    assert main(argv) == 143 and not (files.folder / "run" / "model").exists()
    assert main(argv) == 0 and (files.folder / "run" / "model").exists()


POOL = """
import multiprocessing, time

def share(completions):
    with multiprocessing.get_context("fork").Pool(2) as pool:  # its exit sends SIGTERM to the workers
        pool.map(abs, range(4))
        pool.apply_async(time.sleep, [600])
    return [float(len(text)) for text in completions]
"""


def test_workers_of_reward_functions_have_default_signal_handlers(files, capfd):
    (files.folder / "pool.py").write_text(POOL)
    settings = {**files.online, "reward": f"{files.folder / 'pool.py'}:share", "steps": 1, "group_size": 2}
    assert main(["train", "grpo", *files("run", **settings)]) == 0
    assert "stopping after this step" not in capfd.readouterr().err


HANGING = """
import os, time
from pathlib import Path

def share(completions, answer):
    if not Path({mark!r}).exists():
        Path({mark!r}).write_text(str(os.getpid()))
        os.write(1, b"hanging\\n")
        time.sleep(600)
    return [text.count(right) + sum(map(ord, text)) % 97 / 97 for text, right in zip(completions, answer)]
"""


@pytest.mark.parametrize("timeout_s", cases([0, 600], lambda timeout_s: timeout_s == 0))
def test_folder_is_locked_until_its_process_is_killed(timeout_s, files, error_of, capsys):
    (files.folder / "hanging.py").write_text(HANGING.format(mark=str(files.folder / "mark")))
    reward = {
        "reward": f"{files.folder / 'hanging.py'}:share",
        **({"reward_timeout_s": timeout_s} if timeout_s else {}),
    }
    argv = ["train", "grpo", *files("run", **{**files.online, **reward, "steps": 1, "group_size": 2})]
    with subprocess.Popen([*WHET, *argv], stdout=subprocess.PIPE, text=True) as first:
        assert any("hanging" in line for line in first.stdout)
        error = error_of(*argv)
        assert_mentions(error, f"process {first.pid}", os.uname().nodename, "train grpo --model=")
        child = int((files.folder / "mark").read_text())
        assert (child == first.pid) == (not timeout_s)
        first.kill()
        first.wait()
    assert main(argv) == 0  # at once, even if the child survives


# --- inputs ---------------------------------------------------------------------------------------------


def test_data_of_a_run_cannot_change(files, error_of):
    data = files.folder / "rows.jsonl"
    assert main(["train", "sft", *files("run", steps=2)]) == 0
    before = data.read_text()
    for text in (before + before.splitlines()[0] + "\n", before.replace("aaa", "aab"), before.replace("\n", "\n\n", 1)):
        data.write_text(text)
        error = error_of("train", "sft", *files("run", steps=4))
        facts = f"{data} (data) has changed", f"{len(before):,} bytes before", f"{len(text):,} bytes now", "output_dir"
        assert_mentions(error, *facts)
    data.write_text(before)
    assert main(["train", "sft", *files("run", steps=4)]) == 0
    shutil.rmtree(files.folder / "run" / "checkpoints")  # a run that starts again may use other data
    data.write_text(before + before)
    assert main(["train", "sft", *files("run", steps=4)]) == 0


def test_several_data_files_with_renamed_columns(files):
    """One is compressed, one CSV."""
    rows = [{"q": row["prompt"], "a": row["completion"]} for row in files.rows]
    (files.folder / "a.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps(row) + "\n" for row in rows[:5]).encode())
    )
    with (files.folder / "b.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["q", "a"])
        writer.writeheader()
        writer.writerows(rows[5:])
    settings = {"learning_rate": 1e-2, "steps": 1, "batch_size": 8}
    assert main(["train", "sft", *files("plain", **settings)]) == 0
    data = ["--data", str(files.folder / "a.jsonl.gz"), str(files.folder / "b.csv")]
    flags = [flag for flag in files("named", **settings) if not flag.startswith("--data=")]
    assert main(["train", "sft", *flags, *data, "--columns", "prompt=q,completion=a"]) == 0
    assert same_weights(files.folder / "plain", files.folder / "named")
    assert read_toml(files.folder / "named" / "config.toml")["columns"] == {"prompt": "q", "completion": "a"}


def test_invalid_row_leaves_a_checkpoint_and_the_fixed_file_resumes_from_it(files, error_of, capsys):
    data = files.folder / "rows.jsonl"
    settings = {"steps": 8, "batch_size": 1, "learning_rate": 1e-2, "data": files.folder / "run.jsonl"}
    lines = data.read_text().splitlines(keepends=True)
    bad = epoch_order(8, 0, 0).tolist()[6]
    long = json.dumps({"id": "x", "prompt": "say", "completion": "y" * 600}) + "\n"
    settings["data"].write_text("".join([*lines[:bad], long, *lines[bad + 1 :]]))
    error = error_of("train", "sft", *files("run", **settings))
    assert_mentions(error, f"run.jsonl:{bad + 1} (id 'x'): SFT", "604 tokens", 512)
    assert [path.name for path in (files.folder / "run" / "checkpoints").iterdir()] == ["step-000003"]
    assert "604 tokens" in error_of("train", "sft", *files("run", **settings))
    used = epoch_order(8, 0, 0).tolist()[0]
    settings["data"].write_text("".join([*lines[:used], lines[bad], *lines[used + 1 :]]))
    assert_mentions(error_of("train", "sft", *files("run", **settings)), f"such as {settings['data']}:{bad + 1}")
    settings["data"].write_text("".join(lines))
    assert main(["train", "sft", *files("run", **settings)]) == 0
    out = capsys.readouterr().out
    assert f"run.jsonl (data) has changed: {len(''.join(lines)) - len(lines[bad]) + len(long):,} bytes before" in out
    assert_mentions(out, f"run.jsonl:{bad + 1} (id 'x')", "resuming from")
    assert main(["train", "sft", *files("whole", **settings)]) == 0
    assert same_weights(files.folder / "run", files.folder / "whole")


def test_failing_reward_leaves_a_checkpoint(files, error_of, capsys):
    reward = files.folder / "judge.py"
    reward.write_text(
        "calls = []\ndef judge(completions):\n    calls.append(0)\n    return [1 / max(0, 2 - len(calls))] * 4\n"
    )
    run = files("run", steps=2, group_size=2, max_new_tokens=2, reward=f"{reward}:judge")
    assert main(["train", "grpo", *map(str, run)]) == 2
    out, err = capsys.readouterr()
    assert_mentions(out, "step-000001", "the same command resumes")
    assert_mentions(err, "judge", "division by zero")
    reward.write_text("def judge(completions):\n    return [1.0] * 4\n")
    assert main(["train", "grpo", *map(str, run)]) == 0 and "resuming from" in capsys.readouterr().out


def test_run_without_a_step_can_change_its_settings(files, error_of):
    """A wrong setting or row can be fixed in the same folder."""
    bad = files.folder / "bad.jsonl"
    bad.write_text(json.dumps({"prompt": "spell a:"}) + "\n")
    assert_mentions(error_of("train", "sft", *files("run", "bad.jsonl", batch_size=1)), "'prompt'", "'completion'")
    assert main(["train", "sft", *files("run", steps=1), "--no-resume"]) == 0
    assert_mentions(error_of("train", "sft", *files("run", "pairs.jsonl", steps=1)), "run with data = ", "output_dir")


@pytest.mark.parametrize("rank", [0, 2])
def test_base_model_of_a_run_cannot_change(rank, files, tiny_model, error_of):
    model = shutil.copytree(tiny_model, files.folder / "model")
    settings = {"model": model, "lora_rank": rank}
    assert main(["train", "sft", *files("run", steps=1, **settings)]) == 0
    (model / "README.md").write_text("a note")
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-4] + bytes(4))
    if rank:
        assert "model.safetensors (model) has changed" in error_of("train", "sft", *files("run", steps=2, **settings))
        (model / "model.safetensors").write_bytes(weights)
    else:  # the checkpoint has all weights
        assert main(["train", "sft", *files("run", steps=2, **settings)]) == 0
    tokenizer = model / "tokenizer_config.json"
    tokenizer.write_text(tokenizer.read_text().replace("<pad>", "<eos>"))
    assert "tokenizer_config.json (model) has changed" in error_of("train", "sft", *files("run", steps=3, **settings))


def test_changes_of_rewards_and_held_out_rows_are_printed(files, capsys):
    held_out = files.folder / "held_out.jsonl"
    held_out.write_text((files.folder / "rows.jsonl").read_text())
    settings = {**files.online, "group_size": 2, "eval_data": held_out}
    assert main(["train", "grpo", *files("run", steps=1, **settings)]) == 0
    for file in (held_out, files.folder / "letters.py"):
        file.write_text(file.read_text() + "\n")
    capsys.readouterr()
    assert main(["train", "grpo", *files("run", steps=2, **settings)]) == 0
    out = capsys.readouterr().out
    assert f"{held_out} (eval_data) has changed" in out and "letters.py (reward) has changed" in out
    assert main(["train", "grpo", *files("run", steps=3, **settings)]) == 0
    assert "has changed" not in capsys.readouterr().out


# --- a full disk ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "steps", "file"),
    cases([(60_000, 4, "checkpoints/step-000004"), (60_000, 2, "model")], lambda case: case[2] == "model"),
)
def test_disk_full_is_one_line_and_the_same_command_resumes(limit, steps, file, files):
    settings = {"learning_rate": 1e-2, "checkpoint_every": 2}
    run = files.folder / "run"
    argv = ["train", "sft", *files("run", **settings, steps=2)]
    assert main(argv) == 0
    before = {path: path.read_bytes() for path in run.rglob("*.safetensors")}
    argv = ["train", "sft", *files("run", **settings, steps=steps)]
    limited = f"import resource as r; r.setrlimit(r.RLIMIT_FSIZE, ({limit}, -1))"  # larger files fail as on a full disk
    failed = run_python(f"{limited}\n{WHET[-1]}", *argv)
    (error,) = failed.stderr.strip().splitlines()
    assert failed.returncode == 2
    assert_mentions(error, run / file, "bytes", "The same command resumes the run.")
    assert {path: path.read_bytes() for path in run.rglob("*.safetensors")} == before
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000002"]
    assert main(argv) == 0
    assert main(["train", "sft", *files("whole", **settings, steps=steps)]) == 0
    assert same_weights(run, files.folder / "whole")


# --- damage ---------------------------------------------------------------------------------------------


def test_damaged_checkpoint_is_skipped_with_a_warning(files, capsys):
    run = files("run", steps=4, learning_rate=1e-2)
    assert main(["train", "sft", *run, "--checkpoint-every=2"]) == 0
    weights = (files.folder / "run" / "model" / "model.safetensors").read_bytes()
    damaged = files.folder / "run" / "checkpoints" / "step-000004" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    capsys.readouterr()
    assert main(["train", "sft", *run]) == 0
    out, err = capsys.readouterr()
    assert_mentions(err, "whet: warning: latest_checkpoint", "step-000004")
    assert_mentions(out, "resuming from", "step-000002")
    assert (files.folder / "run" / "model" / "model.safetensors").read_bytes() == weights


def test_lora_run_resumes_bitwise_identically(files):
    settings = {"data": "pairs.jsonl", "lora_rank": 2, "learning_rate": 1e-2}
    assert main(["train", "dpo", *files("whole", steps=6, **settings)]) == 0
    for steps in (3, 6):
        assert main(["train", "dpo", *files("parts", steps=steps, **settings)]) == 0
    assert same_weights(files.folder / "whole", files.folder / "parts", "adapter_model.safetensors")


def test_steps_that_change_the_learning_rate_are_reported(files, capsys):
    def resume(steps, **settings):
        assert (
            main(["train", "sft", *files("run", steps=steps, learning_rate=0.02, lr_schedule="linear", **settings)])
            == 0
        )
        notes = [line for line in capsys.readouterr().out.splitlines() if "schedule" in line]
        rates = [row["learning_rate"] for row in read_jsonl(files.folder / "run" / "metrics.jsonl")]
        return notes, rates[-1]

    assert resume(2) == ([], pytest.approx(0.01))
    [note], rate = resume(4)
    assert_mentions(note, "linear", "2 steps", "steps is 4", "0.01 instead of 0", "schedule_steps")
    assert rate == pytest.approx(0.005)
    assert resume(4)[0] == []
    notes, rate = resume(5, schedule_steps=5)
    assert notes == ["schedule_steps changes from 0 to 5"] and rate == pytest.approx(0.004)


def test_steps_short_of_the_schedule_are_reported(files, capsys):
    settings = {"learning_rate": 0.02, "lr_schedule": "cosine"}
    assert main(["train", "sft", *files("run", steps=4, **settings), "--checkpoint-every=2"]) == 0
    shutil.rmtree(files.folder / "run" / "checkpoints" / "step-000004")
    capsys.readouterr()
    assert main(["train", "sft", *files("run", steps=3, **settings)]) == 0
    assert_mentions(capsys.readouterr().out, "cosine", "4 steps", "steps is 3", "does not reach 0")


def test_settings_that_a_resumed_run_can_change(files, error_of, capsys):
    assert main(["train", "sft", *files("run", steps=2)]) == 0
    error = error_of("train", "sft", *files("run", steps=4, seed=1))
    assert_mentions(error, "seed = 0", "seed is now 1", "output_dir")
    assert_mentions(error_of("train", "sft", *files("run", steps=1)), "step-000002", "steps = 1")
    assert_mentions(error_of("train", "sft", *files("run", steps=4), "--no-resume"), "resume is off", "output_dir")
    assert_mentions(error_of("train", "dpo", *files("run", steps=4)), "SFT", "DPO")
    assert read_toml(files.folder / "run" / "config.toml")["steps"] == 2
    assert main(["train", "sft", *files("run", steps=4, learning_rate=0.5)]) == 0
    assert "learning_rate changes from 2e-05 to 0.5" in capsys.readouterr().out
    assert [step for step, _ in gradients(files.folder / "run")] == [1, 2, 3, 4]
    shutil.rmtree(files.folder / "run" / "checkpoints")
    assert_mentions(error_of("train", "sft", *files("run", "pairs.jsonl", steps=4)), "run with data = ", "output_dir")


def test_resumed_run_can_change_reward_functions(files, capsys):
    settings = {**files.online, "group_size": 2, "eval_data": files.folder / "rows.jsonl"}
    assert main(["train", "grpo", *files("run", steps=1, **settings)]) == 0
    rewards = [settings.pop("reward"), "examples/rewards.py:short"]
    assert main(["train", "grpo", *files("run", steps=2, **settings), "--reward", *rewards]) == 0
    assert "reward changes from ['" in capsys.readouterr().out
    card = (files.folder / "run" / "README.md").read_text()
    assert "| Metric | Step 0 | Step 2 |" in card and "| mean_reward |" in card


# --- memory ---------------------------------------------------------------------------------------------


def test_memory_report_has_measured_and_predicted_parts(files, no_holders):
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, which other tests may have reached
    assert main(["train", "grpo", *files("run", steps=2, group_size=2, **files.online)]) == 0
    figures = json.loads((files.folder / "run" / "memory.json").read_text())
    measured, predicted = figures["measured"], figures["predicted"]
    assert sum(measured.values()) == figures["resident"] <= figures["peak"]
    assert not {"sampler_weights", "kv_cache", "workspace"} & set(measured)  # released before the update
    for part in ("weights", "moments"):
        assert measured[part] == pytest.approx(predicted[part], abs=2000)
    assert sum(predicted.values()) == pytest.approx(figures["peak"], rel=0.25)
    assert "Peak memory" in (files.folder / "run" / "report.html").read_text()


def test_run_out_of_memory_is_predicted_with_advice(files, capsys, monkeypatch):
    monkeypatch.setattr("whet.runs.memory.available_bytes", lambda: 1_000_000)
    assert main(["train", "sft", *files("run", steps=1, batch_size=8)]) == 0
    assert_mentions(capsys.readouterr().err, "whet: warning: whet train sft", "1.00 MB", "No setting")


@pytest.mark.needs("wandb")
def test_resumed_run_is_one_run_at_wandb(files):
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}  # wandb reads it once per process
    for steps in (1, 2):
        arguments = [*files("run", steps=steps, batch_size=8), "--loggers", "wandb"]
        subprocess.run([*WHET, "train", "sft", *arguments], env=environment, check=True, capture_output=True)
    runs = [path.name.rpartition("-")[2] for path in (files.folder / "run" / "wandb").glob("offline-run-*")]
    assert len(runs) == 2 and len(set(runs)) == 1
