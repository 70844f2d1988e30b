"""apply_rope on torch tensors: bfloat16 to the bit, views without a copy, and errors."""

import numpy as np
import pytest
from tests.raising import assert_raises, mentions

import whet

torch = pytest.importorskip("torch")

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(shape, generator=GENERATOR)


def test_float32_equals_numpy():
    rope, positions = whet.get_rope(64, 32, 100), torch.arange(0, 100, 9)
    query, key = normal(12, 3, 64), normal(12, 64)
    expected = rope(positions.numpy(), query.numpy().copy(), key.numpy().copy())
    got = rope(positions, query, key)
    assert got[0] is query and got[1] is key
    for tensor, array in zip(got, expected, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
    table = torch.from_numpy(rope.cos_sin_cache)
    whet.apply_rope(positions.int(), again := normal(12, 64), None, 64, table)
    assert again.isfinite().all()


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [2, 6, 16, 30, 32, 34, 62, 64, 80, 96, 120, 128, 160, 250])
def test_bfloat16_is_float32_rounded_once(rotary_dim, is_neox):
    head_size = rotary_dim + rotary_dim % 3
    rope = whet.get_rope(head_size, rotary_dim, 500, is_neox_style=is_neox)
    positions = torch.randint(0, 500, (7,), generator=GENERATOR)
    for skew in (0, 1):
        x = normal(7 * 2 * head_size + skew).bfloat16()[skew:].view(7, -1)
        wide = x.float()
        rope(positions, x)
        rope(positions, wide)
        assert torch.equal(x.view(torch.int16), wide.bfloat16().view(torch.int16))


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("n", [3, 16, 40])
def test_bfloat16_extremes(is_neox, n):
    tiny, huge, inf, nan = 2.0**-133, 3.3e38, float("inf"), float("nan")
    values = torch.tensor([0.0, -0.0, tiny, -tiny, 2.0**-126, 1.0, huge, -huge, inf, nan])
    first, second = torch.cartesian_prod(values, values).T  # all combinations, as n pairs each
    pairs = [torch.stack([first, second], 1).repeat_interleave(n, 0).view(100, n, 2)]
    x = (pairs[0].transpose(1, 2) if is_neox else pairs[0]).reshape(100, 2 * n)
    for angle in (0.0, 0.3, 2.5):
        table = np.tile(np.float32([np.cos(angle)] * n + [np.sin(angle)] * n), (100, 1))
        got, wide = x.bfloat16(), x.bfloat16().float()
        for tensor in (got, wide):
            whet.apply_rope(torch.arange(100), tensor, None, 2 * n, table, is_neox)
        expected = wide.bfloat16()
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num().view(torch.int16), expected.nan_to_num().view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_of_a_fused_projection(dtype):
    rope, positions = whet.get_rope(32, max_position=50), torch.randint(0, 50, (2, 9), generator=GENERATOR)
    qkv = normal(2, 9, (4 + 2 + 2) * 32).to(dtype)
    query, key, value = qkv.split([128, 64, 64], -1)
    expected = rope(positions, query.clone(), key.clone())
    untouched = value.clone()
    rope(positions, query, key.view(2, 9, 2, 32))
    assert torch.equal(query, expected[0]) and torch.equal(key, expected[1]) and torch.equal(value, untouched)
    heads_first = qkv[..., :128].reshape(2, 9, 4, 32).transpose(1, 2).contiguous()
    assert torch.equal(rope.inverse(positions, heads_first.transpose(1, 2))[0].float().norm(dim=-1) > 0,
                       torch.ones(2, 9, 4, dtype=torch.bool))  # fmt: skip


@pytest.mark.parametrize(
    ("tensor", "facts"),
    [
        (torch.zeros(2, 16, requires_grad=True), ("query requires grad", ".detach()")),
        (torch.zeros(2, 16, device="meta"), ("query is on meta", "CPU tensor")),
        (torch.zeros(2, 16, dtype=torch.float16), ("dtype float16", "float32 or bfloat16", "to(torch.float32)")),
        (torch.zeros(1, 16).expand(2, 16), ("query is expanded",)),
        (torch.zeros(16, 2).T, ("query has strides (1, 2)", "1 along the last axis")),
    ],
)
def test_unsupported_tensors_are_rejected(tensor, facts):
    assert_raises(whet.WhetError, facts, whet.get_rope(16, max_position=4), torch.tensor([0, 1]), tensor)


def test_positions_outside_the_table_are_named():
    with pytest.raises(whet.WhetValueError, match=mentions("positions[0, 1] is 4", "table of 4 positions")):
        whet.get_rope(16, max_position=4)(torch.tensor([[0, 4]]), torch.zeros(1, 2, 16))
