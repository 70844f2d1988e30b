"""Ollama's TEMPLATE, which is only written for chat templates that are plain concatenations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.models.tokenizers import vocab_files
from tests.raising import assert_mentions

from whet.cli.modelfile import parse_template, render_modelfile
from whet.models.tokenizers import read_tokenizer
from whet.models.tokenizers.pre_tokenizers import PRE_TOKENIZERS

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}DEFAULT{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = CHATML.replace("DEFAULT", "")
SMOLLM = CHATML.replace("DEFAULT", "<|im_start|>system\nBe kind<|im_end|>\n")
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|h|>{{ m.role }}<|/h|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|h|>assistant<|/h|>\n\n{% endif %}"
)
GEMMA = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<t>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}</t>\n{% endfor %}"
    "{% if add_generation_prompt %}<t>model\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.role == 'assistant' %}"
    " {{ m.content }}</s>{% else %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
)
IN_THE_USERS_TURN = "{{ '<<' + messages[0].content + '>>' if messages[0].role == 'system' }}" + MISTRAL.replace(
    "{{ raise_exception('no') }}", ""
).replace("[INST] ", "[INST] {{ 'x' if loop.index0 == 1 else '' }}")
OPENS_A_THOUGHT = PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


PHI = PLAIN.removesuffix("{% endif %}") + "{% else %}{{ eos_token }}{% endif %}"


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    trained = vocab_files.train_byte_level(list(PRE_TOKENIZERS["qwen2"].patterns), 400)
    return vocab_files.byte_level_metadata(trained, "qwen2")


def tokenizer_of(metadata: dict[str, Any], template: str | None, **keys: Any) -> Any:
    given = {} if template is None else {"tokenizer.chat_template": template}
    return read_tokenizer({**metadata, **given, **{f"tokenizer.ggml.{key}": value for key, value in keys.items()}})


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            PLAIN,
            'TEMPLATE """{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}'
            "{{ if .Prompt }}<|im_start|>user\n{{ .Prompt }}<|im_end|>\n{{ end }}"
            '<|im_start|>assistant\n{{ .Response }}<|im_end|>\n"""\n',
        ),
        (
            LLAMA,
            'TEMPLATE """{{ if .System }}<|h|>system<|/h|>\n\n{{ .System }}<|eot|>{{ end }}'
            "{{ if .Prompt }}<|h|>user<|/h|>\n\n{{ .Prompt }}<|eot|>{{ end }}"
            '<|h|>assistant<|/h|>\n\n{{ .Response }}<|eot|>"""\n',
        ),
        (
            GEMMA,
            'TEMPLATE """{{ if .Prompt }}<t>user\n{{ .Prompt }}</t>\n{{ end }}<t>model\n{{ .Response }}</t>\n"""\n',
        ),
    ],
)
def test_plain_concatenations_as_go_templates(template, expected, metadata):
    text, limitation = render_modelfile(Path("m.gguf"), tokenizer_of(metadata, template, add_bos_token=True))
    assert text.startswith(f"FROM ./m.gguf\n{expected}PARAMETER stop ") and not limitation


def test_default_system_message(metadata):
    tokenizer = tokenizer_of(metadata, SMOLLM)
    assert '"""\nSYSTEM """Be kind"""\nPARAMETER' in render_modelfile(Path("m.gguf"), tokenizer)[0]
    template = parse_template(tokenizer)
    assert template is not None and template.system == ("<|im_start|>system\n", "<|im_end|>\n")


@pytest.mark.parametrize(
    "template",
    [
        IN_THE_USERS_TURN,
        OPENS_A_THOUGHT,
        PLAIN + "{{ strftime_now('%Y') }}",
        PLAIN.replace("im_", "{{'{{'}}"),
        "{{ messages[0].content }}",
        LLAMA.replace("bos_token", "'first'"),
    ],
)
def test_other_templates_are_omitted_with_a_note(template, metadata):
    text, limitation = render_modelfile(Path("m.gguf"), tokenizer_of(metadata, template))
    assert "TEMPLATE" not in text
    assert_mentions(limitation, "chat template", "Modelfile has no TEMPLATE", "Ollama")


def test_eos_after_a_conversation_is_not_part_of_a_message(metadata):
    assert parse_template(tokenizer_of(metadata, PHI)) == parse_template(tokenizer_of(metadata, PLAIN))


def test_without_a_chat_template(metadata):
    assert render_modelfile(Path("m.gguf"), tokenizer_of(metadata, None)) == (
        'FROM ./m.gguf\nPARAMETER stop "<|im_end|>"\n',
        "",
    )
