"""The task of the contenders, and how their first step is judged.

A step is written out by hand: plain torch in float32, one row at a time, on the completions that the contender sampled
itself. Loss, norm of the gradient, and how far a matrix moved have to be those of that step; and the tokens have to be
samples of the policy.
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
"""As both libraries name them."""
ADVANTAGE_EPS = 1e-4
GRPO_BETA = 0.04
"""Of the steps with a KL term."""
DPO_BETA = 0.1
_MOVED = "model.layers.0.self_attn.k_proj.weight"
_LETTERS = "abcdefghijklmnopqrstuvwxyz "


def step_flops(model: ModelShape, n_passes: int, prompts: tuple[int, float], completions: tuple[int, float]) -> float:
    """Operations of passes over prompts and completions, (how many, length) each, that compute every token once."""
    (n_prompts, prompt), (n_completions, completion) = prompts, completions
    n_completion = n_completions * completion
    n_tokens = n_prompts * prompt + n_completion
    context = (n_prompts * prompt**2 / 2 + n_completion * (prompt + completion / 2)) / n_tokens
    return n_passes * model.forward_flops(round(n_tokens), round(n_completion), context)


@dataclass(frozen=True)
class GRPOShape:
    """Sizes of a GRPO step, in prompts, completions and tokens.

    Attributes:
        mean_length: completions end by chance, after so many tokens on average; 0: only at completion_length.
        beta: weight of the KL to a reference; 0: there is no reference.
        seed: of the prompts.
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
        """Completions of a step."""
        return self.n_prompts * self.group_size

    @property
    def stop_ids(self) -> list[int]:
        """Tokens that end a completion. Random weights make all tokens about as probable, lengths about geometric."""
        n = round(self.model.config.vocab_size / self.mean_length) if self.mean_length else 0
        return list(range(self.model.config.vocab_size - 1 - n, self.model.config.vocab_size - 1))

    @property
    def n_tokens(self) -> float:
        """Tokens of the rows, as one counts them who computes every prompt for every completion of it."""
        return self.n_completions * (self.prompt_length + self._completion_length)

    @property
    def n_flops(self) -> float:
        """Sampling, forward and the backward's two products; with a KL term, the reference's forward too."""
        completions = self.n_completions, self._completion_length
        return step_flops(self.model, 5 if self.beta else 4, (self.n_prompts, self.prompt_length), completions)

    @property
    def _completion_length(self) -> float:
        # The mean of a geometric distribution that is cut off.
        stop = 1 / self.mean_length if self.mean_length else 0.0
        return (1 - (1 - stop) ** self.completion_length) / stop if stop else self.completion_length

    def prompts(self, step: int) -> list[str]:
        """The prompts of a step, a token a letter."""
        rng = np.random.default_rng([self.seed, step])
        return [_text(rng, self.prompt_length) for _ in range(self.n_prompts)]


@dataclass(frozen=True)
class DPOShape:
    """Sizes of a DPO step: pairs, tokens of the prompt, tokens of each of the two completions, its EOS included."""

    model: ModelShape = LLAMA_135M
    n_pairs: int = 8
    prompt_length: int = 256
    completion_length: int = 128
    seed: int = 0
    reference_noise: ClassVar[float] = 2e-3

    @property
    def n_tokens(self) -> int:
        """Tokens of the rows, the prompt counted for chosen and for rejected."""
        return 2 * self.n_pairs * (self.prompt_length + self.completion_length)

    @property
    def n_flops(self) -> float:
        """The reference, forward, and the backward's two."""
        completions = 2 * self.n_pairs, self.completion_length
        return step_flops(self.model, 4, (self.n_pairs, self.prompt_length), completions)

    def pairs(self) -> list[dict[str, str]]:
        """The pairs of every step, a token a letter; EOS, which trainers add, is the last token of a completion."""
        rng = np.random.default_rng(self.seed)
        lengths = {"prompt": self.prompt_length}
        lengths |= dict.fromkeys(("chosen", "rejected"), self.completion_length - 1)
        return [{name: _text(rng, n) for name, n in lengths.items()} for _ in range(self.n_pairs)]


def _text(rng: np.random.Generator, n: int) -> str:
    return "".join(_LETTERS[i] for i in rng.integers(len(_LETTERS), size=n))


def tokenizer_of(shape: GRPOShape | DPOShape) -> Any:
    """A Hugging Face tokenizer of one token per byte, and of as many more as the vocabulary has.

    EOS is in GRPO a token that the model does not have, so that none is ever sampled; in DPO the last but one of its
    vocabulary. Loads the modules of the models too, so that no contender's memory counts them.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2ForCausalLM  # noqa: F401

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
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def policy_of(shape: ModelShape) -> Any:
    """The model to be trained, float32."""
    return random_model(shape).requires_grad_(True)


def reference_of(shape: GRPOShape | DPOShape, policy: Any) -> Any:
    """A frozen copy with noise on its weights, so that no log-ratio is zero."""
    import torch

    model = copy.deepcopy(policy).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=shape.reference_noise)
    return model


def even_tokens(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """The reward: the share of a completion's token ids that are even."""
    return [sum(token % 2 == 0 for token in completion) / len(completion) for completion in completion_ids]


class Answer(NamedTuple):
    """A contender's account of a step.

    Attributes:
        loss: of the step.
        grad_norm: of all gradients, before clipping.
        moved: Euclidean norm of what the step added to a matrix (``Watch``).
        completion_ids: of GRPO, what it sampled, groups side by side.
    """

    loss: float
    grad_norm: float
    moved: float
    completion_ids: Sequence[Sequence[int]] = ()


@dataclass
class Watch:
    """How far a matrix of a model, one of the first layer, moves from step to step."""

    model: Any
    _before: Any = field(init=False)

    def __post_init__(self) -> None:
        self._before = self._matrix()

    def _matrix(self) -> Any:
        return self.model.get_parameter(_MOVED).detach().double().clone()

    def moved(self) -> float:
        """Since the last call."""
        before, self._before = self._before, self._matrix()
        return (self._before - before).norm().item()


# --- the first step, written out ------------------------------------------------------------------------


class Expected(NamedTuple):
    """A first step as it should be.

    Attributes:
        loss: of the step.
        policy: a model with its gradient.
        surprise: how many standard errors the log-probs of the sampled tokens are off their expectation.
        loss_scale: what an error of the loss is relative to.
    """

    loss: float
    policy: Any
    surprise: float = 0.0
    loss_scale: float = 1.0


def grpo_error(answer: Answer, shape: GRPOShape) -> float:
    """How far a first step is off (``_error``); infinite where completions have other lengths than asked for, or
    are no samples of the policy: six standard errors off."""
    lengths = {len(row) for row in answer.completion_ids}
    if len(answer.completion_ids) != shape.n_completions or not all(1 <= n <= shape.completion_length for n in lengths):
        return math.inf
    if not shape.mean_length and lengths != {shape.completion_length}:
        return math.inf
    right = grpo_written_out(answer.completion_ids, shape)
    return _error(answer, right) if abs(right.surprise) < 6 else math.inf


def grpo_written_out(completions: Sequence[Sequence[int]], shape: GRPOShape) -> Expected:
    """A first step on these completions.

    On the policy that sampled, every ratio rho is 1 and nothing is clipped. With the tokens of all completions in the
    denominator (dapo), and KL by k3 with the ratio as its factor::

        loss = mean over tokens of -rho A + beta rho (exp(d) - d - 1)
        A = (r - mean) / (sample deviation of the group + 1e-4),    d = log ref - log pi

    Of a sampled token, log pi has the expectation -H and the variance sum_v p_v log^2 p_v - H^2.
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
    # Where completions have one length, advantages add up to nothing, and the loss is the KL term.
    return Expected(loss, policy, excess / math.sqrt(variance), kl_loss or 1.0)


def dpo_error(answer: Answer, shape: DPOShape) -> float:
    """How far a first step is off (``_error``) from::

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
    """The largest error of an answer.

    Of the loss in units of ``loss_scale``, as it may be zero; relative of the norm of the gradient, and of how far a
    matrix moved, which by AdamW's first update is learning_rate g / (|g| + epsilon) of the clipped gradient g.
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
    """Log-probs (n, V) at the last n tokens of a row, and (n,) of these tokens."""
    import torch

    logprobs = model(torch.tensor([row]), logits_to_keep=n + 1).logits[0, :-1].log_softmax(-1)
    return logprobs, logprobs.gather(1, torch.tensor(row[-n:])[:, None])[:, 0]
