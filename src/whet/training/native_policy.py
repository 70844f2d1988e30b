"""The adapters and norms of a ``whet.Learner`` as the policy of a trainer, without torch.

Checkpoints hold the tensors of PEFT's modules under the same names: ``TorchPolicy`` continues them, and the reverse.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from whet.config.kept_tokens import KeptTokens
from whet.config.settings import TrainerConfig
from whet.errors import CheckpointError, WhetTypeError, WhetValueError
from whet.learner import Learner
from whet.learner.batch import Logprobs, Neftune
from whet.learner.trained import ADAPTER
from whet.models.base_record import check_record
from whet.models.stop_tokens import base_stop_ids
from whet.signals import deferred_signals
from whet.training.policy import (
    Score,
    State,
    check_moving_adapters,
    check_same_optimizer,
    check_same_parameters,
    error_without_reference,
)
from whet.training.reference_cache import ReferenceCache


class NativePolicy:
    """Adapters that are trained, and their frozen reference: the base, or the initial adapters.

    Args:
        model: the adapters and their base.
        ref_model: None: a learner has no other reference.
        config: settings of the trainer.
        where: the trainer's name, for errors.

    Attributes:
        model: the learner.
        reference: the frozen reference.

    Raises:
        WhetValueError: a setting has no effect on a learner.
    """

    def __init__(self, model: Learner, ref_model: Any, config: TrainerConfig, where: str) -> None:
        self.model, self._config = model, config
        if config.compute == "torch":
            raise WhetValueError(
                f"{where}: compute is 'torch', and a Learner computes natively. Omit it, or train modules of torch."
            )
        if config.compute not in ("auto", model.compute):
            raise WhetValueError(
                f"{where}: compute is {config.compute!r}, and the learner computes in {model.compute}. Make it with "
                f"whet.Learner(compute={config.compute!r})."
            )
        if config.qat and config.samples:
            raise WhetValueError(
                f"{where}: qat is {config.qat!r}, and the samples of a Learner would not be of rounded weights. Train "
                f"modules of torch in floats (whet train: --base none)."
            )
        if config.qat != model.qat:
            raise WhetValueError(
                f"{where}: qat is {config.qat!r}, and the learner's is {model.qat!r}. Make both equal: "
                f"whet.Learner(qat={config.qat!r})."
            )
        if config.router_aux_loss_coef:
            raise WhetValueError(
                f"{where}: router_aux_loss_coef is {config.router_aux_loss_coef}, and a Learner has no balance loss: "
                f"its routers are frozen. Omit it, or train modules of torch."
            )
        if config.trains_reward and model.head is None:
            raise WhetValueError(
                f'{where}: the learner has no head. Make it with whet.Learner(modules_to_save=["score"]).'
            )
        if not config.trains_reward and model.head is not None:
            raise WhetValueError(f"{where}: the learner has the head of a reward model. Pass it to Reward.")
        if config.optimizer not in ("adamw", "adamw_8bit"):
            raise WhetValueError(
                f"{where}: optimizer is {config.optimizer!r}, and a Learner has 'adamw' and 'adamw_8bit'. Use one of "
                f"them, or train modules of torch."
            )
        check_moving_adapters(config, where)
        if config.activation_bytes is not None:
            model.limit_activations(config.activation_bytes)
        self.reference = AdapterReference(model, kept=config.uses_reference_model())
        self._has_gradients = False
        self._seed = 0

    @staticmethod
    def check(model: Learner, ref_model: Any, where: str) -> None:
        """Raise if there is a separate reference."""
        if ref_model is not None:
            raise WhetTypeError(
                f"{where}: ref_model is {type(ref_model).__name__}, but the reference of a Learner is its base, or its "
                f"initial adapters. Omit it."
            )

    @property
    def arithmetic(self) -> str:
        """The arithmetic of the products: "float32" or "bfloat16"."""
        return self.model.compute

    packs_batches = True
    """Equal prompts are computed once, and nothing is padded."""

    @property
    def rounds_samples(self) -> bool:
        """Whether the base is quantised: the engine rounds inputs of its products to 8 bits, the learner does not."""
        return self.model.base.is_quantised

    @property
    def n_trained(self) -> int:
        """Number of trained parameters."""
        return self.model.n_parameters

    @property
    def position_limit(self) -> int:
        """Number of positions that the base was packed for."""
        return self.model.base.config.max_position

    @property
    def replays_experts(self) -> bool:
        """Whether ``logprobs`` takes the experts of tokens: of a mixture of experts."""
        return self.model.base.config.n_experts > 0

    def stop_token_ids(self, tokenizer: Any, chosen: Sequence[int]) -> list[int]:
        """Return the tokens that end a completion, see ``base_stop_ids``."""
        return base_stop_ids(self.model.base, tokenizer, chosen)

    # --- passes -----------------------------------------------------------------------------------------

    @contextmanager
    def training(self, seed: int) -> Iterator[None]:
        """Context of ``logprobs`` and ``backward``: with dropout and noise by the seed."""
        self._seed = seed
        yield

    def exported_weights(self) -> AbstractContextManager[None]:
        """Context without effect: a learner always computes with the weights of its export."""
        return nullcontext()

    def seed(self, seed: int) -> None:
        """No effect: the seed of the update is enough, as dropout depends on tokens, not on their micro-batch."""

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
        differentiable_entropy: bool = False,  # it always is
        return_mean: bool = False,
        neftune_alpha: float = 0.0,
    ) -> Logprobs:
        """Return ``Learner.logprobs``."""
        return self.model.logprobs(
            prompt_ids, completion_ids, completion_mask=completion_mask, kept_tokens=kept_tokens,
            candidates=candidates, experts=experts, temperature=temperature, return_entropy=return_entropy,
            return_mean=return_mean, dropout_seed=self._dropout_seed(),
            neftune=Neftune(neftune_alpha, self._seed) if neftune_alpha else None,
        )  # fmt: skip

    def rewards(
        self, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]], *, keep: bool = True
    ) -> np.ndarray:
        """Return ``Learner.rewards``; without ``keep`` in eval mode."""
        seed = self._dropout_seed() if keep else None
        return self.model.rewards(prompt_ids, completion_ids, keep=keep, dropout_seed=seed)

    def _dropout_seed(self) -> int | None:
        """Return the seed of the update's dropout; None: there is none."""
        return self._seed if self.model.lora_dropout and self._config.training_mode else None

    def backward(
        self,
        grad: np.ndarray,
        share: float = 1.0,
        grad_entropy: np.ndarray | None = None,
        grad_mean: np.ndarray | None = None,
    ) -> dict[str, float]:
        """Add the gradients of the adapters: NaN if a given gradient is not finite, as autograd would."""
        self._has_gradients = True
        if all(each is None or np.isfinite(each).all() for each in (grad, grad_entropy, grad_mean)):
            self.model.backward(grad, grad_entropy, grad_mean)
            return {}
        for each in self.model.gradients:
            each.fill(np.nan)
        return {}

    @contextmanager
    def scoring(self, *, reference: bool = False) -> Iterator[Score]:
        """Context that provides the log-probs of the policy, or of its reference."""
        with self.reference.as_learner() if reference else contextlib.nullcontext():
            adapters = not (reference and self.reference.adapters_off)

            def score(*rows: Any, **options: Any) -> np.ndarray:
                logprobs, entropy, *_ = self.model.logprobs(*rows, **options, adapters=adapters, keep=False)
                return logprobs if entropy is None else np.stack([logprobs, entropy])

            yield score

    # --- updates ----------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Set the gradients to zero."""
        self.model.zero_grad()
        self._has_gradients = False

    def allocate(self) -> None:
        """Allocate the moments."""
        self.model.allocate_moments(self._config.optimizer == "adamw_8bit")

    def gradients(self, required: Sequence[bool] = ()) -> list[Any]:
        """Return the gradients of the parameters as tensors of torch that share their memory."""
        self._has_gradients |= any(required)
        if not self._has_gradients:
            return [None] * len(self.model.parameters)
        import torch  # only ranks and exact sums call this with gradients

        return [torch.from_numpy(grad) for grad in self.model.gradients]

    def gradient_bytes(self) -> int:
        """Size of the gradients in bytes."""
        return sum(grad.nbytes for grad in self.model.gradients)

    def grad_norm(self) -> float:
        """Return the 2-norm of all gradients together."""
        return self.model.grad_norm()

    def step(self, learning_rate: float, grad_scale: float) -> None:
        """Update the adapters once, from the gradients times ``grad_scale``."""
        config = self._config
        self.model.apply_gradients(
            learning_rate, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_epsilon,
            weight_decay=config.weight_decay, grad_scale=grad_scale, lr_ratio=config.loraplus_lr_ratio,
        )  # fmt: skip

    def check_unchanged(self) -> None:
        """No effect: a learner's adapters, once made, are all trained."""

    # --- the model --------------------------------------------------------------------------------------

    def checksum(self) -> int:
        """Return a checksum of the bits of all weights."""
        digest = zlib.crc32(self.model.base.digest().encode())
        for parameter in self.model.parameters:
            digest = zlib.crc32(parameter.data, digest)
        return digest

    def state(self) -> State:
        """Return adapters, moments and reference as ``TorchPolicy.state`` does for PEFT's modules."""
        learner, tensors = self.model, {"model": self._as_peft(self.model.parameters)}
        tensors["optimizer"] = {}
        if any(len(moments) > 2 for moments in learner.moments):  # blocks of rows, which PEFT's modules have in columns
            arrays = {f"{i}.{j}": x for i, moments in enumerate(learner.moments) for j, x in enumerate(moments)}
            tensors["moments"] = arrays | {"step": np.array(learner.n_updates, np.int64)}
        elif learner.moments:
            for key, moment in (("exp_avg", 0), ("exp_avg_sq", 1)):
                named = self._as_peft([moments[moment] for moments in learner.moments])
                tensors["optimizer"] |= {f"{name}.{key}": value for name, value in named.items()}
            step = np.array(learner.n_updates, np.float32)
            tensors["optimizer"] |= {f"{name}.step": step.copy() for name in tensors["model"]}
        if self.reference.first_values:
            tensors["reference"] = self._as_peft(self.reference.first_values)
        config = learner.peft_config(learner.base.path)
        state = {
            "whole_model": False,
            "model": None,
            "adapter": {"name": ADAPTER, "config": config},
            "base": learner.base.record(),
            "ref_model": None,
            "adapters_off": self.reference.adapters_off,
        }
        return tensors, state

    @staticmethod
    def build_models(
        model: Learner,
        ref_model: Any,
        tensors: Mapping[str, Mapping[str, Any]],
        state: Mapping[str, Any],
        config: TrainerConfig,
        where: str,
        path: str,
    ) -> tuple[Any, Any]:
        """Return the learner, after checking that the checkpoint holds adapters of its base."""
        if state["whole_model"] or state["ref_model"] is not None:
            part = "every weight of a model" if state["whole_model"] else "a separate reference"
            raise CheckpointError(
                f"{where}: {path} holds {part}, and a Learner trains adapters. Pass modules of torch."
            )
        check_record(state["base"], model.base, where, path)
        return model, ref_model

    def load_state(self, tensors: Mapping[str, Mapping[str, Any]], state: Mapping[str, Any], where: str) -> None:
        """Restore the result of ``state``, or of ``TorchPolicy.state``."""
        learner = self.model
        check_same_parameters(tensors["model"], self._as_peft(learner.parameters), where)
        for parameter, value in zip(learner.parameters, self._from_peft(tensors["model"]), strict=True):
            parameter[:] = value
        learner.update()
        learner.n_updates, learner.moments = 0, []
        check_same_optimizer(self._config, state, where)
        if saved := tensors.get("moments"):
            learner.n_updates = int(saved["step"])
            self.allocate()
            for i, moments in enumerate(learner.moments):
                for j, own in enumerate(moments):
                    own[...] = saved[f"{i}.{j}"]
        if any(name.endswith("_scale") for name in tensors["optimizer"]):
            raise CheckpointError(f"{where}: the checkpoint has 8-bit moments of modules. Pass modules of torch.")
        if optimizer := tensors["optimizer"]:
            steps = {int(value) for name, value in optimizer.items() if name.endswith(".step")}
            if len(steps) != 1:
                raise ValueError(f"the optimizer's steps differ: {sorted(steps)}")
            [learner.n_updates] = steps
            moments = [
                self._from_peft({name: optimizer[f"{name}.{key}"] for name in tensors["model"]})
                for key in ("exp_avg", "exp_avg_sq")
            ]
            learner.moments = list(zip(*moments, strict=True))
            for parameter, (m, v) in zip(learner.parameters, learner.moments, strict=True):
                if not parameter.shape == m.shape == v.shape:
                    raise ValueError(f"the optimizer's moments have shapes {m.shape} and {v.shape}")
        first = self._from_peft(tensors["reference"]) if tensors.get("reference") else []
        self.reference.load(first, state.get("adapters_off", True), where)

    def _as_peft(self, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Return the parameters, or arrays of their shapes, under the names of PEFT's parameters."""
        left, named = iter(arrays), {}
        for each in self.model.trained:
            named |= each.to_peft([next(left) for _ in each.parameters])
        return named

    def _from_peft(self, named: Mapping[str, Any]) -> list[np.ndarray]:
        """Return the inverse of ``_as_peft``, as float32 copies."""
        return [array for each in self.model.trained for array in each.from_peft(named)]

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the adapters as a PEFT folder, with the record of their base."""
        self.model.save_pretrained(folder)

    def saved_bytes(self) -> int:
        """Size of the adapters in bytes."""
        return self.gradient_bytes()

    def memory_blocks(self) -> Iterator[tuple[str, Hashable, int]]:
        """Yield the memory of base, adapters, reference, gradients and moments, for ``whet.memory_report``."""
        yield from self.model.memory_blocks()
        parts = {
            "weights": self.model.parameters,
            "gradients": self.model.gradients,
            "moments": [moment for moments in self.model.moments for moment in moments],
            "reference": self.reference.first_values,
        }
        yield "copies", ("factors", id(self.model)), self.model.packed_bytes()
        yield "activations", ("activations", id(self.model)), self.model.kept_bytes
        for part, arrays in parts.items():
            for array in arrays:
                yield part, array.ctypes.data, array.nbytes


class AdapterReference:
    """Frozen reference of a learner: its base if the adapters are new, else the initial adapters.

    Args:
        learner: the policy.
        kept: whether to keep the initial adapters if they are needed. Otherwise the policy is the reference until its
            first update.

    Attributes:
        model: None: there is no separate model.
        adapters_off: whether the reference is the base.
        first_values: the initial values of the learner's ``parameters``; empty: not used.
    """

    model = None

    def __init__(self, learner: Learner, *, kept: bool) -> None:
        self._learner, self._kept = learner, kept
        self.adapters_off = all(each.is_original() for each in (*learner.adapters, *learner.norms))
        self.first_values: list[np.ndarray] = []
        if kept and not self.adapters_off:
            self.first_values = [parameter.copy() for parameter in learner.parameters]

    def is_policy(self) -> bool:
        """Whether the reference is the policy before its first update, with nothing kept separately."""
        return not self.adapters_off and not self.first_values

    @contextmanager
    def as_learner(self) -> Iterator[None]:
        """Context in which the learner has the initial adapters, if they are the reference."""
        if self.adapters_off or not self.first_values:
            yield
            return
        own = self._learner.parameters

        def set_parameters(arrays: Sequence[np.ndarray]) -> None:
            left = iter(arrays)
            with deferred_signals():
                for each in self._learner.trained:
                    each.parameters = tuple(next(left) for _ in each.parameters)
                self._learner.update()

        try:
            set_parameters(self.first_values)
            yield
        finally:
            set_parameters(own)

    def move(self, alpha: float) -> None:
        """Make the current adapters the reference; ``alpha`` is 1, see ``check_moving_adapters``."""
        self.first_values = [parameter.copy() for parameter in self._learner.parameters]
        self.adapters_off = False

    def open_cache(self, folder: str, arithmetic: str) -> ReferenceCache:
        """Open the cached log-probs of the base, or of the initial adapters."""
        digest = hashlib.sha256(self._learner.base.digest().encode())
        if not self.adapters_off:
            for adapter in self._learner.adapters:
                digest.update(f"{adapter.name} {adapter.alpha}".encode())
            for norm in self._learner.norms:
                digest.update(norm.name.encode())
            for array in self.first_values or self._learner.parameters:
                digest.update(array.tobytes())
        return ReferenceCache(folder, digest.hexdigest(), f"native-{arithmetic}")

    def load(self, first_values: list[np.ndarray], adapters_off: bool, where: str) -> None:
        """Restore the reference of a checkpoint from its attributes; the policy may already be trained.

        Raises:
            CheckpointError: initial values are needed, and neither the checkpoint nor the learner has them.
        """
        if self._kept and not adapters_off and not first_values and self.adapters_off:
            raise error_without_reference(where)
        self.adapters_off = adapters_off
        if adapters_off or first_values:
            self.first_values = first_values
