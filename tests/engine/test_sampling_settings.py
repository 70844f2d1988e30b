"""Stop conditions, sampling settings and reported values of the native engine, against the torch engine."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import tokenizers
from tests.engine.tiny_models import VOCAB, tiny_model
from tests.isas import assert_isas_agree
from tests.raising import assert_raises
from tests.threads import threads
from tokenizers import decoders, models, pre_tokenizers

from whet.config.sampling import Completion, SamplingParams
from whet.engine import Engine
from whet.errors import WhetTypeError, WhetValueError
from whet.models.tokenizers.token_texts import read_token_texts
from whet.rollout.torch_engine import TorchEngine, find_stop

PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8]]
ALL: dict[str, Any] = {
    "temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "presence_penalty": 0.7,
    "frequency_penalty": 0.4, "logit_bias": {3: 2.5, 7: -100, 20: -1.5}, "min_new_tokens": 4, "max_new_tokens": 20,
    "stop_token_ids": [2, 11], "stop": ["日", "ab", "c d"], "top_logprobs": 5, "seed": 3,
}  # fmt: skip


def make_tokenizer() -> Any:
    """48 tokens: two special tokens, letters, pairs, spaces, and parts of 日 (e6 97 a5) and é (c3 a9)."""
    words = [*"abcdefghijklmnop", "Ġ", "æ", "Ĺ", "¥", "Ã", "©", "Ĺ¥", "æĹ", "ab", "bc", "cd", "Ġa", "Ġd", "dĠ"]
    words += ["ef", "gh", "ij", "aa", "bb", "cĠ", "Ġab", "¥a", "Ċ", "ĊĊ", "é", "n", "."]
    vocab = {word: i for i, word in enumerate(["<s>", "<x>", *dict.fromkeys(words)])}
    vocab |= {f"w{i}": i for i in range(len(vocab), VOCAB)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<s>", "<x>"])
    return tokenizer


TOKENIZER = make_tokenizer()
TEXTS = read_token_texts(TOKENIZER, "test")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", max_position_embeddings=512)


@pytest.fixture(scope="module")
def engine(model: Any) -> Any:
    with Engine.from_model(model, weights="float32", tokenizer=TOKENIZER) as engine:
        yield engine


def everything(groups: list[list[Completion]]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(completion) for completion in itertools.chain(*groups)]


def assert_same(ours: list[list[Completion]], theirs: list[list[Completion]]) -> None:
    for a, b in zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True):
        assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
        np.testing.assert_allclose(a.logprobs or [], b.logprobs or [], atol=2e-4)
        assert (a.top_logprobs is None) == (b.top_logprobs is None)
        for row, other in zip(a.top_logprobs or [], b.top_logprobs or [], strict=True):
            assert [token for token, _ in row] == [token for token, _ in other]
            np.testing.assert_allclose([x for _, x in row], [x for _, x in other], atol=2e-4)


@pytest.mark.parametrize(
    "settings",
    [
        ALL,
        {**ALL, "temperature": 0, "top_k": 0},
        {"presence_penalty": 2.0, "temperature": 0},
        {"frequency_penalty": -2.0},
        {"logit_bias": {4: 3.0}, "top_logprobs": 20},
        {"stop": "a"},
        {"stop": ["é", "bc", "\n"], "min_new_tokens": 9},
        {"stop_token_ids": list(range(24)), "min_new_tokens": 5, "top_logprobs": 1},
    ],
)
def test_every_setting_matches_the_torch_engine(engine: Any, model: Any, settings: dict[str, Any]) -> None:
    sampling = SamplingParams(**{"max_new_tokens": 20, **settings})
    theirs = TorchEngine(model, tokenizer=TOKENIZER, max_batch=5).generate(PROMPTS, 4, sampling)
    assert_same(engine.generate(PROMPTS, 4, sampling), theirs)


def test_completion_with_settings_depends_only_on_its_key(model: Any) -> None:
    rows, sampling = [*PROMPTS, [4] * 70, [4] * 70 + [9]], SamplingParams(**ALL)
    with Engine.from_model(model, weights="bf16", tokenizer=TOKENIZER) as engine:
        expected = everything(engine.generate(rows, 4, sampling))
        assert {c["finish_reason"] for c in expected} == {"stop", "length"}
        assert everything(engine.generate(rows[:1], 2, sampling)) == expected[:2]
        with threads(3):
            assert everything(engine.generate(rows, 4, sampling)) == expected
    for options in ({"prefill_chunk": 7}, {"max_batch": 3}):
        with Engine.from_model(model, weights="bf16", tokenizer=TOKENIZER, **options) as engine:
            assert everything(engine.generate(rows, 4, sampling)) == expected


def test_every_instruction_set_gives_the_same_bits() -> None:
    code = """
with Engine.from_model(tiny_model("llama"), weights="float32", tokenizer=TOKENIZER) as engine:
    drawn = everything(engine.generate(PROMPTS, 2, SamplingParams(**ALL)))
print(hashlib.sha256(repr(drawn).encode()).hexdigest())
"""
    assert_isas_agree("import hashlib, whet\nfrom tests.engine.test_sampling_settings import *", code)


def test_text_ends_before_the_stop_string(engine: Any) -> None:
    free = SamplingParams(max_new_tokens=40, temperature=2.0, seed=1)
    groups = engine.generate(PROMPTS, 8, free)
    stopped = engine.generate(PROMPTS, 8, dataclasses.replace(free, stop=["ab", "日", "d "]))
    n_cut = 0
    for a, b in zip(itertools.chain(*groups), itertools.chain(*stopped), strict=True):
        whole = TEXTS.bytes_of(a.token_ids)
        cut = find_stop(whole, [b"ab", "日".encode(), b"d "])
        n_cut += cut is not None
        n = len(b.token_ids)
        assert a.text is None and b.text == whole[:cut].decode(errors="replace")
        assert b.token_ids == a.token_ids[:n] and b.logprobs == a.logprobs[:n]
        if cut is None:
            assert n == 40 and b.finish_reason == "length"
        else:
            assert b.finish_reason == "stop"
            assert len(TEXTS.bytes_of(b.token_ids)) > cut >= len(TEXTS.bytes_of(b.token_ids[:-1])) - 2
    assert 0 < n_cut < 24


def test_text_without_stop_string_matches_the_tokenizer(engine: Any) -> None:
    for completion in itertools.chain(*engine.generate(PROMPTS, 4, SamplingParams(max_new_tokens=30, stop="zzz"))):
        assert completion.text == TOKENIZER.decode(completion.token_ids, skip_special_tokens=True)


def test_stop_string_naming_a_special_token_is_a_stop_token(engine: Any, model: Any) -> None:
    named = SamplingParams(stop=["<x>", "zzz"], max_new_tokens=30, logit_bias={1: 4.0}, seed=4)
    groups = engine.generate(PROMPTS, 4, named)
    completions = list(itertools.chain(*groups))
    assert any(c.token_ids[-1] == 1 and c.finish_reason == "stop" for c in completions)
    assert not any(1 in c.token_ids[:-1] or "<x>" in c.text for c in completions)
    assert_same(groups, TorchEngine(model, tokenizer=TOKENIZER).generate(PROMPTS, 4, named))
    by_id = dataclasses.replace(named, stop="zzz", stop_token_ids=[1])
    assert everything(engine.generate(PROMPTS, 4, by_id)) == everything(groups)


def test_stream_matches_generate_and_never_shows_a_stop_string(engine: Any) -> None:
    for seed, stop in itertools.product(range(6), (["ab", "日", "c d"], "a", "\n\n")):
        sampling = SamplingParams(**{**ALL, "stop": stop, "seed": seed, "min_new_tokens": seed % 3})
        [[whole]] = engine.generate(PROMPTS[:1], 1, sampling)
        stream = engine.stream(PROMPTS[0], sampling)
        tokens = list(stream)
        assert [t.token_id for t in tokens] == whole.token_ids and [t.logprob for t in tokens] == whole.logprobs
        assert [t.top_logprobs for t in tokens] == whole.top_logprobs
        assert "".join(t.text for t in tokens) == whole.text and stream.finish_reason == whole.finish_reason

        async def texts(sampling: SamplingParams = sampling) -> list[str | None]:
            return [t.text async for t in engine.stream(PROMPTS[0], sampling)]

        assert asyncio.run(texts()) == [t.text for t in tokens]  # each with its token, whatever else runs
    [token] = engine.stream([1], SamplingParams(max_new_tokens=1))
    assert token.text is None and token.top_logprobs is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_ends_a_completion_before_min_new_tokens(engine: Any, temperature: float) -> None:
    """Stop tokens get probability 0; stop strings are ignored."""
    stops = {"stop_token_ids": list(range(0, VOCAB, 2)), "stop": [*"abcdefgh"]}
    base = SamplingParams(temperature=temperature, max_new_tokens=30, seed=2)
    for names in (["stop_token_ids"], ["stop"], ["stop_token_ids", "stop"]):
        sampling = dataclasses.replace(base, **{name: stops[name] for name in names}, min_new_tokens=6)
        completions = list(itertools.chain(*engine.generate(PROMPTS, 6, sampling)))
        assert min(len(c.token_ids) for c in completions) >= 7
        assert any(len(c.token_ids) == 7 and c.finish_reason == "stop" for c in completions)
        if "stop_token_ids" in names:
            assert not any(token % 2 == 0 for c in completions for token in c.token_ids[:6])
        sooner = engine.generate(PROMPTS, 6, dataclasses.replace(sampling, min_new_tokens=0))
        assert any(len(c.token_ids) < 7 for c in itertools.chain(*sooner))


def test_greedy_follows_bias_and_penalties(engine: Any) -> None:
    greedy = SamplingParams(temperature=0, max_new_tokens=12)
    [[plain]] = engine.generate(PROMPTS[:1], 1, greedy)
    [[biased]] = engine.generate(PROMPTS[:1], 1, dataclasses.replace(greedy, logit_bias={9: 100.0}))
    assert biased.token_ids == [9] * 12
    banned = dict.fromkeys(plain.token_ids, -100.0)
    [[other]] = engine.generate(PROMPTS[:1], 1, dataclasses.replace(greedy, logit_bias=banned))
    assert not set(other.token_ids) & set(plain.token_ids)
    both = dataclasses.replace(greedy, logit_bias={9: 100.0, 8: 99.5}, frequency_penalty=1.0)
    [[turns]] = engine.generate([[9, 9, 9]], 1, both)  # the prompt's do not count
    assert turns.token_ids[:6] in ([9, 8] * 3, [8, 9] * 3)
    [[once]] = engine.generate([[9]], 1, dataclasses.replace(both, frequency_penalty=0, presence_penalty=1.0))
    assert sorted(once.token_ids[:2]) == [8, 9] and len(set(once.token_ids[2:])) == 1


def test_model_logprobs_do_not_depend_on_settings(engine: Any) -> None:
    sampling = SamplingParams(**{**ALL, "stop": ()})
    rows = [prompt for prompt in PROMPTS for _ in range(3)]
    drawn = list(itertools.chain(*engine.generate(PROMPTS, 3, sampling, logprobs_mode="model")))
    full = [row + c.token_ids for row, c in zip(rows, drawn, strict=True)]
    forced = engine.logprobs(full, start=[len(row) for row in rows])
    for row, c, logprobs in zip(rows, drawn, forced, strict=True):
        np.testing.assert_allclose(c.logprobs, logprobs, atol=2e-6)
        logits = engine.logits(row + c.token_ids)[len(row) - 1 : -1].astype(np.float64)
        wide = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        for t, top in enumerate(c.top_logprobs):
            assert [token for token, _ in top] == np.argsort(-logits[t], kind="stable")[:5].tolist()
            np.testing.assert_allclose([x for _, x in top], wide[t, [token for token, _ in top]], atol=1e-5)
    assert [c.token_ids for c in drawn] == [
        c.token_ids for c in itertools.chain(*engine.generate(PROMPTS, 3, sampling))
    ]


def test_alternatives_are_from_the_sampled_distribution(engine: Any) -> None:
    for completion in itertools.chain(*engine.generate(PROMPTS, 3, SamplingParams(**{**ALL, "top_k": 3}))):
        for token, logprob, top in zip(completion.token_ids, completion.logprobs, completion.top_logprobs, strict=True):
            assert 1 <= len(top) <= 3 and (token, logprob) in top  # what is filtered out is not there
            assert abs(math.fsum(math.exp(x) for _, x in top) - 1) < 1e-5


def test_settings_are_per_request_in_a_batch(engine: Any) -> None:
    [[expected]] = engine.generate(PROMPTS[:1], 1, SamplingParams(**ALL))
    plain = SamplingParams(max_new_tokens=20)
    [[plainly]] = engine.generate(PROMPTS[:1], 1, plain)
    streams = [engine.stream(PROMPTS[0], SamplingParams(**ALL)), engine.stream(PROMPTS[0], plain)]
    tokens = list(itertools.zip_longest(*streams))
    assert [t.token_id for t, _ in tokens if t] == expected.token_ids
    assert [t.token_id for _, t in tokens if t] == plainly.token_ids


def test_stop_needs_a_tokenizer(model: Any) -> None:
    sampling = SamplingParams(stop="x", max_new_tokens=3)
    with Engine.from_model(model) as engine:
        for call in (lambda: engine.generate([[1]], 1, sampling), lambda: engine.stream([1], sampling)):
            assert_raises(
                WhetValueError, r"Engine.(generate|stream): stop is \('x',\), and the engine has no token", call
            )
        engine.tokenizer = object()
        assert_raises(WhetTypeError, ("tokenizer is a object", "a fast"), engine.generate, [[1]], 1, sampling)
        assert engine.generate([[1]], 1, SamplingParams(max_new_tokens=3))
        engine.tokenizer = TOKENIZER
        assert engine.tokenizer is TOKENIZER and engine.generate([[1]], 1, sampling)[0][0].text is not None
    assert_raises(WhetValueError, ("TorchEngine.generate", "stop is"), TorchEngine(model).generate, [[1]], 1, sampling)


def test_model_tokenizer_is_read_lazily(model: Any, tmp_path: Any) -> None:
    model.save_pretrained(tmp_path)
    sampling = SamplingParams(stop="a", max_new_tokens=12)
    with Engine.from_pretrained(tmp_path) as engine:
        engine.generate([[1]], 1, SamplingParams(max_new_tokens=3))
        assert_raises(WhetValueError, ("Engine.generate", "tokenizer.json", "Set"), engine.generate, [[1]], 1, sampling)
        TOKENIZER.save(str(tmp_path / "tokenizer.json"))
        found = everything(engine.generate(PROMPTS, 2, sampling))
    with Engine.from_model(model, tokenizer=TOKENIZER) as engine:
        assert everything(engine.generate(PROMPTS, 2, sampling)) == found


def test_tokens_outside_the_vocabulary_are_rejected(engine: Any, model: Any) -> None:
    outside = SamplingParams(logit_bias={48: 1.0})
    assert_raises(WhetValueError, ("logit_bias", 48, "0 ... 47"), engine.generate, [[1]], 1, outside)
    torch_engine = TorchEngine(model)
    assert_raises(WhetValueError, ("logit_bias", 48, "0 ... 47"), torch_engine.generate, [[1]], 1, outside)
    every = SamplingParams(min_new_tokens=1, stop_token_ids=range(VOCAB))
    assert_raises(WhetValueError, "stop_token_ids holds the whole vocabulary", engine.generate, [[1]], 1, every)
