"""Settings of episodes, shared by training and evaluation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from whet.config.fields import AboveZero, Count, Positive, reject_ineffective


@dataclass(kw_only=True)
class EpisodeSettings:
    """Limits of an episode of an environment, or with tools."""

    max_turns: Positive = 8
    """Maximum number of the model's turns in an episode of an environment or with tools; max_new_tokens limits the
    tokens that it samples in all of them."""
    max_turn_tokens: Count = 0
    """Maximum number of sampled tokens of a turn, which is then ended for the model; 0: max_new_tokens."""
    max_read_tokens: Count = 0
    """Maximum number of tokens that environment and chat template add between turns; 0: the model's positions."""
    max_tool_characters: Positive = 4000
    """Maximum number of characters of a tool's result; the model reads the beginning of a longer one, and a mark."""
    env_timeout_s: AboveZero = 10.0
    """Time limit of a turn of environment or tools in seconds. An episode whose environment fails has no reward, and in
    evaluations the reward 0."""
    rewritten_history: Literal["refuse", "branch"] = "refuse"
    """Answer to a chat template that renders earlier turns differently after later messages, as Qwen3's does: refuse,
    or continue the episode on a branch. Each branch is a row of the loss."""

    def learns_answers(self) -> bool:
        """Whether the tokens that an environment answered are trained."""
        return False


def check_episode_settings(config: Any, *, has_environment: bool, has_tools: bool) -> None:
    """Reject settings of episodes that have no effect.

    Raises:
        WhetValueError: names the setting.
    """
    names = {field.name for field in dataclasses.fields(EpisodeSettings)} - {"max_tool_characters"}
    reject_ineffective(config, sorted(names), has_environment or has_tools, "there are no environment and no tools")
    reject_ineffective(config, ["max_tool_characters"], has_tools, "there are no tools")
