"""The ASGI application: routes, authorisation, limits, and streamed responses."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import whet
from whet.errors import WhetError
from whet.serve import ollama
from whet.serve.admin import Admin, check_admin
from whet.serve.anthropic import Messages
from whet.serve.endpoints import Chat, Completion, Endpoint, Generate, Streamed
from whet.serve.errors import GONE, ApiError
from whet.serve.events import EventStream
from whet.serve.inputs import read_prompt
from whet.serve.limits import Limits, key_of_request
from whet.serve.loop import EngineLoop
from whet.serve.metrics import Metrics
from whet.serve.model import ServedModel
from whet.serve.ollama import OllamaChat
from whet.serve.recording import RecordingService
from whet.serve.responses import Responses
from whet.serve.schema import DetokenizeRequest, TokenizeRequest, parse
from whet.serve.scores import Decisions, Embeddings, Rewards
from whet.serve.service import Service
from whet.serve.sessions import Session

_STATUS_S = 0.2
"""Time that a streamed response waits for its first chunk; an error within it becomes the HTTP status."""
_OPEN_PATHS = ("/health", "/ready", "/version", "/metrics", "/ping")
"""Paths that need no key, in addition to the page's."""
_PAGE = Path(__file__).parent / "page"
_PAGE_PATHS = {"/": "index.html", "/page/page.js": "page.js", "/page/style.css": "style.css"}
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class _App:
    """Handlers of one server's routes."""

    def __init__(
        self,
        model: ServedModel,
        api_keys: Sequence[str],
        limits: Limits,
        max_body_bytes: int,
        hosts: Sequence[str],
        adapter_folder: str,
        sessions: Mapping[str, Session] | None,
    ) -> None:
        self.model = model
        self.loop = EngineLoop()
        self.metrics = Metrics(model, self.loop, limits)
        parts = (model, self.loop, self.metrics, limits)
        self.service = Service(*parts) if sessions is None else RecordingService(*parts, sessions)
        self._keys = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._max_body_bytes, self._hosts = max_body_bytes, [host.lower() for host in hosts]
        self.admin = Admin(model, self.loop, adapter_folder, self._body)

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.loop.start()
        yield
        await asyncio.to_thread(self.loop.stop)

    def route(
        self, path: str, handler: Callable[[Request], Awaitable[Response]], *methods: str, is_admin: bool = False
    ) -> Route:
        """Return a route; ``is_admin``: for requests that may change the server."""

        async def handle(request: Request) -> Response:
            try:
                self._check(request)
                if is_admin:
                    check_admin(request, bool(self._keys))
                return await handler(request)
            except ApiError as error:
                return _explain(error, error.body())
            except (WhetError, UnicodeEncodeError) as error:  # such as a text with a lone surrogate
                found = ApiError(400, str(error))
                return _explain(found, found.body())
            except RecursionError:
                found = ApiError(400, "The request is nested too deeply.")
                return _explain(found, found.body())
            except Exception as error:
                traceback.print_exc()
                return JSONResponse(ApiError(500, f"{type(error).__name__}: {error}").body(), 500)

        return Route(path, handle, methods=list(methods or ("GET",)))

    def _check(self, request: Request) -> None:
        """Raise unless host and key of a request are right."""
        if self._hosts:  # a page of another site can resolve its own name to this address
            host = request.headers.get("host", "").lower()
            name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
            if name.strip("[]") not in self._hosts:
                raise ApiError(403, f"The host {name!r:.100} is not served. Start with --allowed-hosts.")
        if not self._keys or request.url.path in (*_OPEN_PATHS, *_PAGE_PATHS):
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
        digest = hashlib.sha256(given.encode()).digest()
        matches = [hmac.compare_digest(digest, key) for key in self._keys]  # all, for a constant time
        key_of_request.set(digest.hex())
        if not any(matches):
            raise ApiError(401, "The API key is missing or wrong. Send Authorization: Bearer KEY.", None, "invalid_key")

    async def _body(self, request: Request) -> Any:
        """Return a request's JSON body, read up to the limit."""
        found = bytearray()
        try:
            async for part in request.stream():
                found += part
                if len(found) > self._max_body_bytes:
                    raise ApiError(413, f"The body is larger than {self._max_body_bytes:,} bytes.")
        except ClientDisconnect:
            raise ApiError(GONE, "The client went away.") from None
        try:
            return json.loads(found)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"The body is not JSON: {error}.") from None

    # --- endpoints that run on the engine -------------------------------------------------------------------

    def running(self, kind: type[Endpoint]) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of an endpoint that runs on the engine."""
        create: Callable[[Service, Any], Endpoint] = kind

        async def respond(request: Request) -> Response:
            endpoint = await asyncio.to_thread(create, self.service, await self._body(request))
            if not (isinstance(endpoint, Streamed) and endpoint.streams):
                return JSONResponse(await _unless_gone(request, endpoint.respond()))
            chunks = endpoint.chunks()
            first = asyncio.ensure_future(anext(chunks, None))
            await asyncio.wait({first}, timeout=_STATUS_S)
            if first.done():
                first.result()
            return EventStream(endpoint, first, chunks)

        async def handle(request: Request) -> Response:
            try:
                with self.service.handling():
                    return await respond(request)
            except ApiError as error:
                return _explain(error, kind.failure(error))

        return handle

    # --- others -----------------------------------------------------------------------------------------

    def describe(self, of: Callable[[ServedModel], Any]) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of an endpoint that describes the model."""

        async def handle(_: Request) -> Response:
            return JSONResponse(of(self.model))

        return handle

    async def models(self, _: Request) -> Response:
        cards = [
            {
                "id": name,
                "object": "model",
                "created": self.model.created,
                "owned_by": "whet",
                "root": self.model.name,
                "parent": None if name == self.model.name else self.model.name,
                "max_model_len": self.model.context,
            }
            for name in self.model.adapters
        ]
        return JSONResponse({"object": "list", "data": cards})

    async def tokenize(self, request: Request) -> Response:
        fields = parse(TokenizeRequest, await self._body(request))
        ids = await asyncio.to_thread(read_prompt, self.model, fields)
        body = {"count": len(ids), "max_model_len": self.model.context, "tokens": ids}
        if fields.return_token_strs:
            body["token_strs"] = [self.model.token_texts[token_id] for token_id in ids]
        return JSONResponse(body)

    async def detokenize(self, request: Request) -> Response:
        fields = parse(DetokenizeRequest, await self._body(request))
        ids = self.model.check_tokens(fields.tokens, "tokens")
        return JSONResponse({"prompt": self.model.tokenizer.decode(ids, skip_special_tokens=False)})

    async def tokenizer_info(self, _: Request) -> Response:
        tokenizer = self.model.tokenizer
        body: dict[str, Any] = {"chat_template": tokenizer.chat_template or None}
        for name in ("bos", "eos", "pad"):
            token_id = getattr(tokenizer, f"{name}_token_id", None)
            body[f"{name}_token_id"] = token_id
            body[f"{name}_token"] = None if token_id is None else self.model.token_texts[token_id]
        return JSONResponse(body)

    def file(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of a file of the page."""

        async def handle(_: Request) -> Response:
            return FileResponse(_PAGE / name, headers=_PAGE_HEADERS)

        return handle

    async def health(self, _: Request) -> Response:
        if not self.loop.is_alive:
            raise ApiError(503, "The engine has stopped.")
        return Response()

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": whet.__version__})

    async def show_metrics(self, _: Request) -> Response:
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def make_app(
    model: ServedModel,
    *,
    api_keys: Sequence[str] = (),
    max_requests: int = 256,
    max_requests_per_key: int | None = None,
    max_seconds: float | None = None,
    max_body_bytes: int = 16 << 20,
    hosts: Sequence[str] = (),
    adapter_folder: str = "",
    sessions: Mapping[str, Session] | None = None,
) -> Starlette:
    """Create the ASGI application that serves a model.

    Args:
        model: engine, tokenizer and adapters.
        api_keys: accepted keys; empty: no key is needed.
        max_requests: prompts that may be queued and running at once; further requests get the status 429.
        max_requests_per_key: the same for each API key. Default: no further limit.
        max_seconds: time that a request may take, from its arrival; then it ends with the status 504, or with an error
            in its stream. Default: any.
        max_body_bytes: size of the largest request.
        hosts: names in the Host header that are answered; empty: all.
        adapter_folder: folder below which clients may load adapters; empty: none.
        sessions: by API key; their requests are recorded, and nothing of the server can be changed. None: no session.
    """
    limits = Limits(max_requests, max_requests_per_key, max_seconds)
    app = _App(model, [*api_keys, *(sessions or ())], limits, max_body_bytes, hosts, adapter_folder, sessions)
    admin = app.admin
    routes = [
        app.route("/v1/chat/completions", app.running(Chat), "POST"),
        app.route("/v1/completions", app.running(Completion), "POST"),
        app.route("/inference/v1/generate", app.running(Generate), "POST"),
        app.route("/v1/responses", app.running(Responses), "POST"),
        app.route("/v1/embeddings", app.running(Embeddings), "POST"),
        app.route("/v1/decisions", app.running(Decisions), "POST"),
        *(app.route(path, app.running(Rewards), "POST") for path in ("/score", "/v1/score")),
        app.route("/v1/messages", app.running(Messages), "POST"),
        app.route("/api/chat", app.running(OllamaChat), "POST"),
        app.route("/api/tags", app.describe(ollama.list_models)),
        app.route("/api/show", app.describe(ollama.show_model), "POST"),
        app.route("/api/version", app.describe(lambda _: {"version": ollama.VERSION})),
        app.route("/v1/models", app.models),
        app.route("/tokenize", app.tokenize, "POST"),
        app.route("/detokenize", app.detokenize, "POST"),
        app.route("/tokenizer_info", app.tokenizer_info),
        *(app.route(path, app.file(name)) for path, name in _PAGE_PATHS.items()),
        *(app.route(path, app.health) for path in ("/health", "/ready", "/ping")),
        app.route("/version", app.version),
        app.route("/metrics", app.show_metrics),
    ]
    changes = [
        app.route("/v1/load_lora_adapter", admin.load_adapter, "POST", is_admin=True),
        app.route("/v1/unload_lora_adapter", admin.unload_adapter, "POST", is_admin=True),
        app.route("/pause", admin.pause, "POST", is_admin=True),
        app.route("/resume", admin.resume, "POST", is_admin=True),
        app.route("/is_paused", admin.is_paused, is_admin=True),
        app.route("/reset_prefix_cache", admin.reset_prefix_cache, "POST", is_admin=True),
        app.route("/reload", admin.reload, "POST", is_admin=True),
    ]
    routes += changes if sessions is None else []
    return Starlette(routes=routes, lifespan=app.lifespan, exception_handlers={HTTPException: _explain_http})


async def _explain_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    found = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return _explain(found, found.body())


def _explain(error: ApiError, body: Any) -> Response:
    return JSONResponse(body, error.status, {"Retry-After": "1"} if error.status == 429 else None)


async def _unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """Await work, and cancel it when the client goes away."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(GONE, "The client went away.")
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
