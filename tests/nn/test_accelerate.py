"""Whet's kernels in Hugging Face models, against the models' own functions in float64 and float32."""

from __future__ import annotations

import copy
import functools
import os
import platform
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.raising import assert_raises, mentions

pytest.importorskip("transformers")
import peft
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module
from tests.engine.tiny_models import CASES, VOCAB, foreign_model, own_precision, tiny_model
from tests.processes import printed_by, run_python
from tests.threads import threads
from tests.tiny import with_lora

import whet
from whet import WhetTypeError, WhetValueError
from whet.learner.batch import pack_batch
from whet.nn import accelerate, completion_logprobs
from whet.nn.accelerate import Acceleration, acceleration_of, choose_accelerations
from whet.nn.threads import openmp_fork

GENERATOR = torch.Generator().manual_seed(5)


def ids(n: int) -> list[int]:
    return torch.randint(0, VOCAB, (n,), generator=GENERATOR).tolist()


SHARED, OTHER = ids(7), ids(3)
PROMPTS = [SHARED, OTHER, SHARED, SHARED, OTHER]
COMPLETIONS = [ids(6), ids(1), [], ids(11), ids(4)]
WEIGHTS = torch.randn(5, 11, generator=GENERATOR)


def logprobs_and_gradients(model: Any, temperature: float = 0.8) -> tuple[Any, dict[str, torch.Tensor]]:
    model.zero_grad()
    result = completion_logprobs(model, PROMPTS, COMPLETIONS, temperature=temperature, return_entropy=True)
    (result.logprobs * WEIGHTS.to(result.logprobs)).sum().backward()
    return result, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([g.double().flatten() for g in gradients.values()])


def trained(case: str, **options: Any) -> Any:
    return tiny_model(case, **options).requires_grad_(True)


@pytest.mark.parametrize("case", CASES)
def test_packed_batch_equals_padded_batch(case):
    """Log-probs, entropies and gradients of every parameter, with shared prompts, against float64."""
    model = trained(case)
    if not case.startswith(("gpt2", "gptj", "phi", "starcoder2")):  # which have dropout by default
        model.train()
    with own_precision(model):
        exact, exact_gradients = logprobs_and_gradients(model.double())
    plain, plain_gradients = logprobs_and_gradients(model.float())
    with accelerate(model, "float32"):
        fast, gradients = logprobs_and_gradients(model)
    assert gradients.keys() == exact_gradients.keys()
    assert torch.equal(fast.mask, plain.mask)
    bound = 4 * (plain.logprobs - exact.logprobs).abs().max() + 2e-6
    assert (fast.logprobs - exact.logprobs).abs().max() < bound
    assert (fast.entropy - exact.entropy).abs().max() < 2e-5
    error, own = flat(gradients) - flat(exact_gradients), flat(plain_gradients) - flat(exact_gradients)
    assert error.norm() < 4 * own.norm() + 1e-6 * flat(exact_gradients).norm()


@pytest.mark.parametrize("case", ["llama", "llama-biases-tied", "mistral", "qwen3", "gpt_neox", "gpt2", "gptj", "phi3",
                                  "smollm3", "granite", "olmo2", "gemma2", "gemma3", "starcoder2", "stablelm-parallel",
                                  "phi", "qwen3_5_text", "granite4-hybrid", "nemotron_h"])  # fmt: skip
def test_bfloat16_gradients_keep_their_direction(case):
    model = trained(case, initializer_range=0.1)
    _, exact = logprobs_and_gradients(model)
    with accelerate(model, "bfloat16"):
        result, gradients = logprobs_and_gradients(model)
    assert result.logprobs.dtype == torch.float32
    assert all(g.dtype == torch.float32 for g in gradients.values())
    assert torch.cosine_similarity(flat(gradients), flat(exact), 0) > 0.999


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("case", ["llama", "gptj", "gpt_neox", "lfm2", "qwen3_5_text", "granite4-hybrid", "nemotron_h"])
def test_gradient_checkpointing_recomputes_layers(case, reentrant):
    model = trained(case).train()
    with accelerate(model, "float32"):
        _, plain = logprobs_and_gradients(model)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        passes = 0

        def count(*args: Any) -> None:
            nonlocal passes
            passes += 1

        next(m for m in model.modules() if type(m).__name__.endswith("Attention")).register_forward_pre_hook(count)
        _, again = logprobs_and_gradients(model)
    assert passes == 2
    assert plain.keys() == again.keys()
    assert torch.equal(flat(plain), flat(again))


@pytest.mark.parametrize("case", CASES)
def test_layers_beyond_the_limit_are_computed_again_with_the_same_bits(case):
    model = trained(case)
    with accelerate(model, "float32") as acceleration:
        acceleration.in_place = True
        _, plain = logprobs_and_gradients(model)
        of_token = acceleration.layer_bytes
        n_tokens = len(pack_batch(PROMPTS, COMPLETIONS).input_ids)
        counts = Counter[int]()
        for layer, i in acceleration._layers.items():
            for part in layer.children():
                part.register_forward_pre_hook(lambda *args, i=i: counts.update([i]))
        n_layers = len(of_token)
        acceleration.activation_bytes = n_tokens * sum(of_token)
        logprobs_and_gradients(model)
        once = [counts[i] for i in range(n_layers)]
        for n_kept in range(n_layers):
            counts.clear()
            acceleration.activation_bytes = n_tokens * sum(of_token[n_layers - n_kept :])
            _, again = logprobs_and_gradients(model)
            assert plain.keys() == again.keys() and torch.equal(flat(plain), flat(again)), n_kept
            assert [counts[i] > once[i] for i in range(n_layers)] == [True] * (n_layers - n_kept) + [False] * n_kept


def test_dropout_of_a_layer_computed_again_is_the_same():
    model = with_lora(tiny_model("llama"), b_std=0.1, lora_dropout=0.5, target_modules=["q_proj", "down_proj"]).train()
    with accelerate(model, "float32") as acceleration:
        found = []
        for limit in (None, 0):
            acceleration.activation_bytes = limit
            torch.manual_seed(3)
            found.append(flat(logprobs_and_gradients(model)[1]))
        torch.manual_seed(4)
        other = flat(logprobs_and_gradients(model)[1])
    assert torch.equal(*found) and not torch.equal(found[0], other)


def test_autograd_gets_every_gradient():
    """``torch.autograd.grad`` and hooks get the gradients, and in-place accumulation computes the same ones."""
    model = trained("llama")
    with accelerate(model, "float32") as acceleration:
        _, backward = logprobs_and_gradients(model)
        result = completion_logprobs(model, PROMPTS, COMPLETIONS, temperature=0.8)
        grads = torch.autograd.grad((result.logprobs * WEIGHTS).sum(), list(model.parameters()))
        for one, other in zip(grads, backward.values(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        seen = []
        hooked = model.model.layers[0].mlp.up_proj.weight
        hooked.register_hook(lambda grad: seen.append(grad))
        acceleration.in_place = True
        _, in_place = logprobs_and_gradients(model)
    for name, grad in backward.items():
        torch.testing.assert_close(in_place[name], grad, rtol=1e-6, atol=1e-7)
    assert len(seen) == 1


def test_gradients_accumulate_in_place():
    model = trained("qwen2")
    with accelerate(model, "float32") as acceleration:
        acceleration.in_place = True
        _, once = logprobs_and_gradients(model)
        completion_logprobs(model, PROMPTS, COMPLETIONS, temperature=0.8).logprobs.mul(WEIGHTS).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, 2 * once[name], rtol=1e-5, atol=1e-6)


def test_remove_restores_the_model():
    model = trained("llama")
    before, _ = logprobs_and_gradients(model)
    names, attention = set(vars(model.model.layers[0].mlp)), model.config._attn_implementation
    acceleration = accelerate(model, "bfloat16")
    assert acceleration_of(model) is acceleration
    inside, _ = logprobs_and_gradients(model)
    acceleration.remove()
    acceleration.remove()
    assert acceleration_of(model) is None
    assert set(vars(model.model.layers[0].mlp)) == names
    assert model.config._attn_implementation == attention
    after, _ = logprobs_and_gradients(model)
    assert torch.equal(before.logprobs, after.logprobs)
    assert not torch.equal(before.logprobs, inside.logprobs)


@pytest.mark.parametrize("case", ["llama", "mistral", "gpt_neox", "gptj", "gemma2"])
def test_forward_and_generate_match_torch(case):
    """A padded forward with a mask, and generation."""
    model = tiny_model(case)
    rows = torch.tensor([ids(9), ids(9)])
    mask = torch.ones_like(rows)
    mask[0, :4] = 0
    with torch.no_grad():
        plain = model(rows, attention_mask=mask).logits[:, 4:]
        generated = model.generate(rows, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
        with accelerate(model, "float32"):
            torch.testing.assert_close(model(rows, attention_mask=mask).logits[:, 4:], plain, rtol=1e-4, atol=1e-4)
            again = model.generate(rows, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(generated, again)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_changed_in_place_take_effect(dtype):
    """bfloat16 copies and the head are never stale."""
    model = trained("llama")
    with accelerate(model, dtype):
        first, _ = logprobs_and_gradients(model)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)
        second, _ = logprobs_and_gradients(model)
        fresh = copy.deepcopy(model.state_dict())
    other = trained("llama")
    other.load_state_dict(fresh)
    with accelerate(other, dtype):
        expected, _ = logprobs_and_gradients(other)
    assert not torch.equal(first.logprobs, second.logprobs)
    assert torch.equal(second.logprobs, expected.logprobs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replaced_weight_data_takes_effect(dtype):
    """``p.data = ...`` does not change the version counter."""
    model, scaled = trained("qwen2"), trained("qwen2")
    for p in scaled.parameters():
        p.data = p.data * 1.5
    with accelerate(scaled, dtype):
        expected = plain_logprobs(scaled)
    with accelerate(model, dtype):
        before = plain_logprobs(model)
        for p in model.parameters():
            p.data = p.data * 1.5
        assert torch.equal(plain_logprobs(model), expected)
        assert not torch.equal(before, expected)


def test_adapters_train_and_can_be_disabled():
    targets = ["q_proj", "v_proj", "down_proj"]
    model = with_lora(trained("llama"), r=2, target_modules=targets, init_lora_weights=False)
    plain, plain_gradients = logprobs_and_gradients(model)
    with accelerate(model, "float32"):
        fast, gradients = logprobs_and_gradients(model)
        with model.disable_adapter():
            off = plain_logprobs(model)
    assert gradients.keys() == plain_gradients.keys()
    assert all("lora" in name for name in gradients)
    torch.testing.assert_close(fast.logprobs, plain.logprobs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(flat(gradients), flat(plain_gradients), rtol=1e-3, atol=1e-3)
    with model.disable_adapter():
        torch.testing.assert_close(off, plain_logprobs(model), rtol=1e-4, atol=1e-4)


def plain_logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return completion_logprobs(model, PROMPTS, COMPLETIONS).logprobs


def test_unsupported_models_are_rejected():
    facts = "model is Linear", "a Hugging Face causal model"
    assert_raises(WhetTypeError, facts, accelerate, torch.nn.Linear(2, 2))
    assert_raises(WhetValueError, ("model_type is 'opt'", "gemma2, gemma3"), accelerate, foreign_model())
    facts = "bfloat16 on cpu", "float32", "model.float()"
    assert_raises(WhetValueError, facts, accelerate, tiny_model("llama").bfloat16())
    assert_raises(WhetValueError, ("dtype", "'float16'", "auto"), accelerate, tiny_model("llama"), "float16")
    model = tiny_model("llama")
    with accelerate(model):
        assert_raises(WhetValueError, ("accelerated already", "remove()"), accelerate, model)
    acceleration = Acceleration(model)
    assert acceleration_of(model) is None
    with acceleration:
        assert_raises(WhetValueError, ("token 48", "has 48 tokens"), completion_logprobs, model, [[1]], [[48]])
        assert_raises(WhetValueError, ("embedding", "token id 48"), completion_logprobs, model, [[48]], [[1]])


class Doubled(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class Masked(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **options: Any) -> Any:
        output = super().forward(*args, **options)
        output.logits = output.logits - 1e4
        return output


def double(module: Any, inputs: Any, output: Any) -> Any:
    return output * 2


def give_class(name: str, kind: type) -> Callable[[Any], None]:
    return lambda model: setattr(model.get_submodule(name), "__class__", kind)


def patch_forward(name: str) -> Callable[[Any], None]:
    def patch(model: Any) -> None:
        module = model.get_submodule(name)
        original = module.forward
        module.forward = functools.wraps(original)(lambda *args, **options: original(*args, **options))

    return patch


def hook(name: str) -> Callable[[Any], None]:
    return lambda model: model.get_submodule(name).register_forward_hook(double)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (give_class("", Masked), "forward of the model"),
        (give_class("model.layers.0.self_attn.q_proj", Doubled), "forward of model.layers.0.self_attn.q_proj"),
        (give_class("lm_head", Doubled), "linear head"),
        (patch_forward(""), "forward of the model"),
        (patch_forward("lm_head"), "forward of lm_head"),
        (patch_forward("model.layers.1.mlp"), "forward of model.layers.1.mlp"),
        (patch_forward("model.layers.1.input_layernorm"), "forward of model.layers.1.input_layernorm"),
        (patch_forward("model.layers.1.self_attn"), "forward of model.layers.1.self_attn"),
        (hook(""), "forward hook of the model"),
        (hook("lm_head"), "forward hook of lm_head"),
        (hook("model.layers.0.mlp.act_fn"), "forward hook of model.layers.0.mlp.act_fn"),
    ],
)
def test_code_that_the_kernels_would_bypass_is_rejected(change, fact):
    model = tiny_model("llama")
    acceleration = Acceleration(model)
    change(model)
    assert_raises(WhetValueError, (fact,), accelerate, model)
    fact = "forward of lm_head" if fact == "linear head" else fact
    assert_raises(WhetValueError, (fact,), acceleration.install)  # changed after it was made


def test_hooks_inside_and_around_adapters_are_rejected():
    for name in ("lora_A.default", "base_layer"):
        model = with_lora(tiny_model("llama"))
        model.get_submodule(f"base_model.model.model.layers.0.mlp.down_proj.{name}").register_forward_hook(double)
        assert_raises(WhetValueError, ("forward hook of", f"down_proj.{name}"), accelerate, model)
    model = with_lora(tiny_model("llama"))
    model.register_forward_hook(double)
    assert_raises(WhetValueError, ("forward hook of the model",), accelerate, model)


def test_library_hooks_and_hooks_that_still_run_are_allowed():
    model = trained("llama")
    for name in ("model.layers.0", "model.layers.0.self_attn", "model.layers.0.mlp", "model.layers.1.mlp.gate_proj"):
        model.get_submodule(name).register_forward_hook(lambda module, inputs, output: None)
    model.model.layers[0].mlp.register_forward_hook(double)
    model.enable_input_require_grads()
    add_hook_to_module(model.model.layers[1].mlp, ModelHook())
    plain = plain_logprobs(model)
    with accelerate(model, "float32"):
        torch.testing.assert_close(plain_logprobs(model), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        peft.LoHaConfig(r=2, target_modules=["lm_head"]),
        peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]),
        peft.LoraConfig(r=2, use_dora=True, target_modules=["lm_head"]),
        peft.TrainableTokensConfig(token_indices=[5], target_modules=["embed_tokens"]),
        peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["self_attn.o_proj.weight"]),
    ],
    ids=["LoHa", "IA3", "DoRA", "tokens of a tied head", "target_parameters"],
)
def test_adapters_that_the_head_would_drop_are_rejected(config):
    """With "auto" torch computes them, with a warning."""
    model = peft.get_peft_model(
        tiny_model("llama", tie_word_embeddings=isinstance(config, peft.TrainableTokensConfig)), config
    )
    with pytest.raises(WhetValueError, match=r"linear head|target_parameters"):
        accelerate(model)
    with pytest.warns(UserWarning, match=mentions("SFT", "torch computes the step", "compute='torch'")):
        assert choose_accelerations([model], "auto", False, "SFT") == {}


def test_attention_without_custom_functions_is_rejected(monkeypatch):
    """For example StableLM's in transformers 4.56, whose result would be NaN."""

    def forward(self: Any, hidden_states: Any, **options: Any) -> Any:
        return hidden_states, None

    model = tiny_model("gpt_neox")
    monkeypatch.setattr(type(model.gpt_neox.layers[0].attention), "forward", forward)
    assert_raises(WhetValueError, ("GPTNeoXAttention", "transformers", "attention function"), accelerate, model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_converted_after_accelerate_is_rejected(dtype):
    model = tiny_model("llama")
    with accelerate(model, dtype):
        facts = "torch.float64 on cpu", "expected float32", "remove()"
        assert_raises(WhetValueError, facts, completion_logprobs, model.double(), [[1]], [[2, 3]])


def test_attention_dropout_is_rejected():
    model = trained("llama", attention_dropout=0.1).train()
    with accelerate(model):
        facts = "dropout is 0.1", "model.eval()"
        assert_raises(WhetValueError, facts, completion_logprobs, model, [[1, 2]], [[3, 4]])
    completion_logprobs(model, [[1, 2]], [[3, 4]])


def test_results_do_not_depend_on_the_number_of_threads():
    """The bits are equal on one thread and two, in bfloat16 and float32."""
    model = trained("qwen2")
    for dtype in ("float32", "bfloat16"):
        results = []
        for n in (1, 2):
            with threads(n), accelerate(model, dtype):
                results.append(logprobs_and_gradients(model))
        assert torch.equal(results[0][0].logprobs, results[1][0].logprobs)
        assert torch.equal(flat(results[0][1]), flat(results[1][1]))


@pytest.mark.skipif(not openmp_fork(), reason="torch has one thread, or no OpenMP")
def test_kernels_use_openmp_threads_and_the_pool_after_a_fork():
    x = torch.randn(4096, 512, generator=GENERATOR)
    right, weight = whet.rms_norm(x, torch.ones(512)), torch.ones(512)
    with accelerate(trained("llama")):
        assert torch.equal(whet.rms_norm(x, weight), right)
        child = os.fork()  # OpenMP does not survive this; the pool does
        if child == 0:
            os._exit(0 if torch.equal(whet.rms_norm(x, weight), right) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(whet.rms_norm(x, weight), right)
    assert torch.equal(whet.rms_norm(x, weight), right)


def test_a_script_exits_without_output():
    """torch's graph still references packed weights at exit."""
    script = """
from tests.engine.tiny_models import tiny_model
from whet.nn import accelerate, completion_logprobs

model = tiny_model("llama").requires_grad_(True)
acceleration = accelerate(model)
result = completion_logprobs(model, [[1]], [[2]])
"""
    run = run_python(script)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


_STEP = """
import mmap
from pathlib import Path
import torch
from whet import _core

def mebibytes(name):
    line = next(x for x in Path("/proc/self/smaps_rollup").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) >> 10

_core.keep_freed_memory()
_core.keep_freed_memory()  # by the next model
before = mebibytes("Rss:")
parts = [torch.ones(4 << 20) for _ in range(16)]  # 16 MiB each
huge = mebibytes("AnonHugePages:")
del parts
retained = mebibytes("Rss:") - before
taken = mebibytes("AnonHugePages:")
asked = mmap.mmap(-1, 256 << 20)
asked.madvise(mmap.MADV_HUGEPAGE)
for at in range(0, len(asked), 4096):
    asked[at] = 1
print(retained, huge, mebibytes("AnonHugePages:") - taken)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc can be configured")
def test_freed_memory_is_retained_in_huge_pages():
    retained, huge, available = map(int, printed_by(_STEP).split())
    assert retained > 240
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if setting.exists() and "[never]" not in setting.read_text() and available > 200:  # memory is not fragmented
        assert huge > 200
