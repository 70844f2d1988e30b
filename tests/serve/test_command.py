"""``whet serve`` as a process: its address, its end, and mistakes in its flags."""

import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from tests.raising import assert_mentions
from tests.serve.conftest import write_adapter

from whet.cli.serve import listen


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
        assert_mentions(error_of("serve", str(tiny_model), "--port", str(port)), str(port), "--port")


def test_responses_are_not_delayed():
    with listen("127.0.0.1", 0) as listening:
        assert listening.proto == socket.IPPROTO_TCP
