"""The native engine against transformers and its definition; completions depend only on their keys."""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import os
import pickle
import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tests.engine.tiny_models import CASES, VOCAB, logits_of, tiny_model, token_ids
from tests.raising import assert_raises, mentions
from tests.threads import threads
from tests.tiny import with_lora

import whet
import whet.memory
from whet.config.sampling import SamplingParams, StreamKey
from whet.engine import Engine, EngineBusyError
from whet.engine.session import Session
from whet.errors import WhetTypeError, WhetValueError
from whet.ops.micro_lora import MicroLoRA
from whet.rollout.torch_engine import TorchEngine

PLAIN = SamplingParams(max_new_tokens=12)
GREEDY = SamplingParams(temperature=0, max_new_tokens=12)


def llama(**options):
    return tiny_model("llama", max_position_embeddings=512, **options)


def prompts(*lengths, seed=3):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


def tokens_of(groups):
    return [[c.token_ids for c in group] for group in groups]


def everything(groups):
    return [[(c.token_ids, c.logprobs, c.finish_reason) for c in group] for group in groups]


@pytest.mark.parametrize("case", CASES)
def test_every_logit_matches_transformers(case):
    model, ids = tiny_model(case), token_ids()
    expected = logits_of(model, ids)
    scale = np.abs(expected).max()
    own_error = np.abs(expected - logits_of(copy.deepcopy(model).double(), ids)).max()
    with Engine.from_model(model, weights="float32") as engine:
        assert np.abs(engine.logits(ids[0].tolist()) - expected).max() < max(2e-6 * scale, 4 * own_error)
    narrow = copy.deepcopy(model).bfloat16()(ids).logits[0].detach().float().numpy()
    with Engine.from_model(model, weights="bf16") as engine:
        limit = max(0.06 * scale, 1.5 * np.abs(narrow - expected).max())
        assert np.abs(engine.logits(ids[0].tolist()) - expected).max() < limit


@pytest.mark.parametrize("make", [Engine.from_model, TorchEngine])
def test_batch_split_by_stream_keys_equals_the_whole_batch(make):
    """Prompts in another order, and a group in two calls, on separate engines."""
    model, given = llama(), prompts(5, 9, 7)
    sampling = SamplingParams(max_new_tokens=6, seed=11)
    shown = tokens_of if make is TorchEngine else everything  # torch's last digits depend on the batch
    whole = shown(make(model).generate(given, 4, sampling))
    assert len({str(completion) for group in whole for completion in group}) == 12
    reversed_order = make(model).generate(given[::-1], 4, sampling, keys=[StreamKey(i) for i in (2, 1, 0)])
    assert shown(reversed_order) == whole[::-1]
    first = make(model).generate(given[1:], 1, sampling, keys=[StreamKey(1), StreamKey(2)])
    rest = make(model).generate(given[1:], 3, sampling, keys=[StreamKey(1, 1), StreamKey(2, 1)])
    assert [a + b for a, b in zip(shown(first), shown(rest), strict=True)] == whole[1:]


@pytest.mark.parametrize("make", [Engine.from_model, TorchEngine])
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([StreamKey(0)], ("keys has 1 entries", "one for each of 2 prompts")),
        ([StreamKey(0), StreamKey(-1)], r"keys\[1\] is StreamKey\(prompt_index=-1, first_sample=0\), expected"),
        ([StreamKey(0), StreamKey(0, 2**63)], ("keys[1] is", "from 0 to 2**63 - 1")),
        ([0, 1], ("keys[0] is 0", "StreamKey")),
    ],
)
def test_invalid_stream_keys_are_rejected(make, keys, message):
    assert_raises(WhetValueError, message, make(llama()).generate, prompts(5, 9), 1, SamplingParams(), keys=keys)


def test_sync_keeps_a_smaller_max_position(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path)
    engines = [
        Engine.from_model(model, weights="float32", max_position=64),
        Engine.from_pretrained(tmp_path, weights="float32", max_position=64),
    ]
    for parameter in model.parameters():
        parameter.data.mul_(1.1)
    expected = Engine.from_model(model, weights="float32").generate(prompts(5, 9), 1, PLAIN)
    for engine in engines:
        engine.sync(model)
        assert engine.config.max_position == 64
        assert tokens_of(engine.generate(prompts(5, 9), 1, PLAIN)) == tokens_of(expected)


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen2", "qwen3", "gpt_neox", "gpt2", "gptj", "phi3"])
def test_greedy_and_sampled_tokens_match_the_torch_engine(case):
    model = tiny_model(case)
    rows = prompts(5, 9, 1)
    with Engine.from_model(model, weights="float32") as engine:
        for sampling in (GREEDY, PLAIN, SamplingParams(top_k=9, top_p=0.8, min_p=0.02, repetition_penalty=1.3)):
            ours = engine.generate(rows, 3, sampling)
            theirs = TorchEngine(model).generate(rows, 3, sampling)
            assert tokens_of(ours) == tokens_of(theirs)
            for a, b in zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True):
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-4)
                assert a.finish_reason == b.finish_reason


def test_logprobs_match_the_logits():
    model, rows = tiny_model("llama"), prompts(20, 7)
    with Engine.from_model(model, weights="float32") as engine:
        logprobs, entropy = engine.logprobs(rows, start=[4, 1], temperature=0.7, return_entropy=True)
        for row, start, got, got_entropy in zip(rows, [4, 1], logprobs, entropy, strict=True):
            wide = torch.from_numpy(logits_of(model, torch.tensor([row]))).double().div(0.7).log_softmax(-1)
            expected = wide[start - 1 : -1].gather(1, torch.tensor(row[start:])[:, None])[:, 0]
            np.testing.assert_allclose(got, expected, atol=1e-5)
            np.testing.assert_allclose(got_entropy, -(wide.exp() * wide).sum(-1)[start - 1 : -1], atol=1e-5)
        assert engine.logprobs([[3]])[0].shape == (0,)


def test_sampled_logprobs_equal_teacher_forced_logprobs():
    rows = prompts(70, 130)
    with Engine.from_model(llama(), weights="bf16") as engine:
        groups = engine.generate(rows, 3, SamplingParams(temperature=0.8, max_new_tokens=80))
        for row, group in zip(rows, groups, strict=True):
            full = [row + c.token_ids for c in group]
            again = engine.logprobs(full, start=len(row), temperature=0.8)
            for completion, scored in zip(group, again, strict=True):
                # Decoding and scoring run the same sums: the same bits, except for the sampler's sum.
                np.testing.assert_allclose(completion.logprobs, scored, atol=1e-5)
        model_mode = engine.generate(rows, 3, SamplingParams(temperature=0.8, max_new_tokens=80), logprobs_mode="model")
        assert tokens_of(model_mode) == tokens_of(groups)
        np.testing.assert_allclose(
            model_mode[0][1].logprobs, engine.logprobs([rows[0] + groups[0][1].token_ids], start=70)[0], atol=1e-5
        )


@pytest.mark.parametrize("weights", ["float32", "bf16", "int8", "int4"])
def test_completion_depends_only_on_its_key(weights):
    """Bits do not depend on the batch, its order, prefill chunks, memory or threads."""
    model, rows = llama(), prompts(3, 64, 65, 130, 20, 20)
    rows[5][:20] = rows[3][:20]
    sampling = SamplingParams(max_new_tokens=70, seed=5)
    with Engine.from_model(model, weights=weights) as engine:
        expected = everything(engine.generate(rows, 4, sampling))
        assert everything(engine.generate(rows, 2, sampling)) == [group[:2] for group in expected]
        page = engine.memory["kv_page_bytes"]
        isolated = engine.generate([rows[0]], 4, sampling)
        assert everything(isolated) == expected[:1]
        with threads(1):
            assert everything(engine.generate(rows, 4, sampling)) == expected
    for options in ({"prefill_chunk": 7}, {"max_batch": 3}, {"kv_bytes": 7 * page, "max_batch": 5}):
        with Engine.from_model(model, weights=weights, **options) as engine:
            assert everything(engine.generate(rows, 4, sampling)) == expected
            assert engine.memory["kv_used_bytes"] == 0


def test_group_shares_its_prompt_and_samples_differ():
    with Engine.from_model(llama(), weights="float32", kv_bytes=1 << 20) as engine:
        [group] = engine.generate(prompts(200), 16, SamplingParams(max_new_tokens=1, temperature=3.0))
        assert len({c.token_ids[0] for c in group}) > 4


def test_prefix_cache_does_not_change_tokens():
    system = prompts(192)[0]
    rows = [system + extra for extra in prompts(1, 9, 70, seed=4)]
    sampling = SamplingParams(max_new_tokens=20)
    with Engine.from_model(llama(), weights="bf16") as engine:
        together = everything(engine.generate(rows, 2, sampling))
        assert everything(engine.generate(rows[:1], 2, sampling)) == together[:1]
        page = engine.memory["kv_page_bytes"]
    # 3 shared pages, 1 + 1 + 2 more, and the pages of the samples: fits only if shared.
    with Engine.from_model(llama(), weights="bf16", kv_bytes=10 * page, max_batch=2) as engine:
        assert everything(engine.generate(rows, 2, sampling)) == together


def test_stop_tokens_lengths_and_the_last_position():
    model = tiny_model("llama")  # 64 positions
    with Engine.from_model(model, weights="float32") as engine:
        [[free]] = engine.generate(prompts(5), 1, PLAIN)
        stop = free.token_ids[4]
        [[stopped]] = engine.generate(prompts(5), 1, SamplingParams(max_new_tokens=12, stop_token_ids=[stop, 0]))
        first = free.token_ids.index(stop)
        assert stopped.token_ids == free.token_ids[: first + 1] and stopped.finish_reason == "stop"
        [[near]] = engine.generate(prompts(60), 1, PLAIN)
        assert len(near.token_ids) == 4 and near.finish_reason == "length"
        with pytest.raises(
            WhetValueError, match=mentions("prompt_ids[0] has 64 tokens", "leaves no room", "limit is 64")
        ):
            engine.generate(prompts(64), 1, PLAIN)


def test_generate_each_yields_in_order_and_close_cancels():
    model, rows, sampling = llama(), prompts(5, 70, 9), SamplingParams(max_new_tokens=20, seed=4)
    with Engine.from_model(model, weights="float32") as engine:
        expected = engine.generate(rows, 2, sampling)
        each = engine.generate_each(rows, 2, sampling)
        assert everything([next(each)]) == everything(expected[:1])
        with pytest.raises(EngineBusyError, match=mentions("1 calls", "close")):
            engine.sync(model)
        assert everything(list(each)) == everything(expected[1:])
        dropped = engine.generate_each(rows, 2, sampling)
        next(dropped)
        dropped.close()
        engine.sync(model)
        with pytest.raises(WhetValueError, match=mentions("generate", "n is 0")):
            next(engine.generate_each(rows, 0))


@pytest.mark.parametrize("weights", ["float32", "bf16", "q8_0"])
def test_sync_reads_a_folder(tmp_path, weights):
    model = tiny_model("llama", hidden_size=64)
    with Engine.from_model(model, weights=weights) as engine:
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(2)
        model.save_pretrained(tmp_path)
        before = engine.fingerprint()
        engine.sync(tmp_path)
        assert engine.policy_version == 1 and engine.fingerprint() != before
        with Engine.from_pretrained(tmp_path, weights=weights) as fresh:
            assert fresh.fingerprint() == engine.fingerprint()
        assert_raises(WhetValueError, "does not exist", engine.sync, str(tmp_path / "none"))
        tiny_model("llama", hidden_size=64, num_hidden_layers=1).save_pretrained(tmp_path / "other")
        assert_raises(WhetValueError, ("Engine.sync", "n_layers"), engine.sync, tmp_path / "other")


def test_sync_takes_effect_in_the_next_rollout_without_stale_pointers():
    model = llama()
    with Engine.from_model(model, weights="float32") as engine:
        before = engine.generate(prompts(8), 2, PLAIN)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        assert everything(engine.generate(prompts(8), 2, PLAIN)) == everything(before)  # a packed copy, not a view
        engine.sync(model)
        after = engine.generate(prompts(8), 2, PLAIN)
        assert after[0][0].policy_version == 1 and everything(after) != everything(before)
        assert tokens_of(after) == tokens_of(TorchEngine(model).generate(prompts(8), 2, PLAIN))
        model.to(torch.float64).to(torch.float32)  # new memory
        engine.sync(model)
        assert tokens_of(engine.generate(prompts(8), 2, PLAIN)) == tokens_of(
            TorchEngine(model).generate(prompts(8), 2, PLAIN)
        )
        model.resize_token_embeddings(VOCAB + 8)
        assert_raises(
            WhetValueError, ("Engine.sync", "the model's vocab_size is 56, the engine's 48"), engine.sync, model
        )
        assert engine.policy_version == 2


def test_sync_takes_all_weights_or_none():
    model = llama()
    with Engine.from_model(model, weights="bf16") as engine:
        before = everything(engine.generate(prompts(8), 2, PLAIN))
        with torch.no_grad():
            model.model.embed_tokens.weight.zero_()
            model.lm_head.weight[3, 5] = torch.nan
        assert_raises(WhetValueError, ("Engine.sync", "head, rows 0 to 47", "NaN or infinity"), engine.sync, model)
        assert everything(engine.generate(prompts(8), 2, PLAIN)) == before and engine.policy_version == 0


def test_sync_during_a_completion_is_rejected():
    with Engine.from_model(llama()) as engine, engine.stream([1, 2, 3], PLAIN) as stream:
        next(stream)
        assert_raises(EngineBusyError, ("Engine.sync", "1 calls"), engine.sync, llama())


def test_stream_matches_generate_and_can_be_cancelled():
    with Engine.from_model(llama()) as engine:
        [[whole]] = engine.generate([[1, 2, 3]], 1, PLAIN)
        stream = engine.stream([1, 2, 3], PLAIN)
        assert [(t.token_id, t.logprob) for t in stream] == list(zip(whole.token_ids, whole.logprobs, strict=True))
        assert stream.finish_reason == "length"
        for i, _ in enumerate(engine.stream([1, 2, 3], PLAIN)):
            if i == 2:
                break
        left = engine.stream([4], PLAIN)
        next(left)
        left.cancel()
        assert left.finish_reason == "cancelled" and list(left) == []
        assert engine.memory["kv_used_bytes"] == 0

        async def all_tokens():
            return [t.token_id async for t in engine.stream([1, 2, 3], PLAIN)]

        assert asyncio.run(all_tokens()) == whole.token_ids


def test_nan_logits_are_reported_and_the_engine_stays_usable():
    model = llama()
    with Engine.from_model(model, weights="float32") as engine:
        good = everything(engine.generate(prompts(8), 1, PLAIN))
        with torch.no_grad():
            kept = model.lm_head.weight.clone()
            model.lm_head.weight.fill_(3e38)
        engine.sync(model)
        with pytest.raises(WhetValueError, match=mentions("logits for prompt 0, sample 0, token 0", "NaN")):
            engine.generate(prompts(8), 1, PLAIN)
        with torch.no_grad():
            model.lm_head.weight.copy_(kept)
        engine.sync(model)
        assert everything(engine.generate(prompts(8), 1, PLAIN)) == good


def lora_model(rank=4):
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    return with_lora(llama(), seed=1, b_std=0.2, r=rank, target_modules=targets).eval()


def test_peft_adapters_separate_and_merged_match_the_model():
    model = lora_model(rank=16)
    ids = token_ids()
    expected = logits_of(model, ids)
    scale = np.abs(expected).max()
    for merged in (False, True):
        with Engine.from_model(model, weights="float32", merge_adapters=merged) as engine:
            assert np.abs(engine.logits(ids[0].tolist()) - expected).max() < 5e-6 * scale
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_A" in name:
                        parameter.mul_(-1)
            engine.sync(model)
            flipped = logits_of(model, ids)
            assert np.abs(engine.logits(ids[0].tolist()) - flipped).max() < 5e-6 * scale
            expected = flipped


@pytest.mark.parametrize("weights", ["float32", "bf16", "q8_0"])
def test_adapters_are_bfloat16_except_with_float32_weights(weights):
    model = lora_model(rank=16)
    row = token_ids()[0].tolist()
    with Engine.from_model(model, weights=weights) as engine:
        given = engine.logits(row)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:  # the scaling, in B already, is a power of 2
                    parameter.copy_(parameter.bfloat16().float())
        engine.sync(model)
        assert np.array_equal(engine.logits(row), given) == (weights != "float32")


@pytest.mark.parametrize(
    ("settings", "special"),
    [
        ({"modules_to_save": ["norm"]}, r"modules_to_save=\['norm'\]"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
    ],
)
def test_adapters_that_change_more_than_factors_are_rejected(settings, special):
    model = with_lora(llama(), r=2, target_modules=["q_proj"], **settings)
    with (
        Engine.from_model(llama(), weights="float32") as engine,
        pytest.raises(WhetValueError, match=rf"adapter 'default' has {special}.*Engine\.from_model\(model\)"),
    ):
        engine.add_adapter(model)
    with Engine.from_model(model, weights="float32") as engine, torch.no_grad():
        row = prompts(9)[0]
        np.testing.assert_allclose(engine.logits(row), model(torch.tensor([row])).logits[0], rtol=0, atol=1e-4)


def test_one_batch_mixes_adapters(tmp_path):
    base = llama()
    model = lora_model()
    model.save_pretrained(tmp_path)
    micro = MicroLoRA(32, 32, rank=2, seed=1)
    micro = MicroLoRA.from_arrays(micro.A, np.random.default_rng(0).normal(size=(2, 32)).astype(np.float32), 4.0)
    rows = prompts(70, 70, 70)
    rows[1] = rows[2] = rows[0]
    with Engine.from_model(base, weights="float32") as engine:
        folder = engine.add_adapter(tmp_path)
        live = engine.add_adapter(model)
        small = engine.add_adapter({"model.layers.1.self_attn.q_proj": micro})
        together = engine.generate(rows, 2, PLAIN, adapter=[None, folder, small])
        assert len({str(tokens_of([g])) for g in together}) == 3
        for i, adapter in enumerate([None, live, small]):
            one = engine.generate(rows, 2, PLAIN, adapter=adapter)[i]
            assert everything([one]) == everything([together[i]])
        with Engine.from_model(model, weights="float32") as own:
            assert everything(own.generate(rows, 2, PLAIN))[1] == everything(together)[1]
        with torch.no_grad():
            weight = base.model.layers[1].self_attn.q_proj.weight
            micro.merge(weight.detach())
        assert tokens_of(TorchEngine(base).generate(rows, 2, PLAIN))[2] == tokens_of(together)[2]
        engine.remove_adapter(small)
        with pytest.raises(WhetValueError, match=rf"there is no adapter {small}; there are \[{folder}, {live}\]"):
            engine.generate(rows, 1, PLAIN, adapter=small)
        assert_raises(WhetValueError, r"the model has no module 'q_proj'", engine.add_adapter, {"q_proj": micro})


Q_PROJ = "model.layers.0.self_attn.q_proj"
FACTORS = np.zeros((2, 32), np.float32), np.ones((32, 2), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda e: e.generate([[1]], 0), WhetValueError, ("n is 0", "an integer >= 1")),
        (lambda e: e.generate([[]]), WhetValueError, ("prompt_ids[0] is empty",)),
        (lambda e: e.generate([[1, 48]]), WhetValueError, ("prompt_ids[0] holds token 48, outside 0 ... 47",)),
        (lambda e: e.generate([[1.5]]), WhetTypeError, ("prompt_ids[0]", "integer token ids")),
        (
            lambda e: e.generate([[1]], 1, SamplingParams(stop_token_ids=[3, 48])),
            WhetValueError,
            ("stop_token_ids holds 48, outside 0 ... 47", "never sampled"),
        ),
        (lambda e: e.generate("text"), WhetTypeError, ("prompt_ids is a str", "rows of token ids")),
        (lambda e: e.generate([[1]], adapter=7), WhetValueError, ("Engine.generate", "adapter 7")),
        (lambda e: e.generate([[1]], adapter=[None, None]), WhetValueError, ("adapter has 2 entries",)),
        (lambda e: e.generate([[1]], logprobs_mode="raw"), WhetValueError, ("logprobs_mode is 'raw'",)),
        (lambda e: e.logprobs([[1, 2]], start=3), WhetValueError, ("start is 3 for a row of 2",)),
        (lambda e: e.logprobs([[1, 2]], temperature=0), WhetValueError, ("temperature is 0",)),
        (
            lambda e: e.logprobs([[1, 2]], temperature=1e-40),
            WhetValueError,
            ("temperature is 1e-40", "from 1e-30 to 1e30"),
        ),
        (lambda e: e.logprobs([[1, 2]], temperature="a"), WhetValueError, ("temperature is 'a'",)),
        (lambda e: e.logprobs([[1, 2]], start=1.5), WhetTypeError, ("start is 1.5", "an integer")),
        (lambda e: e.logprobs([[1, 2]], start=[1.5]), WhetValueError, ("start is 1.5 for a row of 2",)),
        (
            lambda e: e.generate([[1]], 2**64),
            WhetValueError,
            ("n is 18446744073709551616", "an integer", "< 2^63"),
        ),
        (lambda e: e.generate([[1]], 1, {"n": 2}), WhetTypeError, ("sampling is a dict", "SamplingParams")),
        (lambda e: e.stream([1], {"n": 2}), WhetTypeError, ("sampling is a dict", "SamplingParams")),
        (lambda e: e.generate([[1]], adapter=np.array([0])), WhetValueError, ("Engine.generate", "adapter array([0])")),
        (lambda e: e.remove_adapter([]), WhetValueError, ("Engine.remove_adapter", "adapter []")),
        (lambda e: e.add_adapter({Q_PROJ: (1, 2)}), WhetTypeError, ("expected a MicroLoRA or (A, B, scaling)",)),
        (lambda e: e.add_adapter({Q_PROJ: "abc"}), WhetTypeError, ("is 'abc'", "a MicroLoRA")),
        (
            lambda e: e.add_adapter({Q_PROJ: (*FACTORS, math.nan)}),
            WhetValueError,
            ("NaN or infinity, in A or in scaling B",),
        ),
        (
            lambda e: e.add_adapter({Q_PROJ: (*FACTORS, 1e300)}),
            WhetValueError,
            ("NaN or infinity, in A or in scaling B",),
        ),
        (lambda e: e.add_adapter(3), WhetTypeError, ("adapter is a int", "PEFT", "MicroLoRA")),
        (lambda e: e.sync(torch.nn.Linear(2, 2)), WhetTypeError, ("expected a Hugging Face model",)),
    ],
)
def test_bad_arguments_are_explained(call, error, message):
    with Engine.from_model(llama()) as engine:
        assert_raises(error, message, call, engine)


def test_weights_without_memory_or_lazily_negated_are_rejected():
    model = llama()
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.detach().clone()._neg_view()
    assert_raises(WhetValueError, r"layers.0.mlp.up_proj.weight is lazily negated", Engine.from_model, model)
    weight.data = weight.detach().resolve_neg()
    weight.untyped_storage().resize_(0)
    assert_raises(WhetTypeError, ("layers.0.mlp.up_proj.weight", "no memory"), Engine.from_model, model)


def test_numpy_and_huge_integers_are_accepted():
    with Engine.from_model(llama()) as engine:
        [expected] = engine.logprobs([[1, 2, 3]], start=2)
        np.testing.assert_array_equal(engine.logprobs([[1, 2, 3]], start=np.int64(2))[0], expected)
        huge = SamplingParams(max_new_tokens=2**64, seed=4)
        [[completion]] = engine.generate([[1] * 500], 1, huge)
        assert len(completion.token_ids) == 12 and completion.finish_reason == "length"


def test_bad_options_are_explained():
    for make in (Engine.from_pretrained, Engine.from_gguf):
        for path in (None, 3, ["model"]):
            assert_raises(WhetTypeError, (f"Engine.{make.__name__}: path is {path!r}", "path of a model"), make, path)
    for options, message in (
        ({"weights": "int3"}, ("Engine.from_model", "weights is 'int3'", "float32, bfloat16")),
        ({"kv_bytes": 0}, ("Engine.from_model", "kv_bytes is 0")),
        ({"max_batch": 2**64}, ("max_batch is 18446744073709551616", "an integer >= 1 and < 2^63")),
        ({"max_batch": 1.5}, ("max_batch is 1.5", "an integer")),
    ):
        assert_raises(WhetValueError, message, Engine.from_model, llama(), **options)
    with (
        Engine.from_model(llama(), kv_bytes=30_000) as engine,
        pytest.raises(WhetValueError, match=mentions("100 + 128 tokens", "kv_bytes", 30000)),
    ):
        engine.generate(prompts(100))


def test_close_is_final_and_idempotent():
    engine = Engine.from_model(llama())
    engine.close()
    engine.close()
    assert_raises(WhetValueError, "the engine is closed", engine.generate, [[1]])


def test_an_interrupt_leaves_the_engine_usable():
    with Engine.from_model(llama()) as engine:
        expected = everything(engine.generate(prompts(8), 4, PLAIN))
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            for _ in range(10_000):
                engine.generate(prompts(8), 16, SamplingParams(max_new_tokens=400))
        assert engine.memory["kv_used_bytes"] == 0
        assert everything(engine.generate(prompts(8), 4, PLAIN)) == expected


def test_forked_engine_matches_its_parent():
    with Engine.from_model(llama()) as engine:
        expected = everything(engine.generate(prompts(8, 70), 4, PLAIN))
        child = os.fork()
        if child == 0:
            os._exit(0 if everything(engine.generate(prompts(8, 70), 4, PLAIN)) == expected else 1)
        assert os.waitpid(child, 0)[1] == 0


def in_child(check):
    """Return the exit status of a forked child that runs the check; a hanging child is killed."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            check()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def test_fork_during_a_call_raises_in_the_child(monkeypatch):
    monkeypatch.setattr(whet.memory, "_holders", weakref.WeakSet())  # engines in fixtures of other modules
    at_work, go_on = threading.Event(), threading.Event()

    def no_parts():  # of an adapter: they are read while the engine is locked
        at_work.set()
        yield from itertools.repeat((), not go_on.wait(60))

    def check():
        for use in (lambda: engine.generate([[1, 2]]), lambda: engine.memory, lambda: engine.sync(model)):
            assert_raises(whet.WhetError, ("when this process was forked", "Make a new engine"), use)
        assert "kv_cache" not in whet.memory_report().parts
        with Engine.from_model(model) as another:
            assert everything(another.generate([[1, 2]], 2, PLAIN)) == expected
        engine.close()

    model = llama()
    with Engine.from_model(model) as engine:
        expected = everything(engine.generate([[1, 2]], 2, PLAIN))
        thread = threading.Thread(target=engine._calls.core.add_adapter, args=(7, no_parts(), ()))
        thread.start()
        assert at_work.wait(60)
        assert in_child(check) == 0
        go_on.set()
        thread.join()
        assert everything(engine.generate([[1, 2]], 2, PLAIN)) == expected


def test_fork_during_a_sync_raises_in_the_child():
    with Engine.from_model(llama()) as engine:
        session = Session(engine._calls, "sync")
        session.begin(exclusive=True)

        def check():
            assert_raises(whet.WhetError, "when this process was forked", engine.generate, [[1, 2]])

        assert in_child(check) == 0


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_engines_and_streams_cannot_be_copied(copied):
    with Engine.from_model(llama()) as engine, engine.stream([1], PLAIN) as stream:
        assert_raises(WhetTypeError, ("Engine", "pickled", "Engine.from_base"), copied, engine)
        assert_raises(WhetTypeError, ("TokenStream", "pickled", "list(stream)"), copied, stream)
        assert copy.deepcopy(list(stream)) == pickle.loads(pickle.dumps(list(engine.stream([1], PLAIN))))


def test_stream_rejects_concurrent_iteration():
    with Engine.from_model(llama()) as engine, engine.stream([1, 2], PLAIN) as stream:
        entered, go_on = threading.Event(), threading.Event()
        drawn = stream._call.next_drawn

        def slow(*args):
            entered.set()
            assert go_on.wait(60)
            return drawn(*args)

        stream._call.next_drawn = slow
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(next, stream)
            assert entered.wait(60)
            assert_raises(WhetValueError, "another thread or task is waiting for the next token", next, stream)
            go_on.set()
            tokens = [first.result(), *stream]
        assert [token.token_id for token in tokens] == tokens_of(engine.generate([[1, 2]], 1, PLAIN))[0][0]


def test_engine_is_thread_safe():
    rows = prompts(8, 70, 20)
    with Engine.from_model(llama()) as engine:
        expected = [everything(engine.generate([row], 3, PLAIN)) for row in rows]
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(lambda row: everything(engine.generate([row], 3, PLAIN)), rows)) == expected


def resident_bytes():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_thousand_engines_leak_nothing():
    model = tiny_model("gpt2")
    sizes = []
    for i in range(1000):
        with Engine.from_model(model, kv_bytes=1 << 20, max_batch=2, prefill_chunk=8) as engine:
            engine.generate([[1, 2]], 1, SamplingParams(max_new_tokens=2))
        if i in (200, 999):
            sizes.append(resident_bytes())
    assert sizes[1] - sizes[0] < 8 << 20


@pytest.mark.parametrize("source", ["model.gguf", 3, None])
def test_a_path_in_place_of_a_model_is_explained(source):
    assert_raises(WhetTypeError, (type(source).__name__, "Engine.from_pretrained"), Engine, source)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_alternatives_of_scored_tokens_are_the_most_probable(temperature):
    engine = Engine.from_model(tiny_model("llama"), weights="float32")
    rows = [token_ids(60)[0].tolist(), token_ids(5)[0].tolist(), [3]]
    logprobs, entropies, alternatives = engine.logprobs(
        rows, start=1, temperature=temperature, return_entropy=True, top_logprobs=3
    )
    assert [len(row) for row in alternatives] == [len(row) for row in logprobs] == [59, 4, 0]
    assert (np.concatenate(entropies) > 0).all()
    for row, found in zip(rows, alternatives, strict=True):
        logits = engine.logits(row)[:-1].astype(np.float64) / temperature
        right = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for step, pairs in enumerate(found):
            assert [token for token, _ in pairs] == np.argsort(-right[step], kind="stable")[:3].tolist()
            np.testing.assert_allclose([value for _, value in pairs], np.sort(right[step])[::-1][:3], atol=2e-5)
    assert_raises(WhetValueError, ("top_logprobs", "21", "20"), engine.logprobs, rows, top_logprobs=21)
