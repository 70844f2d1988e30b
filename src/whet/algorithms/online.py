"""Base of the training algorithms that sample: engine, rewards and evaluation."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from whet import _core
from whet.config.sampling import Completion, SamplingParams
from whet.config.settings import EngineName
from whet.data.batches import as_rows
from whet.data.rows import tokenize_prompt
from whet.engine import Engine
from whet.errors import WhetTypeError, WhetValueError, check_installed
from whet.models.architecture import LARGEST_SIZE
from whet.rewards.functions import RewardFn, RewardFunctions
from whet.rewards.metrics import mean_rewards
from whet.rollout.ahead import AheadSampler
from whet.rollout.choose import check_lengths, ensure_capacity, make_engine, packed_base, reward_functions
from whet.rollout.episodes import Player, rollout_of
from whet.rollout.plan import Request, lags
from whet.rollout.players import check_chat_template, limits_of, make_player
from whet.rollout.protocol import RolloutEngine
from whet.rollout.rollout import (
    Prompts,
    Rollout,
    as_prompt_row,
    choose_sampling,
    make_rollout,
    read_prompts,
    sample,
    warn_if_truncated,
)
from whet.rollout.sharded_engine import ShardedEngine
from whet.tasks.environment import Environment
from whet.training.phases import phase
from whet.training.trainer import Trainer

if TYPE_CHECKING:
    from whet.serve.agents import Agent, AgentPlayer

_MAX_DIFFERENCE = 0.1
"""Nats per token; an engine in the policy's weight format differs by less than 0.02."""


class OnlineTrainer(Trainer):
    """Base of the training algorithms that sample.

    Every rank samples its share of a batch; only rank 0 calls reward and preference functions, with the whole batch, so
    that functions that compare completions or keep state return the same values as in a single process.

    Args:
        engine: the engine that samples; "auto", "native" or "torch" set ``config.engine``; None: ``config.engine``.
        environment: makes the environment of an episode (``whet.tasks.environment``); None: completions are sampled.
        agent: plays an episode instead of an environment: ``play(row, server) -> reward`` samples at an OpenAI URL
            (``whet.serve.agents``).
        tools: functions that the model calls (``whet.tasks.tools``), instead of an environment.
        **arguments: arguments of ``Trainer``.

    Attributes:
        rewards_turns: whether an environment rewards the turns of episodes.
        last_completions: one dict per completion of the last step: step, prompt, completion, each reward.
    """

    row_fields = ("prompt",)
    plays_episodes = False
    """Whether the algorithm trains on episodes of an environment."""
    rewards: RewardFunctions | None
    _ahead: AheadSampler | None = None  # memory_report reads it also of a trainer whose construction failed

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        *,
        engine: RolloutEngine | EngineName | None = None,
        environment: Callable[[], Environment] | None = None,
        agent: Agent | None = None,
        tools: Sequence[Callable[..., Any]] = (),
        **arguments: Any,
    ) -> None:
        if isinstance(engine, str):
            arguments["engine"], engine = engine, None
        super().__init__(model, ref_model, **arguments)
        config = self.config
        chosen = config.engine if engine is None else engine
        weights = config.rollout_weights
        if weights == "auto" and self.policy.arithmetic == "bfloat16" and packed_base(model) is None:
            weights = "bf16"  # as in the policy's matmuls
        pool = {"workers": config.rollout_workers, "address": config.ray_address, "device": config.rollout_device}
        make = partial(make_engine, chosen, model, weights, type(self).__name__, tokenizer=self.tokenizer, **pool)
        self.engine = make(config.kv_bytes)
        self._is_own_engine = isinstance(chosen, str)
        self._make_engine = make if self._is_own_engine and not config.kv_bytes else None
        self.last_completions: list[dict[str, Any]] = []
        self.rewards_turns = environment is not None or agent is not None
        has_episodes = self.rewards_turns or bool(tools)
        self.player = self._make_player(environment, tools, agent) if has_episodes else None
        self._ahead = self._make_ahead() if config.async_lag else None
        self._ahead_state: dict[str, np.ndarray] = {}
        self._sampler_bytes = 0
        self._warned_of_truncation = self._warned_of_mismatch = False

    def _make_ahead(self) -> AheadSampler:
        """Return the sampler of later steps.

        Raises:
            WhetValueError: the engine cannot sample while its model trains.
        """
        where, config = type(self).__name__, self.config
        if not hasattr(self.engine, "snapshot"):
            raise WhetValueError(
                f"{where}: async_lag is {config.async_lag}, and {type(self.engine).__name__} has no snapshot(model), a "
                f"copy of the weights that it samples from while the model trains. Use engine='native' or 'ray', or "
                f"omit async_lag."
            )
        if self.player is not None:
            raise WhetValueError(
                f"{where}: async_lag is {config.async_lag}, and there is an environment, whose episodes are played "
                f"before their step trains. Omit one of them."
            )
        longest = self.policy.position_limit or LARGEST_SIZE
        return AheadSampler(config.async_tokens, longest, self.ranks.rank, self.ranks.size)

    @property
    def lookahead(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of batches after its own that a step needs: of the steps that are sampled while it trains."""
        return self.config.async_lag

    def _make_player(
        self, environment: Callable[[], Environment] | None, tools: Sequence[Callable[..., Any]], agent: Agent | None
    ) -> Player | AgentPlayer:
        """Return the player of the episodes, see ``make_player``.

        Raises:
            WhetTypeError: the algorithm trains on completions only, or there is an agent that is not a function, or
                next to an environment or tools.
            MissingExtraError: there is an agent, and the packages of a server are missing.
        """
        where = type(self).__name__
        if not self.plays_episodes:
            raise WhetTypeError(
                f"{where}: there is an environment or agent, and only GRPO and RLOO train on episodes. Omit it."
            )
        longest = self.policy.position_limit or LARGEST_SIZE
        if agent is None:
            return make_player(
                environment, tools, self.tokenizer, self.stop_token_ids(), longest, self.config, where
            )  # fmt: skip
        if not callable(agent) or tools or environment is not None:
            got = "there are an environment or tools too" if callable(agent) else f"it is {agent!r:.60}"
            raise WhetTypeError(f"{where}: agent is a function (row, server) -> reward, without others, but {got}.")
        check_chat_template(self.tokenizer, where)
        check_installed(f"{where}: agent", "starlette", "uvicorn", "prometheus_client", extra="serve")
        from whet.serve.agents import AgentPlayer

        port = self.config.serve_port and self.config.serve_port + self.ranks.rank
        return AgentPlayer(agent, self.tokenizer, self.stop_token_ids(), limits_of(self.config), port)

    def as_row(self, item: Any) -> Mapping[str, Any]:
        """Return an item of a dataset as a dict; a bare prompt is also a row."""
        return as_prompt_row(item)

    def evaluate(self, prompts: Any, *, reward_fn: RewardFn | None = None, temperature: float | None = None) -> float:
        """Return the mean reward of one completion per prompt, sampled from the current policy.

        Weights, optimizer, counters and random states do not change. The engine is synced with the weights
        (``policy_version`` increases), as in every step. The same weights give the same completions.

        Args:
            prompts: as for ``train``, read once in order; or a single batch.
            reward_fn: default: the trainer's.
            temperature: sampling temperature; 0: greedy; None: the trainer's.

        Returns:
            The mean over scored prompts; NaN if no prompt was scored.

        Raises:
            RewardError: a reward function failed.
            WhetTypeError: there is no reward function, as in OnlineDPO with a preference_fn.
        """
        return super().evaluate(prompts, reward_fn=reward_fn, temperature=temperature)

    def evaluation_metrics(
        self, dataset: Any, *, reward_fn: RewardFn | None = None, temperature: float | None = None
    ) -> dict[str, float]:
        """Return ``mean_reward``, the result of ``evaluate``, and with several reward functions the mean of each."""
        where = f"{type(self).__name__}.evaluate"
        functions = self.rewards if reward_fn is None else reward_fn
        if functions is None:
            raise WhetTypeError(f"{where}: there is a preference_fn and no reward function. Pass reward_fn.")
        if not isinstance(functions, RewardFunctions):
            functions = reward_functions(self.config, functions)
        scored = []
        with self._synced_engine():
            for i, (batch,) in enumerate(self.iter_batches(dataset)):
                rollout = self._sample(batch, 1, i, temperature)
                scored.append(self.ranks.broadcast_from_first(partial(rollout.score, functions)))
        return mean_rewards(scored)

    def sample(self, prompt_batch: Any, n: int, *, for_update: bool = False) -> Rollout:
        """Sample ``n`` completions per prompt from the current policy, reproducibly for (seed, step).

        Args:
            prompt_batch: see ``train``.
            n: completions per prompt.
            for_update: record what an update repeats: the tokens that each token is drawn from, if the settings exclude
                any, and the experts of tokens, if the policy replays them.
        """
        with self._synced_engine():
            rollout = self._sample(prompt_batch, n, self.step, for_update=for_update)
        return self._check_truncation(rollout)

    def sample_step(self, prompt_batch: Any, n: int, *, for_update: bool = False) -> Rollout:
        """Return the completions that this step trains on: of ``sample``, or with ``async_lag`` sampled ahead of it.

        Raises:
            WhetTypeError: with async_lag, outside ``train``, which knows the batches of later steps.
        """
        if self._ahead is None:
            return self.sample(prompt_batch, n, for_update=for_update)
        upcoming, where = self.reader.upcoming, type(self).__name__
        if upcoming is None:
            raise WhetTypeError(
                f"{where}: async_lag is {self.config.async_lag}, and train_step knows no batches of later steps. Call "
                f"train(dataset), or omit async_lag."
            )
        prompts = self.get_prepared(prompt_batch)
        requests = [
            Request(each.ids, n, choose_sampling(each, self._sampling(self.step + i, for_update), self.tokenizer))
            for i, each in enumerate([prompts, *upcoming])
        ]
        rows = [ids for request in requests for ids in request.prompt_ids]
        self.engine = ensure_capacity(self.engine, self._make_engine, rows, self.config.max_new_tokens)
        groups = self._collect(self._ahead, requests)
        rollout = make_rollout(prompts, groups, self.tokenizer)
        own = np.concatenate([lags(completion, self.step) for completion in rollout.completions])
        rollout.extra_metrics = {
            "sampler/lag_mean": float(own.mean()),
            "sampler/lag_max": int(own.max()),
            "sampler/idle_time_s": self._ahead.idle_s(),
        }
        return self._check_truncation(rollout)

    def _collect(self, ahead: AheadSampler, requests: list[Request]) -> list[list[Completion]]:
        """Return the completions of this step, and begin those that its weights sample.

        One engine first completes this step's, so that it can take the weights without a copy.
        """

        def extend() -> None:
            with phase("sync"):
                ahead.extend(self.engine, self.model, self.step, requests)

        if getattr(self.engine, "samples_snapshots", False) or not ahead.has(self.step, requests[0]):
            extend()
        with phase("wait"):
            groups = ahead.collect(self.step, requests[0], self.ranks)
        extend()
        return groups

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint, see ``Trainer.save``; completions that are sampled ahead are completed and saved."""
        self._ahead_state = {} if self._ahead is None else self._ahead.state(self.step, self.ranks)
        try:
            super().save(path)
        finally:
            self._ahead_state = {}

    def can_save(self) -> bool:
        """Whether a checkpoint would be complete: completions sampled ahead are gathered from ranks that work."""
        if self._ahead is None:
            return True
        return self.ranks.size == 1 and not self._ahead.has_failed()

    def extra_tensors(self) -> dict[str, np.ndarray]:
        """Return the completions that were sampled ahead."""
        return self._ahead_state

    def load_extra_tensors(self, tensors: Mapping[str, Any]) -> None:
        """Restore the completions that were sampled ahead; without async_lag they are sampled again."""
        if self._ahead is not None:
            self._ahead.load_state(tensors)

    def memory_blocks(self) -> Iterator[tuple[str, Hashable, int]]:
        """Yield the memory held by the trainer, and of weights that wait for the sampler."""
        yield from super().memory_blocks()
        if self._ahead is not None:
            yield from self._ahead.memory_blocks()

    def _check_truncation(self, rollout: Rollout) -> Rollout:
        """Warn once if many completions are truncated."""
        if self.ranks.is_first and not self._warned_of_truncation:
            longest, where = self.config.max_new_tokens, type(self).__name__
            self._warned_of_truncation = warn_if_truncated(rollout, longest, where)
        return rollout

    def warn_if_mismatched(self, difference: float, fix: str) -> None:
        """Warn once if the sampler's distribution differs from the trained policy, and no correction is active.

        Args:
            difference: the metric ``sampler/logprob_difference``.
            fix: last sentence of the warning.
        """
        if self._ahead is not None:  # the policy has changed since
            return
        if difference > _MAX_DIFFERENCE and self.ranks.is_first and not self._warned_of_mismatch:
            self._warned_of_mismatch = True
            warnings.warn(
                f"{type(self).__name__}: sampler/logprob_difference is {difference:.2g}: the sampler's log-probs are "
                "far from the policy's. Adapters with virtual tokens, or hooks, may make generate and forward differ. "
                f"{fix}",
                stacklevel=3,
            )

    @contextmanager
    def _synced_engine(self) -> Iterator[None]:
        """Sync the engine, and return its memory to the system afterwards: peak memory is the maximum of sampling and
        update, not their sum.

        The allocator retains memory freed by an update, the engine memory of finished sequences. Before sampling, as
        many bytes of the allocator's are returned to the system as the engine used last time; after it, all of the
        engine's, including weights that the next sync packs again.
        """
        with nullcontext() if self._ahead is None else self._ahead.pause():
            yield from self._use_synced_engine()

    def _use_synced_engine(self) -> Iterator[None]:
        if self.policy.packs_batches:
            with phase("generation"):
                _core.release_freed_memory(self._sampler_bytes)
        try:
            with self.policy.exported_weights():
                with phase("sync"):
                    self.engine.sync(self.model)
                yield
        finally:
            release = getattr(self.engine, "release_memory", None)
            if release is not None:
                with phase("generation"):
                    self._sampler_bytes = release()
        if self._is_own_engine and isinstance(self.engine, Engine):  # a user's engine may sample again without a sync
            with phase("generation"):
                self._sampler_bytes += self.engine.release_weights()

    def replays_experts(self) -> bool:
        """Whether an update gives tokens to the experts that the sampler chose."""
        return False

    def can_replay_experts(self) -> bool:
        """Whether the engine records experts and the policy takes them."""
        return getattr(self.engine, "records_experts", True) and self.policy.replays_experts

    def prepare(self, batch: Any) -> Prompts:
        """Return the prompts of a batch as token ids; reject prompts that leave no room for a completion.

        An environment renders its own prompts: ``decoded`` are the rows.
        """
        where = type(self).__name__
        if self.player is not None:
            rows = as_rows(batch, as_prompt_row, where)
            if rows is None:
                raise WhetTypeError(f"{where}: the batch is {type(batch).__name__}, and an environment takes rows.")
            return Prompts([], [dict(row) for row in rows], {})
        prompts = read_prompts(batch, self.tokenizer, where)
        self.length_limit.check_prompts(prompts.ids)
        check_lengths(self.model, prompts.ids, self.config.max_new_tokens, where)
        return prompts

    def tokenize_row(self, row: Mapping[str, Any], tokenizer: Any) -> list[int]:
        """Return the prompt, see ``tokenize_prompt``; an environment renders its own."""
        return [] if self.player is not None else tokenize_prompt(row, tokenizer)

    def _sample(
        self, batch: Any, n: int, key: int, temperature: float | None = None, for_update: bool = False
    ) -> Rollout:
        """Sample ``n`` completions per prompt, reproducibly for (seed, key) and the engine's weights."""
        prompts = self.get_prepared(batch)
        self.engine = ensure_capacity(self.engine, self._make_engine, prompts.ids, self.config.max_new_tokens)
        sampling = self._sampling(key, for_update)
        if temperature is not None:
            sampling = dataclasses.replace(sampling, temperature=temperature)
        if self.player is not None:
            return self._play(self.player, prompts.decoded, n, sampling)
        engine = self.engine if self.ranks.size == 1 else ShardedEngine(self.ranks, self.engine)
        with phase("generation"):
            return sample(engine, prompts, n, sampling, self.tokenizer)

    def _sampling(self, key: int, for_update: bool) -> SamplingParams:
        """Return the settings of sampling for (seed, key); ``for_update``: see ``sample``."""
        seed = int(np.random.SeedSequence([self.config.seed % 2**64, key]).generate_state(1)[0])
        sampling = self.config.sampling(self.stop_token_ids(), seed)
        if not for_update:
            return sampling
        recorded = {"kept_tokens": sampling.drops_tokens(), "experts": self.replays_experts()}
        return dataclasses.replace(sampling, **recorded)

    def _play(
        self, player: Player | AgentPlayer, rows: list[dict[str, Any]], n: int, sampling: SamplingParams
    ) -> Rollout:
        """Play ``n`` episodes per row; every rank plays its share of the rows."""
        n_ranks = self.ranks.size
        own = range(self.ranks.rank, len(rows), n_ranks)
        play = partial(player.play, self.engine, [rows[i] for i in own], n, sampling, own)
        with phase("generation"):
            shares = self.ranks.gather_results(play)
        return rollout_of([shares[i % n_ranks][i // n_ranks * n + j] for i in range(len(rows)) for j in range(n)])
