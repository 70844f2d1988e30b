"""Anthropic's messages: a translation to and from ``Chat``."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from whet.serve.endpoints import Body, Chat
from whet.serve.errors import ApiError
from whet.serve.schema import EXTRAS, check_object
from whet.serve.service import Service

_SAME = ("model", "max_tokens", "temperature", "top_p", "stream", *EXTRAS)


class Messages(Chat):
    """``/v1/messages``."""

    id_prefix = "msg"
    ending = ""

    def __init__(self, service: Service, body: Any) -> None:
        super().__init__(service, _translate(check_object(body)))

    def event(self, chunk: Body) -> str:
        return f"event: {chunk['type']}\ndata: {json.dumps(chunk, ensure_ascii=False)}\n\n"

    @staticmethod
    def failure(error: ApiError) -> Body:
        found = error.body()["error"]
        return {"type": "error", "error": {"type": found["type"], "message": found["message"]}}

    async def respond(self) -> Body:
        content: list[Body] = []
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                if chunk["type"] == "content_block_start":
                    content.append({**chunk["content_block"]})
                elif chunk["type"] == "content_block_delta":
                    _append(content[-1], chunk["delta"])
        return self._message(content, self._reason())

    async def chunks(self) -> AsyncGenerator[Body]:
        yield {"type": "message_start", "message": self._message([], None)}
        index, current = -1, ""
        async with aclosing(self.parts(self.streams)) as parts:
            async for part in parts:
                for block, delta in self._blocks(self.split(part.choice, part.text)):
                    if block["type"] != current or current == "tool_use":
                        if current:
                            yield {"type": "content_block_stop", "index": index}
                        index, current = index + 1, block["type"]
                        yield {"type": "content_block_start", "index": index, "content_block": block}
                    yield {"type": "content_block_delta", "index": index, "delta": delta}
        if current:
            yield {"type": "content_block_stop", "index": index}
        [prompt] = self.prompts
        delta = {"stop_reason": self._reason(), "stop_sequence": None}
        yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": prompt.n_completion}}
        yield {"type": "message_stop"}

    @staticmethod
    def _blocks(fields: Body) -> Iterator[tuple[Body, Body]]:
        """Yield the content blocks of a message's new fields, empty, each with a delta."""
        if text := fields.get("reasoning_content"):
            block = {"type": "thinking", "thinking": "", "signature": ""}
            yield block, {"type": "thinking_delta", "thinking": text}
        if text := fields.get("content"):
            yield {"type": "text", "text": ""}, {"type": "text_delta", "text": text}
        for call in fields.get("tool_calls", ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            block = {"type": "tool_use", "id": call["id"].replace("call_", "toolu_"), "name": name, "input": {}}
            yield block, {"type": "input_json_delta", "partial_json": arguments}

    def _reason(self) -> str:
        reason = self.reason(self.prompts[0].choices[0])
        names = {"stop": "end_turn", "length": "max_tokens", "abort": "pause_turn", "tool_calls": "tool_use"}
        return names[reason]

    def _message(self, content: list[Body], reason: str | None) -> Body:
        [prompt] = self.prompts
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model or self._served.name,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": {
                "input_tokens": len(prompt.token_ids) - prompt.n_cached,
                "cache_read_input_tokens": prompt.n_cached,
                "output_tokens": prompt.n_completion,
            },
        }


def _append(block: Body, delta: Body) -> None:
    """Append a delta to a content block."""
    if delta["type"] == "input_json_delta":
        block["input"] = json.loads(delta["partial_json"])  # complete: calls are not split
    else:
        name = delta["type"].removesuffix("_delta")
        block[name] += delta[name]


def _translate(body: Mapping[str, Any]) -> Body:
    """Return the body of a chat completion."""
    if body.get("max_tokens") is None:
        raise ApiError(400, "max_tokens is missing, expected at least 1.", "max_tokens")
    found = {name: body[name] for name in _SAME if name in body}
    if "stop_sequences" in body:
        found["stop"] = body["stop_sequences"]
    if (tools := body.get("tools")) is not None:
        found["tools"] = [_as_tool(tool) for tool in tools] if isinstance(tools, list) else tools
    if (choice := body.get("tool_choice")) is not None:
        found |= _as_choice(choice)
    config = body.get("output_config")
    form = config.get("format") if isinstance(config, Mapping) else body.get("output_format")
    if form is not None:
        is_schema = isinstance(form, Mapping) and form.get("type") == "json_schema"
        if not is_schema:
            raise ApiError(400, f"output_config.format is {form!r:.60}, expected json_schema.", "output_config")
        found["response_format"] = {"type": "json_schema", "json_schema": form}
    given = body.get("messages")
    turns = [each for message in given for each in _as_messages(message)] if isinstance(given, list) else []
    system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    return {**found, "messages": [*system, *turns]}


def _as_tool(tool: Any) -> Any:
    if not isinstance(tool, Mapping):
        return tool
    if tool.get("type") not in (None, "custom"):
        got = f"tools holds the type {tool.get('type')!r:.40}"
        raise ApiError(400, f"{got}, which runs at Anthropic. Send tools with an input_schema.", "tools")
    function = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}}


def _as_choice(choice: Any) -> Body:
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    found: Body = {"parallel_tool_calls": False} if kind and choice.get("disable_parallel_tool_use") else {}
    if kind == "tool":
        return {**found, "tool_choice": {"type": "function", "function": {"name": choice.get("name")}}}
    if str(kind) not in _CHOICES:
        got = f"tool_choice is {choice!r:.60}"
        raise ApiError(400, f"{got}, expected a type of auto, any, tool or none.", "tool_choice")
    return {**found, "tool_choice": _CHOICES[str(kind)]}


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _as_messages(message: Any) -> list[Any]:
    """Return the messages of a chat for a message: results of tools are messages, and calls are not content.

    Blocks of thinking are dropped, since they belong to earlier turns.
    """
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return [message]
    results, calls, kept = [], [], []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")})
        elif kind not in ("thinking", "redacted_thinking"):
            kept.append(block)
    own = {**message, "content": kept, **({"tool_calls": calls} if calls else {})}
    return [*results, own] if kept or calls or not results else results
