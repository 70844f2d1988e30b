"""Log-probabilities of completions under a causal language model, differentiable in the model.

Supports any ``nn.Module`` that maps token ids to logits, including Hugging Face causal models and PEFT models. Does not
sample, tokenise, switch between train and eval mode, or move the model.

The log-softmax is ``log pi(a) = z_a / T - logsumexp(z / T)``, computed in chunks of tokens with a custom backward:
``torch_logprobs``. On a device, where logits and their gradient are most of the memory of a step, the head is computed
apart from the model, and only a chunk of logits is alive at once. Padding is on the right, so in a causal model no real
token attends to it.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from whet.config.kept_tokens import KeptTokens
from whet.errors import WhetTypeError, WhetValueError, check_temperature
from whet.learner.batch import (
    OWN_CHOICE,
    Neftune,
    PackedBatch,
    check_rows,
    input_rows,
    pack_batch,
    place_experts,
    select_candidates,
    select_kept,
)
from whet.models.families import model_config
from whet.nn.accelerate import Acceleration, acceleration_of
from whet.nn.balance import balance_loss, count_rows, record_router_logits
from whet.nn.linear_logprobs import Kept, linear_logprobs
from whet.nn.modules import inner_module, module_device, position_limit
from whet.nn.output_head import output_head
from whet.nn.replay import replay_experts
from whet.nn.torch_logprobs import Wanted, logprobs_of_logits, logprobs_of_states


class CompletionLogprobs(NamedTuple):
    """Log-probs of a batch of completions under a model. C is the longest completion's length.

    Attributes:
        logprobs: (B, C) float32 (float64 for float64 logits), or (B, C, k) of given candidates, differentiable in the
            model; 0 where ``mask`` is False.
        entropy: (B, C), ``H = -sum_v p_v log p_v`` in nats, differentiable on request, 0 where ``mask`` is False; None
            unless requested.
        mask: (B, C) bool, True on the tokens of each completion that count.
        mean: (B, C), the mean of the log-probs of the vocabulary, differentiable, 0 where ``mask`` is False; None
            unless requested.
        balance: the balance loss of the model's routers, differentiable; None unless requested.
        replaced_experts: see ``Logprobs``.
    """

    logprobs: Tensor
    entropy: Tensor | None
    mask: Tensor
    mean: Tensor | None = None
    balance: Tensor | None = None
    replaced_experts: float | None = None


def _check_positions(
    where: str, model: nn.Module, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> None:
    limit = position_limit(model)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        n_tokens = len(prompt) + len(completion)
        if limit is not None and n_tokens - 1 > limit:  # the last token is not an input
            raise WhetValueError(
                f"{where}: row {i} has {n_tokens:,} tokens, and the model's last position is {limit:,}. Shorten it."
            )


def completion_logprobs(
    model: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    *,
    completion_mask: Sequence[Sequence[bool]] | None = None,
    kept_tokens: Sequence[KeptTokens | None] | None = None,
    candidates: Sequence[Any] | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    return_mean: bool = False,
    return_balance: bool = False,
    experts: Sequence[Any] | None = None,
    differentiable_entropy: bool = False,
    neftune: Neftune | None = None,
) -> CompletionLogprobs:
    """Return the log-probability of each completion token, given its prompt and the tokens before it.

    ``log pi(y_t | x, y_<t) = z_t[y_t] / T - logsumexp(z_t / T)``, ``H_t = -sum_v p_v log p_v`` (equal to
    ``logZ - sum_v p_v z_v / T``), and ``M_t = sum_v log p_v / V``, accumulated in float32 for any dtype of logits;
    float64 stays float64.

    Args:
        model: ``forward(input_ids (B, T)) -> logits (B, T, V)``, or an object with ``.logits``, run in its current mode
            and on its device. If forward has parameters ``attention_mask``, ``use_cache`` or ``logits_to_keep``, it
            gets the mask, False, and a count that spares it the logits of prompt positions.
        prompt_ids: B rows of token ids without padding, at least one token each.
        completion_ids: B rows of token ids without padding; a row may be empty.
        completion_mask: for each completion token, whether it counts; None: all do. Whet's kernels do not compute the
            logits of tokens that do not count.
        kept_tokens: for each completion, the tokens that each token was drawn from (``Completion.kept_tokens``): sums
            over v are sums over them. None: the whole vocabulary.
        candidates: for each completion, (T, k) token ids whose log-probs are returned instead of its tokens' own, such
            as a teacher's most probable tokens. Without kept_tokens and return_mean.
        temperature: T, divides the logits; pass the sampling temperature of the completions.
        return_entropy: also compute H.
        return_mean: also compute M, as label smoothing needs. Without kept_tokens.
        experts: for each row, ids of the experts of its last inputs, or None, as in ``Learner.logprobs``: the routers
            choose these, with their own probabilities. Only on Whet's kernels.
        return_balance: also compute the balance loss of a mixture of experts, over all inputs: the tokens of the rows
            except their last.
        differentiable_entropy: whether H has a gradient; on Whet's kernels the backward of a frozen head then computes
            the logits again.
        neftune: noise on the embeddings, of a Hugging Face model; None: none.

    Returns:
        ``CompletionLogprobs(logprobs (B, C) or (B, C, k), entropy (B, C) or None, mask (B, C), mean (B, C) or None,
        balance () or None)``. A row of log-probs does not depend on other rows or on padding.

    Raises:
        WhetTypeError: token ids that are not integers, or an output that is not a tensor of logits.
        WhetValueError: no rows, different numbers of rows, an empty prompt, a mask of another shape, a token id outside
            the vocabulary, logits of the wrong shape, a row longer than the model's positions, or a temperature that
            is not a number > 0.
    """
    where = "completion_logprobs"
    check_temperature(where, temperature)
    prompts = token_lists(prompt_ids, where, "prompt_ids", allow_empty=False)
    completions = token_lists(completion_ids, where, "completion_ids", allow_empty=True)
    check_rows(where, prompts, completions, completion_mask, kept_tokens)
    if candidates is not None and (kept_tokens is not None or return_mean):
        name = "kept_tokens" if kept_tokens is not None else "return_mean"
        raise WhetValueError(f"{where}: candidates and {name} are given, which exclude each other. Omit one.")
    _check_positions(where, model, prompts, completions)

    acceleration = acceleration_of(model)
    if acceleration is not None:
        return _packed_logprobs(
            model, acceleration, prompts, completions, completion_mask, kept_tokens, candidates, temperature,
            return_entropy, return_mean, return_balance, experts, differentiable_entropy, neftune,
        )  # fmt: skip
    if experts is not None:
        raise WhetValueError(f"{where}: experts are given, and torch computes the model. Omit them, or accelerate it.")

    # The last token of a completion predicts nothing that counts, so it is not an input.
    inputs = [prompt + completion[:-1] for prompt, completion in zip(prompts, completions, strict=True)]
    device = module_device(model)
    input_ids, attention_mask = padded_batch(inputs, device=device)
    n_last = input_ids.shape[1] - min(map(len, prompts)) + 1
    noise = None
    if neftune is not None:
        batch = pack_batch(prompts, completions)
        drawn = neftune.draw(batch, embedding_dim(model, where))
        noise = torch.zeros((*input_ids.shape, drawn.shape[1]))
        for i in (i for i, completion in enumerate(completions) if completion):
            noise[i, : len(inputs[i])] = torch.from_numpy(drawn[input_rows(batch, i, len(prompts[i]))])
    for head in (output_head(model) if splits_head(device) else None, None):
        apart = nullcontext([]) if head is None else head.taken_apart()
        recorded = record_router_logits(model) if return_balance else nullcontext()
        with add_noise(model, noise), recorded as routers, apart as states:
            logits = causal_logits(model, input_ids, attention_mask, n_last, where=where)
        if head is None or head.gives(logits):
            break
    vocab_size = logits.shape[2] if head is None else head.module.out_features
    balance = None if routers is None else balance_loss(model, routers, attention_mask.flatten())

    targets, mask = padded_batch(completions, device=device)
    if completion_mask is not None:
        mask = padded_batch(completion_mask, device=device)[0].bool()
    rows, steps = mask.nonzero(as_tuple=True)
    token_ids = targets[rows, steps]
    _check_vocabulary(where, token_ids, vocab_size)
    # Column of the logits that predict completion token 0, per row.
    n_skipped = input_ids.shape[1] - logits.shape[1]
    first = torch.tensor([len(prompt) - 1 - n_skipped for prompt in prompts], device=device)
    at = rows.cpu().numpy(), steps.cpu().numpy()
    kept = select_kept(kept_tokens, *at, token_ids.cpu().numpy(), vocab_size, where)
    if candidates is not None:
        chosen = select_candidates(candidates, completions, *at, vocab_size, where)
        token_ids = torch.from_numpy(chosen).to(token_ids)
    else:
        token_ids = token_ids[:, None]
    wanted = Wanted(token_ids, float(temperature), return_entropy, return_mean, kept)
    columns = first[rows] + steps
    if head is None:
        logprobs, entropy, mean = logprobs_of_logits(logits, rows, columns, wanted)
    else:
        logprobs, entropy, mean = logprobs_of_states(states[0][rows, columns], head, wanted)
    if entropy is not None and not differentiable_entropy:
        entropy = entropy.detach()
    return _scatter_by_row(
        logprobs[:, 0] if candidates is None else logprobs, entropy, mean, mask, rows, steps
    )._replace(balance=balance)


def _packed_logprobs(
    model: nn.Module,
    acceleration: Acceleration,
    prompts: list[list[int]],
    completions: list[list[int]],
    completion_mask: Sequence[Sequence[bool]] | None,
    kept_tokens: Sequence[KeptTokens | None] | None,
    candidates: Sequence[Any] | None,
    temperature: float,
    return_entropy: bool,
    return_mean: bool,
    return_balance: bool,
    experts: Sequence[Any] | None,
    differentiable_entropy: bool,
    neftune: Neftune | None,
) -> CompletionLogprobs:
    """Compute packed: without padding, shared prompts once, and logits never materialised."""
    where = "completion_logprobs"
    packed, head = pack_batch(prompts, completions), acceleration.head()
    batch = PackedBatch(*map(torch.from_numpy, packed))
    _check_vocabulary(where, batch.targets, head.bounds[-1][1])
    replay, share = partial(nullcontext, []), None
    if experts is not None:
        inner: Any = inner_module(model)
        config = model_config(inner.config.to_dict(), where=where)
        given = place_experts(experts, prompts, packed, config, where)
        replay = partial(replay_experts, model, config, given)
        share = 1 / max(1, np.count_nonzero(given[..., 0] != OWN_CHOICE))
    noise = None if neftune is None else torch.from_numpy(neftune.draw(packed, embedding_dim(model, where)))
    recorded = record_router_logits(model) if return_balance else nullcontext()
    try:
        with add_noise(model, noise), replay() as replaced, recorded as routers:
            hidden = acceleration.hidden_states(batch, again=replay)
    except IndexError as error:
        raise _missing_row_error(where, batch.input_ids, int(batch.position_ids.max()) + 1) from error
    balance = None if routers is None else balance_loss(model, routers, count_rows(batch))
    lengths = torch.tensor([len(row) for row in completions])
    mask, counts = torch.arange(int(lengths.max())) < lengths[:, None], slice(None)
    if completion_mask is not None:
        mask = padded_batch(completion_mask, device=mask.device)[0].bool()
        counts = mask[batch.rows, batch.steps]
    rows, steps, targets = batch.rows[counts], batch.steps[counts], batch.targets[counts]
    found = select_kept(kept_tokens, rows.numpy(), steps.numpy(), targets.numpy(), head.bounds[-1][1], where)
    kept = None
    if found is not None:
        kept = Kept(torch.from_numpy(found.offsets), torch.from_numpy(found.words), found.vocab_size)
    if candidates is not None:
        targets = torch.from_numpy(
            select_candidates(candidates, completions, rows.numpy(), steps.numpy(), head.bounds[-1][1], where)
        )
    values = linear_logprobs(
        hidden[batch.hidden_rows[counts]], head, targets, float(temperature), return_entropy, kept,
        differentiable_entropy, return_mean,
    )  # fmt: skip
    shared = None if share is None else share * sum(replaced)
    return _scatter_by_row(*values, mask, rows, steps)._replace(balance=balance, replaced_experts=shared)


def embedding_dim(model: nn.Module, where: str) -> int:
    """Return the size of the embeddings of a Hugging Face model.

    Raises:
        WhetTypeError: another module.
    """
    inner: Any = inner_module(model)
    if not (hasattr(inner, "get_input_embeddings") and hasattr(inner, "config")):
        raise WhetTypeError(
            f"{where}: neftune adds noise to the embeddings of a Hugging Face model, and {type(inner).__name__} has no "
            f"get_input_embeddings, or no config. Omit it."
        )
    return inner.config.get_text_config().hidden_size


@contextmanager
def add_noise(model: nn.Module, noise: Tensor | None) -> Iterator[None]:
    """Context in which ``noise``, of the shape of the inputs of the first layer, is added to them; None: none."""
    if noise is None:
        yield
        return
    inner: Any = inner_module(model)
    scale = getattr(inner.config, "embedding_multiplier", None) or 1.0  # Granite's, after the embedding

    def add(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output + (noise / scale).to(output).view_as(output)

    hook = inner.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()


def _scatter_by_row(
    logprobs: Tensor, entropy: Tensor | None, mean: Tensor | None, mask: Tensor, rows: Tensor, steps: Tensor
) -> CompletionLogprobs:
    """Scatter values of tokens to their rows and steps, with zeros elsewhere."""

    def scatter(values: Tensor) -> Tensor:
        return values.new_zeros((*mask.shape, *values.shape[1:])).index_put((rows, steps), values)

    entropy, mean = (None if values is None else scatter(values) for values in (entropy, mean))
    return CompletionLogprobs(scatter(logprobs), entropy, mask, mean)


def _check_vocabulary(where: str, token_ids: Tensor, size: int) -> None:
    if token_ids.numel() and int(token_ids.max()) >= size:
        raise WhetValueError(
            f"{where}: completion_ids holds token {int(token_ids.max())}, but the model's vocabulary has "
            f"{size} tokens. Tokenise with the model's own tokenizer."
        )


def _missing_row_error(where: str, input_ids: Tensor, length: int) -> WhetValueError:
    return WhetValueError(
        f"{where}: the model's embedding has no row for a token or position of this batch (largest "
        f"token id {int(input_ids.max())}, longest row {length} tokens). Use the model's own tokenizer "
        f"and rows within its position limit."
    )


def causal_logits(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, n_last: int, *, where: str) -> Tensor:
    """Return the logits of right-padded rows, for at least the last ``n_last`` positions.

    Args:
        model: see ``completion_logprobs``.
        input_ids: (B, T) int64, on the model's device.
        attention_mask: (B, T) bool; passed if the model's forward has such a parameter.
        n_last: positions needed, counted from the end; the others are skipped if forward has ``logits_to_keep``.
        where: the caller's name, for errors.

    Returns:
        (B, K, V) with K = T or K = n_last: the last K positions.

    Raises:
        WhetTypeError: the output is not a floating-point tensor.
        WhetValueError: the output has the wrong shape, or an embedding has no row for a token or position.
    """
    n_rows, length = input_ids.shape
    named = _forward_parameters(model)
    options: dict[str, Any] = {}
    if "attention_mask" in named:
        options["attention_mask"] = attention_mask.long()
    if "use_cache" in named:
        options["use_cache"] = False
    if "logits_to_keep" in named:
        options["logits_to_keep"] = n_last
    try:
        output = model(input_ids, **options)
    except IndexError as error:
        raise _missing_row_error(where, input_ids, length) from error
    logits = getattr(output, "logits", output)
    model_name = type(model).__name__
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        got = f"a {logits.dtype} tensor" if isinstance(logits, Tensor) else type(logits).__name__
        raise WhetTypeError(
            f"{where}: {model_name} returned {got}, expected a floating-point tensor of logits (B, T, V) or "
            f"an object with .logits. Pass a causal language model."
        )
    if logits.ndim != 3 or logits.shape[0] != n_rows or logits.shape[1] not in (length, n_last):
        raise WhetValueError(
            f"{where}: {model_name} returned logits of shape {tuple(logits.shape)}, expected (B, T, V) = "
            f"({n_rows}, {length}, V). Pass a causal language model."
        )
    return logits


def padded_batch(
    rows: Sequence[Sequence[int]], *, device: torch.device, pad_id: int = 0, left: bool = False
) -> tuple[Tensor, Tensor]:
    """Pad rows of token ids on the right, or left, to ``(ids (B, T) int64, mask (B, T) bool)``."""
    length = max(map(len, rows))

    def pad_row(row: Sequence[int], fill: int) -> list[int]:
        padding = [fill] * (length - len(row))
        return [*padding, *row] if left else [*row, *padding]

    ids = torch.tensor([pad_row(row, pad_id) for row in rows], dtype=torch.int64)
    mask = torch.tensor([pad_row([1] * len(row), 0) for row in rows], dtype=torch.bool)
    return ids.to(device), mask.to(device)


def token_lists(rows: Sequence[Sequence[int]], where: str, name: str, *, allow_empty: bool) -> list[list[int]]:
    """Return ``rows`` as lists of ints after checks: integers only, none negative, no empty row unless allowed."""
    checked = []
    for i, row in enumerate(rows):
        values = row.tolist() if isinstance(row, Tensor) else row
        try:
            tokens = [operator.index(token) for token in values]
        except TypeError as error:
            raise WhetTypeError(
                f"{where}: {name}[{i}] is {row!r:.60}, expected a flat sequence of integer token ids."
            ) from error
        if not tokens and not allow_empty:
            raise WhetValueError(
                f"{where}: {name}[{i}] is empty, so no token predicts the first token after it. Start the prompt with "
                f"at least one token, such as BOS."
            )
        if tokens and min(tokens) < 0:
            raise WhetValueError(
                f"{where}: {name}[{i}] holds {min(tokens)}, expected token ids >= 0. Pass rows without "
                f"padding or label masks."
            )
        checked.append(tokens)
    return checked


def splits_head(device: torch.device) -> bool:
    """Whether logits are computed in chunks, from the hidden states of the tokens that count."""
    return device.type != "cpu"


def _forward_parameters(model: nn.Module) -> set[str]:
    return set(inspect.signature(inner_module(model).forward).parameters)
