"""Modules are rebuilt from JSON, without pickle, to the bit; what cannot be described is named."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import dataclass

import pytest
import torch
from tests.raising import assert_raises, mentions
from tests.tiny import tiny_llama
from torch import nn
from torch.nn import functional

from whet.checkpoint.modules import build_module, describe_module, load_module_tensors, module_tensors
from whet.errors import CheckpointError


def rebuilt(module: nn.Module) -> nn.Module:
    description = json.loads(json.dumps(describe_module(module), allow_nan=False))
    assert description["undescribed"] == []
    copy = build_module(description)
    load_module_tensors(copy, module_tensors(module))
    return copy


@dataclass(frozen=True)
class Config:
    dim: int = 8
    betas: tuple[float, float] = (0.9, 0.95)


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * dim, dim))
        self.activation = functional.silu
        self.scale = 0.5

    def forward(self, x):
        h = self.norm(x)
        h = x + self.attention(h, h, h, need_weights=False)[0] * self.scale
        return self.activation(h + self.mlp(h))


class Everything(nn.Module):
    """A module with every supported kind of member: flags, configs, ties, shared blocks, both kinds of buffers."""

    def __init__(self, vocab: int, config: Config, *, causal: bool) -> None:
        super().__init__()
        self.config, self.causal, self.names, self.nothing = config, causal, ["a", {"b": (1, None)}], None
        self.dtype, self.size = torch.float32, torch.Size([2, 3])
        self.embed = nn.Embedding(vocab, config.dim, padding_idx=0)
        self.register_parameter("absent", None)
        self.gain = nn.Parameter(torch.randn(config.dim), requires_grad=False)
        self.register_buffer("offset", torch.randn(config.dim))
        self.register_buffer("scratch", torch.randn(config.dim), persistent=False)
        self.block = Block(config.dim)
        self.blocks = nn.ModuleList([self.block, Block(config.dim), self.block])
        self.by_name = nn.ModuleDict({"rnn": nn.GRU(config.dim, config.dim, 2, batch_first=True, dropout=0.2)})
        self.head = nn.Linear(config.dim, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.tied = [self.embed.weight]
        self.first = (self.block,)

    def forward(self, ids):
        h = self.embed(ids) * self.gain + self.offset + self.scratch
        for block in self.blocks:
            h = block(h)
        h = self.by_name["rnn"](h)[0]
        return functional.linear(self.first[0](h), self.tied[0])


def test_a_model_with_every_kind_of_member_is_rebuilt_bitwise():
    torch.manual_seed(0)
    model = Everything(11, Config(), causal=True)
    model.blocks[1].eval()
    copy = rebuilt(model)
    ids = torch.randint(0, 11, (2, 5))
    torch.manual_seed(1)
    expected = model(ids)  # in train mode: dropout too
    torch.manual_seed(1)
    assert torch.equal(copy(ids), expected)
    assert (copy.config, copy.causal, copy.names, copy.nothing) == (Config(), True, ["a", {"b": (1, None)}], None)
    assert (copy.dtype, copy.size) == (torch.float32, torch.Size([2, 3]))
    assert copy.head.weight is copy.embed.weight is copy.tied[0]
    assert copy.blocks[0] is copy.blocks[2] is copy.block is copy.first[0]
    assert [m.training for m in copy.modules()] == [m.training for m in model.modules()]
    assert [n for n, _ in copy.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert not copy.gain.requires_grad and copy.embed.weight.requires_grad and copy.absent is None
    assert set(copy.state_dict()) == set(model.state_dict())  # "scratch" is in neither
    assert repr(copy) == repr(model)
    copy(ids).sum().backward()
    assert copy.embed.weight.grad is not None and model.embed.weight.grad is None


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.LSTM(4, 3, 2, bidirectional=True, proj_size=2), (5, 2, 4)),
        (nn.GRU(4, 3, batch_first=True), (2, 5, 4)),
        (nn.TransformerEncoderLayer(4, 2, 8, activation="gelu", batch_first=True), (2, 5, 4)),
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2), (2, 5, 4)),
        (nn.Sequential(nn.Conv1d(3, 4, 2, padding="same", padding_mode="circular"), nn.BatchNorm1d(4)), (2, 3, 6)),
        (nn.Linear(3, 2, dtype=torch.bfloat16), (1, 3)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
@pytest.mark.parametrize("training", [True, False])
def test_torch_modules_are_rebuilt_bitwise(module, shape, training):
    module.train(training)
    x = torch.randn(shape, dtype=next(module.parameters()).dtype)

    def run(m):
        torch.manual_seed(0)
        y = m(x)
        return y[0] if isinstance(y, tuple) else y

    copy = rebuilt(module)
    assert torch.equal(run(copy), run(module))
    if isinstance(module, nn.RNNBase):
        assert copy._flat_weights[0] is copy.weight_ih_l0


def test_shared_memory_of_parameters_is_preserved():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    copy = rebuilt(model)
    assert copy[0].weight is not copy[1].weight
    assert copy[0].weight.data_ptr() == copy[1].weight.data_ptr()
    assert torch.equal(copy[1].weight, model[0].weight)


class Awkward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = lambda x: x
        self.t = torch.ones(2)
        self.file = sys.stdout
        self.loads = torch.load
        self.inner = nn.ModuleList([nn.Linear(1, 1)])
        self.inner[0].extra = {1, 2}
        self.inner[0].register_forward_hook(lambda *_: None)


def test_the_error_names_a_member_that_cannot_be_describe_class():
    description = describe_module(Awkward())
    text = "; ".join(description["undescribed"])
    for part in (
        f"f is {Awkward.__module__}.Awkward.__init__.<locals>.<lambda>",
        "t is a tensor, but neither a parameter nor a buffer",
        "file is of type",
        "loads is torch.serialization.load",
        "inner.0.extra is of type builtins.set",
        "inner.0._forward_hooks holds hooks",
    ):
        assert part in text
    assert_raises(CheckpointError, r"cannot be rebuilt.*f is .*pass it as model=", build_module, description)


def test_the_error_names_a_class_defined_in_a_function():
    class Local(nn.Module):
        pass

    assert_raises(CheckpointError, "Local, not found by that name", build_module, describe_module(Local()))


def test_classes_of_a_script_are_found_in_that_script(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(
        "from torch import nn\n"
        "class Net(nn.Linear):\n    pass\n"
        "from whet.checkpoint.modules import build_module, describe_module\n"
        "description = describe_module(Net(2, 3))\n"
        "built = build_module(description)\n"
    )
    names = runpy.run_path(str(script), run_name="__main__")
    assert type(names["built"]) is names["Net"]
    assert names["description"]["modules"][0]["class"] == "__main__:Net"
    with pytest.raises(CheckpointError, match=mentions("__main__:Net", "model=")):
        build_module(names["description"])


def describe_class(name: str) -> dict:
    description = describe_module(nn.Linear(2, 2))
    description["modules"][0]["class"] = name
    return description


def test_building_imports_nothing_and_builds_only_modules():
    sys.modules.pop("this", None)
    for name in ("this:Zen", "subprocess:Popen", "transformers.cli.serving:X", "builtins:object"):
        assert_raises(CheckpointError, r"imported|is not an nn\.Module", build_module, describe_class(name))
    assert "this" not in sys.modules


@pytest.mark.parametrize("function", ["torch.load", "torch.compile", "torch.nn.functional.importlib", "os.system"])
def test_functions_other_than_operators_are_rejected(function):
    description = describe_module(nn.Linear(2, 2))
    description["modules"][0]["attributes"]["act"] = {"$": "function", "value": function}
    assert_raises(CheckpointError, "is not an operator of torch", build_module, description)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d.pop("tensors"),
        lambda d: d["modules"][0].pop("parameters"),
        lambda d: d["modules"][0]["parameters"].update(weight=7),
        lambda d: d["modules"][0]["attributes"].update(_parameters={}),
        lambda d: d["modules"].clear(),
        lambda d: d["tensors"][0].update(shape=[-1, 2]),
        lambda d: d["tensors"][0].update(dtype="load"),
        lambda d: d["modules"][0]["attributes"].update(x={"$": "module", "value": 9}),
        lambda d: d["modules"][0]["attributes"].update(x={"$": "dataclass", "value": ["torch.nn:Linear", {}]}),
    ],
)
def test_a_corrupt_description_is_an_error(spoil):
    description = json.loads(json.dumps(describe_module(nn.Linear(2, 2))))
    spoil(description)
    assert_raises(CheckpointError, r"build_module|dtype", build_module, description)


def test_mismatched_tensors_change_nothing():
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    good = {name: torch.full_like(tensor, 7) for name, tensor in module_tensors(model).items()}
    for spoilt, message in (
        ({"weight": good["weight"]}, "the module also has bias"),
        ({**good, "more": good["bias"]}, "the checkpoint also has more"),
        ({**good, "bias": torch.zeros(3)}, r"bias is \(3,\) float32 in the checkpoint and \(2,\) float32"),
        ({**good, "bias": torch.zeros(2, dtype=torch.float64)}, r"bias is \(2,\) float64 in the checkpoint"),
    ):
        assert_raises(CheckpointError, rf"load_module_tensors\(Linear\).*{message}", load_module_tensors, model, spoilt)
    assert torch.equal(model.weight, before)
    load_module_tensors(model, good)
    assert model.bias.tolist() == [7, 7]


class ValueHead(nn.Module):
    def __init__(self, lm) -> None:
        super().__init__()
        self.lm, self.config, self.value = lm, lm.config, nn.Linear(16, 1)


def small_llama(**options):
    pytest.importorskip("transformers")
    return tiny_llama(vocab_size=32, num_key_value_heads=2, **options)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_hugging_face_models_are_rebuilt_bitwise(tied, attention):
    model = small_llama(tie_word_embeddings=tied, attn_implementation=attention).to(torch.bfloat16).eval()
    model.model.embed_tokens.weight.requires_grad_(False)
    model.generation_config.eos_token_id = [3, 4]
    state = torch.get_rng_state()
    copy = rebuilt(model)
    assert torch.equal(torch.get_rng_state(), state)
    ids = torch.randint(0, 32, (2, 6))
    assert torch.equal(copy(ids).logits, model(ids).logits)
    assert copy.config.to_dict() == model.config.to_dict()
    assert copy.config._attn_implementation == attention
    assert copy.generation_config.eos_token_id == [3, 4]
    assert (copy.lm_head.weight is copy.model.embed_tokens.weight) is tied
    assert [p.requires_grad for p in copy.parameters()] == [p.requires_grad for p in model.parameters()]
    assert not copy.training


@pytest.mark.parametrize("attention", ["org/kernel", "kernels-community/flash-attn@main:attn", ["sdpa"], 3])
def test_a_checkpoint_cannot_load_a_kernel_from_the_hub(attention, monkeypatch):
    import transformers

    def never(*arguments, **options):
        raise AssertionError("a kernel was asked for")

    monkeypatch.setattr(transformers.modeling_utils, "load_and_register_attn_kernel", never, raising=False)
    description = json.loads(json.dumps(describe_module(small_llama())))
    config = next(entry for entry in _entries(description) if isinstance(entry, list) and "sdpa" in entry)
    config[config.index("sdpa")] = attention
    with pytest.raises(CheckpointError, match=mentions("build_module", "attention", "LlamaConfig", "eager")):
        build_module(description)


def _entries(value):
    """Every value inside a description."""
    yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _entries(inner)


def test_a_hugging_face_model_inside_a_module_is_rebuilt():
    model = ValueHead(small_llama())
    copy = rebuilt(model)
    assert copy.config.to_dict() == model.config.to_dict()
    ids = torch.arange(4)[None]
    assert torch.equal(copy.lm(ids).logits, model.lm(ids).logits)


def test_models_with_adapters_cannot_be_rebuilt():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(small_llama(), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    assert_raises(CheckpointError, r"LoraConfig|PeftType.*pass it as model=", build_module, describe_module(model))
    with pytest.raises(CheckpointError, match=mentions("lora_A", "saved", "model=")):
        build_module(describe_module(model.base_model.model))
