"""TRL's losses of a model, computed by the methods of its trainers, in float64."""

from __future__ import annotations

import collections
import contextlib
from types import SimpleNamespace
from typing import Any

import torch


class ForTRL(torch.nn.Module):
    """A model with the outputs that TRL's trainers read."""

    is_gradient_checkpointing = False

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, labels: Any, **_: Any) -> Any:
        log_probs = self.model(input_ids)[:, :-1].log_softmax(-1)
        found = log_probs.gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0]
        found = found.masked_fill(labels[:, 1:] == -100, 0.0)
        others = {name: torch.zeros_like(found) for name in ("entropy", "mean_logits")}
        squares = (2 * log_probs).logsumexp(-1)
        return SimpleNamespace(log_probs=found, is_top1=found < 0, log_sum_sq_probs=squares, **others)


def trainer_of(model: Any, ref_model: Any, **settings: Any) -> Any:
    """The attributes that ``_compute_loss`` of TRL's trainers reads."""
    return SimpleNamespace(
        model=ForTRL(model), ref_model=ForTRL(ref_model), aux_loss_enabled=False, precompute_ref_logps=False,
        accelerator=SimpleNamespace(
            device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x, reduce=lambda x, reduction: x,
            process_index=0, num_processes=1, is_main_process=False, sync_gradients=True,
            autocast=contextlib.nullcontext, pad_across_processes=lambda x, **_: x,
        ),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None), _total_train_tokens=0, _tp_size=1,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)), **settings,
    )  # fmt: skip


def grpo_loss(
    batch: dict[str, torch.Tensor], entropies: torch.Tensor, kind: Any = None, **settings: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss and metrics of TRL's GRPO trainer, or of ``kind``, at given log-probs and entropies."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    kind = kind or GRPOTrainer
    given = {
        "loss_type": "dapo", "importance_sampling_level": "token", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2,
        "off_policy_mask_threshold": None, "top_entropy_quantile": 1.0, "entropy_coef": 0.0, **settings,
    }  # fmt: skip
    trainer = trainer_of(
        None, None, current_gradient_accumulation_steps=1, use_vllm=False, use_adaptive_entropy=False,
        _entropy_bonus_enabled=given["entropy_coef"] != 0, max_completion_length=None,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask, **given,
    )  # fmt: skip
    vars(trainer.args).update(delta=None, use_bias_correction_kl=True, steps_per_generation=1)
    one, more = torch.tensor([1.0, 1.05], dtype=torch.float64)  # of floats TRL makes float32
    vars(trainer.args).update(sapo_temperature_pos=one, sapo_temperature_neg=more)
    trainer.get_high_entropy_mask = lambda *chosen: GRPOTrainer.get_high_entropy_mask(trainer, *chosen)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (batch["logprobs"], entropies, None)
    blank = torch.zeros(batch["logprobs"].shape)
    inputs = {
        **dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids"), blank),
        "completion_mask": batch["completion_mask"].long(), "advantages": batch["advantages"],
        "old_per_token_logps": batch["old_logprobs"], "ref_per_token_logps": batch["ref_logprobs"],
        "num_items_in_batch": batch["completion_mask"].sum(),
    }  # fmt: skip
    loss = kind._compute_loss(trainer, trainer.model, inputs)
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


def grad_norm(loss: torch.Tensor, model: torch.nn.Module) -> float:
    """2-norm of the gradients of a loss."""
    loss.backward()
    return torch.stack([each.grad.norm() for each in model.parameters() if each.grad is not None]).norm().item()
