"""Rows of token ids from dicts and tensors: tokenising, and the order of batches.

A row is a dict as in a JSON Lines file. Its fields may be plain strings, chat messages (lists of
``{"role": ..., "content": ...}``) or token ids; the last are not changed. Does not pad, does not
truncate, and keeps no data sets: a row is tokenised when its batch is needed.

Needs NumPy; a tokenizer's packages only where they are used.
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
    encoder = Encoder("tokenize_prompt", row, tokenizer)
    ids = encoder.tokens() if encoder.is_tokenized() else encoder.prompt(encoder.field("prompt"))
    if not ids:
        raise encoder.error("the prompt is empty. Give it a token to continue from, such as BOS.")
    return ids


def tokenize_completion(row: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], list[int]]:
    """``(prompt_ids, completion_ids)`` of a row to imitate.

    Rows: ``prompt`` and ``completion``; ``messages``, of which the last, the assistant's, is the completion; or
    ``text`` (a string or token ids) or ``input_ids``, whose first token (BOS, if the tokenizer adds it) is the prompt.
    Of ``input_ids``, tokens count that every mask of the row marks (``labels``, ``completion_mask`` and
    ``assistant_masks``, see ``whet.data.token_ids.counted_tokens``), and the prompt is what precedes the first.

    Text of prompt and completion is tokenised together, and the prompt is what that shares with the
    prompt alone, at least one token: a token across the boundary belongs to the completion. Plain text ends
    with EOS; a chat template ends its turns itself.

    Raises:
        WhetValueError: fields are missing, all of them are empty, the tokenizer has no EOS token, the
            chat template is missing or refuses the messages, or the last message is not the assistant's; or
            masks of another length than ``input_ids``, with other values, or with gaps, which ``tokenize_turns`` reads.
        WhetTypeError: a field is of another form than its partner, or text comes without a tokenizer.
    """
    encoder = Encoder("tokenize_completion", row, tokenizer)
    if (given := encoder.marked_tokens()) is not None:
        prompt_ids, completion_ids, mask = _split_marked(encoder, *given)
        if not all(mask):
            raise encoder.error(
                "the row's masks leave out tokens after the first that is learnt, which tokenize_turns reads "
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
    """``(prompt_ids, completion_ids, completion_mask)`` of a row to imitate, in which every assistant's turn counts.

    Rows are those of ``tokenize_completion``. Of ``messages``, and of a ``completion`` that is messages, the tokens of
    each turn of the assistant count, if its ``weight`` is not 0, and those of other turns do not; the prompt is what
    precedes the first that counts. Of other rows, and where only the last message is to be learnt, it is what
    ``tokenize_completion`` gives, which all counts.

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
    """``(prompt_ids, completion_ids, completion_mask)`` of a row to imitate, by ``loss_on`` of ``SFTConfig``.

    Raises:
        WhetValueError: as ``tokenize_turns``; or ``loss_on`` is "all", and the row has masks, which it would override.
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
    """Prompt, completion and its mask of a tokenised row: the completion begins with the first token that counts."""
    if not ids:
        raise encoder.error("input_ids is empty.")
    n_prompt = max(1, counted.index(True) if True in counted else len(ids))
    return ids[:n_prompt], ids[n_prompt:], counted[n_prompt:]


def tokenize_preference(row: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], list[int], list[int]]:
    """``(prompt_ids, chosen_ids, rejected_ids)`` of a preference pair.

    ``chosen`` and ``rejected`` continue ``prompt``, or, without one, start with it. A ``prompt`` of text or messages
    that both of them repeat counts once, and one of text that stands in both conversations is not read.
    The prompt is their longest common prefix in tokens. Text ends with EOS. The completions of
    a tie are equal, and without a prompt empty.

    Raises:
        WhetValueError: as ``tokenize_completion``; or chosen and rejected share no first token, or are conversations
            without the text of the prompt.
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


def epoch_order(n_rows: int, seed: int, epoch: int) -> np.ndarray:
    """(n_rows,): the rows of an epoch, a permutation that depends on (seed, epoch) only."""
    return np.random.default_rng([seed % 2**64, epoch]).permutation(n_rows)


def _batches(n_rows: int, batch_size: int, seed: int, start_batch: int) -> Iterator[list[int]]:
    per_epoch = n_rows // batch_size
    first_epoch, skipped = divmod(start_batch, per_epoch)
    for epoch in itertools.count(first_epoch):
        order = epoch_order(n_rows, seed, epoch)
        for batch in range(skipped, per_epoch):
            yield order[batch * batch_size : (batch + 1) * batch_size].tolist()
        skipped = 0
