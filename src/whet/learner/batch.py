"""A batch without padding: sequences end to end, and a prompt that several completions share stored once.

A prompt's tokens are followed by its completions (without their last tokens, which predict nothing). Tokens of a
completion attend to the prompt and to their own completion, so hidden states, and gradients summed over the
completions, equal the padded batch's.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from whet import _core
from whet.config.kept_tokens import KeptTokens
from whet.errors import WhetValueError
from whet.models.architecture import ModelConfig
from whet.ops.packing import pack_sequences


class PackedBatch(NamedTuple):
    """N tokens in S sequences, and the M predictions to compute from them: int64 arrays, NumPy or torch.

    Attributes:
        input_ids: (N,).
        position_ids: (N,), counted from the first token of the prompt.
        group_offsets: (G + 1,): group g, a prompt and its completions, is the tokens
            [group_offsets[g], group_offsets[g + 1]).
        q_offsets: (S + 1,): sequence s is the tokens [q_offsets[s], q_offsets[s + 1]).
        k_offsets: (S + 1,), into ``key_rows``.
        key_rows: (K,): the keys of sequence s are the tokens key_rows[k_offsets[s] : k_offsets[s + 1]]. The last of
            them are its queries (aligned right), and a query attends to keys up to itself.
        reader_offsets: (N + 1,), into ``readers``.
        readers: (K,): the inverse of ``key_rows`` in CSR form: the positions in it that refer to token n are
            readers[reader_offsets[n] : reader_offsets[n + 1]].
        hidden_rows: (M,): the token whose hidden state predicts.
        targets: (M,): the token to predict.
        rows: (M,): the completion of the target.
        steps: (M,): the target's index in its completion.
    """

    input_ids: Any
    position_ids: Any
    group_offsets: Any
    q_offsets: Any
    k_offsets: Any
    key_rows: Any
    reader_offsets: Any
    readers: Any
    hidden_rows: Any
    targets: Any
    rows: Any
    steps: Any


def group_by_prompt(prompt_ids: Sequence[Sequence[int]]) -> dict[tuple[int, ...], list[int]]:
    """Group the indices of equal prompts, in order of first occurrence."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, prompt in enumerate(prompt_ids):
        groups.setdefault(tuple(prompt), []).append(i)
    return groups


def count_tokens(rows: Sequence[Sequence[Sequence[int]]]) -> int:
    """Count the tokens of rows, each a prompt and its completions; a shared prompt counts once."""
    prompts = group_by_prompt([row[0] for row in rows])
    return sum(map(len, prompts)) + sum(len(ids) for row in rows for ids in row[1:])


class Logprobs(NamedTuple):
    """Log-probs of a batch of completions. C is the length of the longest completion.

    Attributes:
        logprobs: (B, C) float32, or (B, C, k) of given candidates; 0 where ``mask`` is False.
        entropy: (B, C) float32, in nats, 0 where ``mask`` is False; None unless requested.
        mask: (B, C) bool: the tokens of each completion that count.
        mean: (B, C) float32, the mean of the log-probs of the vocabulary, 0 where ``mask`` is False; None unless
            requested.
        replaced_experts: share of the given experts of a token in a layer that are others than the model's own choice;
            None unless experts are given.
    """

    logprobs: np.ndarray
    entropy: np.ndarray | None
    mask: np.ndarray
    mean: np.ndarray | None = None
    replaced_experts: float | None = None


class Divergences(NamedTuple):
    """Divergences from a teacher of a batch of completions. C is the length of the longest completion.

    Attributes:
        values: (B, C) float32, in nats; 0 where ``mask`` is False.
        mask: (B, C) bool: the tokens of each completion that count.
    """

    values: np.ndarray
    mask: np.ndarray


def check_rows(
    where: str,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_mask: Sequence[Sequence[bool]] | None,
    kept_tokens: Sequence[KeptTokens | None] | None,
) -> None:
    """Raise a WhetValueError unless there are as many prompts as completions, and a mask and kept tokens fit them."""
    if len(prompts) != len(completions) or not prompts:
        raise WhetValueError(
            f"{where}: prompt_ids has {len(prompts)} rows and completion_ids has {len(completions)}. "
            f"Pass as many prompts as completions, at least one."
        )
    if completion_mask is not None and list(map(len, completion_mask)) != list(map(len, completions)):
        raise WhetValueError(
            f"{where}: completion_mask has rows of {list(map(len, completion_mask))!s:.60} values, and completion_ids "
            f"of {list(map(len, completions))!s:.60} tokens. Pass one value for each token."
        )
    if kept_tokens is None:
        return
    if len(kept_tokens) != len(completions):
        raise WhetValueError(
            f"{where}: kept_tokens has {len(kept_tokens)} entries for {len(completions)} completions. Pass one for "
            f"each, or None for all."
        )
    for i, (kept, completion) in enumerate(zip(kept_tokens, completions, strict=True)):
        if kept is not None and len(kept) != len(completion):
            raise WhetValueError(
                f"{where}: kept_tokens[{i}] has {len(kept)} sets, and completion_ids[{i}] {len(completion)} tokens. "
                f"Pass the kept_tokens of this completion."
            )


def select_candidates(
    candidates: Sequence[Any],
    completions: Sequence[Sequence[int]],
    rows: np.ndarray,
    steps: np.ndarray,
    vocab_size: int,
    where: str,
) -> np.ndarray:
    """Return the candidates (M, k) of the tokens ``steps`` of the completions ``rows``, (M,) each.

    Raises:
        WhetValueError: candidates do not fit the completions, or are not token ids.
    """
    tables = [np.asarray(table) for table in candidates]
    lengths = list(map(len, completions))
    k = next((table.shape[1] for table in tables if table.ndim == 2), 0)
    if [table.shape for table in tables] != [(n, k) for n in lengths] or not k:
        raise WhetValueError(
            f"{where}: candidates has shapes {[table.shape for table in tables]!s:.80}, expected (T, k) for the T "
            f"tokens of each completion, {lengths!s:.80}, with the same k of at least 1."
        )
    for i, table in enumerate(tables):
        if table.dtype.kind not in "iu" or (table.size and not 0 <= table.min() <= table.max() < vocab_size):
            raise WhetValueError(
                f"{where}: candidates[{i}] holds values that are not token ids from 0 to {vocab_size - 1}."
            )
    found = np.empty((len(rows), k), np.int64)
    for out, r, t in zip(found, rows, steps, strict=True):
        out[:] = tables[r][t]
    return found


def select_kept(
    kept: Sequence[KeptTokens | None] | None,
    rows: np.ndarray,
    steps: np.ndarray,
    targets: np.ndarray,
    vocab_size: int,
    where: str,
) -> KeptTokens | None:
    """Return the sets of tokens ``steps[i]`` of the completions ``rows[i]``, which are ``targets[i]``.

    Raises:
        WhetValueError: a set of another vocabulary, or without its token.
    """
    if kept is None:
        return None
    for i, each in enumerate(kept):
        if each is not None and each.vocab_size != vocab_size:
            raise WhetValueError(
                f"{where}: kept_tokens[{i}] has sets of a vocabulary of {each.vocab_size} tokens, and the model's has "
                f"{vocab_size}. Pass kept_tokens from an engine of the same model."
            )
    found = KeptTokens.select(kept, rows, steps, vocab_size)
    if found is not None:
        try:
            _core.check_kept_tokens(offsets=found.offsets, words=found.words, tokens=targets, vocab_size=vocab_size)
        except ValueError as error:
            raise WhetValueError(f"{where}: kept_tokens: {error}. Pass the kept_tokens of these completions.") from None
    return found


def count_unpadded(ids: Sequence[int], pad_id: int | None) -> int:
    """Return the number of tokens up to the last that is not padding; None: all."""
    return next((i + 1 for i in reversed(range(len(ids))) if ids[i] != pad_id), 0)


def pack_batch(prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]) -> PackedBatch:
    """Pack non-empty prompts and their completions; equal prompts are stored once."""
    ids: list[Sequence[int]] = []
    positions, keys, hidden, targets, rows, steps = ([] for _ in range(6))
    q_lengths, k_lengths, group_offsets = [0], [0], [0]
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

    for prompt, members in group_by_prompt(prompt_ids).items():
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
        group_offsets.append(n)
    key_rows = _concatenate(keys)
    readers = np.argsort(key_rows, kind="stable")
    counts = np.bincount(key_rows, minlength=n)
    arrays = (
        *map(_concatenate, (ids, positions)), group_offsets, np.cumsum(q_lengths), np.cumsum(k_lengths), key_rows,
        np.concatenate(([0], np.cumsum(counts))), readers, *map(_concatenate, (hidden, targets, rows, steps)),
    )  # fmt: skip
    return PackedBatch(*(np.ascontiguousarray(a, np.int64) for a in arrays))


def input_rows(batch: PackedBatch, i: int, n_prompt: int) -> np.ndarray:
    """Return the tokens of a packed batch that are the inputs of row i, whose completion is not empty: all its tokens
    except the last.
    """
    predictors = batch.hidden_rows[batch.rows == i]
    return np.concatenate((predictors[:1] - np.arange(n_prompt - 1, 0, -1), predictors))


class Neftune(NamedTuple):
    """Noise on embeddings (NEFTune; Jain et al. 2023, arXiv 2310.05914): ``alpha / sqrt(L d) U(-1, 1)`` is added to
    each element of the inputs of a row of L tokens.

    Attributes:
        alpha: scale of the noise.
        seed: below 2^64. The noise depends on it and on the row's tokens, not on the rest of the batch; in a prompt
            that rows share, L is the length of the longest of them.
    """

    alpha: float
    seed: int

    def draw(self, batch: PackedBatch, dim: int) -> np.ndarray:
        """Return the noise of the N tokens of a packed batch of NumPy arrays, (N, dim) float32."""
        out = np.empty((len(batch.input_ids), dim), np.float32)
        n_keys, starts = np.diff(batch.k_offsets), batch.q_offsets[:-1]
        groups = np.searchsorted(batch.group_offsets, starts, "right") - 1
        longest = np.zeros(len(batch.group_offsets), np.int64)
        np.maximum.at(longest, groups, n_keys)
        for s, (start, end) in enumerate(itertools.pairwise(batch.q_offsets)):
            keys = batch.key_rows[batch.k_offsets[s] : batch.k_offsets[s + 1]]
            path = hashlib.blake2b(batch.input_ids[keys].astype("<i8").tobytes(), digest_size=8).digest()
            key = np.array([self.seed, int.from_bytes(path, "little")], np.uint64)
            n_tokens = (longest[groups[s]] if n_keys[s] == end - start else n_keys[s]) + 1  # the last is not an input
            uniform = np.random.Generator(np.random.Philox(key=key)).random((end - start, dim), np.float32)
            out[start:end] = self.alpha / math.sqrt(n_tokens * dim) * (2 * uniform - 1)
        return out


OWN_CHOICE = 0xFFFF
"""In place of the experts of a token: the model's own choice."""


def place_experts(
    experts: Sequence[Any], prompts: Sequence[Sequence[int]], batch: PackedBatch, config: ModelConfig, where: str
) -> np.ndarray:
    """Return the experts of the N tokens of a batch, (N, mixtures, k) uint16, ``OWN_CHOICE`` where none are given.

    Args:
        experts: for each row, (T, mixtures, k) ids of experts of its last T inputs, or None. The inputs are all tokens
            except the last. Inputs of a prompt that rows share have the experts of the first row that has some.
        where: prefix of error messages.

    Raises:
        WhetValueError: experts that do not fit the model or the rows.
    """
    shape = config.n_moe_layers, config.n_used_experts
    if not config.n_experts:
        raise WhetValueError(f"{where}: experts are given, and the model is not a mixture of experts. Omit them.")
    placed = np.full((len(batch.input_ids), *shape), OWN_CHOICE, np.uint16)
    for i in reversed(range(len(experts))):
        predictors = batch.hidden_rows[batch.rows == i]
        if experts[i] is None or not len(predictors):
            continue
        ids = np.asarray(experts[i])
        inputs = input_rows(batch, i, len(prompts[i]))
        if ids.dtype.kind not in "iu" or ids.shape[1:] != shape or len(ids) > len(inputs):
            raise WhetValueError(
                f"{where}: experts of a row are {ids.dtype} of shape {ids.shape}, expected integers (T, {shape[0]}, "
                f"{shape[1]}) for at most its {len(inputs)} inputs. Pass the experts of this completion."
            )
        ordered = np.sort(ids, axis=-1)
        if ids.size and not (
            ordered.min() >= 0 and ordered.max() < config.n_experts and (np.diff(ordered.astype(np.int64)) > 0).all()
        ):
            raise WhetValueError(
                f"{where}: experts of a token are not {shape[1]} different ids from 0 to {config.n_experts - 1}. Pass "
                f"the experts of a sampler of the same model."
            )
        placed[inputs[len(inputs) - len(ids) :]] = ids
    return placed


def split_micro_batches(rows: Sequence[Sequence[Sequence[int]]], max_tokens: int) -> list[list[int]]:
    """Split rows into micro-batches of at most ``max_tokens`` packed tokens; a longer row gets its own micro-batch.

    Args:
        rows: a prompt and its completions (one, or a pair) each. Rows of one prompt share a micro-batch if they fit.
        max_tokens: 1 or more.

    Returns:
        Ascending row indices of each micro-batch; row 0 is in the first one.
    """
    parts: list[list[int]] = []
    sizes: list[int] = []
    for prompt, members in group_by_prompt([row[0] for row in rows]).items():
        for i in members:
            tokens = sum(max(0, len(completion) - 1) for completion in rows[i][1:])
            if i == members[0] or sizes[-1] + tokens > max_tokens:
                parts.append([])
                sizes.append(len(prompt))
            parts[-1].append(i)
            sizes[-1] += tokens
    bins = pack_sequences([min(size, max_tokens) for size in sizes], max_tokens)
    return sorted(sorted(i for part in bin for i in parts[part]) for bin in bins)


def _concatenate(parts: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(part, np.int64) for part in parts]) if parts else np.zeros(0, np.int64)
