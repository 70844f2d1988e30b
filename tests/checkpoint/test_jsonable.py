"""Plain values survive JSON: types, NaN, odd keys; anything else is refused by name."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.raising import assert_raises, mentions

from whet.checkpoint.jsonable import decode, encode
from whet.errors import CheckpointError, WhetTypeError


def round_trip(value):
    return decode(json.loads(json.dumps(encode(value, "value"), allow_nan=False)))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**70),
        1e-320,
        -0.0,
        math.inf,
        -math.inf,
        "ü\ud800\0",
        [1, (2, [3.5, ()])],
        {"a": {"b": (1,)}},
        {1: "a", (2, "x"): None},
        {"$": "float", "value": "nan"},
        torch.bfloat16,
        torch.Size([2, 0]),
        torch.device("cuda:1"),
    ],
)
def test_values_round_trip_with_their_types(value):
    back = round_trip(value)
    assert back == value
    assert repr(back) == repr(value)  # distinguishes -0.0 from 0.0, True from 1, tuple from list
    assert type(back) is type(value)


def test_nan_round_trips():
    assert math.isnan(round_trip({"best": math.nan})["best"])


def test_numpy_scalars_become_numbers():
    back = round_trip([np.float32(0.5), np.int64(3), np.bool_(True), np.float64("inf")])
    assert repr(back) == "[0.5, 3, True, inf]"


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers() | st.just("$"), inner)
    ),
    max_leaves=20,
)


@given(plain)
def test_any_plain_value_round_trips(value):
    assert repr(round_trip(value)) == repr(value)


def test_the_error_names_a_value_that_cannot_be_stored():
    with pytest.raises(WhetTypeError, match=mentions("state['optimizer'][1]", "torch.Tensor", "tensor group")):
        encode({"optimizer": [0, torch.zeros(1)]}, "state")
    assert_raises(WhetTypeError, r"builtins\.set", encode, {1}, "state")
    assert_raises(WhetTypeError, r"numpy\.longdouble", encode, np.longdouble(1), "state")


@pytest.mark.parametrize("text", ['{"$": "lambda", "value": 1}', '{"$": "dtype", "value": "load"}'])
def test_unknown_tags_and_names_are_rejected(text):
    with pytest.raises(CheckpointError):
        decode(json.loads(text))
