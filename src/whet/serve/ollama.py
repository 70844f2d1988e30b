"""Ollama's chat, which many front ends speak: a translation to and from ``Chat``."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from whet.serve.choices import Choice
from whet.serve.endpoints import Body, Chat
from whet.serve.errors import ApiError
from whet.serve.model import ServedModel
from whet.serve.schema import check_object
from whet.serve.service import Service

VERSION = "0.12.0"
"""The version of Ollama whose interface this is: clients ask for it."""
_OPTIONS = {
    "num_predict": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "seed": "seed", "stop": "stop", "repeat_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}  # fmt: skip


class OllamaChat(Chat):
    """``/api/chat``: lines of JSON."""

    media_type = "application/x-ndjson"
    keep_alive = ending = ""

    def __init__(self, service: Service, body: Any) -> None:
        self._begun_ns, body = time.perf_counter_ns(), check_object(body)
        super().__init__(service, _translate(body))
        self.streams = body.get("stream", True) is not False
        self._is_thinking_shown = body.get("think", True) is not False

    def event(self, chunk: Body) -> str:
        return json.dumps(chunk, ensure_ascii=False) + "\n"

    @staticmethod
    def failure(error: ApiError) -> Body:
        return {"error": error.message}

    async def respond(self) -> Body:
        message: Body = {"role": "assistant", "content": ""}
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                for name, part in chunk["message"].items():
                    message[name] = part if name == "role" or name not in message else message[name] + part
        return {**chunk, "message": message}

    async def chunks(self) -> AsyncGenerator[Body]:
        first_ns = 0
        async with aclosing(self.parts(self.streams)) as parts:
            async for part in parts:
                first_ns = first_ns or time.perf_counter_ns()
                fields = self.split(part.choice, part.text)
                message = {"role": "assistant", "content": fields.get("content", "")}
                if self._is_thinking_shown and "reasoning_content" in fields:
                    message["thinking"] = fields["reasoning_content"]
                if "tool_calls" in fields:
                    message["tool_calls"] = [_as_call(call["function"]) for call in fields["tool_calls"]]
                body = {"model": self.model or self._served.name, "created_at": _now(), "message": message}
                yield {**body, "done": False} if not part.choice.finish else body | self._end(part.choice, first_ns)

    def _end(self, choice: Choice, first_ns: int) -> Body:
        [prompt], now = self.prompts, time.perf_counter_ns()
        return {
            "done": True,
            "done_reason": choice.finish,
            "total_duration": now - self._begun_ns,
            "load_duration": 0,
            "prompt_eval_count": len(prompt.token_ids),
            "prompt_eval_duration": first_ns - self._begun_ns,
            "eval_count": len(choice.token_ids),
            "eval_duration": now - first_ns,
        }


def _translate(body: Mapping[str, Any]) -> Body:
    """Return the body of a chat completion."""
    options = body.get("options") or {}
    if not isinstance(options, Mapping):
        raise ApiError(400, f"options is {options!r:.60}, expected an object.", "options")
    found = {own: options[name] for name, own in _OPTIONS.items() if name in options}
    if found.get("max_tokens") in (-1, -2):  # no limit
        del found["max_tokens"]
    if form := body.get("format"):
        is_schema = isinstance(form, Mapping)
        schema = {"type": "json_schema", "json_schema": {"schema": form}}
        found["response_format"] = schema if is_schema else {"type": "json_object"}
    name = str(body.get("model") or "").removesuffix(":latest")
    kwargs = {"enable_thinking": body["think"]} if isinstance(body.get("think"), bool) else {}
    given = {key: body[key] for key in ("messages", "tools") if key in body}
    return {"model": name, "chat_template_kwargs": kwargs, **given, **found}


def _as_call(function: Body) -> Body:
    return {"function": {"name": function["name"], "arguments": json.loads(function["arguments"])}}


def list_models(model: ServedModel) -> Body:
    """Return the body of ``/api/tags``."""
    names = [f"{name}:latest" for name in model.adapters]
    return {"models": [{"name": name, "model": name, **_describe(model)} for name in names]}


def show_model(model: ServedModel) -> Body:
    """Return the body of ``/api/show``."""
    config = model.engine.config
    info = {"general.parameter_count": config.n_parameters, "whet.context_length": model.context}
    template = str(getattr(model.tokenizer, "chat_template", None) or "")
    capabilities = ["completion", *(["tools"] if model.replies.can_call else [])]
    return {**_describe(model), "template": template, "model_info": info, "capabilities": capabilities}


def _describe(model: ServedModel) -> Body:
    formats = ", ".join(sorted(set(model.engine.formats.values())))
    details = {"format": "gguf", "family": "whet", "families": ["whet"], "quantization_level": formats}
    details["parameter_size"] = f"{model.engine.config.n_parameters / 1e6:.0f}M"
    return {
        "modified_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
        "size": model.engine.memory["weights_bytes"],
        "digest": model.fingerprint,
        "details": details,
    }


def _now() -> str:
    return datetime.now(UTC).isoformat()
