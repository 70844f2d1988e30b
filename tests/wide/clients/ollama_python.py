"""ollama-python: chats, whole, streamed and asynchronous; schemas, tools, models and errors.

python ollama_python.py URL FACTS
"""

import asyncio
import json
import sys

import ollama

URL, FACTS = sys.argv[1], json.loads(sys.argv[2])
OPTIONS = {"seed": FACTS["seed"], "num_predict": FACTS["max_tokens"]}
GIVEN = {"model": "tiny", "messages": FACTS["messages"], "options": OPTIONS}
SCHEMA = {"type": "object", "properties": {"value": {"enum": [1, 2]}}, "required": ["value"]}
SCHEMA["additionalProperties"] = False


def add(a: int) -> int:
    """Add one.

    Args:
        a: a number.
    """
    return a + 1


client = ollama.Client(host=URL)
answer = client.chat(**GIVEN)
assert answer.message.content == FACTS["text"] and answer.done and answer.done_reason == FACTS["finish"]
assert answer.eval_count == FACTS["n_tokens"] and answer.prompt_eval_count > 0
*chunks, last = client.chat(**GIVEN, stream=True)
assert "".join(chunk.message.content for chunk in [*chunks, last]) == FACTS["text"] and last.done
content = client.chat("tiny", FACTS["messages"], format=SCHEMA).message.content
assert json.loads(content)["value"] in (1, 2)
call = {"function": {"name": "add", "arguments": {"a": 1}}}
turns = [
    {"role": "assistant", "content": "", "tool_calls": [call]},
    {"role": "tool", "content": "2", "tool_name": "add"},
]
answer = client.chat("tiny", [*FACTS["messages"], *turns], tools=[add], options={"num_predict": 3})
assert answer.message.role == "assistant" and answer.eval_count <= 3
[model] = client.list().models
assert model.model == "tiny:latest" and model.size > 0 and model.modified_at
shown = client.show("tiny")
assert "completion" in shown.capabilities and "tools" in shown.capabilities and shown.template
try:
    client.chat("other", FACTS["messages"])
except ollama.ResponseError as error:
    assert error.status_code == 404 and "other" in error.error
else:
    raise AssertionError("an unknown model is accepted")


async def check_async() -> None:
    answer = await ollama.AsyncClient(host=URL).chat(**GIVEN)
    assert answer.message.content == FACTS["text"]


asyncio.run(check_async())
