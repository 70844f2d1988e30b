"""Workloads of the training suites, and the error of their first step.

The reference step is written out by hand: plain torch in float32, row by row, on the completions that the contender
sampled. Loss, gradient norm and the update of a matrix must agree, and the tokens must be samples of the policy.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from benchmarks.contenders.engine.models import DEVIATION, LLAMA_135M, ModelShape, random_model

LEARNING_RATE = 1e-6
ADAM_EPSILON = 1e-8
MAX_GRAD_NORM = 1.0
OPTIMIZER = {"learning_rate": LEARNING_RATE, "adam_epsilon": ADAM_EPSILON, "max_grad_norm": MAX_GRAD_NORM}
"""Settings with the names of both libraries."""
ADVANTAGE_EPS = 1e-4
GRPO_BETA = 0.04
"""beta of the steps with a KL term."""
DPO_BETA = 0.1
_MOVED = "model.layers.0.self_attn.k_proj.weight"
_LETTERS = "abcdefghijklmnopqrstuvwxyz "


def step_flops(model: ModelShape, n_passes: int, prompts: tuple[int, float], completions: tuple[int, float]) -> float:
    """Count the operations of passes over prompts and completions, (number, length) each, computing each token once."""
    (n_prompts, prompt), (n_completions, completion) = prompts, completions
    n_completion = n_completions * completion
    n_tokens = n_prompts * prompt + n_completion
    context = (n_prompts * prompt**2 / 2 + n_completion * (prompt + completion / 2)) / n_tokens
    return n_passes * model.forward_flops(round(n_tokens), round(n_completion), context)


@dataclass(frozen=True)
class GRPOShape:
    """Sizes of a GRPO step, in prompts, completions and tokens.

    Attributes:
        mean_length: mean length of completions that end randomly; 0: all have completion_length.
        beta: weight of the KL to a reference; 0: no reference.
        seed: seed of the prompts.
    """

    model: ModelShape = LLAMA_135M
    n_prompts: int = 4
    group_size: int = 8
    prompt_length: int = 128
    completion_length: int = 128
    mean_length: int = 0
    beta: float = 0.0
    seed: int = 0
    reference_noise: ClassVar[float] = DEVIATION  # as large as the weights: a KL far above the rounding of float32

    @property
    def n_completions(self) -> int:
        """Number of completions of a step."""
        return self.n_prompts * self.group_size

    @property
    def stop_ids(self) -> list[int]:
        """Stop tokens. With random weights all tokens are about equally probable, so lengths are about geometric."""
        n = round(self.model.config.vocab_size / self.mean_length) if self.mean_length else 0
        return list(range(self.model.config.vocab_size - 1 - n, self.model.config.vocab_size - 1))

    @property
    def n_tokens(self) -> float:
        """Tokens of the rows, counting a prompt once per completion."""
        return self.n_completions * (self.prompt_length + self._completion_length)

    @property
    def n_flops(self) -> float:
        """Operations of sampling, forward, and two products of backward; with a KL term, the reference's forward."""
        completions = self.n_completions, self._completion_length
        return step_flops(self.model, 5 if self.beta else 4, (self.n_prompts, self.prompt_length), completions)

    @property
    def _completion_length(self) -> float:
        # Mean of a truncated geometric distribution.
        stop = 1 / self.mean_length if self.mean_length else 0.0
        return (1 - (1 - stop) ** self.completion_length) / stop if stop else self.completion_length

    def prompts(self, step: int) -> list[str]:
        """Return the prompts of a step, one token per letter."""
        rng = np.random.default_rng([self.seed, step])
        return [_text(rng, self.prompt_length) for _ in range(self.n_prompts)]


@dataclass(frozen=True)
class DPOShape:
    """Sizes of a DPO step: pairs, tokens of the prompt, tokens of each completion including its EOS."""

    model: ModelShape = LLAMA_135M
    n_pairs: int = 8
    prompt_length: int = 256
    completion_length: int = 128
    seed: int = 0
    reference_noise: ClassVar[float] = 2e-3

    @property
    def n_tokens(self) -> int:
        """Tokens of the rows, counting the prompt for chosen and for rejected."""
        return 2 * self.n_pairs * (self.prompt_length + self.completion_length)

    @property
    def n_flops(self) -> float:
        """Operations of the reference's forward, forward, and two products of backward."""
        completions = 2 * self.n_pairs, self.completion_length
        return step_flops(self.model, 4, (self.n_pairs, self.prompt_length), completions)

    def pairs(self) -> list[dict[str, str]]:
        """Return the pairs of every step, one token per letter; trainers append EOS to a completion."""
        rng = np.random.default_rng(self.seed)
        lengths = {"prompt": self.prompt_length}
        lengths |= dict.fromkeys(("chosen", "rejected"), self.completion_length - 1)
        return [{name: _text(rng, n) for name, n in lengths.items()} for _ in range(self.n_pairs)]


def _text(rng: np.random.Generator, n: int) -> str:
    return "".join(_LETTERS[i] for i in rng.integers(len(_LETTERS), size=n))


def tokenizer_of(shape: GRPOShape | DPOShape) -> Any:
    """Create a Hugging Face tokenizer from ``byte_tokenizer``.

    The models' modules are imported too, so that no contender's memory counts them.
    """
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2ForCausalLM  # noqa: F401

    return PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(shape), eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def byte_tokenizer(shape: GRPOShape | DPOShape) -> Any:
    """Create a ``tokenizers.Tokenizer`` of one token per byte, filled up to the vocabulary size.

    GRPO's EOS is outside of the model's vocabulary, so that it is never sampled; DPO's is its second to last entry.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab_size = shape.model.config.vocab_size
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    names += [f"<{i}>" for i in range(len(names), vocab_size - 1)] + ["<pad>"]
    if isinstance(shape, GRPOShape):
        names.append("<eos>")
    else:
        names[-2] = "<eos>"
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return tokenizer


def policy_of(shape: ModelShape) -> Any:
    """Create the model to train, in float32."""
    return random_model(shape).requires_grad_(True)


def reference_of(shape: GRPOShape | DPOShape, policy: Any) -> Any:
    """Create a frozen copy with noise on its weights, so that no log-ratio is zero."""
    import torch

    model = copy.deepcopy(policy).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=shape.reference_noise)
    return model


def even_tokens(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """Reward: share of even token ids in a completion."""
    return [sum(token % 2 == 0 for token in completion) / len(completion) for completion in completion_ids]


class Answer(NamedTuple):
    """A contender's report of a step.

    Attributes:
        loss: loss of the step.
        grad_norm: norm of all gradients, before clipping.
        moved: Euclidean norm of the update of a matrix (``Watch``).
        completion_ids: GRPO's sampled completions, ordered by group.
    """

    loss: float
    grad_norm: float
    moved: float
    completion_ids: Sequence[Sequence[int]] = ()


@dataclass
class Watch:
    """Measures the updates of a matrix of the first layer."""

    model: Any
    _before: Any = field(init=False)

    def __post_init__(self) -> None:
        self._before = self._matrix()

    def _matrix(self) -> Any:
        return self.model.get_parameter(_MOVED).detach().double().clone()

    def moved(self) -> float:
        """Return the norm of the matrix's change since the last call."""
        before, self._before = self._before, self._matrix()
        return (self._before - before).norm().item()


# --- the first step, written out ------------------------------------------------------------------------


class Expected(NamedTuple):
    """Reference of a first step.

    Attributes:
        loss: loss of the step.
        policy: the model with its gradient.
        surprise: deviation of the sampled tokens' log-probs from their expectation, in standard errors.
        loss_scale: scale of the relative error of the loss.
    """

    loss: float
    policy: Any
    surprise: float = 0.0
    loss_scale: float = 1.0


def grpo_error(answer: Answer, shape: GRPOShape) -> float:
    """Return the error of a first step (``_error``); infinity if completions have wrong lengths or are not samples of
    the policy: log-probs six standard errors off their expectation."""
    lengths = {len(row) for row in answer.completion_ids}
    if len(answer.completion_ids) != shape.n_completions or not all(1 <= n <= shape.completion_length for n in lengths):
        return math.inf
    if not shape.mean_length and lengths != {shape.completion_length}:
        return math.inf
    right = grpo_written_out(answer.completion_ids, shape)
    return _error(answer, right) if abs(right.surprise) < 6 else math.inf


def grpo_written_out(completions: Sequence[Sequence[int]], shape: GRPOShape) -> Expected:
    """Compute a first step on these completions.

    The policy is the sampling policy, so every ratio rho is 1 and nothing is clipped. With the tokens of all
    completions in the denominator (dapo), and the k3 KL weighted by the ratio::

        loss = mean over tokens of -rho A + beta rho (exp(d) - d - 1)
        A = (r - mean) / (sample deviation of the group + 1e-4),    d = log ref - log pi

    For a sampled token, log pi has the expectation -H and the variance sum_v p_v log^2 p_v - H^2.
    """
    import torch

    policy, tokenizer = policy_of(shape.model), tokenizer_of(shape)
    reference = reference_of(shape, policy) if shape.beta else None
    prompts = [tokenizer(text)["input_ids"] for text in shape.prompts(0)]
    rewards = np.array(even_tokens(completions)).reshape(shape.n_prompts, -1)
    centred = rewards - rewards.mean(1, keepdims=True)
    advantages = (centred / (rewards.std(1, ddof=1, keepdims=True) + ADVANTAGE_EPS)).ravel()
    n_tokens = sum(map(len, completions))
    loss = kl_loss = excess = variance = 0.0
    for i, completion in enumerate(completions):
        row = [*prompts[i // shape.group_size], *completion]
        logprobs, own = _token_logprobs(policy, row, len(completion))
        ratio, penalty = (own - own.detach()).exp(), 0.0
        if reference is not None:
            difference = _token_logprobs(reference, row, len(completion))[1].detach() - own
            penalty = shape.beta * (difference.exp() - difference - 1)
            kl_loss += penalty.detach().sum().item() / n_tokens
        row_loss = (ratio * (penalty - advantages[i])).sum() / n_tokens
        row_loss.backward()
        loss += row_loss.item()
        with torch.no_grad():
            p = logprobs.exp()
            entropy = -(p * logprobs).sum(1)
            excess += (own + entropy).sum().item()
            variance += ((p * logprobs.square()).sum(1) - entropy.square()).sum().item()
    # With completions of equal length the advantages sum to zero, and the loss is the KL term.
    return Expected(loss, policy, excess / math.sqrt(variance), kl_loss or 1.0)


def dpo_error(answer: Answer, shape: DPOShape) -> float:
    """Return the error of a first step (``_error``), whose loss is::

    loss = mean over pairs of -log sigmoid(beta [(chosen - ref chosen) - (rejected - ref rejected)])
    """
    import torch

    policy, tokenizer = policy_of(shape.model), tokenizer_of(shape)
    reference = reference_of(shape, policy)
    loss = 0.0
    for pair in shape.pairs():
        prompt, eos = tokenizer(pair["prompt"])["input_ids"], [tokenizer.eos_token_id]
        ratios = []
        for side in ("chosen", "rejected"):
            completion = tokenizer(pair[side])["input_ids"] + eos
            row = [*prompt, *completion]
            own = _token_logprobs(policy, row, len(completion))[1].sum()
            ratios.append(own - _token_logprobs(reference, row, len(completion))[1].sum().detach())
        pair_loss = -torch.nn.functional.logsigmoid(DPO_BETA * (ratios[0] - ratios[1])) / shape.n_pairs
        pair_loss.backward()
        loss += pair_loss.item()
    return _error(answer, Expected(loss, policy))


def _error(answer: Answer, right: Expected) -> float:
    """Return the largest error of an answer.

    The loss error is in units of ``loss_scale``, since the loss may be zero; the errors of gradient norm and matrix
    update are relative. AdamW's first update is learning_rate g / (|g| + epsilon) with the clipped gradient g.
    """
    import torch

    norms = [parameter.grad.double().norm() for parameter in right.policy.parameters()]
    norm = torch.stack(norms).norm().item()
    gradient = right.policy.get_parameter(_MOVED).grad.double() * min(1.0, MAX_GRAD_NORM / norm)
    moved = (LEARNING_RATE * gradient / (gradient.abs() + ADAM_EPSILON)).norm().item()
    loss_error = abs(answer.loss - right.loss) / right.loss_scale
    errors = (loss_error, abs(answer.grad_norm / norm - 1), abs(answer.moved / moved - 1))
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def _token_logprobs(model: Any, row: Sequence[int], n: int) -> tuple[Any, Any]:
    """Return the log-probs (n, V) at the last n tokens of a row, and the log-probs (n,) of these tokens."""
    import torch

    logprobs = model(torch.tensor([row]), logits_to_keep=n + 1).logits[0, :-1].log_softmax(-1)
    return logprobs, logprobs.gather(1, torch.tensor(row[-n:])[:, None])[:, 0]
