"""Server processes of the suite "serve": Whet's and llama.cpp's, on as many threads as the suite.

llama-server's fastest settings depend on machine and load: each of ``every_setting`` serves the first load of as many
streams twice, and the fastest serves all such loads.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import whet
from benchmarks.contenders.engine.workload import Sample, load_once
from benchmarks.contenders.llama_programs import find_llama_program
from benchmarks.contenders.serve.client import Answer, Body, post_all
from whet.system.processes import set_parent_death_signal

_START_S = 120
_GRACE_S = 10
_KV_BYTES = 384 << 20
"""Whet's KV cache: the first calls fill it. A page's first use takes 1 ms per 3 MB, for the system to clear it."""
_CELLS = 256
"""Granularity of llama.cpp's contexts, in tokens."""


class Server(ABC):
    """A running server, which ends with the object.

    Args:
        command: starts it; host and port follow.
        note: remark about its settings.

    Attributes:
        greedy: fields of requests that sample the most probable token.
        process_id: of the server.

    Raises:
        RuntimeError: it ended, or is not ready after two minutes.
    """

    greedy: ClassVar[Body] = {"temperature": 0}

    def __init__(self, command: Sequence[str], note: str = "") -> None:
        self.note = note
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._address = f"127.0.0.1:{port}"
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=partial(set_parent_death_signal, os.getpid()),
            )  # fmt: skip
            self.process_id = process.pid
            self.close = weakref.finalize(self, _end, process)
            until_s = time.perf_counter() + _START_S
            while not self._is_ready():
                if process.poll() is not None or time.perf_counter() > until_s:
                    log.seek(0)
                    text = log.read().decode(errors="replace").strip()
                    raise RuntimeError(f"the server did not start, status {process.poll()}: {text[-400:]}")
                time.sleep(0.02)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{self._address}"

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except OSError:  # not listening yet, or 503 while it loads
            return False

    def complete(self, bodies: Sequence[Body]) -> list[Answer]:
        """Post requests of completions at the same time.

        Raises:
            RuntimeError: a request failed.
        """
        return post_all(self._address, "/v1/completions", bodies)

    @abstractmethod
    def sample(self, body: Body) -> Sample:
        """Return the completion of a request that is not streamed, with its log-probs."""

    @abstractmethod
    def follow(self, schema: Mapping[str, Any]) -> Body:
        """Return the fields of requests whose completions follow a JSON schema."""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


Open = Callable[[Path, int, int, Callable[[Server], float]], Server]
"""(file, rows, tokens of each, trial) -> a server of the file that is fast at a load; ``trial`` returns its seconds."""


class WhetServer(Server):
    """``whet serve``."""

    def sample(self, body: Body) -> Sample:
        [answer] = self.complete([{**body, "return_token_ids": True, "logprobs": 0}])
        choice = answer.body["choices"][0]
        return Sample(body["prompt"], choice["token_ids"], choice["logprobs"]["token_logprobs"])

    def follow(self, schema: Mapping[str, Any]) -> Body:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def open_whet(weights: str, file: Path, n_rows: int, n_tokens: int, trial: Callable[[Server], float]) -> Server:
    """Return Whet's server in a weight format; empty: the file's."""
    command = [sys.executable, "-m", "whet", "serve", str(file), "--kv-bytes", str(_KV_BYTES)]
    command += ["--weights", weights] if weights else []
    return load_once(("whet serve", *command), lambda: WhetServer(command))


class LlamaServer(Server):
    """llama.cpp's server. Its requests have no samplers except the argmax."""

    greedy: ClassVar[Body] = {"temperature": 0, "samplers": ["top_k"], "top_k": 1}

    def complete(self, bodies: Sequence[Body]) -> list[Answer]:
        return super().complete([{**body, **self.greedy} for body in bodies])

    def sample(self, body: Body) -> Sample:
        [answer] = self.complete([{**body, "logprobs": 1}])
        tokens = answer.body["choices"][0]["logprobs"]["content"]
        return Sample(body["prompt"], [token["id"] for token in tokens], [token["logprob"] for token in tokens])

    def follow(self, schema: Mapping[str, Any]) -> Body:
        return {"json_schema": schema}


def every_setting(n_rows: int) -> list[tuple[str, ...]]:
    """List the settings that are tried, as llama-server's arguments. Flash attention is its default, and faster."""
    caches = ("-kvu", "-no-kvu") if n_rows > 1 else ("-kvu",)
    return [("-fa", "on", cache, "-ub", batch) for cache in caches for batch in ("512", "2048")]


def open_llama(program: str, file: Path, n_rows: int, n_tokens: int, trial: Callable[[Server], float]) -> Server:
    """Return llama.cpp's server in the setting in which ``trial`` takes the fewest seconds, of two runs.

    Servers of as many rows have the same setting: the one that is fastest at the first load.

    Args:
        program: path of llama-server; empty: found by ``find_llama_program``.

    Raises:
        NotMeasured: llama-server is missing.
    """
    path = find_llama_program("llama-server", program)
    threads = str(whet.get_num_threads())
    context = str(n_rows * (-(-n_tokens // _CELLS) * _CELLS))
    fixed = (path, "-m", str(file), "-t", threads, "-tb", threads, "-np", str(n_rows), "-c", context)

    def start(settings: tuple[str, ...]) -> Server:
        command = (*fixed, *settings)
        return LlamaServer(command, f"{_version(path)}, {' '.join(command[3:])}")

    if n_rows not in _fastest:
        took = {}
        for settings in every_setting(n_rows):
            server = start(settings)
            took[settings] = min(trial(server) for _ in range(2))
            server.close()
        _fastest[n_rows] = min(took, key=lambda settings: took[settings])
    return load_once((*fixed, *_fastest[n_rows]), lambda: start(_fastest[n_rows]))


_fastest: dict[int, tuple[str, ...]] = {}


def _version(path: str) -> str:
    """Return llama.cpp's version and commit."""
    run = subprocess.run([path, "--version"], capture_output=True, text=True)
    found = re.search(r"version: .*", run.stdout + run.stderr)
    return found[0] if found else "unknown version"
