"""A hub on this machine: the part of the Hugging Face hub's HTTP interface that downloads use."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve_hub(repositories: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Serve folders as repositories; yield the address for HF_ENDPOINT, and the list of files that were sent."""
    sent: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def _answer(self, with_body: bool) -> None:
            path = self.path.partition("?")[0].strip("/")
            parts = path.removeprefix("api/models/").split("/")
            repo, rest = "/".join(parts[:2]), parts[2:]
            if repo not in repositories:
                headers = {"X-Error-Code": "RepoNotFound", "Content-Type": "application/json"}
                return self._send(404, b"{}", headers, with_body)
            folder = repositories[repo]
            files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
            if path.startswith("api/"):
                if rest[:1] == ["tree"]:
                    entries = [
                        {"type": "file", "path": name, "size": (folder / name).stat().st_size, "oid": "0" * 40}
                        for name in files
                    ]
                    body = json.dumps(entries).encode()
                else:
                    body = json.dumps(
                        {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}
                    ).encode()
                return self._send(200, body, {"Content-Type": "application/json"}, with_body)
            name = "/".join(rest[2:])  # resolve/REVISION/NAME
            if name not in files:
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
            data = (folder / name).read_bytes()
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            status = 200
            if (asked := self.headers.get("Range", "")).startswith("bytes=") and with_body:
                first = int(asked.removeprefix("bytes=").partition("-")[0])
                headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
                data, status = data[first:], 206
            if with_body:
                sent.append(f"{repo}/{name}")
            self._send(status, data, headers, with_body)
            return None

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", sent
    finally:
        server.shutdown()
        server.server_close()
