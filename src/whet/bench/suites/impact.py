"""Where the time of a GRPO step goes: a whole step of a trainer, on a Llama with random weights, split into its phases.

A provider returns a ``Step``, which ``step_error`` compares with the same step in float64, written out by hand on the
completions that the provider sampled. So any trainer can be a provider. Stop tokens are off, and every completion has
the same length: each call does the same work, on other tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from whet.bench.case import BenchOptions, Case, Provider, Suite, Table, Timed

BETA = 0.04
LEARNING_RATE = 1e-6
"""Thirty updates move a weight by 3e-5 at most, of 0.02 in the root mean square: every call meets the same model."""
ADAM_EPSILON = 1e-8
MAX_GRAD_NORM = 1.0

NOTE = (
    "Float32, random weights, no stop tokens, beta > 0 so that there are reference log-probs (logprobs) and a KL term. "
    "The document says of a Llama-8B-class model: generation 60-80%, backward 15-25%, forward 5-10%, advantages and KL "
    "< 0.01% each. Making only the primitives faster, by whatever factor, saves at most the parts advantages and kl of "
    "a step. The reward is one comparison per token; what checks answers takes longer."
)


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step: of the model, in prompts and completions, and in tokens."""

    hidden_dim: int = 256
    n_layers: int = 8
    vocab_size: int = 49_152
    n_prompts: int = 4
    group_size: int = 8
    prompt_length: int = 64
    completion_length: int = 64

    @property
    def n_completions(self) -> int:
        """Completions of a step."""
        return self.n_prompts * self.group_size

    @property
    def ffn_dim(self) -> int:
        """Width of the feed-forward layers."""
        return 8 * self.hidden_dim // 3

    @property
    def n_parameters(self) -> int:
        """Parameters of the model: embeddings (tied), attention and feed-forward matrices, norms."""
        layer = self.hidden_dim * (4 * self.hidden_dim + 3 * self.ffn_dim + 2)
        return self.vocab_size * self.hidden_dim + self.n_layers * layer + self.hidden_dim

    def describe(self) -> str:
        """The sizes in words."""
        return (
            f"{self.n_parameters / 1e6:.1f} M parameters: {self.n_layers} layers of {self.hidden_dim}, vocabulary "
            f"{self.vocab_size:,}; {self.prompt_length} + {self.completion_length} tokens"
        )


class StepInputs:
    """Prompts, the policy before the step and its reference. Providers train a copy of the policy."""

    def __init__(self, shape: StepShape, rng: np.random.Generator) -> None:
        self.shape = shape
        self.prompt_ids: list[list[int]] = rng.integers(
            shape.vocab_size, size=(shape.n_prompts, shape.prompt_length)
        ).tolist()
        self._seeds = rng.integers(2**31, size=2).tolist()

    @cached_property
    def policy(self) -> Any:
        return random_llama(self.shape, self._seeds[0])

    @cached_property
    def reference(self) -> Any:
        return random_llama(self.shape, self._seeds[1]).requires_grad_(False)


class Step(NamedTuple):
    """What a step leaves behind.

    Attributes:
        completion_ids: one row per completion, groups side by side.
        figures: loss, kl (mean per token), entropy (mean per token), grad_norm (before clipping), mean_reward.
        model: the policy after the step.
    """

    completion_ids: Sequence[Sequence[int]]
    figures: dict[str, float]
    model: Any


def random_llama(shape: StepShape, seed: int) -> Any:
    """A Hugging Face Llama with tied embeddings and no stop token, float32.

    Raises:
        ImportError: torch or transformers is missing.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_dim,
        intermediate_size=shape.ffn_dim,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=max(1, shape.hidden_dim // 64),
        max_position_embeddings=shape.prompt_length + shape.completion_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def even_tokens(completions: Sequence[Any]) -> list[float]:
    """The reward: the share of a completion's token ids that are even."""
    return [float((np.asarray(completion) % 2 == 0).mean()) for completion in completions]


def whet_step(inputs: StepInputs) -> Callable[[], Timed]:
    """A step of Whet's own trainer."""
    from whet.algorithms.grpo import GRPO

    trainer = GRPO(
        copy.deepcopy(inputs.policy),
        inputs.reference,
        even_tokens,
        group_size=inputs.shape.group_size,
        max_new_tokens=inputs.shape.completion_length,
        beta=BETA,
        compute="float32",
        learning_rate=LEARNING_RATE,
        adam_epsilon=ADAM_EPSILON,
        max_grad_norm=MAX_GRAD_NORM,
    )

    def call() -> Timed:
        metrics = trainer.train_step(inputs.prompt_ids)
        figures = {name: metrics[name] for name in ("loss", "kl", "entropy", "grad_norm", "mean_reward")}
        parts = {name[5:-2]: s for name, s in metrics.items() if name.startswith("time/") and name != "time/other_s"}
        ids = [row["completion"] for row in trainer.last_completions]
        return Timed(Step(ids, figures, trainer.model), parts)

    return call


# --- the same step in float64 ---------------------------------------------------------------------------


class Expected(NamedTuple):
    """What a first step should leave behind.

    Attributes:
        figures: as those of ``Step``.
        moved: Euclidean norm of the weights' change.
        surprise: how many standard errors the log-probs of the sampled tokens are off their expectation.
    """

    figures: dict[str, float]
    moved: float
    surprise: float


def step_error(step: Step, inputs: StepInputs) -> float:
    """Largest relative error of a first step: of its figures, and of how far it moved the weights.

    Infinite where completions have the wrong length, or are no samples of the policy (six standard errors off).
    """
    shape = inputs.shape
    if [len(row) for row in step.completion_ids] != [shape.completion_length] * shape.n_completions:
        return math.inf
    right = written_out(step.completion_ids, inputs)
    pairs = zip(step.model.parameters(), inputs.policy.parameters(), strict=True)
    moved = math.sqrt(sum((new.detach().double() - old.detach()).square().sum().item() for new, old in pairs))
    figures = [(step.figures[name], value) for name, value in right.figures.items()]
    errors = [abs(got / value - 1) for got, value in [*figures, (moved, right.moved)]]
    return max(errors) if abs(right.surprise) < 6 and all(map(math.isfinite, errors)) else math.inf


def written_out(completion_ids: Sequence[Sequence[int]], inputs: StepInputs) -> Expected:
    """A first step on these completions, one row at a time, with nothing of Whet.

    In float64, but for the model's norms, which Hugging Face computes in float32. On the policy that sampled every
    ratio is 1, and nothing is clipped. With the tokens of all completions in the denominator (dapo), and KL by k3 with
    the ratio as its factor::

        loss = mean over tokens of -rho A + beta rho (exp(d) - d - 1),    d = ref - policy,    rho = pi / stopgrad(pi)

    The first update of AdamW, of a gradient g clipped to norm 1, is learning_rate g / (|g| + epsilon). Of a sampled
    token, log pi has the expectation -H and the variance sum_v p_v log^2 p_v - H^2.
    """
    import torch

    policy, reference = (copy.deepcopy(model).double() for model in (inputs.policy, inputs.reference))
    rewards = np.array(even_tokens(completion_ids)).reshape(inputs.shape.n_prompts, -1)
    spread = rewards.std(1, keepdims=True)
    advantages = ((rewards - rewards.mean(1, keepdims=True)) / np.where(spread < 1e-8, np.inf, spread)).ravel()
    loss = kl = entropy = excess = variance = 0.0
    n_tokens = sum(map(len, completion_ids))
    for i, completion in enumerate(completion_ids):
        ids = [*inputs.prompt_ids[i // inputs.shape.group_size], *completion]
        every, own = _token_logprobs(policy, ids, completion)
        difference = _token_logprobs(reference, ids, completion)[1] - own
        ratio, row_kl = (own - own.detach()).exp(), difference.exp() - difference - 1
        row_loss = (-ratio * advantages[i] + BETA * ratio * row_kl).sum() / n_tokens
        row_loss.backward()
        loss, kl = loss + row_loss.item(), kl + row_kl.sum().item() / n_tokens
        log_p, p = every.detach(), every.detach().exp()
        row_entropy = -(p * log_p).sum(1)
        entropy += row_entropy.sum().item() / n_tokens
        excess += (own.detach() + row_entropy).sum().item()
        variance += ((p * log_p.square()).sum(1) - row_entropy.square()).sum().item()
    gradient = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    norm = gradient.norm().item()
    clipped = gradient * min(1.0, MAX_GRAD_NORM / norm)
    moved = (LEARNING_RATE * clipped / (clipped.abs() + ADAM_EPSILON)).norm().item()
    figures = {"loss": loss, "kl": kl, "entropy": entropy, "grad_norm": norm, "mean_reward": float(rewards.mean())}
    return Expected(figures, moved, excess / math.sqrt(variance))


def _token_logprobs(model: Any, ids: Sequence[int], completion: Sequence[int]) -> tuple[Any, Any]:
    """Of one row: log-probs (T, V) at the completion's tokens, and (T,) of these tokens."""
    import torch

    every = model(torch.tensor([ids]), logits_to_keep=len(completion) + 1).logits[0, :-1].log_softmax(-1)
    return every, every.gather(1, torch.tensor(completion)[:, None])[:, 0]


# --- the tables -----------------------------------------------------------------------------------------


def step_case(name: str, shape: StepShape, size: float | None = None) -> Case:
    """A step of this shape; ``step_error`` judges what a provider's ``Step`` says."""
    return Case(
        name,
        inputs=lambda rng: StepInputs(shape, rng),
        reference=lambda inputs: inputs,
        tolerance=5e-4,
        n_items=shape.n_completions * (shape.prompt_length + shape.completion_length),
        size=size,
        note=shape.describe(),
    )


def step_table(title: str, cases: Sequence[Case], providers: Sequence[Provider], size_label: str = "") -> Table:
    """Whole steps by these providers."""
    return Table(
        title,
        cases,
        providers,
        allocation="inside: all that a step allocates",
        note=NOTE,
        item="tokens",
        size_label=size_label,
        error=step_error,
    )


def tables(options: BenchOptions) -> list[Table]:
    """Steps by group size; and, unless it has to be quick, by size of the model."""
    shape, providers = StepShape(), [Provider("whet", whet_step)]
    if options.quick:
        shape = StepShape(hidden_dim=64, n_layers=2, vocab_size=4096, prompt_length=16, completion_length=16)
    groups = [step_case(f"4 x {n}", replace(shape, group_size=n), size=4 * n) for n in (2, 4, 8)]
    by_group = step_table("A GRPO step, by group size", groups, providers, "completions per step")
    if options.quick:
        return [by_group]
    models = [step_case(f"width {n}", replace(shape, hidden_dim=n, group_size=4)) for n in (128, 512)]
    return [by_group, step_table("A GRPO step, by width of the model", models, providers)]


SUITE = Suite(
    "impact",
    "Where the time of a GRPO step goes",
    "Whole steps of Whet's trainer on Hugging Face Llamas, split into their phases: what share of a step the "
    "primitives are, and what the rest is.",
    tables,
)
