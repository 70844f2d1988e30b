# pyright: reportMissingImports=false, reportPrivateImportUsage=false
"""TRL's trainers, paused before every step and timed by part."""

from __future__ import annotations

import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.contenders.training import lora, workload
from benchmarks.contenders.training.contender import Session
from benchmarks.contenders.training.lora import Work
from benchmarks.contenders.training.workload import Answer, DPOShape, GRPOShape, Watch
from whet.training.phases import phase, record

_MANY_STEPS = 1000
_CALLS: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""The form of calls in the calculator's template, as transformers reads it."""
_BETAS = {
    "grpo": 0.0,
    "rloo": lora.RLOO_BETA,
    "distill": 1.0,  # KL(student || teacher)
    "dpo": workload.DPO_BETA,
    "kto": workload.DPO_BETA,
    "simpo": lora.SIMPO["beta"],
}
_SUMMED = ("grpo", "sft", "distill")
"""Methods whose losses of micro-batches are divided by counts of the whole batch."""
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
"""Settings of every contender, without output and checkpoints."""


def serve_grpo(session: Session, shape: GRPOShape, settings: dict[str, Any]) -> None:
    """Take steps of GRPOTrainer, each on its own prompts; ``settings``: fields of GRPOConfig, and ``micro_batch``."""
    with _quiet() as folder:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        tokenizer = workload.tokenizer_of(shape)
        policy = session.build(workload.policy_of, shape.model)
        if shape.mean_length:
            policy.generation_config.eos_token_id = shape.stop_ids
        if shape.beta:  # TRL loads the reference from _name_or_path of the policy's config
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
        watch = Watch(policy)
        _run(trainer, session, lambda losses, norm: Answer(sum(losses), norm, watch.moved(), list(sampled)))


def serve_dpo(session: Session, shape: DPOShape, settings: dict[str, Any]) -> None:
    """Take steps of DPOTrainer on the same pairs; ``settings``: fields of DPOConfig, and ``micro_batch``."""
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
        watch = Watch(policy)
        _run(trainer, session, lambda losses, norm: Answer(statistics.mean(losses), norm, watch.moved()))


def serve_lora(session: Session, work: Work, settings: dict[str, Any]) -> None:
    """Take steps of TRL's trainers on PEFT adapters.

    Args:
        settings: fields of the method's config, and ``micro_batch``; ``base``: dtype of the frozen weights, or "nf4",
            quantised by bitsandbytes; "": all weights are trained, in float32.
    """
    with _quiet() as folder:
        from datasets import Dataset

        settings = dict(settings)
        base = settings.pop("base")
        tokenizer = work.tokenizer()
        trainer_class, config_class = _classes_of(work.method)
        rate = lora.LEARNING_RATES["adapters" if base else "all weights"]
        options = {**OURS, "learning_rate": rate, "seed": work.seed, **_batches(work.n_rows, settings)}
        options["model_init_kwargs"] = _weights_of(base)
        own: dict[str, Any] = {}
        sampled: list[Any] = []
        if work.samples:
            options |= {
                "max_completion_length": work.max_new_tokens,
                "shuffle_dataset": False,
                "beta": _BETAS[work.method],
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 0,
            }
            if work.method == "distill":
                own["teacher_model"] = work.teacher
                options["teacher_model_init_kwargs"] = options["model_init_kwargs"]
            else:
                own["reward_funcs"] = _record_completions(work.reward, sampled)
                options["num_generations"] = work.group_size
            if work.tools:
                tokenizer.response_template = _CALLS
                own["tools"] = work.load_tools()
                options["max_tool_calling_iterations"] = lora.MAX_CALLS
        else:
            # No limit is None, except that CPOTrainer takes it for 512.
            options["max_length"] = work.model.config.max_position if work.method == "simpo" else None
            if work.method in _BETAS:
                options["beta"] = _BETAS[work.method]
            if work.method == "simpo":
                options |= {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": lora.SIMPO["margin"]}
        # Without sampling every step has the same rows, in TRL's random order.
        n_epoch = work.n_steps if work.samples else 1
        rows = [row for step in range(n_epoch) for row in work.rows(step)]
        trainer = trainer_class(
            model=work.folder,
            args=config_class(output_dir=folder, **options),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=lora.lora_config(work.model, "SEQ_CLS" if work.method == "reward" else "CAUSAL_LM")
            if base
            else None,
            **own,
        )
        seen: list[list[int]] = []
        if work.samples:
            is_distill = work.method == "distill"
            _record_prompts(trainer, seen, work.group_size, sampled if is_distill else [])
            _time_as(trainer, "_generate_single_turn", "generation")
            if not is_distill:
                _time_as(trainer, "_get_per_token_logps_and_entropies", "forward")
        else:
            _record_rows(trainer, seen)
        if work.method == "reward":
            _zero_head(trainer.model)
        n_trained = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
        scores: list[float | None] = []
        engine = _evaluating_engine(trainer.model, tokenizer) if work.evaluate_every else None

        def evaluate() -> None:
            seen.clear()
            evaluated = work.is_evaluated(len(scores))
            scores.append(lora.held_out_score(engine, trainer.model, work, tokenizer) if evaluated else None)

        def answer(losses: list[float], norm: float) -> lora.Step:
            seconds = session.elapsed_s
            loss = sum(losses) if work.method in _SUMMED else statistics.mean(losses)
            tokens = lora.Tokens(lora.digest(seen), sum(map(len, sampled)))
            return lora.Step(tokens, n_trained, loss, norm, seconds, score=scores[-1])

        _run(trainer, session, answer, evaluate)


def _classes_of(method: str) -> tuple[Any, Any]:
    """Return the trainer of a method and its config."""
    import trl

    if method == "simpo":
        from trl.experimental import cpo

        return cpo.CPOTrainer, cpo.CPOConfig
    name = {"kto": "KTO", "reward": "Reward", "distill": "Distillation"}.get(method, method.upper())
    return getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")


def _zero_head(model: Any) -> None:
    """Begin with a reward of 0 for all rows, as Whet does; TRL's head is random."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".score." in name:
                parameter.zero_()


def _weights_of(base: str) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained``."""
    if base != "nf4":
        return {"dtype": base or "float32"}
    import bitsandbytes  # noqa: F401  (raise an ImportError with its name)
    import torch
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    return {"dtype": "bfloat16", "quantization_config": quantization, "device_map": {"": "cpu"}}


def _evaluating_engine(model: Any, tokenizer: Any) -> Any:
    from whet.rollout.choose import make_engine

    return make_engine("native", model, "float32", "whet bench", tokenizer=tokenizer)


def _record_completions(reward: Callable[..., Any], sampled: list[Any]) -> Callable[..., Any]:
    """Wrap the reward function to record the completions of the step in ``sampled``."""

    def score(**columns: Any) -> Any:
        sampled[:] = columns["completion_ids"]
        return reward(**columns)

    return score


def _record_prompts(trainer: Any, seen: list[list[int]], group_size: int, sampled: list[Any]) -> None:
    """Record the distinct prompts of every step in ``seen``; later turns of episodes are generated row by row.

    Args:
        sampled: gets the completions, of which DistillationTrainer has no other record.
    """
    inner = trainer._generate_single_turn

    def generate(prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("num_generations") != 1:
            seen.extend(list(ids) for ids in prompt_ids[::group_size])
        found = inner(prompt_ids, *args, **kwargs)
        sampled[:] = found
        return found

    trainer._generate_single_turn = generate


def _record_rows(trainer: Any, seen: list[list[int]]) -> None:
    """Record the rows of every forward pass in ``seen``, without padding."""
    inner = trainer.compute_loss

    def compute(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        for side in ("", "chosen_", "rejected_"):  # CPOTrainer's pairs are joined later
            if f"{side}input_ids" in inputs:
                pairs = zip(inputs[f"{side}input_ids"], inputs[f"{side}attention_mask"], strict=True)
                seen.extend(ids[mask.bool()].tolist() for ids, mask in pairs)
        return inner(model, inputs, *args, **kwargs)

    trainer.compute_loss = compute


@contextmanager
def _quiet() -> Iterator[str]:
    """Disable network access and output; yield a temporary folder."""
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
    """Translate ``micro_batch`` to the settings of Hugging Face trainers."""
    settings = dict(settings)
    micro_batch = min(settings.pop("micro_batch", n_rows), n_rows)
    if n_rows % micro_batch:
        raise ValueError(f"micro_batch is {micro_batch}, which does not divide the {n_rows} rows of a step")
    return {
        **settings,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": n_rows // micro_batch,
    }


def _time_as(owner: Any, name: str, part: str, results: list[Any] | None = None) -> None:
    """Time a method as a part; append its results to ``results`` if given."""
    inner = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        with phase(part):
            result = inner(*args, **kwargs)
        if results is not None:
            results.append(result)
        return result

    setattr(owner, name, timed)


def _run(
    trainer: Any,
    session: Session,
    answer: Callable[[list[float], float], Any],
    between: Callable[[], object] = lambda: None,
) -> None:
    """Train, one step per request of the session, until the process ends.

    Args:
        answer: makes the answer of a step from the losses of its micro-batches and the gradient norm.
        between: called before waiting for a request.
    """
    from transformers import PrinterCallback, TrainerCallback

    losses: list[Any] = []
    norms: list[Any] = []
    _time_as(trainer, "compute_loss", "loss", losses)
    _time_as(trainer.accelerator, "backward", "backward")
    _time_as(trainer.accelerator, "clip_grad_norm_", "optimizer", norms)

    class Halt(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            losses.clear()
            norms.clear()
            between()
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
            session.end(answer([float(loss) for loss in losses], float(norms[-1])), parts)

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Halt())
    trainer.train()
