"""``whet serve`` as a process: its address, its end, and mistakes in its flags."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import openai
import pytest
from tests.raising import assert_mentions
from tests.serve.conftest import write_adapter

from whet.serve.threads import listen


def start(*argv):
    command = [sys.executable, "-m", "whet", "serve", *map(str, argv), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    address = re.search(r"http://\S+", line)
    assert address, line + process.stderr.read()
    return process, address[0], line


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_requests_end_before_the_server_does(number, tiny_model):
    process, url, _ = start(tiny_model)
    found = []

    def ask():
        body = {"prompt": ["ab"] * 64, "max_tokens": 500, "ignore_eos": True}
        found.append(httpx.post(url + "/completions", json=body, timeout=60).json())

    client = threading.Thread(target=ask)
    client.start()
    metrics = url.removesuffix("v1") + "metrics"
    while not re.search(r"vllm:num_requests_running{.*} 64", httpx.get(metrics).text):
        assert client.is_alive()
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(30) in (-number, 128 + number)
    client.join(10)
    assert [choice["finish_reason"] for choice in found[0]["choices"]] == ["length"] * 64


def test_a_folder_of_adapters_is_served_with_its_base(tiny_model, tmp_path):
    adapters = [write_adapter(tmp_path / name, i, str(tiny_model)) for i, name in enumerate(("mine", "green"))]
    process, url, line = start(adapters[0], "--adapter", f"green={adapters[1]}")
    try:
        assert "mine, mine-base, green" in line

        def ask(**model):
            body = {"prompt": "ab", "temperature": 0, "max_tokens": 20, **model}
            return httpx.post(url + "/completions", json=body).json()["choices"][0]["text"]

        texts = [ask(model=name) for name in ("mine", "mine-base", "green")]
        assert len(set(texts)) == 3 and ask() == texts[0]
    finally:
        process.kill()
        process.wait()


def test_mistakes_are_named(tiny_model, error_of, tmp_path):
    assert_mentions(error_of("serve", str(tiny_model), "--adapter", "x"), "adapter is 'x'", "NAME=FOLDER")
    assert_mentions(error_of("serve", str(tiny_model), "--port", "70000"), "port is 70000", "65535")
    assert_mentions(error_of("serve", str(tiny_model), "--context", "1000"), "context is 1000", "512")
    assert_mentions(error_of("serve", str(tiny_model), "--kv-bytes", "1"), "too small", "--kv-bytes")
    (tmp_path / "keys").write_text("\n")
    assert_mentions(error_of("serve", str(tiny_model), "--api-key-file", str(tmp_path / "keys")), "empty")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_mentions(error_of("serve", str(tiny_model), "--port", str(port)), str(port), "Pass another port")


def test_responses_are_not_delayed():
    with listen("127.0.0.1", 0, "test") as listening:
        assert listening.proto == socket.IPPROTO_TCP


@pytest.fixture
def loading(tiny_model, tmp_path):
    """Start a server that waits for its chat template, a pipe; yield the process, its address and the pipe."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.mkfifo(pipe := tmp_path / "template")
    command = [sys.executable, "-m", "whet", "serve", str(tiny_model), "--port", str(port)]
    process = subprocess.Popen([*command, "--chat-template", str(pipe)], stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    while True:
        try:
            httpx.get(url)
            break
        except httpx.TransportError:
            assert process.poll() is None
            time.sleep(0.02)
    yield process, url, pipe
    process.kill()
    process.wait()


@pytest.mark.skipif(sys.platform == "win32", reason="pipes")
def test_every_path_is_unavailable_while_the_model_loads(loading):
    process, url, pipe = loading
    for path in ("/health", "/ready", "/v1/models", "/nowhere"):
        response = httpx.get(url + path)
        assert response.status_code == 503 and response.headers["retry-after"]
        assert response.json() == {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}
    assert httpx.post(url + "/v1/chat/completions", json={}).status_code == 503
    with openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=9) as client:  # the client waits and retries
        timer = threading.Timer(0.5, pipe.write_text, ["{{ messages[0].content }}"])
        timer.start()
        assert client.models.list().data[0].id == "model"
    assert httpx.get(url + "/ready").status_code == httpx.get(url + "/health").status_code == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) in (-signal.SIGTERM, 128 + signal.SIGTERM)


@pytest.mark.skipif(sys.platform == "win32", reason="pipes")
def test_a_failed_load_ends_the_process(loading):
    process, url, pipe = loading
    assert httpx.get(url + "/ready").status_code == 503
    pipe.write_text("")
    assert process.wait(20) == 2
    [line] = process.stderr.read().strip().splitlines()
    assert "chat_template" in line and "empty" in line


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_that_loads(number, loading):
    process, _, _ = loading
    process.send_signal(number)
    assert process.wait(10) in (-number, 128 + number)
