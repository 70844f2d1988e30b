"""Requests of real clients, recorded from them and stored in bodies/, a file per client.

A file holds the client's name and version and its requests: method, path, body, and in ``needs`` which answer the
client has to get (a function of ``test_bodies``). Two files are exceptions: TRL's request is recorded from the method
of its rollout loop, called without a trainer; the requests of ``vllm bench serve``, which needs an installed vLLM, are
written by hand from a list of the fields that it sends.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).with_name("bodies")


class Recorded(NamedTuple):
    """A request of a client.

    Attributes:
        client: name and version of the client.
        method: of the request.
        path: of the request.
        body: JSON; None: none.
        needs: what its answer has to be.
    """

    client: str
    method: str
    path: str
    body: Any
    needs: str


def read_recorded() -> list[Recorded]:
    """Return the requests of all clients."""
    found = []
    for path in sorted(FOLDER.glob("*.json")):
        content = json.loads(path.read_text())
        found += [Recorded(content["client"], **each) for each in content["requests"]]
    return found
