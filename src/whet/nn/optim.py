"""AdamW in one pass over parameters, gradients and moments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from whet import _core

NARROW = (torch.bfloat16, torch.float16)
"""Dtypes of parameters that have a float32 master."""
_PIECE = 1 << 18
"""Weights of a 16-bit parameter that are stepped at a time: their gradients in float32 stay in the cache."""


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` with a native step for parameters on the CPU, and float32 masters of 16-bit ones.

    Loshchilov & Hutter 2019, with torch's order of operations, each rounded once: the moments are torch's to the bit,
    and so are most parameters; torch's square root, of MKL, may be an ULP off, and an update 1e-7 of itself with it.
    Arguments, parameter groups and state dict are torch's, and so is the step of float64 parameters, other devices
    and layouts.

    Departure from torch: a bfloat16 or float16 parameter is the rounded copy of a float32 master, ``master`` in its
    state. Gradients are converted exactly, moments are float32, the step is that of a float32 parameter, and the
    master is then rounded to the parameter, to nearest even. torch adds to the parameter itself, where whatever is less
    than half a unit in the last place is lost: in bfloat16, 2^-9 of the weight. A weight that is not its rounded master
    any more, because it was edited or loaded, is where its next step starts from. Moments and master take 12 bytes a
    weight.

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
        """Make the moments and masters now that the first step would make.

        That would have them in the memory that its activations leave, and what lies between them there is too small for
        activations of another size.
        """
        for group in self.param_groups:
            for p in group["params"] if _is_plain(group) else []:
                self._state_of(p)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but the state of 16-bit parameters in float32, which torch would round to their dtype."""
        super().load_state_dict(state_dict)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for p, key in zip(own, saved, strict=True):
            if p.dtype in NARROW:
                values = state_dict["state"].get(key, {})
                tensors = {name: value for name, value in values.items() if name != "step"}
                self.state[p] |= {name: value.to(p.device, torch.float32, copy=True) for name, value in tensors.items()}

    def _state_of(self, p: Tensor) -> dict[str, Any]:
        """Moments of a parameter, and its master, made where they are missing."""
        state, master = self.state[p], self._master_of(p)
        if "exp_avg" not in state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(master, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(master, memory_format=torch.preserve_format)
        return state

    def _master_of(self, p: Tensor) -> Tensor:
        """The tensor that a step changes: a 16-bit parameter's master, made where it is missing, or the parameter."""
        if p.dtype not in NARROW:
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
            return False  # torch tells of it; the kernel would read and write past their end
        state["step"] += 1
        beta1, beta2 = group["betas"]
        kernel = partial(
            _core.adamw, lr=float(group["lr"]), beta1=beta1, beta2=beta2, eps=group["eps"],
            weight_decay=group["weight_decay"], t=state["step"].item(), grad_scale=grad_scale,
        )  # fmt: skip
        if master is p:
            kernel(p=parts[0], grad=parts[1], m=parts[3], v=parts[4])
        else:
            for narrow, narrow_grad, piece, m, v in zip(*(x.view(-1).split(_PIECE) for x in parts), strict=True):
                _follow(piece, narrow)
                kernel(p=piece, grad=narrow_grad.float(), m=m, v=v)
                narrow.copy_(piece)
        torch.autograd.graph.increment_version(p)
        return True

    def _torch_step(self, others: list[Tensor], grad_scale: float) -> None:
        """torch's own step of only these parameters, of 16-bit ones on their masters."""
        whole = [(group, group["params"]) for group in self.param_groups]
        found = [(p, p.grad, self._master_of(p), self.state[p]) for p in others]
        stepped = {id(p): master for p, _, master, _ in found}
        try:
            for group, parameters in whole:
                group["params"] = [stepped[id(p)] for p in parameters if id(p) in stepped]
            for p, grad, master, state in found:
                if master is not p:
                    _follow(master, p)
                    del state["master"]  # torch makes moments where a state is empty
                    self.state[master] = state
                wide = cast(Tensor, grad).to(master.dtype)
                master.grad = wide * grad_scale if grad_scale != 1.0 else wide
            super().step()
        finally:
            for group, parameters in whole:
                group["params"] = parameters
            for p, grad, master, state in found:
                master.grad = None
                p.grad = grad
                if master is not p:
                    self.state.pop(master, None)
                    state["master"] = master
        for p, _, master, _ in found:
            if master is not p:
                p.copy_(master)


def _follow(master: Tensor, p: Tensor) -> None:
    """Set what of a master does not round to its parameter, which was edited, to the parameter."""
    rounded = master.to(p.dtype)
    if not torch.equal(rounded, p):
        master.copy_(torch.where(rounded == p, master, p))


def _is_plain(group: dict[str, Any]) -> bool:
    """Whether the native step has the settings of a group."""
    return not (group["amsgrad"] or group["maximize"] or group["capturable"] or group["differentiable"])
