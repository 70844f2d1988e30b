"""openai-python: chats and completions, whole, streamed and asynchronous; schemas, tools and errors.

python openai_python.py URL FACTS
"""

import asyncio
import json
import sys
from enum import IntEnum

import openai
import pydantic

URL, FACTS = sys.argv[1], json.loads(sys.argv[2])
GIVEN = {"model": "tiny", "messages": FACTS["messages"], "seed": FACTS["seed"], "max_tokens": FACTS["max_tokens"]}


class Value(IntEnum):
    one = 1
    two = 2


class Answer(pydantic.BaseModel):
    value: Value


TOOL = openai.pydantic_function_tool(Answer, name="answer")


def check_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GIVEN)
    assert answer.choices[0].message.content == FACTS["text"] and answer.choices[0].finish_reason == FACTS["finish"]
    assert answer.usage.completion_tokens == FACTS["n_tokens"] and answer.system_fingerprint.startswith("whet-")
    plain = client.chat.completions.create(model="tiny", messages=FACTS["messages"])  # to the end of the context
    assert plain.choices[0].finish_reason in ("stop", "length")

    *chunks, last = client.chat.completions.create(**GIVEN, stream=True, stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == FACTS["finish"]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == FACTS["text"]
    assert last.choices == [] and last.usage.completion_tokens == FACTS["n_tokens"]

    with client.chat.completions.stream(**GIVEN, logprobs=True, top_logprobs=2) as stream:
        kinds = {event.type for event in stream}
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds, kinds
    assert stream.current_completion_snapshot.choices[0].message.content == FACTS["text"]


def check_formats(client: openai.OpenAI) -> None:
    given = {"model": "tiny", "messages": FACTS["messages"]}
    parsed = client.chat.completions.parse(**given, response_format=Answer).choices[0].message.parsed
    assert parsed.value in Value
    with client.chat.completions.stream(**given, response_format=Answer) as stream:
        assert stream.get_final_completion().choices[0].message.parsed.value in Value

    forced = {"type": "function", "function": {"name": "answer"}}
    for choice in ("required", forced):
        message = client.chat.completions.parse(**given, tools=[TOOL], tool_choice=choice).choices[0].message
        assert message.tool_calls[0].function.parsed_arguments.value in Value
        with client.chat.completions.stream(**given, tools=[TOOL], tool_choice=choice) as stream:
            events = list(stream)
        [done] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        assert done.name == "answer" and done.parsed_arguments.value in Value
    reply = message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "fine"}
    given["messages"] = [*FACTS["messages"], reply, result]
    assert client.chat.completions.create(**given, tools=[TOOL], max_tokens=4).usage.completion_tokens <= 4


def check_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=FACTS["prompt"], echo=True, logprobs=1, max_tokens=1)
    [choice] = answer.choices
    found = choice.logprobs.token_logprobs
    assert found[0] is None and len(found) == len(FACTS["logprobs"]) + 2
    assert all(abs(a - b) < 1e-6 for a, b in zip(found[1:-1], FACTS["logprobs"], strict=True))
    assert choice.text.startswith(FACTS["prompt"])
    chunks = list(client.completions.create(model="tiny", prompt=FACTS["prompt"], stream=True, max_tokens=5))
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def check_errors(client: openai.OpenAI) -> None:
    assert [card.id for card in client.models.list()] == ["tiny"]
    for change, kind, code in (
        ({"model": "other"}, openai.NotFoundError, "model_not_found"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "context_length_exceeded"),
        ({"temperature": -1}, openai.BadRequestError, None),
    ):
        for streams in (False, True):
            try:
                client.chat.completions.create(**{**GIVEN, **change, "stream": streams})
            except kind as error:
                assert error.code == code and error.message
            else:
                raise AssertionError(f"{change} is accepted")


async def check_async() -> None:
    async with openai.AsyncOpenAI(base_url=URL + "/v1", api_key="none") as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**GIVEN) for _ in range(8)))
        assert all(answer.choices[0].message.content == FACTS["text"] for answer in answers)
        stream = await client.chat.completions.create(**GIVEN, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == FACTS["text"]
        async with client.chat.completions.stream(**GIVEN) as stream:
            text = "".join([event.delta async for event in stream if event.type == "content.delta"])
        assert text == FACTS["text"]


with openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0) as client:
    for check in (check_chats, check_formats, check_completions, check_errors):
        check(client)
asyncio.run(check_async())
