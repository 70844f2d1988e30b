"""Requests to a server of the OpenAI API: ``whet serve``, vLLM, llama-server and others."""

from __future__ import annotations

import json
import os
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from whet.errors import WhetValueError

REQUESTS = 8
"""Requests to a server at once."""


class ServerError(WhetValueError):
    """A request failed.

    Attributes:
        is_final: whether the same request would fail again.
    """

    is_final = False


def is_url(model: str) -> bool:
    """Whether the name of a model is the URL of a server."""
    return urlsplit(model).scheme in ("http", "https")


class ModelServer:
    """A model behind an OpenAI URL.

    Args:
        url: base URL, such as http://127.0.0.1:8000/v1, or with the model's name: http://127.0.0.1:8000/v1#NAME. The
            environment variable OPENAI_API_KEY is the key, if any.
        where: prefix of errors.
        timeout_s: time limit of a request in seconds.

    Attributes:
        url: base URL.
        model: the model's name.

    Raises:
        ServerError: there is no server.
        WhetValueError: it serves several models and the URL names none as #NAME, or another one.
    """

    def __init__(self, url: str, where: str, timeout_s: float = 600.0) -> None:
        self.url, _, self.model = url.rstrip("/").partition("#")
        self._where, self._timeout_s = where, timeout_s
        names = [card["id"] for card in self.ask("/models")["data"] if self.model or not card.get("parent")]
        self.model = self.model or (names[0] if len(names) == 1 else "")
        if self.model not in names:
            raise WhetValueError(
                f"{where}: {url} serves {', '.join(names) or 'no model'}. Append the name of one: {self.url}#NAME."
            )

    def ask(self, path: str, body: dict[str, Any] | None = None, url: str = "") -> Any:
        """Return the JSON that answers a request, with ``body`` a POST; ``url`` replaces the base URL.

        Raises:
            ServerError: the server does not answer, or with another status than 200.
        """
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = Request((url or self.url) + path, data, headers)
        try:
            with urlopen(request, timeout=self._timeout_s) as response:
                return json.load(response)
        except HTTPError as error:
            text = error.read(500).decode(errors="replace")
            failure = ServerError(f"{self._where}: {request.full_url} answered {error.code}: {text}")
            failure.is_final = error.code < 500 and error.code not in (408, 429)
            raise failure from error
        except (OSError, HTTPException, ValueError) as error:
            raise ServerError(f"{self._where}: {request.full_url} does not answer: {error}.") from error
