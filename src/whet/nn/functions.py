"""The layers of a transformer's training step as autograd functions over native kernels, on the CPU.

Each function computes in the dtype of its input, float32 or bfloat16, accumulates in float32, and saves only inputs for
its backward (attention also its output). The output of a norm or of SwiGLU is recomputed in the backward of the linear
layer that reads it: the tensors this takes are saved in any case. bfloat16 products use torch, which reaches the
machine's ceiling; float32 products use Whet, because torch reaches two fifths of the ceiling of a Zen 5. Weights are
float32 masters; a bfloat16 product rounds its weight into scratch memory that all layers share, and weight gradients
are float32.

Callers check the arguments: see ``whet.nn.accelerate``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whet import _core
from whet.learner.batch import PackedBatch
from whet.models.architecture import SWIGLU_LIMIT, SWIGLU_SLOPE
from whet.nn.scratch import empty
from whet.ops.linear import gemm
from whet.ops.rope import apply_rope


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None, in_place: bool) -> Tensor:
    """Return the rows of weight (V, K) at the ids, of any shape; the row of ``padding_idx`` gets no gradient.

    ``in_place``: see ``linears``.
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
        buffer = grad_buffer(ctx.weight, ctx.in_place)
        total = torch.zeros_like(ctx.weight) if buffer is None else buffer
        total.index_add_(0, ids, grad.to(total.dtype))
        return None, total if buffer is None else None, None, None


def rounded_linear(x: Tensor, weight: Tensor, bias: Tensor | None, by_columns: bool) -> Tensor:
    """Return x bf16(weight)^T + bias in bfloat16, without gradients, rounding the weight on load; for few rows of x.

    Args:
        x: (..., K) of any float dtype, rounded to bfloat16.
        weight: (N, K) float32, contiguous; (K, N) if ``by_columns``.
        bias: (N,) or None.
        by_columns: whether the weight is stored transposed.
    """
    k, n = weight.shape if by_columns else weight.shape[::-1]
    rows = x.detach().reshape(-1, k).to(torch.bfloat16).contiguous()
    out = torch.empty((len(rows), n), dtype=torch.bfloat16)
    added = None if bias is None else bias.detach().float().contiguous()
    _core.rounded_linear(rows, weight.detach(), by_columns=by_columns, bias=added, out=out)
    return out.view(*x.shape[:-1], n)


def _restore_shape(x: Tensor, out: Tensor) -> Tensor:
    """Reshape the rows ``out`` computed of x to (..., N); not a view for autograd, so callers may add in place."""
    return torch.ops.aten._unsafe_view(out, [*x.shape[:-1], out.shape[1]])


def _promote(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors unchanged if all are bfloat16, else all in float32."""
    if all(x.dtype == torch.bfloat16 for x in tensors):
        return tensors
    return tuple(x.float() for x in tensors)


def _accumulates_in_place(weight: Tensor, in_place: bool) -> bool:
    """Whether a backward adds the gradient of a weight to ``.grad`` itself."""
    hooks = getattr(weight, "_backward_hooks", None) or getattr(weight, "_post_accumulate_grad_hooks", None)
    return in_place and weight.is_leaf and not hooks


def grad_buffer(weight: Tensor, in_place: bool) -> Tensor | None:
    """Return ``weight.grad`` to accumulate into, allocated if missing; None if the gradient goes through autograd."""
    if not _accumulates_in_place(weight, in_place):
        return None
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a b + bias in the dtype of a and b."""
    out = empty((len(a), b.shape[1]), a.dtype)
    if a.dtype == torch.bfloat16:
        return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias.to(a.dtype), a, b, out=out)
    gemm(a.detach(), b.detach(), out=out)
    return out if bias is None else out.add_(bias)


def add_matmul(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b to ``out``, which is float32 or has the dtype of a and b."""
    if a.dtype == torch.float32 and out.is_contiguous():
        gemm(a.detach(), b.detach(), beta=1.0, out=out)
    elif out.dtype == a.dtype:
        out.addmm_(a, b)
    else:
        out.add_(matmul(a, b))


class Recompute(NamedTuple):
    """Gradient checkpointing of one tensor: a function and its inputs, which are saved in any case."""

    compute: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


def _attach_recompute(recompute: Recompute, out: Any) -> None:
    out.whet_recompute = recompute, out._version


def _find_recompute(x: Tensor) -> Recompute | None:
    """Return the tensor's ``Recompute`` unless the tensor was modified in place, for example by a hook."""
    recompute, version = getattr(x, "whet_recompute", (None, 0))
    return recompute if x._version == version else None


def recompute(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return ``compute(*inputs)``; the backward pass computes it again, so that only the inputs are saved."""
    return _Recompute.apply(compute, *inputs)  # pyright: ignore[reportReturnType]


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.compute = compute
        ctx.save_for_backward(*inputs)
        return compute(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [x.detach().requires_grad_(needs) for x, needs in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            out = ctx.compute(*inputs)
        found = iter(torch.autograd.grad(out, [x for x in inputs if x.requires_grad], grads[0]))
        return None, *(next(found) if needs else None for needs in needed)


class Adapter(NamedTuple):
    """A LoRA adapter (Hu et al. 2021), added to a product: scale drop(x) a^T b^T.

    Attributes:
        a: (r, K) float32: gets a gradient.
        b: (N, r) float32: gets a gradient.
        scale: alpha / r, or alpha / sqrt(r) of rsLoRA (Kalajdzievski 2023).
        dropout: probability with which an element of x is set to 0; the others are divided by 1 - dropout.
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0

    @property
    def gain(self) -> float:
        """Factor of the product over the elements that dropout keeps: scale / (1 - dropout), or 0 if it keeps none."""
        return self.scale / (1 - self.dropout) if self.dropout < 1 else 0.0

    def cast_factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return a and gain b in the dtype of products."""
        return self.a.detach().to(dtype), (self.b.detach() * self.gain).to(dtype)


class Product(NamedTuple):
    """x weight^T + bias plus the LoRA adapters of the layer.

    Attributes:
        weight: returns (N, K) in the dtype of products, possibly in scratch memory that the next call overwrites.
        bias: (N,) or None: gets a gradient.
        adapters: of the layer.
        master: (N, K) float32, the trained weight, which gets a gradient. None: the weight does not train.
    """

    weight: Callable[[], Tensor]
    bias: Tensor | None
    adapters: tuple[Adapter, ...] = ()
    master: Tensor | None = None

    def parameters(self) -> list[Tensor | None]:
        """Return master, bias, and a and b of every adapter."""
        return [self.master, self.bias, *(w for adapter in self.adapters for w in adapter[:2])]


def linears(x: Tensor, products: Sequence[Product], dtype: torch.dtype, in_place: bool = False) -> tuple[Tensor, ...]:
    """Return several products of one input in ``dtype``: (..., N) each.

    y = x W^T + bias + sum_i s_i t_i B_i^T with t_i = drop_i(x) A_i^T; backward, with u_i = s_i dy B_i: dW = dy^T x,
    dB_i = s_i dy^T t_i, dA_i = u_i^T drop_i(x), dx = dy W + sum_i drop_i(u_i A_i). x is saved once for all products,
    or recomputed if it has a ``Recompute``; it is not saved if neither a weight nor an adapter trains. The backward
    draws the random numbers of dropout again.

    Args:
        x: (..., K) of any float dtype.
        in_place: add the gradient of a master to its ``.grad`` directly and pass none to autograd: one pass less, for
            loops that call ``backward`` and read only ``.grad``. A weight that is not a leaf, or has hooks on its
            gradient, gets the gradient through autograd.
    """
    parameters = [parameter for product in products for parameter in product.parameters()]
    return _Linears.apply(  # pyright: ignore[reportReturnType]
        x, _find_recompute(x), tuple(products), dtype, in_place, *parameters
    )


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, recompute: Recompute | None, products: tuple[Product, ...], dtype: torch.dtype,
        in_place: bool, *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        outs, ts, ctx.seeds = [], [], []
        for product in products:
            out = matmul(rows, product.weight().t(), product.bias)
            for adapter in product.adapters:
                a, b = adapter.cast_factors(dtype)
                ctx.seeds.append(int(torch.randint(2**63 - 1, ())) if adapter.dropout else 0)
                ts.append(matmul(_apply_mask(rows, _dropout_mask(rows, adapter.dropout, ctx.seeds[-1])), a.t()))
                add_matmul(out, ts[-1], b.t())
            outs.append(_restore_shape(x, out))
        recompute = Recompute(_identity, (rows,)) if recompute is None else recompute
        ctx.compute, ctx.products, ctx.shape = recompute.compute, products, x.shape
        ctx.dtype, ctx.in_place = dtype, in_place
        weights = [w for product in products for w in product.parameters() if w is not None and w is not product.bias]
        ctx.trains = any(w.requires_grad for w in weights)
        ctx.n_weights = len(weights)  # saved so that autograd raises if one was modified before the backward
        ctx.save_for_backward(*weights, *((*ts, *recompute.inputs) if ctx.trains else ()))
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        n, saved = len(ctx.seeds), ctx.saved_tensors[ctx.n_weights :]
        ts, inputs = saved[:n], saved[n:]
        needs_x, needs = ctx.needs_input_grad[0], iter(ctx.needs_input_grad[5:])
        rows: Any = ctx.compute(*inputs).reshape(-1, ctx.shape[-1]).to(ctx.dtype) if ctx.trains else None
        grad_x: Any = None
        parameter_grads, i = [], 0
        for product, grad in zip(ctx.products, grads, strict=True):
            grad = grad.reshape(-1, grad.shape[-1]).to(ctx.dtype)
            if needs_x and grad_x is None:
                grad_x = matmul(grad, product.weight())
            elif needs_x:
                add_matmul(grad_x, grad, product.weight())
            parameter_grads.append(_weight_grad(product.master, grad, rows, ctx.in_place) if next(needs) else None)
            parameter_grads.append(grad.sum(0, dtype=torch.float32) if next(needs) else None)
            for adapter in product.adapters:
                a, b = adapter.cast_factors(ctx.dtype)
                u, mask = matmul(grad, b), _dropout_mask(grad, adapter.dropout, ctx.seeds[i], ctx.shape[-1])
                parameter_grads.append(matmul(u.t(), _apply_mask(rows, mask)).float() if next(needs) else None)
                parameter_grads.append(_lora_b_grad(grad, ts[i], adapter.gain) if next(needs) else None)
                if needs_x and mask is not None:
                    grad_x.add_(matmul(u, a).mul_(mask))
                elif needs_x:
                    add_matmul(grad_x, u, a)
                i += 1
        return None if grad_x is None else grad_x.view(ctx.shape), None, None, None, None, *parameter_grads


def _weight_grad(weight: Any, grad: Tensor, rows: Tensor, in_place: bool) -> Tensor | None:
    """Return grad^T rows, or add it to ``weight.grad`` and return None."""
    if not _accumulates_in_place(weight, in_place):
        return matmul(grad.t(), rows).float()
    if weight.grad is None:
        weight.grad = matmul(grad.t(), rows).float()
    else:
        add_matmul(weight.grad, grad.t(), rows)
    return None


def _lora_b_grad(grad: Tensor, t: Tensor, gain: float) -> Tensor:
    """Return gain grad^T t, computed as (t^T grad)^T, which reads the larger matrix in row-major order."""
    return torch.empty(grad.shape[1], t.shape[1]).copy_(matmul(t.t(), grad).t()).mul_(gain)


def _identity(rows: Tensor) -> Tensor:
    return rows


def _dropout_mask(rows: Tensor, dropout: float, seed: int, width: int | None = None) -> Tensor | None:
    """Return 1 for each element that dropout keeps and 0 for the others, by seed; None without dropout."""
    if not dropout:
        return None
    mask = rows.new_empty((len(rows), rows.shape[1] if width is None else width))
    return mask.bernoulli_(1 - dropout, generator=torch.Generator().manual_seed(seed))


def _apply_mask(rows: Tensor, mask: Tensor | None) -> Tensor:
    return rows if mask is None else rows * mask


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis, (..., n), in ``dtype``; weight is float32."""
    if x.dtype not in (torch.float32, dtype):
        x = x.float()
    x = x.contiguous()
    out: Any = _RMSNorm.apply(x, weight, eps, dtype)
    _attach_recompute(Recompute(partial(_compute_rms_norm, eps=eps, dtype=dtype), (x, weight)), out)
    return out


def _compute_rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    out = empty(x.shape, dtype)
    if x.dtype == dtype:
        return _core.rms_norm(x.detach(), weight.detach(), eps, None, out)
    _core.rms_norm_to_bf16(x.detach(), weight.detach(), eps, out)
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _compute_rms_norm(x, weight, eps, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        grad_x, grad_weight = empty(x.shape, x.dtype), torch.empty_like(weight)
        _core.rms_norm_backward(
            x=x, weight=weight, grad=grads[0].contiguous(), eps=ctx.eps, grad_x=grad_x, grad_weight=grad_weight
        )
        return grad_x, grad_weight, None, None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) up, element-wise."""
    gate, up = (x.contiguous() for x in _promote(gate, up))
    out: Any = _SwiGLU.apply(gate, up)
    _attach_recompute(Recompute(_compute_swiglu, (gate, up)), out)
    return out


def _compute_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    out, n = empty(gate.shape, gate.dtype), gate.shape[-1]
    _core.swiglu(gate.detach().view(-1, n), up.detach().view(-1, n), out.view(-1, n))
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _compute_swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        gate, up = (tensor.detach() for tensor in ctx.saved_tensors)
        grad_gate, grad_up = empty(gate.shape, gate.dtype), empty(up.shape, up.dtype)
        _core.swiglu_backward(gate=gate, up=up, grad=grads[0].contiguous(), grad_gate=grad_gate, grad_up=grad_up)
        return grad_gate, grad_up


class ExpertWeights(NamedTuple):
    """The frozen weights of the experts of a mixture.

    Attributes:
        gate_up: returns (2 F, K) of an expert, gate rows first, or (F, K) without gates, in the dtype of products,
            possibly in scratch memory that the next call overwrites.
        down: returns (K, F) of an expert, likewise.
        gate_up_bias: (E, 2 F) float32, gates first; None: experts have no biases.
        down_bias: (E, K) float32.
        activation: one of ``EXPERT_ACTIVATIONS``: "silu" and "clamped_swiglu" with gates, "relu2" without.
    """

    gate_up: Callable[[int], Tensor]
    down: Callable[[int], Tensor]
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: str = "silu"

    def activate(self, rows: Tensor) -> Tensor:
        """Return the activation (N, F) of the results of the first matrix."""
        if self.activation == "relu2":
            return rows.float().relu().square().to(rows.dtype)
        gate, up = _halves(rows)
        return _clamped_swiglu(gate, up) if self.activation == "clamped_swiglu" else _compute_swiglu(gate, up)

    def activation_backward(self, rows: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of the results of the first matrix."""
        if self.activation == "relu2":
            return (2 * rows.float().relu() * grad.float()).to(rows.dtype)
        gate, up = _halves(rows)
        if self.activation == "clamped_swiglu":
            with torch.enable_grad():
                gate, up = (x.detach().requires_grad_() for x in (gate, up))
                return torch.cat(torch.autograd.grad(_clamped_swiglu(gate, up), (gate, up), grad), 1)
        grad_gate, grad_up = empty(gate.shape, gate.dtype), empty(up.shape, up.dtype)
        _core.swiglu_backward(gate=gate, up=up, grad=grad, grad_gate=grad_gate, grad_up=grad_up)
        return torch.cat((grad_gate, grad_up), 1)


EXPERT_ACTIVATIONS = {"silu": True, "clamped_swiglu": True, "relu2": False}
"""Activation in ``ModelConfig`` -> whether experts with it have gates."""


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    g, u = gate.float().clamp(max=SWIGLU_LIMIT), up.float().clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (g * torch.sigmoid(SWIGLU_SLOPE * g) * (u + 1)).to(gate.dtype)


class ExpertAdapters(NamedTuple):
    """LoRA adapters of the experts of a mixture, W + B A each: a (E, r, inputs), b (E, outputs, r); None: none."""

    gate_up: tuple[Tensor, Tensor] | None = None
    down: tuple[Tensor, Tensor] | None = None


def experts(
    x: Tensor,
    chosen: Tensor,
    factors: Tensor,
    weights: ExpertWeights,
    dtype: torch.dtype,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """Return sum over j of factors[n, j] f_e(x[n]) for the experts e = chosen[n, j], (N, K) float32.

    f_e(x) = W_down h + b_down, h = silu(gate) up (or clamped), [gate, up] = W_up x + b_up; or h = relu(W_up x)^2
    without gates. The tokens of an expert are multiplied together. Saves no activations; backward, with
    u = W_down^T dy: d factors[n, j] = h . u + b_down . dy, dh = factors[n, j] u.

    Args:
        x: (N, K) of any float dtype.
        chosen: (N, J) indices of different experts.
        factors: (N, J) float32.
        weights: of the experts; experts without tokens are not read.
        dtype: of products.
        adapters: of the experts; those without tokens get a gradient of 0.
    """
    flat = [factor for pair in adapters or ExpertAdapters() for factor in pair or (None, None)]
    return _Experts.apply(x, chosen, factors, weights, dtype, *flat)  # pyright: ignore[reportReturnType]


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        chosen: Tensor,
        factors: Tensor,
        weights: ExpertWeights,
        dtype: torch.dtype,
        *adapters: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, chosen, factors, *adapters)
        ctx.weights, ctx.dtype = weights, dtype
        order, counts = _sort_by_expert(chosen)
        rows = x.to(dtype)[order // chosen.shape[1]]
        gate_up = _multiply_by_expert(rows, counts, lambda e: weights.gate_up(e).t(), weights.gate_up_bias)
        h = weights.activate(_add_adapters(gate_up, rows, counts, *adapters[:2]))
        out = _multiply_by_expert(h, counts, lambda e: weights.down(e).t(), weights.down_bias)
        out = _add_adapters(out, h, counts, *adapters[2:])
        return _sum_places(factors.flatten()[order, None] * out, order, chosen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, chosen, factors, *adapters = ctx.saved_tensors
        weights = ctx.weights
        order, counts = _sort_by_expert(chosen)
        tokens = order // chosen.shape[1]
        rows, grad_out = x.to(ctx.dtype)[tokens], grads[0].to(ctx.dtype)[tokens]
        gate_up = _multiply_by_expert(rows, counts, lambda e: weights.gate_up(e).t(), weights.gate_up_bias)
        gate_up = _add_adapters(gate_up, rows, counts, *adapters[:2])
        h, factor = weights.activate(gate_up), factors.flatten()[order, None]
        u = _multiply_by_expert(grad_out, counts, weights.down)
        u, grads_down = _adapters_backward(u, h, grad_out, counts, *adapters[2:], factor=factor)
        grad_factors = torch.empty(factors.numel())
        grad_factors[order] = (h.float() * u.float()).sum(-1)
        if weights.down_bias is not None:
            grad_factors[order] += (weights.down_bias[chosen.flatten()[order]] * grads[0].float()[tokens]).sum(-1)
        grad_gate_up = weights.activation_backward(gate_up, (factor * u).to(ctx.dtype))
        grad_rows = _multiply_by_expert(grad_gate_up, counts, weights.gate_up)
        grad_rows, grads_up = _adapters_backward(grad_rows, rows, grad_gate_up, counts, *adapters[:2])
        grad_x = _sum_places(grad_rows, order, chosen).to(x.dtype)
        return grad_x, None, grad_factors.view_as(factors), None, None, *grads_up, *grads_down


def _sort_by_expert(chosen: Tensor) -> tuple[Tensor, list[int]]:
    """Return the indices of ``chosen``, flat, by expert and then by token, and the number of each expert's."""
    flat = chosen.flatten()
    return flat.argsort(stable=True), flat.bincount().tolist()


def _multiply_by_expert(
    rows: Tensor, counts: Sequence[int], weight: Callable[[int], Tensor], bias: Tensor | None = None
) -> Tensor:
    """Return the product of each expert's rows, which follow each other, and its weight, plus its bias."""
    return torch.cat(
        [
            matmul(part, weight(e), None if bias is None else bias[e])
            for e, part in enumerate(rows.split(counts))
            if len(part)
        ]
    )


def _add_adapters(out: Tensor, rows: Tensor, counts: Sequence[int], a: Tensor | None, b: Tensor | None) -> Tensor:
    """Return ``out`` plus B (A x) of each expert's rows, in the dtype of ``out``."""
    if a is None or b is None:
        return out
    low = _multiply_by_expert(rows, counts, lambda e: a[e].t().to(rows.dtype))
    return out + _multiply_by_expert(low, counts, lambda e: b[e].t().to(rows.dtype))


def _adapters_backward(
    grad_rows: Tensor,
    rows: Tensor,
    grad_out: Tensor,
    counts: Sequence[int],
    a: Tensor | None,
    b: Tensor | None,
    factor: Tensor | float = 1.0,
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Return ``grad_rows`` plus A^T B^T dy of each expert's rows, and the gradients of a and b of ``factor`` dy."""
    if a is None or b is None:
        return grad_rows, (None, None)
    grad_low = _multiply_by_expert(grad_out, counts, lambda e: b[e].to(rows.dtype))
    low = _multiply_by_expert(rows, counts, lambda e: a[e].t().to(rows.dtype))
    grad_a, grad_b = torch.zeros_like(a), torch.zeros_like(b)
    parts = (values.float().split(counts) for values in (factor * grad_low, rows, grad_out, factor * low))
    for e, (u, x, dy, t) in enumerate(zip(*parts, strict=True)):
        if len(u):
            grad_a[e], grad_b[e] = matmul(u.t(), x), matmul(dy.t(), t)
    return grad_rows + _multiply_by_expert(grad_low, counts, lambda e: a[e].to(rows.dtype)), (grad_a, grad_b)


def _halves(rows: Tensor) -> list[Tensor]:
    return [half.contiguous() for half in rows.chunk(2, dim=-1)]


def _sum_places(rows: Tensor, order: Tensor, chosen: Tensor) -> Tensor:
    """Return the sum of the rows of each token, (N, K) float32, in the order of its experts in ``chosen``."""
    pairs = torch.empty(rows.shape)
    pairs[order] = rows.float()
    return pairs.view(*chosen.shape, -1).sum(1)


def rope(x: Tensor, table: Tensor, is_neox: bool = True) -> Tensor:
    """Rotate x (N, H, D) by the rows of ``table`` (N, R): R / 2 cosines, then R / 2 sines.

    Element i pairs with i + R / 2, or elements pair with their neighbours (``is_neox=False``).
    """
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
    out = empty(x.shape, x.dtype).copy_(x.detach())
    apply_rope(torch.arange(len(out)), out, None, out.shape[2], table, is_neox, inverse=inverse)
    return out


def attention(
    q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, scale: float, window: int | None, softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute causal attention within the sequences of a packed batch.

    Args:
        q: (N, H, D), contiguous along its last axis.
        k: (N, H_kv, D).
        v: (N, H_kv, D).
        batch: the sequences, and the keys of each.
        scale: of the scores.
        window: keys that a token attends to at most, including its own; None: all.
        softcap: scores s become softcap tanh(s / softcap); 0 disables it.
        sinks: (H,), a logit of each head in its softmax that has no value; None: none.

    Returns:
        (N, H, D), contiguous.
    """
    q, k, v = _promote(q, k, v)
    return _Attention.apply(q, k, v, sinks, batch, scale, window, softcap)  # pyright: ignore[reportReturnType]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, batch: PackedBatch, scale: float,
        window: int | None, softcap: float,
    ) -> Tensor:  # fmt: skip
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        out = empty(q.shape, q.dtype)
        lse = torch.empty(q.shape[:2])
        _make_attention_task(q, k, v, out, lse, sinks, batch, scale, window, softcap).forward()
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.settings = batch, scale, window, softcap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        batch: PackedBatch = ctx.settings[0]
        grad_q, grad_k, grad_v = (empty(x.shape, x.dtype) for x in (q, k, v))
        _make_attention_task(q, k, v, out, lse, sinks, *ctx.settings).backward(
            grad_out=grads[0].contiguous(), grad_q=grad_q, grad_k=grad_k, grad_v=grad_v,
            reader_offsets=batch.reader_offsets, readers=batch.readers,
        )  # fmt: skip
        grad_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:  # -w rowsum(dO O) for a weight w of the sink
            weights = torch.exp2((sinks * math.log2(math.e) - lse).clamp(max=0))
            grad_sinks = -(weights * (grads[0].float() * out).sum(-1)).sum(0).to(sinks.dtype)
        return grad_q, grad_k, grad_v, grad_sinks, None, None, None, None


def short_conv(x: Tensor, weight: Tensor, batch: PackedBatch) -> Tensor:
    """Compute a causal depthwise convolution within the sequences of a packed batch, with zeros before each.

    Args:
        x: (N, C).
        weight: (C, taps), the oldest first.
        batch: the sequences, and the tokens of each.

    Returns:
        (N, C): the sum over j of weight[:, j] times x, taps - 1 - j tokens before.
    """
    taps = weight.shape[1]
    padded = torch.cat((x, x.new_zeros(1, x.shape[1])))  # row N: before a sequence
    rows = tokens_before(batch, taps - 1)
    terms = (padded[rows[:, taps - 1 - j]] * weight[:, j] for j in range(taps - 1))
    return sum(terms, x * weight[:, -1])


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, batch: PackedBatch, corrects: bool = True
) -> Tensor:  # fmt: skip
    """Compute the gated delta rule within the sequences of a packed batch (Yang, Kautz, Hatamizadeh 2024).

    Per head, with the state S' of the token before, zeros before a sequence:
    S = e^g S' + k (beta (v - e^g S'^T k))^T, out = S^T q. Completions start from their prompt's last state.

    Args:
        q: (N, H_k, D_k), scaled.
        k: (N, H_k, D_k), of unit length.
        v: (N, H, D); head h reads the key head h // (H / H_k).
        log_decay: (N, H), g.
        beta: (N, H).
        batch: the sequences, and the tokens of each.
        corrects: whether v is corrected, else S = e^g S' + k (beta v)^T (Mamba-2).

    Returns:
        (N, H, D) float32.
    """
    qkv = torch.cat([x.float().flatten(1) for x in (q, k, v)], 1)
    shape = *k.shape[1:], v.shape[2], corrects
    return _GatedDeltaRule.apply(qkv, log_decay.float(), beta.float(), batch, shape)  # pyright: ignore[reportReturnType]


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, log_decay: Tensor, beta: Tensor, batch: PackedBatch, shape: tuple[int, int, int, bool]
    ) -> Tensor:
        decay, beta = log_decay.exp(), beta.contiguous()
        ctx.save_for_backward(qkv, decay, beta)
        ctx.settings = batch, shape
        out = torch.empty(*decay.shape, shape[2])
        _make_delta_task(qkv, decay, beta, batch, shape).forward(out.flatten(1))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        found = tuple(map(torch.empty_like, ctx.saved_tensors))
        _make_delta_task(*ctx.saved_tensors, *ctx.settings).backward(
            grad_out=grads[0].contiguous().flatten(1), grad_qkv=found[0], grad_decay=found[1], grad_beta=found[2]
        )
        return *found, None, None


def _make_delta_task(
    qkv: Tensor, decay: Tensor, beta: Tensor, batch: PackedBatch, shape: tuple[int, int, int, bool]
) -> Any:  # fmt: skip
    return _core.TrainingDelta(
        qkv=qkv.detach(), decay=decay.detach(), beta=beta.detach(), n_key_heads=shape[0], key_dim=shape[1],
        corrects=shape[3], q_offsets=batch.q_offsets, k_offsets=batch.k_offsets, key_rows=batch.key_rows,
    )  # fmt: skip


def tokens_before(batch: PackedBatch, n: int) -> Tensor:
    """Return the tokens 1, ..., n places before each token in its sequence, (N, n + 1); N: before the sequence.

    Column 0 is the token itself.
    """
    n_tokens = len(batch.input_ids)
    found = torch.full((n_tokens, n + 1), n_tokens)
    offsets = zip(*(o.tolist() for o in (batch.q_offsets, batch.k_offsets)), strict=True)
    first_q, first_k = next(offsets)
    for end_q, end_k in offsets:
        keys = batch.key_rows[first_k:end_k]
        count = end_q - first_q
        for before in range(n + 1):
            own = keys[max(0, len(keys) - count - before) : max(0, len(keys) - before)]
            found[end_q - len(own) : end_q, before] = own
        first_q, first_k = end_q, end_k
    return found


def _make_attention_task(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, batch: PackedBatch, scale: float,
    window: int | None, softcap: float,
) -> Any:  # fmt: skip
    return _core.TrainingAttention(
        q=q.detach(), k=k.detach(), v=v.detach(), out=out.detach(), lse=lse, q_offsets=batch.q_offsets,
        k_offsets=batch.k_offsets, key_rows=batch.key_rows, window=window or None, scale=scale,
        softcap=softcap, sinks=None if sinks is None else sinks.detach().float().contiguous(),
    )  # fmt: skip
