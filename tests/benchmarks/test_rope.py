"""``whet bench rope``: flags are honoured, providers are right, and errors are found."""

import numpy as np
import pytest
import tyro
from tests.raising import mentions

from benchmarks.suites.rope import SUITE, RopeOptions
from whet.bench import NotMeasured
from whet.bench.kernels.rope import torch_compiled
from whet.errors import WhetError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def parse(*flags):
    return tyro.cli(RopeOptions, args=flags)


def case_names(options):
    return [[case.name for case in table.cases] for table in SUITE.tables(options)]


def test_default_is_the_grid_of_the_script():
    prefill, decode = case_names(RopeOptions())
    assert len(prefill) == 32
    assert prefill[0] == "1 x 64, 32 heads" and prefill[-1] == "64 x 512, 48 heads"
    assert decode[0] == "1 x 1, 32 heads" and decode[-1] == "64 x 1, 48 heads, cold"
    assert len(case_names(RopeOptions(quick=True))[0]) == 4


def test_every_flag_is_honoured():
    options = parse(
        *("--no-is-neox-style", "--batch-size", "32", "--seq-len", "1024", "--num-heads", "64", "--num-kv-heads", "8"),
        *("--head-size", "256", "--rotary-dim", "64", "--dtype", "float", "--seed", "3", "--save-path", "there"),
    )
    assert (options.seed, options.out, options.device) == (3, "there", "cpu")
    (table,) = SUITE.tables(options)
    assert table.title == "RoPE, prefill, GPT-J pairing, float32"
    (case,) = table.cases
    assert case.name == "32 x 1024, 64/8 heads"
    # 72 heads, 64 elements of 4 bytes, read and written; a row of the table; a position
    assert case.n_bytes == 32 * 1024 * (72 * 64 * 4 * 2 + 64 * 4 + 8)
    assert parse("--is-neox-style").is_neox_style and not options.is_neox_style
    assert parse("--out", "here").out == "here"


def test_inputs_depend_on_seed_and_shape():
    (table,) = SUITE.tables(RopeOptions(batch_size=2, seq_len=3, num_heads=4, num_kv_heads=1, head_size=64))
    one, same, other = (table.cases[0].inputs(np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert one.shapes == [(2, 3, 4, 64), (2, 3, 1, 64)]
    np.testing.assert_array_equal(one.positions, same.positions)
    assert not np.array_equal(one.positions, other.positions)
    assert one.rope.rotary_dim == 32 and one.rope.max_position == 8192


def test_published_times_are_only_in_published_settings():
    def figures(**settings):
        case = SUITE.tables(RopeOptions(batch_size=16, seq_len=512, num_heads=32, **settings))[0].cases[0]
        return case.published, case.note

    published, note = figures()
    assert published == {"torch": 123.4e-6, "FlashInfer": 42.7e-6, "vLLM": 38.9e-6} and "8 TB/s" in note
    assert figures(is_neox_style=False)[0]["vLLM"] == 39.5e-6
    for settings in ({"rotary_dim": 128}, {"dtype": "float"}, {"num_kv_heads": 8}, {"head_size": 64}):
        assert figures(**settings) == ({}, "")


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float"])
def test_every_provider_is_right_and_errors_are_found(is_neox_style, dtype):
    options = RopeOptions(
        is_neox_style=is_neox_style, dtype=dtype, batch_size=2, seq_len=5, num_heads=3, num_kv_heads=1
    )
    (table,) = SUITE.tables(options)
    (case,) = table.cases
    inputs = case.inputs(np.random.default_rng(0))
    right = case.reference(inputs)
    assert right.shape == (2 * 5 * (3 + 1) * 128,)
    for provider in table.providers:
        if provider.prepare is torch_compiled:
            continue  # compiling takes longer than all tests of this file
        tolerance = case.tolerance if provider.tolerance is None else provider.tolerance
        if provider.name.startswith(("FlashInfer", "vLLM")):
            with pytest.raises(NotMeasured, match=mentions("only on CUDA", "on cpu")):
                provider.prepare(inputs)
            continue
        answer = provider.prepare(inputs)()
        assert table.error(answer, right) <= tolerance, provider.name
        assert table.error(np.asarray(answer) + 2 * tolerance * (1 + np.abs(right)), right) > tolerance


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_named():
    with pytest.raises(WhetError, match=mentions("cuda:0", "no CUDA device")):
        SUITE.tables(RopeOptions(device="cuda:0"))


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"device": "tpu"}, ("device is 'tpu'", "cpu", "cuda:0")),
        ({"batch_size": -1}, ("batch_size is -1", "at least 1", "0 for")),
        ({"rotary_dim": 256}, ("rotary_dim is 256", "even number", "head_size=128")),
    ],
)
def test_invalid_options_are_named(settings, facts):
    with pytest.raises(WhetError, match=mentions(*facts)):
        SUITE.tables(RopeOptions(**settings))
