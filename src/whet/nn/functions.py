"""The parts of a transformer's training step as autograd functions over native kernels, on the CPU.

Each computes in the dtype of its input, float32 or bfloat16, with float32 sums, and keeps for its backward no more than
the inputs; a product's input is computed again, where that takes only what is kept anyway.
Products of bfloat16 are torch's, which are at the machine's ceiling; of float32 they are Whet's, as torch's
reach two fifths of a Zen 5's. Weights are float32 masters; where products are bfloat16, each rounds its weight, in
memory that all share, and the gradient is float32.

Arguments are checked by those who call: see ``whet.nn.accelerate``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whet import _core
from whet.nn.packed import PackedBatch
from whet.nn.scratch import empty
from whet.ops.activations import softcap
from whet.ops.linear import PackedWeight, gemm
from whet.ops.linear import linear as packed_linear
from whet.ops.rope import apply_rope

_TILE = 2048
"""Tile of the vocabulary: entries whose logits are computed at a time."""
_ROWS = 512
"""Tokens whose logits are computed at a time in the forward: 4 MiB, which stay in the caches."""


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None, in_place: bool) -> Tensor:
    """The rows of weight (V, K) at the ids, of any shape; that of ``padding_idx`` gets no gradient.

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
        into = _grad_of(ctx.weight, ctx.in_place)
        total = torch.zeros_like(ctx.weight) if into is None else into
        total.index_add_(0, ids, grad.to(total.dtype))
        return None, total if into is None else None, None, None


def rounded_linear(x: Tensor, weight: Tensor, bias: Tensor | None, by_columns: bool) -> Tensor:
    """x bf16(weight)^T + bias for a few rows x, the weight rounded as it is read, without gradients; bfloat16.

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


def _in_shape_of(x: Tensor, out: Tensor) -> Tensor:
    """The result ``out`` of all rows of x, (..., N): no view, so that those who get it may add to it in place."""
    return torch.ops.aten._unsafe_view(out, [*x.shape[:-1], out.shape[1]])


def _of_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, all bfloat16 or all float32."""
    if all(x.dtype == torch.bfloat16 for x in tensors):
        return tensors
    return tuple(x.float() for x in tensors)


def _takes_in_place(weight: Tensor, in_place: bool) -> bool:
    """Whether the gradient of a weight goes to ``.grad`` where it is computed."""
    hooks = getattr(weight, "_backward_hooks", None) or getattr(weight, "_post_accumulate_grad_hooks", None)
    return in_place and weight.is_leaf and not hooks


def _grad_of(weight: Tensor, in_place: bool) -> Tensor | None:
    """``weight.grad`` to add to, or None where autograd has to get the gradient."""
    if not _takes_in_place(weight, in_place):
        return None
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def _mm(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b + bias, of the dtype that a and b have."""
    out = empty((len(a), b.shape[1]), a.dtype)
    if a.dtype == torch.bfloat16:
        return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias.to(a.dtype), a, b, out=out)
    gemm(a.detach(), b.detach(), out=out)
    return out if bias is None else out.add_(bias)


def _add_mm(into: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b to rows of float32, or of the dtype that a and b have."""
    if a.dtype == torch.float32 and into.is_contiguous():
        gemm(a.detach(), b.detach(), beta=1.0, out=into)
    elif into.dtype == a.dtype:
        into.addmm_(a, b)
    else:
        into.add_(_mm(a, b))


class Recipe(NamedTuple):
    """How a tensor is computed again from tensors that are saved in any case."""

    compute: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


def _attach(recipe: Recipe, out: Any) -> None:
    out.whet_recipe = recipe, out._version


def _recipe_of(x: Tensor) -> Recipe | None:
    """That of a tensor which nobody, such as a hook, has changed since."""
    recipe, version = getattr(x, "whet_recipe", (None, 0))
    return recipe if x._version == version else None


class Adapter(NamedTuple):
    """A LoRA adapter (Hu et al. 2021) beside a product: scale drop(x) a^T b^T.

    Attributes:
        a: (r, K) float32: gets a gradient.
        b: (N, r) float32: gets a gradient.
        scale: alpha / r, or alpha / sqrt(r) of rsLoRA (Kalajdzievski 2023).
        dropout: the share of x that is set to 0, at random, where the rest is divided by 1 - dropout; 0: none.
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0

    @property
    def gain(self) -> float:
        """The factor of the product of those elements of x that dropout keeps; 0 where it keeps none."""
        return self.scale / (1 - self.dropout) if self.dropout < 1 else 0.0

    def narrow(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """a and gain b in the dtype of products."""
        return self.a.detach().to(dtype), (self.b.detach() * self.gain).to(dtype)


class Product(NamedTuple):
    """x weight^T + bias, and adapters beside it.

    Attributes:
        weight: returns (N, K) in the dtype of products, perhaps in memory that the next call writes again.
        bias: (N,) or None: gets a gradient.
        adapters: of the layer.
        master: (N, K) float32, the weight where it trains: gets a gradient. None: it does not train.
    """

    weight: Callable[[], Tensor]
    bias: Tensor | None
    adapters: tuple[Adapter, ...] = ()
    master: Tensor | None = None

    def parameters(self) -> list[Tensor | None]:
        """master, bias, and a and b of every adapter."""
        return [self.master, self.bias, *(w for adapter in self.adapters for w in adapter[:2])]


def linears(x: Tensor, products: Sequence[Product], dtype: torch.dtype, in_place: bool = False) -> tuple[Tensor, ...]:
    """Products of one input in ``dtype``: (..., N) each.

    y = x W^T + bias + sum_i s_i t_i B_i^T with t_i = drop_i(x) A_i^T; backward, with u_i = s_i dy B_i: dW = dy^T x,
    dB_i = s_i dy^T t_i, dA_i = u_i^T drop_i(x), dx = dy W + sum_i drop_i(u_i A_i). Nothing is kept of x where neither
    a weight nor an adapter trains; else it is kept once for all products, or computed again where it has a ``Recipe``.
    Random numbers of dropout are drawn again in the backward.

    Args:
        x: (..., K) of any float dtype.
        in_place: add the gradient of a master to its ``.grad`` where it is computed, and give autograd none: one pass
            less, for a loop that calls ``backward`` and looks only at ``.grad``. Where the weight is no leaf, or has
            hooks that want to see its gradient, autograd gets it.
    """
    parameters = [parameter for product in products for parameter in product.parameters()]
    return _Linears.apply(  # pyright: ignore[reportReturnType]
        x, _recipe_of(x), tuple(products), dtype, in_place, *parameters
    )


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, recipe: Recipe | None, products: tuple[Product, ...], dtype: torch.dtype, in_place: bool,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        outs, low, ctx.seeds = [], [], []
        for product in products:
            out = _mm(rows, product.weight().t(), product.bias)
            for adapter in product.adapters:
                a, b = adapter.narrow(dtype)
                ctx.seeds.append(int(torch.randint(2**63 - 1, ())) if adapter.dropout else 0)
                low.append(_mm(_masked(rows, _mask(rows, adapter.dropout, ctx.seeds[-1])), a.t()))
                _add_mm(out, low[-1], b.t())
            outs.append(_in_shape_of(x, out))
        source = Recipe(_as_it_is, (rows,)) if recipe is None else recipe
        ctx.compute, ctx.products, ctx.shape = source.compute, products, x.shape
        ctx.dtype, ctx.in_place = dtype, in_place
        weights = [w for product in products for w in product.parameters() if w is not None and w is not product.bias]
        ctx.trains = any(w.requires_grad for w in weights)
        ctx.n_weights = len(weights)  # which are saved so that autograd tells where one has changed before the backward
        ctx.save_for_backward(*weights, *((*low, *source.inputs) if ctx.trains else ()))
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        n, saved = len(ctx.seeds), ctx.saved_tensors[ctx.n_weights :]
        low, inputs = saved[:n], saved[n:]
        needs_x, needs = ctx.needs_input_grad[0], iter(ctx.needs_input_grad[5:])
        rows: Any = ctx.compute(*inputs).reshape(-1, ctx.shape[-1]).to(ctx.dtype) if ctx.trains else None
        grad_x: Any = None
        parameter_grads, i = [], 0
        for product, grad in zip(ctx.products, grads, strict=True):
            grad = grad.reshape(-1, grad.shape[-1]).to(ctx.dtype)
            if needs_x and grad_x is None:
                grad_x = _mm(grad, product.weight())
            elif needs_x:
                _add_mm(grad_x, grad, product.weight())
            parameter_grads.append(_weight_grad(product.master, grad, rows, ctx.in_place) if next(needs) else None)
            parameter_grads.append(grad.sum(0, dtype=torch.float32) if next(needs) else None)
            for adapter in product.adapters:
                a, b = adapter.narrow(ctx.dtype)
                low_grad, mask = _mm(grad, b), _mask(grad, adapter.dropout, ctx.seeds[i], ctx.shape[-1])
                parameter_grads.append(_mm(low_grad.t(), _masked(rows, mask)).float() if next(needs) else None)
                parameter_grads.append(_up_grad(grad, low[i], adapter.gain) if next(needs) else None)
                if needs_x and mask is not None:
                    grad_x.add_(_mm(low_grad, a).mul_(mask))
                elif needs_x:
                    _add_mm(grad_x, low_grad, a)
                i += 1
        return None if grad_x is None else grad_x.view(ctx.shape), None, None, None, None, *parameter_grads


def _weight_grad(weight: Any, grad: Tensor, rows: Tensor, in_place: bool) -> Tensor | None:
    """grad^T rows; None where it went to ``weight.grad``."""
    if not _takes_in_place(weight, in_place):
        return _mm(grad.t(), rows).float()
    if weight.grad is None:
        weight.grad = _mm(grad.t(), rows).float()
    else:
        _add_mm(weight.grad, grad.t(), rows)
    return None


def _up_grad(grad: Tensor, low: Tensor, gain: float) -> Tensor:
    """gain grad^T low; computed as (low^T grad)^T, which reads the larger one as it lies."""
    return torch.empty(grad.shape[1], low.shape[1]).copy_(_mm(low.t(), grad).t()).mul_(gain)


def _as_it_is(rows: Tensor) -> Tensor:
    return rows


def _mask(rows: Tensor, dropout: float, seed: int, width: int | None = None) -> Tensor | None:
    """1 for elements of rows that dropout keeps, 0 for the others, the same for the same seed; None: it keeps all."""
    if not dropout:
        return None
    mask = rows.new_empty((len(rows), rows.shape[1] if width is None else width))
    return mask.bernoulli_(1 - dropout, generator=torch.Generator().manual_seed(seed))


def _masked(rows: Tensor, mask: Tensor | None) -> Tensor:
    return rows if mask is None else rows * mask


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, of (..., n), in ``dtype``; weight float32."""
    if x.dtype not in (torch.float32, dtype):
        x = x.float()
    x = x.contiguous()
    out: Any = _RMSNorm.apply(x, weight, eps, dtype)
    _attach(Recipe(partial(_norm, eps=eps, dtype=dtype), (x, weight)), out)
    return out


def _norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
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
        return _norm(x, weight, eps, dtype)

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
    """silu(gate) up, element by element."""
    gate, up = (x.contiguous() for x in _of_one_dtype(gate, up))
    out: Any = _SwiGLU.apply(gate, up)
    _attach(Recipe(_gated, (gate, up)), out)
    return out


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    out, n = empty(gate.shape, gate.dtype), gate.shape[-1]
    _core.swiglu(gate.detach().view(-1, n), up.detach().view(-1, n), out.view(-1, n))
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        gate, up = (tensor.detach() for tensor in ctx.saved_tensors)
        grad_gate, grad_up = empty(gate.shape, gate.dtype), empty(up.shape, up.dtype)
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
    out = empty(x.shape, x.dtype).copy_(x.detach())
    apply_rope(torch.arange(len(out)), out, None, out.shape[2], table, is_neox, inverse=inverse)
    return out


def attention(
    q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, scale: float, window: int | None, softcap: float = 0.0
) -> Tensor:
    """Causal attention of the sequences of a packed batch.

    Args:
        q: (N, H, D), its last axis contiguous.
        k: (N, H_kv, D).
        v: as k.
        batch: which keys a token sees.
        scale: of the scores.
        window: keys seen at most, the token's own included; None: all.
        softcap: scores s are softcap tanh(s / softcap); 0: they are s.

    Returns:
        (N, H, D), contiguous.
    """
    return _Attention.apply(*_of_one_dtype(q, k, v), batch, scale, window, softcap)  # pyright: ignore[reportReturnType]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, scale: float, window: int | None, softcap: float
    ) -> Tensor:
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        out = empty(q.shape, q.dtype)
        lse = torch.empty(q.shape[:2])
        _make_attention_task(q, k, v, out, lse, batch, scale, window, softcap).forward()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = batch, scale, window, softcap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        batch: PackedBatch = ctx.settings[0]
        grad_q, grad_k, grad_v = (empty(x.shape, x.dtype) for x in (q, k, v))
        _make_attention_task(q, k, v, out, lse, *ctx.settings).backward(
            grad_out=grads[0].contiguous(), grad_q=grad_q, grad_k=grad_k, grad_v=grad_v,
            reader_offsets=batch.reader_offsets, readers=batch.readers,
        )  # fmt: skip
        return grad_q, grad_k, grad_v, None, None, None, None


def _make_attention_task(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, batch: PackedBatch, scale: float, window: int | None,
    softcap: float,
) -> Any:  # fmt: skip
    return _core.TrainingAttention(
        q=q.detach(), k=k.detach(), v=v.detach(), out=out.detach(), lse=lse, q_offsets=batch.q_offsets,
        k_offsets=batch.k_offsets, key_rows=batch.key_rows, window=window or None, scale=scale,
        softcap=softcap,
    )  # fmt: skip


class Tile(NamedTuple):
    """Rows of the head's weight, perhaps in memory that the next tile overwrites.

    Attributes:
        rows: (n, K) in the dtype of products.
        packed: the same for products with float32 results; None: rows are float32.
        bias: (n,) float32 or None.
        up: (n, r) float32: the adapters' rows, or None.
        softcap: of the logits; 0: none.
    """

    rows: Tensor
    packed: PackedWeight | None
    bias: Tensor | None
    up: Tensor | None = None
    softcap: float = 0.0

    def logits(self, hidden: Tensor, low: Tensor | None, out: Tensor) -> None:
        """The float32 logits of (M, K) float32 rows, and ``low`` (M, r) of them, to ``out`` (M, n)."""
        if self.packed is not None:
            packed_linear(hidden, self.packed, self.bias, out=out)
        else:
            gemm(hidden, self.rows, transpose_b=True, out=out)
            if self.bias is not None:
                out += self.bias
        if low is not None:
            gemm(low, self.up, transpose_b=True, beta=1.0, out=out)
        if self.softcap:
            softcap(out, self.softcap, out=out)

    def uncap(self, logits: Tensor, grad: Tensor) -> None:
        """Make the gradient of such logits that of those before the soft-cap, in place."""
        if self.softcap:
            _core.softcap_backward(y=logits, cap=self.softcap, grad=grad)


class Head:
    """The projection on the vocabulary, as its products take it: tiles of the weight, made when they are asked for.

    Args:
        rows: (first row, number of rows) -> rows of the weight in ``dtype``, perhaps in memory that the next call
            writes again.
        shape: (V, K) of the weight.
        bias: (V,) or None.
        dtype: of products.
        weight: (V, K) float32, which gets the gradient; None: it does not train.

    Attributes:
        bounds: first row and end of each tile.
        in_place: as ``linears`` takes it.
        adapters: beside the product.
        softcap: of the logits: they are softcap tanh(z / softcap); 0: they are z.
    """

    in_place = False
    adapters: tuple[Adapter, ...] = ()
    softcap: float = 0.0

    def __init__(
        self, rows: Callable[[int, int], Tensor], shape: tuple[int, int], bias: Tensor | None, dtype: torch.dtype,
        weight: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.weight, self.bias, self.dtype, self.bounds = weight, bias, dtype, _tile_bounds(shape[0])
        self._rows = rows
        self._packed: dict[int, PackedWeight] = {}
        if dtype == torch.bfloat16:
            sizes = {end - start for start, end in self.bounds}
            self._packed = {n: PackedWeight("bfloat16", (n, shape[1])) for n in sizes}

    @property
    def trains(self) -> bool:
        """Whether weight, bias or an adapter gets a gradient."""
        return bool(self.adapters) or any(x is not None and x.requires_grad for x in (self.weight, self.bias))

    @property
    def packed_bytes(self) -> int:
        """Memory of the tiles that are packed again each time."""
        return sum(packed.size_bytes for packed in self._packed.values())

    def tile(self, i: int) -> Tile:
        start, end = self.bounds[i]
        rows, packed = self._rows(start, end - start), self._packed.get(end - start)
        if packed is not None:
            packed.update(rows)
        return Tile(rows, packed, _part(self.bias, start, end), softcap=self.softcap)


def _tile_bounds(n_words: int) -> list[tuple[int, int]]:
    return [(start, min(start + _TILE, n_words)) for start in range(0, n_words, _TILE)]


def _part(bias: Tensor | None, start: int, end: int) -> Tensor | None:
    return None if bias is None else bias.detach()[start:end].float()


def linear_logprobs(
    hidden: Tensor, head: Head, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of tokens, and entropies, from hidden states: the vocabulary's projection and the log-softmax in one.

    ``log pi(y) = z_y / T - log sum_v exp(z_v / T)``, ``z = hidden weight^T + bias``, soft-capped
    where the head is. Logits are float32, and there are those of 2,048 words at a time: the sums run on from tile to
    tile (online log-sum-exp; Milakov & Gimelshein 2018). Where something of the head trains, the backward computes the
    tiles again; else they give the gradient of hidden, but for a factor of each row, while they are there.

    Args:
        hidden: (M, K).
        head: the projection.
        targets: (M,) int64.
        temperature: T.
        with_entropy: also compute the entropy, which is not differentiable.

    Returns:
        (M,) float32 each; None for the entropy that was not asked for.
    """
    if hidden.requires_grad and torch.is_grad_enabled() and not head.trains:
        logprobs, entropy = _FrozenHeadLogprobs.apply(  # pyright: ignore[reportGeneralTypeIssues]
            hidden, head, targets, temperature, with_entropy
        )
    else:
        logprobs, entropy = _LinearLogprobs.apply(  # pyright: ignore[reportGeneralTypeIssues]
            hidden, head.weight, head.bias, *_low_rank(hidden, head.adapters), head, targets, temperature, with_entropy
        )
    return logprobs, entropy if with_entropy else None


def _low_rank(hidden: Tensor, adapters: Sequence[Adapter]) -> tuple[Tensor | None, Tensor | None]:
    """(M, R) and (V, R) float32, whose product all adapters add to the logits."""
    if not adapters:
        return None, None
    x = hidden.float()
    low = [torch.nn.functional.dropout(x, adapter.dropout) @ adapter.a.t() for adapter in adapters]
    return torch.cat(low, 1), torch.cat([adapter.b * adapter.scale for adapter in adapters], 1)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, low: Tensor | None, up: Tensor | None,
        head: Head, targets: Tensor, temperature: float, with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        wide, targets = hidden.detach().float().contiguous(), targets.contiguous()
        logprobs, lse, entropy = (torch.zeros(len(wide)) for _ in range(3))
        rows = _core.TokenLogprobs(targets, temperature, with_entropy)
        logits = torch.empty(_ROWS * _TILE)
        for i, (first, last) in enumerate(head.bounds):
            tile = head.tile(i)._replace(up=_part(up, first, last))
            for start in range(0, len(wide), _ROWS):
                part = wide[start : start + _ROWS]
                z = logits[: len(part) * (last - first)].view(len(part), -1)
                tile.logits(part, _part(low, start, start + _ROWS), z)
                rows.add(z, start, first)
        rows.end(logprobs, lse, entropy)
        ctx.save_for_backward(hidden, targets, logprobs, lse, low, up)
        ctx.head, ctx.temperature = head, temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        saved: list[Any] = [x if x is None else x.detach() for x in ctx.saved_tensors]
        hidden, targets, logprobs, lse, low, up = saved
        head: Head = ctx.head
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dtype = head.dtype
        wide = hidden.float().contiguous()
        rows = hidden.to(dtype).contiguous() if needs_weight else wide
        scale = grads[0].float().contiguous()
        n = len(wide)
        grad_hidden = torch.zeros_like(wide)
        into = grad_weight = None
        if needs_weight and head.weight is not None:
            into = _grad_of(head.weight, head.in_place)
            grad_weight = torch.empty_like(head.weight) if into is None else None
        grad_bias = torch.empty_like(head.bias) if needs_bias and head.bias is not None else None
        grad_low, grad_up = (None, None) if low is None else (torch.zeros_like(low), torch.empty_like(up))
        logits = torch.empty(n * _TILE)
        in_place = dtype == torch.float32 and not head.softcap  # whose slope is that of the logits
        narrow = logits if in_place else torch.empty(n * _TILE, dtype=dtype)
        for i, (first, last) in enumerate(head.bounds):
            tile = head.tile(i)._replace(up=_part(up, first, last))
            z, grad_z = (x[: n * (last - first)].view(n, last - first) for x in (logits, narrow))
            tile.logits(wide, low, z)
            _core.token_logprobs_backward(
                logits=z, tokens=targets, first_token=first, temperature=ctx.temperature, lse=lse,
                logprobs=logprobs, grads=scale, out=grad_z,
            )  # fmt: skip
            tile.uncap(z, grad_z)
            if needs_hidden:
                _add_mm(grad_hidden, grad_z, tile.rows)
            if into is not None:
                _add_mm(into[first:last], grad_z.t(), rows)
            elif grad_weight is not None:
                grad_weight[first:last] = _mm(grad_z.t(), rows)
            if grad_bias is not None:
                grad_bias[first:last] = grad_z.sum(0, dtype=torch.float32)
            if low is not None and grad_low is not None and grad_up is not None:
                _add_mm(grad_low, grad_z.float(), cast(Tensor, tile.up))
                grad_up[first:last] = _mm(grad_z.float().t(), low)
        grad_hidden = grad_hidden if needs_hidden else None
        return grad_hidden, grad_weight, grad_bias, grad_low, grad_up, None, None, None, None


class _FrozenHeadLogprobs(torch.autograd.Function):
    """``linear_logprobs`` where nothing of the head trains: a tile is dequantised, multiplied and raised once.

    d log pi(y) / d hidden = ((1 - p_y) w_y - sum_{v != y} p_v w_v) / T, where the sum over the vocabulary runs on from
    tile to tile as that of attention over its keys (FlashAttention; Dao et al. 2022): what is summed is divided by the
    normaliser so far, and corrected when that grows. The word y stays out of it, as the digits of 1 - p_y would. With a
    soft-cap c each w_v is multiplied by 1 - (z_v / c)^2.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        wide, targets = hidden.detach().float().contiguous(), targets.contiguous()
        n = len(wide)
        logprobs, lse, entropy, before = (torch.zeros(n) for _ in range(4))
        of_own = torch.ones(n)  # the soft-cap's slope at the logit of y
        own, others = torch.empty(wide.shape, dtype=head.dtype), torch.zeros_like(wide)
        parts = [slice(start, min(start + _ROWS, n)) for start in range(0, n, _ROWS)]
        sums = [_core.TokenLogprobs(targets[part], temperature, with_entropy) for part in parts]
        plus, certain = torch.full((_ROWS,), -temperature), torch.zeros(_ROWS)  # whose "gradient" is p, and 0 for y
        logits, weights = torch.empty(_ROWS * _TILE), torch.empty(_ROWS * _TILE, dtype=head.dtype)
        for i, (first, last) in enumerate(head.bounds):
            tile = head.tile(i)
            for part, rows in zip(parts, sums, strict=True):
                size = part.stop - part.start
                z, p = (x[: size * (last - first)].view(size, -1) for x in (logits, weights))
                tile.logits(wide[part], None, z)
                rows.add(z, 0, first)
                rows.end(logprobs[part], lse[part], entropy[part])
                _core.token_logprobs_backward(
                    logits=z, tokens=targets[part], first_token=first, temperature=temperature, lse=lse[part],
                    logprobs=certain[:size], grads=plus[:size], out=p,
                )  # fmt: skip
                if head.softcap:
                    tile.uncap(z, p)
                    here = ((targets[part] >= first) & (targets[part] < last)).nonzero()[:, 0]
                    of_own[part][here] = 1 - (z[here, targets[part][here] - first] / head.softcap) ** 2
                if i:
                    others[part] *= (before[part] - lse[part]).exp_()[:, None]
                _add_mm(others[part], p, tile.rows)
            before.copy_(lse)
            here = ((targets >= first) & (targets < last)).nonzero()[:, 0]
            own[here] = tile.rows[targets[here] - first]
        slope = others.neg_()
        for part in parts:
            slope[part].addcmul_(own[part].float(), (logprobs[part].expm1().neg_() * of_own[part])[:, None])
        ctx.save_for_backward(slope.div_(temperature))
        ctx.dtype = hidden.dtype
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return (slope * grads[0].float()[:, None]).to(ctx.dtype), None, None, None, None
