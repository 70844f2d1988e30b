"""Preference pairs: their log-probs, their reference, their loss, and an update on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, cast

import numpy as np

from whet.config.preferences import PreferenceConfig
from whet.errors import WhetValueError
from whet.losses.closed_form import Loss
from whet.losses.dpo import dpo_loss
from whet.losses.terms import logprob_difference
from whet.training.phases import phase
from whet.training.reference_cache import TokenRow
from whet.training.trainer import Trainer

_GRADIENTS = ("chosen_logprobs", "rejected_logprobs")


class Pairs(NamedTuple):
    """B preference pairs. A pair of arrays belongs to the chosen and the rejected completions.

    Attributes:
        prompt_ids: B rows of token ids.
        chosen_ids: B rows of token ids.
        rejected_ids: B rows of token ids.
        reference: the reference's log-probs, summed over tokens, (B,) each; None: not computed.
        sampler_logprobs: log-probs of the tokens as recorded by the engine, (B, T) each; None: not recorded.
        metrics: ``LengthLimit`` metrics of the source batch.
    """

    prompt_ids: list[list[int]]
    chosen_ids: list[list[int]]
    rejected_ids: list[list[int]]
    reference: tuple[np.ndarray, np.ndarray] | None = None
    sampler_logprobs: tuple[np.ndarray, np.ndarray] | None = None
    metrics: Mapping[str, float] = MappingProxyType({})

    @classmethod
    def from_rows(cls, rows: Iterable[TokenRow]) -> Pairs:
        """Build pairs from rows of prompt, chosen and rejected token ids."""
        prompts, chosen, rejected = map(list, zip(*rows, strict=True)) if (rows := list(rows)) else ([], [], [])
        return cls(prompts, chosen, rejected)

    def rows(self) -> list[TokenRow]:
        """Return prompt, chosen and rejected token ids of each pair."""
        return list(zip(self.prompt_ids, self.chosen_ids, self.rejected_ids, strict=True))

    def select(self, indices: list[int]) -> Pairs:
        """Return the pairs at ``indices``."""
        prompts, chosen, rejected = ([side[i] for i in indices] for side in self[:3])
        reference, sampler_logprobs = (
            both and (both[0][indices], both[1][indices]) for both in (self.reference, self.sampler_logprobs)
        )
        return Pairs(prompts, chosen, rejected, reference, sampler_logprobs, self.metrics)

    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the token counts of chosen and rejected completions, (B,) each."""
        return np.array(list(map(len, self.chosen_ids))), np.array(list(map(len, self.rejected_ids)))


PairLoss = Callable[..., Loss]
"""``loss(pairs, (chosen, rejected), n_pairs=, n_tokens=)`` of the policy's summed log-probs, (B,) each. ``n_pairs`` and
``n_tokens`` count pairs and tokens of chosen completions of the batch, so that the losses of micro-batches add up."""


def preference_loss(
    config: PreferenceConfig, pairs: Pairs, policy: tuple[np.ndarray, np.ndarray], *, n_pairs: int, n_tokens: int
) -> Loss:
    """Return ``dpo_loss`` of pairs from the policy's summed log-probs, with the settings of ``config``."""
    chosen_lengths, rejected_lengths = pairs.lengths()
    return dpo_loss(
        *policy,
        *(pairs.reference or (None, None)),
        loss_type=config.loss_type,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
        n_pairs=n_pairs,
        n_tokens=n_tokens,
    )


def reference_sums(trainer: Trainer, pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """Return the reference's log-probs of chosen and rejected completions, (B,) each."""
    return sum_logprobs(trainer, pairs, reference=True)


def add_reference(trainer: Trainer, pairs: Pairs) -> Pairs:
    """Add the reference's sums to the pairs; return the pairs unchanged if the loss does not use the reference."""
    if not trainer.config.has_reference() or pairs.reference is not None:
        return pairs
    if not trainer.config.uses_reference_model():
        raise WhetValueError(
            "DPO: precompute_reference is set, but these pairs have no reference log-probs. Call train, or "
            "pass the rows that add_reference_logprobs returns."
        )
    return pairs._replace(reference=reference_sums(trainer, pairs))


def sum_logprobs(trainer: Trainer, pairs: Pairs, *, reference: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return the summed log-probs of chosen and rejected completions under the policy or its reference, (B,) each."""
    rows = pairs.prompt_ids * 2, pairs.chosen_ids + pairs.rejected_ids
    both = trainer.logprobs(*rows, reference=reference)
    both = both.sum(1, dtype=np.float64)
    return both[: len(pairs.prompt_ids)], both[len(pairs.prompt_ids) :]


def update_on_pairs(trainer: Trainer, pairs: Pairs, pair_loss: PairLoss) -> dict[str, float]:
    """Update a trainer on the loss of pairs, and return metrics; no update without pairs.

    Pairs with ``sampler_logprobs`` add ``sampler/logprob_difference``, the mean over tokens of the absolute difference
    from the policy's log-probs, and ``sampler/logprob_difference_max``.
    """
    if not pairs.prompt_ids:
        return {"loss": 0.0, "grad_norm": 0.0, "num_tokens": 0}
    pairs = add_reference(trainer, pairs)
    n_pairs, n_chosen = len(pairs.prompt_ids), sum(map(len, pairs.chosen_ids))
    n_completion = n_chosen + sum(map(len, pairs.rejected_ids))
    with trainer.update() as update:
        rows = pairs.rows()
        for part in map(pairs.select, trainer.shard(update, rows, trainer.micro_batches(rows))):
            maxima: dict[str, float] = {}
            with phase("forward"):
                logprobs, entropy, mask, *_ = trainer.policy.logprobs(
                    part.prompt_ids * 2, part.chosen_ids + part.rejected_ids, return_entropy=True
                )
            with phase("loss"):
                chosen, rejected = np.split(logprobs.sum(1, dtype=np.float64), 2)
                loss = pair_loss(part, (chosen, rejected), n_pairs=n_pairs, n_tokens=n_chosen)
                of_sums = [loss.gradients.get(name, np.zeros(len(chosen))) for name in _GRADIENTS]
                gradient, metrics = np.concatenate(of_sums)[:, None] * mask, dict(loss.metrics)
            if part.sampler_logprobs is not None:
                recorded = np.concatenate([side[:, : mask.shape[1]] for side in part.sampler_logprobs])
                total, maxima["sampler/logprob_difference_max"] = logprob_difference(logprobs, recorded, mask)
                metrics["sampler/logprob_difference"] = total / max(1, n_completion)
            metrics["entropy"] = float(cast(np.ndarray, entropy).sum(dtype=np.float64)) / max(1, n_completion)
            update.add(loss.value, gradient, metrics, maxima)
    return {**update.metrics, **update.maxima, "num_tokens": n_completion + 2 * sum(map(len, pairs.prompt_ids))}
