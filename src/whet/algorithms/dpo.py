"""Direct Preference Optimization: prefer chosen over rejected completions, without a reward model.

With c and r the policy's log-ratios to the reference, summed over the chosen and the rejected
completion, d = c - r (Rafailov et al. 2023, eq. 7):

    l = -log sigmoid(beta d)

The losses of the family differ in the function of c, r and d (see ``dpo_loss``). Assumes that both completions answer
the same prompt; prompt tokens never count.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, cast

import numpy as np

from whet.algorithms.pairs import Pairs, add_reference, pair_loss, reference_sums, sum_logprobs, update_on_pairs
from whet.config.settings import DPOConfig
from whet.data.batches import as_rows, check_row_counts, columns_as_rows, is_batch, is_sequence, row_reader
from whet.data.rows import tokenize_preference
from whet.data.token_ids import token_rows
from whet.errors import WhetTypeError, WhetValueError, is_number
from whet.training.prefetch import locate_error
from whet.training.reference_cache import ReferenceSums, Sums, TokenRow
from whet.training.trainer import Trainer, training_step

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
        return {**update_on_pairs(self, kept), **pairs.metrics, "frac_ties": n_excluded / max(1, n_pairs)}

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
            sums = sum_logprobs(self, pairs)
            pairs = add_reference(self, pairs)
            loss = pair_loss(self.config, pairs, sums, n_pairs=1, n_tokens=1)
            for name, value in {**loss.metrics, "loss": loss.value}.items():
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
        cache = self.config.reference_cache
        open_cache = partial(self.policy.reference.open_cache, cache, self.policy.arithmetic)
        found = self._sums.add(
            token_rows, self._reference_sums, self.config.batch_size, open_cache if cache else None, self.ranks
        )
        for i, sums in zip(missing, found, strict=True):
            done[i] = {**done[i], **dict(zip(_REFERENCE, sums, strict=True))}
        return done

    def _reference_sums(self, rows: list[TokenRow]) -> list[Sums]:
        if self.policy.reference.is_policy() and self.n_updates:
            raise WhetValueError(
                "DPO: precompute_reference is set, the policy has already been trained, there is no ref_model, and "
                "some rows are new. Pass ref_model, or the rows that add_reference_logprobs returned before."
            )
        chosen, rejected = reference_sums(self, Pairs.from_rows(rows))
        return list(zip(chosen.tolist(), rejected.tolist(), strict=True))

    def extra_tensors(self) -> dict[str, np.ndarray]:
        """Return the reference's sums of the rows seen, see ``ReferenceSums.tensors``."""
        return self._sums.tensors()

    def load_extra_tensors(self, tensors: Mapping[str, Any]) -> None:
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
        sums = np.array(known, np.float64)
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
