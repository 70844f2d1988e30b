"""Compare the engine on a GPU with the CPU's, on one real model.

    python -m tests.real.compare_gpu              # make test-real
    python -m tests.real.compare_gpu FILE...

For each file: differences of the log-probs of 96 tokens of prose from the CPU's in float32, and greedy tokens after the
first prompts. The exit status is 1 if a difference exceeds its limit. On a device that computes on the CPU it takes
minutes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from tests.real.model import PROSE, fetch_model

from whet import Engine, SamplingParams
from whet.models.tokenizers import read_tokenizer

PROMPTS = Path(__file__).with_name("prompts.txt")
N_TOKENS, N_PROMPTS, NEW_TOKENS = 97, 2, 12
LIMIT = 2e-4
"""Limit of the difference of a log-prob."""


def compare(file: Path) -> bool:
    """Print the differences of a file, and return whether they are within the limits."""
    gpu = Engine.from_pretrained(file, device="gpu", kv_dtype="float32")
    exact = Engine.from_pretrained(file, weights="float32", kv_dtype="float32")
    tokenizer = read_tokenizer(file)
    prose = tokenizer.encode(PROSE.read_text(encoding="utf-8"))[:N_TOKENS]
    begin = time.perf_counter()
    ours, theirs = (engine.logprobs([prose])[0] for engine in (gpu, exact))
    scoring = time.perf_counter() - begin
    rows = [tokenizer.encode(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()[:N_PROMPTS]]
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0)
    begin = time.perf_counter()
    texts = [[sample[0].token_ids for sample in engine.generate(rows, 1, sampling)] for engine in (gpu, exact)]
    n_same = sum(list(one) == list(other) for one, other in zip(*texts, strict=True))
    largest = float(np.abs(np.asarray(ours) - np.asarray(theirs)).max())
    print(
        f"{file.name}: log-probs differ by up to {largest:.1e} ({scoring:.0f} s); {n_same} of {len(rows)} greedy texts "
        f"are equal ({time.perf_counter() - begin:.0f} s)"
    )
    return largest <= LIMIT and n_same == len(rows)


def main(files: list[str]) -> int:
    results = [compare(Path(file)) for file in files or [fetch_model()]]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
