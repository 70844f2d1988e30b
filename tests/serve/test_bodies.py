"""Requests as real clients send them get the answers that these clients need."""

import base64
import json
import math

import httpx
import numpy as np
import pytest
from tests.serve.conftest import serving
from tests.serve.models import write_tools_model
from tests.serve.recorded import read_recorded

from whet.serve import ServedModel, make_app

RECORDED = read_recorded()


@pytest.fixture(scope="module")
def tools_model(tmp_path_factory):
    folder = write_tools_model(tmp_path_factory.mktemp("tools") / "model")
    return ServedModel.load(str(folder), name="tiny", weights="float32")


@pytest.fixture(scope="module")
def url(tools_model):
    with serving(make_app(tools_model)) as address:
        yield address


@pytest.mark.parametrize(
    "asked", RECORDED, ids=[f"{i}-{each.client.split()[0]}-{each.needs}" for i, each in enumerate(RECORDED)]
)
def test_clients_get_what_they_need(url, tools_model, asked):
    body = asked.body
    if body and asked.path == "/v1/chat/completions":
        body = {"max_tokens": 200, **body}  # with the seed of conftest, the reply ends
    content = None if asked.body is None else json.dumps(body).encode()
    headers = {"Authorization": "Bearer none", "Content-Type": "application/json"}
    response = httpx.request(asked.method, url + asked.path, content=content, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    CHECKS[asked.needs](response, asked.body, tools_model)


# --- whole answers ------------------------------------------------------------------------------------------------


def chat(response, body, model):
    found = response.json()
    assert found["object"] == "chat.completion" and found["id"].startswith("chatcmpl-") and found["model"] == "tiny"
    [choice] = found["choices"]
    assert choice["index"] == 0 and choice["message"]["role"] == "assistant"
    assert isinstance(choice["message"]["content"], str) and choice["finish_reason"] in ("stop", "length")
    check_usage(found["usage"])
    return choice


def schema(response, body, model):
    choice = chat(response, body, model)
    assert json.loads(choice["message"]["content"])["value"] in (1, 2) and choice["finish_reason"] == "stop"


def call(response, body, model):
    [choice] = response.json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    [found] = choice["message"]["tool_calls"]
    check_call(found, body)


def chat_ids(response, body, model):
    choice = chat(response, body, model)
    ids, found = choice["token_ids"], choice["logprobs"]["content"]
    assert len(response.json()["prompt_token_ids"]) > 0 and len(ids) == len(found) > 0
    assert all(math.isfinite(entry["logprob"]) and entry["top_logprobs"] == [] for entry in found)


def chat_top(response, body, model):
    choice = chat(response, body, model)
    for entry in choice["logprobs"]["content"]:
        top = [each["logprob"] for each in entry["top_logprobs"]]
        assert len(top) == body["top_logprobs"] and top == sorted(top, reverse=True)


def embeddings(response, body, model):
    found = response.json()
    assert found["object"] == "list" and found["model"] == "tiny" and found["usage"]["prompt_tokens"] > 0
    one = isinstance(body["input"], str) or isinstance(body["input"][0], int)
    texts = [body["input"]] if one else body["input"]
    assert [entry["index"] for entry in found["data"]] == list(range(len(texts)))
    for entry, text in zip(found["data"], texts, strict=True):
        ids = text if isinstance(text, list) else model.tokenizer.encode(text)
        raw = entry["embedding"]
        values = raw if body["encoding_format"] == "float" else np.frombuffer(base64.b64decode(raw), "<f4")
        [right] = model.engine.embed([ids], pooling="last")
        np.testing.assert_allclose(values, right / np.linalg.norm(right), rtol=1e-5, atol=1e-7)


def responses(response, body, model):
    return check_response(response.json(), body)


def responses_schema(response, body, model):
    [message] = responses(response, body, model)["output"]
    assert json.loads(message["content"][0]["text"])["value"] in (1, 2)


def responses_call(response, body, model):
    [found] = responses(response, body, model)["output"]
    assert found["type"] == "function_call" and found["call_id"] and found["name"] == body["tools"][0]["name"]
    assert json.loads(found["arguments"])["value"] in (1, 2)


def responses_stream(response, body, model):
    """Numbered events whose deltas add up to the text of the last event's response."""
    found = [
        json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line.startswith("data: {")
    ]
    names = [line.removeprefix("event: ") for line in response.text.splitlines() if line.startswith("event: ")]
    assert names == [event["type"] for event in found] and names[0] == "response.created"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert names[-1] in ("response.completed", "response.incomplete")
    [message] = check_response(found[-1]["response"], body)["output"]
    text = "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")
    assert text == message["content"][0]["text"]


def completion(response, body, model):
    if body.get("stream"):
        *_, last = chunks = [each["choices"][0] for each in events(response)]
        assert last["finish_reason"] in ("stop", "length") and "".join(each["text"] for each in chunks)
        return
    found = response.json()
    assert found["object"] == "text_completion"
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    assert [choice["index"] for choice in found["choices"]] == list(range(len(prompts)))
    for choice in found["choices"]:
        assert isinstance(choice["text"], str) and choice["finish_reason"] in ("stop", "length")
        assert not any(text in choice["text"] for text in body.get("stop", ()))
    check_usage(found["usage"])


def completion_ids(response, body, model):
    [choice] = response.json()["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) > 0


def echo(response, body, model):
    """Log-probs of the prompt and one more token; the first is null, and each one is in the alternatives."""
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [model.tokenizer.encode(body["prompt"])]
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(prompts)))
    for choice, ids in zip(choices, prompts, strict=True):
        found = choice["logprobs"]
        values, tops = found["token_logprobs"], found["top_logprobs"]
        assert len(values) == len(tops) == len(found["tokens"]) == len(found["text_offset"]) == len(ids) + 1
        assert values[0] is None and tops[0] is None
        assert all(value in top.values() for value, top in zip(values[1:], tops[1:], strict=True))
        [right] = model.engine.logprobs([ids])
        assert values[1:-1] == right.tolist()


def token_ids(response, body, model):
    found = response.json()
    [choice] = found["choices"]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{each}" for each in choice["token_ids"]]
    assert all(math.isfinite(entry["logprob"]) and entry["logprob"] > -9999 for entry in entries)
    assert choice["finish_reason"] in ("stop", "length") and found["request_id"]
    assert found["prompt_token_ids"] == body["token_ids"]


def models(response, body, model):
    [card] = response.json()["data"]
    assert card["id"] == "tiny" and card["object"] == "model" and card["max_model_len"] == model.context


def tokenizer_info(response, body, model):
    found = response.json()
    assert found["eos_token"] == "<eos>" and found["bos_token"] is None and "message" in found["chat_template"]


def tokens(response, body, model):
    found = response.json()
    assert found["tokens"] == model.tokenizer.encode(body["prompt"]) and found["count"] == len(found["tokens"])
    assert found["max_model_len"] == model.context


def state(response, body, model):
    assert response.content == b""


def metrics(response, body, model):
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert 'vllm:num_requests_running{model_name="tiny"}' in response.text


# --- streams --------------------------------------------------------------------------------------------------------


def events(response):
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, done, end = response.text.split("\n\n")
    assert done == "data: [DONE]" and end == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines if not line.startswith(":")]


def chat_stream(response, body, model):
    """A chunk with the role, contents, a chunk with the reason and nothing else, and the usage if it is asked for."""
    found = events(response)
    if body.get("stream_options", {}).get("include_usage"):
        *found, last = found
        assert last["choices"] == []
        check_usage(last["usage"])
    choices = [choice for chunk in found for choice in chunk["choices"]]
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["id"] == found[0]["id"] for chunk in found)
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {} and choices[-1]["finish_reason"] in ("stop", "length", "tool_calls")
    assert all(choice["finish_reason"] is None and choice["index"] == 0 for choice in choices[:-1])
    return choices


def schema_stream(response, body, model):
    text = "".join(choice["delta"].get("content", "") for choice in chat_stream(response, body, model))
    assert json.loads(text)["value"] in (1, 2)


def call_stream(response, body, model):
    choices = chat_stream(response, body, model)
    [found] = [each for choice in choices for each in choice["delta"].get("tool_calls", ())]
    assert found["index"] == 0 and choices[-1]["finish_reason"] == "tool_calls"
    check_call(found, body)


def usage_stream(response, body, model):
    """Token counts in every chunk."""
    found = events(response)
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == sorted(counts) and counts[-1] == body["max_completion_tokens"] and found[-1]["choices"] == []


# --- other dialects -----------------------------------------------------------------------------------------------


def ollama(response, body, model):
    *rest, found = [json.loads(line) for line in response.text.splitlines()]
    assert bool(rest) == body.get("stream", True) and not any(each["done"] for each in rest)
    assert found["model"] == "tiny" and found["message"]["role"] == "assistant" and found["done"] is True
    assert found["done_reason"] in ("stop", "length") and found["eval_count"] > 0 and found["prompt_eval_count"] > 0
    return found["message"]["content"]


def ollama_schema(response, body, model):
    assert json.loads(ollama(response, body, model))["value"] in (1, 2)


def ollama_models(response, body, model):
    [card] = response.json()["models"]
    assert card["model"] == "tiny:latest" and card["size"] > 0 and card["details"]["quantization_level"]


def ollama_model(response, body, model):
    found = response.json()
    assert {"completion", "tools"} <= {*found["capabilities"]} and found["template"] and found["model_info"]


def anthropic(response, body, model):
    found = response.json()
    assert found["type"] == "message" and found["role"] == "assistant" and found["content"][0]["type"] == "text"
    assert found["stop_reason"] in ("end_turn", "max_tokens") and found["usage"]["output_tokens"] > 0


def anthropic_stream(response, body, model):
    kinds = [line.removeprefix("event: ") for line in response.text.splitlines() if line.startswith("event: ")]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert "content_block_delta" in kinds


# --- parts ----------------------------------------------------------------------------------------------------------


def check_usage(usage):
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


def check_response(found, body):
    assert found["object"] == "response" and found["id"].startswith("resp-") and found["model"] == "tiny"
    assert found["status"] in ("completed", "incomplete") and found["output"]
    assert found["usage"]["total_tokens"] == found["usage"]["input_tokens"] + found["usage"]["output_tokens"] > 0
    assert found["usage"]["output_tokens"] <= body.get("max_output_tokens", 2048)
    return found


def check_call(found, body):
    assert found["id"] and found["type"] == "function"
    assert found["function"]["name"] in [tool["function"]["name"] for tool in body["tools"]]
    assert json.loads(found["function"]["arguments"])["value"] in (1, 2)


CHECKS = {
    check.__name__: check
    for check in (
        chat, schema, call, chat_ids, completion, completion_ids, echo, token_ids, models, tokenizer_info, tokens,
        state, metrics, chat_stream, schema_stream, call_stream, usage_stream, ollama, ollama_schema, ollama_models,
        ollama_model, anthropic, anthropic_stream, chat_top, embeddings, responses, responses_schema, responses_call,
        responses_stream,
    )
}  # fmt: skip
