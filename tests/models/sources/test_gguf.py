"""GGUF files written by the gguf package: equal logits, and errors for every kind of damage."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.tiny_models import logits_of, naive_logits, rope, tiny_model, token_ids
from tests.gguf_files import (
    BF16,
    F16,
    F32,
    Q8_0,
    as_llama_cpp,
    gguf_name,
    values_by_module,
    values_by_slot,
    write_gguf,
)
from tests.raising import assert_raises, mentions

from whet.engine import Engine
from whet.errors import WhetValueError
from whet.models.formats import TABLE
from whet.models.reference import naive_weights
from whet.models.sources.gguf import open_gguf, tensor_name
from whet.models.sources.gguf_container import parse_gguf, read_gguf
from whet.models.sources.live import open_module

QUANTISED = tuple(gguf.GGMLQuantizationType(f.gguf_type) for f in TABLE.values() if f.gguf_name and not f.is_float)


CASES = ("llama", "llama-biases-tied", "mistral", "qwen2", "qwen3", "gpt_neox", "gpt_neox-serial", "gpt2",
         "gpt2-untied-unscaled", "phi3", "granite", "smollm3-interval", "olmo2", "gemma2", "gemma3", "starcoder2",
         "starcoder2-untied", "stablelm", "stablelm-parallel", "phi", "phi-rotary",
         "granite4", "granite4-not-rotated", "olmo3-kinds", "exaone4", "exaone4-windows", "ernie4_5",
         "ministral3", "arcee", "hunyuan", "hunyuan-alpha", "granite_swa", "lfm2", "lfm2-taps",
         "qwen3_5_text", "granite4-hybrid", "nemotron_h-groups", "gemma4")  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers(case, tmp_path):
    model, ids = tiny_model(case, **({"scale_attn_weights": True} if "unscaled" in case else {})), token_ids()
    source = open_gguf(write_gguf(model, tmp_path / "model.gguf"))
    np.testing.assert_allclose(naive_logits(source, ids), logits_of(model, ids), rtol=0, atol=1e-4)
    live = open_module(model)
    values = values_by_slot if not source.config.delta_tiled else values_by_module
    ours, theirs = values(source), values(live)
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    if case != "granite4":  # the file does not record that gate and up are one matrix in the folder
        assert source.targets.keys() == live.targets.keys()
    assert source.config.windows == live.config.windows
    for row_slice in source.slices():
        assert not row_slice.tensor.flags.owndata and not row_slice.tensor.flags.writeable


@pytest.mark.parametrize("case", CASES)
def test_names_of_tensors(case):
    model = tiny_model(case)
    for name in model.state_dict():
        if name == "lm_head.weight" and case == "gemma2":
            continue  # llama.cpp has none
        if ".shared_mlp." in name:
            continue  # gate and up are two tensors
        assert tensor_name(model.config.model_type, name) == gguf_name(model.config, name)
    assert tensor_name("llama", "model.layers.13.mlp.up_proj.weight") == "blk.13.ffn_up.weight"
    with pytest.raises(KeyError):
        tensor_name("llama", "model.layers.1.mlp.router.weight")


@pytest.mark.parametrize("case", ["llama", "gpt_neox"])
@pytest.mark.parametrize("kind", [F16, BF16, *QUANTISED], ids=lambda kind: kind.name)
def test_every_tensor_type(case, kind, tmp_path):
    """Rows of 256, a multiple of Q4_K's block, match the gguf package bitwise."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 256}
    model = tiny_model(case, **sizes)
    path = write_gguf(model, tmp_path / "model.gguf", kind)
    source = open_gguf(path)
    format = kind.name.lower().replace("f16", "float16").replace("bfloat16", "bfloat16")
    assert {row_slice.format for row_slice in source.slices()} == {"float32", format}
    by_name = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name in model.state_dict():
        tensor = by_name[gguf_name(model.config, name)]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        model.get_parameter(name).data = torch.tensor(undone(model.config, name, values))
    live = open_module(model)
    ours, theirs = (naive_weights(s.config, s.slices(), np.float32) for s in (source, live))
    for slot in theirs:
        np.testing.assert_array_equal(ours[slot], theirs[slot], err_msg=slot)
    ids = token_ids(8)
    np.testing.assert_allclose(naive_logits(source, ids), logits_of(model, ids), rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_engine_computes_with_the_blocks_of_the_file(kind, tmp_path):
    """Compare with the definition's logits; in the file's formats, inputs of products are int8."""
    model = tiny_model("llama", num_hidden_layers=1, hidden_size=256, intermediate_size=256)
    path, ids = write_gguf(model, tmp_path / "model.gguf", kind), token_ids(8)
    expected = naive_logits(open_gguf(path), ids)

    def error(engine):
        return np.linalg.norm(engine.logits(ids[0].tolist()) - expected) / np.linalg.norm(expected)

    with Engine.from_gguf(path) as engine:
        assert {f for slot, f in engine.formats.items() if slot != "positions"} == {TABLE[kind.name.lower()].packed_as}
        assert error(engine) < 0.1
    with Engine.from_gguf(path, weights="float32", embedding="float32", head="float32") as engine:
        assert error(engine) < 1e-5


def undone(config: Any, name: str, array: np.ndarray) -> np.ndarray:
    """Return the inverse of ``as_llama_cpp``, by applying it to row numbers."""
    order = as_llama_cpp(config, name, np.arange(array.shape[0])[:, None])[:, 0]
    return array[np.argsort(order)]


def test_mixed_types(tmp_path):
    """Norms in F32 and an embedding in another type than the layers, as in practice."""
    model, ids = tiny_model("qwen2"), token_ids()
    path = write_gguf(
        model, tmp_path / "model.gguf", lambda name: F16 if "embed" in name else Q8_0 if "mlp.up" in name else F32
    )
    source = open_gguf(path)
    formats = {
        row_slice.slot: row_slice.format
        for row_slice in source.slices()
        if row_slice.first_row == 40 or "embed" in row_slice.slot
    }
    assert formats["embedding"] == "float16" and formats["layers.0.gate_up"] == "q8_0"
    np.testing.assert_allclose(naive_logits(source, ids), logits_of(model, ids), rtol=0, atol=0.2)


def test_llama3_rope_scaling_is_a_tensor_of_divisors(tmp_path):
    model, ids = tiny_model("llama-llama3"), token_ids()
    exact = open_module(model).config
    plain = 500.0 ** (-np.arange(4) / 4)
    path = write_gguf(
        model, tmp_path / "model.gguf", extra={"rope_freqs.weight": (plain / exact.inv_freq).astype(np.float32)}
    )
    source = open_gguf(path)
    np.testing.assert_allclose(source.config.inv_freq, exact.inv_freq, rtol=1e-6)
    np.testing.assert_allclose(naive_logits(source, ids), logits_of(model, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["llama-linear", "llama-yarn"])
def test_scaling_in_the_metadata(case, tmp_path):
    model, ids = tiny_model(case), token_ids()
    settings = model.config.rope_parameters

    def change(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType(settings["rope_type"]))
        writer.add_rope_scaling_factor(settings["factor"])
        writer.add_rope_scaling_orig_ctx_len(settings.get("original_max_position_embeddings", 64))

    source = open_gguf(write_gguf(model, tmp_path / "model.gguf", change=change))
    np.testing.assert_allclose(naive_logits(source, ids), logits_of(model, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("n", [12, 24])
def test_longrope(n, tmp_path):
    model, ids = tiny_model("phi3-longrope"), token_ids(n)
    settings = model.config.rope_parameters
    extra = {
        f"rope_factors_{kind}.weight": np.array(settings[f"{kind}_factor"], np.float32) for kind in ("long", "short")
    }

    def change(writer):
        writer.add_rope_scaling_orig_ctx_len(16)
        writer.add_rope_scaling_attn_factors(open_module(model).config.attention_factor)

    path = write_gguf(model, tmp_path / "model.gguf", change=change, extra=extra)
    source = open_gguf(path, max_position=n)
    np.testing.assert_allclose(naive_logits(source, ids), logits_of(model, ids), rtol=0, atol=1e-4)


def test_partial_rotary_is_rejected_in_families_without_it(tmp_path):
    model = tiny_model("qwen2")
    model.config.rope_parameters["partial_rotary_factor"] = 0.5
    path = write_gguf(model, tmp_path / "model.gguf")
    assert_raises(WhetValueError, ("qwen2.rope.dimension_count is 4", "the whole head, 8"), open_gguf, path)


# --- fused q, k and v, and split models -----------------------------------------------------------------------------


def weights_of(path: Path) -> dict[str, np.ndarray]:
    source = open_gguf(path)
    return naive_weights(source.config, source.slices(), np.float32)


def assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for slot in theirs:
        np.testing.assert_array_equal(ours[slot], theirs[slot], err_msg=slot)


@pytest.mark.parametrize("case", ["llama", "llama-biases-tied", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", [F32, Q8_0], ids=lambda kind: kind.name)
def test_fused_qkv(case, kind, tmp_path):
    model = tiny_model(case, hidden_size=64, intermediate_size=64, head_dim=16)
    fused = write_gguf(model, tmp_path / "fused.gguf", kind, fused=True)
    assert "blk.0.attn_qkv.weight" in read_gguf(fused, "here").tensors
    assert_same(weights_of(fused), weights_of(write_gguf(model, tmp_path / "three.gguf", kind)))


def test_fused_and_separate_qkv_together_are_rejected(tmp_path):
    extra = {"blk.0.attn_q.bias": np.ones(32, np.float32)}
    path = write_gguf(tiny_model("qwen2"), tmp_path / "model.gguf", fused=True, extra=extra)
    assert_raises(WhetValueError, r"there are both blk\.0\.attn_qkv\.bias and blk\.0\.attn_q\.bias", open_gguf, path)


def test_fused_qkv_of_wrong_size_is_rejected(tmp_path):
    extra = {"blk.0.attn_qkv.weight": np.ones((65, 32), np.float32)}
    model = tiny_model("llama", num_hidden_layers=1)
    path = write_gguf(model, tmp_path / "model.gguf", extra=extra)
    path.write_bytes(path.read_bytes().replace(b"blk.0.attn_q.w", b"blk.0.attn_x.w"))
    assert_raises(WhetValueError, ("blk.0.attn_qkv.weight has 65 rows", "64", "q, k and v"), open_gguf, path)


@pytest.mark.parametrize("small_first_shard", [False, True])
def test_split_models(small_first_shard, tmp_path):
    """Any part opens the model, also if the first has no tensors."""
    model = tiny_model("llama")
    whole = write_gguf(model, tmp_path / "whole.gguf")
    first = write_gguf(model, tmp_path / "m.gguf", split_max_tensors=8, small_first_shard=small_first_shard)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert first == parts[0] and len(parts) == 3 + small_first_shard
    for part in parts:
        assert_same(weights_of(part), weights_of(whole))
        assert read_gguf(part, "here").paths == tuple(parts)
    with Engine.from_pretrained(parts[-1], weights="float32") as engine:
        ids = token_ids(8)
        np.testing.assert_allclose(engine.logits(ids[0].tolist()), logits_of(model, ids), rtol=0, atol=1e-3)


def test_wrong_files_of_split_models_are_rejected(tmp_path):
    model = tiny_model("llama")
    write_gguf(model, tmp_path / "m.gguf", split_max_tensors=8)
    other = write_gguf(tiny_model("llama", num_hidden_layers=1), tmp_path / "o.gguf", split_max_tensors=4)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    data = [part.read_bytes() for part in parts]

    def check(facts: tuple[object, ...], i: int, changed: bytes, part: int = 0) -> None:
        parts[i].write_bytes(changed)
        assert_raises(WhetValueError, ('open_gguf("', *facts), open_gguf, parts[part])
        parts[i].write_bytes(data[i])

    second = "m-00002-of-00003.gguf has split.no, split.count and split.tensors.count"
    check((second, (0, 3, 21), (1, 3, 21)), 1, data[0])  # a duplicate
    check(
        (second, (1, 3, 12), (1, 3, 21)),
        1,
        other.with_name(parts[1].name.replace("m", "o")).read_bytes(),
    )
    check((second, (None, None, None)), 1, write_gguf(model, tmp_path / "whole.gguf").read_bytes())
    check(("m-00002-of-00003.gguf", "truncated"), 1, data[1][:-200])
    check(("m-00002-of-00003.gguf", "blk.0.attn_q.weight", "another model"), 1,
          data[1].replace(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight"))  # fmt: skip
    parts[1].unlink()
    for part in (parts[0], parts[2]):
        assert_raises(WhetValueError, ("m-00002-of-00003.gguf", "part 2 of 3", "into this folder"), open_gguf, part)
    renamed = parts[0].rename(tmp_path / "m-00001-of-00002.gguf")
    assert_raises(
        WhetValueError, ("split.count is 3", "expected a name such as model-00001-of-00003"), open_gguf, renamed
    )


def test_split_model_with_missing_tensors_is_rejected(tmp_path):
    write_gguf(tiny_model("llama"), tmp_path / "m.gguf", split_max_tensors=8)
    at = b"split.tensors.count" + struct.pack("<I", 5)
    for part in tmp_path.glob("m-*.gguf"):
        part.write_bytes(part.read_bytes().replace(at + struct.pack("<i", 21), at + struct.pack("<i", 22)))
    assert_raises(WhetValueError, ("the 3 parts have 21 tensors", "the 22 of split.tensors.count"), open_gguf, part)


def test_from_pretrained_keeps_the_blocks_of_a_file(tmp_path):
    path = write_gguf(tiny_model("llama", intermediate_size=64), tmp_path / "model.gguf", Q8_0)
    with Engine.from_pretrained(path) as one, Engine.from_gguf(path) as other:
        assert one.formats == other.formats and one.formats["layers.0.qkv"] == "q8_0"
        assert (one.logits([1, 2, 3]) == other.logits([1, 2, 3])).all()
    with Engine.from_pretrained(path, weights="float32") as engine:
        assert engine.formats["layers.0.qkv"] == "float32"


# --- against llama.cpp ---------------------------------------------------------------------------------------------


@pytest.mark.needs("llama_cpp")
@pytest.mark.parametrize("case", ["llama", "llama-llama3", "qwen2", "qwen3", "gpt2", "phi3"])
@pytest.mark.parametrize("fused", [False, True])
def test_logits_match_llama_cpp(case, fused, tmp_path):
    import llama_cpp

    options = {"sliding_window": None} if case == "phi3" else {}
    model, ids = tiny_model(case, **options), token_ids(16)

    def change(writer):
        writer.add_tokenizer_model("no_vocab")
        writer.add_vocab_size(model.config.vocab_size)

    extra = {}
    if case == "llama-llama3":
        plain = 500.0 ** (-np.arange(4) / 4)
        extra["rope_freqs.weight"] = (plain / open_module(model).config.inv_freq).astype(np.float32)
    path = write_gguf(model, tmp_path / "model.gguf", change=change, extra=extra, fused=fused)
    llama = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    llama.eval(ids[0].tolist())
    expected = np.array(llama.scores[:16], np.float32)
    llama.close()
    np.testing.assert_allclose(naive_logits(open_gguf(path), ids), expected, rtol=0, atol=0.05)


# --- damaged files -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> bytes:
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 5}
    model = tiny_model("llama", num_attention_heads=2, num_key_value_heads=1, **sizes)
    return write_gguf(model, tmp_path_factory.mktemp("gguf") / "model.gguf").read_bytes()


def opened(data: bytes, tmp_path: Path):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return open_gguf(path)


def test_cut_short_at_every_byte(small, tmp_path):
    path = tmp_path / "whole.gguf"
    path.write_bytes(small)
    end = max(int(tensor.data_offset + tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)
    data = np.frombuffer(small, np.uint8)
    for n in range(end):
        assert_raises(WhetValueError, r"^here: .*(truncated|begin with GGUF)", parse_gguf, data[:n], "here")
    opened(small[:end], tmp_path)
    assert_raises(WhetValueError, ('open_gguf("', 'model.gguf")', "truncated"), opened, small[: end - 1], tmp_path)
    assert_raises(WhetValueError, r"model\.gguf is empty", opened, b"", tmp_path)


def header(n_tensors=0, n_keys=0, version=3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


ARCHITECTURE = key(b"general.architecture", 8, text(b"llama"))


def tensor(name: bytes, shape=(32,), kind=0, offset=0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def keyed(*key_of: Any) -> bytes:
    """Build a file with one key."""
    return header(n_keys=1) + key(*key_of)


def holding(*tensors: bytes) -> bytes:
    """Build a file with these tensors and some data."""
    return header(len(tensors)) + b"".join(tensors) + bytes(200)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGML" + bytes(100), ("does not begin with GGUF",)),
        (header(version=1), ("GGUF version 1", "this engine reads 2 and 3", "convert it")),
        (header(version=3 << 24), ("GGUF version 50331648", "this engine reads 2 and 3", "it is big-endian")),
        (header(n_tensors=2**63), ("number of tensors is 9223372036854775808, more than the 8 remaining bytes",)),
        (header(n_keys=2**64 - 1), ("number of keys is 18446744073709551615, more than",)),
        (header(n_keys=1) + struct.pack("<Q", 2**63) + bytes(9), ("within a key (9223372036854775808 bytes",)),
        (keyed(b"", 8, text(b"x")), ("a key is ''", "plain text")),
        (keyed(b"a\x1b[0m", 8, text(b"x")), ("a key is 'a\\x1b[0m'", "plain text")),
        (keyed(b"\xff", 8, text(b"x")), ("a key", "UTF-8")),
        (keyed(b"k" * 2000, 8, text(b"x")), ("a key is 'kkk", "expected plain text")),
        (keyed(b"k", 13, bytes(8)), ("k has type 13", "GGUF")),
        (keyed(b"k", 7, b"\x02" + bytes(8)), ("k is 2", "0 or 1")),
        (keyed(b"k", 9, struct.pack("<IQ", 4, 2**62)), ("length of k is 4611686018427387904, more",)),
        (keyed(b"k", 9, struct.pack("<IQ", 8, 2**62)), ("length of k is 4611686018427387904, more",)),
        (keyed(b"k", 9, 4 * struct.pack("<IQ", 9, 1) + bytes(12)), ("k is an array of type 9", "num")),
        (keyed(b"k", 9, struct.pack("<IQ", 13, 1) + bytes(12)), ("k is an array of type 13, expected",)),
        (keyed(b"k", 9, struct.pack("<IQ", 7, 1) + b"\x02"), ("k is 2", "0 or 1")),
        (keyed(b"k", 9, struct.pack("<IQQ", 8, 1, 99)), ("within k (99 bytes",)),
        (header(n_keys=2) + 2 * ARCHITECTURE, ("the key general.architecture is duplicated",)),
        (keyed(b"general.alignment", 4, struct.pack("<I", 0)), ("general.alignment is 0, expected",)),
        (keyed(b"general.alignment", 4, struct.pack("<I", 12)), ("general.alignment is 12, expected",)),
        (keyed(b"general.alignment", 8, text(b"32")), ("general.alignment is '32', expected",)),
        (holding(tensor(b"t"), tensor(b"t")), ("the tensor t is duplicated",)),
        (holding(tensor(b"t", shape=())), ("t has 0 axes", "1 to 4")),
        (holding(tensor(b"t", shape=(1,) * 5)), ("t has 5 axes", "1 to 4")),
        (header(1) + text(b"t") + struct.pack("<I", 2**32 - 1) + bytes(200), ("t has 4294967295 axes",)),
        (holding(tensor(b"t", shape=(2**63, 2**63))), ("t of shape", "ends at byte", "truncated")),
        (holding(tensor(b"t", shape=(2**62, 4))), ("t of shape", "ends at byte")),
        (holding(tensor(b"t", shape=(0, 2**63))), ("t of shape", "ends at byte")),
        (holding(tensor(b"t", offset=2**64 - 32)), ("t of shape", "ends at byte")),
        (holding(tensor(b"t", offset=4)), ("t begins at byte 4 of the data", "a multiple of 32")),
        (holding(tensor(b"a"), tensor(b"b", offset=96)), ("b begins at byte 96 of the data", "expected a")),
        (
            holding(tensor(b"blk.3.attn_k.weight", kind=22)),
            ("blk.3.attn_k.weight is IQ2_S", "this engine", "llama-quantize"),
        ),
        (holding(tensor(b"t", kind=40)), ("t is NVFP4", "this engine reads F32, BF16", "TQ1_0 and TQ2_0", "Quantize")),
        (holding(tensor(b"t", kind=4)), ("t is of type 4", "llama.cpp does not write", "this")),
        (holding(tensor(b"t", shape=(33,), kind=8)), ("t has rows of 33", "32")),
        (header() + bytes(32), ("general.architecture is None", "this engine reads llama, mistral3, qwen2")),
        (
            keyed(b"general.architecture", 8, text(b"qwen3next")),
            ("'qwen3next'", "has fused projections", "this engine"),
        ),
        (keyed(b"general.architecture", 8, text(b"mamba")), ("general.architecture is 'mamba'",)),
        (keyed(b"general.architecture", 4, bytes(4)), ("general.architecture is 0",)),
        (
            header(n_keys=2) + ARCHITECTURE + key(b"split.count", 2, b"\x03\x00"),
            ("split.count is 3", "expected a name such"),
        ),
        (
            header(n_keys=2) + ARCHITECTURE + key(b"llama.expert_kinds", 4, bytes(4)),
            (
                "llama.expert_kinds",
                "not supported",
            ),
        ),
        (header(n_keys=1) + ARCHITECTURE, ("llama.block_count is None", "an integer of at least 1")),
    ],
)
def test_hostile_files(data, message, tmp_path):
    assert_raises(WhetValueError, ('open_gguf("', "model.gguf", *message), opened, data, tmp_path)


def test_missing_file_is_rejected(tmp_path):
    assert_raises(WhetValueError, ("nothing.gguf", "pass a path"), open_gguf, tmp_path / "nothing.gguf")
    assert_raises(WhetValueError, "not a file", open_gguf, tmp_path)


SIZES = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv",
         "context_length", "attention.key_length")  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, 2**32 - 1])
def test_invalid_sizes_are_rejected(small, tmp_path, name, value):
    at = small.index(text(f"llama.{name}".encode())) + 8 + len(f"llama.{name}") + 4
    changed = small[:at] + struct.pack("<I", value) + small[at + 4 :]
    if name == "context_length" and value:
        value, changed = 0, small[:at] + bytes(4) + small[at + 4 :]
    assert_raises(WhetValueError, ('open_gguf("', 'model.gguf")'), opened, changed, tmp_path)


@pytest.mark.parametrize(
    ("change", "extra", "message"),
    [
        (
            None,
            {"blk.0.ffn_up.bias": np.ones(40, np.float32)},
            ("blk.0.ffn_up.bias", "not supported"),
        ),
        (
            None,
            {"rope_freqs.weight": np.ones(3, np.float32)},
            ("rope_freqs.weight is", "expected 4 finite numbers above 0"),
        ),
        (None, {"rope_freqs.weight": np.zeros(4, np.float32)}, ("expected 4 finite numbers above 0",)),
        (
            None,
            {"rope_factors_long.weight": np.ones(4, np.float32)},
            (
                "rope_factors_long",
                "1-D F32",
            ),
        ),
        (lambda w: w.add_float32("llama.logit_scale", 2.0), None, ("llama.logit_scale is 2.0", "1 or none")),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), None, ("rope.scaling.type is 'longrope'",)),
        (
            lambda w: w.add_float32("llama.rope.scaling.attn_factor", float("nan")),
            None,
            ("attn_factor is nan, expected",),
        ),
        (lambda w: w.add_expert_count(2), None, ("llama.expert_count is 2", "0 or none")),
        (lambda w: w.add_bool("llama.attention.causal", False), None, ("attention.causal is False", "True or no")),
        (lambda w: w.add_float32("llama.attn_logit_softcapping", 5.0), None, ("softcapping is 5.0", "0 or none")),
    ],
)
def test_unsupported_options_and_tensors_are_rejected(change, extra, message, tmp_path):
    path = write_gguf(tiny_model("llama"), tmp_path / "model.gguf", change=change, extra=extra)
    assert_raises(WhetValueError, ("open_gguf", *message), open_gguf, path)


def test_neutral_options_are_accepted(tmp_path):
    def change(writer):
        for key, value in {
            "attention.causal": True, "expert_count": 0, "expert_used_count": 0, "pooling_type": 0,
            "rope.scale_linear": 1.0, "rope.scaling.yarn_ext_factor": 1.0, "logit_scale": 1.0,
            "attention.scale": 8**-0.5, "attn_logit_softcapping": 0.0,
        }.items():  # fmt: skip
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)]
            add(f"llama.{key}", value)

    model, plain = tiny_model("llama"), tmp_path / "plain.gguf"
    source = open_gguf(write_gguf(model, tmp_path / "model.gguf", change=change))
    assert source.config == open_gguf(write_gguf(model, plain)).config


@pytest.mark.parametrize(("key", "expected"), [("yarn_attn_factor", 0.8), ("attn_factor", 0.8 * (0.1 * np.log(4) + 1))])
def test_yarn_attention_factor_under_either_key(key, expected, tmp_path):
    """Absolute, as llama.cpp's converter writes it, or relative to YaRN's default, as llama.cpp reads it."""

    def change(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)
        writer.add_float32(f"llama.rope.scaling.{key}", 0.8)

    source = open_gguf(write_gguf(tiny_model("llama-yarn"), tmp_path / "model.gguf", change=change))
    assert source.config.attention_factor == pytest.approx(expected)


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_attention_factor_without_yarn(factor, tmp_path):
    """llama.cpp multiplies cosines and sines by the factor with any scaling."""

    def change(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(factor)
        writer.add_rope_scaling_attn_factors(0.8)

    config = open_gguf(write_gguf(tiny_model("llama"), tmp_path / "model.gguf", change=change)).config
    plain = open_gguf(write_gguf(tiny_model("llama"), tmp_path / "plain.gguf")).config
    assert config.attention_factor == pytest.approx(0.8)
    np.testing.assert_allclose(config.inv_freq, np.array(plain.inv_freq) / factor)


def test_sizes_by_layer(tmp_path):
    """Sizes per layer are accepted if they are all equal."""
    model = tiny_model("llama")
    path = write_gguf(model, tmp_path / "same.gguf", change=lambda w: None)
    data = path.read_bytes()
    assert open_gguf(path).config.n_kv_heads == 2
    old = key(b"llama.attention.head_count_kv", 4, struct.pack("<I", 2))
    for sizes, message in (
        ((2, 2), None),
        ((2, 4), ("head_count_kv is [2, 4]", "an integer of at least 1, the")),
    ):
        new = key(b"llama.attention.head_count_kv", 9, struct.pack("<IQII", 4, 2, *sizes))
        # An extra key, of a length that keeps the data aligned to 32.
        filler = key(b"x", 8, text(b" " * (-(len(new) - len(old) + len(key(b"x", 8, text(b"")))) % 32)))
        changed = data.replace(old, new + filler)
        changed = changed[:16] + struct.pack("<Q", struct.unpack("<Q", data[16:24])[0] + 1) + changed[24:]
        path.write_bytes(changed)
        if message is None:
            assert open_gguf(path).config.n_kv_heads == 2
        else:
            assert_raises(WhetValueError, message, open_gguf, path)


def test_values_of_every_type():
    numbers = {0: ("B", 255), 1: ("b", -1), 2: ("H", 65535), 3: ("h", -2), 4: ("I", 2**32 - 1), 5: ("i", -3),
               6: ("f", 0.5), 10: ("Q", 2**64 - 1), 11: ("q", -(2**63)), 12: ("d", 0.1), 7: ("?", True)}  # fmt: skip
    keys, expected = b"", {}
    for kind, (layout, value) in numbers.items():
        keys += key(f"number.{kind}".encode(), kind, struct.pack(f"<{layout}", value))
        keys += key(f"array.{kind}".encode(), 9, struct.pack(f"<IQ2{layout}", kind, 2, value, value))
        expected |= {f"number.{kind}": value, f"array.{kind}": [value, value]}
    keys += key(b"text", 8, text("é".encode())) + key(b"texts", 9, struct.pack("<IQ", 8, 2) + text(b"\xff") + text(b""))
    inner = struct.pack("<IQB", 0, 1, 7) + struct.pack("<IQ", 8, 1) + text(b"x")
    keys += key(b"nested", 9, struct.pack("<IQ", 9, 2) + inner)
    expected |= {"text": "é", "texts": 2, "nested": [[7], 1]}
    data = header(n_keys=len(expected)) + keys
    metadata, tensors = parse_gguf(np.frombuffer(data + bytes(32), np.uint8), "here")
    assert {**metadata, "texts": len(metadata["texts"]), "nested": [[7], len(metadata["nested"][1])]} == expected
    assert metadata["nested"][1].to_list() == ["x"] and tensors == {}
    with pytest.raises(ValueError, match=mentions("has a text that", "UTF-8", "'\\xff'")):
        metadata["texts"].to_list()


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 1500), byte=st.integers(0, 255))
def test_mutated_metadata_bytes_are_safe(small, tmp_path, at, byte):
    """Opening succeeds or raises a WhetValueError."""
    data = bytearray(small)
    data[at] = byte
    try:
        source = opened(bytes(data), tmp_path)
    except WhetValueError:
        return
    assert all(row_slice.tensor.nbytes >= 0 for row_slice in source.slices())


def test_metadata_and_tensors_match_the_gguf_package(tmp_path):
    model = tiny_model("llama-yarn", **rope("default"))
    path = write_gguf(model, tmp_path / "model.gguf", F16)
    ours, theirs = read_gguf(path, "here"), gguf.GGUFReader(path)
    assert ours.tensors.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        stored = ours.tensors[tensor.name]
        np.testing.assert_array_equal(stored.tensor, tensor.data)
        assert stored.shape == tuple(tensor.shape[::-1].tolist())
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            value = field.contents()
            is_texts = isinstance(value, list) and isinstance(value[0], str)
            assert (ours.metadata[name].to_list() if is_texts else ours.metadata[name]) == value


def test_rope_theta_of_layers_with_a_window(tmp_path):
    """Newer files have this key; a family without such layers rejects it."""
    path = write_gguf(
        tiny_model("gemma3"), tmp_path / "1.gguf", change=lambda w: w.add_float32("gemma3.rope.freq_base_swa", 400.0)
    )
    config = open_gguf(path).config
    assert config.local_inv_freq[1] == pytest.approx(400**-0.25) and config.inv_freq[1] != config.local_inv_freq[1]
    path = write_gguf(
        tiny_model("llama"), tmp_path / "2.gguf", change=lambda w: w.add_float32("llama.rope.freq_base_swa", 400.0)
    )
    assert_raises(WhetValueError, ("llama.rope.freq_base_swa is 400.0", "none"), open_gguf, path)
