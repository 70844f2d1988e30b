"""Players of episodes for an environment or tools, with the limits of a config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from whet.config.episodes import EpisodeSettings
from whet.errors import WhetTypeError
from whet.models.tokenizers.token_texts import read_token_texts
from whet.rollout.episodes import EpisodeLimits, Player
from whet.tasks.environment import Environment, as_environment
from whet.tasks.tools import Tools
from whet.text.replies import ReplyFormat


def make_player(
    environment: Callable[[], Environment] | None,
    tools: Sequence[Callable[..., Any]],
    tokenizer: Any,
    stop_token_ids: Iterable[int],
    max_position: int,
    settings: EpisodeSettings,
    where: str,
) -> Player:
    """Return the player of an environment, or of tools.

    Args:
        environment: makes the environment of an episode; None: there are tools.
        tools: functions that the model calls; empty: there is an environment.
        tokenizer: with a chat template.
        stop_token_ids: tokens that end a turn.
        max_position: most tokens of an episode.
        settings: limits of an episode.
        where: prefix of errors.

    Raises:
        WhetTypeError: there are an environment and tools, the environment is not a class or function, a function has no
            schema, or there is no tokenizer with a chat template.
    """
    if tools and environment is not None:
        raise WhetTypeError(
            f"{where}: there are tools and an environment, which lists its own (attribute tools). Pass one of them."
        )
    make: Any = environment
    if tools:
        played = Tools(tools, settings.max_tool_characters)
        make = lambda: played  # noqa: E731 (the child of an episode has a copy)
    make = as_environment(make, f"{where}: environment")
    check_chat_template(tokenizer, where)
    replies = ReplyFormat(tokenizer, read_token_texts(tokenizer, where))
    return Player(make, tokenizer, replies, stop_token_ids, max_position, limits_of(settings))


def check_chat_template(tokenizer: Any, where: str) -> None:
    """Raise a WhetTypeError unless there is a tokenizer with a chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise WhetTypeError(f"{where}: episodes need a tokenizer with a chat template. Pass tokenizer.")


def limits_of(settings: EpisodeSettings) -> EpisodeLimits:
    """Return the limits of an episode."""
    return EpisodeLimits(
        settings.max_turns, settings.max_turn_tokens, settings.max_read_tokens, settings.env_timeout_s,
        may_branch=settings.rewritten_history == "branch", marks_answers=settings.learns_answers(),
    )  # fmt: skip
