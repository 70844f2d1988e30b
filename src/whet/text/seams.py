"""Token ids of a conversation with many turns: sampled ids are kept, and what follows a turn is appended.

Tokenising a sampled text again can give other ids than were sampled: merges cross the end of the turn, calls of tools
are rendered in another form, special tokens are lost in decoding. So only the text that the chat template adds after a
turn is tokenised: the end of the turn, the new messages, and the opening of the next turn.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n  Hello<|im_end|>  \\n<|im_start|>user\\n...assistant\\n
    opening, of messages                                     sampled           seam, of the new messages

This equals the rendering of the whole conversation only if the template does not rewrite earlier turns. Qwen3's drops
their thinking after the next user message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from whet.data.chat import Chat
from whet.data.messages import example_call, tool_result
from whet.data.rows import tokenize_prompt
from whet.errors import WhetValueError

Message = Mapping[str, Any]


class RewrittenHistoryError(WhetValueError):
    """The chat template renders an earlier turn differently once other messages follow it."""


class Seam(NamedTuple):
    """The text between two turns.

    Attributes:
        end: text that ends a turn which was truncated.
        text: text after the end of the turn, up to the beginning of the next one.
    """

    end: str
    text: str


class Seams:
    """Continues conversations by appending token ids.

    Args:
        tokenizer: with a chat template.
        stop_token_ids: tokens of which one ends a turn.
        row: ``tools`` and ``chat_template_kwargs`` for the template, as in rows of data sets.
        where: prefix of errors.
    """

    def __init__(
        self, tokenizer: Any, stop_token_ids: Iterable[int], row: Mapping[str, Any] | None = None, where: str = "Seams"
    ) -> None:
        self._tokenizer, self._row, self._where = tokenizer, dict(row or {}), where
        self._chat = Chat(where, self._row, tokenizer)
        texts = {int(i): tokenizer.decode([int(i)], skip_special_tokens=False) for i in stop_token_ids}
        self._stops = {text: i for i, text in texts.items() if text}

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of messages with the assistant's turn opened."""
        return tokenize_prompt({**self._row, "prompt": list(messages)}, self._tokenizer)

    def seam(self, messages: Sequence[Message], new: Sequence[Message]) -> Seam:
        """Return what follows the last of ``messages``, an assistant's turn, if ``new`` messages come next.

        Raises:
            RewrittenHistoryError: with the new messages, the template renders earlier turns differently.
            WhetValueError: the template rejects the messages, or ends no turn with one of the stop tokens.
        """
        before = self._chat.render(messages)
        after = self._chat.render([*messages, *new], add_generation_prompt=True)
        ends = [(before.rfind(text), text) for text in self._stops]
        place, end = max(ends, default=(-1, ""))
        if place < 0:
            raise WhetValueError(
                f"{self._where}: the chat template ends the assistant's turn with {before[-20:]!r}, which is not a "
                f"stop token ({', '.join(map(repr, self._stops)) or 'there is none'}), so that the end of a turn is "
                f"unknown. Set stop_token_ids to the token that ends it."
            )
        head = before[:place] + end
        if not after.startswith(head):
            raise RewrittenHistoryError(
                f"{self._where}: with the message {new[0].get('role')!r} after it, the chat template renders an "
                f"earlier turn differently: {_first_difference(head, after)}. Sampled tokens would differ from the "
                f"prompt of the next turn. Use a template that keeps earlier turns (--chat-template), or, in training, "
                f"set rewritten_history to 'branch'."
            )
        return Seam(end, after[len(head) :])

    def ids(self, seam: Seam, *, is_ended: bool) -> list[int]:
        """Return the token ids of a seam.

        Args:
            is_ended: whether the stop token was sampled. Otherwise the ids begin with it.
        """
        # Tokenised with the stop token in front: tokenizers of SentencePiece treat the begin of a text differently.
        ids = self._tokenizer(seam.end + seam.text, add_special_tokens=False)["input_ids"]
        if list(ids[:1]) != [self._stops[seam.end]]:
            raise WhetValueError(
                f"{self._where}: the tokenizer encodes {seam.end!r} as {list(ids[:3])}, not as the stop token "
                f"{self._stops[seam.end]}, so that turns cannot be joined. Declare it as a special token."
            )
        return list(ids[1:] if is_ended else ids)

    def check(self, replies: Iterable[tuple[Message, Message]]) -> None:
        """Reject a template that rewrites earlier turns or drops parts of them, before anything is sampled.

        Args:
            replies: pairs of a typical reply and the message that follows it.

        Raises:
            RewrittenHistoryError: the template renders one of the replies differently after the message.
            WhetValueError: it drops a part of a reply.
        """
        for reply, following in replies:
            question = {"role": "user", "content": "Question"}
            self._chat.check_complete([question, reply], first_learnt=1)
            self.ids(self.seam([question, reply], [following]), is_ended=True)
            self.seam([question, reply, following, reply], [following])

    def check_calls(self, name: str) -> None:
        """Reject a template that drops calls of a tool or its results, or rewrites calls, before anything is sampled.

        Raises:
            RewrittenHistoryError: the template renders a call differently after its result.
            WhetValueError: it drops the tools, the call or the result.
        """
        reply = example_call(name)
        result = tool_result(reply["tool_calls"][0], "result of the tool")
        try:
            self.check([(reply, result)])
        except RewrittenHistoryError:  # Qwen3 keeps thinking between calls, and adds its tags to a turn without it
            reply["reasoning_content"] = "thought"
            self.check([(reply, result)])
        if result["content"] not in self.seam([{"role": "user", "content": "Question"}, reply], [result]).text:
            raise WhetValueError(
                f"{self._where}: the chat template drops the results of tools. Use one that renders messages of the "
                f"role 'tool' (--chat-template)."
            )


def content_mask(
    render: Callable[[Sequence[Message]], list[int]], ids: Sequence[int], messages: Sequence[Message]
) -> list[bool]:
    """Return whether each of the tokens ``ids = render(messages)`` holds a part of the content of a message.

    The other tokens are the template's: with another content of the message they stay the same. Two other contents are
    rendered, as the content may begin or end like one of them.
    """
    mask = [False] * len(ids)
    for i, message in enumerate(messages):
        others = [render([*messages[:i], {**message, "content": text}, *messages[i + 1 :]]) for text in ("0", "x")]
        begin = min(count_shared(ids, other) for other in others)
        end = len(ids) - min(count_shared(ids[::-1], other[::-1]) for other in others)
        mask[begin:end] = [True] * (end - begin)
    return mask


def count_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the longest common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _first_difference(one: str, other: str) -> str:
    """Return the texts around the first difference."""
    at = count_shared(one, other)
    begin = max(0, at - 10)
    return f"{one[begin : at + 20]!r} becomes {other[begin : at + 20]!r}"
