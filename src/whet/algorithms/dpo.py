"""Direct Preference Optimization: prefer chosen over rejected completions, without a reward model.

With c and r the policy's log-ratios to the reference, summed over the chosen and the rejected
completion, d = c - r (Rafailov et al. 2023, eq. 7):

    l = -log sigmoid(beta d)

The losses of the family differ in the function of c, r and d (see ``dpo_loss``). Assumes that both completions answer
the same prompt; prompt tokens never count.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, cast

import numpy as np

from whet.algorithms.offline_pairs import OfflinePairs
from whet.algorithms.pairs import Pairs, preference_loss, reference_sums
from whet.config.preferences import DPOConfig
from whet.data.batches import is_batch, is_sequence, row_reader
from whet.errors import WhetTypeError, WhetValueError, is_number
from whet.losses.closed_form import Loss
from whet.training.prefetch import locate_error
from whet.training.reference_cache import ReferenceSums, Sums, TokenRow

_REFERENCE = ("ref_chosen_logprobs", "ref_rejected_logprobs")


class DPO(OfflinePairs):
    """Direct Preference Optimization. Takes the arguments of ``Trainer``.

    Rows with precomputed reference log-probs have the sums ``ref_chosen_logprobs`` and ``ref_rejected_logprobs``.
    """

    config_class = DPOConfig

    @cached_property
    def _sums(self) -> ReferenceSums:
        """The reference's summed log-probs of precomputed rows."""
        return ReferenceSums()

    def pair_loss(self, pairs: Pairs, policy: tuple[np.ndarray, np.ndarray], *, n_pairs: int, n_tokens: int) -> Loss:
        """Return ``dpo_loss``."""
        return preference_loss(self.config, pairs, policy, n_pairs=n_pairs, n_tokens=n_tokens)

    def excludes_ties(self) -> bool:
        """Whether the loss compares the two completions; ``sft`` only uses the chosen one."""
        return set(self.config.losses()) != {"sft"}

    def train(self, dataset: Any, steps: int | None = None, *, n_epochs: int | None = None) -> dict[str, float]:
        """Run ``Trainer.train``; with ``precompute_reference``, compute the reference's log-probs first.

        Log-probs are kept, also in checkpoints, for later epochs and runs over the same rows.
        """
        if self.config.precompute_reference and self.config.has_reference():
            dataset = self.add_reference_logprobs(dataset)
        return super().train(dataset, steps, n_epochs=n_epochs)

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

    def prepare(self, prompt: Any, chosen: Any = None, rejected: Any = None) -> Pairs:
        """Return the pairs of a batch, with the reference's sums if they are known for all pairs."""
        pairs, rows = self.read_pairs(prompt, chosen, rejected)
        if not rows or not self.config.has_reference():
            return pairs
        known = [_read_sums(row) or self._sums.get(ids) for row, ids in zip(rows, pairs.rows(), strict=True)]
        if None in known:
            return pairs
        if self.config.ld_alpha is not None:
            raise WhetValueError(
                "DPO: rows have ref_chosen_logprobs, sums over whole completions, and ld_alpha weighs the tokens after "
                "the length of the other completion. Leave the fields out, or ld_alpha at None."
            )
        sums = np.array(known, np.float64)
        return pairs._replace(reference=(sums[:, 0], sums[:, 1]))


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
