"""Add a CycloneDX list of the code that the compiled extension contains to wheels (PEP 770).

    python tools/sbom.py WHEEL ...

Wheels of one platform list nanobind, whose runtime every extension contains; wheels linked by Zig also its C++ library.
The file is .dist-info/sboms/whet.cdx.json. Equal wheels get equal files: it has no time and no serial number.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path


def add_sbom(wheel: Path, zig: str | None = None) -> None:
    """Add the list to a wheel, in place; ``zig`` is the version of Zig that linked it."""
    name, release, *_ = wheel.name.split("-")
    info = f"{name}-{release}.dist-info"
    text = json.dumps(make_sbom(release, zig), indent=1)
    with zipfile.ZipFile(wheel) as packed:
        files = [(entry, packed.read(entry)) for entry in packed.infolist()]
    sbom = zipfile.ZipInfo(f"{info}/sboms/whet.cdx.json", files[0][0].date_time)
    files = [(entry, data) for entry, data in files if entry.filename not in (sbom.filename, f"{info}/RECORD")]
    files.append((sbom, text.encode()))
    record = zipfile.ZipInfo(f"{info}/RECORD", files[0][0].date_time)
    files.append((record, write_record(files, record.filename)))
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for entry, data in files:
            entry.external_attr = entry.external_attr or 0o100644 << 16
            packed.writestr(entry, data, zipfile.ZIP_DEFLATED)


def write_record(files: list[tuple[zipfile.ZipInfo, bytes]], record: str) -> bytes:
    """Return the RECORD of a wheel: path, digest and size of every file."""
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    for entry, data in files:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        writer.writerow([entry.filename, f"sha256={digest}", len(data)])
    writer.writerow([record, "", ""])
    return rows.getvalue().encode()


def make_sbom(release: str, zig: str | None) -> dict:
    nanobind = version("nanobind")
    components = [
        make_component("nanobind", nanobind, "BSD-3-Clause", "nanobind"),
        make_component("robin-map", nanobind, "MIT", "nanobind"),  # nanobind's copy
    ]
    if zig is not None:
        components.append(make_component("libc++", zig, "Apache-2.0 WITH LLVM-exception", "ziglang"))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": make_component("whet", release, "Apache-2.0", "whet")},
        "components": components,
    }


def make_component(name: str, release: str, licence: str, package: str) -> dict:
    return {
        "type": "library",
        "name": name,
        "version": release,
        "licenses": [{"expression": licence}],
        "purl": f"pkg:pypi/{package}@{release}",
    }


if __name__ == "__main__":
    for path in sys.argv[1:]:
        add_sbom(Path(path))
