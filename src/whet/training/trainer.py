"""Base of the training algorithms: the optimizer step, the loop over a dataset, logging, checkpoints.

An optimizer update accumulates the gradients of micro-batches, clips them and makes an AdamW step (Loshchilov & Hutter
2019), or is skipped if the loss or a gradient is not finite. Independent of the algorithm, which computes its loss.

A run is a function of (initial weights, data, config): a trainer saved after step k and loaded again is bit-identical
to one that never stopped. This requires a reproducible order of the data: sequences and torch's DataLoader are shuffled
by (seed, epoch); an iterable, or a custom sampler, has to repeat its order.

Under torchrun several processes are one run (``whet.training.distributed``): methods are called on all ranks, and only
rank 0 logs and saves.
"""

from __future__ import annotations

import functools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import numpy as np

from whet.checkpoint.folder import preserved_rng
from whet.config.fields import make_config
from whet.config.kept_tokens import KeptTokens
from whet.config.settings import TrainerConfig, learning_rate_at
from whet.data.batches import as_row
from whet.data.token_ids import token_rows
from whet.errors import NonFiniteError, WhetTypeError, WhetValueError
from whet.learner.batch import count_tokens, split_micro_batches
from whet.memory import MemoryWatch, register_holder
from whet.models.written_folder import complete_folder
from whet.signals import DeferredSignals
from whet.training.callbacks import Callback, as_callback
from whet.training.distributed import join_ranks
from whet.training.lengths import LengthLimit
from whet.training.loggers import Logger
from whet.training.loop import DatasetReader, run_steps
from whet.training.phases import phase, record
from whet.training.policy import error_without_effect, policy_class
from whet.training.reduction import ExactSum, shard_by_cost
from whet.training.state import load_trainer, save_trainer
from whet.training.update import TokenRows, Update

if TYPE_CHECKING:
    from typing import Self

Step = TypeVar("Step", bound=Callable[..., dict[str, float]])


def training_step(compute: Step) -> Step:
    """Decorate ``train_step`` of an algorithm: count, time and log the step, and call the callbacks.

    Args:
        compute: computes one step and returns its metrics, including ``num_tokens`` of this step.

    Returns:
        A method that adds the metrics of every step: ``learning_rate``, ``skipped_steps``, ``num_tokens`` (of all
        steps), ``step_time_s``, ``tokens_per_s``, and the phases of ``step_time_s`` that occurred:
        ``time/generation_s``, ``time/reward_s``, ``time/advantages_s``, ``time/logprobs_s`` (without gradient: old and
        reference), ``time/forward_s`` (with gradient), ``time/loss_s`` without ``time/kl_s``, ``time/backward_s``,
        ``time/wait_s`` (for completions sampled ahead), ``time/reduction_s`` (the gradient all-reduce, including the
        wait for other ranks), ``time/optimizer_s`` (zeroing, clipping, update), ``time/sync_s`` (weights to the
        engine), and ``time/other_s``. ``train`` tokenises rows before their step, outside all phases. For GPUs see
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


class Trainer(ABC):
    """Base of the training algorithms; each adds ``train_step``, decorated with ``training_step``.

    Args:
        model: ``forward(input_ids (B, T)) -> logits (B, T, V)``, including Hugging Face and PEFT models. Parameters
            that require grad are trained in place; the optimizer keeps float32 master weights of 16-bit parameters.
            Or a ``whet.Learner``, whose adapters are trained without torch.
        ref_model: the frozen reference, for algorithms that use one. None: the current model, with or without adapters
            (see ``whet.training.reference``). A learner's reference is its base, or its initial adapters.
        config: settings; None: the defaults.
        tokenizer: for rows of text; callable and with ``decode``, as in Hugging Face.
        logger: one logger or several.
        callbacks: one callback or several, called in this order; rlox callbacks are accepted.
        **settings: fields of the config, which override ``config``.

    Attributes:
        policy: computes log-probs of the model, and their gradients.
        step: number of completed steps.
        epoch: current pass of ``train`` over its dataset, from 0.
        position: rows, or batches, of the dataset consumed in this pass.
        num_tokens: tokens of prompts and completions seen.
        skipped_steps: updates skipped because the loss or a gradient was not finite.
        n_updates: number of optimizer updates.
        memory: memory of the process at the peak.
        should_stop: set by a callback, on any rank, to end ``train`` after the step.
        ranks: the ranks of the run.
        reader: state of the datasets.
    """

    config_class: ClassVar[type[TrainerConfig]] = TrainerConfig
    row_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of a dataset row, in the order of ``train_step``'s arguments."""
    lookahead = 0
    """Number of batches after its own that a step needs."""

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        *,
        config: Any = None,
        tokenizer: Any = None,
        logger: Logger | Sequence[Logger] | None = None,
        callbacks: Callback | Sequence[Callback] = (),
        **settings: Any,
    ) -> None:
        where = type(self).__name__
        implementation = policy_class(model, where)
        implementation.check(model, ref_model, where)
        self.config: Any = self.complete_config(make_config(self.config_class, config, settings), ref_model)
        self.ranks = join_ranks()
        self._exact = ExactSum() if self.config.deterministic_reduction else None
        if ref_model is not None and not self.config.has_reference():
            raise WhetValueError(
                f"{where}: ref_model has no effect: with these settings the loss uses no reference. Omit it, or choose "
                f"a loss that uses one (GRPO: set beta)."
            )
        self.model = model
        self.tokenizer = tokenizer
        self.loggers: list[Any] = _as_list(where, "logger", logger, "log")
        given = _as_list(where, "callbacks", callbacks, "on_step_end", "on_train_batch")
        self.callbacks: list[Any] = [as_callback(callback) for callback in given]
        self.policy = implementation(model, ref_model, self.config, where)
        self.length_limit = LengthLimit(self.policy.position_limit, self.config, where)
        self.step = self.epoch = self.position = self.num_tokens = self.skipped_steps = self.n_updates = 0
        self._initial_settings = {name: getattr(self.config, name) for name in self.config.fixed_at_construction}
        self.memory = MemoryWatch()
        register_holder(self)
        self.should_stop = False
        self._skipped_in_a_row = self._horizon = 0
        # Signals are deferred between an update and the count of its step: they are atomic.
        self._signals = DeferredSignals()
        self.reader = DatasetReader()

    def complete_config(self, config: Any, ref_model: Any) -> Any:
        """Return the config, with settings resolved whose default depends on the reference."""
        return config

    @property
    def ref_model(self) -> Any:
        """The reference, if it is a separate module."""
        return self.policy.reference.model

    # --- one step ---------------------------------------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        if not self.schedule_end and self.config.lr_schedule != "constant":
            raise WhetValueError(
                f"{type(self).__name__}: lr_schedule is {self.config.lr_schedule!r}, whose length is "
                f"unknown outside of train(). Pass schedule_steps."
            )
        return learning_rate_at(self.step, self.config, self.schedule_end)

    @property
    def schedule_end(self) -> int:
        """Step at which a decaying schedule reaches 0; 0: unknown."""
        return self.config.schedule_steps or self._horizon

    def extend_schedule(self, last_step: int) -> None:
        """Make a schedule without schedule_steps end at ``last_step``, unless it ends later."""
        self._horizon = max(self._horizon, last_step)

    def _count_step(self, n_tokens: int) -> None:
        """Count a completed step; its batch, if drawn by ``train``, is not trained again."""
        self.num_tokens += n_tokens
        self.step += 1
        self.reader.count(self)
        if self.config.moves_reference() and self.step % self.config.ref_sync_steps == 0:
            self.policy.reference.move(self.config.ref_sync_alpha)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log metrics at the current step, on rank 0."""
        for logger in self.loggers if self.ranks.is_first else []:
            logger.log(metrics, self.step)

    def micro_batches(self, rows: TokenRows) -> list[list[int]]:
        """Split rows, each a prompt and its completions, into micro-batches of ascending indices.

        A micro-batch has ``micro_batch_size`` rows, or ``max_tokens_per_step`` tokens if batches are packed.
        """
        size, tokens = self.config.micro_batch_size, self.config.max_tokens_per_step
        if self.policy.packs_batches and tokens and not size:
            return split_micro_batches(rows, tokens)
        size = size or len(rows)
        return [list(range(start, min(start + size, len(rows)))) for start in range(0, len(rows), size)]

    def shard(self, update: Update, rows: TokenRows, parts: Sequence[list[int]]) -> Iterator[list[int]]:
        """Yield this rank's share of the micro-batches ``parts`` of the rows, see ``Update.shard``."""
        return update.shard(parts, [[rows[i] for i in part] for part in parts])

    @contextmanager
    def update(self) -> Iterator[Update]:
        """Make one optimizer update: within the context, ``add`` the losses of micro-batches to the yielded ``Update``.

        The micro-batches come from ``shard``, which yields each rank its share.

        If the loss or the gradient norm is not finite, the update is skipped and counted, and neither parameters nor
        optimizer state change.

        Within ``train_step`` a signal such as Ctrl-C that arrives after the gradients are complete takes effect after
        the step is counted, or before the next update.

        Raises:
            NonFiniteError: ``max_skipped_steps`` consecutive updates were skipped.
            WhetValueError: something changed since construction that would have no effect: the parameters that require
                grad, rates of the optimizer's groups, config fields that are fixed at construction, or the need for a
                reference.
        """
        self._signals.release()
        self._check_unchanged()
        with phase("optimizer"):
            self.policy.zero_grad()  # gradients from outside
            self.policy.allocate()
        exact = self._exact
        if exact is not None:
            exact.begin()
        entropy = [self.config.seed % 2**64, self.step, self.n_updates + self.skipped_steps]
        seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
        is_seeded = self.config.training_mode and (self.ranks.size > 1 or exact is not None)
        update = Update(self.memory, self.policy, self.ranks, seed if is_seeded else None, exact)
        with preserved_rng() if is_seeded else nullcontext():
            try:
                with self.policy.training(seed):
                    yield update
            except Exception as error:
                self.ranks.broadcast_failure(error)
                raise
        with phase("reduction") if self.ranks.size > 1 or exact is not None else nullcontext():
            update.reduce(self.config.reduce_dtype == "bfloat16")
        with phase("optimizer"):
            loss = update.metrics["loss"]
            norm = update.metrics["grad_norm"] = self.policy.grad_norm()
            self._signals.hold()
            if math.isfinite(loss) and math.isfinite(norm):
                # Clip as clip_grad_norm_ does, within the optimizer's single pass over the gradients.
                limit = self.config.max_grad_norm or math.inf
                self.policy.step(self.learning_rate, min(1.0, limit / (norm + 1e-6)))
                self.n_updates += 1
                self._skipped_in_a_row = 0
            else:
                self.skipped_steps += 1
                self._skipped_in_a_row += 1
            # A backward pass allocates gradients in the memory freed by its activations, which keeps the peak low.
            self.policy.zero_grad()
        if self._skipped_in_a_row >= self.config.max_skipped_steps:
            raise NonFiniteError(
                f"{type(self).__name__}: {self._skipped_in_a_row} updates in a row had a loss or gradient "
                f"that is not finite (last: loss {loss}, gradient norm {norm}, at step {self.step}). Lower the "
                f"learning rate, or check the weights and the data for NaN."
            )

    def _check_unchanged(self) -> None:
        """Raise if a change since construction would have no effect on the update."""
        self.policy.check_unchanged()
        if self.config.uses_reference_model() and self.policy.reference.is_policy():
            raise error_without_effect(
                type(self).__name__,
                "the loss uses a reference, but did not when the trainer was made, so that none was kept. Restore "
                "config (to add a KL term later, start with a small beta)",
            )
        for name, value in self._initial_settings.items():
            if getattr(self.config, name) != value:
                raise error_without_effect(
                    type(self).__name__,
                    f"config.{name} is {getattr(self.config, name)!r} and has no effect: the trainer was made with "
                    f"{value!r}. Restore it",
                )

    def logprobs(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        temperature: float = 1.0,
        completion_mask: Sequence[Sequence[bool]] | None = None,
        *,
        kept_tokens: Sequence[KeptTokens | None] | None = None,
        experts: Sequence[np.ndarray | None] | None = None,
        reference: bool = False,
        return_entropy: bool = False,
    ) -> np.ndarray:
        """Return (B, C) log-probs of completion tokens under the policy, or its reference, in eval mode.

        Positions after the end of a completion, and tokens masked by ``completion_mask``, are 0. With ``kept_tokens``
        (``Completion.kept_tokens``), of the distribution over them; with ``experts`` (``Completion.experts``), by these
        experts. With ``return_entropy`` (2, B, C), log-probs and the entropy of each token's distribution in nats.
        """
        rows = list(zip(prompt_ids, completion_ids, strict=True))
        leading = (2,) if return_entropy else ()
        out = np.zeros((*leading, len(rows), max(map(len, completion_ids), default=0)), np.float32)
        with phase("logprobs"), self.policy.scoring(reference=reference) as score:

            def compute(part: list[int]) -> np.ndarray:
                mask = None if completion_mask is None else [completion_mask[i] for i in part]
                kept = None if kept_tokens is None else [kept_tokens[i] for i in part]
                prompts, completions = [prompt_ids[i] for i in part], [completion_ids[i] for i in part]
                options: dict[str, Any] = {} if experts is None else {"experts": [experts[i] for i in part]}
                return score(
                    prompts, completions, completion_mask=mask, kept_tokens=kept, temperature=temperature,
                    return_entropy=return_entropy, **options,
                )  # fmt: skip

            for part, found in self.compute_on_ranks(rows, compute):
                out = out.astype(found.dtype, copy=False)
                out[..., part, : found.shape[-1]] = found
        return out

    def compute_on_ranks(
        self, rows: TokenRows, compute: Callable[[list[int]], np.ndarray]
    ) -> Iterator[tuple[list[int], np.ndarray]]:
        """Yield each micro-batch of the rows and what ``compute`` returns of it; the ranks share the computation."""
        parts = self.micro_batches(rows)
        costs = [count_tokens([rows[i] for i in part]) for part in parts]
        own = shard_by_cost(costs, self.ranks.size)[self.ranks.rank]
        for shared in self.ranks.gather_results(lambda: [(parts[i], compute(parts[i])) for i in own]):
            yield from shared

    def completion_rows(self, completions: Any) -> list[list[int]]:
        """Return completions as rows of token ids, without padding.

        A (B, T) tensor or array without an attention mask does not distinguish padding from tokens, so each of its rows
        ends with the first stop token.
        """
        rows = token_rows(completions)
        if getattr(completions, "ndim", 0) != 2:
            return rows
        stops = set(self.stop_token_ids())
        ends = [next((t + 1 for t, token in enumerate(row) if token in stops), len(row)) for row in rows]
        return [row[:end] for row, end in zip(rows, ends, strict=True)]

    def stop_token_ids(self) -> list[int]:
        """Return the tokens that end a completion, from the config or EOS; see ``whet.models.stop_tokens``."""
        return self.policy.stop_token_ids(self.tokenizer, self.config.stop_token_ids)

    # --- the loop ---------------------------------------------------------------------------------------

    def train(self, dataset: Any, steps: int | None = None, *, n_epochs: int | None = None) -> dict[str, float]:
        """Run ``train_step`` over a dataset.

        Args:
            dataset: rows, which are dicts (of text, chat messages or token ids, with any other columns), or bare values
                and tuples in the order of ``train_step``'s arguments; or batches in a form of ``train_step``. A
                sequence, an iterable, a ``DataLoader`` or an iterator (see ``whet.data.batches.batch_stream`` for the
                order). A step takes ``batch_size`` rows. An iterable is not shuffled: it is read in order, and
                restarted at its end. The form of all rows of a list is checked first; up to 4 batches are drawn and
                tokenised ahead of their step, and no more than the remaining steps.
            steps: number of steps to run. The run continues at the row after the last one, also in a trainer loaded
                from a checkpoint, and with another ``batch_size``; with batches, such as a ``DataLoader``'s, after the
                same number of batches. An iterator, which cannot restart, continues at its current position, after
                items drawn for a failed or interrupted step, if any.
            n_epochs: alternative to steps: number of passes over the dataset; a partial pass counts as the first.
                Default: until the end of the epoch, as n_epochs=1.

        Returns:
            The metrics of the last step; empty if there was no step.

        Raises:
            RowError: a row is invalid; the message begins with its place.
            WhetTypeError: dataset has none of these forms, or both steps and n_epochs are given.
            WhetValueError: an empty dataset, fewer rows than ``batch_size``, steps that are not an integer >= 0,
                n_epochs that is not an integer >= 1, or no steps for a dataset without a length.
        """
        return run_steps(self, dataset, steps, n_epochs)

    def prepare(self, *batch: Any) -> Any:
        """Prepare a batch, the arguments of ``train_step``: tokenise its rows, and check their lengths.

        Uses no random numbers and no weights.
        """
        return batch

    def get_prepared(self, *batch: Any) -> Any:
        """Return ``prepare(*batch)``, reusing the result of ``train`` or ``iter_batches`` for this batch."""
        return self.reader.get_prepared(self, batch)

    def tokenize_row(self, row: Mapping[str, Any], tokenizer: Any) -> Any:
        """Return the token ids of a row, in the algorithm's form."""
        return row

    def evaluate(self, dataset: Any, **options: Any) -> float:
        """Return the mean loss of the current policy over a dataset, in eval mode.

        Weights, optimizer, counters and random states do not change.

        Args:
            dataset: as for ``train``, read once in order; or a single batch.
            **options: options of the algorithm's ``evaluation_metrics``.

        Returns:
            The first of ``evaluation_metrics``.

        Raises:
            WhetTypeError, WhetValueError: as ``train_step``.
        """
        with preserved_rng():
            return next(iter(self.evaluation_metrics(dataset, **options).values()))

    def evaluation_metrics(self, dataset: Any, **options: Any) -> dict[str, float]:
        """Return evaluation metrics over a dataset by name, the main metric first; defined by each algorithm."""
        raise WhetTypeError(f"{type(self).__name__}: evaluation is not supported. Define evaluation_metrics(dataset).")

    def iter_batches(self, dataset: Any) -> Iterator[tuple[Any, ...]]:
        """Return the arguments of ``train_step`` for one pass over a dataset, in order."""
        return self.reader.iter_batches(self, dataset)

    @abstractmethod
    def train_step(self, *batch: Any) -> dict[str, float]:
        """Make one step on a batch; defined by each algorithm. ``training_step`` lists the metrics of every step."""

    def as_row(self, item: Any) -> Mapping[str, Any]:
        """Return an item of a dataset, or of a list of rows, as a dict."""
        return as_row(item, self.row_fields, type(self).__name__)

    # --- checkpoints ------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint folder: weights, optimizer, schedule, random states, place in the data, config.

        Only rank 0 writes; on other ranks this is a no-op.

        For a model with frozen parameters only the trained parameters are saved; for adapters on a packed base also its
        ``PackedBase.record``: they load on that base only. The reference is saved if it is a separate module, or the
        initial values of the trained parameters. An existing checkpoint at ``path`` remains until the new one is
        complete.

        Raises:
            CheckpointError: ``path`` exists and is not a checkpoint.
        """
        if self.ranks.is_first:
            save_trainer(self, path)

    def can_save(self) -> bool:
        """Whether a checkpoint would be complete after an error in a step that has changed no weights."""
        return True

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        model: Any = None,
        ref_model: Any = None,
        *,
        env_id: Any = None,
        **arguments: Any,
    ) -> Self:
        """Load a trainer from a checkpoint, and continue exactly as if it had not stopped.

        Args:
            path: the checkpoint folder.
            model: a model of the same class and configuration, whose weights are replaced; None: built from the
                checkpoint (not supported for PEFT models and other partly trained models, nor for modules that cannot
                be described). A PEFT model and a ``Learner`` on the same base continue each other's checkpoints.
            ref_model: the reference, in the same way.
            env_id: ignored; for compatibility with rlox.
            **arguments: arguments of the constructor, such as ``reward_fn``, ``tokenizer``, ``logger`` and
                ``callbacks``; settings override the saved ones.

        Raises:
            CheckpointError: no checkpoint, a damaged checkpoint, a checkpoint of another algorithm, or a model that
                does not match.
        """
        return load_trainer(cls, path, model, ref_model, arguments)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the model and the tokenizer, if any, as a folder for Hugging Face's ``from_pretrained``.

        Adapters on a packed base get the base's record, from which Whet packs the same base again.

        Raises:
            WhetTypeError: the model has no ``save_pretrained``.
        """
        self.policy.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        complete_folder(folder)

    def memory_blocks(self) -> Iterator[tuple[str, Hashable, int]]:
        """Yield the memory held by the trainer, for ``whet.memory_report``."""
        return self.policy.memory_blocks()

    def extra_tensors(self) -> dict[str, np.ndarray]:
        """Return tensors of the algorithm to save in a checkpoint, in addition to model and optimizer."""
        return {}

    def load_extra_tensors(self, tensors: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore the result of ``extra_tensors``."""


def _as_list(where: str, name: str, several: Any, *methods: str) -> list[Any]:
    """Return one or several members as a list; reject members with none of the methods."""
    members = [] if several is None else list(several) if isinstance(several, (list, tuple)) else [several]
    for member in members:
        if not any(callable(getattr(member, method, None)) for method in methods):
            raise WhetTypeError(
                f"{where}: {name} is {member!r:.60}, expected an object with the method {' or '.join(methods)}, or "
                f"several. See whet.training.loggers and whet.training.callbacks."
            )
    return members
