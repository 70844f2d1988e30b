"""Weights from any float source, in any strides and pieces, into every format: the same numbers."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from tests.gguf_files import write_gguf
from tests.processes import printed_by
from tests.raising import mentions
from tests.tiny import tiny_llama

from whet import _core
from whet.models.architecture import ACTIVATIONS, NORMS, ModelConfig, RowSlice
from whet.models.loading import pack_slices
from whet.ops.quant import CORE_FORMATS, quantize

N, K = 83, 256


def config_of(n, k):
    return vars(
        ModelConfig(
            n_layers=1, n_heads=1, n_kv_heads=1, head_dim=2, hidden_dim=k, ffn_dim=2, vocab_size=n, max_position=8,
            norm="rms", norm_eps=1e-12, windows=(0,), attention_scale=1.0,
        )
    )  # fmt: skip


def engine_with(format, n=N, k=K):
    """Make a core whose only layer's MLP is the matrix under test, so that its rows can be read as an embedding's."""
    shapes = {"embedding": (n, k), "layers.0.qkv": (6, k), "layers.0.o": (k, 2), "layers.0.gate_up": (4, k)}
    shapes["layers.0.down"] = (k, 2)
    slots = [(s, CORE_FORMATS[format if s == "embedding" else "float32"], *shape) for s, shape in shapes.items()]
    norms = [(s, None, k, k) for s in ("layers.0.norm1.weight", "layers.0.norm2.weight", "final_norm.weight")]
    weights = _core.Weights(config_of(n, k), slots + norms)
    core = _core.Engine(weights, kv_bytes=1 << 20, max_batch=4, chunk=16, kv_type=_core.KvType.float32)
    pack_slices(core.weights, [RowSlice("final_norm.weight", 0, np.ones(k, np.float32), "float32")])
    return core


@pytest.mark.parametrize(("setting", "known"), [("norm", NORMS), ("activation", ACTIVATIONS)])
def test_config_names_match_the_cores_enums(setting, known):
    assert tuple(getattr(_core, setting.capitalize()).__members__) == known
    config = config_of(N, K) | {setting: "unknown"}
    with pytest.raises(KeyError, match=mentions("unknown")):
        _core.Weights(config, [])


def head_of(core, n=N, k=K):
    """Return rms_norm(row t) . row j for all rows t and j, from lookup and product of the packed rows."""
    out = []
    for t in range(0, n, 9):
        core.begin_session(1, False)
        tokens = np.array([t], np.int32)
        job = core.add_score(
            1, tokens=tokens, score_from=1, temperature=1.0, entropy=False, logits=True, hidden=False, top_logprobs=0,
            adapter=0, keep=False,
        )  # fmt: skip
        while not core.step(job):
            pass
        out.append(core.scores(job)[2])
    return np.stack(out)


def rounded(weight, format):
    if format == "float32":
        return weight
    if format == "bfloat16":
        return torch.from_numpy(weight).bfloat16().float().numpy()
    return quantize(weight, format).dequantize()


SOURCES = {
    "rows": lambda w: w,
    "columns": lambda w: np.asfortranarray(w),
    "every second": lambda w: np.repeat(np.repeat(w, 2, axis=0), 2, axis=1)[::2, ::2],
    "torch": torch.from_numpy,
    "torch transposed": lambda w: torch.from_numpy(w.T.copy()).T,
}


@pytest.mark.parametrize("format", CORE_FORMATS)
@pytest.mark.parametrize("source", SOURCES)
def test_packing_does_not_depend_on_slices_and_strides(format, source):
    weight = np.random.default_rng(0).normal(size=(N, K)).astype(np.float32)
    core = engine_with(format)
    given = SOURCES[source](weight)
    slices = [RowSlice("embedding", first, given[first:end], "float32") for first, end in ((0, 5), (5, 53), (53, N))]
    pack_slices(core.weights, slices)
    got = head_of(core)
    one_by_one = engine_with(format)
    pack_slices(one_by_one.weights, [RowSlice("embedding", i, weight[i : i + 1], "float32") for i in range(N)])
    np.testing.assert_array_equal(got, head_of(one_by_one))
    kept = rounded(weight, format).astype(np.float64)
    normed = kept[::9] / np.sqrt((kept[::9] ** 2).mean(axis=1, keepdims=True))
    # bfloat16 rounds the inputs of the product too, and the quantised formats take them as int8.
    np.testing.assert_allclose(got, normed @ kept.T, atol=1e-3 if format == "float32" else 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["float32", "bfloat16", "q8_0"])
@pytest.mark.parametrize("transposed", [False, True])
def test_float16_is_widened_exactly(dtype, format, transposed):
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[0, :4] = torch.tensor([1e-6, -6e-8, 0.0, -0.0]).to(dtype)
    given = weight.T.contiguous().T if transposed else weight
    halves, floats = engine_with(format), engine_with(format)
    name = str(dtype).removeprefix("torch.")
    pack_slices(halves.weights, [RowSlice("embedding", 0, given, name)])
    pack_slices(floats.weights, [RowSlice("embedding", 0, weight.float(), "float32")])
    np.testing.assert_array_equal(head_of(halves), head_of(floats))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("format", ["float32", "bfloat16", "int8", "q4_k"])
def test_float64_is_rounded_to_float32_first(format, transposed):
    wide = np.random.default_rng(0).normal(size=(600, K))
    cores = [engine_with(format, 600) for _ in range(2)]
    given = np.asfortranarray(wide) if transposed else wide
    pack_slices(cores[0].weights, [RowSlice("embedding", 0, given, "float64")])
    pack_slices(cores[1].weights, [RowSlice("embedding", 0, wide.astype(np.float32), "float32")])
    np.testing.assert_array_equal(head_of(cores[0], 600), head_of(cores[1], 600))


@pytest.mark.parametrize("stored", ["q8_0", "q4_0", "q4_k"])
@pytest.mark.parametrize("format", ["float32", "bfloat16", "int8", "q8_0", "q4_0", "q4_k"])
def test_blocks_are_repacked_in_any_format(stored, format):
    """Repacking equals packing the dequantised numbers, and copies if the format matches; with strides and offsets."""
    blocks = quantize(np.random.default_rng(0).normal(size=(600, K)).astype(np.float32), stored)
    values = blocks.dequantize() if stored != format else blocks.data
    cores = [engine_with(format, 600) for _ in range(2)]
    for first in (0, 1):
        row_slice = RowSlice("embedding", 300 * first, blocks.data[first::2], stored)
        pack_slices(cores[0].weights, [row_slice])
        plain = RowSlice("embedding", 300 * first, values[first::2], "float32" if stored != format else stored)
        pack_slices(cores[1].weights, [plain])
    np.testing.assert_array_equal(head_of(cores[0], 600), head_of(cores[1], 600))


@pytest.mark.parametrize("format", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("step", [1, 3])
def test_vectors_of_every_float_type(format, step):
    """Return the final norm's weight, from products of normed rows."""
    weight = torch.randn(K, generator=torch.Generator().manual_seed(1)).to(getattr(torch, format))
    given = torch.repeat_interleave(weight, step)[::step]
    cores = [engine_with("float32") for _ in range(2)]
    rows = np.random.default_rng(0).normal(size=(N, K)).astype(np.float32)
    for core, vector in zip(cores, ((given, format), (weight.float(), "float32")), strict=True):
        pack_slices(core.weights, [RowSlice("embedding", 0, rows, "float32")])
        pack_slices(core.weights, [RowSlice("final_norm.weight", 0, *vector)])
    np.testing.assert_array_equal(*map(head_of, cores))
    first = rows[0] / np.sqrt((rows[0].astype(np.float64) ** 2).mean()) * weight.double().numpy()
    np.testing.assert_allclose(head_of(cores[0])[0].ravel(), rows @ first, atol=1e-3)


def test_rows_of_odd_length():
    weight = np.random.default_rng(0).normal(size=(33, 37)).astype(np.float32)
    for given in (weight, np.asfortranarray(weight)):
        for format in ("float32", "bfloat16"):
            core = engine_with(format, 33, 37)
            pack_slices(core.weights, [RowSlice("embedding", 0, given, "float32")])
            kept = rounded(weight, format).astype(np.float64)
            normed = kept[::9] / np.sqrt((kept[::9] ** 2).mean(axis=1, keepdims=True))
            np.testing.assert_allclose(
                head_of(core, 33, 37), normed @ kept.T, atol=0.05 if format != "float32" else 1e-5
            )


PEAK = """
import sys, whet
from whet.memory import memory_report
whet.Engine, whet.set_num_threads(1)
before = memory_report().resident
engine = whet.Engine.from_pretrained(sys.argv[1], kv_bytes=1 << 20, max_batch=1, prefill_chunk=1)
print(memory_report().peak - before, engine.memory["weights_bytes"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's peak memory of a process")
@pytest.mark.parametrize("is_file", [False, True])
def test_peak_memory_of_loading_excludes_the_file(tmp_path, is_file):
    model = tiny_llama(vocab_size=512, hidden_size=512, intermediate_size=2048, num_hidden_layers=12)
    model.bfloat16().save_pretrained(tmp_path)
    path = write_gguf(model, tmp_path / "model.gguf") if is_file else tmp_path
    peak, packed = map(int, printed_by(PEAK, path).split())
    assert packed > 80e6 and peak < packed + 30e6
