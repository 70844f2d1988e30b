"""Tokenizers of GGUF files give the ids of the libraries that they were trained with, whoever asks for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from tests.models.tokenizers import vocab_files
from tests.models.tokenizers.texts import make_texts
from tests.models.tokenizers.vocab_files import CHAT, byte_level_keys
from tests.processes import printed_by
from tests.raising import mentions
from tests.real.compare_tokenizers import HASHES, hashes, texts_of
from tests.real.model import real_model

from whet.data.rows import tokenize_prompt
from whet.errors import WhetValueError
from whet.models.tokenizers import GGUFTokenizer, load_tokenizer, open_tokenizer, read_tokenizer
from whet.models.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from whet.models.tokenizers.token_texts import read_token_texts

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def piece_keys(tokens: list[str], types: list[int], **keys: Any) -> dict[str, Any]:
    """Make a SentencePiece BPE vocabulary in which earlier pieces have better scores."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "smollm", "deepseek-v3", "gpt-4o", "superbpe"])
def test_byte_level_ids_match_the_training_library(pre: str, tmp_path: Path) -> None:
    trained = vocab_files.train_byte_level(list(PRE_TOKENIZERS[pre].patterns))
    keys = vocab_files.byte_level_metadata(trained, pre)
    tokenizer = read_tokenizer(vocab_files.write_file(tmp_path / "a.gguf", keys))
    texts = make_texts(1500, ["<|im_end|>", "<|tool|>", "<s>"])
    assert [tokenizer.encode(text) for text in texts] == [each.ids for each in trained.encode_batch(texts)]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts
    assert len(tokenizer) == trained.get_vocab_size()


@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize("add_dummy_prefix", [True, False])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_ids_match_sentencepiece(kind: str, add_dummy_prefix: bool, byte_fallback: bool, tmp_path: Path) -> None:
    options = {"add_dummy_prefix": add_dummy_prefix, "byte_fallback": byte_fallback}
    model = vocab_files.train_sentencepiece(kind, **options)
    tokenizer = read_tokenizer(vocab_files.write_file(tmp_path / "a.gguf", vocab_files.sentencepiece_metadata(model)))
    trained = sentencepiece.SentencePieceProcessor(model_proto=model)
    texts = make_texts(1500, [] if add_dummy_prefix else ["<tool>"])
    pairs = [(tokenizer.encode(text), trained.encode(text)) for text in texts]
    if kind == "unigram":  # of two segmentations with the same sum either may come
        assert sum(ours != theirs for ours, theirs in pairs) < 0.02 * len(pairs)
        pairs = [(sorted(ours), sorted(theirs)) for ours, theirs in pairs]
    assert [ours for ours, _ in pairs] == [theirs for _, theirs in pairs]
    if byte_fallback:
        spaced = [text.replace("\u2581", " ") for text in texts]  # which is how it writes a space
        assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == spaced


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_normalisation_collapses_spaces_and_folds_width(kind: str, tmp_path: Path) -> None:
    model = vocab_files.train_sentencepiece(kind, normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True)
    tokenizer = read_tokenizer(vocab_files.write_file(tmp_path / "a.gguf", vocab_files.sentencepiece_metadata(model)))
    trained = sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in ("  ｗｏｒｄ   and\tword ", "ﬁne", "a\u3000b", "½"):
        assert tokenizer.encode(text) == trained.encode(text), text


def test_space_prefix_is_added_after_each_special_token() -> None:
    tokenizer = GGUFTokenizer(piece_keys(["<unk>", "<s>", "</s>", "▁a", "a", "▁"], [2, 3, 3, 1, 1, 1]))
    assert tokenizer.encode("a</s>a") == [1, 3, 2, 3]


def test_merges_do_not_produce_control_tokens() -> None:
    tokens = ["<unk>", "<s>", "</s>", "<", "s", ">", "<s", "▁"]
    tokenizer = GGUFTokenizer(piece_keys(tokens, [2, 3, 3, 1, 1, 1, 1, 1], add_space_prefix=False))
    tokenizer.backend.encode_special_tokens = True  # special tokens in a text are text
    assert tokenizer.encode("<s>", add_special_tokens=False) == [6, 5]


def test_unknown_characters_become_byte_tokens() -> None:
    tokens = ["<unk>", "<s>", "</s>", *BYTES, "a"]
    types = [2, 3, 3, *[6] * 256, 1]
    with_bytes = GGUFTokenizer(piece_keys(tokens, types, add_space_prefix=False))
    assert with_bytes.encode("aé", add_special_tokens=False) == [259, 3 + 0xC3, 3 + 0xA9]
    assert with_bytes.decode([259, 3 + 0xC3, 3 + 0xA9]) == "aé"
    without = GGUFTokenizer(piece_keys(["<unk>", "<s>", "</s>", "a"], [2, 3, 3, 1], add_space_prefix=False))
    assert without.encode("aéé", add_special_tokens=False) == [3, 0]


def test_phi3_special_tokens_strip_following_spaces() -> None:
    keys = piece_keys(["<unk>", "<s>", "</s>", "<|end|>", "a"], [2, 3, 3, 3, 1], add_space_prefix=False)
    text = "<|end|> \n a<s>"
    assert GGUFTokenizer(keys).encode(text, add_special_tokens=False) == [3, 0, 4, 1]
    assert GGUFTokenizer({**keys, "general.name": "My Phi-3 mini"}).encode(text, add_special_tokens=False) == [3, 4, 1]


@pytest.mark.parametrize(
    ("adds", "expected"), [((True, False), [0]), ((False, True), [1]), ((True, True), [0, 1]), ((False, False), [])]
)
def test_bos_and_eos_follow_the_file(adds: tuple[bool, bool], expected: list[int]) -> None:
    keys = byte_level_keys(add_bos_token=adds[0], add_eos_token=adds[1])
    tokenizer = GGUFTokenizer(keys)
    assert tokenizer("")["input_ids"] == expected
    assert tokenizer.encode("a", add_special_tokens=False) == tokenizer.encode("a")[adds[0] : 1 + adds[0]]
    assert tokenizer.to_transformers()("")["input_ids"] == expected


def test_add_bos_defaults_to_the_pre_tokenizers() -> None:
    keys = byte_level_keys("llama-bpe")
    del keys["tokenizer.ggml.add_bos_token"]
    assert GGUFTokenizer(keys)("")["input_ids"] == [0]


def test_empty_tokens_get_names() -> None:
    tokenizer = GGUFTokenizer(piece_keys(["<unk>", "<s>", "</s>", "", "a"], [2, 3, 3, 5, 1]))
    assert tokenizer.vocabulary.tokens[3] == "[EMPTY_3]"


@pytest.mark.parametrize(
    ("tokens", "keys", "stops"),
    [
        (["a", "<|im_end|>", "<|endoftext|>"], {}, [1, 2]),
        (["a", "b", "c"], {"eos_token_id": 1, "eot_token_id": 2}, [1, 2]),
        (["a", "b", "<|end|>"], {"eom_token_id": 0}, [0, 2]),
        (["<|end|>", "<|return|>", "<|call|>"], {}, [1, 2]),  # Harmony: <|end|> ends a message
        (["<|end|>", "<|flush|>", "<|calls|>"], {}, [1, 2]),
        (["</s>", "<|tool_response>", "a"], {}, [1]),  # Gemma 4: </s> is HTML
        (["<|fim_pad|>", "<|repo_name|>", "<|fim_prefix|>"], {}, [0, 1]),
    ],
)
def test_stop_tokens(tokens: list[str], keys: dict[str, int], stops: list[int]) -> None:
    keys = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    made = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": [], **keys}
    assert GGUFTokenizer(made).stop_token_ids == stops


def test_ordinary_padding_token_is_not_special() -> None:
    keys = byte_level_keys(padding_token_id=5)
    tokenizer = GGUFTokenizer(keys)
    assert (tokenizer.pad_token_id, tokenizer.to_transformers().pad_token_id) == (None, None)
    assert tokenizer.decode([5], skip_special_tokens=True) == tokenizer.decode([5]) != ""


def test_transformers_has_the_same_ids_texts_and_special_tokens(tmp_path: Path) -> None:
    path = vocab_files.write_file(tmp_path / "a.gguf", byte_level_keys("qwen2", add_bos_token=True))
    ours, theirs = read_tokenizer(path), open_tokenizer(path)
    assert isinstance(theirs, transformers.PreTrainedTokenizerFast)
    theirs.save_pretrained(tmp_path / "folder")
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    for text in make_texts(200, ["<|im_end|>", "<|tool|>"]):
        ids = ours(text)["input_ids"]
        for other in (theirs, saved):
            assert other(text)["input_ids"] == ids
            assert other.decode(ids, skip_special_tokens=True) == ours.decode(ids, skip_special_tokens=True)
    for other in (theirs, saved):
        assert (other.bos_token_id, other.eos_token_id, other.pad_token_id) == (0, 1, None)
        assert other.special_tokens_map == ours.special_tokens_map
        assert other.chat_template == CHAT
        assert len(other) == len(ours)


@pytest.mark.parametrize("options", [{"add_generation_prompt": True}, {"continue_final_message": True}, {}])
def test_template_ids_match_transformers(options: dict[str, bool]) -> None:
    ours = GGUFTokenizer(byte_level_keys())
    theirs = ours.to_transformers()
    messages = [
        {"role": "user", "content": " héllo <|im_end|> "},
        {"role": "assistant", "content": "well ", "name": None},
    ]
    ids = ours.apply_chat_template(messages, return_dict=False, **options)
    assert ids == theirs.apply_chat_template(messages, return_dict=False, **options)
    assert ours.apply_chat_template(messages, **options) == {"input_ids": ids}
    text = ours.apply_chat_template(messages, tokenize=False, **options)
    assert text == theirs.apply_chat_template(messages, tokenize=False, **options)


def test_saved_tokenizer_is_read_by_transformers(tmp_path: Path) -> None:
    keys = byte_level_keys(add_bos_token=True)
    for folder, more in (("one", {}), ("several", {"tokenizer.chat_template.tool_use": "{{ tools[0].name }}"})):
        ours = GGUFTokenizer(keys | more)
        ours.save_pretrained(tmp_path / folder)
        loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
        assert loaded("a text").input_ids == ours.encode("a text")
        assert loaded.special_tokens_map == ours.special_tokens_map
        assert (loaded.eos_token_id, loaded.chat_template) == (ours.eos_token_id, ours.chat_template)


def test_data_rows_accept_either_tokenizer() -> None:
    ours = GGUFTokenizer(byte_level_keys(add_bos_token=True))
    theirs = ours.to_transformers()
    for row in ({"prompt": "a text"}, {"prompt": ""}, {"prompt": [{"role": "user", "content": "a"}]}):
        assert tokenize_prompt(row, ours) == tokenize_prompt(row, theirs)


def test_several_templates_are_found_by_name() -> None:
    keys = byte_level_keys() | {"tokenizer.chat_template.tool_use": "{{ tools[0].name }}"}
    tokenizer = GGUFTokenizer(keys)
    messages = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(messages, tools=[{"name": "f"}], tokenize=False) == "f"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<s><|user|>a<|im_end|>\n"
    assert tokenizer.to_transformers().apply_chat_template(messages, tokenize=False) == "<s><|user|>a<|im_end|>\n"


def test_load_tokenizer_of_a_folder_and_of_a_file(tmp_path: Path) -> None:
    path = vocab_files.write_file(tmp_path / "a.gguf", byte_level_keys())
    open_tokenizer(path).save_pretrained(tmp_path / "folder")
    ids = read_tokenizer(path)("hello")["input_ids"]
    assert (
        load_tokenizer(path)("hello")["input_ids"] == load_tokenizer(tmp_path / "folder")("hello")["input_ids"] == ids
    )
    with pytest.raises(WhetValueError, match=mentions("load_tokenizer: ", "none'", "not exist")):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(WhetValueError, match=mentions("load_tokenizer", "transformers", tmp_path)):
        load_tokenizer(tmp_path)


def test_reading_a_tokenizer_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    path = vocab_files.write_file(tmp_path / "a.gguf", byte_level_keys())
    code = (
        "import sys; from whet.models.tokenizers import read_tokenizer; "
        f"read_tokenizer({str(path)!r}).apply_chat_template([{{'role': 'user', 'content': 'a'}}]); "
        "print({'transformers', 'torch'} & sys.modules.keys())"
    )
    assert printed_by(code) == "set()\n"


def test_contradictory_options_are_rejected() -> None:
    tokenizer = GGUFTokenizer(byte_level_keys())
    with pytest.raises(WhetValueError, match=mentions("clean_up_tokenization_spaces")):
        tokenizer.decode([5], clean_up_tokenization_spaces=True)
    with pytest.raises(WhetValueError, match=mentions("add_generation_prompt and continue_final_message")):
        tokenizer.apply_chat_template([], add_generation_prompt=True, continue_final_message=True)
    for options in ({"tokenize": False}, {"return_dict": False}, {"continue_final_message": True}):
        with pytest.raises(WhetValueError, match=mentions("return_assistant_tokens_mask is True", "tokenize=True")):
            tokenizer.apply_chat_template([], return_assistant_tokens_mask=True, **options)
    tokenizer.chat_template = None
    with pytest.raises(WhetValueError, match=mentions("the tokenizer has no chat_template")):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])


def test_ids_of_a_real_file_match_llama_cpp() -> None:
    path = real_model()
    tokenizer = read_tokenizer(path)
    theirs = json.loads(HASHES.read_text())[path.name]
    assert hashes(texts_of(tokenizer), lambda text: tokenizer.encode(text, add_special_tokens=False)) == theirs


@pytest.mark.parametrize("kind", [vocab_files.USER_DEFINED, vocab_files.CONTROL])
def test_special_tokens_in_the_byte_alphabet_are_literal(kind):
    """DeepSeek has "õ", whose character is also the name of the byte 0xF5."""
    metadata = vocab_files.byte_level_metadata(
        vocab_files.train_byte_level(list(PRE_TOKENIZERS["qwen2"].patterns), 400), "qwen2"
    )
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    types[tokens.index("õ")] = kind
    tokens += ["<é>", "ÿ.*"]
    types += [kind, kind]
    tokenizer = read_tokenizer(metadata)
    text = "é õ<é>日本ÿ.* x"
    ids = tokenizer.encode(text)
    assert {tokens.index("õ"), len(tokens) - 1, len(tokens) - 2} <= set(ids)
    assert tokenizer.decode(ids) == tokenizer.to_transformers().decode(ids) == text
    if kind == vocab_files.USER_DEFINED:
        assert read_token_texts(tokenizer, "here").text_of(ids) == text
