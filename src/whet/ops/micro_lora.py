"""MicroLoRA: a low-rank adapter for online learning, and batches with a separate adapter per row.

Forward, gradients and merging as in ``whet.ops.lora``; steps of SGD and AdamW; elastic weight consolidation (EWC)
against catastrophic forgetting. Files and PEFT are in ``whet.models.adapter_files``.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685; Kirkpatrick et al. 2017,
"Overcoming catastrophic forgetting in neural networks", equation 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from whet import _core
from whet.errors import CheckpointError, WhetTypeError, WhetValueError, check_integer
from whet.ops import inputs
from whet.ops.lora import (
    MAX_RANK,
    check_factors,
    check_rows,
    check_target,
    lora_accumulate,
    lora_forward,
    naive_lora_forward,
    run_on_copy,
)


def naive_lora_batch(x: np.ndarray, y: np.ndarray, adapters: Sequence[MicroLoRA], index: Sequence[int]) -> np.ndarray:
    """Reference implementation of ``lora_batch``; returns a new array."""
    rows = [
        out if k < 0 else naive_lora_forward(row, out, adapters[k].A, adapters[k].B, adapters[k].scale)
        for row, out, k in zip(x, y, index, strict=True)
    ]
    return np.array(rows).reshape(y.shape)


class LoRAStack:
    """Adapters of one layer stacked in memory, for ``lora_batch``. A copy: later steps of an adapter have no effect.

    Args:
        adapters: at least one; all with the same in_features and out_features. Ranks and alphas may differ.

    Raises:
        WhetValueError: no adapters, or different sizes.
        WhetTypeError: an adapter is not a MicroLoRA.
    """

    def __init__(self, adapters: Sequence[MicroLoRA]) -> None:
        adapters = list(adapters)
        if not adapters:
            raise WhetValueError("LoRAStack: adapters is empty. Pass at least one MicroLoRA.")
        for i, adapter in enumerate(adapters):
            if not isinstance(adapter, MicroLoRA):
                raise WhetTypeError(f"LoRAStack: adapters[{i}] is a {type(adapter).__name__}, expected a MicroLoRA.")
            if (adapter.in_features, adapter.out_features) != (adapters[0].in_features, adapters[0].out_features):
                raise WhetValueError(
                    f"LoRAStack: adapters[{i}] is {adapter.in_features} to {adapter.out_features}, but adapters[0] is "
                    f"{adapters[0].in_features} to {adapters[0].out_features}. Stack adapters of one layer."
                )
        self.in_features, self.out_features = adapters[0].in_features, adapters[0].out_features
        self._a = np.concatenate([adapter.A for adapter in adapters])
        self._b = np.concatenate([adapter.B for adapter in adapters])
        self._offsets = np.cumsum([0, *(adapter.rank for adapter in adapters)], dtype=np.int64)
        self._scales = np.array([adapter.scale for adapter in adapters], np.float32)

    def __len__(self) -> int:
        return len(self._scales)


def lora_batch(x: Any, y: Any, adapters: LoRAStack | Sequence[MicroLoRA], index: Any) -> Any:
    """Apply ``lora_forward`` to every row with its own adapter, in place; rows do not depend on each other.

    Args:
        x: (N, in), float32 or bfloat16, NumPy or torch (CPU).
        y: (N, out), float32 or bfloat16, written to.
        adapters: a ``LoRAStack``, or adapters of one layer, which are stacked (copied) in each call.
        index: (N,) integers: the adapter of each row, -1 for none.

    Returns:
        y.

    Raises:
        WhetValueError: shapes disagree, an index is out of range, y is read-only, or a tensor requires grad or is not
            on the CPU.
        WhetTypeError: another dtype, index does not hold integers, or y is not an array.
    """
    stack = adapters if isinstance(adapters, LoRAStack) else LoRAStack(adapters)
    packed = (stack._a, stack._b, stack._offsets, stack._scales)
    if _core.lora_batch(x, y, *packed, index) is not NotImplemented:
        return y
    name = "lora_batch"
    rows = check_rows(name, "x", x, "the adapters", stack.in_features)
    check_target(name, "y", y, (*np.shape(x)[:-1], stack.out_features))
    ids = inputs.as_integers(name, "index", index)
    if ids.shape != (len(rows),):
        raise WhetValueError(f"{name}: index has shape {ids.shape}, expected ({len(rows)},): one adapter per row of x.")
    bad = np.flatnonzero((ids < -1) | (ids >= len(stack)))
    if len(bad):
        raise WhetValueError(
            f"{name}: index[{bad[0]}] is {ids[bad[0]]}, expected -1 (none) to {len(stack) - 1}: "
            f"there are {len(stack)} adapters."
        )
    run_on_copy(name, y, stack.out_features, lambda flat: _core.lora_batch(rows, flat, *packed, ids))
    return y


class MicroLoRA:
    """A low-rank adapter of a linear layer, with its gradients, optimizer state and EWC state of earlier tasks.

    A starts uniform in (-1, 1) / sqrt(in_features), B at 0: a new adapter changes nothing.

    Gradients: each ``accumulate`` adds the gradient of one loss, and a step uses their mean, G / n, plus the gradient
    of the EWC penalty, ewc_lambda / 2 sum F (theta - theta*)^2. ``accumulate_fisher`` adds squared gradients on a task
    to retain; ``consolidate`` adds their mean to F and sets theta* to the current weights.

    A copy (``copy``, ``pickle``) has its own memory and includes the optimizer state.

    Args:
        in_features: columns of x.
        out_features: columns of y.
        rank: r, 1 to 8.
        alpha: s = alpha / r scales the delta.
        seed: of A.

    Attributes:
        ewc_lambda: weight of the EWC penalty; initially 0, and without effect before ``consolidate``.
        n_gradients: losses in G since the last step.
        n_steps: Adam steps so far.

    Raises:
        WhetValueError: a size below 1, a rank above 8, an alpha that is not finite, or a seed that is not an integer of
            at least 0.
        WhetTypeError: a size that is not an integer, or an alpha that is not a number.
    """

    def __init__(self, in_features: int, out_features: int, rank: int = 2, alpha: float = 4.0, seed: int = 0) -> None:
        self.in_features = inputs.as_positive_int("MicroLoRA", "in_features", in_features)
        self.out_features = inputs.as_positive_int("MicroLoRA", "out_features", out_features)
        self.rank = inputs.as_positive_int("MicroLoRA", "rank", rank)
        if self.rank > MAX_RANK:
            raise WhetValueError(f"MicroLoRA: rank is {rank}, expected 1 to {MAX_RANK}. Use PEFT for larger ranks.")
        if not math.isfinite(inputs.as_number("MicroLoRA", "alpha", alpha)):
            raise WhetValueError(f"MicroLoRA: alpha is {alpha}, expected a finite number.")
        self.alpha = float(alpha)
        self.scale = self.alpha / self.rank
        self.ewc_lambda = 0.0
        self.n_gradients = self.n_steps = self.n_fisher = 0
        # A and B share one flat array, and gradients, moments, ... are flat arrays of the same layout, so that an
        # optimizer step is one formula.
        self._arrays: dict[str, np.ndarray] = {}
        self._make_views()
        bound = 1 / math.sqrt(self.in_features)
        generator = np.random.default_rng(check_integer("MicroLoRA", "seed", seed, 0))
        self._a[:] = generator.uniform(-bound, bound, self._a.shape)

    def _make_views(self) -> None:
        self._theta, self._gradient = self._buffer("lora"), self._buffer("grad")
        self._a, self._b = self._split(self._theta)
        self._grad_a, self._grad_b = self._split(self._gradient)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _VIEWS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Copied views would not share memory: copy the flat arrays, aligned to cache lines, and recreate the views.
        self.__dict__.update(state, _arrays={})
        for name, array in state["_arrays"].items():
            self._buffer(name)[:] = array
        self._make_views()

    @classmethod
    def from_arrays(cls, a: Any, b: Any, alpha: float) -> MicroLoRA:
        """Return an adapter with copies of A (r, in) and B (r, out), float32."""
        a, b = check_factors("MicroLoRA.from_arrays", a, b)
        adapter = cls(a.shape[1], b.shape[1], a.shape[0], alpha)
        adapter._a[:], adapter._b[:] = a, b
        return adapter

    @property
    def A(self) -> np.ndarray:
        """Factor A, (r, in) float32: a view of the adapter's memory."""
        return self._a

    @property
    def B(self) -> np.ndarray:
        """Factor B, (r, out) float32: a view of the adapter's memory."""
        return self._b

    @property
    def gradients(self) -> tuple[np.ndarray, np.ndarray]:
        """Sums G_A (r, in) and G_B (r, out), float32, over the losses accumulated since the last step."""
        return self._grad_a, self._grad_b

    def __repr__(self) -> str:
        return f"MicroLoRA({self.in_features}, {self.out_features}, rank={self.rank}, alpha={self.alpha:g})"

    def forward(self, x: Any, y: Any) -> Any:
        """Add s (x A^T) B to y in place, and return y. Arguments as ``lora_forward``."""
        if _core.lora_forward(x, y, self._a, self._b, self.scale) is NotImplemented:
            lora_forward(x, y, self._a, self._b, self.scale)
        return y

    def accumulate(self, x: Any, grad_y: Any) -> None:
        """Add the gradient of one loss: x (..., in) is the layer's input, grad_y = dL/dy (..., out).

        Rows of one call belong to one loss: their gradients are summed, like in autograd.
        """
        lora_accumulate(x, grad_y, self._a, self._b, self.scale, self._grad_a, self._grad_b)
        self.n_gradients += 1

    def zero_grad(self) -> None:
        """Discard the accumulated gradient."""
        self._gradient[:] = 0
        self.n_gradients = 0

    def sgd_step(self, lr: float) -> None:
        """Step theta -= lr g, with g the mean gradient plus the EWC term. Then G = 0, n = 0.

        Raises:
            WhetValueError: nothing was accumulated, the gradient is not finite, or lr is below 0 or not finite.
        """
        self._theta -= np.float32(_check_not_negative("sgd_step", "lr", lr)) * self._mean_gradient("sgd_step")
        self.zero_grad()

    def adam_step(
        self, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:
        """Step AdamW (Loshchilov & Hutter 2019, algorithm 2), with g as in ``sgd_step``. Then G = 0, n = 0.

        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,
        theta -= lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay theta)

        Raises:
            WhetValueError: as ``sgd_step``; betas that are not two numbers in [0, 1), eps not above 0, or weight_decay
                below 0.
        """
        name = "adam_step"
        _check_not_negative(name, "lr", lr)
        _check_not_negative(name, "weight_decay", weight_decay)
        is_pair = isinstance(betas, (tuple, list)) and len(betas) == 2
        if not (is_pair and all(0 <= inputs.as_number(name, "betas", beta) < 1 for beta in betas)):
            raise WhetValueError(f"{name}: betas is {betas!r:.60}, expected two numbers in [0, 1).")
        if not 0 < inputs.as_number(name, "eps", eps) < math.inf:
            raise WhetValueError(f"{name}: eps is {eps}, expected a number above 0.")
        g = self._mean_gradient(name)
        m, v = self._buffer("adam_m"), self._buffer("adam_v")
        self.n_steps += 1
        b1, b2 = betas
        m += np.float32(1 - b1) * (g - m)
        v *= np.float32(b2)
        v += np.float32(1 - b2) * g * g
        root = np.sqrt(v) / np.float32(math.sqrt(1 - b2**self.n_steps)) + np.float32(eps)
        self._theta *= np.float32(1 - lr * weight_decay)
        self._theta -= np.float32(lr / (1 - b1**self.n_steps)) * m / root
        self.zero_grad()

    def accumulate_fisher(self, x: Any, grad_y: Any) -> None:
        """Add the squared gradient of one sample's log-likelihood to the diagonal Fisher information.

        One call is one sample: the gradients of its rows are summed before they are squared. Does not change G.
        """
        gradient = np.zeros_like(self._theta)
        lora_accumulate(x, grad_y, self._a, self._b, self.scale, *self._split(gradient))
        self._buffer("fisher_sum")[:] += gradient * gradient
        self.n_fisher += 1

    def consolidate(self) -> None:
        """Set theta* = theta, and add the mean of the squared gradients to F.

        Later tasks add to the F of earlier tasks, around the new theta* (online EWC of Schwarz et al. 2018, "Progress &
        Compress", with gamma = 1).

        Raises:
            WhetValueError: no ``accumulate_fisher`` since the last ``consolidate``.
        """
        if self.n_fisher == 0:
            raise WhetValueError("consolidate: no Fisher information was accumulated. Call accumulate_fisher before.")
        total = self._buffer("fisher_sum")
        self._buffer("fisher")[:] += total / np.float32(self.n_fisher)
        self._buffer("anchor")[:] = self._theta
        total[:] = 0
        self.n_fisher = 0

    def ewc_penalty(self) -> float:
        """Return ewc_lambda / 2 sum F (theta - theta*)^2, summed in float64; 0 before ``consolidate``."""
        if "anchor" not in self._arrays:
            return 0.0
        moved = self._theta.astype(np.float64) - self._arrays["anchor"]
        return float(0.5 * self.ewc_lambda * np.sum(self._arrays["fisher"] * moved * moved))

    def merge(self, weight: Any) -> Any:
        """Add s B^T A to weight in place, and return weight.

        Args:
            weight: (out, in) like in ``torch.nn.Linear``, float32 or bfloat16 (rounded once), NumPy or torch. Pass a
                parameter as ``linear.weight.detach()``, which shares its memory.
        """
        return self._add_to(weight, self.scale, "merge")

    def unmerge(self, weight: Any) -> Any:
        """Subtract s B^T A from weight in place, and return weight: undoes ``merge`` up to rounding."""
        return self._add_to(weight, -self.scale, "unmerge")

    def state_dict(self) -> dict[str, Any]:
        """Return the complete training state: copies of the arrays, ``lora_A`` to ``anchor_B``, and the numbers."""
        state: dict[str, Any] = {name: getattr(self, name) for name in _NUMBERS}
        for name in _BUFFERS:
            if name in self._arrays:
                for letter, part in zip("AB", self._split(self._arrays[name]), strict=True):
                    state[f"{name}_{letter}"] = part.copy()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the ``state_dict`` of an adapter of the same sizes; after an error nothing has changed.

        ``lora_A`` and ``lora_B`` are required; missing entries are reset.

        Raises:
            CheckpointError: an unknown or missing key, another shape or dtype, or a value that is not a number.
        """
        loaded = MicroLoRA(self.in_features, self.out_features, self.rank, self.alpha)
        arrays = {key: value for key, value in state.items() if key not in _NUMBERS}
        for name in sorted({"lora", *(key[:-2] for key in arrays)}):
            if name not in _BUFFERS:
                raise CheckpointError(f"load_state_dict: {name}_A or {name}_B is unknown. Expected {_KEYS}.")
            for letter, part in zip("AB", loaded._split(loaded._buffer(name)), strict=True):
                value = arrays.pop(f"{name}_{letter}", None)
                if value is None or np.shape(value) != part.shape or str(value.dtype) != "float32":
                    raise CheckpointError(
                        f"load_state_dict: {name}_{letter} is {_describe(value)}, expected float32 {part.shape}."
                    )
                part[:] = value
        if arrays:
            raise CheckpointError(f"load_state_dict: {', '.join(arrays)} unknown. Expected {_KEYS}.")
        for name, kind in _NUMBERS.items():
            value = state.get(name, getattr(loaded, name))
            if isinstance(value, bool) or not isinstance(value, (int, kind)) or not math.isfinite(value):
                raise CheckpointError(f"load_state_dict: {name} is {value!r}, expected a finite {kind.__name__}.")
            setattr(loaded, name, kind(value))
        loaded.scale = loaded.alpha / loaded.rank
        self.__dict__.update(loaded.__dict__)

    def _buffer(self, name: str) -> np.ndarray:
        """Return the flat array of this name, initially zeros; it and its B part are aligned to cache lines."""
        if name not in self._arrays:
            n = self._b_offset + self.rank * self.out_features
            memory = np.zeros(n + 15, np.float32)
            begin = -(memory.ctypes.data // 4) % 16
            self._arrays[name] = memory[begin : begin + n]
        return self._arrays[name]

    @property
    def _b_offset(self) -> int:
        return -(-self.rank * self.in_features // 16) * 16

    def _split(self, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        n = self.rank * self.in_features
        return flat[:n].reshape(self.rank, -1), flat[self._b_offset :].reshape(self.rank, -1)

    def _mean_gradient(self, function: str) -> np.ndarray:
        if self.n_gradients == 0:
            raise WhetValueError(f"{function}: no gradient was accumulated. Call accumulate before.")
        g = self._gradient / np.float32(self.n_gradients)
        if self.ewc_lambda and "anchor" in self._arrays:
            g += np.float32(self.ewc_lambda) * self._arrays["fisher"] * (self._theta - self._arrays["anchor"])
        if not np.isfinite(g).all():
            raise WhetValueError(f"{function}: the gradient holds NaN or infinity. Call zero_grad() to discard it.")
        return g

    def _add_to(self, weight: Any, scale: float, function: str) -> Any:
        if _core.lora_add_product(self._b.T, self._a, weight, scale) is NotImplemented:
            check_target(function, "weight", weight, (self.out_features, self.in_features))
            add = partial(_core.lora_add_product, self._b.T, self._a)
            run_on_copy(function, weight, self.in_features, lambda flat: add(flat, float(scale)))
        return weight


_NUMBERS = {"alpha": float, "ewc_lambda": float, "n_gradients": int, "n_steps": int, "n_fisher": int}
_VIEWS = ("_theta", "_gradient", "_a", "_b", "_grad_a", "_grad_b")
_BUFFERS = ("lora", "grad", "adam_m", "adam_v", "fisher_sum", "fisher", "anchor")
_KEYS = f"NAME_A and NAME_B for NAME among {', '.join(_BUFFERS)}, and {', '.join(_NUMBERS)}"


def _check_not_negative(function: str, name: str, value: float) -> float:
    if not 0 <= inputs.as_number(function, name, value) < math.inf:
        raise WhetValueError(f"{function}: {name} is {value}, expected a finite number of at least 0.")
    return value


def _describe(x: Any) -> str:
    return "missing" if x is None else f"{getattr(x, 'dtype', type(x).__name__)} {np.shape(x)}"
