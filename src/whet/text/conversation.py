"""A conversation with a model: messages in, chunks of replies out. It does not use a terminal.

The engine retains the KV cache of every turn and computes a prompt from the first token that differs. If the chat
template repeats the text of a reply, the prompt contains the sampled token ids, because tokenising the text could give
others. If a template drops earlier thinking or rewrites a reply, only the common prefix is reused.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from whet.config.sampling import SamplingParams
from whet.data.chat import Chat
from whet.data.messages import example_call, failed_calls, tool_calls, without
from whet.data.rows import tokenize_prompt
from whet.data.thinking import DEFAULT_TAGS, answer_in
from whet.engine import Engine, Token
from whet.errors import WhetValueError
from whet.models.tokenizers.token_texts import read_token_texts
from whet.text.model import detokenise_stream, longest_sequence
from whet.text.replies import ReplyFormat
from whet.text.thinking import TextChunk, split_thinking

Message = Mapping[str, Any]
_REPLY_DIVISOR = 4
"""A reply gets at least ``context // _REPLY_DIVISOR`` tokens, or max_new_tokens if that is less."""
_PROMPT_FRACTION_WHEN_FULL = 0.75
"""A full context is cut to this fraction of the prompt's limit: dropping a turn invalidates the cache of all later
turns, so several are dropped at once."""


class _Prompt(NamedTuple):
    messages: tuple[Message, ...]
    ids: list[int]
    rendered: list[int]
    """The tokenised text; ``ids`` have the sampled ids of earlier replies instead."""


class _History(NamedTuple):
    """The turns so far; replaced as a whole, so that an interrupt leaves the state before or after a turn."""

    messages: tuple[Message, ...]
    prompt: _Prompt | None = None
    """The prompt of the last reply."""
    reply_ids: tuple[int, ...] = ()


class Conversation:
    """Messages and the model that answers them.

    Args:
        engine: retains the KV cache of the conversation.
        tokenizer: from a GGUF file or transformers, with a chat template.
        sampling: settings of every reply; reply i is sampled with ``seed + i``.
        system: the system prompt; empty: the template's default.
        adapter: the result of ``Engine.add_adapter``.
        context: maximum tokens of prompt and reply; None: limited by the model's positions and the engine's memory.
        tools: in OpenAI's form; the calls of a reply are in ``Turn.message``.
        where: prefix of errors.

    Raises:
        WhetValueError: there is no chat template, it fails, ignores the system prompt or cannot call tools; the context
            exceeds the model's positions or the engine's memory.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        sampling: SamplingParams,
        *,
        system: str = "",
        adapter: int | None = None,
        context: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        where: str = "Conversation",
    ) -> None:
        self.engine, self.tokenizer, self.sampling, self.adapter = engine, tokenizer, sampling, adapter
        self.where = where
        if not getattr(tokenizer, "chat_template", None):
            raise WhetValueError(
                f"{where}: the model's tokenizer has no chat template. Pass --chat-template with a Jinja file, such as "
                f"the chat_template.jinja of a model that was trained with the same format, or --tokenizer with a "
                f"folder or .gguf file that has one. (whet generate --raw continues plain text.)"
            )
        self.context = _check_context(engine, context, where)
        self._format = ReplyFormat(tokenizer, read_token_texts(tokenizer, where))
        self._replies = self._format.thinking
        self.tags = self._replies.tags or DEFAULT_TAGS
        self._tools = list(tools)
        self._shown = self._format.shown_tokens(has_tools=True) if tools else self._replies.special_tags
        if tools:
            self._check_tools()
        self._n_replies = 0
        self.restart(system)

    # ------------------------------------------------------------------ history

    @property
    def messages(self) -> tuple[Message, ...]:
        """The system prompt, if there is one, and the complete turns."""
        return self._history.messages

    @property
    def system(self) -> str:
        """The system prompt; empty if none was set."""
        first = self.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else ""

    def restart(self, system: str | None = None) -> None:
        """Clear the history; ``system`` replaces the system prompt.

        Raises:
            WhetValueError: the chat template rejects or ignores the system prompt.
        """
        system = self.system if system is None else system
        opening = ({"role": "system", "content": system},) if system else ()
        hello = {"role": "user", "content": "Hello"}
        rendered = self._render([*opening, hello])
        if system and rendered == self._render([hello]):
            raise WhetValueError(
                f"{self.where}: the chat template ignores the system prompt. Omit it, and put its text into a message."
            )
        self.last: Turn | None = None
        self._history, self._last_prompt = _History(opening), None

    def row(self, thinking: bool = False) -> dict[str, Any]:
        """The conversation as a row of ``whet train sft``: ``{"messages": [...]}``.

        Args:
            thinking: whether replies include their thinking.

        Raises:
            WhetValueError: the conversation has no turn.
        """
        if len(self.messages) < 2:
            raise WhetValueError(f"{self.where}: there is no turn to save.")
        messages = [dict(m) if thinking else {**m, "content": self._answer(m)} for m in self.messages]
        if not thinking:
            messages = without(messages, "reasoning_content")
        return {"messages": messages, **({"tools": self._tools} if self._tools else {})}

    # ------------------------------------------------------------------ turns

    def ask(self, text: str) -> Turn:
        """Return the turn that answers a message. The oldest turns are dropped if the context is full.

        Raises:
            WhetValueError: the message does not fit in the context, or the chat template rejects it.
        """
        return self._turn([*self._unanswered("it was not carried out"), {"role": "user", "content": text}])

    def answer(self, results: Sequence[Message]) -> Turn:
        """Return the turn that follows the results of tools.

        Args:
            results: a message of the role "tool" for each call of the last reply.

        Raises:
            WhetValueError: as for ``ask``.
        """
        return self._turn(results)

    def _turn(self, new: Sequence[Message]) -> Turn:
        messages = [*self._history.messages, *new]
        prompt = self._make_prompt(list(messages))
        self._last_prompt = prompt
        n_turns = [sum(message["role"] == "user" for message in each) for each in (messages, prompt.messages)]
        return Turn(self, prompt, self._next_sampling(prompt), n_turns[0] - n_turns[1])

    def _unanswered(self, reason: str) -> list[Message]:
        """Return results for the calls of the last reply, without which templates reject a message after it."""
        return [result for last in self.messages[-1:] for result in failed_calls(last, reason)]

    def ask_again(self) -> Turn:
        """Return a turn that replaces the last reply, sampled with another seed.

        Raises:
            WhetValueError: there is no message, or temperature is 0 and the reply would be the same.
        """
        if self._last_prompt is None:
            raise WhetValueError(f"{self.where}: there is no message to answer again.")
        if self.sampling.temperature == 0:
            raise WhetValueError(f"{self.where}: temperature is 0, which would give the same reply.")
        return Turn(self, self._last_prompt, self._next_sampling(self._last_prompt), 0)

    def _next_sampling(self, prompt: _Prompt) -> SamplingParams:
        seed = (self.sampling.seed + self._n_replies) % 2**64
        self._n_replies += 1
        room = self.context - len(prompt.ids)
        return replace(self.sampling, seed=seed, max_new_tokens=min(self.sampling.max_new_tokens, room))

    def _make_prompt(self, messages: list[Message]) -> _Prompt:
        """Return the prompt of the newest messages that leave room for a reply."""
        room = max(1, self.sampling.min_new_tokens, min(self.sampling.max_new_tokens, self.context // _REPLY_DIVISOR))
        max_prompt = self.context - room
        n_opening = 1 if self.system else 0
        allowed = max_prompt
        while True:
            rendered = self._render(messages)
            ids = self._insert_sampled_ids(rendered)
            questions = [i for i, message in enumerate(messages) if message["role"] == "user"]
            if len(ids) <= allowed or len(questions) == 1:
                break
            del messages[n_opening : questions[1]]
            allowed = int(max_prompt * _PROMPT_FRACTION_WHEN_FULL)
        if len(ids) > max_prompt:
            raise WhetValueError(
                f"{self.where}: the message takes {len(ids)} tokens with chat template and system prompt, but at most "
                f"{max_prompt} fit: the context has {self.context}, of which {room} are reserved for the reply. "
                f"Shorten the message, or raise --context."
            )
        return _Prompt(tuple(messages), ids, rendered)

    def _insert_sampled_ids(self, rendered: list[int]) -> list[int]:
        """Return the ids of a prompt, with the sampled ids of the last reply if the prompt repeats its text."""
        prompt, reply_ids = self._history.prompt, list(self._history.reply_ids)
        if prompt is None or rendered[: len(prompt.rendered)] != prompt.rendered:
            return rendered
        text, after = self._decode(reply_ids), rendered[len(prompt.rendered) :]
        n_tokens = range(len(after) + 1)
        n = bisect.bisect_right(n_tokens, len(text), key=lambda n: len(self._decode(after[:n]))) - 1
        return [*prompt.ids, *reply_ids, *after[n:]] if self._decode(after[:n]) == text else rendered

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _answer(self, message: Message) -> str:
        """Return a reply without its thinking, and other messages unchanged."""
        content = message["content"]
        if message["role"] != "assistant" or not content.lstrip().startswith(self.tags.opening):
            return content
        return (answer_in(content, self.tags) or "").lstrip()

    def _render(self, messages: Sequence[Message]) -> list[int]:
        row = {"prompt": list(messages), **({"tools": self._tools} if self._tools else {})}
        return tokenize_prompt(row, self.tokenizer)

    def _check_tools(self) -> None:
        """Reject a template that cannot call tools, or drops them."""
        self._format.check_can_call(self.where)
        call = example_call(self._tools[0]["function"]["name"])
        messages = [{"role": "user", "content": "Hello"}, call, *failed_calls(call, "example")]
        Chat(self.where, {"tools": self._tools}, self.tokenizer).check_complete(messages, first_learnt=1)

    def texts(self, tokens: Iterable[Token], sampling: SamplingParams) -> Iterator[str]:
        """Yield the text of tokens as they are sampled, with thinking tags even if they decode to no text."""
        if sampling.stop:  # the engine finds stop strings and yields the text before them
            for token in tokens:
                yield from filter(None, (self._shown.get(token.token_id), token.text))
            return
        token_ids = (token.token_id for token in tokens if token.token_id not in sampling.stop_token_ids)
        for is_tag, run in itertools.groupby(token_ids, lambda token_id: token_id in self._shown):
            if is_tag:
                yield from map(self._shown.__getitem__, run)
            else:
                yield from detokenise_stream(self.tokenizer, run)

    def _texts_next_to_calls(self, texts: Iterable[str], prompt_ids: list[int]) -> Iterator[TextChunk]:
        """Yield the thinking and the text of a reply that may call tools."""
        parser = self._format.parser(prompt_ids, self._tools, with_errors=True)
        for part, is_last in itertools.chain(zip(texts, itertools.repeat(False)), [("", True)]):
            yield from (found for found in parser.add(part, is_last) if isinstance(found, TextChunk))

    def _end(self, turn: Turn, prompt: _Prompt, reply_ids: list[int], text: str) -> None:
        """Add a reply to the history, unless it was stopped before its first text."""
        self.last = turn
        reply: Message = {"role": "assistant", "content": text}
        if self._tools:
            sampled = [token_id for token_id in reply_ids if token_id not in turn.sampling.stop_token_ids]
            reply = self._format.message(sampled, prompt.ids, self._tools, turn.sampling.stop)
        if turn.finish_reason == "stop" or self._answer(reply).strip() or tool_calls(reply):
            self._history = _History((*prompt.messages, reply), prompt, tuple(reply_ids))
            turn.is_kept, turn.message = True, reply


class Turn:
    """A message and its reply, which is sampled while it is iterated over, once.

    However the iteration ends, the text up to there becomes part of the conversation, unless it is empty. Close the
    iterator (``contextlib.closing(turn.chunks())``) if it may end early.

    Attributes:
        n_dropped: number of turns dropped from the beginning of the conversation.
        n_prompt: number of prompt tokens.
        n_reused: number of prompt tokens that were in the KV cache.
        n_tokens: number of tokens of the reply so far.
        finish_reason: as in ``TokenStream``.
        first_s: seconds to the first token.
        rest_s: seconds from the first token to the last.
        is_kept: whether the reply has become part of the conversation.
        message: the reply, if it has; with tools it may have ``tool_calls``.
    """

    def __init__(self, conversation: Conversation, prompt: _Prompt, sampling: SamplingParams, n_dropped: int) -> None:
        self._conversation, self._prompt, self.sampling = conversation, prompt, sampling
        self.n_dropped, self.n_prompt = n_dropped, len(prompt.ids)
        self.n_reused = self.n_tokens = 0
        self.first_s = self.rest_s = 0.0
        self.finish_reason = "running"
        self.is_kept = False
        self.message: Message = {}

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed after the first token; 0 before there are two."""
        return (self.n_tokens - 1) / self.rest_s if self.rest_s else 0.0

    def chunks(self) -> Generator[TextChunk, None, None]:
        """Yield the reply as it is sampled, split into thinking and answer, without tags."""
        conversation, prompt_ids, begin_s = self._conversation, self._prompt.ids, time.perf_counter()
        is_open = bool(conversation._replies.opening_tag(prompt_ids))
        texts = [conversation.tags.opening] if is_open else []
        ids: list[int] = []
        n_decoded = 0  # ids whose text was yielded; later ones have no text, or an incomplete character
        stream = conversation.engine.stream(prompt_ids, self.sampling, adapter=conversation.adapter, keep=True)

        def sampled_tokens() -> Iterator[Token]:
            for token in stream:
                self.n_tokens += 1
                if self.n_tokens == 1:
                    self.n_reused, self.first_s = stream.n_reused, time.perf_counter() - begin_s
                self.rest_s = time.perf_counter() - begin_s - self.first_s
                ids.append(token.token_id)
                yield token

        def decoded_texts() -> Iterator[str]:
            nonlocal n_decoded
            for text in conversation.texts(sampled_tokens(), self.sampling):
                texts.append(text)
                n_decoded = len(ids)
                yield text

        try:
            with stream:
                if conversation._tools:
                    yield from conversation._texts_next_to_calls(decoded_texts(), prompt_ids)
                else:
                    yield from split_thinking(decoded_texts(), is_open, conversation.tags)
        finally:
            self.finish_reason = stream.finish_reason
            conversation._end(self, self._prompt, ids[:n_decoded], "".join(texts))


def _check_context(engine: Engine, requested: int | None, where: str) -> int:
    """Return the context: by default the tokens for which the model has positions and the engine memory."""
    max_context = longest_sequence(engine)
    if requested is not None and requested > max_context:
        limit = "model has positions" if max_context == engine.config.max_position else "engine has memory"
        raise WhetValueError(
            f"{where}: context is {requested}, but the {limit} for {max_context} tokens. Lower --context."
        )
    return max_context if requested is None else requested
