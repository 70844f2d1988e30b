"""A torch module as the policy of a trainer: log-probs as NumPy arrays, gradients from theirs, and AdamW steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from whet.config.settings import TrainerConfig
from whet.errors import WhetTypeError, WhetValueError
from whet.learner.batch import Logprobs
from whet.memory import tensor_memory
from whet.models.sources.live import check_frequencies
from whet.nn.accelerate import acceleration_of, choose_accelerations
from whet.nn.causal_lm import completion_logprobs
from whet.nn.frozen import base_of
from whet.nn.modules import module_mode
from whet.nn.optim import HALF_DTYPES, AdamW
from whet.training.reference import Reference

Score = Callable[..., np.ndarray]
"""``completion_logprobs`` of a model, without gradients, as an array: the log-probs of a micro-batch."""


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
        optimizer: AdamW, with float32 masters of 16-bit parameters.

    Raises:
        WhetTypeError: a model is not a module.
        WhetValueError: a model cannot be trained, with the reason.
    """

    def __init__(self, model: nn.Module, ref_model: nn.Module | None, config: TrainerConfig, where: str) -> None:
        self.model, self._config, self._where = model, config, where
        self.trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.trainable:
            raise WhetValueError(f"{where}: no parameter of model requires grad. Unfreeze some.")
        self.reference = Reference(model, self.trainable, ref_model, kept=config.uses_reference_model(), where=where)
        models = [model] if self.reference.model is None else [model, self.reference.model]
        self.accelerations = choose_accelerations(models, config.compute, config.training_mode, where)
        self.acceleration = self.accelerations.get(model)
        if self.acceleration is not None:
            self.acceleration.in_place = True
        # Only matrices decay: vectors are biases and norm weights, whose neutral value is not 0.
        matrices = [p for p in self.trainable.values() if p.ndim > 1]
        vectors = [p for p in self.trainable.values() if p.ndim <= 1]
        self.optimizer = AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
        )
        self._rate = config.learning_rate
        self._kept: Tensor | None = None

    @staticmethod
    def check(model: nn.Module, ref_model: nn.Module | None, where: str) -> None:
        """Raise unless the models are modules that a trainer takes."""
        for name, module in (("model", model), ("ref_model", ref_model)):
            if module is None and name == "ref_model":
                continue
            if not isinstance(module, nn.Module):
                raise WhetTypeError(f"{where}: {name} is {type(module).__name__}, expected an nn.Module.")
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

    # --- passes -----------------------------------------------------------------------------------------

    @contextmanager
    def training(self) -> Iterator[None]:
        """Context of ``logprobs`` and ``backward``: the model's mode, and its kernels."""
        with module_mode(self.model, self._config.training_mode), self.acceleration or nullcontext():
            yield

    def logprobs(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        *,
        completion_mask: Sequence[Sequence[bool]] | None = None,
        temperature: float = 1.0,
        return_entropy: bool = False,
    ) -> Logprobs:
        """Return log-probs as ``completion_logprobs`` does; ``backward`` follows."""
        self._kept, entropy, mask = completion_logprobs(
            self.model, prompt_ids, completion_ids, completion_mask=completion_mask, temperature=temperature,
            return_entropy=return_entropy,
        )  # fmt: skip
        arrays = [None if x is None else x.detach().cpu().numpy() for x in (self._kept, entropy, mask)]
        return Logprobs(*arrays)  # pyright: ignore[reportArgumentType]

    def backward(self, grad_logprobs: np.ndarray) -> None:
        """Add the gradients of the parameters, from the gradient of the last log-probs, (B, C)."""
        kept, self._kept = self._kept, None
        if kept is None:
            raise WhetTypeError("backward: it follows logprobs, once. Call logprobs first.")
        kept.backward(torch.from_numpy(grad_logprobs).to(kept))

    @contextmanager
    def scoring(self, *, reference: bool = False) -> Iterator[Score]:
        """Context that provides the log-probs of the policy, or of its reference, in eval mode."""
        with (
            self.reference.as_module() if reference else nullcontext(self.model) as model,
            torch.no_grad(),
            module_mode(model, training=False),
            self.accelerations.get(model) or nullcontext(),
        ):
            yield lambda *rows, **options: completion_logprobs(model, *rows, **options).logprobs.cpu().numpy()

    # --- updates ----------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Free the gradients."""
        self.optimizer.zero_grad()

    def allocate(self) -> None:
        """Allocate the optimizer's state."""
        self.optimizer.allocate_moments()

    def grad_norm(self) -> float:
        """Return the 2-norm of all gradients together; norms of 16-bit gradients are computed in float32."""
        grads = [p.grad for p in self.trainable.values() if p.grad is not None]
        parts = [vector_norm(grad, dtype=torch.float32) if grad.dtype in HALF_DTYPES else grad for grad in grads]
        return nn.utils.get_total_norm(parts).item()

    def step(self, learning_rate: float, grad_scale: float) -> None:
        """Update the parameters once, from the gradients times ``grad_scale``."""
        self._rate = learning_rate
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
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
        if any(rate != self._rate for rate in rates):
            raise error_without_effect(
                self._where,
                f"the rates of the optimizer's groups are {rates} and have no effect: each update sets them from the "
                "schedule. Set config.learning_rate",
            )

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


def error_without_effect(where: str, text: str) -> WhetValueError:
    """Return the error of a change since construction that has no effect."""
    return WhetValueError(f"{where}: {text}, or make another trainer.")
