"""A tiny random Llama with a byte tokenizer, saved as a Hugging Face folder, and data for it."""

import json
import weakref
from pathlib import Path

import pytest

from whet import memory
from whet.cli import main

ROOT = Path(__file__).parents[2]
ROWS = [{"prompt": f"spell {letter}:", "completion": letter * 3, "answer": letter} for letter in "abcdefgh"]
PAIRS = [{"prompt": f"spell {letter}:", "chosen": letter * 2, "rejected": "z"} for letter in "abcdefgh"]

LETTERS = """
def share(completions, answer):
    return [text.count(right) + sum(map(ord, text)) % 97 / 97 for text, right in zip(completions, answer)]
"""

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def no_holders(monkeypatch):
    """Exclude memory of engines in fixtures of other modules from reports."""
    monkeypatch.setattr(memory, "_holders", weakref.WeakSet())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Folder of the model of ``write_tiny_model``."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def write_tiny_model(folder, chat_template=CHAT_TEMPLATE, max_position=512):
    """Write a model with 2 layers, hidden size 32, a token per byte, and a chat template; return its folder."""
    import torch
    from tests.tiny import tiny_llama
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = chat_template
    torch.manual_seed(0)
    model = tiny_llama(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_position,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_gguf(tiny_model):
    """GGUF file of the tiny model and its tokenizer, except that "qz" is a token instead of the byte 0xAD."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    return write_tiny_gguf(model, tiny_model, tiny_model.parent / "tiny.gguf")


def write_tiny_gguf(model, folder, path, *types):
    """Write a model as GGUF with the tokenizer of ``folder``, except that the last token is "qz"."""
    from tests.gguf_files import write_gguf
    from transformers import AutoTokenizer

    vocab = AutoTokenizer.from_pretrained(folder).get_vocab()
    tokens = [*sorted(vocab, key=lambda token: vocab[token])[:-1], "qz"]
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * 256,
        "tokenizer.ggml.merges": ["q z"],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    return write_gguf(model, path, *types, keys=keys)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def files(tmp_path, tiny_model):
    """Write rows, pairs and a reward function; return a function that makes the flags of a named run."""

    def flags(name, data="rows.jsonl", **settings):
        given = {"model": tiny_model, "data": tmp_path / data, "output_dir": tmp_path / name, "batch_size": 2}
        given |= settings
        return [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]

    write_rows(tmp_path / "rows.jsonl", ROWS)
    write_rows(tmp_path / "pairs.jsonl", PAIRS)
    (tmp_path / "letters.py").write_text(LETTERS)
    flags.folder, flags.rows = tmp_path, ROWS
    flags.online = {"reward": f"{tmp_path / 'letters.py'}:share", "max_new_tokens": 4, "learning_rate": 1e-3}
    return flags


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def error_of(capsys):
    """Return a function that runs a failing command and returns its error line; warnings are ignored."""

    def line(*argv):
        capsys.readouterr()
        assert main([str(argument) for argument in argv]) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        errors = [line for line in lines if not line.startswith("whet: warning: ")]
        assert len(errors) == 1, lines
        return errors[0]

    return line
