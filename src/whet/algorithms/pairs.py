"""Preference pairs: their log-probs, their reference, their loss, and an update on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, cast

import numpy as np

from whet.config.preferences import SORTED_LOSSES, PreferenceConfig
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
        weights: factors of the pairs' losses, (B,); None: 1.
        margins: margins of a reward model's pairs, (B,); None: 0.
    """

    prompt_ids: list[list[int]]
    chosen_ids: list[list[int]]
    rejected_ids: list[list[int]]
    reference: tuple[np.ndarray, np.ndarray] | None = None
    sampler_logprobs: tuple[np.ndarray, np.ndarray] | None = None
    metrics: Mapping[str, float] = MappingProxyType({})
    weights: np.ndarray | None = None
    margins: np.ndarray | None = None

    @classmethod
    def join(cls, batches: Sequence[Pairs]) -> Pairs:
        """Join the pairs of batches, without their log-probs."""
        return cls.from_rows(row for pairs in batches for row in pairs.rows())

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
        margins = None if self.margins is None else self.margins[indices]
        return Pairs(prompts, chosen, rejected, reference, sampler_logprobs, self.metrics, margins=margins)

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
        loss_type=config.losses(),
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        f_divergence_type=config.f_divergence_type,
        f_alpha_divergence_coef=config.f_alpha_divergence_coef,
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
        weights=pairs.weights,
        n_pairs=n_pairs,
        n_tokens=n_tokens,
    )


def reference_sums(trainer: Trainer, pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """Return the reference's log-probs of chosen and rejected completions, (B,) each."""
    return sum_logprobs(trainer, pairs, reference=True)


def add_weights(trainer: Trainer, pairs: Pairs) -> Pairs:
    """Add the weights of the pairs under the current policy, if the loss has them."""
    sharp = sharp_logprobs(trainer, pairs)
    if sharp is None:
        return pairs
    own = trainer.logprobs(pairs.prompt_ids * 2, pairs.chosen_ids + pairs.rejected_ids)
    return pairs._replace(weights=pair_weights(own, sharp, pairs))


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
    both = (both * _token_weights(trainer, pairs, both.shape[1])).sum(1, dtype=np.float64)
    return both[: len(pairs.prompt_ids)], both[len(pairs.prompt_ids) :]


def _token_weights(trainer: Trainer, pairs: Pairs, width: int) -> np.ndarray:
    """Return the factors of the tokens in the sums of chosen and rejected completions, (2 B, width) or (1, 1).

    With ``ld_alpha``, it is the factor of tokens after the length of the other completion (Liu et al. 2024, LD-DPO).
    """
    alpha = getattr(trainer.config, "ld_alpha", None)
    if alpha is None:
        return np.ones((1, 1))
    shared = np.minimum(*pairs.lengths())
    return np.where(np.arange(width) < np.tile(shared, 2)[:, None], 1.0, alpha)


def sharp_logprobs(trainer: Trainer, pairs: Pairs) -> np.ndarray | None:
    """Return the policy's log-probs at temperature 1/2 of the tokens of chosen and rejected completions, (2 B, T).

    They give WPO's weights (``pair_weights``); None: the loss has none.
    """
    if not getattr(trainer.config, "use_weighting", False):
        return None
    return trainer.logprobs(pairs.prompt_ids * 2, pairs.chosen_ids + pairs.rejected_ids, temperature=0.5)


def pair_weights(logprobs: np.ndarray, sharp: np.ndarray, pairs: Pairs) -> np.ndarray:
    """Return WPO's weights of pairs, (B,): the product over both completions of exp(mean over tokens of w_t).

    Zhou et al. 2024, eq. 2: ``w_t = log p(y_t) - log sum_v p(v)^2``. With ``p_2(v) = p(v)^2 / sum_u p(u)^2``, the
    distribution at temperature 1/2, this is ``log p_2(y_t) - log p(y_t)``.

    Args:
        logprobs: (2 B, T), of the tokens of chosen and rejected completions, 0 after their ends.
        sharp: (2 B, T), the same at temperature 1/2.
        pairs: for the lengths.
    """
    lengths = np.maximum(np.concatenate(pairs.lengths()), 1)
    means = (sharp.astype(np.float64) - logprobs).sum(1) / lengths
    return np.exp(np.add(*np.split(means, 2)))


def sorts_batch(trainer: Trainer) -> bool:
    """Whether the loss compares completions of different pairs, and so needs the log-probs of the whole batch."""
    return isinstance(trainer.config, PreferenceConfig) and not set(trainer.config.losses()).isdisjoint(SORTED_LOSSES)


def _share(whole: Loss, indices: list[int], n_pairs: int) -> Loss:
    """Return the share of some pairs in the loss of a batch, whose metrics are means over pairs."""
    share = len(indices) / n_pairs
    metrics = {name: share * value for name, value in whole.metrics.items()}
    return Loss(share * whole.value, metrics, {name: side[indices] for name, side in whole.gradients.items()})


def update_on_pairs(trainer: Trainer, pairs: Pairs, pair_loss: PairLoss) -> dict[str, float]:
    """Update a trainer on the loss of pairs, and return metrics; no update without pairs.

    A loss that sorts the batch is computed before its micro-batches, in one more pass without gradient.

    Pairs with ``sampler_logprobs`` add ``sampler/logprob_difference``, the mean over tokens of the absolute difference
    from the policy's log-probs, and ``sampler/logprob_difference_max``.
    """
    if not pairs.prompt_ids:
        return {"loss": 0.0, "grad_norm": 0.0, "num_tokens": 0}
    pairs = add_reference(trainer, pairs)
    n_pairs, n_chosen = len(pairs.prompt_ids), sum(map(len, pairs.chosen_ids))
    n_completion = n_chosen + sum(map(len, pairs.rejected_ids))
    rows = pairs.rows()
    parts = trainer.micro_batches(rows)
    whole = None
    if sorts_batch(trainer) and len(parts) > 1:
        whole = pair_loss(pairs, sum_logprobs(trainer, pairs), n_pairs=n_pairs, n_tokens=n_chosen)
    sharp = sharp_logprobs(trainer, pairs)
    with trainer.update() as update:
        for indices in trainer.shard(update, rows, parts):
            part = pairs.select(indices)
            maxima: dict[str, float] = {}
            with phase("forward"):
                logprobs, entropy, mask, *_ = trainer.policy.logprobs(
                    part.prompt_ids * 2, part.chosen_ids + part.rejected_ids, return_entropy=True
                )
            with phase("loss"):
                weights = mask * _token_weights(trainer, part, mask.shape[1])
                chosen, rejected = np.split((logprobs * weights).sum(1, dtype=np.float64), 2)
                if sharp is not None:
                    of_part = sharp[[*indices, *(n_pairs + i for i in indices)], : mask.shape[1]]
                    part = part._replace(weights=pair_weights(logprobs, of_part, part))
                if whole is None:
                    loss = pair_loss(part, (chosen, rejected), n_pairs=n_pairs, n_tokens=n_chosen)
                else:
                    loss = _share(whole, indices, n_pairs)
                of_sums = [loss.gradients.get(name, np.zeros(len(chosen))) for name in _GRADIENTS]
                gradient, metrics = np.concatenate(of_sums)[:, None] * weights, dict(loss.metrics)
            if part.sampler_logprobs is not None:
                recorded = np.concatenate([side[:, : mask.shape[1]] for side in part.sampler_logprobs])
                total, maxima["sampler/logprob_difference_max"] = logprob_difference(logprobs, recorded, mask)
                metrics["sampler/logprob_difference"] = total / max(1, n_completion)
            metrics["entropy"] = float(cast(np.ndarray, entropy).sum(dtype=np.float64)) / max(1, n_completion)
            update.add(loss.value, gradient, metrics, maxima)
    return {**update.metrics, **update.maxima, "num_tokens": n_completion + 2 * sum(map(len, pairs.prompt_ids))}
