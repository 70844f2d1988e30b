"""Completions as arrays, for a checkpoint: nothing is pickled, and log-probs keep their bits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from whet.config.kept_tokens import KeptTokens
from whet.config.sampling import Completion


def store_completions(found: Mapping[tuple[int, int], Completion], header: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return sampled completions, without alternatives, as arrays by name; ``header``: other values, as JSON."""
    keys = sorted(found)
    completions = [found[key] for key in keys]
    versions = [c.policy_versions or [c.policy_version] * len(c.token_ids) for c in completions]
    facts = {
        **header,
        "keys": keys,
        "lengths": [len(c.token_ids) for c in completions],
        "finish_reasons": [c.finish_reason for c in completions],
        "texts": [c.text for c in completions],
        "policy_versions": [c.policy_version for c in completions],
        "has_logprobs": [c.logprobs is not None for c in completions],
        "experts": [None if c.experts is None else list(c.experts.shape) for c in completions],
        "vocab_size": next((c.kept_tokens.vocab_size for c in completions if c.kept_tokens is not None), None),
    }
    arrays = {
        "facts": np.frombuffer(json.dumps(facts).encode(), np.uint8),
        "token_ids": np.array([token for c in completions for token in c.token_ids], np.int64),
        "logprobs": np.array([p for c in completions for p in c.logprobs or ()], np.float64),
        "versions": np.array([version for of_one in versions for version in of_one], np.int64),
    }
    if facts["vocab_size"] is not None:
        sets = KeptTokens.concatenate([c.kept_tokens for c in completions if c.kept_tokens is not None])
        arrays |= {"kept.offsets": sets.offsets, "kept.words": sets.words}
    if any(c.experts is not None for c in completions):
        flat = [c.experts.reshape(-1).astype(np.int32) for c in completions if c.experts is not None]
        arrays["experts"] = np.concatenate(flat)
    return arrays


def load_completions(arrays: Mapping[str, np.ndarray]) -> tuple[dict[tuple[int, int], Completion], dict[str, Any]]:
    """Return the completions and the header of ``store_completions``."""
    facts = json.loads(arrays["facts"].tobytes())
    found, at, at_logprob, at_expert = {}, 0, 0, 0
    offsets, words = arrays.get("kept.offsets"), arrays.get("kept.words")
    for i, key in enumerate(facts["keys"]):
        n = facts["lengths"][i]
        logprobs = kept = experts = None
        if facts["has_logprobs"][i]:
            logprobs = arrays["logprobs"][at_logprob : at_logprob + n].tolist()
            at_logprob += n
        if offsets is not None and words is not None:
            first, last = offsets[at], offsets[at + n]
            kept = KeptTokens(offsets[at : at + n + 1] - first, words[first:last], facts["vocab_size"])
        if (shape := facts["experts"][i]) is not None:
            size = int(np.prod(shape))
            experts = arrays["experts"][at_expert : at_expert + size].astype(np.uint16).reshape(shape)
            at_expert += size
        versions = arrays["versions"][at : at + n].tolist()
        found[tuple(key)] = Completion(
            arrays["token_ids"][at : at + n].tolist(),
            logprobs,
            facts["finish_reasons"][i],
            facts["policy_versions"][i],
            facts["texts"][i],
            kept_tokens=kept,
            experts=experts,
            policy_versions=versions if len(set(versions)) > 1 else None,
        )
        at += n
    return found, facts
