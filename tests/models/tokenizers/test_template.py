"""Chat templates of strangers: rendered as transformers renders them, within bounds."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from tests.raising import mentions
from transformers.utils.chat_template_utils import render_jinja_template

from whet.errors import WhetTypeError, WhetValueError
from whet.models.tokenizers import template
from whet.models.tokenizers.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "a <b> 'c' é"}, {"role": "assistant", "content": "d\n", "name": None}]

VALUES: dict[str, Any] = {"bos_token": "<s>", "tools": None, "add_generation_prompt": False}


def in_transformers(source: str, **options: Any) -> str:
    plain = [{name: value for name, value in message.items() if value is not None} for message in MESSAGES]
    [rendered], _ = render_jinja_template([plain], chat_template=source, **options, **VALUES)
    return rendered


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m['role'] ~ ':' ~ m.content | trim }}\n{% endfor %}",
        "{%- set ns = namespace(n=0) -%}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
        "{{ messages | tojson }}{{ {'b': 1, 'a': 'é'} | tojson(indent=2, sort_keys=true) }}",
        "{% macro f(x, n=3) %}{{ x * n }}{% endmacro %}{{ f('ab') }}{{ f('a' + 'b', n=2) }}",
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ loop.last }}{% else %}x{% endfor %}",
        "{% for i in range(3) %}  {% if true %}\n  {{ i ** 2 }}{{ '%s-%d' % ('a', 2) }}\n{% endif %}{% endfor %}",
        "{% for k, v in messages[0].items() recursive %}{{ k }}={{ v.split(' ')[0].upper() }}{% endfor %}",
        "{{ bos_token }}{{ messages[1].name is defined }}{{ tools is none }}{{ missing }}{{ [1] + [2] }}",
        "{{ messages[-1]['content'].startswith('d') }}{{ 'x' if 'role' in messages[0] }}{{ dict(a=1) }}",
    ],
)
def test_templates_render_as_in_transformers(source: str) -> None:
    assert ChatTemplate(source).render(MESSAGES, **VALUES) == in_transformers(source)


NONE_IS_TESTED = (
    "{% for m in messages %}{% if m['content'] is none %}call {{ m['tool'] }}{% else %}{{ 'said ' + m['content'] }}"
    "{% endif %};{% endfor %}"
)


def test_content_of_none_is_kept_for_templates_that_require_it() -> None:
    called = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool": "f", "name": None}]
    assert ChatTemplate(NONE_IS_TESTED).render(called) == "said a;call f;"
    # Other templates get no content, and do not print None.
    assert ChatTemplate("{% for m in messages %}{{ m.content }};{% endfor %}").render(called) == "a;;"
    with pytest.raises(WhetValueError, match=mentions("has no attribute 'content'")):
        ChatTemplate(NONE_IS_TESTED).render([{"role": "assistant"}])


@pytest.mark.parametrize("content", ["m.content", "m.content | trim", "'[' ~ m.content ~ ']'"])
def test_the_last_message_stays_open_as_in_transformers(content: str) -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ " + content + " }}</s>{% endfor %}"
    ours = ChatTemplate(source).render(MESSAGES, continue_final_message=True, **VALUES)
    assert ours == in_transformers(source, continue_final_message=True)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}|{% endgeneration %}\n{% endfor %}",
        "{% for m in messages %}\n{%- generation -%}\n {{ m.role }} {%- endgeneration -%} {{ m.content }}{% endfor %}",
        "a{% generation %}\n{% set x = 'b' %}{{ x }}\n{% endgeneration %}{{ x }}{% generation %}{% endgeneration %}c",
        "no marks",
    ],
)
def test_generation_spans_match_transformers(source: str) -> None:
    plain = [{name: value for name, value in message.items() if value is not None} for message in MESSAGES]
    [text], [spans] = render_jinja_template([plain], chat_template=source, return_assistant_tokens_mask=True, **VALUES)
    template = ChatTemplate(source)
    assert template.render(MESSAGES, **VALUES) == text
    assert template.generation_spans(text, MESSAGES, **VALUES) == spans
    assert template.render(MESSAGES, **VALUES) == text


@pytest.mark.parametrize(
    "source",
    [
        "{% set x %}{% generation %}ab{% endgeneration %}{% endset %}{{ x[:20] }}",
        "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
        "{% set x %}{% generation %}a{% endgeneration %}{% endset %}{{ x | length }}",
    ],
)
def test_generation_marks_changed_by_filters_are_rejected(source: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(WhetValueError, match=mentions("{% generation %}")):
        template.generation_spans(template.render(MESSAGES), MESSAGES)


def test_strftime_now() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([]) == str(datetime.date.today().year)


def test_continuing_a_stripped_message() -> None:
    stripping = ChatTemplate("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    assert stripping.render([{"role": "user", "content": "a  "}], continue_final_message=True) == "[a"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for i in range(1000) %}{% for j in range(10000) %}{% endfor %}{% endfor %}", "steps"),
        ("{% for i in range(100000000000) %}{% endfor %}", "steps"),
        ("{% macro f() %}{% for i in 'ab' %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'a' * 100000000000 }}", "steps"),
        ("{{ [1] * 100000000000 }}", "steps"),
        ("{{ 100000000000 * 'a' }}", "steps"),
        ("{{ 10 ** 100000000000 }}", "steps"),
        ("{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "steps"),
        ("{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", "steps"),
        ("{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}", "steps"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|safely"),
        ("{{ messages.__init__.__globals__ }}", "unsafe"),
        ("{{ raise_exception.__globals__.keys() }}", "unsafe"),
        ("{{ '{0.__class__.__mro__}'.format(messages) }}", "unsafe"),
        ("{% set n = namespace(__class__=1) %}", "underscore"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "underscore|unexpected|expected"),
        ("{% include 'x' %}", "loader"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].role }}", "undefined|no element"),
        ("{{ 1 / 0 }}", "zero"),
    ],
)
def test_sandbox_violations_are_rejected(source: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "_MOST_STEPS", 10_000)
    with pytest.raises(WhetValueError, match=rf"(?s)tokenizer\.chat_template: .*({reason}).*Set another chat_template"):
        ChatTemplate(source).render([{"role": "user", "content": "a"}])


def test_budget_applies_per_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "_MOST_STEPS", 2000)
    loop = ChatTemplate("{% for i in range(999) %}{% endfor %}")
    assert [loop.render([]) for _ in range(5)] == [""] * 5


@pytest.mark.parametrize("source", ["{% for %}", "{{", "{% endif %}", "{{ a b }}"])
def test_invalid_jinja_is_rejected(source: str) -> None:
    with pytest.raises(WhetValueError, match=mentions("tokenizer.chat_template", "it", "Jinja template")):
        ChatTemplate(source)


def test_huge_templates_are_rejected() -> None:
    with pytest.raises(WhetValueError, match=mentions("characters", "at most")):
        ChatTemplate("a" * (template._MOST_CHARACTERS + 1))


def test_objects_with_methods_are_rejected() -> None:
    with pytest.raises(WhetTypeError, match=mentions("expected texts, numbers, lists and dicts")):
        ChatTemplate("{{ messages }}").render([{"role": "user", "content": object()}])
