"""From files and tensors to rows of token ids: reading, tokenising, and the order of batches.

A row is a dict as in a JSON Lines file. Its fields may be plain strings, chat messages (lists of
``{"role": ..., "content": ...}``) or token ids; the last pass through as they are. Does not pad, does not
truncate, and does not hold data sets: a row becomes token ids when a batch asks for it.

Needs NumPy; ``datasets``, ``pyarrow`` and a tokenizer's own packages only where they are used.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whet.errors import MissingExtraError, WhetTypeError, WhetValueError


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines, JSON (a list of objects) or Parquet file, or of a Hugging Face dataset.

    Args:
        path: a file ending in .jsonl, .json or .parquet; any other text that names no file is taken as
            a dataset's name, and its train split is read (needs ``datasets``).

    Raises:
        WhetValueError: no such file, a file that is not what its ending says (with ``file:line`` for
            JSON Lines), or one without rows.
        MissingExtraError: Parquet without pyarrow, or a dataset's name without ``datasets``.
    """
    file = Path(path)
    if file.suffix in (".jsonl", ".json", ".parquet"):
        if not file.is_file():
            raise WhetValueError(f"read_rows: there is no file {str(path)!r}.")
        rows = _read_parquet(file) if file.suffix == ".parquet" else _read_json(file)
    elif file.exists():
        raise WhetValueError(f"read_rows: {str(path)!r} does not end in .jsonl, .json or .parquet.")
    else:
        rows = _read_dataset(str(path))
    if not rows:
        raise WhetValueError(f"read_rows: {str(path)!r} holds no rows.")
    return rows


def _read_json(file: Path) -> list[dict[str, Any]]:
    """A list of objects if the first character says so, else one object per line; empty lines are skipped."""
    content = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if content.lstrip()[:1] == b"[":
        rows = _parsed(content, str(file))
        numbered = [(f"{file}: row {i}", row) for i, row in enumerate(rows)]
    else:
        lines = enumerate(content.split(b"\n"), start=1)
        numbered = [(f"{file}:{i}", _parsed(line, f"{file}:{i}")) for i, line in lines if line.strip()]
    for where, row in numbered:
        if not isinstance(row, dict):
            raise WhetValueError(f'read_rows: {where}: {row!r:.60} is no JSON object, such as {{"prompt": ...}}.')
    return [row for _, row in numbered]


def _parsed(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise WhetValueError(f"read_rows: {where}: not JSON in UTF-8: {error}.") from error


def _read_parquet(file: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtraError(f"Reading {file}", "pyarrow", "datasets") from error
    try:
        return parquet.read_table(file).to_pylist()
    except ValueError as error:
        raise WhetValueError(f"read_rows: {file}: not Parquet: {error}.") from error


def _read_dataset(name: str) -> list[dict[str, Any]]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        what = f"read_rows: there is no file {name!r}, and reading it as a dataset's name"
        raise MissingExtraError(what, "datasets", "datasets") from error
    return [dict(row) for row in datasets.load_dataset(name, split="train")]


def token_rows(x: Any, attention_mask: Any = None) -> list[list[int]]:
    """Token ids of any common shape as rows without padding.

    Args:
        x: a (B, T) or (T,) integer tensor or array; a sequence of 1-D tensors, arrays or lists; one
            flat list of ints; or a mapping with ``input_ids`` and perhaps ``attention_mask``.
        attention_mask: of x's shape, nonzero where a token counts; the padding that it shows is
            stripped from either side. None counts every token.

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
    return [_unpadded(i, row, mask) for i, (row, mask) in enumerate(zip(rows, masks, strict=True))]


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


def _unpadded(i: int, row: np.ndarray, mask: np.ndarray | None) -> list[int]:
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
    """Token ids of ``row["prompt"]``, ready to be continued.

    A string gets BOS if, and as, the tokenizer adds it, and no EOS. Messages go through the chat
    template, which opens the assistant's turn, or leaves it open if the last message is one.

    Raises:
        WhetValueError: no prompt or an empty one, no chat template, or messages that the template refuses.
        WhetTypeError: the prompt is none of the three forms, or text comes without a tokenizer.
    """
    where = "tokenize_prompt"
    ids = _prompt_ids(_field(row, "prompt", where), tokenizer, where)
    if not ids:
        raise WhetValueError(f"{where}: the prompt is empty. Give it a token to continue from, such as BOS.")
    return ids


def tokenize_completion(row: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], list[int]]:
    """``(prompt_ids, completion_ids)`` of a row to imitate.

    Rows: ``prompt`` and ``completion``; ``messages``, of which the last is the completion; or ``text``
    (a string or token ids), whose first token (BOS, if the tokenizer adds it) is the prompt.

    Text of prompt and completion is tokenised together, and the prompt is what that shares with the
    prompt alone, at least one token: a token across the border belongs to the completion. Plain text ends
    with EOS; a chat template ends its turns itself.

    Raises:
        WhetValueError: fields are missing, all of them are empty, the tokenizer has no EOS token, or the
            chat template is missing or refuses the messages.
        WhetTypeError: a field is of another form than its partner, or text comes without a tokenizer.
    """
    where = "tokenize_completion"
    if row.get("completion") is not None:
        prompt, ids = _prompt_and_whole(_field(row, "prompt", where), row["completion"], tokenizer, where)
    elif row.get("messages") is not None:
        messages = row["messages"]
        if not _is_messages(messages) or len(messages) < 2:
            raise WhetValueError(f"{where}: messages is {messages!r:.60}, expected two chat messages or more.")
        prompt, ids = _prompt_and_whole(messages[:-1], messages[-1:], tokenizer, where)
    elif row.get("text") is not None:
        prompt, ids = [], _whole(row["text"], tokenizer, where)
    else:
        raise WhetValueError(
            f"{where}: the row has {', '.join(map(repr, row)) or 'nothing'}, expected 'prompt' and "
            f"'completion', or 'messages', or 'text'."
        )
    n_prompt = max(1, _common_prefix(prompt, ids))
    if not ids:
        raise WhetValueError(f"{where}: prompt and completion are both empty.")
    return ids[:n_prompt], ids[n_prompt:]


def tokenize_preference(row: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], list[int], list[int]]:
    """``(prompt_ids, chosen_ids, rejected_ids)`` of a preference pair.

    ``chosen`` and ``rejected`` continue ``prompt``, or, without one, hold it as their common beginning.
    The prompt is the longest run of tokens that all of them begin with. Text ends with EOS.

    Raises:
        WhetValueError: as ``tokenize_completion``, or chosen and rejected share no first token.
        WhetTypeError: as ``tokenize_completion``.
    """
    where = "tokenize_preference"
    answers = _field(row, "chosen", where), _field(row, "rejected", where)
    prompt = row.get("prompt")
    if prompt is None:
        wholes = [_whole(answer, tokenizer, where) for answer in answers]
        bare = wholes
    else:
        prompts, wholes = zip(*(_prompt_and_whole(prompt, a, tokenizer, where) for a in answers), strict=True)
        bare = [*wholes, prompts[0]] if prompts[0] else wholes
    n_prompt = _common_prefix(*bare)
    if n_prompt == 0:
        raise WhetValueError(
            f"{where}: chosen and rejected share no first token, so there is no prompt to compare them on. "
            f"Give the row a prompt, or use a tokenizer that adds BOS."
        )
    chosen, rejected = wholes
    return chosen[:n_prompt], chosen[n_prompt:], rejected[n_prompt:]


def shuffled_batches(n_rows: int, batch_size: int, seed: int, start_batch: int = 0) -> Iterator[list[int]]:
    """Row indices of batch ``start_batch`` and all that follow, without end.

    Epoch e is a permutation that depends on (seed, e) alone, cut into ``n_rows // batch_size`` batches;
    the rows that are left over at its end wait for the next epoch's order.

    Raises:
        WhetValueError: fewer rows than a batch holds, batch_size below 1, or start_batch below 0.
    """
    if batch_size < 1 or n_rows < batch_size or start_batch < 0:
        raise WhetValueError(
            f"shuffled_batches: n_rows is {n_rows}, batch_size {batch_size} and start_batch {start_batch}; "
            f"expected 1 <= batch_size <= n_rows and start_batch >= 0. Use a smaller batch or more rows."
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


def _field(row: Mapping[str, Any], name: str, where: str) -> Any:
    if row.get(name) is None:
        raise WhetValueError(f"{where}: the row has no {name!r}; it has {', '.join(map(repr, row)) or 'nothing'}.")
    return row[name]


def _is_messages(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(isinstance(m, Mapping) for m in value)


def _prompt_ids(prompt: Any, tokenizer: Any, where: str) -> list[int]:
    if isinstance(prompt, str):
        return _encoded(prompt, tokenizer, where)
    if _is_messages(prompt):
        return _chat_ids(prompt, tokenizer, where, to_be_continued=True)
    return _given_ids(prompt, where)


def _whole(answer: Any, tokenizer: Any, where: str) -> list[int]:
    """Ids of something that holds its own prompt, with its end."""
    if isinstance(answer, str):
        return _with_eos(_encoded(answer, tokenizer, where), tokenizer, where)
    if _is_messages(answer):
        return _chat_ids(answer, tokenizer, where)
    return _given_ids(answer, where)


def _prompt_and_whole(prompt: Any, answer: Any, tokenizer: Any, where: str) -> tuple[list[int], list[int]]:
    """Token ids of the prompt alone, and of prompt and answer together."""
    if _is_messages(prompt) and isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    both_text = isinstance(prompt, str) and isinstance(answer, str)
    both_chat = _is_messages(prompt) and _is_messages(answer)
    if not both_text and not both_chat and any(isinstance(v, str) or _is_messages(v) for v in (prompt, answer)):
        raise WhetTypeError(
            f"{where}: the prompt is {prompt!r:.40} and what follows it {answer!r:.40}. Give both as text, "
            f"both as messages, or both as token ids."
        )
    prompt_ids = _prompt_ids(prompt, tokenizer, where)
    if both_text or both_chat:
        return prompt_ids, _whole([*prompt, *answer] if both_chat else prompt + answer, tokenizer, where)
    return prompt_ids, prompt_ids + _given_ids(answer, where)


def _given_ids(value: Any, where: str) -> list[int]:
    rows = token_rows(value)
    if len(rows) != 1:
        raise WhetTypeError(f"{where}: {value!r:.60} holds {len(rows)} rows, expected one row of token ids.")
    return rows[0]


def _encoded(text: str, tokenizer: Any, where: str) -> list[int]:
    """Ids of ``text`` with what the tokenizer puts before it, once, and without what it puts after it."""
    if tokenizer is None:
        raise WhetTypeError(f"{where}: the row holds text, and there is no tokenizer. Pass one, or token ids.")
    ids = tokenizer(text)["input_ids"]
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not plain:
        return [token for token in ids if token == tokenizer.bos_token_id][:1]
    starts = (s for s in range(len(ids) - len(plain) + 1) if ids[s : s + len(plain)] == plain)
    before = ids[: next(starts, 0)]
    return plain if plain[: len(before)] == before else before + plain


def _with_eos(ids: list[int], tokenizer: Any, where: str) -> list[int]:
    eos = tokenizer.eos_token_id
    if eos is None:
        raise WhetValueError(
            f"{where}: the tokenizer has no EOS token, so the model could not learn to end. Set "
            f"tokenizer.eos_token, or pass token ids."
        )
    return ids if ids[-1:] == [eos] else [*ids, eos]


def _chat_ids(messages: Sequence[Any], tokenizer: Any, where: str, to_be_continued: bool = False) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        raise WhetValueError(
            f"{where}: the row holds chat messages, and the tokenizer has no chat_template. Set one, or give "
            f"the row as text."
        )
    open_turn = to_be_continued and messages[-1].get("role") == "assistant"
    try:
        return tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=to_be_continued and not open_turn,
            continue_final_message=open_turn,
            return_dict=False,
        )
    except Exception as error:
        raise WhetValueError(f"{where}: the chat template refuses {messages!r:.80}: {error}.") from error


def _common_prefix(*rows: Sequence[int]) -> int:
    """How many first tokens all rows share."""
    alike = (len(set(column)) == 1 for column in zip(*rows, strict=False))
    return sum(1 for _ in itertools.takewhile(bool, alike))
