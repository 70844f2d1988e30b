"""Trainers of preference pairs of a dataset: rows, ties, the update, evaluation. The loss is an algorithm's."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from whet.algorithms.pairs import Pairs, add_reference, add_weights, sum_logprobs, update_on_pairs
from whet.data.batches import as_rows, check_row_counts, columns_as_rows
from whet.data.rows import tokenize_preference
from whet.data.token_ids import token_rows
from whet.errors import WhetTypeError, WhetValueError
from whet.losses.closed_form import Loss
from whet.training.reference_cache import TokenRow
from whet.training.trainer import Trainer, training_step


class OfflinePairs(Trainer):
    """Base of the algorithms that train on pairs of a dataset. Takes the arguments of ``Trainer``.

    Ties, pairs whose chosen and rejected completions are the same tokens, carry no preference: they are excluded,
    counted in ``frac_ties``, and warned about once.
    """

    row_fields = ("prompt", "chosen", "rejected")

    _warned_of_ties = False

    @abstractmethod
    def pair_loss(self, pairs: Pairs, policy: tuple[np.ndarray, np.ndarray], *, n_pairs: int, n_tokens: int) -> Loss:
        """Return the loss of pairs, see ``whet.algorithms.pairs.PairLoss``."""

    def update_on(self, pairs: Pairs) -> dict[str, float]:
        """Update the policy on pairs without ties, if there are any, and return metrics."""
        return update_on_pairs(self, pairs, self.pair_loss)

    def excludes_ties(self) -> bool:
        """Whether the loss compares the two completions."""
        return True

    @training_step
    def train_step(self, prompt: Any, chosen: Any = None, rejected: Any = None) -> dict[str, float]:
        """Update the policy on a batch of pairs.

        Args:
            prompt: B prompts, as texts or as token ids in a form that ``whet.data.token_rows`` reads, such as a (B, P)
                tensor; or, as the only argument, a list of rows: dicts that ``whet.data.tokenize_preference`` reads,
                tuples of prompt, chosen and rejected, or a dict of columns.
            chosen: B completions without their prompts, in the same forms.
            rejected: B completions, in the same forms.

        Returns:
            Metrics: ``loss``, the metrics of the loss function, ``entropy`` (mean per completion token), ``frac_ties``
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
                f"{type(self).__name__}: in {n_excluded} of the {n_pairs} pairs of this batch chosen and rejected are "
                f"the same tokens. Such ties are excluded; frac_ties is their share of every batch.",
                stacklevel=3,
            )
        metrics = self.update_on(kept)
        return {**metrics, **pairs.metrics, "frac_ties": n_excluded / max(1, n_pairs)}

    def evaluation_metrics(self, dataset: Any) -> dict[str, float]:
        """Return ``loss``, ``rewards/accuracies`` and ``rewards/margins`` over all pairs except ties.

        Raises:
            WhetValueError: all pairs are ties, or ``precompute_reference`` without reference log-probs.
        """
        batches = [add_weights(self, add_reference(self, pairs)) for pairs in self.batches_without_ties(dataset)]
        policy, references = [sum_logprobs(self, pairs) for pairs in batches], [pairs.reference for pairs in batches]
        pairs = Pairs.join(batches)
        if None not in references:
            pairs = pairs._replace(reference=_concatenate(cast(Any, references)))
        if weights := [batch.weights for batch in batches if batch.weights is not None]:
            pairs = pairs._replace(weights=np.concatenate(weights))
        n_tokens = sum(map(len, pairs.chosen_ids))
        loss = self.pair_loss(pairs, _concatenate(policy), n_pairs=len(pairs.prompt_ids), n_tokens=n_tokens)
        return {"loss": loss.value, **{name: loss.metrics[name] for name in ("rewards/accuracies", "rewards/margins")}}

    def batches_without_ties(self, dataset: Any) -> list[Pairs]:
        """Return the pairs of a dataset except ties, by batches.

        Raises:
            WhetValueError: all pairs are ties.
        """
        batches = [self._without_ties(self.get_prepared(*batch)) for batch in self.iter_batches(dataset)]
        if not (found := [pairs for pairs in batches if pairs.prompt_ids]):
            raise WhetValueError(
                f"{type(self).__name__}: chosen and rejected are the same in every pair of the dataset."
            )
        return found

    def prepare(self, prompt: Any, chosen: Any = None, rejected: Any = None) -> Pairs:
        """Return the pairs of a batch."""
        return self.read_pairs(prompt, chosen, rejected)[0]

    def read_pairs(self, prompt: Any, chosen: Any, rejected: Any) -> tuple[Pairs, list[Mapping[str, Any]]]:
        """Return the pairs of a batch, within the length limit, and their rows, which are empty for token ids."""
        name, columns = type(self).__name__, (prompt, chosen, rejected)
        if chosen is not None and rejected is not None:
            rows = columns_as_rows(self.row_fields, columns, name)
        elif chosen is not None or rejected is not None or (rows := as_rows(prompt, self.as_row, name)) is None:
            raise WhetTypeError(
                f"{name}: the batch is {prompt!r:.60}, expected prompt, chosen and rejected, or a list of rows (dicts)."
            )
        if rows is None:
            ids = token_rows(prompt), self.completion_rows(chosen), self.completion_rows(rejected)
            check_row_counts(name, self.row_fields, ids)
            tokenized, rows = list(zip(*ids, strict=True)), [{}] * len(ids[0])
        else:
            tokenized = [self.tokenize_row(row, self.tokenizer) for row in rows]
        fitted = self.length_limit.fit(tokenized)
        rows = [row for row, ids in zip(rows, fitted.rows, strict=True) if ids is not None]
        pairs = Pairs.from_rows(cast(TokenRow, tuple(ids)) for ids in fitted.rows if ids is not None)
        return pairs._replace(metrics=fitted.metrics), rows

    def tokenize_row(self, row: Mapping[str, Any], tokenizer: Any) -> TokenRow:
        """Return prompt, chosen and rejected completion; see ``tokenize_preference``."""
        return tokenize_preference(row, tokenizer)

    def _without_ties(self, pairs: Pairs) -> Pairs:
        if not self.excludes_ties():
            return pairs
        both = zip(pairs.chosen_ids, pairs.rejected_ids, strict=True)
        different = [i for i, (chosen, rejected) in enumerate(both) if chosen != rejected]
        return pairs if len(different) == len(pairs.prompt_ids) else pairs.select(different)


def _concatenate(sums: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    chosen, rejected = zip(*sums, strict=True)
    return np.concatenate(chosen), np.concatenate(rejected)
