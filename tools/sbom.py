"""Add a CycloneDX list of the code that the compiled extension contains to wheels (PEP 770).

    python tools/sbom.py WHEEL_OR_FOLDER ...

The extension contains nanobind's runtime with its hash maps and, if zig linked it, LLVM's C++ library. The file is
.dist-info/sboms/whet.cdx.json. Equal wheels get equal files: it has no time and no serial number.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import nanobind


def add_sbom(wheel: Path, libcxx: str | None = None) -> None:
    """Add the list to a wheel, in place. ``libcxx``: the version of LLVM's C++ library, if it is linked statically."""
    name, release, *_ = wheel.name.split("-")
    info = f"{name}-{release}.dist-info"
    text = json.dumps(make_sbom(release, libcxx), indent=1)
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


def make_sbom(release: str, libcxx: str | None) -> dict:
    components = [
        make_component("pypi/nanobind", version("nanobind"), "BSD-3-Clause", "the runtime of the bindings"),
        make_component("github/Tessil/robin-map", robin_map_version(), "MIT", "nanobind's hash maps"),
    ]
    if libcxx is not None:
        licence = "Apache-2.0 WITH LLVM-exception"
        components.append(make_component("github/llvm/llvm-project", libcxx, licence, "libc++, libc++abi, libunwind"))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": make_component("pypi/whet", release, "Apache-2.0", "this package")},
        "components": components,
    }


def make_component(package: str, release: str, licence: str, description: str) -> dict:
    return {
        "type": "library",
        "name": package.rpartition("/")[2],
        "version": release,
        "description": description,
        "licenses": [{"expression": licence}],
        "purl": f"pkg:{package}@{release}",
    }


def robin_map_version() -> str:
    header = Path(nanobind.include_dir()).parent / "ext/robin_map/include/tsl/robin_growth_policy.h"
    return ".".join(re.findall(r"define TSL_RH_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header.read_text()))


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        for wheel in path.glob("*.whl") if path.is_dir() else [path]:
            add_sbom(wheel)
