"""Embeddings and probabilities of labels equal the engine's, through the clients that people use."""

import base64
import json
import math
import shutil
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from tests.cli.conftest import tiny_model, write_tiny_gguf  # noqa: F401
from tests.raising import assert_raises
from tests.serve.conftest import serving

from whet.engine.session import Call
from whet.errors import WhetValueError
from whet.models.sources.gguf_container import GGUFFile
from whet.serve import ServedModel, make_app
from whet.serve.model import read_pooling
from whet.serve.service import _GROUP

MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def unit(rows):
    rows = np.asarray(rows, np.float64)
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


# --- embeddings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("name", ["tiny", "red"])
def test_embeddings_are_the_engines(client, served, pooling, name):
    texts = ["hello", "a", "x" * 150]
    ids = [served.tokenizer.encode(text) for text in texts]
    right = unit(served.engine.embed(ids, pooling=pooling, adapter=served.adapters[name]))
    extra = {"pooling": pooling}
    answer = client.embeddings.create(model=name, input=texts, extra_body=extra)  # asks for base64
    found = np.array([each.embedding for each in answer.data])
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-7)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 156 and answer.model == name
    for given in (texts, ids):
        answer = client.embeddings.create(model=name, input=given, encoding_format="float", extra_body=extra)
        assert [each.index for each in answer.data] == [0, 1, 2]
        assert np.array_equal(np.array([each.embedding for each in answer.data]), found)
    for given in (texts[2], ids[2]):
        [one] = client.embeddings.create(model=name, input=given, extra_body=extra).data
        assert np.array_equal(one.embedding, found[2])  # to the bit, without neighbours


def test_dimensions_cut_and_normalise(client, served):
    whole = served.engine.embed([served.tokenizer.encode("hello")])
    [cut] = client.embeddings.create(model="tiny", input="hello", dimensions=8).data
    np.testing.assert_allclose(cut.embedding, unit(whole[0, :8]), rtol=0, atol=1e-7)


def test_many_inputs_are_queued_in_groups(served):
    with (
        serving(make_app(served, max_requests=_GROUP)) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="any") as client,
    ):
        texts = [chr(97 + i % 26) * (1 + i // 26) for i in range(3 * _GROUP + 1)]
        found = [each.embedding for each in client.embeddings.create(model="tiny", input=texts).data]
    right = unit(served.engine.embed([served.tokenizer.encode(text) for text in texts]))
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-7)
    assert served.engine.memory["kv_used_bytes"] == 0


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        (None, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls_token"),
    ],
)
def test_the_models_own_pooling_is_the_default(tiny_model, tmp_path, config, pooling):  # noqa: F811
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    if config is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling/config.json").write_text(json.dumps(config))
    model = ServedModel.load(str(folder), weights="float32")
    with serving(make_app(model)) as url:
        response = httpx.post(url + "/v1/embeddings", json={"input": "hello"})
        if pooling == "cls_token":
            assert response.status_code == 400 and "cls_token" in response.json()["error"]["message"]
            assert httpx.post(url + "/v1/embeddings", json={"input": "a", "pooling": "last"}).status_code == 200
        else:
            right = unit(model.engine.embed([model.tokenizer.encode("hello")], pooling=pooling))
            np.testing.assert_allclose(response.json()["data"][0]["embedding"], right[0], rtol=0, atol=1e-7)


@pytest.mark.parametrize(("number", "pooling"), [(0, "last"), (1, "mean"), (3, "last")])
def test_a_gguf_file_names_its_pooling(number, pooling):
    keys = {"general.architecture": "qwen3", "qwen3.pooling_type": number}
    assert read_pooling(GGUFFile((), keys, {})) == pooling


@pytest.mark.parametrize(
    ("body", "facts"),
    [
        ({}, ("input is empty",)),
        ({"input": []}, ("input is empty",)),
        ({"input": ["a", ""]}, ("input is empty",)),
        ({"input": [[1], [9999]]}, ("9999", "257")),
        ({"input": ["a", 1]}, ("input holds 1",)),
        ({"input": "x" * 600}, ("512", "600")),
        ({"input": "a", "dimensions": 33}, ("dimensions is 33", "32")),
        ({"input": "a", "dimensions": 0}, ("dimensions is 0",)),
        ({"input": "a", "pooling": "cls"}, ("pooling", "cls", "last or mean")),
        ({"input": "a", "encoding_format": "int8"}, ("encoding_format", "int8", "base64")),
        ({"input": "a", "truncate_prompt_tokens": 3}, ("truncate_prompt_tokens",)),
        ({"input": ["a"] * 3000}, ("3000", "2048")),
    ],
)
def test_embeddings_that_cannot_be_computed(post, body, facts):
    message = post("/v1/embeddings", 400, **body)["error"]["message"]
    assert all(fact in message for fact in facts), message


def test_base64_is_little_endian_float32(post):
    listed = post("/v1/embeddings", input="hello")["data"][0]["embedding"]
    packed = post("/v1/embeddings", input="hello", encoding_format="base64")["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == listed
    assert math.isclose(sum(x * x for x in listed), 1, abs_tol=1e-6)


# --- decisions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "red"])
@pytest.mark.parametrize("chats", [False, True])
def test_labels_have_the_engines_log_probs(post, served, name, chats):
    labels = ["yes", "no", [5, 6, 7]]
    given: Any = {"messages": MESSAGES} if chats else {"prompt": "hello" * 20}
    prompt = post("/tokenize", **given)["tokens"]
    rows = [served.tokenizer.encode(label) if isinstance(label, str) else label for label in labels]
    found = served.engine.logprobs(
        [[*prompt, *row] for row in rows], start=len(prompt), adapter=served.adapters[name]
    )  # fmt: skip
    sums = [float(each.sum(dtype=np.float64)) for each in found]
    body = post("/v1/decisions", model=name, labels=labels, **given)
    assert [each["label"] for each in body["labels"]] == labels
    assert [each["logprob"] for each in body["labels"]] == sums
    right = np.exp(sums) / np.exp(sums).sum()
    np.testing.assert_allclose([each["probability"] for each in body["labels"]], right, rtol=1e-12)
    assert body["choice"] == labels[int(np.argmax(sums))]
    assert body["usage"] == {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + 8}


def test_a_decisions_prompt_is_computed_once(post, served, monkeypatch):
    used, step = [], Call.step

    def step_and_measure(call):
        step(call)
        used.append(served.engine.memory["kv_used_bytes"])

    monkeypatch.setattr(Call, "step", step_and_measure)
    post("/v1/decisions", prompt=[5] * 257, labels=[[i] for i in range(20)])
    pages = max(used) / served.engine.memory["kv_page_bytes"]
    assert 4 + 1 <= pages <= 4 + 20  # shared pages, and one of each label that has arrived by the first step


@pytest.mark.parametrize(
    ("body", "facts"),
    [
        ({"prompt": "a"}, ("labels has 0", "from 2 to 255")),
        ({"prompt": "a", "labels": ["x"]}, ("labels has 1",)),
        ({"prompt": "a", "labels": ["x", ""]}, ("labels is empty",)),
        ({"prompt": "a", "labels": ["x", {}]}, ("labels holds",)),
        ({"prompt": "", "labels": ["x", "y"]}, ("prompt is empty",)),
        ({"labels": ["x", "y"]}, ("prompt or messages",)),
        ({"prompt": "a" * 511, "labels": ["x", "yy"]}, ("512", "513")),
        ({"input": "a", "questions": []}, ("questions", "labels")),
        ({"prompt": "a", "labels": ["x", "y"], "model": 3}, ("model",)),
    ],
)
def test_decisions_that_cannot_be_made(post, body, facts):
    message = post("/v1/decisions", 400, **body)["error"]["message"]
    assert all(fact in message for fact in facts), message


# --- rewards --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["adapters", "whole"])
def rewarded(request, tiny_model, tmp_path_factory):  # noqa: F811
    """URL of a server of a reward model, its name there, and the model as a reward function."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from whet import Learner
    from whet.runs.models import as_reward_model
    from whet.text.reward_model import RewardModel

    folder, rng = tmp_path_factory.mktemp("reward") / "rm", np.random.default_rng(0)
    if request.param == "whole":
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        model: Any = as_reward_model(AutoModelForCausalLM.from_pretrained(tiny_model), tokenizer, "test")
        model.score.weight.data += 0.2
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        served, name = ServedModel.load(str(folder), weights="float32"), "rm"
    else:
        learner = Learner(tiny_model, lora_rank=2, modules_to_save=["score"], weights="float32")
        for parameter in learner.parameters:
            parameter[:] = 0.3 * rng.normal(size=parameter.shape)
        learner.save_pretrained(folder)
        served, name = ServedModel.load(str(tiny_model), name="tiny", adapters={"judge": str(folder)}), "judge"
        # In memory it has no place for its head, which would be ignored.
        assert_raises(WhetValueError, ("reward model", "save it", "RewardModel"), served.load_adapter, "own", learner)
    weights = "float32" if request.param == "whole" else None
    with serving(make_app(served)) as address:
        yield address, name, RewardModel(folder, weights=weights)


def test_scores_are_the_reward_models(rewarded):
    address, name, model = rewarded

    def score(status: int = 200, path: str = "/score", **body: Any):
        response = httpx.post(address + path, json={"model": name, **body}, timeout=30)
        assert response.status_code == status, response.text
        return response.json()

    prompts, answers = ["hello", "x" * 70], ["a", "bc"]
    expected = model(prompts, answers)
    for first, second in (("text_1", "text_2"), ("queries", "documents")):
        body: Any = {first: prompts, second: answers}
        answer = score(**body)
        assert [each["score"] for each in answer["data"]] == expected  # to the bit
    assert answer["model"] == name and answer["usage"]["prompt_tokens"] == 6 + 1 + 70 + 2 + 1
    answer = score(path="/v1/score", text_1="hello", text_2=answers, use_activation=True)
    sigmoids = [1 / (1 + math.exp(-x)) for x in model(["hello"] * 2, answers)]
    assert [each["score"] for each in answer["data"]] == pytest.approx(sigmoids) and len({*sigmoids}) == 2
    [chat] = score(text_1=MESSAGES, text_2="hi")["data"]
    assert chat["score"] == model([MESSAGES], ["hi"])[0] != expected[0]
    wrong: Any = (
        ({"text_1": "a"}, ["text_2"]),
        ({"text_1": ["a", "b"], "text_2": ["c"] * 3}, ["2 entries", "text_2 3"]),
        ({"text_1": "a", "text_2": [1]}, ["answer 1", "texts"]),
        ({"text_1": "a", "text_2": "b" * 600}, ["512"]),
    )
    for body, facts in wrong:
        error = score(400, **body)["error"]["message"]
        assert all(fact in error for fact in facts), error


def test_reward_models_write_no_texts(rewarded, post):
    address, name, _ = rewarded
    for path, body in (
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/decisions", {"prompt": "a", "labels": ["b", "c"]}),
    ):
        response = httpx.post(address + path, json={"model": name, **body}, timeout=30)
        assert response.status_code == 400 and "/score" in response.json()["error"]["message"], path
    answer = post("/score", 400, model="tiny", text_1="a", text_2="b")
    assert "'tiny' is not a reward model" in answer["error"]["message"]
