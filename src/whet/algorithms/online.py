"""What the algorithms that sample share: prompts in, completions and rewards out.

Sampling goes through the ``RolloutEngine`` protocol alone. Functions that judge completions see text
where there is a tokenizer (special tokens left out), and 1-D tensors of token ids where there is none,
without prompt and without padding.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from whet.batches import as_rows
from whet.config import EngineName, RolloutConfig
from whet.data import is_messages, token_rows, tokenize_prompt
from whet.errors import WhetTypeError, WhetValueError
from whet.fields import check_used
from whet.phases import phase
from whet.rewards import RewardBatch, RewardFunctions
from whet.rollout.choose import check_lengths, make_engine, with_room
from whet.rollout.protocol import RolloutEngine
from whet.sampling import Completion, SamplingParams
from whet.trainer import Trainer

RewardFn = Callable[..., Any] | Sequence[Callable[..., Any]] | RewardFunctions

_TOKENIZER_FIELDS = ("input_ids", "attention_mask", "token_type_ids")


class Prompts(NamedTuple):
    """A batch of prompts: token ids, the form that functions see, and the dataset's other columns."""

    ids: list[list[int]]
    shown: list[Any]
    columns: dict[str, list[Any]]


def read_prompts(batch: Any, tokenizer: Any, where: str) -> Prompts:
    """Prompts from texts, chats, rows (dicts with ``prompt`` as text, messages or ids), columns, or token ids.

    Token ids come in any form that ``token_rows`` takes. Other fields of rows and of a mapping with
    ``input_ids`` are columns.
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
            raise WhetValueError(f"{where}: {name} has {len(column)} values, and there are {len(ids)} prompts.")
    shown = [
        prompt if isinstance(prompt, str) or is_messages(prompt) else as_shown(row, tokenizer)
        for prompt, row in zip(given, ids, strict=True)
    ]
    return Prompts(ids, shown, columns)


def as_prompt_row(item: Any) -> Mapping[str, Any]:
    """A row as it is; a bare prompt, or a tuple that holds one alone, as a row."""
    if isinstance(item, tuple) and len(item) == 1 and not isinstance(item[0], Integral):
        [item] = item
    return item if isinstance(item, Mapping) else {"prompt": item}


def as_shown(token_ids: Sequence[int], tokenizer: Any) -> Any:
    """Token ids as functions see them: text, or without a tokenizer a 1-D tensor."""
    if tokenizer is None:
        return torch.tensor(token_ids, dtype=torch.int64)
    return tokenizer.decode(token_ids, skip_special_tokens=True)


def as_plain(shown: Any) -> Any:
    """What ``as_shown`` gave, as JSON can hold it."""
    return shown.tolist() if isinstance(shown, torch.Tensor) else shown


@dataclass
class Rollout:
    """N = prompts x n completions, those of one prompt side by side.

    Attributes:
        prompt_ids: N rows of token ids.
        prompts: N prompts in the form that functions see.
        completions: N completions.
        shown: the completions in that form.
        columns: the dataset's other columns, N values each.
    """

    prompt_ids: list[list[int]]
    prompts: list[Any]
    completions: list[Completion]
    shown: list[Any]
    columns: dict[str, list[Any]]

    @property
    def completion_ids(self) -> list[list[int]]:
        """N rows of token ids."""
        return [completion.token_ids for completion in self.completions]

    def sampler_logprobs(self, rows: Sequence[int]) -> Tensor | None:
        """(R, T) log-probs of some completions' tokens as the engine recorded them; None if it does not."""
        recorded = [self.completions[i].logprobs for i in rows]
        known = [torch.tensor(row) for row in recorded if row is not None]
        return nn.utils.rnn.pad_sequence(known, batch_first=True) if len(known) == len(recorded) else None

    @property
    def truncated(self) -> np.ndarray:
        """(N,) bool, True where ``max_new_tokens`` ended the completion."""
        return np.array([completion.finish_reason == "length" for completion in self.completions])

    def score(self, functions: RewardFunctions) -> RewardBatch:
        """The rewards of the N completions."""
        with phase("reward"):
            return functions(
                prompts=self.prompts,
                completions=self.shown,
                completion_ids=self.completion_ids,
                columns=self.columns,
            )

    def metrics(self) -> dict[str, float]:
        """Lengths in tokens, the share that no stop token ended, and the tokens of prompts and completions."""
        lengths = [len(completion.token_ids) for completion in self.completions]
        return {
            "completions/mean_length": float(np.mean(lengths)),
            "completions/min_length": min(lengths),
            "completions/max_length": max(lengths),
            "completions/clipped_ratio": float(np.mean(self.truncated)),
            "num_tokens": sum(lengths) + sum(map(len, self.prompt_ids)),
        }


def sample(engine: RolloutEngine, prompts: Prompts, n: int, sampling: SamplingParams, tokenizer: Any) -> Rollout:
    """``n`` completions for each prompt."""
    with phase("generation"):
        groups = engine.generate(prompts.ids, n, sampling)
    completions = [completion for group in groups for completion in group]

    def repeated(values: list[Any]) -> list[Any]:
        return [value for value in values for _ in range(n)]

    return Rollout(
        prompt_ids=repeated(prompts.ids),
        prompts=repeated(prompts.shown),
        completions=completions,
        shown=[as_shown(completion.token_ids, tokenizer) for completion in completions],
        columns={name: repeated(values) for name, values in prompts.columns.items()},
    )


def reward_functions(config: RolloutConfig, reward_fn: RewardFn | None) -> RewardFunctions:
    """The reward functions, called as the config says; ``RewardFunctions`` stay as they are.

    Raises:
        WhetTypeError: there are none.
        WhetValueError: ``RewardFunctions``, and the config says otherwise than they do.
    """
    if reward_fn is None:
        where = type(config).__name__.removesuffix("Config")
        raise WhetTypeError(f"{where}: reward_fn is None. Pass a function that scores completions.")
    if isinstance(reward_fn, RewardFunctions):
        weights = reward_fn.weights.tolist()
        for name, own, same in (
            ("reward_weights", weights, list(config.reward_weights) == weights),
            ("reward_policy", reward_fn.on_error, config.reward_policy == reward_fn.on_error),
            ("reward_timeout_s", reward_fn.timeout_s, config.reward_timeout_s == reward_fn.timeout_s),
        ):
            check_used(config, [name], same, f"reward_fn is RewardFunctions, which has its own, {own!r}")
        return reward_fn
    return RewardFunctions(
        reward_fn,
        weights=config.reward_weights or None,
        on_error=config.reward_policy,
        timeout_s=config.reward_timeout_s,
    )


class OnlineTrainer(Trainer):
    """The base of the training algorithms that sample.

    Args:
        engine: samples the completions; "auto", "native", "torch" or None stand for the setting of that name.
        **arguments: of ``Trainer``.

    Attributes:
        last_completions: one dict per completion of the last step: step, prompt, completion, each reward.
    """

    row_fields = ("prompt",)
    rewards: RewardFunctions | None

    def __init__(
        self,
        model: nn.Module,
        ref_model: nn.Module | None = None,
        *,
        engine: RolloutEngine | EngineName | None = None,
        **arguments: Any,
    ) -> None:
        if isinstance(engine, str):
            arguments["engine"], engine = engine, None
        super().__init__(model, ref_model, **arguments)
        config = self.config
        chosen = config.engine if engine is None else engine
        weights = config.rollout_weights
        if weights == "auto" and self.acceleration is not None and self.acceleration.dtype == torch.bfloat16:
            weights = "bf16"  # the policy multiplies these, and so does its sampler
        make = partial(make_engine, chosen, model, weights, type(self).__name__)
        self.engine = make(config.kv_bytes)
        self._make_engine = make if isinstance(chosen, str) and not config.kv_bytes else None
        self.last_completions: list[dict[str, Any]] = []

    def as_row(self, item: Any) -> Mapping[str, Any]:
        """An item of a dataset as a dict; a bare prompt is a row too."""
        return as_prompt_row(item)

    def evaluate(self, prompts: Any, *, reward_fn: RewardFn | None = None, temperature: float | None = None) -> float:
        """The mean reward of one completion per prompt, sampled from the policy as it is.

        Nothing is trained: weights, optimizer, counters and random states are as they were. The engine takes over the
        weights (``policy_version`` goes up), as it does in every step. The same weights give the same completions.

        Args:
            prompts: as ``train`` takes them, gone through once in their order; or a single batch.
            reward_fn: scores in place of the trainer's own.
            temperature: of sampling; 0: always the most probable token; None: the trainer's.

        Returns:
            The mean over the prompts that were scored; NaN if none was.

        Raises:
            RewardError: a reward function failed.
            WhetTypeError: there is no reward function, as in OnlineDPO with a preference_fn.
        """
        return self._measured(
            lambda: self.evaluation_metrics(prompts, reward_fn=reward_fn, temperature=temperature)["mean_reward"]
        )

    def evaluation_metrics(
        self, dataset: Any, *, reward_fn: RewardFn | None = None, temperature: float | None = None
    ) -> dict[str, float]:
        """``mean_reward`` as ``evaluate`` gives it, and of several reward functions each one's mean."""
        where = f"{type(self).__name__}.evaluate"
        functions = self.rewards if reward_fn is None else reward_fn
        if functions is None:
            raise WhetTypeError(f"{where}: there is no reward function, but a preference_fn. Pass reward_fn.")
        if not isinstance(functions, RewardFunctions):
            functions = reward_functions(self.config, functions)
        self.engine.sync(self.model)
        batches = enumerate(self.in_order(dataset))
        return mean_rewards([self._sample(batch, 1, i, where, temperature).score(functions) for i, (batch,) in batches])

    def sample(self, prompt_batch: Any, n: int) -> Rollout:
        """``n`` completions per prompt from the policy as it is, the same ones for one (seed, step)."""
        with phase("sync"):
            self.engine.sync(self.model)
        return self._sample(prompt_batch, n, self.step, type(self).__name__)

    def _sample(self, batch: Any, n: int, key: int, where: str, temperature: float | None = None) -> Rollout:
        """``n`` completions per prompt, the same ones for one (seed, key) and the engine's weights."""
        prompts = read_prompts(batch, self.tokenizer, where)
        check_lengths(self.model, prompts.ids, self.config.max_new_tokens, where)
        self.engine = with_room(self.engine, self._make_engine, prompts.ids, self.config.max_new_tokens)
        seed = int(np.random.SeedSequence([self.config.seed % 2**64, key]).generate_state(1)[0])
        sampling = self.config.sampling(self.stop_token_ids(), seed)
        if temperature is not None:
            sampling = dataclasses.replace(sampling, temperature=temperature)
        return sample(self.engine, prompts, n, sampling, self.tokenizer)


def reward_metrics(rewards: RewardBatch) -> dict[str, float]:
    """Mean reward, and mean and std of each function's scores, over what was scored; NaN where nothing was.

    ``reward_errors`` counts the scores that a policy replaced.
    """
    metrics = {"mean_reward": nan_mean(rewards.rewards), "reward_errors": float(rewards.n_errors)}
    for name, scores in rewards.by_name.items():
        metrics[f"rewards/{name}/mean"] = nan_mean(scores)
        metrics[f"rewards/{name}/std"] = nan_mean((scores - nan_mean(scores)) ** 2) ** 0.5
    return metrics


def mean_rewards(scored: Sequence[RewardBatch]) -> dict[str, float]:
    """``mean_reward`` over all batches, and of several functions each one's mean as ``rewards/NAME/mean``."""
    mean = nan_mean(np.concatenate([batch.rewards for batch in scored]))
    names = scored[0].by_name
    by_name = {f"rewards/{n}/mean": nan_mean(np.concatenate([batch.by_name[n] for batch in scored])) for n in names}
    return {"mean_reward": mean, **(by_name if len(by_name) > 1 else {})}


def nan_mean(values: np.ndarray) -> float:
    """Mean of the values that are not NaN; NaN if there is none."""
    scored = values[~np.isnan(values)]
    return float(scored.mean()) if scored.size else float("nan")


def completion_table(
    step: int, rollout: Rollout, rewards: RewardBatch | None, extra: Mapping[str, Sequence[Any]]
) -> list[dict[str, Any]]:
    """One dict per completion: step, prompt, completion, each function's reward, the total, and ``extra``."""
    columns: dict[str, Sequence[Any]] = {
        "prompt": [as_plain(prompt) for prompt in rollout.prompts],
        "completion": [as_plain(completion) for completion in rollout.shown],
    }
    if rewards is not None:
        columns |= {f"rewards/{name}": scores.tolist() for name, scores in rewards.by_name.items()}
        columns["reward"] = rewards.rewards.tolist()
    columns |= extra
    return [{"step": step, **dict(zip(columns, row, strict=True))} for row in zip(*columns.values(), strict=True)]


def group_std(rewards: np.ndarray) -> np.ndarray:
    """Population standard deviation of each row, of what is scored; 0 for a row with nothing scored."""
    scored = ~np.isnan(rewards)
    n = np.maximum(scored.sum(axis=1), 1)
    mean = np.where(scored, rewards, 0.0).sum(axis=1) / n
    return np.sqrt(np.where(scored, (rewards - mean[:, None]) ** 2, 0.0).sum(axis=1) / n)
