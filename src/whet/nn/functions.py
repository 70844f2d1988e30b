"""The parts of a transformer's training step as autograd functions over native kernels, on the CPU.

Each computes in the dtype of its input, float32 or bfloat16, with float32 sums, and keeps for its backward no more than
the inputs. Products of bfloat16 are torch's, which are at the machine's ceiling; of float32 they are Whet's, as torch's
reach two fifths of a Zen 5's. Weights are float32 masters; where products are bfloat16, a rounded copy of the weight
stands beside it, and its gradient is float32.

Arguments are checked by those who call: see ``whet.nn.accelerate``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whet import _core
from whet.nn.packed import PackedBatch
from whet.ops.linear import PackedWeight, gemm
from whet.ops.linear import linear as packed_linear
from whet.ops.rope import apply_rope

_TILE = 2048
"""Tile of the vocabulary: entries whose logits are computed at a time."""
_ROWS = 512
"""Tokens whose logits are computed at a time in the forward: 4 MiB, which stay in the caches."""


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None, in_place: bool) -> Tensor:
    """The rows of weight (V, K) at the ids, of any shape; that of ``padding_idx`` gets no gradient.

    ``in_place``: see ``linear``.
    """
    return _Embedding.apply(ids, weight, padding_idx, in_place)  # pyright: ignore[reportReturnType]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None, in_place: bool) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding_idx, ctx.in_place = weight, padding_idx, in_place
        return torch.nn.functional.embedding(ids, weight.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[None, Tensor | None, None, None]:
        ids, grad = ctx.saved_tensors[0].reshape(-1), grads[0].reshape(-1, ctx.weight.shape[1])
        if ctx.padding_idx is not None:
            grad = grad * (ids != ctx.padding_idx)[:, None]
        into = _grad_of(ctx.weight, ctx.in_place)
        total = torch.zeros_like(ctx.weight) if into is None else into
        total.index_add_(0, ids, grad.to(total.dtype))
        return None, total if into is None else None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, copy: Tensor, in_place: bool = False) -> Tensor:
    """x weight^T + bias in the dtype of ``copy``, the weight as it is multiplied.

    Args:
        x: (..., K) of any float dtype.
        weight: (N, K) float32: gets the gradient.
        bias: (N,) or None.
        copy: (N, K): weight itself, or its rounded copy.
        in_place: add the gradient to ``weight.grad`` where it is computed, and give autograd none: one pass less, for
            a loop that calls ``backward`` and looks only at ``.grad``. Where the weight is no leaf, or has hooks that
            want to see its gradient, autograd gets it.
    """
    return _Linear.apply(x, weight, bias, copy, in_place)  # pyright: ignore[reportReturnType]


def rounded_linear(x: Tensor, weight: Tensor, bias: Tensor | None, by_columns: bool) -> Tensor:
    """x bf16(weight)^T + bias for a few rows x, without a copy of the weight and without gradients; bfloat16.

    Args:
        x: (..., K) of any float dtype, rounded to bfloat16.
        weight: (N, K) float32, contiguous; (K, N) ``by_columns``.
        bias: (N,) or None.
        by_columns: how the weight lies.
    """
    k, n = weight.shape if by_columns else weight.shape[::-1]
    rows = x.detach().reshape(-1, k).to(torch.bfloat16).contiguous()
    out = torch.empty((len(rows), n), dtype=torch.bfloat16)
    added = None if bias is None else bias.detach().float().contiguous()
    _core.rounded_linear(rows, weight.detach(), by_columns=by_columns, bias=added, out=out)
    return out.view(*x.shape[:-1], n)


def _of_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, all bfloat16 or all float32."""
    if all(x.dtype == torch.bfloat16 for x in tensors):
        return tensors
    return tuple(x.float() for x in tensors)


def _grad_of(weight: Tensor, in_place: bool) -> Tensor | None:
    """``weight.grad`` to add to, or None where autograd has to get the gradient."""
    hooks = getattr(weight, "_backward_hooks", None) or getattr(weight, "_post_accumulate_grad_hooks", None)
    if not in_place or not weight.is_leaf or hooks:
        return None
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def _mm(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b + bias, of the dtype that a and b have."""
    if a.dtype == torch.bfloat16:
        return torch.mm(a, b) if bias is None else torch.addmm(bias.to(a.dtype), a, b)
    out = gemm(a.detach(), b.detach())
    return out if bias is None else out.add_(bias)


def _add_mm(into: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b to float32 rows."""
    if a.dtype == torch.float32 and into.is_contiguous():
        gemm(a.detach(), b.detach(), beta=1.0, out=into)
    else:
        into.add_(_mm(a, b))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, copy: Tensor, in_place: bool) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(copy.dtype)
        ctx.save_for_backward(rows, copy)
        ctx.weight, ctx.in_place = weight, in_place
        ctx.shape, ctx.bias_dtype = x.shape, None if bias is None else bias.dtype
        out = _mm(rows, copy.t(), bias)
        return out.view(*x.shape[:-1], copy.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        rows, copy = ctx.saved_tensors
        grad = grads[0].reshape(-1, copy.shape[0]).to(copy.dtype)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = _mm(grad, copy).view(ctx.shape) if needs_x else None
        grad_bias = grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
        into = _grad_of(ctx.weight, ctx.in_place) if needs_weight else None
        grad_weight = None
        if into is not None:
            _add_mm(into, grad.t(), rows)
        elif needs_weight:
            grad_weight = _mm(grad.t(), rows).float()
        return grad_x, grad_weight, grad_bias, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, of (..., n), in ``dtype``; weight float32."""
    if x.dtype not in (torch.float32, dtype):
        x = x.float()
    return _RMSNorm.apply(x, weight, eps, dtype)  # pyright: ignore[reportReturnType]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.dtype = eps, dtype
        if x.dtype == dtype:
            return _core.rms_norm(x.detach(), weight.detach(), eps, None, None)
        out = torch.empty_like(x, dtype=dtype)
        _core.rms_norm_to_bf16(x.detach(), weight.detach(), eps, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        _core.rms_norm_backward(
            x=x, weight=weight, grad=grads[0].contiguous(), eps=ctx.eps, grad_x=grad_x, grad_weight=grad_weight
        )
        return grad_x, grad_weight, None, None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) up, element by element."""
    return _SwiGLU.apply(*_of_one_dtype(gate, up))  # pyright: ignore[reportReturnType]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        n = gate.shape[-1]
        return _core.swiglu(gate.detach().view(-1, n), up.detach().view(-1, n), None).view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        gate, up = (tensor.detach() for tensor in ctx.saved_tensors)
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        _core.swiglu_backward(gate=gate, up=up, grad=grads[0].contiguous(), grad_gate=grad_gate, grad_up=grad_up)
        return grad_gate, grad_up


def rope(x: Tensor, table: Tensor, is_neox: bool = True) -> Tensor:
    """x (N, H, D) rotated by the rows of ``table`` (N, R), its R / 2 cosines and then its sines.

    Pairs are halves of the R elements, or neighbours (``is_neox=False``)."""
    return _Rope.apply(x, table, is_neox)  # pyright: ignore[reportReturnType]


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, is_neox: bool) -> Tensor:
        ctx.save_for_backward(table)
        ctx.is_neox = is_neox
        return _rotate(x, table, is_neox, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return _rotate(grads[0], ctx.saved_tensors[0], ctx.is_neox, inverse=True), None, None


def _rotate(x: Tensor, table: Tensor, is_neox: bool, inverse: bool) -> Tensor:
    out = x.detach().clone(memory_format=torch.contiguous_format)
    apply_rope(torch.arange(len(out)), out, None, out.shape[2], table, is_neox, inverse=inverse)
    return out


def attention(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, scale: float, window: int | None) -> Tensor:
    """Causal attention of the sequences of a packed batch.

    Args:
        q: (N, H, D), its last axis contiguous.
        k: (N, H_kv, D).
        v: as k.
        batch: which keys a token sees.
        scale: of the scores.
        window: keys seen at most, the token's own included; None: all.

    Returns:
        (N, H, D), contiguous.
    """
    return _Attention.apply(*_of_one_dtype(q, k, v), batch, scale, window)  # pyright: ignore[reportReturnType]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, scale: float, window: int | None
    ) -> Tensor:
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        out = torch.empty(q.shape, dtype=q.dtype)
        lse = torch.empty(q.shape[:2])
        _make_attention_task(q, k, v, out, lse, batch, scale, window).forward()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = batch, scale, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        batch: PackedBatch = ctx.settings[0]
        grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
        _make_attention_task(q, k, v, out, lse, *ctx.settings).backward(
            grad_out=grads[0].contiguous(), grad_q=grad_q, grad_k=grad_k, grad_v=grad_v,
            reader_offsets=batch.reader_offsets, readers=batch.readers,
        )  # fmt: skip
        return grad_q, grad_k, grad_v, None, None, None


def _make_attention_task(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, batch: PackedBatch, scale: float, window: int | None
) -> Any:
    return _core.TrainingAttention(
        q=q.detach(), k=k.detach(), v=v.detach(), out=out.detach(), lse=lse, q_offsets=batch.q_offsets,
        k_offsets=batch.k_offsets, key_rows=batch.key_rows, window=window or None, scale=scale,
    )  # fmt: skip


class Head:
    """The projection on the vocabulary, as its products take it: tiles of the weight, packed where it is bfloat16.

    Args:
        weight: (V, K) float32: gets the gradient.
        bias: (V,) or None.
        copy: weight itself, or its bfloat16 copy.

    Attributes:
        in_place: as ``linear`` takes it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, copy: Tensor) -> None:
        self.weight, self.bias, self.copy = weight, bias, copy
        self.in_place = False
        self.tiles = [(start, min(start + _TILE, len(copy))) for start in range(0, len(copy), _TILE)]
        self._packed: list[PackedWeight] = []
        if copy.dtype == torch.bfloat16:
            self._packed = [PackedWeight("bfloat16", (end - start, copy.shape[1])) for start, end in self.tiles]
            self.repack()

    def repack(self) -> None:
        """Take the weights as they are now."""
        if self._packed:
            for packed, (start, end) in zip(self._packed, self.tiles, strict=True):
                packed.update(self.copy[start:end])

    def logits(self, hidden: Tensor, i: int, out: Tensor) -> None:
        """The float32 logits of tile i, of (M, K) float32 rows, to ``out`` (M, n)."""
        start, end = self.tiles[i]
        bias = None if self.bias is None else self.bias.detach()[start:end].float()
        if self._packed:
            packed_linear(hidden, self._packed[i], bias, out=out)
            return
        gemm(hidden, self.copy[start:end], transpose_b=True, out=out)
        if bias is not None:
            out += bias


def linear_logprobs(
    hidden: Tensor, head: Head, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of tokens, and entropies, from hidden states: the vocabulary's projection and the log-softmax in one.

    ``log pi(y) = z_y / T - log sum_v exp(z_v / T)``, ``z = hidden weight^T + bias``. Logits are float32, and there are
    those of 2,048 words at a time: the sums run on from tile to tile (online log-sum-exp; Milakov & Gimelshein 2018),
    and the backward computes the tiles again.

    Args:
        hidden: (M, K).
        head: the projection.
        targets: (M,) int64.
        temperature: T.
        with_entropy: also compute the entropy, which is not differentiable.

    Returns:
        (M,) float32 each; None for the entropy that was not asked for.
    """
    logprobs, entropy = _LinearLogprobs.apply(  # pyright: ignore[reportGeneralTypeIssues]
        hidden, head.weight, head.bias, head, targets, temperature, with_entropy
    )
    return logprobs, entropy if with_entropy else None


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, targets: Tensor, temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        wide, targets = hidden.detach().float().contiguous(), targets.contiguous()
        logprobs, lse, entropy = (torch.zeros(len(wide)) for _ in range(3))
        rows = _core.TokenLogprobs(targets, temperature, with_entropy)
        logits = torch.empty(_ROWS * _TILE)
        for i, (first, last) in enumerate(head.tiles):
            for start in range(0, len(wide), _ROWS):
                part = wide[start : start + _ROWS]
                z = logits[: len(part) * (last - first)].view(len(part), -1)
                head.logits(part, i, z)
                rows.add(z, start, first)
        rows.end(logprobs, lse, entropy)
        ctx.save_for_backward(hidden, targets, logprobs, lse)
        ctx.head, ctx.temperature = head, temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden, targets, logprobs, lse = ctx.saved_tensors
        head: Head = ctx.head
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dtype = head.copy.dtype
        wide, rows = hidden.detach().float().contiguous(), hidden.detach().to(dtype).contiguous()
        scale = grads[0].float().contiguous()
        n = len(wide)
        grad_hidden = torch.zeros_like(wide)
        into = _grad_of(head.weight, head.in_place) if needs_weight else None
        grad_weight = torch.empty_like(head.weight) if needs_weight and into is None else None
        grad_bias = torch.empty_like(head.bias) if needs_bias and head.bias is not None else None
        logits = torch.empty(n * _TILE)
        narrow = logits if dtype == torch.float32 else torch.empty(n * _TILE, dtype=dtype)
        for i, (first, last) in enumerate(head.tiles):
            z, grad_z = (x[: n * (last - first)].view(n, last - first) for x in (logits, narrow))
            head.logits(wide, i, z)
            _core.token_logprobs_backward(
                logits=z, tokens=targets, first_token=first, temperature=ctx.temperature, lse=lse,
                logprobs=logprobs.detach(), grads=scale, out=grad_z,
            )  # fmt: skip
            if needs_hidden:
                _add_mm(grad_hidden, grad_z, head.copy[first:last])
            if into is not None:
                _add_mm(into[first:last], grad_z.t(), rows)
            elif grad_weight is not None:
                grad_weight[first:last] = _mm(grad_z.t(), rows)
            if grad_bias is not None:
                grad_bias[first:last] = grad_z.sum(0, dtype=torch.float32)
        return grad_hidden if needs_hidden else None, grad_weight, grad_bias, None, None, None, None
