"""Rules that known attacks on model servers have taught: hosts, origins, keys, templates, paths, numbers and sizes."""

import hmac
import json
from types import SimpleNamespace

import httpx
import pytest
import transformers
from tests.serve.conftest import serving

from whet.cli.serve import ServeConfig
from whet.serve import ServedModel, make_app
from whet.serve import app as app_module

MESSAGES = [{"role": "user", "content": "hello"}]
KEYS = ("right", "other", "third")


@pytest.fixture(scope="module")
def guarded(served):
    with serving(make_app(served, api_keys=KEYS, hosts=ServeConfig(model="m").hosts())) as url:
        yield url


# --- hosts and origins ------------------------------------------------------------------------------------------


def test_the_server_listens_on_this_machine_only():
    assert ServeConfig(model="m").host == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("[::1]", 200),
        ("LOCALHOST", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil", 403),
        ("", 403),
        ("127.0.0.1@evil.example", 403),
        ("evil.example:localhost", 403),
    ],
)
def test_other_hosts_are_not_answered(guarded, host, status):
    """A page of another site that resolves its name to this machine sends its own name (DNS rebinding)."""
    for path in ("/health", "/v1/models", "/metrics"):
        response = httpx.get(guarded + path, headers={"Host": host, "Authorization": "Bearer right"})
        assert response.status_code == status, path


def test_pages_of_other_sites_are_not_allowed_to_read(guarded):
    headers = {"Origin": "https://evil.example", "Authorization": "Bearer right"}
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/nowhere")):
        response = httpx.request(method, guarded + path, headers=headers, content=b"{")
        assert not [name for name in response.headers if name.startswith("access-control-")]
    asked = {**headers, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    response = httpx.options(guarded + "/v1/chat/completions", headers=asked)
    assert response.status_code >= 400
    assert not [name for name in response.headers if name.startswith("access-control-")]


# --- keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("Authorization", "Bearer right", 200),
        ("Authorization", "Bearer third", 200),
        ("X-Api-Key", "other", 200),
        ("Authorization", "Bearer wrong", 401),
        ("Authorization", "Bearer rightt", 401),
        ("Authorization", "Bearer", 401),
        ("Authorization", "Basic right", 401),
        ("X-Other", "right", 401),
        ("Authorization", "Bearer " + "r" * 5000, 401),
    ],
)
def test_keys_are_compared_in_constant_time(guarded, monkeypatch, header, value, status):
    """Whatever is sent, its digest is compared with the digest of every key."""
    compared = []

    def compare(a, b):
        compared.append((len(a), len(b)))
        return hmac.compare_digest(a, b)

    monkeypatch.setattr(app_module, "hmac", SimpleNamespace(compare_digest=compare))
    assert httpx.get(guarded + "/v1/models", headers={header: value}).status_code == status
    assert compared == [(32, 32)] * len(KEYS)


def test_all_endpoints_except_state_need_a_key(guarded, served):
    app = make_app(served, api_keys=KEYS)
    # The page asks for the key itself.
    is_open = {"/", "/page/page.js", "/page/style.css", "/health", "/ready", "/version", "/metrics", "/ping"}
    for route in app.routes:
        path, methods = route.path, route.methods - {"HEAD"}
        for method in methods:
            status = httpx.request(method, guarded + path, content=b"{}").status_code
            assert (status == 200) if path in is_open else (status == 401), path


# --- templates, paths and addresses -----------------------------------------------------------------------------

TEMPLATES = [
    {"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}},
    {"chat_template": "{{ 7 * 7 }}"},
    {"chat_template_kwargs": {"messages": []}},
    {"chat_template_kwargs": {"conversation": [], "tokenize": False}},
    {"chat_template_kwargs": {"self": 1}},
    {"chat_template_kwargs": {"tools": []}},
]


@pytest.fixture(scope="module", params=["whet", "transformers"])
def any_tokenizer(request, served, tiny_model):
    if request.param == "whet":
        with serving(make_app(served)) as url:
            yield url
        return
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    before = served.engine.tokenizer
    with serving(make_app(ServedModel(served.engine, tokenizer, "tiny", served.stop_ids))) as url:
        yield url
    served.engine.tokenizer = before


@pytest.mark.parametrize("given", TEMPLATES)
@pytest.mark.parametrize("last", ["user", "assistant"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_templates_never_come_from_a_request(any_tokenizer, given, last, path):
    messages = [*MESSAGES, *([{"role": "assistant", "content": "a"}] if last == "assistant" else [])]
    response = httpx.post(any_tokenizer + path, json={"messages": messages, "max_tokens": 1, **given})
    assert response.status_code == 400, response.text
    assert "chat_template" in response.json()["error"]["message"]


def test_messages_are_text_for_the_template(any_tokenizer):
    """A message is not a template, whatever it holds."""
    text = "{{ 7 * 7 }}{% for i in range(3) %}x{% endfor %}"
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "return_token_ids": True}
    ids = httpx.post(any_tokenizer + "/v1/chat/completions", json=body).json()["prompt_token_ids"]
    assert text in httpx.post(any_tokenizer + "/detokenize", json={"tokens": ids}).json()["prompt"]


@pytest.mark.parametrize("name", ["/etc/passwd", "../adapters", "http://127.0.0.1:1/x", "tiny/../red", "red/", "\x00"])
def test_models_are_names_and_never_paths(url, name):
    response = httpx.post(url + "/v1/completions", json={"prompt": "a", "model": name})
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}},
        {"type": "file", "file": {"file_id": "/etc/x"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"image_url": "file:///etc/passwd"},
    ],
)
def test_addresses_in_messages_are_not_opened(post, part):
    error = post("/v1/chat/completions", 400, messages=[{"role": "user", "content": [part]}])["error"]
    assert "only text is supported" in error["message"]


# --- numbers and sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1", "1" + "0" * 40])
@pytest.mark.parametrize(
    "field", ["temperature", "min_p", "n", "max_tokens", "logprobs", "presence_penalty", "min_tokens"]
)
def test_numbers_out_of_range_are_refused(url, field, value):
    if (field, value) == ("presence_penalty", "-1"):
        pytest.skip("in range")
    response = httpx.post(url + "/v1/completions", content=f'{{"prompt": "a", "{field}": {value}}}'.encode())
    assert response.status_code == 400 and field in response.json()["error"]["message"], response.text


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 129},
        {"prompt": ["a"] * 1025},
        {"logit_bias": {str(i): 1 for i in range(10_000)}},
        {"structured_outputs": {"regex": "a" * 300_000}},
        {"structured_outputs": {"choice": [str(i) for i in range(10**5)]}},
    ],
)
def test_numbers_of_things_are_bounded(url, fields):
    response = httpx.post(url + "/v1/completions", content=json.dumps({"prompt": "a", **fields}).encode(), timeout=60)
    assert response.status_code == 400 and response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a" * (2 << 20)}),
        ("/v1/completions", {"prompt": ["é" * (1 << 20), "a"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * (1 << 20)}] * 2}),
        ("/tokenize", {"prompt": "a" * (2 << 20)}),
    ],
)
def test_texts_that_cannot_fit_are_refused_without_being_tokenised(url, served, monkeypatch, path, body):
    """A tokenizer takes a second and 200 MB for each MB."""
    for name in ("encode", "apply_chat_template"):
        monkeypatch.setattr(served.tokenizer, name, None)
    response = httpx.post(url + path, json=body, timeout=60)
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    assert "512" in response.json()["error"]["message"] and "2,097,152" in response.json()["error"]["message"]
