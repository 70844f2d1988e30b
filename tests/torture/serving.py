"""``whet serve`` under clients that come, go, cut and stall: answers depend on prompt and seed, and nothing leaks."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from tests.torture.common import Tally, require, scaled, workshop

_N_CLIENTS, _SECONDS = 32, 180
_MOST_GROWTH = 4e6
"""Bytes of resident memory between the first third and the end."""
_PROMPTS = ("1+2=", "34+5=", "7+", "12+34=" * 4)


def torture(scale: float) -> Iterator[Tally]:
    tally = Tally("clients that come, go, cut and stall")
    with workshop() as shop, tally.case("soak"):
        command = [sys.executable, "-m", "whet", "serve", str(shop.model), "--port", "0", "--max-requests", "64"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            try:
                assert server.stderr is not None
                address = re.search(r"http://\S+", server.stderr.readline())
                require(address, "the server does not start")
                assert address is not None
                asyncio.run(_soak(address[0], server.pid, scaled(_SECONDS, scale), tally))
            finally:
                server.terminate()
    yield tally


async def _soak(url: str, process: int, seconds: float, tally: Tally) -> None:
    limits = httpx.Limits(max_connections=2 * _N_CLIENTS, max_keepalive_connections=_N_CLIENTS)
    expected, counts = {}, dict.fromkeys(("answered", "cut", "refused"), 0)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for prompt in _PROMPTS:
            for seed in range(4):
                expected[prompt, seed] = await _ask(client, prompt, seed)
        idle = await _usage(client)
    n_files = await _count_files(process)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        end = time.monotonic() + seconds
        soak = asyncio.gather(*(_visit(client, random.Random(i), end, expected, counts) for i in range(_N_CLIENTS)))
        await asyncio.sleep(seconds / 3)
        before = _memory(process)
        await soak
        growth = _memory(process) - before
        left = await _usage(client)
        for _ in range(100):
            if left == idle:
                break
            await asyncio.sleep(0.1)
            left = await _usage(client)
    require(left == idle, f"requests and pages were {idle}, and are {left}")
    n_left = await _count_files(process)
    require(n_left == n_files, f"{n_files} files were open, and {n_left} are")
    require(growth < _MOST_GROWTH, f"resident memory grew by {growth / 1e6:.1f} MB")
    require(all(counts.values()), f"some kinds of visits did not happen: {counts}")
    n = sum(counts.values())
    tally.cases += n - 1
    tally.note = f"{n:,} requests ({counts['answered']:,} compared), memory {growth / 1e6:+.1f} MB"


async def _ask(client: httpx.AsyncClient, prompt: str, seed: int) -> str:
    body = {"prompt": prompt, "seed": seed, "max_tokens": 20, "ignore_eos": True}
    return (await client.post("/completions", json=body)).raise_for_status().json()["choices"][0]["text"]


async def _visit(
    client: httpx.AsyncClient,
    rng: random.Random,
    end: float,
    expected: dict[tuple[str, int], str],
    counts: dict[str, int],
) -> None:
    """Send requests until the end: some are read whole, some are cut at any point, and some are read slowly."""
    while time.monotonic() < end:
        prompt, seed = rng.choice(_PROMPTS), rng.randrange(4)
        body = {"prompt": prompt, "seed": seed, "max_tokens": 20, "ignore_eos": True, "stream": True}
        kind = rng.choice(("whole", "cut", "cut", "slow", "many"))
        if kind == "many":  # more prompts than the queue has room for, from several clients at once
            body |= {"prompt": [prompt] * 40, "stream": False}
        try:
            async with client.stream("POST", "/completions", json=body) as response:
                if response.status_code == 429:
                    counts["refused"] += 1
                    await response.aread()
                    continue
                require(response.status_code == 200, f"status {response.status_code}")
                lines, n_lines = [], rng.randrange(8) if kind == "cut" else sys.maxsize
                async for line in response.aiter_lines():
                    lines.append(line)
                    if len(lines) > n_lines:
                        break
                    if kind == "slow":
                        await asyncio.sleep(0.01)
        except httpx.TransportError as error:
            raise AssertionError(f"the server closed a connection: {error!r}") from error
        if kind == "cut":
            counts["cut"] += 1
        elif kind == "many":
            texts = [choice["text"] for choice in json.loads("".join(lines))["choices"]]
            require(texts == [expected[prompt, seed]] * 40, "an answer differs")
        else:
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            require(text == expected[prompt, seed], f"{text!r} instead of {expected[prompt, seed]!r}")
            counts["answered"] += 1


async def _usage(client: httpx.AsyncClient) -> list[str]:
    """Return the numbers of requests, and the share of the KV cache in use."""
    text = (await client.get(str(client.base_url).removesuffix("/v1/") + "/metrics")).text
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return [re.findall(rf"vllm:{name}{{.*}} (\S+)", text)[0] for name in names]


async def _count_files(process: int) -> int:
    """Return the number of open files and sockets, once the closed connections are gone."""
    await asyncio.sleep(1)
    return len(os.listdir(f"/proc/{process}/fd"))


def _memory(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(re.findall(r"VmRSS:\s+(\d+)", status)[0])
