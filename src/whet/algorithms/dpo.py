"""Direct Preference Optimization: prefer chosen over rejected completions, without a reward model.

With c and r the policy's log-ratios to the reference, summed over the chosen and the rejected
completion, d = c - r (Rafailov et al. 2023, eq. 7):

    l = -log sigmoid(beta d)

The members of the family differ in the function of c, r and d (see ``dpo_loss``). Assumes that both
completions answer the same prompt; prompt tokens never count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from whet.algorithms.masked import check_float_tensor, check_shapes, sampler_gap
from whet.batches import check_row_counts, is_batch, is_rows
from whet.config import DPOConfig, DPOLossType, check_dpo_options
from whet.data import token_rows, tokenize_preference
from whet.errors import WhetTypeError, WhetValueError
from whet.nn.causal_lm import completion_logprobs
from whet.phases import phase
from whet.reference_cache import ReferenceCache
from whet.trainer import Trainer, has_adapters

_PER_TOKEN = ("ipo", "sigmoid_norm")
_REFERENCE = ("ref_chosen_logprobs", "ref_rejected_logprobs")


class Pairs(NamedTuple):
    """B preference pairs: rows of token ids, and the reference's sums (B,) where they are known."""

    prompt_ids: list[list[int]]
    chosen_ids: list[list[int]]
    rejected_ids: list[list[int]]
    reference: tuple[Tensor, Tensor] | None = None


class DPO(Trainer):
    """Direct Preference Optimization. The arguments are those of ``Trainer``."""

    config_class = DPOConfig
    row_fields = ("prompt", "chosen", "rejected")

    def uses_reference(self) -> bool:
        """Whether a reference model stands by; precomputed log-probs need none."""
        return self.config.has_reference() and not self.config.precompute_reference

    def train_step(self, prompt: Any, chosen: Any = None, rejected: Any = None) -> dict[str, float]:
        """One update on a batch of pairs.

        Args:
            prompt: B prompts as ``whet.data.token_rows`` takes token ids, a (B, P) tensor for one; or, alone,
                a list of rows: dicts that ``whet.data.tokenize_preference`` reads, with
                ``ref_chosen_logprobs`` and ``ref_rejected_logprobs`` (sums) if they are precomputed.
            chosen: B completions without their prompts, likewise.
            rejected: B completions, likewise.

        Returns:
            Metrics: ``loss``, those of ``dpo_loss``, ``entropy`` (mean per completion token), and those of
            every step.

        Raises:
            WhetValueError: rows that do not match, or ``precompute_reference`` without reference log-probs.
        """
        return self.take_step(lambda: update_on_pairs(self, self._pairs(prompt, chosen, rejected)))

    def train(self, dataset: Any, steps: int | None = None) -> dict[str, float]:
        """As ``Trainer.train``; with ``precompute_reference`` the reference's log-probs come first."""
        if self.config.precompute_reference and self.config.has_reference():
            dataset = self.add_reference_logprobs(dataset)
        return super().train(dataset, steps)

    def add_reference_logprobs(self, rows: Any) -> list[Mapping[str, Any]]:
        """The rows with ``ref_chosen_logprobs`` and ``ref_rejected_logprobs``, summed over the completion.

        Of ``ref_model``, or of the policy, if it has not been trained yet. Rows that have them keep them, and those
        that ``reference_cache`` knows are not computed again.

        Raises:
            WhetTypeError: not a sequence of rows.
            WhetValueError: there is no reference: the policy has been trained, and none was passed.
        """
        if not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__") or any(map(is_batch, rows)):
            raise WhetTypeError("DPO: precompute_reference needs a sequence of rows, not of ready batches.")
        done = [self.as_row(row) for row in rows]
        missing = [i for i, row in enumerate(done) if any(row.get(name) is None for name in _REFERENCE)]
        if not missing:
            return done
        pairs = self._pairs([done[i] for i in missing], None, None)
        ids = list(zip(pairs.prompt_ids, pairs.chosen_ids, pairs.rejected_ids, strict=True))
        cache = self._reference_cache() if self.config.reference_cache else None
        known = {j: sums for j, row in enumerate(ids) if cache and (sums := cache[row])}
        unknown = [j for j in range(len(ids)) if j not in known]
        for start in range(0, len(unknown), self.config.batch_size):
            part = unknown[start : start + self.config.batch_size]
            sides = map(list, zip(*(ids[j] for j in part), strict=True))
            chosen, rejected = self._reference_sums(Pairs(*sides))  # pyright: ignore[reportArgumentType]
            new = dict(zip(part, zip(chosen.tolist(), rejected.tolist(), strict=True), strict=True))
            if cache:
                cache.add((ids[j], sums) for j, sums in new.items())
            known |= new
        for j, i in enumerate(missing):
            done[i] = {**done[i], **dict(zip(_REFERENCE, known[j], strict=True))}
        return done

    def _reference_cache(self) -> ReferenceCache:
        arithmetic = "torch" if self.acceleration is None else str(self.acceleration.dtype).removeprefix("torch.")
        if self.ref_model is not None:
            return ReferenceCache(self.config.reference_cache, self.ref_model, arithmetic)
        return ReferenceCache(self.config.reference_cache, self.model, arithmetic, has_adapters(self.model))

    def _reference_sums(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        if self.ref_model is not None or has_adapters(self.model):
            return reference_sums(self, pairs)
        if self.n_updates:
            raise WhetValueError(
                "DPO: precompute_reference is set, the policy has been trained already, and there is no "
                "ref_model. Pass ref_model, or the rows that add_reference_logprobs returned before."
            )
        return _pair_sums(pairs, partial(self.logprobs, self.model))

    def _pairs(self, prompt: Any, chosen: Any, rejected: Any) -> Pairs:
        if chosen is not None and rejected is not None:
            rows = token_rows(prompt), self.completion_rows(chosen), self.completion_rows(rejected)
            check_row_counts("DPO", self.row_fields, rows)
            return Pairs(*rows)
        if not is_rows(prompt):
            raise WhetTypeError("DPO: expected prompt, chosen and rejected, or a list of rows (dicts).")
        ids = zip(*(tokenize_preference(row, self.tokenizer) for row in prompt), strict=True)
        pairs = Pairs(*map(list, ids))  # pyright: ignore[reportArgumentType]
        if any(row.get(name) is None for row in prompt for name in _REFERENCE):
            return pairs
        known = [torch.tensor([float(row[name]) for row in prompt]) for name in _REFERENCE]
        return pairs._replace(reference=(known[0], known[1]))


def reference_sums(trainer: Trainer, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """The reference's log-probs of chosen and rejected completions, (B,) each."""
    return _pair_sums(pairs, trainer.reference_logprobs)


def _pair_sums(pairs: Pairs, logprobs: Callable[[Any, Any], Tensor]) -> tuple[Tensor, Tensor]:
    both = logprobs(pairs.prompt_ids * 2, pairs.chosen_ids + pairs.rejected_ids).sum(1)
    chosen, rejected = both.split(len(pairs.prompt_ids))
    return chosen, rejected


def update_on_pairs(trainer: Trainer, pairs: Pairs, sampler: tuple[Tensor, Tensor] | None = None) -> dict[str, float]:
    """One update of a trainer whose config is a ``PreferenceConfig``, and its metrics.

    With ``sampler``, the log-probs of chosen and rejected tokens as the engine recorded them, (B, T) each, how far they
    are from the policy's: ``sampler/log_ratio``, the mean of |difference| over tokens, and its ``_max``.
    """
    config, reference = trainer.config, pairs.reference
    if not config.has_reference():
        reference = None
    elif reference is None and not trainer.uses_reference():
        raise WhetValueError(
            "DPO: precompute_reference is set, but these pairs have no reference log-probs. Call train, or "
            "pass the rows that add_reference_logprobs returns."
        )
    elif reference is None:
        reference = reference_sums(trainer, pairs)
    n_pairs = len(pairs.prompt_ids)
    n_completion = sum(map(len, pairs.chosen_ids)) + sum(map(len, pairs.rejected_ids))
    worst: list[float] = []

    def loss_of(part: list[int]) -> tuple[Tensor, dict[str, float]]:
        prompts, chosen_ids, rejected_ids = ([side[i] for i in part] for side in pairs[:3])
        with phase("forward"):
            logprobs, entropy, mask = completion_logprobs(
                trainer.model,
                prompts * 2,
                chosen_ids + rejected_ids,
                return_entropy=True,
            )
        with phase("loss"):
            chosen, rejected = logprobs.sum(1).split(len(prompts))
            chosen_lengths, rejected_lengths = mask.sum(1).split(len(prompts))
            ref_chosen, ref_rejected = (side[part] for side in reference) if reference else (None, None)
            loss, metrics = dpo_loss(
                chosen,
                rejected,
                ref_chosen,
                ref_rejected,
                loss_type=config.loss_type,
                beta=config.beta,
                label_smoothing=config.label_smoothing,
                chosen_lengths=chosen_lengths,
                rejected_lengths=rejected_lengths,
                n_pairs=n_pairs,
            )
        if sampler is not None:
            recorded = torch.cat([side[part, : mask.shape[1]] for side in sampler]).to(mask.device)
            total, largest = sampler_gap(logprobs, recorded, mask)
            metrics["sampler/log_ratio"] = total / max(1, n_completion)
            worst.append(largest)
        return loss, {**metrics, "entropy": cast(Tensor, entropy).sum().item() / max(1, n_completion)}

    metrics = trainer.update(list(zip(*pairs[:3], strict=True)), loss_of)
    if worst:
        metrics["sampler/log_ratio_max"] = max(worst)
    return {**metrics, "num_tokens": n_completion + 2 * sum(map(len, pairs.prompt_ids))}


def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor | None,
    ref_rejected_logprobs: Tensor | None,
    *,
    loss_type: DPOLossType = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
    n_pairs: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The loss of the DPO family, averaged over pairs.

    With c and r the log-ratios of chosen and rejected, d = c - r, d' = c / chosen_lengths - r /
    rejected_lengths, s the label smoothing and sig the sigmoid::

        sigmoid       -(1 - s) logsig(beta d) - s logsig(-beta d)      (s > 0: conservative DPO)
        sigmoid_norm  the same of d'
        robust        [-(1 - s) logsig(beta d) + s logsig(-beta d)] / (1 - 2 s)
        hinge         relu(1 - beta d)
        ipo           (d' - 1 / (2 beta))^2
        exo_pair      KL(q || p), q = (sig(beta d), sig(-beta d)), p = (1 - s, s)
        nca_pair      -logsig(beta c) - logsig(-beta c) / 2 - logsig(-beta r) / 2
        bco_pair      -logsig(beta c) - logsig(-beta r)
        sppo_hard     (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2
        apo_zero      1 - sig(beta c) + sig(beta r)
        apo_down      sig(beta c) + 1 - sig(beta d)
        sft           -chosen_logprobs

    Args:
        chosen_logprobs: (B,) float, summed over the completion, differentiable. The loss has its dtype.
        rejected_logprobs: (B,), likewise.
        ref_chosen_logprobs: (B,), of the reference; None for both references: reference-free, as if
            the reference gave every completion the same probability.
        ref_rejected_logprobs: (B,).
        loss_type: see above.
        beta: strength of the pull towards the reference.
        label_smoothing: probability that a label is wrong, for sigmoid, sigmoid_norm, robust and
            exo_pair (which needs one above 0).
        chosen_lengths: (B,), tokens of each completion; for ipo and sigmoid_norm.
        rejected_lengths: (B,).
        n_pairs: pairs of the whole batch, so that the losses and the metrics of micro-batches add up;
            None: B.

    Returns:
        The scalar loss, and metrics as floats, means over the pairs: ``rewards/{chosen,rejected}`` (beta c
        and beta r), ``rewards/margins`` (beta d), ``rewards/accuracies`` (share with d > 0),
        ``logps/{chosen,rejected}``.

    Raises:
        WhetTypeError: an argument that is no tensor of the right kind.
        WhetValueError: shapes that disagree, no pairs, an unknown loss_type, a setting out of range,
            one reference without the other, or missing lengths.

    Source: TRL 1.16's table (Rafailov 2023, Mitchell 2023, Chowdhury 2024, Zhao 2023, Azar 2023, Meng
        2024, Ji 2024, Chen 2024, Jung 2024, Wu 2024, D'Oosterlinck 2024). Departure: TRL's sigmoid
        ignores label_smoothing.
    """
    check_dpo_options("dpo_loss", loss_type, beta, label_smoothing)
    if loss_type in _PER_TOKEN and (chosen_lengths is None or rejected_lengths is None):
        raise WhetValueError(f"dpo_loss: {loss_type!r} averages over tokens. Pass chosen_lengths and rejected_lengths.")
    check_float_tensor("dpo_loss", "chosen_logprobs", chosen_logprobs, n_axes=1)
    optional = {"ref_chosen_logprobs": ref_chosen_logprobs, "ref_rejected_logprobs": ref_rejected_logprobs}
    optional |= {"chosen_lengths": chosen_lengths, "rejected_lengths": rejected_lengths}
    rejected = {"rejected_logprobs": rejected_logprobs}
    check_shapes("dpo_loss", "chosen_logprobs", chosen_logprobs, rejected, optional)
    if not len(chosen_logprobs):
        raise WhetValueError("dpo_loss: chosen_logprobs is empty. Pass at least one pair.")

    c, r = chosen_logprobs, rejected_logprobs
    if ref_chosen_logprobs is not None and ref_rejected_logprobs is not None:
        c, r = c - ref_chosen_logprobs.detach().to(c), r - ref_rejected_logprobs.detach().to(r)
    elif ref_chosen_logprobs is not None or ref_rejected_logprobs is not None:
        raise WhetValueError("dpo_loss: only one of the two ref_*_logprobs is None. Pass both, or neither.")

    n_pairs = float(len(c) if n_pairs is None else n_pairs)
    d = c - r
    if loss_type in _PER_TOKEN:
        chosen, rejected = cast(Tensor, chosen_lengths), cast(Tensor, rejected_lengths)
        per_token = c / chosen.clamp(min=1) - r / rejected.clamp(min=1)
        pair_loss = _pair_loss(loss_type, c, r, per_token, beta, label_smoothing)
    elif loss_type == "sft":
        pair_loss = -chosen_logprobs
    else:
        pair_loss = _pair_loss(loss_type, c, r, d, beta, label_smoothing)
    metrics = {
        "rewards/chosen": beta * c,
        "rewards/rejected": beta * r,
        "rewards/margins": beta * d,
        "rewards/accuracies": (d > 0).to(d),
        "logps/chosen": chosen_logprobs,
        "logps/rejected": rejected_logprobs,
    }
    means = torch.stack([values.detach().sum() / n_pairs for values in metrics.values()])
    return pair_loss.sum() / n_pairs, dict(zip(metrics, means.tolist(), strict=True))


def _pair_loss(loss_type: str, c: Tensor, r: Tensor, d: Tensor, beta: float, smoothing: float) -> Tensor:
    if loss_type in ("sigmoid", "sigmoid_norm"):
        return -(1 - smoothing) * logsigmoid(beta * d) - smoothing * logsigmoid(-beta * d)
    if loss_type == "robust":
        right, wrong = logsigmoid(beta * d), logsigmoid(-beta * d)
        return (-(1 - smoothing) * right + smoothing * wrong) / (1 - 2 * smoothing)
    if loss_type == "hinge":
        return torch.relu(1 - beta * d)
    if loss_type == "ipo":
        return (d - 1 / (2 * beta)).square()
    if loss_type == "exo_pair":
        right, wrong = logsigmoid(beta * d), logsigmoid(-beta * d)
        return right.exp() * (right - math.log1p(-smoothing)) + wrong.exp() * (wrong - math.log(smoothing))
    if loss_type == "nca_pair":
        return -logsigmoid(beta * c) - (logsigmoid(-beta * c) + logsigmoid(-beta * r)) / 2
    if loss_type == "bco_pair":
        return -logsigmoid(beta * c) - logsigmoid(-beta * r)
    if loss_type == "sppo_hard":
        return (c - 1 / (2 * beta)).square() + (r + 1 / (2 * beta)).square()
    if loss_type == "apo_zero":
        return 1 - torch.sigmoid(beta * c) + torch.sigmoid(beta * r)
    return torch.sigmoid(beta * c) + 1 - torch.sigmoid(beta * d)  # apo_down
