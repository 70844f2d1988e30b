"""Print the perplexity of a model in each weight format: python examples/perplexity.py MODEL rows.jsonl

MODEL is a Hugging Face folder or a .gguf file. A row has a "prompt" and a "completion"; the perplexity is
computed over the completions and their end-of-text token.
"""

import json
import math
import sys
from pathlib import Path

import whet
from whet.models.tokenizers import load_tokenizer

model, path = sys.argv[1:]
tokenizer = load_tokenizer(model)
sequences, starts = [], []
for row in map(json.loads, Path(path).read_text(encoding="utf-8").splitlines()):
    prompt_ids = tokenizer(row["prompt"])["input_ids"]
    sequences.append([*prompt_ids, *tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id])
    starts.append(len(prompt_ids))
for weights in ("float32", "bf16", "int8", "q8_0", "int4", "q4_k"):
    with whet.Engine.from_pretrained(model, weights=weights) as engine:
        logprobs = engine.logprobs(sequences, start=starts)
        mean = sum(row.sum() for row in logprobs) / sum(len(row) for row in logprobs)
        formats = "+".join(sorted(set(engine.formats.values())))
        print(f"{weights:8} {math.exp(-mean):.4f}  {engine.memory['weights_bytes'] / 1e6:6.2f} MB  {formats}")
