"""Responses of the endpoints that sample, in OpenAI's and vLLM's forms; streamed ones are lists of chunks."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Generic, TypeVar

from whet.config.sampling import SamplingParams
from whet.serve.choices import Choice, LegacyLogprobs, chat_logprobs, prompt_logprobs, usage_of
from whet.serve.errors import ApiError
from whet.serve.inputs import Tools, read_grammar, read_texts
from whet.serve.schema import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    GenerateSampling,
    Request,
    check_alternatives,
    parse,
)
from whet.serve.service import Part, Prompt, Service
from whet.text.thinking import TextChunk

Body = dict[str, Any]
Fields = TypeVar("Fields", bound=Request)


class Endpoint(ABC):
    """A request of an endpoint that runs on the engine."""

    @abstractmethod
    async def respond(self) -> Body:
        """Return the whole response."""

    @staticmethod
    def failure(error: ApiError) -> Body:
        """Return the body of an error."""
        return error.body()


class Sampled(Endpoint, Generic[Fields]):
    """A request that samples.

    Attributes:
        prompts: its prompts, with their results once ``parts`` was read.
        model: name of the model or adapter.
    """

    id_prefix = ""

    def __init__(self, service: Service, request: Fields) -> None:
        self.service, self.request, self._served = service, request, service.model
        self.model = request.model
        self._served.check_writes(self.model)
        self.id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.prompts: list[Prompt] = []
        self.sampling: list[SamplingParams | None] = []
        self.n_scored: int | None = request.prompt_logprobs
        self.shown: Mapping[int, str] = {}
        self.grammar = read_grammar(service.model, request)
        self.grammar_after = ""  # text behind which the grammar begins

    def parts(self, streams: bool) -> AsyncGenerator[Part]:
        """Return the results of the engine."""
        constrain = partial(self._served.grammars.constrain, self.grammar, self.grammar_after) if self.grammar else None
        return self.service.run(
            self.prompts, self.sampling, n=self.request.n, model=self.model, n_scored=self.n_scored, shown=self.shown,
            constrain=constrain, streams=streams,
        )  # fmt: skip

    def usage(self) -> Body:
        """Return the token counts so far."""
        return usage_of(
            sum(len(prompt.token_ids) for prompt in self.prompts),
            sum(prompt.n_completion for prompt in self.prompts),
            sum(prompt.n_cached for prompt in self.prompts),
        )

    def of_prompt(self, prompt: Prompt) -> Body:
        """Return the ids and log-probs of a prompt, if the request asks for them."""
        found: Body = {"prompt_token_ids": prompt.token_ids} if self.request.return_token_ids else {}
        if self.request.prompt_logprobs is not None:
            logprobs = prompt_logprobs(self._served, prompt.token_ids, prompt.logprobs, prompt.alternatives)
            found["prompt_logprobs"] = logprobs
        return found


class Streamed(Sampled[Fields]):
    """A request that samples, and is answered as a whole or by chunks.

    Attributes:
        streams: whether the response is streamed.
    """

    object_name = ""
    media_type = "text/event-stream"
    """Media type of a streamed response."""
    keep_alive = ": keep-alive\n\n"
    """Text in its pauses."""
    ending = "data: [DONE]\n\n"
    """Text at its end."""

    def __init__(self, service: Service, request: Fields) -> None:
        super().__init__(service, request)
        self.streams = request.stream

    @abstractmethod
    def choice(self, prompt: Prompt, choice: Choice, text: str) -> Body:
        """Return a complete choice."""

    @abstractmethod
    def deltas(self, part: Part) -> list[Body]:
        """Return the choices of the chunks for a part."""

    async def respond(self) -> Body:
        """Sample, and return the whole response."""
        texts: dict[int, str] = {}
        async with aclosing(self.parts(streams=False)) as parts:
            async for part in parts:
                texts[part.choice.index] = texts.get(part.choice.index, "") + part.text
        pairs = [(prompt, choice) for prompt in self.prompts for choice in prompt.choices]
        choices = [self.choice(prompt, choice, texts[choice.index]) for prompt, choice in pairs]
        return {**self.envelope(self.object_name), "choices": choices, "usage": self.usage(), **self.extras()}

    def event(self, chunk: Body) -> str:
        """Return the text of a chunk of the streamed response."""
        return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"

    async def chunks(self) -> AsyncGenerator[Body]:
        """Sample, and yield the chunks of a streamed response."""
        options = self.request.options
        name = self.object_name if self.object_name.endswith("_completion") else f"{self.object_name}.chunk"
        is_first = True

        def chunk(choices: list[Body]) -> Body:
            body = {**self.envelope(name), "choices": choices}
            if options.continuous_usage_stats:
                body["usage"] = self.usage()
            elif options.include_usage:
                body["usage"] = None
            return body

        async with aclosing(self.parts(streams=True)) as parts:
            async for part in parts:
                for choice in self.deltas(part):
                    body = chunk([choice])
                    if is_first:
                        body |= self.extras()
                    is_first = False
                    yield body
        if options.include_usage:
            yield {**self.envelope(name), "choices": [], "usage": self.usage()}

    def envelope(self, name: str) -> Body:
        """Return the fields of a response and of every chunk."""
        return {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.model or self._served.name,
            "system_fingerprint": self.prompts[0].fingerprint or self._served.fingerprint,
        }

    def extras(self) -> Body:
        """Return further fields of the response, or of its first chunk."""
        return {}


class Completion(Streamed[CompletionRequest]):
    """``/v1/completions``."""

    object_name = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, service: Service, body: Any) -> None:
        request = parse(CompletionRequest, body)
        super().__init__(service, request)
        if (request.best_of or request.n) != request.n:
            raise ApiError(400, f"best_of is {request.best_of}, expected n={request.n}, or nothing.", "best_of")
        n_new = request.max_tokens or 0
        self._n_alternatives = check_alternatives("logprobs", request.logprobs)
        if n_new == 0 and not request.echo:
            raise ApiError(400, "max_tokens is 0, which needs echo. Raise it, or set echo.", "max_tokens")
        if request.echo and request.logprobs is not None:
            self.n_scored = max(self._n_alternatives, request.prompt_logprobs or 0)
        for ids, text in read_texts(self._served, request.prompt, "prompt", request.add_special_tokens):
            service.check_length(len(ids), n_new)
            text = text or (self._served.texts.text_of(ids) if request.echo else "")
            self.prompts.append(Prompt(token_ids=ids, text=text))
        settings = service.sampling_of(request, n_new, self._n_alternatives) if n_new else None
        self.sampling = [settings] * len(self.prompts)
        self._legacy: dict[int, LegacyLogprobs] = {}
        self._echoed: set[int] = set()

    def choice(self, prompt: Prompt, choice: Choice, text: str) -> Body:
        return self._part(prompt, choice, 0, text, is_first=True)

    def deltas(self, part: Part) -> list[Body]:
        is_first = part.choice.index not in self._echoed
        self._echoed.add(part.choice.index)
        return [self._part(part.prompt, part.choice, part.start, part.text, is_first)]

    def _part(self, prompt: Prompt, choice: Choice, start: int, text: str, is_first: bool) -> Body:
        request = self.request
        echoes = request.echo and is_first
        body: Body = {"index": choice.index, "text": (prompt.text if echoes else "") + text, "logprobs": None}
        body["finish_reason"] = choice.finish or None
        if request.logprobs is not None:
            ids: list[int] = choice.token_ids[start:]
            logprobs: list[float | None] = [*choice.logprobs[start:]]
            tops = choice.alternatives[start:] or [()] * len(ids)
            if echoes:
                ids, logprobs = [*prompt.token_ids, *ids], [*prompt.logprobs, *logprobs]
                tops = [*(prompt.alternatives or [()] * len(prompt.token_ids)), *tops]
            legacy = self._legacy.setdefault(
                choice.index, LegacyLogprobs(self._served, request.return_tokens_as_token_ids)
            )
            body["logprobs"] = legacy.part(ids, logprobs, tops)
        if request.return_token_ids:
            body["token_ids"] = choice.token_ids[start:]
        return body | self.of_prompt(prompt) if is_first else body


class Chat(Streamed[ChatRequest]):
    """``/v1/chat/completions``."""

    object_name = "chat.completion"
    id_prefix = "chatcmpl"

    def __init__(self, service: Service, body: Any) -> None:
        request = parse(ChatRequest, body)
        super().__init__(service, request)
        if "audio" in request.modalities:
            raise ApiError(400, "modalities holds 'audio', and this server writes text only.", "modalities")
        if request.top_logprobs and not request.logprobs:
            raise ApiError(400, f"top_logprobs is {request.top_logprobs}, which needs logprobs: true.", "top_logprobs")
        tools = Tools(service.model, request.tools, request.tool_choice)
        ids = service.render(request.messages, request, tools.offered)
        n_new = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        if n_new == 0:
            raise ApiError(400, "max_tokens is 0, expected at least 1.", "max_tokens")
        service.check_length(len(ids), n_new or 1)
        self.prompts = [Prompt(token_ids=ids)]
        n_alternatives = check_alternatives("top_logprobs", request.top_logprobs)
        self.sampling = [service.sampling_of(request, n_new or self._served.context - len(ids), n_alternatives)]
        replies = self._served.replies
        self.shown = replies.shown_tokens(bool(tools.offered))
        if forced := tools.grammar():
            if self.grammar:
                raise ApiError(
                    400, "tool_choice and response_format both determine the reply. Omit one.", "tool_choice"
                )
            self.grammar = forced
        self.grammar_after = replies.thinking.closing_tag(ids)
        self._parsers = [replies.parser(ids, tools.offered) for _ in range(request.n)]
        self._n_calls = [0] * request.n
        self._begun: set[int] = set()

    def split(self, choice: Choice, text: str) -> Body:
        """Return new text as fields of a message."""
        found: Body = {}
        for part in self._parsers[choice.index].add(text, bool(choice.finish)):
            if isinstance(part, TextChunk):
                name = "reasoning_content" if part.is_thinking else "content"
                found[name] = found.get(name, "") + part.text
            elif self.request.parallel_tool_calls or not self._n_calls[choice.index]:
                function = {"name": part.name, "arguments": json.dumps(part.arguments, ensure_ascii=False)}
                call = {"index": self._n_calls[choice.index], "id": f"call_{secrets.token_hex(12)}", "type": "function"}
                found.setdefault("tool_calls", []).append({**call, "function": function})
                self._n_calls[choice.index] += 1
        return found

    def reason(self, choice: Choice) -> str:
        """Return why a choice ended."""
        return "tool_calls" if choice.finish == "stop" and self._n_calls[choice.index] else choice.finish

    def extras(self) -> Body:
        [prompt] = self.prompts
        return self.of_prompt(prompt)

    def choice(self, prompt: Prompt, choice: Choice, text: str) -> Body:
        fields = self.split(choice, text)
        calls = [{key: value for key, value in call.items() if key != "index"} for call in fields.get("tool_calls", ())]
        content = fields.get("content", None if calls else "")
        message = {"role": "assistant", **fields, "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        return {**self._rest(choice, 0), "message": message, "finish_reason": self.reason(choice)}

    def deltas(self, part: Part) -> list[Body]:
        choice, found = part.choice, []
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            delta = {"role": "assistant", "content": ""}
            found.append({"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None})
        delta = self.split(choice, part.text)
        if delta or self.request.logprobs or self.request.return_token_ids:
            found.append({**self._rest(choice, part.start), "delta": delta, "finish_reason": None})
        if choice.finish:
            reason = self.reason(choice)
            found.append({"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": reason})
        return found

    def _rest(self, choice: Choice, start: int) -> Body:
        body: Body = {"index": choice.index, "logprobs": None}
        if self.request.logprobs:
            body["logprobs"] = chat_logprobs(
                self._served, choice.token_ids[start:], choice.logprobs[start:], choice.alternatives[start:],
                self.request.return_tokens_as_token_ids,
            )  # fmt: skip
        if self.request.return_token_ids:
            body["token_ids"] = choice.token_ids[start:]
        return body


class Generate(Sampled[GenerateSampling]):
    """``/inference/v1/generate``: token ids in and out, without any text."""

    id_prefix = "gen"

    def __init__(self, service: Service, body: Any) -> None:
        outer = parse(GenerateRequest, body)
        request = parse(GenerateSampling, {**outer.sampling_params, "model": outer.model})
        super().__init__(service, request)
        if request.stream:
            raise ApiError(400, "stream is true, and this endpoint answers as a whole. Omit it.", "stream")
        self._n_alternatives = check_alternatives("logprobs", request.logprobs)
        ids = self._served.check_prompt(outer.token_ids, "token_ids")
        if request.max_tokens == 0:
            raise ApiError(400, "max_tokens is 0, expected at least 1.", "max_tokens")
        service.check_length(len(ids), request.max_tokens or 1)
        self.prompts = [Prompt(token_ids=ids)]
        n_new = request.max_tokens or self._served.context - len(ids)
        self.sampling = [service.sampling_of(request, n_new, self._n_alternatives)]

    async def respond(self) -> Body:
        async with aclosing(self.parts(streams=False)) as parts:
            async for _ in parts:
                pass
        [prompt] = self.prompts
        body: Body = {"request_id": self.id, "choices": [self._choice(choice) for choice in prompt.choices]}
        return body | self.of_prompt(prompt) | {"prompt_token_ids": prompt.token_ids, "usage": self.usage()}

    def _choice(self, choice: Choice) -> Body:
        body: Body = {"index": choice.index, "token_ids": choice.token_ids, "finish_reason": choice.finish}
        if self.request.logprobs is not None:
            body["logprobs"] = chat_logprobs(
                self._served, choice.token_ids, choice.logprobs, choice.alternatives, as_ids=True
            )
        return body
