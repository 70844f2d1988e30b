"""Test cases of ranks, under torchrun or in one process: ``python -m tests.scale.ranks OUT [CASE ...]``.

Each case is a function without arguments that returns plain values; rank r writes the values of all cases to OUT.r, and
cases write files to OUT.files.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
from tests.tiny import TinyModel, fours, letters_tokenizer, timeless, tiny_llama, with_lora

from whet.algorithms.cpo import CPO
from whet.algorithms.distill import Distill
from whet.algorithms.dpo import DPO
from whet.algorithms.grpo import GRPO
from whet.algorithms.kto import KTO
from whet.algorithms.online_dpo import OnlineDPO
from whet.algorithms.orpo import ORPO
from whet.algorithms.reward import Reward
from whet.algorithms.rloo import RLOO
from whet.algorithms.sdpo import SDPO
from whet.algorithms.sft import SFT
from whet.algorithms.simpo import SimPO
from whet.config import GRPOLossType
from whet.engine import Engine
from whet.errors import WhetError
from whet.runs.models import as_reward_model
from whet.training.callbacks import Callback
from whet.training.distributed import join_ranks

SETTINGS: dict[str, Any] = {"learning_rate": 0.01, "micro_batch_size": 2, "compute": "float32"}
PROMPTS = [[5, 6], [7], [8, 9, 10]]
SFT_BATCH = [[5, 6], [7], [8, 9, 4], [4]], [[4, 5, 2], [6, 6, 7, 2], [2], [9, 9, 9, 9, 2]]
SAME_LENGTHS = [[5, 6], [7, 8]], [[4, 5, 2], [6, 6, 2]]
PAIRS = [[5, 6], [7], [8]], [[4, 5, 2], [6, 2], [7, 7, 7, 2]], [[5, 2], [6, 7, 2], [4, 2]]
RATED = [[5, 6], [7], [8], [9]], [[4, 5, 2], [6, 2], [7, 7, 7, 2], [4]], [True, False, True, True]
LOSS_TYPES = get_args(GRPOLossType)


class Metrics(Callback):
    """Metrics of each step."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_step_end(self, trainer: Any, metrics: Any) -> None:
        self.metrics.append(timeless(metrics))


def _grpo(model: Any = None, **settings: Any) -> GRPO:
    given = {**SETTINGS, "group_size": 3, "max_new_tokens": 5, "rollout_weights": "float32", **settings}
    if given.get("loss_type") == "cispo":
        given["epsilon_high"] = 5.0
    return GRPO(model or tiny_llama(), reward_fn=given.pop("reward_fn", fours), **given)


def _after(trainer: Any, *batches: tuple[Any, ...]) -> dict[str, Any]:
    """Return metrics of each step, the gradient of the first step, and the weights after the last."""
    gradients: list[list[float]] = []
    step = trainer.policy.optimizer.step

    def record(*arguments: Any, **options: Any) -> Any:
        if not gradients:
            gradients.extend(p.grad.flatten().tolist() for p in trainer.policy.trainable.values() if p.grad is not None)
        return step(*arguments, **options)

    trainer.policy.optimizer.step = record
    metrics = [timeless(trainer.train_step(*batch)) for batch in batches]
    weights = [p.detach().flatten().tolist() for p in trainer.model.parameters()]
    return {"metrics": metrics, "gradients": gradients, "weights": weights}


def losses() -> dict[str, Any]:
    """Runs of every algorithm and every loss type."""
    found = {
        "sft": _after(SFT(tiny_llama(), **SETTINGS), SFT_BATCH, SFT_BATCH),
        "dpo": _after(DPO(tiny_llama(), **SETTINGS), PAIRS, PAIRS),
        "cpo": _after(CPO(tiny_llama(), **SETTINGS), PAIRS, PAIRS),
        "simpo": _after(SimPO(tiny_llama(), **SETTINGS), PAIRS, PAIRS),
        "orpo": _after(ORPO(tiny_llama(), **SETTINGS), PAIRS, PAIRS),
        "kto": _after(KTO(tiny_llama(), **SETTINGS), RATED, RATED),
        "reward": _after(Reward(as_reward_model(tiny_llama(), None, "ranks"), **SETTINGS), PAIRS, PAIRS),
        "online-dpo": _after(
            OnlineDPO(tiny_llama(), reward_fn=fours, max_new_tokens=5, rollout_weights="float32", **SETTINGS),
            (PROMPTS,),
        ),
        "distill": _after(
            Distill(
                tiny_llama(),
                teacher=Engine.from_model(tiny_llama(seed=3), weights="float32"),
                max_new_tokens=5,
                rollout_weights="float32",
                **SETTINGS,
            ),
            (PROMPTS,),
        ),
        "sdpo": _after(
            SDPO(
                tiny_llama(),
                reward_fn=lambda completions: [float("a" in text) for text in completions],
                feedback_fn=lambda completions: ["c" if i % 3 else None for i in range(len(completions))],
                tokenizer=letters_tokenizer(),
                reprompt_template="{prompt}{solution}{feedback}",
                solution_template="{solution}",
                feedback_template="{feedback}",
                n=4,
                max_new_tokens=5,
                rollout_weights="float32",
                **SETTINGS,
            ),
            (["bc", "d", "efg"],),
        ),
        "rloo": _after(
            RLOO(tiny_llama(), reward_fn=fours, max_new_tokens=5, rollout_weights="float32", **SETTINGS),
            (PROMPTS,),
            (PROMPTS,),
        ),
        "kl, two updates": _after(_grpo(beta=0.1, num_iterations=2), (PROMPTS,)),
        "entropy": _after(_grpo(entropy_coef=0.1, top_entropy_quantile=0.4, num_iterations=2), (PROMPTS,)),
        "mini-batches": _after(_grpo(steps_per_generation=2, beta=0.1, num_iterations=2), (PROMPTS,)),
        "correction": _after(_grpo(sampler_correction="sequence_mask"), (PROMPTS,)),
        "packed": _after(_grpo(micro_batch_size=0, max_tokens_per_step=20), (PROMPTS,)),
    }
    return found | {name: _after(_grpo(loss_type=name), (PROMPTS,)) for name in LOSS_TYPES}


def adapters() -> dict[str, Any]:
    """Runs with LoRA: only adapters have gradients."""

    def model() -> Any:
        return with_lora(tiny_llama(), b_std=0.3)

    return {
        "sft": _after(SFT(model(), **SETTINGS), SFT_BATCH, SFT_BATCH),
        "grpo": _after(_grpo(model()), (PROMPTS,), (PROMPTS,)),
        "exact": _after(_grpo(model(), deterministic_reduction=True), (PROMPTS,), (PROMPTS,)),
    }


def cached() -> dict[str, Any]:
    """Runs of DPO with a reference cache, which rank 0 writes: the second run reads all log-probs."""
    folder = Path(f"{sys.argv[1]}.files")
    rows, runs = list(zip(*PAIRS, strict=True)), []
    for _ in range(2):
        trainer = DPO(tiny_llama(), precompute_reference=True, reference_cache=str(folder), **SETTINGS)
        done = trainer.add_reference_logprobs(rows)
        runs.append([[row["ref_chosen_logprobs"], row["ref_rejected_logprobs"]] for row in done])
        join_ranks().all_gather(None)  # rank 0 has written
    [file] = folder.iterdir()
    return {"first": runs[0], "again": runs[1], "lines": sorted(file.read_text().splitlines())}


def uneven() -> dict[str, Any]:
    """Runs with fewer rows than ranks, and with one prompt, whose group is split."""
    one_row = [[5, 6]], [[4, 5, 2]]
    return {
        "one row": _after(SFT(tiny_llama(), **SETTINGS), one_row),
        "one prompt": _after(_grpo(), ([[5, 6]],)),
        "custom module": _after(_grpo(TinyModel(), compute="torch", rollout_weights="auto"), (PROMPTS,)),
    }


def ahead() -> dict[str, Any]:
    """Runs that sample ahead: metrics of each step, and of the steps after a checkpoint."""
    rows = [[3 + i % 8, 4 + i % 5, 5][: 1 + i % 3] for i in range(20)]

    def run(name: str, model: Callable[[], Any], **settings: Any) -> dict[str, Any]:
        log = Metrics()
        given = {"batch_size": 2, "deterministic_reduction": True, "max_new_tokens": 9, "callbacks": [log], **settings}
        trainer = _grpo(model(), **given)
        trainer.train(rows, steps=5)
        trainer.save(f"{sys.argv[1]}.files/{name}")
        trainer.train(rows, steps=2)
        again = Metrics()
        join_ranks().all_gather(None)  # rank 0 has saved
        resumed = GRPO.from_checkpoint(
            f"{sys.argv[1]}.files/{name}", model(), reward_fn=fours, callbacks=[again]
        )  # fmt: skip
        resumed.train(rows, steps=2)
        return {"metrics": log.metrics, "resumed": again.metrics}

    return {
        "all weights": run("all", tiny_llama, async_lag=1),
        "adapters": run("adapters", lambda: with_lora(tiny_llama(), b_std=0.3), async_lag=3, async_tokens=3),
    }


def exact() -> dict[str, Any]:
    """Runs with deterministic_reduction, also with dropout."""
    settings = {"deterministic_reduction": True}
    return {
        "grpo": _after(_grpo(**settings), (PROMPTS,), (PROMPTS,)),
        "sft": _after(SFT(tiny_llama(), **SETTINGS, **settings), SFT_BATCH, SFT_BATCH),
        "dropout": _after(
            SFT(TinyModel(dropout=0.5), **{**SETTINGS, "compute": "torch"}, training_mode=True, **settings), SFT_BATCH
        ),
    }


def bfloat16_reduction() -> dict[str, Any]:
    """Run with a bfloat16 all-reduce."""
    return {"sft": _after(SFT(tiny_llama(), reduce_dtype="bfloat16", **SETTINGS), SFT_BATCH)}


def evaluations() -> dict[str, Any]:
    """Evaluations, which ranks share."""
    rows = list(zip(*SFT_BATCH, strict=True))
    return {"grpo": _grpo().evaluate(PROMPTS), "sft": SFT(tiny_llama(), **SETTINGS).evaluate(rows)}


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except (WhetError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _on(rank: int) -> bool:
    return join_ranks().rank == rank


def failures() -> dict[str, Any]:
    """Errors on a single rank; later steps on all ranks succeed."""

    def raising(completions: list[Any]) -> list[float]:
        raise RuntimeError("no judge")

    poisoned = copy.deepcopy(tiny_llama())
    trainer = SFT(poisoned, **SETTINGS)
    if _on(min(1, join_ranks().size - 1)):  # only this rank's gradient
        next(iter(poisoned.parameters())).register_hook(lambda gradient: gradient * float("nan"))
    before = [p.detach().clone() for p in poisoned.parameters()]
    skipped = trainer.train_step(*SFT_BATCH)["skipped_steps"]
    unchanged = all(map(torch.equal, before, poisoned.parameters()))

    def no_memory(*arguments: Any, keys: Any) -> Any:
        raise MemoryError("no room for keys and values")

    broken = _grpo()
    if _on(1):
        broken.engine.generate = no_memory
    other_data = SFT_BATCH if _on(0) else ([[5]], [[6, 2]])
    other_order = SAME_LENGTHS if _on(0) else tuple(part[::-1] for part in SAME_LENGTHS)
    rows = list(zip(*SFT_BATCH, strict=True))
    return {
        "reward": _message(lambda: _grpo(reward_fn=raising).train_step(PROMPTS)),
        "sampling": _message(lambda: broken.train_step(PROMPTS)),
        "skipped": skipped,
        "unchanged": unchanged,
        "data": _message(lambda: SFT(tiny_llama(), **SETTINGS).train_step(*other_data)),
        "order": _message(lambda: SFT(tiny_llama(), **SETTINGS).train_step(*other_order)),
        "settings": _message(
            lambda: SFT(tiny_llama(), batch_size=1 + join_ranks().rank, **SETTINGS).train(rows, steps=1)
        ),
        "weights": _message(lambda: SFT(tiny_llama(seed=join_ranks().rank), batch_size=2, **SETTINGS).train(rows)),
    }


CASES = (losses, adapters, cached, uneven, exact, bfloat16_reduction, evaluations, ahead, failures)

if __name__ == "__main__":
    found = {case.__name__: case() for case in CASES if case.__name__ in sys.argv[2:] or len(sys.argv) == 2}
    Path(f"{sys.argv[1]}.{join_ranks().rank}").write_text(json.dumps(found))
