"""A language model as the judge of answers: a reward function, or a preference of pairs, by a rubric.

The judge gets the rubric, the prompt and the answer, and replies with JSON that a grammar constrains: a number, or
which of two answers is better (Zheng et al. 2023, https://arxiv.org/abs/2306.05685). Replies are the most probable, and
may be kept on disk.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from whet.config.fields import AboveZero, PathText, Positive, check_range, check_types
from whet.config.sampling import SamplingParams
from whet.config.toml import read_toml
from whet.data.messages import is_messages, text_of
from whet.data.rows import tokenize_prompt
from whet.errors import RewardError, WhetTypeError, WhetValueError
from whet.memory import register_holder, unregister_holder
from whet.models.hub import find_on_hub
from whet.rollout.server import REQUESTS, ModelServer, ServerError, is_url
from whet.text.model import find_model, find_stop_ids, load_chat_tokenizer, load_engine

_REASON_LENGTH = 300
"""Characters of a reason."""
_MAX_TOKENS = 64
"""Tokens of a reply without its reason: enough for tokenizers of bytes, and spaces between the parts of the JSON."""
_ASK_SCORE = "Score the answer from {} (worst) to {} (best)."
_ASK_BETTER = "Which answer is better, 1 or 2?"


@dataclass(kw_only=True, eq=False)
class Judge:
    """A model that scores answers: ``GRPO(model, reward_fn=Judge(model=..., rubric=...))``.

    A request that fails, after several attempts, leaves its answer unscored and counts in ``reward_errors``; if all
    requests of a batch fail, it is an error.

    Raises:
        WhetTypeError: a value has the wrong type.
        WhetValueError: a value is out of range or missing, the model cannot be loaded, or the server does not answer.
    """

    model: PathText
    """URL of an OpenAI server such as http://127.0.0.1:8000/v1#NAME, a model folder, a .gguf file, or a hub name."""
    rubric: str
    """Properties of a good answer, in words for the judge."""
    lowest: int = 1
    """Score of the worst answers."""
    highest: int = 10
    """Score of the best answers."""
    reasons: bool = False
    """Let the judge give a reason before its score, of up to 300 characters: slower, and more often right."""
    cache: PathText = ""
    """SQLite file that keeps replies for later calls and runs; empty: none."""
    attempts: Positive = 5
    """Attempts of a request, 1, 2, 4, ... seconds apart."""
    timeout_s: AboveZero = 120.0
    """Time limit of a request to a server in seconds."""

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, "model", bool(self.model), "a URL, a folder, a .gguf file or a hub name")
        check_range(self, "rubric", bool(self.rubric.strip()), "a text for the judge")
        check_range(self, "highest", self.lowest < self.highest <= self.lowest + 100, "from lowest + 1 to lowest + 100")
        self.__name__ = "judge"
        self._complete = self._open_server() if is_url(self.model) else self._open_engine()

    @classmethod
    def read(cls, path: str) -> Judge:
        """Make the judge of a TOML file, whose keys are the fields.

        Raises:
            WhetValueError: as the constructor, or the file cannot be read, or has other keys.
        """
        settings, known = read_toml(path), [field.name for field in fields(cls)]
        if wrong := [name for name in settings if name not in known]:
            raise WhetValueError(f"{path}: there is no {wrong[0]}. A judge has {', '.join(known)}.")
        if missing := [name for name in ("model", "rubric") if name not in settings]:
            raise WhetValueError(f"{path}: {missing[0]} is missing. A judge needs model and rubric.")
        judge = cls(**settings)
        judge.__name__ = Path(path).stem
        return judge

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float | RewardError]:
        """Return the score of each completion, or the error of its request."""
        ask = _ASK_SCORE.format(self.lowest, self.highest)
        pairs = zip(prompts, completions, strict=True)
        questions = [self._question(prompt, {"answer": answer}, ask, "score") for prompt, answer in pairs]
        found = self._ask(questions, "score", range(self.lowest, self.highest + 1))
        return [each if isinstance(each, RewardError) else float(each) for each in found]

    def prefer(self, pairs: Sequence[tuple[Any, Any]], prompts: Sequence[Any]) -> list[int | None]:
        """Return which completion of each pair is better: 0 the first, 1 the second, None undecided.

        Judges prefer a place: a pair is asked in both orders, and is undecided if the replies differ or one is missing.
        """
        questions = [
            self._question(prompt, {"answer_1": one, "answer_2": other}, _ASK_BETTER, "better")
            for prompt, pair in zip(prompts, pairs, strict=True)
            for one, other in (pair, pair[::-1])
        ]
        found = self._ask(questions, "better", range(1, 3))
        return [
            None if RewardError in map(type, both) or both[0] == both[1] else int(both[0] == 2)
            for both in zip(found[::2], found[1::2], strict=True)
        ]

    def _question(self, prompt: Any, answers: Mapping[str, Any], ask: str, name: str) -> str:
        parts = {"prompt": prompt, **answers}
        texts = "\n\n".join(f"<{tag}>\n{_as_text(part)}\n</{tag}>" for tag, part in parts.items())
        form = f'{{"reason": "a sentence or two", "{name}": ...}}' if self.reasons else f'{{"{name}": ...}}'
        return f"{self.rubric.strip()}\n\n{texts}\n\n{ask} Reply with JSON: {form}"

    def _ask(self, questions: Sequence[str], name: str, choices: range) -> list[int | RewardError]:
        """Return the number in the reply to each question, or the error of its request.

        Raises:
            RewardError: all requests failed.
        """
        keys = [hashlib.sha256(f"{self._identity}\n{choices}\n{text}".encode()).hexdigest() for text in questions]
        known: dict[str, int | RewardError] = dict(self._read_cache(keys))
        new = {key: text for key, text in zip(keys, questions, strict=True) if key not in known}
        found = dict(zip(new, self._complete(list(new.values()), name, choices), strict=True)) if new else {}
        errors = [each for each in found.values() if isinstance(each, RewardError)]
        self._write_cache({key: each for key, each in found.items() if not isinstance(each, RewardError)})
        if errors and len(errors) == len(new) and not known:
            raise RewardError(f"{self.__name__}: all of {len(errors)} requests failed: {errors[0]}") from errors[0]
        if errors:
            warnings.warn(
                f"{self.__name__}: {len(errors)} of {len(questions)} requests failed, and are not scored: {errors[0]}",
                stacklevel=2,
            )
        known |= found
        return [known[key] for key in keys]

    def _open_server(self) -> Callable[..., list[int | RewardError]]:
        server = ModelServer(self.model, "judge", self.timeout_s)
        self._identity = f"{server.url}#{server.model}"

        def reply(question: str, name: str, choices: range) -> int | RewardError:
            schema = {"name": "judgement", "strict": True, "schema": self._schema(name, choices)}
            body = {
                "model": server.model, "messages": [{"role": "user", "content": question}], "temperature": 0,
                "max_tokens": self._max_tokens(), "response_format": {"type": "json_schema", "json_schema": schema},
            }  # fmt: skip
            for attempt in range(self.attempts):
                try:
                    found = server.ask("/chat/completions", body)
                except ServerError as error:
                    if error.is_final or attempt + 1 == self.attempts:
                        return RewardError(str(error))
                    time.sleep(2**attempt)
                else:
                    return _read_reply(_content_of(found), name, choices)
            raise AssertionError("attempts is at least 1")

        def complete(questions: list[str], name: str, choices: range) -> list[int | RewardError]:
            with ThreadPoolExecutor(REQUESTS) as pool:
                return list(pool.map(lambda question: reply(question, name, choices), questions))

        return complete

    def _open_engine(self) -> Callable[..., list[int | RewardError]]:
        where = "judge"
        path = find_on_hub(self.model, where)
        model = find_model(path, where)
        engine, tokenizer = load_engine(model, None, None, where), load_chat_tokenizer(model, where)
        engine.tokenizer = tokenizer
        stops = find_stop_ids(path, tokenizer, engine.config.vocab_size, where)
        self._identity = engine.fingerprint()
        unregister_holder(engine)
        self._memory_blocks = engine.memory_blocks
        register_holder(self)

        def complete(questions: list[str], name: str, choices: range) -> list[int | RewardError]:
            chats = [[{"role": "user", "content": question}] for question in questions]
            has_template = getattr(tokenizer, "chat_template", None) is not None
            rows = [{"prompt": chat if has_template else chat[0]["content"]} for chat in chats]
            regex = rf'\{{{self._reason_regex()}"{name}": ?({"|".join(map(str, choices))})\}}'
            sampling = SamplingParams(
                temperature=0, stop_token_ids=stops, max_new_tokens=self._max_tokens(), regex=regex
            )
            prompts = [tokenize_prompt(row, tokenizer) for row in rows]
            replies = [each.token_ids for [each] in engine.generate(prompts, 1, sampling)]
            texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in replies]
            return [_read_reply(text, name, choices) for text in texts]

        return complete

    def memory_blocks(self) -> Iterator[tuple[str, Hashable, int]]:
        """Yield the memory of a model in this process, for ``whet.memory_report``."""
        for _, key, n_bytes in self._memory_blocks():
            yield "reward_models", key, n_bytes

    def _max_tokens(self) -> int:
        return _MAX_TOKENS + (_REASON_LENGTH if self.reasons else 0)

    def _reason_regex(self) -> str:
        return rf'"reason": "[^"\\\n]{{0,{_REASON_LENGTH}}}", ' if self.reasons else ""

    def _schema(self, name: str, choices: range) -> dict[str, Any]:
        reason = {"reason": {"type": "string", "maxLength": _REASON_LENGTH}} if self.reasons else {}
        properties = {**reason, name: {"type": "integer", "enum": list(choices)}}
        return {
            "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
        }  # fmt: skip

    # --- replies on disk ----------------------------------------------------------------------------------

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """Context of a transaction. Processes that share the file wait for each other."""
        with closing(sqlite3.connect(self.cache, timeout=60)) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, value INTEGER)")
            yield database

    def _read_cache(self, keys: Sequence[str]) -> Iterator[tuple[str, int]]:
        if not self.cache:
            return
        try:
            with self._database() as database:
                for key in keys:
                    yield from database.execute("SELECT key, value FROM replies WHERE key = ?", [key])
        except sqlite3.Error as error:
            raise WhetValueError(f"{self.__name__}: cache {self.cache!r} cannot be read: {error}.") from error

    def _write_cache(self, replies: Mapping[str, Any]) -> None:
        if self.cache and replies:
            with self._database() as database:
                database.executemany("INSERT OR REPLACE INTO replies VALUES (?, ?)", replies.items())


def _as_text(part: Any) -> str:
    """Return a prompt or an answer as the judge reads it; of messages, each with its role."""
    if is_messages(part):
        return "\n\n".join(f"{message['role']}: {text_of(message)}" for message in part)
    if not isinstance(part, str):
        raise WhetTypeError(f"judge: it got {part!r:.60}, expected text or messages. Pass a tokenizer to the trainer.")
    return part


def _content_of(response: Any) -> Any:
    """Return the text of a chat's response; None: it has none."""
    try:
        return response["choices"][0]["message"]["content"]
    except (LookupError, TypeError):
        return None


def _read_reply(reply: Any, name: str, choices: range) -> int | RewardError:
    try:
        value = json.loads(reply)[name]
    except (ValueError, TypeError, LookupError):
        return RewardError(f"the reply {reply!r:.100} is not JSON with {name!r}")
    is_valid = isinstance(value, int) and not isinstance(value, bool) and value in choices
    return value if is_valid else RewardError(f"{name} is {value!r:.60}, expected {choices[0]} to {choices[-1]}")
