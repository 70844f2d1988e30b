"""Games of GEM and TextArena as environments: "gem:ID" and "textarena:ID", with options of the game.

    gem:game:GuessTheNumber-v0-easy
    gem:game:Mastermind-v0,code_length=3
    textarena:GuessTheNumber-v0
    textarena:TicTacToe-v0,opponent=players.py:play

GEM's games have one player. A game of TextArena for two needs an opponent, a function (observation, seed) -> action,
against which the model plays first. The package is imported before the processes of episodes fork.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from whet.errors import WhetError, WhetValueError
from whet.rewards.functions import load_function
from whet.tasks.environment import Message, Step

LIBRARIES = {"gem": "gem-llm", "textarena": "textarena"}
"""Prefix of a name, which is the module -> package on PyPI."""


class MissingGamesError(WhetError, ImportError):
    """The package of a game is missing."""


class GemGame:
    """A game of GEM: ``reset(seed)`` and ``step(action)`` of Gymnasium, with texts."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._game = make()

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """Begin the game of a seed."""
        return _with_suffix(*self._game.reset(seed=seed))

    def step(self, message: Message) -> Step:
        """Play the text of a turn."""
        text, reward, is_over, is_truncated, info = self._game.step(message["content"])
        return Step(_with_suffix(text, info), float(reward), bool(is_over or is_truncated))


def _with_suffix(text: str, info: Mapping[str, Any]) -> str:
    suffix = info.get("suffix")
    return f"{text.rstrip()}\n{suffix}" if suffix else text


class TextArenaGame:
    """A game of TextArena, whose observations are the messages since the model's last turn.

    Args:
        make: makes the game without wrappers.
        opponent: the other player; None: there is none.
    """

    def __init__(self, make: Callable[[], Any], opponent: Callable[[str, int], str] | None = None) -> None:
        self._game, self._opponent, self._seed = make(), opponent, 0

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """Begin the game of a seed."""
        self._seed = seed
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 (some games use it)
        self._game.reset(num_players=1 if self._opponent is None else 2, seed=seed)
        return self._observe()

    def step(self, message: Message) -> Step:
        """Play the text of a turn, and the opponent's answers."""
        is_over = self._act(message["content"])
        while not is_over and self._game.state.current_player_id != 0:
            assert self._opponent is not None, "the game has one player"
            is_over = self._act(self._opponent(self._observe(), self._seed))
        if not is_over:
            return Step(self._observe())
        rewards, _ = self._game.close()
        return Step(reward=float(rewards[0]), done=True)

    def _act(self, action: str) -> bool:
        is_over, _ = self._game.step(action)
        return bool(is_over)

    def _observe(self) -> str:
        player, observations = self._game.get_observation()
        return "\n".join(text for author, text, _ in observations if author != player)


def load_game(name: str, options: Mapping[str, Any]) -> Callable[[], GemGame | TextArenaGame]:
    """Return a function that makes the game which "gem:ID" or "textarena:ID" names.

    Raises:
        MissingGamesError: the package is not installed.
        WhetValueError: the library has no such game, or the game rejects the options.
    """
    library, _, game = name.partition(":")
    try:
        module = __import__("gem.envs" if library == "gem" else library)  # GEM registers its games in gem.envs
    except ImportError as error:
        package = LIBRARIES[library]
        raise MissingGamesError(f"load_environment: {name} needs {package}: pip install {package} ({error})") from error
    own = dict(options)
    opponent = own.pop("opponent", None) if library == "textarena" else None
    make = partial(module.make, game if library == "gem" else f"{game}-raw", **own)
    try:
        make().reset(**({} if library == "gem" else {"num_players": 1 if opponent is None else 2}))
    except Exception as error:  # libraries raise anything
        hint = "" if opponent or library == "gem" else " A game for two needs opponent=file.py:function."
        raise WhetValueError(
            f"load_environment: {name} does not begin: {type(error).__name__}: {error}.{hint}"
        ) from error
    if library == "gem":
        return partial(GemGame, make)
    return partial(TextArenaGame, make, opponent and load_function(opponent))
