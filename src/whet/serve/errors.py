"""Errors that a client receives, in OpenAI's form."""

from __future__ import annotations

from typing import Any

GONE = 499
"""Status of a request whose client went away (nginx's)."""


class ApiError(Exception):
    """An error response.

    Attributes:
        status: HTTP status.
        message: for people.
        param: name of the request's field; None: none.
        code: for programs; None: none.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """Return the response's body."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
