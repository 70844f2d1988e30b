"""Trains low-rank adapters of a model whose packed weights stay frozen, natively: torch is not imported.

    learner = Learner("model.gguf", lora_rank=16)
    result = learner.logprobs(prompt_ids, completion_ids)    # (B, C), computed with the adapters
    learner.backward(grad)                                   # d loss / d logprobs, (B, C)
    learner.step(lr=1e-4)                                    # AdamW

The engine's weights are used as they are packed, in any format and family that the engine supports; the backward pass
reads the same panels. Rows of equal prompts share the computation of the prompt in both directions. cpp/learner
explains the passes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from whet import _core
from whet.config.settings import ComputeDtype
from whet.errors import WhetTypeError, WhetValueError, check_choice, check_temperature
from whet.learner.batch import Logprobs, check_rows, pack_batch
from whet.models.adapter_files import write_peft
from whet.models.lora import choose_adapted, core_matrix
from whet.models.packed_base import PackedBase, pack_base
from whet.models.slots import LoRA, ModelSource, WeightLocation, keep_order
from whet.models.sources.gguf_container import GGUFFile
from whet.models.sources.pretrained import open_pretrained


class TrainedAdapter:
    """The adapter of one module: ``W + (alpha / r) B^T A``.

    Attributes:
        name: of the module in the Hugging Face model.
        a: (r, k) float32.
        b: (r, n) float32, its columns in the order of the module's outputs in the slot.
        alpha: the adapter is multiplied by alpha / r.
        grad_a: (r, k) float32, accumulated by ``Learner.backward``.
        grad_b: (r, n) float32, as grad_a.
    """

    def __init__(self, location: WeightLocation, rank: int, alpha: float, rng: np.random.Generator) -> None:
        n, k = location.shape
        self.name, self.location, self.alpha = location.names[0], location, float(alpha)
        bound = 1 / math.sqrt(k)  # as PEFT: Kaiming uniform with a = sqrt(5)
        self.a = rng.uniform(-bound, bound, (rank, k)).astype(np.float32)
        self.b = np.zeros((rank, n), np.float32)
        self.grad_a, self.grad_b = np.zeros_like(self.a), np.zeros_like(self.b)

    @property
    def scaling(self) -> float:
        """alpha / r."""
        return self.alpha / len(self.a)

    @property
    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """A and B, which training updates in place; call ``Learner.update`` after other changes."""
        return self.a, self.b

    @property
    def gradients(self) -> tuple[np.ndarray, np.ndarray]:
        """Gradients of A and B."""
        return self.grad_a, self.grad_b


class Learner:
    """Low-rank adapters of a packed base, their forward and backward passes, and an AdamW step.

    One thread at a time. Results have the same bits for every number of threads and instruction set, and so have sums
    of gradients for every order of a batch's rows, as long as rows with equal prompts and completions have equal
    gradients.

    Args:
        model: a Hugging Face folder, a GGUF file, or a ``PackedBase`` to share with engines.
        lora_rank: rank of every adapter.
        lora_alpha: adapters are multiplied by lora_alpha / lora_rank. Default: lora_rank.
        lora_layers: modules with an adapter, as PEFT's ``target_modules``. Default: all linear layers except the head.
        weights: format of the packed weights, as for ``Engine``.
        compute: of products: "bfloat16" rounds weights and activations, sums are float32. "auto": bfloat16 if the
            processor has bfloat16 products and the weights are not float32.
        max_position: tokens of the longest row, for which frequencies that depend on it are resolved. Default: the
            model's.
        seed: of the initial A; B is zero.

    Attributes:
        base: the packed base.
        adapters: in a fixed order.
        compute: "float32" or "bfloat16".

    Raises:
        WhetValueError: a model, format, layer or rank that does not fit, with the fix.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | GGUFFile | PackedBase,
        *,
        lora_rank: int = 16,
        lora_alpha: float | None = None,
        lora_layers: Sequence[str] = (),
        weights: str | None = None,
        compute: ComputeDtype = "auto",
        max_position: int | None = None,
        seed: int = 0,
    ) -> None:
        where = "Learner"
        check_choice(where, "compute", compute, ComputeDtype)
        if isinstance(model, PackedBase):
            for name, value in (("weights", weights), ("max_position", max_position)):
                if value is not None:
                    raise WhetValueError(f"{where}: {name} is {value!r}, but the base is packed already. Pass None.")
            source = model.source()
        else:
            source = open_pretrained(model, max_position=max_position)
        adapted = choose_adapted(source, lora_rank, lora_layers, (), where)
        for location, _ in adapted.factors:
            _matrix_of(location, where)
        self.base = model if isinstance(model, PackedBase) else pack_base(source, weights=weights, where=where)
        if compute == "auto":
            is_narrow = "bf16" in _core.isa() and self.base.summary != "float32"
            compute = "bfloat16" if is_narrow else "float32"
        self.compute = compute
        try:
            self._core = _core.Learner(self.base.core, compute == "bfloat16")
        except ValueError as error:
            raise WhetValueError(f"{where}: {error}. Train this model with torch.") from None
        rng = np.random.default_rng(seed)
        alpha = lora_rank if lora_alpha is None else lora_alpha
        self.adapters = tuple(TrainedAdapter(location, rank, alpha, rng) for location, rank in adapted.factors)
        for adapter in self.adapters:
            layer, target = _matrix_of(adapter.location, where)
            rank, n = adapter.b.shape
            self._core.add_adapter(layer=layer, target=target, first_row=adapter.location.first_row, n=n, rank=rank)
        self.update()
        self._scatter: tuple[np.ndarray, np.ndarray] | None = None  # row and step of each target of the last forward
        self._moments: list[tuple[np.ndarray, np.ndarray]] = []
        self._n_steps = 0

    def update(self) -> None:
        """Pack the factors for the next ``logprobs``."""
        for i, adapter in enumerate(self.adapters):
            self._core.set_factors(i, adapter.a, adapter.b, adapter.scaling)

    def logprobs(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        *,
        completion_mask: Sequence[Sequence[bool]] | None = None,
        temperature: float = 1.0,
        return_entropy: bool = False,
        adapters: bool = True,
        keep: bool = True,
    ) -> Logprobs:
        """Return the log-probability of each completion token, given its prompt and the tokens before it.

        ``log pi(y_t | x, y_<t) = z_t[y_t] / T - logsumexp(z_t / T)``, ``H_t = -sum_v p_v log p_v``; accumulated in
        float64 over tiles of the vocabulary.

        Args:
            prompt_ids: B rows of token ids, at least one token each.
            completion_ids: B rows of token ids; a row may be empty.
            completion_mask: for each completion token, whether it counts; None: all do.
            temperature: T, divides the logits.
            return_entropy: also compute H.
            adapters: whether to apply the adapters; False: the base.
            keep: whether ``backward`` follows.

        Raises:
            WhetValueError: rows, tokens or a mask that do not fit the model or each other.
        """
        where = "Learner.logprobs"
        check_temperature(where, temperature)
        prompts, completions = (
            [list(map(int, row)) for row in prompt_ids],
            [list(map(int, row)) for row in completion_ids],
        )
        mask = self._check_rows(prompts, completions, completion_mask)
        # In an order that depends only on the content, so that gradients are summed in it.
        order = sorted(range(len(prompts)), key=lambda i: (prompts[i], completions[i]))
        batch = pack_batch([prompts[i] for i in order], [completions[i] for i in order])
        rows, steps = np.asarray(order, np.int64)[batch.rows], batch.steps
        counted = mask[rows, steps]
        rows, steps = rows[counted], steps[counted]
        values = np.empty(len(rows), np.float32)
        entropies = np.empty(len(rows), np.float32) if return_entropy else None
        self._scatter = None
        if len(rows):
            self._core.forward(
                tokens=batch.input_ids, positions=batch.position_ids, group_offsets=batch.group_offsets,
                q_offsets=batch.q_offsets, k_offsets=batch.k_offsets, key_rows=batch.key_rows,
                reader_offsets=batch.reader_offsets, readers=batch.readers, predictors=batch.hidden_rows[counted],
                targets=batch.targets[counted], temperature=temperature, with_adapters=adapters, keep=keep,
                logprobs=values, entropy=entropies,
            )  # fmt: skip
        if keep and adapters:
            self._scatter = rows, steps

        def scatter(tokens: np.ndarray) -> np.ndarray:
            out = np.zeros(mask.shape, np.float32)
            out[rows, steps] = tokens
            return out

        return Logprobs(scatter(values), None if entropies is None else scatter(entropies), mask)

    def backward(self, grad_logprobs: Any, grad_entropy: Any = None) -> None:
        """Add the gradients of the adapters to their ``grad_a`` and ``grad_b``; follows ``logprobs``, once.

        Args:
            grad_logprobs: gradient of the loss with respect to ``logprobs``, (B, C); ignored where its mask is False.
            grad_entropy: the same for ``entropy``; None: the loss does not depend on it.

        Raises:
            WhetTypeError: no ``logprobs`` precedes, or it was computed without adapters or ``keep``.
            WhetValueError: another shape, or NaN or infinity.
        """
        where = "Learner.backward"
        if self._scatter is None:
            raise WhetTypeError(f"{where}: it follows logprobs(), with adapters and keep, once. Call logprobs() first.")
        (rows, steps), grads = self._scatter, []
        for name, grad in (("grad_logprobs", grad_logprobs), ("grad_entropy", grad_entropy)):
            if grad is None:
                grads.append(None)
                continue
            values = np.asarray(grad, np.float32)
            if values.ndim != 2 or (len(rows) and (values.shape[0] <= rows.max() or values.shape[1] <= steps.max())):
                raise WhetValueError(f"{where}: {name} has shape {values.shape}, expected the (B, C) of the log-probs.")
            values = np.ascontiguousarray(values[rows, steps])
            if not np.isfinite(values).all():
                raise WhetValueError(f"{where}: {name} holds NaN or infinity. Check the loss of this batch.")
            grads.append(values)
        self._scatter = None
        if len(rows):
            gradients = [adapter.gradients for adapter in self.adapters]
            self._core.backward(grad_logprobs=grads[0], grad_entropy=grads[1], grads=gradients)

    def source(self) -> ModelSource:
        """Return the base and the adapters as a model, for ``Engine.from_model``, ``sync`` and ``add_adapter``."""
        adapters = [
            LoRA(adapter.location.weight, adapter.location.first_row, adapter.a, adapter.b.T, adapter.scaling)
            for adapter in self.adapters
        ]
        return self.base.source()._replace(adapters=tuple(adapters))

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        for adapter in self.adapters:
            for grad in adapter.gradients:
                grad.fill(0)

    def grad_norm(self) -> float:
        """Return the 2-norm of all gradients together, accumulated in float64."""
        return math.sqrt(
            sum(
                float(np.square(grad, dtype=np.float64).sum())
                for adapter in self.adapters
                for grad in adapter.gradients
            )
        )

    def step(
        self,
        lr: float = 1e-4,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = 1.0,
    ) -> float:
        """Update the adapters by AdamW (Loshchilov & Hutter 2019), set the gradients to zero, and return their norm.

        Args:
            max_grad_norm: gradients with a larger norm are scaled to it; None: never.

        Raises:
            WhetValueError: the gradients hold NaN or infinity; nothing is changed.
        """
        norm = self.grad_norm()
        if not math.isfinite(norm):
            raise WhetValueError(
                "Learner.step: the gradients hold NaN or infinity. Call zero_grad() and check the loss."
            )
        self._moments = self._moments or [
            (np.zeros_like(p), np.zeros_like(p)) for adapter in self.adapters for p in adapter.factors
        ]
        self._n_steps += 1
        scale = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norm + 1e-6))
        pairs = [pair for adapter in self.adapters for pair in zip(adapter.factors, adapter.gradients, strict=True)]
        for (p, grad), (m, v) in zip(pairs, self._moments, strict=True):
            _core.adamw(
                p=p, grad=grad, m=m, v=v, lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay,
                t=self._n_steps, grad_scale=scale,
            )  # fmt: skip
        self.zero_grad()
        self.update()
        return norm

    def save_pretrained(self, folder: str | os.PathLike[str], base_model_name: str = "") -> None:
        """Write the adapters as a PEFT folder."""
        adapters = {}
        for adapter in self.adapters:
            b, order = adapter.b, adapter.location.module.row_order
            if order is not keep_order:
                b = np.empty_like(adapter.b)
                for first, view in order(self.base.config, np.arange(b.shape[1])):
                    b[:, view] = adapter.b[:, first : first + len(view)]
            adapters[adapter.name] = adapter.a, b.T, adapter.alpha
        write_peft(folder, adapters, base_model_name or self.base.path)

    def _check_rows(
        self, prompts: list[list[int]], completions: list[list[int]], given: Sequence[Sequence[bool]] | None
    ) -> np.ndarray:
        """Check a batch, and return the mask of the tokens that count."""
        where, config = "Learner.logprobs", self.base.config
        check_rows(where, prompts, completions, given)
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            if not prompt:
                raise WhetValueError(
                    f"{where}: prompt_ids[{i}] is empty, so no token predicts the first token after it. Start the "
                    f"prompt with at least one token, such as BOS."
                )
            if len(prompt) + len(completion) - 1 > config.max_position:  # the last token is not an input
                raise WhetValueError(
                    f"{where}: row {i} has {len(prompt) + len(completion):,} tokens, and the model's last position is "
                    f"{config.max_position:,}. Shorten it."
                )
            low, high = min((*prompt, *completion)), max((*prompt, *completion))
            if low < 0 or high >= config.vocab_size:
                raise WhetValueError(
                    f"{where}: row {i} has token {low if low < 0 else high}, and the model's vocabulary has "
                    f"{config.vocab_size:,} tokens. Tokenise with the model's own tokenizer."
                )
        lengths = list(map(len, completions))
        mask = np.arange(max(lengths)) < np.asarray(lengths)[:, None]
        for row, flags in zip(mask, given or (), strict=False):
            row[: len(flags)] = flags
        return mask


def _matrix_of(location: WeightLocation, where: str) -> tuple[int, Any]:
    """Return the layer and the core's matrix of a module."""
    matrix = core_matrix(location.weight)
    if matrix is None:
        raise WhetValueError(
            f"{where}: lora_layers names {location.names[0]}, and only the linear layers of attention and MLP learn "
            f"natively. Train it with torch."
        )
    return matrix
