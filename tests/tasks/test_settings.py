"""The settings of a task, from texts and tables."""

import datetime

import pytest

from whet.errors import WhetTypeError, WhetValueError
from whet.tasks.settings import TaskSettings, read_spec, spec_text

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


def test_a_text_and_a_table_are_the_same_settings():
    settings = TaskSettings(
        name="reasoning_gym:chain_sum",
        seed=3,
        size=20,
        weight=0.5,
        system_prompt="Add, please: a=b.",
        options={"max_terms": 2, "signs": ["+", "-"], "on": True},
    )
    assert read_spec(TEXT) == read_spec(TABLE) == settings
    assert spec_text(TABLE) == spec_text(TEXT) == TEXT


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
    assert read_spec(spec_text(text)) == settings


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (3, WhetTypeError, "spec is 3, expected a name with options, or a table"),
        ({"seed": 1}, WhetValueError, "has no name, such as 'reasoning_gym:chain_sum'"),
        ("chain_sum", WhetValueError, "name is 'chain_sum', expected reasoning_gym:NAME"),
        ("a:B,seed", WhetValueError, "'seed' is no new option of the form key=value"),
        ("a:B,x=1,x=2", WhetValueError, "'x' is no new option"),
        ("a:B,seed=-1", WhetValueError, "seed is -1, expected an integer from 0 to 2^31 - 1"),
        ("a:B,size=0", WhetValueError, "size is 0, expected an integer >= 1"),
        ("a:B,size=many", WhetTypeError, "size is 'many', expected int or None"),
        ("a:B,held_out=1.5", WhetValueError, "held_out is 1.5, expected a share from 0 to 1"),
        ("a:B,weight=NaN", WhetValueError, "weight is nan, expected a number other than NaN"),
        ("a:B,weight=0", WhetValueError, "weight is 0, expected a number from 0.001 to 1000"),
        ({"name": "a:B", "options": 3}, WhetTypeError, "options of a:B is 3, expected a table"),
    ],
)
def test_what_is_refused(spec, error, message):
    with pytest.raises(error) as raised:
        read_spec(spec)
    assert message in str(raised.value)


def test_a_value_that_no_text_holds():
    with pytest.raises(WhetTypeError, match=r"when is datetime.date\(2026, 1, 1\), expected a number, a text"):
        spec_text({"name": "a:B", "when": datetime.date(2026, 1, 1)})
