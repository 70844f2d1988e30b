"""A server of a tiny model, with two adapters, on a free port of this machine."""

import secrets

import httpx
import numpy as np
import pytest
from tests.cli.conftest import error_of, tiny_model  # noqa: F401

from whet.models.adapter_files import peft_config, write_peft
from whet.serve import ServedModel, make_app
from whet.serve.threads import serving


@pytest.fixture(autouse=True)
def one_seed(monkeypatch):
    """Give requests without a seed always the same one, so that sampled answers repeat."""
    monkeypatch.setattr(secrets, "randbits", lambda bits: 2)


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
