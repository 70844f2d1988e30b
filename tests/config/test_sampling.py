"""Sampling settings: what is refused when they are made, and that numbers become Python's own."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from tests.raising import assert_raises

from whet.config.sampling import SamplingParams
from whet.errors import WhetTypeError, WhetValueError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 2.5}, "SamplingParams: max_new_tokens is 2.5, expected int"),
        ({"max_new_tokens": 4.0}, "max_new_tokens is 4.0, expected int"),
        ({"max_new_tokens": True}, "max_new_tokens is True, expected int"),
        ({"top_k": 2.5}, "top_k is 2.5, expected int"),
        ({"seed": 1.0}, "seed is 1.0, expected int"),
        ({"temperature": "1"}, "temperature is '1', expected float"),
        ({"temperature": None}, "temperature is None, expected float"),
        ({"top_p": True}, "top_p is True, expected float"),
        ({"stop_token_ids": 2}, "stop_token_ids is 2, expected a list of token ids"),
        ({"stop_token_ids": "12"}, "stop_token_ids is '12', expected a list of token ids"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids is (1.5,), expected a list of int values"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids is ('1',), expected a list of int values"),
        ({"stop_token_ids": [None]}, "stop_token_ids is (None,), expected a list of int values"),
        ({"stop_token_ids": [True]}, "stop_token_ids is (True,), expected a list of int values"),
        ({"stop": 3}, "stop is 3, expected a list of str values"),
        ({"stop": ["a", None]}, "stop is ('a', None), expected a list of str values"),
        ({"stop": b"a"}, "stop is b'a', expected a list of str values"),
        ({"logit_bias": [3]}, "logit_bias is [3], expected a table of int to float"),
        ({"logit_bias": {"x": 1}}, "logit_bias is {'x': 1}, expected a table of int to float"),
        ({"logit_bias": {1.5: 1}}, "logit_bias is {1.5: 1}, expected a table of int to float"),
        ({"logit_bias": {3: "1"}}, "logit_bias is {3: '1'}, expected a table of int to float"),
        ({"top_logprobs": 1.0}, "top_logprobs is 1.0, expected int"),
        ({"min_new_tokens": True}, "min_new_tokens is True, expected int"),
        ({"stop_token_ids": np.array([1.0])}, "stop_token_ids is (1.0,), expected a list of int values"),
    ],
)
def test_another_type_is_refused_when_made(settings, message):
    assert_raises(WhetTypeError, re.escape(message), SamplingParams, **settings)


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
def test_a_value_out_of_range_is_refused_when_made(name, value):
    assert_raises(WhetValueError, f"SamplingParams: {name} is ", SamplingParams, **{name: value})


def test_numbers_of_numpy_become_pythons_own():
    made = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), max_new_tokens=np.uint8(9), stop_token_ids=np.array([2, 5])
    )
    assert made == SamplingParams(temperature=0.5, top_k=3, max_new_tokens=9, stop_token_ids=[2, 5])
    numbers = [made.temperature, made.top_k, made.max_new_tokens, *made.stop_token_ids]
    assert [type(number) for number in numbers] == [float, int, int, int, int]
    assert SamplingParams(stop_token_ids={7}).stop_token_ids == (7,)
    bias = SamplingParams(logit_bias={np.int64(3): np.float32(0.5), "4": 1}).logit_bias
    assert bias == {3: 0.5, 4: 1} and [type(part) for pair in bias.items() for part in pair] == [int, float, int, int]


def test_stop_is_one_string_or_several():
    assert SamplingParams(stop="ab").stop == ("ab",) == SamplingParams(stop=["ab"]).stop
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c") and SamplingParams().stop == ()
    assert hash(SamplingParams(stop="ab", logit_bias={1: 2.0})) == hash(
        SamplingParams(stop=["ab"], logit_bias={3: 1.0})
    )
