"""Low-rank products against float64, and the MicroLoRA adapter that uses them."""

import copy
import itertools
import os
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.isas import assert_isas_agree
from tests.raising import assert_raises, mentions
from tests.threads import same_on_any_threads

import whet
from whet.ops.lora import naive_lora_forward, naive_lora_gradients
from whet.ops.micro_lora import naive_lora_batch

SIZES = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 200, 511, 513, 1100]


def arrays(rows, n_in, n_out, rank, seed=0):
    rng = np.random.default_rng([seed, rows, n_in, n_out, rank])
    shapes = ((rows, n_in), (rows, n_out), (rank, n_in), (rank, n_out))
    return tuple(rng.standard_normal(shape, np.float32) for shape in shapes)


def close(got, exact, n):
    """Assert float32 accuracy for sums of n products of numbers around 1."""
    np.testing.assert_allclose(got, exact, rtol=2e-6, atol=3e-7 * 8 * np.sqrt(n) * 8)


def wide(*xs):
    return tuple(x.astype(np.float64) for x in xs)


def adapter_of(n_in=5, n_out=3, rank=2, alpha=4.0, seed=0):
    _, _, a, b = arrays(1, n_in, n_out, rank, seed)
    return whet.MicroLoRA.from_arrays(a, b, alpha)


# --- the products -----------------------------------------------------------------------------------------


def test_worked_values():
    # x A^T = (1 * 1 + 2 * 0, 1 * 1 + 2 * 3) = (1, 7); times B = (1 * 2 + 7 * 1, 7 * -1, 1) = (9, -7, 1); twice that.
    x, y = np.array([[1, 2]], np.float32), np.array([[10, 20, 30]], np.float32)
    a, b = np.array([[1, 0], [1, 3]], np.float32), np.array([[2, 0, 1], [1, -1, 0]], np.float32)
    assert whet.lora_forward(x, y, a, b, 2.0) is y
    np.testing.assert_array_equal(y, [[28, 6, 32]])
    g, grad_a, grad_b = np.array([[1, 1, 0]], np.float32), np.zeros_like(a), np.ones_like(b)
    whet.lora_accumulate(x, g, a, b, 2.0, grad_a, grad_b)
    # g B^T = (2, 0); G_A = 2 (2, 0)^T (1, 2); G_B = 1 + 2 (1, 7)^T (1, 1, 0).
    np.testing.assert_array_equal(grad_a, [[4, 8], [0, 0]])
    np.testing.assert_array_equal(grad_b, [[3, 3, 1], [15, 15, 1]])


@pytest.mark.parametrize("n", SIZES)
def test_forward_and_gradients_against_float64(n):
    for rank, (rows, n_in, n_out) in itertools.product(range(1, 9), ((1, n, 40), (3, 70, n), (9, n, n))):
        x, y, a, b = arrays(rows, n_in, n_out, rank)
        exact = naive_lora_forward(*wide(x, y, a, b), 0.5)
        close(whet.lora_forward(x, y.copy(), a, b, 0.5), exact, n_in + rank)
        grad_a, grad_b = np.zeros_like(a), np.zeros_like(b)
        whet.lora_accumulate(x, y, a, b, 0.5, grad_a, grad_b)
        exact_a, exact_b = naive_lora_gradients(*wide(x, y, a, b), 0.5)
        close(grad_a, exact_a, (n_out + rows) * rows)
        close(grad_b, exact_b, (n_in + rows) * rows)


@settings(max_examples=60)
@given(st.integers(0, 70), st.integers(1, 90), st.integers(1, 90), st.integers(1, 8), st.integers(0, 99))
def test_any_shape(rows, n_in, n_out, rank, seed):
    x, y, a, b = arrays(rows, n_in, n_out, rank, seed)
    close(whet.lora_forward(x, y.copy(), a, b, 2.0), naive_lora_forward(*wide(x, y, a, b), 2.0), n_in + rank)
    grad_a, grad_b = np.zeros_like(a), np.zeros_like(b)
    whet.lora_accumulate(x, y, a, b, 1.0, grad_a, grad_b)
    exact_a, exact_b = naive_lora_gradients(*wide(x, y, a, b), 1.0)
    close(grad_a, exact_a, (n_out + 1) * (rows + 1))
    close(grad_b, exact_b, (n_in + 1) * (rows + 1))


def test_a_rows_bits_do_not_depend_on_its_neighbours():
    for rank in (1, 2, 4, 8):
        x, y, a, b = arrays(13, 700, 90, rank)
        together = whet.lora_forward(x, y.copy(), a, b, 0.3)
        for i in range(13):
            np.testing.assert_array_equal(whet.lora_forward(x[i], y[i].copy(), a, b, 0.3), together[i])


def test_bits_do_not_depend_on_threads():
    x, y, a, b = arrays(50, 1500, 900, 3)
    index = np.arange(50) % 3 - 1
    adapters = [adapter_of(1500, 900, 3, seed=k) for k in range(2)]

    def work():
        grad_a, grad_b = np.zeros_like(a), np.zeros_like(b)
        whet.lora_accumulate(x, y, a, b, 1.5, grad_a, grad_b)
        out = whet.lora_forward(x, y.copy(), a, b, 1.5)
        return out, grad_a, grad_b, whet.lora_batch(x, y.copy(), adapters, index)

    same_on_any_threads(work)


DIGEST = """
h = hashlib.sha256()
rng = np.random.default_rng(0)
for rank in range(1, 9):
    for n in (1, 15, 16, 33, 64, 200, 1100):
        x, y, a, b = (rng.standard_normal(s, np.float32) for s in ((6, n), (6, 70), (rank, n), (rank, 70)))
        grad_a, grad_b = a * 0, b * 0
        whet.lora_accumulate(x, y, a, b, 1.5, grad_a, grad_b)
        for out in (whet.lora_forward(x, y, a, b, 0.3), grad_a, grad_b):
            h.update(out.tobytes())
print(h.hexdigest())
"""


@pytest.mark.skipif("WHET_ISA" in os.environ, reason="tests every instruction set itself")
def test_bits_do_not_depend_on_the_instruction_set():
    assert_isas_agree("import hashlib, numpy as np, whet", DIGEST)


def test_strided_rows_misaligned_starts_and_more_axes():
    x, y, a, b = arrays(6, 33, 20, 2)
    expected = whet.lora_forward(x, y.copy(), a, b, 1.0)
    big_x, big_y = np.zeros((12, 40), np.float32), np.full((12, 30), 7, np.float32)
    strided_x, strided_y = big_x[::2, 1:34], big_y[1::2, 3:23]
    strided_x[:], strided_y[:] = x, y
    whet.lora_forward(strided_x, strided_y, a, b, 1.0)
    np.testing.assert_array_equal(strided_y, expected)
    assert (big_y[::2] == 7).all() and (big_y[:, :3] == 7).all() and (big_y[:, 23:] == 7).all()
    # The slow path: column strides, axes that do not fold, reversed rows, other byte order, lists.
    fortran = np.asfortranarray(y)
    np.testing.assert_array_equal(whet.lora_forward(np.asfortranarray(x), fortran, a, b, 1.0), expected)
    folded = y.reshape(2, 3, 20).copy()
    np.testing.assert_array_equal(whet.lora_forward(x.reshape(2, 3, 33), folded, a, b, 1.0).reshape(6, 20), expected)
    swapped = y.reshape(2, 3, 20).swapaxes(0, 1).copy()
    whet.lora_forward(x.reshape(2, 3, 33).swapaxes(0, 1), swapped, a, b, 1.0)
    np.testing.assert_array_equal(swapped.swapaxes(0, 1).reshape(6, 20), expected)
    reverse = y[::-1].copy()
    np.testing.assert_array_equal(whet.lora_forward(x[::-1], reverse, a, b, 1.0), expected[::-1])
    foreign = y.astype(">f4")
    np.testing.assert_array_equal(whet.lora_forward(x.tolist(), foreign, a, b, 1.0), expected)
    deep = y.reshape(1, 1, 1, 2, 3, 20).copy()
    whet.lora_forward(x.reshape(1, 1, 1, 2, 3, 33), deep, a, b, 1.0)
    np.testing.assert_array_equal(deep.reshape(6, 20), expected)


def test_x_may_be_y():
    x, _, a, _ = arrays(5, 40, 40, 2)
    expected = naive_lora_forward(*wide(x, x, a, a), 0.1)
    close(whet.lora_forward(x, x, a, a, 0.1), expected, 40)


def test_gradients_with_column_strides():
    x, y, a, b = arrays(4, 10, 7, 3)
    grads = [np.ones_like(a), np.ones_like(b)]
    odd = [np.asfortranarray(g) for g in grads]
    whet.lora_accumulate(x, y, a, b, 1.0, *grads)
    whet.lora_accumulate(x, y, a, b, 1.0, *odd)
    for one, other in zip(grads, odd, strict=True):
        np.testing.assert_array_equal(one, other)


X, Y, A, B = arrays(4, 10, 7, 3)
READ_ONLY = Y.copy()
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("call", "error", "facts"),
    [
        (lambda: whet.lora_forward(X[:, :9], Y, A, B, 1.0), ValueError, ("x has shape (4, 9)", "(..., 10)")),
        (lambda: whet.lora_forward(X, Y[:3], A, B, 1.0), ValueError, ("y has shape (3, 7)", "(4, 7)")),
        (lambda: whet.lora_forward(X[None], Y, A, B, 1.0), ValueError, ("y has shape (4, 7)", "(1, 4, 7)")),
        (lambda: whet.lora_forward(X, Y.tolist(), A, B, 1.0), TypeError, ("y is a list",)),
        (lambda: whet.lora_forward(X, READ_ONLY, A, B, 1.0), ValueError, ("y is read-only",)),
        (lambda: whet.lora_forward(X, Y.astype(int), A, B, 1.0), TypeError, ("y has dtype int64", "float32")),
        (lambda: whet.lora_forward(X.astype(float), Y, A, B, 1.0), TypeError, ("x has dtype float64",)),
        (lambda: whet.lora_forward(X, Y, A, B[:2], 1.0), ValueError, ("has 3 rows and b 2",)),
        (lambda: whet.lora_forward(X, Y, A.astype(float), B, 1.0), TypeError, ("has dtype float64", "float32")),
        (lambda: whet.lora_forward(X, Y, A[0], B, 1.0), ValueError, ("has shape (10,)", "(r, features)")),
        (lambda: whet.lora_forward(X, Y, np.tile(A, (3, 1)), B, 1.0), ValueError, ("with r from 1 to 8",)),
        (lambda: whet.lora_accumulate(X, Y[:2], A, B, 1.0, A * 0, B * 0), ValueError, ("both the same rows",)),
        (lambda: whet.lora_accumulate(X, Y, A, B, 1.0, B * 0, B * 0), ValueError, ("grad_a has shape (3, 7)",)),
        (lambda: whet.lora_batch(X, Y.copy(), [], [0] * 4), ValueError, ("adapters is empty",)),
        (lambda: whet.lora_batch(X, Y.copy(), [3], [0] * 4), TypeError, ("adapters[0] is a int",)),
        (
            lambda: whet.LoRAStack([adapter_of(5, 3), adapter_of(5, 4)]),
            ValueError,
            ("adapters[1] is 5 to 4", "adapters[0] is 5 to 3"),
        ),
        (lambda: whet.lora_batch(X, Y.copy(), [adapter_of(10, 7)], [0, 0, 1, 0]), ValueError, ("index[2] is 1",)),
        (lambda: whet.lora_batch(X, Y.copy(), [adapter_of(10, 7)], np.full(4, -2)), ValueError, ("index[0] is -2",)),
        (lambda: whet.lora_batch(X, Y.copy(), [adapter_of(10, 7)], [0, 0]), ValueError, ("index has shape (2,)",)),
        (lambda: whet.lora_batch(X, Y.copy(), [adapter_of(10, 7)], [0.0] * 4), TypeError, ("index has dtype float64",)),
    ],
)
def test_invalid_inputs_are_named(call, error, facts):
    with pytest.raises(error, match=mentions(*facts)) as caught:
        call()
    assert isinstance(caught.value, whet.WhetError)


# --- an adapter per row -----------------------------------------------------------------------------------


def test_batch_rows_equal_single_calls():
    adapters = [adapter_of(70, 45, rank, alpha, seed=rank) for rank, alpha in ((1, 1.0), (8, 3.0), (2, 16.0), (5, 2.0))]
    x, y, _, _ = arrays(23, 70, 45, 1)
    index = np.random.default_rng(1).integers(-1, 4, 23)
    out = whet.lora_batch(x, y.copy(), adapters, index)
    close(out, naive_lora_batch(x, y, adapters, index), 70)
    for i, k in enumerate(index):
        np.testing.assert_array_equal(out[i], y[i] if k < 0 else adapters[k].forward(x[i], y[i].copy()))
    stack = whet.LoRAStack(adapters)
    assert len(stack) == 4
    np.testing.assert_array_equal(whet.lora_batch(x, y.copy(), stack, index.tolist()), out)
    fortran = np.asfortranarray(y)
    np.testing.assert_array_equal(whet.lora_batch(x, fortran, stack, index.astype(np.int32)), out)
    assert whet.lora_batch(x[:0], y[:0], stack, index[:0]).shape == (0, 45)


# --- the adapter ------------------------------------------------------------------------------------------


def test_a_new_adapter_changes_nothing():
    adapter = whet.MicroLoRA(40, 30, rank=3, seed=5)
    x, y, _, _ = arrays(2, 40, 30, 1)
    np.testing.assert_array_equal(adapter.forward(x, y.copy()), y)
    assert adapter.A.shape == (3, 40) and adapter.B.shape == (3, 30) and adapter.scale == 4 / 3
    assert 0 < np.abs(adapter.A).max() <= 1 / np.sqrt(40)
    np.testing.assert_array_equal(adapter.A, whet.MicroLoRA(40, 30, rank=3, seed=5).A)
    assert (adapter.A != whet.MicroLoRA(40, 30, rank=3, seed=6).A).all()
    assert repr(adapter) == "MicroLoRA(40, 30, rank=3, alpha=4)"


def test_invalid_adapters_are_named():
    for arguments, facts in (
        ((0, 3), ("in_features is 0", "at least 1")),
        ((3, 3, 9), ("rank is 9", "1 to 8")),
        ((3, 3, 1, np.inf), ("alpha is inf",)),
    ):
        assert_raises(whet.WhetValueError, facts, whet.MicroLoRA, *arguments)


def test_sgd_by_hand():
    adapter = adapter_of()
    a, b = adapter.A.copy(), adapter.B.copy()
    x, g, _, _ = arrays(4, 5, 3, 1)
    for i in range(4):
        adapter.accumulate(x[i], g[i])
    assert adapter.n_gradients == 4
    grad_a, grad_b = naive_lora_gradients(*wide(x, g, a, b), 2.0)
    np.testing.assert_allclose(adapter.gradients[0], grad_a, rtol=1e-5, atol=1e-6)
    adapter.sgd_step(0.1)
    np.testing.assert_allclose(adapter.A, a - 0.1 * grad_a / 4, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(adapter.B, b - 0.1 * grad_b / 4, rtol=1e-5, atol=1e-6)
    assert adapter.n_gradients == 0 and not adapter.gradients[0].any() and not adapter.gradients[1].any()


def test_ewc_by_hand():
    adapter = whet.MicroLoRA.from_arrays(np.array([[2.0]], np.float32), np.array([[3.0]], np.float32), alpha=1.0)
    x, g = np.array([1.0], np.float32), np.array([2.0], np.float32)
    assert adapter.ewc_penalty() == 0
    # G_A = g B x = 6, G_B = g A x = 4; of the second sample, with g = 1, 3 and 2. F = mean of squares = 22.5, 10.
    adapter.accumulate_fisher(x, g)
    adapter.accumulate_fisher(x, g / 2)
    assert adapter.n_gradients == 0
    adapter.consolidate()
    adapter.ewc_lambda = 0.5
    adapter.accumulate(x, g)
    adapter.sgd_step(0.125)  # theta = theta*: no penalty yet. A = 2 - 6 / 8, B = 3 - 4 / 8
    assert (adapter.A[0, 0], adapter.B[0, 0]) == (1.25, 2.5)
    assert adapter.ewc_penalty() == 0.25 * (22.5 * 0.75**2 + 10 * 0.5**2)
    adapter.accumulate(x, g * 0)
    adapter.sgd_step(0.0625)  # only the penalty: A += 0.5 * 22.5 * 0.75 / 16, B += 0.5 * 10 * 0.5 / 16
    assert (adapter.A[0, 0], adapter.B[0, 0]) == (1.25 + 8.4375 / 16, 2.5 + 2.5 / 16)
    a, b = float(adapter.A[0, 0]), float(adapter.B[0, 0])
    adapter.accumulate_fisher(x, x)  # a second task: its squares, B^2 and A^2, are added to F, around the new weights
    adapter.consolidate()
    assert adapter.ewc_penalty() == 0
    adapter.A[0, 0] += 1
    assert adapter.ewc_penalty() == pytest.approx(0.25 * (22.5 + b * b), rel=1e-6) and a != 0


def test_merge_and_unmerge():
    adapter = adapter_of(33, 20, 3)
    weight = np.random.default_rng(0).standard_normal((20, 33), np.float32)
    merged = weight.copy()
    assert adapter.merge(merged) is merged
    exact = weight + adapter.scale * adapter.B.T.astype(np.float64) @ adapter.A
    np.testing.assert_allclose(merged, exact, rtol=1e-5, atol=1e-5)
    x = arrays(6, 33, 20, 1)[0]
    np.testing.assert_allclose(x @ merged.T, adapter.forward(x, x @ weight.T), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(adapter.unmerge(merged), weight, atol=4e-6)
    fortran = np.asfortranarray(weight)
    np.testing.assert_allclose(adapter.merge(fortran), exact, rtol=1e-5, atol=1e-5)
    with pytest.raises(whet.WhetValueError, match=mentions("merge", "weight has shape (33, 20)", "(20, 33)")):
        adapter.merge(weight.T)


def test_invalid_steps_are_named():
    adapter = adapter_of()
    x, g, _, _ = arrays(1, 5, 3, 1)
    for call, facts in (
        (lambda: adapter.sgd_step(0.1), ("no gradient was accumulated",)),
        (lambda: adapter.adam_step(0.1), ("no gradient was accumulated",)),
        (lambda: adapter.sgd_step(-1), ("lr is -1", "finite number")),
        (lambda: adapter.adam_step(0.1, betas=(0.9, 1.0)), ("betas is (0.9, 1.0)",)),
        (lambda: adapter.adam_step(0.1, betas=3), ("betas is 3", "two numbers")),
        (lambda: adapter.adam_step(0.1, betas=(0.9,)), ("betas is (0.9,)", "two numbers")),
        (lambda: whet.MicroLoRA(2, 2, seed=-1), ("MicroLoRA", "seed is -1", ">= 0")),
        (lambda: whet.MicroLoRA(2, 2, seed="a"), ("MicroLoRA", "seed is 'a'", "integer")),
        (lambda: adapter.adam_step(0.1, eps=0), ("eps is 0", "number above 0")),
        (lambda: adapter.adam_step(0.1, weight_decay=float("nan")), ("weight_decay is nan",)),
        (adapter.consolidate, ("no Fisher information was accumulated",)),
    ):
        assert_raises(whet.WhetValueError, facts, call)
    before = adapter.A.copy()
    adapter.accumulate(x, g * np.nan)
    assert_raises(whet.WhetValueError, ("zero_grad()",), adapter.sgd_step, 0.1)
    np.testing.assert_array_equal(adapter.A, before)
    adapter.zero_grad()
    adapter.accumulate(x, g)
    adapter.sgd_step(0.1)


def trained(adapter, steps, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        x, g = rng.standard_normal((3, adapter.in_features)), rng.standard_normal((3, adapter.out_features))
        adapter.accumulate(x.astype(np.float32), g.astype(np.float32))
        adapter.adam_step(0.01, weight_decay=0.1)
    return adapter


def test_a_loaded_state_continues_identically():
    first = trained(adapter_of(), 3)
    first.accumulate_fisher(np.ones(5, np.float32), np.ones(3, np.float32))
    first.consolidate()
    first.ewc_lambda = 0.5
    state = first.state_dict()
    second = adapter_of(seed=9)
    second.load_state_dict(state)
    for adapter in (first, second):
        trained(adapter, 2, seed=1)
    np.testing.assert_array_equal(first.A, second.A)
    np.testing.assert_array_equal(first.B, second.B)
    assert (second.n_steps, second.ewc_lambda) == (5, 0.5)
    assert not np.array_equal(state["lora_A"], first.A)  # a copy


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda adapter: pickle.loads(pickle.dumps(adapter))])
def test_copies_have_their_own_memory_and_state(copied):
    x, g, _, _ = arrays(3, 40, 24, 2)

    def learn(adapter):
        adapter.accumulate_fisher(x, g)
        adapter.consolidate()
        for _ in range(2):
            adapter.accumulate(x, g)
            adapter.adam_step(0.1)
        adapter.accumulate(x, g)  # a gradient without a step yet

    def content(adapter):
        return {name: np.copy(value) for name, value in adapter.state_dict().items()}

    adapter = adapter_of(40, 24)
    adapter.ewc_lambda = 0.5
    learn(adapter)
    before, twin = content(adapter), copied(adapter)
    learn(twin)
    np.testing.assert_equal(content(adapter), before)
    learn(adapter)
    np.testing.assert_equal(content(twin), content(adapter))
    np.testing.assert_array_equal(
        twin.forward(x, np.zeros((3, 24), np.float32)), adapter.forward(x, np.zeros((3, 24), np.float32))
    )
    assert not np.array_equal(twin.A, before["lora_A"]) and twin.A.ctypes.data % 64 == 0


def test_invalid_states_change_nothing():
    adapter = adapter_of()
    before, state = adapter.A.copy(), adapter_of(seed=3).state_dict()
    for change, facts in (
        ({"lora_A": None}, ("lora_A is missing", "float32")),
        ({"lora_B": np.zeros((2, 4), np.float32)}, ("lora_B is float32 (2, 4)", "float32 (2, 3)")),
        ({"grad_A": np.zeros((2, 5))}, ("grad_A is float64",)),
        ({"adam_m_A": np.zeros((2, 5), np.float32)}, ("adam_m_B is missing",)),
        ({"momentum_A": np.zeros(3)}, ("momentum_A or momentum_B is unknown",)),
        ({"n_steps": 1.5}, ("n_steps is 1.5", "finite int")),
        ({"alpha": float("nan")}, ("alpha is nan",)),
    ):
        assert_raises(whet.errors.CheckpointError, facts, adapter.load_state_dict, {**state, **change})
    np.testing.assert_array_equal(adapter.A, before)


@pytest.mark.parametrize("shift", [0, 1, 7, 40])
def test_y_may_overlap_x(shift):
    """If shifted, inputs are copied first; in place they are read row by row."""
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-2, 3, (2, 40)).astype(np.float32) for _ in range(2))
    memory = rng.integers(-2, 3, 200 * 40 + 40).astype(np.float32)
    x, y = memory[: 200 * 40].reshape(200, 40), memory[shift : shift + 200 * 40].reshape(200, 40)
    right = y + 2 * (x @ a.T) @ b
    assert whet.lora_forward(x, y, a, b, 2.0) is y
    np.testing.assert_array_equal(y, right)
