"""Tasks of reasoning-gym (0.1.25): question generators with verifiers, opened by name.

A question becomes a user message. Its score is the score of reasoning-gym's verifier, or 0 if the verifier raises, the
completion is not a text, or a wrong answer is rewarded for its form. Items are generated on access. Row i is item i or,
if that belongs to the other split, item ``i + size``, ``i + 2 size``, ...: with ``held_out=0`` the training rows are
reasoning-gym's, in the same order.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import dataclasses
import difflib
import math
import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from whet.data.thinking import answer_in
from whet.errors import WhetValueError, check_installed, is_number
from whet.tasks.protocol import Split, assign_split
from whet.tasks.settings import TaskSettings

PREFIX = "reasoning_gym:"

_UNUSABLE = {
    "acre": "its items are generated together, so that an item depends on their number",
    "codeio": "it executes code of its data to generate an item, and prints its errors",
    "composite": "it is a mixture of other data sets: pass each of them as a separate task",
    "game_of_life_halting": "its verifier accepts every answer",
}
_UNORDERED = ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
"""Data sets that draw from a set of strings, whose order differs between processes."""
_FORM_SCORE = 0.05
"""Maximum score of reasoning-gym's verifiers for a wrong answer of the right form."""
_EVALUATED = (
    "binary_matrix", "n_queens", "spiral_matrix", "string_insertion",  # by eval
    "countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration",  # by SymPy
)  # fmt: skip
"""Data sets whose verifiers evaluate an answer as an expression."""
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_MINUS = re.compile("\u2212(?=\\d)|(?<!\\w)\u2013(?=\\d)")
"""Minus signs, and en dashes that are not part of a range."""
_GROUPED = re.compile("(?<=\\d)[\u00a0\u2009\u202f](?=\\d{3}(?!\\d))")
"""No-break and thin spaces between groups of three digits."""
_NAME = re.compile(r"[^\W\d]\w*")


class ReasoningGymTask:
    """A data set of reasoning-gym as a ``Task``.

    The answer in a completion is the text between its last ``<answer>`` tags if the system prompt asks for them;
    otherwise its last number if the right answer is a number; otherwise all of it. Thinking is removed, with the tags
    of any chat template (``whet.data.thinking``).

    Args:
        settings: ``name`` begins with "reasoning_gym:"; ``options`` are fields of the data set's config. Defaults:
            ``seed`` 0, ``size`` 1000, ``system_prompt`` a sentence that asks for the answer only.
        split: the split of the rows.

    Raises:
        MissingExtraError: reasoning-gym is not installed.
        WhetValueError: the data set is unknown (the message has similar names) or unusable, an option is unknown or out
            of range, or the split has no questions.
    """

    def __init__(self, settings: TaskSettings, split: Split) -> None:
        self.name = settings.name
        with _preserved_generators(0):
            self._dataset = _create_dataset(settings)
        self._evaluates = settings.name.removeprefix(PREFIX) in _EVALUATED
        self._partial_credit = bool(settings.partial_credit)
        self.rows = _Rows(self._dataset, self.name, split, settings.held_out)
        self.system_prompt = _system_prompt(settings.system_prompt, self._dataset)
        _ = self.rows[0]  # raises if there is none

    def score(self, completion: str, row: Mapping[str, Any]) -> float:
        """Return the verifier's score; without ``partial_credit``, 0 for scores below 1."""
        answer = self._extract_answer(completion, row["answer"])
        if not answer or (self._evaluates and _is_code(answer)):
            return 0.0
        # Some verifiers write to the metadata, which is shared with the prompt's other completions.
        entry = {"question": row["question"], "answer": row["answer"], "metadata": copy.deepcopy(row["metadata"])}
        try:
            score = self._dataset.score_answer(answer, entry)
        except Exception:  # any type: verifiers parse arbitrary text
            return 0.0
        if not is_number(score) or not score > _FORM_SCORE:
            return 0.0
        return min(1.0, float(score)) if self._partial_credit else float(score >= 1)

    def _extract_answer(self, completion: Any, right: Any) -> str | None:
        if not isinstance(completion, str):
            return None
        from reasoning_gym.utils import extract_answer  # pyright: ignore[reportMissingImports]

        text = answer_in(completion)
        if text is None:
            return None
        if "<answer>" in self.system_prompt:
            return extract_answer(text)
        if _is_numeric(right):
            numbers = _NUMBER.findall(_GROUPED.sub("", _MINUS.sub("-", text)))
            return numbers[-1].rstrip(",") if numbers else None
        return text.strip()


class _Rows(Sequence[dict[str, Any]]):
    """The questions of one split, generated on access."""

    def __init__(self, dataset: Any, name: str, split: Split, held_out: float) -> None:
        self._dataset, self._name, self._split, self._held_out = dataset, name, split, held_out
        self._size, self._seed = dataset.config.size, dataset.seed
        share = held_out if split == "eval" else 1 - held_out
        if share == 0:
            raise WhetValueError(f"open_task: {name}: held_out is {held_out:g}, which leaves no rows for {split!r}.")
        self._n_tries = math.ceil(30 / share)  # all tries of a row fail with probability (1 - share)^tries < e^-30

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(self._size))]
        if not -self._size <= i < self._size:
            raise IndexError(i)
        for k in range(self._n_tries):
            item = self._generate(i % self._size, k)
            prompt = [{"role": "user", "content": item["question"]}] if item else None
            if item and assign_split(prompt, self._held_out) == self._split:
                return {"prompt": prompt, **{key: item[key] for key in ("question", "answer", "metadata")}}
        raise WhetValueError(
            f"open_task: {self._name}: none of {self._n_tries} items for row {i} belongs to {self._split!r} with "
            f"held_out = {self._held_out:g}: it has too few distinct questions. Widen its options, or change held_out."
        )

    def _generate(self, i: int, k: int) -> dict[str, Any] | None:
        """Generate item ``i + k size``; None if the generator finds none."""
        # By seed, as tables of some data sets end at their size. On a copy, as one data set shrinks its size.
        dataset = copy.copy(self._dataset)
        dataset.seed = self._seed + k * self._size
        with _preserved_generators(dataset.seed + i):
            try:
                return dataset[i]
            except IndexError:
                return None


def _create_dataset(settings: TaskSettings) -> Any:
    check_installed(f"The task {settings.name}", "reasoning_gym", extra="gym", package="reasoning-gym")
    import reasoning_gym  # noqa: F401  # pyright: ignore[reportMissingImports]
    from reasoning_gym.dataset import ProceduralDataset  # pyright: ignore[reportMissingImports]
    from reasoning_gym.factory import DATASETS, create_dataset  # pyright: ignore[reportMissingImports]

    name = settings.name.removeprefix(PREFIX)
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.5)
        near = " or ".join(PREFIX + n for n in near)
        hint = f"Did you mean {near}?" if near else f"Choose from {', '.join(DATASETS)}."
        raise WhetValueError(f"open_task: reasoning-gym has no data set {name!r}. {hint}")
    if name in _UNUSABLE:
        raise WhetValueError(f"open_task: {settings.name} cannot be used: {_UNUSABLE[name]}.")
    if name in _UNORDERED and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise WhetValueError(
            f"open_task: {settings.name} is not reproducible: its items depend on the order of Python's sets, which "
            f"differs between processes. Set PYTHONHASHSEED=0 in the environment of the command."
        )
    _check_options(settings, [f.name for f in dataclasses.fields(DATASETS[name][1])])
    seed, size = settings.seed or 0, 1000 if settings.size is None else settings.size
    try:
        dataset = create_dataset(name, seed=seed, size=size, **settings.options)
        item = dataset[0]
    except Exception as error:  # AssertionError of its checks, or any error from values of wrong types
        raise WhetValueError(
            f"open_task: {settings.name} rejects these options: {type(error).__name__}: {error}."
        ) from error
    if item["answer"] is None and type(dataset).score_answer is ProceduralDataset.score_answer:
        raise WhetValueError(f"open_task: {settings.name} cannot be used: it has neither answers nor a verifier.")
    return dataset


def _check_options(settings: TaskSettings, fields: Sequence[str]) -> None:
    known = [f for f in fields if f not in ("seed", "size")]
    for option in settings.options:
        if option not in known:
            near = difflib.get_close_matches(option, [*known, *(f.name for f in dataclasses.fields(settings))], n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Choose from {', '.join(known)}."
            raise WhetValueError(f"open_task: {settings.name} has no option {option!r}. {hint}")


def _system_prompt(given: str | None, dataset: Any) -> str:
    from reasoning_gym.utils import SYSTEM_PROMPTS  # pyright: ignore[reportMissingImports]

    if given is None:
        with _preserved_generators(dataset.seed):
            numeric = _is_numeric(dataset[0]["answer"])
        return f"Answer with the {'number' if numeric else 'final answer'} alone."
    if given in SYSTEM_PROMPTS:
        return SYSTEM_PROMPTS[given]
    if given and len(given.split()) == 1:
        raise WhetValueError(
            f"open_task: system_prompt is {given!r}, expected a text, or one of {', '.join(SYSTEM_PROMPTS)}."
        )
    return given


def _is_numeric(answer: Any) -> bool:
    return isinstance(answer, str) and _NUMBER.fullmatch(answer) is not None


def _is_code(answer: str) -> bool:
    """Whether evaluating an answer could have side effects: it has functions, attributes or strings."""
    functions = {name for name in _NAME.findall(answer) if hasattr(builtins, name)} - {"abs", "_"}
    return bool(functions) or re.search(r"__|['\"\\]|\.\s*[^\W\d]", answer) is not None


@contextlib.contextmanager
def _preserved_generators(seed: int) -> Iterator[None]:
    """Seed Python's and NumPy's global generators, which some data sets use, and restore their states on exit."""
    state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)  # noqa: NPY002
