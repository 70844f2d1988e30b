"""A conversation with a model: messages in, pieces of replies out. It knows no terminal.

The engine keeps the keys and values of every turn, and computes a prompt from where it parts from them. A reply stays
in the prompt as the tokens that were drawn, wherever the chat template repeats its text: the text could be tokenised
otherwise. Templates that drop earlier thinking, or rewrite a reply, make another prompt, of which the common part is
reused.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from whet.cli.text_model import SPARE_PAGES, text_pieces
from whet.config.sampling import SamplingParams
from whet.data.rows import tokenize_prompt
from whet.data.thinking import DEFAULT_TAGS, Replies, Tags, answer_in
from whet.engine import Engine, Token
from whet.errors import WhetValueError
from whet.models.formats import PAGE_TOKENS

Message = Mapping[str, str]
_WHERE = "whet chat"
_REPLY_SHARE = 4
"""A reply can count on this part of the context, or on max_new_tokens where those are fewer."""
_KEPT_WHEN_FULL = 0.75
"""Of the prompt's part of the context: dropping a turn changes all that follows it, which is computed again. So many
turns are dropped at once that the next ones need not."""


class Piece(NamedTuple):
    """A piece of a reply: of its thinking, or of what it says."""

    text: str
    is_thinking: bool


class _Prompt(NamedTuple):
    messages: tuple[Message, ...]
    ids: list[int]
    rendered: list[int]
    """As the tokenizer has its text; ``ids`` hold earlier replies as they were drawn."""


class _Past(NamedTuple):
    """The turns so far; replaced whole, so that an interrupt finds the state before or after a turn."""

    messages: tuple[Message, ...]
    prompt: _Prompt | None = None
    """Of the last reply, which it ends with."""
    reply_ids: tuple[int, ...] = ()


class Conversation:
    """Messages, and the model that answers them.

    Args:
        engine: keeps the keys and values of what was said.
        tokenizer: of a GGUF file or of transformers, with a chat template.
        sampling: of every reply; each is drawn with a key of its own: the seed, plus the number of replies before.
        system: the system prompt; empty: what the template puts there.
        adapter: what ``Engine.add_adapter`` returned.
        context: tokens of prompt and reply; None: as many as the model has positions and the engine memory for.

    Raises:
        WhetValueError: there is no chat template, it fails, or it leaves the system prompt out; a context that the
            model or the memory does not have.
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
    ) -> None:
        self.engine, self.tokenizer, self.sampling, self.adapter = engine, tokenizer, sampling, adapter
        if not getattr(tokenizer, "chat_template", None):
            raise WhetValueError(
                f"{_WHERE}: the model's tokenizer has no chat template, which says where a message begins and ends. "
                f"Pass --chat-template with a Jinja file, such as the chat_template.jinja of a model that was trained "
                f"likewise, or --tokenizer with a folder or a .gguf file that has one. (whet generate --raw continues "
                f"plain text.)"
            )
        self.context = _context(engine, context)
        self._replies = Replies(tokenizer)
        self.tags = self._replies.tags or DEFAULT_TAGS
        self._n_replies = 0
        self.restart(system)

    # ------------------------------------------------------------------ what was said

    @property
    def messages(self) -> tuple[Message, ...]:
        """The system prompt, if there is one, and whole turns."""
        return self._past.messages

    @property
    def system(self) -> str:
        """The system prompt; empty: none of this conversation's own."""
        first = self.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else ""

    def restart(self, system: str | None = None) -> None:
        """Forget what was said; ``system`` replaces the system prompt.

        Raises:
            WhetValueError: the chat template refuses the system prompt, or leaves it out.
        """
        system = self.system if system is None else system
        opening = ({"role": "system", "content": system},) if system else ()
        hello = {"role": "user", "content": "Hello"}
        rendered = self._render([*opening, hello])
        if system and rendered == self._render([hello]):
            raise WhetValueError(
                f"{_WHERE}: the chat template leaves the system prompt out. Leave it away, and put it into a message."
            )
        self.last: Turn | None = None
        self._past, self._asked = _Past(opening), None

    def row(self, thinking: bool = False) -> dict[str, Any]:
        """The conversation as a row of ``whet train sft``: ``{"messages": [...]}``.

        Args:
            thinking: with what replies begin with between their tags.

        Raises:
            WhetValueError: nothing has been said.
        """
        if len(self.messages) < 2:
            raise WhetValueError(f"{_WHERE}: there is no turn to save.")
        kept = [dict(m) if thinking else {**m, "content": self._answer(m)} for m in self.messages]
        return {"messages": kept}

    # ------------------------------------------------------------------ turns

    def ask(self, text: str) -> Turn:
        """The turn that answers a message. The oldest turns are dropped where the context does not hold all of them.

        Raises:
            WhetValueError: the message alone is longer than the context, or the chat template refuses it.
        """
        past = self._past
        prompt = self._make_prompt([*past.messages, {"role": "user", "content": text}])
        n_dropped = (len(past.messages) + 1 - len(prompt.messages)) // 2
        self._asked = prompt
        return Turn(self, prompt, self._next_sampling(prompt), n_dropped)

    def ask_again(self) -> Turn:
        """The turn that answers the last message once more, in place of its reply, drawn with another key.

        Raises:
            WhetValueError: there is no message, or temperature is 0, and the reply would be the same.
        """
        if self._asked is None:
            raise WhetValueError(f"{_WHERE}: there is no message that could be answered again.")
        if self.sampling.temperature == 0:
            raise WhetValueError(f"{_WHERE}: temperature is 0, so the same reply would come again.")
        return Turn(self, self._asked, self._next_sampling(self._asked), 0)

    def _next_sampling(self, prompt: _Prompt) -> SamplingParams:
        seed = (self.sampling.seed + self._n_replies) % 2**64
        self._n_replies += 1
        room = self.context - len(prompt.ids)
        return replace(self.sampling, seed=seed, max_new_tokens=min(self.sampling.max_new_tokens, room))

    def _make_prompt(self, messages: list[Message]) -> _Prompt:
        """The prompt of the newest messages that leave room for a reply."""
        room = max(1, self.sampling.min_new_tokens, min(self.sampling.max_new_tokens, self.context // _REPLY_SHARE))
        most = self.context - room
        n_opening = 1 if self.system else 0
        allowed = most
        while True:
            rendered = self._render(messages)
            ids = self._with_drawn(rendered)
            if len(ids) <= allowed or len(messages) == n_opening + 1:
                break
            del messages[n_opening : n_opening + 2]
            allowed = int(most * _KEPT_WHEN_FULL)
        if len(ids) > most:
            raise WhetValueError(
                f"{_WHERE}: the message takes {len(ids)} tokens with what the chat template and the system prompt add, "
                f"and of a context of {self.context} a reply needs {room}, which leaves {most}. Shorten it, or raise "
                f"--context."
            )
        return _Prompt(tuple(messages), ids, rendered)

    def _with_drawn(self, rendered: list[int]) -> list[int]:
        """The ids of a prompt, with replies as they were drawn where it repeats their text."""
        prompt, reply_ids = self._past.prompt, list(self._past.reply_ids)
        if prompt is None or rendered[: len(prompt.rendered)] != prompt.rendered:
            return rendered
        text, after = self._decode(reply_ids), rendered[len(prompt.rendered) :]
        n_tokens = range(len(after) + 1)
        n = bisect.bisect_right(n_tokens, len(text), key=lambda n: len(self._decode(after[:n]))) - 1
        return [*prompt.ids, *reply_ids, *after[n:]] if self._decode(after[:n]) == text else rendered

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _answer(self, message: Message) -> str:
        """The text of a reply without its thinking; other messages as they are."""
        content = message["content"]
        if message["role"] != "assistant" or not content.lstrip().startswith(self.tags.opening):
            return content
        return (answer_in(content, self.tags) or "").lstrip()

    def _render(self, messages: Sequence[Message]) -> list[int]:
        return tokenize_prompt({"prompt": list(messages)}, self.tokenizer)

    def texts(self, tokens: Iterable[Token], sampling: SamplingParams) -> Iterator[str]:
        """The text of tokens as they come: ``text_pieces``, and the tags of thinking, also where they have no text."""
        if sampling.stop:  # found by the engine, which tells the text before it
            for token in tokens:
                yield from filter(None, (self._replies.special_tags.get(token.token_id), token.text))
            return
        token_ids = (token.token_id for token in tokens if token.token_id not in sampling.stop_token_ids)
        for is_tag, run in itertools.groupby(token_ids, lambda token_id: token_id in self._replies.special_tags):
            if is_tag:
                yield from map(self._replies.special_tags.__getitem__, run)
            else:
                yield from text_pieces(self.tokenizer, run)

    def _end(self, turn: Turn, prompt: _Prompt, reply_ids: list[int], text: str) -> None:
        """Take a reply in, unless it was cut before it said anything."""
        self.last = turn
        reply = {"role": "assistant", "content": text}
        if turn.finish_reason == "stop" or self._answer(reply).strip():
            self._past = _Past((*prompt.messages, reply), prompt, tuple(reply_ids))
            turn.is_kept = True


class Turn:
    """A message and its reply, which comes as it is iterated over, once.

    However the iteration ends, what was said until then is the conversation's; nothing, where nothing was said. Close
    it (``contextlib.closing(turn.pieces())``) where it may end early.

    Attributes:
        n_dropped: turns that were dropped from the beginning of the conversation.
        n_prompt, n_reused: tokens of the prompt, and of these those whose keys and values were kept.
        n_tokens: of the reply so far.
        finish_reason: as a ``TokenStream``'s.
        first_s, rest_s: seconds to the first token, and from there to the last one.
        is_kept: whether the reply has become part of the conversation.
    """

    def __init__(self, conversation: Conversation, prompt: _Prompt, sampling: SamplingParams, n_dropped: int) -> None:
        self._conversation, self._prompt, self.sampling = conversation, prompt, sampling
        self.n_dropped, self.n_prompt = n_dropped, len(prompt.ids)
        self.n_reused = self.n_tokens = 0
        self.first_s = self.rest_s = 0.0
        self.finish_reason = "running"
        self.is_kept = False

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens after the first one; 0 before there are two."""
        return (self.n_tokens - 1) / self.rest_s if self.rest_s else 0.0

    def pieces(self) -> Generator[Piece, None, None]:
        """The reply as it comes, its thinking told apart, without the tags."""
        conversation, prompt_ids, begin_s = self._conversation, self._prompt.ids, time.perf_counter()
        is_open = bool(conversation._replies.opening_tag(prompt_ids))
        texts = [conversation.tags.opening] if is_open else []
        ids: list[int] = []
        n_said = 0  # of the ids: what follows them has no text, or not yet a whole character
        stream = conversation.engine.stream(prompt_ids, self.sampling, adapter=conversation.adapter, keep=True)

        def drawn() -> Iterator[Token]:
            for token in stream:
                self.n_tokens += 1
                if self.n_tokens == 1:
                    self.n_reused, self.first_s = stream.n_reused, time.perf_counter() - begin_s
                self.rest_s = time.perf_counter() - begin_s - self.first_s
                ids.append(token.token_id)
                yield token

        def said() -> Iterator[str]:
            nonlocal n_said
            for text in conversation.texts(drawn(), self.sampling):
                texts.append(text)
                n_said = len(ids)
                yield text

        try:
            with stream:
                yield from tell_apart(said(), is_open, conversation.tags)
        finally:
            self.finish_reason = stream.finish_reason
            conversation._end(self, self._prompt, ids[:n_said], "".join(texts))


def tell_apart(texts: Iterable[str], is_open: bool = False, tags: Tags = DEFAULT_TAGS) -> Iterator[Piece]:
    """The pieces of a reply without its tags; what it begins with between tags is thinking.

    Args:
        texts: which together are the reply.
        is_open: whether the prompt has opened the thinking.
        tags: around the thinking.
    """
    texts = iter(texts)
    held = ""
    while not is_open:  # until it is told whether it begins with the tag
        text = next(texts, None)
        held += text or ""
        begin = held.lstrip()
        is_open = begin.startswith(tags.opening)
        if text is None or not (is_open or tags.opening.startswith(begin)):
            yield from (Piece(text, False) for text in itertools.chain([held], texts) if text)
            return
    answer, held = None, held.lstrip().removeprefix(tags.opening)
    for text in itertools.chain([""], texts):
        thought, tag, rest = (held + text).partition(tags.closing)
        n_held = 0 if tag else max(n for n in range(len(tags.closing)) if thought.endswith(tags.closing[:n]))
        shown, held = thought[: len(thought) - n_held], thought[len(thought) - n_held :]
        if shown:
            yield Piece(shown, True)
        if tag:
            answer = rest
            break
    if held:
        yield Piece(held, True)
    if answer is not None:
        whole = itertools.dropwhile(lambda text: not text.strip(), itertools.chain([answer], texts))
        first = next(whole, "")
        yield from (Piece(text, False) for text in itertools.chain([first.lstrip()], whole) if text)


def _context(engine: Engine, asked: int | None) -> int:
    """Tokens of a sequence that the model has positions, and the engine memory for."""
    memory, positions = engine.memory, engine.config.max_position
    most = min((memory["kv_bytes"] // memory["kv_page_bytes"] - SPARE_PAGES) * PAGE_TOKENS, positions)
    if asked is not None and asked > most:
        why = f"the model's last position is {positions}" if most == positions else f"the engine has memory for {most}"
        raise WhetValueError(f"{_WHERE}: context is {asked} tokens, and {why}. Lower --context.")
    return most if asked is None else asked
