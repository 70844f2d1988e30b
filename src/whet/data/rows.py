"""Tokenisation of rows, and the order of batches.

A row is a dict, as in a JSON Lines file. Its fields may be plain strings, chat messages (lists of
``{"role": ..., "content": ...}``) or token ids, which are used unchanged. Does not pad, truncate, or store datasets: a
row is tokenised when its batch is needed.

Needs only NumPy, and the packages of the tokenizer that is passed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from whet.data.encoder import Encoder, common_prefix, list_names
from whet.data.messages import count_shared, is_messages
from whet.data.token_ids import MASKS
from whet.errors import WhetValueError, check_integer


def tokenize_prompt(row: Mapping[str, Any], tokenizer: Any) -> list[int]:
    """Return the token ids of ``row["prompt"]``, or ``input_ids`` without padding, for a model to continue.

    A string gets BOS if the tokenizer adds it, and no EOS. Messages go through the chat template, which opens the
    assistant's turn, or leaves it open if the last message is the assistant's.

    In every row with messages, here and below, ``tools`` (a list, or JSON) and ``chat_template_kwargs`` (a dict, or
    JSON) are passed to the chat template.

    Raises:
        WhetValueError: the prompt is missing or empty, there is no chat template, or the template rejects the messages
            or ignores the tools.
        WhetTypeError: the prompt has none of the three forms, or is text without a tokenizer.
    """
    encoder = Encoder("tokenize_prompt", row, tokenizer)
    ids = encoder.tokens() if encoder.is_tokenized() else encoder.prompt(encoder.field("prompt"))
    if not ids:
        raise encoder.error("the prompt is empty. Give it a token to continue from, such as BOS.")
    return ids


def tokenize_completion(row: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return ``(prompt_ids, completion_ids)`` of a row to imitate.

    A row has ``prompt`` and ``completion``; or ``messages``, the last of which is the assistant's and is the
    completion; or ``text`` (a string or token ids) or ``input_ids``, whose first token (BOS, if the tokenizer adds it)
    is the prompt. With ``input_ids``, a token counts if every mask of the row marks it (``labels``,
    ``completion_mask``, ``assistant_masks``; see ``whet.data.token_ids.counted_tokens``), and the prompt is all tokens
    before the first that counts.

    Prompt and completion text is tokenised jointly, and the prompt is the longest common prefix with the tokens of the
    prompt text, at least one token: a token across the boundary belongs to the completion. Plain text ends with EOS; a
    chat template ends its turns.

    Raises:
        WhetValueError: fields are missing or all empty, the tokenizer has no EOS token, the chat template is missing
            or rejects the messages, or the last message is not the assistant's; or a mask differs in length from
            ``input_ids``, has invalid values, or has gaps, which only ``tokenize_turns`` supports.
        WhetTypeError: two fields have different forms, or text comes without a tokenizer.
    """
    encoder = Encoder("tokenize_completion", row, tokenizer)
    if (given := encoder.marked_tokens()) is not None:
        prompt_ids, completion_ids, mask = _split_marked(encoder, *given)
        if not all(mask):
            raise encoder.error(
                "the row's masks have gaps after the first token that is learnt, which only tokenize_turns supports "
                "(loss_on='completion' of SFT)."
            )
        return prompt_ids, completion_ids
    if row.get("completion") is not None:
        prompt, ids = encoder.prompt_and_whole(encoder.field("prompt"), row["completion"])
    elif row.get("messages") is not None:
        messages = row["messages"]
        if not is_messages(messages) or len(messages) < 2:
            raise encoder.error(f"messages is {messages!r:.60}, expected two chat messages or more.")
        prompt, ids = encoder.prompt_and_whole(messages[:-1], messages[-1:])
    elif row.get("text") is not None:
        prompt, ids = [], encoder.whole(row["text"])
    else:
        raise encoder.error(
            f"the row has {list_names(row)}, expected 'prompt' and 'completion', or 'messages', or 'text'."
        )
    n_prompt = max(1, common_prefix(prompt, ids))
    if not ids:
        raise encoder.error("prompt and completion are both empty.")
    return ids[:n_prompt], ids[n_prompt:]


def tokenize_turns(row: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], list[int], list[bool]]:
    """Return ``(prompt_ids, completion_ids, completion_mask)`` of a row to imitate, with every assistant turn learnt.

    Accepts the rows of ``tokenize_completion``. In ``messages``, and in a ``completion`` of messages, the tokens of
    each assistant turn count unless its ``weight`` is 0, and no others do; the prompt is all tokens before the first
    that counts. Other rows, and conversations whose last message only is learnt, give the ids of
    ``tokenize_completion``, all of which count.

    The ids are the tokens of the whole conversation. A turn begins where the messages before it end, rendered with the
    assistant's turn opened, and ends where the messages up to it end: with the end-of-turn token, and the line break
    after it if the template writes one. Both renderings must be token prefixes of the whole, except for an EOS that a
    template writes only after the last message, and for a token across the start, which belongs to the turn. If they
    are not, as with templates that drop the reasoning of earlier turns, the template's ``{% generation %}`` marks
    delimit the turns, provided that there is one for each; the tokens that end the last turn then end every turn,
    marked or not.

    Raises:
        WhetValueError: as ``tokenize_completion``; or neither method delimits the turns exactly.
        WhetTypeError: as ``tokenize_completion``.
    """
    encoder = Encoder("tokenize_turns", row, tokenizer)
    if (given := encoder.marked_tokens()) is not None:
        return _split_marked(encoder, *given)
    messages, first = encoder.conversation()
    if len(messages) - first <= 1:
        prompt_ids, completion_ids = tokenize_completion(row, tokenizer)
        return prompt_ids, completion_ids, [True] * len(completion_ids)
    ids = encoder.whole(messages, first)
    mask = np.zeros(len(ids), bool)
    spans = encoder.assistant_spans(messages, first, ids)
    for start, end in spans:
        mask[start:end] = True
    n_prompt = max(1, spans[0][0])
    return ids[:n_prompt], ids[n_prompt:], mask[n_prompt:].tolist()


def tokenize_example(row: Mapping[str, Any], tokenizer: Any, loss_on: str) -> tuple[list[int], list[int], list[bool]]:
    """Return ``(prompt_ids, completion_ids, completion_mask)`` of a row to imitate, by ``loss_on`` of ``SFTConfig``.

    Raises:
        WhetValueError: as ``tokenize_turns``; or ``loss_on="all"`` would override the row's masks.
        WhetTypeError: as ``tokenize_turns``.
    """
    if loss_on == "completion":
        return tokenize_turns(row, tokenizer)
    prompt_ids, completion_ids = tokenize_completion(row, tokenizer)
    if loss_on == "all":
        if masks := [name for name in MASKS if row.get("input_ids") is not None and row.get(name) is not None]:
            raise WhetValueError(
                f"tokenize_example: loss_on is 'all', and the row's {masks[0]!r} marks what is learnt. Use "
                f"loss_on='completion', or leave {masks[0]} out."
            )
        prompt_ids, completion_ids = prompt_ids[:1], prompt_ids[1:] + completion_ids
    return prompt_ids, completion_ids, [True] * len(completion_ids)


def _split_marked(encoder: Encoder, ids: list[int], counted: list[bool]) -> tuple[list[int], list[int], list[bool]]:
    """Split a tokenised row into prompt, completion and its mask; the completion begins with the first learnt token."""
    if not ids:
        raise encoder.error("input_ids is empty.")
    n_prompt = max(1, counted.index(True) if True in counted else len(ids))
    return ids[:n_prompt], ids[n_prompt:], counted[n_prompt:]


def tokenize_preference(row: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], list[int], list[int]]:
    """Return ``(prompt_ids, chosen_ids, rejected_ids)`` of a preference pair.

    ``chosen`` and ``rejected`` continue ``prompt``, or contain it if there is none. A ``prompt`` of text or messages
    that both of them repeat counts once; a text prompt that occurs in both conversations is ignored. The prompt is the
    longest common prefix in tokens. Text ends with EOS. The completions of a tie are equal, and empty without a
    prompt.

    Raises:
        WhetValueError: as ``tokenize_completion``; or chosen and rejected have no common first token, or are
            conversations without the text of the prompt.
        WhetTypeError: as ``tokenize_completion``.
    """
    encoder = Encoder("tokenize_preference", row, tokenizer)
    prompt, answers = encoder.without_prompt(row.get("prompt"), [encoder.field("chosen"), encoder.field("rejected")])
    if prompt is None:
        n_shared = count_shared(*answers)
        wholes = [encoder.whole(answer, n_shared) for answer in answers]
        bare = wholes
    else:
        prompts, wholes = zip(*(encoder.prompt_and_whole(prompt, answer) for answer in answers), strict=True)
        bare = [*wholes, prompts[0]] if prompts[0] else wholes
    n_prompt = common_prefix(*bare)
    if n_prompt == 0:
        raise encoder.error(
            "chosen and rejected have no common first token, so there is no prompt to compare them on. Give the "
            "row a prompt, or use a tokenizer that adds BOS."
        )
    chosen, rejected = wholes
    return chosen[:n_prompt], chosen[n_prompt:], rejected[n_prompt:]


def shuffled_batches(n_rows: int, batch_size: int, seed: int, start_batch: int = 0) -> Iterator[list[int]]:
    """Yield the row indices of each batch, starting at ``start_batch``, indefinitely.

    Epoch e is a permutation that depends only on (seed, e), cut into ``n_rows // batch_size`` batches; the remaining
    rows are dropped from that epoch.

    Raises:
        WhetValueError: n_rows < batch_size, batch_size < 1, start_batch < 0, or one is not an integer.
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


def epoch_order(n_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of an epoch's rows, (n_rows,): a permutation that depends only on (seed, epoch)."""
    return np.random.default_rng([seed % 2**64, epoch]).permutation(n_rows)


def _batches(n_rows: int, batch_size: int, seed: int, start_batch: int) -> Iterator[list[int]]:
    per_epoch = n_rows // batch_size
    first_epoch, skipped = divmod(start_batch, per_epoch)
    for epoch in itertools.count(first_epoch):
        order = epoch_order(n_rows, seed, epoch)
        for batch in range(skipped, per_epoch):
            yield order[batch * batch_size : (batch + 1) * batch_size].tolist()
        skipped = 0
