"""OpenAI's responses, without a store: a translation to and from ``Chat``."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from whet.serve.choices import Choice
from whet.serve.endpoints import Body, Chat
from whet.serve.errors import ApiError
from whet.serve.schema import EXTRAS, ResponseRequest, check_object, parse
from whet.serve.service import Service

_REPEATED = ("tools", "tool_choice", "text", "metadata")
"""Fields of any content that the response repeats."""
_SAME = ("model", "stream", "temperature", "top_p", "parallel_tool_calls", "stop", *EXTRAS)
_REFUSED = {
    "previous_response_id": "Responses are not stored. Send all items as input.",
    "conversation": "Conversations are not stored. Send all items as input.",
    "store": "Responses are not stored. Omit it, or send false.",
    "background": "Responses are not stored. Omit it, and stream.",
    "prompt": "Templates of prompts are not stored. Send instructions and input.",
    "top_logprobs": "Use /v1/chat/completions.",
    "max_tool_calls": "It limits tools that a server runs, and this one runs none.",
}
"""Fields that are refused unless they ask for nothing, and the fix."""
_LOGPROBS = "message.output_text.logprobs"


class Responses(Chat):
    """``/v1/responses``."""

    id_prefix = "resp"
    ending = ""

    def __init__(self, service: Service, body: Any) -> None:
        body = check_object(body)
        self._given = given = parse(ResponseRequest, body)
        for name in _REPEATED:
            try:
                json.dumps(getattr(given, name), allow_nan=False)
            except ValueError:
                raise ApiError(400, f"{name} holds a number that is not finite.", name) from None
        super().__init__(service, {**{name: body[name] for name in _SAME if name in body}, **_translate(body, given)})
        self._n_events = 0
        self._output: list[Body] = []

    def event(self, chunk: Body) -> str:
        if "error" in chunk and "type" not in chunk:
            error = chunk["error"]
            chunk = self._event("error", code=error["code"], message=error["message"], param=error["param"])
        return f"event: {chunk['type']}\ndata: {json.dumps(chunk, ensure_ascii=False)}\n\n"

    def _event(self, kind: str, **fields: Any) -> Body:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **fields}

    async def respond(self) -> Body:
        events = [event async for event in self.chunks()]
        return events[-1]["response"]

    async def chunks(self) -> AsyncGenerator[Body]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        current: _TextItem | None = None
        async with aclosing(self.parts(self.streams)) as parts:
            async for part in parts:
                fields = self.split(part.choice, part.text)
                for name in ("reasoning_content", "content"):
                    if text := fields.get(name):
                        if current is None or current.name != name:
                            for event in current.end() if current else ():
                                yield event
                            current = _TextItem(self, name)
                            for event in current.begin():
                                yield event
                        yield current.add(text)
                for call in fields.get("tool_calls", ()):
                    for event in current.end() if current else ():
                        yield event
                    current = None
                    for event in self._call(call):
                        yield event
        if not self._output:
            current = _TextItem(self, "content")
            for event in current.begin():
                yield event
        for event in current.end() if current else ():
            yield event
        status = _STATUS[self._choice.finish]
        kind = status if status in ("completed", "incomplete") else "failed"
        yield self._event(f"response.{kind}", response=self._response(status))

    @property
    def _choice(self) -> Choice:
        return self.prompts[0].choices[0]

    def _add_item(self, item: Body) -> Body:
        """Return the event of a new item; ``_replace_item`` follows."""
        self._output.append(item)
        return self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _replace_item(self, item: Body) -> Body:
        self._output[-1] = item
        return self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _call(self, call: Body) -> list[Body]:
        """Return the events of a call of a tool."""
        function = call["function"]
        item = {
            "type": "function_call",
            "id": f"fc_{secrets.token_hex(12)}",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": "",
            "status": "in_progress",
        }
        events = [self._add_item(item)]
        where = {"output_index": len(self._output) - 1, "item_id": item["id"]}
        arguments = function["arguments"]
        events.append(self._event("response.function_call_arguments.delta", **where, delta=arguments))
        done = {**where, "arguments": arguments, "name": function["name"]}
        events.append(self._event("response.function_call_arguments.done", **done))
        events.append(self._replace_item({**item, "arguments": arguments, "status": "completed"}))
        return events

    def _response(self, status: str) -> Body:
        given, request = self._given, self.request
        is_done = status != "in_progress"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": given.instructions or None,
            "model": self.model or self._served.name,
            "output": [*self._output],
            "parallel_tool_calls": request.parallel_tool_calls,
            "temperature": self._settings.temperature,
            "top_p": self._settings.top_p,
            "max_output_tokens": given.max_output_tokens,
            "tools": given.tools,
            "tool_choice": given.tool_choice,
            "text": given.text or {"format": {"type": "text"}},
            "metadata": given.metadata,
            "user": given.user or None,
            "reasoning": {"effort": None, "summary": None},
            "truncation": "disabled",
            "previous_response_id": None,
            "store": False,
            "background": False,
            "top_logprobs": 0,
            "usage": self._token_counts() if is_done else None,
        }

    @property
    def _settings(self) -> Any:
        return self.sampling[0]

    def _token_counts(self) -> Body:
        [prompt] = self.prompts
        thinking = "".join(
            part["text"] for item in self._output if item["type"] == "reasoning" for part in item["content"]
        )
        n_thinking = len(self._served.tokenizer.encode(thinking, add_special_tokens=False)) if thinking else 0
        return {
            "input_tokens": len(prompt.token_ids),
            "input_tokens_details": {"cached_tokens": prompt.n_cached},
            "output_tokens": prompt.n_completion,
            "output_tokens_details": {"reasoning_tokens": n_thinking},
            "total_tokens": len(prompt.token_ids) + prompt.n_completion,
        }


_STATUS = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}


class _TextItem:
    """A message or a reasoning whose text arrives in parts.

    Attributes:
        name: "content" or "reasoning_content".
    """

    def __init__(self, response: Responses, name: str) -> None:
        self._response, self.name, self._text = response, name, ""
        self._is_message = name == "content"
        self._kind = "output_text" if self._is_message else "reasoning_text"
        self._id = f"{'msg' if self._is_message else 'rs'}_{secrets.token_hex(12)}"
        self._where: Body = {}

    def begin(self) -> list[Body]:
        """Return the events before the text."""
        response = self._response
        added = response._add_item(self._item("in_progress", []))
        self._where = {"item_id": self._id, "output_index": len(response._output) - 1, "content_index": 0}
        return [added, response._event("response.content_part.added", **self._where, part=self._part())]

    def add(self, text: str) -> Body:
        """Return the event of new text."""
        self._text += text
        return self._response._event(f"response.{self._kind}.delta", **self._where, delta=text, **self._logprobs())

    def end(self) -> list[Body]:
        """Return the events after the text."""
        response, part = self._response, self._part()
        return [
            response._event(f"response.{self._kind}.done", **self._where, text=self._text, **self._logprobs()),
            response._event("response.content_part.done", **self._where, part=part),
            response._replace_item(self._item("completed", [part])),
        ]

    def _part(self) -> Body:
        found = {"type": self._kind, "text": self._text}
        return {**found, "annotations": [], "logprobs": []} if self._is_message else found

    def _logprobs(self) -> Body:
        return {"logprobs": []} if self._is_message else {}

    def _item(self, status: str, content: list[Body]) -> Body:
        if self._is_message:
            return {"type": "message", "id": self._id, "status": status, "role": "assistant", "content": content}
        return {"type": "reasoning", "id": self._id, "status": status, "summary": [], "content": content}


def _translate(body: Mapping[str, Any], given: ResponseRequest) -> Body:
    """Return the fields of a chat completion that have other names or forms."""
    for name, fix in _REFUSED.items():
        if body.get(name):
            raise ApiError(400, f"{name} is not supported. {fix}", name, "unsupported_parameter")
    if given.truncation != "disabled":
        raise ApiError(400, "truncation: this server never cuts a prompt. Omit it.", "truncation")
    if given.reasoning.get("effort"):
        raise ApiError(400, "reasoning.effort is not supported. Use chat_template_kwargs.", "reasoning")
    if _LOGPROBS in given.include:
        raise ApiError(400, f"include: {_LOGPROBS} is not supported. Use /v1/chat/completions.", "include")
    found: Body = {"max_tokens": given.max_output_tokens, "tools": [_as_tool(tool) for tool in given.tools]}
    if (form := given.text.get("format")) is not None:
        if not isinstance(form, Mapping):
            raise ApiError(400, f"text.format is {form!r:.60}, expected an object with a type.", "text")
        found["response_format"] = {"type": form.get("type"), "json_schema": form}
    choice = given.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    found["tool_choice"] = choice
    return {**found, "messages": _as_messages(given.instructions, given.input)}


def _as_tool(tool: Any) -> Any:
    if not isinstance(tool, Mapping):
        return tool
    if tool.get("type") != "function":
        raise ApiError(
            400, f"tools holds the type {tool.get('type')!r:.40}, and only functions are supported.", "tools"
        )
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _as_messages(instructions: str, items: str | list) -> list[Any]:
    """Return the messages of a chat for instructions and input items."""
    if not items:
        raise ApiError(400, f"input is {items!r}, expected a text or a list of items.", "input")
    messages: list[Any] = [{"role": "system", "content": instructions}] if instructions else []
    names: dict[Any, Any] = {}
    for i, item in enumerate([{"role": "user", "content": items}] if isinstance(items, str) else items):
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            _add_message(messages, {"role": role, "content": item.get("content")})
        elif kind == "function_call":
            names[str(item.get("call_id"))] = item.get("name")
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or messages[-1].get("role") != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", ()), call]}
        elif kind == "function_call_output":
            name = names.get(str(item.get("call_id")))
            output = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
            messages.append({**output, "name": name} if name else output)
        elif kind != "reasoning":  # earlier thinking is not part of a prompt
            got = repr(kind) if isinstance(item, Mapping) else repr(item)
            raise ApiError(
                400, f"input[{i}] is {got:.60}, expected a message, function_call, function_call_output or reasoning.",
                "input",
            )  # fmt: skip
    return messages


def _add_message(messages: list[Any], message: Body) -> None:
    """Add a message; an instruction joins the one before it, since many templates allow only one."""
    before = messages[-1] if messages else {}
    if before.get("role") == message["role"] == "system" and isinstance(message["content"], str):
        messages[-1] = {**before, "content": f"{before['content']}\n\n{message['content']}"}
    else:
        messages.append(message)
