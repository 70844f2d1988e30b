"""Settings of a task, from a text such as "reasoning_gym:chain_sum,max_terms=2" or a table of a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from whet.config.fields import Range, check_range, check_types
from whet.errors import WhetTypeError, WhetValueError

_Share = Annotated[float, Range("a fraction from 0 to 1", lambda share: 0 <= share <= 1)]
_Weight = Annotated[float, Range("a number from 0.001 to 1000", lambda weight: 1e-3 <= weight <= 1e3)]
# Generators add row numbers to it, and NumPy's seeds have 32 bits.
_Seed = Annotated[int | None, Range("an integer from 0 to 2^31 - 1", lambda seed: seed is None or 0 <= seed < 1 << 31)]
_Size = Annotated[int | None, Range("an integer >= 1", lambda size: size is None or size >= 1)]


@dataclass(kw_only=True)
class TaskSettings:
    """Settings of a task. Other keys, and the entries of the table ``options``, are passed to the task."""

    name: str
    """reasoning_gym:NAME, package.module:Class or path/file.py:Class."""
    seed: _Seed = None
    """Seed of its items; None: the task's default. Generators may repeat items for seeds closer than size."""
    size: _Size = None
    """Number of rows; None: the task's default."""
    weight: _Weight = 1.0
    """Weight of its rows among several tasks."""
    held_out: _Share = 0.1
    """Fraction of prompts held out for evaluation, which never occur in training."""
    system_prompt: str | None = None
    """A text, or for reasoning_gym a name in its SYSTEM_PROMPTS; "": none; None: the task's default."""
    partial_credit: bool | None = None
    """For reasoning_gym: keep scores below 1 instead of replacing them by 0. None: False."""
    options: dict = field(default_factory=dict)
    """Options of the task."""

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, "name", ":" in self.name, "reasoning_gym:NAME, package.module:Class or path/file.py:Class")


def read_spec(spec: str | Mapping[str, Any]) -> TaskSettings:
    """Read the settings from a text or a table.

    In a text, ``key=value`` pairs follow the name, separated by commas; a value is JSON, or a word.

    Raises:
        WhetTypeError: the spec is neither, or a value has the wrong type.
        WhetValueError: the text is malformed, the name is missing, or a value is out of range.
    """
    if not isinstance(spec, (str, Mapping)):
        raise WhetTypeError(f"open_task: spec is {spec!r:.60}, expected a name with options, or a table.")
    name, options = split_options(spec, "open_task") if isinstance(spec, str) else ("", spec)
    given = {"name": name, **options} if name else dict(options)
    if not given.get("name"):
        raise WhetValueError(f"open_task: {spec!r:.80} has no name, such as 'reasoning_gym:chain_sum'.")
    known = [f.name for f in dataclasses.fields(TaskSettings)]
    more = {key: value for key, value in given.items() if key not in known}
    options = given.get("options", {})
    if not isinstance(options, Mapping):
        raise WhetTypeError(f"open_task: options of {given['name']} is {options!r:.60}, expected a table.")
    settings = {key: value for key, value in given.items() if key in known}
    return TaskSettings(**{**settings, "options": {**options, **more}})


def format_spec(spec: str | Mapping[str, Any]) -> str:
    """Format a spec as text for ``read_spec``, omitting defaults.

    Raises:
        WhetTypeError, WhetValueError: as for ``read_spec``.
    """
    settings = read_spec(spec)
    fields = [f for f in dataclasses.fields(TaskSettings) if f.name not in ("name", "options")]
    changed = {f.name: getattr(settings, f.name) for f in fields if getattr(settings, f.name) != f.default}
    pairs = [f"{key}={_as_json(key, value)}" for key, value in {**changed, **settings.options}.items()]
    return ",".join([settings.name, *pairs])


def _as_json(key: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise WhetTypeError(
            f"open_task: {key} is {value!r:.60}, expected a number, a text, a boolean, or a list or table of them."
        ) from error


def split_options(text: str, where: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of a text such as ``"reasoning_gym:chain_sum,max_terms=2"``.

    Raises:
        WhetValueError: an option is not of the form key=value, or given twice; ``where`` is the prefix of the error.
    """
    name, _, rest = text.partition(",")
    given: dict[str, Any] = {}
    while rest:
        key, equals, rest = rest.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier() or key in given or key == "name":
            raise WhetValueError(
                f"{where}: {text!r:.100}: {key!r:.40} is not a new option of the form key=value. Separate options by "
                f"commas, as in 'reasoning_gym:chain_sum,max_terms=2'."
            )
        given[key], rest = _parse_value(rest.lstrip())
    return name.strip(), given


def _parse_value(text: str) -> tuple[Any, str]:
    """Parse the value at the beginning of a text; return it and the text after the comma."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
        following = text[end:].lstrip()
        if following[:1] in ("", ","):
            return value, following[1:]
    except ValueError:
        pass
    word, _, following = text.partition(",")
    return word.strip(), following
