"""Programs that talk to an OpenAI URL as environments: the rollout engine serves, and records what they sample.

    async def play(row, server):
        client = AsyncOpenAI(base_url=server.url, api_key=server.api_key)
        messages = [{"role": "user", "content": row["question"]}]
        reply = await client.chat.completions.create(model=server.model, messages=messages)
        return float(row["answer"] in reply.choices[0].message.content)

Every call of ``play`` runs in a child process with its own session (``whet.serve.sessions``).
"""

from __future__ import annotations

import inspect
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from http.client import HTTPConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from whet.config.sampling import DISTRIBUTION_SETTINGS, GRAMMAR_SETTINGS, SamplingParams, StreamKey
from whet.engine import Engine
from whet.errors import WhetTypeError, is_number
from whet.rewards.processes import ChildObject, Guard, summary, wait_for_any
from whet.rollout.episodes import Episode, EpisodeLimits
from whet.rollout.protocol import RolloutEngine
from whet.serve.app import make_app
from whet.serve.model import ServedModel
from whet.serve.recording import reply_of
from whet.serve.sessions import Session
from whet.serve.threads import serving

_MODEL = "policy"
_CHECK_S = 0.05
"""Time between checks of the sessions of agents that have not returned."""
_MANY = 1 << 31
"""Requests that may be open: none is refused for others, which would make results depend on time."""


class Server(NamedTuple):
    """The server of an agent's session.

    Attributes:
        url: base URL of its OpenAI API, also in the environment variable OPENAI_BASE_URL.
        api_key: names the session, also in OPENAI_API_KEY.
        model: name of the policy.
        seed: for random choices of the agent, the same for all samples of a row.
    """

    url: str
    api_key: str
    model: str
    seed: int


Agent = Callable[[Mapping[str, Any], Server], Any]
"""``play(row, server) -> reward``, also async."""


class AgentPlayer:
    """Plays episodes whose environment is a program that talks to an OpenAI URL.

    Args:
        agent: plays an episode; called in a child process.
        tokenizer: with a chat template, if the agent sends messages.
        stop_token_ids: tokens that end a turn.
        limits: of an episode; ``timeout_s`` limits the time between requests.
        port: port to listen on; 0: any free one.
    """

    def __init__(
        self, agent: Agent, tokenizer: Any, stop_token_ids: Iterable[int], limits: EpisodeLimits, port: int = 0
    ) -> None:
        self._agent, self._tokenizer, self._stops = agent, tokenizer, list(stop_token_ids)
        self._limits, self._port = limits, port

    def play(
        self,
        engine: RolloutEngine,
        rows: Sequence[Mapping[str, Any]],
        n: int,
        sampling: SamplingParams,
        indices: Sequence[int] | None = None,
    ) -> list[Episode]:
        """Play ``n`` episodes for each row, as ``Player.play``.

        Raises:
            WhetTypeError: the engine is not native.
            WhetError: the chat template rewrites earlier turns, or its turns cannot be joined.
        """
        if not isinstance(engine, Engine):
            raise WhetTypeError(f"AgentPlayer.play: engine is {type(engine).__name__}, and only the native one serves.")
        run = {name: getattr(sampling, name) for name in (*DISTRIBUTION_SETTINGS, *GRAMMAR_SETTINGS, "stop")}
        model = ServedModel(
            engine, self._tokenizer, _MODEL, self._stops, defaults=run, logprobs_mode="sampling",
            fingerprint=f"{_MODEL}-{engine.policy_version}",
        )  # fmt: skip
        playing: list[_Playing] = []
        with ExitStack() as forked:  # before the server starts: children have none of its descriptors
            guard = forked.enter_context(Guard())
            for i, row in zip(range(len(rows)) if indices is None else indices, rows, strict=True):
                seed = int(np.random.SeedSequence([sampling.seed, i]).generate_state(1)[0])
                for j in range(n):
                    make = partial(_Hosted, self._agent, row, seed)
                    child = ChildObject(make, lambda reward: reward, self._limits.timeout_s, guard)
                    forked.enter_context(child)
                    session = Session(StreamKey(i, j), sampling, self._limits)
                    playing.append(_Playing(row, f"session-{secrets.token_hex(12)}", session, child))
            app = make_app(model, max_requests=_MANY, sessions={each.key: each.session for each in playing})
            with serving(app, port=self._port) as url, forked.pop_all():
                rewards = self._run(playing, url + "/v1")
        return [each.session.episode(each.row, rewards[each.key], partial(reply_of, model)) for each in playing]

    def _run(self, playing: Sequence[_Playing], url: str) -> dict[str, float | None]:
        """Return the reward of each session; None if its agent failed."""
        rewards: dict[str, float | None] = {}
        for each in playing:
            each.session.touch()
            each.child.start("play", url, each.key)
        waiting = list(playing)
        while waiting:
            for each in waiting:
                each.child.deadline = each.session.deadline()
                if each.session.failure is not None:
                    raise each.session.failure
            wait_for_any([each.child for each in waiting], at_most_s=_CHECK_S)
            for each in [each for each in waiting if each.child.is_ready()]:
                waiting.remove(each)
                found = each.child.outcome()
                _pass_by(url)
                failed = isinstance(found, BaseException)
                rewards[each.key] = None if failed else found
                each.session.close(summary(found) if failed else "")
        return rewards


def _pass_by(url: str) -> None:
    """Wait until the server has accepted the requests that were sent before: connections are accepted in order."""
    with closing(HTTPConnection(urlsplit(url).netloc)) as connection:
        connection.request("GET", "/health")
        connection.getresponse().read()


class _Playing(NamedTuple):
    row: Mapping[str, Any]
    key: str
    session: Session
    child: ChildObject


class _Hosted:
    """An agent in its child process."""

    def __init__(self, agent: Agent, row: Mapping[str, Any], seed: int) -> None:
        self._agent, self._row, self._seed = agent, row, seed

    async def play(self, url: str, api_key: str) -> float:
        os.environ.update(OPENAI_BASE_URL=url, OPENAI_API_KEY=api_key)
        found = self._agent(self._row, Server(url, api_key, _MODEL, self._seed))
        reward = await found if inspect.isawaitable(found) else found
        if not is_number(reward):
            raise WhetTypeError(f"the agent returned {reward!r:.60}, expected its reward, a finite number.")
        return float(reward)
