"""The frozen reference of a policy: what it is, and its log-probs of preference pairs, computed once.

Knows no trainer: who computes log-probs passes that in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from whet.errors import CheckpointError, WhetValueError
from whet.signals import deferred_signals
from whet.training.distributed import Ranks
from whet.training.reference_cache import ReferenceCache, Sums, row_digest

TokenRow = tuple[list[int], list[int], list[int]]
"""Token ids of a pair: prompt, chosen and rejected completion."""


class Reference:
    """The model that a loss compares the policy with: what the policy was when training began.

    A separate module, the user's or a frozen copy of the policy; or a PEFT model itself: with its adapters off, where
    those are new and nothing else trains, and otherwise with the first values of all that trains.

    Args:
        policy: the model that is trained.
        trained: its parameters that are trained, by name.
        model: the user's module; None: one of the others.
        kept: whether first values or a frozen copy are kept, where they are needed. Without them the policy itself is
            the reference until it is trained.
        where: the caller's name, for the errors.

    Attributes:
        model: the separate module; None: there is none.
        adapters_off: whether it is the policy with its adapters off.
        first_values: what it has in the place of the trained parameters, by name; empty: nothing.

    Raises:
        WhetValueError: model shares memory with what is trained.
    """

    def __init__(
        self, policy: nn.Module, trained: Mapping[str, Tensor], model: nn.Module | None, *, kept: bool, where: str
    ) -> None:
        self._policy: Any = policy
        self._trained = trained
        self._kept = kept
        if model is not None:
            _check_apart(policy, trained, model, where)
        self._is_inside = model is None and hasattr(policy, "peft_config") and hasattr(policy, "disable_adapter")
        self.adapters_off = self._is_inside and _adapters_are_new(policy)
        self.first_values: dict[str, Tensor] = {}
        if kept and self._is_inside and not self.adapters_off:
            self.first_values = {name: p.detach().clone() for name, p in trained.items()}
        if kept and model is None and not self._is_inside:
            model = copy.deepcopy(policy).requires_grad_(False)
        self.model = model

    @contextmanager
    def as_module(self) -> Iterator[nn.Module]:
        """The module that computes the reference's log-probs, as long as the context lasts."""
        if self.adapters_off:
            with _without_adapters(self._policy):
                yield self._policy
        elif self.first_values:
            with _with_values(self._trained, self.first_values):
                yield self._policy
        else:
            yield self._policy if self.model is None else self.model

    def is_policy(self) -> bool:
        """Whether the reference is the policy as it was before its first update, and nothing of that is kept."""
        return self.model is None and not self.adapters_off and not self.first_values

    def open_cache(self, folder: str, arithmetic: str) -> ReferenceCache:
        """The log-probs that earlier runs left in ``folder`` for these weights and this arithmetic."""
        module = self._policy if self.model is None else self.model
        return ReferenceCache(folder, module, arithmetic, adapters_off=self.adapters_off)

    def load(self, first_values: Mapping[str, Tensor], adapters_off: bool, where: str) -> None:
        """Go on as a checkpoint's reference, which had these attributes; the policy may have come trained already.

        Raises:
            CheckpointError: neither the checkpoint nor the policy has the first values that are needed.
        """
        if not self._is_inside:
            return
        if self._kept and not adapters_off and not first_values and self.adapters_off:
            raise CheckpointError(
                f"{where}: the adapters were trained already when the run began, and neither the checkpoint nor model "
                "has what they were: a reference was not used. Pass model with the adapters that the run began with."
            )
        self.adapters_off = adapters_off
        if adapters_off or first_values:
            self.first_values = {n: value.to(self._trained[n].device) for n, value in first_values.items()}


def _check_apart(policy: nn.Module, trained: Mapping[str, Tensor], model: nn.Module, where: str) -> None:
    """Raise a WhetValueError where a module has memory that is trained, so that it would move with the policy."""
    if model is policy:
        raise WhetValueError(f"{where}: ref_model is the model itself. Pass a frozen copy, or None.")
    names = {p.untyped_storage().data_ptr(): name for name, p in trained.items() if p.numel()}
    shared = [names[at] for p in model.parameters() if (at := p.untyped_storage().data_ptr()) in names]
    if shared:
        raise WhetValueError(
            f"{where}: ref_model shares {shared[0]} with model, which trains it: get_peft_model, for example, "
            "puts adapters into the module that it is given. Leave ref_model out: Whet keeps what model is now itself."
        )


def _adapters_are_new(policy: nn.Module) -> bool:
    """Whether a PEFT model computes the same with its adapters off, and will while it is trained."""
    taken_out: set[nn.Module] = set()
    for layer in policy.modules():
        parts = [getattr(layer, name, None) for name in getattr(layer, "adapter_layer_names", ())]
        if parts and not _changes_nothing(layer):
            return False
        taken_out.update(module for part in parts if isinstance(part, nn.Module) for module in part.modules())
    return not any(p.requires_grad for m in policy.modules() if m not in taken_out for p in m.parameters(recurse=False))


def _changes_nothing(layer: Any) -> bool:
    """Whether one of PEFT's layers computes what it would without its active adapters; False where that is not known.

    LoRA does while a factor is 0, which it is only before the first update; a copy of a module while it equals it.
    """
    if hasattr(layer, "modules_to_save"):
        active = [layer.modules_to_save[name] for name in layer.active_adapters if name in layer.modules_to_save]
        return all(_are_equal(module, layer.original_module) for module in active)
    if not isinstance(getattr(layer, "lora_B", None), nn.ModuleDict) or layer.merged:
        return False
    ups = [layer.lora_B[name] for name in layer.active_adapters if name in layer.lora_B]
    tables = [layer.lora_embedding_A[name] for name in layer.active_adapters if name in layer.lora_embedding_A]
    return not any(bool(p.any()) for p in [*tables, *(p for up in ups for p in up.parameters())])


def _are_equal(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@contextmanager
def _without_adapters(policy: Any) -> Iterator[None]:
    """Adapters off for a while. PEFT has all of the active ones train as it enables them: each is as it was instead."""
    flags = [(p, p.requires_grad) for p in policy.parameters()]
    disabled = policy.disable_adapter()
    try:
        with deferred_signals():
            disabled.__enter__()
        yield
    finally:
        with deferred_signals():
            disabled.__exit__(None, None, None)
            for p, requires_grad in flags:
                p.requires_grad_(requires_grad)


@contextmanager
def _with_values(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Other values in the parameters' place for a while; the memory of each is exchanged, not written."""
    own = {name: p.data for name, p in parameters.items()}
    try:
        with deferred_signals():
            _exchange(parameters, values)
        yield
    finally:
        with deferred_signals():
            _exchange(parameters, own)


def _exchange(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, p in parameters.items():
        p.data = values[name]


class ReferenceSums:
    """The reference's summed log-probs of pairs, by their token ids: kept over epochs, and in checkpoints."""

    def __init__(self) -> None:
        self._sums: dict[str, Sums] = {}

    def get(self, row: Sequence[Sequence[int]]) -> Sums | None:
        """The sums of a row; None: not known."""
        return self._sums.get(row_digest(row)) if self._sums else None

    def add(
        self,
        rows: Sequence[TokenRow],
        compute: Callable[[list[TokenRow]], list[Sums]],
        batch_size: int,
        open_cache: Callable[[], ReferenceCache] | None,
        ranks: Ranks,
    ) -> list[Sums]:
        """The sums of all rows; ``compute``, in batches, gives those that neither this nor the cache has.

        Rank 0 alone reads the cache and writes it.
        """
        keys = [row_digest(row) for row in rows]
        unknown = {key: row for key, row in zip(keys, rows, strict=True) if key not in self._sums}
        cache: ReferenceCache | None = None

        def look_up(opened: Callable[[], ReferenceCache]) -> dict[str, Sums]:
            nonlocal cache
            cache = opened()
            return {key: sums for key, row in unknown.items() if (sums := cache[row])}

        if open_cache and unknown:
            self._sums |= ranks.broadcast_from_first(partial(look_up, open_cache))
        left = [(key, row) for key, row in unknown.items() if key not in self._sums]
        for start in range(0, len(left), batch_size):
            batch = dict(left[start : start + batch_size])
            new = compute(list(batch.values()))
            if cache:
                cache.add(zip(batch.values(), new, strict=True))
            self._sums |= zip(batch, new, strict=True)
        return [self._sums[key] for key in keys]

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint: digests of the rows (N, 16) uint8, and chosen and rejected sums (N, 2) float64."""
        if not self._sums:
            return {}
        rows = torch.tensor([list(bytes.fromhex(key)) for key in self._sums], dtype=torch.uint8)
        return {"rows": rows, "sums": torch.tensor(list(self._sums.values()), dtype=torch.float64)}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Know what ``tensors`` returned."""
        if tensors:
            rows, sums = tensors["rows"].tolist(), tensors["sums"].tolist()
            self._sums = {bytes(key).hex(): (c, r) for key, (c, r) in zip(rows, sums, strict=True)}
