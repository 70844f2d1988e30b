"""The policy of a trainer: log-probs as NumPy arrays, gradients from theirs, and AdamW steps.

Trainers and algorithms see only this interface, of which there are two implementations: ``TorchPolicy`` trains the
modules of torch, ``NativePolicy`` the adapters of a ``whet.Learner``, without torch. Their checkpoints are the same
files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from whet.config.kept_tokens import KeptTokens
from whet.config.settings import MovingReference, TrainerConfig
from whet.errors import CheckpointError, WhetValueError, check_installed
from whet.learner import Learner
from whet.learner.batch import Logprobs
from whet.training.reference_cache import ReferenceCache

Score = Callable[..., np.ndarray]
"""``Policy.logprobs`` without gradients: (B, C) log-probs; with ``return_entropy`` (2, B, C), and their entropy."""

State = tuple[dict[str, dict[str, Any]], dict[str, Any]]
"""Tensors in groups, and other values, of a checkpoint."""


class Reference(Protocol):
    """Frozen reference of a loss: the policy at the beginning of training.

    Attributes:
        model: a separate module; None: the reference is computed by the policy.
    """

    model: Any

    def is_policy(self) -> bool:
        """Whether the reference is the policy before its first update, with nothing kept separately."""
        ...

    def open_cache(self, folder: str, arithmetic: str) -> ReferenceCache:
        """Open the cached log-probs of earlier runs in ``folder`` for these weights and this arithmetic."""
        ...

    def move(self, alpha: float) -> None:
        """Set the reference to alpha times the policy plus 1 - alpha times the reference."""
        ...


class Policy(Protocol):
    """A model that is trained, and its frozen reference.

    Attributes:
        model: the module, or the learner.
        reference: the frozen reference.
    """

    model: Any

    def __init__(self, model: Any, ref_model: Any, config: TrainerConfig, where: str) -> None: ...

    @staticmethod
    def check(model: Any, ref_model: Any, where: str) -> None:
        """Raise unless a trainer can train the model."""
        ...

    @property
    def reference(self) -> Reference: ...

    @property
    def arithmetic(self) -> str:
        """The arithmetic of the products: "float32" or "bfloat16" of Whet's kernels, or "torch"."""
        ...

    @property
    def packs_batches(self) -> bool:
        """Whether batches are packed, so that their cost is their number of tokens, and equal prompts count once."""
        ...

    @property
    def rounds_samples(self) -> bool:
        """Whether the engine rounds inputs of products that this policy does not round: the base is quantised."""
        ...

    @property
    def n_trained(self) -> int:
        """Number of trained parameters."""
        ...

    @property
    def position_limit(self) -> int | None:
        """Number of positions of the model; None: unlimited."""
        ...

    def stop_token_ids(self, tokenizer: Any, chosen: Sequence[int]) -> list[int]:
        """Return the tokens that end a completion, see ``whet.models.stop_tokens``."""
        ...

    # --- passes -----------------------------------------------------------------------------------------

    def training(self, seed: int) -> AbstractContextManager[None]:
        """Context of ``logprobs`` and ``backward`` of an update, with the seed of its dropout and noise."""
        ...

    def exported_weights(self) -> AbstractContextManager[None]:
        """Context in which the model has the weights of its export, see ``TrainerConfig.qat``."""
        ...

    def seed(self, seed: int) -> None:
        """Seed dropout."""
        ...

    @property
    def replays_experts(self) -> bool:
        """Whether ``logprobs`` takes the experts of tokens."""
        ...

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
        """Return log-probs of completion tokens, see ``Learner.logprobs``; ``backward`` follows.

        Args:
            differentiable_entropy: whether ``backward`` gets the gradient of the entropy.
            neftune_alpha: scale of noise on the embeddings, by the seed of ``training``; 0: none.
        """
        ...

    def rewards(
        self, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]], *, keep: bool = True
    ) -> np.ndarray:
        """Return the rewards (B,) of completions under a reward model; not ``keep``: in eval mode, without backward."""
        ...

    def backward(
        self,
        grad: np.ndarray,
        share: float = 1.0,
        grad_entropy: np.ndarray | None = None,
        grad_mean: np.ndarray | None = None,
    ) -> dict[str, float]:
        """Add the gradients of the parameters, from the gradients of the last log-probs, (B, C), of their entropy and
        their means, or of the last rewards, (B,).

        A policy with a balance loss adds its gradient, times ``share``, the share of the micro-batch in the update, and
        returns the terms of the metrics "loss" and "balance_loss".
        """
        ...

    def scoring(self, *, reference: bool = False) -> AbstractContextManager[Score]:
        """Context that provides the log-probs of the policy, or of its reference, in eval mode."""
        ...

    # --- updates ----------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Free the gradients, or set them to zero."""
        ...

    def allocate(self) -> None:
        """Allocate the optimizer's state."""
        ...

    def gradients(self, required: Sequence[bool] = ()) -> list[Any]:
        """Return the gradient of each parameter, a contiguous tensor of torch that may be written; None: it has none.

        Args:
            required: for each parameter, whether a missing gradient becomes zeros.
        """
        ...

    def gradient_bytes(self) -> int:
        """Size of the gradients in bytes."""
        ...

    def grad_norm(self) -> float:
        """Return the 2-norm of all gradients together."""
        ...

    def step(self, learning_rate: float, grad_scale: float) -> None:
        """Update the parameters once, from the gradients times ``grad_scale``."""
        ...

    def check_unchanged(self) -> None:
        """Raise a WhetValueError if a change since construction would have no effect on the update."""
        ...

    # --- the model --------------------------------------------------------------------------------------

    def checksum(self) -> int:
        """Return a checksum of the bits of all weights."""
        ...

    def state(self) -> State:
        """Return the trained parameters, the optimizer's state and the reference, for a checkpoint."""
        ...

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
        """Return model and reference for a checkpoint, before the policy is made: the given ones, or new ones.

        Raises:
            CheckpointError: the checkpoint does not fit the model.
        """
        ...

    def load_state(self, tensors: Mapping[str, Mapping[str, Any]], state: Mapping[str, Any], where: str) -> None:
        """Restore the result of ``state``."""
        ...

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the model, or its adapters and the record of their base, as a folder of Hugging Face or PEFT."""
        ...

    def saved_bytes(self) -> int:
        """Size of what ``save_pretrained`` writes, in bytes."""
        ...

    def memory_blocks(self) -> Iterator[tuple[str, Hashable, int]]:
        """Yield the memory of weights, reference, gradients and moments, for ``whet.memory_report``."""
        ...


def policy_class(model: Any, where: str) -> type[Policy]:
    """Return the implementation for a model: native for a ``Learner``, else torch.

    Raises:
        MissingExtraError: the model is not a learner, and torch is not installed.
    """
    if isinstance(model, Learner):
        from whet.training.native_policy import NativePolicy

        return NativePolicy
    check_installed(where, "torch")
    from whet.training.torch_policy import TorchPolicy

    return TorchPolicy


def check_moving_adapters(config: TrainerConfig, where: str) -> None:
    """Raise unless the settings of a policy of adapters move its reference all the way to the policy, or never.

    Raises:
        WhetValueError: ``ref_sync_alpha`` is below 1.
    """
    if isinstance(config, MovingReference) and config.moves_reference() and (alpha := config.ref_sync_alpha) != 1:
        raise WhetValueError(
            f"{where}: ref_sync_alpha is {alpha}, but the mean of the factors of two adapters is not the mean of their "
            f"weights. Set ref_sync_alpha to 1, or train all weights."
        )


def check_same_parameters(saved: Mapping[str, Any], own: Mapping[str, Any], where: str) -> None:
    """Raise a CheckpointError unless a checkpoint has the trained parameters of the model, by name and shape."""
    saved, own = ({name: tuple(value.shape) for name, value in part.items()} for part in (saved, own))
    if saved != own:
        different = sorted(name for name in {*saved, *own} if saved.get(name) != own.get(name))[:5]
        raise CheckpointError(
            f"{where}: the trained parameters of the checkpoint and of model differ in {', '.join(different)}. "
            f"Pass a model with the same adapters."
        )


def check_same_optimizer(config: TrainerConfig, state: Mapping[str, Any], where: str) -> None:
    """Raise a CheckpointError if a checkpoint has the state of another optimizer."""
    saved = state.get("config", {}).get("optimizer", "adamw")
    if saved != config.optimizer:
        raise CheckpointError(
            f"{where}: optimizer is {config.optimizer!r}, and the checkpoint has the state of {saved!r}. Pass that, or "
            f"begin a run from the model that was saved."
        )


def error_without_reference(where: str) -> CheckpointError:
    """Return the error of trained adapters whose initial values, the reference, are unknown."""
    return CheckpointError(
        f"{where}: the adapters were already trained when the run began, and neither the checkpoint nor model has "
        "their initial values: the run used no reference. Pass model with the initial adapters."
    )


def error_without_effect(where: str, text: str) -> WhetValueError:
    """Return the error of a change since construction that has no effect."""
    return WhetValueError(f"{where}: {text}, or make another trainer.")
