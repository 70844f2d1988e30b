"""Constrained samples draw allowed tokens only, and wait for them."""

import numpy as np
import pytest
from tests.engine.tiny_models import VOCAB, tiny_model, token_ids

from whet import SamplingParams
from whet.config.sampling import StreamKey
from whet.engine import Engine
from whet.engine.session import Call, Session

WORDS = (VOCAB + 31) // 32


def bitmap(*tokens):
    bits = np.zeros(WORDS * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


@pytest.fixture
def engine():
    return Engine.from_model(tiny_model("llama"), weights="float32")


def open_constrained(engine, prompt, n, sampling):
    """Open a call without a grammar, whose caller allows the tokens."""
    session = Session(engine._calls, "test")
    session.begin()
    request = {**engine._make_request(n, sampling, False, None, "test"), **StreamKey(0)._asdict()}
    row = np.array(prompt, np.int32)
    job = session.add("prompt", "", "", tokens=row, adapter=0, keep=False, constrained=True,
                      scored_alternatives=-1, **request)  # fmt: skip
    return Call(session, job, None)


def test_only_allowed_tokens_are_drawn(engine):
    sampling = SamplingParams(max_new_tokens=6, seed=3)
    prompt = token_ids(5)[0].tolist()
    [right] = engine.generate([prompt], 2, SamplingParams(max_new_tokens=6, seed=3))
    call = open_constrained(engine, prompt, 2, sampling)
    free = engine.open_prompt(prompt, 2, sampling)
    sets = [(7, 9), (40,), (3, 5, 60), tuple(range(VOCAB)), (11,), (12, 13)]
    for step, allowed in enumerate(sets):
        for i in range(2):
            call.allow(i, bitmap(*allowed))
        while len(call.drawn(1, 0).token_ids) <= step:
            call.step()
        for i in range(2):
            assert call.drawn(i, 0).token_ids[step] in allowed
    assert call.is_done()
    while not free.is_done():
        free.step()
    for i in range(2):
        assert free.drawn(i, 0).token_ids.tolist() == right[i].token_ids
    call.close(), free.close()


def test_a_sample_waits_until_its_tokens_are_known(engine):
    call = open_constrained(engine, [3, 4], 2, SamplingParams(max_new_tokens=2))
    for _ in range(5):
        call.step()
    assert not len(call.drawn(0, 0).token_ids)
    call.allow(1, bitmap(8))
    for _ in range(3):
        call.step()
    assert not len(call.drawn(0, 0).token_ids) and call.drawn(1, 0).token_ids.tolist() == [8]
    with pytest.raises(ValueError, match="bitmap"):
        call.allow(0, np.zeros(WORDS + 1, np.int32))
    call.close()
    assert engine.memory["kv_used_bytes"] == 0


def test_log_probs_are_of_the_allowed_tokens(engine):
    call = open_constrained(engine, [3, 4], 1, SamplingParams(max_new_tokens=1))
    call.allow(0, bitmap(8, 9))
    while not call.is_done():
        call.step()
    drawn = call.drawn(0, 0)
    call.close()
    [logits] = engine.logits([3, 4])[-1:].astype(np.float64)
    right = logits[drawn.token_ids[0]] - np.log(np.exp(logits[[8, 9]]).sum())
    assert drawn.logprobs[0] == pytest.approx(right, abs=1e-5)
