"""Grammars that constrain completions: JSON schemas, regular expressions, choices and Lark, by llguidance."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from whet.config.sampling import SamplingParams
from whet.errors import WhetValueError, check_installed
from whet.models.tokenizers.token_texts import find_backend

_MOST_CHARACTERS = 1 << 18
_MOST_GRAMMARS = 8  # requests usually repeat one: a copy of its matcher takes a twentieth of compiling it again
# llguidance compiles by recursion, and ends the process where a stack of 8 MiB is too small: behind 1,000 levels of
# schemas, or rules that refer to each other.
_MOST_DEPTH, _MOST_LEVELS, _MOST_LINES = 64, 512, 500
_NUMBERS = (-(2**63) + 2, 2**63 - 1)  # integers below end the process too
_DEFINITIONS = ("$defs", "definitions")
_GUIDANCE = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n[ \t]{0,32})?"}
"""Options of a schema without ``x-guidance``: where any whitespace is allowed, a small model may write nothing else."""


class Grammars:
    """Compiles grammars for a tokenizer.

    Args:
        tokenizer: a tokenizer of transformers or of Whet.
        vocab_size: of the model.
        stop_ids: tokens that end a completion; they are allowed where the grammar may end.

    Attributes:
        stop_ids: as given.

    Raises:
        MissingExtraError: llguidance is not installed.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: Sequence[int]) -> None:
        check_installed("a grammar", "llguidance", extra="serve")
        import llguidance

        self.stop_ids = tuple(stop_ids)
        self._n_words = (vocab_size + 31) // 32
        with tempfile.TemporaryDirectory() as folder:  # llguidance takes a name or a path
            path = Path(folder) / "tokenizer.json"
            path.write_text(find_backend(tokenizer, "a grammar").to_str(), encoding="utf-8")
            self._tokens = llguidance.LLTokenizer(os.fspath(path), n_vocab=vocab_size, eos_token=list(stop_ids))
        self._compile = lru_cache(_MOST_GRAMMARS)(self._make_matcher)

    def compile(self, sampling: SamplingParams) -> str:
        """Return the grammar of the one setting in ``SamplingParams.grammar_settings``.

        Raises:
            WhetValueError: it is not valid.
        """
        if sampling.schema is not None:
            return self.from_schema(sampling.schema)
        return self.from_regex(sampling.regex) if sampling.regex else self.from_lark(sampling.lark)

    def from_schema(self, schema: Mapping[str, Any] | bool) -> str:
        """Return the grammar of a JSON schema, with at most a space, or a line break and indentation, between parts.

        Raises:
            WhetValueError: the schema is not valid, too large, or has keys that are not supported.
        """
        from llguidance import LLMatcher

        _check_schema(schema)
        if schema is not False:
            schema = {"x-guidance": _GUIDANCE, **({} if schema is True else schema)}
        return self._validate(LLMatcher.grammar_from_json_schema(json.dumps(schema)), "schema")

    def from_regex(self, pattern: str) -> str:
        """Return the grammar of a regular expression, which matches whole completions."""
        from llguidance import LLMatcher

        return self._validate(LLMatcher.grammar_from_regex(pattern), "regex")

    def from_choices(self, choices: Iterable[str]) -> str:
        """Return the grammar of several texts, of which one is a completion."""
        return self.from_regex("|".join(map(_escape, choices)))

    def from_lark(self, grammar: str) -> str:
        """Return a grammar in llguidance's dialect of Lark.

        Raises:
            WhetValueError: the grammar is not valid or too large, or a schema in it (%json) is not supported.
        """
        from llguidance import LLMatcher

        _check_length(grammar, "grammar")
        if (n_lines := grammar.count("\n") + 1) > _MOST_LINES:
            raise WhetValueError(f"grammar has {n_lines:,} lines, expected at most {_MOST_LINES}.")
        decoder = json.JSONDecoder()
        for found in re.finditer(r"%json\s*", grammar):
            try:
                schema, _ = decoder.raw_decode(grammar, found.end())
            except (ValueError, RecursionError) as error:
                raise WhetValueError(f"grammar has a %json that is not followed by a schema: {error}.") from None
            _check_schema(schema)
        return self._validate(LLMatcher.grammar_from_lark(grammar), "grammar")

    def _validate(self, grammar: str, name: str) -> str:
        _check_length(grammar, name)
        with _PanicGuard(name):
            matcher, message = self._compile(grammar)
        if matcher is None:
            raise WhetValueError(f"{name} is not supported: {message:.400}")
        return grammar

    def _make_matcher(self, grammar: str) -> tuple[Any, str]:
        """Return the matcher of a grammar before its first token; or None, and why the grammar is not supported."""
        from llguidance import LLMatcher

        is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._tokens)
        if is_wrong or messages:
            return None, " ".join(messages)
        return LLMatcher(self._tokens, grammar, log_level=0), ""

    def constrain(self, grammar: str, after: str = "") -> Constraint:
        """Return the state of a completion under a grammar.

        Args:
            grammar: from another method.
            after: text of the completion behind which the grammar begins, such as the end of its thinking; empty: it
                begins at once.
        """
        with _PanicGuard("the grammar"):
            matcher, _ = self._compile(grammar)
        return Constraint(matcher.deep_copy(), self._n_words, after, self._tokens)


class Constraint:
    """The tokens that may follow in a completion."""

    def __init__(self, matcher: Any, n_words: int, after: str, tokens: Any) -> None:
        self._matcher, self._tokens, self._awaited, self._before = matcher, tokens, after.encode(), b""
        self._bitmap = np.full(n_words, -1, np.int32)
        self._address, self._n_bytes = self._bitmap.ctypes.data, self._bitmap.nbytes

    def allowed(self) -> np.ndarray:
        """Return the bitmap of the next token, for ``Call.allow``.

        Raises:
            WhetValueError: the grammar exceeds llguidance's limits.
        """
        if self._awaited:
            return self._bitmap  # every token
        with _PanicGuard("the grammar"):
            self._matcher.unsafe_compute_mask_ptr(self._address, self._n_bytes)
        if self._matcher.is_error():
            raise WhetValueError(f"the grammar cannot be followed: {self._matcher.get_error()[:400]}")
        return self._bitmap

    def add(self, token_ids: Iterable[int]) -> None:
        """Advance by sampled tokens."""
        for token_id in map(int, token_ids):
            if self._awaited:
                self._before += self._tokens.decode_bytes([token_id])
                if self._awaited in self._before:
                    self._awaited = b""
            elif not self._matcher.is_stopped():
                self._matcher.consume_token(token_id)


class _PanicGuard:
    """A context that raises panics of llguidance, which are not an ``Exception``, as a WhetValueError.

    A class, since a generator takes as long as a mask whose tables are in the processor's caches.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, *rest: object) -> None:
        if type(error).__name__ == "PanicException":
            raise WhetValueError(f"{self._name} is not supported: {error!s:.400}") from None


def _escape(text: str) -> str:
    return re.sub(r"([\\.+*?()|\[\]{}^$/#&~-])", r"\\\1", text)


def _check_length(grammar: str, name: str) -> None:
    if len(grammar) > _MOST_CHARACTERS:
        raise WhetValueError(f"{name} has {len(grammar):,} characters, expected at most {_MOST_CHARACTERS:,}.")


def _check_schema(schema: Any) -> None:
    """Raise unless numbers and levels of a schema are within limits.

    A schema that refers to its definitions has at most the sum of their levels and its own.
    """
    roots, others, n_levels = [schema], set[str](), 0
    while roots:
        n_levels += _measure(roots.pop(), roots, others)
    n_levels += _MOST_DEPTH * len(others)
    if n_levels > _MOST_LEVELS:
        raise WhetValueError(
            f"schema has up to {n_levels:,} levels with its definitions, expected at most {_MOST_LEVELS}."
        )


def _measure(value: Any, roots: list[Any], others: set[str], depth: int = 0) -> int:
    """Return the number of levels of a schema without its definitions.

    Args:
        roots: receives the definitions.
        others: receives references to anything else.
        depth: of ``value``.

    Raises:
        WhetValueError: a level or number is out of range.
    """
    if depth > _MOST_DEPTH:
        raise WhetValueError(f"schema is nested deeper than {_MOST_DEPTH} levels.")
    if isinstance(value, (int, float)) and not _NUMBERS[0] <= value <= _NUMBERS[1]:
        raise WhetValueError(f"schema has a number out of range, expected -2^63 + 2 to 2^63 - 1: {value!s:.40}.")
    deepest = depth
    for key, each in (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    ):
        if key in _DEFINITIONS and isinstance(each, Mapping):
            roots += each.values()
            continue
        if key == "$ref" and not str(each).startswith(("#/$defs/", "#/definitions/")):
            others.add(str(each))
        deepest = max(deepest, _measure(each, roots, others, depth + 1))
    return deepest
