"""The client of the suite "serve": requests of OpenAI's completions, each on its own thread and connection.

The client shares its processors with the server: what arrives is stored with its time, and parsed after the last
request has ended.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

_TIMEOUT_S = 600

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """A response and its times, in seconds of ``time.perf_counter``.

    Attributes:
        started_s: when the client connected.
        ended_s: when the response was complete.
        arrivals_s: when each chunk with text arrived; of a whole response, its end.
        n_prompt: prompt tokens, as the server counts them.
        n_tokens: sampled tokens, as the server counts them.
        text: the completion.
        body: the whole response, or the last chunk.
    """

    started_s: float
    ended_s: float
    arrivals_s: Sequence[float]
    n_prompt: int
    n_tokens: int
    text: str
    body: Body

    @property
    def first_s(self) -> float:
        """Seconds to the first text."""
        return self.arrivals_s[0] - self.started_s

    @property
    def gaps_s(self) -> np.ndarray:
        """Seconds between consecutive tokens, (n_tokens - 1,); 0 between tokens of one chunk."""
        gaps = np.zeros(self.n_tokens - 1)
        gaps[: len(self.arrivals_s) - 1] = np.diff(self.arrivals_s)
        return gaps


def post_all(address: str, path: str, bodies: Sequence[Body]) -> list[Answer]:
    """Post all bodies at the same time.

    Args:
        address: host and port.
        path: of the endpoint.
        bodies: requests; all are streamed, or none is.

    Raises:
        RuntimeError: a server answers with an error, or with chunks that are not OpenAI's.
    """
    payloads = [json.dumps(body).encode() for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as threads:
        received = list(threads.map(lambda payload: _post(address, path, payload), payloads))
    return [_parse(pieces, bool(body.get("stream"))) for body, pieces in zip(bodies, received, strict=True)]


_Pieces = list[tuple[float, bytes]]
"""The time and content of what arrived; the first is the time of the request, without content."""


def _post(address: str, path: str, payload: bytes) -> _Pieces:
    pieces = [(time.perf_counter(), b"")]
    connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", path, payload, {"Content-Type": "application/json", "Connection": "close"})
        response = connection.getresponse()
        while piece := response.read1(1 << 16):
            pieces.append((time.perf_counter(), piece))
        if response.status != 200:
            text = b"".join(piece for _, piece in pieces).decode(errors="replace")
            raise RuntimeError(f"{path}: status {response.status}: {text[:400]}")
    finally:
        connection.close()
    return pieces


def _parse(pieces: _Pieces, is_stream: bool) -> Answer:
    if not is_stream:
        body = json.loads(b"".join(piece for _, piece in pieces))
        usage, end = body["usage"], pieces[-1][0]
        text = body["choices"][0]["text"]
        return Answer(pieces[0][0], end, [end], usage["prompt_tokens"], usage["completion_tokens"], text, body)
    arrivals, texts, usage, chunk = [], [], {}, {}
    for arrived_s, chunk in _events(pieces):
        if "error" in chunk:
            raise RuntimeError(f"the stream ended with an error: {chunk['error']}")
        if text := "".join(choice["text"] for choice in chunk["choices"]):
            arrivals.append(arrived_s)
            texts.append(text)
        usage = chunk.get("usage") or usage
    if not usage:
        raise RuntimeError("the stream ended without usage")
    return Answer(
        pieces[0][0], pieces[-1][0], arrivals, usage["prompt_tokens"], usage["completion_tokens"], "".join(texts), chunk
    )


def _events(pieces: _Pieces) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield the events of a stream with the time at which each was complete."""
    pending, is_done = b"", False
    for arrived_s, piece in pieces:
        *events, pending = (pending + piece).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                is_done = True
            elif not event.startswith(b":"):
                yield arrived_s, json.loads(data)
    if not is_done or pending:
        raise RuntimeError(f"the stream ended without [DONE], with {pending[:80]!r}")
