"""The base of the training algorithms: the optimizer step, the loop over a dataset, logging, checkpoints.

One optimizer update adds up the gradients of micro-batches, clips them and makes an AdamW step
(Loshchilov & Hutter 2019), or skips it where the loss or a gradient is not finite. Knows no algorithm:
each of them computes its own loss.

A run is a function of (initial weights, data, config): a trainer that is saved after step k and loaded again continues
bit for bit as one that never stopped. Under torchrun several processes are one run (``whet.training.distributed``): a
method is called on all ranks, and rank 0 alone logs and saves.

The order of the data must be reproducible for that: sequences and torch's
DataLoader are shuffled by (seed, epoch); an iterable, or a custom sampler, has to give the same order again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from whet.checkpoint.folder import preserved_rng
from whet.config.fields import make_config
from whet.config.settings import TrainerConfig, learning_rate_at
from whet.data.batches import Place, Rewindable, as_row, batch_stream, batches_in_order, is_batch, is_sequence
from whet.data.token_ids import token_rows
from whet.errors import NonFiniteError, WhetTypeError, WhetValueError, check_integer
from whet.memory import MemoryWatch, register_holder, tensor_memory
from whet.models.base_record import write_record
from whet.models.sources.live import check_frequencies
from whet.models.written_folder import complete_folder
from whet.nn.accelerate import acceleration_of, choose_accelerations
from whet.nn.causal_lm import completion_logprobs
from whet.nn.frozen import base_of
from whet.nn.modules import module_device, module_mode, stop_token_ids
from whet.nn.optim import HALF_DTYPES, AdamW
from whet.nn.packed import split_micro_batches
from whet.signals import DeferredSignals
from whet.training.callbacks import Callback, as_callback
from whet.training.distributed import ExactSum, Ranks, fingerprint, join_ranks, shard_by_cost
from whet.training.lengths import LengthLimit
from whet.training.loggers import Logger
from whet.training.phases import phase, record
from whet.training.prefetch import Prefetcher, check_forms, is_in_memory, locate_error
from whet.training.reference import Reference
from whet.training.state import Snapshot, load_trainer, save_trainer

if TYPE_CHECKING:
    from typing_extensions import Self

TokenRows = Sequence[Sequence[Sequence[int]]]
"""Token ids of rows, each a prompt and its completions."""

Batch = TypeVar("Batch")
Step = TypeVar("Step", bound=Callable[..., dict[str, float]])


def training_step(compute: Step) -> Step:
    """Make ``train_step`` of a method that computes one step: count, time and log it, and call the callbacks.

    Args:
        compute: returns the metrics of the step, ``num_tokens`` (of this step only) among them.

    Returns:
        A method that returns these metrics, and those of every step: ``learning_rate``, ``skipped_steps``,
        ``num_tokens`` (of all steps), ``step_time_s``, ``tokens_per_s``, and the parts of ``step_time_s`` that
        occurred: ``time/generation_s``, ``time/reward_s``, ``time/advantages_s``, ``time/logprobs_s`` (those
        without gradient: old and reference), ``time/forward_s`` (with gradient), ``time/loss_s`` without
        ``time/kl_s``, ``time/backward_s``, ``time/reduction_s`` (gradients of other ranks, and the wait for them),
        ``time/optimizer_s`` (zeroing, clipping, update), ``time/sync_s`` (weights to the engine), and
        ``time/other_s``. ``train`` tokenises rows before their step, which is in none of them. On a GPU see
        ``whet.training.phases``.
    """

    @functools.wraps(compute)
    def train_step(self: Trainer, *batch: Any, **fields: Any) -> dict[str, float]:
        learning_rate = self.learning_rate
        with self._signals:
            with record() as seconds:
                metrics = compute(self, *batch, **fields)
            self._signals.hold()
            self._count_step(int(metrics["num_tokens"]))
        elapsed_s = sum(seconds.values())
        metrics |= {
            "learning_rate": learning_rate,
            "skipped_steps": self.skipped_steps,
            "num_tokens": self.num_tokens,
            "step_time_s": elapsed_s,
            "tokens_per_s": metrics["num_tokens"] / elapsed_s,
            **{f"time/{name}_s": part_s for name, part_s in seconds.items()},
        }
        self.log(metrics)
        for callback in self.callbacks:
            callback.on_step_end(self, metrics)
        return metrics

    return cast(Step, train_step)


class Update:
    """The sums of one optimizer update over its micro-batches, of all ranks.

    Args:
        ranks: among whom the micro-batches are dealt.
        seed: of dropout, which is keyed by micro-batch where they are dealt; None: torch's generator goes on.
        exact: sums the gradients, where they must not depend on how they are dealt; None: floats as they come.

    Attributes:
        metrics: after the update ``loss``, the other metrics, and ``grad_norm``, as it was before clipping.
        maxima: after the update the largest of each that was given as such.
    """

    def __init__(
        self, memory: MemoryWatch, parameters: Sequence[Tensor], ranks: Ranks, seed: int | None, exact: ExactSum | None
    ) -> None:
        self.metrics = {"loss": 0.0}
        self.maxima: dict[str, float] = {}
        self._memory, self._parameters = memory, parameters
        self._ranks, self._seed, self._exact = ranks, seed, exact
        self._costs: list[int] = []
        self._digest = 0
        self._at = 0
        self._added: list[tuple[int, dict[str, float], dict[str, float]]] = []
        memory.begin()

    def shard(self, batches: Sequence[Batch], rows: Sequence[TokenRows]) -> Iterator[Batch]:
        """This rank's share of the micro-batches; the loss of each is added before the next one is taken.

        Args:
            batches: all of them, the same ones on every rank.
            rows: the token ids of each: they are dealt by their numbers, and compared between the ranks.
        """
        self._costs = [count_tokens(part) for part in rows]
        self._digest = zlib.crc32(repr(rows).encode()) if self._ranks.size > 1 else 0
        for i in shard_by_cost(self._costs, self._ranks.size)[self._ranks.rank]:
            self._at = i
            if self._seed is not None:
                torch.manual_seed(int(np.random.SeedSequence([self._seed, i]).generate_state(1, np.uint64)[0]) >> 1)
            yield batches[i]

    def add(self, loss: Tensor, metrics: Mapping[str, float], maxima: Mapping[str, float] | None = None) -> None:
        """Add the gradient of a micro-batch's loss, and its metrics; ``maxima`` are not summed.

        Raises:
            WhetTypeError: there are several ranks, and the micro-batch does not come from ``shard``.
        """
        if self._ranks.size > 1 and not self._costs:
            raise WhetTypeError("Update.add: the micro-batches were not dealt to the ranks. Take them from shard().")
        self._look()
        with phase("backward"):
            loss.backward()
        self._look()
        self._added.append((self._at, {"loss": loss.item(), **metrics}, dict(maxima or {})))
        if self._exact is not None:
            self._exact.add(self._parameters)

    def reduce(self, dtype: torch.dtype | None) -> None:
        """Sum gradients and metrics over the micro-batches of all ranks.

        Raises:
            WhetValueError: the ranks have different batches.
            RankError: one of them failed.
        """
        exact, has_gradient = self._exact, [p.grad is not None for p in self._parameters]
        if exact is not None:
            has_gradient = [exact.has(p) for p in self._parameters]
        shares = self._ranks.all_gather_checked((self._digest, self._added, has_gradient))
        if any(digest != self._digest for digest, _, _ in shares):
            raise WhetValueError(
                "train: the ranks have different batches. Give all of them the same rows in the same order; each "
                "takes its share itself, so that the data needs no DistributedSampler."
            )
        # In the order of the micro-batches, whoever computed them.
        for _, metrics, maxima in sorted(itertools.chain(*(added for _, added, _ in shares)), key=lambda part: part[0]):
            for name, value in metrics.items():
                self.metrics[name] = self.metrics.get(name, 0.0) + value
            for name, value in maxima.items():
                self.maxima[name] = max(self.maxima.get(name, -math.inf), value)
        anywhere = [any(known) for known in zip(*(known for _, _, known in shares), strict=True)]
        concerned = [p for p, has in zip(self._parameters, anywhere, strict=True) if has]
        if exact is not None:
            exact.finish(concerned, self._ranks)
        elif self._ranks.size > 1:
            for p in concerned:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
            self._ranks.all_reduce([cast(Tensor, p.grad) for p in concerned], dtype)

    def _look(self) -> None:
        self._memory.sample(sum(p.grad.nbytes for p in self._parameters if p.grad is not None))


class Trainer(ABC):
    """The base of the training algorithms; each adds ``train_step``, made by ``training_step``.

    Args:
        model: ``forward(input_ids (B, T)) -> logits (B, T, V)``, Hugging Face and PEFT models included. Its
            parameters that require grad are trained, in place; the optimizer keeps float32 masters of 16-bit ones.
        ref_model: the frozen reference, for the algorithms that compare with one. None: model as it is now, however
            its adapters came (see ``whet.training.reference``).
        config: settings; None: the defaults.
        tokenizer: for rows of text; needs to be callable and have ``decode``, as Hugging Face's do.
        logger: one logger or several.
        callbacks: one callback or several, called in this order; rlox's are taken too.
        **settings: fields of the config; they override those of ``config``.

    Attributes:
        step: steps done.
        epoch: number of the pass over its dataset in which ``train`` is, from 0.
        position: rows of the dataset, or ready batches, that it has consumed in this pass.
        num_tokens: tokens of prompts and completions seen.
        skipped_steps: updates skipped because the loss or a gradient was not finite.
        n_updates: optimizer updates done.
        memory: the memory of the process in the fullest step.
        should_stop: set by a callback, on any rank, to end ``train`` after the step.
        ranks: the processes that train together.
    """

    config_class: ClassVar[type[TrainerConfig]] = TrainerConfig
    row_fields: ClassVar[tuple[str, ...]] = ()
    """The fields of a row of the dataset, in the order of ``train_step``'s arguments."""

    def __init__(
        self,
        model: nn.Module,
        ref_model: nn.Module | None = None,
        *,
        config: Any = None,
        tokenizer: Any = None,
        logger: Logger | Sequence[Logger] | None = None,
        callbacks: Callback | Sequence[Callback] = (),
        **settings: Any,
    ) -> None:
        where = type(self).__name__
        for name, module in (("model", model), ("ref_model", ref_model)):
            if not isinstance(module, nn.Module) and not (module is None and name == "ref_model"):
                raise WhetTypeError(f"{where}: {name} is {type(module).__name__}, expected an nn.Module.")
            if module is not None and acceleration_of(module) is not None:
                raise WhetValueError(
                    f"{where}: {name} is accelerated already. A trainer accelerates its model itself for each "
                    "step, as compute says: call remove() on what accelerate() returned."
                )
            if module is not None:
                check_frequencies(module, f"{where}: {name}")
        self.config: Any = self.complete_config(make_config(self.config_class, config, settings), ref_model)
        self.ranks = join_ranks()
        self._exact = ExactSum() if self.config.deterministic_reduction else None
        if ref_model is not None and not self.config.has_reference():
            raise WhetValueError(
                f"{where}: ref_model has no effect: with these settings the loss uses no reference. Leave it out, "
                f"or set beta."
            )
        self.model = model
        self.tokenizer = tokenizer
        self.loggers: list[Any] = _as_list(where, "logger", logger, "log")
        given = _as_list(where, "callbacks", callbacks, "on_step_end", "on_train_batch")
        self.callbacks: list[Any] = [as_callback(callback) for callback in given]
        self.length_limit = LengthLimit(model, self.config, where)
        self.trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.trainable:
            raise WhetValueError(f"{where}: no parameter of model requires grad. Unfreeze some.")
        self.reference = Reference(model, self.trainable, ref_model, kept=self.uses_reference(), where=where)
        models = [model] if self.ref_model is None else [model, self.ref_model]
        self.accelerations = choose_accelerations(models, self.config.compute, self.config.training_mode, where)
        self.acceleration = self.accelerations.get(model)
        if self.acceleration is not None:
            self.acceleration.in_place = True
        # Only matrices decay: vectors are norm weights, whose neutral value is not 0, and biases.
        matrices = [p for p in self.trainable.values() if p.ndim > 1]
        vectors = [p for p in self.trainable.values() if p.ndim <= 1]
        self.optimizer = AdamW(
            [{"params": matrices, "weight_decay": self.config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=self.config.learning_rate,
            betas=(self.config.adam_beta1, self.config.adam_beta2),
            eps=self.config.adam_epsilon,
        )
        self.step = self.epoch = self.position = self.num_tokens = self.skipped_steps = self.n_updates = 0
        self._rate = self.config.learning_rate
        self._made_with = {name: getattr(self.config, name) for name in self.config.fixed_at_construction}
        self.memory = MemoryWatch()
        register_holder(self)
        self.should_stop = False
        self._skipped_in_a_row = self._horizon = 0
        self._after_batch: Place | None = None
        """The place in the dataset after the batch that ``train`` has drawn and no step has been counted for."""
        # An update and the count of its step are one change, which no signal divides.
        self._signals = DeferredSignals()
        self._iterator = Rewindable(iter(()))
        """The last dataset that was an iterator, with what no step has been counted for."""
        self._prepared: tuple[tuple[Any, ...], Any] | None = None
        self._checked: tuple[Any, int] = None, 0
        """The dataset whose rows were checked, and their number."""

    def complete_config(self, config: Any, ref_model: nn.Module | None) -> Any:
        """The config, with what the reference decides where it is not given."""
        return config

    @property
    def ref_model(self) -> nn.Module | None:
        """The reference, where it is a module of its own."""
        return self.reference.model

    def uses_reference(self) -> bool:
        """Whether the reference computes log-probs in every step."""
        return self.config.has_reference()

    # --- one step ---------------------------------------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        """The rate of the next update."""
        if not self.schedule_end and self.config.lr_schedule != "constant":
            raise WhetValueError(
                f"{type(self).__name__}: lr_schedule is {self.config.lr_schedule!r}, whose length is not "
                f"known outside of train(). Pass schedule_steps."
            )
        return learning_rate_at(self.step, self.config, self.schedule_end)

    @property
    def schedule_end(self) -> int:
        """The step at which the rate of a decaying schedule is 0; 0: not known yet."""
        return self.config.schedule_steps or self._horizon

    def _count_step(self, n_tokens: int) -> None:
        """Count a step whose updates are done; its batch, if ``train`` has drawn it, is not trained again."""
        self.num_tokens += n_tokens
        self.step += 1
        if self._after_batch is not None:
            self._iterator.forget(self._after_batch.item - self.position)
            self.epoch, self.position = self._after_batch
            self._after_batch = None

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log metrics at the current step; rank 0 does."""
        for logger in self.loggers if self.ranks.is_first else []:
            logger.log(metrics, self.step)

    def micro_batches(self, rows: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
        """The rows, each a prompt and its completions, in micro-batches: their indices, ascending.

        Of ``micro_batch_size`` rows; or, where batches are packed, of ``max_tokens_per_step`` tokens.
        """
        size, tokens = self.config.micro_batch_size, self.config.max_tokens_per_step
        if self.acceleration is not None and tokens and not size:
            return split_micro_batches(rows, tokens)
        size = size or len(rows)
        return [list(range(start, min(start + size, len(rows)))) for start in range(0, len(rows), size)]

    def shard(
        self, update: Update, rows: Sequence[Sequence[Sequence[int]]], parts: Sequence[list[int]]
    ) -> Iterator[list[int]]:
        """This rank's share of the micro-batches ``parts`` of the rows, as ``Update.shard``."""
        return update.shard(parts, [[rows[i] for i in part] for part in parts])

    @contextmanager
    def update(self) -> Iterator[Update]:
        """One optimizer update: ``add`` the micro-batches' losses to what this gives, within its context.

        The context takes the micro-batches from ``shard``, which gives each rank its share.

        If the sum of the losses or the gradient norm is not finite, the update is skipped and counted, and neither
        parameters nor optimizer have changed.

        Within ``train_step`` a signal that comes after the gradients are there, such as Ctrl-C, takes effect when the
        step is counted, or the next update begins.

        Raises:
            NonFiniteError: ``max_skipped_steps`` updates in a row were skipped.
            WhetValueError: something was changed since the trainer was made, and has no effect: which parameters
                require grad, rates of the optimizer's groups, fields of config that are read once, or the need of a
                reference.
        """
        self._signals.release()
        self._check_unchanged()
        with phase("optimizer"):
            self.optimizer.zero_grad()  # what others left
            self.optimizer.allocate_moments()
        parameters, exact = list(self.trainable.values()), self._exact
        if exact is not None:
            exact.begin()
        seed = None
        if self.config.training_mode and (self.ranks.size > 1 or exact is not None):
            entropy = [self.config.seed % 2**64, self.step, self.n_updates + self.skipped_steps]
            seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
        update = Update(self.memory, parameters, self.ranks, seed, exact)
        with nullcontext() if seed is None else preserved_rng():
            try:
                with module_mode(self.model, self.config.training_mode), self.acceleration or nullcontext():
                    yield update
            except Exception as error:
                self.ranks.broadcast_failure(error)
                raise
        with phase("reduction") if self.ranks.size > 1 or exact is not None else nullcontext():
            update.reduce(torch.bfloat16 if self.config.reduce_dtype == "bfloat16" else None)
        with phase("optimizer"):
            loss = update.metrics["loss"]
            norm = update.metrics["grad_norm"] = self._grad_norm()
            self._signals.hold()
            if math.isfinite(loss) and math.isfinite(norm):
                self._rate = self.learning_rate
                for group in self.optimizer.param_groups:
                    group["lr"] = self._rate
                # Clipped as by clip_grad_norm_, but within the optimizer's one pass over the gradients.
                limit = self.config.max_grad_norm or math.inf
                self.optimizer.step(grad_scale=min(1.0, limit / (norm + 1e-6)))
                self.n_updates += 1
                self._skipped_in_a_row = 0
            else:
                self.skipped_steps += 1
                self._skipped_in_a_row += 1
            # Each backward pass makes gradients in memory that its activations leave: there is never room for both.
            self.optimizer.zero_grad()
        if self._skipped_in_a_row >= self.config.max_skipped_steps:
            raise NonFiniteError(
                f"{type(self).__name__}: {self._skipped_in_a_row} updates in a row had a loss or gradient "
                f"that is not finite (last: loss {loss}, gradient norm {norm}, at step {self.step}). Lower the "
                f"learning rate, or check the weights and the data for NaN."
            )

    def _check_unchanged(self) -> None:
        """Raise for what was changed since the trainer was made and would have no effect on the update."""
        frozen = next((name for name, p in self.trainable.items() if not p.requires_grad), None)
        if frozen:
            raise self._without_effect(
                f"{frozen} does not require grad any more, as it did when the trainer was made. Call "
                "requires_grad_(True) on it (set_adapter does, of PEFT's)"
            )
        own = set(map(id, self.trainable.values()))
        added = next((name for name, p in self.model.named_parameters() if p.requires_grad and id(p) not in own), None)
        if added:
            raise self._without_effect(
                f"{added} requires grad, which it did not when the trainer was made: it would not be trained. "
                "Call requires_grad_(False) on it"
            )
        if self.uses_reference() and self.reference.is_policy():
            raise self._without_effect(
                "the loss uses a reference now, which it did not when the trainer was made, so that none was kept. Set "
                "config back (a KL term that begins later begins with a small beta)"
            )
        for name, value in self._made_with.items():
            if getattr(self.config, name) != value:
                raise self._without_effect(
                    f"config.{name} is {getattr(self.config, name)!r} and has no effect: the trainer was made with "
                    f"{value!r}. Set it back"
                )
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if any(rate != self._rate for rate in rates):
            raise self._without_effect(
                f"the rates of the optimizer's groups are {rates} and have no effect: each update sets them to that of "
                "the schedule. Set config.learning_rate"
            )

    def _without_effect(self, text: str) -> WhetValueError:
        return WhetValueError(f"{type(self).__name__}: {text}, or make another trainer.")

    def _grad_norm(self) -> float:
        """The norm of all gradients, whose 16-bit ones are replaced by their float32 norms, which torch would round."""
        grads = [p.grad for p in self.trainable.values() if p.grad is not None]
        parts = [vector_norm(grad, dtype=torch.float32) if grad.dtype in HALF_DTYPES else grad for grad in grads]
        return nn.utils.get_total_norm(parts).item()

    @torch.no_grad()
    def logprobs(
        self,
        model: nn.Module,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        temperature: float = 1.0,
        completion_mask: Sequence[Sequence[bool]] | None = None,
    ) -> Tensor:
        """(B, C) log-probs of completion tokens, ``model`` in eval mode; 0 past each completion's end.

        Of tokens that do not count by ``completion_mask``, too, it is 0.
        """
        acceleration = self.accelerations.get(model)
        rows = list(zip(prompt_ids, completion_ids, strict=True))
        out = torch.zeros(len(rows), max(map(len, completion_ids), default=0), device=module_device(model))
        with phase("logprobs"), module_mode(model, training=False), acceleration or nullcontext():
            parts = self.micro_batches(rows)

            def compute(part: list[int]) -> Tensor:
                mask = None if completion_mask is None else [completion_mask[i] for i in part]
                prompts, completions = [prompt_ids[i] for i in part], [completion_ids[i] for i in part]
                return completion_logprobs(
                    model, prompts, completions, completion_mask=mask, temperature=temperature
                ).logprobs

            own = shard_by_cost(_costs(rows, parts), self.ranks.size)[self.ranks.rank]
            for shared in self.ranks.gather_results(lambda: [(parts[i], compute(parts[i])) for i in own]):
                for part, logprobs in shared:
                    out = out.to(logprobs.dtype)
                    out[part, : logprobs.shape[1]] = logprobs
        return out

    def reference_logprobs(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        temperature: float = 1.0,
    ) -> Tensor:
        """``logprobs`` of the reference."""
        with self.reference.as_module() as model:
            return self.logprobs(model, prompt_ids, completion_ids, temperature)

    def completion_rows(self, completions: Any) -> list[list[int]]:
        """Completions as rows of token ids, each cut at its end.

        A (B, T) tensor or array without an attention mask does not distinguish padding from tokens, so
        each of its rows ends with the first stop token.
        """
        rows = token_rows(completions)
        if getattr(completions, "ndim", 0) != 2:
            return rows
        stops = set(self.stop_token_ids())
        ends = [next((t + 1 for t, token in enumerate(row) if token in stops), len(row)) for row in rows]
        return [row[:end] for row, end in zip(rows, ends, strict=True)]

    def stop_token_ids(self) -> list[int]:
        """The tokens that end a completion: those of the config, or EOS; see the function ``stop_token_ids``."""
        return stop_token_ids(self.model, self.tokenizer, self.config.stop_token_ids)

    # --- the loop ---------------------------------------------------------------------------------------

    def train(self, dataset: Any, steps: int | None = None, *, n_epochs: int | None = None) -> dict[str, float]:
        """Run ``train_step`` over a dataset.

        Args:
            dataset: rows: dicts (of text, chat messages or token ids, with any other columns), or bare values
                and tuples in the order of ``train_step``'s arguments; or ready batches, as ``train_step`` takes them.
                In a sequence, an iterable, a ``DataLoader`` or an iterator (``whet.data.batches.batch_stream`` says in
                what order). Rows are taken ``batch_size`` at a time. An iterable cannot be shuffled: it is taken in
                its own order, and again from the start at its end. The form of all rows of a list is checked first;
                batches are drawn and tokenised up to 4 before their step, and no more than there are steps to come.
            steps: how many more steps to run. The run continues at the row where the last one stopped, also in a
                trainer loaded from a checkpoint, and with another ``batch_size``; in ready batches, such as those of
                a ``DataLoader``, after as many of them. An iterator (which cannot start again) continues where it
                stands, after what was taken from it for a step that failed or was interrupted, if there is one.
            n_epochs: in place of steps: how many more passes over the dataset; one that is begun counts as the first.
                Without either: to the end of the epoch, which is n_epochs=1.

        Returns:
            The metrics of the last step; empty if there was none.

        Raises:
            RowError: a row cannot be used; the message begins with its place.
            WhetTypeError: dataset is none of these, or both steps and n_epochs.
            WhetValueError: an empty dataset, fewer rows than ``batch_size``, steps that are no integer >= 0, n_epochs
                that is no integer >= 1, or no steps for a dataset without a length.
        """
        if steps is not None and n_epochs is not None:
            raise WhetTypeError(f"train: steps is {steps} and n_epochs {n_epochs}. Pass one of them.")
        steps = check_integer("train", "steps", steps, 0, optional=True)
        n_epochs = check_integer("train", "n_epochs", n_epochs, 1, optional=True)
        if isinstance(dataset, Iterator) and not is_sequence(dataset):
            if self._iterator.source is not dataset:
                self._iterator = Rewindable(dataset)
            dataset = self._iterator
        place = Place(self.epoch, self.position)
        batches, n_left, per_epoch = batch_stream(
            dataset, self.config.batch_size, self.config.seed, place, self.row_fields, self.as_row
        )
        self._check_forms(dataset)
        ahead = Prefetcher(batches, lambda drawn: self._prepare(dataset, drawn[0]))
        if steps is None:
            if n_left is None or per_epoch is None:
                raise WhetValueError(
                    "train: the dataset has no length, so that the end of an epoch is not known. Pass steps."
                )
            steps = n_left + ((n_epochs or 1) - 1) * per_epoch
        last_step = self.step + steps
        self._horizon = max(self._horizon, last_step)
        if self.ranks.size > 1:
            facts = {**dataclasses.asdict(self.config), "step": self.step, "position": place}
            facts |= {"last step": last_step}
            facts["the sum of the weights"] = fingerprint([p.detach() for p in self.model.parameters()])
            self.ranks.check_same("train", facts)
        self.should_stop = False
        for logger in self.loggers:
            if getattr(logger, "total_steps", 0) is None:
                logger.total_steps = last_step
        metrics: dict[str, float] = {}
        before = None
        try:
            for callback in self.callbacks:
                callback.on_train_begin(self, last_step)
            while self.step < last_step and not self.should_stop:
                before = Snapshot(self) if self.callbacks else None
                taken = ahead.take(last_step - self.step)
                if taken is None:
                    break
                drawn, ready = taken
                arguments, self._after_batch = drawn
                self._prepared = arguments, ready
                metrics = self.train_step(*arguments)
                self.should_stop = self.ranks.any(self.should_stop)
            for callback in self.callbacks:
                callback.on_train_end(self)
        except Exception as error:
            if before is not None and before.restore(self):
                with suppress(OSError):  # of a checkpoint: ``error`` is what ended the run
                    for callback in self.callbacks:
                        callback.on_train_failure(self, error)
            raise
        finally:
            self._after_batch = self._prepared = None
            self._iterator.rewind()
            for callback in self.callbacks:
                callback.on_train_exit(self)
        return metrics

    def prepare(self, *batch: Any) -> Any:
        """A batch, the arguments of ``train_step``, as a step uses it: its rows tokenised, and their lengths checked.

        It draws no random number, and needs no weight.
        """
        return batch

    def get_prepared(self, *batch: Any) -> Any:
        """``prepare``, for ``train_step`` and evaluation; what is known already of a batch is not computed again."""
        known, self._prepared = self._prepared, None
        given = [argument for argument in batch if argument is not None]
        if known is not None and len(known[0]) == len(given) and all(map(operator.is_, known[0], given)):
            return known[1]
        return self.prepare(*batch)

    def tokenize_row(self, row: Mapping[str, Any], tokenizer: Any) -> Any:
        """Token ids of a row, as the algorithm reads it."""
        return row

    def _prepare(self, dataset: Any, batch: tuple[Any, ...]) -> Any:
        try:
            return self.prepare(*batch)
        except (WhetValueError, WhetTypeError) as error:
            located = locate_error(error, dataset, batch[0], self.prepare, self.as_row, self.step + 1)
            if located is error:
                raise
            raise located from error

    def _check_forms(self, dataset: Any) -> None:
        """Check the form of all rows in memory, once."""
        if not is_in_memory(dataset) or is_batch(dataset[0], self.row_fields):
            return
        if self._checked[0] is not dataset or self._checked[1] != len(dataset):
            check_forms(dataset, self.tokenize_row, self.as_row, self.tokenizer is not None)
            self._checked = dataset, len(dataset)

    def evaluate(self, dataset: Any, **options: Any) -> float:
        """The mean loss of the current policy over a dataset, in eval mode.

        Nothing is trained: weights, optimizer, counters and random states are as they were.

        Args:
            dataset: as for ``train``, read once in its order; or a single batch.
            **options: of the algorithm's ``evaluation_metrics``.

        Returns:
            The first of ``evaluation_metrics``.

        Raises:
            WhetTypeError, WhetValueError: as ``train_step``.
        """
        with preserved_rng():
            return next(iter(self.evaluation_metrics(dataset, **options).values()))

    def evaluation_metrics(self, dataset: Any, **options: Any) -> dict[str, float]:
        """The metrics of an evaluation over a dataset, by name, the main one first; each algorithm defines them."""
        raise WhetTypeError(f"{type(self).__name__}: it has no evaluation. Define evaluation_metrics(dataset).")

    def iter_batches(self, dataset: Any) -> Iterator[tuple[Any, ...]]:
        """The arguments of ``train_step`` for one pass over a dataset, in its order."""
        where = f"{type(self).__name__}.evaluate"
        for batch in batches_in_order(dataset, self.config.batch_size, self.row_fields, self.as_row, where):
            self._prepared = batch, self._prepare(dataset, batch)
            yield batch

    @abstractmethod
    def train_step(self, *batch: Any) -> dict[str, float]:
        """One step on one batch, which each algorithm defines; ``training_step`` lists the metrics of every step."""

    def as_row(self, item: Any) -> Mapping[str, Any]:
        """An item of a dataset, or of a list of rows, as a dict."""
        return as_row(item, self.row_fields, type(self).__name__)

    # --- checkpoints ------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint folder: weights, optimizer, schedule, random states, place in the data, config.

        Rank 0 does; on others nothing happens.

        Of a model with frozen parameters only the trained ones are kept, and of adapters on a packed base its
        ``PackedBase.record``: they load on that base only. The reference is kept if it is a separate module, or the
        first values of what trains. What was at ``path`` stays until the new checkpoint is complete.

        Raises:
            CheckpointError: something that is not a checkpoint is at ``path``.
        """
        if self.ranks.is_first:
            save_trainer(self, path)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module | None = None,
        ref_model: nn.Module | None = None,
        *,
        env_id: Any = None,
        **arguments: Any,
    ) -> Self:
        """Load the trainer that ``save`` wrote; its next step is the one that would have come next.

        Args:
            path: the checkpoint folder.
            model: a model of the same class and configuration, whose weights are replaced; None: it is
                built from the checkpoint (not possible for PEFT models and others of which only a part
                was trained, nor for modules that cannot be described).
            ref_model: likewise the reference.
            env_id: ignored; for compatibility with rlox.
            **arguments: of the constructor, such as ``reward_fn``, ``tokenizer``, ``logger`` and
                ``callbacks``; settings among them override those saved.

        Raises:
            CheckpointError: no checkpoint, a damaged one, one of another algorithm, or a model that does
                not match it.
        """
        return load_trainer(cls, path, model, ref_model, arguments)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the model and the tokenizer, if any, as Hugging Face's ``from_pretrained`` reads them.

        Of adapters on a packed base, with the record of that base, by which Whet packs the same one for them.

        Raises:
            WhetTypeError: the model has no ``save_pretrained``.
        """
        if not hasattr(self.model, "save_pretrained"):
            raise WhetTypeError(
                f"save_pretrained: {type(self.model).__name__} is no Hugging Face model. Use save, or "
                f"torch.nn.Module.state_dict."
            )
        base = base_of(self.model)
        # PEFT would look for embeddings to save, in a folder of the hub's too; packed ones are not saved.
        options = {} if base is None else {"save_embedding_layers": False}
        cast(Any, self.model).save_pretrained(folder, **options)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        complete_folder(folder)
        if base is not None:
            write_record(folder, base.record())

    def memory_blocks(self) -> Iterator[tuple[str, Hashable, int]]:
        """The memory that the trainer holds, for ``whet.memory_report``."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        for part, model in (("weights", self.model), ("reference", self.ref_model)):
            if model is not None:
                yield from tensor_memory(part, itertools.chain(model.parameters(), model.buffers()))
                base = base_of(model)
                yield from base.memory_blocks() if base is not None else ()
        for acceleration in self.accelerations.values():
            yield from acceleration.memory_blocks()
        yield from tensor_memory("reference", self.reference.first_values.values())
        yield from tensor_memory("gradients", (p.grad for p in self.trainable.values() if p.grad is not None))
        yield from tensor_memory("moments", (value for value in states if isinstance(value, Tensor)))

    def extra_tensors(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint keeps for an algorithm beside model and optimizer."""
        return {}

    def load_extra_tensors(self, tensors: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Restore what ``extra_tensors`` returned."""


def count_tokens(rows: Sequence[Sequence[Sequence[int]]]) -> int:
    """The tokens of a micro-batch's rows, each a prompt and its completions; a prompt that they share once."""
    prompts = {tuple(row[0]) for row in rows}
    return sum(map(len, prompts)) + sum(len(ids) for row in rows for ids in row[1:])


def _costs(rows: Sequence[Sequence[Sequence[int]]], parts: Sequence[list[int]]) -> list[int]:
    return [count_tokens([rows[i] for i in part]) for part in parts]


def _as_list(where: str, name: str, several: Any, *methods: str) -> list[Any]:
    """None, one or several as a list; refuse what has none of the methods."""
    members = [] if several is None else list(several) if isinstance(several, (list, tuple)) else [several]
    for member in members:
        if not any(callable(getattr(member, method, None)) for method in methods):
            raise WhetTypeError(
                f"{where}: {name} is {member!r:.60}, expected an object with the method {' or '.join(methods)}, or "
                f"several. "
                f"whet.training.loggers and whet.training.callbacks have some."
            )
    return members
