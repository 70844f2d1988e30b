"""Classes for TRL's environment_factory: the same tools and prompts as in TRL, rewards, failures, and training."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.cli.conftest import write_tiny_model
from tests.raising import assert_mentions, assert_raises
from tests.rollout.test_tool_episodes import HERMES
from trl.trainer.grpo_config import GRPOConfig as TRLConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from whet.algorithms import GRPO
from whet.errors import WhetTypeError
from whet.models.tokenizers import load_tokenizer
from whet.rewards.processes import Guard, RaisedInChild
from whet.tasks.environment import EpisodeProcess, Opening, Step, as_environment, load_environment


class Counter:
    """An environment in TRL's form, as its documentation shows one."""

    def reset(self, goal: int = 3, **row: Any) -> str | None:
        self.count, self.goal = random.randint(0, 1) * 0, goal
        return None if row.get("silent") else f" The goal is {goal}."

    def add(self, n: int) -> int:
        """Add to the counter.

        Args:
            n: number to add
        """
        if n < 0:
            raise ValueError("negative")
        self.count += n
        return self.count

    async def read(self) -> str:
        """Return the counter."""
        return f"count={self.count}"

    def get_reward(self) -> float:
        return float(self.count == self.goal) + 0.1 * self.count

    def _hidden(self) -> None: ...


class Broken(Counter):
    def get_reward(self) -> Any:
        return "high"


class Empty:
    def reset(self, **row: Any) -> None: ...


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": "call00000", "function": function}


def begin(kind: Any, row: Any, guard: Guard) -> tuple[EpisodeProcess, Any]:
    process = EpisodeProcess(as_environment(kind, "test"), row, 7, 30.0, guard)
    process.reset()
    return process, process.outcome()


def answer(process: EpisodeProcess, *calls: Any) -> Any:
    process.step({"role": "assistant", "content": "", **({"tool_calls": list(calls)} if calls else {})})
    return process.outcome()


def test_the_rewards_of_an_episode_add_up_to_get_reward() -> None:
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "Count."}]
    with Guard() as guard:
        process, opening = begin(Counter, {"prompt": prompt, "goal": 5}, guard)
        try:
            assert isinstance(opening, Opening)
            assert opening.messages == [prompt[0], {"role": "user", "content": "Count. The goal is 5."}]
            first = answer(process, call("add", n=2), call("read"))
            assert isinstance(first, Step) and not first.done and first.reward == pytest.approx(0.2)
            assert [message["content"] for message in first.messages] == ["2", "count=2"]  # pyright: ignore
            second = answer(process, call("add", n=-1), call("add", n=3))
            assert second.messages[0]["is_error"] and second.messages[1]["content"] == "5"
            last = answer(process)
            assert last.done and first.reward + second.reward + last.reward == pytest.approx(1.5)
        finally:
            process.close()


@pytest.mark.parametrize(
    ("row", "content"),
    [({"prompt": "Count."}, "Count. The goal is 3."), ({}, " The goal is 3."), ({"prompt": "x", "silent": 1}, "x")],
)
def test_openings(row: Any, content: str) -> None:
    with Guard() as guard:
        process, opening = begin(Counter, row, guard)
        process.close()
    assert opening.messages == [{"role": "user", "content": content}]


def test_failures_are_named() -> None:
    with Guard() as guard:
        process, _ = begin(Broken, {}, guard)
        found = answer(process, call("add", n=1))
        process.close()
    assert isinstance(found, RaisedInChild)
    assert_mentions(found.summary, "get_reward", "high", "finite")
    assert_raises(WhetTypeError, ("no step",), as_environment, Empty, "here")


def test_trl_offers_the_same_tools(tmp_path: Any) -> None:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl.chat_template_utils import qwen2_5_chat_template

    folder = write_tiny_model(tmp_path / "model", HERMES, max_position=512)
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "Count."}], "goal": 3}] * 4)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = qwen2_5_chat_template  # one that TRL knows
    arguments = TRLConfig(output_dir=str(tmp_path / "trl"), use_cpu=True, bf16=False, report_to=[])
    trainer = GRPOTrainer(
        str(folder), [], args=arguments, train_dataset=rows, environment_factory=Counter,
        processing_class=tokenizer,
    )  # fmt: skip
    own: Any = as_environment(Counter, "test")()
    assert (
        [tool.__name__ for tool in trainer.tools] == [tool["function"]["name"] for tool in own.tools] == ["add", "read"]
    )
    assert trainer.reward_func_names == ["Counter"]


def test_a_step_trains(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_tiny_model(tmp_path / "model", HERMES, max_position=2048)
    (tmp_path / "game.py").write_text("from tests.tasks.test_trl import Counter\n")
    make = load_environment(f"{tmp_path / 'game.py'}:Counter")
    call_of_add = r'<tool_call>\{"name": "add", "arguments": \{"n": [0-3]\}\}</tool_call>'
    grpo = GRPO(
        AutoModelForCausalLM.from_pretrained(folder), environment=make, tokenizer=load_tokenizer(folder),
        regex=f"x|{call_of_add}", group_size=4, batch_size=2, max_new_tokens=300, max_turns=3, env_timeout_s=60.0,
        compute="float32",
    )  # fmt: skip
    metrics = grpo.train_step([{"prompt": f"{goal}?", "goal": goal} for goal in (1, 2)])
    assert metrics["sampler/logprob_difference"] < 1e-4 and metrics["episodes/mean_calls"] > 0
    for row in grpo.last_completions:
        goal = int(row["prompt"][0]["content"][0])
        calls = [c for message in row["completion"] for c in message.get("tool_calls", ())]
        total = sum(c["function"]["arguments"]["n"] for c in calls)
        assert row["reward"] == pytest.approx(float(total == goal) + 0.1 * total)
