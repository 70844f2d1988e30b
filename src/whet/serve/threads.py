"""A server in a thread of this process."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from whet.errors import WhetError, WhetValueError
from whet.serve.connection import Connection

_END_S, _POLL_S = 10, 0.002
"""Time that requests have to end with the server, and between checks whether it has started."""


@contextmanager
def serving(
    app: Starlette, host: str = "127.0.0.1", port: int = 0, *, connection: type[Connection] = Connection
) -> Iterator[str]:
    """Serve an application until the block ends, and yield its address, ``http://HOST:PORT``.

    Args:
        port: to listen on; 0: any free one.
        connection: class of its connections.

    Raises:
        WhetValueError: the address is in use, or not this machine's.
        WhetError: the application does not start.
    """
    config = uvicorn.Config(app, http=connection, ws="none", log_level="error", timeout_graceful_shutdown=_END_S)
    server = uvicorn.Server(config)
    with listen(host, port, "serving") as listening:
        thread = threading.Thread(target=server.run, args=([listening],), name="whet-serve", daemon=True)
        thread.start()
        while not server.started:
            if not thread.is_alive():
                raise WhetError("serving: the server did not start; its error is printed above.")
            time.sleep(_POLL_S)
        try:
            yield f"http://{host}:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def listen(host: str, port: int, where: str) -> socket.socket:
    """Return a socket that listens; ``where`` is the prefix of errors.

    Raises:
        WhetValueError: the address is in use, or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is explicit; without it, a response takes 40 ms longer.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if sys.platform != "win32":  # there, it would let two servers share the port
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(2048)
        return listening
    except OSError as error:
        listening.close()
        raise WhetValueError(
            f"{where}: cannot listen on {host}, port {port}: {error.strerror}. Pass another port or host."
        ) from error
