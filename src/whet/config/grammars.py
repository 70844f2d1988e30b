"""Grammars of completions as settings: text, or a file with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from whet.config.fields import Conversion
from whet.errors import WhetValueError


def read_grammar(value: Any) -> Any:
    """Return the text of a grammar, given the text, a file with it, or a JSON schema as a dict.

    Raises:
        WhetValueError: the file cannot be read.
    """
    if isinstance(value, (Mapping, bool)):
        return json.dumps(value)
    if not isinstance(value, str) or "\n" in value:
        return value
    try:
        path = Path(value).expanduser()
        return path.read_text(encoding="utf-8") if value and path.is_file() else value
    except UnicodeDecodeError as error:
        raise WhetValueError(f"grammar {value!r} cannot be read: {error}. Pass a text file in UTF-8.") from None
    except (OSError, RuntimeError, ValueError):  # a text that no path can be
        return value


GrammarText = Annotated[str, Conversion(read_grammar)]


def parse_schema(text: str, where: str) -> dict[str, Any] | bool | None:
    """Return a JSON schema from its text; None if there is none.

    Raises:
        WhetValueError: the text is not a JSON object.
    """
    if not text:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WhetValueError(f"{where}: schema {text!r:.80} is neither a file nor JSON: {error}.") from None
    if not isinstance(found, (dict, bool)):
        raise WhetValueError(f"{where}: schema {text!r:.80} is a {type(found).__name__}, expected a JSON object.")
    return found
