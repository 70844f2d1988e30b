"""Episodes of an environment, sampled turn by turn: while one waits for its environment, others decode.

An episode becomes a ``Completion``: the tokens after the opening, of which the model sampled some. Token ids are only
appended (``whet.text.seams``); where the template rewrites earlier turns, the episode continues on another branch. Turn
t of a sample is drawn with the seed of (seed, t) and the sample's stream key, so that results depend on neither speed
nor batch; the first turn is drawn as a completion without an environment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np

from whet.config.kept_tokens import KeptTokens
from whet.config.sampling import Completion, SamplingParams, StreamKey
from whet.data.messages import text_of
from whet.engine import Engine
from whet.engine.session import Call
from whet.rewards.processes import Guard, summary, wait_for_any
from whet.rollout.protocol import RolloutEngine
from whet.rollout.rollout import Branch, Rollout
from whet.tasks.environment import Environment, EpisodeProcess, Message, Opening, Step
from whet.text.replies import ReplyFormat
from whet.text.seams import RewrittenHistoryError, Seams, content_mask, count_shared

End = Literal["done", "turns", "length", "context", "error"]
"""Causes of the end of an episode: the environment, ``max_turns``, ``max_new_tokens`` sampled tokens, too little room
for the next messages, or a failure of the environment."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an episode.

    Attributes:
        max_turns: turns of the model.
        max_turn_tokens: sampled tokens of a turn; a longer one is ended for the model. 0: ``max_new_tokens`` of the
            sampling settings, the sampled tokens of an episode.
        max_read_tokens: tokens of messages between turns; 0: as many as the model has positions for.
        timeout_s: seconds of a call of the environment.
        may_branch: whether a chat template may rewrite earlier turns: the next turn then begins a branch.
        marks_answers: whether to find the tokens of the contents of messages between turns.
    """

    max_turns: int = 8
    max_turn_tokens: int = 0
    max_read_tokens: int = 0
    timeout_s: float = 10.0
    may_branch: bool = False
    marks_answers: bool = False


@dataclass
class Episode:
    """An episode while it is played, and afterwards.

    Attributes:
        key: of the random numbers of its tokens.
        row: of the data set.
        prompt_ids: the opening; of a later branch what it shares with the opening.
        messages: the conversation so far.
        n_opening: number of messages of the opening.
        tools: tools in OpenAI's form.
        token_ids: tokens after the opening.
        sampled: whether the model sampled each of them.
        answered: whether each holds content of a message between turns, with ``EpisodeLimits.marks_answers``.
        logprobs: of each; 0 if it was not sampled.
        kept: the tokens that they were drawn from, by turn.
        experts: of the tokens, see ``Completion``.
        rewards: of each turn.
        n_failed_calls: number of calls of tools that failed.
        end: how it ended; None while it is played.
        error: of the environment.
        policy_version: of the weights that sampled the last turn.
        is_turn_ended: whether the last turn ended with a stop token.
        earlier: the branches before the last one, which the other fields of tokens describe.
    """

    key: StreamKey
    row: Mapping[str, Any]
    prompt_ids: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    n_opening: int = 0
    tools: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    answered: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[KeptTokens] = field(default_factory=list)
    experts: np.ndarray | None = None
    rewards: list[float] = field(default_factory=list)
    n_failed_calls: int = 0
    end: End | None = None
    error: str = ""
    policy_version: int = 0
    is_turn_ended: bool = True
    earlier: list[Branch] = field(default_factory=list)

    @property
    def opening_ids(self) -> list[int]:
        """Tokens before the first turn."""
        return self.earlier[0].prompt_ids if self.earlier else self.prompt_ids

    @property
    def n_sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(self.sampled) + sum(branch.completion.n_sampled for branch in self.earlier)

    @property
    def n_read(self) -> int:
        """Number of tokens of the last branch, after the opening, that were not sampled on it."""
        return len(self.sampled) - sum(self.sampled)

    @property
    def n_calls(self) -> int:
        """Number of calls of tools."""
        return sum(len(message.get("tool_calls", ())) for message in self.messages[self.n_opening :])

    @property
    def reward(self) -> float | None:
        """The sum of the turns' rewards; None if the environment failed."""
        return None if self.end == "error" else sum(self.rewards)

    def add_turn(self, completion: Completion) -> None:
        """Append a sampled turn."""
        n = len(completion.token_ids)
        self.token_ids += completion.token_ids
        self.sampled += [True] * n
        self.answered += [False] * n
        self.logprobs += completion.logprobs or [0.0] * n
        if completion.kept_tokens is not None:
            self.kept.append(completion.kept_tokens)
        if completion.experts is not None:
            self.experts = completion.experts
        self.policy_version = completion.policy_version

    def add_read(self, ids: Sequence[int], answered: Sequence[bool] | None = None) -> None:
        """Append tokens that the model reads, and whether each holds content of a message; None: unknown."""
        self.token_ids += ids
        self.sampled += [False] * len(ids)
        self.answered += answered or [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        if self.kept:
            self.kept.append(KeptTokens.from_ids([None] * len(ids), self.kept[0].vocab_size))

    def begin_branch(self, ids: Sequence[int], answered: Sequence[bool] | None = None) -> None:
        """Continue on the ids of the conversation as the template renders it now, of which no token is sampled.

        Args:
            ids: the tokens.
            answered: whether each holds content of a message after the last turn; None: unknown.

        The branch's prompt is what it shares with the opening, so that branches and samples share its computation.
        """
        n_shared = max(1, count_shared(self.opening_ids, ids))
        self.earlier.append(Branch(self.prompt_ids, self.completion()))
        self.prompt_ids, n_read = list(ids[:n_shared]), len(ids) - n_shared
        self.kept = [KeptTokens.from_ids([None] * n_read, self.kept[0].vocab_size)] if self.kept else []
        self.token_ids, self.sampled, self.logprobs = list(ids[n_shared:]), [False] * n_read, [0.0] * n_read
        self.answered = list((answered or [False] * len(ids))[n_shared:])

    def completion(self) -> Completion:
        """Return the last branch as a completion. The last messages, which no turn follows, are not part of it."""
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason="length" if self.end == "length" else "stop",
            policy_version=self.policy_version,
            kept_tokens=KeptTokens.concatenate(self.kept) if self.kept else None,
            experts=self.experts,
            sampled=self.sampled,
            answered=self.answered if any(self.answered) else None,
        )


class _Turns(Protocol):
    """Samples turns of several episodes."""

    is_incremental: bool
    """Whether ``advance`` returns before all turns are sampled."""

    def start(self, episode: Episode, ids: list[int], sampling: SamplingParams) -> None:
        """Begin a turn."""
        ...

    def advance(self) -> list[tuple[Episode, Completion]]:
        """Sample, and return the turns that are complete."""
        ...


class _EngineTurns:
    """Turns on a native engine, in one batch that turns join and leave; it retains their keys and values."""

    is_incremental = True

    def __init__(self, engine: Engine, stack: ExitStack) -> None:
        self._engine, self._running = engine, list[tuple[Episode, Call, SamplingParams]]()
        stack.callback(self._close)

    def start(self, episode: Episode, ids: list[int], sampling: SamplingParams) -> None:
        call = self._engine.open_prompt(ids, 1, sampling, key=episode.key, keep=True, where="play")
        self._running.append((episode, call, sampling))

    def advance(self) -> list[tuple[Episode, Completion]]:
        self._running[0][1].step()
        complete = [each for each in self._running if each[1].is_done()]
        self._running = [each for each in self._running if not each[1].is_done()]
        found = []
        for episode, call, sampling in complete:
            [completion] = self._engine.completions(call, 1, sampling)
            call.close()
            found.append((episode, completion))
        return found

    def _close(self) -> None:
        for _, call, _ in self._running:
            call.close()


class _BatchTurns:
    """Turns on any engine: all that have begun, in one batch for each seed."""

    is_incremental = False

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine, self._begun = engine, list[tuple[Episode, list[int], SamplingParams]]()

    def start(self, episode: Episode, ids: list[int], sampling: SamplingParams) -> None:
        self._begun.append((episode, ids, sampling))

    def advance(self) -> list[tuple[Episode, Completion]]:
        begun, self._begun = self._begun, []
        found = []
        for sampling in dict.fromkeys(sampling for *_, sampling in begun):
            turns = [(episode, ids) for episode, ids, own in begun if own == sampling]
            keys: Any = {"keys": [episode.key for episode, _ in turns]}
            groups = self._engine.generate([ids for _, ids in turns], 1, sampling, **keys)
            found += [(episode, group[0]) for (episode, _), group in zip(turns, groups, strict=True)]
        return found


class Player:
    """Plays episodes of an environment.

    Args:
        make: makes an environment; called in a child process of each episode.
        tokenizer: with a chat template.
        replies: the form of the model's replies.
        stop_token_ids: tokens that end a turn.
        max_position: the model's number of positions.
        limits: of an episode.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        tokenizer: Any,
        replies: ReplyFormat,
        stop_token_ids: Iterable[int],
        max_position: int,
        limits: EpisodeLimits = EpisodeLimits(),
    ) -> None:
        self._make, self._tokenizer, self._replies = make, tokenizer, replies
        self._stops, self._max_position, self._limits = list(stop_token_ids), max_position, limits
        self._checked_tools: list[dict[str, Any]] = []

    def play(
        self,
        engine: RolloutEngine,
        rows: Sequence[Mapping[str, Any]],
        n: int,
        sampling: SamplingParams,
        indices: Sequence[int] | None = None,
    ) -> list[Episode]:
        """Play ``n`` episodes for each row, and return them in the order of the rows.

        The samples of a row get the same environment seed: their episodes begin alike.

        Args:
            indices: of the rows in the batch, which determine their random numbers. Default: 0, 1, 2, ...

        Raises:
            RewrittenHistoryError: the chat template rewrites earlier turns, and ``may_branch`` is not set.
            WhetValueError: there are tools, and the chat template cannot call them.
        """
        with ExitStack() as stack:
            guard = stack.enter_context(Guard())
            turns: _Turns = _EngineTurns(engine, stack) if isinstance(engine, Engine) else _BatchTurns(engine)
            playing = []
            for i, row in zip(range(len(rows)) if indices is None else indices, rows, strict=True):
                seed = int(np.random.SeedSequence([sampling.seed, i]).generate_state(1)[0])
                for j in range(n):
                    process = EpisodeProcess(self._make, row, seed, self._limits.timeout_s, guard)
                    stack.callback(process.close)
                    process.reset()
                    playing.append(_Playing(Episode(StreamKey(i, j), row), process))
            self._run(playing, turns, sampling)
        return [each.episode for each in playing]

    def _run(self, playing: Sequence[_Playing], turns: _Turns, sampling: SamplingParams) -> None:
        processes = {id(each.episode): each.process for each in playing}
        waiting, n_sampling = [each.episode for each in playing], 0
        while waiting or n_sampling:
            if waiting and not (n_sampling and turns.is_incremental):
                wait_for_any([processes[id(episode)].child for episode in waiting])
            for episode in [episode for episode in waiting if processes[id(episode)].child.is_ready()]:
                waiting.remove(episode)
                if self._continue(episode, processes[id(episode)].outcome(), turns, sampling):
                    n_sampling += 1
                else:
                    processes[id(episode)].close()
            if n_sampling and (turns.is_incremental or not waiting):
                for episode, completion in turns.advance():
                    n_sampling -= 1
                    if (message := self._end_turn(episode, completion, sampling)) is not None:
                        processes[id(episode)].step(message)
                        waiting.append(episode)
                    else:
                        processes[id(episode)].close()

    def _seams(self, tools: Sequence[Mapping[str, Any]]) -> Seams:
        return Seams(self._tokenizer, self._stops, {"tools": tools} if tools else {}, "Player.play")

    def _check_tools(self, tools: list[dict[str, Any]]) -> None:
        """Reject a template that drops tools, their calls or results, or whose calls cannot be read."""
        if not tools or tools == self._checked_tools:
            return
        self._replies.check_can_call("Player.play")
        self._seams(tools).check_calls(str(tools[0].get("function", {}).get("name")))
        self._checked_tools = tools

    def _continue(
        self, episode: Episode, found: Opening | Step | BaseException, turns: _Turns, sampling: SamplingParams
    ) -> bool:
        """Read the environment's answer and begin the next turn; return whether there is one."""
        if isinstance(found, BaseException):
            episode.end, episode.error = "error", summary(found)
            return False
        if isinstance(found, Opening):
            episode.messages, episode.n_opening, episode.tools = list(found.messages), len(found.messages), found.tools
            self._check_tools(found.tools)
            if self._may_fit(found.messages, self._max_position):
                episode.prompt_ids = self._seams(episode.tools).opening(found.messages)
            if not 0 < len(episode.prompt_ids) < self._max_position:
                episode.end = "error"
                episode.error = f"the opening does not fit into the model's {self._max_position:,} positions"
                return False
        else:
            episode.rewards.append(found.reward)
            episode.n_failed_calls += sum(bool(message.get("is_error")) for message in _messages_of(found))
            if found.done or len(episode.rewards) == self._limits.max_turns:
                episode.end = "done" if found.done else "turns"
                return False
            if episode.n_sampled >= sampling.max_new_tokens:
                episode.end = "length"
                return False
            if not self._read(episode, found):
                episode.end = "context"
                return False
        limit = sampling.max_new_tokens - episode.n_sampled
        turn = len(episode.rewards)
        seed = sampling.seed if turn == 0 else int(np.random.SeedSequence([sampling.seed, turn]).generate_state(1)[0])
        most = min(limit, self._limits.max_turn_tokens or limit)
        turns.start(
            episode,
            [*episode.prompt_ids, *episode.token_ids],
            dataclasses.replace(sampling, max_new_tokens=most, seed=seed),
        )
        return True

    def _may_fit(self, messages: Iterable[Message], n_tokens: int) -> bool:
        """Whether messages can have ``n_tokens`` or fewer, by their length: tokenising megabytes takes seconds."""
        n_bytes = sum(len(text_of(message).encode(errors="replace")) for message in messages)
        return n_bytes <= n_tokens * self._replies.longest_token

    def _read(self, episode: Episode, step: Step) -> bool:
        """Append the messages of a step; return whether they fit, with a token of the next turn."""
        seams, most_read = self._seams(episode.tools), self._limits.max_read_tokens or self._max_position
        new = _messages_of(step)
        if not self._may_fit(new, min(most_read, self._max_position)):
            return False

        def render(new: Sequence[Message]) -> list[int]:
            return seams.ids(seams.seam(episode.messages, new), is_ended=episode.is_turn_ended)

        def render_all(new: Sequence[Message]) -> list[int]:
            return seams.opening([*episode.messages, *new])

        try:
            ids = render(new)
            n_before, n_read, add = len(episode.prompt_ids) + len(episode.token_ids), episode.n_read, episode.add_read
        except RewrittenHistoryError:
            if not self._limits.may_branch:
                raise
            render = render_all
            ids = render(new)
            n_before, n_read, add = 0, -count_shared(episode.opening_ids, ids), episode.begin_branch
        if n_read + len(ids) > most_read or n_before + len(ids) >= self._max_position:
            return False
        answered = content_mask(render, ids, new) if self._limits.marks_answers else None
        episode.messages += new
        add(ids, answered)
        return True

    def _end_turn(self, episode: Episode, completion: Completion, sampling: SamplingParams) -> dict[str, Any] | None:
        """Add a turn; return its message, which the environment answers, or None: the episode has ended."""
        before = [*episode.prompt_ids, *episode.token_ids]
        episode.add_turn(completion)
        # After a stop string the turn still lacks its stop token.
        episode.is_turn_ended = any(i in sampling.stop_token_ids for i in completion.token_ids[-1:])
        message = self._replies.message(completion.token_ids, before, episode.tools, sampling.stop)
        episode.messages.append(message)
        if completion.finish_reason == "length" and episode.n_sampled >= sampling.max_new_tokens:
            episode.end = "length"
            return None
        return message


def _messages_of(step: Step) -> Sequence[Message]:
    assert not isinstance(step.messages, str), "a step from a child has messages"
    return step.messages


class _Playing(NamedTuple):
    episode: Episode
    process: EpisodeProcess


ENVIRONMENT_REWARD = "environment_reward"
"""Column of rollouts that holds the reward of an episode."""


def environment_reward(environment_reward: Sequence[float | None], completions: Sequence[Any]) -> list[float | None]:
    """Return the sum of the rewards of each episode's turns; None if its environment failed."""
    return list(environment_reward)


def rollout_of(episodes: Sequence[Episode]) -> Rollout:
    """Return episodes as a rollout. Reward functions get lists of messages as prompts and completions."""
    names = dict.fromkeys(name for episode in episodes for name in episode.row if name != "prompt")
    columns = {name: [episode.row.get(name) for episode in episodes] for name in names}
    columns[ENVIRONMENT_REWARD] = [episode.reward for episode in episodes]
    return Rollout(
        prompt_ids=[episode.prompt_ids for episode in episodes],
        prompts=[episode.messages[: episode.n_opening] for episode in episodes],
        completions=[episode.completion() for episode in episodes],
        decoded=[episode.messages[episode.n_opening :] for episode in episodes],
        columns=columns,
        extra_metrics=episode_metrics(episodes),
        earlier={i: episode.earlier for i, episode in enumerate(episodes) if episode.earlier},
        failed=[i for i, episode in enumerate(episodes) if episode.end == "error"],
        details={
            "end": [episode.end for episode in episodes],
            "error": [episode.error for episode in episodes],
            "turn_rewards": [episode.rewards for episode in episodes],
        },
    )


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return means of turns, read tokens and branches, with tools also of calls and failed calls, and the share of each
    end.
    """
    n = len(episodes)
    calls = {"calls": sum(e.n_calls for e in episodes), "failed_calls": sum(e.n_failed_calls for e in episodes)}
    has_tools = any(episode.tools for episode in episodes)
    ends = {f"episodes/ended_by_{end}": sum(e.end == end for e in episodes) / n for end in get_args(End)}
    return {
        "episodes/mean_turns": sum(len(episode.rewards) for episode in episodes) / n,
        "episodes/mean_read_tokens": sum(episode.n_read for episode in episodes) / n,
        **{f"episodes/mean_{name}": count / n for name, count in calls.items() if has_tools},
        "episodes/mean_branches": sum(1 + len(episode.earlier) for episode in episodes) / n,
        **ends,
    }
