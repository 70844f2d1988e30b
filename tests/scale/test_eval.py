"""``whet eval`` on a pool of workers."""

import json

import pytest
from tests.cli.conftest import tiny_gguf, tiny_model  # noqa: F401
from tests.cli.test_eval import run, tasks  # noqa: F401
from tests.scale.test_ray_pool import cluster  # noqa: F401
from tests.tiny import with_lora

pytestmark = pytest.mark.needs("ray")


def results(path):
    models = json.loads(path.read_text())["models"]
    return [{**task, "elapsed_s": 0} for model in models for task in model["tasks"]]


def test_a_pool_samples_the_same_completions(cluster, run, tasks, tiny_model, tiny_gguf, tmp_path, monkeypatch):  # noqa: F811
    from transformers import AutoModelForCausalLM

    with_lora(AutoModelForCausalLM.from_pretrained(tiny_model), b_std=0.5, target_modules=["q_proj"]).save_pretrained(
        tmp_path / "adapter"
    )
    monkeypatch.chdir(tiny_gguf.parent)  # relative paths, resolved by the driver
    asked = ["--task", tasks("Letters"), "--size", "5", "-n", "3", "--max-new-tokens", "9", "--stop", "e", "--records"]
    two = [tiny_gguf.name, tiny_model, "--adapter", "none", "--adapter", tmp_path / "adapter"]
    run(*two, *asked, "--out", tmp_path / "local.json")
    run(*two, *asked, "--rollout-workers", "2", "--out", tmp_path / "pool.json")
    assert results(tmp_path / "local.json") == results(tmp_path / "pool.json")
    assert [task["items"] for task in results(tmp_path / "pool.json")] == [5, 5]


def test_settings_without_effect_are_rejected(run, tasks, tiny_model):  # noqa: F811
    for option, message in (
        (["--ray-address", "auto"], "rollout_workers is 0: this process samples"),
        (["--rollout-workers", "-1"], "rollout_workers is -1, expected an integer >= 0"),
    ):
        assert message in run(tiny_model, "--task", tasks("Letters"), *option, status=2).err
