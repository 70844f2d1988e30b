"""Parameters of a learner: adapters of modules and of experts, norms, and heads, with gradients and PEFT's names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from whet.errors import WhetValueError
from whet.models.adapter_files import MAGNITUDE, PEFT_PREFIX
from whet.models.architecture import ModelConfig
from whet.models.packed_base import PackedBase
from whet.models.pissa import is_zero, principal_factors
from whet.models.slots import NormValues, WeightLocation, locate_norm, slot_columns, slot_outputs

ADAPTER = "default"
"""PEFT's name of a model's first adapter."""


class TrainedAdapter:
    """The adapter of one module, or all adapters of the experts of a layer: ``W + (alpha / r) B^T A``.

    Attributes:
        name: of the module in the Hugging Face model, or of the parameter with the matrices of all experts.
        n_experts: number of the experts; 1 for a module. Below, r is this number times the rank.
        a: (r, k) float32, its columns in the order of the slot.
        b: (r, n) float32, its columns in the order of the module's outputs in the slot.
        alpha: the adapter is multiplied by alpha / rank.
        wrapper: name of PEFT's module with the adapter.
        n_fixed: the last rows of A and B that do not train.
        grad_a: (r, k) float32, accumulated by ``Learner.backward``.
        grad_b: (r, n) float32, as grad_a.
        magnitude: (n,) float32, of DoRA: the lengths of the rows of the sum, in the order of b's columns; None: plain
            LoRA.
        grad_magnitude: its gradient, as grad_a.
    """

    def __init__(
        self, location: WeightLocation, rank: int, alpha: float, rng: np.random.Generator, config: ModelConfig
    ) -> None:
        n, k = location.matrix_shape
        self.name, self.location, self.alpha = location.name, location, float(alpha)
        self.n_experts = location.n_experts
        bound = 1 / math.sqrt(k)  # as PEFT: Kaiming uniform with a = sqrt(5)
        self.a = rng.uniform(-bound, bound, (self.n_experts * rank, k)).astype(np.float32)
        self.b = np.zeros((self.n_experts * rank, n), np.float32)
        self.grad_a, self.grad_b = np.zeros_like(self.a), np.zeros_like(self.b)
        self.magnitude: np.ndarray | None = None
        self.grad_magnitude: np.ndarray | None = None
        self._scales_rows = False
        self.wrapper, self.n_fixed = self.name, 0
        outputs, columns = slot_outputs(config, location), slot_columns(config, location)
        self._outputs = np.arange(n) if outputs is None else outputs  # the module's output at each column of b
        self._columns = slice(None) if columns is None else columns  # the column of a of each of the module's inputs
        self._inputs = slice(None) if columns is None else np.argsort(columns)

    @property
    def rank(self) -> int:
        """Rank of the adapter, or of an expert's."""
        return len(self.a) // self.n_experts

    @property
    def scaling(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    def parts(self, *arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield the rows of each expert's adapter in arrays with the rows of A."""
        return zip(*(np.split(array, self.n_experts) for array in arrays), strict=True)

    def gradient_parts(self) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield the gradients of each expert's adapter, or of the module's, as the core takes them."""
        if self.grad_magnitude is not None:
            return iter([self.gradients])
        return self.parts(self.grad_a, self.grad_b)

    def trained_rows(self) -> list[slice]:
        """Return the rows of A and B with gradients: of experts only those with a number that is not 0."""
        if self.n_experts == 1:
            return [slice(0, self.rank - self.n_fixed)]
        found = [grad_a.any() or grad_b.any() for grad_a, grad_b in self.parts(self.grad_a, self.grad_b)]
        return [slice(e * self.rank, (e + 1) * self.rank) for e in np.flatnonzero(found)]

    def start_principal(self, base: PackedBase, rng: np.random.Generator, where: str) -> None:
        """Set the first half of A and B to the principal part of the base's matrix, and the second to minus it."""
        if not self.scaling > 0:
            raise WhetValueError(
                f"{where}: lora_init is 'pissa', and the adapter of {self.name} is multiplied by {self.scaling:g}, "
                f"expected a factor above 0. Raise lora_alpha."
            )
        self.n_fixed = self.rank // 2
        matrix = base.rows(self.name, np.empty(self.location.shape, np.float32))
        a, b = principal_factors(matrix, self.n_fixed, self.scaling, rng)
        self.a[:], self.b[:] = self.from_module(np.concatenate((a, a)), np.concatenate((b, -b), 1))

    def is_original(self) -> bool:
        """Whether the adapter changes nothing."""
        return is_zero(self.a, self.b.T) and not self._scales_rows

    def drop_fixed_gradients(self) -> None:
        """Set the gradients of rows that do not train to zero."""
        for grad in (self.grad_a, self.grad_b):
            grad[len(grad) - self.n_fixed :] = 0

    def add_magnitude(self, magnitude: np.ndarray, is_original: bool = False) -> None:
        """Train magnitudes from these initial values on; ``is_original``: the lengths of the base's rows."""
        self.magnitude = np.ascontiguousarray(magnitude, np.float32)
        self.grad_magnitude = np.zeros_like(self.magnitude)
        self._scales_rows = not is_original

    @property
    def parameters(self) -> tuple[np.ndarray, ...]:
        """A, B, and the magnitudes if there are any, which training updates in place; call ``Learner.update`` after
        other changes.
        """
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)

    @parameters.setter
    def parameters(self, arrays: tuple[np.ndarray, ...]) -> None:
        self.a, self.b, *magnitude = arrays
        if magnitude:
            [self.magnitude] = magnitude

    def to_module(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return A and B, or moments of them, (r, k) and (r, n), as the module's: (r, k) and (n, r), in its order."""
        rows = np.empty(b.shape[::-1], b.dtype)
        # PEFT has the ranks of all experts, each with the columns of the experts.
        rows[self._outputs] = b.reshape(self.n_experts, self.rank, -1).transpose(2, 1, 0).reshape(rows.shape)
        return a[:, self._columns], rows

    def from_module(self, columns: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the inverse of ``to_module``."""
        b = rows[self._outputs].reshape(len(rows), self.rank, self.n_experts).transpose(2, 1, 0)
        return np.ascontiguousarray(columns[:, self._inputs]), np.ascontiguousarray(b.reshape(self.b.shape))

    @property
    def gradients(self) -> tuple[np.ndarray, ...]:
        """Gradients of ``parameters``."""
        if self.grad_magnitude is None:
            return self.grad_a, self.grad_b
        return self.grad_a, self.grad_b, self.grad_magnitude

    def to_peft(self, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Return the parameters, or arrays of their shapes, by the names of PEFT's parameters."""
        a, b, *magnitude = arrays
        a, b = self.to_module(a, b)
        named = {"lora_A": a, "lora_B": b}
        if magnitude:
            named[MAGNITUDE] = self.order_outputs(magnitude[0])
        return {f"{PEFT_PREFIX}{self.wrapper}.{name}.{ADAPTER}.weight": array for name, array in named.items()}

    def order_outputs(self, values: np.ndarray) -> np.ndarray:
        """Return numbers of the outputs (n,) in the order of the module's."""
        ordered = np.empty_like(values)
        ordered[self._outputs] = values
        return ordered

    def from_peft(self, named: Mapping[str, Any]) -> list[np.ndarray]:
        """Return the inverse of ``to_peft``, as float32 copies."""
        a, b, *magnitude = (np.array(named[name], np.float32) for name in self.to_peft(self.parameters))
        return [*self.from_module(a, b), *map(self.outputs_of_module, magnitude)]

    def outputs_of_module(self, values: np.ndarray) -> np.ndarray:
        """Return the inverse of ``order_outputs``."""
        return values[self._outputs]


class TrainedModule:
    """A module that is trained whole: PEFT's ``modules_to_save``.

    Attributes:
        name: of the module in the Hugging Face model.
        parts: "weight", and "bias" if there is one.
        parameters: float32, as the module stores them; training updates them in place. Call ``Learner.update`` after
            other changes.
        gradients: of the parameters, accumulated by ``Learner.backward``.
    """

    def __init__(self, name: str, *parameters: np.ndarray) -> None:
        self.name, self.parameters = name, parameters
        self.parts = ("weight", "bias")[: len(parameters)]
        self.gradients = tuple(map(np.zeros_like, parameters))

    def to_peft(self, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Return the parameters, or arrays of their shapes, by the names of PEFT's parameters."""
        name = f"{PEFT_PREFIX}{self.name}.modules_to_save.{ADAPTER}"
        return {f"{name}.{part}": array for part, array in zip(self.parts, arrays, strict=True)}

    def from_peft(self, named: Mapping[str, Any]) -> list[np.ndarray]:
        """Return the inverse of ``to_peft``, as float32 copies."""
        return [np.array(named[name], np.float32) for name in self.to_peft(self.parameters)]


class TrainedNorm(TrainedModule):
    """The weight, and bias if there is one, of a norm, (n,) each, which are initially the base's."""

    def __init__(self, location: WeightLocation, base: PackedBase) -> None:
        self.location, self._base = location, base
        super().__init__(location.names[0], *self._read_base())

    def _read_base(self) -> tuple[np.ndarray, ...]:
        readers = [self._base.rows, *([] if self.location.bias is None else [self._base.bias])]
        return tuple(read(self.location.names[0], np.empty(self.location.shape, np.float32)) for read in readers)

    def is_original(self) -> bool:
        """Whether the parameters are the base's."""
        return all(map(np.array_equal, self.parameters, self._read_base()))

    def locate(self) -> list[NormValues]:
        """Return the parameters as values of slots."""
        vectors: dict[str, Any] = dict(zip(self.parts, self.parameters, strict=True))
        return locate_norm(self._base.config, self.location, vectors, "Learner")
