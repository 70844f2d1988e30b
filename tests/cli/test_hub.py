"""Commands with names on the hub, against a hub on this machine."""

import shutil

import pytest
from tests.hub_stub import serve_hub
from tests.processes import run_python

from whet.models.hub import is_hub_name, repository_of


@pytest.fixture(scope="module")
def hub(tiny_model, tiny_gguf, tmp_path_factory):
    """Repositories of the tiny model, in one format and in several."""
    folder = tmp_path_factory.mktemp("ggufs")
    for name in ("tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf", "tiny-Q4_K.gguf", "a-f16.gguf", "b-f16.gguf"):
        shutil.copy(tiny_gguf, folder / name)
    model = shutil.copytree(tiny_model, tmp_path_factory.mktemp("hub") / "model")
    (model / "original").mkdir()
    (model / "original" / "consolidated.safetensors").write_bytes(b"unused")
    with serve_hub({"someone/tiny": model, "someone/tiny-GGUF": folder}) as found:
        yield found


@pytest.fixture
def whet(hub, tmp_path):
    """Return a function that runs a command without transformers, with an empty cache of the hub."""

    def run(*argv, **environment):
        code = (
            f"import sys\nsys.modules['transformers'] = None\nfrom whet.cli import main\nsys.exit(main({list(argv)!r}))"
        )
        given = {"HF_ENDPOINT": hub[0], "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", **environment}
        return run_python(code, **given)

    return run


def test_a_folder_is_downloaded_once_and_found_without_network(hub, whet):
    argv = ["generate", "someone/tiny", "--prompt", "a", "--max-new-tokens", "2", "--temperature", "0"]
    first = whet(*argv)
    assert first.returncode == 0, first.stderr
    assert "looking for it on the Hugging Face hub" in first.stderr
    assert not any("consolidated" in name for name in hub[1])
    n_sent = len(hub[1])
    again = whet(*argv)
    assert again.stdout == first.stdout and len(hub[1]) == n_sent
    offline = whet(*argv, HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
    assert offline.returncode == 0 and offline.stdout == first.stdout, offline.stderr


@pytest.mark.parametrize(("tag", "name"), [(":Q8_0", "Q8_0"), (":q4_k", "Q4_K"), ("", "Q4_K_M")])
def test_a_gguf_file_is_chosen_by_its_format(tag, name, hub, whet):
    before = len(hub[1])
    done = whet("info", f"someone/tiny-GGUF{tag}")
    assert done.returncode == 0, done.stderr
    assert hub[1][before:] == [f"someone/tiny-GGUF/tiny-{name}.gguf"]


@pytest.mark.parametrize(
    ("model", "facts"),
    [
        ("someone/nothing", ("'someone/nothing' is neither a local path nor a model", "Check the name")),
        ("someone/tiny-GGUF:Q3_K_S", ("someone/tiny-GGUF:Q3_K_S names 0 models", "tiny-Q8_0.gguf")),
        ("someone/tiny-GGUF:f16", ("names 2 models", "a-f16.gguf, b-f16.gguf")),
    ],
)
def test_names_that_the_hub_lacks_are_errors(model, facts, whet):
    done = whet("generate", model, "--prompt", "a")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) <= 2
    for fact in facts:
        assert fact in done.stderr, done.stderr


def test_adapters_of_a_name_are_trained_resumed_and_used(files, whet):
    argv = ["train", "sft", *files("run", model="someone/tiny", lora_rank=2, learning_rate=1e-2)]
    for steps in ("1", "2"):
        done = whet(*argv, "--steps", steps)
        assert done.returncode == 0 and "trained natively" in done.stdout, done.stderr
    folder = files.folder / "run" / "model"
    assert '"base_model_name_or_path": "someone/tiny"' in (folder / "adapter_config.json").read_text()
    for model in (folder, files.folder / "run" / "checkpoints" / "step-000002"):
        argv = ["generate", "someone/tiny", "--adapter", str(model), "--prompt", "a", "--max-new-tokens", "2"]
        assert whet(*argv).returncode == 0
    done = whet("generate", str(folder), "--prompt", "a", "--max-new-tokens", "2")
    assert done.returncode == 0, done.stderr


def test_names_and_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("owner/name") and is_hub_name("owner/name:Q4_K_M")
    assert not any(map(is_hub_name, ("name", "a/b/c", "./a", "/a/b", "~/a", "a/b:", "")))
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert not is_hub_name("owner/name")
    assert repository_of("/x/hub/models--owner--a-name/snapshots/0123") == "owner/a-name"
    assert repository_of("/x/owner/name") == ""
