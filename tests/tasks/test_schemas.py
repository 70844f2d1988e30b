"""Schemas of functions equal transformers', and arguments are checked against them."""

from __future__ import annotations

import enum
from typing import Any, Literal, Optional, Union

import pytest
from tests.raising import assert_raises

from whet.errors import WhetTypeError, WhetValueError
from whet.tasks.schemas import find_fault, tool_schema


class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"


class Mixed(enum.Enum):
    ONE = 1
    TEXT = "t"
    NONE = None


def plain(a: int, b: float, text: str, flag: bool = True) -> int:
    """Compute something.

    More about it, in a second paragraph.

    Args:
        a: The first number,
            which goes on in another line.
        b: The second: with a colon.
        text: A text
        flag: Whether: yes
            or: no

    Returns:
        The number.

    Raises:
        ValueError: never.
    """
    return a


def containers(
    a: list[int], b: list, c: dict[str, float], d: dict, e: tuple[int, str], f: tuple, g: list[list[str]] | None = None
) -> list[dict[str, Any]]:
    """Containers

    Args:
        a: list
        b: bare list
        c: dict

        d: bare dict after a blank line
        e: pair
        f: bare tuple
        g: nested
    """
    return []


def unions(
    a: int | str,
    b: Optional[int],  # noqa: UP045
    c: Union[int, list[str], None],  # noqa: UP007
    d: Literal["x", "y"],
    e: Literal[1, "y", None],
    f: Unit,
    g: Mixed | None,
    h: Any,
    i: list | tuple,
    j: int | None = None,
) -> Unit | None:
    """Unions.
    Args:
        a: one
        b: two
        c: three
        d: four
        e: five
        f: six
        g: seven
        h: eight
        i: nine
        j: ten
    Returns:
        A unit
    """


def choices(drink: str, size: int = 1) -> None:
    """
    Choose. Args are below.

    Args:
        drink: The drink (choices: ["tea ", "coffee"])
        size: The size (Choices: [1, 2])
    """


def nothing() -> Holder:
    """Without parameters, and with a result that has no schema."""
    return Holder()


def odd_indents(a: int, b: int, c: int):
    """Odd   Returns: of something

    Args:
      a:
        On the next line.
      b: first
       c: deeper than b, so a part of b
      c: own
      nobody: a name without a parameter
    """


def swallows(a: int):
    """An empty description takes the next line.

    Args:
        a:
        b: which is not a parameter
    """


async def waits(a: int) -> str:
    """Wait.

    Args:
        a: seconds
    """
    return str(a)


class Holder:
    def method(self, a: int) -> int:
        """Method.

        Args:
            a: a number
        """
        return a


ACCEPTED = [plain, containers, unions, choices, nothing, odd_indents, swallows, waits, Holder().method]


@pytest.mark.parametrize("function", ACCEPTED, ids=lambda function: function.__name__)
def test_schemas_equal_transformers(function: Any) -> None:
    from transformers.utils.chat_template_utils import get_json_schema

    expected, found = get_json_schema(function), tool_schema(function)
    assert found == expected
    assert list(found["function"]["parameters"]["properties"]) == list(expected["function"]["parameters"]["properties"])


def no_docstring(a: int): ...


def no_hint(a):
    """Doc.

    Args:
        a: x
    """


def not_described(a: int, b: int):
    """Doc.

    Args:
        a: x
    """


def own_class(a: Holder):
    """Doc.

    Args:
        a: x
    """


def several(*a: int):
    """Doc.

    Args:
        a: x
    """


def bad_choices(a: str):
    """Doc.

    Args:
        a: x (choices: tea)
    """


def one_item(a: tuple[int]):
    """Doc.

    Args:
        a: x
    """


@pytest.mark.parametrize(
    ("function", "error", "facts"),
    [
        (no_docstring, WhetValueError, ("no_docstring", "docstring")),
        (no_hint, WhetTypeError, ("no_hint", "'a'", "type hint")),
        (not_described, WhetValueError, ("not_described", "'b'", "Args")),
        (own_class, WhetTypeError, ("own_class", "'a'", "Holder", "Literal")),
        (several, WhetTypeError, ("several", "'a'", "by name")),
        (bad_choices, WhetValueError, ("bad_choices", "'a'", "tea", "JSON")),
        (one_item, WhetTypeError, ("one_item", "tuple[int]")),
        (Holder, WhetTypeError, ("Holder", "function")),
        (3, WhetTypeError, ("3", "function")),
    ],
)
def test_functions_without_a_schema_are_rejected(function: Any, error: type[Exception], facts: Any) -> None:
    assert_raises(error, facts, tool_schema, function)


@pytest.mark.parametrize(
    ("function", "arguments", "fault"),
    [
        (plain, {"a": 1, "b": 2, "text": "x"}, ""),
        (plain, {"a": 1, "b": 2.5, "text": "x", "flag": False}, ""),
        (plain, {"a": True, "b": 2.5, "text": "x"}, "a is true, expected integer"),
        (plain, {"a": 1.0, "b": 2.5, "text": "x"}, "a is 1.0, expected integer"),
        (plain, {"a": 1, "text": 3, "c": 4}, "b is missing; there is no parameter 'c'; text is 3, expected string"),
        (plain, {"a": None, "b": 2.5, "text": "x"}, "a is null, expected integer"),
        (containers, {"a": [1, "2"], "b": [], "c": {}, "d": {}, "e": [1, "x"], "f": []},
         'a[1] is "2", expected integer'),
        (containers, {"a": [], "b": [1, {}], "c": {"k": "v"}, "d": {}, "e": [1, "x"], "f": [1]},
         "c['k'] is \"v\", expected number"),
        (containers, {"a": [], "b": [], "c": {"k": 1}, "d": {"k": []}, "e": [1], "f": []}, "e has 1 items, expected 2"),
        (containers, {"a": [], "b": [], "c": {}, "d": {}, "e": [1, "x"], "f": [], "g": None}, ""),
        (choices, {"drink": "tea"}, ""),
        (choices, {"drink": "milk"}, 'drink is "milk", expected one of ["tea", "coffee"]'),
        (choices, {"drink": "tea", "size": True}, "size is true, expected integer"),
    ],
)  # fmt: skip
def test_arguments_are_checked(function: Any, arguments: dict[str, Any], fault: str) -> None:
    assert find_fault(arguments, tool_schema(function)["function"]["parameters"]) == fault


def test_unions_are_checked() -> None:
    parameters = tool_schema(unions)["function"]["parameters"]
    good = {"a": "x", "b": None, "c": ["x"], "d": "y", "e": None, "f": "ft", "g": None, "h": {"any": 1}, "i": []}
    assert find_fault(good, parameters) == ""
    for name, bad in {"a": 1.5, "c": 1.5, "d": "z", "e": 2, "f": "mile", "g": "other", "i": "text"}.items():
        assert find_fault(good | {name: bad}, parameters).startswith(f"{name} is ")
