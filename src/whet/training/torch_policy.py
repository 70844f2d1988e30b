"""A torch module as the policy of a trainer: log-probs as NumPy arrays, gradients from theirs, and AdamW steps."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from whet.checkpoint.modules import build_module, describe_module, load_module_tensors, module_tensors
from whet.checkpoint.unpack import adapter_settings
from whet.config.kept_tokens import KeptTokens
from whet.config.settings import TrainerConfig
from whet.errors import CheckpointError, WhetTypeError, WhetValueError
from whet.learner.batch import Logprobs, Neftune
from whet.memory import tensor_memory
from whet.models.base_record import check_record, write_record
from whet.models.sources.live import check_frequencies
from whet.nn.accelerate import acceleration_of, choose_accelerations
from whet.nn.balance import balance_coefficient
from whet.nn.causal_lm import completion_logprobs
from whet.nn.frozen import base_of
from whet.nn.modules import module_device, module_mode, position_limit, stop_token_ids
from whet.nn.optim import HALF_DTYPES
from whet.nn.optimizers import CHANGED, is_hidden_matrix, make_optimizer
from whet.nn.replay import routers_of
from whet.nn.rewards import check_reward_model, completion_rewards
from whet.nn.rounding import RoundedWeights
from whet.system.memory import choose_activation_bytes, unused_bytes
from whet.training.policy import Score, State, check_same_optimizer, check_same_parameters, error_without_effect
from whet.training.reduction import checksum
from whet.training.reference import Reference


class TorchPolicy:
    """A module whose parameters that require grad are trained, and its frozen reference.

    Args:
        model: the policy.
        ref_model: the reference, see ``Reference``.
        config: settings of the trainer.
        where: the trainer's name, for errors.

    Attributes:
        model: the policy.
        trainable: the trained parameters, by name.
        reference: the frozen reference.
        acceleration: Whet's kernels in the policy; None: torch computes it.
        accelerations: Whet's kernels by model, policy and reference.
        optimizer: by ``config.optimizer``; AdamW has float32 masters of 16-bit parameters.

    Raises:
        WhetTypeError: a model is not a module.
        WhetValueError: a model cannot be trained, with the reason.
    """

    def __init__(self, model: nn.Module, ref_model: nn.Module | None, config: TrainerConfig, where: str) -> None:
        self.model, self._config, self._where = model, config, where
        self.trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.trainable:
            raise WhetValueError(f"{where}: no parameter of model requires grad. Unfreeze some.")
        if config.trains_reward:
            check_reward_model(model, where)
        self.reference = Reference(model, self.trainable, ref_model, kept=config.uses_reference_model(), where=where)
        self.reference.check_moves(config, where)
        models = [model] if self.reference.model is None else [model, self.reference.model]
        self.accelerations = choose_accelerations(models, config.compute, config.training_mode, where)
        self.acceleration = self.accelerations.get(model)
        if self.acceleration is not None:
            self.acceleration.in_place = True
        if config.activation_bytes is not None and not (self.acceleration and self.acceleration.layer_bytes):
            part = "a part of the model" if self.acceleration else "the step"
            raise WhetValueError(
                f"{where}: activation_bytes is {config.activation_bytes} and has no effect, because torch computes "
                f"{part}. Omit it, or call model.gradient_checkpointing_enable() and set training_mode."
            )
        self.optimizer = make_optimizer(config, self._groups(), where)
        self._rounded = RoundedWeights(model, config.qat, where) if config.qat else None
        self._rate = config.learning_rate
        self._kept: tuple[Tensor | None, ...] | None = None  # the last log-probs or rewards, entropy, and means
        self._balance: Tensor | None = None
        self._seed = 0
        self._balance_coefficient = balance_coefficient(model, config.router_aux_loss_coef, where)

    def _groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of the optimizer, each with its rate as a multiple of the schedule's.

        Only matrices decay: vectors are biases and norm weights, whose neutral value is not 0.
        """
        config, named = self._config, list(self.trainable.items())
        of_b = {name for name, _ in named if ".lora_B." in name or ".lora_embedding_B." in name}
        if config.loraplus_lr_ratio != 1 and not of_b:
            raise WhetValueError(
                f"{self._where}: loraplus_lr_ratio is {config.loraplus_lr_ratio} and has no effect, because model has "
                f"no LoRA adapters. Omit it."
            )
        parts: dict[tuple[bool, bool, bool], list[Tensor]] = {}
        for name, p in named:
            is_matrix = config.optimizer == "muon" and is_hidden_matrix(name, p, self.model)
            parts.setdefault((p.ndim <= 1, name in of_b, is_matrix), []).append(p)
        groups = []
        for (is_vector, is_b, is_matrix), ps in sorted(parts.items(), key=lambda item: item[0]):
            decay, ratio = 0.0 if is_vector else config.weight_decay, config.loraplus_lr_ratio if is_b else 1.0
            rate = config.learning_rate * ratio
            groups.append({"params": ps, "weight_decay": decay, "ratio": ratio, "lr": rate, "is_matrix": is_matrix})
        return groups

    @staticmethod
    def check(model: nn.Module, ref_model: nn.Module | None, where: str) -> None:
        """Raise unless the models are modules that a trainer takes."""
        for name, module in (("model", model), ("ref_model", ref_model)):
            if module is None and name == "ref_model":
                continue
            if not isinstance(module, nn.Module):
                raise WhetTypeError(
                    f"{where}: {name} is {type(module).__name__}, expected an nn.Module"
                    f"{' or a whet.Learner' if name == 'model' else ''}."
                )
            if acceleration_of(module) is not None:
                raise WhetValueError(
                    f"{where}: {name} is already accelerated. A trainer accelerates its model during each step, "
                    "according to compute: call remove() on the result of accelerate()."
                )
            check_frequencies(module, f"{where}: {name}")

    @property
    def arithmetic(self) -> str:
        """The arithmetic of the products: "float32" or "bfloat16" of Whet's kernels, or "torch"."""
        return str(self.acceleration.dtype).removeprefix("torch.") if self.acceleration else "torch"

    @property
    def packs_batches(self) -> bool:
        """Whether batches are packed: Whet's kernels do so, padding modules do not."""
        return self.acceleration is not None

    @property
    def rounds_samples(self) -> bool:
        """Whether the engine rounds inputs of products that this policy does not round: the base is quantised."""
        base = base_of(self.model)
        return base is not None and base.is_quantised

    @property
    def n_trained(self) -> int:
        """Number of trained parameters."""
        return sum(p.numel() for p in self.trainable.values())

    @property
    def position_limit(self) -> int | None:
        """``max_position_embeddings`` of the module."""
        return position_limit(self.model)

    def stop_token_ids(self, tokenizer: Any, chosen: Sequence[int]) -> list[int]:
        """Return the tokens that end a completion."""
        return stop_token_ids(self.model, tokenizer, chosen)

    # --- passes -----------------------------------------------------------------------------------------

    @contextmanager
    def training(self, seed: int) -> Iterator[None]:
        """Context of ``logprobs`` and ``backward``: the model's mode, and its kernels. Torch's generator continues."""
        self._seed = seed
        if self.acceleration is not None:
            self.acceleration.activation_bytes = choose_activation_bytes(self._config.activation_bytes, unused_bytes())
        move = getattr(self.optimizer, "train", None)
        if move is not None:  # to the weights where a schedule-free step computes its gradients
            move()
        try:
            with (
                module_mode(self.model, self._config.training_mode),
                self.acceleration or nullcontext(),
                self.exported_weights(),
            ):
                yield
        finally:
            if move is not None:
                self.optimizer.eval()

    def exported_weights(self) -> AbstractContextManager[None]:
        """Context in which the model has the weights of its export: rounded with ``qat``, else unchanged."""
        return nullcontext() if self._rounded is None else self._rounded.applied()

    def seed(self, seed: int) -> None:
        """Seed torch's generator, from which dropout draws."""
        torch.manual_seed(seed)

    @property
    def replays_experts(self) -> bool:
        """Whether ``logprobs`` takes the experts of tokens: of a mixture of experts on Whet's kernels."""
        return self.acceleration is not None and bool(routers_of(self.model))

    def logprobs(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        *,
        completion_mask: Sequence[Sequence[bool]] | None = None,
        kept_tokens: Sequence[KeptTokens | None] | None = None,
        candidates: Sequence[Any] | None = None,
        experts: Sequence[np.ndarray | None] | None = None,
        temperature: float = 1.0,
        return_entropy: bool = False,
        differentiable_entropy: bool = False,
        return_mean: bool = False,
        neftune_alpha: float = 0.0,
    ) -> Logprobs:
        """Return log-probs as ``completion_logprobs`` does; ``backward`` follows."""
        found = completion_logprobs(
            self.model, prompt_ids, completion_ids, completion_mask=completion_mask, kept_tokens=kept_tokens,
            candidates=candidates, temperature=temperature, return_entropy=return_entropy,
            differentiable_entropy=differentiable_entropy, return_mean=return_mean,
            return_balance=self._balance_coefficient != 0, experts=experts,
            neftune=Neftune(neftune_alpha, self._seed) if neftune_alpha else None,
        )  # fmt: skip
        self._kept, self._balance = (found.logprobs, found.entropy, found.mean), found.balance
        arrays = [None if x is None else x.detach().cpu().numpy() for x in found[:4]]
        return Logprobs(*arrays, replaced_experts=found.replaced_experts)  # pyright: ignore[reportArgumentType]

    def rewards(
        self, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]], *, keep: bool = True
    ) -> np.ndarray:
        """Return ``completion_rewards``; ``backward`` follows, unless they are of the eval mode."""
        if keep:
            rewards = completion_rewards(self.model, prompt_ids, completion_ids)
            self._kept = (rewards,)
            return rewards.detach().cpu().numpy()
        with torch.no_grad(), module_mode(self.model, training=False), self.acceleration or nullcontext():
            return completion_rewards(self.model, prompt_ids, completion_ids).cpu().numpy()

    def backward(
        self,
        grad: np.ndarray,
        share: float = 1.0,
        grad_entropy: np.ndarray | None = None,
        grad_mean: np.ndarray | None = None,
    ) -> dict[str, float]:
        """Add the gradients of the parameters, from the gradients of the last log-probs, (B, C), of their entropy and
        their means, or of the last rewards, (B,), and of the balance.
        """
        kept, self._kept = self._kept, None
        if kept is None:
            raise WhetTypeError("backward: it follows logprobs or rewards, once. Call one of them first.")
        pairs = [(x, given) for x, given in zip(kept, (grad, grad_entropy, grad_mean), strict=False) if x is not None]
        outputs = [x for x, given in pairs if given is not None]
        gradients = [torch.from_numpy(given).to(x) for x, given in pairs if given is not None]
        if self._balance is None:
            torch.autograd.backward(outputs, gradients)
            return {}
        balance, self._balance = share * self._balance, None
        loss = self._balance_coefficient * balance
        torch.autograd.backward([*outputs, loss], [*gradients, torch.ones_like(loss)])
        return {"loss": loss.item(), "balance_loss": balance.item()}

    @contextmanager
    def scoring(self, *, reference: bool = False) -> Iterator[Score]:
        """Context that provides the log-probs of the policy, or of its reference, in eval mode."""
        with (
            self.reference.as_module() if reference else nullcontext(self.model) as model,
            torch.no_grad(),
            module_mode(model, training=False),
            self.accelerations.get(model) or nullcontext(),
            nullcontext() if reference else self.exported_weights(),
        ):

            def score(*rows: Any, **options: Any) -> np.ndarray:
                logprobs, entropy, *_ = completion_logprobs(model, *rows, **options)
                return (logprobs if entropy is None else torch.stack([logprobs, entropy])).cpu().numpy()

            yield score

    # --- updates ----------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Free the gradients."""
        self.optimizer.zero_grad()

    def allocate(self) -> None:
        """Allocate the optimizer's state."""
        self.optimizer.allocate_moments()

    def gradients(self, required: Sequence[bool] = ()) -> list[Tensor | None]:
        """Return the gradients, contiguous; with ``required`` zeros instead of None."""
        for p, is_required in itertools.zip_longest(self.trainable.values(), required):
            if p.grad is not None:
                p.grad = p.grad.contiguous()
            elif is_required:
                p.grad = torch.zeros_like(p, memory_format=torch.contiguous_format)
        return [p.grad for p in self.trainable.values()]

    def gradient_bytes(self) -> int:
        """Size of the gradients in bytes."""
        return sum(p.grad.nbytes for p in self.trainable.values() if p.grad is not None)

    def grad_norm(self) -> float:
        """Return the 2-norm of all gradients together; norms of 16-bit gradients are computed in float32."""
        grads = [p.grad for p in self.trainable.values() if p.grad is not None]
        parts = [vector_norm(grad, dtype=torch.float32) if grad.dtype in HALF_DTYPES else grad for grad in grads]
        return nn.utils.get_total_norm(parts).item()

    def step(self, learning_rate: float, grad_scale: float) -> None:
        """Update the parameters once, from the gradients times ``grad_scale``."""
        self._rate = learning_rate
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group["ratio"]
        self.optimizer.step(grad_scale=grad_scale)

    def check_unchanged(self) -> None:
        """Raise a WhetValueError if a change since construction would have no effect on the update."""
        frozen = next((name for name, p in self.trainable.items() if not p.requires_grad), None)
        if frozen:
            raise error_without_effect(
                self._where,
                f"{frozen} no longer requires grad, as it did when the trainer was made. Call requires_grad_(True) on "
                "it (PEFT's set_adapter does)",
            )
        own = set(map(id, self.trainable.values()))
        added = next((name for name, p in self.model.named_parameters() if p.requires_grad and id(p) not in own), None)
        if added:
            raise error_without_effect(
                self._where,
                f"{added} requires grad, but did not when the trainer was made: it would not be trained. Call "
                "requires_grad_(False) on it",
            )
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if any(group["lr"] != self._rate * group["ratio"] for group in self.optimizer.param_groups):
            raise error_without_effect(
                self._where,
                f"the rates of the optimizer's groups are {rates} and have no effect: each update sets them from the "
                "schedule. Set config.learning_rate",
            )

    # --- the model --------------------------------------------------------------------------------------

    def checksum(self) -> int:
        """Return a checksum of the bits of all weights."""
        return checksum([p.detach() for p in self.model.parameters()])

    def state(self) -> State:
        """Return the model, or its trained part, the optimizer's state and the reference, for a checkpoint."""
        base = base_of(self.model)
        whole = all(parameter.requires_grad for parameter in self.model.parameters())
        tensors = {"model": module_tensors(self.model) if whole else dict(self.trainable), "optimizer": {}}
        for name, parameter in self.trainable.items():
            for key, value in self.optimizer.state[parameter].items():
                tensors["optimizer"][f"{name}.{key}"] = value
        state = {
            "whole_model": whole,
            "model": describe_module(self.model),
            "adapter": adapter_settings(self.model),
            "base": None if base is None else base.record(),
            "ref_model": None,
            "adapters_off": self.reference.adapters_off,
            "groups": [{key: each[key] for key in CHANGED if key in each} for each in self.optimizer.param_groups],
        }
        if first_values := self.reference.first_values:
            tensors["reference"] = first_values
        if self.reference.model is not None and self._config.uses_reference_model():
            tensors["ref_model"] = module_tensors(self.reference.model)
            state["ref_model"] = describe_module(self.reference.model)
        return tensors, state

    @staticmethod
    def build_models(
        model: Any,
        ref_model: Any,
        tensors: Mapping[str, Mapping[str, Any]],
        state: Mapping[str, Any],
        config: TrainerConfig,
        where: str,
        path: str,
    ) -> tuple[Any, Any]:
        """Return model and reference of a checkpoint: the given ones or new ones, with its weights."""
        if model is not None and "base" in state:
            check_record(state["base"], base_of(model), where, path)
        model = build_module(state["model"]) if model is None else model
        if state["whole_model"]:
            load_module_tensors(model, tensors["model"])
        undescribed = state["ref_model"] is not None and state["ref_model"]["undescribed"]
        if state["ref_model"] is not None and config.has_reference():
            if ref_model is None and undescribed:
                ref_model = copy.deepcopy(model)
            elif ref_model is None:
                ref_model = build_module(state["ref_model"]).to(module_device(model))
            load_module_tensors(ref_model.requires_grad_(False), tensors["ref_model"])
        return model, ref_model

    def load_state(self, tensors: Mapping[str, Mapping[str, Any]], state: Mapping[str, Any], where: str) -> None:
        """Restore the trained parameters, unless ``build_models`` did, the optimizer's state and the reference."""
        if not state["whole_model"]:
            check_same_parameters(tensors["model"], self.trainable, where)
            with torch.no_grad():
                for name, parameter in self.trainable.items():
                    parameter.copy_(tensors["model"][name])
        self._load_optimizer(tensors, state, where)
        self.reference.load(tensors.get("reference", {}), state.get("adapters_off", True), where)

    def _load_optimizer(self, tensors: Mapping[str, Mapping[str, Any]], state: Mapping[str, Any], where: str) -> None:
        check_same_optimizer(self._config, state, where)
        if "moments" in tensors:
            raise CheckpointError(f"{where}: the checkpoint has 8-bit moments of a Learner. Pass a Learner.")
        if not tensors["optimizer"]:
            return
        self.optimizer.allocate_moments()
        for name, value in tensors["optimizer"].items():
            name, key = name.rsplit(".", 1)
            parameter = self.trainable[name]
            own = self.optimizer.state[parameter]
            if value.numel() != 1 if key == "step" else value.shape != own[key].shape:
                raise ValueError(f"the optimizer's {key} of {name} has shape {tuple(value.shape)}")
            own[key] = value if key == "step" else value.to(parameter.device)
        for group, numbers in zip(self.optimizer.param_groups, state.get("groups") or (), strict=False):
            group.update(numbers)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the model as a folder for Hugging Face's ``from_pretrained``.

        Adapters on a packed base get the base's record, from which Whet packs the same base again.

        Raises:
            WhetTypeError: the model has no ``save_pretrained``.
        """
        model: Any = self.model
        if not hasattr(model, "save_pretrained"):
            raise WhetTypeError(
                f"save_pretrained: {type(model).__name__} is not a Hugging Face model. Use save, or "
                f"torch.nn.Module.state_dict."
            )
        base = base_of(model)
        # PEFT would search for embeddings to save, also on the hub; packed embeddings are not saved.
        model.save_pretrained(folder, **({} if base is None else {"save_embedding_layers": False}))
        if base is not None:
            write_record(folder, base.record())

    def saved_bytes(self) -> int:
        """Size of all parameters in bytes."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def memory_blocks(self) -> Iterator[tuple[str, Hashable, int]]:
        """Yield the memory of models, gradients and optimizer, for ``whet.memory_report``."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        for part, model in (("weights", self.model), ("reference", self.reference.model)):
            if model is not None:
                yield from tensor_memory(part, itertools.chain(model.parameters(), model.buffers()))
                base = base_of(model)
                yield from base.memory_blocks() if base is not None else ()
        for acceleration in self.accelerations.values():
            yield from acceleration.memory_blocks()
        yield from tensor_memory("reference", self.reference.first_values.values())
        yield from tensor_memory("gradients", (p.grad for p in self.trainable.values() if p.grad is not None))
        yield from tensor_memory("moments", (value for value in states if isinstance(value, Tensor)))
