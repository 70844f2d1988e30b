"""Choice of engine, warnings of fallbacks, and weight formats of the native engine."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import peft
import pytest
import torch
import transformers
from tests.raising import assert_raises, mentions
from tests.tiny import LLAMA, tiny_llama, with_lora

from whet.algorithms.best_of_n import BestOfN
from whet.algorithms.grpo import GRPO
from whet.config.sampling import SamplingParams
from whet.engine import Engine
from whet.errors import WhetTypeError, WhetValueError
from whet.nn.causal_lm import completion_logprobs
from whet.rollout.choose import check_lengths, ensure_capacity, make_engine
from whet.rollout.torch_engine import TorchEngine


def gemma():
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**LLAMA, head_dim=8))


class OwnModule(torch.nn.Module):
    """Module with a config that is not a Hugging Face config."""

    def __init__(self):
        super().__init__()
        self.config = {"n_layers": 1}
        self.embedding = torch.nn.Embedding(12, 12)

    def forward(self, input_ids):
        return self.embedding(input_ids)


def prompt_learning():
    return peft.get_peft_model(tiny_llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


@pytest.mark.parametrize("make_model", [tiny_llama, lambda: with_lora(tiny_llama())])
def test_auto_is_native_for_supported_models(make_model):
    model = make_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        engine = make_engine("auto", model)
    assert isinstance(engine, Engine) and set(engine.formats.values()) == {"float32"}
    sampling = SamplingParams(max_new_tokens=6)
    expected = TorchEngine(model).generate([[4, 5], [7]], 3, sampling)
    found = engine.generate([[4, 5], [7]], 3, sampling)
    assert [[c.token_ids for c in group] for group in found] == [[c.token_ids for c in group] for group in expected]
    assert isinstance(make_engine("torch", model), TorchEngine)
    assert make_engine(engine, model) is engine


def test_auto_syncs_merged_adapters():
    model = with_lora(tiny_llama())  # including the head
    engine = make_engine("auto", model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    engine.sync(model)
    sampling = SamplingParams(max_new_tokens=8)
    assert [c.token_ids for c in engine.generate([[4, 5]], 4, sampling)[0]] == [
        c.token_ids for c in TorchEngine(model).generate([[4, 5]], 4, sampling)[0]
    ]


def test_weight_format_is_the_models_or_as_requested():
    half = copy.deepcopy(tiny_llama()).bfloat16()
    assert make_engine("auto", half).formats["layers.0.o"] == "bfloat16"
    assert make_engine("native", half, "float32").formats["layers.0.o"] == "float32"
    assert make_engine("auto", tiny_llama(), "int8").formats["layers.0.o"] == "int8"


def phi3(**change):
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 4.0, 8.0, 16.0]} | change
    settings = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **factors}}
    settings |= {"original_max_position_embeddings": 16, "eos_token_id": 2, "initializer_range": 0.3}
    torch.manual_seed(0)
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**{**LLAMA, **settings})).eval()


@pytest.mark.parametrize("make_model", [phi3, lambda: with_lora_of_phi3(phi3())])
def test_longrope_samples_with_the_training_factors(make_model):
    model, rows = make_model(), [[4, 5, 6, 7, 8, 9, 10, 11], [5, 4, 3, 5, 6]]
    engine = make_engine("auto", model)
    sampling = SamplingParams(max_new_tokens=8)
    for _ in range(2):
        for prompt, [completion] in zip(rows, engine.generate(rows, 1, sampling), strict=True):
            policy = completion_logprobs(model, [prompt], [completion.token_ids]).logprobs[0].detach()
            torch.testing.assert_close(torch.tensor(completion.logprobs), policy, rtol=0, atol=1e-5)
        with torch.no_grad():
            for parameter in filter(lambda p: p.requires_grad, model.parameters()):
                parameter.add_(0.01)
        engine.sync(model)


def with_lora_of_phi3(model):
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["o_proj"], task_type="CAUSAL_LM"))


def test_completions_that_may_exceed_the_short_factors_are_rejected():
    model = phi3()
    check_lengths(model, [[4] * 8, [4] * 3], 8, "GRPO")
    check_lengths(model, [[4] * 17, [4] * 20], 8, "GRPO")  # long from the start
    facts = ("GRPO", "prompt 1", "9 tokens", "max_new_tokens is 8", "16 tokens", "longrope")
    assert_raises(WhetValueError, facts, check_lengths, model, [[4] * 8, [4] * 9], 8, "GRPO")
    with pytest.raises(WhetValueError, match=mentions("GRPO", "prompt 1", "17 tokens")):
        check_lengths(model, [[4] * 8, [4] * 17], 8, "GRPO")  # a batch has one set of factors
    check_lengths(phi3(short_factor=[2.0, 4.0, 8.0, 16.0]), [[4] * 9], 8, "GRPO")
    check_lengths(tiny_llama(), [[4] * 60], 60, "GRPO")
    check_lengths(OwnModule(), [[4] * 60], 60, "GRPO")


@pytest.mark.parametrize("engine", ["native", "torch"])
def test_trainers_and_best_of_n_check_the_lengths(engine):
    settings = {"reward_fn": lambda completions: [0.0] * len(completions), "engine": engine, "max_new_tokens": 8}
    assert_raises(WhetValueError, ("GRPO", "prompt 0", "9 tokens"), GRPO(phi3(), **settings).train_step, [[4] * 9])
    with pytest.raises(WhetValueError, match=mentions("BestOfN.generate", "prompt 0", "9 tokens")):
        BestOfN(phi3(), **settings).generate([[4] * 9])


def hooked():
    model = tiny_llama()
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output * 2)
    return model


@pytest.mark.parametrize(
    ("make_model", "reason"),
    [
        (gemma, "gemma"),
        (prompt_learning, "the model has learned prompts"),
        (hooked, "a forward hook of model.layers.0.mlp is defined in"),
    ],
)
def test_a_fallback_warns_once_and_native_raises(make_model, reason):
    model = make_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = make_engine("auto", model, where="GRPO")
    warned = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    assert isinstance(engine, TorchEngine) and len(warned) == 1
    assert warned[0].startswith("GRPO: torch samples") and reason in warned[0]
    assert_raises(WhetValueError, (reason,), make_engine, "native", model)


def test_custom_modules_use_torch_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(make_engine("auto", OwnModule()), TorchEngine)
    with pytest.raises(WhetTypeError, match=mentions("model", "OwnModule", "Hugging Face")):
        make_engine("native", OwnModule())


def test_kv_cache_grows_for_longer_sequences():
    model = tiny_llama()
    page = make_engine("native", model).memory["kv_page_bytes"]
    small = make_engine("native", model, kv_bytes=2 * page)
    assert small.memory["kv_bytes"] == 2 * page
    make = partial(make_engine, "native", model, "auto", "GRPO")
    small.policy_version = 3
    assert ensure_capacity(small, make, [[4] * 50, [4]], 13) is small
    assert ensure_capacity(small, None, [[4] * 50, [4]], 900) is small
    torch_engine = TorchEngine(model)
    assert ensure_capacity(torch_engine, make, [[4] * 50], 900) is torch_engine
    larger = ensure_capacity(small, make, [[4] * 50, [4]], 900)
    assert larger.policy_version == 3 and larger.memory["kv_bytes"] == 3 * page  # the model has 64 positions
    assert [len(c.token_ids) for [c] in larger.generate([[4] * 50, [4]], 1, SamplingParams(max_new_tokens=900))] == [
        14,
        63,
    ]
    with pytest.raises(WhetValueError, match=mentions("GRPO", "kv_bytes", 99, "no effect")):
        make_engine(small, model, where="GRPO", kv_bytes=99)


def long_llama():
    torch.manual_seed(0)
    return tiny_llama(max_position_embeddings=512)


def test_training_continues_with_a_larger_kv_cache():
    model, settings = long_llama(), {"reward_fn": lambda completions: [float(len(c)) for c in completions]}
    settings |= {"engine": "native", "max_new_tokens": 8}
    trainer = GRPO(model, group_size=2, compute="float32", **settings)
    page = trainer.engine.memory["kv_page_bytes"]
    trainer.engine = make_engine("native", model, kv_bytes=2 * page)  # small, as 1 GiB for a large model
    trainer.train_step([[4, 5]])
    trainer.train_step([[4] * 300])
    assert trainer.engine.memory["kv_bytes"] == 6 * page and trainer.engine.policy_version == 2
    best = BestOfN(model, n=2, **settings)
    best.engine = make_engine("native", model, kv_bytes=2 * page)
    assert best.generate([[4] * 300]).shape[1] <= 308
    fixed = GRPO(model, group_size=2, compute="float32", kv_bytes=2 * page, **settings)
    with pytest.raises(WhetValueError, match=mentions("300", "8 tokens", "KV cache", "Raise kv_bytes")):
        fixed.train_step([[4] * 300])


@pytest.mark.parametrize("engine", ["vllm", None, 3])
def test_invalid_engines_are_rejected(engine):
    with pytest.raises(WhetTypeError, match=mentions("GRPO", "engine", "'auto'", "'native'", "'torch'", "'ray'")):
        make_engine(engine, OwnModule(), where="GRPO")
