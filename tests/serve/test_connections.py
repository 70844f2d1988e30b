"""Connections end when a request stalls, and refused requests get an answer that can be read."""

import contextlib
import json
import logging
import socket
import time

import httpx
import pytest
from tests.serve.conftest import serving

from whet.serve import make_app
from whet.serve.connection import Connection

HEADER_S, BODY_S = 0.5, 1.0
MOST_S = 10  # on a busy machine


class Hasty(Connection):
    header_s, body_s = HEADER_S, BODY_S


@pytest.fixture(scope="module")
def app(served, tmp_path_factory):
    return make_app(served, adapter_folder=str(tmp_path_factory.mktemp("adapters")))


@pytest.fixture(scope="module")
def port(app):
    with serving(app, connection=Hasty) as address:
        yield int(address.rpartition(":")[2])


@contextlib.contextmanager
def connected(port):
    with socket.create_connection(("127.0.0.1", port), timeout=MOST_S) as connection:
        yield connection


def read_all(connection):
    """Return what arrives until the server closes the connection."""
    found = b""
    while part := connection.recv(1 << 16):
        found += part
    return found


def read_answer(connection):
    """Return a response of a connection that stays open; it may arrive in parts."""
    with connection.makefile("rb") as file:
        lines = [file.readline()]
        while lines[-1].strip():
            lines.append(file.readline())
        length = next(int(line.partition(b":")[2]) for line in lines if line.lower().startswith(b"content-length:"))
        return b"".join(lines) + file.read(length)


def assert_refused(answer, status, *words):
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in head.lower()
    message = json.loads(body)["error"]["message"]
    assert all(word in message for word in words), message


def header(length, path="/v1/completions", method="POST"):
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n\r\n".encode()


def test_a_connection_without_a_request_is_closed(port):
    with connected(port) as connection:
        start = time.monotonic()
        assert read_all(connection) == b""
        assert HEADER_S * 0.9 < time.monotonic() - start < MOST_S


def test_a_header_that_stalls_is_answered_408(port):
    with connected(port) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.")
        assert_refused(read_all(connection), 408, "header", "in time")


def test_a_header_that_drips_is_answered_408(port):
    """Each byte arrives soon after the one before."""
    with connected(port) as connection:
        start = time.monotonic()
        connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
        connection.settimeout(HEADER_S / 5)
        found = b""
        while not found and time.monotonic() < start + MOST_S:
            connection.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                found = connection.recv(1 << 16)
        connection.settimeout(MOST_S)
        assert_refused(found + read_all(connection), 408, "header")


def test_bodies_that_stall_are_answered_408_by_every_endpoint(app, port):
    paths = [route.path for route in app.routes if "POST" in route.methods]
    assert {"/v1/chat/completions", "/v1/embeddings", "/tokenize", "/api/show", "/reload", "/pause"} <= {*paths}
    read_paths = [path for path in paths if path not in NO_BODY]
    with contextlib.ExitStack() as stack:
        connections = {path: stack.enter_context(connected(port)) for path in read_paths}
        for path, connection in connections.items():
            connection.sendall(header(100, path) + b'{"model"')
        for connection in connections.values():
            assert_refused(read_all(connection), 408, "body", "in time")


NO_BODY = ("/pause", "/resume", "/reset_prefix_cache", "/reload", "/api/show")  # answered before a body arrives


@pytest.mark.parametrize(
    "asked", ["GET /health", "GET /nowhere", "POST /nowhere", "POST /api/show", "POST /reset_prefix_cache"]
)
def test_a_stalled_body_that_nobody_reads_ends_the_connection(port, asked):
    method, path = asked.split()
    with connected(port) as connection:
        connection.sendall(header(100, path, method) + b"{")
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 ") and b"HTTP/1.1 408" not in answer


def test_a_body_may_take_longer_than_a_pause(port):
    content = b'{"prompt": "abc", "max_tokens": 2}'
    with connected(port) as connection:
        connection.sendall(header(len(content)))
        for i in range(0, len(content), 8):
            time.sleep(BODY_S / 4)
            connection.sendall(content[i : i + 8])
        assert read_answer(connection).startswith(b"HTTP/1.1 200 ")


def test_answers_and_pauses_between_requests_have_no_limit_here(port):
    """A response may take longer than a request, and a connection may be idle for longer."""
    content, url = b'{"prompt": "abc", "max_tokens": 2}', f"http://127.0.0.1:{port}"
    with connected(port) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert read_answer(connection).startswith(b"HTTP/1.1 200 ")
        for _ in range(2):
            time.sleep(1.5 * HEADER_S)
            assert httpx.post(f"{url}/pause").status_code == 200
            start = time.monotonic()
            connection.sendall(header(len(content)) + content)
            time.sleep(1.5 * BODY_S)
            assert httpx.post(f"{url}/resume").status_code == 200
            assert read_answer(connection).startswith(b"HTTP/1.1 200 ")
            assert time.monotonic() - start > BODY_S


def test_a_second_header_that_stalls_is_answered_408(port):
    with connected(port) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert read_answer(connection).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"GET /hea")
        assert_refused(read_all(connection), 408, "header")


def test_a_header_of_1_mb_is_refused_with_an_answer(port):
    """The client sends all of it before it reads."""
    with connected(port) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX-A: " + b"x" * (1 << 20) + b"\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        assert_refused(read_all(connection), 431, "16 KiB")


def test_what_is_not_http_is_refused_with_an_answer(port):
    with connected(port) as connection:
        connection.sendall(b"\x16\x03\x01" * 1000 + b"\r\n\r\n")
        assert_refused(read_all(connection), 400, "HTTP")


def test_a_refused_client_that_does_not_close_is_closed(port):
    with connected(port) as connection:
        connection.sendall(b"no HTTP\r\n\r\n")
        assert_refused(read_all(connection), 400)
        with pytest.raises(ConnectionError):
            for _ in range(100):
                connection.sendall(b"x")
                time.sleep(0.1)


def test_a_damaged_body_during_its_response_ends_the_connection(port, caplog):
    post = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n"
    with caplog.at_level(logging.ERROR), connected(port) as connection:
        connection.sendall(post)
        assert read_answer(connection).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"zz\r\n")
        assert read_all(connection) == b""
    assert not caplog.records
