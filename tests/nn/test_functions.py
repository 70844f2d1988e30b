"""Autograd functions, forward and backward, against their formulas in float64 torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.nn.definitions import BOUNDS, capped, compare, normal
from tests.raising import assert_raises
from torch import Tensor

from whet import _core
from whet.learner.batch import PackedBatch, pack_batch
from whet.nn import functions
from whet.nn.optim import AdamW
from whet.nn.scratch import cast_weight


@pytest.mark.parametrize("n", [1, 7, 16, 33, 576])
@pytest.mark.parametrize(
    ("dtype", "out"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)
def test_rms_norm(n, dtype, out):
    def definition(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    inputs = [normal(3, 5, n, dtype=dtype), normal(n)]
    compare(lambda x, weight: functions.rms_norm(x, weight, 1e-5, out), definition, inputs, BOUNDS[out])


@pytest.mark.parametrize("n", [1, 15, 33, 1536])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_swiglu(n, dtype):
    inputs = [3 * normal(5, n, dtype=dtype), normal(5, n, dtype=dtype)]
    compare(functions.swiglu, lambda gate, up: torch.nn.functional.silu(gate) * up, inputs, BOUNDS[dtype])


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (64, 64), (40, 24)])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_rope(head_dim, rotary_dim, is_neox, dtype):
    angles = normal(7, rotary_dim // 2)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    cos, sin = (part[:, None].double() for part in table.chunk(2, 1))

    def definition(x: Tensor) -> Tensor:
        rows, rest = x.split((rotary_dim, head_dim - rotary_dim), -1)
        pairs = rows.unflatten(-1, (2, -1)) if is_neox else rows.unflatten(-1, (-1, 2)).transpose(-1, -2)
        first, second = pairs.unbind(-2)
        out = torch.stack((first * cos - second * sin, second * cos + first * sin), -2 if is_neox else -1)
        return torch.cat((out.flatten(-2), rest), -1)

    compare(
        lambda x: functions.rope(x, table, is_neox), definition, [normal(7, 3, head_dim, dtype=dtype)], BOUNDS[dtype]
    )


def attention_mask(batch: PackedBatch, window: int | None) -> Tensor:
    """Return whether token i attends to token j, (N, N)."""
    n = len(batch.input_ids)
    mask = torch.zeros(n, n, dtype=torch.bool)
    for (q_begin, q_end), (k_begin, k_end) in zip(
        *(
            zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
            for offsets in (batch.q_offsets, batch.k_offsets)
        ),
        strict=True,
    ):
        keys = batch.key_rows[k_begin:k_end]
        for token in range(q_begin, q_end):
            end = len(keys) - (q_end - 1 - token)
            mask[token, keys[max(0, end - window) if window else 0 : end]] = True
    return mask


LENGTHS = {
    "one token": [(1, [1])],
    "a shared prompt": [(9, [4, 1, 7])],
    "more than a block": [(70, [40, 3]), (1, [90]), (33, [2]), (130, [67, 66])],
}


def packed(lengths: str) -> PackedBatch:
    prompts, completions = [], []
    for i, (n_prompt, n_completions) in enumerate(LENGTHS[lengths]):
        for n in n_completions:
            prompts.append([i] * n_prompt)
            completions.append([0] * n)
    return PackedBatch(*map(torch.from_numpy, pack_batch(prompts, completions)))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("n_heads", "n_kv_heads", "head_dim"), [(4, 2, 8), (3, 3, 40), (9, 3, 64), (2, 1, 128)])
@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"),
    [(None, 0.0, False), (5, 0.0, False), (None, 1.5, False), (None, 0.0, True), (5, 0.7, True)],
)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_attention(lengths, n_heads, n_kv_heads, head_dim, window, softcap, has_sinks, dtype):
    batch = packed(lengths)
    n, mask, kv_group = len(batch.input_ids), attention_mask(batch, window), n_heads // n_kv_heads

    def definition(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(kv_group, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * 0.3
        scores = capped(scores, softcap).masked_fill(~mask, float("-inf"))
        columns = [sink[:, None, None].expand(-1, n, 1) for sink in sinks]
        weights = torch.cat((scores, *columns), -1).softmax(-1)[..., :n]
        return torch.einsum("hij,jhd->ihd", weights, v)

    shapes = [(n, n_heads, head_dim), (n, n_kv_heads, head_dim), (n, n_kv_heads, head_dim)]
    inputs = [normal(*shape, dtype=dtype) for shape in shapes] + [normal(n_heads)] * has_sinks
    bound = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]

    def attend(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        return functions.attention(q, k, v, batch, 0.3, window, softcap, *sinks)

    compare(attend, definition, inputs, bound)


def test_sinks_far_above_the_scores_have_no_gradient():
    batch = PackedBatch(*map(torch.from_numpy, pack_batch([[1, 2, 3]], [[4, 5]])))
    q, k, v = (normal(len(batch.input_ids), 2, 8) for _ in range(3))
    sinks = torch.tensor([200.0, 400.0], requires_grad=True)
    functions.attention(q, k, v, batch, 0.3, None, 0.0, sinks).sum().backward()
    torch.testing.assert_close(sinks.grad, torch.zeros(2), rtol=0, atol=1e-30)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("n_heads", "n_key_heads"), [(1, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize(("dim", "key_dim"), [(16, 16), (5, 7), (40, 33), (128, 128)])
def test_gated_delta_rule(lengths, n_heads, n_key_heads, dim, key_dim):
    batch = packed(lengths)
    n = len(batch.input_ids)

    def definition(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        q, k = (x.repeat_interleave(n_heads // n_key_heads, 1) for x in (q, k))
        states = [torch.zeros(n_heads, key_dim, dim, dtype=torch.float64)] * (n + 1)
        outs = []
        for t, before in enumerate(functions.tokens_before(batch, 1)[:, 1].tolist()):
            state = states[before] * log_decay[t].exp()[:, None, None]  # states[n] is before a sequence
            u = beta[t][:, None] * (v[t] - torch.einsum("hij,hi->hj", state, k[t]))
            states[t] = state + k[t][:, :, None] * u[:, None]
            outs.append(torch.einsum("hij,hi->hj", states[t], q[t]))
        return torch.stack(outs)

    q, k = (torch.nn.functional.normalize(normal(n, n_key_heads, key_dim), dim=-1) for _ in range(2))
    gates = -normal(n, n_heads).exp(), normal(n, n_heads).sigmoid()

    def rule(*inputs: Tensor) -> Tensor:
        return functions.gated_delta_rule(*inputs, batch)

    compare(rule, definition, [q, k, normal(n, n_heads, dim), *gates], 5e-6)


def test_a_sequence_of_the_delta_rule_continues_the_prompt_before_it():
    batch = packed("a shared prompt")
    rows = batch.key_rows.clone()
    rows[batch.k_offsets[1] : batch.k_offsets[1] + 9] -= 1  # the first completion would continue another token
    x, gates = normal(len(batch.input_ids), 1, 4), normal(len(batch.input_ids), 1)
    other = batch._replace(key_rows=rows.clamp(0))
    assert_raises(ValueError, "continue", functions.gated_delta_rule, x, x, x, gates, gates, other)


def trained_product(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> functions.Product:
    """Return the product with a weight that trains."""
    return functions.Product(lambda: cast_weight(weight, dtype), bias, master=weight)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_linear_and_embedding(dtype):
    ids = torch.tensor([[3, 0, 3], [1, 4, 3]])

    def function(table: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x = functions.embedding(ids, table, 0, False)
        return functions.linears(x, [trained_product(weight, bias, dtype)], dtype)[0].float()

    def definition(table: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x = torch.nn.functional.embedding(ids, table, 0)
        return torch.nn.functional.linear(x, weight, bias)

    compare(function, definition, [normal(5, 33), normal(17, 33), normal(17)], BOUNDS[dtype])


def saved_bytes(outputs_of: Callable[[], Any]) -> int:
    """Return the bytes that a call saves for its backward, each storage counted once."""
    saved: dict[int, int] = {}

    def save(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        outputs = outputs_of()
    del outputs
    return sum(saved.values())


@pytest.mark.parametrize("dtype", BOUNDS)
def test_lora_adapters_of_frozen_products(dtype):
    """Two products of one input, the first with two adapters."""
    weights = normal(24, 33, dtype=dtype), normal(17, 33, dtype=dtype)

    def layers(a1: Tensor, b1: Tensor, a2: Tensor, b2: Tensor, bias: Tensor) -> list[functions.Product]:
        adapters = functions.Adapter(a1, b1, 0.5), functions.Adapter(a2, b2, 2.0)
        return [
            functions.Product(lambda: weights[0], None, adapters),
            functions.Product(lambda: weights[1], bias),
        ]

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.cat(functions.linears(x, layers(*parameters), dtype), -1).float()

    def definition(x: Tensor, a1: Tensor, b1: Tensor, a2: Tensor, b2: Tensor, bias: Tensor) -> Tensor:
        first = x @ weights[0].double().t() + 0.5 * (x @ a1.t()) @ b1.t() + 2 * (x @ a2.t()) @ b2.t()
        return torch.cat((first, x @ weights[1].double().t() + bias), -1)

    inputs = [normal(2, 5, 33), normal(4, 33), normal(24, 4), normal(3, 33), normal(24, 3), normal(17)]
    compare(function, definition, inputs, BOUNDS[dtype])


def test_dropout_mask_is_redrawn_in_the_backward():
    """Forward and backward drop the same elements of x, the configured share of them; the next call drops others."""
    x, a, b = normal(40, 50), torch.eye(50), torch.eye(50)
    zero = torch.zeros(50, 50)

    def function(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        torch.manual_seed(3)
        adapter = functions.Adapter(a, b, 1.5, 0.25)
        return functions.linears(x, [functions.Product(lambda: zero, None, (adapter,))], torch.float32)[0]

    mask = (function(torch.ones(40, 50), a, b) != 0).double()
    assert 0.7 < mask.mean() < 0.8
    compare(function, lambda x, a, b: 1.5 * (x * mask / 0.75) @ a.t() @ b.t(), [x, normal(4, 50), normal(50, 4)], 5e-6)
    torch.manual_seed(4)
    adapter = functions.Adapter(a, b, 1.0, 0.25)
    (other,) = functions.linears(torch.ones(40, 50), [functions.Product(lambda: zero, None, (adapter,))], torch.float32)
    assert not torch.equal(other != 0, mask.bool())


def test_a_frozen_weight_saves_no_input():
    x, weight, (a, b) = normal(100, 64).requires_grad_(), normal(32, 64), (normal(2, 64), normal(32, 2))
    product = functions.Product(lambda: weight, None)
    assert saved_bytes(lambda: functions.linears(x, [product], torch.float32)) == 0
    adapted = product._replace(adapters=(functions.Adapter(a.requires_grad_(), b.requires_grad_(), 1.0),))
    once = saved_bytes(lambda: functions.linears(x, [adapted], torch.float32))
    assert once == x.nbytes + 100 * 2 * 4 + a.nbytes + b.nbytes
    trained = trained_product(weight.requires_grad_(), None, torch.float32)
    assert saved_bytes(lambda: functions.linears(x, [trained, trained], torch.float32)) == x.nbytes + weight.nbytes
    assert saved_bytes(lambda: functions.linears(x, [adapted, adapted], torch.float32)) == once + 100 * 2 * 4


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("trains", ["the weight", "an adapter"])
def test_inputs_of_products_are_recomputed(dtype, trains):
    """Outputs of norms and SwiGLU are not saved; gradients equal those from saved outputs, to the bit."""
    a, b, weight = normal(2, 64).requires_grad_(), normal(32, 2).requires_grad_(), normal(32, 64).requires_grad_()
    adapted = functions.Product(partial(cast_weight, weight, dtype), None, (functions.Adapter(a, b, 1.0),))
    trains_weight = trains == "the weight"
    product = trained_product(weight, None, dtype) if trains_weight else adapted
    parameters = [weight] if trains_weight else [a, b]

    def run(x: Tensor, recompute: bool) -> tuple[Tensor, ...]:
        inner = functions.rms_norm(functions.swiglu(x, 2 * x), torch.ones(64), 1e-5, dtype)
        inner = inner if recompute else inner.view_as(inner)  # a tensor without a Recompute
        return functions.linears(inner, [product], dtype)

    x = normal(100, 64).requires_grad_()
    losses = [run(x, recompute)[0].float().square().sum() for recompute in (True, False)]
    gradients = [torch.autograd.grad(loss, (x, *parameters)) for loss in losses]
    for recomputed, right in zip(*gradients, strict=True):
        assert torch.equal(recomputed, right)
    saved = [saved_bytes(lambda recompute=recompute: run(x, recompute)) for recompute in (True, False)]
    assert saved[1] - saved[0] == 100 * 64 * dtype.itemsize


def test_adamw():
    """Three steps, against the formula in float64."""
    weight, lr, decay, (beta1, beta2), eps = normal(1003), 0.01, 0.1, (0.9, 0.99), 1e-8
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = AdamW([parameter], lr=lr, weight_decay=decay, betas=(beta1, beta2), eps=eps)
    p, m, v = weight.double(), torch.zeros(1003).double(), torch.zeros(1003).double()
    for t in range(1, 4):
        parameter.grad = normal(1003)
        g = 0.5 * parameter.grad.double()
        optimizer.step(grad_scale=0.5)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g.square()
        p = p * (1 - lr * decay) - lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
    torch.testing.assert_close(parameter.detach().double(), p, rtol=5e-7, atol=1e-6)


def test_the_core_rejects_tensors_that_need_a_conversion():
    """A result written to a converted copy would be lost; float64 read as float32 would be garbage."""
    x, weight, out = torch.ones(2, 8), torch.ones(8), torch.zeros(2, 8, dtype=torch.bfloat16)
    _core.bf16_from_f32(x, out)
    assert torch.equal(out, x.bfloat16())
    for wrong in (x.double(), torch.ones(2, 16)[:, ::2]):
        assert_raises(TypeError, ("bf16_from_f32", "incompatible"), _core.bf16_from_f32, wrong, out)
        assert_raises(TypeError, ("rms_norm_to_bf16", "incompatible"), _core.rms_norm_to_bf16, x, weight, 1e-5, wrong)
    assert_raises(ValueError, ("shapes",), _core.bf16_from_f32, x, out[0])
    with pytest.raises(ValueError, match="readers"):
        batch = PackedBatch(*map(torch.from_numpy, pack_batch([[1, 2]], [[3, 4]])))
        q = torch.zeros(len(batch.input_ids), 1, 32)
        task = _core.TrainingAttention(
            q=q, k=q, v=q, out=q, lse=q[..., 0].contiguous(), q_offsets=batch.q_offsets, k_offsets=batch.k_offsets,
            key_rows=batch.key_rows, window=None, scale=1.0, softcap=0.0, sinks=None,
        )  # fmt: skip
        readers = {"reader_offsets": batch.q_offsets, "readers": batch.readers}
        task.backward(grad_out=q, grad_q=q, grad_k=q, grad_v=q, **readers)
