"""Packed weights shared by engines and modules: their rows equal the model's, in every format and order."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.tiny_models import CASES, VOCAB, tiny_model
from tests.raising import assert_raises
from tests.threads import same_on_any_threads, threads
from tests.tiny import with_lora
from torch import nn

from whet.config.sampling import SamplingParams
from whet.engine import Engine, EngineBusyError
from whet.errors import WhetTypeError, WhetValueError
from whet.models.formats import FORMATS, choose_formats
from whet.models.packed_base import PackedBase, pack_base
from whet.models.sources.live import open_module
from whet.models.sources.pretrained import open_pretrained
from whet.ops.quant import quantize

LAYER = "model.layers.0."
PROMPTS = [[3, 4, 5], [7, 8, 9, 10, 11]]
SAMPLING = SamplingParams(max_new_tokens=8, seed=2)


def wide_llama(**options: Any) -> Any:
    """Make a model whose row lengths are multiples of every block, except in the MLP."""
    sizes = {"hidden_size": 256, "intermediate_size": 288, "num_hidden_layers": 1, "head_dim": 10}
    return tiny_model("llama", **{**sizes, **options})


def round_trip(weight: torch.Tensor, format: str) -> torch.Tensor:
    """Quantise and dequantise a weight by its format's definition."""
    if format == "float32":
        return weight
    if format == "bfloat16":
        return weight.bfloat16().float()
    return torch.from_numpy(quantize(weight.numpy(), format).dequantize())


def expected_rows(model: Any, source: Any, weights: str, name: str) -> torch.Tensor:
    """Compute the expected rows of a module in slot order, span by span."""
    location = source.targets[name]
    parts = choose_formats(source, weights, None, None, "test")[location.weight]
    formats = [part.format for part in parts for _ in range(part.n_rows)][location.first_row :][: location.shape[0]]
    weight = model.get_submodule(name).weight.detach()
    runs = [i for i in range(1, len(formats)) if formats[i] != formats[i - 1]]
    bounds = [0, *runs, len(formats)]
    return torch.cat([round_trip(weight[a:b], formats[a]) for a, b in itertools.pairwise(bounds)])


@pytest.mark.parametrize("weights", FORMATS)
def test_rows_of_every_format(weights):
    model = wide_llama()
    source = open_module(model)
    base = pack_base(source, weights=weights)
    for name in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        expected = expected_rows(model, source, weights, LAYER + name)
        shape = expected.shape
        wide, narrow = torch.empty(shape), torch.empty(shape, dtype=torch.bfloat16)
        base.rows(LAYER + name, wide)
        base.rows(LAYER + name, narrow)
        assert torch.equal(wide, expected)
        assert torch.equal(narrow, expected.bfloat16())
        n = shape[0] // 3
        assert torch.equal(base.rows(LAYER + name, torch.empty(n, shape[1]), first=5), expected[5 : 5 + n])
        as_numpy = base.rows(LAYER + name, np.empty(shape, np.float32))
        np.testing.assert_array_equal(as_numpy, expected.numpy())
    ids = torch.tensor([4, 0, 4])
    embedding = base.rows("model.embed_tokens", torch.empty(VOCAB, 256))
    assert torch.equal(base.gather("model.embed_tokens", ids, torch.empty(3, 256)), embedding[ids])
    assert base.nbytes == Engine.from_base(base).memory["weights_bytes"]


def test_matrix_in_several_formats_is_contiguous():
    base = pack_base(open_module(wide_llama(num_hidden_layers=3)), weights="q4_k_m")
    assert "q4_k, q6_k" in base.formats.values()
    q, k, v = (torch.empty(n, 256) for n in (40, 20, 20))
    for name, out in (("q", q), ("k", k), ("v", v)):
        base.rows(f"model.layers.2.self_attn.{name}_proj", out)
    whole = base.core.rows("layers.2.qkv", 0, 80, torch.empty(80, 256))
    assert torch.equal(whole, torch.cat([q, k, v]))


@pytest.mark.parametrize("case", CASES)
def test_rows_by_module_name_in_every_family(case):
    model = tiny_model(case)
    base = pack_base(open_module(model), weights="float32")
    for name, location in base.targets.items():
        module = dict(model.named_modules()).get(name)
        if module is None:
            continue
        weight = module.weight.detach().T if location.module.transposed else module.weight.detach()
        # A norm with an offset is stored as their sum.
        bound = 2**-23 if location.module.offset else 0.0
        torch.testing.assert_close(base.rows(name, torch.empty(weight.shape)), weight, rtol=0, atol=bound)
        if location.bias is not None:
            assert torch.equal(base.bias(name, torch.empty(len(module.bias))), module.bias.detach()), name


def test_packed_bytes_do_not_depend_on_threads():
    source = open_module(wide_llama())

    def packed() -> list[np.ndarray]:
        base = pack_base(source, weights="q4_k_m")
        rows = base.rows(LAYER + "mlp.up_proj", np.empty((288, 256), np.float32))
        return [rows, np.array(base.digest())]

    same_on_any_threads(packed)


def test_digest_depends_on_weights_and_formats():
    model = tiny_model("llama")
    digest = pack_base(open_module(model)).digest()
    assert pack_base(open_module(model), weights="bf16").digest() == digest
    assert pack_base(open_module(model), weights="q8_0").digest() != digest
    with torch.no_grad():
        model.model.norm.weight[7] += 1
    assert pack_base(open_module(model)).digest() != digest


def sample(engine: Engine) -> Any:
    return [[(c.token_ids, c.logprobs) for c in group] for group in engine.generate(PROMPTS, 2, SAMPLING)]


@pytest.mark.parametrize("weights", ["float32", "bf16", "q4_k_m"])
def test_engines_on_a_shared_base_sample_the_same_tokens(weights):
    model = wide_llama()
    base = pack_base(open_module(model), weights=weights)
    own = Engine.from_model(model, weights=weights)
    assert own.base is None
    first, second = Engine.from_base(base), Engine.from_base(base, max_batch=2)
    assert first.base is base
    assert first.formats == own.formats
    assert sample(first) == sample(own)
    first.close()
    with threads(2):
        assert sample(second) == sample(own)
    assert torch.equal(base.rows("model.norm", torch.empty(256)), model.model.norm.weight)


def test_base_from_a_folder_equals_base_from_its_module(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    base = pack_base(open_pretrained(tmp_path))
    assert base.digest() == pack_base(open_module(model)).digest()
    assert sample(Engine.from_base(base)) == sample(Engine.from_pretrained(tmp_path, tokenizer=None))


# ---------------------------------------------------------------- models on a base


class OnBase(nn.Linear):
    """A Linear with the weight of a base."""

    weight: Any = torch.empty(0)  # not to be read

    def __init__(self, module: Any, base: PackedBase) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = module.weight.shape
        self.whet_base = base


def on_base(model: Any, base: PackedBase) -> Any:
    model = copy.deepcopy(model)
    for name, location in base.targets.items():
        if len(location.shape) == 2 and name in dict(model.named_modules()):
            model.set_submodule(name, OnBase(model.get_submodule(name), base))
    return model.requires_grad_(False)


LORA = {"r": 2, "target_modules": ["q_proj", "down_proj"], "b_std": 0.3}


def test_sync_of_a_model_on_the_base_copies_only_adapters():
    model = tiny_model("llama")
    base = pack_base(open_module(model), weights="q8_0")
    digest = base.digest()
    engine = Engine.from_base(base)
    plain = sample(engine)
    policy = with_lora(on_base(model, base), **LORA)
    engine.sync(policy)
    assert engine.policy_version == 1
    own = Engine.from_model(with_lora(model, **LORA), weights="q8_0")
    assert sample(engine) == sample(own) != plain
    assert sample(Engine.from_model(policy)) == sample(own)
    policy.disable_adapter_layers()
    engine.sync(policy)
    assert sample(engine) == plain
    assert base.digest() == digest


def test_engine_on_a_base_rejects_other_models():
    model = tiny_model("llama")
    base, other = pack_base(open_module(model)), pack_base(open_module(model))
    engine = Engine.from_base(base)
    plain = sample(engine)
    assert_raises(WhetValueError, ("Engine.sync", "engine is on a packed base", "engine.base"), engine.sync, model)
    assert_raises(WhetValueError, "the model is on another base", engine.sync, on_base(model, other))
    own = Engine.from_model(model)
    assert_raises(
        WhetValueError, ("model is on a packed base", "Engine.from_base(base)"), own.sync, on_base(model, base)
    )
    assert sample(engine) == plain
    with engine.stream(PROMPTS[0], SAMPLING):
        assert_raises(EngineBusyError, "Engine.sync", engine.sync, on_base(model, base))


def test_trainable_weights_on_a_base_are_rejected():
    model = tiny_model("llama")
    base = pack_base(open_module(model))
    engine = Engine.from_base(base)
    trained = on_base(model, base)
    trained.model.norm.weight.requires_grad_(True)
    assert_raises(WhetValueError, "model.norm.weight requires grad", engine.sync, trained)
    with_head = on_base(model, base)
    with_head.lm_head = nn.Linear(32, VOCAB, bias=False).requires_grad_(False)
    assert_raises(WhetValueError, ("lm_head is a Linear", "modules_to_save"), engine.sync, with_head)
    mixed = on_base(model, base)
    mixed.lm_head.whet_base = pack_base(open_module(model))
    assert_raises(WhetValueError, "on 2 packed bases", engine.sync, mixed)
    plain = on_base(model, base)
    assert_raises(WhetValueError, "merge_adapters=False", Engine.from_model, plain, merge_adapters=True)
    assert_raises(WhetValueError, "packed for 64", Engine.from_model, plain, max_position=32)
    assert_raises(WhetValueError, ("Engine.from_model", "weights is 'q8_0'"), Engine.from_model, plain, weights="q8_0")
    assert_raises(WhetValueError, ("pack_base", "source.base"), pack_base, open_module(plain))


def test_invalid_arguments_of_a_base_are_rejected():
    model = tiny_model("llama", attention_bias=True)
    base = pack_base(open_module(model))
    q, out = LAYER + "self_attn.q_proj", torch.empty(32, 32)
    assert_raises(WhetValueError, ("PackedBase.rows", "no module 'q_proj'"), base.rows, "q_proj", out)
    assert_raises(WhetValueError, (f"rows 1 ... 32 of {q}", "32 rows"), base.rows, q, out, first=1)
    assert_raises(WhetValueError, "rows -1", base.rows, q, out[:1], first=-1)
    for wrong in (out[:, :16], out.T[:8], out.double(), torch.empty(32, 33), torch.empty(4, requires_grad=True)):
        assert_raises(WhetTypeError, ("PackedBase.rows: out is", (32, 32)), base.rows, q, wrong)
    assert_raises(WhetTypeError, ("out is list", "NumPy", "torch"), base.rows, q, [])
    read_only = np.empty((32, 32), np.float32)
    read_only.flags.writeable = False
    assert_raises(WhetTypeError, "out is float32", base.rows, q, read_only)
    assert_raises(WhetValueError, "lm_head has no bias", base.bias, "lm_head", torch.empty(VOCAB))
    embed, ids = "model.embed_tokens", torch.tensor([VOCAB])
    assert_raises(WhetValueError, f"expected 0 ... {VOCAB - 1}", base.gather, embed, ids, torch.empty(1, 32))
    assert_raises(WhetTypeError, ("ids are", "int32"), base.gather, embed, ids.int(), torch.empty(1, 32))
    assert_raises(WhetValueError, (q, "Read its rows with rows()"), base.gather, q, ids, torch.empty(1, 32))
    assert_raises(WhetTypeError, ("PackedBase", "pickled", "again"), pickle.dumps, base)
    assert copy.deepcopy({"base": base})["base"] is base
    assert_raises(WhetTypeError, ("Engine.from_base", "base is a ModelSource"), Engine.from_base, base.source())
    assert_raises(WhetValueError, "head is 'q8_0'", Engine.from_base, base, head="q8_0")
    assert_raises(WhetValueError, "weights is 'fp3'", pack_base, open_module(model), weights="fp3")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    assert_raises(WhetValueError, ("pack_base: head", "NaN"), pack_base, open_module(model))


def test_reordered_rows_are_read_whole():
    model = tiny_model("gpt_neox")
    base = pack_base(open_module(model))
    name = "gpt_neox.layers.0.attention.query_key_value"
    assert_raises(WhetValueError, (name, "out has 16 rows", "all 96 rows"), base.rows, name, torch.empty(16, 32))
