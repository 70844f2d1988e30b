"""Write what the tests of the package compare with: small models, and what the native engine makes of them.

python web/test/fixtures.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
from tests.gguf_files import write_gguf
from tests.tiny import tiny_llama

from whet.config.sampling import SamplingParams
from whet.engine import Engine

KINDS = ("F32", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 238, 46]
SIZES = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}


def answers(engine: Engine) -> dict[str, Any]:
    """Samples, scores and the most probable tokens."""
    sampling = SamplingParams(temperature=0.8, top_p=0.9, max_new_tokens=24, seed=7, stop_token_ids=[1])
    [samples] = engine.generate([PROMPT], 2, sampling)
    [scores] = engine.logprobs([[*PROMPT, *samples[0].token_ids]])
    [[greedy]] = engine.generate([PROMPT], 1, SamplingParams(temperature=0, max_new_tokens=16))
    plain = {"samples": [{"tokens": s.token_ids, "logprobs": s.logprobs} for s in samples], "scores": scores.tolist()}
    return {"ids": PROMPT, "plain": plain, "greedy": greedy.token_ids}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    llama = tiny_llama(**SIZES, **HEADS, initializer_range=0.2, tie_word_embeddings=True)
    cases = {}
    for kind in KINDS:
        path = write_gguf(llama, folder / f"{kind.lower()}.gguf", gguf.GGMLQuantizationType[kind])
        with Engine.from_gguf(path) as engine:
            cases[path.stem] = answers(engine)
    (folder / "model.json").write_text(json.dumps({"cases": cases}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
