"""The kernel suite's tables, and providers made from plain functions."""

from types import SimpleNamespace

import numpy as np
import pytest

import whet
from whet.bench import BenchOptions
from whet.bench.kernels import linear, rope
from whet.bench.kernels.rope import RopeInputs, rope_case, rotate_exactly, torch_compiled, torch_scale
from whet.bench.prepare import in_dtype, in_loop, normal, on_arrays, on_tensors
from whet.bench.suites import load_suite
from whet.ops.quant import CORE_TABLE

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("n_rows", [1, 32])
def test_every_weight_format_has_rows_and_bytes(n_rows):
    tables = {table.title: table for table in load_suite("kernels").tables(BenchOptions())}
    cases = {case.name: case for case in tables[f"Linear layer, {n_rows} row{'s' * (n_rows > 1)}"].cases}
    for format in CORE_TABLE:
        case = cases[f"{format} 4096 x 4096"]
        assert case.n_bytes == CORE_TABLE[format].row_bytes(4096) * 4096 and case.n_flops == 2 * n_rows * 4096**2
        assert (f"{format} 4096 x 4096, cold" in cases) == (n_rows == 1)
    assert cases["q6_k 4096 x 4096"].n_bytes == 4096 * 16 * 210  # 16 blocks of 256 a row, each of 210 bytes
    assert "q4_k 1536 x 576" not in cases  # 576 is not a multiple of the block length


@pytest.mark.parametrize("format", CORE_TABLE)
@pytest.mark.parametrize("n_rows", [1, 32])
def test_linear_rows_are_right_in_every_format(format, n_rows):
    table = linear._linear(n_rows, [format], [], cold_shapes=[(48, 512)])
    [case] = table.cases
    assert case.cache == "cold" and case.name == f"{format} 48 x 512, cold"
    x = case.inputs(np.random.default_rng(0))
    right = case.reference(x)
    for provider in table.providers:
        tolerance = case.tolerance if provider.tolerance is None else provider.tolerance
        assert table.error(provider.prepare(x)(), right) <= tolerance, provider.name


# --- RoPE -----------------------------------------------------------------------------------------------


def test_rope_tables_are_right():
    tables = rope.tables(BenchOptions(quick=True))
    assert [table.title for table in tables[:2]] == ["RoPE, sines and cosines computed", "RoPE with tables"]
    assert len({table.title for table in tables}) == len(tables) == 6
    for table in tables:
        case = table.cases[0]
        inputs = case.inputs(np.random.default_rng(0))
        for provider in table.providers:
            if provider.prepare is torch_compiled:
                continue
            answer = provider.prepare(inputs)()
            assert table.error(answer, (provider.reference or case.reference)(inputs)) <= case.tolerance
            if provider.prepare is not torch_scale:
                assert table.error(np.asarray(answer) + 0.1, case.reference(inputs)) > case.tolerance


def test_published_figures_of_ruvllm():
    computed, looked_up = rope.tables(BenchOptions())[:2]
    assert [case.name for case in looked_up.cases] == ["64 x 1", "128 x 8", "128 x 32"]
    assert {case.name: case.published["RuvLLM"] for case in computed.cases}["128 x 32"] == 5.21e-6
    assert ["estimate" in case.note for case in looked_up.cases] == [False, True, True]


def test_rope_reference_by_hand():
    # One head of four elements at one position p: the pairs (0, 2), (1, 3) rotate by p and p / 100.
    embedding = whet.get_rope(4)
    inputs = RopeInputs(np.random.default_rng(0), (1, 1, 1, 0, 4), embedding, "float32")
    (a, b, c, d), p = (inputs.values.astype(float), int(inputs.positions[0, 0]))
    first, second = p, p / 100
    expected = [
        a * np.cos(first) - c * np.sin(first), b * np.cos(second) - d * np.sin(second),
        a * np.sin(first) + c * np.cos(first), b * np.sin(second) + d * np.cos(second),
    ]  # fmt: skip
    np.testing.assert_allclose(rotate_exactly(inputs), expected, rtol=1e-9)


def test_large_rope_inputs_are_checked_at_sampled_tokens():
    embedding = whet.get_rope(64, max_position=16)
    case = rope_case("large", (3, 100, 2, 0, 64), embedding, "float32")
    inputs = case.inputs(np.random.default_rng(0))
    assert case.reference(inputs).size == 64 * 2 * 64
    assert inputs.sample[0][0] == inputs.sample[1][0] == 0 and (inputs.sample[0][-1], inputs.sample[1][-1]) == (2, 99)


# --- plain functions as providers -------------------------------------------------------------------------


def test_plain_function_gets_arrays_or_tensors():
    x, n = np.arange(6.0, dtype=np.float32), 2
    assert on_arrays("builtins:max", key=lambda value: value)((1, 3, 2))() == 3
    assert on_tensors(lambda *inputs, k: (inputs, k), k=5)((x, n))()[1] == 5
    (tensor_x, same_n), _ = on_tensors(lambda *inputs, k: (inputs, k), k=5)((x, n))()
    assert tensor_x.data_ptr() == x.ctypes.data and same_n == 2  # no copy
    half, ids = on_tensors(lambda *inputs: inputs, "bfloat16")((x, np.arange(3)))()
    assert (half.dtype, ids.dtype) == (torch.bfloat16, torch.int64)
    assert in_dtype(type, "float32")((x,))() is np.ndarray and in_dtype(type, "bfloat16")((x,))() is torch.Tensor
    rows = SimpleNamespace(rows=lambda: [(row,) for row in x.reshape(-1, 3)])
    assert in_loop(lambda row: row.sum())(rows)() == [3, 12]


def test_normal_numbers_are_exact_in_the_dtype():
    wide, narrow = (normal(np.random.default_rng(0), (64,), dtype) for dtype in ("float32", "bfloat16"))
    exact = torch.from_numpy(narrow).bfloat16().float().numpy()
    np.testing.assert_array_equal(narrow, exact)
    assert 0 < np.abs(wide - narrow).max() < 2**-7 * np.abs(wide).max()
