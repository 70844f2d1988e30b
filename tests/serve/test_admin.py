"""Adapters that come and go, pauses, and weights that are read again, while requests run."""

import asyncio
import json
import shutil
import threading
import time

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers
from tests.cli.conftest import tiny_model, write_tiny_gguf  # noqa: F401
from tests.serve.conftest import serving, write_adapter

from whet.engine.session import Call
from whet.models.adapter_files import peft_config, write_peft
from whet.serve import ServedModel, make_app
from whet.serve.gate import Gate

MESSAGES = [{"role": "user", "content": "hello"}]
LONG = {"messages": MESSAGES, "max_tokens": 100, "ignore_eos": True, "seed": 1, "return_token_ids": True}


@pytest.fixture
def place(tiny_model, tmp_path):  # noqa: F811
    """Serve a copy of the model, and yield a client; ``place.folder`` is the model's, ``place.adapters`` theirs."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    for i, name in enumerate(("adapters/red", "adapters/blue", "outside")):
        write_adapter(tmp_path / name, i)
    model = ServedModel.load(str(folder), name="tiny", weights="float32")
    app = make_app(model, adapter_folder=str(tmp_path / "adapters"))
    with serving(app) as url, httpx.Client(base_url=url, timeout=30) as client:
        client.model, client.folder, client.adapters = model, folder, tmp_path / "adapters"
        yield client


@pytest.fixture
def slow_steps(monkeypatch):
    step, steps = Call.step, []

    def step_slowly(call):
        time.sleep(0.01)
        steps.append(None)
        step(call)

    monkeypatch.setattr(Call, "step", step_slowly)
    return steps


class Asked(threading.Thread):
    """A streamed chat in a thread.

    Attributes:
        token_ids: its tokens so far.
        finish: why it ended; None: it runs.
        error: of a refused request.
    """

    def __init__(self, client, **fields):
        super().__init__(daemon=True)
        self.client, self.body = client, {**LONG, "stream": True, **fields}
        self.token_ids, self.finish, self.error = [], None, None
        self.start()

    def run(self):
        with self.client.stream("POST", "/v1/chat/completions", json=self.body) as response:
            if response.status_code != 200:
                self.error = json.loads(response.read())["error"]
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    data = json.loads(line.removeprefix("data: "))
                    if "error" in data:
                        self.error = data["error"]
                        return
                    [choice] = data["choices"]
                    self.token_ids += choice.get("token_ids", [])
                    self.finish = choice["finish_reason"] or self.finish

    def wait_for_tokens(self, n=1):
        while len(self.token_ids) < n:
            assert self.is_alive()
            time.sleep(0.005)
        return self

    def result(self):
        self.join(30)
        assert not self.is_alive()
        return self.token_ids, self.finish


def ask(client, **fields):
    response = client.post("/v1/chat/completions", json={**LONG, **fields})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def names(client):
    return [card["id"] for card in client.get("/v1/models").json()["data"]]


# --- adapters -------------------------------------------------------------------------------------------------


def load(client, name, path, **more):
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})


def unload(client, name):
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def test_adapters_are_loaded_and_unloaded(place):
    plain = ask(place)
    response = load(place, "red", "red")
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'red' added successfully.")
    assert load(place, "blue", str(place.adapters / "blue")).status_code == 200
    assert names(place) == ["tiny", "red", "blue"]
    found = {name: ask(place, model=name) for name in ("tiny", "red", "blue")}
    for name in ("red", "blue"):
        with_folder = place.model.engine.add_adapter(str(place.adapters / name))
        ids = place.model.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
        settings = place.model.sampling({"max_new_tokens": 100, "seed": 1})
        [[right]] = place.model.engine.generate([ids], 1, settings, adapter=with_folder)
        assert found[name] == right.token_ids
    assert len({tuple(ids) for ids in found.values()}) == 3 and found["tiny"] == plain
    assert load(place, "red", "blue", load_inplace=True).status_code == 200
    assert ask(place, model="red") == found["blue"]
    response = unload(place, "red")
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'red' removed successfully.")
    assert names(place) == ["tiny", "blue"]
    gone = place.post("/v1/chat/completions", json={**LONG, "model": "red"})
    assert gone.status_code == 404 and "red" in gone.json()["error"]["message"]
    assert ask(place) == plain


def test_requests_on_an_unloaded_adapter_end_with_it(place, slow_steps):
    load(place, "red", "red")
    right = ask(place, model="red")
    used = place.model.engine.memory["adapters_bytes"]
    assert used > 0
    running = [Asked(place, model="red").wait_for_tokens() for _ in range(2)]
    assert unload(place, "red").status_code == 200
    assert all(each.is_alive() for each in running)
    assert [each.result() for each in running] == [(right, "length")] * 2
    assert place.model.engine.memory["adapters_bytes"] == 0


@pytest.mark.parametrize(
    ("name", "path", "status", "fact"),
    [
        ("x", "../outside", 400, "not below"),
        ("x", "/etc", 400, "not below"),
        ("x", "link", 400, "not below"),
        ("x", "loop", 400, "lora_path"),
        ("x", "a\0b", 400, "lora_path"),
        ("x", "nothing", 404, "adapter_config.json"),
        ("x", "", 404, "adapter_config.json"),
        ("x", "broken", 400, "adapter_model"),
        ("x", "misfit", 400, "down_proj"),
        ("", "red", 400, "empty"),
        ("tiny", "red", 400, "already"),
        ("x", 3, 400, "lora_path"),
    ],
)
def test_adapters_that_cannot_be_loaded(place, name, path, status, fact):
    (place.adapters / "link").symlink_to("../outside")
    (place.adapters / "loop").symlink_to("loop")
    (place.adapters / "broken").mkdir()
    shutil.copy(place.adapters / "red/adapter_config.json", place.adapters / "broken")
    factors = {"model.layers.1.mlp.down_proj": (np.ones((2, 3), np.float32), np.ones((32, 2), np.float32), 1.0)}
    write_peft(place.adapters / "misfit", factors, peft_config(factors, "tiny", "CAUSAL_LM", ["down_proj"]))
    response = load(place, name, path)
    assert response.status_code == status and fact in response.json()["error"]["message"], response.text
    assert names(place) == ["tiny"]
    assert load(place, name, path, load_inplace=True).status_code == status


def test_only_loaded_adapters_can_be_unloaded(place, url):
    assert unload(place, "tiny").status_code == unload(place, "green").status_code == 404
    for path in ("load", "unload"):
        response = httpx.post(f"{url}/v1/{path}_lora_adapter", json={})
        assert response.status_code == 400 and "--adapter-folder" in response.json()["error"]["message"]


# --- pauses ---------------------------------------------------------------------------------------------------


def test_paused_requests_continue(place, slow_steps):
    right = ask(place)
    running = Asked(place).wait_for_tokens()
    assert place.post("/pause?mode=keep").json() == {"status": "paused"}
    assert place.get("/is_paused").json() == {"is_paused": True}
    n = len(slow_steps)
    waiting = Asked(place)
    time.sleep(0.2)
    assert len(slow_steps) == n and running.is_alive() and not waiting.token_ids
    for path in ("/reload", "/reset_prefix_cache"):
        response = place.post(path)
        assert response.status_code == 409 and "mode=wait" in response.json()["error"]["message"]
    assert place.post("/resume").json() == {"status": "resumed"}
    assert place.get("/is_paused").json() == {"is_paused": False}
    assert running.result() == waiting.result() == (right, "length")


def test_a_pause_waits_for_running_requests(place, slow_steps):
    right = ask(place)
    running = Asked(place).wait_for_tokens()
    assert place.post("/pause?mode=wait").status_code == 200
    assert len(running.token_ids) > 1 and running.result() == (right, "length")
    assert place.model.engine.memory["kv_kept_bytes"] == 0  # cleared
    waiting = Asked(place)
    time.sleep(0.1)
    assert not waiting.token_ids
    place.post("/resume")
    assert waiting.result() == (right, "length")
    assert place.post("/pause?mode=wait&clear_cache=false").status_code == 200
    assert place.model.engine.memory["kv_kept_bytes"] > 0


@pytest.mark.parametrize("mode", ["", "?mode=abort"])
def test_a_pause_aborts_running_requests(place, slow_steps, mode):
    right = ask(place)
    running = Asked(place, n=1).wait_for_tokens(5)
    assert place.post("/pause" + mode).status_code == 200
    token_ids, finish = running.result()
    assert finish == "abort" and token_ids == right[: len(token_ids)] and 5 <= len(token_ids) < 100
    memory = place.model.engine.memory
    assert memory["kv_used_bytes"] == memory["kv_kept_bytes"] == 0
    place.post("/resume")
    assert ask(place) == right


def test_clients_that_leave_during_a_pause_free_their_rows(place, slow_steps):
    with openai.OpenAI(base_url=str(place.base_url) + "/v1", api_key="any") as client:
        chunks = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, extra_body=LONG)
        next(iter(chunks))
        place.post("/pause?mode=keep")
        with pytest.raises(httpx.ReadTimeout):
            place.post("/v1/chat/completions", json=LONG, timeout=0.2)
        assert place.model.engine.memory["kv_used_bytes"] > 0
        chunks.close()
    end = time.monotonic() + 10
    while (
        place.model.engine.memory["kv_used_bytes"] or 'waiting{model_name="tiny"} 0.0' not in place.get("/metrics").text
    ):
        assert time.monotonic() < end
        time.sleep(0.01)
    place.post("/resume")
    ask(place)


def test_unknown_modes_are_named(place):
    response = place.post("/pause?mode=stop")
    assert response.status_code == 400 and "abort, wait, keep" in response.json()["error"]["message"]
    assert place.get("/is_paused").json() == {"is_paused": False}


def test_the_prefix_cache_is_reset(place):
    for _ in range(2):
        ask(place, max_tokens=1)
    assert place.model.engine.memory["kv_kept_bytes"] > 0
    assert place.post("/reset_prefix_cache").json() == {"success": True}
    assert place.model.engine.memory["kv_kept_bytes"] == 0


# --- weights --------------------------------------------------------------------------------------------------


def change_weights(folder):
    module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        module.model.layers[0].mlp.up_proj.weight.mul_(3)
    module.save_pretrained(folder)


def test_running_requests_end_on_the_old_weights(place, slow_steps, monkeypatch):
    load(place, "red", "red")
    before, red = ask(place), ask(place, model="red")
    fingerprint = place.model.fingerprint
    change_weights(place.folder)
    running = Asked(place).wait_for_tokens()
    answer, is_queued, change = {}, threading.Event(), Gate.change

    def queue(*args, **settings):
        is_queued.set()  # in the event loop, which handles the next request after this one
        return change(*args, **settings)

    monkeypatch.setattr(Gate, "change", queue)
    reloading = threading.Thread(target=lambda: answer.update(place.post("/reload").json()))
    reloading.start()
    assert is_queued.wait(10)
    waiting = Asked(place)
    assert running.result() == (before, "length")
    reloading.join(30)
    assert answer["status"] == "reloaded" and answer["system_fingerprint"] != fingerprint
    fresh = ServedModel.load(str(place.folder), name="tiny", weights="float32")
    with fresh.engine:
        after = fresh.engine.generate(
            [place.model.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]], 1,
            place.model.sampling({"max_new_tokens": 100, "seed": 1}),
        )[0][0].token_ids  # fmt: skip
    assert waiting.result() == (after, "length") and after != before
    assert ask(place) == after and ask(place, model="red") != red
    body = place.post("/v1/chat/completions", json=LONG).json()
    assert body["system_fingerprint"] == place.model.fingerprint == answer["system_fingerprint"] == fresh.fingerprint


def test_weights_that_do_not_fit_change_nothing(place):
    before, fingerprint = ask(place), place.model.fingerprint
    config = json.loads((place.folder / "config.json").read_text())
    (place.folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    response = place.post("/reload")
    assert response.status_code == 400 and "norm_eps" in response.json()["error"]["message"]
    (place.folder / "model.safetensors").write_bytes(b"x")
    assert place.post("/reload").status_code == 400
    assert ask(place) == before and place.model.fingerprint == fingerprint


def test_a_gguf_file_is_read_again(tiny_model, tmp_path):  # noqa: F811
    folder = shutil.copytree(tiny_model, tmp_path / "model")

    def write():
        return write_tiny_gguf(transformers.AutoModelForCausalLM.from_pretrained(folder), folder, tmp_path / "a.gguf")

    model = ServedModel.load(str(write()), name="tiny")
    with serving(make_app(model)) as url, httpx.Client(base_url=url, timeout=30) as client:
        before = ask(client)
        change_weights(folder)
        write()
        assert client.post("/reload").status_code == 200
        assert ask(client) != before
        assert model.fingerprint == ServedModel.load(str(tmp_path / "a.gguf"), name="tiny").fingerprint


def test_a_models_own_adapter_is_read_again(tiny_model, tmp_path):  # noqa: F811
    own = write_adapter(tmp_path / "own", 0)
    model = ServedModel.load(str(tiny_model), name="tiny", weights="float32", adapter=own)
    with serving(make_app(model)) as url, httpx.Client(base_url=url, timeout=30) as client:
        before, base, fingerprint = ask(client), ask(client, model="tiny-base"), model.fingerprint
        write_adapter(tmp_path / "own", 1)
        assert client.post("/reload").status_code == 200
        assert ask(client) != before and ask(client, model="tiny-base") == base and model.fingerprint != fingerprint


# --- access ---------------------------------------------------------------------------------------------------

ADMIN = ("/pause", "/resume", "/reset_prefix_cache", "/reload", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")


def statuses(app, address, paths=ADMIN, **headers):
    """Statuses of requests from an address."""
    transport = httpx.ASGITransport(app, client=(address, 5000))

    async def ask_all():
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
            found = [(await client.post(path, json={})).status_code for path in paths]
            return {*found, (await client.get("/is_paused")).status_code}

    return asyncio.run(ask_all())


@pytest.mark.parametrize(
    ("address", "headers"),
    [
        ("192.168.0.2", {}),
        ("2001:db8::1", {}),
        ("testclient", {}),
        ("127.0.0.1", {"Origin": "https://example.com"}),
        ("127.0.0.1", {"Origin": "null"}),
        ("127.0.0.1", {"Sec-Fetch-Site": "cross-site"}),
    ],
)
def test_only_this_machine_may_change_the_server(served, address, headers):
    assert statuses(make_app(served), address, **headers) == {403}


def test_keys_allow_changes_from_elsewhere(served):
    app = make_app(served, api_keys=["right"])
    assert statuses(app, "192.168.0.2") == statuses(app, "127.0.0.1") == {401}
    assert statuses(app, "192.168.0.2", (), Authorization="Bearer right") == {200}
