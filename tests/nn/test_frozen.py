"""Models with packed, frozen matrices, and adapters on them, against the dequantised models."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.raising import assert_raises, mentions

pytest.importorskip("transformers")
pytest.importorskip("peft")
import peft
from tests.engine.tiny_models import VOCAB, own_precision, tiny_model
from tests.gguf_files import Q8_0, write_gguf
from tests.models.sources.test_gguf_model import KEYS
from tests.tiny import with_lora
from torch import nn

from whet import WhetTypeError, WhetValueError
from whet.models.packed_base import pack_base
from whet.models.sources.gguf_model import load_gguf_model
from whet.models.sources.live import open_module
from whet.nn import accelerate, completion_logprobs
from whet.nn.accelerate import Acceleration, choose_accelerations
from whet.nn.frozen import FrozenEmbedding, FrozenLinear, frozen_model
from whet.nn.linear_logprobs import linear_logprobs

GENERATOR = torch.Generator().manual_seed(7)
FAMILIES = ["llama", "llama-biases-tied", "mistral", "qwen2", "qwen3", "gpt_neox", "gpt2", "gptj", "phi3", "gemma2",
            "granite_swa", "lfm2"]  # fmt: skip
LARGE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
"""Sizes with row lengths that are multiples of 256, for the K-quants."""


def ids(n: int) -> list[int]:
    return torch.randint(0, VOCAB, (n,), generator=GENERATOR).tolist()


SHARED = ids(7)
PROMPTS, COMPLETIONS = [SHARED, ids(3), SHARED], [ids(6), ids(4), ids(9)]
WEIGHTS = torch.randn(3, 9, generator=GENERATOR)


def lora(model: Any, **settings: Any) -> Any:
    return with_lora(model, b_std=0.1, **{"target_modules": "all-linear", **settings})


def in_floats(case: str, frozen: Any, **options: Any) -> Any:
    """Return the model of the case with the frozen model's weights in floats."""
    model = tiny_model(case, **options)
    with torch.no_grad():
        for name, module in frozen.named_modules():
            if isinstance(module, (FrozenLinear, FrozenEmbedding)):
                plain, numbers = model.get_submodule(name), module.weight.clone()
                plain.weight.copy_(numbers.t() if type(plain).__name__ == "Conv1D" else numbers)
    return model


def logprobs_and_gradients(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    result = completion_logprobs(model, PROMPTS, COMPLETIONS, temperature=0.8).logprobs
    (result * WEIGHTS.to(result)).sum().backward()
    gradients = [p.grad.double().flatten() for name, p in model.named_parameters() if p.requires_grad]
    return result.detach(), torch.cat(gradients)


def check_gradients(case: str, base: str, **options: Any) -> None:
    """Assert that log-probs and adapter gradients equal the float64 results of the model in floats."""
    frozen = frozen_model(tiny_model(case, **options), base)
    wide = lora(in_floats(case, frozen, **options)).double()
    with own_precision(wide):
        exact_log, exact = logprobs_and_gradients(wide)
    _, own = logprobs_and_gradients(lora(in_floats(case, frozen, **options)))
    model = lora(frozen)
    with accelerate(model, "float32"):
        log, gradients = logprobs_and_gradients(model)
    assert gradients.shape == exact.shape
    assert (gradients - exact).norm() < 4 * (own - exact).norm() + 1e-5 * exact.norm()
    torch.testing.assert_close(log.double(), exact_log, rtol=1e-5, atol=1e-4)
    with accelerate(model, "bfloat16"):
        assert torch.cosine_similarity(logprobs_and_gradients(model)[1], exact, 0) > 0.999


@pytest.mark.parametrize("base", ["float32", "bf16", "q8_0", "q4_k_m"])
def test_gradients_on_every_format_of_the_base(base):
    check_gradients("llama", base, initializer_range=0.1, **LARGE)


@pytest.mark.parametrize("case", FAMILIES)
def test_gradients_of_every_family(case):
    check_gradients(case, "q8_0", initializer_range=0.1)


@pytest.mark.parametrize("case", ["llama", "llama-biases-tied", "gpt_neox", "gpt2", "gptj", "gemma2"])
def test_frozen_model_without_kernels_equals_floats(case):
    """Without the kernels: logits of a padded batch, and generation."""
    frozen = frozen_model(tiny_model(case), "bf16")
    model = in_floats(case, frozen)
    rows = torch.tensor([ids(9), ids(9)])
    torch.testing.assert_close(frozen(rows).logits, model(rows).logits, rtol=1e-4, atol=1e-4)
    generated = [m.generate(rows, max_new_tokens=5, do_sample=False, pad_token_id=0) for m in (model, frozen)]
    assert torch.equal(*generated)
    with accelerate(frozen, "float32"):
        again = frozen.generate(rows, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(generated[0], again)


def test_no_float_copy_of_a_matrix_is_held():
    """Neither in the modules, nor in state_dict, nor in the tensors that a training step saves."""
    base = pack_base(open_module(tiny_model("llama", **LARGE)), weights="q8_0")
    model = lora(frozen_model(tiny_model("llama", **LARGE), base), r=2)
    assert all(p.ndim == 1 or "lora_" in name for name, p in model.named_parameters())
    assert all("norm" in name or "lora_" in name for name in model.state_dict())
    assert not any(p.requires_grad for name, p in model.named_parameters() if "lora_" not in name)
    saved: list[torch.Tensor] = []
    with (
        accelerate(model, "bfloat16"),
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x),
    ):
        completion_logprobs(model, PROMPTS, COMPLETIONS)
    n_tokens = sum(map(len, PROMPTS)) + sum(map(len, COMPLETIONS))
    assert max(x.untyped_storage().nbytes() for x in saved) <= 4 * 512 * n_tokens < 2 * 256 * 256


def test_packed_weights_are_readable_and_read_only():
    model = frozen_model(tiny_model("gpt_neox"), "bf16")
    layer, original = model.gpt_neox.layers[0].attention.query_key_value, tiny_model("gpt_neox")
    right = original.gpt_neox.layers[0].attention.query_key_value.weight.bfloat16().float()
    weight = layer.weight
    assert (weight.shape, weight.dtype, weight.device.type) == (right.shape, torch.float32, "cpu")
    for value in (weight.clone(), weight.data, weight.detach(), weight * 1, weight.to(torch.float64).float()):
        assert type(value) is torch.Tensor and torch.equal(value, right)
    assert "bfloat16" in repr(layer) and "bfloat16" in repr(weight)
    table = model.gpt_neox.embed_in
    assert torch.equal(table.weight.clone(), original.gpt_neox.embed_in.weight.bfloat16().float())
    rows = torch.tensor([[3, 0], [3, VOCAB - 1]])
    assert torch.equal(table(rows), original.gpt_neox.embed_in.weight.bfloat16().float()[rows])
    assert_raises(IndexError, "outside the table of 48", table, torch.tensor([VOCAB]))
    assert_raises(IndexError, "outside the table of 48", table, torch.tensor([-1]))
    message = "query_key_value.weight", "packed", "read-only", "merge_and_unload"

    def assign() -> None:
        weight.data += 1

    for write in (lambda: weight.add_(1), lambda: weight.copy_(right), lambda: nn.init.zeros_(weight), assign):
        assert_raises(WhetTypeError, message, write)
    assert_raises(WhetTypeError, message, setattr, layer, "weight", nn.Parameter(right))
    assert_raises(WhetTypeError, message, setattr, layer, "weight", right)
    assert torch.equal(layer.weight.clone(), right)


def test_copies_share_packed_weights_and_casts_change_only_the_rest():
    model = frozen_model(tiny_model("llama"), "q8_0")
    again = copy.deepcopy(model)
    assert again.lm_head.whet_base is model.model.embed_tokens.whet_base
    assert again.model.norm.weight is not model.model.norm.weight
    rows = torch.tensor([ids(6)])
    assert torch.equal(again(rows).logits, model(rows).logits)
    assert again.bfloat16().lm_head.weight.dtype == torch.float32
    assert again.model.norm.weight.dtype == torch.bfloat16
    assert torch.cosine_similarity(again(rows).logits.float().flatten(), model(rows).logits.flatten(), 0) > 0.99
    assert_raises(WhetValueError, ("packed for the CPU", "meta", "from_pretrained"), model.to, "meta")
    assert not model.model.norm.weight.is_meta


def test_adapters_are_saved_and_loaded_for_training(tmp_path):
    model = lora(frozen_model(tiny_model("llama"), "q8_0"))
    log = completion_logprobs(model, PROMPTS, COMPLETIONS).logprobs
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {"adapter_model.safetensors"}
    again = peft.PeftModel.from_pretrained(frozen_model(tiny_model("llama"), "q8_0"), tmp_path, is_trainable=True)
    assert torch.equal(completion_logprobs(again, PROMPTS, COMPLETIONS).logprobs, log)
    assert_raises(WhetTypeError, ("save_pretrained", "packed", "get_peft_model"), again.unload().save_pretrained)


@pytest.mark.parametrize("safe", [True, False])
def test_merging_into_packed_weights_is_rejected(safe):
    model = lora(frozen_model(tiny_model("llama"), "q8_0"))
    log = completion_logprobs(model, PROMPTS, COMPLETIONS).logprobs
    for merge in (model.merge_and_unload, model.merge_adapter):
        assert_raises(WhetTypeError, ("weight: it is packed", "save_pretrained"), merge, safe_merge=safe)
        assert torch.equal(completion_logprobs(model, PROMPTS, COMPLETIONS).logprobs, log)


def test_unsupported_uses_of_packed_weights_are_rejected():
    def frozen() -> Any:
        return frozen_model(tiny_model("llama"), "q8_0")

    for settings, message in (
        ({"use_dora": True}, ("DoraLinearVariant", "model.layers.0.self_attn.q_proj", "q8_0")),
        ({"lora_bias": True}, ("adapter 'default'", "lora_bias", "model.layers.0")),
    ):
        model = lora(frozen(), **settings)
        assert_raises(WhetValueError, message, accelerate, model)
        for compute in ("auto", "torch"):
            assert_raises(WhetValueError, message, choose_accelerations, [model], compute, True, "GRPO")
    for name in ("lm_head", "embed_tokens", "q_proj"):
        facts = f"{name}: it is packed as q8_0", "modules_to_save", "target_modules"
        assert_raises(WhetValueError, facts, lora, frozen(), target_modules=["v_proj"], modules_to_save=[name])
    for init in ("olora", "pissa_niter_2"):
        assert_raises(WhetTypeError, ("packed", "init_lora_weights"), lora, frozen(), init_lora_weights=init)
    other = pack_base(open_module(tiny_model("llama", intermediate_size=64)), weights="q8_0")
    facts = "gate_proj.weight", (40, 32), (64, 32), "base of another model"
    assert_raises(WhetValueError, facts, frozen_model, tiny_model("llama"), other)
    assert_raises(WhetValueError, ("weights", "int3"), frozen_model, tiny_model("llama"), "int3")
    assert_raises(TypeError, "pickle", pickle.dumps, frozen())


@pytest.mark.parametrize("case", ["llama", "llama-biases-tied"])
def test_resizing_the_vocabulary_is_rejected(case):
    """tie_weights and the same size are no-ops; another size is rejected before the model changes."""
    model = frozen_model(tiny_model(case), "q8_0")
    rows = torch.tensor([ids(6)])
    logits, head = model(rows).logits, model.lm_head
    model.tie_weights()
    assert model.resize_token_embeddings(VOCAB) is model.get_input_embeddings()
    for size in (VOCAB + 16, VOCAB - 8):
        message = "embed_tokens.weight", "packed", "vocabulary", "the model in floats"
        assert_raises(WhetTypeError, message, model.resize_token_embeddings, size)
    assert model.config.vocab_size == VOCAB and model.lm_head is head
    assert torch.equal(model(rows).logits, logits)


def test_torch_compile_skips_frozen_products():
    """Their shared scratch memory is invisible to the graph."""
    model = lora(frozen_model(tiny_model("llama", num_hidden_layers=1), "q8_0"))
    rows = torch.tensor([ids(6)])

    def gradients(of: Any) -> list[torch.Tensor]:
        model.zero_grad()
        of(rows).logits.square().sum().backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    right = gradients(model)
    torch._dynamo.reset()
    for got, expected in zip(gradients(torch.compile(model, backend="aot_eager")), right, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("base", [None, "q8_0"])
def test_adapters_that_add_in_place(base):
    """AdaLoRA adds to the output of the layer in place."""
    settings = peft.AdaLoraConfig(target_modules=["q_proj", "down_proj"], total_step=9, init_lora_weights=False)
    torch.manual_seed(3)
    frozen = frozen_model(tiny_model("llama"), "q8_0")
    models = [peft.get_peft_model(m, settings) for m in (in_floats("llama", frozen), frozen)]
    models[1].load_state_dict({k: v for k, v in models[0].state_dict().items() if "lora_" in k}, strict=False)
    right, gradients = logprobs_and_gradients(models[0])
    model = models[0] if base is None else models[1]
    with accelerate(model, "float32"):
        found, own = logprobs_and_gradients(model)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own, gradients, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("base", [None, "q8_0"])
def test_outputs_modified_in_place_by_hooks_are_not_recomputed(base):
    """The backward recomputes a norm's output only if it was not modified in place."""
    frozen = frozen_model(tiny_model("llama"), "q8_0")
    plain = lora(in_floats("llama", frozen))
    model = plain if base is None else lora(frozen)
    for hooked in {id(m): m for m in (plain, model)}.values():
        for layer in hooked.get_base_model().model.layers:
            layer.input_layernorm.register_forward_hook(lambda module, args, output: output.add_(0.5))
    right = logprobs_and_gradients(plain)[1]
    with accelerate(model, "float32"):
        torch.testing.assert_close(logprobs_and_gradients(model)[1], right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig"])
def test_virtual_tokens_before_a_frozen_model(kind):
    frozen = frozen_model(tiny_model("llama"), "q8_0")
    settings = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    rows, results = torch.tensor([ids(6)]), []
    for model in (in_floats("llama", frozen), frozen):
        torch.manual_seed(0)
        prompted = peft.get_peft_model(model, settings)
        prompted.word_embeddings = model.get_input_embeddings()
        results.append(prompted(rows).logits)
    torch.testing.assert_close(*results)


def test_dropout_of_everything():
    """Adapters add nothing, and nothing is divided by zero."""
    model = lora(frozen_model(tiny_model("llama"), "q8_0"), lora_dropout=1.0).train()
    with accelerate(model, "float32"):
        log, gradients = logprobs_and_gradients(model)
        with model.disable_adapter():
            torch.testing.assert_close(log, completion_logprobs(model, PROMPTS, COMPLETIONS, temperature=0.8).logprobs)
    assert not gradients.any()


@pytest.mark.parametrize("case", FAMILIES)
def test_frozen_model_of_a_folder(case, tmp_path):
    model = tiny_model(case)
    model.generation_config.eos_token_id = [3, 4]
    model.save_pretrained(tmp_path)
    frozen = frozen_model(tmp_path, "q8_0")
    assert type(frozen) is type(model) and not frozen.training
    rows = torch.tensor([ids(9)])
    assert torch.equal(frozen(rows).logits, frozen_model(model, "q8_0")(rows).logits)
    assert frozen.generation_config.eos_token_id == [3, 4]
    assert frozen.name_or_path == str(tmp_path)


@pytest.mark.parametrize("case", ["llama", "qwen2", "gpt2"])
def test_frozen_model_of_a_gguf_file_keeps_its_formats(case, tmp_path):
    model = tiny_model(case, **({} if case == "gpt2" else {"intermediate_size": 64}))
    path = write_gguf(model, tmp_path / "model.gguf", Q8_0, keys=KEYS)
    floats, _ = load_gguf_model(path)
    frozen = frozen_model(path)
    assert set(frozen.lm_head.whet_base.formats.values()) <= {"q8_0", "float32"}
    rows = torch.tensor([ids(9)])
    torch.testing.assert_close(frozen(rows).logits, floats(rows).logits, rtol=1e-4, atol=1e-4)
    assert frozen.generation_config.eos_token_id == floats.generation_config.eos_token_id
    assert frozen_model(path, "q4_0").lm_head.whet_base.formats["layers.0.o"] == "q4_0"


@pytest.mark.parametrize("base", ["float32", "q8_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_of_a_packed_head_equal_floats(base, dtype):
    """Over several tiles of the vocabulary; the last one has another size."""
    frozen = frozen_model(tiny_model("llama", vocab_size=5000, hidden_size=64), base)
    model = in_floats("llama", frozen, vocab_size=5000, hidden_size=64).requires_grad_(False)
    hidden, targets = torch.randn(30, 64, generator=GENERATOR), torch.randint(0, 5000, (30,), generator=GENERATOR)
    results = []
    for either in (model, frozen):
        x = hidden.clone().requires_grad_()
        head = Acceleration(either, "float32" if dtype == torch.float32 else "bfloat16").head()
        logprobs, entropy, _ = linear_logprobs(x, head, targets, 0.7, True)
        logprobs.sum().backward()
        results.append((logprobs, entropy, x.grad))
    for got, right in zip(*results, strict=True):
        assert torch.equal(got, right)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True, "lora_alpha": 3},
    "by name": {"target_modules": ["v_proj", "down_proj"], "layers_to_transform": [1]},
    "head": {"target_modules": ["lm_head", "v_proj"], "lora_alpha": 3},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "dora": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
    "biases": {"bias": "all"},
    "norms": {"modules_to_save": ["norm"]},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.filterwarnings("ignore:accelerate. PEFT computes")
@pytest.mark.filterwarnings("ignore:.*lora_bias=True")
def test_adapters_on_a_float_model_match_peft(settings):
    model = lora(tiny_model("llama-biases-tied"), **SETTINGS[settings])
    right_log, right = logprobs_and_gradients(model)
    with accelerate(model, "float32"):
        log, gradients = logprobs_and_gradients(model)
    torch.testing.assert_close(log, right_log, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradients, right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("base", [None, "q8_0"])
def test_active_adapters(base):
    """Two at once, one, another one, none, and different adapters per row."""
    model = tiny_model("llama") if base is None else frozen_model(tiny_model("llama"), base)
    model = lora(model)
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    rows = torch.tensor([ids(9), ids(9)])

    def logits() -> list[torch.Tensor]:
        with torch.no_grad():
            found = []
            for names in (["default", "second"], ["second"], ["default"]):
                model.base_model.set_adapter(names)
                found.append(model(rows).logits)
            with model.disable_adapter():
                found.append(model(rows).logits)
            found.append(model.eval()(rows, adapter_names=["second", "__base__"]).logits)
        return found

    plain = logits()
    with accelerate(model, "float32"):
        for got, right in zip(logits(), plain, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)
    assert not any(torch.allclose(a, b) for i, a in enumerate(plain) for b in plain[:i])


def test_a_merged_adapter_is_applied_once():
    model = lora(tiny_model("llama"))
    rows = torch.tensor([ids(9)])
    with torch.no_grad(), accelerate(model, "float32"):
        unmerged = model(rows).logits
        model.merge_adapter()
        torch.testing.assert_close(model(rows).logits, unmerged, rtol=1e-4, atol=1e-4)
        with model.disable_adapter():
            off = model(rows).logits
    torch.testing.assert_close(off, tiny_model("llama")(rows).logits, rtol=1e-4, atol=1e-4)


def test_adapters_beyond_plain_lora_warn_and_use_peft():
    model = lora(tiny_model("llama"), use_dora=True)
    with pytest.warns(UserWarning, match=mentions("PEFT", "adapter 'default'", "DoraLinearVariant")):
        accelerate(model).remove()


def test_dropout_of_adapters_is_seeded():
    model = lora(frozen_model(tiny_model("llama"), "q8_0"), lora_dropout=0.5).train()
    with accelerate(model, "float32"):
        results = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            results.append(logprobs_and_gradients(model)[1])
        assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
        without = logprobs_and_gradients(model.eval())[1]
    assert not torch.equal(without, results[0])


def test_gradient_checkpointing_redraws_dropout():
    model = lora(frozen_model(tiny_model("llama"), "q8_0"), lora_dropout=0.25).train()
    with accelerate(model, "float32"):
        torch.manual_seed(0)
        _, plain = logprobs_and_gradients(model)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(0)
        _, again = logprobs_and_gradients(model)
    assert torch.equal(plain, again)
