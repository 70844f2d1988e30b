"""AdamW in one pass over parameters, gradients and moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from whet import _core

HALF_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes of parameters with a float32 master."""
CHUNK = 1 << 18
"""Weights of a 16-bit parameter updated at a time: their float32 gradients fit in the cache."""


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` with a native step for parameters on the CPU, and float32 masters of 16-bit ones.

    Loshchilov & Hutter 2019, in torch's order of operations, each rounded once: moments equal torch's to the bit, and
    so do most parameters; the square root that torch takes from MKL can be an ULP off, an update then 1e-7 of itself.
    Arguments, parameter groups and state dict are torch's; float64 parameters, other devices and other layouts use
    torch's step.

    Departure from torch: a bfloat16 or float16 parameter is the rounded copy of a float32 master weight, ``master`` in
    its state. Gradients are converted exactly, moments are float32, the master is updated like a float32 parameter and
    then rounded to the parameter, to nearest even. torch updates the parameter itself and loses updates below half a
    unit in the last place: in bfloat16, 2^-9 of the weight. If a weight was edited or loaded and no longer equals its
    rounded master, its next step starts from the weight. Moments and master take 12 bytes per weight.

    Args:
        params: parameters or parameter groups, as for ``torch.optim.AdamW``.
        **settings: settings of ``torch.optim.AdamW``.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: float = 1.0) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the parameters once.

        Args:
            closure: recomputes the loss, as in torch's optimizers.
            grad_scale: multiplies every gradient as it is read, for clipping; ``.grad`` is unchanged.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        others: list[Tensor] = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not (self._is_native(group) and self._native_step(p, group, grad_scale)):
                    others.append(p)
        if others:
            self._torch_step(others, grad_scale)
        return loss

    def allocate_moments(self) -> None:
        """Allocate the moments and masters now rather than in the first step.

        The first step would place them in memory freed by its activations, and the gaps between them would be too small
        for activations of another size.
        """
        for group in self.param_groups:
            for p in group["params"] if self._is_native(group) else []:
                self._state_of(p)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load like torch, except that the state of 16-bit parameters stays float32, where torch rounds it."""
        super().load_state_dict(state_dict)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for p, key in zip(own, saved, strict=True):
            if p.dtype in HALF_DTYPES:
                values = state_dict["state"].get(key, {})
                tensors = {name: value for name, value in values.items() if name != "step"}
                self.state[p] |= {name: value.to(p.device, torch.float32, copy=True) for name, value in tensors.items()}

    def _state_of(self, p: Tensor) -> dict[str, Any]:
        """Return the state of a parameter: moments and, for 16 bits, its master, allocated if missing."""
        state, master = self.state[p], self._master_of(p)
        if "exp_avg" not in state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(master, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(master, memory_format=torch.preserve_format)
        return state

    def _master_of(self, p: Tensor) -> Tensor:
        """Return the tensor a step updates: a 16-bit parameter's master, allocated if missing, or the parameter."""
        if p.dtype not in HALF_DTYPES:
            return p
        state = self.state[p]
        if "master" not in state:
            for name in state.keys() - {"step"}:  # torch's own
                state[name] = state[name].float()
            state["master"] = p.detach().float()
        return state["master"]

    def _native_step(self, p: Tensor, group: dict[str, Any], grad_scale: float) -> bool:
        grad, state, master = p.grad, self._state_of(p), self._master_of(p)
        assert grad is not None
        parts = (p.detach(), grad.detach(), master.detach(), state["exp_avg"], state["exp_avg_sq"])
        if any(x.dtype != torch.float32 for x in parts[1 if master is p else 2 :]):
            return False
        if any(x.device.type != "cpu" or not x.is_contiguous() for x in parts):
            return False
        if any(x.shape != p.shape for x in parts):
            return False  # torch raises an error; the kernel would read and write out of bounds
        state["step"] += 1
        beta1, beta2 = group["betas"]
        kernel = partial(
            _core.adamw, lr=float(group["lr"]), beta1=beta1, beta2=beta2, eps=group["eps"],
            weight_decay=group["weight_decay"], t=state["step"].item(), grad_scale=grad_scale,
        )  # fmt: skip
        if master is p:
            kernel(p=parts[0], grad=parts[1], m=parts[3], v=parts[4])
        else:
            for half, half_grad, chunk, m, v in zip(*(x.view(-1).split(CHUNK) for x in parts), strict=True):
                refresh_master(chunk, half)
                kernel(p=chunk, grad=half_grad.float(), m=m, v=v)
                half.copy_(chunk)
        torch.autograd.graph.increment_version(p)
        return True

    def _is_native(self, group: Mapping[str, Any]) -> bool:
        """Whether the native step supports the settings of a group."""
        return not (group["amsgrad"] or group["maximize"] or group["capturable"] or group["differentiable"])

    def _step_by_torch(self) -> None:
        super().step()

    def _torch_step(self, others: list[Tensor], grad_scale: float) -> None:
        """Run torch's step on only these parameters, for 16-bit ones on their masters."""
        all_groups = [(group, group["params"]) for group in self.param_groups]
        selected = [(p, p.grad, self._master_of(p), self.state[p]) for p in others]
        masters = {id(p): master for p, _, master, _ in selected}
        try:
            for group, parameters in all_groups:
                group["params"] = [masters[id(p)] for p in parameters if id(p) in masters]
            for p, grad, master, state in selected:
                if master is not p:
                    refresh_master(master, p)
                    del state["master"]  # torch allocates moments only if a state is empty
                    self.state[master] = state
                master_grad = cast(Tensor, grad).to(master.dtype)
                master.grad = master_grad * grad_scale if grad_scale != 1.0 else master_grad
            self._step_by_torch()
        finally:
            for group, parameters in all_groups:
                group["params"] = parameters
            for p, grad, master, state in selected:
                master.grad = None
                p.grad = grad
                if master is not p:
                    self.state.pop(master, None)
                    state["master"] = master
        for p, _, master, _ in selected:
            if master is not p:
                p.copy_(master)


def refresh_master(master: Tensor, p: Tensor) -> None:
    """Set the elements of a master that do not round to its edited parameter to the parameter."""
    rounded = master.to(p.dtype)
    if not torch.equal(rounded, p):
        master.copy_(torch.where(rounded == p, master, p))
