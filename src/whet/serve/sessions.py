"""Sessions: the requests of one rollout to a server, recorded as they are sampled, and the episode that they form.

A request whose prompt begins with the ids of an earlier request and its completion continues the episode; any other
one begins a branch. A chat that repeats an earlier one with its reply and adds messages is continued by appending ids
(``whet.text.seams``), so that nothing sampled is tokenised again. The random numbers of a request depend on the seed,
the session's key, its prompt, and the number of earlier requests with this prompt, not on the time of its arrival.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from whet.config.sampling import DISTRIBUTION_SETTINGS, Completion, SamplingParams, StreamKey
from whet.errors import WhetError
from whet.rollout.episodes import End, Episode, EpisodeLimits
from whet.serve.errors import ApiError
from whet.text.seams import RewrittenHistoryError, Seams

Message = Mapping[str, Any]


class Rendered(NamedTuple):
    """A chat whose prompt was rendered: its messages, and the template's other variables."""

    messages: list[dict[str, Any]]
    row: dict[str, Any]


@dataclass(eq=False)
class Turn:
    """A request of a session.

    Attributes:
        prompt_ids: as sampled.
        sampling: settings.
        chat: what the prompt was rendered from; None: ids or a text.
        completion: None while it is sampled.
        text: of the completion, as the client got it.
        reply: the text as a message, once it is needed.
    """

    prompt_ids: list[int]
    sampling: SamplingParams
    chat: Rendered | None
    completion: Completion | None = None
    text: str = ""
    reply: dict[str, Any] | None = None

    @property
    def token_ids(self) -> list[int]:
        """The sampled tokens."""
        assert self.completion is not None, "a turn of a session is complete"
        return self.completion.token_ids

    @property
    def ids(self) -> list[int]:
        """The prompt and the sampled tokens."""
        return [*self.prompt_ids, *self.token_ids]

    @property
    def is_ended(self) -> bool:
        """Whether its last token is a stop token."""
        return self.token_ids[-1:] != [] and self.token_ids[-1] in self.sampling.stop_token_ids


class Session:
    """The requests of one rollout. Methods are called by the server's threads and by the one that plays.

    Args:
        key: of the random numbers.
        sampling: settings of the run, which requests may not change.
        limits: of the episode; ``max_new_tokens`` counts the sampled tokens of a branch.

    Attributes:
        turns: complete requests.
        error: why the rollout does not count; "": it does.
        failure: an error that concerns all rollouts.
        refusal: the limit that refused a request last.
        is_closed: whether its client has ended.
        n_handled: number of requests without a response; the server's event loop counts.
    """

    def __init__(self, key: StreamKey, sampling: SamplingParams, limits: EpisodeLimits) -> None:
        self._key, self._sampling, self._limits = key, sampling, limits
        self.turns: list[Turn] = []
        self.error, self.is_closed, self.n_handled = "", False, 0
        self.failure: WhetError | None = None
        self.refusal: End | None = None
        self._open: list[Turn] = []
        self._chats: dict[tuple[int, ...], Rendered] = {}
        self._lock = threading.Lock()
        self._active_s = time.monotonic()

    @property
    def key(self) -> StreamKey:
        """Key of the random numbers."""
        return self._key

    def deadline(self) -> float:
        """Return when the client has neither sent a request nor waited for one for ``timeout_s`` seconds."""
        return (time.monotonic() if self._open else self._active_s) + self._limits.timeout_s

    def touch(self) -> None:
        """Count the client's time from now on."""
        self._active_s = time.monotonic()

    def begin(self, prompt_ids: list[int], sampling: SamplingParams) -> Turn:
        """Begin a request.

        Raises:
            ApiError: 400: its settings are not the run's, or a limit is reached.
        """
        for name in DISTRIBUTION_SETTINGS:
            if (given := getattr(sampling, name)) != (own := getattr(self._sampling, name)):
                raise ApiError(
                    400, f"{name} is {given!r}, and the run samples with {own!r}. Omit it, or set it in the run.", name
                )
        with self._lock:
            if self.is_closed:
                raise ApiError(400, "The session has ended.")
            if len(self.turns) + len(self._open) >= self._limits.max_turns:
                self.refuse("turns")
                raise ApiError(400, f"The session has had max_turns={self._limits.max_turns} requests.", None, "turns")
            before = [turn for turn in self.turns if _begins(prompt_ids, turn.ids)]
            left = self._sampling.max_new_tokens - sum(len(turn.token_ids) for turn in before)
            if left <= 0:
                self.refuse("length")
                most = f"max_new_tokens={self._sampling.max_new_tokens}"
                raise ApiError(400, f"The conversation has {most} sampled tokens.", None, "length")
            n_same = sum(turn.prompt_ids == prompt_ids for turn in [*self.turns, *self._open])
            digest = hashlib.sha256(np.array(prompt_ids, "<i8").tobytes()).digest()
            words = np.frombuffer(digest, "<u4").tolist()
            longest = min(left, self._limits.max_turn_tokens or left, sampling.max_new_tokens)
            changes: dict[str, Any] = {
                "seed": int(np.random.SeedSequence([self._sampling.seed, *words, n_same]).generate_state(1)[0]),
                "max_new_tokens": longest,
                "kept_tokens": self._sampling.kept_tokens,
                "experts": self._sampling.experts,
            }
            chat = self._chats.get(tuple(prompt_ids))
            self._open.append(turn := Turn(prompt_ids, dataclasses.replace(sampling, **changes), chat))
            return turn

    def end(self, turn: Turn, completion: Completion, text: str) -> None:
        """End a request whose completion is complete."""
        with self._lock:
            if self.is_closed:
                return
            turn.completion, turn.text = completion, text
            self._open.remove(turn)
            self.turns.append(turn)
            self.touch()

    def drop(self, turn: Turn, error: str = "") -> None:
        """End a request that the server refused, or, with an error, that the client left; a complete one stays."""
        with self._lock:
            if turn in self._open:
                self._open.remove(turn)
                self.error = self.error or error
                self.touch()

    def refuse(self, limit: End) -> None:
        """Record that a limit refused a request."""
        self.refusal = limit

    def render(self, chat: Rendered, ids: list[int], seams: Seams, reply_of: Callable[[Turn], dict[str, Any]]) -> Any:
        """Return the prompt of a chat: appended to an earlier request that it repeats, or ``ids``, its rendering.

        Raises:
            RewrittenHistoryError: the template rewrites earlier turns, and episodes may not branch.
            WhetValueError: turns cannot be joined.
        """
        turns = [turn for turn in self.turns if turn.chat is not None and turn.chat.row == chat.row]
        found = [turn for turn in turns if _repeats(chat.messages, turn, reply_of)]
        if found:
            turn = max(found, key=lambda turn: (len(turn.ids), turn.ids))
            n = len(turn.chat.messages) + 1 if turn.chat else 0
            try:
                seam = seams.seam(chat.messages[:n], chat.messages[n:])
                ids = [*turn.ids, *seams.ids(seam, is_ended=turn.is_ended)]
            except RewrittenHistoryError as error:
                if not self._limits.may_branch:
                    self.failure = error
                    raise
            except WhetError as error:
                self.failure = error
                raise
        with self._lock:
            self._chats[tuple(ids)] = chat
        return ids

    def close(self, error: str) -> None:
        """End the session, with the error of its client, if there is one."""
        with self._lock:
            self.is_closed = True
            unfinished = "the agent returned during a request" if self._open or self.n_handled else ""
            unused = "the agent sent no request" if not self.turns else ""
            self.error = error or self.error or unfinished or unused

    def episode(self, row: Mapping[str, Any], reward: float | None, reply_of: Callable[[Turn], Any]) -> Episode:
        """Return the episode of a closed session; its reward is None if the rollout does not count."""
        episode = Episode(self._key, row)
        lines = _lines(self.turns)
        for i, line in enumerate(lines):
            for j, turn in enumerate(line):
                assert turn.completion is not None, "a turn of a session is complete"
                if j:
                    episode.add_read(turn.prompt_ids[len(line[j - 1].ids) :])
                elif i:
                    episode.begin_branch(turn.prompt_ids)
                else:
                    episode.prompt_ids = list(turn.prompt_ids)
                episode.add_turn(turn.completion)
        if lines:
            first, last = lines[-1][0], lines[-1][-1]
            episode.n_opening = len(first.chat.messages) if first.chat else 0
            episode.messages = [*(last.chat.messages if last.chat else ()), reply_of(last)]
        if reward is None or self.error:
            episode.end, episode.error = "error", self.error
        else:
            episode.end = self.refusal or "done"
            episode.rewards = [0.0] * (len(self.turns) - 1) + [reward]
        return episode


def _lines(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Return turns in lines, in which each continues the ids of the one before; their order is the prompts'.

    A turn that continues a turn in the middle of a line begins a line. The tokens that both lines share were sampled on
    the first, and are trained there only.
    """
    lines: list[list[Turn]] = []
    for turn in sorted(turns, key=lambda turn: (len(turn.prompt_ids), turn.prompt_ids, turn.token_ids)):
        continued = [line for line in lines if _begins(turn.prompt_ids, line[-1].ids)]
        if continued:
            max(continued, key=lambda line: len(line[-1].ids)).append(turn)
        else:
            lines.append([turn])
    return lines


def _begins(ids: Sequence[int], with_ids: Sequence[int]) -> bool:
    return list(ids[: len(with_ids)]) == list(with_ids)


def _repeats(messages: Sequence[Message], turn: Turn, reply_of: Callable[[Turn], Message]) -> bool:
    """Whether messages repeat the messages of a turn and its reply as it was sent, and continue."""
    assert turn.chat is not None, "the caller has chosen chats"
    before = turn.chat.messages
    if len(messages) < len(before) + 2 or list(messages[: len(before)]) != before:
        return False
    return _parts(messages[len(before)]) == _parts(reply_of(turn))


def _parts(message: Message) -> Any:
    """Return the parts of a message that a template renders; clients may leave out or add others."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return message.get("role"), message.get("content") or "", message.get("reasoning_content") or "", calls
