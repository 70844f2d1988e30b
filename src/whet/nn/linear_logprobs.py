"""Token log-probabilities from hidden states: the LM head and the log-softmax as one autograd function, on the CPU.

Logits are float32, and only one tile of them exists at a time: ``VOCAB_TILE`` vocabulary entries by, in a forward,
``_TOKEN_TILE`` tokens. If weight, bias or an adapter of the head trains, the backward recomputes the tiles; otherwise
the forward computes the gradient of the hidden states from the same logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whet import _core
from whet.models.sizes import VOCAB_TILE
from whet.nn.functions import Adapter, add_matmul, grad_buffer, matmul
from whet.ops.activations import softcap
from whet.ops.linear import PackedWeight, gemm
from whet.ops.linear import linear as packed_linear

_TOKEN_TILE = 512
"""Tokens of a tile of logits in the forward: 4 MiB of logits, which fit in the caches."""


class Tile(NamedTuple):
    """Rows of the head's weight, possibly in memory that the next tile overwrites.

    Attributes:
        rows: (n, K) in the dtype of products.
        packed: ``rows`` packed for products with float32 results; None: ``rows`` are float32.
        bias: (n,) float32 or None.
        lora_b: (n, r) float32: the same rows of the adapters' B, or None.
        softcap: of the logits; 0: none.
    """

    rows: Tensor
    packed: PackedWeight | None
    bias: Tensor | None
    lora_b: Tensor | None = None
    softcap: float = 0.0

    def logits(self, hidden: Tensor, lora_t: Tensor | None, out: Tensor) -> None:
        """Write the float32 logits of ``hidden`` (M, K) and ``lora_t`` (M, r), both float32, to ``out`` (M, n)."""
        if self.packed is not None:
            packed_linear(hidden, self.packed, self.bias, out=out)
        else:
            gemm(hidden, self.rows, transpose_b=True, out=out)
            if self.bias is not None:
                out += self.bias
        if lora_t is not None:
            gemm(lora_t, self.lora_b, transpose_b=True, beta=1.0, out=out)
        if self.softcap:
            softcap(out, self.softcap, out=out)

    def softcap_backward_(self, logits: Tensor, grad: Tensor) -> None:
        """Convert ``grad`` in place from the gradient of the capped ``logits`` to the gradient of the uncapped ones."""
        if self.softcap:
            _core.softcap_backward(y=logits, cap=self.softcap, grad=grad)


class Head:
    """The LM head as tiles of its weight, converted or dequantised on demand.

    Args:
        rows: (first row, number of rows) -> rows of the weight in ``dtype``, possibly in memory that the next call
            overwrites.
        shape: (V, K) of the weight.
        bias: (V,) or None.
        dtype: of products.
        weight: (V, K) float32, which gets the gradient; None: the weight does not train.

    Attributes:
        bounds: first row and end of each tile.
        in_place: as in ``functions.linears``.
        adapters: LoRA adapters of the head.
        softcap: logits z become softcap tanh(z / softcap); 0 disables it.
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
        """Whether the weight, the bias or an adapter gets a gradient."""
        return bool(self.adapters) or any(x is not None and x.requires_grad for x in (self.weight, self.bias))

    @property
    def packed_bytes(self) -> int:
        """Memory of the packed tiles, which every call overwrites."""
        return sum(packed.size_bytes for packed in self._packed.values())

    def tile(self, i: int) -> Tile:
        """Return tile ``i``; the previous one may be overwritten."""
        start, end = self.bounds[i]
        rows, packed = self._rows(start, end - start), self._packed.get(end - start)
        if packed is not None:
            packed.update(rows)
        return Tile(rows, packed, _slice_f32(self.bias, start, end), softcap=self.softcap)


def _tile_bounds(vocab_size: int) -> list[tuple[int, int]]:
    return [(start, min(start + VOCAB_TILE, vocab_size)) for start in range(0, vocab_size, VOCAB_TILE)]


def _slice_f32(x: Tensor | None, start: int, end: int) -> Tensor | None:
    return None if x is None else x.detach()[start:end].float()


class Kept(NamedTuple):
    """Tensors of ``KeptTokens``, whose sets are the support of the distributions.

    Attributes:
        offsets: (M + 1,) int64.
        words: (N,) int32.
        vocab_size: V.
    """

    offsets: Tensor
    words: Tensor
    vocab_size: int

    def drop_(self, logits: Tensor, first_row: int, first_token: int) -> None:
        """Set logits (m, n) of rows and tokens from the first on to a very low number outside their sets."""
        _core.drop_logits(
            logits, offsets=self.offsets, words=self.words, first_row=first_row, first_token=first_token,
            vocab_size=self.vocab_size,
        )  # fmt: skip


def linear_logprobs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float,
    with_entropy: bool,
    kept: Kept | None = None,
    differentiable_entropy: bool = False,
    with_mean: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return log-probs of tokens, entropies, and means of log-probs, from hidden states: LM head and log-softmax fused.

    ``log pi(y) = z_y / T - log sum_v exp(z_v / T)`` with ``z = hidden weight^T + bias``, soft-capped if the head is.
    Logits are float32, computed in tiles of ``VOCAB_TILE`` vocabulary entries; sums accumulate over the tiles (online
    log-sum-exp; Milakov & Gimelshein 2018). If something of the head trains, with several targets or means, or if the
    entropy has a gradient, the backward recomputes the tiles. Otherwise the forward also computes the gradient of
    hidden, up to one factor per row, while a tile is in the cache.

    Args:
        hidden: (M, K).
        head: the LM head.
        targets: (M,) int64, or (M, k): several tokens y of each row.
        temperature: T.
        with_entropy: also compute the entropy.
        kept: the tokens v of each sum; None: the whole vocabulary.
        differentiable_entropy: whether the entropy has a gradient.
        with_mean: also compute the mean of the log-probs of the vocabulary. Without ``kept``.

    Returns:
        Log-probs in the shape of ``targets``, the entropy (M,) or None unless ``with_entropy``, and the mean (M,) or
        None unless ``with_mean``, in float32.
    """
    mean, recomputes = None, head.trains or differentiable_entropy or with_mean or targets.ndim == 2
    if hidden.requires_grad and torch.is_grad_enabled() and not recomputes:
        logprobs, entropy = _FrozenHeadLogprobs.apply(  # pyright: ignore[reportGeneralTypeIssues]
            hidden, head, targets, temperature, with_entropy, kept
        )
    else:
        logprobs, entropy, mean = _LinearLogprobs.apply(  # pyright: ignore[reportGeneralTypeIssues]
            hidden,
            head.weight,
            head.bias,
            *_lora_factors(hidden, head.adapters),
            head,
            targets,
            temperature,
            with_entropy,
            kept,
            with_mean,
        )
    entropy = None if not with_entropy else entropy if differentiable_entropy else entropy.detach()
    return logprobs, entropy, mean if with_mean else None


def _lora_factors(hidden: Tensor, adapters: Sequence[Adapter]) -> tuple[Tensor | None, Tensor | None]:
    """Return t (M, R) and B (V, R), float32, of all adapters together: they add t B^T to the logits."""
    if not adapters:
        return None, None
    x = hidden.float()
    ts = [torch.nn.functional.dropout(x, adapter.dropout) @ adapter.a.t() for adapter in adapters]
    return torch.cat(ts, 1), torch.cat([adapter.b * adapter.scale for adapter in adapters], 1)


def _in_tile(targets: Tensor, first: int, last: int) -> tuple[Tensor, ...]:
    """Return the indices of targets from ``first`` to before ``last``, one tensor for each dimension."""
    return ((targets >= first) & (targets < last)).nonzero(as_tuple=True)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, lora_t: Tensor | None,
        lora_b: Tensor | None, head: Head, targets: Tensor, temperature: float, with_entropy: bool, kept: Kept | None,
        with_mean: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        hidden_f32, targets = hidden.detach().float().contiguous(), targets.contiguous()
        logprobs, lse, entropy = (torch.zeros(len(hidden_f32)) for _ in range(3))
        total = torch.zeros(len(hidden_f32), dtype=torch.float64)  # of the logits of the vocabulary
        sums = _core.TokenLogprobs(
            targets if targets.ndim == 1 else targets[:, 0].contiguous(), temperature, with_entropy
        )
        chosen = torch.empty(targets.shape)  # logits of several targets
        logits = torch.empty(_TOKEN_TILE * VOCAB_TILE)
        for i, (first, last) in enumerate(head.bounds):
            tile = head.tile(i)._replace(lora_b=_slice_f32(lora_b, first, last))
            for start in range(0, len(hidden_f32), _TOKEN_TILE):
                part = hidden_f32[start : start + _TOKEN_TILE]
                z = logits[: len(part) * (last - first)].view(len(part), -1)
                tile.logits(part, _slice_f32(lora_t, start, start + _TOKEN_TILE), z)
                if kept is not None:
                    kept.drop_(z, start, first)
                sums.add(z, start, first)
                if targets.ndim == 2:
                    part_targets = targets[start : start + _TOKEN_TILE]
                    in_tile = _in_tile(part_targets, first, last)
                    chosen[start : start + _TOKEN_TILE][in_tile] = z[in_tile[0], part_targets[in_tile] - first]
                if with_mean:
                    total[start : start + _TOKEN_TILE] += z.sum(1, dtype=torch.float64)
        sums.end(logprobs, lse, entropy)
        if targets.ndim == 2:
            logprobs = chosen.div_(temperature).sub_(lse[:, None])
        mean = (total / (temperature * head.bounds[-1][1]) - lse).float()
        ctx.save_for_backward(hidden, targets, logprobs, lse, entropy, lora_t, lora_b)
        ctx.head, ctx.temperature, ctx.kept = head, temperature, kept
        ctx.set_materialize_grads(False)
        return logprobs, entropy, mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        saved: list[Any] = [x if x is None else x.detach() for x in ctx.saved_tensors]
        hidden, targets, logprobs, lse, entropy, lora_t, lora_b = saved
        head: Head = ctx.head
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dtype = head.dtype
        hidden_f32 = hidden.float().contiguous()
        hidden_cast = hidden.to(dtype).contiguous() if needs_weight else hidden_f32
        n = len(hidden_f32)
        grad_logprobs = torch.zeros(targets.shape) if grads[0] is None else grads[0].float().contiguous()
        tokens, of_several = targets, None
        if targets.ndim == 2:  # sum_k g_k ([v = y_k] - p_v); the kernel computes the second term, with a token outside
            of_several = (grad_logprobs / ctx.temperature).to(dtype)
            grad_logprobs, logprobs, tokens = grad_logprobs.sum(1), lse, torch.full((n,), head.bounds[-1][1])
        grad_entropy = None if grads[1] is None else grads[1].float() / ctx.temperature
        of_mean = None
        if grads[2] is not None:  # g ([v = y] - p_v) + h (1 / V - p_v) = (g + h) ([v = y] - p_v) + h (1 / V - [v = y])
            grad_logprobs, of_mean = grad_logprobs + grads[2].float(), grads[2].float() / ctx.temperature
        step = n if grad_entropy is None else _TOKEN_TILE
        parts = [slice(start, min(start + step, n)) for start in range(0, n, max(1, step))]
        grad_hidden = torch.zeros_like(hidden_f32)
        buffer = grad_weight = None
        if needs_weight and head.weight is not None:
            buffer = grad_buffer(head.weight, head.in_place)
            grad_weight = torch.empty_like(head.weight) if buffer is None else None
        grad_bias = torch.empty_like(head.bias) if needs_bias and head.bias is not None else None
        grad_t, grad_b = (None, None) if lora_t is None else (torch.zeros_like(lora_t), torch.empty_like(lora_b))
        logits = torch.empty(n * VOCAB_TILE)
        in_place = dtype == torch.float32 and not head.softcap  # the soft-cap's backward reads the logits
        grad_logits = logits if in_place else torch.empty(n * VOCAB_TILE, dtype=dtype)
        for i, (first, last) in enumerate(head.bounds):
            tile = head.tile(i)._replace(lora_b=_slice_f32(lora_b, first, last))
            z, grad_z = (x[: n * (last - first)].view(n, last - first) for x in (logits, grad_logits))
            tile.logits(hidden_f32, lora_t, z)
            if ctx.kept is not None:
                ctx.kept.drop_(z, 0, first)
            for part in parts:
                of_entropy = None
                if grad_entropy is not None:  # d H / d z = -p (log p + H) / T
                    log_p = (z[part] / ctx.temperature).sub_(lse[part, None]).clamp_(min=-1e4)
                    of_entropy = log_p.exp().mul_(log_p.add_(entropy[part, None])).mul_(grad_entropy[part, None])
                _core.token_logprobs_backward(
                    logits=z[part], tokens=tokens[part], first_token=first, temperature=ctx.temperature,
                    lse=lse[part], logprobs=logprobs[part], grads=grad_logprobs[part], out=grad_z[part],
                )  # fmt: skip
                if of_entropy is not None:
                    grad_z[part].sub_(of_entropy)
            if of_several is not None:
                in_tile = _in_tile(targets, first, last)
                grad_z.index_put_((in_tile[0], targets[in_tile] - first), of_several[in_tile], accumulate=True)
            if of_mean is not None:
                grad_z += (of_mean / head.bounds[-1][1])[:, None]
                (in_tile,) = _in_tile(targets, first, last)
                grad_z[in_tile, targets[in_tile] - first] -= of_mean[in_tile].to(dtype)
            tile.softcap_backward_(z, grad_z)
            if needs_hidden:
                add_matmul(grad_hidden, grad_z, tile.rows)
            if buffer is not None:
                add_matmul(buffer[first:last], grad_z.t(), hidden_cast)
            elif grad_weight is not None:
                grad_weight[first:last] = matmul(grad_z.t(), hidden_cast)
            if grad_bias is not None:
                grad_bias[first:last] = grad_z.sum(0, dtype=torch.float32)
            if lora_t is not None and grad_t is not None and grad_b is not None:
                add_matmul(grad_t, grad_z.float(), cast(Tensor, tile.lora_b))
                grad_b[first:last] = matmul(grad_z.float().t(), lora_t)
        grad_hidden = grad_hidden if needs_hidden else None
        return grad_hidden, grad_weight, grad_bias, grad_t, grad_b, *[None] * 6


class _FrozenHeadLogprobs(torch.autograd.Function):
    """``linear_logprobs`` with a frozen head: each tile is dequantised, multiplied and exponentiated only once.

    d log pi(y) / d hidden = ((1 - p_y) w_y - sum_{v != y} p_v w_v) / T. The sum over the vocabulary accumulates over
    tiles like attention over its keys (FlashAttention; Dao et al. 2022): it is normalised by the log-sum-exp of the
    tiles so far and rescaled when that grows. The target token y is excluded from the sum, to avoid cancellation in
    1 - p_y. With a soft-cap c each w_v is multiplied by 1 - (z_v / c)^2.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, targets: Tensor, temperature: float, with_entropy: bool, kept: Kept | None
    ) -> tuple[Tensor, Tensor]:
        hidden_f32, targets = hidden.detach().float().contiguous(), targets.contiguous()
        n = len(hidden_f32)
        logprobs, lse, entropy, previous_lse = (torch.zeros(n) for _ in range(4))
        softcap_grad = torch.ones(n)  # at the logit of y
        target_rows = torch.empty(hidden_f32.shape, dtype=head.dtype)  # w_y
        weighted_rows = torch.zeros_like(hidden_f32)  # sum_{v != y} p_v w_v
        parts = [slice(start, min(start + _TOKEN_TILE, n)) for start in range(0, n, _TOKEN_TILE)]
        sums = [_core.TokenLogprobs(targets[part], temperature, with_entropy) for part in parts]
        # With these as its gradients and log-probs the backward kernel returns p_v for v != y, and 0 for y.
        neg_temperature, zero_target = torch.full((_TOKEN_TILE,), -temperature), torch.zeros(_TOKEN_TILE)
        logits = torch.empty(_TOKEN_TILE * VOCAB_TILE)
        probs = torch.empty(_TOKEN_TILE * VOCAB_TILE, dtype=head.dtype)
        for i, (first, last) in enumerate(head.bounds):
            tile = head.tile(i)
            for part, part_sums in zip(parts, sums, strict=True):
                size = part.stop - part.start
                z, p = (x[: size * (last - first)].view(size, -1) for x in (logits, probs))
                tile.logits(hidden_f32[part], None, z)
                if kept is not None:
                    kept.drop_(z, part.start, first)
                part_sums.add(z, 0, first)
                part_sums.end(logprobs[part], lse[part], entropy[part])
                _core.token_logprobs_backward(
                    logits=z, tokens=targets[part], first_token=first, temperature=temperature, lse=lse[part],
                    logprobs=zero_target[:size], grads=neg_temperature[:size], out=p,
                )  # fmt: skip
                if head.softcap:
                    tile.softcap_backward_(z, p)
                    (in_tile,) = _in_tile(targets[part], first, last)
                    softcap_grad[part][in_tile] = 1 - (z[in_tile, targets[part][in_tile] - first] / head.softcap) ** 2
                if i:
                    weighted_rows[part] *= (previous_lse[part] - lse[part]).exp_()[:, None]
                add_matmul(weighted_rows[part], p, tile.rows)
            previous_lse.copy_(lse)
            (in_tile,) = _in_tile(targets, first, last)
            target_rows[in_tile] = tile.rows[targets[in_tile] - first]
        grad_hidden = weighted_rows.neg_()
        for part in parts:
            one_minus_p = logprobs[part].expm1().neg_()
            grad_hidden[part].addcmul_(target_rows[part].float(), (one_minus_p * softcap_grad[part])[:, None])
        ctx.save_for_backward(grad_hidden.div_(temperature))
        ctx.dtype = hidden.dtype
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad_hidden,) = ctx.saved_tensors
        return (grad_hidden * grads[0].float()[:, None]).to(ctx.dtype), None, None, None, None, None
