"""Mutated requests get an answer or an error that explains them: never a 500, a hang or a leak."""

import json
import random

import httpx
from tests.serve.mutations import mutate, replace_each
from tests.serve.recorded import read_recorded

PARTS = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
BODIES = {
    "/v1/chat/completions": {
        "model": "tiny", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": PARTS}],
        "max_tokens": 4, "n": 2, "seed": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop": ["a"],
        "logit_bias": {"5": 1}, "logprobs": True, "top_logprobs": 2,

        "tools": [], "tool_choice": "auto", "chat_template_kwargs": {"a": 1},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
    },
    "/v1/completions": {
        "prompt": ["ab", "c"], "max_tokens": 3, "echo": True, "logprobs": 1, "stop_token_ids": [3], "min_tokens": 1,
        "structured_outputs": {"choice": ["a", "b"]}, "prompt_logprobs": 1, "repetition_penalty": 1.1,
    },
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2, "logprobs": 1, "seed": 3}},
    "/v1/messages": {"max_tokens": 3, "system": "s", "messages": [{"role": "user", "content": "x"}], "top_k": 2},
    "/v1/messages?": {
        "max_tokens": 3, "tools": [], "tool_choice": {"type": "auto"}, "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {"c": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]},
        ],
    },
    "/api/chat": {"messages": [{"role": "user", "content": "x"}], "options": {"num_predict": 3}, "stream": False},
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}], "instructions": "s",
        "max_output_tokens": 3, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
        "include": ["a"], "reasoning": {"effort": None}, "store": False,
    },
    "/v1/embeddings": {"input": ["ab", "c"], "encoding_format": "base64", "dimensions": 3, "pooling": "mean"},
    "/v1/decisions": {"prompt": "abc", "labels": ["a", [5, 6]], "chat_template_kwargs": {"a": 1}},
    "/tokenize": {"prompt": "abc", "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}  # fmt: skip


def test_mutated_requests(url, served):
    bits = random.Random(77)
    statuses, failures = {}, []
    with httpx.Client(timeout=30) as client:
        for i in range(600):
            path = bits.choice(list(BODIES))
            body = BODIES[path]
            for _ in range(bits.choice([1, 1, 2, 4])):
                body = mutate(body, bits)
            if path.startswith("/v1") and bits.random() < 0.3:
                body["stream"] = True
            response = client.post(url + path, content=json.dumps(body).encode())
            is_stream = "event-stream" in response.headers["content-type"]
            explained = response.status_code == 200 or response.json()["error"]
            if response.status_code not in (200, 400, 404, 429) or (is_stream and "server_error" in response.text):
                failures.append((path, body, response.text))
            assert explained
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            assert i or client.get(url + "/health").status_code == 200
    assert not failures
    assert statuses[200] > 50 and statuses[400] > 50
    assert served.engine.memory["kv_used_bytes"] == 0 and not served.engine._calls._sessions


def test_each_field_of_recorded_requests_may_be_anything(url):
    """One value of each field at a time is replaced by a value of each type."""
    failures, seen = [], set()
    with httpx.Client(timeout=60) as client:
        for asked in read_recorded():
            if not isinstance(asked.body, dict):
                continue
            body = {"max_tokens": 2, **asked.body} if asked.path.startswith("/v1/c") else asked.body
            for place, changed in replace_each(body):
                if (asked.path, place) in seen:
                    continue
                seen.add((asked.path, place))
                response = client.post(url + asked.path, content=json.dumps(changed).encode())
                if response.status_code not in (200, 400, 404, 429) or "server_error" in response.text:
                    failures.append((asked.path, changed, response.text))
    assert not failures
    assert len(seen) > 1000
