"""Compare Whet's quantisation of one real model with llama.cpp's, in the mixtures that both support.

    python -m tests.real.compare_packing FOLDER [TEXT ...] [--only MIXTURE ...]
    python -m tests.real.compare_packing FOLDER --random 256    # a model without a tokenizer, on random tokens

FOLDER contains f32.gguf and files of the same model from llama.cpp's quantiser, q4_k_m.gguf and so on; missing files
are created. Reported for each: the squared error of tensors relative to their sum of squares, averaged per type (every
24th row of the embedding); the perplexity of the texts, 1,024 tokens of each, by Whet's engine for both; and the KL
divergence of ``whet export``'s and llama.cpp's files from the exact model, with products in float32, so that only the
weights differ. The perplexity of one text varies by chance by 0.02: only the mean of several distinguishes two
quantisers.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from rich.console import Console
from rich.table import Table

import whet
from benchmarks.contenders.engine.models import quantize_gguf
from whet import Engine
from whet.models.export import export_gguf
from whet.models.formats import FILE_TYPES, display_name
from whet.models.tokenizers import read_tokenizer
from whet.ops.quant import FORMATS

MIXTURES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q6_k", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m")
PACKED = {"q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q6_k", "q4_k_m", "q5_k_m"}  # which the engine packs floats in too
PROSE = Path(__file__).with_name("prose.txt")
N_TOKENS = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("texts", type=Path, nargs="*", default=[PROSE])
    parser.add_argument("--random", type=int, metavar="N", help="N random tokens instead of texts")
    parser.add_argument("--only", nargs="+", choices=MIXTURES, default=MIXTURES)
    arguments = parser.parse_args()
    source = arguments.folder / "f32.gguf"
    texts = random_tokens(source, arguments.random) if arguments.random else tokens_of(source, arguments.texts)
    plain = {tensor.name: tensor.data for tensor in gguf.GGUFReader(source).tensors}
    console = Console()
    errors = Table("mixture", "type", "tensors", "whet", "llama.cpp", "ratio", title="Squared error")
    perplexities = Table("mixture", "whet", "llama.cpp", "ratio", title=f"Perplexity, {len(texts)} texts")
    divergences = Table("mixture", "whet export", "llama.cpp", "ratio", title="KL from the exact model, nats a token")
    exact = logprobs_of(source, texts)
    for mixture in arguments.only:
        path = arguments.folder / f"{mixture}.gguf"
        if not path.exists():
            quantize_gguf(source, path, mixture)
        for name, pairs in squared_errors(plain, path).items():
            ours, theirs = np.mean(pairs, axis=0)
            errors.add_row(mixture, name, str(len(pairs)), f"{ours:.3e}", f"{theirs:.3e}", ratio(ours, theirs))
        if mixture in PACKED:
            ours = perplexity(source, texts, display_name(mixture, "compare_packing"))
            theirs = perplexity(path, texts, None)
            perplexities.add_row(mixture, f"{ours:.3f}", f"{theirs:.3f}", ratio(ours, theirs))
        if mixture in FILE_TYPES:
            with tempfile.TemporaryDirectory() as folder:
                export_gguf(source, Path(folder, "ours.gguf"), mixture)
                ours = divergence(exact, logprobs_of(Path(folder, "ours.gguf"), texts))
            theirs = divergence(exact, logprobs_of(path, texts))
            divergences.add_row(mixture, f"{ours:.4f}", f"{theirs:.4f}", ratio(ours, theirs))
    console.print(errors, perplexities, divergences)


def tokens_of(source: Path, paths: list[Path]) -> list[list[int]]:
    tokenizer = read_tokenizer(source)
    return [tokenizer.encode(path.read_text())[:N_TOKENS] for path in paths]


def random_tokens(source: Path, n: int) -> list[list[int]]:
    n_rows = next(t.data.shape[0] for t in gguf.GGUFReader(source).tensors if t.name == "token_embd.weight")
    return [np.random.default_rng(0).integers(n_rows, size=n).tolist()]


def ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.4f}" if theirs else "-"


def squared_errors(plain: dict[str, np.ndarray], path: Path) -> dict[str, list[tuple[float, float]]]:
    """Type -> of each of the file's tensors in it, the errors of ``whet.quantize`` and of the file."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for tensor in gguf.GGUFReader(path).tensors:
        format = tensor.tensor_type.name.lower()
        if format in FORMATS:
            rows = slice(None, None, 24 if tensor.name == "token_embd.weight" else 1)
            exact = plain[tensor.name][rows]
            theirs = gguf.dequantize(tensor.data[rows], tensor.tensor_type)
            total = (exact**2).sum()
            ours = whet.quantize(exact, format).dequantize()
            found[format].append((((ours - exact) ** 2).sum() / total, ((theirs - exact) ** 2).sum() / total))
    return found


def perplexity(path: Path, texts: list[list[int]], weights: Any) -> float:
    """Return the geometric mean perplexity of the texts."""
    with Engine.from_gguf(path, weights=weights) as engine:
        return float(np.exp(-np.mean([row.mean() for row in engine.logprobs(texts)])))


def logprobs_of(path: Path, texts: list[list[int]]) -> list[np.ndarray]:
    """Return (T, V) float32 log-probs of each text by a file, with weights in float32."""
    with Engine.from_gguf(path, weights="float32") as engine:
        return [whet.log_softmax(engine.logits(ids)) for ids in texts]


def divergence(exact: list[np.ndarray], other: list[np.ndarray]) -> float:
    """Return the mean KL divergence, sum_v p_v log(p_v / q_v), over the tokens of each text, averaged over texts."""
    return float(np.mean([(np.exp(p) * (p - q)).sum(1).mean() for p, q in zip(exact, other, strict=True)]))


if __name__ == "__main__":
    main()
