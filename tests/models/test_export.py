"""Exported GGUF files: against the folders and files they are made from, and as Whet, gguf and llama.cpp read them."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.engine.tiny_models import CASES, family_name, logits_of, rope, tiny_model, token_ids
from tests.gguf_files import values_by_module, values_by_slot
from tests.models.tokenizers import vocab_files
from tests.models.tokenizers.texts import make_texts
from tests.raising import assert_raises
from tests.tiny import with_lora
from tokenizers import AddedToken, Regex, pre_tokenizers

import whet
from whet.engine import Engine
from whet.errors import DiskFullError, WhetValueError
from whet.models import gguf_writer
from whet.models.architecture import find_difference
from whet.models.export import export_gguf, read_adapters
from whet.models.families import FAMILIES, model_config
from whet.models.formats import FILE_TYPES, TABLE
from whet.models.gguf_keys import as_stored
from whet.models.packed_base import pack_base
from whet.models.slots import locate_lora
from whet.models.sources.folder import open_folder
from whet.models.sources.gguf import open_gguf
from whet.models.sources.gguf_container import read_gguf
from whet.models.sources.gguf_model import read_gguf_config
from whet.models.tokenizers import read_tokenizer
from whet.models.tokenizers.pre_tokenizers import PRE_TOKENIZERS

N_TOKENS = 400
N_ROWS = 416
NOT_IN_GGUF = {
    "qwen2-windows": "windows",
    "qwen3-biases-windows": "windows",
    "llama-gelu": "activation",
    "gpt2-untied-unscaled": "attention_scale",
    "gpt2-reordered": "activation",
    "granite_swa-bases": "local_layers",
    "gemma2-kinds": "attention biases in gemma2",
    "gemma2-attention": "logits_softcap",
    "gemma3-kinds": "attention biases in gemma3",
    "olmo2-one-head": "attention biases in olmo2",
    "smollm3": "rope_layers",
    "smollm3-windows": "windows",
    "exaone4-windows": "windows",
    "ernie4_5-biases-yarn": "attention biases in ernie4_5",
    "arcee-biases": "attention biases in arcee",
    "hunyuan-alpha": "attention biases in hunyuan-dense",
    "qwen3_5_text-sizes": "attention biases in qwen35",
    "olmoe-normalised": "n_kv_heads",
    "qwen3_moe-dense": "attention biases in qwen3moe",
    "lfm2_moe-plain": "router_normalised",
    "granite4-experts": "rotary_dim",
    "nemotron_h-mixed": "layers: MLPs and mixtures",
    "gemma4-plain": "attention biases in gemma4",
}
"""Cases with options that GGUF cannot express."""


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return vocab_files.train_byte_level(list(PRE_TOKENIZERS["qwen2"].patterns), N_TOKENS)


def save(model: Any, tokenizer: Any, folder: Path, **settings: Any) -> Path:
    """Write a Hugging Face folder."""
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, **settings}))
    return folder


def assert_same_model(ours: Any, theirs: Any, model_type: str) -> None:
    """Compare a file with its folder; the file also has the tensors that llama.cpp requires."""
    assert find_difference(ours.config, as_stored(theirs.config, FAMILIES[model_type])) is None
    values = values_by_module if ours.config.delta_tiled else values_by_slot
    found, expected = values(ours), values(theirs)
    assert expected.keys() <= found.keys()
    for slot in found:
        needed = expected["embedding"] if slot == "head" else np.zeros_like(found[slot])
        np.testing.assert_array_equal(found[slot], expected.get(slot, needed), err_msg=slot)


@pytest.mark.parametrize("case", CASES)
def test_float32_keeps_every_bit_of_every_family(case, tokenizer, tmp_path):
    folder = save(tiny_model(case, vocab_size=N_ROWS), tokenizer, tmp_path / "model")
    out = tmp_path / "model.gguf"
    if case in NOT_IN_GGUF:
        facts = ("GGUF", NOT_IN_GGUF[case])
        return assert_raises(WhetValueError, facts, export_gguf, folder, out, "f32")
    if FAMILIES[family_name(case)].gguf is None:
        return assert_raises(WhetValueError, ("GGUF", "model_type", "llama"), export_gguf, folder, out, "f32")
    export_gguf(folder, out, "f32")
    assert_same_model(open_gguf(out), open_folder(folder), family_name(case))
    return None


DENSE_TYPES = [name for name, mixture in FILE_TYPES.items() if not mixture.experts]


@pytest.mark.parametrize("name", DENSE_TYPES)
def test_every_tensor_type(name, tokenizer, tmp_path):
    """Tensors equal ``whet.quantize``'s, with rows of 256, and of 288, which blocks of 256 do not divide."""
    model = tiny_model("llama", vocab_size=N_ROWS, hidden_size=256, intermediate_size=288, head_dim=64)
    folder = save(model, tokenizer, tmp_path / "model")
    written = export_gguf(folder, tmp_path / "model.gguf", name)
    assert written.size_bytes == (tmp_path / "model.gguf").stat().st_size
    exact = values_by_slot(open_folder(folder))
    file, source = read_gguf(tmp_path / "model.gguf", "here"), open_gguf(tmp_path / "model.gguf")
    assert file.metadata["general.file_type"] == FILE_TYPES[name].file_type
    for row_slice in source.slices():
        values = exact[row_slice.slot][row_slice.first_row : row_slice.first_row + len(row_slice.tensor)]
        if not TABLE[row_slice.format].is_float:
            np.testing.assert_array_equal(row_slice.tensor, whet.quantize(values, row_slice.format).data)
        elif row_slice.format == "float16":
            np.testing.assert_array_equal(row_slice.tensor, values.astype(np.float16))
        elif row_slice.format == "bfloat16":
            np.testing.assert_array_equal(
                row_slice.tensor, torch.tensor(values).bfloat16().view(torch.uint16).numpy(), err_msg=row_slice.slot
            )
        else:
            np.testing.assert_array_equal(row_slice.tensor, values)
    assert sum(written.formats.values()) == len(file.tensors)
    down = TABLE[file.tensors["blk.0.ffn_down.weight"].format].block_length
    assert down <= 32 and file.tensors["blk.0.attn_norm.weight"].format == "float32"
    for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors:  # the package finds every tensor in its place
        kind = TABLE[file.tensors[tensor.name].format].gguf_name
        assert tensor.tensor_type.name == kind and tensor.n_bytes == file.tensors[tensor.name].tensor.nbytes


def test_tensors_that_llama_cpp_requires_are_added(tokenizer, tmp_path):
    """A tied head gets the type of an untied one, from a folder and from a file."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": True}
    folder = save(tiny_model("phi", vocab_size=N_ROWS, **sizes), tokenizer, tmp_path / "model")
    export_gguf(folder, tmp_path / "f32.gguf", "f32")
    export_gguf(folder, tmp_path / "a.gguf", "q4_k_m")
    export_gguf(tmp_path / "f32.gguf", tmp_path / "b.gguf", "q4_k_m")
    exact = values_by_slot(open_folder(folder))["embedding"]
    for name in "ab":
        tensors = read_gguf(tmp_path / f"{name}.gguf", "here").tensors
        for tensor, format in (("token_embd", "q4_k"), ("output", "q6_k")):
            assert tensors[f"{tensor}.weight"].format == format
            np.testing.assert_array_equal(tensors[f"{tensor}.weight"].tensor, whet.quantize(exact, format).data)


def test_untied_head_that_llama_cpp_lacks_is_rejected(tokenizer, tmp_path):
    folder = save(tiny_model("gemma2", vocab_size=N_ROWS, tie_word_embeddings=False), tokenizer, tmp_path / "model")
    message = "head in gemma2"
    assert_raises(WhetValueError, message, export_gguf, folder, tmp_path / "m.gguf")


@pytest.mark.parametrize("name", DENSE_TYPES)
def test_file_exported_in_its_types_keeps_its_bytes(name, tokenizer, tmp_path):
    model = tiny_model("llama-llama3", vocab_size=N_ROWS, hidden_size=256, intermediate_size=288)
    export_gguf(save(model, tokenizer, tmp_path / "model"), tmp_path / "one.gguf", name)
    export_gguf(tmp_path / "one.gguf", tmp_path / "two.gguf", name)
    one, two = (read_gguf(tmp_path / f"{which}.gguf", "here") for which in ("one", "two"))
    assert one.tensors.keys() == two.tensors.keys() and one.metadata.keys() == two.metadata.keys()
    for key in one.tensors:
        assert one.tensors[key].format == two.tensors[key].format
        np.testing.assert_array_equal(one.tensors[key].tensor, two.tensors[key].tensor, err_msg=key)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("case", ["llama-biases-tied", "qwen3", "gpt_neox", "phi3-longrope"])
def test_engine_logprobs_of_the_export_match(case, name, tokenizer, tmp_path):
    model = tiny_model(case, vocab_size=N_ROWS).to({"f16": torch.float16, "bf16": torch.bfloat16}.get(name))
    folder, ids = save(model, tokenizer, tmp_path / "model"), token_ids(12)[0].tolist()
    export_gguf(folder, tmp_path / "model.gguf", name)
    found = []
    for path in (folder, tmp_path / "model.gguf"):
        with Engine.from_pretrained(path, weights="float32", embedding="float32", head="float32") as engine:
            found.append(engine.logprobs([ids])[0])
    np.testing.assert_allclose(*found, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", ["llama", "gpt_neox", "phi3", "gemma2"])
def test_adapters_are_merged(case, tokenizer, tmp_path):
    """Merged weights match PEFT's, also in reordered rows, and so do trained norms."""
    model = tiny_model(case, vocab_size=N_ROWS)
    folder = save(model, tokenizer, tmp_path / "model")
    targets = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt_neox": ["query_key_value"], "phi3": ["qkv_proj"]}
    norms = ["final_layer_norm"] if case == "gpt_neox" else ["norm"]
    adapted = with_lora(model, b_std=0.1, target_modules=targets.get(case, ["q_proj"]), modules_to_save=norms)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name:
                parameter.uniform_(0.5, 1.5)
    adapted.save_pretrained(tmp_path / "adapter")
    adapters = read_adapters(tmp_path / "adapter", open_folder(folder), "here")
    export_gguf(folder, tmp_path / "model.gguf", "f32", adapters=adapters)
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    found, expected = (
        values_by_slot(open_gguf(tmp_path / "model.gguf")),
        values_by_slot(open_folder(tmp_path / "merged")),
    )
    for slot in expected:
        np.testing.assert_allclose(found[slot], expected[slot], rtol=0, atol=1e-6, err_msg=slot)
    plain = values_by_slot(open_folder(folder))
    assert any((found[slot] != plain[slot]).any() for slot in plain)


@pytest.mark.parametrize("packed", [False, True])
def test_adapter_of_a_tied_head_does_not_change_the_embedding(packed, tokenizer, tmp_path):
    """The file has an untied head, from floats and from a packed base."""
    folder = save(tiny_model("qwen2", vocab_size=N_ROWS), tokenizer, tmp_path / "model")
    source = pack_base(open_folder(folder), weights="float32").source() if packed else open_folder(folder)
    a, b = np.ones((1, 32), np.float32), np.ones((N_ROWS, 1), np.float32)
    adapters = locate_lora(source.config, source.targets["lm_head"], a, b, 0.5, "here")
    export_gguf(folder, tmp_path / "m.gguf", "f32", source=source, adapters=adapters)
    found, plain = values_by_slot(open_gguf(tmp_path / "m.gguf")), values_by_slot(open_folder(folder))
    np.testing.assert_array_equal(found["embedding"], plain["embedding"])
    np.testing.assert_allclose(found["head"], plain["embedding"] + 0.5, rtol=1e-6)


def test_adapter_of_a_tied_head_is_rejected_without_an_untied_head(tokenizer, tmp_path):
    folder = save(tiny_model("gemma2", vocab_size=N_ROWS), tokenizer, tmp_path / "model")
    source = open_folder(folder)
    a, b = np.ones((1, 32), np.float32), np.ones((N_ROWS, 1), np.float32)
    adapters = locate_lora(source.config, source.targets["lm_head"], a, b, 1.0, "here")
    message = "head in gemma2"
    assert_raises(WhetValueError, message, export_gguf, folder, tmp_path / "m.gguf", adapters=adapters)


_OF_LLAMA = {case: CASES[f"llama-{case}"][1] for case in ("llama3", "longrope", "yarn-mscale")}


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        ("qwen2", _OF_LLAMA["llama3"], "rope_type 'llama3' in qwen2"),
        ("smollm3-interval", _OF_LLAMA["longrope"], "rope_type 'longrope' in smollm3"),
        ("olmo2", _OF_LLAMA["yarn-mscale"], "truncate in olmo2"),
        ("qwen2", {"head_dim": 12}, "hidden_dim, 32"),
        (
            "gemma3",
            {
                "rope_parameters": {
                    "full_attention": rope("yarn", factor=4.0, attention_factor=0.8)["rope_parameters"],
                    "sliding_attention": rope("default")["rope_parameters"],
                }
            },
            "attention_factor: in gemma3",
        ),
    ],
)
def test_options_that_gguf_cannot_express_are_rejected(case, options, message, tokenizer, tmp_path):
    folder = save(tiny_model(case, vocab_size=N_ROWS, **options), tokenizer, tmp_path / "model")
    assert_raises(WhetValueError, ("GGUF", message), export_gguf, folder, tmp_path / "m.gguf", "f32")


@pytest.mark.parametrize("case", ["llama-longrope", "phi3-longrope", "granite"])
def test_rope_scaling_type_is_written(case, tokenizer, tmp_path):
    """llama.cpp needs the key to read longrope factors in any architecture except Phi-3."""
    folder = save(tiny_model(case, vocab_size=N_ROWS), tokenizer, tmp_path / "model")
    export_gguf(folder, tmp_path / "m.gguf", "f32")
    file = read_gguf(tmp_path / "m.gguf", "here")
    kind = file.metadata.get(f"{file.metadata['general.architecture']}.rope.scaling.type")
    assert kind == ("longrope" if "rope_factors_long.weight" in file.tensors else None)


def test_custom_yarn_ramp_is_written_as_frequencies(tokenizer, tmp_path):
    """llama.cpp ignores beta_fast and beta_slow; a folder converted from the file has the same frequencies."""
    folder = save(tiny_model("llama-yarn-mscale", vocab_size=N_ROWS), tokenizer, tmp_path / "model")
    export_gguf(folder, tmp_path / "m.gguf", "f32")
    file, expected = read_gguf(tmp_path / "m.gguf", "here"), open_folder(folder).config
    assert "rope_freqs.weight" in file.tensors and "llama.rope.scaling.type" not in file.metadata
    for found in (open_gguf(file).config, model_config(read_gguf_config(file)[0])):
        np.testing.assert_allclose(found.inv_freq, expected.inv_freq, rtol=1e-6)
        assert found.attention_factor == pytest.approx(expected.attention_factor)


@pytest.mark.parametrize(("case", "n"), [("mistral", 5), ("starcoder2", 5), ("phi3", 6), ("gemma2", 0), ("llama", 0)])
def test_sliding_windows_that_llama_cpp_ignores_are_noted(case, n, tokenizer, tmp_path):
    folder = save(tiny_model(case, vocab_size=N_ROWS), tokenizer, tmp_path / "model")
    note = export_gguf(folder, tmp_path / "m.gguf", "f32").note
    assert export_gguf(tmp_path / "m.gguf", tmp_path / "again.gguf", "f16").note == note
    assert bool(note) == (n > 0) and (not n or f"beyond {n} tokens it computes another model" in note)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "smollm", "gpt-2", "tekken", "gpt-4o", "deepseek-v3", "qwen35"])
def test_pre_tokenizer_is_found_by_its_patterns(pre, tmp_path):
    trained = vocab_files.train_byte_level(list(PRE_TOKENIZERS[pre].patterns), N_TOKENS)
    made = json.loads(trained.to_str())
    made["model"]["ignore_merges"] = PRE_TOKENIZERS[pre].ignore_merges
    trained = trained.from_str(json.dumps(made))
    export_gguf(save(tiny_model("qwen2", vocab_size=N_ROWS), trained, tmp_path / "m"), tmp_path / "m.gguf", "f32")
    metadata = read_gguf(tmp_path / "m.gguf", "here").metadata
    assert metadata["tokenizer.ggml.pre"] == pre
    written = read_tokenizer(tmp_path / "m.gguf")
    for text in make_texts(2000, seed=2):
        assert written.encode(text) == trained.encode(text).ids, text
    assert (written.bos_token_id, written.eos_token_id) == (0, 1) and written.stop_token_ids == [1]
    assert written.chat_template == "{{ messages[0].content }}" and len(written) == N_ROWS
    assert set(metadata["tokenizer.ggml.token_type"][N_TOKENS + 1 :]) == {5}


@pytest.mark.parametrize(
    "splits",
    [
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    ],
)
def test_pre_tokenizer_steps_without_patterns(splits, tokenizer, tmp_path):
    other = tokenizer.from_str(tokenizer.to_str())
    other.pre_tokenizer = pre_tokenizers.Sequence(splits)
    export_gguf(save(tiny_model("llama", vocab_size=N_ROWS), other, tmp_path / "m"), tmp_path / "m.gguf", "f16")
    assert read_gguf(tmp_path / "m.gguf", "here").metadata["tokenizer.ggml.pre"] == "smollm"


def test_unknown_pre_tokenizer_needs_a_name_from_the_user(tokenizer, tmp_path):
    other = tokenizer.from_str(tokenizer.to_str())
    other.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"[a-f]+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    folder, out = save(tiny_model("llama", vocab_size=N_ROWS), other, tmp_path / "m"), tmp_path / "m.gguf"
    assert_raises(WhetValueError, ("[a-f]+", "Name the nearest with --pre"), export_gguf, folder, out)
    message = "pre is 'qwen'", "llama.cpp"
    assert_raises(WhetValueError, message, export_gguf, folder, out, pre="qwen")
    export_gguf(folder, out, pre="qwen2")
    assert read_gguf(out, "here").metadata["tokenizer.ggml.pre"] == "qwen2"


def test_sentencepiece(tmp_path):
    """SentencePiece BPE from a folder saved by Whet, whose merges encode the scores."""
    options = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    made = vocab_files.sentencepiece_metadata(vocab_files.train_sentencepiece("bpe", **options))
    path = vocab_files.write_file(tmp_path / "v.gguf", made)
    own = read_tokenizer(path)
    model = tiny_model("llama", vocab_size=len(own))
    model.save_pretrained(tmp_path / "m")
    own.to_transformers().save_pretrained(tmp_path / "m")
    export_gguf(tmp_path / "m", tmp_path / "m.gguf", "f32")
    written = read_tokenizer(tmp_path / "m.gguf")
    assert written.vocabulary.kind == own.vocabulary.kind and written.vocabulary.types == own.vocabulary.types
    for text in make_texts(2000, seed=3):
        assert written.encode(text) == own.encode(text), text


def save_phi3(folder: Path, name: str = "", **flags: Any) -> Any:
    """Special tokens of Phi-3 strip the whitespace after them, detected by the name in the file."""
    options = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    made = vocab_files.sentencepiece_metadata(vocab_files.train_sentencepiece("bpe", **options))
    path = vocab_files.write_file(folder.parent / "v.gguf", {**made, "general.name": name or "none"})
    tokenizer = read_tokenizer(path).to_transformers()
    if flags:
        tokenizer.add_tokens([AddedToken("<|user|>", special=True, normalized=False, **flags)])
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize(
    ("folder", "rstrip", "name"),
    [
        ("model", True, "Phi-3 model"),
        ("Phi-3-mini-ft", True, "Phi-3-mini-ft"),
        ("my-phi3", False, "my-Phi 3"),
        ("model", False, "model"),
    ],
)
def test_whitespace_after_special_tokens(folder, rstrip, name, tmp_path):
    """llama.cpp strips it in files with phi-3 in ``general.name``, whatever the folder's name."""
    own = save_phi3(tmp_path / folder, "Phi-3" if rstrip else "")
    export_gguf(tmp_path / folder, tmp_path / "m.gguf", "f16")
    assert read_gguf(tmp_path / "m.gguf", "here").metadata["general.name"] == name
    text = "</s>\nHi there</s>\n"
    assert read_tokenizer(tmp_path / "m.gguf").encode(text) == own.encode(text)


@pytest.mark.parametrize("flag", ["lstrip", "single_word"])
def test_flags_of_special_tokens_that_gguf_cannot_express(flag, tmp_path):
    save_phi3(tmp_path / "m", **{flag: True})
    message = "other tokens", "--pre"
    assert_raises(WhetValueError, message, export_gguf, tmp_path / "m", tmp_path / "m.gguf")


def test_chat_templates_are_read_as_in_transformers(tokenizer, tmp_path):
    folder = save(tiny_model("llama", vocab_size=N_ROWS), tokenizer, tmp_path / "m")
    (folder / "chat_template.jinja").write_bytes(b"{{ messages[0].content }}\r\n\r\nend")
    export_gguf(folder, tmp_path / "m.gguf", "f16")
    assert read_tokenizer(tmp_path / "m.gguf").chat_template == "{{ messages[0].content }}\n\nend"
    (folder / "chat_template.jinja").write_bytes(b"caf\xe9")
    message = "chat_template.jinja cannot be read: .*Save the template as UTF-8"
    assert_raises(WhetValueError, message, export_gguf, folder, tmp_path / "n.gguf")


@pytest.mark.needs("llama_cpp")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", ["llama", "llama-llama3", "llama-yarn", "qwen2", "qwen3", "gpt_neox",
                                  "gpt_neox-serial", "gpt2", "phi3-longrope", "smollm3-interval", "granite", "olmo2",
                                  "gemma2", "gemma3", "starcoder2", "starcoder2-untied", "stablelm",
                                  "stablelm-parallel", "phi"])  # fmt: skip
def test_llama_cpp_opens_the_file(case, tied, tokenizer, tmp_path):
    import llama_cpp

    # llama.cpp allocates at least 256 tokens, for which it uses longrope's long factors.
    # It does not support windows in StarCoder2 and an untied head in Gemma 2.
    own = {"starcoder2": {"sliding_window": None}}.get(case, {})
    tied = tied or case == "gemma2"
    model, ids = tiny_model(case, vocab_size=N_ROWS, tie_word_embeddings=tied, **own), token_ids(24)
    export_gguf(save(model, tokenizer, tmp_path / "m"), tmp_path / "m.gguf", "f32")
    llama = llama_cpp.Llama(str(tmp_path / "m.gguf"), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    text = "Hello, world!  It's 12:30."
    assert llama.tokenize(text.encode(), add_bos=False) == tokenizer.encode(text).ids
    llama.eval(ids[0].tolist())
    np.testing.assert_allclose(llama.scores[:24], logits_of(model, ids), rtol=0, atol=0.05)
    llama.close()


# --- rejected exports -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tokenizer, tmp_path) -> Path:
    (tmp_path / "out").mkdir()
    return save(tiny_model("llama", vocab_size=N_ROWS), tokenizer, tmp_path / "model")


def refuse(folder: Path, message: str, error: Any = WhetValueError, **options: Any) -> None:
    """Assert that the export raises and changes no file."""
    out = folder.parent / "out"
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert_raises(error, message, export_gguf, folder, out / "m.gguf", **options)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_existing_file_needs_overwrite(folder, tmp_path):
    (tmp_path / "out" / "m.gguf").write_bytes(b"mine")
    refuse(folder, ("m.gguf", "--overwrite"))
    export_gguf(folder, tmp_path / "out" / "m.gguf", overwrite=True)
    open_gguf(tmp_path / "out" / "m.gguf")


def test_unwritable_paths_are_rejected(folder, tmp_path, monkeypatch):
    assert_raises(WhetValueError, ("export_gguf", "nowhere"), export_gguf, folder, tmp_path / "nowhere" / "m.gguf")
    assert_raises(WhetValueError, "out is a folder", export_gguf, folder, tmp_path / "out")
    if Path("/proc/self").is_dir():  # where access() allows everything to root, and nothing can be made
        assert_raises(WhetValueError, "nothing can be written to /proc: ", export_gguf, folder, "/proc/m.gguf")
    monkeypatch.setattr(gguf_writer.os, "access", lambda *_: False)
    refuse(folder, ("nothing can be written to", "out", "Permission denied", "Choose another folder"))


def test_disk_full_leaves_nothing_behind(folder, monkeypatch):
    def write(file: Any, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(gguf_writer, "_write_all", write)
    refuse(folder, "the disk is full", DiskFullError)


def test_damaged_model_leaves_nothing_behind(folder):
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-100])
    refuse(folder, "model.safetensors")
    weights.write_bytes(data)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    refuse(folder, ("model.layers.2.", "missing"))


def test_nan_and_overflow_are_rejected(tokenizer, tmp_path):
    (tmp_path / "out").mkdir()
    model = tiny_model("llama", vocab_size=N_ROWS)
    model.model.layers[1].mlp.up_proj.weight[3, 4] = 1e5
    refuse(save(model, tokenizer, tmp_path / "model"), ("gate_up", "1e+05, beyond", "float16"), quantize="f16")
    model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    for name in ("f32", "f16", "q8_0"):
        refuse(save(model, tokenizer, tmp_path / "model"), ("layers.1.gate_up", "NaN or infinity"), quantize=name)


def test_tokenizer_that_does_not_fit_the_embedding_is_rejected(folder, tmp_path):
    config = json.loads((folder / "tokenizer.json").read_text())
    config["added_tokens"].append({**config["added_tokens"][0], "id": N_ROWS, "content": "<more>"})
    (folder / "tokenizer.json").write_text(json.dumps(config))
    refuse(folder, f"the tokenizer has {N_ROWS + 1} tokens and the embedding {N_ROWS} rows")
    (folder / "tokenizer.json").unlink()
    refuse(folder, ("has no tokenizer.json", "Save the tokenizer there"))


def test_unknown_file_type_is_rejected(folder):
    refuse(folder, ("quantize is 'q3_k_m'", "f32, f16"), quantize="q3_k_m")
