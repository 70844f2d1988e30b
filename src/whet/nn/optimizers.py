"""Optimizers other than AdamW, with its interface: ``step(grad_scale=)`` and ``allocate_moments``.

adamw_8bit            moments in 8 bits by blocks (Dettmers et al. 2021, arXiv 2110.02861; codes of Whet's core)
muon                  torch.optim.Muon for matrices (Jordan et al. 2024), AdamW for the other parameters
schedule_free_adamw   the package schedulefree (Defazio et al. 2024, arXiv 2405.15682)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whet import _core
from whet.config.settings import TrainerConfig
from whet.errors import WhetValueError, check_installed
from whet.learner.moments import MOMENT_BLOCK, is_in_8_bits, moment_seed, n_blocks
from whet.nn.modules import inner_module
from whet.nn.optim import CHUNK, HALF_DTYPES, AdamW, refresh_master

CHANGED = ("k", "weight_sum", "lr_max")
"""Numbers of a parameter group that steps change, and that checkpoints have."""


def make_optimizer(config: TrainerConfig, groups: Sequence[dict[str, Any]], where: str) -> Any:
    """Return the optimizer of a config for parameter groups with their ``lr``, ``weight_decay`` and ``is_matrix``.

    Raises:
        WhetValueError: the optimizer does not support the parameters.
        MissingExtraError: its package is not installed.
    """
    given = {
        "lr": config.learning_rate,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
    }
    if config.optimizer == "muon":
        return Muon(groups, momentum=config.muon_momentum, where=where, **given)
    if config.optimizer == "schedule_free_adamw":
        return make_schedule_free(groups, where, **given)
    return (AdamW8bit if config.optimizer == "adamw_8bit" else AdamW)(groups, **given)


class AdamW8bit(AdamW):
    """AdamW whose moments take 2 bytes per weight and 8 per block of weights, instead of 8 per weight.

    A step is AdamW's in float32 on the decoded moments, whose codes are rounded stochastically by parameter, step and
    element: runs are reproducible. Small parameters keep float32 moments.

    Raises:
        WhetValueError: in ``step``, a parameter that is not contiguous, of at most 32 bits, and on the CPU.
    """

    def _state_of(self, p: Tensor) -> dict[str, Any]:
        if not is_in_8_bits(p.numel()):
            return super()._state_of(p)
        state = self.state[p]
        self._master_of(p)
        if "exp_avg" not in state:
            state["step"] = torch.tensor(0.0)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros(p.shape, dtype=torch.uint8)
                state[f"{name}_scale"] = torch.zeros(n_blocks(p.numel()))
        return state

    def _native_step(self, p: Tensor, group: dict[str, Any], grad_scale: float) -> bool:
        if not is_in_8_bits(p.numel()):
            return super()._native_step(p, group, grad_scale)
        if p.device.type != "cpu" or not p.is_contiguous() or p.dtype not in (torch.float32, *HALF_DTYPES):
            raise WhetValueError(
                f"adamw_8bit: a parameter of shape {tuple(p.shape)} is {p.dtype} on {p.device}, expected contiguous "
                f"float32, bfloat16 or float16 on the CPU. Use optimizer 'adamw'."
            )
        state, master = self._state_of(p), self._master_of(p).detach()
        state["step"] += 1
        (beta1, beta2), t = group["betas"], int(state["step"].item())
        numbers = {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "weight_decay": group["weight_decay"]}
        numbers |= {"lr": float(group["lr"]), "t": t, "grad_scale": grad_scale}
        index = next(i for i, own in enumerate(p for each in self.param_groups for p in each["params"]) if own is p)
        parts = [x.view(-1).split(CHUNK) for x in (p.detach(), p.grad.contiguous(), master)]  # pyright: ignore[reportOptionalMemberAccess]
        parts += [state[name].view(-1).split(CHUNK) for name in ("exp_avg", "exp_avg_sq")]
        parts += [state[f"{name}_scale"].split(CHUNK // MOMENT_BLOCK) for name in ("exp_avg", "exp_avg_sq")]
        for i, (own, grad, chunk, m, v, m_scales, v_scales) in enumerate(zip(*parts, strict=True)):
            if own.dtype in HALF_DTYPES:
                refresh_master(chunk, own)
            _core.adamw_8bit(
                p=chunk, grad=grad.float(), m=m, v=v, m_scales=m_scales, v_scales=v_scales,
                seed=moment_seed(index, t, i), **numbers,
            )  # fmt: skip
            if own.dtype in HALF_DTYPES:
                own.copy_(chunk)
        torch.autograd.graph.increment_version(p)
        return True


class Muon(AdamW):
    """``torch.optim.Muon`` for the groups with ``is_matrix``, AdamW for the others.

    The update of a matrix is its momentum, orthogonalised by 5 Newton-Schulz iterations in bfloat16, times
    0.2 sqrt(max(rows, columns)): as long as AdamW's, so that the same rates fit (Liu et al. 2025, arXiv 2502.16982).
    16-bit parameters have float32 masters, as in ``AdamW``.

    Args:
        groups: parameter groups.
        momentum: of matrices.
        where: prefix of errors.
        **settings: of AdamW.

    Raises:
        WhetValueError: there is no matrix.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], *, momentum: float, where: str, **settings: Any) -> None:
        super().__init__(groups, **settings)
        matrices = self._matrices()
        if not matrices:
            raise WhetValueError(f"{where}: optimizer is 'muon', and no matrix trains. Use 'adamw'.")
        options = {"momentum": momentum, "adjust_lr_fn": "match_rms_adamw"}
        self._muon = torch.optim.Muon([p for group in matrices for p in group["params"]], **options)
        for group in matrices:
            group |= {name: value for name, value in self._muon.defaults.items() if name not in ("lr", "weight_decay")}
        self._muon.param_groups, self._muon.state = matrices, self.state

    def _matrices(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["is_matrix"]]

    def _is_native(self, group: Mapping[str, Any]) -> bool:
        return not group["is_matrix"] and super()._is_native(group)

    def allocate_moments(self) -> None:
        """Allocate moments, momentum and masters now rather than in the first step; see ``AdamW``."""
        super().allocate_moments()
        for p in (p for group in self._matrices() for p in group["params"]):
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(self._master_of(p).detach())

    def _step_by_torch(self) -> None:
        self._muon.step()
        matrices = [(group, group["params"]) for group in self._matrices()]
        for group, _ in matrices:
            group["params"] = []
        try:
            super()._step_by_torch()
        finally:
            for group, parameters in matrices:
                group["params"] = parameters


def make_schedule_free(groups: Sequence[dict[str, Any]], where: str, **settings: Any) -> Any:
    """Return schedulefree's AdamW with the interface of ``AdamW``.

    Its parameters are averages x of the steps. ``train`` moves them to the points y where gradients are computed, and
    ``eval`` back.

    Raises:
        WhetValueError: a parameter has 16 bits.
        MissingExtraError: schedulefree is not installed.
    """
    check_installed(where, "schedulefree", extra="schedulefree")
    import schedulefree  # pyright: ignore[reportMissingImports]

    class ScheduleFreeAdamW(schedulefree.AdamWScheduleFree):
        def allocate_moments(self) -> None:
            for p in (p for group in self.param_groups for p in group["params"] if "z" not in self.state[p]):
                self.state[p] |= {"z": p.detach().clone(), "exp_avg_sq": torch.zeros_like(p)}

        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: float = 1.0) -> Any:
            grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            for grad in grads if grad_scale != 1 else ():
                grad *= grad_scale
            self.train()
            loss = super().step(closure)
            self.eval()
            return loss

    narrow = next((p for group in groups for p in group["params"] if p.dtype in HALF_DTYPES), None)
    if narrow is not None:
        raise WhetValueError(
            f"{where}: optimizer is 'schedule_free_adamw', and a parameter is {narrow.dtype}: averages need float32. "
            f"Load the model in float32, or use 'adamw', which keeps float32 masters."
        )
    return ScheduleFreeAdamW(groups, **settings)


def is_hidden_matrix(name: str, p: Tensor, model: nn.Module) -> bool:
    """Whether Muon trains a parameter: a matrix, except the embedding's, the head's, and their adapters."""
    inner: Any = inner_module(model)
    ends = [get() for get in (getattr(inner, f"get_{end}_embeddings", None) for end in ("input", "output")) if get]
    own = {id(end): end for end in ends if end is not None}
    names = [each for each, module in model.named_modules() if id(module) in own]
    return p.ndim == 2 and not any(f"{each}." in name for each in names) and "trainable_tokens_delta" not in name
