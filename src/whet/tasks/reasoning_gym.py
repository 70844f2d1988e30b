"""Tasks of reasoning-gym (0.1.25): generators of questions, each with a verifier, opened by name.

A question becomes a user's message, and its score is that of reasoning-gym's own verifier, guarded: 0 where it
raises, where the completion is no text, and where a wrong answer is rewarded for its form. Items are generated when
they are asked for. Row i is item i, or where that belongs to the other split, item ``i + size``, ``i + 2 size``, ...:
with ``held_out=0`` the rows to train on are reasoning-gym's own, in their order.
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
from whet.tasks.protocol import Split, split_of
from whet.tasks.settings import TaskSettings

PREFIX = "reasoning_gym:"

_UNUSABLE = {
    "acre": "its items are made all at once, so that an item depends on how many there are",
    "codeio": "it executes code of its data to make an item, and prints what goes wrong in it",
    "composite": "it is a mixture of others: give each of them a task of its own",
    "game_of_life_halting": "its verifier takes every answer for right",
}
_UNORDERED = ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
"""Those that draw from a set of strings, whose order is another one in each process."""
_FORM_SCORE = 0.05
"""The most that a verifier of reasoning-gym gives an answer that is wrong, but of the right form."""
_EVALUATED = (
    "binary_matrix", "n_queens", "spiral_matrix", "string_insertion",  # by eval
    "countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration",  # by SymPy
)  # fmt: skip
"""Those whose verifiers evaluate an answer as an expression."""
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_MINUS = re.compile("\u2212(?=\\d)|(?<!\\w)\u2013(?=\\d)")
"""The minus sign, and a dash that is no range's."""
_GROUPED = re.compile("(?<=\\d)[\u00a0\u2009\u202f](?=\\d{3}(?!\\d))")
"""Spaces that do not break, and thin ones, between groups of three digits."""
_NAME = re.compile(r"[^\W\d]\w*")


class ReasoningGymTask:
    """A data set of reasoning-gym as a ``Task``.

    The answer in a completion is the text between its last ``<answer>`` tags if the system prompt asks for them; else
    its last number if the right answer is a number; else all of it. What a model thinks before it is left out, between
    the tags of any chat template (``whet.data.thinking``).

    Args:
        settings: ``name`` begins with "reasoning_gym:"; ``options`` are fields of the data set's config. The default of
            ``seed`` is 0, of ``size`` 1000, and of ``system_prompt`` a sentence that asks for the answer only.
        split: which of its questions are the rows.

    Raises:
        MissingExtraError: reasoning-gym is not installed.
        WhetValueError: there is no such data set (the message has near names), it cannot be used, an option is unknown
            or out of range, or the split has no questions.
    """

    def __init__(self, settings: TaskSettings, split: Split) -> None:
        self.name = settings.name
        with _preserved_generators(0):
            self._dataset = _create_dataset(settings)
        self._evaluates = settings.name.removeprefix(PREFIX) in _EVALUATED
        self._partial_credit = bool(settings.partial_credit)
        self.rows = _Rows(self._dataset, self.name, split, settings.held_out)
        self.system_prompt = _system_prompt(settings.system_prompt, self._dataset)
        _ = self.rows[0]  # that there is one

    def score(self, completion: str, row: Mapping[str, Any]) -> float:
        """The verifier's score, or 0 for one below 1 without ``partial_credit``."""
        answer = self._extract_answer(completion, row["answer"])
        if not answer or (self._evaluates and _is_code(answer)):
            return 0.0
        # Some verifiers write to the metadata, which the other completions of the prompt share.
        entry = {"question": row["question"], "answer": row["answer"], "metadata": copy.deepcopy(row["metadata"])}
        try:
            score = self._dataset.score_answer(answer, entry)
        except Exception:  # of any kind: the verifiers parse what a model wrote
            return 0.0
        if not is_number(score) or not score > _FORM_SCORE:
            return 0.0
        return min(1.0, float(score)) if self._partial_credit else float(score >= 1)

    def _extract_answer(self, completion: Any, right: Any) -> str | None:
        if not isinstance(completion, str):
            return None
        from reasoning_gym.utils import extract_answer  # pyright: ignore[reportMissingImports]

        said = answer_in(completion)
        if said is None:
            return None
        if "<answer>" in self.system_prompt:
            return extract_answer(said)
        if _is_numeric(right):
            numbers = _NUMBER.findall(_GROUPED.sub("", _MINUS.sub("-", said)))
            return numbers[-1].rstrip(",") if numbers else None
        return said.strip()


class _Rows(Sequence[dict[str, Any]]):
    """The questions of one split, generated when they are asked for."""

    def __init__(self, dataset: Any, name: str, split: Split, held_out: float) -> None:
        self._dataset, self._name, self._split, self._held_out = dataset, name, split, held_out
        self._size, self._seed = dataset.config.size, dataset.seed
        share = held_out if split == "eval" else 1 - held_out
        if share == 0:
            raise WhetValueError(f"open_task: {name}: held_out is {held_out:g}, which leaves nothing for {split!r}.")
        self._n_tries = math.ceil(30 / share)  # a row finds none by chance with probability (1 - share)^tries < e^-30

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(self._size))]
        if not -self._size <= i < self._size:
            raise IndexError(i)
        for k in range(self._n_tries):
            item = self._item(i % self._size, k)
            prompt = [{"role": "user", "content": item["question"]}] if item else None
            if item and split_of(prompt, self._held_out) == self._split:
                return {"prompt": prompt, **{key: item[key] for key in ("question", "answer", "metadata")}}
        raise WhetValueError(
            f"open_task: {self._name}: none of {self._n_tries} items for row {i} belongs to {self._split!r} with "
            f"held_out = {self._held_out:g}: it has too few different questions. Widen its options, or change held_out."
        )

    def _item(self, i: int, k: int) -> dict[str, Any] | None:
        """Item ``i + k size``; None where the generator finds none."""
        # Not by that index: tables of some data sets end with their size. A copy, as one shrinks its size on its way.
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
        hint = f"Did you mean {near}?" if near else f"There are: {', '.join(DATASETS)}."
        raise WhetValueError(f"open_task: reasoning-gym has no data set {name!r}. {hint}")
    if name in _UNUSABLE:
        raise WhetValueError(f"open_task: {settings.name} cannot be used: {_UNUSABLE[name]}.")
    if name in _UNORDERED and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise WhetValueError(
            f"open_task: {settings.name} cannot be used as it is: its items depend on the order of Python's sets, "
            f"which is another one in each process. Set PYTHONHASHSEED=0 in the environment of the command."
        )
    _check_options(settings, [f.name for f in dataclasses.fields(DATASETS[name][1])])
    seed, size = settings.seed or 0, 1000 if settings.size is None else settings.size
    try:
        dataset = create_dataset(name, seed=seed, size=size, **settings.options)
        item = dataset[0]
    except Exception as error:  # AssertionError of its checks, or whatever a value of another type leads to
        raise WhetValueError(
            f"open_task: {settings.name} does not take these options: {type(error).__name__}: {error}."
        ) from error
    if item["answer"] is None and type(dataset).score_answer is ProceduralDataset.score_answer:
        raise WhetValueError(f"open_task: {settings.name} cannot be used: it has neither answers nor a verifier.")
    return dataset


def _check_options(settings: TaskSettings, fields: Sequence[str]) -> None:
    taken = [f for f in fields if f not in ("seed", "size")]
    for option in settings.options:
        if option not in taken:
            near = difflib.get_close_matches(option, [*taken, *(f.name for f in dataclasses.fields(settings))], n=1)
            hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(taken)}."
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
    """Whether evaluating an answer could do more than to compute: by its functions, attributes or strings."""
    functions = {name for name in _NAME.findall(answer) if hasattr(builtins, name)} - {"abs", "_"}
    return bool(functions) or re.search(r"__|['\"\\]|\.\s*[^\W\d]", answer) is not None


@contextlib.contextmanager
def _preserved_generators(seed: int) -> Iterator[None]:
    """Python's and NumPy's global generators, from which some data sets draw, of this seed; as before afterwards."""
    state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)  # noqa: NPY002
