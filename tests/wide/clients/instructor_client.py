"""instructor: objects by a forced tool and by a JSON schema, whole and streamed.

python instructor_client.py URL FACTS
"""

import json
import sys
from enum import IntEnum
from typing import Literal

import instructor
import openai
import pydantic

URL, FACTS = sys.argv[1], json.loads(sys.argv[2])


class Value(IntEnum):
    one = 1
    two = 2


class Answer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    value: Value


class Part(pydantic.BaseModel):  # instructor reads no enums from parts
    model_config = pydantic.ConfigDict(extra="forbid")
    value: Literal[1, 2]


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0), mode=mode)
    given = {"model": "tiny", "messages": FACTS["messages"], "max_retries": 0}
    assert client.chat.completions.create(**given, response_model=Answer).value in Value, mode
    *_, last = client.chat.completions.create_partial(**given, response_model=Part)
    assert last.value in (1, 2), mode
