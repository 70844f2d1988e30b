"""Teachers of distillation: models whose log-probs of given tokens a student learns from.

A teacher has the vocabulary of the student: a token id has the same text.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, cast

import numpy as np

from whet.config.settings import ComputeDtype
from whet.errors import WhetError, WhetTypeError, WhetValueError
from whet.learner import Learner
from whet.models.tokenizers.token_texts import PROBES, find_difference, read_token_texts
from whet.rollout.server import REQUESTS, ModelServer, is_url
from whet.text.model import find_model, load_chat_tokenizer, load_engine


class Teacher(Protocol):
    """Model that scores tokens, such as an ``Engine``."""

    def logprobs(
        self, sequences: Sequence[Sequence[int]], *, start: Sequence[int], temperature: float
    ) -> list[np.ndarray]:
        """Return the log-probs of the tokens of each sequence from ``start`` on, as ``Engine.logprobs`` does."""
        ...


class ServerTeacher:
    """Teacher behind an OpenAI URL whose server returns log-probs of prompts: ``whet serve``, or vLLM.

    Args:
        url: see ``ModelServer``.

    Raises:
        WhetValueError: as ``ModelServer``.
    """

    def __init__(self, url: str) -> None:
        self._server = ModelServer(url, "teacher")

    def logprobs(
        self, sequences: Sequence[Sequence[int]], *, start: Sequence[int], temperature: float
    ) -> list[np.ndarray]:
        """Return the log-probs of the tokens of each sequence from ``start`` on, float32.

        Raises:
            WhetValueError: temperature is not 1, of which servers return log-probs; or the server refuses.
        """
        if temperature != 1:
            raise WhetValueError(
                f"teacher: temperature is {temperature}, and servers return log-probs at temperature 1. Set 1, or pass "
                f"the teacher's folder or .gguf file."
            )
        with ThreadPoolExecutor(REQUESTS) as pool:
            return list(pool.map(self._score, sequences, start))

    def _score(self, ids: Sequence[int], start: int) -> np.ndarray:
        ids = list(map(int, ids))
        body = {"model": self._server.model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        found = self._server.ask("/completions", body)["choices"][0].get("prompt_logprobs")
        if found is None or len(found) != len(ids):
            url = self._server.url
            raise WhetValueError(f"teacher: {url} returns no prompt_logprobs. Serve it by whet serve, or vLLM.")
        return np.array([found[i][str(ids[i])]["logprob"] for i in range(start, len(ids))], np.float32)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, from ``/tokenize`` next to the OpenAI API."""
        body = {"model": self._server.model, "prompt": text, "add_special_tokens": False}
        return self._server.ask("/tokenize", body, self._server.url.removesuffix("/v1"))["tokens"]


def open_teacher(teacher: Any, tokenizer: Any, where: str) -> Teacher:
    """Return a teacher, and check that its vocabulary is the student's.

    Args:
        teacher: a folder, a .gguf file, a URL (``ServerTeacher``), an ``Engine``, or another ``Teacher``.
        tokenizer: the student's; None: token ids are used unchecked.

    Raises:
        WhetTypeError: it is none of these.
        WhetValueError: it cannot be loaded, or has another tokenizer.
    """
    if isinstance(teacher, (str, os.PathLike)):
        text = os.fspath(teacher)
        if is_url(text):
            server = ServerTeacher(text)
            if tokenizer is not None:
                _check_tokens(tokenizer, server.tokenize, f"{where}: teacher {text}")
            return server
        model = find_model(text, f"{where}: teacher")
        engine = load_engine(model, None, None, f"{where}: teacher")
        engine.tokenizer = load_chat_tokenizer(model, f"{where}: teacher")
        teacher = engine
    if not callable(getattr(teacher, "logprobs", None)):
        raise WhetTypeError(
            f"{where}: teacher is {teacher!r:.60}, expected a folder, a .gguf file, a URL or a whet.Engine."
        )
    if tokenizer is not None and getattr(teacher, "tokenizer", None) is not None:
        _check_texts(tokenizer, teacher.tokenizer, where)
    return teacher


def open_learner(teacher: Any, tokenizer: Any, student: Learner, where: str) -> Learner:
    """Return a teacher whose whole distributions are computed: a folder, a .gguf file, or a ``Learner``.

    Raises:
        WhetTypeError: it is none of these.
        WhetValueError: it cannot be loaded, or has another tokenizer.
    """
    if isinstance(teacher, Learner):
        return teacher
    if not isinstance(teacher, (str, os.PathLike)) or is_url(os.fspath(teacher)):
        raise WhetTypeError(
            f"{where}: teacher is {teacher!r:.60}, and divergence is 'full', which needs its weights: a folder, a "
            f".gguf file or a whet.Learner. Set divergence to 'sampled', or pass one of these."
        )
    model = find_model(os.fspath(teacher), f"{where}: teacher")
    if tokenizer is not None:
        _check_texts(tokenizer, load_chat_tokenizer(model, f"{where}: teacher"), where)
    return Learner(model, lora_rank=1, compute=cast(ComputeDtype, student.compute))


def _check_texts(own: Any, others: Any, where: str) -> None:
    """Raise unless token ids have the same texts; one vocabulary may have more tokens, such as unused ones."""
    first, second = (read_token_texts(each, where) for each in (own, others))
    found = find_difference(first, second)
    if found is None and (n := len(second.tokens)) < len(first.tokens):
        found = n, first.tokens[n].decode(errors="replace"), "no token"
    if found is not None:
        i, text, other = found
        raise WhetValueError(
            f"{where}: the teacher has another tokenizer: token {i} is {text!r} for the student and {other!r} "
            f"for the teacher. Choose a teacher of the student's family."
        )


def _check_tokens(own: Any, tokenize: Any, where: str) -> None:
    """Raise unless both tokenizers split some texts into the same ids."""
    for text in PROBES:
        ids, others = own.encode(text, add_special_tokens=False), tokenize(text)
        if list(ids) != list(others):
            raise WhetValueError(
                f"{where} has another tokenizer: {text!r:.30} is {list(ids)[:6]} for the student and {others[:6]} for "
                f"the teacher. Choose a teacher of the student's family."
            )


def score_tokens(
    teacher: Teacher, prompt_ids: Sequence[list[int]], completion_ids: Sequence[list[int]], temperature: float
) -> list[np.ndarray]:
    """Return the teacher's log-probs of the tokens of each completion.

    Raises:
        WhetError: the teacher failed.
    """
    rows = [[*prompt, *ids] for prompt, ids in zip(prompt_ids, completion_ids, strict=True)]
    found = list(teacher.logprobs(rows, start=list(map(len, prompt_ids)), temperature=temperature))
    for ids, logprobs in zip(completion_ids, found, strict=True):
        if len(logprobs) != len(ids):
            raise WhetError(f"teacher: it returned {len(logprobs)} log-probs for {len(ids)} tokens.")
    return found
