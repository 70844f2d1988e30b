"""Workloads of the suites "lora" and "lora-learning": runs of trainers on LoRA adapters, each in a separate process.

Whet and TRL get the same weights, rows, order and settings. The tokens of each step are compared with the expected
tokens; the results are its time and the memory peak of its process.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from benchmarks.contenders.engine.models import ModelShape, empty_model, write_random_folder
from benchmarks.contenders.training import workload
from benchmarks.contenders.training.contender import Contender, whole_run
from benchmarks.contenders.training.workload import DPOShape, GRPOShape
from whet.bench.case import Timed, WholeRun
from whet.config.algorithms import ALGORITHMS
from whet.data.rows import tokenize_completion, tokenize_preference, tokenize_prompt
from whet.models.tokenizers import BackendTokenizer, load_tokenizer

RANK = 16
ALPHA = 32
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""All linear layers except the head, in a Llama."""
FAMILY_LAYERS: Mapping[str, Sequence[str]] = {
    "lfm2": ("q_proj", "k_proj", "v_proj", "in_proj", "out_proj", "w1", "w2", "w3"),
    "qwen3_5_text": (*LAYERS, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    "olmoe": LAYERS[:4],  # experts are frozen
}
"""All linear layers except the head in other families, by model_type."""
LEARNING_RATES = {"adapters": 2e-4, "all weights": 5e-6}
SIMPO = {"beta": 2.0, "margin": 0.5}
RLOO_BETA = 0.05
SUMS = "reasoning_gym:chain_sum,min_terms=2,max_terms=2,min_digits=1,max_digits=2"
LONG_SUMS = "reasoning_gym:chain_sum,min_terms=4,max_terms=4,min_digits=3,max_digits=3"
CALCULATOR = Path("examples/calculator")
MAX_CALLS = 2
"""Turns of an episode that may call tools."""
_N_SUMS = 5000
_CHAT = "{% for message in messages %}{{ message.content }}\n{% endfor %}"

Method = Literal["grpo", "rloo", "distill", "sft", "dpo", "simpo", "kto", "reward"]
TEACHER_NOISE = 2e-3
"""Deviation of the noise on the student's weights that makes the weights of distillation's teacher."""


def is_paired(method: Method) -> bool:
    """Return whether the rows of a method are pairs."""
    return ALGORITHMS[method].config.is_paired


@dataclass(frozen=True)
class Weights:
    """A model on disk in the native form of each library; temporary files are removed with the object.

    Attributes:
        path: for Whet: a GGUF file or the folder.
        folder: Hugging Face folder with the same weights.
    """

    path: Path
    folder: Path

    @classmethod
    def of_file(cls, gguf: str) -> Weights:
        """Use a GGUF file, and write its weights in float32 to a temporary folder."""
        from whet.models.sources.gguf_model import load_gguf_model

        path = Path(gguf).resolve(strict=True)
        weights = cls(path, _temporary_folder())
        for part in load_gguf_model(path):
            part.save_pretrained(weights.folder)
        return weights._remove_with_self()

    @classmethod
    def of_calls(cls, gguf: str) -> Weights:
        """Train the model of a GGUF file to call the calculator, by the SFT of the example, and merge the adapters."""

        def run(*arguments: object, output: Path | None = None) -> None:
            text = subprocess.run(
                [sys.executable, *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True
            ).stdout
            if output is not None:
                output.write_text(text, encoding="utf-8")

        folder = _temporary_folder()
        weights = cls(folder / "model", folder / "model")
        weakref.finalize(weights, shutil.rmtree, folder, ignore_errors=True)
        rows, output = folder / "calls.jsonl", folder / "calls"
        run(CALCULATOR / "rows.py", output=rows)
        files = ("--model", Path(gguf).resolve(strict=True), "--data", rows, "--output-dir", output)
        run("-m", "whet", "train", "sft", CALCULATOR / "sft.toml", *files)
        run("-m", "whet", "merge", output / "model", weights.folder)
        return weights

    @classmethod
    def random(cls, shape: ModelShape) -> Weights:
        """Write random bfloat16 weights of a shape to a temporary folder."""
        folder = _temporary_folder()
        write_random_folder(shape, folder)
        return cls(folder, folder)._remove_with_self()

    @cached_property
    def teacher(self) -> Path:
        """Folder of other weights of the same shape: the model's, with noise; removed with this object."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = _temporary_folder()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=TEACHER_NOISE)
        model.save_pretrained(folder)
        if (self.folder / "tokenizer.json").is_file():
            AutoTokenizer.from_pretrained(self.folder).save_pretrained(folder)
        return folder

    def _remove_with_self(self) -> Weights:
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        return self


def _temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="whet-bench-"))


class Tokens(NamedTuple):
    """Tokens of a step.

    Attributes:
        rows: digest of the token ids of the prompts if the method samples, else of the whole rows.
        n_completion: number of completion tokens.
    """

    rows: str
    n_completion: int


class Step(NamedTuple):
    """A contender's report of a step.

    Attributes:
        tokens: tokens of the step.
        n_trained: number of trained parameters.
        loss: loss of the step.
        grad_norm: norm of all gradients, before clipping.
        seconds: time of the step.
        memory: memory of the process by owner at its peak step so far, if known.
        score: held-out score of the policy before the step, if evaluated.
    """

    tokens: Tokens
    n_trained: int
    loss: float
    grad_norm: float
    seconds: float
    memory: Mapping[str, int] = {}
    score: float | None = None


@dataclass(frozen=True)
class Work:
    """Steps of a method on rows; rows are dicts that both libraries accept.

    Attributes:
        method: the algorithm.
        path, folder: files of the model, see ``Weights``.
        shape: shape of the model and of random rows; None: rows are sums of two terms.
        n_steps: number of steps; the first step does not count.
        seed: seed of the order of the sums, of the adapters and of sampling.
        evaluate_every: steps between evaluations on held-out sums; 0: no evaluation.
        n_held_out: number of sums of an evaluation.
        task: the sums.
        tools: functions that the model may call, as ``FILE:NAME``.
        teacher: folder of distillation's teacher.
    """

    method: Method
    path: str
    folder: str
    model: ModelShape
    shape: GRPOShape | DPOShape | None = None
    n_steps: int = 5
    seed: int = 0
    evaluate_every: int = 0
    n_held_out: int = 200
    n_prompts: int = 8
    group_size: int = 8
    max_new_tokens: int = 24
    task: str = SUMS
    tools: tuple[str, ...] = ()
    teacher: str = ""

    @classmethod
    def on_sums(cls, weights: Weights, model: ModelShape, **settings: Any) -> Work:
        """Make GRPO steps on sums of two terms: 8 prompts per step, 8 completions each of at most 24 tokens."""
        return cls("grpo", str(weights.path), str(weights.folder), model, **settings)

    @classmethod
    def of_shape(cls, method: Method, weights: Weights, shape: GRPOShape | DPOShape, **settings: Any) -> Work:
        """Make steps on random rows with completions of full length."""
        if isinstance(shape, GRPOShape):
            sizes = (shape.n_prompts, shape.group_size, shape.completion_length)
            settings |= dict(zip(("n_prompts", "group_size", "max_new_tokens"), sizes, strict=True))
        if method == "distill":
            settings["teacher"] = str(weights.teacher)
        return cls(method, str(weights.path), str(weights.folder), shape.model, shape, **settings)

    @property
    def n_rows(self) -> int:
        """Number of rows of a step: completions, pairs (DPO) or examples (SFT, KTO)."""
        if isinstance(self.shape, DPOShape):
            return self.shape.n_pairs * (1 if self.is_paired else 2)
        return self.n_prompts * self.group_size

    @property
    def samples(self) -> bool:
        """Whether the method samples completions."""
        return ALGORITHMS[self.method].config.samples

    @property
    def is_paired(self) -> bool:
        """Whether a row is a pair."""
        return is_paired(self.method)

    def tokenizer(self, *, is_native: bool = False) -> Any:
        """Load the model's tokenizer, or create a byte tokenizer if its weights are random.

        Args:
            is_native: without transformers.
        """
        shape = self.shape or DPOShape(self.model)
        if (Path(self.folder) / "tokenizer.json").is_file():
            if is_native:
                return load_tokenizer(self.folder)
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(self.folder)
        if is_native:
            texts = {"eos_token": "<eos>", "pad_token": "<pad>"}
            return BackendTokenizer(workload.byte_tokenizer(shape), texts, _CHAT)
        tokenizer = workload.tokenizer_of(shape)
        tokenizer.chat_template = _CHAT
        return tokenizer

    # --- rows -----------------------------------------------------------------------------------------------

    @cached_property
    def _sums(self) -> tuple[Any, Any]:
        """Tasks of training and evaluation."""
        from whet.tasks import open_task

        trained = open_task(f"{self.task},seed=1000000,size={_N_SUMS}")
        return trained, open_task(self.task, split="eval", size=self.n_held_out)

    def load_tools(self) -> list[Callable[..., Any]]:
        """Return the functions that the model may call."""
        from whet.tasks.tools import load_tools

        return load_tools(self.tools)

    @cached_property
    def _order(self) -> list[int]:
        return np.random.default_rng(self.seed).permutation(len(self._sums[0].rows)).tolist()

    def rows(self, step: int) -> list[dict[str, Any]]:
        """Return the rows of a step, counted from 0."""
        if isinstance(self.shape, GRPOShape):
            return [{"prompt": text, "row": i} for i, text in enumerate(self.shape.prompts(step))]
        if isinstance(self.shape, DPOShape):
            pairs = self.shape.pairs()
            if self.is_paired:
                return pairs
            rows = [(p["prompt"], p[side], side == "chosen") for p in pairs for side in ("chosen", "rejected")]
            names = ("prompt", "completion", "label")[: 3 if self.method == "kto" else 2]
            return [dict(zip(names, row, strict=False)) for row in rows]
        first = step * self.n_prompts
        return [self._sum(0, self._order[i % len(self._order)]) for i in range(first, first + self.n_prompts)]

    def held_out(self) -> list[dict[str, Any]]:
        """Return the sums of an evaluation."""
        return [self._sum(1, i) for i in range(self.n_held_out)]

    def _sum(self, split: int, row: int) -> dict[str, Any]:
        from whet.tasks import make_prompt

        task = self._sums[split]
        return {"prompt": make_prompt(task, task.rows[row]), "row": row if split == 0 else -1 - row}

    def reward(self, completions: Sequence[Any], completion_ids: Any = None, row: Sequence[int] = (), **_: Any) -> Any:
        """Score completions: sums by the task; random rows by the share of even token ids.

        Args:
            completions: texts, or messages.
            row: indices of sums in the task; held-out sums count down from -1.
        """
        from whet.tasks.mixture import final_answer

        if self.shape is not None:
            return workload.even_tokens(completion_ids)
        texts = list(map(final_answer, completions))
        tasks = [self._sums[int(i < 0)] for i in row]
        places = [i if i >= 0 else -1 - i for i in row]
        return [float(task.score(text, task.rows[i])) for text, task, i in zip(texts, tasks, places, strict=True)]

    # --- checks -----------------------------------------------------------------------------------------------

    def token_rows(self, rows: Iterable[Mapping[str, Any]], tokenizer: Any) -> list[list[int]]:
        """Tokenise the prompts of methods that sample, or whole rows of others, as Whet does."""
        if self.samples:
            from whet.tasks.schemas import tool_schema

            tools = {"tools": list(map(tool_schema, self.load_tools()))} if self.tools else {}
            return [tokenize_prompt({**row, **tools}, tokenizer) for row in rows]
        if not self.is_paired:
            return [prompt + ids for prompt, ids in (tokenize_completion(row, tokenizer) for row in rows)]
        pairs = [tokenize_preference(row, tokenizer) for row in rows]
        return [prompt + ids for prompt, *both in pairs for ids in both]

    def expected(self) -> list[str]:
        """Return the digest of the rows of each step."""
        tokenizer = self.tokenizer()
        return [digest(self.token_rows(self.rows(step), tokenizer)) for step in range(self.n_steps)]

    def is_evaluated(self, step: int) -> bool:
        """Whether the policy is evaluated before this step."""
        return self.evaluate_every > 0 and step % self.evaluate_every == 0


def digest(rows: Iterable[Sequence[int]]) -> str:
    """Return a digest of rows of token ids that does not depend on their order."""
    return hashlib.sha256(json.dumps(sorted([int(i) for i in row] for row in rows)).encode()).hexdigest()[:16]


def layers_of(shape: ModelShape) -> Sequence[str]:
    """Return the layers that have adapters."""
    return FAMILY_LAYERS.get(shape.hf_config["model_type"], LAYERS)


def lora_config(shape: ModelShape, task_type: str = "CAUSAL_LM") -> Any:
    """Return the configuration of every contender's adapters."""
    from peft import LoraConfig

    return LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(layers_of(shape)), task_type=task_type)


def n_adapter_parameters(shape: ModelShape) -> int:
    """Return the number of parameters of a model's adapters."""
    if shape.hf_config["model_type"] not in FAMILY_LAYERS:
        return RANK * sum(n + k for n, k in _layer_shapes(shape))
    layers = layers_of(shape)
    matrices = (parameter for name, parameter in empty_model(shape).named_parameters() if name.split(".")[-2] in layers)
    return RANK * sum(sum(matrix.shape) for matrix in matrices if matrix.ndim == 2)


def _layer_shapes(shape: ModelShape) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of all linear layers except the head."""
    config = shape.config
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    hidden, ffn = config.hidden_dim, config.ffn_dim
    layer = [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q), (ffn, hidden), (ffn, hidden), (hidden, ffn)]
    return layer * config.n_layers


_OTHER_PASSES: Mapping[Method, int] = {
    "sft": 0, "dpo": 1, "simpo": 0, "kto": 3, "reward": 0, "grpo": 1, "rloo": 2, "distill": 2
}  # fmt: skip
"""Forward passes without a backward pass: sampling, a reference, a teacher, KTO's KL term of policy and reference."""


def lora_step_flops(shape: GRPOShape | DPOShape, method: Method = "grpo", *, quantised: bool = False) -> float:
    """Count the operations of a step on adapters that computes every token once, and no layer again.

    A forward pass takes one product per matrix, backward dx = dy W (the head's within the forward pass); attention
    recomputes its scores (five products for the two of the forward pass). Adapters take four products of A and B.
    Sampling on a quantised base counts half: it is in 8 bits, at twice the rate.
    """
    model = shape.model
    if isinstance(shape, GRPOShape):
        n_prompts, n_completions = shape.n_prompts, shape.n_completions
    else:
        n_prompts, n_completions = shape.n_pairs, 2 * shape.n_pairs
    n_prompt, n_completion = n_prompts * shape.prompt_length, n_completions * shape.completion_length
    passes = workload.step_flops(model, 1, (n_prompts, shape.prompt_length), (n_completions, shape.completion_length))
    matrices = model.forward_flops(n_prompt + n_completion, n_completion, 0.0)
    attention = passes - matrices
    if method == "reward":  # a scalar head
        head = matrices - model.forward_flops(n_prompt + n_completion, 0, 0.0)
        passes, matrices = passes - head, matrices - head
    adapters = 4 * 2 * (n_prompt + n_completion) * n_adapter_parameters(model)
    n_passes = 1 + _OTHER_PASSES[method] - (0.5 if quantised else 0.0)
    return passes * n_passes + matrices + 2.5 * attention + adapters


# --- the run ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """Steps of a run, for ``run_error``."""

    steps: Sequence[Step] = field(repr=False)


def run_whole(serve: Callable[..., None], work: Work, settings: Mapping[str, Any]) -> WholeRun:
    """Run ``work`` in a separate process; its first step is not a sample."""
    return run_steps(partial(Contender, serve), work, settings)


def run_steps(start: Callable[..., Callable[[], Timed]], work: Work, settings: Mapping[str, Any]) -> WholeRun:
    """Run ``work`` by the contender that ``start`` creates."""
    run = whole_run(partial(start, replace(work), dict(settings)), work.n_steps)  # without cached properties
    steps: list[Step] = run.value
    curve = [(i, step.score) for i, step in enumerate(steps) if step.score is not None]
    return replace(run, value=Answer(steps), memory=steps[-1].memory, curve=curve)


def run_error(answer: Answer, work: Work) -> float:
    """Return 0 for a correct run, else 1.

    A correct step has the expected rows, completions of full length on random rows, all adapters or all weights
    trained, and a finite loss and gradient.
    """
    head = work.model.config.hidden_dim if work.method == "reward" else 0
    n_trained = {n_adapter_parameters(work.model) + head, work.model.config.n_parameters}
    steps = answer.steps
    right = [step.tokens.rows for step in steps] == work.expected()
    right &= all(step.n_trained in n_trained for step in steps)
    right &= bool(np.isfinite([[step.loss, step.grad_norm] for step in steps]).all())
    if work.samples:
        most = work.n_rows * work.max_new_tokens
        right &= all(0 < step.tokens.n_completion <= most for step in steps)
        right &= work.shape is None or all(step.tokens.n_completion == most for step in steps)
    return 0.0 if right else 1.0


def held_out_score(engine: Any, model: Any, work: Work, tokenizer: Any) -> float:
    """Return the mean score of the held-out sums, answered greedily by a native engine with the model's weights."""
    from whet.config.sampling import SamplingParams

    rows = work.held_out()
    sampling = SamplingParams(
        temperature=0, max_new_tokens=work.max_new_tokens, stop_token_ids=[int(tokenizer.eos_token_id)]
    )
    engine.sync(model)
    completions = engine.generate([tokenize_prompt(row, tokenizer) for row in rows], 1, sampling)
    texts = [tokenizer.decode(group[0].token_ids, skip_special_tokens=True) for group in completions]
    return statistics.mean(work.reward(texts, row=[row["row"] for row in rows]))
