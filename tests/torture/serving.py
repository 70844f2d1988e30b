"""``whet serve`` under clients that come, go, cut and stall: every answer is the engine's, and nothing leaks."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from tests.serve.models import write_tools_model
from tests.torture.common import Tally, require, scaled
from tests.torture.servers import Server, server

_N_CLIENTS, _SECONDS = 32, 1800
_KV_BYTES = 16 << 20
"""KV cache, which ended requests fill in the first minutes: what they keep would be counted as growth."""
_MOST_GROWTH = 4e6
"""Bytes of resident memory between the first third and the end."""
_TIMEOUT_S = 120
"""Longest pause within an answer: the machine may be busy."""
_PROMPTS = ("1+2=", "34+5=", "a longer prompt, which fills more than a page of the cache: " * 2, "é")
_SEEDS, _N_NEW, _N_MANY = 4, 20, 40
_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
_KINDS = ("whole", "whole", "cut", "cut", "slow", "many", "grammar", "stall", "half", "quiet")

Expected = dict[tuple[str, int], str]


def torture(scale: float) -> Iterator[Tally]:
    tally = Tally("clients that come, go, cut and stall")
    with tempfile.TemporaryDirectory(prefix="whet-torture-") as folder, tally.case("soak"):
        model = write_tools_model(Path(folder) / "model")
        expected = _engine_answers(model)
        with server(model, "--max-requests", "64", "--kv-bytes", str(_KV_BYTES)) as running:
            _soak(running, scaled(_SECONDS, scale), expected, tally)
    yield tally


def _engine_answers(model: Path) -> Expected:
    """Return the engine's texts by prompt and seed."""
    from whet import Engine, SamplingParams
    from whet.text.model import load_chat_tokenizer

    tokenizer, found = load_chat_tokenizer(str(model), "torture"), {}
    with Engine.from_pretrained(model) as engine:
        for prompt in _PROMPTS:
            for seed in range(_SEEDS):
                [[sample]] = engine.generate(
                    [tokenizer.encode(prompt)], 1, SamplingParams(max_new_tokens=_N_NEW, seed=seed)
                )
                found[prompt, seed] = tokenizer.decode(sample.token_ids, skip_special_tokens=True)
    return found


def _soak(running: Server, seconds: float, expected: Expected, tally: Tally) -> None:
    running.warm_up([_body("1", 0) | {"structured_outputs": {"json": _SCHEMA}, "ignore_eos": False}])
    idle = running.idle_usage()
    counts: Counter[str] = Counter()
    growth = asyncio.run(_visit_all(running, seconds, expected, counts))
    running.require_usage(idle)
    running.require_silence()
    require(growth < _MOST_GROWTH, f"resident memory grew by {growth / 1e6:.1f} MB")
    require(all(counts[kind] for kind in (*_KINDS, "refused")), f"some kinds of visits did not happen: {counts}")
    tally.cases += counts.total() - counts["refused"] - 1
    tally.note = f"{', '.join(f'{n:,} {kind}' for kind, n in counts.most_common())}; memory {growth / 1e6:+.1f} MB"


async def _visit_all(running: Server, seconds: float, expected: Expected, counts: Counter[str]) -> float:
    """Let all clients visit the server; return the growth of its memory after the first third."""
    limits = httpx.Limits(max_connections=2 * _N_CLIENTS, max_keepalive_connections=_N_CLIENTS)
    async with httpx.AsyncClient(base_url=running.url, timeout=_TIMEOUT_S, limits=limits) as client:
        end = time.monotonic() + seconds
        visits = [_visit(client, running, random.Random(i), end, expected, counts) for i in range(_N_CLIENTS)]
        soak = asyncio.gather(*visits)
        await asyncio.sleep(seconds / 3)
        before = running.memory()
        await soak
        return running.memory() - before


def _body(prompt: str, seed: int) -> dict[str, Any]:
    return {"prompt": prompt, "seed": seed, "max_tokens": _N_NEW, "ignore_eos": True}


async def _visit(
    client: httpx.AsyncClient, running: Server, rng: random.Random, end: float, expected: Expected, counts: Counter[str]
) -> None:
    """Visit until the end: read whole answers, cut them at any point, read slowly, or send part of a request."""
    while time.monotonic() < end:
        prompt, seed, kind = rng.choice(_PROMPTS), rng.randrange(_SEEDS), rng.choice(_KINDS)
        body = _body(prompt, seed)
        try:
            if kind in ("stall", "half"):
                await _stall(running.port, rng, body, is_whole=kind == "half")
            elif kind == "quiet":
                await _give_up(client, rng, body)
            elif kind == "many":  # more prompts than the queue has room for, from several clients at once
                response = await client.post("/v1/completions", json={**body, "prompt": [prompt] * _N_MANY})
                kind = _require_answers(response, [expected[prompt, seed]] * _N_MANY) or kind
            elif kind == "grammar":
                kind = await _ask_for_json(client, body)
            else:
                kind = await _stream(client, rng, body, kind, expected[prompt, seed])
        except httpx.TransportError as error:
            raise AssertionError(f"a {kind} visit: {error!r}; the server has {running.usage()}") from error
        counts[kind] += 1


async def _ask_for_json(client: httpx.AsyncClient, body: dict) -> str:
    """Require an answer that follows the schema; return "grammar", or "refused" if the queue was full."""
    body = {**body, "structured_outputs": {"json": _SCHEMA}, "ignore_eos": False, "max_tokens": 200}
    response = await client.post("/v1/completions", json=body)
    if response.status_code == 429:
        return "refused"
    text = response.raise_for_status().json()["choices"][0]["text"]
    require(json.loads(text) in ({"a": 1}, {"a": 2}), f"{text!r} does not follow the schema")
    return "grammar"


def _require_answers(response: httpx.Response, texts: list[str]) -> str:
    """Require the texts of a response; return "refused" if the queue was full."""
    if response.status_code == 429:
        return "refused"
    require(response.status_code == 200, f"status {response.status_code}: {response.text}")
    found = [choice["text"] for choice in response.json()["choices"]]
    require(found == texts, f"{found} instead of {texts}")
    return ""


async def _stream(client: httpx.AsyncClient, rng: random.Random, body: dict, kind: str, right: str) -> str:
    """Read a streamed answer, whole, slowly or up to a cut; return the kind, or "refused"."""
    lines: list[str] = []
    n_lines = rng.randrange(8) if kind == "cut" else sys.maxsize
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        if response.status_code == 429:
            await response.aread()
            return "refused"
        require(response.status_code == 200, f"status {response.status_code}")
        async for line in response.aiter_lines():
            lines.append(line)
            if len(lines) > n_lines:
                return kind
            if kind == "slow":
                await asyncio.sleep(0.01)
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    require(text == right, f"{text!r} instead of {right!r}")
    return kind


async def _give_up(client: httpx.AsyncClient, rng: random.Random, body: dict) -> None:
    """Send a request without a stream, and close the connection before its answer."""
    long = {**body, "max_tokens": 1000}
    try:
        await client.post("/v1/completions", json=long, timeout=rng.uniform(0.001, 0.3))
    except httpx.TimeoutException:
        return


async def _stall(port: int, rng: random.Random, body: dict, is_whole: bool) -> None:
    """Send a whole request and the end of the connection's sending side, or a part of a request and nothing more."""
    content = json.dumps({**body, "stream": rng.random() < 0.5}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    sent = head + content
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent if is_whole else sent[: rng.randrange(len(sent))])
        await writer.drain()
        if is_whole:
            writer.get_extra_info("socket").shutdown(socket.SHUT_WR)
            await asyncio.wait_for(reader.read(), 30)
        else:
            await asyncio.sleep(rng.uniform(0, 2))
    except ConnectionError:
        pass  # the server may close first
    finally:
        writer.close()
