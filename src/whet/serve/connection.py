"""Connections of ``whet serve``: uvicorn's HTTP/1.1, on which a request has to arrive in time and in order."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from whet.serve.errors import ApiError

_LINGER_S = 2.0
"""Time in which the rest of a refused request is read: to close a socket with unread bytes discards the answer."""


class Connection(H11Protocol):
    """A connection that ends when a request stalls.

    A stalled request is answered with the status 408, unless its response has begun. A request that is not HTTP is
    answered with 400, one whose header is too large with 431.

    Attributes:
        header_s: time from the first byte of a header, or from the connection's begin, to the header's end.
        body_s: longest pause within a body.
    """

    header_s: ClassVar[float] = 30.0
    body_s: ClassVar[float] = 60.0
    _awaited: Any = None  # state of the client while a timer runs: IDLE, SEND_BODY
    _timer: asyncio.TimerHandle | None = None
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if not self._is_refused:
            self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that h11 cannot read; called while its error is handled."""
        status = getattr(sys.exc_info()[1], "error_status_hint", 400)
        size = self.config.h11_max_incomplete_event_size or "16 KiB"
        self._refuse(ApiError(status, f"The header is larger than {size}." if status == 431 else msg))

    def _watch(self) -> None:
        """Start, restart or stop the timer, according to the part of a request that is awaited."""
        state = self.conn.their_state
        if state is h11.IDLE and self._awaited is h11.IDLE:
            return  # a header may not take longer by arriving in pieces
        self._stop()
        seconds = {h11.IDLE: self.header_s, h11.SEND_BODY: self.body_s}.get(state)
        if seconds is not None:
            self._awaited, self._timer = state, self.loop.call_later(seconds, self._end_stalled)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._awaited, self._timer = None, None

    def _end_stalled(self) -> None:
        part = "header" if self._awaited is h11.IDLE else "body"
        self._stop()
        if part == "header" and not self.conn.trailing_data[0]:
            self.transport.close()  # no request has begun
        else:
            self._refuse(ApiError(408, f"The request's {part} did not arrive in time."))

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error if the response has not begun, and end the connection."""
        self._stop()
        self._is_refused = True
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        body = json.dumps(error.body()).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        events: list[Any] = [h11.Response(status_code=error.status, headers=headers), h11.Data(data=body)]
        for event in [*events, h11.EndOfMessage()]:
            self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:  # its handler waits for the body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write_eof()
        self.transport.resume_reading()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.close)
