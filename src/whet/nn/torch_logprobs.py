"""Log-probs of tokens by torch's operators, on any device and in any dtype: from logits, or from hidden states.

Rows are computed in chunks: tensors (rows, V) exist for a chunk only, except logits that a model returned, and their
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whet.config.kept_tokens import KeptTokens
from whet.nn.output_head import OutputHead

_CHUNK_ELEMENTS, _DEVICE_CHUNK_ELEMENTS = 1 << 20, 1 << 26
"""Logits computed in float32 at a time: 4 MiB, which fit in a core's cache; 256 MiB on a device, where the start of a
kernel takes microseconds."""


class Wanted(NamedTuple):
    """Values to compute of each row's distribution, the softmax of its logits / T.

    Attributes:
        token_ids: (N, k), tokens whose log-probs are returned.
        temperature: T.
        entropy: whether the entropy is returned.
        mean: whether the mean of the log-probs of the vocabulary is returned.
        kept: the tokens of each distribution; None: the whole vocabulary.
    """

    token_ids: Tensor
    temperature: float
    entropy: bool
    mean: bool
    kept: KeptTokens | None


def logprobs_of_logits(logits: Tensor, rows: Tensor, columns: Tensor, wanted: Wanted) -> Any:
    """Return log-probs (N, k), entropies and means, (N,) or None, of ``logits[rows, columns]``; each at most once."""
    return _OfLogits.apply(logits, rows, columns, wanted)  # pyright: ignore[reportGeneralTypeIssues]


def logprobs_of_states(states: Tensor, head: OutputHead, wanted: Wanted) -> Any:
    """Return log-probs (N, k), entropies and means, (N,) or None, of hidden states (N, K) before the head.

    The backward computes the logits again. The gradient of the weight is a sum in float32 over the chunks.
    """
    weight, bias = head.module.weight, head.module.bias
    return _OfStates.apply(states, weight, bias, head, wanted)  # pyright: ignore[reportGeneralTypeIssues]


class _OfLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, columns: Tensor, wanted: Wanted) -> tuple[Tensor | None, ...]:
        dtype = _sum_dtype(logits)
        sums = _forward(lambda part: logits[rows[part], columns[part]].to(dtype), len(rows), logits.shape[2], wanted)
        ctx.save_for_backward(logits, rows, columns, *sums)
        ctx.wanted = wanted
        ctx.set_materialize_grads(False)
        return sums.logprobs, sums.entropy, sums.mean

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        logits, rows, columns, *saved = ctx.saved_tensors
        sums, out = _Sums(*saved), torch.zeros_like(logits)
        for part in _chunks(len(rows), logits.shape[2], logits.device):
            z = logits[rows[part], columns[part]].to(sums.log_z.dtype)
            out[rows[part], columns[part]] = _backward(z, part, sums, grads, ctx.wanted).to(out.dtype)
        return out, None, None, None


class _OfStates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, head: OutputHead, wanted: Wanted
    ) -> tuple[Tensor | None, ...]:
        sums = _forward(lambda part: head.logits(states[part])[0], len(states), len(weight), wanted)
        ctx.save_for_backward(states, weight, *sums)
        ctx.head, ctx.wanted = head, wanted
        ctx.set_materialize_grads(False)
        return sums.logprobs, sums.entropy, sums.mean

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        states, weight, *saved = ctx.saved_tensors
        sums, dtype = _Sums(*saved), weight.dtype
        of_states, of_weight, of_bias = ctx.needs_input_grad[:3]
        grad_states = torch.empty_like(states) if of_states else None
        grad_weight = torch.zeros_like(weight, dtype=sums.log_z.dtype) if of_weight else None
        grad_bias = sums.log_z.new_zeros(len(weight)) if of_bias else None
        for part in _chunks(len(states), len(weight), states.device):
            z, factor = ctx.head.logits(states[part])
            grad_z = _backward(z, part, sums, grads, ctx.wanted)
            if not isinstance(factor, float) or factor != 1:
                grad_z.mul_(factor)
            if grad_states is not None:
                grad_states[part] = (grad_z.to(dtype) @ weight).to(states.dtype)
            if grad_weight is not None:
                grad_weight += grad_z.to(dtype).t() @ states[part].to(dtype)
            if grad_bias is not None:
                grad_bias += grad_z.sum(0)
        made = (None if grad is None else grad.to(dtype) for grad in (grad_weight, grad_bias))
        return grad_states, *made, None, None


class _Sums(NamedTuple):
    log_z: Tensor
    logprobs: Tensor
    entropy: Tensor | None
    mean: Tensor | None


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _chunks(n_rows: int, vocab_size: int, device: torch.device) -> Iterator[slice]:
    step = max(1, (_CHUNK_ELEMENTS if device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS) // vocab_size)
    return (slice(start, start + step) for start in range(0, max(1, n_rows), step))


def _forward(logits: Callable[[slice], Tensor], n_rows: int, vocab_size: int, wanted: Wanted) -> _Sums:
    """Compute the values of rows from the float logits (n, V) of some of them, which are overwritten."""
    parts: list[_Sums] = []
    for part in _chunks(n_rows, vocab_size, wanted.token_ids.device):
        z = _scaled(logits(part), wanted, part)
        log_z = torch.logsumexp(z, dim=-1)
        logprobs = z.gather(-1, wanted.token_ids[part]) - log_z[:, None]
        mean = z.mean(dim=-1) - log_z if wanted.mean else None
        entropy = None
        if wanted.entropy:
            log_p = z.sub_(log_z[:, None])
            # The floor makes p log p of an impossible token 0 * -1e4 instead of 0 * -inf.
            entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(dim=-1)
        parts.append(_Sums(log_z, logprobs, entropy, mean))
    entropies, means = ([x for x in column if x is not None] for column in list(zip(*parts, strict=True))[2:])
    return _Sums(
        torch.cat([each.log_z for each in parts]),
        torch.cat([each.logprobs for each in parts]),
        torch.cat(entropies) if wanted.entropy else None,
        torch.cat(means) if wanted.mean else None,
    )


def _backward(z: Tensor, part: slice, sums: _Sums, grads: Any, wanted: Wanted) -> Tensor:
    """Return the gradient of logits (n, V), which are overwritten.

    It is the sum of ``d log pi(a) / d z_v = ([v = a] - p_v) / T``, ``d H / d z_v = -p_v (log p_v + H) / T`` and
    ``d M / d z_v = (1 / V - p_v) / T``.
    """
    scale, of_entropy, of_mean = (None if each is None else each[part] / wanted.temperature for each in grads)
    if scale is None:
        scale = z.new_zeros(wanted.token_ids[part].shape)
    log_p, factor = _scaled(z, wanted, part).sub_(sums.log_z[part, None]), scale.sum(1, keepdim=True)
    if of_entropy is not None and sums.entropy is not None:
        factor = factor + of_entropy[:, None] * (log_p.clamp(min=-1e4) + sums.entropy[part, None])
    if of_mean is not None:
        factor = factor + of_mean[:, None]
    grad = log_p.exp_().mul_(-factor)
    if of_mean is not None:
        grad += of_mean[:, None] / grad.shape[1]
    return grad.scatter_add_(-1, wanted.token_ids[part], scale)


def _scaled(z: Tensor, wanted: Wanted, part: slice) -> Tensor:
    """Divide logits by the temperature, and set those outside the sets of their rows to -inf, in place."""
    z = z.div_(wanted.temperature)
    if wanted.kept is None or not len(z):
        return z
    mask = torch.from_numpy(wanted.kept.mask(part.start, part.start + len(z))).to(z.device)
    return z.masked_fill_(~mask, -torch.inf)
