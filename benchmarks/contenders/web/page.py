"""A Chromium page in which a contender runs: a separate Node process serves it, opens it and calls its functions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from whet.bench.case import NotMeasured
from whet.files import replace_text

WEB = Path(__file__).resolve().parents[3] / "web"
"""Folder of the npm package."""
_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
_GRACE_S = 10


def missing_part(web: Path = WEB) -> str:
    """Return the missing prerequisite of pages and how to install it; empty if all are installed."""
    if not (web / "dist/index.js").exists() or not (web / "node_modules/playwright-core").exists():
        return "the npm package is not built: make web"
    for names in (("node",), _CHROMIUM):
        if not any(map(shutil.which, names)):
            return f"{names[0]} is not installed: apt-get install {names[0].replace('node', 'nodejs')}"
    return ""


def install_peers(folder: Path, web: Path = WEB) -> Path:
    """Install the pinned peers in ``folder`` if necessary, and return their ``node_modules``.

    Raises:
        NotMeasured: npm is missing or failed.
    """
    lock = (web / "bench/package-lock.json").read_text(encoding="utf-8")
    done = folder / "installed.json"
    if done.exists() and done.read_text(encoding="utf-8") == lock:
        return folder / "node_modules"
    if shutil.which("npm") is None:
        raise NotMeasured("npm, which installs it, is missing: apt-get install npm")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(web / "bench" / name, folder)
    command = ["npm", "ci", "--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if run.returncode:
        raise NotMeasured(f"npm could not install it in {folder}: {run.stderr.strip()[-200:]}")
    replace_text(done, lock)
    return folder / "node_modules"


class Page:
    """A page that runs a module of web/bench; closed with the object.

    Args:
        module: name of the module: "whet.js".
        folders: further served folders: name in the URL -> folder.

    Raises:
        NotMeasured: a prerequisite of pages is missing.
        RuntimeError: the page did not open.
    """

    def __init__(self, module: str, folders: Mapping[str, Path]) -> None:
        if missing := missing_part():
            raise NotMeasured(missing)
        served = {"whet": WEB / "dist", "bench": WEB / "bench", **folders}
        settings = {
            "chromium": next(filter(None, map(shutil.which, _CHROMIUM))),
            "page": f"/bench/{module}",
            "folders": {name: str(folder.resolve()) for name, folder in served.items()},
        }
        self._process = subprocess.Popen(
            ["node", str(WEB / "bench/driver.mjs"), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.close = weakref.finalize(self, _end, self._process)
        self.version: str = self._answer()

    def call(self, function: str, **arguments: Any) -> Any:
        """Call a function of the module and return its result.

        Raises:
            RuntimeError: the function failed or the page was closed.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"call": function, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise RuntimeError(f"the page's process ended with status {self._process.wait()}") from None
        return self._answer()

    def peak_bytes(self) -> int | None:
        """Return the memory peak of the page's renderer; None if the system does not report it."""
        return self.call("rendererPeak") if os.path.isdir("/proc/self") else None

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the page's process ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    with suppress(OSError):
        process.stdin.close()  # the process and its browser then exit
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
