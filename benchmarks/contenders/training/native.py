"""Whet's trainers."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.contenders.training import lora, workload
from benchmarks.contenders.training.contender import Session
from benchmarks.contenders.training.lora import Work
from benchmarks.contenders.training.workload import Answer, DPOShape, GRPOShape, Watch
from whet.config.algorithms import ALGORITHMS


def serve_grpo(session: Session, shape: GRPOShape, settings: dict[str, Any]) -> None:
    """Take GRPO steps, each on its own prompts."""
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
    """Take DPO steps on the same pairs."""
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


def serve_lora(session: Session, work: Work, settings: dict[str, Any]) -> None:
    """Take steps on adapters of a packed base, or on all weights.

    Args:
        settings: ``base``: format of the base; "": all weights are trained, in float32. ``is_native``: a learner
            trains the adapters, without torch. Others are passed to the trainer.
    """
    own = dict(settings)
    base, is_native = own.pop("base"), own.pop("is_native", False)
    tokenizer = work.tokenizer(is_native=is_native)
    model = _learner_of(work, base) if is_native else _model_of(work, base)
    rate = lora.LEARNING_RATES["adapters" if base else "all weights"]
    # If no completion may end, EOS is outside of the vocabulary: prompts are token ids, and there is no tokenizer.
    has_eos = tokenizer.eos_token_id < work.model.config.vocab_size
    arguments = {**workload.OPTIMIZER, "learning_rate": rate, "seed": work.seed, **own}
    arguments["tokenizer"] = tokenizer if has_eos else None
    trainer: Any = ALGORITHMS[work.method].load()(model, **{**_method_settings(work), **arguments})
    n_trained = trainer.policy.n_trained
    for step in count():
        rows, score = work.rows(step), None
        ids = work.token_rows(rows, tokenizer)
        if not has_eos:
            rows = [{**row, "prompt": prompt} for row, prompt in zip(rows, ids, strict=True)]
        if work.is_evaluated(step):
            score = lora.held_out_score(trainer.engine, trainer.model, work, tokenizer)
        session.begin()
        metrics = trainer.train_step(rows)
        seconds, fullest = session.elapsed_s, trainer.memory.fullest
        memory = {} if fullest is None else fullest.parts
        n_completion = round(metrics.get("completions/mean_length", 0) * work.n_rows)
        tokens = lora.Tokens(lora.digest(ids), n_completion)
        session.end(
            lora.Step(tokens, n_trained, metrics["loss"], metrics["grad_norm"], seconds, memory, score), _parts(metrics)
        )


def _method_settings(work: Work) -> dict[str, Any]:
    """Return the arguments of a method's trainer that are equal for both libraries."""
    if not work.samples:
        return {"dpo": {"beta": workload.DPO_BETA}, "simpo": lora.SIMPO, "kto": {"beta": workload.DPO_BETA}}.get(
            work.method, {}
        )
    if work.method == "distill":
        return {"teacher": work.teacher, "divergence": "full", "max_new_tokens": work.max_new_tokens}
    settings = {"reward_fn": work.reward, "group_size": work.group_size, "max_new_tokens": work.max_new_tokens}
    if work.method == "grpo":
        settings |= {"advantage_ddof": 1, "advantage_eps": workload.ADVANTAGE_EPS}
    if work.method == "rloo":
        settings["beta"] = lora.RLOO_BETA
    return settings | ({"tools": work.load_tools(), "max_turns": 1 + lora.MAX_CALLS} if work.tools else {})


def _learner_of(work: Work, base: str) -> Any:
    """Load the learner of a run."""
    import whet

    settings = {"lora_rank": lora.RANK, "lora_alpha": lora.ALPHA, "lora_layers": lora.layers_of(work.model)}
    if work.method == "reward":
        settings["modules_to_save"] = ["score"]
    return whet.Learner(work.path, weights=base, seed=work.seed, **settings)


def _model_of(work: Work, base: str) -> Any:
    """Load the policy of a run: adapters on a packed base, or all weights in float32."""
    import torch

    torch.manual_seed(work.seed)
    if base:
        import peft

        from whet.nn import frozen_model

        return peft.get_peft_model(frozen_model(work.path, base), lora.lora_config(work.model))
    if Path(work.path).is_file():
        from whet.models.sources.gguf_model import load_gguf_model

        return load_gguf_model(work.path)[0]
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(work.path, dtype=torch.float32)


def _answer(metrics: dict[str, float], watch: Watch, completion_ids: Any = ()) -> Answer:
    return Answer(metrics["loss"], metrics["grad_norm"], watch.moved(), completion_ids)


def _parts(metrics: dict[str, float]) -> dict[str, float]:
    seconds = {name[5:-2]: part_s for name, part_s in metrics.items() if name.startswith("time/")}
    return {name: part_s for name, part_s in seconds.items() if name != "other"}
