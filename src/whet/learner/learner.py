"""Trains low-rank adapters and norms of a model whose packed weights stay frozen, natively: torch is not imported.

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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np

from whet import _core
from whet.config.kept_tokens import KeptTokens
from whet.config.settings import ComputeDtype
from whet.errors import WhetTypeError, WhetValueError, check_choice, check_temperature
from whet.learner.batch import (
    OWN_CHOICE,
    Divergences,
    Logprobs,
    Neftune,
    PackedBatch,
    check_rows,
    pack_batch,
    place_experts,
    select_candidates,
    select_kept,
)
from whet.learner.moments import make_moments, moment_seed
from whet.learner.rounding import RoundedBase
from whet.learner.trained import TrainedAdapter, TrainedModule, TrainedNorm
from whet.models.adapter_files import (
    MAGNITUDE,
    SCORE,
    Dora,
    check_reward_head,
    has_reward_head,
    match_pattern,
    peft_config,
    read_peft_config,
    read_peft_modules,
    wrapper_of,
    write_peft,
)
from whet.models.base_record import check_record, read_binding, write_record
from whet.models.formats import FILE_TYPES, TABLE, FileType
from whet.models.hub import repository_of
from whet.models.lora import Adapted, LoraInit, LoraSettings, choose_adapted, core_matrix, read_adapted
from whet.models.packed_base import PackedBase, pack_base
from whet.models.sizes import slot_bytes
from whet.models.slots import (
    LoRA,
    ModelSource,
    NormValues,
    WeightLocation,
    is_norm,
    locate_norm,
    with_expert_modules,
)
from whet.models.sources.gguf_container import GGUFFile
from whet.models.sources.pretrained import open_pretrained
from whet.system.memory import choose_activation_bytes, unused_bytes

_LOGPROBS, _DIVERGENCE, _HIDDEN, _REWARDS = "logprobs", "divergence", "hidden_states", "rewards"
"""Forward passes that ``backward`` may follow."""


class _Rows(NamedTuple):
    """A packed batch, and the M tokens of it that count.

    Attributes:
        packed: the batch.
        arrays: arguments of the core's forward pass.
        targets: (M,): the token.
        rows: (M,): its completion.
        steps: (M,): its index in the completion.
        mask: (B, C).
    """

    packed: PackedBatch
    arrays: dict[str, Any]
    targets: np.ndarray
    rows: np.ndarray
    steps: np.ndarray
    mask: np.ndarray

    def scatter(self, values: np.ndarray) -> np.ndarray:
        """Return values (M, ...) at their completions and steps, (B, C, ...), and 0 elsewhere."""
        out = np.zeros((*self.mask.shape, *values.shape[1:]), np.float32)
        out[self.rows, self.steps] = values
        return out


class Learner:
    """Low-rank adapters and norms of a packed base, their forward and backward passes, and an AdamW step.

    One thread at a time. Results have the same bits for every number of threads and instruction set, and so have sums
    of gradients for every order of a batch's rows, as long as rows with equal prompts and completions have equal
    gradients.

    Args:
        model: a Hugging Face folder, a GGUF file, or a ``PackedBase`` to share with engines.
        adapter: a folder of adapters to train further, saved by PEFT or Whet; determines rank, alpha and layers.
        lora_rank: rank of every adapter. Default: 16.
        lora_alpha: adapters are multiplied by lora_alpha / lora_rank. Default: lora_rank.
        use_rslora: multiply by lora_alpha / sqrt(lora_rank) instead (Kalajdzievski 2023).
        use_dora: also train the length of each row of W + scaling B A (DoRA, Liu et al. 2024); without lora_dropout.
            They are initially the lengths of W's rows; |W + scaling B A| is constant in the gradients (section 4.3).
        rank_pattern: ranks of some modules, by regular expressions of ends of their names, as in PEFT.
        alpha_pattern: the same for lora_alpha.
        lora_init: "zero": A is random and B is zero. "pissa": scaling B A is the sum of the largest lora_rank singular
            components of the matrix, which is subtracted again by a second adapter that does not train (PiSSA, Meng et
            al. 2024). Both are one adapter of twice the rank, which is what ``save_pretrained`` writes.
        lora_dropout: probability in [0, 1) with which ``logprobs`` with a ``dropout_seed`` sets an element of an
            adapter's input to 0; the others are divided by 1 - lora_dropout.
        lora_layers: modules with an adapter, as PEFT's ``target_modules``. Default: all linear layers except the head.
        modules_to_save: ends of names of norms whose weights and biases are trained too: "norm" is every norm of
            Llama; and "score", the head of a reward model, which is initially 0. Default: none.
        weights: format of the packed weights, as for ``Engine``.
        qat: file type of ``whet export``, such as "q4_0": the passes compute with the numbers that a file of this type
            has after the adapters were merged (quantisation-aware training, ``whet.learner.rounding``). Needs plain
            LoRA without dropout. ``adapters=False``, the usual reference, is the base before rounding.
        compute: of products: "bfloat16" rounds weights and activations, sums are float32. "auto": bfloat16 if the
            processor has bfloat16 products and the weights are not float32.
        max_position: tokens of the longest row, for which frequencies that depend on it are resolved. Default: the
            model's.
        activation_bytes: memory in which a forward pass keeps activations of layers for the backward pass, besides the
            inputs of all layers; the other layers are computed again, with the same bits. Default: a quarter of the
            unused memory.
        seed: of the initial A; B is zero.

    Attributes:
        base: the packed base.
        adapters: in a fixed order.
        norms: the trained norms, in a fixed order.
        head: the head of a reward model, (1, hidden_dim); None: there is none.
        lora_dropout: the setting, or the folder's.
        compute: "float32" or "bfloat16".
        qat: the setting.
        activation_bytes: of the next step.
        moments: AdamW's first and second moment of each array of ``parameters``, in 8 bits their codes and scales;
            empty before its first step.
        n_updates: number of AdamW steps.

    Raises:
        WhetValueError: a model, format, layer or rank that does not fit, with the fix.
        CheckpointError: the adapters are damaged, of another kind than LoRA, or of another model or base.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | GGUFFile | PackedBase,
        *,
        adapter: str | os.PathLike[str] | None = None,
        lora_rank: int | None = None,
        lora_alpha: float | None = None,
        lora_layers: Sequence[str] = (),
        lora_dropout: float | None = None,
        lora_init: LoraInit = "zero",
        rank_pattern: Mapping[str, int] = MappingProxyType({}),
        alpha_pattern: Mapping[str, float] = MappingProxyType({}),
        modules_to_save: Sequence[str] = (),
        use_rslora: bool = False,
        use_dora: bool = False,
        weights: str | None = None,
        qat: FileType | None = None,
        compute: ComputeDtype = "auto",
        max_position: int | None = None,
        activation_bytes: int | None = None,
        seed: int = 0,
    ) -> None:
        where = "Learner"
        if activation_bytes is not None and activation_bytes < 0:
            raise WhetValueError(f"{where}: activation_bytes is {activation_bytes}, expected at least 0, or None.")
        check_choice(where, "compute", compute, ComputeDtype)
        if isinstance(model, PackedBase):
            for name, value in (("weights", weights), ("max_position", max_position)):
                if value is not None:
                    raise WhetValueError(f"{where}: {name} is {value!r}, but the base is packed already. Pass None.")
            source = model.source()
        else:
            source = open_pretrained(model, max_position=max_position)
        if adapter is None:
            rank = 16 if lora_rank is None else lora_rank
            has_head, norms = SCORE in modules_to_save, [name for name in modules_to_save if name != SCORE]
            check_choice(where, "lora_init", lora_init, LoraInit)
            if use_dora and lora_init != "zero":
                raise WhetValueError(
                    f"{where}: lora_init is {lora_init!r}, and with use_dora only 'zero' is supported."
                )
            new = LoraSettings(rank, lora_layers, norms, rank_pattern, alpha_pattern, lora_init, use_dora)
            adapted = choose_adapted(source, new, where)
            self.lora_dropout = _check_dropout(0.0 if lora_dropout is None else lora_dropout, where)
        else:
            given = {"lora_rank": lora_rank, "lora_alpha": lora_alpha, "lora_layers": lora_layers or None}
            given |= {"use_rslora": use_rslora or None, "use_dora": use_dora or None, "lora_dropout": lora_dropout}
            given |= {"modules_to_save": modules_to_save or None, "rank_pattern": rank_pattern or None}
            given |= {"alpha_pattern": alpha_pattern or None, "lora_init": None if lora_init == "zero" else lora_init}
            for name, value in given.items():
                if value is not None:
                    raise WhetValueError(
                        f"{where}: {name} is {value!r}, but the adapter's folder determines it. Omit it."
                    )
            adapted, has_head = read_adapted(adapter, source, where), has_reward_head(adapter)
            settings = read_peft_config(where, Path(adapter) / "adapter_config.json")
            self.lora_dropout = _check_dropout(settings.get("lora_dropout") or 0.0, f"{where}: {adapter}")
        if obstacle := find_unlearnable(adapted):
            raise WhetValueError(f"{where}: {obstacle}. Train it with torch.")
        if self.lora_dropout and any(".experts_" in location.weight for location, _ in adapted.factors):
            raise WhetValueError(
                f"{where}: lora_dropout is {self.lora_dropout}, and adapters of experts have none, as in PEFT. Pass 0, "
                f"or remove experts from lora_layers."
            )
        if self.lora_dropout and adapted.use_dora:
            raise WhetValueError(
                f"{where}: lora_dropout is {self.lora_dropout}, and DoRA has none here. Pass 0, or train it with torch."
            )
        if qat is not None:
            check_choice(where, "qat", qat, FileType)
            _check_rounding(qat, adapted.use_dora, self.lora_dropout, where)
        locations = dict.fromkeys(with_expert_modules(source.targets).values())
        places = {location: i for i, location in enumerate(locations)}
        factors = sorted(adapted.factors, key=lambda factor: places[factor[0]])
        self.base = model if isinstance(model, PackedBase) else pack_base(source, weights=weights, where=where)
        if adapter is not None and (record := read_binding(adapter, source, weights is not None, where)) is not None:
            check_record(record, self.base, where, os.fspath(adapter))
        self.qat = qat
        self._rounded = None if qat is None else RoundedBase(self.base, qat, where)
        packed = self._trained_base
        if compute == "auto":
            is_narrow = "bf16" in _core.isa() and packed.summary != "float32"
            compute = "bfloat16" if is_narrow else "float32"
        self.compute = compute
        self._core = _core.Learner(packed.core, compute == "bfloat16", qat is not None)
        # Computes without adapters.
        self._base_core = self._core if qat is None else _core.Learner(self.base.core, compute == "bfloat16", False)
        self._last_core = self._core  # of the last forward pass
        rng = np.random.default_rng(seed)

        def alpha_of(location: WeightLocation, rank: int) -> float:
            trained = rank // 2 if lora_init == "pissa" else rank
            alpha = match_pattern(alpha_pattern, location.name, trained if lora_alpha is None else lora_alpha)
            return alpha * rank / (math.sqrt(trained) if use_rslora else trained)

        self.adapters = tuple(
            TrainedAdapter(location, rank, alpha_of(location, rank), rng, self.base.config)
            for location, rank in factors
        )
        for each in self.adapters if lora_init == "pissa" else ():
            each.start_principal(self.base, rng, where)
        self.norms = tuple(
            TrainedNorm(location, self.base) for location in sorted(adapted.whole, key=places.__getitem__)
        )
        self.head = TrainedModule(SCORE, np.zeros((1, self.base.config.hidden_dim), np.float32)) if has_head else None
        if adapter is not None:
            self._load(adapter)
        index = 0
        for each in self.adapters:
            each.wrapper = wrapper_of(each.name, {other.name for other in self.adapters})
            layer, target = cast(tuple[int, Any], core_matrix(each.location.weight))
            n = each.b.shape[1]
            for e in range(each.n_experts):
                first_row = each.location.first_row + e * n
                index = self._core.add_adapter(layer=layer, target=target, first_row=first_row, n=n, rank=each.rank)
            if adapted.use_dora and each.magnitude is None:
                each.add_magnitude(self._row_lengths(index, each), is_original=True)
        for values in chain.from_iterable(norm.locate() for norm in self.norms):
            self._core.add_norm(*values)
        self._activation_bytes = activation_bytes
        self.update()
        self._rewarded = np.zeros((0, 0), np.float32)  # hidden states of the last rewards
        self._kept: tuple[str, _Rows] | None = None  # head and batch of the last forward pass that backward may follow
        self.moments: list[tuple[np.ndarray, ...]] = []
        self.n_updates = 0

    @property
    def _trained_base(self) -> PackedBase:
        """The weights that are computed with the adapters."""
        return self.base if self._rounded is None else self._rounded.packed

    def _load(self, folder: str | os.PathLike[str]) -> None:
        """Load the values of saved adapters and norms."""
        saved: dict[str, Any] = read_peft_modules(folder, head=self.head is not None)
        if self.head is not None:
            self.head.parameters = (check_reward_head(saved[SCORE], self.base.config.hidden_dim, "Learner", folder),)
        for adapter in self.adapters:
            names = (adapter.name, *adapter.location.names)
            found = next(saved[name] for name in names if name in saved)
            if isinstance(found, Dora):
                found, magnitude = found
                adapter.add_magnitude(adapter.outputs_of_module(np.asarray(magnitude, np.float32).reshape(-1)))
            a, b, scaling = found
            adapter.alpha = scaling * adapter.rank
            adapter.a[:], adapter.b[:] = adapter.from_module(a, b)
        for norm in self.norms:
            vectors = next(saved[name] for name in norm.location.names if name in saved)
            locate_norm(self.base.config, norm.location, vectors, f"Learner: {folder}")  # checks their shapes
            norm.parameters = tuple(vectors[part] for part in norm.parts)

    @property
    def trained(self) -> tuple[TrainedAdapter | TrainedModule, ...]:
        """The adapters, then the modules that are trained whole: norms and the head."""
        return *self.adapters, *self.whole

    @property
    def whole(self) -> tuple[TrainedModule, ...]:
        """The modules that are trained whole."""
        return self.norms if self.head is None else (*self.norms, self.head)

    @property
    def parameters(self) -> list[np.ndarray]:
        """The trained arrays of ``trained``."""
        return [array for each in self.trained for array in each.parameters]

    @property
    def gradients(self) -> list[np.ndarray]:
        """The gradient of each array of ``parameters``."""
        return [array for each in self.trained for array in each.gradients]

    def update(self) -> None:
        """Pack the parameters for the next ``logprobs``."""
        factors = [(each, *part) for each in self.adapters for part in each.parts(each.a, each.b)]
        for i, (each, a, b) in enumerate(factors):
            self._core.set_factors(i, a, b, each.scaling)
            if each.magnitude is not None:
                self._core.set_magnitude(i, each.magnitude, self._row_lengths(i, each))
        for i, values in enumerate(chain.from_iterable(norm.locate() for norm in self.norms)):
            self._core.set_norm(i, values.values)
        if self._rounded is not None:
            self._rounded.update([each for each in self.source().adapters if isinstance(each, LoRA)])
        self.limit_activations(self._activation_bytes)

    def _row_lengths(self, index: int, adapter: TrainedAdapter) -> np.ndarray:
        """Return the lengths of the rows of W + scaling B A, (n,) float64."""
        lengths = np.empty(adapter.b.shape[1])
        self._core.row_lengths(index, adapter.a, adapter.b, adapter.scaling, lengths)
        return lengths

    def limit_activations(self, n_bytes: int | None) -> None:
        """Replace the constructor's ``activation_bytes``."""
        self._activation_bytes = n_bytes
        self.activation_bytes = choose_activation_bytes(n_bytes, unused_bytes())

    def logprobs(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        *,
        completion_mask: Sequence[Sequence[bool]] | None = None,
        kept_tokens: Sequence[KeptTokens | None] | None = None,
        candidates: Sequence[Any] | None = None,
        temperature: float = 1.0,
        return_entropy: bool = False,
        return_mean: bool = False,
        adapters: bool = True,
        keep: bool = True,
        dropout_seed: int | None = None,
        experts: Sequence[Any] | None = None,
        neftune: Neftune | None = None,
    ) -> Logprobs:
        """Return the log-probability of each completion token, given its prompt and the tokens before it.

        ``log pi(y_t | x, y_<t) = z_t[y_t] / T - logsumexp(z_t / T)``, ``H_t = -sum_v p_v log p_v``,
        ``M_t = sum_v log p_v / V``; accumulated in float64 over tiles of the vocabulary.

        Args:
            prompt_ids: B rows of token ids, at least one token each.
            completion_ids: B rows of token ids; a row may be empty.
            completion_mask: for each completion token, whether it counts; None: all do.
            kept_tokens: for each completion, the tokens that each token was drawn from (``Completion.kept_tokens``):
                sums over v are sums over them. None: the whole vocabulary.
            candidates: for each completion, (T, k) token ids whose log-probs are returned instead of its tokens'
                own, such as a teacher's most probable tokens. Without kept_tokens.
            temperature: T, divides the logits.
            return_entropy: also compute H.
            return_mean: also compute M, as label smoothing needs. Without kept_tokens.
            adapters: whether to apply the adapters and norms; False: the base.
            keep: whether ``backward`` follows.
            dropout_seed: seed of ``lora_dropout``, such as the number of the step, modulo 2^64. The elements that are
                dropped depend on it, on the module, and on the tokens up to the current one: a prompt that rows share
                is computed once, and the order of rows does not matter. None: no dropout.
            experts: for each row, the ids of the experts that a sampler chose, (T, mixtures, k) for the last T of the
                row's inputs, which are all tokens except the last, or None (``Completion.experts``). They replace the
                choice of the model, whose router still gives their weights (R3, Ma et al. 2025, arXiv:2510.11370).
                Inputs of a prompt that rows share have the experts of one of the rows. None: the model's choice.
            neftune: noise on the embeddings; None: none.

        Raises:
            WhetValueError: rows, tokens or a mask that do not fit the model or each other.
        """
        where = "Learner.logprobs"
        check_temperature(where, temperature)
        dropout = self._dropout(dropout_seed, adapters, where)
        batch = self._pack(prompt_ids, completion_ids, completion_mask, kept_tokens, where, experts)
        vocab_size = self.base.config.vocab_size
        kept = select_kept(kept_tokens, batch.rows, batch.steps, batch.targets, vocab_size, where)
        if kept_tokens is not None and (candidates is not None or return_mean):
            name = "return_mean" if candidates is None else "candidates"
            raise WhetValueError(f"{where}: {name} needs the whole vocabulary. Omit it, or kept_tokens.")
        targets = batch.targets[:, None]
        if candidates is not None:
            targets = select_candidates(candidates, completion_ids, batch.rows, batch.steps, vocab_size, where)
        values = np.empty(targets.shape, np.float32)
        entropy, mean = (
            np.empty(len(targets), np.float32) if wanted else None for wanted in (return_entropy, return_mean)
        )
        self._forward(
            batch, targets=targets, kept_offsets=None if kept is None else kept.offsets,
            kept_words=None if kept is None else kept.words, temperature=temperature, logprobs=values, entropy=entropy,
            mean=mean, neftune=neftune, adapters=adapters, keep=keep, head=_LOGPROBS, **dropout,
        )  # fmt: skip
        scattered = batch.scatter(values if candidates is not None else values[:, 0])
        entropy, mean = (None if x is None else batch.scatter(x) for x in (entropy, mean))
        replaced = None
        if experts is not None:
            n_given = np.count_nonzero(batch.arrays["experts"][..., 0] != OWN_CHOICE)
            replaced = self._last_core.n_replaced / n_given if n_given and len(batch.rows) else 0.0
        return Logprobs(scattered, entropy, batch.mask, mean, replaced)

    def divergence(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        teacher: Learner,
        *,
        beta: float = 0.5,
        temperature: float = 1.0,
        completion_mask: Sequence[Sequence[bool]] | None = None,
        teacher_prompt_ids: Sequence[Sequence[int]] | None = None,
        teacher_adapters: bool = True,
        keep: bool = True,
    ) -> Divergences:
        """Return the divergence of each token's distribution from a teacher's (generalised JSD; Agarwal et al. 2024).

        With the distributions p of this learner and q of the teacher, both at temperature T, and m = (1 - beta) p +
        beta q: ``D = beta KL(q || m) + (1 - beta) KL(p || m)``; for beta 0 KL(q || p), for beta 1 KL(p || q). Logits of
        both exist in tiles of the vocabulary.

        Args:
            prompt_ids: B rows of token ids, at least one token each.
            completion_ids: B rows of token ids; a row may be empty.
            teacher: a learner with the same vocabulary, whose weights and adapters do not change; may be this one.
            beta: from 0 to 1.
            temperature: T, divides the logits of both.
            completion_mask: for each completion token, whether it counts; None: all do.
            teacher_prompt_ids: prompts of the teacher, before the same completions; None: ``prompt_ids``.
            teacher_adapters: whether to apply the teacher's adapters; False: its base.
            keep: whether ``backward`` follows.

        Raises:
            WhetValueError: as ``logprobs``, or another vocabulary.
        """
        where = "Learner.divergence"
        check_temperature(where, temperature)
        if not isinstance(teacher, Learner):
            raise WhetTypeError(f"{where}: teacher is a {type(teacher).__name__}, expected a Learner.")
        if not 0 <= beta <= 1:
            raise WhetValueError(f"{where}: beta is {beta!r}, expected a number from 0 to 1.")
        sizes = self.base.config.vocab_size, teacher.base.config.vocab_size
        if sizes[0] != sizes[1]:
            raise WhetValueError(
                f"{where}: the vocabulary has {sizes[0]:,} tokens, and the teacher's {sizes[1]:,}. Pass a teacher with "
                f"the same tokenizer."
            )
        batch = teachers = self._pack(prompt_ids, completion_ids, completion_mask, None, where)
        if teacher_prompt_ids is not None:
            teachers = teacher._pack(teacher_prompt_ids, completion_ids, completion_mask, None, where)
        teacher_hidden = teacher._hidden(teachers, adapters=teacher_adapters, keep=False)
        if teachers is not batch:  # other prompts, another order of the tokens
            places = np.empty(len(batch.rows), np.int64)
            places[np.lexsort((batch.steps, batch.rows))] = np.lexsort((teachers.steps, teachers.rows))
            teacher_hidden = teacher_hidden[places]
        values = np.empty(len(batch.rows), np.float32)
        self._forward(batch, adapters=True, keep=keep, head=_DIVERGENCE)
        if len(values):
            self._core.divergence(
                teacher=(teacher._trained_base if teacher_adapters else teacher.base).core,
                teacher_hidden=teacher_hidden,
                temperature=temperature,
                beta=beta,
                out=values,
            )
        return Divergences(batch.scatter(values), batch.mask)

    def hidden_states(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        *,
        adapters: bool = True,
        keep: bool = True,
        dropout_seed: int | None = None,
    ) -> np.ndarray:
        """Return the final hidden state (B, hidden_dim) after the last token of each row, for a custom head.

        A scalar head has values ``h @ w + b``, and ``backward`` takes the gradient of the hidden states, g w.

        Args:
            prompt_ids: B rows of token ids, at least one token each; equal prompts are computed once.
            completion_ids: B rows of token ids; a row may be empty.
            adapters: whether to apply the adapters; False: the base.
            keep: whether ``backward`` follows.
            dropout_seed: as in ``logprobs``.

        Raises:
            WhetValueError: as ``logprobs``.
        """
        where = "Learner.hidden_states"
        dropout = self._dropout(dropout_seed, adapters, where)
        ends = [[*map(int, row), 0] for row in completion_ids]  # the state after a token predicts the next one
        mask = [[False] * (len(row) - 1) + [True] for row in ends]
        batch = self._pack(prompt_ids, ends, mask, None, where)
        hidden = self._hidden(batch, adapters=adapters, keep=keep, **dropout)
        out = np.empty_like(hidden)
        out[batch.rows] = hidden
        return out

    def rewards(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        *,
        keep: bool = True,
        dropout_seed: int | None = None,
    ) -> np.ndarray:
        """Return the rewards (B,) float64 of rows: the product of the head and the hidden state after the last token.

        ``backward`` takes their gradients, (B,), and adds the gradient of the head too.

        Args:
            prompt_ids: as in ``hidden_states``.
            completion_ids: as in ``hidden_states``.
            keep: whether ``backward`` follows.
            dropout_seed: as in ``logprobs``.

        Raises:
            WhetValueError: as ``logprobs``, or there is no head.
        """
        if self.head is None:
            raise WhetValueError('Learner.rewards: there is no head. Make the learner with modules_to_save=["score"].')
        hidden = self.hidden_states(prompt_ids, completion_ids, keep=keep, dropout_seed=dropout_seed)
        hidden /= np.float32(self.base.config.logits_scale)  # which only an LM head has
        if self._kept is not None:
            self._kept, self._rewarded = (_REWARDS, self._kept[1]), hidden
        return (hidden * self.head.parameters[0]).sum(1, dtype=np.float64)

    def _dropout(self, seed: int | None, adapters: bool, where: str) -> dict[str, Any]:
        """Return the core's arguments of dropout."""
        if seed is not None and not (self.lora_dropout and adapters):
            reason = "lora_dropout is 0" if adapters else "adapters is False"
            raise WhetValueError(f"{where}: dropout_seed is {seed} and has no effect, because {reason}. Omit it.")
        return {"seed": (seed or 0) % 2**64, "dropout": 0.0 if seed is None else self.lora_dropout}

    def _hidden(self, batch: _Rows, *, adapters: bool, keep: bool, **dropout: Any) -> np.ndarray:
        """Return the hidden states that predict the counted tokens of a batch."""
        out = np.empty((len(batch.rows), self.base.config.hidden_dim), np.float32)
        self._forward(batch, adapters=adapters, keep=keep, head=_HIDDEN, **dropout)
        if len(out):
            self._last_core.hidden(out)
        return out

    def _forward(
        self, batch: _Rows, *, adapters: bool, keep: bool, head: str, neftune: Neftune | None = None, **values: Any
    ) -> None:
        """Run the forward pass of a batch, and log-probs for ``targets``."""
        self._kept = None
        none = {
            "targets": np.empty((len(batch.rows), 0), np.int64),
            "logprobs": np.empty((len(batch.rows), 0), np.float32),
        }
        none |= dict.fromkeys(("kept_offsets", "kept_words", "entropy", "mean")) | {"temperature": 1.0}
        none |= {"dropout": 0.0, "seed": 0}
        noise = None if neftune is None else neftune.draw(batch.packed, self.base.config.hidden_dim)
        if len(batch.rows):
            self._last_core = self._core if adapters else self._base_core
            self._last_core.forward(
                **batch.arrays, **(none | values), with_adapters=adapters, keep=keep,
                activation_bytes=self.activation_bytes, noise=noise,
            )  # fmt: skip
        if keep and adapters:
            self._kept = head, batch

    def backward(self, grad: Any, grad_entropy: Any = None, grad_mean: Any = None) -> None:
        """Add the gradients of the parameters to ``gradients``; follows a forward pass, once.

        Args:
            grad: gradient of the loss with respect to the ``logprobs`` of ``logprobs``, the ``values`` of
                ``divergence``, ``hidden_states``, or ``rewards``, in its shape; ignored where its mask is False.
            grad_entropy: of ``logprobs``, the same for ``entropy``; None: the loss does not depend on it.
            grad_mean: of ``logprobs``, the same for ``mean``.

        Raises:
            WhetTypeError: no forward pass precedes, or it was computed without adapters or ``keep``.
            WhetValueError: another shape, or NaN or infinity.
        """
        where = "Learner.backward"
        if self._kept is None:
            raise WhetTypeError(f"{where}: it follows logprobs(), with adapters and keep, once. Call logprobs() first.")
        head, batch = self._kept
        if head == _REWARDS:
            grad = self._backward_head(grad)
            head = _HIDDEN
        found = [
            None if given is None else self._select_gradient(name, given, head, batch)
            for name, given in (("grad", grad), ("grad_entropy", grad_entropy), ("grad_mean", grad_mean))
        ]
        if head != _LOGPROBS and (grad_entropy is not None or grad_mean is not None):
            raise WhetValueError(f"{where}: grad_entropy and grad_mean follow logprobs(), not {head}(). Omit them.")
        self._kept = None
        if not len(batch.rows):
            return
        gradients = {
            "grads": [part for adapter in self.adapters for part in adapter.gradient_parts()],
            "norm_grads": [gradient for norm in self.norms for gradient in norm.gradients],
        }
        if head == _LOGPROBS:
            values = cast(np.ndarray, found[0])
            self._core.backward(
                grad_logprobs=values.reshape(len(values), -1),
                grad_entropy=found[1],
                grad_mean=found[2],
                **gradients,
            )
        elif head == _DIVERGENCE:
            self._core.backward_divergence(grad=found[0], **gradients)
        else:
            self._core.backward_hidden(grad=found[0], **gradients)
        for adapter in self.adapters:
            adapter.drop_fixed_gradients()

    def _backward_head(self, grad: Any) -> np.ndarray:
        """Add the gradient of the head from the gradient of the last rewards, (B,), and return the hidden states'."""
        of_rewards, head = np.asarray(grad, np.float32), cast(TrainedModule, self.head)
        if of_rewards.shape != self._rewarded.shape[:1] or not np.isfinite(of_rewards).all():
            raise WhetValueError(
                f"Learner.backward: grad is {of_rewards.shape}, expected {self._rewarded.shape[:1]} finite numbers, as "
                f"the result of rewards()."
            )
        column = of_rewards[:, None]
        head.gradients[0][:] += (column * self._rewarded).sum(0, dtype=np.float64).astype(np.float32)
        return column * head.parameters[0] / np.float32(self.base.config.logits_scale)

    def _select_gradient(self, name: str, grad: Any, head: str, batch: _Rows) -> np.ndarray:
        """Return the gradients of the counted tokens of the last forward pass."""
        where, values = "Learner.backward", np.asarray(grad, np.float32)
        shape = (len(batch.mask), self.base.config.hidden_dim) if head == _HIDDEN else batch.mask.shape
        if values.shape[:2] != shape or values.ndim > (3 if head == _LOGPROBS and name == "grad" else 2):
            raise WhetValueError(
                f"{where}: {name} has shape {values.shape}, expected {shape}, as the result of {head}()."
            )
        values = np.ascontiguousarray(values[batch.rows] if head == _HIDDEN else values[batch.rows, batch.steps])
        if not np.isfinite(values).all():
            raise WhetValueError(f"{where}: {name} holds NaN or infinity. Check the loss of this batch.")
        return values

    def _pack(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        completion_mask: Sequence[Sequence[bool]] | None,
        kept_tokens: Sequence[KeptTokens | None] | None,
        where: str,
        experts: Sequence[Any] | None = None,
    ) -> _Rows:
        """Check and pack a batch, in an order that depends only on its content, so that gradients are summed in it."""
        prompts, completions = ([list(map(int, row)) for row in rows] for rows in (prompt_ids, completion_ids))
        mask = self._check_rows(prompts, completions, completion_mask, kept_tokens, where)
        order = sorted(range(len(prompts)), key=lambda i: (prompts[i], completions[i]))
        batch = pack_batch([prompts[i] for i in order], [completions[i] for i in order])
        rows, steps = np.asarray(order, np.int64)[batch.rows], batch.steps
        counted = mask[rows, steps]
        placed = None
        if experts is not None:
            if len(experts) != len(prompts):
                raise WhetValueError(f"{where}: experts has {len(experts)} entries for {len(prompts)} rows.")
            placed = place_experts(
                [experts[i] for i in order], [prompts[i] for i in order], batch, self.base.config, where
            )
        arrays: dict[str, Any] = {
            "tokens": batch.input_ids, "positions": batch.position_ids, "group_offsets": batch.group_offsets,
            "q_offsets": batch.q_offsets, "k_offsets": batch.k_offsets, "key_rows": batch.key_rows,
            "reader_offsets": batch.reader_offsets, "readers": batch.readers,
            "predictors": batch.hidden_rows[counted], "experts": placed,
        }  # fmt: skip
        return _Rows(batch, arrays, batch.targets[counted], rows[counted], steps[counted], mask)

    def source(self) -> ModelSource:
        """Return base, adapters and norms as a model, for ``Engine.from_model``, ``sync`` and ``add_adapter``."""
        adapters: list[LoRA | NormValues] = [
            LoRA(each.location.weight, each.location.first_row + i * b.shape[1], a, b.T, each.scaling, each.magnitude)
            for each in self.adapters
            for i, (a, b) in enumerate(each.parts(each.a, each.b))
        ]
        adapters += chain.from_iterable(norm.locate() for norm in self.norms)
        return self.base.source()._replace(adapters=tuple(adapters))

    @property
    def n_parameters(self) -> int:
        """Number of trained parameters."""
        return sum(array.size for array in self.parameters)

    @property
    def n_kept_layers(self) -> int:
        """Number of layers whose activations the last ``logprobs`` kept for the backward pass."""
        return self._core.n_kept_layers

    @property
    def kept_bytes(self) -> int:
        """Memory of the activations that are kept, in bytes; ``update`` releases it."""
        return self._core.kept_bytes

    def memory_blocks(self) -> Iterator[tuple[str, Hashable, int]]:
        """Yield the memory of the base, and of its rounded copy, for ``whet.memory_report``."""
        yield from self.base.memory_blocks()
        if self._rounded is not None:
            yield from self._rounded.packed.memory_blocks()

    def packed_bytes(self) -> int:
        """Size of the factors as packed for products, in bytes."""
        format = "bfloat16" if self.compute == "bfloat16" else "float32"
        parts = chain.from_iterable(each.parts(each.a, each.b) for each in self.adapters)
        shapes = [(a.shape, b.shape[::-1]) for a, b in parts]
        return sum(slot_bytes(a, format) + slot_bytes(b, format) for a, b in shapes)

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        for grad in self.gradients:
            grad.fill(0)

    def grad_norm(self) -> float:
        """Return the 2-norm of all gradients together, accumulated in float64."""
        return math.sqrt(sum(float(np.square(grad, dtype=np.float64).sum()) for grad in self.gradients))

    def step(
        self,
        lr: float = 1e-4,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = 1.0,
        lr_ratio: float = 1.0,
        in_8_bits: bool = False,
    ) -> float:
        """Update the parameters by AdamW (Loshchilov & Hutter 2019), set the gradients to zero, and return their norm.

        Args:
            weight_decay: of adapters and the head; norms do not decay.
            max_grad_norm: gradients with a larger norm are scaled to it; None: never.
            lr_ratio: learning rate of the matrices B, as a multiple of ``lr`` (LoRA+, Hayou et al. 2024).
            in_8_bits: keep moments in 8 bits, from the first step on (``whet.learner.moments``).

        Raises:
            WhetValueError: the gradients hold NaN or infinity; nothing is changed.
        """
        norm = self.grad_norm()
        if not math.isfinite(norm):
            raise WhetValueError(
                "Learner.step: the gradients hold NaN or infinity. Call zero_grad() and check the loss."
            )
        scale = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norm + 1e-6))
        self.allocate_moments(in_8_bits)
        self.apply_gradients(
            lr, betas=betas, eps=eps, weight_decay=weight_decay, grad_scale=scale, lr_ratio=lr_ratio
        )  # fmt: skip
        self.zero_grad()
        return norm

    def allocate_moments(self, in_8_bits: bool = False) -> None:
        """Allocate the moments of AdamW, in float32 or in 8 bits, unless they exist."""
        if not self.moments:
            parts = [(p, getattr(each, "n_experts", 1)) for each in self.trained for p in each.parameters]
            self.moments = [make_moments(p, n_parts, in_8_bits) for p, n_parts in parts]

    def apply_gradients(
        self,
        lr: float,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        grad_scale: float,
        lr_ratio: float = 1.0,
    ) -> None:
        """Update the parameters by AdamW from their gradients times ``grad_scale``, which are not changed.

        The adapters of an expert without gradients, as no row of the batch was given to it, are not updated and do not
        decay, nor do their moments.
        """
        self.allocate_moments()
        self.n_updates += 1
        moments = iter(enumerate(self.moments))
        for each in self.trained:
            is_adapter = isinstance(each, TrainedAdapter)
            rows = each.trained_rows() if is_adapter else [slice(None)]
            for p, grad, (index, (m, v, *scales)) in zip(each.parameters, each.gradients, moments, strict=False):
                rate = lr * lr_ratio if is_adapter and p is each.b else lr
                decay = weight_decay if p.ndim > 1 else 0.0
                for own in rows if p.ndim > 1 else [slice(None)]:
                    numbers = {"lr": rate, "beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": decay}
                    numbers |= {"t": self.n_updates, "grad_scale": grad_scale}
                    arrays = {"p": p[own], "grad": grad[own], "m": m[own], "v": v[own]}
                    if not scales:
                        _core.adamw(**arrays, **numbers)
                        continue
                    part = (own.start or 0) // max(1, len(p) // len(scales[0]))
                    _core.adamw_8bit(
                        **arrays, **numbers, m_scales=scales[0][part], v_scales=scales[1][part],
                        seed=moment_seed(index, self.n_updates, part),
                    )  # fmt: skip
        self.update()

    def factors(self) -> dict[str, tuple[np.ndarray, np.ndarray, float]]:
        """Return A (r, k), B (n, r) and alpha by module, as in PEFT; A may be the learner's own."""
        return {each.name: (*each.to_module(each.a, each.b), each.alpha) for each in self.adapters}

    def peft_config(self, base_model_name: str = "") -> dict[str, Any]:
        """Return the contents of PEFT's adapter_config.json.

        Args:
            base_model_name: name or path of the base model. Default: the path that it was read from.
        """
        path, modules = self.base.path, [each for each in self.adapters if each.n_experts == 1]
        norms = self._find_ends(self.norms, str.endswith) or [norm.name for norm in self.norms]
        return peft_config(
            self.factors(), base_model_name or repository_of(path) or path, "SEQ_CLS" if self.head else "CAUSAL_LM",
            self._find_ends(modules, lambda name, end: name.rpartition(".")[2] == end),
            [*norms, SCORE] if self.head else norms, self.lora_dropout,
            self.base.config.n_experts, any(each.magnitude is not None for each in self.adapters),
        )  # fmt: skip

    def _find_ends(
        self, trained: Sequence[TrainedAdapter | TrainedNorm], has_end: Callable[[str, str], bool]
    ) -> list[str]:
        """Return the last parts of the names of modules, if by PEFT's rule no other module has such an end."""
        ends = {each.name.rpartition(".")[2] for each in trained}
        locations = {each.location for each in trained}
        others = [name for name, location in self.base.targets.items() if location not in locations]
        return [] if any(has_end(name, end) for name in others for end in ends) else sorted(ends)

    def save_pretrained(self, folder: str | os.PathLike[str], base_model_name: str = "") -> None:
        """Write the adapters as a PEFT folder, with the record of the base from which Whet packs the same base again.

        Args:
            folder: created if missing.
            base_model_name: see ``peft_config``.
        """
        whole = {
            f"{each.name}.{part}": value
            for each in self.whole
            for part, value in zip(each.parts, each.parameters, strict=True)
        }
        magnitudes = {
            f"{each.name}.{MAGNITUDE}": each.order_outputs(each.magnitude)
            for each in self.adapters
            if each.magnitude is not None
        }
        write_peft(folder, self.factors(), self.peft_config(base_model_name), {**whole, **magnitudes})
        write_record(folder, self.base.record())

    def _check_rows(
        self,
        prompts: list[list[int]],
        completions: list[list[int]],
        given: Sequence[Sequence[bool]] | None,
        kept_tokens: Sequence[KeptTokens | None] | None,
        where: str,
    ) -> np.ndarray:
        """Check a batch, and return the mask of the tokens that count."""
        config = self.base.config
        check_rows(where, prompts, completions, given, kept_tokens)
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


def find_unlearnable(adapted: Adapted) -> str:
    """Return what of adapters a learner does not support; empty: nothing."""
    if adapted.special:
        return f"the adapters have {adapted.special}, and only LoRA, DoRA and norms are learnt"
    for location, _ in adapted.factors:
        if core_matrix(location.weight) is None:
            return f"lora_layers names {location.name}, and only the linear layers of attention and MLP are learnt"
    for location in adapted.whole:
        if not is_norm(location):
            return f"modules_to_save names {location.names[0]}, and of these only norms are learnt"
    return ""


def _check_rounding(qat: str, use_dora: bool, dropout: float, where: str) -> None:
    if TABLE[FILE_TYPES[qat].base].is_float:
        raise WhetValueError(f"{where}: qat is {qat!r}, which rounds nothing, expected a file type that quantises.")
    if use_dora or dropout:
        other = "DoRA" if use_dora else f"lora_dropout {dropout}"
        raise WhetValueError(
            f"{where}: qat is {qat!r}, which rounds W + s B A, and does not work with {other}. Omit one."
        )


def _check_dropout(dropout: Any, where: str) -> float:
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise WhetValueError(f"{where}: lora_dropout is {dropout!r:.60}, expected a number in [0, 1).")
    return float(dropout)
