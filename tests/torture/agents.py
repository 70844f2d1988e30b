"""Agents (``whet.serve.agents``) that disconnect during a request, raise, die, hang or flood, among good ones."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from tests.cli.conftest import write_tiny_model
from tests.rollout.test_episodes import EOS, TEMPLATE
from tests.torture.common import Tally, require, scaled

from whet.config.sampling import SamplingParams
from whet.engine import Engine
from whet.models.tokenizers import load_tokenizer
from whet.rollout.episodes import EpisodeLimits
from whet.serve.agents import AgentPlayer, Server

_N_STEPS, _N_AGENTS = 12, 8
_FAULTS = ("disconnect", "abandon", "raise", "die", "hang", "flood", "nothing")


def torture(scale: float) -> Iterator[Tally]:
    tally = Tally("agents that disconnect, raise, die, hang and flood")
    with tempfile.TemporaryDirectory(prefix="whet-torture-") as folder:
        model = write_tiny_model(Path(folder) / "model", TEMPLATE, max_position=4096)
        tokenizer = load_tokenizer(str(model))
        sampling = SamplingParams(max_new_tokens=3000, stop_token_ids=(EOS,), min_new_tokens=1000, seed=1)
        player = AgentPlayer(_play, tokenizer, [EOS], EpisodeLimits(max_turns=3, timeout_s=3.0))
        with Engine.from_pretrained(model) as engine:
            good = [{"name": i, "fault": ""} for i in range(_N_AGENTS)]
            expected = [episode.token_ids for episode in player.play(engine, good, 1, sampling)]
            before = _usage(engine)
            for step in range(scaled(_N_STEPS, scale)):
                faults = random.Random(step).choices((*_FAULTS, ""), k=_N_AGENTS)
                rows = [{"name": i, "fault": fault} for i, fault in enumerate(faults)]
                with tally.case(f"step {step}: {', '.join(fault or 'none' for fault in faults)}"):
                    for episode, ids in zip(player.play(engine, rows, 1, sampling), expected, strict=True):
                        if fault := episode.row["fault"]:
                            require(episode.end == "error" and episode.reward is None, f"{fault} counts")
                        else:
                            require(episode.reward == 1.0, f"an agent without fault failed: {episode.error}")
                            require(episode.token_ids == ids, "others changed its tokens")
                    require(_usage(engine) == before, f"the usage was {before}, and is {_usage(engine)}")
    yield tally


def _usage(engine: Engine) -> tuple[int, int]:
    """Return the numbers of threads and open files, once calls on the engine have ended."""
    engine.clear_prefix_cache()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def _play(row: Any, server: Server) -> float:
    fault = row["fault"]
    if fault == "nothing":
        return 1.0
    _post(server, f"first of {row['name']}", 1000)
    if fault in ("disconnect", "abandon"):
        _cut(server, time_s=random.Random(row["name"]).uniform(0.0, 0.02))
        if fault == "abandon":
            _post(server, "as if all were well", 1000)
        return 1.0
    if fault == "raise":
        raise RuntimeError("no more")
    if fault == "die":
        os._exit(9)
    if fault == "hang":
        time.sleep(60)
    if fault == "flood":
        threads = [threading.Thread(target=_post_in_vain, args=(server, i)) for i in range(20)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        raise RuntimeError("requests are open")
    _post(server, f"second of {row['name']}", 1000)
    return 1.0


def _post(server: Server, prompt: str, n_tokens: int) -> None:
    headers = {"Authorization": f"Bearer {server.api_key}"}
    body = {"prompt": prompt, "max_tokens": n_tokens}
    httpx.post(f"{server.url}/completions", json=body, headers=headers, timeout=60).raise_for_status()


def _post_in_vain(server: Server, i: int) -> None:
    with contextlib.suppress(httpx.HTTPError):  # refused by max_turns, or killed with the agent
        _post(server, str(i), 1000)


def _cut(server: Server, time_s: float) -> None:
    """Begin a request of 1,000 tokens or more, and close the connection while it is sampled."""
    host, port = server.url.split("//")[1].split("/")[0].split(":")
    body = b'{"prompt": "cut", "max_tokens": 2900}'
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.api_key}\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(time_s)
