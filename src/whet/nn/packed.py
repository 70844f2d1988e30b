"""A batch without padding: sequences laid end to end, and a prompt that several completions share laid once.

A prompt's tokens stand once, and after them its completions' (without the last token, which predicts nothing). A
completion's tokens see the prompt's keys and their own, so that the hidden states, and by the sum over the completions
the gradients, are those of the padded batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from whet.ops.packing import pack_sequences


class PackedBatch(NamedTuple):
    """N tokens in S sequences, and the M predictions that are asked of them. All int64.

    Attributes:
        input_ids: (N,).
        position_ids: (N,), of each token in its own prompt and completion.
        q_offsets: (S + 1,): sequence s is the tokens [q_offsets[s], q_offsets[s + 1]).
        k_offsets: (S + 1,), into ``key_rows``.
        key_rows: (K,): the keys of sequence s are the tokens key_rows[k_offsets[s] : k_offsets[s + 1]]. Its queries are
            their last ones (aligned on the right), and a query sees the keys up to itself.
        reader_offsets: (N + 1,), into ``readers``.
        readers: (K,): the inverse of ``key_rows`` in CSR form: the positions in it that refer to token n are
            readers[reader_offsets[n] : reader_offsets[n + 1]].
        hidden_rows: (M,): the token whose hidden state predicts.
        targets: (M,): the token that it predicts.
        rows: (M,): the completion that the target belongs to.
        steps: (M,): and its place there.
    """

    input_ids: Tensor
    position_ids: Tensor
    q_offsets: Tensor
    k_offsets: Tensor
    key_rows: Tensor
    reader_offsets: Tensor
    readers: Tensor
    hidden_rows: Tensor
    targets: Tensor
    rows: Tensor
    steps: Tensor


def pack_batch(prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]) -> PackedBatch:
    """The batch of these prompts, none of them empty, and their completions; equal prompts stand once."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, prompt in enumerate(prompt_ids):
        groups.setdefault(tuple(prompt), []).append(i)
    ids: list[Sequence[int]] = []
    positions, keys, hidden, targets, rows, steps = ([] for _ in range(6))
    q_lengths, k_lengths = [0], [0]
    n = 0

    def add(tokens: Sequence[int], prefix: np.ndarray) -> np.ndarray:
        nonlocal n
        own = np.arange(n, n + len(tokens))
        n += len(tokens)
        ids.append(tokens)
        positions.append(np.arange(len(prefix), len(prefix) + len(tokens)))
        keys.extend((prefix, own))
        q_lengths.append(len(tokens))
        k_lengths.append(len(prefix) + len(tokens))
        return own

    for prompt, members in groups.items():
        prefix = add(prompt, np.arange(0))
        for i in members:
            completion = completion_ids[i]
            if not len(completion):
                continue
            own = add(completion[:-1], prefix) if len(completion) > 1 else np.arange(0)
            hidden.extend((prefix[-1:], own))
            targets.append(completion)
            rows.append(np.full(len(completion), i))
            steps.append(np.arange(len(completion)))
    key_rows = _concatenate(keys)
    readers = np.argsort(key_rows, kind="stable")
    counts = np.bincount(key_rows, minlength=n)
    arrays = (
        *map(_concatenate, (ids, positions)), np.cumsum(q_lengths), np.cumsum(k_lengths), key_rows,
        np.concatenate(([0], np.cumsum(counts))), readers, *map(_concatenate, (hidden, targets, rows, steps)),
    )  # fmt: skip
    return PackedBatch(*(torch.from_numpy(np.ascontiguousarray(a, np.int64)) for a in arrays))


def token_batches(rows: Sequence[Sequence[Sequence[int]]], max_tokens: int) -> list[list[int]]:
    """Rows in micro-batches of at most ``max_tokens`` tokens of ``pack_batch``; a longer row is one by itself.

    Args:
        rows: each a prompt and its completions (one, or a pair). Those of one prompt stay together where they fit.
        max_tokens: 1 or more.

    Returns:
        The indices of each micro-batch, ascending; the first one holds row 0.
    """
    groups: dict[tuple[int, ...], list[list[int]]] = {}
    costs: dict[tuple[int, ...], list[int]] = {}
    for i, (prompt, *completions) in enumerate(rows):
        key, tokens = tuple(prompt), sum(max(0, len(completion) - 1) for completion in completions)
        members, sizes = groups.setdefault(key, []), costs.setdefault(key, [])
        if not members or sizes[-1] + tokens > max_tokens:
            members.append([])
            sizes.append(len(key))
        members[-1].append(i)
        sizes[-1] += tokens
    parts = [part for members in groups.values() for part in members]
    sizes = [min(size, max_tokens) for of_prompt in costs.values() for size in of_prompt]
    packed = [sorted(i for part in bin for i in parts[part]) for bin in pack_sequences(sizes, max_tokens)]
    return sorted(packed)


def _concatenate(parts: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(part, np.int64) for part in parts]) if parts else np.zeros(0, np.int64)
