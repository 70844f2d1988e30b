"""Whet's trainers."""

from __future__ import annotations

from itertools import count
from typing import Any

from whet.bench.contenders.training import workload
from whet.bench.contenders.training.contender import Session
from whet.bench.contenders.training.workload import Answer, DPOShape, GRPOShape, Watch


def serve_grpo(session: Session, shape: GRPOShape, settings: dict[str, Any]) -> None:
    """GRPO steps, each on its own prompts."""
    from whet.algorithms.grpo import GRPO

    tokenizer = workload.tokenizer_of(shape)
    policy = session.build(workload.policy_of, shape.model)
    trainer = GRPO(
        policy,
        workload.reference_of(shape, policy) if shape.beta else None,
        reward_fn=workload.even_tokens,
        beta=shape.beta,
        group_size=shape.group_size,
        max_new_tokens=shape.completion_length,
        stop_token_ids=shape.stop_ids,
        advantage_ddof=1,
        advantage_eps=workload.ADVANTAGE_EPS,
        **workload.OPTIMIZER,
        **settings,
    )
    watch = Watch(policy)
    for step in count():
        prompts = [tokenizer(text)["input_ids"] for text in shape.prompts(step)]
        session.begin()
        metrics = trainer.train_step(prompts)
        rows = [row["completion"] for row in trainer.last_completions]
        session.end(_answer(metrics, watch, rows), _parts(metrics))


def serve_dpo(session: Session, shape: DPOShape, settings: dict[str, Any]) -> None:
    """DPO steps on the same pairs."""
    from whet.algorithms.dpo import DPO

    tokenizer = workload.tokenizer_of(shape)
    policy = session.build(workload.policy_of, shape.model)
    trainer = DPO(
        policy,
        workload.reference_of(shape, policy),
        tokenizer=tokenizer,
        beta=workload.DPO_BETA,
        **workload.OPTIMIZER,
        **settings,
    )
    watch = Watch(policy)
    while True:
        session.begin()
        metrics = trainer.train_step(shape.pairs())
        session.end(_answer(metrics, watch), _parts(metrics))


def _answer(metrics: dict[str, float], watch: Watch, completion_ids: Any = ()) -> Answer:
    return Answer(metrics["loss"], metrics["grad_norm"], watch.moved(), completion_ids)


def _parts(metrics: dict[str, float]) -> dict[str, float]:
    seconds = {name[5:-2]: part_s for name, part_s in metrics.items() if name.startswith("time/")}
    return {name: part_s for name, part_s in seconds.items() if name != "other"}
