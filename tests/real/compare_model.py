"""Compare Whet with llama.cpp on one real model in every mixture of llama.cpp's quantiser.

    python -m tests.real.compare_model                 # all mixtures: make test-real
    python -m tests.real.compare_model Q4_K_M Q8_0     # some
    python -m tests.real.compare_model --write         # and stores llama.cpp's log-probs, for a test without it

Needs llama-cpp-python. The files are made once, in build/real. For each: perplexity on 1,024 tokens of prose, mean
absolute differences of their log-probs, and greedy text of 32 tokens for 20 prompts. Both are compared with the exact
model too: the file's weights, computed in float32. The exit status is 1 if a file misses a limit in ``faults``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from tests.real.model import FOLDER, PROSE, SHIPPED, fetch_model

from whet import Engine, SamplingParams
from whet.models.formats import TABLE
from whet.models.sources.gguf import open_gguf
from whet.models.tokenizers import read_tokenizer

MIXTURES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S",
    "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4_MOE",
)  # fmt: skip
EXACT = {"F32": 1e-3, "F16": 2e-3}
"""Types that llama.cpp also computes in float32, except F16's inputs -> limit of the mean difference of log-probs."""
CHANCE = 49_152
"""Perplexity of a guess: the vocabulary size. 1.6 bits, without training for them, are worse."""
N_TOKENS, NEW_TOKENS = 1024, 32
LOGPROBS = Path(__file__).with_name("logprobs.json")
PROMPTS = Path(__file__).with_name("prompts.txt")
STORED = slice(64, 128)
"""Stored log-probs, counted from the second token of the prose."""
Tokens = list[int]


class Comparison(NamedTuple):
    """A row of the table.

    Attributes:
        types: types of the file's matrices.
        perplexities: Whet's, llama.cpp's, and the exact model's.
        apart: mean absolute difference of their log-probs.
        errors: this difference of each from the exact model.
        n_same: number of equal greedy texts.
        gaps: largest difference of the exact model's two best logits at the first different token of two texts: of all,
            and of texts in which Whet's token is not the best.
    """

    name: str
    types: set[str]
    perplexities: tuple[float, float, float]
    apart: float
    errors: tuple[float, float]
    n_same: int
    gaps: tuple[float, float]

    @property
    def ratio(self) -> float:
        return self.perplexities[0] / self.perplexities[1]

    def faults(self) -> list[str]:
        """List the missed limits.

        llama.cpp rounds the inputs of products with K-quants in blocks of 256 with one scale, of other types in blocks
        of 32, and of F16 to float16: there the exact model decides which is off. Both round the inputs of quantised
        products to 8 bits: in 640 greedy tokens, logits up to 0.5 apart swap in either.
        """
        perplexity, theirs, exact = self.perplexities
        if exact > CHANCE:
            return []  # noise, which grows with every layer; the file has opened
        is_float = all(TABLE[type].is_float for type in self.types)
        has_super_blocks = any(TABLE[type].block_length == 256 for type in self.types)
        limit = 0.1 if has_super_blocks else 0.08
        own_error, their_error = self.errors
        wrong = {
            "perplexity": abs(self.ratio - 1) > 0.01 and abs(perplexity - exact) > abs(theirs - exact),
            f"log-probs {limit} apart": self.apart >= limit,
            "further from exact than llama.cpp": has_super_blocks and own_error > their_error,
            "llama.cpp is not exact": their_error >= EXACT.get(self.name, 1.0),
            "a certain token is another": self.gaps[1] > (0.2 if is_float else 0.75),
        }
        return [fault for fault, is_wrong in wrong.items() if is_wrong]


def make_mixture(source: Path, name: str) -> Path:
    """Return the file of a mixture, quantised by llama.cpp from the source."""
    import llama_cpp

    path = FOLDER / f"{name}.gguf"
    if not path.exists():
        options = llama_cpp.llama_model_quantize_default_params()
        kind = "ALL" if name == "F32" else "MOSTLY"
        options.ftype, options.allow_requantize = getattr(llama_cpp, f"LLAMA_FTYPE_{kind}_{name}"), True
        temporary = path.with_suffix(".writing")
        if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(temporary), ctypes.byref(options)):
            raise SystemExit(f"llama.cpp cannot quantise {source} to {name}.")
        temporary.replace(path)
    return path


class LlamaCpp:
    """llama.cpp with a file; keys and values are float16 unless ``exact``."""

    def __init__(self, path: Path, exact: bool) -> None:
        import llama_cpp

        cache = llama_cpp.GGML_TYPE_F32 if exact else llama_cpp.GGML_TYPE_F16
        options = {"n_threads": len(os.sched_getaffinity(0)), "type_k": cache, "type_v": cache, "verbose": False}
        self.llama = llama_cpp.Llama(str(path), n_ctx=N_TOKENS, logits_all=True, **options)

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *_: object) -> None:
        self.llama.close()

    def logits(self, ids: Tokens) -> np.ndarray:
        """Return the logits (T, V) after every token, valid until the next call."""
        self.llama.reset()
        self.llama.eval(ids)
        return self.llama.scores[: len(ids)]

    def logprobs(self, ids: Tokens) -> np.ndarray:
        """Return the log-probs of every token except the first, in float64."""
        found = []
        for logits, token in zip(self.logits(ids), ids[1:], strict=False):
            wide = logits.astype(np.float64) - logits.max()
            found.append(wide[token] - np.log(np.exp(wide).sum()))
        return np.array(found)

    def first_difference(self, prompt: Tokens, text: Tokens) -> int | None:
        """Return the index of the first token of a text that differs from llama.cpp's greedy token."""
        greedy = self.logits(prompt + text)[len(prompt) - 1 : -1].argmax(axis=1)
        return next((i for i, (a, b) in enumerate(zip(greedy, text, strict=True)) if a != b), None)


def compare(name: str, path: Path, ids: Tokens, prompts: list[Tokens]) -> tuple[Comparison, np.ndarray]:
    """Return a row of the table, and llama.cpp's log-probs."""
    with Engine.from_gguf(path) as engine:
        [ours] = engine.logprobs([ids])
        greedy = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS)
        texts = [each.token_ids for [each] in engine.generate(prompts, 1, greedy)]
    with LlamaCpp(path, name in EXACT) as llama:
        theirs = llama.logprobs(ids)
        ends = [llama.first_difference(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    parted = [(prompt, text, end) for prompt, text, end in zip(prompts, texts, ends, strict=True) if end is not None]
    with Engine.from_gguf(path, weights="float32", embedding="float32", head="float32") as engine:
        [exact] = engine.logprobs([ids])
        gaps, own_gaps = [0.0], [0.0]
        for prompt, text, end in parted:
            logits = engine.logits(prompt + text[:end])[-1]
            second, best = logits.argsort()[-2:]
            gaps.append(float(logits[best] - logits[second]))
            own_gaps.append(gaps[-1] * (text[end] != best))
    apart, *errors = (float(np.abs(a - b).mean()) for a, b in ((ours, theirs), (ours, exact), (theirs, exact)))
    row = Comparison(
        name,
        {row_slice.format for row_slice in open_gguf(path).slices() if row_slice.tensor.ndim == 2},
        (perplexity(ours), perplexity(theirs), perplexity(exact)),
        apart,
        (errors[0], errors[1]),
        len(prompts) - len(parted),
        (max(gaps), max(own_gaps)),
    )
    return row, theirs


def perplexity(logprobs: np.ndarray) -> float:
    return float(np.exp(-logprobs.mean()))


def table_of(rows: list[Comparison]) -> Table:
    table = Table(title=f"{SHIPPED} in llama.cpp's mixtures: Whet and llama.cpp")
    for heading in ("file", "types"):
        table.add_column(heading)
    headings = (
        "perplexity",
        "llama.cpp's",
        "exact",
        "ratio",
        "apart",
        "error",
        "llama.cpp's",
        "same texts",
        "gap",
        "own gap",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("missed")
    for row in rows:
        table.add_row(
            row.name,
            ", ".join(sorted(row.types)),
            *(f"{each:.3f}" for each in row.perplexities),
            f"{row.ratio:.4f}",
            f"{row.apart:.4f}",
            *(f"{error:.4f}" for error in row.errors),
            f"{row.n_same}",
            *(f"{gap:.3f}" for gap in row.gaps),
            "; ".join(row.faults()),
        )
    return table


def store(found: dict[str, Any]) -> None:
    """Write a line for each file."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found))
    LOGPROBS.write_text(f"{{\n{lines}\n}}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mixtures", nargs="*", metavar="MIXTURE", help=f"{SHIPPED} (unchanged), {', '.join(MIXTURES)}")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if unknown := set(asked.mixtures) - {SHIPPED, *MIXTURES}:
        parser.error(f"unknown mixtures: {', '.join(sorted(unknown))}")
    source = fetch_model()
    tokenizer = read_tokenizer(source)
    ids = tokenizer.encode(PROSE.read_text())[:N_TOKENS]
    chats = [[{"role": "user", "content": line}] for line in PROMPTS.read_text().splitlines()]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    found = json.loads(LOGPROBS.read_text()) if LOGPROBS.exists() else {}
    rows = []
    for name in asked.mixtures or (SHIPPED, *MIXTURES):
        start = time.monotonic()
        path = source if name == SHIPPED else make_mixture(source, name)
        row, theirs = compare(name, path, ids, prompts)
        rows.append(row)
        found[name] = [round(float(each), 4) for each in theirs[STORED]]
        print(f"{name}: {', '.join(row.faults()) or 'good'} ({time.monotonic() - start:.0f} s)", flush=True)
    Console(width=None if sys.stdout.isatty() else 170).print(table_of(rows))
    if asked.write:
        store(found)
    return int(any(row.faults() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
