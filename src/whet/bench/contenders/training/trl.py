# pyright: reportMissingImports=false, reportPrivateImportUsage=false
"""TRL's trainers, halted before every step and timed by the parts that they are made of."""

from __future__ import annotations

import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from whet.bench.contenders.training import workload
from whet.bench.contenders.training.contender import Session
from whet.bench.contenders.training.workload import Answer, DPOShape, GRPOShape, Watch
from whet.training.phases import phase, record

_MANY_STEPS = 1000
OURS: dict[str, Any] = {
    **workload.OPTIMIZER,
    "lr_scheduler_type": "constant",
    "optim": "adamw_torch",
    "max_steps": _MANY_STEPS,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
"""The settings that every contender has, and that nothing be written or shown."""


def serve_grpo(session: Session, shape: GRPOShape, settings: dict[str, Any]) -> None:
    """GRPOTrainer's steps, each on its own prompts; ``settings`` are those of GRPOConfig, with ``micro_batch``."""
    with _quiet() as folder:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        tokenizer = workload.tokenizer_of(shape)
        policy = session.build(workload.policy_of, shape.model)
        if shape.mean_length:
            policy.generation_config.eos_token_id = shape.stop_ids
        if shape.beta:  # TRL loads the reference from where the policy's config says that it came from
            policy.config._name_or_path = f"{folder}/reference"
            workload.reference_of(shape, policy).save_pretrained(policy.config._name_or_path)
        config = GRPOConfig(
            output_dir=folder,
            num_generations=shape.group_size,
            max_completion_length=shape.completion_length,
            shuffle_dataset=False,
            beta=shape.beta,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            **_batches(shape.n_completions, settings),
            **OURS,
        )
        sampled: list[list[int]] = []

        def reward(completion_ids: Any, **columns: Any) -> list[Any]:
            sampled[:] = completion_ids
            return workload.even_tokens(completion_ids)

        prompts = [text for step in range(_MANY_STEPS) for text in shape.prompts(step)]
        trainer = GRPOTrainer(
            model=policy,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
        )
        _time_as(trainer, "_generate_single_turn", "generation")
        _time_as(trainer, "_get_per_token_logps_and_entropies", "forward")
        _run(trainer, session, sampled, sum)


def serve_dpo(session: Session, shape: DPOShape, settings: dict[str, Any]) -> None:
    """DPOTrainer's steps on the same pairs; ``settings`` are those of DPOConfig, with ``micro_batch``."""
    with _quiet() as folder:
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer

        tokenizer = workload.tokenizer_of(shape)
        policy = session.build(workload.policy_of, shape.model)
        config = DPOConfig(output_dir=folder, beta=workload.DPO_BETA, **_batches(shape.n_pairs, settings), **OURS)
        trainer = DPOTrainer(
            model=policy,
            ref_model=workload.reference_of(shape, policy),
            args=config,
            train_dataset=Dataset.from_list(shape.pairs()),
            processing_class=tokenizer,
        )
        _time_as(trainer.ref_model, "forward", "logprobs")
        _run(trainer, session, [], statistics.mean)


@contextmanager
def _quiet() -> Iterator[str]:
    """Nothing on the network, no output; yields a folder, which is gone afterwards."""
    os.environ.update(
        HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1", CI="1", TOKENIZERS_PARALLELISM="false"
    )
    warnings.simplefilter("ignore")
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.utils.disable_progress_bars()
    with tempfile.TemporaryDirectory(prefix="whet-bench-") as folder:
        yield folder


def _batches(n_rows: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with ``micro_batch`` as Hugging Face's trainers call it."""
    settings = dict(settings)
    micro_batch = min(settings.pop("micro_batch", n_rows), n_rows)
    return {
        **settings,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": n_rows // micro_batch,
    }


def _time_as(owner: Any, name: str, part: str, results: list[Any] | None = None) -> None:
    """Time a method as a part, and keep what it returns where there is a list for it."""
    inner = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        with phase(part):
            result = inner(*args, **kwargs)
        if results is not None:
            results.append(result)
        return result

    setattr(owner, name, timed)


def _run(trainer: Any, session: Session, sampled: list[list[int]], loss_of: Callable[[list[float]], float]) -> None:
    """Train, a step each time that the session asks for one; ends with the process.

    Args:
        sampled: the completions of the step, once it has been taken.
        loss_of: the step's loss, of those of its micro-batches as the trainer computes them.
    """
    from transformers import PrinterCallback, TrainerCallback

    losses: list[Any] = []
    norms: list[Any] = []
    watch = Watch(trainer.model)
    _time_as(trainer, "compute_loss", "loss", losses)
    _time_as(trainer.accelerator, "backward", "backward")
    _time_as(trainer.accelerator, "clip_grad_norm_", "optimizer", norms)

    class Halt(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            losses.clear()
            norms.clear()
            session.begin()
            self.record = ExitStack()
            self.seconds = self.record.enter_context(record())

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            self.optimizer = ExitStack()
            self.optimizer.enter_context(phase("optimizer"))

        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            self.optimizer.close()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.record.close()
            parts = {name: part_s for name, part_s in self.seconds.items() if name != "other"}
            loss = loss_of([float(loss) for loss in losses])
            session.end(Answer(loss, float(norms[-1]), watch.moved(), list(sampled)), parts)

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Halt())
    trainer.train()
