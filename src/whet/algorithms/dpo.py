"""Direct Preference Optimization: prefer chosen over rejected completions, without a reward model.

With c and r the policy's log-ratios to the reference, summed over the chosen and the rejected
completion, d = c - r (Rafailov et al. 2023, eq. 7):

    l = -log sigmoid(beta d)

The losses of the family differ in the function of c, r and d (see ``dpo_loss``). Assumes that both completions answer
the same prompt; prompt tokens never count.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from whet.algorithms.loss_terms import check_float_tensor, check_shapes, denominator
from whet.algorithms.pairs import Pairs, add_reference, reference_sums, sum_logprobs, update_on_pairs
from whet.config.settings import DPOConfig, DPOLossType, PreferenceConfig, check_dpo_options
from whet.data.batches import as_rows, check_row_counts, columns_as_rows, is_batch, is_sequence, row_reader
from whet.data.rows import tokenize_preference
from whet.data.token_ids import token_rows
from whet.errors import WhetTypeError, WhetValueError, is_number
from whet.training.prefetch import locate_error
from whet.training.reference import ReferenceSums, TokenRow
from whet.training.reference_cache import Sums
from whet.training.trainer import Trainer, training_step

_LENGTH_NORMALISED = ("ipo", "sigmoid_norm")
_REFERENCE = ("ref_chosen_logprobs", "ref_rejected_logprobs")


class DPO(Trainer):
    """Direct Preference Optimization. Takes the arguments of ``Trainer``.

    Ties, pairs whose chosen and rejected completions are the same tokens, carry no preference: they are excluded
    (except by the loss ``sft``, which only uses the chosen completion), counted in ``frac_ties``, and warned about
    once.
    """

    config_class = DPOConfig
    row_fields = ("prompt", "chosen", "rejected")

    _warned_of_ties = False

    @cached_property
    def _sums(self) -> ReferenceSums:
        """The reference's summed log-probs of precomputed rows."""
        return ReferenceSums()

    @training_step
    def train_step(self, prompt: Any, chosen: Any = None, rejected: Any = None) -> dict[str, float]:
        """Update the policy on a batch of pairs.

        Args:
            prompt: B prompts, as texts or as token ids in a form that ``whet.data.token_rows`` reads, such as a (B, P)
                tensor; or, as the only argument, a list of rows: dicts that ``whet.data.tokenize_preference`` reads,
                tuples of prompt, chosen and rejected, or a dict of columns. Rows with precomputed reference log-probs
                have the sums ``ref_chosen_logprobs`` and ``ref_rejected_logprobs``.
            chosen: B completions without their prompts, in the same forms.
            rejected: B completions, in the same forms.

        Returns:
            Metrics: ``loss``, the metrics of ``dpo_loss``, ``entropy`` (mean per completion token), ``frac_ties``
            (share of pairs), with ``truncation`` also ``frac_truncated`` and ``frac_dropped`` (shares of rows), and the
            metrics of every step. A batch with only ties or dropped rows has loss and gradient norm 0, and makes no
            update.

        Raises:
            WhetTypeError: the batch has none of these forms.
            WhetValueError: columns of different lengths, a row longer than ``max_length``, or ``precompute_reference``
                without reference log-probs.
        """
        pairs = self.get_prepared(prompt, chosen, rejected)
        kept = self._without_ties(pairs)
        n_pairs = len(pairs.prompt_ids)
        n_excluded = n_pairs - len(kept.prompt_ids)
        if n_excluded and not self._warned_of_ties:
            self._warned_of_ties = True
            warnings.warn(
                f"DPO: in {n_excluded} of the {n_pairs} pairs of this batch chosen and rejected are the same tokens. "
                f"Such ties are excluded; frac_ties is their share of every batch.",
                stacklevel=3,
            )
        return {**update_on_pairs(self, kept, pair_losses), **pairs.metrics, "frac_ties": n_excluded / max(1, n_pairs)}

    def train(self, dataset: Any, steps: int | None = None, *, n_epochs: int | None = None) -> dict[str, float]:
        """Run ``Trainer.train``; with ``precompute_reference``, compute the reference's log-probs first.

        Log-probs are kept, also in checkpoints, for later epochs and runs over the same rows.
        """
        if self.config.precompute_reference and self.config.has_reference():
            dataset = self.add_reference_logprobs(dataset)
        return super().train(dataset, steps, n_epochs=n_epochs)

    def evaluation_metrics(self, dataset: Any) -> dict[str, float]:
        """Return ``loss``, ``rewards/accuracies`` and ``rewards/margins`` of ``dpo_loss`` over all pairs except ties.

        Raises:
            WhetValueError: all pairs are ties, or ``precompute_reference`` without reference log-probs.
        """
        totals = {"loss": 0.0, "rewards/accuracies": 0.0, "rewards/margins": 0.0}
        n_pairs = n_tokens = 0
        for batch in self.iter_batches(dataset):
            pairs = self._without_ties(self.get_prepared(*batch))
            if not pairs.prompt_ids:
                continue
            sums = sum_logprobs(self, self.model, pairs)
            pairs = add_reference(self, pairs)
            loss, metrics = pair_losses(self.config, pairs, sums, n_pairs=1, n_tokens=1)
            for name, value in {**metrics, "loss": loss.item()}.items():
                if name in totals:
                    totals[name] += value
            n_pairs += len(pairs.prompt_ids)
            n_tokens += sum(map(len, pairs.chosen_ids))
        if not n_pairs:
            raise WhetValueError("DPO: chosen and rejected are the same in every pair of the dataset.")
        per_token = {"loss"} if self.config.loss_type == "sft" else set()
        return {name: total / (n_tokens if name in per_token else n_pairs) for name, total in totals.items()}

    def add_reference_logprobs(self, rows: Any) -> list[Mapping[str, Any]]:
        """Add ``ref_chosen_logprobs`` and ``ref_rejected_logprobs``, summed over the completion, to the rows.

        The reference is ``ref_model``, or the policy before its first update. Rows that already have log-probs, or
        whose log-probs are in this trainer, its checkpoint or ``reference_cache``, are not computed again.

        Raises:
            WhetTypeError: not a sequence of rows.
            WhetValueError: log-probs are missing and there is no reference: the policy has already been trained.
        """
        if not is_sequence(rows):
            raise WhetTypeError(
                f"DPO: precompute_reference needs a sequence of rows, got a {type(rows).__name__}. Pass list(dataset)."
            )
        items = [rows[i] for i in range(len(rows))]
        if any(is_batch(item, self.row_fields) for item in items):
            raise WhetTypeError("DPO: precompute_reference needs a sequence of rows, not of batches.")
        done = list(map(row_reader(rows, self.as_row), items))
        missing = [i for i, row in enumerate(done) if _read_sums(row) is None]
        if not missing:
            return done
        self.reader.check_forms(self, rows)
        try:
            fitted = self.length_limit.fit([self.tokenize_row(done[i], self.tokenizer) for i in missing]).rows
        except (WhetValueError, WhetTypeError) as error:
            raise locate_error(error, rows, done, self.prepare, self.as_row, self.step + 1) from error
        missing = [i for i, row in zip(missing, fitted, strict=True) if row is not None]
        token_rows = [cast(TokenRow, tuple(row)) for row in fitted if row is not None]
        cache, arithmetic = self.config.reference_cache, self.acceleration.dtype if self.acceleration else "torch"
        open_cache = partial(self.reference.open_cache, cache, str(arithmetic).removeprefix("torch."))
        found = self._sums.add(
            token_rows, self._reference_sums, self.config.batch_size, open_cache if cache else None, self.ranks
        )
        for i, sums in zip(missing, found, strict=True):
            done[i] = {**done[i], **dict(zip(_REFERENCE, sums, strict=True))}
        return done

    def _reference_sums(self, rows: list[TokenRow]) -> list[Sums]:
        if self.reference.is_policy() and self.n_updates:
            raise WhetValueError(
                "DPO: precompute_reference is set, the policy has already been trained, there is no ref_model, and "
                "some rows are new. Pass ref_model, or the rows that add_reference_logprobs returned before."
            )
        chosen, rejected = reference_sums(self, Pairs.from_rows(rows))
        return list(zip(chosen.tolist(), rejected.tolist(), strict=True))

    def extra_tensors(self) -> dict[str, Tensor]:
        """Return the reference's sums of the rows seen, see ``ReferenceSums.tensors``."""
        return self._sums.tensors()

    def load_extra_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of ``extra_tensors``."""
        self._sums.load_tensors(tensors)

    def _without_ties(self, pairs: Pairs) -> Pairs:
        if self.config.loss_type == "sft":
            return pairs
        both = zip(pairs.chosen_ids, pairs.rejected_ids, strict=True)
        different = [i for i, (chosen, rejected) in enumerate(both) if chosen != rejected]
        return pairs if len(different) == len(pairs.prompt_ids) else pairs.select(different)

    def prepare(self, prompt: Any, chosen: Any = None, rejected: Any = None) -> Pairs:
        """Return the pairs of a batch, with the reference's sums if they are known for all pairs."""
        columns = (prompt, chosen, rejected)
        if chosen is not None and rejected is not None:
            rows = columns_as_rows(self.row_fields, columns, "DPO")
        elif chosen is not None or rejected is not None or (rows := as_rows(prompt, self.as_row, "DPO")) is None:
            raise WhetTypeError(
                f"DPO: the batch is {prompt!r:.60}, expected prompt, chosen and rejected, or a list of rows (dicts)."
            )
        if rows is None:
            ids = token_rows(prompt), self.completion_rows(chosen), self.completion_rows(rejected)
            check_row_counts("DPO", self.row_fields, ids)
            tokenized, rows = list(zip(*ids, strict=True)), [{}] * len(ids[0])
        else:
            tokenized = [self.tokenize_row(row, self.tokenizer) for row in rows]
        fitted = self.length_limit.fit(tokenized)
        rows = [row for row, ids in zip(rows, fitted.rows, strict=True) if ids is not None]
        pairs = Pairs.from_rows(cast(TokenRow, tuple(ids)) for ids in fitted.rows if ids is not None)
        pairs = pairs._replace(metrics=fitted.metrics)
        if not rows or not self.config.has_reference():
            return pairs
        known = [_read_sums(row) or self._sums.get(ids) for row, ids in zip(rows, pairs.rows(), strict=True)]
        if None in known:
            return pairs
        sums = torch.tensor(known, dtype=torch.float64)
        return pairs._replace(reference=(sums[:, 0], sums[:, 1]))

    def tokenize_row(self, row: Mapping[str, Any], tokenizer: Any) -> TokenRow:
        """Return prompt, chosen and rejected completion; see ``tokenize_preference``."""
        return tokenize_preference(row, tokenizer)


def _read_sums(row: Mapping[str, Any]) -> Sums | None:
    """Return the reference's sums from the fields of a row; None if absent."""
    sums = []
    for name in _REFERENCE:
        value = row.get(name)
        if value is None:
            return None
        number = value.item() if getattr(value, "ndim", None) == 0 else value
        if not is_number(number):
            raise WhetValueError(f"DPO: {name} of a row is {value!r:.60}, expected a finite number.")
        sums.append(float(number))
    return sums[0], sums[1]


def pair_losses(
    config: PreferenceConfig, pairs: Pairs, policy: tuple[Tensor, Tensor], *, n_pairs: int, n_tokens: int
) -> tuple[Tensor, dict[str, float]]:
    """Return ``dpo_loss`` of pairs from the policy's summed log-probs, with the settings of ``config``."""
    chosen_lengths, rejected_lengths = (counts.to(policy[0].device) for counts in pairs.lengths())
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
    n_tokens: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Loss of the DPO family, averaged over pairs; sft is averaged over the tokens of the chosen completions.

    With c and r the log-ratios of chosen and rejected, d = c - r, d' = c / chosen_lengths - r /
    rejected_lengths, s the label smoothing and sig the sigmoid:

        sigmoid       -(1 - s) logsig(beta d) - s logsig(-beta d)      (s > 0: conservative DPO)
        sigmoid_norm  sigmoid with d' in place of d
        robust        [-(1 - s) logsig(beta d) + s logsig(-beta d)] / (1 - 2 s)
        hinge         relu(1 - beta d)
        ipo           (d' - 1 / (2 beta))^2
        exo_pair      KL(q || p), q = (sig(beta d), sig(-beta d)), p = (1 - s, s)
        nca_pair      -logsig(beta c) - logsig(-beta c) / 2 - logsig(-beta r) / 2
        bco_pair      -logsig(beta c) - logsig(-beta r)
        sppo_hard     (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2
        apo_zero      1 - sig(beta c) + sig(beta r)
        apo_down      sig(beta c) + 1 - sig(beta d)
        sft           -chosen_logprobs, summed and divided by n_tokens

    Args:
        chosen_logprobs: (B,) float, summed over the completion, differentiable. The loss has its dtype.
        rejected_logprobs: (B,), as chosen_logprobs.
        ref_chosen_logprobs: (B,), log-probs of the reference; None for both references: reference-free, as if the
            reference assigned every completion the same probability.
        ref_rejected_logprobs: (B,).
        loss_type: see above.
        beta: strength of the KL regularisation towards the reference.
        label_smoothing: probability that a label is wrong, for sigmoid, sigmoid_norm, robust and exo_pair (which needs
            a value above 0).
        chosen_lengths: (B,), tokens per completion; for ipo, sigmoid_norm and sft.
        rejected_lengths: (B,); for ipo and sigmoid_norm.
        n_pairs: pairs of the whole batch, so that losses and metrics of micro-batches add up; None: B.
        n_tokens: for sft, tokens of the chosen completions of the whole batch; None: the sum of chosen_lengths.

    Returns:
        The scalar loss, and metrics as floats, means over the pairs: ``rewards/{chosen,rejected}`` (beta c
        and beta r), ``rewards/margins`` (beta d), ``rewards/accuracies`` (share with d > 0),
        ``logps/{chosen,rejected}``.

    Raises:
        WhetTypeError: an argument is not a tensor, or has the wrong dtype or number of axes.
        WhetValueError: shapes differ, there are no pairs, loss_type is unknown, a setting is out of range, only one
            reference is given, or lengths are missing.

    Source: TRL 1.16's table (Rafailov 2023, Mitchell 2023, Chowdhury 2024, Zhao 2023, Azar 2023, Meng
        2024, Ji 2024, Chen 2024, Jung 2024, Wu 2024, D'Oosterlinck 2024). Departure: TRL's sigmoid
        ignores label_smoothing.
    """
    check_dpo_options("dpo_loss", loss_type, beta, label_smoothing)
    if loss_type in _LENGTH_NORMALISED and (chosen_lengths is None or rejected_lengths is None):
        raise WhetValueError(f"dpo_loss: {loss_type!r} averages over tokens. Pass chosen_lengths and rejected_lengths.")
    if loss_type == "sft" and chosen_lengths is None and n_tokens is None:
        raise WhetValueError("dpo_loss: 'sft' averages over tokens. Pass chosen_lengths, or n_tokens.")
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

    n_pairs = denominator("dpo_loss", "n_pairs", len(c) if n_pairs is None else n_pairs)
    d = c - r
    if loss_type in _LENGTH_NORMALISED:
        chosen, rejected = cast(Tensor, chosen_lengths), cast(Tensor, rejected_lengths)
        per_token = c / chosen.clamp(min=1) - r / rejected.clamp(min=1)
        loss = _pair_loss(loss_type, c, r, per_token, beta, label_smoothing).sum() / n_pairs
    elif loss_type == "sft":
        n_tokens = cast(Tensor, chosen_lengths).sum().item() if n_tokens is None else n_tokens
        loss = -chosen_logprobs.sum() / denominator("dpo_loss", "n_tokens", n_tokens)
    else:
        loss = _pair_loss(loss_type, c, r, d, beta, label_smoothing).sum() / n_pairs
    metrics = {
        "rewards/chosen": beta * c,
        "rewards/rejected": beta * r,
        "rewards/margins": beta * d,
        "rewards/accuracies": (d > 0).to(d),
        "logps/chosen": chosen_logprobs,
        "logps/rejected": rejected_logprobs,
    }
    means = torch.stack([values.detach().sum() / n_pairs for values in metrics.values()])
    return loss, dict(zip(metrics, means.tolist(), strict=True))


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
