"""Small models, a tokenizer and an engine for tests; models of every family are in ``tests.engine.tiny_models``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from whet.config.sampling import Completion, SamplingParams

torch.set_num_threads(1)  # the models are too small for more

VOCAB = 12
EOS = 2


class TinyModel(nn.Module):
    """A causal net: forward(input_ids) -> logits."""

    def __init__(self, seed: int = 0, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCAB, 8)
            self.mixer = nn.GRU(8, 8, batch_first=True)
            self.head = nn.Linear(8, VOCAB)
        self.dropout = nn.Dropout(dropout)
        self.to(dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.dropout(self.mixer(self.embedding(input_ids))[0]))


class OwnGenerate(TinyModel):
    """A model with a custom ``generate``, which draws from torch's generator and returns no log-probs."""

    def generate(self, input_ids: Tensor, max_new_tokens: int) -> Tensor:
        for _ in range(max_new_tokens):
            input_ids = torch.cat([input_ids, torch.multinomial(self(input_ids)[:, -1].softmax(-1), 1)], 1)
        return input_ids


LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "eos_token_id": EOS, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def tiny_llama(seed: int = 0, **options: Any) -> Any:
    """Create a random Llama of the sizes in LLAMA, overridden by options; torch's generator state is preserved."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**LLAMA, **options}))


def with_lora(model: Any, seed: int = 0, b_std: float = 0.0, **settings: Any) -> Any:
    """Add random PEFT adapters, whose B factors have the standard deviation ``b_std``."""
    from peft import LoraConfig, get_peft_model

    given = {"r": 4, "target_modules": ["v_proj", "down_proj", "lm_head"], "task_type": "CAUSAL_LM"}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = get_peft_model(model, LoraConfig(**{**given, **settings}))
        for name, parameter in model.named_parameters():
            if b_std and "lora_B" in name:
                parameter.normal_(std=b_std)
    return model


def changed(model: nn.Module, seed: int = 1) -> Any:
    """Copy the model and perturb all of its parameters."""
    other = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return other


def letters_tokenizer() -> Any:
    """Create a tokenizer with one token per letter a..h; ids 0..3 are <pad> <s> </s> and a space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, " ": 3} | {letter: 4 + i for i, letter in enumerate("abcdefgh")}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


class ScriptedEngine:
    """A RolloutEngine that returns given completions and records its calls."""

    def __init__(
        self,
        groups: list[list[list[int]]],
        logprobs: list[list[list[float]]] | None = None,
        sampled: list[list[list[bool]]] | None = None,
    ) -> None:
        self.groups = groups
        self.logprobs = logprobs
        self.sampled = sampled
        self.policy_version = 0
        self.asked: list[tuple[list[list[int]], int, SamplingParams]] = []

    def sync(self, model: Any) -> None:
        self.policy_version += 1

    def generate(self, prompt_ids: Any, n: int, sampling: SamplingParams) -> list[list[Completion]]:
        self.asked.append((prompt_ids, n, sampling))
        return [
            [
                Completion(
                    ids,
                    self.logprobs[i][j] if self.logprobs else None,
                    "stop" if ids[-1] == EOS else "length",
                    self.policy_version,
                    sampled=self.sampled[i][j] if self.sampled else None,
                )
                for j, ids in enumerate(group)
            ]
            for i, group in enumerate(self.groups)
        ]


class Recorded:
    """Wrapper of an engine that records calls and results."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.policy_version = 0
        self.asked: list[tuple[int, int, float]] = []
        self.groups: list[list[list[Completion]]] = []

    def sync(self, model: Any) -> None:
        self.policy_version += 1
        self.engine.sync(model)

    def generate(self, prompt_ids: Any, n: int, sampling: SamplingParams) -> list[list[Completion]]:
        self.asked.append((len(prompt_ids), n, sampling.temperature))
        self.groups.append(self.engine.generate(prompt_ids, n, sampling))
        return self.groups[-1]


class Items(Dataset):
    """Minimal torch dataset."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < len(self.items):
            raise KeyError(i)  # torch does not require IndexError
        return self.items[i]


class Streamed(IterableDataset):
    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def fours(completions: list[Tensor]) -> list[float]:
    """Reward: number of occurrences of token 4."""
    return [float((c == 4).sum()) for c in completions]


def first_is_four(completions: list[Tensor]) -> list[float]:
    return [float(c[0] == 4) for c in completions]


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics that do not depend on time."""
    return {name: value for name, value in metrics.items() if "time" not in name and name != "tokens_per_s"}


def token_logprobs(model: nn.Module, prompt: list[int], completion: list[int], temperature: float = 1.0) -> Tensor:
    """Compute per-token log-probs of one completion by the plain definition: one row, no padding."""
    output = model(torch.tensor([prompt + completion]))
    logits = getattr(output, "logits", output)[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None]).squeeze(-1)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    other = weights(b)
    for name, value in weights(a).items():
        assert torch.equal(value, other[name]), name


def assert_close_weights(a: nn.Module, b: nn.Module, **tolerance: Any) -> None:
    torch.testing.assert_close(weights(a), weights(b), **tolerance)


def make_trainer(algorithm: Callable[..., Any], model: nn.Module | None = None, **settings: Any) -> Any:
    """Create a trainer whose step tests can write out: no clipping, and float32 if Whet's kernels compute."""
    given: dict[str, Any] = {"learning_rate": 0.02, "max_grad_norm": 0.0}
    if hasattr(model, "config"):
        given["compute"] = "float32"
    return algorithm(TinyModel() if model is None else model, **{**given, **settings})


def assert_resumes(
    make: Callable[[], Any], rows: Any, folder: Path, split: tuple[int, int] = (2, 2), **given: Any
) -> None:
    """Check that a run that is saved and continued has the weights of one without a break.

    Args:
        make: makes a new trainer.
        rows: its dataset.
        folder: for the checkpoint.
        split: steps before and after it.
        **given: arguments of ``from_checkpoint`` besides the model.
    """
    whole, first, other = make(), make(), make()
    whole.train(rows, sum(split))
    first.train(rows, split[0])
    first.save(folder / "checkpoint")
    second = type(first).from_checkpoint(folder / "checkpoint", model=other.model, **given)
    second.train(rows, split[1])
    if isinstance(whole.model, nn.Module):
        assert_same_weights(whole.model, second.model)
        return
    for a, b in zip(whole.model.parameters, second.model.parameters, strict=True):
        assert a.tobytes() == b.tobytes()


def padded(rows: list[list[int]], left: bool) -> dict[str, Tensor]:
    """Pad rows on the left or right, as a tokenizer does."""
    fills = [[0] * (max(map(len, rows)) - len(row)) for row in rows]
    ids = [fill + row if left else row + fill for row, fill in zip(rows, fills, strict=True)]
    masks = [fill + [1] * len(row) if left else [1] * len(row) + fill for row, fill in zip(rows, fills, strict=True)]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(masks)}


def assert_same_steps(make: Callable[[], Any], batches: Sequence[tuple[Any, ...]]) -> None:
    """Assert that one step on each batch leaves the same weights."""
    trainers = [make() for _ in batches]
    for trainer, batch in zip(trainers, batches, strict=True):
        trainer.train_step(*batch)
        assert_same_weights(trainer.model, trainers[0].model)
