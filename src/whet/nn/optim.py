"""AdamW in one pass over parameters, gradients and moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whet import _core


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` with a native step for float32 parameters on the CPU.

    Loshchilov & Hutter 2019, with torch's order of operations, each rounded once: the moments are torch's to the bit,
    and so are most parameters; torch's square root, of MKL, may be an ULP off, and an update 1e-7 of itself with it.
    Arguments, parameter groups and state dict are torch's, and so is the step of parameters of another dtype or device.

    Args:
        params, **settings: of ``torch.optim.AdamW``.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: float = 1.0) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update.

        Args:
            closure: computes the loss again, as torch's optimizers take it.
            grad_scale: multiplies every gradient on its way, as clipping does; ``.grad`` stays as it is.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        others: list[Tensor] = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not (_is_plain(group) and self._native_step(p, group, grad_scale)):
                    others.append(p)
        if others:
            self._torch_step(others, grad_scale)
        return loss

    def make_moments(self) -> None:
        """Make the moments now that the first step would make.

        That would have them in the memory that its activations leave, and what lies between them there is too small for
        activations of another size.
        """
        for group in self.param_groups:
            for p in group["params"] if _is_plain(group) else []:
                self._moments_of(p)

    def _moments_of(self, p: Tensor) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state

    def _native_step(self, p: Tensor, group: dict[str, Any], grad_scale: float) -> bool:
        grad, state = p.grad, self._moments_of(p)
        assert grad is not None
        parts = (p, grad, state["exp_avg"], state["exp_avg_sq"])
        if any(x.dtype != torch.float32 or x.device.type != "cpu" or not x.is_contiguous() for x in parts):
            return False
        if any(x.shape != p.shape for x in parts):
            return False  # torch tells of it; the kernel would read and write past their end
        state["step"] += 1
        beta1, beta2 = group["betas"]
        _core.adamw(
            p=p.detach(), grad=grad.detach(), m=state["exp_avg"], v=state["exp_avg_sq"], lr=float(group["lr"]),
            beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"], t=state["step"].item(),
            grad_scale=grad_scale,
        )  # fmt: skip
        torch.autograd.graph.increment_version(p)
        return True

    def _torch_step(self, others: list[Tensor], grad_scale: float) -> None:
        """torch's own step, of only these parameters."""
        chosen = set(map(id, others))
        grads = [(p, p.grad) for group in self.param_groups for p in group["params"]]
        try:
            for p, grad in grads:
                p.grad = (grad * grad_scale if grad_scale != 1.0 else grad) if id(p) in chosen else None
            super().step()
        finally:
            for p, grad in grads:
                p.grad = grad


def _is_plain(group: dict[str, Any]) -> bool:
    """Whether the native step has the settings of a group."""
    return not (group["amsgrad"] or group["maximize"] or group["capturable"] or group["differentiable"])
