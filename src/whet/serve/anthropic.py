"""Anthropic's messages: a translation to and from ``Chat``."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from whet.serve.choices import Choice
from whet.serve.endpoints import Body, Chat
from whet.serve.errors import ApiError
from whet.serve.schema import check_object
from whet.serve.service import Service

_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "seed")
_BLOCKS = {"content": ("text", "text"), "reasoning_content": ("thinking", "thinking")}
"""Field of a message -> type of its content block, and of its text."""


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
        fields: dict[str, str] = {}
        async with aclosing(self.parts(streams=False)) as parts:
            async for part in parts:
                for name, text in self.split(part.choice, part.text).items():
                    fields[name] = fields.get(name, "") + text
        [prompt] = self.prompts
        kinds = [(_BLOCKS[name], fields[name]) for name in ("reasoning_content", "content") if fields.get(name)]
        content = [{"type": kind, field: text} for (kind, field), text in kinds]
        return self._message(content, _reason(prompt.choices[0]))

    async def chunks(self) -> AsyncGenerator[Body]:
        yield {"type": "message_start", "message": self._message([], None)}
        index, current = -1, ""
        async with aclosing(self.parts(streams=True)) as parts:
            async for part in parts:
                for name, text in self.split(part.choice, part.text).items():
                    kind, field = _BLOCKS[name]
                    if kind != current:
                        if current:
                            yield {"type": "content_block_stop", "index": index}
                        index, current = index + 1, kind
                        block = {"type": kind, field: ""}
                        yield {"type": "content_block_start", "index": index, "content_block": block}
                    delta = {"type": f"{kind}_delta", field: text}
                    yield {"type": "content_block_delta", "index": index, "delta": delta}
        if current:
            yield {"type": "content_block_stop", "index": index}
        [prompt] = self.prompts
        delta = {"stop_reason": _reason(prompt.choices[0]), "stop_sequence": None}
        yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": prompt.n_completion}}
        yield {"type": "message_stop"}

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


def _translate(body: Mapping[str, Any]) -> Body:
    """Return the body of a chat completion."""
    if body.get("max_tokens") is None:
        raise ApiError(400, "max_tokens is missing, expected at least 1.", "max_tokens")
    if body.get("tools"):
        raise ApiError(400, "tools is not supported by this endpoint. Use /v1/chat/completions.", "tools")
    found = {name: body[name] for name in _SAME if name in body}
    if "stop_sequences" in body:
        found["stop"] = body["stop_sequences"]
    given = body.get("messages")
    messages = [_without_thinking(message) for message in given] if isinstance(given, list) else []
    system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    return {**found, "messages": [*system, *messages]}


def _without_thinking(message: Any) -> Any:
    """Return a message without its blocks of thinking, which belong to earlier turns."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    kept = [each for each in message["content"] if not (isinstance(each, Mapping) and each.get("type") == "thinking")]
    return {**message, "content": kept}


def _reason(choice: Choice) -> str:
    return {"stop": "end_turn", "length": "max_tokens", "abort": "pause_turn"}[choice.finish]
