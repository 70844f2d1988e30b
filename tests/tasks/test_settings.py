"""Settings of a task, from texts and tables."""

import datetime

import pytest
from tests.raising import assert_raises

from whet.errors import WhetTypeError, WhetValueError
from whet.tasks.settings import TaskSettings, format_spec, read_spec

TEXT = (
    'reasoning_gym:chain_sum,seed=3,size=20,weight=0.5,system_prompt="Add, please: a=b.",'
    'max_terms=2,signs=["+", "-"],on=true'
)
TABLE = {
    "name": "reasoning_gym:chain_sum",
    "seed": 3,
    "size": 20,
    "weight": 0.5,
    "system_prompt": "Add, please: a=b.",
    "options": {"max_terms": 2, "signs": ["+", "-"]},
    "on": True,
}


def test_text_and_table_give_the_same_settings():
    settings = TaskSettings(
        name="reasoning_gym:chain_sum",
        seed=3,
        size=20,
        weight=0.5,
        system_prompt="Add, please: a=b.",
        options={"max_terms": 2, "signs": ["+", "-"], "on": True},
    )
    assert read_spec(TEXT) == read_spec(TABLE) == settings
    assert format_spec(TABLE) == format_spec(TEXT) == TEXT


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("a:B", {}),
        ("a:B, x = 1 , y=-2.5e-1,z=null", {"x": 1, "y": -0.25, "z": None}),
        ("a:B,word=plain text,n=12abc,on=false", {"word": "plain text", "n": "12abc", "on": False}),
        ('a:B,s="1,2",empty=', {"s": "1,2", "empty": ""}),
    ],
)
def test_values_are_json_or_words(text, options):
    settings = read_spec(text)
    assert settings.name == "a:B" and settings.options == options
    assert read_spec(format_spec(text)) == settings


@pytest.mark.parametrize(
    ("spec", "error", "facts"),
    [
        (3, WhetTypeError, ("spec is 3",)),
        ({"seed": 1}, WhetValueError, ("{'seed': 1}", "no name", "'reasoning_gym:chain_sum'")),
        ("chain_sum", WhetValueError, ("name is 'chain_sum'", "reasoning_gym:NAME")),
        ("a:B,seed", WhetValueError, ("'seed'", "key=value")),
        ("a:B,x=1,x=2", WhetValueError, ("'x'", "key=value")),
        ("a:B,seed=-1", WhetValueError, ("seed is -1", "2^31 - 1")),
        ("a:B,size=0", WhetValueError, ("size is 0", ">= 1")),
        ("a:B,size=many", WhetTypeError, ("size is 'many'", "int")),
        ("a:B,held_out=1.5", WhetValueError, ("held_out is 1.5", "from 0 to 1")),
        ("a:B,weight=NaN", WhetValueError, ("weight is nan",)),
        ("a:B,weight=0", WhetValueError, ("weight is 0", "0.001 to 1000")),
        ({"name": "a:B", "options": 3}, WhetTypeError, ("options of a:B is 3", "table")),
    ],
)
def test_invalid_specs_are_named(spec, error, facts):
    assert_raises(error, facts, read_spec, spec)


def test_value_without_a_text_form():
    spec = {"name": "a:B", "when": datetime.date(2026, 1, 1)}
    assert_raises(WhetTypeError, ("when is datetime.date(2026, 1, 1)", "number"), format_spec, spec)
