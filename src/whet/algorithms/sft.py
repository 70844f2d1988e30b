"""Supervised fine-tuning: maximise the likelihood of completions.

    l = -log pi(y_t | x, y_<t), averaged over the completion tokens of the batch that count

With loss_type "dft", the factor pi(y_t | x, y_<t), a constant in the gradient, multiplies l (Wu et al. 2025). With
label smoothing e, l = -(1 - e) log pi(y_t | x, y_<t) - e mean over the vocabulary of log pi(v | x, y_<t).

Prompt tokens do not count, unless a row has no prompt; in a conversation only the assistant's turns count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from whet.config.settings import SFTConfig, SFTLossType
from whet.data.batches import as_rows, check_row_counts, columns_as_rows, tokenized_rows
from whet.data.rows import tokenize_example
from whet.data.token_ids import token_rows
from whet.errors import WhetValueError
from whet.losses.sft import sft_loss
from whet.training.phases import phase
from whet.training.trainer import Trainer, training_step


class Examples(NamedTuple):
    """Rows of a batch to train on.

    Attributes:
        prompt_ids: rows of token ids.
        completion_ids: rows of token ids.
        masks: per completion token, True if it counts.
        metrics: ``LengthLimit`` metrics.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    masks: list[list[bool]]
    metrics: dict[str, float]


class SFT(Trainer):
    """Supervised fine-tuning of a model on completions. Takes the arguments of ``Trainer``."""

    config_class = SFTConfig
    row_fields = ("prompt", "completion")

    @training_step
    def train_step(self, prompt: Any, completion: Any = None) -> dict[str, float]:
        """Update the model on a batch.

        Args:
            prompt: B prompts, as texts or as token ids in a form that ``whet.data.token_rows`` reads; or, as the only
                argument, a list of rows (dicts that ``whet.data.tokenize_turns`` reads, texts, or tuples of prompt and
                completion), a dict of columns, a mapping with (B, T) ``input_ids`` and optional masks, or token ids,
                all of which count except the first. ``config.loss_on``, or the masks of a row, select the tokens that
                count.
            completion: B completions, in the same forms.

        Returns:
            Metrics: ``loss`` (``sft_loss``, in nats per token), ``token_probability``, the metrics of every step, and
            with ``truncation`` also ``frac_truncated`` and ``frac_dropped``, shares of rows. A batch with only dropped
            rows has loss and gradient norm 0, and makes no update.

        Raises:
            WhetTypeError: the batch has none of these forms.
            WhetValueError: columns of different lengths, no token that counts, or a row longer than ``max_length``.
        """
        prompt_ids, completion_ids, masks, shares = self.get_prepared(prompt, completion)
        n_tokens = sum(map(sum, masks))
        if n_tokens == 0 and not any(shares.values()):
            raise WhetValueError("SFT: no completion of the batch has a token that counts.")
        found = update_on_examples(
            self, prompt_ids, completion_ids, masks, loss_type=self.config.loss_type,
            label_smoothing=self.config.label_smoothing, neftune_alpha=self.config.neftune_alpha,
        )  # fmt: skip
        return {**found, **shares}

    def as_row(self, item: Any) -> Any:
        """Return an item of a dataset as a dict; all of a bare text or row of token ids counts."""
        return item if isinstance(item, Mapping) else super().as_row(item) if _is_pair(item) else {"text": item}

    def evaluation_metrics(self, dataset: Any) -> dict[str, float]:
        """Return ``loss``: mean negative log-likelihood, in nats, of the tokens that count in all rows."""
        total, n_tokens = 0.0, 0
        for batch in self.iter_batches(dataset):
            prompt_ids, completion_ids, masks, _ = self.get_prepared(*batch)
            total -= self.logprobs(prompt_ids, completion_ids, completion_mask=masks).sum().item()
            n_tokens += sum(map(sum, masks))
        if n_tokens == 0:
            raise WhetValueError("SFT: no completion of the dataset has a token that counts.")
        return {"loss": total / n_tokens}

    def prepare(self, prompt: Any, completion: Any = None) -> Examples:
        """Return the rows of a batch as token ids, within the length limit."""
        rows = list(zip(*self._token_ids(prompt, completion), strict=True))
        fitted = self.length_limit.fit(rows)
        prompt_ids, completion_ids, masks = _columns([row for row in fitted.rows if row is not None], 3)
        return Examples(prompt_ids, completion_ids, masks, fitted.metrics)

    def tokenize_row(self, row: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], list[int], list[bool]]:
        """Return prompt, completion and mask of the completion; see ``tokenize_example``."""
        return tokenize_example(row, tokenizer, self.config.loss_on)

    def _token_ids(
        self, prompt: Any, completion: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[bool]]]:
        """Return prompts, completions and completion masks of a batch."""
        if completion is None:
            rows = as_rows(prompt, self.as_row, "SFT")
            if rows is None and isinstance(prompt, Mapping):
                rows = tokenized_rows(prompt, "SFT")
        else:
            rows = columns_as_rows(self.row_fields, (prompt, completion), "SFT")
        if rows is not None:
            found = [self.tokenize_row(row, self.tokenizer) for row in rows]
            return [p for p, _, _ in found], [c for _, c, _ in found], [mask for _, _, mask in found]
        if completion is not None:
            prompt_ids, completion_ids = token_rows(prompt), self.completion_rows(completion)
            check_row_counts("SFT", self.row_fields, (prompt_ids, completion_ids))
        else:
            ids = self.completion_rows(prompt)
            prompt_ids, completion_ids = [row[:1] for row in ids], [row[1:] for row in ids]
        if self.config.loss_on == "all":
            completion_ids = [p[1:] + c for p, c in zip(prompt_ids, completion_ids, strict=True)]
            prompt_ids = [p[:1] for p in prompt_ids]
        return prompt_ids, completion_ids, [[True] * len(ids) for ids in completion_ids]


def update_on_examples(
    trainer: Trainer,
    prompt_ids: list[list[int]],
    completion_ids: list[list[int]],
    masks: list[list[bool]],
    *,
    loss_type: SFTLossType = "nll",
    label_smoothing: float = 0.0,
    neftune_alpha: float = 0.0,
) -> dict[str, float]:
    """Make one update by ``sft_loss`` on rows, of which masks select the tokens, and return its metrics.

    Without a token that counts, loss and gradient norm are 0, and nothing is updated.
    """
    n_tokens = sum(map(sum, masks))
    if n_tokens == 0:
        return {"loss": 0.0, "grad_norm": 0.0, "num_tokens": 0}
    with trainer.update() as update:
        rows = list(zip(prompt_ids, completion_ids, strict=True))
        for part in trainer.shard(update, rows, trainer.micro_batches(rows)):
            with phase("forward"):
                logprobs, _, mask, mean, *_ = trainer.policy.logprobs(
                    [prompt_ids[i] for i in part],
                    [completion_ids[i] for i in part],
                    completion_mask=[masks[i] for i in part],
                    return_mean=label_smoothing > 0,
                    neftune_alpha=neftune_alpha,
                )
            with phase("loss"):
                loss = sft_loss(
                    logprobs, mask, mean_logprobs=mean, loss_type=loss_type, label_smoothing=label_smoothing,
                    n_tokens=n_tokens,
                )  # fmt: skip
            gradients = loss.gradients
            update.add(loss.value, gradients["logprobs"], loss.metrics, grad_mean=gradients.get("mean_logprobs"))
    return {**update.metrics, "num_tokens": sum(map(len, [*prompt_ids, *completion_ids]))}


def _columns(rows: list[list[Any]], n: int) -> list[list[Any]]:
    return [[row[i] for row in rows] for i in range(n)]


def _is_pair(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and not isinstance(item[0], int)
