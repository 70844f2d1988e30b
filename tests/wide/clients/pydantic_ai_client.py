"""pydantic-ai: typed outputs by a required tool and by a JSON schema, and text, whole and streamed.

python pydantic_ai_client.py URL FACTS
"""

import asyncio
import json
import sys
from typing import Literal

import pydantic
from pydantic_ai import Agent, ModelSettings, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, FACTS = sys.argv[1], json.loads(sys.argv[2])
[message] = FACTS["messages"]


class Answer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    value: Literal[1, 2]


async def main() -> None:
    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=URL + "/v1", api_key="none"))
    for output in (Answer, NativeOutput(Answer)):
        agent = Agent(model, output_type=output)
        assert (await agent.run(message["content"])).output.value in (1, 2)
        async with agent.run_stream(message["content"]) as stream:
            assert (await stream.get_output()).value in (1, 2)
    agent = Agent(model, model_settings=ModelSettings(seed=FACTS["seed"], max_tokens=FACTS["max_tokens"]))
    found = await agent.run(message["content"])
    assert found.output == FACTS["text"], found
    assert found.usage().output_tokens == FACTS["n_tokens"]


asyncio.run(main())
