"""Rows of token ids from dicts and tensors: tokenising, and the order of batches.

A row is a dict as in a JSON Lines file. Its fields may be plain strings, chat messages (lists of
``{"role": ..., "content": ...}``) or token ids; the last are not changed. Does not pad, does not
truncate, and keeps no data sets: a row is tokenised when its batch is needed.

Needs NumPy; a tokenizer's packages only where they are used.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from whet.errors import WhetTypeError, WhetValueError, check_integer

FIELDS = ("prompt", "completion", "messages", "text", "chosen", "rejected")
"""The fields of a row that are tokenised; the others are columns of the data set."""


def token_rows(x: Any, attention_mask: Any = None) -> list[list[int]]:
    """Token ids of any common shape as rows without padding.

    Args:
        x: a (B, T) or (T,) integer tensor or array; a sequence of 1-D tensors, arrays or lists; one
            flat list of ints; or a mapping with ``input_ids`` and perhaps ``attention_mask``.
        attention_mask: of x's shape, nonzero where a token counts; padding on either side is
            stripped. None: every token counts.

    Raises:
        WhetTypeError: ids that are no integers.
        WhetValueError: more than two axes, negative ids, a mask of another shape, or one with a hole.
    """
    if isinstance(x, Mapping):
        if "input_ids" not in x:
            raise WhetValueError(f"token_rows: x has the keys {sorted(x)}, expected input_ids among them.")
        mask = x.get("attention_mask") if attention_mask is None else attention_mask
        return token_rows(x["input_ids"], mask)
    rows = _split_rows(x)
    masks = [None] * len(rows) if attention_mask is None else _split_rows(attention_mask)
    if len(masks) != len(rows):
        raise WhetValueError(f"token_rows: attention_mask has {len(masks)} rows and x has {len(rows)}.")
    return [_strip_padding(i, row, mask) for i, (row, mask) in enumerate(zip(rows, masks, strict=True))]


def _split_rows(x: Any) -> list[np.ndarray]:
    """One array per row."""
    is_array = hasattr(x, "ndim")
    if not is_array and (isinstance(x, (str, bytes)) or not isinstance(x, Sequence)):
        raise WhetTypeError(f"token_rows: x is {x!r:.60}, expected token ids in a tensor, array or list.")
    ragged = not is_array and any(_is_row(item) for item in x)
    rows = [_array(row) for row in x] if ragged else [_array(x)]
    if not ragged and rows[0].ndim == 2:
        rows = list(rows[0])
    for i, row in enumerate(rows):
        if row.ndim != 1:
            raise WhetValueError(f"token_rows: row {i} has {row.ndim} axes, expected (B, T), (T,) or a list of (T,).")
    return rows


def _is_row(item: Any) -> bool:
    return hasattr(item, "__len__") and not isinstance(item, str) and getattr(item, "ndim", 1) > 0


def _array(x: Any) -> np.ndarray:
    """A list, or a torch tensor on any device, as an array; an empty one of integers."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().tolist() if x.numel() else np.zeros(tuple(x.shape), dtype=np.int64)
    array = np.asarray(x)
    return array if array.size else array.astype(np.int64)


def _strip_padding(i: int, row: np.ndarray, mask: np.ndarray | None) -> list[int]:
    if row.dtype.kind not in "iu":
        raise WhetTypeError(f"token_rows: row {i} holds {row.dtype} values, expected integer token ids.")
    if mask is not None:
        if mask.shape != row.shape:
            raise WhetValueError(
                f"token_rows: row {i} has {len(row)} tokens and its attention_mask {len(mask)} values."
            )
        counted = np.flatnonzero(mask)
        start, stop = (counted[0], counted[-1] + 1) if counted.size else (0, 0)
        if stop - start != counted.size:
            hole = start + int(np.flatnonzero(mask[start:stop] == 0)[0])
            raise WhetValueError(
                f"token_rows: the attention_mask of row {i} has a hole at position {hole}. Only padding on "
                f"the left or right can be stripped."
            )
        row = row[start:stop]
    if row.size and row.min() < 0:
        raise WhetValueError(
            f"token_rows: row {i} holds {row.min()}, expected token ids >= 0. Mark padding in an attention_mask."
        )
    return row.tolist()


def tokenize_prompt(row: Mapping[str, Any], tokenizer: Any) -> list[int]:
    """Token ids of ``row["prompt"]``, to be continued; or of ``input_ids``, without their padding.

    A string gets BOS if, and as, the tokenizer adds it, and no EOS. Messages go through the chat
    template, which opens the assistant's turn, or leaves it open if the last message is one.

    Of every row that holds messages, here and below, ``tools`` (a list, or one as JSON) and
    ``chat_template_kwargs`` (a dict, or one as JSON) go to the chat template.

    Raises:
        WhetValueError: no prompt or an empty one, no chat template, messages that the template rejects, or tools
            that it ignores.
        WhetTypeError: the prompt is none of the three forms, or text comes without a tokenizer.
    """
    encoder = _Encoder("tokenize_prompt", row, tokenizer)
    ids = encoder.given(row["input_ids"]) if encoder.is_tokenized() else encoder.prompt(encoder.field("prompt"))
    if not ids:
        raise encoder.error("the prompt is empty. Give it a token to continue from, such as BOS.")
    return ids


def tokenize_completion(row: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], list[int]]:
    """``(prompt_ids, completion_ids)`` of a row to imitate.

    Rows: ``prompt`` and ``completion``; ``messages``, of which the last, the assistant's, is the completion; or
    ``text`` (a string or token ids) or ``input_ids``, whose first token (BOS, if the tokenizer adds it) is the prompt.

    Text of prompt and completion is tokenised together, and the prompt is what that shares with the
    prompt alone, at least one token: a token across the boundary belongs to the completion. Plain text ends
    with EOS; a chat template ends its turns itself.

    Raises:
        WhetValueError: fields are missing, all of them are empty, the tokenizer has no EOS token, the
            chat template is missing or refuses the messages, or the last message is not the assistant's.
        WhetTypeError: a field is of another form than its partner, or text comes without a tokenizer.
    """
    encoder = _Encoder("tokenize_completion", row, tokenizer)
    if row.get("completion") is not None:
        prompt, ids = encoder.prompt_and_whole(encoder.field("prompt"), row["completion"])
    elif row.get("messages") is not None:
        messages = row["messages"]
        if not is_messages(messages) or len(messages) < 2:
            raise encoder.error(f"messages is {messages!r:.60}, expected two chat messages or more.")
        prompt, ids = encoder.prompt_and_whole(messages[:-1], messages[-1:])
    elif row.get("text") is not None:
        prompt, ids = [], encoder.whole(row["text"])
    elif encoder.is_tokenized():
        prompt, ids = [], encoder.given(row["input_ids"])
    else:
        raise encoder.error(f"the row has {_names(row)}, expected 'prompt' and 'completion', or 'messages', or 'text'.")
    n_prompt = max(1, _common_prefix(prompt, ids))
    if not ids:
        raise encoder.error("prompt and completion are both empty.")
    return ids[:n_prompt], ids[n_prompt:]


def tokenize_turns(row: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], list[int], list[bool]]:
    """``(prompt_ids, completion_ids, completion_mask)`` of a row to imitate, in which every assistant's turn counts.

    Rows are those of ``tokenize_completion``. Of ``messages``, and of a ``completion`` that is messages, the tokens of
    each turn of the assistant count and those of other turns do not; the prompt is what precedes the first that counts.
    Of other rows, and where only the last message is to be learnt, it is what ``tokenize_completion`` gives, which all
    counts.

    The tokens are those of the whole conversation. A turn begins where the messages before it end, rendered with the
    assistant's turn opened, and ends where the messages up to it do: with the token that ends a turn, and the line
    break after it if the template writes one. Both renderings have to be prefixes of the whole in tokens, but for an
    EOS that a template writes behind the last message only, and for a token across the beginning, which belongs to the
    turn. Where they are not, as with templates that leave out the reasoning of earlier turns, the template's own
    ``{% generation %}`` marks tell, if there is one for each turn; what ends the last turn ends each of them, marked or
    not.

    Raises:
        WhetValueError: as ``tokenize_completion``; or neither tells the turns exactly.
        WhetTypeError: as ``tokenize_completion``.
    """
    encoder = _Encoder("tokenize_turns", row, tokenizer)
    messages, first = encoder.conversation()
    if len(messages) - first <= 1:
        prompt_ids, completion_ids = tokenize_completion(row, tokenizer)
        return prompt_ids, completion_ids, [True] * len(completion_ids)
    ids = encoder.whole(messages)
    mask = np.zeros(len(ids), bool)
    spans = encoder.assistant_spans(messages, first, ids)
    for start, end in spans:
        mask[start:end] = True
    n_prompt = max(1, spans[0][0])
    return ids[:n_prompt], ids[n_prompt:], mask[n_prompt:].tolist()


def tokenize_preference(row: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], list[int], list[int]]:
    """``(prompt_ids, chosen_ids, rejected_ids)`` of a preference pair.

    ``chosen`` and ``rejected`` continue ``prompt``, or, without one, start with it.
    The prompt is their longest common prefix in tokens. Text ends with EOS. The completions of
    a tie are equal, and without a prompt empty.

    Raises:
        WhetValueError: as ``tokenize_completion``, or chosen and rejected share no first token.
        WhetTypeError: as ``tokenize_completion``.
    """
    encoder = _Encoder("tokenize_preference", row, tokenizer)
    answers = encoder.field("chosen"), encoder.field("rejected")
    prompt = row.get("prompt")
    if prompt is None:
        wholes = [encoder.whole(answer) for answer in answers]
        bare = wholes
    else:
        prompts, wholes = zip(*(encoder.prompt_and_whole(prompt, answer) for answer in answers), strict=True)
        bare = [*wholes, prompts[0]] if prompts[0] else wholes
    n_prompt = _common_prefix(*bare)
    if n_prompt == 0:
        raise encoder.error(
            "chosen and rejected share no first token, so there is no prompt to compare them on. Give the row a "
            "prompt, or use a tokenizer that adds BOS."
        )
    chosen, rejected = wholes
    return chosen[:n_prompt], chosen[n_prompt:], rejected[n_prompt:]


def shuffled_batches(n_rows: int, batch_size: int, seed: int, start_batch: int = 0) -> Iterator[list[int]]:
    """Row indices of the batches from ``start_batch`` on, endlessly.

    Epoch e is a permutation that depends on (seed, e) only, cut into ``n_rows // batch_size`` batches;
    the rows left over at its end are dropped from it.

    Raises:
        WhetValueError: fewer rows than batch_size, batch_size below 1, start_batch below 0, or no integers.
    """
    where = "shuffled_batches"
    n_rows, batch_size = check_integer(where, "n_rows", n_rows, 0), check_integer(where, "batch_size", batch_size, 1)
    seed, start_batch = (
        check_integer(where, "seed", seed, -(2**64)),
        check_integer(where, "start_batch", start_batch, 0),
    )
    if n_rows < batch_size:
        raise WhetValueError(
            f"{where}: n_rows is {n_rows}, fewer than batch_size {batch_size}. Use a smaller batch or more rows."
        )
    return _batches(n_rows, batch_size, seed, start_batch)


def _batches(n_rows: int, batch_size: int, seed: int, start_batch: int) -> Iterator[list[int]]:
    per_epoch = n_rows // batch_size
    first_epoch, skipped = divmod(start_batch, per_epoch)
    for epoch in itertools.count(first_epoch):
        order = np.random.default_rng([seed % 2**64, epoch]).permutation(n_rows)
        for batch in range(skipped, per_epoch):
            yield order[batch * batch_size : (batch + 1) * batch_size].tolist()
        skipped = 0


def is_messages(value: Any) -> bool:
    """Whether it is a list of chat messages, mappings with a role."""
    rows = value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else ()
    return len(rows) > 0 and all(isinstance(row, Mapping) and "role" in row for row in rows)


def _names(row: Mapping[str, Any]) -> str:
    """The names of a row's fields that are not None, for errors."""
    return ", ".join(repr(name) for name, value in row.items() if value is not None) or "nothing"


class _Encoder:
    """Token ids of the fields of one row.

    Args:
        where: the caller's name, for errors.
        row: the fields, and further arguments of the chat template.
        tokenizer: for text and messages.
    """

    def __init__(self, where: str, row: Mapping[str, Any], tokenizer: Any) -> None:
        if not isinstance(row, Mapping):
            raise WhetTypeError(f"{where}: the row is {row!r:.60}, expected a dict such as {{'prompt': ...}}.")
        self._where, self._row, self._tokenizer = where, row, tokenizer

    def error(self, text: str) -> WhetValueError:
        return WhetValueError(f"{self._where}: {text}")

    def type_error(self, text: str) -> WhetTypeError:
        return WhetTypeError(f"{self._where}: {text}")

    def field(self, name: str) -> Any:
        if self._row.get(name) is None:
            raise self.error(f"the row has no {name!r}; it has {_names(self._row)}.")
        return self._row[name]

    def is_tokenized(self) -> bool:
        """Whether the row holds token ids as tokenizers name them, and no text of its own."""
        return self._row.get("input_ids") is not None and not any(self._row.get(n) is not None for n in FIELDS)

    def prompt(self, prompt: Any) -> list[int]:
        """Token ids of a prompt, to be continued."""
        if isinstance(prompt, str):
            return self._encode(prompt)
        if is_messages(prompt):
            is_open = prompt[-1]["role"] == "assistant"
            return self._apply_template(prompt, add_generation_prompt=not is_open, continue_final_message=is_open)
        return self.given(prompt)

    def whole(self, answer: Any) -> list[int]:
        """Token ids of an answer that includes its prompt, with EOS."""
        if isinstance(answer, str):
            return self._with_eos(self._encode(answer))
        if is_messages(answer):
            if answer[-1]["role"] != "assistant":
                raise self.error(
                    f"the last message has the role {answer[-1]['role']!r}, and what is learnt ends with it. End "
                    f"with an 'assistant' message: leave out what follows it."
                )
            return self._apply_template(answer)
        return self.given(answer)

    def prompt_and_whole(self, prompt: Any, answer: Any) -> tuple[list[int], list[int]]:
        """Token ids of the prompt alone, and of prompt and answer together."""
        if is_messages(prompt) and isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        both_text = isinstance(prompt, str) and isinstance(answer, str)
        both_chat = is_messages(prompt) and is_messages(answer)
        if not both_text and not both_chat and any(isinstance(v, str) or is_messages(v) for v in (prompt, answer)):
            raise self.type_error(
                f"the prompt is {prompt!r:.40} and what follows it {answer!r:.40}. Give both as text, both as "
                f"messages, or both as token ids."
            )
        prompt_ids = self.prompt(prompt)
        if both_text or both_chat:
            return prompt_ids, self.whole([*prompt, *answer] if both_chat else prompt + answer)
        return prompt_ids, prompt_ids + self.given(answer)

    def conversation(self) -> tuple[Sequence[Any], int]:
        """The row's messages, and the place of the first that may be learnt; none of another kind of row."""
        start, messages = 0, self._row.get("messages")
        if self._row.get("completion") is not None:
            prompt, completion = self.field("prompt"), self._row["completion"]
            if not (is_messages(prompt) and is_messages(completion)):
                return [], 0
            start, messages = len(prompt), [*prompt, *completion]
        if messages is None or not is_messages(messages):
            return [], 0
        turns = (i for i in range(start, len(messages)) if messages[i]["role"] == "assistant")
        return messages, next(turns, start)

    def assistant_spans(self, messages: Sequence[Any], first: int, ids: list[int]) -> list[tuple[int, int]]:
        """(start, end) in the conversation's ids of each of the assistant's turns, from message ``first`` on."""
        turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
        try:
            return [self._span(messages, i, ids) for i in turns]
        except WhetValueError as error:
            if not re.search(r"{%-?\s*generation\s*-?%}", str(self._tokenizer.chat_template)):
                raise
            return self._marked_spans(messages, first, ids, error)

    def _span(self, messages: Sequence[Any], turn: int, ids: list[int]) -> tuple[int, int]:
        """One turn's, by the renderings of the messages before it and up to it."""
        if turn == 0:
            raise self.error(
                "messages begins with the assistant's turn, which answers nothing. Leave it out, give a system message "
                "before it, or train on the last turn (loss_on='last_turn' of SFT)."
            )
        opening = self._apply_template(messages[:turn], add_generation_prompt=True)
        closing = self._apply_template(messages[: turn + 1]) if turn + 1 < len(messages) else ids
        start, end = _common_prefix(opening, ids), _common_prefix(closing, ids)
        if start < len(opening) and not self._text(ids[start:]).startswith(self._text(opening[start:])):
            raise self._inexact(turn, "before it", opening, ids)
        if closing[end:] not in ([], [self._tokenizer.eos_token_id]):
            raise self._inexact(turn, "up to it", closing, ids)
        return start, end

    def _inexact(self, turn: int, which: str, alone: list[int], ids: list[int]) -> WhetValueError:
        place = _common_prefix(alone, ids)
        parts = (self._text(row[max(0, place - 6) : place + 12]) for row in (alone, ids))
        return self.error(
            "messages[{}] is the assistant's, and its tokens in the conversation cannot be told exactly: the chat "
            "template renders the messages {} as ...{!r} alone, and as ...{!r} in the conversation. Use a template "
            "with {{% generation %}} marks, give each turn a row of its own (as its completion), or train on the last "
            "turn (loss_on='last_turn' of SFT).".format(turn, which, *parts)
        )

    def _marked_spans(
        self, messages: Sequence[Any], first: int, ids: list[int], problem: WhetValueError
    ) -> list[tuple[int, int]]:
        """Those of the template's own marks; ``problem`` is why renderings do not tell them."""
        rendered = self._apply_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        edges = np.flatnonzero(np.diff([0, *rendered["assistant_masks"], 0])).tolist()
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        roles = [*(message["role"] for message in messages), ""]
        ends = [i for i in range(len(messages)) if roles[i] == "assistant" and roles[i + 1] != "assistant"]
        if len(spans) != len(ends):
            raise WhetValueError(
                f"{problem} (It has such marks, but they give {len(spans)} parts for {len(ends)} turns.)"
            ) from problem
        ending = ids[spans[-1][1] :]
        spans = [(start, end + _common_prefix(ids[end:], ending)) for start, end in spans]
        return [span for span, i in zip(spans, ends, strict=True) if i >= first]

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def given(self, value: Any) -> list[int]:
        """Token ids as they are, without the padding that the row's ``attention_mask`` shows of its ``input_ids``."""
        mask = self._row.get("attention_mask") if value is self._row.get("input_ids") else None
        given = value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else None
        if not hasattr(value, "ndim") and (given is None or isinstance(next(iter(given), None), (str, Mapping))):
            raise self.type_error(
                f"a field holds {value!r:.60}, expected one text, chat messages (dicts with role and content) or "
                f"a flat list of token ids. In a batch of columns, every column has one value per row."
            )
        rows = token_rows(value, mask)
        if len(rows) != 1:
            raise self.type_error(f"{value!r:.60} holds {len(rows)} rows, expected one row of token ids.")
        return rows[0]

    def _encode(self, text: str) -> list[int]:
        """Ids of ``text`` with the tokenizer's prefix tokens, once, and without its suffix tokens."""
        tokenizer: Any = self._tokenizer
        if tokenizer is None:
            raise self.type_error("the row holds text, and there is no tokenizer. Pass one, or token ids.")
        if not hasattr(tokenizer, "__call__"):  # noqa: B004
            raise self.type_error(
                f"tokenizer is {tokenizer!r:.60}, expected one such as AutoTokenizer.from_pretrained makes."
            )
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

    def _apply_template(self, messages: Sequence[Any], **own: bool) -> Any:
        """Token ids of messages; or the dict with them and a mask that ``own`` asks of the tokenizer."""
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise self.error(
                "the row holds chat messages, and the tokenizer has no chat_template. Set one (in a model's folder the "
                "file chat_template.jinja), or give the row as text."
            )
        for message in messages:
            if not isinstance(message["role"], str):
                raise self.type_error(
                    f"a message has the role {message['role']!r:.40}, expected a text. Of rows that a DataLoader "
                    f"collated, pass collate_fn=list."
                )
        own = {"add_generation_prompt": False, "continue_final_message": False, "return_dict": False, **own}
        options = self._template_options({*own, "tokenize", "tools", "return_assistant_tokens_mask"})
        tools = self._from_json("tools", (list, tuple), "a list of tools")
        ids = self._call_template(messages, {**own, **options, **({"tools": list(tools)} if tools else {})})
        if tools and ids == self._call_template(messages, {**own, **options}):
            raise self.error(
                "the row has tools, and the tokenizer's chat template leaves them out. Use a template that takes "
                "tools, or leave the column out."
            )
        return ids

    def _call_template(self, messages: Sequence[Any], options: Mapping[str, Any]) -> Any:
        try:
            return self._tokenizer.apply_chat_template(list(messages), **options)
        except Exception as error:
            raise self.error(f"the chat template refuses {messages!r:.80}: {error}.") from error

    def _template_options(self, reserved: set[str]) -> dict[str, Any]:
        """The row's ``chat_template_kwargs``."""
        options = dict(self._from_json("chat_template_kwargs", Mapping, "a dict") or {})
        if clashing := reserved.intersection(options):
            raise self.error(
                f"chat_template_kwargs sets {', '.join(sorted(clashing))}, which the task sets. Leave it out."
            )
        return options

    def _from_json(self, name: str, kind: Any, expected: str) -> Any:
        """A field that may be written as JSON; an empty text is None."""
        value = self._row.get(name)
        if isinstance(value, str):
            try:
                value = json.loads(value) if value.strip() else None
            except ValueError as error:
                raise self.error(f"{name} is {value!r:.60}, expected {expected}, perhaps as JSON: {error}.") from error
        if value is not None and not isinstance(value, kind):
            raise self.type_error(f"{name} is {value!r:.60}, expected {expected}, perhaps as JSON.")
        return value


def _common_prefix(*rows: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    alike = (len(set(column)) == 1 for column in zip(*rows, strict=False))
    return sum(1 for _ in itertools.takewhile(bool, alike))
