"""720 random completions of each family: prompts, chunks and batches of any size against transformers, and resumed
streams against fresh ones."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.tiny_models import CASES, VOCAB, family_name, tiny_model

from whet.config.sampling import SamplingParams
from whet.engine import Engine
from whet.models.families import FAMILIES

N_COMPLETIONS = 720
# These frequencies depend on the length of the text: transformers computes others for each step.
BY_LENGTH = ("llama-dynamic", "llama-longrope", "phi3-longrope")
CASES_OF = {
    family: [case for case in CASES if family_name(case) == family and case not in BY_LENGTH] for family in FAMILIES
}


def logprobs_of(model: Any, prompt: list[int], ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        found = model(torch.tensor([[*prompt, *ids]])).logits[0].double().log_softmax(-1).numpy()
    return found[np.arange(len(prompt) - 1, len(prompt) + len(ids) - 1), ids]


@pytest.mark.parametrize("family", FAMILIES)
def test_random_completions_have_the_log_probs_of_transformers(family):
    n_done, differences = 0, []
    for seed in itertools.count():
        if n_done >= N_COMPLETIONS:
            break
        draw, numbers = random.Random(f"{family}-{seed}"), np.random.default_rng(seed)
        length = "n_positions" if family in ("gpt2", "gptj") else "max_position_embeddings"
        model = tiny_model(draw.choice(CASES_OF[family]), **{length: 256})
        prompts = [
            numbers.integers(0, VOCAB, draw.choice([1, 2, 63, 64, 65, 100, 127, 128, 129])).tolist() for _ in "abc"
        ]
        if draw.random() < 0.5:
            prompts[2] = prompts[1][:70] + prompts[2][:20]
        sampling = SamplingParams(max_new_tokens=draw.choice([3, 65, 70]), seed=seed)
        options = {"prefill_chunk": draw.choice([1, 5, 64, 512]), "max_batch": draw.choice([1, 2, 4, 64])}
        with Engine.from_model(model, weights="float32", **options) as engine:
            groups = engine.generate(prompts, 8, sampling)
            for prompt, group in zip(prompts, groups, strict=True):
                n_done += len(group)
                for completion in group:
                    right = logprobs_of(model, prompt, completion.token_ids)
                    differences.append(np.abs(completion.logprobs - right))
                    if not engine.config.n_experts:
                        assert differences[-1].max() < 3e-3, f"seed {seed}: {differences[-1]}"
            with engine.stream(prompts[1], sampling, keep=True) as drawn:
                drawn_ids = [token.token_id for token in drawn]
            more = numbers.integers(0, VOCAB, draw.choice([1, 3, 40])).tolist()
            turn = [*prompts[1], *drawn_ids[: draw.randrange(len(drawn_ids) + 1)], *more][:255]
            with engine.stream(turn, sampling, keep=True) as drawn:
                resumed = [(token.token_id, token.logprob) for token in drawn]
        with Engine.from_model(model, weights="float32") as engine:
            assert resumed == [(token.token_id, token.logprob) for token in engine.stream(turn, sampling)], (
                f"seed {seed}"
            )
    # Rounding decides near ties of experts, each of which changes a token of a mixture.
    assert (np.concatenate(differences) > 3e-3).mean() < 1e-3
