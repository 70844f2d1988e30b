"""Endpoints that change the server: adapters below a folder, pauses, and weights that are read again.

Their names and answers are vLLM's, except ``/reload``.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from whet.models.adapter_files import is_adapter_folder, read_peft_modules
from whet.serve.errors import ApiError
from whet.serve.loop import EngineLoop
from whet.serve.model import ServedModel
from whet.serve.schema import LoadAdapterRequest, UnloadAdapterRequest, parse


def check_admin(request: Request, has_keys: bool) -> None:
    """Raise a 403 unless a request may change the server.

    Without keys, only programs of this machine may, and not pages of other sites in its browser, which may send a POST
    to any address although they cannot read the answer.
    """
    if not has_keys and not _is_local(request):
        raise ApiError(403, f"{request.url.path} is only for this machine. Start with --api-key-file, and send a key.")
    origin = request.headers.get("origin")
    is_foreign = origin is not None and urlsplit(origin).netloc != request.headers.get("host")
    if is_foreign or request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        raise ApiError(403, f"{request.url.path} is not for pages of other sites.")


def _is_local(request: Request) -> bool:
    try:
        address = ipaddress.ip_address(request.client.host if request.client else "")
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


class Admin:
    """Handlers of these endpoints.

    Args:
        model: the served model.
        loop: its engine's loop.
        adapter_folder: folder below which adapters may be loaded; empty: none may.
        read_body: reads a request's JSON body.
    """

    def __init__(
        self,
        model: ServedModel,
        loop: EngineLoop,
        adapter_folder: str,
        read_body: Callable[[Request], Awaitable[Any]],
    ) -> None:
        self._model, self._loop, self._read_body = model, loop, read_body
        self._folder = Path(adapter_folder).resolve() if adapter_folder else None
        self._one_at_a_time = asyncio.Lock()

    # --- adapters -----------------------------------------------------------------------------------------

    async def load_adapter(self, request: Request) -> Response:
        folder = self._check_folder(request)
        fields = parse(LoadAdapterRequest, await self._read_body(request))
        name, adapters = fields.lora_name, self._model.adapters
        path = await asyncio.to_thread(_find_adapter, folder, fields.lora_path)
        async with self._one_at_a_time:
            if not name or (name in adapters and not (fields.load_inplace and name in self._model.loaded)):
                problem = f"{name!r:.100} has already been loaded" if name else "lora_name is empty"
                raise ApiError(400, f"The adapter cannot be loaded: {problem}. Pass another lora_name.", "lora_name")
            parts = await asyncio.to_thread(read_peft_modules, path)
            await self._loop.gate.change(partial(self._model.load_adapter, name, parts))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        self._check_folder(request)
        name = parse(UnloadAdapterRequest, await self._read_body(request)).lora_name
        async with self._one_at_a_time:
            if name not in self._model.loaded:
                known = ", ".join(self._model.loaded) or "none"
                raise ApiError(404, f"The adapter {name!r:.100} cannot be found. Loaded: {known}.", "lora_name")
            await self._loop.gate.change(partial(self._model.unload_adapter, name))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    def _check_folder(self, request: Request) -> Path:
        if self._folder is None:
            raise ApiError(400, f"{request.url.path} needs a folder of adapters. Start with --adapter-folder DIR.")
        return self._folder

    # --- pauses and weights -------------------------------------------------------------------------------

    async def pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        clears = request.query_params.get("clear_cache", "true").lower() not in ("false", "0")
        self._loop.gate.pause(mode)
        if mode == "abort":
            await self._loop.abort()
        if mode == "keep":
            await self._loop.gate.change(_do_nothing)  # the step in progress has ended
        else:
            await self._exclusively(self._model.engine.clear_prefix_cache if clears else _do_nothing)
        return JSONResponse({"status": "paused"})

    async def resume(self, _: Request) -> Response:
        self._loop.gate.resume()
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, _: Request) -> Response:
        return JSONResponse({"is_paused": bool(self._loop.gate.paused)})

    async def reset_prefix_cache(self, _: Request) -> Response:
        await self._exclusively(self._model.engine.clear_prefix_cache)
        return JSONResponse({"success": True})

    async def reload(self, _: Request) -> Response:
        await self._exclusively(self._model.reload)
        return JSONResponse({"status": "reloaded", "system_fingerprint": self._model.fingerprint})

    async def _exclusively(self, run: Callable[[], Any]) -> None:
        """Run when the running requests have ended; new ones wait."""
        if not self._loop.gate.steps() and (n := self._loop.n_running()):
            raise ApiError(
                409, f"{n} requests are paused in the middle, and would never end. /resume them, or /pause with "
                f"mode=wait or mode=abort.", "mode"
            )  # fmt: skip
        await self._loop.gate.change(run, is_exclusive=True)


def _find_adapter(folder: Path, given: str) -> Path:
    """Return the folder of an adapter, which has to be below ``folder`` once symbolic links are resolved.

    Raises:
        ApiError: 400: it is not below; 404: there is no adapter.
    """
    try:
        path = (folder / given).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or a zero byte
        raise ApiError(400, f"lora_path {given!r:.100} is not a path: {error}.", "lora_path") from None
    if not path.is_relative_to(folder):
        raise ApiError(400, f"lora_path {given!r:.100} is not below the folder of adapters.", "lora_path")
    if not is_adapter_folder(path):
        raise ApiError(404, f"lora_path {given!r:.100} has no adapter_config.json.", "lora_path")
    return path


def _do_nothing() -> None:
    pass
