"""Validation of SamplingParams, and conversion of NumPy numbers."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
from tests.raising import assert_raises

from whet.config.sampling import SamplingParams, SamplingSettings
from whet.errors import WhetTypeError, WhetValueError


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"max_new_tokens": 2.5}, ("max_new_tokens", "2.5", "int")),
        ({"max_new_tokens": 4.0}, ("max_new_tokens", "4.0", "int")),
        ({"max_new_tokens": True}, ("max_new_tokens", "True", "int")),
        ({"top_k": 2.5}, ("top_k", "2.5", "int")),
        ({"seed": 1.0}, ("seed", "1.0", "int")),
        ({"temperature": "1"}, ("temperature", "'1'", "float")),
        ({"temperature": None}, ("temperature", "None", "float")),
        ({"top_p": True}, ("top_p", "True", "float")),
        ({"stop_token_ids": 2}, ("stop_token_ids", "2", "a list of token ids")),
        ({"stop_token_ids": "12"}, ("stop_token_ids", "'12'", "a list of token ids")),
        ({"stop_token_ids": [1.5]}, ("stop_token_ids", "(1.5,)", "a list of int values")),
        ({"stop_token_ids": ["1"]}, ("stop_token_ids", "('1',)", "a list of int values")),
        ({"stop_token_ids": [None]}, ("stop_token_ids", "(None,)", "a list of int values")),
        ({"stop_token_ids": [True]}, ("stop_token_ids", "(True,)", "a list of int values")),
        ({"stop": 3}, ("stop", "3", "a list of str values")),
        ({"stop": ["a", None]}, ("stop", "('a', None)", "a list of str values")),
        ({"stop": b"a"}, ("stop", "b'a'", "a list of str values")),
        ({"logit_bias": [3]}, ("logit_bias", "[3]", "a table of int to float")),
        ({"logit_bias": {"x": 1}}, ("logit_bias", "{'x': 1}", "a table of int to float")),
        ({"logit_bias": {1.5: 1}}, ("logit_bias", "{1.5: 1}", "a table of int to float")),
        ({"logit_bias": {3: "1"}}, ("logit_bias", "{3: '1'}", "a table of int to float")),
        ({"top_logprobs": 1.0}, ("top_logprobs", "1.0", "int")),
        ({"min_new_tokens": True}, ("min_new_tokens", "True", "int")),
        ({"stop_token_ids": np.array([1.0])}, ("stop_token_ids", "(1.0,)", "a list of int values")),
    ],
)
def test_wrong_types_are_rejected(settings, facts):
    assert_raises(WhetTypeError, ("SamplingParams", *facts), SamplingParams, **settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, math.nan) for name in ("temperature", "top_p", "min_p", "repetition_penalty")),
        *((name, math.inf) for name in ("temperature", "top_p", "min_p", "repetition_penalty")),
        ("temperature", -0.1),
        ("top_k", -1),
        ("top_p", 0.0),
        ("min_p", 1.0),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("seed", -1),
        ("seed", 1 << 64),
        ("stop_token_ids", [3, -1]),
        *((name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1, math.nan)),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {3: 100.5}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {3: -math.inf}),
        ("min_new_tokens", -1),
        ("min_new_tokens", 129),
        ("top_logprobs", -1),
        ("top_logprobs", 21),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 65),
        ("stop", "\ud800"),
    ],
)
def test_values_out_of_range_are_rejected(name, value):
    assert_raises(WhetValueError, ("SamplingParams", name), SamplingParams, **{name: value})


def test_numpy_numbers_become_python_numbers():
    made = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), max_new_tokens=np.uint8(9), stop_token_ids=np.array([2, 5])
    )
    assert made == SamplingParams(temperature=0.5, top_k=3, max_new_tokens=9, stop_token_ids=[2, 5])
    numbers = [made.temperature, made.top_k, made.max_new_tokens, *made.stop_token_ids]
    assert [type(number) for number in numbers] == [float, int, int, int, int]
    assert SamplingParams(stop_token_ids={7}).stop_token_ids == (7,)
    bias = SamplingParams(logit_bias={np.int64(3): np.float32(0.5), "4": 1}).logit_bias
    assert bias == {3: 0.5, 4: 1} and [type(part) for pair in bias.items() for part in pair] == [int, float, int, int]


def test_stop_accepts_a_string_or_a_list():
    assert SamplingParams(stop="ab").stop == ("ab",) == SamplingParams(stop=["ab"]).stop
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c") and SamplingParams().stop == ()
    assert hash(SamplingParams(stop="ab", logit_bias={1: 2.0})) == hash(
        SamplingParams(stop=["ab"], logit_bias={3: 1.0})
    )


def test_configs_share_the_settings_and_their_documentation():
    shared, owner = ({f.name: f for f in dataclasses.fields(each)} for each in (SamplingSettings, SamplingParams))
    assert shared.keys() <= owner.keys()
    for name, field in shared.items():
        assert (field.default, field.default_factory) == (owner[name].default, owner[name].default_factory)
        assert re.search(rf"^ +{name}: [A-Z]", SamplingSettings.__doc__ or "", re.MULTILINE), name
