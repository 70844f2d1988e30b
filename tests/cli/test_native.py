"""``whet train`` with a learner: without torch, next to modules of torch, and where it is refused."""

import itertools
import json
import shutil
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.processes import run_python
from tests.raising import assert_mentions
from tests.representatives import cases

from whet.cli import main
from whet.config.toml import read_toml

LORA = {"lora_rank": 2, "learning_rate": 1e-2, "compute": "float32"}
DROPOUT = ("--lora-dropout=0.1", "--training-mode")
MISSING = ("torch", "transformers", "peft", "matplotlib")


def train_without(packages, argv):
    """Run a command in a process that lacks packages."""
    code = f"""
import sys
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] in {packages!r} else find(name, *rest)
from whet.cli import main

sys.exit(main({[str(argument) for argument in argv]!r}))
"""
    return run_python(code)


def tensors(folder):
    return load_file(folder / "model" / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("method", "model"),
    cases(itertools.product(["sft", "dpo", "grpo"], ["folder", "gguf"]), lambda case: case == ("grpo", "gguf")),
)
def test_it_trains_and_resumes_without_torch(method, model, files, tiny_model, tiny_gguf):
    given = {"model": tiny_model if model == "folder" else tiny_gguf, **LORA, "data": "pairs.jsonl"}
    given |= {
        "grpo": {**files.online, "data": "rows.jsonl", "group_size": 2, "modules_to_save": "norm"},
        "sft": {"data": "rows.jsonl", "lora_dropout": 0.25, "modules_to_save": "layernorm"},
    }.get(method, {})
    argv = ["train", method, *files("run", **given)]
    done = train_without(MISSING, [*argv, "--steps=2"])
    assert done.returncode == 0, done.stderr
    assert "trained natively" in done.stdout and "there is no report (" in done.stdout
    done = train_without(MISSING, [*argv, "--steps=4"])
    assert done.returncode == 0 and "resuming from" in done.stdout, done.stderr
    other = ["train", method, *files("whole", **given), "--steps=4"]
    assert main(other) == 0  # in this process, which has torch
    whole, parts = tensors(files.folder / "whole"), tensors(files.folder / "run")
    assert whole.keys() == parts.keys() and all((whole[name] == parts[name]).all() for name in whole)
    losses = [
        [json.loads(line)["loss"] for line in (files.folder / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "run")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 4


@pytest.mark.parametrize("first", ["native", "torch"])
def test_a_run_changes_its_backend(first, files, capsys):
    second = {"native": "torch", "torch": "native"}[first]
    given = {**LORA, "data": "pairs.jsonl", "modules_to_save": "norm"}
    argv = ["train", "dpo", *files("run", **given)]
    assert main([*argv, "--steps=2", f"--backend={first}"]) == 0
    assert main([*argv, "--steps=4", f"--backend={second}"]) == 0
    assert f"backend changes from '{first}' to '{second}'" in capsys.readouterr().out
    assert main(["train", "dpo", *files("whole", **given), "--steps=2", f"--backend={first}"]) == 0
    assert main(["train", "dpo", *files("whole", **given), "--steps=4", f"--backend={first}"]) == 0
    changed, whole = tensors(files.folder / "run"), tensors(files.folder / "whole")
    for name, value in whole.items():
        assert np.abs(value - changed[name]).max() < 1e-4, name
    assert read_toml(files.folder / "run" / "config.toml")["backend"] == second


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"lora_rank": 0}, "lora_rank is 0"),
        ({"base": "none"}, "base is 'none'"),
        ({"compute": "torch"}, "compute is 'torch'"),
        ({"dtype": "bfloat16", "compute": "auto"}, "dtype is 'bfloat16'"),
        ({"modules_to_save": "lm_head", "compute": "auto"}, "lm_head in modules_to_save"),
        ({"lora_layers": "lm_head"}, "lora_layers names lm_head"),
        ({"trainable_token_indices": "5", "compute": "auto"}, "trainable_token_indices=[5]"),
        ({"use_rslora": None}, ""),
    ],
)
def test_what_needs_torch_is_named_and_trained_with_torch(settings, reason, files, error_of, capsys):
    given = {**LORA, **settings, "steps": 1}
    argv = ["train", "sft", *files("run", **{k: v for k, v in given.items() if v is not None})]
    if not reason:
        assert main([*argv, "--use-rslora", "--backend=native"]) == 0
        config = json.loads((files.folder / "run" / "model" / "adapter_config.json").read_text())
        assert config["lora_alpha"] == pytest.approx(32 * 2**0.5)
        return
    assert_mentions(
        error_of(*argv, "--backend=native"), "whet train sft: backend is 'native'", reason, "--backend torch"
    )
    if "dtype" in settings:
        assert_mentions(error_of(*argv, "--activation-bytes=0"), "activation_bytes is 0", "torch")
    assert main(argv) == 0
    assert "natively" not in capsys.readouterr().out


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_a_run_of_dora_resumes(optimizer, files, capsys, error_of):
    given = {**LORA, **files.online, "data": "rows.jsonl", "group_size": 2, "optimizer": optimizer}
    for name, steps in (("run", (2, 4)), ("whole", (4,))):
        for n in steps:
            assert main(["train", "grpo", *files(name, **given), "--use-dora", f"--steps={n}"]) == 0
    assert "trained natively" in capsys.readouterr().out
    whole, parts = tensors(files.folder / "whole"), tensors(files.folder / "run")
    assert any("lora_magnitude_vector" in name for name in whole)
    assert whole.keys() == parts.keys() and all((whole[name] == parts[name]).all() for name in whole)
    assert main(["generate", str(files.folder / "run"), "--prompt=a", "--max-new-tokens=2"]) == 0
    error = error_of("train", "grpo", *files("new", **given), "--use-dora", "--backend=native", *DROPOUT)
    assert_mentions(error, "lora_dropout is 0.1", "--backend torch")


def test_a_run_of_qat_resumes(files, capsys):
    given = {**LORA, "qat": "q8_0"}
    for name, steps in (("run", (2, 4)), ("whole", (4,))):
        for n in steps:
            assert main(["train", "sft", *files(name, **given), f"--steps={n}"]) == 0
    assert "trained natively), packed in float32, rounded as a file in q8_0" in capsys.readouterr().out
    whole, parts = tensors(files.folder / "whole"), tensors(files.folder / "run")
    assert all((parts[name] == value).all() for name, value in whole.items())


def test_dora_and_trained_tokens_are_merged_by_commands(files, error_of):
    argv = ["train", "sft", *files("run", **{**LORA, "compute": "auto", "trainable_token_indices": "5"}), "--use-dora"]
    assert_mentions(error_of(*argv, "--backend=native", "--steps=1"), "trainable_token_indices=[5]", "--backend torch")
    assert main([*argv, "--steps=2"]) == 0 and main([*argv, "--steps=3"]) == 0
    assert any("lora_magnitude_vector" in name for name in tensors(files.folder / "run"))
    run, merged = str(files.folder / "run"), str(files.folder / "merged")
    assert main(["generate", run, "--prompt=a", "--max-new-tokens=2"]) == 0
    assert main(["merge", run, merged]) == 0


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "muon"])
def test_runs_keep_their_optimizer(optimizer, files, error_of):
    given = {"optimizer": optimizer, "learning_rate": 1e-3, "compute": "float32"}
    assert main(["train", "sft", *files("whole", **given), "--steps=4"]) == 0
    assert main(["train", "sft", *files("run", **given), "--steps=2"]) == 0
    other = ["train", "sft", *files("run", **{**given, "optimizer": "adamw"}), "--steps=4"]
    assert_mentions(error_of(*other), "optimizer", optimizer, "adamw")
    assert main(["train", "sft", *files("run", **given), "--steps=4"]) == 0
    models = [(files.folder / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "run")]
    assert models[0] == models[1]


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_pissa_with_ranks_by_pattern_on_a_quantised_base(backend, files):
    """Resumed to the bit; the result is plain LoRA on the same base."""
    given = {**LORA, "lora_init": "pissa", "rank_pattern": "q_proj=1", "base": "q8_0", "backend": backend}
    assert main(["train", "sft", *files("whole", **given), "--steps=4"]) == 0
    assert main(["train", "sft", *files("run", **given), "--steps=2"]) == 0
    assert main(["train", "sft", *files("run", **given), "--steps=4"]) == 0
    whole, parts = tensors(files.folder / "whole"), tensors(files.folder / "run")
    assert all(value.tobytes() == parts[name].tobytes() for name, value in whole.items())
    ranks = {name: len(value) for name, value in whole.items() if name.endswith("lora_A.weight")}
    assert {rank for name, rank in ranks.items() if "q_proj" in name} == {2} and set(ranks.values()) == {2, 4}
    assert main(["generate", str(files.folder / "run"), "--prompt=a", "--max-new-tokens=2"]) == 0
    changed = main(["train", "sft", *files("run", **{**given, "lora_init": "zero"}), "--steps=6"])
    assert changed == 2  # a run keeps its adapters


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_kept_activations_do_not_change_results(compute, files):
    found = []
    for n_bytes in (0, 40_000, 10**9):
        given = {**LORA, "compute": compute, "data": "pairs.jsonl", "steps": 2}
        given |= {"lora_dropout": 0.25, "modules_to_save": "norm"}
        assert (
            main(["train", "dpo", *files(f"run{n_bytes}", **given), f"--activation-bytes={n_bytes}", "--training-mode"])
            == 0
        )
        found.append(tensors(files.folder / f"run{n_bytes}"))
    for name, value in found[0].items():
        assert all((value == other[name]).all() for other in found), name


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_several_chat_templates_are_saved_with_the_model(backend, files, tiny_model):
    model = shutil.copytree(tiny_model, files.folder / "templates")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].name }}")
    argv = ["train", "sft", *files("run", model=model, **LORA), f"--backend={backend}"]
    for steps in (1, 2):  # the second run replaces the model
        assert main([*argv, f"--steps={steps}"]) == 0
        saved = files.folder / "run" / "model" / "additional_chat_templates" / "tool_use.jinja"
        assert saved.read_text() == "{{ tools[0].name }}"


def test_an_engine_of_torch_needs_modules(files, error_of):
    argv = ["train", "grpo", *files("run", **files.online, lora_rank=2, steps=1), "--engine=torch", "--backend=native"]
    assert_mentions(error_of(*argv), "engine is 'torch'")


def test_torch_is_not_imported(files):
    argv = files("run", **{**LORA, **files.online, "steps": 1, "group_size": 2})
    code = f"from whet.cli import main\nimport sys\nmain(['train', 'grpo', *{argv!r}])\n"
    code += "print([name for name in ('torch', 'transformers', 'peft') if name in sys.modules])"
    assert run_python(code).stdout.splitlines()[-1] == "[]", sys.version
