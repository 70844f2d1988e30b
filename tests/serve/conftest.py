"""A server of a tiny model, with two adapters, on a free port of this machine."""

import secrets
import threading
import time
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
import uvicorn
from tests.cli.conftest import error_of, tiny_model  # noqa: F401

from whet.cli.serve import listen
from whet.models.adapter_files import peft_config, write_peft
from whet.serve import ServedModel, make_app
from whet.serve.connection import Connection


@pytest.fixture(autouse=True)
def one_seed(monkeypatch):
    """Give requests without a seed always the same one, so that sampled answers repeat."""
    monkeypatch.setattr(secrets, "randbits", lambda bits: 2)


@contextmanager
def serving(app, connection=Connection):
    """Serve an application on a free port, and yield its address."""
    server = uvicorn.Server(uvicorn.Config(app, http=connection, ws="none", log_level="error"))
    socket = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
        socket.close()


def write_adapter(folder, seed, base="tiny"):
    rng = np.random.default_rng(seed)
    name = "model.layers.1.mlp.down_proj"
    factors = {name: (rng.standard_normal((2, 64)) * 5, rng.standard_normal((32, 2)) * 5, 2.0)}
    arrays = {name: (a.astype(np.float32), b.astype(np.float32), alpha) for name, (a, b, alpha) in factors.items()}
    write_peft(folder, arrays, peft_config(arrays, base, "CAUSAL_LM", ["down_proj"]))
    return str(folder)


@pytest.fixture(scope="session")
def served(tiny_model, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("adapters")
    adapters = {name: write_adapter(folder / name, i) for i, name in enumerate(("red", "blue"))}
    return ServedModel.load(str(tiny_model), name="tiny", weights="float32", adapters=adapters)


@pytest.fixture(scope="session")
def url(served):
    with serving(make_app(served)) as address:
        yield address


@pytest.fixture
def post(url):
    """Post a body, and return the JSON of the response, whose status must be as expected."""

    def post(path, status=200, **body):
        response = httpx.post(url + path, json=body, timeout=30)
        assert response.status_code == status, response.text
        return response.json()

    return post
