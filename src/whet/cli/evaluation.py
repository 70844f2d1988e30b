"""What ``whet train`` measures on held-out rows: the loss, or the reward of completions. Changes no weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.algorithms.dpo import dpo_loss
from whet.algorithms.online import OnlineTrainer, nan_mean, read_prompts, sample
from whet.data import tokenize_completion, tokenize_preference
from whet.rewards import RewardBatch, RewardFunctions
from whet.trainer import Trainer

Rows = Sequence[Mapping[str, Any]]


def sft_metrics(trainer: Trainer, rows: Rows) -> dict[str, float]:
    """``loss``: mean negative log-likelihood, in nats, of the completion tokens of all rows."""
    total, n_tokens = 0.0, 0
    for batch in _chunks(rows, trainer.config.batch_size):
        pairs = [tokenize_completion(row, trainer.tokenizer) for row in batch]
        if trainer.config.loss_on == "all":
            pairs = [(prompt[:1], prompt[1:] + completion) for prompt, completion in pairs]
        prompts, completions = zip(*pairs, strict=True)
        total -= trainer.logprobs(trainer.model, prompts, completions).sum().item()
        n_tokens += sum(map(len, completions))
    return {"loss": total / max(1, n_tokens)}


def dpo_metrics(trainer: Trainer, rows: Rows) -> dict[str, float]:
    """``loss``, ``rewards/accuracies`` and ``rewards/margins`` of ``dpo_loss``, means over all rows."""
    totals = {"loss": 0.0, "rewards/accuracies": 0.0, "rewards/margins": 0.0}
    for batch in _chunks(rows, trainer.config.batch_size):
        loss, metrics = _dpo_batch(trainer, batch, len(rows))
        for name, value in {**metrics, "loss": loss.item()}.items():
            if name in totals:
                totals[name] += value
    return totals


def _dpo_batch(trainer: Trainer, batch: Rows, n_pairs: int) -> tuple[Tensor, dict[str, float]]:
    config = trainer.config
    ids = [tokenize_preference(row, trainer.tokenizer) for row in batch]
    prompts, chosen, rejected = map(list, zip(*ids, strict=True))

    def sums(logprobs: Callable[[Any, Any], Tensor]) -> Sequence[Tensor]:
        return logprobs(prompts * 2, chosen + rejected).sum(1).split(len(batch))

    policy = sums(partial(trainer.logprobs, trainer.model))
    if not config.has_reference():
        reference: Sequence[Tensor | None] = (None, None)
    elif config.precompute_reference:
        names = ("ref_chosen_logprobs", "ref_rejected_logprobs")
        reference = [torch.tensor([row[name] for row in batch]).to(policy[0]) for name in names]
    else:
        reference = sums(trainer.reference_logprobs)
    return dpo_loss(
        policy[0],
        policy[1],
        *reference,
        loss_type=config.loss_type,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        chosen_lengths=torch.tensor([len(row) for row in chosen]).to(policy[0].device),
        rejected_lengths=torch.tensor([len(row) for row in rejected]).to(policy[0].device),
        n_pairs=n_pairs,
    )


def reward_metrics(
    trainer: OnlineTrainer, rows: Rows, functions: RewardFunctions, temperature: float
) -> dict[str, float]:
    """Of one completion per prompt: ``mean_reward``, and of several functions each one's mean."""
    scored: list[RewardBatch] = []
    trainer.engine.sync(trainer.model)
    for i, batch in enumerate(_chunks(rows, trainer.config.batch_size)):
        seed = int(np.random.SeedSequence([trainer.config.seed % 2**64, i]).generate_state(1)[0])
        sampling = dataclasses.replace(trainer.config.sampling(trainer.stop_token_ids(), seed), temperature=temperature)
        prompts = read_prompts(batch, trainer.tokenizer, "evaluation")
        scored.append(sample(trainer.engine, prompts, 1, sampling, trainer.tokenizer).score(functions))
    by_name = {
        f"rewards/{name}/mean": nan_mean(np.concatenate([batch.by_name[name] for batch in scored]))
        for name in functions.names
    }
    mean = nan_mean(np.concatenate([batch.rewards for batch in scored]))
    return {"mean_reward": mean, **(by_name if len(by_name) > 1 else {})}


def _chunks(rows: Rows, size: int) -> Iterator[Rows]:
    return (rows[start : start + size] for start in range(0, len(rows), size))
