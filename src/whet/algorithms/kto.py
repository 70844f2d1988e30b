"""Kahneman-Tversky Optimization: learn from single completions that are each labelled desirable or undesirable.

With c the policy's log-ratio to the reference, summed over the completion (Ethayarajh et al. 2024, eq. 7 and 8):

    l = w (1 - sigmoid(beta (c - z)))    desirable
    l = w (1 - sigmoid(beta (z - c)))    undesirable
    z = max(0, mean over the batch of log pi(y' | x) / ref(y' | x)),    y' the completion of the previous row

z estimates KL(policy || reference) and has no gradient. Assumes labels that hold without a comparison, and rows in an
order without meaning: a completion that answers the next prompt too is a biased sample of z.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np

from whet.config.preferences import KTOConfig
from whet.data.batches import as_rows, check_row_counts, columns_as_rows
from whet.data.rows import tokenize_completion
from whet.data.token_ids import token_rows
from whet.errors import WhetTypeError, WhetValueError
from whet.losses.closed_form import Loss
from whet.losses.kto import kto_loss
from whet.training.phases import phase
from whet.training.trainer import Trainer, training_step


class Rated(NamedTuple):
    """Labelled completions.

    Attributes:
        prompt_ids: B rows of token ids.
        completion_ids: B rows of token ids.
        labels: (B,) bool, True for desirable.
        metrics: ``LengthLimit`` metrics of the source batch.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    labels: np.ndarray
    metrics: Mapping[str, float] = MappingProxyType({})


class KTO(Trainer):
    """Kahneman-Tversky Optimization. Takes the arguments of ``Trainer``."""

    config_class = KTOConfig
    row_fields = ("prompt", "completion", "label")

    @training_step
    def train_step(self, prompt: Any, completion: Any = None, label: Any = None) -> dict[str, float]:
        """Update the policy on a batch of labelled completions.

        Args:
            prompt: B prompts, as texts or as token ids in a form that ``whet.data.token_rows`` reads; or, as the only
                argument, a list of rows: dicts that ``whet.data.tokenize_completion`` reads, with a ``label``, tuples
                of prompt, completion and label, or a dict of columns.
            completion: B completions without their prompts, in the same forms.
            label: B booleans, True for desirable completions; 1 and 0 are accepted.

        Returns:
            Metrics: ``loss``, the metrics of ``kto_loss``, ``kl`` (z above, with loss_type "kto"), ``entropy`` (mean
            per completion token), ``frac_desirable`` (share of rows), with ``truncation`` also ``frac_truncated`` and
            ``frac_dropped``, and the metrics of every step. A batch of which dropped rows leave fewer than the loss
            needs has loss and gradient norm 0, and makes no update.

        Raises:
            WhetTypeError: the batch has none of these forms.
            WhetValueError: columns of different lengths, a label that is neither true nor false, a row longer than
                ``max_length``, or a single row with loss_type "kto".
        """
        rows: Rated = self.get_prepared(prompt, completion, label)
        n_rows, n_desirable = len(rows.labels), int(rows.labels.sum())
        if n_rows < self._least_rows():
            if not rows.metrics.get("frac_dropped"):
                raise WhetValueError(
                    "KTO: the batch has a single row, and 'kto' estimates its baseline from the completions of other "
                    "rows. Pass at least 2 rows, or set loss_type to 'apo_zero_unpaired'."
                )
            return {"loss": 0.0, "grad_norm": 0.0, "num_tokens": 0, **rows.metrics}
        reference, kl = self._compute_reference(rows)
        n_completion = sum(map(len, rows.completion_ids))
        with self.update() as update:
            pairs = list(zip(rows.prompt_ids, rows.completion_ids, strict=True))
            for part in self.shard(update, pairs, self.micro_batches(pairs)):
                with phase("forward"):
                    logprobs, entropy, mask, *_ = self.policy.logprobs(
                        [rows.prompt_ids[i] for i in part],
                        [rows.completion_ids[i] for i in part],
                        return_entropy=True,
                    )
                with phase("loss"):
                    counts = {"n_rows": n_rows, "n_desirable": n_desirable}
                    loss = self._loss(logprobs, reference[part], rows.labels[part], kl, counts)
                    gradient = loss.gradients["logprobs"][:, None] * mask
                spread = float(cast(np.ndarray, entropy).sum(dtype=np.float64)) / max(1, n_completion)
                update.add(loss.value, gradient, {**loss.metrics, "entropy": spread})
        found = {**update.metrics, **rows.metrics, "frac_desirable": n_desirable / n_rows}
        if self.config.loss_type == "kto":
            found["kl"] = kl
        return {**found, "num_tokens": n_completion + sum(map(len, rows.prompt_ids))}

    def evaluation_metrics(self, dataset: Any) -> dict[str, float]:
        """Return ``loss``, ``rewards/margins`` if there are both labels, and with loss_type "kto" ``kl``, over all
        rows: z is the mean over the dataset.

        Raises:
            WhetValueError: fewer rows than the loss needs.
        """
        batches: list[Rated] = [self.get_prepared(*batch) for batch in self.iter_batches(dataset)]
        prompts = [row for batch in batches for row in batch.prompt_ids]
        completions = [row for batch in batches for row in batch.completion_ids]
        rows = Rated(prompts, completions, np.concatenate([batch.labels for batch in batches]))
        if len(rows.labels) < self._least_rows():
            raise WhetValueError(
                f"KTO: the dataset has {len(rows.labels)} rows within the length limit, expected at least "
                f"{self._least_rows()}."
            )
        reference, kl = self._compute_reference(rows)
        loss = self._loss(self.logprobs(prompts, completions), reference, rows.labels, kl, {})
        found = {"loss": loss.value}
        if "rewards/margins" in loss.metrics:
            found["rewards/margins"] = loss.metrics["rewards/margins"]
        return {**found, "kl": kl} if self.config.loss_type == "kto" else found

    def prepare(self, prompt: Any, completion: Any = None, label: Any = None) -> Rated:
        """Return the rows of a batch as token ids and labels, within the length limit."""
        label = [label] if label is not None and np.ndim(label) == 0 else label
        if completion is not None and label is not None:
            rows = columns_as_rows(self.row_fields, (prompt, completion, label), "KTO")
        elif completion is not None or label is not None or (rows := as_rows(prompt, self.as_row, "KTO")) is None:
            raise WhetTypeError(
                f"KTO: the batch is {prompt!r:.60}, expected prompt, completion and label, or a list of rows (dicts)."
            )
        if rows is None:
            columns = token_rows(prompt), self.completion_rows(completion), list(map(_read_label, cast(Any, label)))
            check_row_counts("KTO", self.row_fields, columns)
            found = list(zip(*columns, strict=True))
        else:
            found = [self.tokenize_row(row, self.tokenizer) for row in rows]
        fitted = self.length_limit.fit([(prompt, completion) for prompt, completion, _ in found])
        kept = [(*ids, label) for ids, (*_, label) in zip(fitted.rows, found, strict=True) if ids is not None]
        prompts, completions, labels = map(list, zip(*kept, strict=True)) if kept else ([], [], [])
        return Rated(prompts, completions, np.array(labels, bool), fitted.metrics)

    def tokenize_row(self, row: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], list[int], bool]:
        """Return prompt, completion and label of a row; see ``tokenize_completion``."""
        return *tokenize_completion(row, tokenizer), _read_label(row.get("label"))

    def _least_rows(self) -> int:
        return 2 if self.config.loss_type == "kto" else 1

    def _compute_reference(self, rows: Rated) -> tuple[np.ndarray, float]:
        """Return the reference's log-probs of the completions, (B,), and the baseline z, 0 for a loss without it."""
        prompts, completions = rows.prompt_ids, rows.completion_ids
        if self.config.loss_type != "kto":
            return _sum(self.logprobs(prompts, completions, reference=True)), 0.0
        limit = self.length_limit.n_tokens
        others = [completions[i - 1] for i in range(len(prompts))]
        others = [ids[: int(min(len(ids), limit - len(x)))] for x, ids in zip(prompts, others, strict=True)]
        both = _sum(self.logprobs(prompts * 2, completions + others, reference=True))
        own, other = np.split(both, 2)
        return own, max(0.0, float((_sum(self.logprobs(prompts, others)) - other).mean()))

    def _loss(
        self, logprobs: np.ndarray, reference: np.ndarray, labels: np.ndarray, kl: float, counts: Mapping[str, int]
    ) -> Loss:
        config = self.config
        return kto_loss(
            _sum(logprobs), reference, labels, kl=kl, loss_type=config.loss_type, beta=config.beta,
            desirable_weight=config.desirable_weight, undesirable_weight=config.undesirable_weight, **counts,
        )  # fmt: skip


def _sum(logprobs: np.ndarray) -> np.ndarray:
    return logprobs.sum(1, dtype=np.float64)


def _read_label(value: Any) -> bool:
    """Return a label, a boolean or one of 0 and 1, also of NumPy or torch."""
    plain = value.item() if getattr(value, "ndim", None) == 0 else value
    if not (isinstance(plain, Real) and plain in (0, 1)):
        raise WhetValueError(f"KTO: label is {value!r:.60}, expected true (desirable) or false.")
    return bool(plain)
