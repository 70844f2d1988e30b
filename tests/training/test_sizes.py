"""Estimated memory of a run equals the memory of trainers and engines, and of tensors saved by autograd."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.models.test_sizes import LLAMA
from tests.processes import printed_by
from tests.raising import assert_raises, mentions
from tests.representatives import cases
from tests.tiny import with_lora

from whet import Learner, _core
from whet.algorithms import GRPO
from whet.config import DPOConfig, GRPOConfig, OnlineDPOConfig, SFTConfig
from whet.errors import WhetValueError
from whet.memory import allocated_bytes
from whet.models.lora import LoraSettings, choose_adapted
from whet.models.packed_base import pack_base
from whet.models.sizes import estimate, load_source, source_of_config
from whet.models.sources.live import open_module
from whet.nn import accelerate, scratch
from whet.nn.causal_lm import completion_logprobs
from whet.runs.models import add_adapters
from whet.runs.settings import RunConfig
from whet.training.sizes import Lengths, run_memory

CONFIGS = {
    "llama": LLAMA,
    "qwen2-tied": {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 16},
    "olmo2": {**LLAMA, "model_type": "olmo2", "eos_token_id": 2},
    "gemma2": {**LLAMA, "model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma3": {**LLAMA, "model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma4": {
        **LLAMA,
        "model_type": "gemma4_text",
        "head_dim": 16,
        "global_head_dim": 24,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 20,
        "vocab_size_per_layer_input": LLAMA["vocab_size"],
    },
    "phi3": {**LLAMA, "model_type": "phi3", "pad_token_id": 0, "eos_token_id": 2},
    "lfm2": {**LLAMA, "model_type": "lfm2", "full_attn_idxs": [1], "block_multiple_of": 8},
    "qwen3_5": {
        **LLAMA,
        "model_type": "qwen3_5_text",
        "head_dim": 16,
        "full_attention_interval": 2,
        "linear_num_value_heads": 18,
        "linear_num_key_heads": 6,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 10,
    },
    "granite4_h": {
        **LLAMA,
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "shared_intermediate_size": LLAMA["intermediate_size"],
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 6,
        "mamba_d_state": 12,
    },
    "nemotron_h": {
        **LLAMA,
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        "head_dim": 16,
        "mamba_num_heads": 6,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 12,
    },
}
MIXTURES = {
    "nemotron_h_moe": {
        **LLAMA,
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "head_dim": 16,
        "mamba_num_heads": 6,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 12,
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
    },
    "qwen3_moe": {
        **LLAMA,
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [0],
    },
    "granitemoeshared": {
        **LLAMA,
        "model_type": "granitemoeshared",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
    },
    "gpt_oss": {
        **LLAMA,
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
NARROW = "bf16" in _core.isa()


def make_model(name: str, **sizes: Any) -> Any:
    settings = {**CONFIGS, **MIXTURES}[name] | sizes
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def names_of(adapted: Any) -> list[str]:
    """Return the names of modules with adapters: PEFT's "all-linear" would add Gemma 4's inputs of layers."""
    return [location.names[0] for location, _ in adapted.factors]


def held(trainer: Any) -> Counter[str]:
    blocks = {key: (part, n_bytes) for part, key, n_bytes in reversed(list(trainer.memory_blocks()))}
    total: Counter[str] = Counter()
    for part, n_bytes in blocks.values():
        total[part] += n_bytes
    return total


@pytest.mark.parametrize("compute", ["float32", "bfloat16"] if NARROW else ["float32"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lora", [False, True])
def test_trainers_and_engines_use_the_estimated_memory(name, compute, lora, monkeypatch):
    monkeypatch.setattr(scratch._scratch, "buffer", torch.empty(0))  # larger after other tests
    model = make_model(name)
    source = open_module(model)
    adapters: dict[str, Any] = {}
    if lora:
        adapters = {"adapters": choose_adapted(source, LoraSettings(4))}
        model = with_lora(model, r=4, target_modules=names_of(adapters["adapters"]))
    trainer = GRPO(
        model, reward_fn=lambda completions: [float(c[0]) for c in completions], compute=compute, beta=0.1, group_size=2
    )
    trainer.train_step([[5, 6, 7], [8, 9]])
    run = run_memory(source, trainer.config, Lengths(3, 128), interpreter=0, **adapters)
    predicted = run.parts
    found = held(trainer)
    assert not found["gradients"]  # after the update
    for part in ("weights", "reference", "copies", "moments"):
        # Models also have rotary frequencies, and AdamW its step count.
        assert found[part] == pytest.approx(predicted[part], abs=8192, rel=1e-3), part
    engine: Any = trainer.engine
    memory = engine.memory
    [sampler] = [parts["sampler_weights"] for parts in (run.parts, run.sampling) if "sampler_weights" in parts]
    assert sampler == memory["weights_bytes"] + memory["adapters_bytes"]
    # Between steps an engine keeps its weights only if the next sync reuses them.
    still = sum(n_bytes for part, _, n_bytes in engine.memory_blocks() if part == "sampler_weights")
    assert still == predicted.get("sampler_weights", 0) == (sampler if lora else 0)


def kept_by_autograd(model: Any, prompts: list[list[int]], completions: list[list[int]]) -> int:
    """Return the bytes of all tensors saved by a forward pass, except parameters and their copies."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with accelerate(model) as acceleration, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs = completion_logprobs(model, prompts, completions).logprobs  # noqa: F841  (keeps saved tensors alive)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        own |= {key for _, key, _ in acceleration.memory_blocks()}
    return sum(n_bytes for address, n_bytes in storages.items() if address not in own)


@pytest.mark.parametrize("name", [*CONFIGS, *MIXTURES])
@pytest.mark.parametrize("lora", [False, True])
def test_autograd_saves_the_estimated_bytes(name, lora):
    model = make_model(name)
    source, adapters = open_module(model), None
    if lora:
        layers = ["all-linear", "experts"] if name in MIXTURES else []
        adapters = choose_adapted(source, LoraSettings(4, layers))
        if layers:
            model = add_adapters(model, RunConfig(lora_rank=4, lora_layers=layers))
        else:
            model = with_lora(model, r=4, target_modules=names_of(adapters))
    prompts = [[5 + i, 6, 7, 8] * 25 for i in range(4)]
    kept = kept_by_autograd(model, prompts, [[9, 10]] * 4)
    config = SFTConfig(batch_size=4, max_tokens_per_step=0, training_mode=False)
    predicted = run_memory(source, config, Lengths(100, 2), interpreter=0, adapters=adapters).update["activations"]
    # The head computes logits, and the gradients of hidden states, in its backward pass.
    head = 8 * (2048 * (6 if NARROW else 4) + (8 if NARROW else 4) * LLAMA["hidden_size"])
    assert kept == pytest.approx(predicted - head, rel=0.05 if name in MIXTURES or name == "nemotron_h" else 0.03)


@pytest.mark.parametrize("name", [*CONFIGS, *MIXTURES])
def test_recomputation_saves_the_estimated_bytes(name):
    """Layers that are computed again keep their inputs."""
    model, n_prompt = make_model(name, max_position_embeddings=4096), 4000
    source, found, predicted = open_module(model), [], []
    with accelerate(model, "float32") as acceleration:
        for limit in (10**10, 0):
            acceleration.activation_bytes = limit
            before = allocated_bytes()
            result = completion_logprobs(model, [[5] * n_prompt], [[9, 10]])
            found.append(allocated_bytes() - before)
            del result
            config = SFTConfig(batch_size=1, max_tokens_per_step=0, compute="float32", activation_bytes=limit)
            predicted.append(run_memory(source, config, Lengths(n_prompt, 2), interpreter=0).update["activations"])
    largest = max(acceleration.layer_bytes) * (n_prompt + 1)  # which the backward pass computes again
    assert found[0] - found[1] == pytest.approx(predicted[0] - predicted[1] + largest, rel=0.05)


LEARNER_SIZES = {
    "llama": {},
    "lfm2": {},
    "qwen3_5": {"head_dim": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "gemma4": {"head_dim": 32, "global_head_dim": 64, "hidden_size_per_layer_input": 64},
    "granite4_h": {
        "mamba_n_heads": 16,
        "mamba_d_state": 32,
        "num_hidden_layers": 8,
        "layer_types": ["full_attention", "linear_attention"] * 4,
        "shared_intermediate_size": 640,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"] * 2,
        "head_dim": 64,
        "mamba_num_heads": 16,
        "mamba_head_dim": 32,
        "ssm_state_size": 32,
    },
    "nemotron_h_moe": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"] * 2,
        "head_dim": 64,
        "mamba_num_heads": 16,
        "mamba_head_dim": 32,
        "ssm_state_size": 32,
        "moe_intermediate_size": 384,
        "moe_shared_expert_intermediate_size": 512,
    },
    "qwen3_moe": {"head_dim": 128, "moe_intermediate_size": 768, "mlp_only_layers": []},
    "granitemoeshared": {"shared_intermediate_size": 512},
    "gpt_oss": {"head_dim": 64},
}


def print_learner_bytes(name: str, compute: Any) -> None:
    """Print the estimated bytes of a forward and backward pass, and the most that were allocated in it."""
    sizes = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4, **LEARNER_SIZES[name]}
    base = pack_base(open_module(make_model(name, **sizes)), weights="bf16")
    layers = ["all-linear", "per_layer_model_projection"] if name == "gemma4" else []
    learner = Learner(base, compute=compute, activation_bytes=0, lora_layers=layers)
    before = most = allocated_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.001):
            most = max(most, allocated_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    for _ in range(3):
        result = learner.logprobs([[5 + i, 6, 7, 8] * 50 for i in range(4)], [[9, 10] * 50] * 4)
        learner.backward(np.ones_like(result.logprobs))
    done.set()
    thread.join()
    settings = SFTConfig(batch_size=4, max_tokens_per_step=0, training_mode=False, compute=compute, activation_bytes=0)
    source = base.source()
    given = {
        "adapters": choose_adapted(source, LoraSettings(16, layers)),
        "base": "bf16",
        "learner": True,
    }
    predicted = run_memory(source, settings, Lengths(200, 100), interpreter=0, **given).update["activations"]
    print("bytes:", predicted, most - before)


LEARNERS = [("llama", "float32"), *((name, "bfloat16") for name in LEARNER_SIZES)]


@pytest.mark.parametrize(("name", "compute"), cases(LEARNERS, lambda case: case[0] in ("llama", "qwen3_moe")))
def test_a_learner_uses_the_estimated_memory(name, compute):
    # In a process whose threads have no scratch memory yet.
    code = f"from tests.training.test_sizes import print_learner_bytes; print_learner_bytes({name!r}, {compute!r})"
    output = printed_by(code, WHET_NUM_THREADS="2")
    [line] = [line for line in output.splitlines() if line.startswith("bytes: ")]
    predicted, found = map(int, line.split()[1:])
    assert found == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen3",
        "gemma2",
        "gemma4",
        "lfm2",
        "qwen3_5",
        "granite4_h",
        "nemotron_h",
        "qwen3_moe",
        "granitemoeshared",
        "gpt_oss",
    ],
)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_learner_keeps_as_many_layers_as_estimated(name, compute):
    base = pack_base(open_module(make_model(name)), weights="bf16")
    rows = [[5] * 200], [[9] * 57]  # 256 tokens are inputs
    source = base.source()
    given = {"adapters": choose_adapted(source, LoraSettings(16)), "base": "bf16", "learner": True, "interpreter": 0}

    def predict(activation_bytes):
        settings = SFTConfig(
            batch_size=1, max_tokens_per_step=0, training_mode=False, compute=compute, activation_bytes=activation_bytes
        )
        memory = run_memory(source, settings, Lengths(200, 57), **given)
        return memory.kept_layers, memory.update["activations"]

    n_layers, (_, least), (most, everything) = base.config.n_layers, predict(0), predict(10**9)
    assert most == n_layers > 1
    everything -= least
    for activation_bytes, expected in [(0, 0), (everything // 2, None), (everything - 1, n_layers - 1), (10**9, most)]:
        learner = Learner(base, compute=compute, activation_bytes=activation_bytes)
        learner.logprobs(*rows)
        n_kept, activations = predict(activation_bytes)
        assert learner.n_kept_layers == n_kept and expected in (n_kept, None)
        assert learner.kept_bytes == activations - least <= activation_bytes
    if name == "nemotron_h":  # its mixers' layers have no MLP, its MLPs' no mixer
        hidden, mlp, size = LLAMA["hidden_size"], LLAMA["intermediate_size"], 2 if compute == "bfloat16" else 4
        heads = 16 * LLAMA["num_attention_heads"]
        mamba_in, mamba_out = 2 * 72 + 2 * 2 * 12 + 6, 72
        mlps = 2 * 4 * (hidden + mlp)
        attention = 4 * (hidden + LLAMA["num_attention_heads"]) + size * (
            2 * heads + 2 * 16 * LLAMA["num_key_value_heads"]
        )
        mamba = 4 * (hidden + mamba_in) + size * mamba_out
        assert everything == pytest.approx(256 * (mlps + attention + mamba), abs=64 * 16)


def test_max_tokens_per_step_limits_activations():
    source = load_source("smollm-135m")

    def activations(config, completion=128):
        return run_memory(source, config, Lengths(128, completion), interpreter=0).update["activations"]

    small = activations(SFTConfig(batch_size=1))
    assert activations(SFTConfig(batch_size=3)) == pytest.approx(3 * small, rel=0.01)
    assert activations(SFTConfig(batch_size=64)) < 3.5 * small  # 768 tokens, 3 rows
    assert activations(SFTConfig(batch_size=64, max_tokens_per_step=512)) < 2.1 * small
    assert activations(SFTConfig(batch_size=64, micro_batch_size=3)) == pytest.approx(3 * small, rel=0.01)
    pair = activations(DPOConfig(batch_size=64, micro_batch_size=1))
    assert small < pair < 2 * small  # the prompt is stored once
    group = activations(GRPOConfig(batch_size=1, group_size=4))
    assert group == pytest.approx(activations(GRPOConfig(batch_size=8, group_size=4, micro_batch_size=4)))


def test_sampling_and_updates_share_memory():
    source = load_source("qwen2-0.5b")
    config = GRPOConfig(batch_size=8, max_new_tokens=1000, compute="bfloat16")
    memory = run_memory(source, config, Lengths(100, 1000), interpreter=10)
    update, sampling = (sum(parts.values()) for parts in (memory.update, memory.sampling))
    assert memory.total == sum(memory.parts.values()) + max(update, sampling)
    # 2 pages for each of 8 prompts, and pages of 64 completions from token 64 to 1,099.
    page = 24 * 2 * 64 * 64 * 2 * 2
    assert memory.sampling["kv_cache"] == min(1 << 30, (8 * 2 + 64 * 17) * page)
    assert not run_memory(source, SFTConfig(), Lengths(9, 9), interpreter=0).sampling
    torch_samples = run_memory(source, OnlineDPOConfig(engine="torch"), Lengths(9, 9), interpreter=0)
    assert not torch_samples.sampling and "sampler_weights" not in torch_samples.parts


def test_reference_models_are_counted():
    source = load_source("smollm-135m")
    for config, lora_rank, expected in (
        (DPOConfig(), 0, True),
        (DPOConfig(precompute_reference=True), 0, False),
        (DPOConfig(), 8, False),
        (GRPOConfig(), 0, False),
        (GRPOConfig(beta=0.1), 0, True),
    ):
        adapters = choose_adapted(source, LoraSettings(lora_rank)) if lora_rank else None
        parts = run_memory(source, config, Lengths(9, 9), interpreter=0, adapters=adapters).parts
        assert bool(parts["reference"]) == expected


def test_initial_values_of_saved_adapters_are_the_reference():
    source = load_source("smollm-135m")
    adapters = choose_adapted(source, LoraSettings(8))._replace(is_new=False)
    for config, expected in ((DPOConfig(), 4), (DPOConfig(precompute_reference=True), 0), (SFTConfig(), 0)):
        parts = run_memory(source, config, Lengths(9, 9), interpreter=0, adapters=adapters).parts
        assert parts["reference"] == expected * adapters.n_parameters


def test_layers_by_name():
    source = source_of_config(CONFIGS["phi3"])

    def n_trained(**settings):
        adapters = choose_adapted(source, LoraSettings(2, **settings))
        return run_memory(source, SFTConfig(), Lengths(9, 9), interpreter=0, adapters=adapters).gradients

    hidden, ffn, qkv = LLAMA["hidden_size"], LLAMA["intermediate_size"], 8 * 24
    down, up, fused, o = (2 * LLAMA["num_hidden_layers"] * (n + k) for n, k in (
        (hidden, ffn), (2 * ffn, hidden), (qkv, hidden), (hidden, 4 * 24),
    ))  # fmt: skip
    assert n_trained(lora_layers=["down_proj"]) == 4 * down
    assert n_trained() == 4 * (down + up + fused + o)
    vocab, n_layers = LLAMA["vocab_size"], LLAMA["num_hidden_layers"]
    outer = n_trained(lora_layers=["embed_tokens", "down_proj"], modules_to_save=["lm_head", "norm"])
    # PEFT matches "norm" as a suffix: all norms.
    assert outer == 4 * (down + 2 * (vocab + hidden) + vocab * hidden + (2 * n_layers + 1) * hidden)
    assert_raises(
        WhetValueError,
        "compute is 'torch'",
        run_memory,
        source,
        SFTConfig(compute="torch"),
        Lengths(9, 9),
        interpreter=0,
    )


def test_a_packed_base_is_stored_once():
    source = load_source("qwen2-0.5b")
    options = {"lengths": Lengths(128, 128), "interpreter": 0, "adapters": choose_adapted(source, LoraSettings(16))}
    config = GRPOConfig(batch_size=4, group_size=8)
    plain, packed = (run_memory(source, config, base=base, **options) for base in ("none", "q8_0"))
    weights = estimate(source, "q8_0")
    assert packed.parts["weights"] == weights.weights + weights.norms + packed.gradients
    assert packed.parts["sampler_weights"] < 1.1 * packed.gradients  # adapters, in panels
    assert packed.total < plain.total - 3.5 * source.config.n_parameters
    with pytest.raises(WhetValueError, match=mentions("'q8_0'", "base", "adapters")):
        run_memory(source, config, Lengths(9, 9), interpreter=0, base="q8_0")
