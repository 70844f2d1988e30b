"""``whet train`` of adapters on a packed base: settings, errors, resuming, and use by other commands."""

import json
import math
import shutil
import signal
import subprocess

import pytest
import torch
from tests.cli.conftest import PAIRS, write_tiny_gguf
from tests.gguf_files import Q8_0
from tests.processes import WHET
from tests.raising import assert_mentions
from tests.representatives import cases
from transformers import AutoModelForCausalLM

from whet import _core
from whet.cli import main
from whet.config.toml import read_toml
from whet.models.base_record import read_record
from whet.models.packed_base import pack_base
from whet.models.sources.pretrained import open_pretrained
from whet.models.tokenizers import load_tokenizer
from whet.nn.frozen import base_of
from whet.runs.models import load_model

NARROW = "bf16" if "bf16" in _core.isa() else "float32"
LORA = {"lora_rank": 2, "learning_rate": 1e-2}


@pytest.fixture(params=["auto", "torch"], autouse=True)
def backend(request, monkeypatch):
    """Run every test with the learner, where it can train the adapters, and with modules of torch."""
    monkeypatch.setitem(LORA, "backend", request.param)
    return request.param


@pytest.fixture(scope="session")
def q8_gguf(tiny_model):
    """The tiny model as a GGUF file in Q8_0."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    return write_tiny_gguf(model, tiny_model, tiny_model.parent / "q8.gguf", Q8_0)


def adapter(folder):
    return (folder / "model" / "adapter_model.safetensors").read_bytes()


# --- base of a run --------------------------------------------------------------------------------------


def test_base_is_resolved_once_and_is_part_of_the_run(files, tiny_gguf, q8_gguf, capsys, error_of):
    for name, model, options, base, formats in (
        ("folder", {}, {}, NARROW, NARROW),
        ("exact", {}, {"compute": "float32"}, "float32", "float32"),
        ("floats", {"model": tiny_gguf}, {}, NARROW, NARROW),
        ("own", {"model": q8_gguf}, {}, "own", "q8_0"),
        ("other", {"model": q8_gguf}, {"base": "int4"}, "int4", "q8_0, int4"),
        ("none", {}, {"base": "none"}, "none", "in float32 on"),
    ):
        argv = ["train", "sft", *files(name, steps=1, **model, **options, **LORA)]
        capsys.readouterr()
        assert main(argv) == 0
        out = capsys.readouterr().out
        assert formats in out.splitlines()[0]
        assert read_toml(files.folder / name / "config.toml")["base"] == base
        record = read_record(files.folder / name / "model", "test")
        assert (record is None) == (base == "none")
        assert record is None or record["formats"] == formats
        assert f"| Base packed in | {base} |" in (files.folder / name / "README.md").read_text() or base == "none"
        assert main([*argv, "--steps=2"]) == 0 and "resuming from" in capsys.readouterr().out
    settings = {"steps": 3, **LORA}
    argv = ["train", "sft", *files("folder", **settings, base="q8_0")]
    assert_mentions(error_of(*argv), f"base = '{NARROW}'", "'q8_0'", "output_dir")
    config = files.folder / "folder" / "config.toml"
    config.write_text(config.read_text().replace(f'base = "{NARROW}"', 'base = "q8_0"'))
    assert_mentions(error_of(*argv), f"base in {NARROW} (", "base in q8_0 (")


def test_run_from_before_packed_bases_resumes_on_float_weights(files):
    argv = ["train", "sft", *files("run", steps=1, **LORA)]
    assert main([*argv, "--base=none"]) == 0
    config = files.folder / "run" / "config.toml"
    config.write_text(config.read_text().replace('base = "none"\n', ""))
    assert main([*argv, "--steps=2"]) == 0
    assert read_toml(config)["base"] == "none"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16'"),
        ({"modules_to_save": "lm_head"}, "lm_head in modules_to_save"),
    ],
)
def test_settings_that_need_float_weights_are_printed(settings, reason, files, capsys):
    assert main(["train", "sft", *files("run", steps=1, **LORA, **settings)]) == 0
    assert_mentions(capsys.readouterr().out, "float weights", reason)


def test_packed_model_has_no_float_matrices(tiny_model, q8_gguf):
    for path, base, formats in ((tiny_model, "int4", {"int4"}), (q8_gguf, "own", {"q8_0"})):
        model, tokenizer = load_model(str(path), "float32", base)
        assert all(p.ndim == 1 and not p.requires_grad for p in model.parameters())
        assert formats <= set(base_of(model).summary.split(", ")) and tokenizer("a")["input_ids"]


# --- adapter settings -----------------------------------------------------------------------------------


def test_adapter_settings_reach_peft(files):
    settings = {
        **LORA, "lora_alpha": 5, "lora_dropout": 0.25, "lora_layers": "embed_tokens", "base": "q8_0",
        "modules_to_save": "model.norm",
    }  # fmt: skip
    assert main(["train", "sft", *files("run", steps=2, **settings), "--use-rslora"]) == 0
    config = json.loads((files.folder / "run" / "model" / "adapter_config.json").read_text())
    expected = {"r": 2, "lora_alpha": 5, "lora_dropout": 0.25, "use_rslora": True, "target_modules": ["embed_tokens"]}
    assert {name: config[name] for name in expected} == expected and config["modules_to_save"] == ["model.norm"]
    assert main(["train", "sft", *files("all", steps=1, **LORA, lora_layers="all-linear")]) == 0
    config = json.loads((files.folder / "all" / "model" / "adapter_config.json").read_text())
    assert len({name.rpartition(".")[2] for name in config["target_modules"]}) == 7


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lora_rank": 0, "base": "q8_0"}, ("base is 'q8_0'", "no effect", "lora_rank is 0")),
        ({"lora_rank": 0, "lora_dropout": 0.1}, ("lora_dropout is 0.1", "no effect", "lora_rank is 0")),
        ({"lora_rank": 0, "modules_to_save": "norm"}, ("modules_to_save is ['norm']", "no effect")),
        ({"base": "q8_0", "dtype": "auto"}, ("dtype is 'auto'", "no effect", "base")),
        ({"lora_dropout": 0.1, "no_training_mode": None}, ("lora_dropout is 0.1", "training_mode")),
        ({"adapter": "x"}, ("lora_rank is 2", "no effect", "adapter")),
        ({"adapter": "x", "lora_rank": 0, "lora_alpha": 4}, ("lora_alpha is 4", "no effect", "adapter")),
        ({"adapter": "x", "lora_rank": 0}, ('"x": ',)),
        ({"lora_rank": 33}, ("model.layers.0.self_attn.q_proj is 32 x 32", "rank", 32)),
        ({"lora_layers": "qproj"}, ("lora_layers", "'qproj'", "Did you mean q_proj")),
        ({"lora_layers": "norm"}, ("lora_layers", "model.norm", "matrix")),
        ({"lora_layers": "c_attn"}, ("lora_layers", "'c_attn'", "q_proj")),
        ({"modules_to_save": "lm_haed"}, ("'lm_haed'", "Did you mean lm_head")),
        ({"modules_to_save": "q_proj"}, ("q_proj", "modules_to_save", "adapter")),
        ({"modules_to_save": "lm_head", "base": "bf16"}, ("base is 'bf16'", "lm_head in modules_to_save", "float")),
        ({"base": "q4_k"}, (256, "32 and 64", "q5_0")),
        ({"base": "q5_k_m"}, ("q5_k_m", "Pass q5_1 or q8_0")),
        ({"base": "own"}, ("base is 'own'", "bf16")),
        ({"base": "q8_0", "model": "nobody/nothing"}, ("'nobody/nothing'", "local path", "hub", "network")),
    ],
)  # fmt: skip
def test_unfit_adapter_settings_are_rejected_before_loading(settings, expected, files, error_of, monkeypatch):
    monkeypatch.setattr("whet.runs.models.load_model", None)
    given = files("run", **{**LORA, **{name: value for name, value in settings.items() if value is not None}})
    flags = [f"--{name.replace('_', '-')}" for name, value in settings.items() if value is None]
    assert_mentions(error_of("train", "sft", *given, *flags), *expected)


def test_packed_base_is_sampled_with_its_own_format(files, error_of):
    argv = ["train", "grpo", *files("run", **{**files.online, **LORA, "base": "q8_0", "rollout_weights": "int8"})]
    assert_mentions(error_of(*argv), "rollout_weights is 'int8'", "no effect", "base")


# --- training adapters further --------------------------------------------------------------------------


def test_saved_adapters_are_trained_further(files, tiny_model, q8_gguf, error_of, monkeypatch):
    first = {**LORA, "lora_alpha": 7, "model": q8_gguf, "lora_layers": "q_proj"}
    assert main(["train", "sft", *files("first", steps=2, **first)]) == 0
    folder = files.folder / "first" / "model"
    given = {"adapter": folder, "model": q8_gguf, "learning_rate": 0, "backend": LORA["backend"]}
    assert main(["train", "sft", *files("second", steps=1, **given)]) == 0
    second = files.folder / "second" / "model"
    assert adapter(files.folder / "second") == adapter(files.folder / "first")
    configs = [json.loads((path / "adapter_config.json").read_text()) for path in (folder, second)]
    assert configs[0] == configs[1] and read_record(second, "test") == read_record(folder, "test")
    assert f"the LoRA adapters of {folder}" in (second / "README.md").read_text()
    other = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.neg_()
    other.save_pretrained(shutil.copytree(tiny_model, files.folder / "other"))
    argv = ["train", "sft", *files("third", steps=1, **{**given, "model": files.folder / "other", "base": "q8_0"})]
    error = error_of(*argv)
    assert str(folder) in error and error.count("base in q8_0 (") == 2
    monkeypatch.setattr("whet.runs.models.load_model", None)  # comparing the formats suffices
    for settings, facts in (
        ({"base": "int4"}, ("q8_0", "q8_0, int4")),
        ({"base": "none"}, ("q8_0", "base is 'none'")),
        ({"model": tiny_model}, ("q8_0", "bf16")),
    ):
        assert_mentions(error_of("train", "sft", *files("third", steps=1, **{**given, **settings})), folder, *facts)


@pytest.mark.parametrize("precompute", [False, True])
def test_dpo_of_sft_adapters_has_them_as_reference(files, precompute):
    assert main(["train", "sft", *files("sft", steps=3, **LORA)]) == 0
    given = {"adapter": files.folder / "sft" / "model", "data": "pairs.jsonl", "learning_rate": 1e-3}
    given["batch_size"] = len(PAIRS)  # losses of different pairs are not comparable
    flags = ["--compute=float32", *(["--precompute-reference"] if precompute else [])]
    for name, parts in (("whole", [4]), ("parts", [2, 4])):
        for steps in parts:
            assert main(["train", "dpo", *files(name, steps=steps, **given), *flags]) == 0
    lines = [(files.folder / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "parts")]
    whole, parts = ([json.loads(line)["loss"] for line in run] for run in lines)
    assert whole[0] == pytest.approx(math.log(2), abs=1e-6) and whole[-1] < whole[0] - 1e-3
    assert parts == whole
    assert adapter(files.folder / "parts") == adapter(files.folder / "whole")


def test_adapters_of_another_model_are_rejected_before_loading(files, tiny_model, error_of, monkeypatch):
    assert main(["train", "sft", *files("run", steps=1, **LORA)]) == 0
    folder = files.folder / "run" / "model"
    smaller = shutil.copytree(tiny_model, files.folder / "smaller")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    model.config.layer_types = None
    model.save_pretrained(smaller)
    monkeypatch.setattr("whet.runs.models.load_model", None)
    argv = ["train", "sft", *files("other", steps=1, adapter=folder, model=smaller)]
    assert_mentions(error_of(*argv), folder, "another model", "model.layers.1.")
    assert f"--adapter {folder}" in error_of("train", "sft", *files("other", steps=1, model=folder, lora_rank=2))
    (folder / "adapter_model.safetensors").unlink()
    assert_mentions(error_of("train", "sft", *files("other", steps=1, adapter=folder)), "adapter_model.safetensors")


# --- bitwise resume -------------------------------------------------------------------------------------

KILLING = """
import os, signal
from pathlib import Path

import whet.training.trainer as trainer

made = trainer.Trainer.log

def log(self, metrics):
    if self.step == 3 and not Path({mark!r}).exists():
        Path({mark!r}).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    made(self, metrics)

trainer.Trainer.log = log
"""


@pytest.mark.parametrize("method", cases(["sft", "dpo", "grpo", "online-dpo"], lambda method: method == "grpo"))
def test_killed_run_on_a_packed_base_resumes_bitwise_identically(method, files):
    data = {"dpo": "pairs.jsonl"}.get(method, "rows.jsonl")
    settings = {**LORA, "base": "q8_0", "steps": 4, "checkpoint_every": 2}
    settings |= files.online if method in ("grpo", "online-dpo") else {}
    settings |= {"group_size": 2, "beta": 0.1} if method == "grpo" else {}
    settings |= {"lora_dropout": 0.25} if method == "sft" else {}
    argv = ["train", method, *files("killed", data, **settings)]
    code = KILLING.format(mark=str(files.folder / "mark")) + WHET[-1]
    assert subprocess.run([*WHET[:-1], code, *argv], capture_output=True, timeout=300).returncode == -signal.SIGKILL
    assert [path.name for path in (files.folder / "killed" / "checkpoints").glob("step-*")] == ["step-000002"]
    assert main(argv) == 0
    assert main(["train", method, *files("whole", data, **settings)]) == 0
    assert adapter(files.folder / "killed") == adapter(files.folder / "whole")
    rows = [json.loads(line) for line in (files.folder / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and all(row["grad_norm"] > 0 for row in rows)
    if method == "grpo":
        assert all(0 < row["sampler/logprob_difference"] < 0.5 and "sampler/importance_weight" in row for row in rows)


# --- other commands -------------------------------------------------------------------------------------


def test_other_commands_load_adapters_with_their_base(files, tiny_model, q8_gguf, capsys, error_of):
    """The text is the same from the base with adapters, from the adapters' folder, and from the run's folder."""
    settings = {"steps": 4, "lora_rank": 2, "learning_rate": 0.3, "model": q8_gguf}
    assert main(["train", "sft", *files("run", **settings)]) == 0
    run = files.folder / "run"
    prompt = ["--prompt=spell a:", "--max-new-tokens=8", "--temperature=0", "--raw"]

    def generate(*argv):
        capsys.readouterr()
        assert main(["generate", *map(str, argv), *prompt]) == 0
        return capsys.readouterr().out

    text = generate(q8_gguf, "--adapter", run / "model")
    assert text == generate(run / "model") == generate(run) == generate(run, "--weights=q8_0") != generate(q8_gguf)
    reward = f"--reward={files.folder / 'letters.py'}:share"
    (files.folder / "one.jsonl").write_text('{"prompt": "spell a:", "answer": "a"}\n')
    rows = f"--prompts={files.folder / 'one.jsonl'}"
    best_of_n = ["best-of-n", rows, reward, "--n=2", "--max-new-tokens=8", "--temperature=0.001"]
    capsys.readouterr()
    assert main([*best_of_n, f"--model={run / 'model'}"]) == 0
    assert json.loads(capsys.readouterr().out)["completion"] == text.removesuffix("\n")
    assert main(["eval", str(run), str(q8_gguf), f"--data={files.folder / 'rows.jsonl'}", reward, "--raw"]) == 0
    assert "accuracy" in capsys.readouterr().out
    for argv, facts in (
        ([q8_gguf, "--adapter", run / "model", "--weights=bf16"], ("base in q8_0", "bf16")),
        ([tiny_model, "--adapter", run / "model"], ("base in q8_0", "bf16")),
        ([run, "--adapter", run / "model"], ("adapters of", q8_gguf, "--adapter")),
    ):
        assert_mentions(error_of("generate", *argv, *prompt), *facts)
    assert f"--adapter {run / 'model'}" in error_of("train", "sft", *files("next", steps=1, model=run / "model"))
    config = run / "model" / "adapter_config.json"
    config.write_text(config.read_text().replace(str(q8_gguf), "/nowhere/model.gguf"))
    assert_mentions(error_of("generate", run, *prompt), "adapters of '/nowhere/model.gguf'", "--adapter")


def test_chat_template_saved_with_adapters_is_used(files, q8_gguf, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{% for message in messages %}[{{ message.role }}]{{ message.content }}<eos>{% endfor %}")
    settings = {"steps": 1, "model": q8_gguf}
    assert main(["train", "sft", *files("run", chat_template=file, lora_rank=2, **settings)]) == 0
    first = files.folder / "run" / "model"
    assert main(["train", "sft", *files("next", adapter=first, **settings)]) == 0
    second, exported = files.folder / "next" / "model", tmp_path / "exported.gguf"
    assert load_tokenizer(str(second)).chat_template == file.read_text() != load_tokenizer(str(q8_gguf)).chat_template
    assert main(["export", str(second), str(exported)]) == 0
    assert load_tokenizer(str(exported)).chat_template == file.read_text()


def test_adapters_of_a_float_base_run_on_any_format(files, tiny_model, q8_gguf, capsys):
    assert main(["train", "sft", *files("run", steps=1, **LORA)]) == 0
    folder = files.folder / "run" / "model"
    for argv in ([folder], [tiny_model, "--adapter", folder, "--weights=int8"], [q8_gguf, "--adapter", folder]):
        assert main(["generate", *map(str, argv), "--prompt=spell a:", "--max-new-tokens=4", "--raw"]) == 0
    argv = ["train", "sft", *files("next", steps=1, adapter=folder, base="q8_0")]
    assert main(argv) == 0 and "packed in q8_0" in capsys.readouterr().out


# --- memory ---------------------------------------------------------------------------------------------


def test_memory_prediction_includes_the_packed_base(tiny_model, q8_gguf, capsys):
    def parts(model, *argv):
        capsys.readouterr()
        assert main(["estimate", str(model), "--train=sft", "--lora-rank=2", "--json", *argv]) == 0
        return json.loads(capsys.readouterr().out)["parts"]

    for model, base, weights in ((tiny_model, "q8_0", "q8_0"), (tiny_model, "auto", NARROW), (q8_gguf, "own", None)):
        packed = pack_base(open_pretrained(model), weights=weights)
        norms = 4 * 5 * 32
        n_bytes = parts(model, f"--base={base}")
        assert n_bytes["weights"] == packed.nbytes + norms + n_bytes["gradients"]
    floats = parts(tiny_model, "--base=none", "--modules-to-save=lm_head")
    assert floats["gradients"] == parts(tiny_model)["gradients"] + 4 * 258 * 32
    capsys.readouterr()
    assert main(["estimate", str(tiny_model), "--train=sft", "--lora-rank=2", "--base=q4_k"]) == 2
    assert_mentions(capsys.readouterr().err, "q4_k", 256)


def test_memory_of_a_packed_base_is_as_predicted(files, no_holders):
    settings = {**LORA, "base": "q8_0", "group_size": 2, "steps": 2}
    assert main(["train", "grpo", *files("run", **{**files.online, **settings})]) == 0
    figures = json.loads((files.folder / "run" / "memory.json").read_text())
    for part in ("weights", "moments", "sampler_weights"):
        assert figures["measured"][part] == pytest.approx(figures["predicted"][part], abs=2000)
