"""A batch of prompts, and the completions sampled for it.

Sampling uses the ``RolloutEngine`` protocol only. Reward and preference functions get text without special tokens if
there is a tokenizer, else 1-D tensors of token ids, without prompt and padding.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple, Protocol

import numpy as np

from whet.config.kept_tokens import KeptTokens
from whet.config.sampling import Completion, SamplingParams
from whet.data.batches import as_rows
from whet.data.messages import is_messages
from whet.data.rows import tokenize_prompt
from whet.data.thinking import OPENING_TAG, Replies
from whet.data.token_ids import token_rows
from whet.errors import WhetValueError
from whet.rewards.functions import RewardBatch, RewardFunctions

_MAX_TRUNCATED = 0.25
"""Maximum share of truncated completions without a warning."""

_TOKENIZER_FIELDS = ("input_ids", "attention_mask", "token_type_ids")


class Prompts(NamedTuple):
    """A batch of prompts: token ids, their decoded form for reward functions, and the dataset's other columns."""

    ids: list[list[int]]
    decoded: list[Any]
    columns: dict[str, list[Any]]


def read_prompts(batch: Any, tokenizer: Any, where: str) -> Prompts:
    """Read prompts from texts, chats, rows (dicts with ``prompt`` as text, messages or ids), columns, or token ids.

    Token ids may have any form that ``token_rows`` reads. Other fields of rows, or of a mapping with ``input_ids``, are
    columns.
    """
    rows = as_rows(batch, as_prompt_row, where)
    if rows is None:
        ids = given = token_rows(batch)
        values = dict(batch) if isinstance(batch, Mapping) else {}
    else:
        ids = [tokenize_prompt(row, tokenizer) for row in rows]
        given = [row.get("prompt") for row in rows]
        values = {name: [row.get(name) for row in rows] for name in dict.fromkeys(itertools.chain(*rows))}
        values.pop("prompt", None)
    if rows is None or ("input_ids" in values and given[0] is None):
        values = {name: column for name, column in values.items() if name not in _TOKENIZER_FIELDS}
    columns = {name: list(column) for name, column in values.items()}
    for name, column in columns.items():
        if len(column) != len(ids):
            raise WhetValueError(f"{where}: {name} has {len(column)} values for {len(ids)} prompts.")
    decoded = [
        prompt if isinstance(prompt, str) or is_messages(prompt) else decode_for_reward(row, tokenizer)
        for prompt, row in zip(given, ids, strict=True)
    ]
    return Prompts(ids, decoded, columns)


def as_prompt_row(item: Any) -> Mapping[str, Any]:
    """Return a row; wrap a bare prompt, or a tuple of one prompt, in a row."""
    if isinstance(item, tuple) and len(item) == 1 and not isinstance(item[0], Integral):
        [item] = item
    return item if isinstance(item, Mapping) else {"prompt": item}


def decode_for_reward(token_ids: Sequence[int], tokenizer: Any) -> Any:
    """Decode token ids for reward functions: text, or without a tokenizer a 1-D tensor (without torch, an array)."""
    if tokenizer is None:
        try:
            import torch
        except ImportError:
            return np.array(token_ids, np.int64)
        return torch.tensor(token_ids, dtype=torch.int64)
    return tokenizer.decode(token_ids, skip_special_tokens=True)


def decode_completion(completion: Completion, replies: Replies | None) -> Any:
    """Decode a completion for reward functions: text up to a stop string, or without a tokenizer its token ids."""
    if replies is None:
        return decode_for_reward(completion.token_ids, None)
    return replies.text(completion.token_ids) if completion.text is None else completion.text


def to_json_value(decoded: Any) -> Any:
    """Convert the result of ``decode_for_reward`` to a JSON value."""
    return decoded.tolist() if hasattr(decoded, "tolist") else decoded


def pad_rows(rows: Sequence[Sequence[float] | np.ndarray]) -> np.ndarray:
    """Return log-probs of completions as a table (R, T) float32, padded with zeros."""
    table = np.zeros((len(rows), max(map(len, rows), default=0)), np.float32)
    for padded, row in zip(table, rows, strict=True):
        padded[: len(row)] = row
    return table


class Branch(NamedTuple):
    """Token ids of an episode up to the place where its history was rewritten, so that they do not continue.

    Attributes:
        prompt_ids: the beginning, which was not sampled.
        completion: the rest.
    """

    prompt_ids: list[int]
    completion: Completion


@dataclass
class Rollout:
    """N = prompts x n completions, grouped by prompt.

    Attributes:
        prompt_ids: N rows of token ids.
        prompts: N prompts, decoded for reward functions.
        completions: N completions.
        decoded: the completions, decoded for reward functions.
        columns: the dataset's other columns, N values each, and ``OPENING_TAG``: a tag such as "<think>" if the prompt
            opens the thinking, else "".
        extra_metrics: of episodes.
        failed: indices of the episodes whose environment failed, which have no reward.
        earlier: index of an episode -> its branches before the last one, which is its completion.
        details: further columns of the table of completions.
    """

    prompt_ids: list[list[int]]
    prompts: list[Any]
    completions: list[Completion]
    decoded: list[Any]
    columns: dict[str, list[Any]]
    extra_metrics: dict[str, float] = field(default_factory=dict)
    failed: Sequence[int] = ()
    earlier: Mapping[int, Sequence[Branch]] = field(default_factory=dict)
    details: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def completion_ids(self) -> list[list[int]]:
        """N rows of token ids."""
        return [completion.token_ids for completion in self.completions]

    def split_branches(self, rows: Sequence[int]) -> tuple[list[int], Rollout]:
        """Return the branches of the completions ``rows`` as completions, and the row of each."""
        pairs = [
            (i, branch)
            for i in rows
            for branch in (*self.earlier.get(i, ()), Branch(self.prompt_ids[i], self.completions[i]))
        ]
        branches = [branch for _, branch in pairs]
        split = Rollout([each.prompt_ids for each in branches], [], [each.completion for each in branches], [], {})
        return [i for i, _ in pairs], split

    def sampled_by_branch(self, i: int) -> list[list[bool]]:
        """Return whether each token of completion ``i`` was sampled, for each branch."""
        branches = [*(branch.completion for branch in self.earlier.get(i, ())), self.completions[i]]
        return [branch.sampled or [True] * len(branch.token_ids) for branch in branches]

    def sampler_logprobs(self, rows: Sequence[int]) -> np.ndarray | None:
        """Return (R, T) log-probs of the completions ``rows`` recorded by the engine; None if not recorded."""
        recorded = [self.completions[i].logprobs for i in rows]
        known = [row for row in recorded if row is not None]
        if len(known) < len(recorded):
            return None
        return pad_rows(known)

    def kept_tokens(self, rows: Sequence[int]) -> list[KeptTokens | None] | None:
        """Return the tokens that the completions ``rows`` were drawn from; None: the whole vocabulary."""
        recorded = [self.completions[i].kept_tokens for i in rows]
        return None if all(each is None for each in recorded) else recorded

    def experts(self, rows: Sequence[int]) -> list[np.ndarray | None] | None:
        """Return the experts of the tokens of the completions ``rows``; None: not recorded."""
        recorded = [self.completions[i].experts for i in rows]
        return None if all(each is None for each in recorded) else recorded

    def sampled(self, rows: Sequence[int]) -> list[list[bool]] | None:
        """Return whether each token of the completions ``rows`` was sampled; None: all were."""
        chosen = [self.completions[i] for i in rows]
        if all(completion.sampled is None for completion in chosen):
            return None
        return [completion.sampled or [True] * len(completion.token_ids) for completion in chosen]

    def answered(self, rows: Sequence[int]) -> list[list[bool]]:
        """Return whether each token of the completions ``rows`` holds content of a message between turns."""
        return [self.completions[i].answered or [False] * len(self.completions[i].token_ids) for i in rows]

    @property
    def truncated(self) -> np.ndarray:
        """(N,) bool, True for completions ended by ``max_new_tokens``."""
        return np.array([completion.finish_reason == "length" for completion in self.completions])

    def score(self, functions: RewardFunctions) -> RewardBatch:
        """Return the rewards of the N completions."""
        scored = functions(
            prompts=self.prompts, completions=self.decoded, completion_ids=self.completion_ids, columns=self.columns
        )
        scored.rewards[list(self.failed)] = np.nan
        return scored

    def metrics(self) -> dict[str, float]:
        """Return lengths in sampled tokens, the share of truncated completions, and the tokens of all rows."""
        owners, split = self.split_branches(range(len(self.completions)))
        lengths = np.bincount(owners, [completion.n_sampled for completion in split.completions]).astype(int).tolist()
        return {
            "completions/mean_length": float(np.mean(lengths)),
            "completions/min_length": min(lengths),
            "completions/max_length": max(lengths),
            "completions/clipped_ratio": float(np.mean(self.truncated)),
            "num_tokens": sum(map(len, split.completion_ids)) + sum(map(len, split.prompt_ids)),
            **self.extra_metrics,
        }


def warn_if_truncated(rollout: Rollout, max_new_tokens: int, where: str) -> bool:
    """Warn if ``max_new_tokens`` truncated more than a quarter of the completions; return whether it did."""
    share = float(np.mean(rollout.truncated))
    if share <= _MAX_TRUNCATED:
        return False
    warnings.warn(
        f"{where}: max_new_tokens={max_new_tokens} truncated {share:.0%} of the completions before a stop token, so "
        f"that incomplete answers are scored. Raise max_new_tokens (a reasoning model may need thousands); GRPO can "
        f"exclude them from the update (mask_truncated_completions).",
        stacklevel=3,
    )
    return True


class Sampler(Protocol):
    """Subset of ``RolloutEngine`` required by ``sample``."""

    def generate(self, prompt_ids: Sequence[Sequence[int]], n: int, sampling: SamplingParams) -> list[list[Completion]]:
        """Sample completions, see ``RolloutEngine``."""
        ...


def sample(engine: Sampler, prompts: Prompts, n: int, sampling: SamplingParams, tokenizer: Any) -> Rollout:
    """Sample ``n`` completions for each prompt, see ``choose_sampling``."""
    completions = engine.generate(prompts.ids, n, choose_sampling(prompts, sampling, tokenizer))
    return make_rollout(prompts, completions, tokenizer)


def choose_sampling(prompts: Prompts, sampling: SamplingParams, tokenizer: Any) -> SamplingParams:
    """Return the settings for a batch: a grammar begins behind the thinking that prompts open.

    Raises:
        WhetValueError: there is a grammar, and some of the prompts open the thinking.
    """
    if not sampling.grammar_settings() or tokenizer is None:
        return sampling
    replies = Replies(tokenizer)
    tags = {replies.closing_tag(ids) for ids in prompts.ids}
    if len(tags) > 1:
        raise WhetValueError(
            "sample: some prompts open the thinking and others do not, so that the grammar cannot begin behind it. "
            "Render all prompts of a batch alike."
        )
    return dataclasses.replace(sampling, grammar_after=tags.pop())


def make_rollout(prompts: Prompts, groups: Sequence[Sequence[Completion]], tokenizer: Any) -> Rollout:
    """Return the completions of each prompt as a rollout."""
    replies = None if tokenizer is None else Replies(tokenizer)
    completions = [completion for group in groups for completion in group]
    n = len(completions) // max(1, len(prompts.ids))

    def repeat(values: list[Any]) -> list[Any]:
        return [value for value in values for _ in range(n)]

    opening = [replies.opening_tag(ids) if replies else "" for ids in prompts.ids]
    return Rollout(
        prompt_ids=repeat(prompts.ids),
        prompts=repeat(prompts.decoded),
        completions=completions,
        decoded=[decode_completion(completion, replies) for completion in completions],
        columns={name: repeat(values) for name, values in {OPENING_TAG: opening, **prompts.columns}.items()},
    )


def completion_table(
    step: int, rollout: Rollout, rewards: RewardBatch | None, extra: Mapping[str, Sequence[Any]]
) -> list[dict[str, Any]]:
    """Return a dict per completion: step, prompt, completion, each function's reward, the total, and ``extra``."""
    columns: dict[str, Sequence[Any]] = {
        "prompt": [to_json_value(prompt) for prompt in rollout.prompts],
        "completion": [to_json_value(completion) for completion in rollout.decoded],
    }
    if rewards is not None:
        columns |= {f"rewards/{name}": scores.tolist() for name, scores in rewards.by_name.items()}
        columns["reward"] = rewards.rewards.tolist()
    columns |= {**extra, **rollout.details}
    return [{"step": step, **dict(zip(columns, row, strict=True))} for row in zip(*columns.values(), strict=True)]
