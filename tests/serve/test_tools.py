"""Tools: offered by the template, called in the model's format, required by a grammar."""

import json
from typing import Any

import httpx
import openai
import pytest
from tests.serve.conftest import serving
from tests.serve.models import CALL, RESPONSE_TEMPLATE, TOOLS, TOOLS_TEMPLATE, write_tools_model

from whet.serve import ServedModel, make_app

MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def url(tiny_model):
    model = ServedModel.load(str(tiny_model), name="tiny", weights="float32")
    model.tokenizer.chat_template = TOOLS_TEMPLATE
    with serving(make_app(model)) as address:
        yield address


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_required_call_cannot_fail(client, choice, streams):
    given = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "seed": 1, "n": 4}
    found, reasons = [], []
    if streams:
        for chunk in client.chat.completions.create(**given, stream=True):
            for part in chunk.choices:
                found += part.delta.tool_calls or []
                reasons += [part.finish_reason] if part.finish_reason else []
                assert not part.delta.content
        assert all(call.index == 0 for call in found)
    else:
        for each in client.chat.completions.create(**given).choices:
            found += each.message.tool_calls
            reasons.append(each.finish_reason)
            assert each.message.content is None
    assert reasons == ["tool_calls"] * 4 and len(found) == 4 and len({call.id for call in found}) == 4
    assert all(json.loads(call.function.arguments)["a"] in (1, 2) for call in found)
    names = {call.function.name for call in found}
    assert names == {"now"} if choice != "required" else names <= {"add", "now"}


def test_schemas_of_tools_may_have_references(client):
    """Schemas that Pydantic writes for enums and nested models."""
    value = {"enum": [1, 2], "type": "integer"}
    node = {"anyOf": [{"type": "null"}, {"$ref": "#"}]}
    tools: Any = []
    for name, key in (("first", "$defs"), ("second", "definitions")):
        properties = {"value": {"$ref": f"#/{key}/Value"}, "next": node}
        schema = {key: {"Value": value}, "properties": properties, "required": ["value", "next"], "type": "object"}
        schema["additionalProperties"] = False
        tools.append({"type": "function", "function": {"name": name, "parameters": schema}})
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=tools, tool_choice="required", n=8, seed=3
    )
    called = [choice.message.tool_calls[0].function for choice in answer.choices if choice.message.tool_calls]
    assert {each.name for each in called} == {"first", "second"}
    assert all(json.loads(each.arguments)["value"] in (1, 2) for each in called)


@pytest.mark.parametrize("streams", [False, True])
def test_calls_and_text_are_separate(client, streams):
    given = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "extra_body": {
        "structured_outputs": {"choice": [f"I see.\n{CALL}\n{CALL}"]}}}  # fmt: skip
    if streams:
        text, calls = "", []
        for chunk in client.chat.completions.create(**given, stream=True):
            text += chunk.choices[0].delta.content or ""
            calls += chunk.choices[0].delta.tool_calls or []
        assert [call.index for call in calls] == [0, 1]
    else:
        [choice] = client.chat.completions.create(**given).choices
        text, calls = choice.message.content, choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        [choice] = client.chat.completions.create(**given, parallel_tool_calls=False).choices
        assert len(choice.message.tool_calls) == 1
    assert text == "I see."
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [("now", {"a": 2})] * 2


def test_ollama_clients_get_calls(url):
    body = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "stream": False, "options": {"num_predict": 200}}
    body["format"] = {"const": "x"}
    assert "tool_calls" not in httpx.post(url + "/api/chat", json=body).json()["message"]
    assert httpx.post(url + "/api/show", json={"model": "tiny"}).json()["capabilities"] == ["completion", "tools"]


def test_turns_with_calls_are_rendered(url):
    def ask(arguments, status, **more):
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
        messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
        messages.append({"role": "tool", "tool_call_id": "c", "content": "3"})
        body = {"messages": messages, "tools": TOOLS, "max_tokens": 1, "return_token_ids": True, **more}
        response = httpx.post(url + "/v1/chat/completions", json=body)
        assert response.status_code == status, response.text
        return response.json()

    tokens = ask('{"a": 1}', 200)["prompt_token_ids"]
    text = httpx.post(url + "/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert "<assistant>add1<tool>3<assistant>" in text and "<tools>add,now," in text
    without = ask('{"a": 1}', 200, tool_choice="none")["prompt_token_ids"]
    assert "<tools>" not in httpx.post(url + "/detokenize", json={"tokens": without}).json()["prompt"]
    assert "not JSON" in ask("{a", 400)["error"]["message"]


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        ({"tool_choice": "sometimes"}, ("tool_choice", "sometimes", "required")),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, ("other", "among tools")),
        ({"tools": [], "tool_choice": "required"}, ("tool_choice", "no tools")),
        ({"tools": [{"type": "function"}]}, ("tools holds", "name")),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, ("tool_choice", "response_format")),
    ],
)
def test_mistakes_are_explained(url, more, facts):
    body = {"messages": MESSAGES, "tools": TOOLS, **more}
    response = httpx.post(url + "/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert all(fact in response.json()["error"]["message"] for fact in facts), response.text


# --- Anthropic's messages -------------------------------------------------------------------------------------

OWN: Any = [{"name": each["function"]["name"], "input_schema": each["function"]["parameters"]} for each in TOOLS]


def message_of(url, streams, status=200, **more):
    """Return the content and stop reason of a message, rebuilt from its events if it is streamed."""
    body = {"messages": MESSAGES, "tools": OWN, "max_tokens": 200, "stream": streams, **more}
    response = httpx.post(url + "/v1/messages", json=body)
    assert response.status_code == status, response.text
    if status != 200:
        return response.json()["error"]["message"]
    if not streams:
        return response.json()["content"], response.json()["stop_reason"]
    blocks, parts, reason, is_open = [], [], None, False
    for line in response.text.split("\n"):
        event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
        if event.get("type") == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            blocks.append(event["content_block"])
            parts.append("")
            is_open = True
        elif event.get("type") == "content_block_delta":
            delta = event["delta"]
            assert delta["type"] == {"text": "text_delta", "tool_use": "input_json_delta"}[blocks[-1]["type"]]
            parts[event["index"]] += delta.get("text", "") + delta.get("partial_json", "")
        elif event.get("type") == "content_block_stop":
            is_open = False
        elif event.get("type") == "message_delta":
            reason = event["delta"]["stop_reason"]
    assert not is_open
    for block, part in zip(blocks, parts, strict=True):
        if block["type"] == "tool_use":
            assert block["input"] == {}
            block["input"] = json.loads(part)
        else:
            block["text"] += part
    return blocks, reason


@pytest.mark.parametrize("streams", [False, True])
def test_messages_hold_calls(url, streams):
    forced = {"structured_outputs": {"choice": [f"I see.\n{CALL}\n{CALL}"]}}
    (text, first, second), reason = message_of(url, streams, **forced)
    assert text == {"type": "text", "text": "I see."} and reason == "tool_use"
    assert (first["name"], first["input"]) == (second["name"], second["input"]) == ("now", {"a": 2})
    assert first["id"].startswith("toolu_") and first["id"] != second["id"]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    content, _ = message_of(url, streams, tool_choice=choice, **forced)
    assert [block["type"] for block in content] == ["text", "tool_use"]


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_messages_follow_a_schema(url, name):
    form = {"type": "json_schema", "schema": {"enum": ["red"]}}
    given = {name: {"format": form} if name == "output_config" else form}
    content, reason = message_of(url, False, tools=[], **given)
    assert content == [{"type": "text", "text": '"red"'}] and reason == "end_turn"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "now"}])
def test_a_required_tool_use_cannot_fail(url, choice, streams):
    [block], reason = message_of(url, streams, tool_choice=choice, seed=1)
    assert block["type"] == "tool_use" and block["input"]["a"] in (1, 2) and reason == "tool_use"
    assert block["name"] == "now" or choice["type"] == "any"


def test_results_of_tools_become_messages(url):
    text = {"type": "text", "text": "so"}
    use = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": "y"}, text, use]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "3"}]},
                {"type": "text", "text": "and"},
            ],
        },
    ]
    prompt = "<tools>add,now,<tool_call><system>s<user>hello<assistant>soadd1<tool>3<user>and<assistant>"
    body = {"messages": turns, "tools": OWN, "system": "s", "max_tokens": 1}
    usage = httpx.post(url + "/v1/messages", json=body).json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt)
    chat = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    right = httpx.post(url + "/v1/completions", json=chat).json()["choices"][0]["text"]
    content = httpx.post(url + "/v1/messages", json={**body, "max_tokens": 8, "temperature": 0}).json()["content"]
    assert content == [{"type": "text", "text": right}]
    only_result = [*turns[:2], {"role": "user", "content": turns[2]["content"][:1]}]
    assert httpx.post(url + "/v1/messages", json={**body, "messages": only_result}).status_code == 200


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        ({"tool_choice": {"type": "often"}}, ("tool_choice", "often", "any")),
        ({"tool_choice": "any"}, ("tool_choice", "expected a type")),
        ({"output_config": {"format": {"type": "xml"}}}, ("output_config", "xml", "json_schema")),
        ({"output_format": {"type": "json_schema"}}, ("has no schema",)),
        ({"tool_choice": {"type": "tool", "name": "other"}}, ("other", "among tools")),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, ("bash_20250124", "input_schema")),
        ({"tools": [3]}, ("tools holds 3",)),
        ({"tools": {}}, ("tools",)),
        ({"tools": [{"input_schema": {}}]}, ("tools holds", "name")),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, ("tool_calls", "functions")),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, ("image", "only text")),
    ],
)
def test_messages_that_cannot_be_honoured(url, more, facts):
    message = message_of(url, False, 400, **more)
    assert all(fact in message for fact in facts), message


# --- the tokenizer's response_template ----------------------------------------------------------------------------


def write_model_with_template(folder, template):
    """Write the tools model with a response template."""
    model = write_tools_model(folder)
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "response_template": template}))
    return ServedModel.load(str(model), name="tiny", weights="float32")


@pytest.fixture(scope="module")
def template_url(tmp_path_factory):
    with serving(make_app(write_model_with_template(tmp_path_factory.mktemp("m") / "m", RESPONSE_TEMPLATE))) as address:
        yield address


REPLY = "[think]hm [/think]  I see.\n<call now>a=2</call><call add>a = 1</call>"


@pytest.mark.parametrize("streams", [False, True])
def test_replies_follow_the_tokenizers_response_template(template_url, streams):
    body: Any = {
        "messages": MESSAGES, "tools": TOOLS, "structured_outputs": {"choice": [REPLY]}, "max_tokens": 200,
        "stream": streams,
    }  # fmt: skip
    answer = httpx.post(f"{template_url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    if streams:
        lines = [line for line in answer.text.split("\n\n") if line.startswith("data: {")]
        parts = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        deltas, reason = [part["delta"] for part in parts], parts[-1]["finish_reason"]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        texts = {name: "".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning_content")}
    else:
        [choice] = answer.json()["choices"]
        texts, calls, reason = choice["message"], choice["message"]["tool_calls"], choice["finish_reason"]
    assert (texts["reasoning_content"], texts["content"], reason) == ("hm", "I see.", "tool_calls")
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == [
        ("now", {"a": 2}), ("add", {"a": 1})]  # fmt: skip


def test_a_prompt_may_open_a_field_of_the_response_template(template_url):
    body: Any = {
        "messages": [*MESSAGES, {"role": "assistant", "content": "[think]Well, "}], "max_tokens": 200,
        "add_generation_prompt": False, "continue_final_message": True,
        "structured_outputs": {"choice": ["so. [/think]Yes"]},
    }  # fmt: skip
    answer = httpx.post(f"{template_url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    assert (message["reasoning_content"].strip(), message["content"]) == ("so.", "Yes")


def test_a_response_template_that_is_not_supported_is_replaced_by_the_marks(tmp_path):
    fields = {**RESPONSE_TEMPLATE["fields"], "citations": {"open": "[1]"}}
    with pytest.warns(UserWarning, match="'citations'") as warned:
        model = write_model_with_template(tmp_path / "m", {**RESPONSE_TEMPLATE, "fields": fields})
    assert len(warned) == 1 and model.replies.can_call
    with serving(make_app(model)) as url:
        body = {"messages": MESSAGES, "tools": TOOLS, "structured_outputs": {"choice": [CALL]}, "max_tokens": 200}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "now"
