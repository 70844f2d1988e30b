"""Inputs of requests that need the model: messages become a prompt, and formats of answers become grammars."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from whet.data.rows import tokenize_prompt
from whet.errors import WhetError
from whet.serve.errors import ApiError
from whet.serve.model import ServedModel
from whet.serve.schema import MOST_PROMPTS, PromptFields, Request
from whet.text.call_grammar import call_grammar


def read_grammar(model: ServedModel, request: Request) -> str:
    """Return the grammar that a request asks for by ``response_format`` or ``structured_outputs``; empty: none.

    Raises:
        ApiError: 400: the grammar is not valid, or not supported.
    """
    asked = dict(request.structured_outputs)
    form = request.response_format
    if form and form.get("type") != "text":
        if asked:
            raise ApiError(400, "response_format and structured_outputs are both given. Omit one.", "response_format")
        kind, schema = form.get("type"), form.get("json_schema")
        if kind == "json_schema":
            schema = schema.get("schema") if isinstance(schema, Mapping) else None
            if not isinstance(schema, dict):
                raise ApiError(400, f"response_format: json_schema has no schema: {form!r:.80}.", "response_format")
            asked = {"json": schema}
        elif kind == "json_object":
            asked = {"json_object": True}
        else:
            raise ApiError(
                400, f"response_format is {form!r:.80}, expected a type of text, json_object or json_schema."
            )
    asked = {name: value for name, value in asked.items() if value not in (None, False)}
    if not asked:
        return ""
    [(name, value), *others] = asked.items()
    try:
        if not others and name == "json" and isinstance(value, (dict, str)):
            return model.grammars.from_schema(json.loads(value) if isinstance(value, str) else value)
        if not others and name == "json_object":
            return model.grammars.from_schema({"type": "object"})
        if not others and name == "regex" and isinstance(value, str):
            return model.grammars.from_regex(value)
        if not others and name == "choice" and isinstance(value, list) and all(isinstance(v, str) for v in value):
            return model.grammars.from_choices(value)
        if not others and name == "grammar" and isinstance(value, str):
            return model.grammars.from_lark(value)
    except (WhetError, ValueError) as error:
        raise ApiError(400, str(error), "response_format" if form else "structured_outputs") from None
    raise ApiError(
        400,
        f"structured_outputs is {asked!r:.100}, expected one of json (a schema), json_object, regex, choice (a list of "
        f"texts) and grammar (Lark).",
        "structured_outputs",
    )


def read_prompt(model: ServedModel, fields: PromptFields) -> list[int]:
    """Return the token ids of a prompt (a text or ids) or of messages.

    Raises:
        ApiError: 400: both or neither are given, or they cannot be read.
    """
    if (fields.prompt is None) == (fields.messages is None):
        raise ApiError(400, "Expected prompt or messages, and not both.", "prompt")
    if fields.messages is not None:
        return render_messages(model, fields.messages, fields, fields.tools)
    if isinstance(fields.prompt, list):
        return model.check_prompt(fields.prompt, "prompt")
    return model.encode(fields.prompt or "", fields.add_special_tokens)


def read_texts(model: ServedModel, given: str | list, name: str, special: bool) -> list[tuple[list[int], str | None]]:
    """Return the token ids, and the text if there is one, of each prompt: a text, ids, or a list of either.

    Args:
        given: the field's value.
        name: the field's name.
        special: whether the tokenizer adds its special tokens.

    Raises:
        ApiError: 400: a prompt is empty, not a text or ids, or there are too many.
    """
    several = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    if len(several) > MOST_PROMPTS:
        raise ApiError(400, f"{name} has {len(several)} entries, expected at most {MOST_PROMPTS}.", name)
    found: list[tuple[list[int], str | None]] = []
    for each in several:
        if isinstance(each, str):
            ids = model.encode(each, special) if each else []
            if not ids:
                raise ApiError(400, f"{name} is empty, expected at least one token.", name)
            found.append((ids, each))
        elif isinstance(each, list):
            found.append((model.check_prompt(each, name), None))
        else:
            raise ApiError(400, f"{name} holds {each!r:.40}, expected a text, or a list of token ids.", name)
    return found


def render_messages(model: ServedModel, messages: list, request: Any, tools: list) -> list[int]:
    """Return the prompt of messages by the model's chat template.

    Raises:
        ApiError: 400: messages is empty, a content is not text, or the template rejects them.
    """
    if not messages:
        raise ApiError(400, "messages is empty, expected at least one message.", "messages")
    plain = plain_messages(messages)
    model.check_text(*(message["content"] for message in plain))
    options = _check_options(model, request.chat_template_kwargs)
    continues = request.continue_final_message
    if continues and plain[-1]["role"] != "assistant":
        raise ApiError(400, "continue_final_message needs a last message of the assistant.", "continue_final_message")
    tokenizer = model.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise ApiError(400, "The model has no chat template. Use /v1/completions, or start with --chat-template.")
    try:
        if continues or not request.add_generation_prompt or plain[-1]["role"] == "assistant":
            ids = tokenizer.apply_chat_template(
                plain, add_generation_prompt=request.add_generation_prompt and not continues,
                continue_final_message=continues, tokenize=True, return_dict=True, tools=tools or None, **options,
            )["input_ids"]  # fmt: skip
        else:
            row = {"prompt": plain, "chat_template_kwargs": options} | ({"tools": tools} if tools else {})
            ids = tokenize_prompt(row, tokenizer)
    except WhetError as error:
        raise ApiError(400, str(error), "messages") from None
    return [int(i) for i in ids]


def plain_messages(messages: list) -> list[dict[str, Any]]:
    """Return messages for a chat template: contents are texts, arguments of calls are objects."""
    return [_as_text(i, message) for i, message in enumerate(messages)]


def _check_options(model: ServedModel, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return variables for the chat template, which never replace it or the arguments of its tokenizer.

    Raises:
        ApiError: 400: an option has the name of an argument.
    """
    arguments = {"self", "messages", "conversation", "chat_template"}
    parameters = inspect.signature(model.tokenizer.apply_chat_template).parameters.values()
    arguments.update(each.name for each in parameters if each.kind is not each.VAR_KEYWORD)
    if taken := sorted(arguments & options.keys()):
        raise ApiError(
            400, f"chat_template_kwargs sets {', '.join(taken)}, expected variables of the chat template.",
            "chat_template_kwargs",
        )  # fmt: skip
    return dict(options)


def _as_text(i: int, message: Any) -> dict[str, Any]:
    """Return a message whose content is text."""
    name = f"messages[{i}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ApiError(400, f"{name} is {message!r:.60}, expected an object with role and content.", "messages")
    content = message.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text", "output_text"):
                kind = part.get("type") if isinstance(part, Mapping) else part
                raise ApiError(400, f"{name} has a part of type {kind!r:.40}, and only text is supported.", "messages")
            texts.append(str(part.get("text", "")))
        content = "".join(texts)
    if content is not None and not isinstance(content, str):
        raise ApiError(400, f"{name}.content is {content!r:.40}, expected text or a list of parts.", "messages")
    found = {**{key: value for key, value in message.items() if key != "content"}, "content": content or ""}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise ApiError(400, f"{name}.tool_calls is {calls!r:.60}, expected a list of calls.", "messages")
        found["tool_calls"] = [_read_call(name, call) for call in calls]
    return found


def _read_call(name: str, call: Any) -> dict[str, Any]:
    """Return a call of an earlier turn, with its arguments as an object for the chat template."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{name}.tool_calls holds {call!r:.80}, expected calls of functions.", "messages")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise ApiError(400, f"{name}.tool_calls: arguments {arguments!r:.80} are not JSON.", "messages") from None
    return {**call, "function": {**function, "arguments": arguments}}


class Tools:
    """The tools that a request offers, and how the model's replies call them.

    Attributes:
        offered: the tools for the chat template; empty: the reply is text.
    """

    def __init__(self, model: ServedModel, tools: list, choice: str | dict) -> None:
        self.offered: list = [] if choice == "none" else tools
        self._model, self._choice = model, choice
        for tool in tools:
            function = tool.get("function") if isinstance(tool, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise ApiError(400, f"tools holds {tool!r:.80}, expected functions with a name.", "tools")
        if not self.offered:
            if choice not in ("auto", "none"):
                raise ApiError(400, f"tool_choice is {choice!r:.60}, and there are no tools.", "tool_choice")
            return
        if not model.replies.can_call:
            raise ApiError(
                400, "The model's chat template has no format of tool calls that is known. Omit tools.", "tools"
            )

    def grammar(self) -> str:
        """Return the grammar of a reply that has to call a tool; empty: it does not.

        Raises:
            ApiError: 400: an unknown choice or tool, a schema that is not supported, or a format without a grammar.
        """
        choice, form = self._choice, self._model.replies.calls
        if not self.offered or choice == "auto":
            return ""
        wanted = self.offered
        if isinstance(choice, dict):
            name = (choice.get("function") or {}).get("name") if isinstance(choice.get("function"), dict) else None
            wanted = [tool for tool in self.offered if tool["function"]["name"] == name]
        if not wanted or (isinstance(choice, str) and choice != "required"):
            expected = "auto, none, required, or a function among tools"
            raise ApiError(400, f"tool_choice is {choice!r:.80}, expected {expected}.", "tool_choice")
        if form is None:
            raise ApiError(
                400, "tool_choice needs a grammar, and none is known for the model's format of calls. Use auto.",
                "tool_choice",
            )  # fmt: skip
        shown = self._model.replies.shown_tokens(has_tools=True)

        def mark(text: str) -> str:
            ids = [token_id for token_id, name in shown.items() if name == text]
            return f"<[{ids[0]}]>" if ids else json.dumps(text) if text else ""

        try:
            return self._model.grammars.from_lark(call_grammar(form, wanted, mark))
        except (WhetError, ValueError, AttributeError, TypeError) as error:
            raise ApiError(400, str(error), "tools") from None
