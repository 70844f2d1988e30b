"""Streamed responses: the events of an endpoint, with a comment whenever there is nothing to send for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Send

from whet.errors import WhetError
from whet.serve.endpoints import Streamed
from whet.serve.errors import ApiError

KEEP_ALIVE_S = 10.0


class EventStream(StreamingResponse):
    """The response of a streamed request.

    Args:
        endpoint: the request.
        first: its first chunk; None: there is none.
        chunks: the chunks after it.
    """

    def __init__(self, endpoint: Streamed[Any], first: asyncio.Future[Any], chunks: AsyncGenerator[Any]) -> None:
        self._body = self._events(first, chunks)
        super().__init__(self._body, media_type=endpoint.media_type)
        self._endpoint, self._sent_s, self._is_ended = endpoint, time.monotonic(), False

    async def stream_response(self, send: Send) -> None:
        keeper = asyncio.ensure_future(self._keep_alive(send))
        try:
            async with aclosing(self._body):
                await super().stream_response(send)
        finally:
            keeper.cancel()

    async def _events(self, first: asyncio.Future[Any], chunks: AsyncGenerator[Any]) -> AsyncGenerator[str]:
        endpoint = self._endpoint
        try:
            if (chunk := await first) is not None:
                yield self._event(chunk)
                async for chunk in chunks:
                    yield self._event(chunk)
            yield endpoint.ending
        except (ApiError, WhetError) as error:
            yield self._event(endpoint.failure(error if isinstance(error, ApiError) else ApiError(500, str(error))))
        finally:
            self._is_ended = True
            if not first.done():  # awaiting it would let a disconnected client's cancellation in before the next line
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            await chunks.aclose()

    def _event(self, chunk: Any) -> str:
        self._sent_s = time.monotonic()
        return self._endpoint.event(chunk)

    async def _keep_alive(self, send: Send) -> None:
        """Send comments in the pauses. Only this task waits with a timer: chunks need none."""
        while not self._is_ended:
            pause_s = self._sent_s + KEEP_ALIVE_S - time.monotonic()
            if pause_s > 0:
                await asyncio.sleep(pause_s)
            else:
                self._sent_s = time.monotonic()
                await send(
                    {"type": "http.response.body", "body": self._endpoint.keep_alive.encode(), "more_body": True}
                )
