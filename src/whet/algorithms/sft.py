"""Supervised fine-tuning: maximise the likelihood of completions.

    l = -log pi(y_t | x, y_<t), averaged over the completion tokens of the batch that count

Prompt tokens do not count, unless a row has no prompt; of a conversation only the assistant's turns do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from whet.algorithms.loss_terms import check_float_tensor, check_shapes, denominator, masked
from whet.config.settings import SFTConfig
from whet.data.batches import as_rows, check_row_counts, columns_as_rows, tokenized_rows
from whet.data.rows import tokenize_example
from whet.data.token_ids import token_rows
from whet.errors import WhetValueError
from whet.nn.causal_lm import completion_logprobs
from whet.training.phases import phase
from whet.training.trainer import Trainer, training_step


class Examples(NamedTuple):
    """Rows of a batch to imitate.

    Attributes:
        prompt_ids, completion_ids: rows of token ids each.
        masks: for each token of the completions, whether it counts.
        metrics: of ``LengthLimit``.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    masks: list[list[bool]]
    metrics: dict[str, float]


class SFT(Trainer):
    """Supervised fine-tuning of a model on completions. The arguments are those of ``Trainer``."""

    config_class = SFTConfig
    row_fields = ("prompt", "completion")

    @training_step
    def train_step(self, prompt: Any, completion: Any = None) -> dict[str, float]:
        """One update on a batch.

        Args:
            prompt: B prompts, texts or as ``whet.data.token_rows`` takes token ids; or, alone, a list of rows (dicts
                that ``whet.data.tokenize_turns`` reads, texts, or tuples of prompt and completion), a dict of their
                columns, a mapping with (B, T) ``input_ids`` and perhaps masks, or token ids that all count but the
                first. Of their tokens those count that ``config.loss_on`` says, or that all masks of the row mark.
            completion: B completions, likewise.

        Returns:
            Metrics: ``loss`` (mean negative log-likelihood per token, in nats), ``token_probability``, and
            those of every step; with ``truncation`` also ``frac_cut`` and ``frac_dropped``, shares of the rows. A batch
            of rows that are all left out has loss and gradient norm 0, and makes no update.

        Raises:
            WhetTypeError: the batch has none of these forms.
            WhetValueError: rows that do not match, no token that counts, or a row longer than ``max_length``.
        """
        prompt_ids, completion_ids, masks, shares = self.get_prepared(prompt, completion)
        n_tokens = sum(map(sum, masks))
        if n_tokens == 0 and any(shares.values()):
            return {"loss": 0.0, "grad_norm": 0.0, **shares, "num_tokens": 0}
        if n_tokens == 0:
            raise WhetValueError("SFT: no completion of the batch has a token to learn from.")
        with self.update() as update:
            rows = list(zip(prompt_ids, completion_ids, strict=True))
            for part in self.shard(update, rows, self.micro_batches(rows)):
                with phase("forward"):
                    logprobs, _, mask = completion_logprobs(
                        self.model,
                        [prompt_ids[i] for i in part],
                        [completion_ids[i] for i in part],
                        completion_mask=[masks[i] for i in part],
                    )
                with phase("loss"):
                    loss, metrics = sft_loss(logprobs, mask, n_tokens=n_tokens)
                update.add(loss, metrics)
        return {**update.metrics, **shares, "num_tokens": sum(map(len, [*prompt_ids, *completion_ids]))}

    def as_row(self, item: Any) -> Any:
        """An item of a dataset as a dict; a bare text or row of token ids counts whole."""
        return item if isinstance(item, Mapping) else super().as_row(item) if _is_pair(item) else {"text": item}

    def evaluation_metrics(self, dataset: Any) -> dict[str, float]:
        """``loss``: mean negative log-likelihood, in nats, of the tokens that count in all rows."""
        total, n_tokens = 0.0, 0
        for batch in self.iter_batches(dataset):
            prompt_ids, completion_ids, masks, _ = self.get_prepared(*batch)
            total -= self.logprobs(self.model, prompt_ids, completion_ids, completion_mask=masks).sum().item()
            n_tokens += sum(map(sum, masks))
        if n_tokens == 0:
            raise WhetValueError("SFT: no completion of the dataset has a token that counts.")
        return {"loss": total / n_tokens}

    def prepare(self, prompt: Any, completion: Any = None) -> Examples:
        """The rows of a batch as token ids, within the limit of their length."""
        rows = list(zip(*self._token_ids(prompt, completion), strict=True))
        fitted = self.length_limit.fit(rows)
        prompt_ids, completion_ids, masks = _columns([row for row in fitted.rows if row is not None], 3)
        return Examples(prompt_ids, completion_ids, masks, fitted.metrics)

    def tokenize_row(self, row: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], list[int], list[bool]]:
        """Prompt, completion, and which tokens of it count; see ``tokenize_example``."""
        return tokenize_example(row, tokenizer, self.config.loss_on)

    def _token_ids(
        self, prompt: Any, completion: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[bool]]]:
        """Prompts and completions of a batch, and which tokens of the completions count."""
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


def _columns(rows: list[list[Any]], n: int) -> list[list[Any]]:
    return [[row[i] for row in rows] for i in range(n)]


def _is_pair(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and not isinstance(item[0], int)


def sft_loss(
    logprobs: Tensor, completion_mask: Tensor, *, n_tokens: float | None = None
) -> tuple[Tensor, dict[str, float]]:
    """Mean negative log-likelihood, ``-sum logprobs m / n_tokens``, in nats.

    A masked position contributes nothing to value and gradient, even if it is NaN.

    Args:
        logprobs: (B, T) float, of the tokens, differentiable. The loss has its dtype.
        completion_mask: (B, T) bool, True on the tokens that count.
        n_tokens: counting tokens of the whole batch, so that micro-batches add up to it; None: those
            of this one.

    Returns:
        The scalar loss, and as metric ``token_probability``, the mean probability of the tokens.

    Raises:
        WhetTypeError: an argument is no tensor, or of the wrong dtype or number of axes.
        WhetValueError: shapes that disagree, or n_tokens that is no number >= 0.
    """
    check_float_tensor("sft_loss", "logprobs", logprobs, n_axes=2)
    check_shapes("sft_loss", "logprobs", logprobs, {"completion_mask": completion_mask})
    n_tokens = denominator("sft_loss", "n_tokens", completion_mask.sum() if n_tokens is None else n_tokens)
    probability = masked(logprobs.detach().exp(), completion_mask).sum() / n_tokens
    return -masked(logprobs, completion_mask).sum() / n_tokens, {"token_probability": probability.item()}
