"""``whet serve`` under requests that are mutated, enormous, explosive or cut off, and under kill -9.

Mutations begin with bodies that clients were recorded to send (tests/serve/bodies). The server has no OpenAPI document,
so that schemathesis does not apply.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
from tests.serve.models import write_tools_model
from tests.serve.mutations import mutate
from tests.serve.recorded import read_recorded
from tests.torture.common import Tally, require, scaled
from tests.torture.servers import Server, server

_N_MUTATED, _N_THREADS = 10_000, 4
_N_GONE, _N_KILLS = 200, 5
_MOST_SECONDS = 120.0
"""Longest time of a request, on a busy machine."""
_MOST_GROWTH = 1e9
"""Bytes of resident memory that a hostile request may take: a body of 16 MiB, the values that are read from it (some 60
bytes for 3 bytes of text), and 1 MiB of text in tokens."""
_IDLE_S = 16.0
"""Time that clients such as aiohttp (15 s) keep an idle connection."""


def torture(scale: float) -> Iterator[Tally]:
    with tempfile.TemporaryDirectory(prefix="whet-torture-") as folder:
        model = write_tools_model(Path(folder) / "model")
        with server(model, "--max-requests", "64") as running:
            running.warm_up()
            idle = running.idle_usage()
            yield from _mutate(running, scale)
            yield from _attack(running)
            yield from _go_away(running, scale)
            after = Tally("afterwards: the usage of an idle server, and no error printed")
            with after.case("usage"):
                running.require_usage(idle)
                running.require_silence()
            yield after
        yield from _kill(model, scale)


# --- mutated requests ---------------------------------------------------------------------------------------------


def _mutate(running: Server, scale: float) -> Iterator[Tally]:
    recorded = [each for each in read_recorded() if isinstance(each.body, dict)]
    tally, statuses, start = Tally("mutated requests"), Counter[int](), time.monotonic()

    def ask(seed: int) -> None:
        bits = random.Random(seed)
        with httpx.Client(base_url=running.url, timeout=_MOST_SECONDS) as client:
            for i in range(scaled(_N_MUTATED, scale) // _N_THREADS):
                asked = bits.choice(recorded)
                body: Any = {"max_tokens": 8, **asked.body} if asked.path.startswith("/v1/c") else asked.body
                for _ in range(bits.choice([1, 1, 2, 4])):
                    body = mutate(body, bits)
                content = json.dumps(body)
                try:
                    response = client.request(asked.method, asked.path, content=content.encode())
                    _require_explained(response)
                    statuses[response.status_code] += 1
                except (AssertionError, ValueError, httpx.HTTPError) as error:
                    tally.failures.append(f"{seed}, {i}: {asked.path} {content[:400]}: {error!r}")

    with ThreadPoolExecutor(_N_THREADS) as pool:
        list(pool.map(ask, range(_N_THREADS)))
    tally.cases, tally.seconds = statuses.total() + len(tally.failures), time.monotonic() - start
    tally.note = ", ".join(f"{n:,} with status {status}" for status, n in sorted(statuses.items()))
    yield tally


def _require_explained(response: httpx.Response) -> None:
    require(response.status_code in (200, 400, 404, 429), f"status {response.status_code}: {response.text[:300]}")
    require(response.status_code == 200 or response.json()["error"], f"no explanation: {response.text[:300]}")
    require("server_error" not in response.text, f"an error of the server: {response.text[-300:]}")


# --- hostile requests -----------------------------------------------------------------------------------------------


def _attack(running: Server) -> Iterator[Tally]:
    tally, longest = Tally("hostile requests: bounded time and memory"), 0.0
    growths = []
    for name, attack in {**_raw_attacks(), **_json_attacks()}.items():
        with tally.case(name):
            running.reset_peak()
            before, start = running.memory(), time.monotonic()
            statuses = attack(running)
            seconds, growth = time.monotonic() - start, running.peak() - before
            longest = max(longest, seconds)
            growths.append(growth)
            require(all(200 <= status < 500 for status in statuses), f"statuses {statuses}")
            require(seconds < _MOST_SECONDS, f"{seconds:.0f} s")
            require(growth < _MOST_GROWTH, f"memory {growth / 1e6:+.0f} MB")
            pause = time.monotonic()
            require(httpx.get(running.url + "/health", timeout=_MOST_SECONDS).status_code == 200, "no health")
            require(time.monotonic() - pause < 10, "the server answers late")
    tally.note = f"up to {longest:.1f} s, {max(growths) / 1e6:.0f} MB"
    yield tally


Attack = Callable[[Server], list[int]]


def _raw_attacks() -> dict[str, Attack]:
    """Attacks by bytes on a connection."""
    large = b"x" * (1 << 20)
    post = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"

    def chunks(n: int) -> Iterable[bytes]:
        yield post + b"Transfer-Encoding: chunked\r\n\r\n"
        for _ in range(n):
            yield b"100000\r\n" + large + b"\r\n"

    def body(n: int) -> Iterable[bytes]:
        yield post + f"Content-Length: {n << 20}\r\n\r\n".encode()
        yield from (large for _ in range(n))

    def drip() -> Iterable[bytes]:
        yield post + b"Content-Length: 100\r\n\r\n"
        for _ in range(5):
            time.sleep(0.1)
            yield b"{"

    texts: dict[str, Callable[[], Iterable[bytes]]] = {
        "a body of 1 GB": lambda: body(1024),
        "a body of 1 GB in chunks": lambda: chunks(1024),
        "a header of 1 MB": lambda: [b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: " + large + b"\r\n\r\n"],
        "100,000 headers": lambda: [b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 100_000 + b"\r\n"],
        "a path of 1 MB": lambda: [b"GET /" + large + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"],
        "no HTTP": lambda: [large, b"\r\n\r\n"],
        "two lengths": lambda: [post + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"],
        "a negative length": lambda: [post + b"Content-Length: -5\r\n\r\n{}"],
        "a body that drips and stops": drip,
    }
    return {name: lambda running, parts=parts: [_send(running, parts())] for name, parts in texts.items()}


def _send(running: Server, parts: Iterable[bytes]) -> int:
    """Send bytes, and return the status of the answer; 400 if the server closes the connection without one."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=_MOST_SECONDS) as connection:
        with contextlib.suppress(ConnectionError):  # the server has answered already
            for part in parts:
                connection.sendall(part)
        connection.settimeout(5)
        with contextlib.suppress(ConnectionError, TimeoutError):
            head = connection.recv(64)
            if head.startswith(b"HTTP/1.1 "):
                return int(head[9:12])
    return 400


def _json_attacks() -> dict[str, Attack]:
    """Attacks by fields of requests."""
    deep: Any = {"type": "integer"}
    for _ in range(300):  # json.dumps fails at 1,000
        deep = {"type": "object", "properties": {"a": deep}}
    nested = '{"properties":{"a":' * 10_000 + "{}" + "}}" * 10_000
    references = {
        "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {"const": 1}},
        "$ref": "#/$defs/d0",
    }
    regexes = [
        "(a{1,1000}){1,1000}",
        "((a+)+)+b",
        "(a|aa)+" * 50 + "b",
        "(?:a?){100}a{100}",
        ".{1,100000}x",
        "[a-z]*" * 200,
    ]
    larks = [
        'start: a\na: a a | "x"', "start: " + " ".join('"a"?' for _ in range(5000)),
        "\n".join(["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)), 'r60: "a"?']),
    ]  # fmt: skip
    schemas: dict[str, Any] = {
        "nested 300": deep, "references": references, "a million items": {"type": "array", "minItems": 10**6},
        "a long string": {"type": "string", "minLength": 10**7}, "a large enum": {"enum": list(range(100_000))},
        "many properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}},
        "a pattern": {"type": "string", "pattern": "^((a+)+)+$"},
        "itself": {"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}}]},
        "a huge number": {"type": "integer", "minimum": 10**400}, "multiples": {"type": "number", "multipleOf": 1e-300},
    }  # fmt: skip
    found: dict[str, Attack] = {}

    def add(name: str, path: str, content: str, times: int = 1) -> None:
        def attack(running: Server) -> list[int]:
            answers = []
            for _ in range(times):
                response = httpx.post(running.url + path, content=content.encode(), timeout=_MOST_SECONDS)
                answers.append(response.status_code)
            return answers

        found[name] = attack

    def completion(**fields: Any) -> str:
        return json.dumps({"prompt": "a", "max_tokens": 50, **fields})

    add("a schema of depth 10,000", "/v1/completions", f'{{"prompt": "a", "structured_outputs": {{"json": {nested}}}}}')
    add("lists of depth 1,000,000", "/v1/completions", "[" * 10**6)
    for name, schema in schemas.items():
        add(f"schema: {name}", "/v1/completions", completion(structured_outputs={"json": schema}))
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        chat = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "max_tokens": 50}
        add(f"tool: {name}", "/v1/chat/completions", json.dumps({**chat, "tool_choice": "required"}))
    for regex in regexes:
        add(f"regex {regex[:30]}", "/v1/completions", completion(structured_outputs={"regex": regex}, n=8))
    for i, lark in enumerate(larks):
        add(f"grammar {i}", "/v1/completions", completion(structured_outputs={"grammar": lark}, n=8))
    choices = ["a" * i for i in range(1, 1000)]
    add("1,000 choices", "/v1/completions", completion(structured_outputs={"choice": choices}))
    add("100,000 choices", "/v1/completions", completion(structured_outputs={"choice": [*map(str, range(100_000))]}))
    add("a prompt of 15 MB", "/v1/completions", completion(prompt="a b" * 5_000_000))
    add("a prompt of 5,000,000 tokens", "/v1/completions", completion(prompt=[1] * 5_000_000))
    add("100,000 prompts", "/v1/completions", completion(prompt=["a"] * 100_000))
    add(
        "100,000 messages", "/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": "a"}] * 10**5})
    )
    add("100,000 stop strings", "/v1/completions", completion(stop=[str(i) for i in range(100_000)]))
    add("a stop string of 10 MB", "/v1/completions", completion(stop=["a" * 10**7]))
    add("1,000,000 stop tokens", "/v1/completions", completion(stop_token_ids=[5] * 10**6))
    add("128 choices of 1,000 tokens", "/v1/completions", completion(n=128, max_tokens=1000, ignore_eos=True))
    add("a bias of each token", "/v1/completions", completion(logit_bias={str(i): 1 for i in range(258)}))
    add("1,000,000 biases", "/v1/completions", completion(logit_bias={str(i): 1 for i in range(10**6)}))
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": {}}} for i in range(10_000)]
    forced = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 1,
        "tool_choice": "required",
        "tools": tools,
    }
    add("10,000 tools", "/v1/chat/completions", json.dumps(forced))
    add("1,000,000 tokens to text", "/detokenize", json.dumps({"tokens": [70] * 10**6}))
    add("a text of 15 MB to tokens", "/tokenize", json.dumps({"prompt": "a" * (15 << 20)}))
    kwargs = {
        "messages": [],
        "chat_template": "{{ 1 }}",
        "template": "x",
        "tools": "x",
        "tokenize": False,
        "add": [1] * 10**5,
    }
    add("the template's own arguments", "/v1/chat/completions", json.dumps(
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "chat_template_kwargs": kwargs}))  # fmt: skip
    return found


# --- clients that go away -----------------------------------------------------------------------------------------


def _go_away(running: Server, scale: float) -> Iterator[Tally]:
    """Close connections while their requests wait, compute their prompt, or sample, with and without a stream."""
    tally = Tally("clients that go away while queued, in prefill and in decode")
    idle = running.idle_usage()
    bits = random.Random(5)
    with tally.case("all"):
        for i in range(scaled(_N_GONE, scale)):
            prompt = [bits.randrange(3, 250) for _ in range(bits.choice([1, 1500]))]
            body = {"prompt": prompt, "n": bits.choice([1, 16]), "max_tokens": 500, "ignore_eos": True}
            content = json.dumps({**body, "stream": bool(i % 2)}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n"
            with socket.create_connection(("127.0.0.1", running.port)) as connection:
                connection.sendall(head.encode() + content)
                time.sleep(bits.choice([0, 0.01, 0.1]))
        running.require_usage(idle, seconds=60)
        tally.cases += scaled(_N_GONE, scale) - 1
    with tally.case("a client that reads nothing"):
        content = json.dumps({"prompt": "a", "n": 16, "max_tokens": 1000, "ignore_eos": True, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n"
        before = running.memory()
        stalled = []
        for _ in range(4):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", running.port))
            connection.sendall(head.encode() + content)
            stalled.append(connection)
        time.sleep(5)
        require(httpx.get(running.url + "/health", timeout=10).status_code == 200, "no health")
        require(running.memory() - before < _MOST_GROWTH, "memory of streams that nobody reads")
        for connection in stalled:
            connection.close()
        running.require_usage(idle, seconds=60)
    with tally.case("a connection that is idle for as long as clients keep theirs"):
        connection = HTTPConnection("127.0.0.1", running.port, timeout=_MOST_SECONDS)
        for pause in (_IDLE_S, 0):
            connection.request("GET", "/health")  # raises if the server has closed the connection
            require(connection.getresponse().read() == b"", "no health")
            time.sleep(pause)
        connection.close()
    yield tally


# --- kills ----------------------------------------------------------------------------------------------------------


def _kill(model: Path, scale: float) -> Iterator[Tally]:
    """Kill the server under load: clients get an error at once, and the same answer from the next server."""
    tally = Tally("kill -9 of the server, and a restart")
    body = {"prompt": "1+2=", "seed": 3, "max_tokens": 1000, "ignore_eos": True}
    port, right = "0", None
    for i in range(scaled(_N_KILLS, scale)):
        with tally.case(f"kill {i}"), server(model, "--port", port) as running:
            port = str(running.port)
            answer = httpx.post(running.url + "/v1/completions", json=body, timeout=_MOST_SECONDS).json()
            right = right or answer["choices"][0]["text"]
            require(answer["choices"][0]["text"] == right, "the answer of the restarted server differs")
            with ThreadPoolExecutor(8) as pool:
                calls = [pool.submit(_ask_until_killed, running.url, body, bool(j % 2)) for j in range(8)]
                time.sleep(0.05 * (i + 1))
                running.process.kill()
                killed = time.monotonic()
                errors = [call.result(timeout=_MOST_SECONDS) for call in calls]
            require(time.monotonic() - killed < 10, "clients waited")
            require(any(errors), "no request was running")
    yield tally


def _ask_until_killed(url: str, body: dict[str, Any], streams: bool) -> str:
    """Repeat a request until it fails; return the error."""
    with httpx.Client(base_url=url, timeout=_MOST_SECONDS) as client:
        while True:
            try:
                response = client.post("/v1/completions", json={**body, "n": 4, "stream": streams})
                require(response.status_code in (200, 429), f"status {response.status_code}")
            except httpx.TransportError as error:
                return repr(error)
