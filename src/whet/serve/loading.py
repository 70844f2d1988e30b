"""The application while its model is loaded: the socket listens, and every path answers 503."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

_BODY = {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}
"""llama-server's, which its clients wait on."""


class LoadingApp:
    """An ASGI application that becomes another one once that is loaded.

    Args:
        load: creates the application; runs in a thread.
        end: called in the event loop when the application answers, or with the error that ``load`` raised.
    """

    def __init__(self, load: Callable[[], Starlette], end: Callable[[Exception | None], None]) -> None:
        self._load, self._end = load, end
        self._app: Starlette | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._app is not None:
            await self._app(scope, receive, send)
        else:
            await JSONResponse(_BODY, 503, {"Retry-After": "1"})(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Complete the startup at once, load, and end the application's lifespan with the server's."""
        await receive()
        await send({"type": "lifespan.startup.complete"})
        async with AsyncExitStack() as stack:
            loading = asyncio.ensure_future(self._begin(stack))
            await receive()
            loading.cancel()
            with suppress(asyncio.CancelledError):
                await loading
        await send({"type": "lifespan.shutdown.complete"})

    async def _begin(self, stack: AsyncExitStack) -> None:
        try:
            app = await _in_thread(self._load)
            await stack.enter_async_context(app.router.lifespan_context(app))
            self._app = app
        except Exception as error:
            self._end(error)
        else:
            self._end(None)


async def _in_thread(load: Callable[[], Starlette]) -> Starlette:
    """Await a function in a thread that does not keep the process alive, so that a signal ends a server that loads."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Starlette] = loop.create_future()

    def settle(app: Starlette | None, error: Exception | None) -> None:
        if loaded.cancelled():
            return
        if app is not None:
            loaded.set_result(app)
        elif error is not None:
            loaded.set_exception(error)

    def run() -> None:
        app: Starlette | None = None
        failure: Exception | None = None
        try:
            app = load()
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, app, failure)

    threading.Thread(target=run, name="whet-load", daemon=True).start()
    return await loaded
