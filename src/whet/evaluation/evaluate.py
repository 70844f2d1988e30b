"""Evaluation of a model on a task: completions are sampled on an engine and scored in child processes.

Sampling and scoring do not overlap: both use every processor. Completions do not depend on other items or on the
engine's batch, only on the weights, the settings, the seed and the item's index.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from whet import _core
from whet.config.sampling import Completion, SamplingParams
from whet.data.messages import is_messages
from whet.data.rows import tokenize_prompt
from whet.data.thinking import Replies
from whet.errors import RowError, WhetTypeError, WhetValueError
from whet.evaluation.rewarded import RewardedRows
from whet.evaluation.statistics import Estimate, mean, pass_at_k, proportion, proportion_difference, sign_test
from whet.rewards.functions import as_score
from whet.rewards.processes import TIMEOUT_S, call_here, call_in_children, check_timeout, summary
from whet.rollout.protocol import RolloutEngine
from whet.tasks import Task, make_prompt
from whet.tasks.mixture import prepend_tag

FULL_SCORE = 1.0
"""Default of ``TaskResult.full_score``."""
_CHUNK = 64
"""Completions per child process, unless one of them hangs."""


@dataclass(frozen=True)
class Items:
    """The items of a task, tokenised for a model.

    Attributes:
        task: the task.
        rows: N of its rows.
        prompt_ids: token ids of N prompts.
    """

    task: Task
    rows: Sequence[Mapping[str, Any]]
    prompt_ids: Sequence[Sequence[int]]

    @property
    def prompts(self) -> list[Any]:
        """Prompts of the rows, without the system prompt; rows of an environment need none."""
        return [row.get("prompt", row) for row in self.rows]

    def check_context(self, max_new_tokens: int, max_position: int, where: str) -> None:
        """Raise if a prompt with ``max_new_tokens`` exceeds a context of ``max_position``.

        Raises:
            WhetValueError: with the number of such prompts and a setting that fits.
        """
        lengths = [len(prompt) for prompt in self.prompt_ids]
        n_long, longest = sum(length + max_new_tokens > max_position for length in lengths), max(lengths)
        if not n_long:
            return
        room = max_position - longest
        fix = f"Lower max_new_tokens to {room}" if room > 0 else "Make the task's items shorter"
        raise WhetValueError(
            f"{where}: {n_long:,} of {len(lengths):,} prompts of {self.task.name} exceed the model's context: it has "
            f"{max_position:,} positions, max_new_tokens takes {max_new_tokens:,} of them, and the longest prompt has "
            f"{longest:,} tokens. {fix}, or use a model with a longer context."
        )


def read_items(
    task: Task,
    tokenizer: Any,
    *,
    rows: Sequence[Mapping[str, Any]] | None = None,
    raw: bool = False,
    where: str = "evaluate",
) -> Items:
    """Tokenise the items of a task, with prompts as in training (``whet.tasks.make_prompt``).

    Args:
        rows: rows of the task; None: all.
        raw: whether to replace the chat template by plain paragraphs, one per message.

    Raises:
        WhetValueError: the task has no items, or has chat messages without a chat template or ``raw``.
    """
    rows = list(task.rows if rows is None else rows)
    if not rows:
        raise WhetValueError(f"{where}: the task {task.name} has no items.")
    prompts = [make_prompt(task, row) for row in rows]
    if raw:
        prompts = [_as_text(prompt) for prompt in prompts]
    elif not tokenizer.chat_template and any(map(is_messages, prompts)):
        raise WhetValueError(
            f"{where}: {task.name} has chat messages, but the model has no chat template. Pass one (--chat-template "
            f"with a Jinja file), a tokenizer that has one (--tokenizer with a folder or .gguf file), or raw (--raw) "
            f"for plain text."
        )
    rows_with_prompt = [{**row, "prompt": prompt} for row, prompt in zip(rows, prompts, strict=True)]
    return Items(task, rows, [_tokenize(task, i, row, tokenizer) for i, row in enumerate(rows_with_prompt)])


def _tokenize(task: Task, i: int, row: Mapping[str, Any], tokenizer: Any) -> list[int]:
    try:
        return tokenize_prompt(row, tokenizer)
    except (WhetValueError, WhetTypeError) as error:
        raise RowError(f"item {i} of {task.name}: {error}") from error


def _as_text(prompt: Any) -> Any:
    return "\n\n".join(message["content"] for message in prompt) if is_messages(prompt) else prompt


@dataclass(frozen=True)
class TaskResult:
    """The completions of N items of a task, n of each, and their scores.

    Attributes:
        items: the items.
        completions: N x n.
        texts: decoded completions.
        scores: (N, n) float64.
        failures: (item, sample) -> reason of a scoring failure; the score is then 0.
        elapsed_s: seconds of sampling and scoring.
        full_score: minimum score of a completion that solves its item.
    """

    items: Items
    completions: list[list[Completion]]
    texts: list[list[str]]
    scores: np.ndarray
    failures: Mapping[tuple[int, int], str]
    elapsed_s: float
    full_score: float = FULL_SCORE

    @property
    def solved(self) -> np.ndarray:
        """(N, n) bool: whether a completion has a full score."""
        return self.scores >= self.full_score

    @property
    def is_graded(self) -> bool:
        """Whether some score is neither 0 nor 1, so that the mean score is not the accuracy."""
        return bool(np.any((self.scores != 0) & (self.scores != 1)))

    @property
    def accuracy(self) -> Estimate:
        """Proportion of completions that solve their item."""
        return proportion(self.solved.mean(axis=1), self.scores.shape[1])

    @property
    def score(self) -> Estimate:
        """Mean score."""
        return mean(self.scores.mean(axis=1))

    @property
    def pass_at(self) -> dict[int, Estimate]:
        """k -> probability that at least one of k completions solves an item, for k = 1, 2, 4 ... up to n."""
        n = self.scores.shape[1]
        powers = [1 << i for i in range(n.bit_length())]
        return {k: proportion(pass_at_k(self.solved, k), n // k) for k in powers}

    def summary(self) -> dict[str, Any]:
        """Return the results as a JSON value, without completions."""
        completions = [completion for group in self.completions for completion in group]
        n_items, n = self.scores.shape
        return {
            "task": self.items.task.name,
            "items": n_items,
            "samples": n,
            "accuracy": as_json(self.accuracy),
            "score": as_json(self.score) if self.is_graded else as_json(self.accuracy),
            "pass_at": {str(k): as_json(estimate) for k, estimate in self.pass_at.items()},
            "prompt_tokens": float(np.mean([len(prompt) for prompt in self.items.prompt_ids])),
            "completion_tokens": float(np.mean([completion.n_sampled for completion in completions])),
            "truncated": float(np.mean([completion.finish_reason == "length" for completion in completions])),
            "scoring_failures": len(self.failures),
            "elapsed_s": self.elapsed_s,
        }

    def records(self) -> list[dict[str, Any]]:
        """Return each item's plain fields and its completions with their scores, as JSON values."""

        def sample(i: int, j: int) -> dict[str, Any]:
            completion = self.completions[i][j]
            failure = {"failure": self.failures[i, j]} if (i, j) in self.failures else {}
            return {
                "text": self.texts[i][j],
                "score": float(self.scores[i, j]),
                "n_tokens": completion.n_sampled,
                "finish_reason": completion.finish_reason,
                **failure,
            }

        plain = [{name: v for name, v in row.items() if isinstance(v, (str, int, float))} for row in self.items.rows]
        n = self.scores.shape[1]
        return [{"item": i, **row, "completions": [sample(i, j) for j in range(n)]} for i, row in enumerate(plain)]


def evaluate(
    engine: RolloutEngine,
    items: Items,
    tokenizer: Any,
    *,
    n: int = 1,
    sampling: SamplingParams,
    timeout_s: float | None = TIMEOUT_S,
    on_item: Callable[[], object] = lambda: None,
    **options: Any,
) -> TaskResult:
    """Sample ``n`` completions of each item and score them.

    A scorer that raises, returns a value that is not finite, or exceeds ``timeout_s`` gives score 0 and is counted.
    Scorers run in child processes, or in this process if ``timeout_s`` is None, the default on Windows.

    Args:
        on_item: called after an item is sampled.
        options: passed to the engine's ``generate``, such as ``adapter``.

    Raises:
        WhetValueError: as for the engine's ``generate``, or this system cannot end a scorer after ``timeout_s``.
    """
    check_timeout("evaluate", "timeout_s", timeout_s)
    start_s = time.perf_counter()
    generate: Callable[..., Iterable[list[Completion]]] = getattr(engine, "generate_each", engine.generate)
    completions = []
    for group in generate(items.prompt_ids, n, sampling, **options):
        completions.append(group)
        on_item()

    replies = Replies(tokenizer)

    def text_of(completion: Completion) -> str:
        if completion.text is not None:  # up to a stop string
            return completion.text
        return replies.text(completion.token_ids)

    texts = [list(map(text_of, group)) for group in completions]
    scored = texts
    if not isinstance(
        items.task, RewardedRows
    ):  # reward functions get the model's text without the tag, as in training
        opening = map(replies.opening_tag, items.prompt_ids)
        scored = [[prepend_tag(text, tag) for text in group] for tag, group in zip(opening, texts, strict=True)]
    scores, failures = score_completions(items.task, items.rows, scored, timeout_s)
    return TaskResult(items, completions, texts, scores, failures, time.perf_counter() - start_s)


# --- two models -----------------------------------------------------------------------------------------


def compare(first: TaskResult, second: TaskResult) -> dict[str, Any]:
    """Return the differences ``second - first`` on the same items, as a JSON value.

    Raises:
        WhetValueError: the items differ.
    """
    if first.items.prompts != second.items.prompts:
        raise WhetValueError("compare: the results have different items. Evaluate both models on the same items.")
    solved = [result.solved.mean(axis=1) for result in (first, second)]
    scores = [result.scores.mean(axis=1) for result in (first, second)]
    accuracy = proportion_difference(*solved)
    graded = first.is_graded or second.is_graded
    return {
        "task": first.items.task.name,
        "accuracy_difference": as_json(accuracy),
        "score_difference": as_json(mean(scores[1] - scores[0]) if graded else accuracy),
        "better": int(np.sum(scores[1] > scores[0])),
        "worse": int(np.sum(scores[1] < scores[0])),
        "p_value": sign_test(*scores),
    }


def as_json(estimate: Estimate) -> dict[str, float | None]:
    """Return the fields of an estimate, with None for NaN."""
    return {name: None if math.isnan(value) else value for name, value in estimate._asdict().items()}


# --- scoring --------------------------------------------------------------------------------------------


def score_completions(
    task: Task, rows: Sequence[Mapping[str, Any]], texts: Sequence[Sequence[Any]], timeout_s: float | None
) -> tuple[np.ndarray, dict[tuple[int, int], str]]:
    """Score the completions of N rows in child processes; return (N, n) scores, and reasons of failures, which score 0.

    A child has ``timeout_s`` for ``_CHUNK`` completions. If it times out or dies, each of them gets a separate child.
    Without a time limit this process scores.
    """
    scores = np.zeros((len(texts), len(texts[0])))
    indices = [(i, j) for i, group in enumerate(texts) for j in range(len(group))]
    chunks = [indices[start : start + _CHUNK] for start in range(0, len(indices), _CHUNK)]
    outcomes: dict[tuple[int, int], tuple[float, str]] = {}
    while chunks:
        n = _core.n_processors()
        wave, chunks = chunks[:n], chunks[n:]
        score = _score_here if timeout_s is None else _score_in_child
        calls = [partial(score, task, [(texts[i][j], rows[i]) for i, j in chunk]) for chunk in wave]
        results = call_here(calls) if timeout_s is None else call_in_children(calls, list, timeout_s)
        for chunk, result in zip(wave, results, strict=True):
            if not isinstance(result, BaseException):
                outcomes |= zip(chunk, result, strict=True)
            elif len(chunk) > 1:
                chunks += [[index] for index in chunk]
            else:
                outcomes[chunk[0]] = 0.0, str(summary(result))
    for index, (score, _) in outcomes.items():
        scores[index] = score
    return scores, {index: outcomes[index][1] for index in indices if outcomes[index][1]}


def _score_in_child(task: Task, pairs: Sequence[tuple[Any, Mapping[str, Any]]]) -> list[tuple[float, str]]:
    with contextlib.suppress(OSError):  # standard error is closed
        os.dup2(2, 1)  # covers libraries that print without Python
    return _score_here(task, pairs)


def _score_here(task: Task, pairs: Sequence[tuple[Any, Mapping[str, Any]]]) -> list[tuple[float, str]]:
    """Return (score, "") or (0, reason of failure) per completion; keep prints of tasks out of the command's output."""
    with contextlib.redirect_stdout(sys.stderr):
        return [_score(task, completion, row) for completion, row in pairs]


def _score(task: Task, completion: Any, row: Mapping[str, Any]) -> tuple[float, str]:
    try:
        value = task.score(completion, row)
    except Exception as error:
        return 0.0, f"it raised {summary(error)}"
    score = as_score(value)
    if score is None or not math.isfinite(score):
        return 0.0, f"it returned {value!r:.60}, which is not a finite number"
    return score, ""
