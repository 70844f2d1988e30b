"""The engine on a GPU next to the CPU's in float32: every family and format, adapters, sampling, refusals.

Mesa's lavapipe is such a GPU: apt-get install mesa-vulkan-drivers.
"""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tests.engine.tiny_models import CASES, VOCAB, tiny_model
from tests.raising import assert_raises
from tests.representatives import cases
from tests.tiny import LLAMA, tiny_llama, with_lora
from transformers import LlamaConfig, LlamaForCausalLM

from whet.config.sampling import SamplingParams
from whet.engine.engine import Engine
from whet.errors import WhetError, WhetValueError
from whet.gpu import device, program
from whet.learner import Learner
from whet.models.formats import FORMATS
from whet.models.packed_base import pack_base
from whet.models.sources.live import open_module

pytestmark = pytest.mark.needs("gpu")

SMALL: dict[str, Any] = {"kv_bytes": 1 << 20, "max_batch": 8, "prefill_chunk": 16}
TOLERANCE = 3e-5  # of log-probs


def rows_of(lengths: tuple[int, ...], vocab: int = VOCAB) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, vocab, n).tolist() for n in lengths]


def assert_same_scores(gpu: Engine, cpu: Engine, rows: list[list[int]], tolerance: float = TOLERANCE, **options: Any):
    for ours, theirs in zip(gpu.logprobs(rows, **options), cpu.logprobs(rows, **options), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)


def assert_same_samples(ours: Any, theirs: Any) -> None:
    for mine, yours in zip(ours, theirs, strict=True):
        for a, b in zip(mine, yours, strict=True):
            assert list(a.token_ids) == list(b.token_ids)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=TOLERANCE)


def pair_of(model: Any, **options: Any) -> tuple[Engine, Engine]:
    settings = {"weights": "float32", **SMALL, **options}
    return Engine.from_model(model, device="gpu", **settings), Engine.from_model(model, **settings)


@pytest.mark.parametrize("case", cases(CASES, lambda case: "-" not in case))
def test_every_family_has_the_scores_of_the_cpu(case):
    gpu, cpu = pair_of(tiny_model(case))
    assert_same_scores(gpu, cpu, rows_of((2, 7, 20, 33)))
    # A single row norms and activates within products.
    sampling = SamplingParams(max_new_tokens=6)
    assert_same_samples(*(engine.generate(rows_of((3,)), 1, sampling) for engine in (gpu, cpu)))


def test_a_layer_of_a_decoder_is_at_most_five_dispatches():
    for case in ("llama", "qwen3", "lfm2"):
        gpu, _ = pair_of(tiny_model(case))
        decode = [each for each in gpu._program.plan.forward if each[0][0][2] is not None]
        assert len(decode) <= 5 * gpu.config.n_layers + 2  # the embedding and the final norm


@pytest.fixture
def submitted(monkeypatch) -> list[int]:
    """The numbers of steps of the program's submissions."""
    found: list[int] = []

    def counted(name: str) -> Any:
        method = getattr(program.Program, name)

        def call(self: Any, *inputs: Any) -> Any:
            found.append(inputs[0] if name == "decode" else 1)
            return method(self, *inputs)

        return call

    for name in ("forward", "decode"):
        monkeypatch.setattr(program.Program, name, counted(name))
    return found


def blocks_model(seed: int = 0) -> Any:
    """Make a Llama whose rows are whole blocks of every format."""
    sizes = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**LLAMA, **sizes, **heads, "tie_word_embeddings": True}))


def test_several_steps_of_plain_draws_are_one_submission(submitted):
    gpu, cpu = pair_of(blocks_model())
    rows = rows_of((5, 9, 2), 300)
    sampling = SamplingParams(max_new_tokens=40, temperature=0.9, seed=3)
    assert_same_samples(gpu.generate(rows, 1, sampling), cpu.generate(rows, 1, sampling))
    assert max(submitted) >= 2
    assert sum(submitted) <= 40 + 3  # no step is computed twice
    # Filters need the logits between two steps.
    submitted.clear()
    sampling = SamplingParams(max_new_tokens=10, top_k=3, seed=3)
    assert_same_samples(gpu.generate(rows, 1, sampling), cpu.generate(rows, 1, sampling))
    assert max(submitted) == 1


def test_tokens_after_the_end_of_a_sample_are_dropped(submitted):
    gpu, cpu = pair_of(blocks_model())
    row = rows_of((70,), 300)  # more than a page
    free = SamplingParams(max_new_tokens=20, seed=1)
    tokens = cpu.generate(row, 2, free)[0]
    for at in (3, 12, 13):  # within and at the end of a submission
        sampling = SamplingParams(max_new_tokens=20, seed=1, stop_token_ids=[tokens[1].token_ids[at]])
        ours, theirs = gpu.generate(row, 2, sampling), cpu.generate(row, 2, sampling)
        assert_same_samples(ours, theirs)
        # The pages of the sequence are as if it had ended there: a longer one continues them.
        longer = [row[0] + list(ours[0][1].token_ids) + [5, 6]]
        assert_same_scores(gpu, cpu, longer)
        assert_same_samples(*(engine.generate(longer, 1, SamplingParams(max_new_tokens=5)) for engine in (gpu, cpu)))
    assert max(submitted) >= 2


def test_an_abandoned_stream_leaves_the_others_and_the_cache_as_they_are():
    gpu, cpu = pair_of(blocks_model())
    rows = rows_of((6, 4), 300)
    sampling = SamplingParams(max_new_tokens=50, seed=2)
    stream = gpu.stream(rows[0], sampling)
    for _ in range(5):
        next(stream)
    stream.close()
    assert_same_samples(gpu.generate(rows, 3, sampling), cpu.generate(rows, 3, sampling))


def dequantised(model: Any, base: Any) -> Any:
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in model.named_modules():
            if getattr(module, "weight", None) is not None:
                module.weight.copy_(base.rows(name, torch.empty_like(module.weight)))
    return model


def test_a_step_reads_every_weight_once():
    """The model of docs/gpu.md: the bytes of a decode step are the weights' bytes."""
    gpu, cpu = pair_of(blocks_model())
    plan = gpu._program.plan
    sizes = [n_bytes for _, n_bytes, _ in plan.buffers]
    weights = {i for i, (name, *_) in enumerate(plan.buffers) if name == "weights"}
    # The first dispatch reads one row of the embedding, which is also the head.
    read = [i for variants, *_ in [*plan.forward[1:], *plan.head] for i in variants[0][3] if i in weights]
    assert sorted(read) == sorted(weights)
    assert sum(sizes[i] for i in read) == pytest.approx(cpu.memory["weights_bytes"], rel=0.01)  # which has norms too


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_has_the_scores_of_its_float32_weights(format):
    model = blocks_model()
    base = pack_base(open_module(model), weights=format, embedding=None if format.endswith("_m") else format)
    options = {**SMALL, "kv_dtype": "float32"}
    gpu = Engine.from_base(base, device="gpu", **options)
    cpu = Engine.from_model(dequantised(model, base), weights="float32", **options)
    assert_same_scores(gpu, cpu, rows_of((2, 70, 100), 300))


def test_keys_and_values_in_bfloat16_change_scores_as_on_the_cpu():
    model = blocks_model()
    gpu, cpu = pair_of(model, kv_dtype="bfloat16")
    exact = Engine.from_model(model, weights="float32", **SMALL)
    [ours], [theirs], [reference] = (engine.logprobs(rows_of((100,), 300)) for engine in (gpu, cpu, exact))
    assert 0 < np.abs(ours - reference).max() < 2 * np.abs(theirs - reference).max()


@pytest.mark.parametrize("case", ["llama", "lfm2", "qwen3_5_text", "granite4-hybrid", "gemma4", "gpt_oss"])
def test_samples_are_the_ones_of_the_cpu(case):
    gpu, cpu = pair_of(tiny_model(case), kv_bytes=1 << 22)
    prompts = rows_of((5, 20, 33))
    for sampling in (
        SamplingParams(max_new_tokens=20, seed=3),
        SamplingParams(max_new_tokens=20, temperature=0.0),
        SamplingParams(max_new_tokens=12, top_k=7, top_p=0.9, repetition_penalty=1.2, top_logprobs=3, kept_tokens=True),
    ):
        assert_same_samples(gpu.generate(prompts, 3, sampling), cpu.generate(prompts, 3, sampling))
    assert gpu.memory["kv_used_bytes"] == 0


def test_conversations_continue_from_kept_states():
    gpu, cpu = pair_of(tiny_model("qwen3_5_text", max_position_embeddings=512), kv_bytes=1 << 22)
    prompt = [3 + i % 7 for i in range(70)]
    for engine in (gpu, cpu):
        list(engine.stream(prompt, SamplingParams(max_new_tokens=5), keep=True))
    longer = [*prompt[:64], 5, 6, 7]
    sampling = SamplingParams(max_new_tokens=8, seed=2)
    ours, theirs = ([token.token_id for token in e.stream(longer, sampling, keep=True)] for e in (gpu, cpu))
    assert ours == theirs
    assert_same_samples(gpu.generate([prompt, longer], 3, sampling), cpu.generate([prompt, longer], 3, sampling))


def test_experts_are_recorded():
    gpu, cpu = pair_of(tiny_model("qwen3_moe"))
    sampling = SamplingParams(max_new_tokens=6, experts=True)
    [[ours]], [[theirs]] = (engine.generate([[5, 6, 7]], 1, sampling) for engine in (gpu, cpu))
    np.testing.assert_array_equal(ours.experts, theirs.experts)


def test_samples_of_a_prompt_over_pages_share_it_and_part_from_each_other():
    gpu, cpu = pair_of(tiny_llama(max_position_embeddings=256), kv_bytes=1 << 22)
    prompt = [3 + i % 7 for i in range(100)]  # a whole page, and a part of one that is copied
    sampling = SamplingParams(max_new_tokens=40, seed=1)
    [ours], [theirs] = (engine.generate([prompt], 4, sampling) for engine in (gpu, cpu))
    assert [list(each.token_ids) for each in ours] == [list(each.token_ids) for each in theirs]
    first = list(gpu.stream(prompt, SamplingParams(max_new_tokens=5), keep=True))
    assert gpu.memory["kv_kept_bytes"] > 0
    assert first == list(gpu.stream(prompt, SamplingParams(max_new_tokens=5), keep=True))


@pytest.mark.parametrize("case", ["llama", "phi3", "gptj"])
def test_adapters_by_row(case):
    targets = {
        "llama": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
        "phi3": ["qkv_proj", "gate_up_proj", "down_proj"],
        "gptj": ["q_proj", "out_proj", "fc_in", "fc_out"],
    }[case]
    make = lambda seed: with_lora(tiny_model(case), seed, b_std=0.3, target_modules=targets)  # noqa: E731
    gpu, cpu = pair_of(make(0))
    rows = rows_of((2, 7, 20, 33))
    assert_same_scores(gpu, cpu, rows)
    numbers = gpu.add_adapter(make(1)), cpu.add_adapter(make(1))
    assert numbers[0] == numbers[1]
    points = gpu._program._adapters[numbers[0]]
    assert [len(point) for point in points] == [2 if point else 0 for point in points]
    assert sum(map(bool, points)) == (3 if case == "phi3" else 4) * gpu.config.n_layers
    mixed = [numbers[0], None, None, numbers[0]]
    assert_same_scores(gpu, cpu, rows, adapter=mixed)
    assert np.abs(gpu.logprobs(rows, adapter=numbers[0])[3] - gpu.logprobs(rows)[3]).max() > 0.1
    for engine in (gpu, cpu):
        engine.remove_adapter(numbers[0])
        engine.sync(make(2))
    assert_same_scores(gpu, cpu, rows)


def test_sync_copies_the_weights():
    gpu, cpu = pair_of(tiny_model("qwen2"))
    before = gpu.logprobs(rows_of((20,)))[0]
    other = copy.deepcopy(tiny_model("qwen2"))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    for engine in (gpu, cpu):
        engine.sync(other)
    assert_same_scores(gpu, cpu, rows_of((20,)))
    assert np.abs(gpu.logprobs(rows_of((20,)))[0] - before).max() > 0.1


def test_a_matrix_is_cut_where_it_exceeds_the_largest_binding(monkeypatch):
    model = blocks_model()
    monkeypatch.setattr(program, "binding_bytes", lambda device: 1 << 18)
    gpu, cpu = pair_of(model)
    assert max(n_bytes for _, n_bytes, _ in gpu._program.plan.buffers) <= 1 << 18 < 4 * 300 * 256
    assert_same_scores(gpu, cpu, rows_of((2, 33), 300))


def test_a_failed_step_is_repeated(monkeypatch):
    gpu, cpu = pair_of(tiny_model("llama"))
    rows = rows_of((33,))
    real, calls = program.Program.forward, []

    def fail_once(self, *inputs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, *inputs)

    monkeypatch.setattr(program.Program, "forward", fail_once)
    with pytest.raises(KeyboardInterrupt):
        gpu.logprobs(rows)
    assert_same_scores(gpu, cpu, rows)
    assert gpu.memory["kv_used_bytes"] == 0


def test_refusals(monkeypatch):
    model = tiny_model("llama")
    make = Engine.from_model
    assert_raises(WhetValueError, ("device", "'cuda'", "cpu, gpu"), make, model, device="cuda")
    assert_raises(WhetValueError, ("kv_dtype q8", "omit device"), make, model, device="gpu", kv_dtype="q8")
    mixture = tiny_model("qwen3_moe")
    facts = ("expert_bytes", "on a GPU all experts")
    assert_raises(WhetValueError, facts, make, mixture, device="gpu", expert_bytes=1 << 20)
    mixture = make(tiny_model("qwen3_moe"), device="gpu", **SMALL)
    experts = with_lora(tiny_model("qwen3_moe"), target_modules=[], target_parameters=["mlp.experts.down_proj"])
    assert_raises(WhetValueError, ("adapters of experts", "omit device"), mixture.add_adapter, experts)
    dora = Learner(pack_base(open_module(model), weights="float32"), lora_rank=2, use_dora=True)
    engine = make(model, device="gpu", **SMALL)
    assert_raises(WhetValueError, ("no kernel for DoRA", "omit device"), engine.add_adapter, dora)
    for opened, facts in (
        (Mock(side_effect=ImportError), ("wgpu", "pip install 'whet[gpu]'")),
        (Mock(side_effect=RuntimeError("no adapter\nmore")), ("no GPU", "(no adapter)", "omit device")),
        (Mock(return_value=(1, None)), ("before the fork", "'spawn'")),
    ):
        monkeypatch.setattr(device, "_open", opened)
        assert_raises(WhetError, facts, make, model, device="gpu")


def test_memory_of_the_gpu_is_counted_and_freed():
    gpu, cpu = pair_of(tiny_model("llama"))
    assert cpu.memory["gpu_bytes"] == 0 < cpu.memory["weights_bytes"] < gpu.memory["gpu_bytes"]
    assert gpu.memory["weights_bytes"] == 0  # released after the copy
    assert gpu.fingerprint() == cpu.fingerprint()
    assert gpu.release_weights() == 0
    assert_same_scores(gpu, cpu, rows_of((5,)))
    program_of_gpu = weakref.ref(gpu._program)
    gpu.close()
    gc.collect()
    assert program_of_gpu() is None


def test_failures_of_the_gpu_are_explained(monkeypatch):
    import wgpu

    gpu, cpu = pair_of(tiny_model("llama"))
    rows = rows_of((33,))

    for error, facts in (
        (wgpu.GPUOutOfMemoryError, ("Engine.from_model", "memory is full", "kv_bytes")),
        (wgpu.GPUInternalError, ("Engine.from_model", "the GPU failed: of the driver")),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(program.Program, "_submit", Mock(side_effect=error("of the driver")))
            assert_raises(WhetError, facts, gpu.logprobs, rows)
        assert_same_scores(gpu, cpu, rows)


def test_engines_in_threads_share_a_gpu():
    engines = [pair_of(tiny_model("llama"))[0] for _ in range(2)]
    sampling = SamplingParams(max_new_tokens=20, seed=1)
    with ThreadPoolExecutor(4) as pool:
        groups = list(pool.map(lambda i: engines[i % 2].generate([[5, 6, 7]], 4, sampling)[0], range(8)))
    assert len({tuple(tuple(sample.token_ids) for sample in group) for group in groups}) == 1


def test_a_forked_process_needs_a_new_engine():
    gpu, _ = pair_of(tiny_model("llama"))
    gpu._program._pid += 1  # as in a child
    assert_raises(WhetError, ("forked", "omit device"), gpu.logprobs, rows_of((5,)))


def test_infinite_logits_are_an_error():
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(3e38)
    messages = []
    for engine in pair_of(model):
        with pytest.raises(WhetError, match="contain NaN") as raised:
            engine.generate([[5, 6]], 1, SamplingParams(max_new_tokens=3))
        messages.append(str(raised.value))
        assert engine.memory["kv_used_bytes"] == 0
    assert messages[0] == messages[1]


def test_draws_on_the_gpu_follow_the_distribution():
    gpu, cpu = pair_of(blocks_model(), kv_bytes=1 << 24, max_batch=64)
    for sampling in (
        SamplingParams(max_new_tokens=1, temperature=0.7),
        SamplingParams(max_new_tokens=1, temperature=2.0),
    ):
        for mode in ("sampling", "model"):
            ours, theirs = (e.generate([[5, 6]], 300, sampling, logprobs_mode=mode)[0] for e in (gpu, cpu))
            assert [list(a.token_ids) for a in ours] == [list(b.token_ids) for b in theirs]
            np.testing.assert_allclose([a.logprobs for a in ours], [b.logprobs for b in theirs], atol=TOLERANCE)
            assert len({a.token_ids[0] for a in ours}) > 50
