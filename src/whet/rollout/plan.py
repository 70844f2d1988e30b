"""The plan of sampling ahead: which version of the weights samples which token.

With a lag of K, step t trains on completions that the weights after step t - K sampled, or the first weights if there
are fewer: version v, the weights after v steps, samples the batch of step v + K while steps v to v + K - 1 train. With
M tokens between versions, a completion is continued by the next version after each M tokens, up to version t - 1: its
first M tokens have the lag K, the next K - 1, and the last ones at least 1. The rest of the sequence is computed again
with the new weights, so that each log-prob is of one version. Segment j > 0 draws with the seed of (seed, j).

The plan is a function of (step, lag, tokens), not of time. A run that is continued past its last step begins as at its
start.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import NamedTuple

import numpy as np

from whet.config.kept_tokens import KeptTokens
from whet.config.sampling import Completion, SamplingParams


class Request(NamedTuple):
    """Completions that a step needs: ``n`` for each prompt."""

    prompt_ids: list[list[int]]
    n: int
    sampling: SamplingParams

    def digest(self) -> str:
        """Return a digest of the prompts and ``n``, by which a resumed run recognises them."""
        return hashlib.sha256(repr((self.prompt_ids, self.n)).encode()).hexdigest()


def share_of(step: int, first: int, version: int, tokens: int, longest: int) -> int | None:
    """Return the number of tokens up to which a version samples a step's completions; None: it samples none of them.

    Args:
        first: version that begins them.
        tokens: M.
        longest: maximum number of tokens of a completion.
    """
    last = max(first, step - 1) if tokens else first
    if not first <= version <= last:
        return None
    return longest if version == last else min(longest, tokens * (version - first + 1))


def lags(completion: Completion, step: int) -> np.ndarray:
    """Return the lag of each token in steps, when ``step`` trains on it."""
    versions = completion.policy_versions or [completion.policy_version] * len(completion.token_ids)
    return step - np.array(versions, np.int64)


def join_segments(begun: Completion, more: Completion, n_prompt: int) -> Completion:
    """Return a completion and its continuation as one."""
    n = len(begun.token_ids)
    versions = begun.policy_versions or [begun.policy_version] * n
    kept = [each.kept_tokens for each in (begun, more) if each.kept_tokens is not None]
    experts = None
    if begun.experts is not None and more.experts is not None:  # of each token, as its version chose them
        experts = np.concatenate([begun.experts, more.experts[n_prompt + n - 1 :]])
    return dataclasses.replace(
        more,
        token_ids=begun.token_ids + more.token_ids,
        logprobs=None if begun.logprobs is None or more.logprobs is None else begun.logprobs + more.logprobs,
        policy_versions=versions + [more.policy_version] * len(more.token_ids),
        kept_tokens=KeptTokens.concatenate(kept) if kept else None,
        experts=experts,
    )
