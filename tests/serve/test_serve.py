"""The server answers as the engine does, through the clients that people use."""

import asyncio
import gc
import itertools
import json
import re
import shutil
import time
from http.client import HTTPConnection
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import transformers
from tests.cli.conftest import tiny_model  # noqa: F401
from tests.serve.conftest import serving

import whet
from whet import SamplingParams
from whet.engine.session import Call
from whet.serve import ServedModel, make_app
from whet.serve.loop import Ticket

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def engine_answer(served, prompt_ids, n=1, **settings):
    sampling = SamplingParams(stop_token_ids=served.stop_ids, **settings)
    [samples] = served.engine.generate([prompt_ids], n, sampling, logprobs_mode="model")
    return samples


def chat_ids(served, messages=MESSAGES):
    return served.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def text_of(served, token_ids):
    return served.tokenizer.decode(token_ids, skip_special_tokens=True)


def wait_until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# --- sampling -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [False, True])
def test_chat_samples_what_the_engine_samples(client, served, streams):
    right = engine_answer(served, chat_ids(served), n=2, seed=7, max_new_tokens=20, top_logprobs=2)
    given = {"model": "tiny", "messages": MESSAGES, "n": 2, "seed": 7, "max_completion_tokens": 20}
    given |= {"logprobs": True, "top_logprobs": 2}
    texts, logprobs, finish = ["", ""], [[], []], [None, None]
    usage: Any = None
    if streams:
        for chunk in client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
                finish[choice.index] = choice.finish_reason or finish[choice.index]
    else:
        answer = client.chat.completions.create(**given)
        usage = answer.usage
        for choice in answer.choices:
            texts[choice.index], finish[choice.index] = choice.message.content, choice.finish_reason
            logprobs[choice.index] = choice.logprobs.content
    for i, sample in enumerate(right):
        assert texts[i] == text_of(served, sample.token_ids)
        assert finish[i] == sample.finish_reason
        assert [entry.logprob for entry in logprobs[i]] == sample.logprobs
        assert [[other.logprob for other in entry.top_logprobs] for entry in logprobs[i]] == [
            [value for _, value in row] for row in sample.top_logprobs
        ]
    assert usage.prompt_tokens == len(chat_ids(served))
    assert usage.completion_tokens == sum(len(sample.token_ids) for sample in right)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_the_prefix_cache_is_reported(client, served):
    messages = [{"role": "user", "content": "a prompt that is longer than a page of 64 tokens " * 2}]
    first, second = (
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=3, seed=1) for _ in range(2)
    )
    assert first.choices[0].message.content == second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens > 64 > first.usage.prompt_tokens_details.cached_tokens


def test_seeded_requests_do_not_depend_on_others(url, served):
    prompts: list[Any] = [[{"role": "user", "content": "x" * (1 + i)}] for i in range(24)]
    settings = {"seed": 3, "max_new_tokens": 24, "temperature": 0.9}
    right = [text_of(served, engine_answer(served, chat_ids(served, m), **settings)[0].token_ids) for m in prompts]

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as client:
            calls = [
                client.chat.completions.create(model="tiny", messages=m, seed=3, max_tokens=24, temperature=0.9)
                for m in prompts
            ]
            return await asyncio.gather(*calls)

    assert [answer.choices[0].message.content for answer in asyncio.run(ask_all())] == right


def test_adapters_are_chosen_by_name(client, served):
    texts = {}
    for name in ("tiny", "red", "blue"):
        answer = client.chat.completions.create(model=name, messages=MESSAGES, temperature=0, max_tokens=24)
        texts[name] = answer.choices[0].message.content
        [sample] = served.engine.generate(
            [chat_ids(served)],
            1,
            SamplingParams(temperature=0, max_new_tokens=24, stop_token_ids=served.stop_ids),
            adapter=served.adapters[name],
        )[0]
        assert texts[name] == text_of(served, sample.token_ids)
    assert len(set(texts.values())) == 3
    cards = client.models.list().data
    assert [card.id for card in cards] == ["tiny", "red", "blue"]
    assert all(card.max_model_len == served.context for card in cards)


def test_default_length_is_the_rest_of_the_context(client, served):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, extra_body={"ignore_eos": True, "return_token_ids": True}
    )
    [choice] = answer.choices
    assert choice.finish_reason == "length"
    assert len(answer.prompt_token_ids) + len(choice.token_ids) == served.context == 512


def test_settings_reach_the_engine(post, served):
    banned = {str(token): -100 for token in range(200)}
    extra = {"logit_bias": banned, "top_k": -1, "min_p": 0.01, "min_tokens": 4, "presence_penalty": 0.5}
    body = post("/v1/completions", prompt="ab", max_tokens=30, seed=1, return_token_ids=True, stop=["q"], **extra)
    [choice] = body["choices"]
    right = SamplingParams(
        max_new_tokens=30, seed=1, logit_bias={int(k): v for k, v in banned.items()}, min_p=0.01, min_new_tokens=4,
        presence_penalty=0.5, stop=["q"], stop_token_ids=served.stop_ids,
    )  # fmt: skip
    [[sample]] = served.engine.generate([served.tokenizer.encode("ab")], 1, right)
    assert choice["token_ids"] == sample.token_ids and choice["text"] == sample.text
    assert choice["prompt_token_ids"] == served.tokenizer.encode("ab")


def test_stop_token_ids_are_not_part_of_the_text(post, served):
    [sample] = engine_answer(served, served.tokenizer.encode("ab"), temperature=0, max_new_tokens=8)
    stop = sample.token_ids[3]
    body = post("/v1/completions", prompt="ab", max_tokens=8, temperature=0, stop_token_ids=[stop])
    [choice] = body["choices"]
    n = sample.token_ids.index(stop)
    assert choice["finish_reason"] == "stop" and choice["text"] == text_of(served, sample.token_ids[:n])
    assert body["usage"]["completion_tokens"] == n + 1


# --- grammars ---------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "two"]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize("streams", [False, True])
def test_answers_follow_a_schema(client, streams):
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    given = {"model": "tiny", "messages": MESSAGES, "response_format": form, "n": 6, "seed": 2, "max_tokens": 200}
    texts = [""] * 6
    if streams:
        for chunk in client.chat.completions.create(**given, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        for choice in client.chat.completions.create(**given).choices:
            texts[choice.index] = choice.message.content
            assert choice.finish_reason == "stop"
    found = [json.loads(text) for text in texts]
    assert all(each in ({"a": 1}, {"a": "two"}) for each in found) and {"a": 1} in found and {"a": "two"} in found


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"choice": ["yes", "no (maybe)", "x|y"]}, r"yes|no \(maybe\)|x\|y"),
        ({"regex": "[ab]{3}c"}, "[ab]{3}c"),
        ({"grammar": 'start: "p" ("q" | "r")+ "!"'}, "p[qr]+!"),
        ({"json_object": True}, r"(?s)\{.*"),
    ],
)
def test_structured_outputs(post, asked, pattern):
    body = post("/v1/completions", prompt="ab", n=8, max_tokens=60, seed=5, structured_outputs=asked)
    texts = [choice["text"] for choice in body["choices"] if choice["finish_reason"] == "stop"]
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    assert texts or "json_object" in asked


def test_a_grammar_begins_at_once_if_the_prompt_does_not_open_the_thinking(thinker):
    outputs = {"choice": ["x", "y"]}
    given = {"model": "thinker", "messages": MESSAGES, "temperature": 0, "max_tokens": 40}
    [choice] = thinker.chat.completions.create(**given, extra_body={"structured_outputs": outputs}).choices
    assert choice.message.content in ("x", "y")


# --- log-probs of given tokens ----------------------------------------------------------------------------------


def test_echo_scores_prompts_as_evaluation_harnesses_ask(post, served):
    rows = [served.tokenizer.encode(text) for text in ("hello world", "ab", "a longer text to be scored")]
    body = post("/v1/completions", prompt=rows, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    for row, choice in zip(rows, body["choices"], strict=True):
        found = choice["logprobs"]
        values, tops = found["token_logprobs"], found["top_logprobs"]
        assert len(values) == len(tops) == len(found["tokens"]) == len(row) + 1
        assert values[0] is None and tops[0] is None
        [right] = served.engine.logprobs([row])
        np.testing.assert_array_equal(np.float32(values[1 : len(row)]), right)
        logits = served.engine.logits(row)
        for i, (value, top, token) in enumerate(zip(values[1:-1], tops[1:-1], row[1:], strict=True)):
            assert (value == max(top.values())) == (logits[i].argmax() == token)
            assert value in top.values()
        assert "".join(found["tokens"]).startswith(served.tokenizer.decode(row))
        assert found["text_offset"] == [0, *itertools.accumulate(map(len, found["tokens"][:-1]))]
        assert choice["text"].startswith(served.tokenizer.decode(row))


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_is_answered_from_the_prefix_cache(post, served, max_tokens):
    """Log-probs of four continuations of a context, in one request and again, are the engine's."""
    rng = np.random.default_rng(7 + max_tokens)
    context = rng.integers(2, 200, 200).tolist()
    rows = [context + rng.integers(2, 200, 5 + 40 * i).tolist() for i in range(4)]
    right, alternatives = served.engine.logprobs(rows, top_logprobs=1)
    fields = {"max_tokens": max_tokens, "echo": True, "temperature": 0}
    # The last common token is computed again.
    for n_cached in (3 * 199, sum(len(row) - 2 for row in rows)):
        body = post("/v1/completions", prompt=rows, logprobs=1, **fields)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == n_cached
        for choice, row, logprobs, tops in zip(body["choices"], rows, right, alternatives, strict=True):
            found, n = choice["logprobs"], len(row)
            assert found["token_logprobs"][:n] == [None, *logprobs.tolist()]
            assert len(found["token_logprobs"]) == n + max_tokens
            best = [max(top.values()) for top in found["top_logprobs"][1:n]]
            assert best == pytest.approx([max(top[0][1], logprob) for top, logprob in zip(tops, logprobs, strict=True)])
    [several] = post("/v1/completions", prompt=rows[0], logprobs=3, **fields)["choices"]
    assert several["logprobs"]["token_logprobs"][: len(rows[0])] == [None, *right[0].tolist()]


def test_echo_without_a_new_token(post, served):
    body = post("/v1/completions", prompt="hello", max_tokens=0, logprobs=0, echo=True, n=2)
    assert [choice["text"] for choice in body["choices"]] == ["hello", "hello"]
    assert all(choice["finish_reason"] == "length" for choice in body["choices"])
    values = body["choices"][1]["logprobs"]["token_logprobs"]
    [right] = served.engine.logprobs([served.tokenizer.encode("hello")])
    np.testing.assert_array_equal(np.float32(values[1:]), right)
    assert body["usage"]["completion_tokens"] == 0


def test_tokens_that_are_not_utf8_have_different_keys(post, served):
    row = served.tokenizer.encode("é")
    assert len(row) == 2
    [choice] = post("/v1/completions", prompt=row, max_tokens=0, echo=True, logprobs=0)["choices"]
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    [choice] = post(
        "/v1/completions", prompt=row, max_tokens=0, echo=True, logprobs=0, return_tokens_as_token_ids=True
    )["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in row]


def test_prompt_logprobs(post, served):
    body = post("/v1/chat/completions", messages=MESSAGES, max_tokens=1, prompt_logprobs=1, return_token_ids=True)
    ids, rows = body["prompt_token_ids"], body["prompt_logprobs"]
    [right] = served.engine.logprobs([ids])
    assert rows[0] is None and len(rows) == len(ids)
    assert [row[str(token)]["logprob"] for token, row in zip(ids[1:], rows[1:], strict=True)] == right.tolist()


def test_tokens_in_and_tokens_out(post, served):
    row = served.tokenizer.encode("hello")
    given = {"max_tokens": 6, "seed": 5, "logprobs": 1, "temperature": 0.7, "skip_special_tokens": False}
    body = post("/inference/v1/generate", model="tiny", token_ids=row, sampling_params=given)
    [choice], [right] = body["choices"], engine_answer(served, row, seed=5, temperature=0.7, max_new_tokens=6)
    assert choice["token_ids"] == right.token_ids and choice["finish_reason"] == right.finish_reason
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in right.token_ids]
    assert [entry["logprob"] for entry in content] == right.logprobs
    assert body["prompt_token_ids"] == row


def test_log_probs_of_the_sampled_distribution(served):
    """On the three routes of trainers: verifiers', OpenEnv's and TRL's."""
    model = ServedModel(served.engine, served.tokenizer, "tiny", served.stop_ids, logprobs_mode="sampling")
    chosen = {"temperature": 0.6, "top_k": 20, "seed": 3}
    sampling = SamplingParams(stop_token_ids=served.stop_ids, max_new_tokens=8, **chosen)
    ids = chat_ids(served)
    [[right]] = served.engine.generate([ids], 1, sampling, logprobs_mode="sampling")
    assert right.logprobs != engine_answer(served, ids, max_new_tokens=8, **chosen)[0].logprobs
    given = {"max_tokens": 8, **chosen}
    asked = {
        "/inference/v1/generate": {"token_ids": ids, "sampling_params": {**given, "logprobs": 1}},
        "/v1/chat/completions": {
            **given, "messages": MESSAGES, "logprobs": True, "top_logprobs": 0, "return_token_ids": True
        },
        "/v1/completions": {**given, "prompt": ids, "logprobs": 0, "return_token_ids": True},
    }  # fmt: skip
    with serving(make_app(model)) as url:
        bodies = {path: httpx.post(url + path, json=body).json() for path, body in asked.items()}
    for body in bodies.values():
        [choice] = body["choices"]
        assert body.get("prompt_token_ids", choice.get("prompt_token_ids")) == ids
        assert choice["token_ids"] == right.token_ids
        found = choice["logprobs"]
        content = found.get("content") or [{"logprob": value} for value in found["token_logprobs"]]
        assert [entry["logprob"] for entry in content] == right.logprobs


# --- other dialects ---------------------------------------------------------------------------------------------


def test_ollama(url, post, served):
    options = {"num_predict": 12, "seed": 3, "temperature": 0.8}
    [right] = engine_answer(served, chat_ids(served), seed=3, temperature=0.8, max_new_tokens=12)
    text = text_of(served, right.token_ids)
    body = post("/api/chat", model="tiny:latest", messages=MESSAGES, options=options, stream=False, tools=[])
    assert body["message"] == {"role": "assistant", "content": text} and body["done"]
    assert body["done_reason"] == right.finish_reason and body["eval_count"] == len(right.token_ids)
    assert body["prompt_eval_count"] == len(chat_ids(served)) and body["model"] == "tiny"
    response = httpx.post(url + "/api/chat", json={"model": "tiny", "messages": MESSAGES, "options": options})
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == text
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    schema = {"enum": ["x", "yy"]}
    body = post("/api/chat", model="tiny", messages=MESSAGES, format=schema, stream=False)
    assert json.loads(body["message"]["content"]) in ("x", "yy")
    names = [each["name"] for each in httpx.get(url + "/api/tags").json()["models"]]
    assert names == ["tiny:latest", "red:latest", "blue:latest"]
    shown = post("/api/show", model="tiny")
    assert shown["capabilities"] == ["completion"] and "message" in shown["template"]
    assert httpx.get(url + "/api/version").json()["version"]
    assert "options is 3" in post("/api/chat", 400, messages=MESSAGES, options=3)["error"]


def test_anthropic(url, post, served):
    given = {"model": "tiny", "system": "be kind", "messages": MESSAGES, "max_tokens": 12, "seed": 3}
    ids = chat_ids(served, [{"role": "system", "content": "be kind"}, *MESSAGES])
    [right] = engine_answer(served, ids, seed=3, max_new_tokens=12)
    text = text_of(served, right.token_ids)
    body = post("/v1/messages", **given)
    assert body["content"] == [{"type": "text", "text": text}] and body["type"] == "message"
    assert body["stop_reason"] == {"stop": "end_turn", "length": "max_tokens"}[right.finish_reason]
    usage = body["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(ids)
    assert usage["output_tokens"] == len(right.token_ids)
    response = httpx.post(url + "/v1/messages", json={**given, "stream": True})
    events = [event.split("\n") for event in response.text.strip().split("\n\n")]
    chunks = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [name.removeprefix("event: ") for name, _ in events] == [chunk["type"] for chunk in chunks]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    kinds = list(dict.fromkeys(chunk["type"] for chunk in chunks))
    assert kinds == ["message_start", *block, "message_delta", "message_stop"]
    assert "".join(chunk["delta"]["text"] for chunk in chunks if chunk["type"] == "content_block_delta") == text
    assert chunks[-2]["usage"]["output_tokens"] == len(right.token_ids)
    del given["max_tokens"]
    assert "max_tokens" in post("/v1/messages", 400, **given)["error"]["message"]


# --- cancellation ---------------------------------------------------------------------------------------------


def is_idle(served):
    memory = served.engine.memory
    return memory["kv_used_bytes"] == 0 and not served.engine._calls._sessions


@pytest.fixture
def slow_steps(monkeypatch):
    step = Call.step

    def step_slowly(call):
        time.sleep(0.02)
        step(call)

    monkeypatch.setattr(Call, "step", step_slowly)


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_goes_away_frees_its_row(url, served, slow_steps, streams):
    wait_until(lambda: is_idle(served))
    body = {"messages": MESSAGES, "ignore_eos": True, "stream": streams, "n": 8}
    connection = HTTPConnection(url.removeprefix("http://"))
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    wait_until(lambda: not is_idle(served))
    connection.close()
    wait_until(lambda: is_idle(served), seconds=5)


def test_an_idle_server_holds_no_request(post):
    def tickets():
        gc.collect()
        return [each for each in gc.get_objects() if type(each) is Ticket]

    post("/v1/completions", prompt="ab", max_tokens=2, seed=1)
    wait_until(lambda: not tickets())


def test_requests_beyond_the_queue_are_rejected(served, slow_steps):
    with serving(make_app(served, max_requests=2)) as url:
        body = {"prompt": ["a", "b", "c"], "max_tokens": 1}
        response = httpx.post(url + "/v1/completions", json=body)
        assert response.status_code == 400 and "3 places" in response.json()["error"]["message"]
        with httpx.stream("POST", url + "/v1/completions", json=LONG | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            response = httpx.post(url + "/v1/completions", json=body | {"prompt": ["a", "b"]})
        assert response.status_code == 429 and response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "queue_full"
        wait_until(lambda: is_idle(served))
        assert httpx.post(url + "/v1/completions", json=body | {"prompt": ["a", "b"]}).status_code == 200
        assert httpx.post(url + "/v1/embeddings", json={"input": ["a"] * 5}).status_code == 200
    wait_until(lambda: is_idle(served))


LONG = {"prompt": "ab", "max_tokens": 500, "ignore_eos": True}


def test_each_key_has_its_own_limit(served, slow_steps):
    app = make_app(served, api_keys=["one", "two"], max_requests=3, max_requests_per_key=1)
    with serving(app) as url:

        def post(key, **body):
            return httpx.post(url + "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})

        first = {"headers": {"Authorization": "Bearer one"}, "json": LONG | {"stream": True}}
        with httpx.stream("POST", url + "/v1/completions", **first) as stream:
            lines = stream.iter_lines()
            next(lines)
            error = post("one", prompt="a", max_tokens=1)
            assert error.status_code == 429 and "1 requests of this API key" in error.json()["error"]["message"]
            assert post("two", prompt="a", max_tokens=1).status_code == 200
            assert post("two", prompt=["a", "b"], max_tokens=1).status_code == 400
        wait_until(lambda: is_idle(served))
        assert post("one", prompt="a", max_tokens=1).status_code == 200


def test_requests_end_at_the_time_limit(served, slow_steps):
    with serving(make_app(served, max_seconds=0.3)) as url:
        response = httpx.post(url + "/v1/completions", json=LONG)
        assert response.status_code == 504 and response.json()["error"]["code"] == "timeout"
        lines = httpx.post(url + "/v1/completions", json=LONG | {"stream": True}).text.strip().split("\n\n")
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "timeout" and len(lines) > 1
        assert httpx.post(url + "/v1/completions", json=LONG | {"max_tokens": 1}).status_code == 200
        wait_until(lambda: is_idle(served))


def test_silent_streams_are_kept_alive(served, slow_steps, monkeypatch):
    monkeypatch.setattr("whet.serve.events.KEEP_ALIVE_S", 1e-3)
    with serving(make_app(served)) as url:
        body = {"messages": MESSAGES, "stream": True, "max_tokens": 5, "ignore_eos": True}
        lines = httpx.post(url + "/v1/chat/completions", json=body).text.split("\n\n")
    assert ": keep-alive" in lines
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "length" and lines[-2:] == ["data: [DONE]", ""]


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "facts"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "model": "green"}, 404, ("green", "tiny, red, blue")),
        ("/v1/chat/completions", {}, 400, ("messages", "empty")),
        ("/v1/chat/completions", {"messages": ["hello"]}, 400, ("messages[0]", "role")),
        ("/v1/chat/completions", {"messages": MESSAGES, "temperature": -1}, 400, ("temperature", "-1")),
        ("/v1/chat/completions", {"messages": MESSAGES, "top_logprobs": 2}, 400, ("top_logprobs", "logprobs: true")),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 1000}, 400, ("n is 1000", "128")),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 600}, 400, ("512", "600")),
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": [{"type": "function"}]}, 400, ("tools",)),
        ("/v1/chat/completions", {"messages": MESSAGES, "stop": [3]}, 400, ("stop",)),
        ("/v1/chat/completions", {"messages": MESSAGES, "echo": True}, 400, ("echo",)),
        ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}, 400, ("stream_options",)),
        ("/v1/completions", {"prompt": ""}, 400, ("prompt is empty",)),
        ("/v1/completions", {"prompt": [[1, 9999]]}, 400, ("9999", "257")),
        ("/v1/completions", {"prompt": {"a": 1}}, 400, ("prompt",)),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, ("max_tokens is 0", "echo")),
        ("/v1/completions", {"prompt": "a", "logprobs": 30}, 400, ("logprobs is 30", "20")),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, ("suffix",)),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "(?=a)"}}, 400, ("regex", "look-around")),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"xml": "a"}}, 400, ("xml", "choice")),
        ("/v1/completions", {"prompt": "a", "response_format": {"type": "json_schema"}}, 400, ("json_schema",)),
        (
            "/v1/completions",
            {"prompt": "a", "structured_outputs": {"json": {"type": "object", "if": {}}}},
            400,
            ("schema", "if"),
        ),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"9999": 1}}, 400, ("9999",)),
        ("/inference/v1/generate", {"token_ids": []}, 400, ("token_ids is empty",)),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, ("prompt or messages",)),
        ("/detokenize", {"tokens": [-1]}, 400, ("-1",)),
    ],
)
def test_requests_that_cannot_be_honoured_are_explained(post, path, body, status, facts):
    error = post(path, status, **body)["error"]
    assert all(fact in error["message"] for fact in facts), error
    assert error["type"]


def test_a_prompt_that_does_not_fit_is_never_cut(post):
    error = post("/v1/chat/completions", 400, messages=[{"role": "user", "content": "x" * 600}])["error"]
    assert error["code"] == "context_length_exceeded" and "512" in error["message"] and "6" in error["message"]


@pytest.mark.parametrize(
    ("body", "status"), [(b"{", 400), (b"[1]", 400), (b"[" * 100_000, 400), (b" " * (17 << 20), 413)]
)
def test_bodies_that_are_not_requests(url, body, status):
    response = httpx.post(url + "/v1/completions", content=body)
    assert response.status_code == status and response.json()["error"]["message"]


def test_deep_values_are_refused(url):
    deep = 400
    nested = '{"a":' * deep + "1" + "}" * deep
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": nested}}
    turns = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    for path, body in (
        ("/v1/completions", f'{{"prompt": "a", "structured_outputs": {{"json": {nested}}}}}'),
        ("/v1/completions", json.dumps({"prompt": "a", "structured_outputs": {"json": nested * 10}})),
        ("/v1/completions", json.dumps({"prompt": "a", "structured_outputs": {"json": "[" * 100_000}})),
        ("/v1/chat/completions", f'{{"messages": {nested}}}'),
        ("/v1/chat/completions", json.dumps({"messages": [*turns[:-1], {**turns[-1], "tool_calls": [
            {**call, "function": {"name": "f", "arguments": "[" * 100_000}}]}]})),
    ):  # fmt: skip
        response = httpx.post(url + path, content=body.encode())
        assert response.status_code == 400 and response.json()["error"]["message"], response.text
    response = httpx.post(url + "/v1/chat/completions", json={"messages": turns, "max_tokens": 1})
    assert response.status_code in (200, 400)


def test_fields_without_influence_are_accepted(client):
    parts: list[Any] = [{"type": "text", "text": text} for text in ("hel", "lo")]
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": parts}],
        max_tokens=2, user="me", store=False, metadata={"a": "b"}, parallel_tool_calls=True, tools=[], seed=None,
        response_format={"type": "text"}, extra_body={"unknown": 1, "stop": None, "cache_salt": "x"},
    )  # fmt: skip
    assert answer.choices[0].finish_reason in ("length", "stop")


def test_keys_and_hosts(served):
    with serving(make_app(served, api_keys=["right", "other"], hosts=["localhost", "127.0.0.1"])) as url:
        assert httpx.get(url + "/v1/models").status_code == 401
        assert httpx.get(url + "/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
        for header in ({"Authorization": "Bearer right"}, {"X-Api-Key": "other"}):
            assert httpx.get(url + "/v1/models", headers=header).status_code == 200
        assert httpx.get(url + "/health").status_code == 200
        assert httpx.get(url + "/health", headers={"Host": "example.com"}).status_code == 403
        assert httpx.get(url + "/health").headers.get("access-control-allow-origin") is None


# --- the rest -----------------------------------------------------------------------------------------------------


def test_tokens_and_state(post, url, served):
    body = post("/tokenize", prompt="hello", return_token_strs=True)
    ids = served.tokenizer.encode("hello")
    assert body == {"count": 5, "max_model_len": 512, "tokens": ids, "token_strs": list("hello")}
    assert post("/tokenize", messages=MESSAGES)["tokens"] == chat_ids(served)
    assert post("/detokenize", tokens=ids)["prompt"] == "hello"
    info = httpx.get(url + "/tokenizer_info").json()
    assert info["eos_token"] == "<eos>" and info["eos_token_id"] == 1 and "message" in info["chat_template"]
    post("/v1/completions", prompt="a", max_tokens=2, ignore_eos=True)
    text = httpx.get(url + "/metrics").text
    for name in ("vllm:num_requests_running", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count"):
        assert f'{name}{{model_name="tiny"}}' in text
    assert httpx.get(url + "/version").json()["version"]
    assert httpx.get(url + "/nowhere").json()["error"]["type"] == "not_found_error"


@pytest.fixture(scope="module")
def thinker(served, tiny_model, tmp_path_factory):  # noqa: F811
    """Serve a model that was trained to think before its answer."""
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("thinker") / "base")
    module = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    module.model.embed_tokens.weight.data *= 30  # so that a reply can be nearly certain
    module.save_pretrained(folder)
    learner = whet.Learner(folder, lora_rank=8, compute="float32")
    prompt, reply = chat_ids(served), [*served.tokenizer.encode("<think>one</think>\n\ntwo"), 1]
    for _ in range(300):
        found = learner.logprobs([prompt], [reply])
        if found.logprobs.min() > -0.5:
            break
        learner.backward(-np.ones_like(found.logprobs) / len(reply))
        learner.step(lr=1e-2)
    assert found.logprobs.min() > -0.6
    learner.save_pretrained(folder / "adapter")
    model = ServedModel.load(str(folder), name="thinker", weights="float32", adapter=str(folder / "adapter"))
    model.tokenizer.chat_template += "{# <think></think> #}"
    with serving(make_app(model)) as url, openai.OpenAI(base_url=url + "/v1", api_key="any") as client:
        yield client


@pytest.mark.parametrize("streams", [False, True])
def test_thinking_is_separate(thinker, streams):
    given = {"model": "thinker", "messages": MESSAGES, "temperature": 0, "max_tokens": 40}
    thinking, answer, finish = "", "", None
    if streams:
        for chunk in thinker.chat.completions.create(**given, stream=True):
            [choice] = chunk.choices
            thinking += getattr(choice.delta, "reasoning_content", None) or ""
            answer += choice.delta.content or ""
            finish = choice.finish_reason or finish
    else:
        [choice] = thinker.chat.completions.create(**given).choices
        thinking, answer, finish = choice.message.reasoning_content, choice.message.content, choice.finish_reason
    assert (thinking, answer, finish) == ("one", "two", "stop")
