"""litellm: the same chat through its providers of OpenAI, vLLM and Ollama, and its completions.

python litellm_client.py URL FACTS
"""

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no request to its web site
import litellm

URL, FACTS = sys.argv[1], json.loads(sys.argv[2])
GIVEN = {"messages": FACTS["messages"], "seed": FACTS["seed"], "max_tokens": FACTS["max_tokens"], "api_key": "none"}
SCHEMA = {"type": "object", "properties": {"value": {"enum": [1, 2]}}, "required": ["value"]}
SCHEMA["additionalProperties"] = False
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
TOOLS = [{"type": "function", "function": {"name": "answer", "parameters": SCHEMA}}]

for provider, base in (("openai", URL + "/v1"), ("hosted_vllm", URL + "/v1"), ("ollama_chat", URL)):
    given = {**GIVEN, "model": f"{provider}/tiny", "api_base": base}
    answer = litellm.completion(**given)
    assert answer.choices[0].message.content == FACTS["text"], (provider, answer)
    assert answer.choices[0].finish_reason == FACTS["finish"] and answer.usage.completion_tokens == FACTS["n_tokens"]
    chunks = list(litellm.completion(**given, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == FACTS["text"], provider
    given |= {"max_tokens": 200}
    answer = litellm.completion(**given, response_format=FORM)
    assert json.loads(answer.choices[0].message.content)["value"] in (1, 2), (provider, answer)
    answer = asyncio.run(litellm.acompletion(**given))
    assert answer.choices[0].message.role == "assistant"
    try:
        litellm.completion(**{**given, "model": f"{provider}/other"})
    except litellm.exceptions.APIConnectionError:
        assert provider == "ollama_chat"
    except litellm.NotFoundError:
        pass
    else:
        raise AssertionError(f"{provider}: an unknown model is accepted")

for provider in ("openai", "hosted_vllm"):
    given = {**GIVEN, "model": f"{provider}/tiny", "api_base": URL + "/v1", "max_tokens": 200, "seed": 2}
    answer = litellm.completion(**given, tools=TOOLS, tool_choice="required")
    [call] = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["value"] in (1, 2)
    try:
        litellm.completion(**{**given, "max_tokens": 10**6})
    except litellm.ContextWindowExceededError:
        pass
    else:
        raise AssertionError(f"{provider}: too many tokens are accepted")

answer = litellm.text_completion(
    model="text-completion-openai/tiny", prompt=FACTS["prompt"], api_base=URL + "/v1", api_key="none", max_tokens=3
)
assert answer.choices[0].text is not None
