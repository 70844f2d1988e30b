"""Off-policy distillation: the student learns the probabilities that a teacher gave to the tokens of a file.

    l = sum_k p_k (log p_k - log q_k) + (1 - P) (log (1 - P) - log (1 - Q)),    P = sum_k p_k,    Q = sum_k q_k

averaged over the tokens that count, with the teacher's most probable tokens k, their probabilities p in the file, and
the student's q. It is the forward KL divergence of the distributions over these tokens and all others together (Hinton
et al. 2015), a lower bound of the divergence of whole distributions. Assumes that student and teacher have one
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from whet.config.settings import KDConfig
from whet.data.batches import as_rows
from whet.data.rows import tokenize_turns
from whet.errors import WhetTypeError, WhetValueError
from whet.losses.distillation import top_k_loss
from whet.models.tokenizers.token_texts import vocabulary_digest
from whet.training.phases import phase
from whet.training.policy import Score
from whet.training.trainer import Trainer, training_step

_ROUNDING = 1e-3
"""Excess over 0 of a rounded log-prob."""


class Targets(NamedTuple):
    """Rows of a batch, and what a teacher predicted.

    Attributes:
        prompt_ids: rows of token ids.
        completion_ids: rows of token ids.
        masks: per completion token, True if it counts.
        tops: per row, (T, k, 2): token ids and log-probs of the teacher; log-probs of missing ones are -inf.
        metrics: ``LengthLimit`` metrics.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    masks: list[list[bool]]
    tops: list[np.ndarray]
    metrics: dict[str, float]


class KD(Trainer):
    """Off-policy distillation from a file of log-probs.

    Args:
        model: the student.
        ref_model: None: the loss uses no reference.
        **arguments: further arguments of ``Trainer``.
    """

    config_class = KDConfig
    row_fields = ("prompt", "completion", "top_logprobs")

    def __init__(self, model: Any, ref_model: Any = None, **arguments: Any) -> None:
        super().__init__(model, ref_model, **arguments)
        self._vocabulary = ""

    @training_step
    def train_step(self, rows: Any) -> dict[str, float]:
        """Update the model on a batch.

        Args:
            rows: a list of dicts that ``tokenize_turns`` reads, with ``top_logprobs``: for each token of the
                completion, which begins with the first token that counts, pairs of a token id and the teacher's
                log-prob.

        Returns:
            Metrics: ``loss`` (see above, in nats per token), ``covered``, the mean of P, with ``truncation`` also
            ``frac_truncated`` and ``frac_dropped``, and the metrics of every step.

        Raises:
            WhetValueError: the file is of another vocabulary, or rows do not fit their log-probs.
        """
        batch: Targets = self.get_prepared(rows)
        n_tokens, shares = sum(map(sum, batch.masks)), batch.metrics
        if n_tokens == 0 and any(shares.values()):
            return {"loss": 0.0, "grad_norm": 0.0, **shares, "num_tokens": 0}
        if n_tokens == 0:
            raise WhetValueError("KD: no completion of the batch has a token that counts.")
        with self.update() as update:
            pairs = list(zip(batch.prompt_ids, batch.completion_ids, strict=True))
            for part in self.shard(update, pairs, self.micro_batches(pairs)):
                update.add(*self._loss(batch, part, n_tokens, self._logprobs))
        return {**update.metrics, **shares, "num_tokens": sum(map(len, [*batch.prompt_ids, *batch.completion_ids]))}

    def evaluation_metrics(self, dataset: Any) -> dict[str, float]:
        """Return ``loss`` over all rows."""
        total, n_tokens = 0.0, 0
        for batch in self.iter_batches(dataset):
            prepared: Targets = self.get_prepared(*batch)
            pairs = list(zip(prepared.prompt_ids, prepared.completion_ids, strict=True))
            with self.policy.scoring() as score:  # rounds all weights, with qat

                def compute(part: list[int], prepared: Targets = prepared, score: Score = score) -> np.ndarray:
                    return np.array(self._loss(prepared, part, 1, score)[0])

                total += sum(float(value) for _, value in self.compute_on_ranks(pairs, compute))
            n_tokens += sum(map(sum, prepared.masks))
        if n_tokens == 0:
            raise WhetValueError("KD: no completion of the dataset has a token that counts.")
        return {"loss": total / n_tokens}

    def prepare(self, rows: Any) -> Targets:
        """Return the rows of a batch as token ids, within the length limit."""
        found = as_rows(rows, self.as_row, "KD")
        if found is None:
            raise WhetTypeError(f"KD: the batch is {rows!r:.60}, expected a list of rows (dicts) with top_logprobs.")
        fitted = self.length_limit.fit([self.tokenize_row(row, self.tokenizer) for row in found])
        columns = list(zip(*(row for row in fitted.rows if row is not None), strict=True)) or [()] * 4
        return Targets(*map(list, columns), metrics=fitted.metrics)  # pyright: ignore[reportArgumentType]

    def tokenize_row(
        self, row: Mapping[str, Any], tokenizer: Any
    ) -> tuple[list[int], list[int], list[bool], np.ndarray]:
        """Return prompt, completion and its mask as ``tokenize_turns``, and the teacher's tokens (T, k, 2)."""
        if "vocabulary" in row and tokenizer is not None:
            self._vocabulary = self._vocabulary or vocabulary_digest(tokenizer, "KD")
            if row["vocabulary"] != self._vocabulary:
                raise WhetValueError(
                    f"KD: the row is of a teacher with the vocabulary {row['vocabulary']!r:.40}, and the student's is "
                    f"{self._vocabulary!r}. Choose a teacher of the student's family."
                )
        prompt, completion, mask = tokenize_turns(row, tokenizer)
        return prompt, completion, mask, _read_tops(row.get("top_logprobs"), len(completion))

    def _logprobs(self, *rows: Any, **options: Any) -> np.ndarray:
        """Return log-probs with gradients."""
        return self.policy.logprobs(*rows, **options).logprobs

    def _loss(self, batch: Targets, part: list[int], n_tokens: int, score: Score) -> Any:
        """Return the loss of some rows, its gradient, and metrics, from their log-probs by ``score``."""
        completions = [batch.completion_ids[i] for i in part]
        width, k = max(map(len, completions)), max(batch.tops[i].shape[1] for i in part)
        tops, mask = np.full((len(part), width, k, 2), [0, -np.inf], np.float64), np.zeros((len(part), width), bool)
        for padded, counts, i in zip(tops, mask, part, strict=True):
            padded[: len(batch.tops[i]), : batch.tops[i].shape[1]] = batch.tops[i]
            counts[: len(batch.masks[i])] = batch.masks[i]
        candidates = tops[..., 0].astype(np.int64)
        with phase("forward"):
            logprobs = score(
                [batch.prompt_ids[i] for i in part], completions,
                completion_mask=[batch.masks[i] for i in part],
                candidates=[rows[: len(ids)] for rows, ids in zip(candidates, completions, strict=True)],
            )  # fmt: skip
        with phase("loss"):
            loss = top_k_loss(logprobs, tops[..., 1], mask, n_tokens=n_tokens)
        return loss.value, loss.gradients["logprobs"], loss.metrics


def _read_tops(given: Any, n_tokens: int) -> np.ndarray:
    """Return the pairs of ``top_logprobs`` as an array (T, k, 2)."""
    fix = "Write the file with whet score."
    if not isinstance(given, (list, np.ndarray)) or len(given) != n_tokens:
        got = f"{given!r:.40}" if not isinstance(given, (list, np.ndarray)) else f"{len(given)} entries"
        raise WhetValueError(
            f"KD: top_logprobs has {got}, expected one for each of {n_tokens} completion tokens. {fix}"
        )
    found = [_read_pairs(pairs, fix) for pairs in given]
    tops = np.full((n_tokens, max(map(len, found), default=0), 2), [0, -np.inf], np.float64)
    for row, pairs in zip(tops, found, strict=True):
        row[: len(pairs)] = pairs
    return tops


def _read_pairs(given: Any, fix: str) -> np.ndarray:
    """Return pairs of a token id and a log-prob as an array (k, 2)."""
    try:
        found = np.array(given, np.float64)
    except (TypeError, ValueError):
        found = np.empty((0, 0))
    if found.ndim != 2 or found.shape[1] != 2 or not (found[:, 1] <= _ROUNDING).all():
        raise WhetValueError(f"KD: top_logprobs has {given!r:.60}, expected pairs of a token id and a log-prob. {fix}")
    if len(set(found[:, 0])) < len(found):
        raise WhetValueError(f"KD: top_logprobs has {given!r:.60}, in which a token id occurs twice. {fix}")
    return found
