"""Token ids of one row: from text, from messages through the tokenizer's chat template, or as given.

Needs only NumPy, and the packages of the tokenizer that is passed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence, Sized
from numbers import Number
from typing import Any

import numpy as np

from whet.data.chat import Chat
from whet.data.messages import is_learnt, is_messages, text_of
from whet.data.token_ids import MASKS, check_positions, counted_tokens, token_rows
from whet.errors import WhetTypeError, WhetValueError, check_unicode

FIELDS = ("prompt", "completion", "messages", "text", "chosen", "rejected")
"""Fields of a row that are tokenised; other fields are columns of the dataset."""

_MEDIA = ("image", "images", "video", "videos", "audio", "pixel_values")
"""Fields for multimodal models."""


class Encoder:
    """Token ids of the fields of one row.

    Args:
        where: the caller's name, for errors.
        row: the fields, and arguments of the chat template.
        tokenizer: encodes text and messages.
    """

    def __init__(self, where: str, row: Mapping[str, Any], tokenizer: Any) -> None:
        if not isinstance(row, Mapping):
            raise WhetTypeError(f"{where}: the row is {row!r:.60}, expected a dict such as {{'prompt': ...}}.")
        self._where, self._row, self._tokenizer = where, row, tokenizer
        self._chat = Chat(where, row, tokenizer)
        media = [name for name in _MEDIA if _is_media(row.get(name))]
        if media:
            raise self.error(f"the row has {media[0]!r}, and only text is trained. Remove it, or rename it.")

    def error(self, text: str) -> WhetValueError:
        return WhetValueError(f"{self._where}: {text}")

    def type_error(self, text: str) -> WhetTypeError:
        return WhetTypeError(f"{self._where}: {text}")

    def field(self, name: str) -> Any:
        if self._row.get(name) is None:
            raise self.error(f"the row has no {name!r}; it has {list_names(self._row)}.")
        return self._row[name]

    def is_tokenized(self) -> bool:
        """Whether the row has ``input_ids``, and none of the fields that are tokenised."""
        return self._row.get("input_ids") is not None and not any(self._row.get(n) is not None for n in FIELDS)

    def tokens(self) -> list[int]:
        """Return the row's ``input_ids`` without padding."""
        ids = self.given(self._row["input_ids"])
        check_positions(self._where, self._row, len(ids))
        return ids

    def marked_tokens(self) -> tuple[list[int], list[bool]] | None:
        """Return the row's ``input_ids`` without padding, and whether each is learnt; None for a row of another form.

        Raises:
            WhetValueError: a row of another form has masks, which apply only to ``input_ids``.
        """
        if self.is_tokenized():
            ids = self.tokens()
            return ids, counted_tokens(self._where, self._row, ids)
        masks = [name for name in MASKS if hasattr(self._row.get(name), "__len__")]
        fields = [name for name in FIELDS if self._row.get(name) is not None]
        is_text = any(isinstance(self._row[name], str) or is_messages(self._row[name]) for name in fields)
        if masks and fields and (self._row.get("input_ids") is not None or not is_text):
            raise self.error(
                f"the row has {masks[0]!r}, a mask over 'input_ids', and {fields[0]!r}, which is tokenised and learnt. "
                f"Remove one of them."
            )
        return None

    def prompt(self, prompt: Any) -> list[int]:
        """Return the token ids of a prompt for a model to continue."""
        if isinstance(prompt, str):
            return self._encode(prompt)
        if is_messages(prompt):
            self._chat.check_complete(prompt, len(prompt))
            return self._open(prompt)
        return self.given(prompt)

    def _open(self, messages: Sequence[Any]) -> list[int]:
        """Return the token ids of messages with the assistant's turn opened, or left open if it is the last message."""
        is_open = messages[-1]["role"] == "assistant"
        return self._render(messages, add_generation_prompt=not is_open, continue_final_message=is_open)

    def whole(self, answer: Any, first: int = 0) -> list[int]:
        """Return the token ids of prompt and answer with EOS. In messages, the answer begins with message ``first``."""
        if isinstance(answer, str):
            return self._with_eos(self._encode(answer))
        if is_messages(answer):
            if answer[-1]["role"] != "assistant":
                raise self.error(
                    f"the last message has the role {answer[-1]['role']!r}, and the learnt part ends with it. End with "
                    f"an 'assistant' message: remove the messages after it."
                )
            self._chat.check_complete(answer, first)
            return self._render(answer)
        return self.given(answer)

    def prompt_and_whole(self, prompt: Any, answer: Any) -> tuple[list[int], list[int]]:
        """Return the token ids of the prompt, and of prompt and answer tokenised jointly."""
        if is_messages(prompt) and isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        both_text = isinstance(prompt, str) and isinstance(answer, str)
        both_chat = is_messages(prompt) and is_messages(answer)
        if not both_text and not both_chat and any(isinstance(v, str) or is_messages(v) for v in (prompt, answer)):
            raise self.type_error(
                f"the prompt is {prompt!r:.40} and its continuation {answer!r:.40}. Give both as text, both as "
                f"messages, or both as token ids."
            )
        if both_chat:
            self._check_begins_with_answer(answer)
            self._check_weights(answer)
            whole = self.whole([*prompt, *answer], len(prompt))
            return self._open(prompt), whole
        prompt_ids = self.prompt(prompt)
        return prompt_ids, self.whole(prompt + answer) if both_text else prompt_ids + self.given(answer)

    def without_prompt(self, prompt: Any, answers: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """Return the prompt (None if the conversations contain its text), and the answers without a repeated prompt."""
        is_text, are_chats = isinstance(prompt, str), all(map(is_messages, answers))
        if is_text and are_chats and answers[0][0]["role"] != "assistant":
            if not all(any(prompt.strip() in text_of(message) for message in answer) for answer in answers):
                raise self.error(
                    f"the prompt {prompt!r:.40} is a text that the conversations do not contain. Remove the column "
                    f"'prompt', or give it as messages that they continue."
                )
            return None, answers
        alike = all(isinstance(answer, str) for answer in answers) if is_text else is_messages(prompt) and are_chats
        n = len(prompt) if alike else 0
        if n and all(len(answer) > n and answer[:n] == prompt for answer in answers):
            answers = [answer[n:] for answer in answers]
        return prompt, answers

    def _check_begins_with_answer(self, answer: Sequence[Any]) -> None:
        if answer[0]["role"] != "assistant" == answer[-1]["role"]:
            raise self.error(
                f"the continuation of the prompt begins with the role {answer[0]['role']!r}, and only the assistant's "
                f"turn is learnt. Move the messages before it to the prompt; if they repeat it, remove the prompt."
            )

    def _check_weights(self, answer: Sequence[Any]) -> None:
        if any(message["role"] == "assistant" and not is_learnt(message) for message in answer):
            raise self.error("a message of the assistant has weight 0, which only loss_on='completion' of SFT reads.")

    def conversation(self) -> tuple[Sequence[Any], int]:
        """Return the row's messages and the index of the first that may be learnt; none for a row without messages."""
        start, messages = 0, self._row.get("messages")
        if self._row.get("completion") is not None:
            prompt, completion = self.field("prompt"), self._row["completion"]
            if not (is_messages(prompt) and is_messages(completion)):
                return [], 0
            self._check_begins_with_answer(completion)
            start, messages = len(prompt), [*prompt, *completion]
        if messages is None or not is_messages(messages):
            return [], 0
        turns = (i for i in range(start, len(messages)) if is_learnt(messages[i]))
        return messages, next(turns, start)

    def assistant_spans(self, messages: Sequence[Any], first: int, ids: list[int]) -> list[tuple[int, int]]:
        """(start, end) in the conversation's ids of each turn that is learnt, from message ``first`` on."""
        turns = [i for i in range(first, len(messages)) if is_learnt(messages[i])]
        if not turns:
            raise self.error("every message of the assistant has weight 0, so nothing is learnt. Remove the row.")
        try:
            return [self._span(messages, i, ids) for i in turns]
        except WhetValueError as error:
            if not re.search(r"{%-?\s*generation\s*-?%}", str(self._tokenizer.chat_template)):
                raise
            return self._marked_spans(messages, first, ids, error)

    def _span(self, messages: Sequence[Any], turn: int, ids: list[int]) -> tuple[int, int]:
        """Return the span of one turn, from renderings of the messages before it and up to it."""
        if turn == 0:
            raise self.error(
                "messages begins with the assistant's turn, which has no prompt. Remove it, put a system message "
                "before it, or train on the last turn (loss_on='last_turn' of SFT)."
            )
        opening = self._render(messages[:turn], add_generation_prompt=True)
        closing = self._render(messages[: turn + 1]) if turn + 1 < len(messages) else ids
        start, end = common_prefix(opening, ids), common_prefix(closing, ids)
        if start < len(opening) and not self._text(ids[start:]).startswith(self._text(opening[start:])):
            raise self._inexact(turn, "before it", opening, ids)
        if closing[end:] not in ([], [self._tokenizer.eos_token_id]):
            raise self._inexact(turn, "up to it", closing, ids)
        return start, end

    def _inexact(self, turn: int, which: str, prefix: list[int], ids: list[int]) -> WhetValueError:
        i = common_prefix(prefix, ids)
        parts = (self._text(row[max(0, i - 6) : i + 12]) for row in (prefix, ids))
        return self.error(
            "messages[{}] is the assistant's, and its tokens in the conversation cannot be located exactly: the chat "
            "template renders the messages {} as ...{!r} in isolation, and as ...{!r} in the conversation. Use a "
            "template with {{% generation %}} marks (--chat-template of whet train), give each turn its own row (as "
            "its completion), or train on the last turn (loss_on='last_turn' of SFT).".format(turn, which, *parts)
        )

    def _marked_spans(
        self, messages: Sequence[Any], first: int, ids: list[int], problem: WhetValueError
    ) -> list[tuple[int, int]]:
        """Return the spans that the template marks; ``problem`` is why renderings do not delimit the turns."""
        rendered = self._chat.marked(messages)
        edges = np.flatnonzero(np.diff([0, *rendered["assistant_masks"], 0])).tolist()
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        roles = [*(message["role"] for message in messages), ""]
        ends = [i for i in range(len(messages)) if roles[i] == "assistant" and roles[i + 1] != "assistant"]
        if len(spans) != len(ends):
            raise WhetValueError(
                f"{problem} (The template has such marks, but they give {len(spans)} spans for {len(ends)} turns.)"
            ) from problem
        ending = ids[spans[-1][1] :]
        spans = [(start, end + common_prefix(ids[end:], ending)) for start, end in spans]
        return [span for span, i in zip(spans, ends, strict=True) if i >= first and is_learnt(messages[i])]

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def given(self, value: Any) -> list[int]:
        """Return given token ids unchanged, except for padding of ``input_ids``, which the ``attention_mask`` marks."""
        mask = self._row.get("attention_mask") if value is self._row.get("input_ids") else None
        given = value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else None
        if not hasattr(value, "ndim") and (given is None or isinstance(next(iter(given), None), (str, Mapping))):
            raise self.type_error(
                f"a field is {value!r:.60}, expected one text, chat messages (dicts with role and content) or "
                f"a flat list of token ids. In a batch of columns, every column has one value per row."
            )
        rows = token_rows(value, mask)
        if len(rows) != 1:
            raise self.type_error(f"{value!r:.60} holds {len(rows)} rows, expected one row of token ids.")
        return rows[0]

    def _encode(self, text: str) -> list[int]:
        """Encode ``text`` with the tokenizer's prefix tokens, once, and without its suffix tokens."""
        tokenizer: Any = self._tokenizer
        if tokenizer is None:
            raise self.type_error("the row holds text, and there is no tokenizer. Pass one, or token ids.")
        if not hasattr(tokenizer, "__call__"):  # noqa: B004
            raise self.type_error(
                f"tokenizer is {tokenizer!r:.60}, expected a tokenizer, as AutoTokenizer.from_pretrained returns."
            )
        check_unicode(self._where, text)
        ids = tokenizer(text)["input_ids"]
        plain = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not plain:
            return [token for token in ids if token == tokenizer.bos_token_id][:1]
        starts = (s for s in range(len(ids) - len(plain) + 1) if ids[s : s + len(plain)] == plain)
        before = ids[: next(starts, 0)]
        return plain if plain[: len(before)] == before else before + plain

    def _with_eos(self, ids: list[int]) -> list[int]:
        eos = self._tokenizer.eos_token_id
        if eos is None:
            raise self.error(
                "the tokenizer has no EOS token, so the model could not learn to end. Set tokenizer.eos_token, or "
                "pass token ids."
            )
        return ids if ids[-1:] == [eos] else [*ids, eos]

    def _render(self, messages: Sequence[Any], **flags: bool) -> list[int]:
        """Return the token ids of the chat template's text."""
        text = self._chat.render(messages, **flags)
        check_unicode(self._where, text)
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def _is_media(value: Any) -> bool:
    """Whether a field holds more than a name or a number."""
    if value is None or isinstance(value, (str, Number)):
        return False
    return len(value) > 0 if isinstance(value, Sized) and getattr(value, "ndim", 1) else True


def common_prefix(*rows: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    alike = (len(set(column)) == 1 for column in zip(*rows, strict=False))
    return sum(1 for _ in itertools.takewhile(bool, alike))


def list_names(row: Mapping[str, Any]) -> str:
    """Return the names of a row's fields that are not None, for errors."""
    return ", ".join(repr(name) for name, value in row.items() if value is not None) or "nothing"
