"""A ``whet serve`` process that counts its objects on request, for torture of the server."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
from tests.torture.common import ROOT, require

_MAIN = """
import gc, json, os, signal, sys, threading
from collections import Counter

def count(*_):
    gc.collect()
    found = Counter(type(each).__name__ for each in gc.get_objects())
    counts = {name: found[name] for name in ("Task", "Ticket", "Session", "Constraint", "StreamingResponse")}
    counts |= {"threads": threading.active_count(), "files": len(os.listdir("/proc/self/fd"))}
    os.write(2, (json.dumps(counts) + "\\n").encode())

signal.signal(signal.SIGUSR1, count)
from whet.cli import main
sys.exit(main())
"""
_METRICS = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


class Server:
    """A running server.

    Attributes:
        url: its address, without /v1.
        process: the process.
        log: lines that it printed after its start.
    """

    def __init__(self, model: Path, *flags: str) -> None:
        command = [sys.executable, "-c", _MAIN, "serve", str(model), "--name", "tiny", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stderr is not None
        first = self.process.stderr.readline()
        address = re.search(r"(http://\S+)/v1", first)
        if address is None:
            self.process.kill()
            raise AssertionError(f"the server does not start: {first}{self.process.stderr.read()}")
        self.url, self.log = address[1], list[str]()
        self._counts: queue.Queue[dict[str, int]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith('{"Task"'):
                self._counts.put(json.loads(line))
            else:
                self.log.append(line)

    @property
    def port(self) -> int:
        """Its port."""
        return int(self.url.rpartition(":")[2])

    def usage(self) -> dict[str, float]:
        """Return the numbers of tasks, requests, calls on the engine, threads and open files, and used pages."""
        self.process.send_signal(signal.SIGUSR1)
        counts: dict[str, float] = dict(self._counts.get(timeout=30))
        text = httpx.get(self.url + "/metrics", timeout=60).text
        return counts | {name: float(re.findall(rf"vllm:{name}{{.*}} (\S+)", text)[0]) for name in _METRICS}

    def idle_usage(self) -> dict[str, float]:
        """Return the usage once it does not change: connections that their clients have closed are gone."""
        found = self.usage()
        while True:
            time.sleep(1)
            before, found = found, self.usage()
            if before == found:
                return found

    def require_usage(self, expected: dict[str, float], seconds: float = 15.0) -> None:
        """Require the usage to become as expected."""
        end = time.monotonic() + seconds
        while (found := self.usage()) != expected and time.monotonic() < end:
            time.sleep(0.2)
        require(found == expected, f"the usage was {expected}, and is {found}")

    def memory(self) -> int:
        """Return the resident memory in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.findall(r"VmRSS:\s+(\d+)", status)[0])

    def peak(self) -> int:
        """Return the peak of the resident memory in bytes since ``reset_peak``."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.findall(r"VmHWM:\s+(\d+)", status)[0])

    def reset_peak(self) -> None:
        """Begin a new peak."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def require_silence(self) -> None:
        """Require that the server runs and has printed no traceback; it warns of requests that are not HTTP."""
        require(self.process.poll() is None, f"the server ended: {''.join(self.log[-20:])}")
        text = "".join(self.log)
        require("Traceback" not in text, f"the server printed {text[-1500:]}")

    def warm_up(self, bodies: Sequence[dict] = ()) -> None:
        """Start all threads of the server's pool."""
        n_threads = min(32, (os.cpu_count() or 1) + 4)
        body = {"prompt": "1", "max_tokens": 40, "ignore_eos": True}

        def ask() -> None:
            for each in [*bodies, *[body] * 20]:
                httpx.post(self.url + "/v1/completions", json=each, timeout=60).raise_for_status()

        threads = [threading.Thread(target=ask) for _ in range(4 * n_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def server(model: Path, *flags: str) -> Iterator[Server]:
    """Serve a model on a free port, or on the port in ``flags``."""
    running = Server(model, *(flags if "--port" in flags else ("--port", "0", *flags)))
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
