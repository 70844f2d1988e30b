"""OpenAI's responses, through openai-python: whole, streamed, parsed, with tools."""

import json
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from tests.serve.conftest import serving
from tests.serve.models import CALL, TOOLS_TEMPLATE
from tests.serve.models import TOOLS as CHAT_TOOLS

from whet.engine.session import Call
from whet.errors import WhetValueError
from whet.serve import ServedModel, make_app
from whet.serve import app as app_module

TOOLS: Any = [{"type": "function", "description": "d", "strict": True, **tool["function"]} for tool in CHAT_TOOLS]
TEMPLATE = TOOLS_TEMPLATE + "{# <think></think> #}"


class Colour(pydantic.BaseModel):
    name: Literal["red", "green"]


@pytest.fixture(scope="module")
def model(tiny_model):
    model = ServedModel.load(str(tiny_model), name="tiny", weights="float32")
    model.tokenizer.chat_template = TEMPLATE
    return model


@pytest.fixture(scope="module")
def client(model):
    with serving(make_app(model)) as url, openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def forced(*texts):
    return {"structured_outputs": {"choice": [*texts]}, "seed": 1}


def prompt_of(client, **body):
    """The prompt of a response, from its number of tokens: one per byte."""
    given = {"max_output_tokens": 1, "model": "tiny", **body}
    return client.responses.create(**given).usage.input_tokens


def test_a_text_is_answered_as_in_a_chat(client):
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}], seed=3,
        max_tokens=20, temperature=0.7,
    )  # fmt: skip
    answer = client.responses.create(
        model="tiny", instructions="s", input="hello", max_output_tokens=20, temperature=0.7, extra_body={"seed": 3},
        metadata={"a": "b"}, user="me", store=False, truncation="disabled", include=["reasoning.encrypted_content"],
    )  # fmt: skip
    [choice] = chat.choices
    assert answer.output_text == choice.message.content
    assert answer.status == {"stop": "completed", "length": "incomplete"}[choice.finish_reason]
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == chat.usage.completion_tokens
    assert answer.usage.total_tokens == chat.usage.total_tokens
    assert answer.metadata == {"a": "b"} and answer.instructions == "s" and answer.temperature == 0.7
    assert answer.incomplete_details is None or answer.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("how", ["create", "stream", "iterate"])
def test_thinking_text_and_calls_are_items(client, how):
    given: Any = {"model": "tiny", "input": "hello", "tools": TOOLS}
    given["extra_body"] = forced(f"<think>hm</think>I see.\n{CALL}\n{CALL}")
    if how == "create":
        answer = client.responses.create(**given)
    elif how == "stream":
        with client.responses.stream(**given) as stream:
            kinds = [event.type for event in stream]
            answer = stream.get_final_response()
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    else:
        events = list(client.responses.create(**given, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        answer = events[-1].response
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "I see."
        assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "hm"
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert done == answer.output
    thought, message, *calls = answer.output
    assert thought.type == "reasoning" and thought.content[0].text == "hm"
    assert message.type == "message" and answer.output_text == "I see."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("now", {"a": 2})] * 2
    assert len({call.call_id for call in calls}) == 2 and answer.status == "completed"
    assert answer.usage.output_tokens_details.reasoning_tokens == 2


def test_answers_are_parsed(client):
    answer = client.responses.parse(model="tiny", input="hello", text_format=Colour, extra_body={"seed": 1})
    assert answer.output_parsed.name in ("red", "green")
    with client.responses.stream(model="tiny", input="hello", text_format=Colour) as stream:
        stream.until_done()
        assert stream.get_final_response().output_parsed.name in ("red", "green")
    answer = client.responses.create(
        model="tiny", input="hello", text={"format": {"type": "json_object"}}, max_output_tokens=5
    )  # fmt: skip
    assert answer.output_text.startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}])
def test_a_required_call_cannot_fail(client, choice):
    answer = client.responses.create(model="tiny", input="hello", tools=TOOLS, tool_choice=choice)
    [call] = answer.output
    assert call.type == "function_call" and json.loads(call.arguments)["a"] in (1, 2)
    assert call.name == "add" or choice == "required"
    answer = client.responses.create(
        model="tiny", input="hello", tools=TOOLS, parallel_tool_calls=False, extra_body=forced(CALL * 2)
    )  # fmt: skip
    assert len(answer.output) == 1


def test_items_of_earlier_turns_become_the_prompt(client, model):
    first = client.responses.create(
        model="tiny", input="hello", tools=TOOLS, extra_body=forced(f"<think>x</think>y{CALL}")
    )
    items: Any = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}]},
        *first.output,
        {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "3"},
    ]
    text = "<tools>add,now,<tool_call><system>s\n\nd<user>hello<assistant>ynow2<tool>3<assistant>"
    assert prompt_of(client, input=items, instructions="s", tools=TOOLS) == len(model.tokenizer.encode(text))
    ids = model.tokenizer.encode(text)
    answer = client.responses.create(
        model="tiny", input=items, instructions="s", tools=TOOLS, max_output_tokens=9, extra_body={"seed": 2}
    )  # fmt: skip
    settings = model.sampling({"seed": 2, "max_new_tokens": 9, "stop_token_ids": model.stop_ids})
    [[right]] = model.engine.generate([ids], 1, settings)
    assert answer.output_text == model.tokenizer.decode(right.token_ids, skip_special_tokens=True)


def test_an_empty_answer_is_an_empty_message(client):
    bias = {str(i): -100 for i in range(258) if i != 1}
    answer = client.responses.create(model="tiny", input="hello", extra_body={"logit_bias": bias})
    assert answer.output_text == "" and answer.output[0].content[0].text == "" and answer.status == "completed"


def test_errors_in_a_stream_are_events(client, monkeypatch):
    step, steps = Call.step, []

    def step_and_fail(call):
        steps.append(0)
        if len(steps) > 3:
            raise WhetValueError("Engine: broken.")
        step(call)

    monkeypatch.setattr(Call, "step", step_and_fail)
    monkeypatch.setattr(app_module, "_STATUS_S", 0)
    *events, last = client.responses.create(model="tiny", input="hello", stream=True, max_output_tokens=50)
    assert last.type == "error" and "broken" in last.message and last.sequence_number == len(events)


@pytest.mark.parametrize(
    ("body", "facts"),
    [
        ({"previous_response_id": "resp_1"}, ("previous_response_id", "all items")),
        ({"conversation": "c"}, ("conversation",)),
        ({"store": True}, ("store", "Omit it")),
        ({"background": True}, ("background",)),
        ({"prompt": {"id": "p"}}, ("prompt", "instructions")),
        ({"truncation": "auto"}, ("truncation", "never cuts")),
        ({"reasoning": {"effort": "low"}}, ("reasoning.effort", "chat_template_kwargs")),
        ({"include": ["message.output_text.logprobs"]}, ("include", "/v1/chat/completions")),
        ({"tools": [{"type": "web_search"}]}, ("web_search", "only functions")),
        ({"tools": [3]}, ("tools holds",)),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, ("tool_choice", "x")),
        ({"input": []}, ("input is []",)),
        ({"input": [3]}, ("input[0]", "3", "function_call_output")),
        ({"input": [{"type": "item_reference", "id": "x"}]}, ("item_reference",)),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, ("input_image", "only text")),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "add", "arguments": "{"}]}, ("not JSON",)),
        ({"instructions": ["a"]}, ("instructions",)),
        ({"max_output_tokens": 0}, ("max_tokens is 0",)),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, ("response_format", "has no schema")),
        ({"text": {"format": {"type": "xml"}}}, ("response_format", "xml")),
    ],
)  # fmt: skip
def test_responses_that_cannot_be_honoured(client, body, facts):
    response = httpx.post(str(client.base_url) + "responses", json={"input": "hello", **body})
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert all(fact in message for fact in facts), message
