"""Adapters of experts: PEFT's parameters and the modules of older models, in engine, learner, merged and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tests.engine.tiny_models import MIXTURES, logits_of, naive_logits, tiny_model, token_ids
from tests.gguf_files import values_by_slot
from tests.models.test_export import N_ROWS, save, tokenizer
from tests.raising import assert_raises
from tests.threads import same_on_any_threads
from tests.tiny import with_lora

from whet import Engine, SamplingParams
from whet.cli.chat import ChatConfig
from whet.cli.eval import EvalConfig
from whet.cli.generate import GenerateConfig
from whet.cli.serve import ServeConfig
from whet.cli.text_options import EngineSettings
from whet.errors import CheckpointError, WhetValueError
from whet.learner.learner import Learner
from whet.models.export import export_gguf, read_adapters
from whet.models.export_adapters import export_adapters
from whet.models.lora import LoraSettings, choose_adapted, read_adapted
from whet.models.packed_base import pack_base
from whet.models.row_reader import RowReader
from whet.models.sizes import source_of_config
from whet.models.slots import LoRA, iter_locations
from whet.models.sources.gguf import open_gguf
from whet.models.sources.live import open_module
from whet.models.sources.pretrained import open_pretrained
from whet.nn.forwards import is_experts
from whet.text.model import load_engine

__all__ = ["tokenizer"]
PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]
UNGATED = ["experts.up_proj", "experts.down_proj"]
ATOL = 1e-4


def adapt(model: Any, folder: Path | None = None, seed: int = 0, **settings: Any) -> Any:
    """Add adapters of attention and experts, with random B, and save them."""
    names = PARAMETERS if hasattr(next(filter(is_experts, model.modules())), "gate_up_proj") else UNGATED
    given = {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj"], "target_parameters": names, **settings}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapted = with_lora(model, b_std=0.2, **given)
    if folder is not None:
        adapted.save_pretrained(folder, save_embedding_layers=False)
    return adapted


@pytest.mark.parametrize("case", MIXTURES)
def test_engines_and_learners_compute_the_adapters_of_peft(case, tmp_path):
    adapted, ids = adapt(tiny_model(case), tmp_path), token_ids()
    expected, plain = logits_of(adapted, ids), logits_of(tiny_model(case), ids)
    assert np.abs(expected - plain).mean() > 100 * ATOL
    np.testing.assert_allclose(naive_logits(open_module(adapted, merged=True), ids), expected, rtol=0, atol=ATOL)
    row = ids[0].tolist()
    live = Engine.from_model(adapted, weights="float32")
    base = Engine.from_model(tiny_model(case), weights="float32")
    number = base.add_adapter(tmp_path)
    np.testing.assert_allclose(live.logits(row), expected, rtol=0, atol=ATOL)
    np.testing.assert_array_equal(base.logits(row, adapter=number), live.logits(row))
    np.testing.assert_allclose(base.logits(row), plain, rtol=0, atol=ATOL)
    source = open_module(tiny_model(case))
    assert read_adapted(tmp_path, source, "here").n_parameters == sum(
        p.numel() for p in adapted.parameters() if p.requires_grad
    )
    learner = Learner(pack_base(source, weights="float32"), adapter=tmp_path, compute="float32")
    got = learner.logprobs([row[:1]], [row[1:]], keep=False).logprobs[0]
    want = torch.tensor(expected).log_softmax(-1)[range(len(row) - 1), row[1:]]
    np.testing.assert_allclose(got, want, rtol=0, atol=ATOL)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")  # of PEFT, which applies them
@pytest.mark.parametrize("parameter", PARAMETERS)
def test_adapters_of_one_parameter(parameter, tmp_path):
    """PEFT has one wrapper in place of two; the parameter has a separate rank and scaling."""
    patterns = {"rank_pattern": {parameter: 3}, "alpha_pattern": {parameter: 5}, "use_rslora": True}
    adapted = adapt(tiny_model("olmoe"), tmp_path / "peft", target_parameters=[parameter], **patterns)
    ids = token_ids()
    learner = Learner(pack_base(open_module(tiny_model("olmoe")), weights="float32"), adapter=tmp_path / "peft")
    assert {each.rank for each in learner.adapters} == {2, 3}
    learner.save_pretrained(tmp_path / "whet")
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "whet"))
    assert first.keys() == second.keys()
    for name, values in first.items():
        np.testing.assert_array_equal(values, second[name], err_msg=name)
    engine = Engine.from_model(tiny_model("olmoe"), weights="float32")
    for folder in ("peft", "whet"):
        found = engine.logits(ids[0].tolist(), adapter=engine.add_adapter(tmp_path / folder))
        np.testing.assert_allclose(found, logits_of(adapted, ids), rtol=0, atol=ATOL)


@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss"])
def test_peft_reads_what_a_learner_wrote(case, tmp_path):
    from peft import PeftModel

    learner = Learner(pack_base(open_module(tiny_model(case))), lora_rank=3, lora_layers=["k_proj", "experts"])
    rng = np.random.default_rng(0)
    for adapter in learner.adapters:
        adapter.b[:] = rng.normal(size=adapter.b.shape)
    learner.update()
    learner.save_pretrained(tmp_path)
    peft = PeftModel.from_pretrained(tiny_model(case), tmp_path)
    source = open_module(peft)
    for got, expected in zip(
        sorted((a for a in source.adapters if isinstance(a, LoRA)), key=lambda each: (each.slot, each.first_row)),
        sorted((a for a in learner.source().adapters if isinstance(a, LoRA)), key=lambda e: (e.slot, e.first_row)),
        strict=True,
    ):
        assert (got.slot, got.first_row, got.scaling) == (expected.slot, expected.first_row, expected.scaling)
        np.testing.assert_array_equal(got.a.numpy(), expected.a)
        np.testing.assert_array_equal(got.b.numpy(), expected.b)


def write_older_folder(folder: Path, names: list[str], rng: np.random.Generator, source: Any) -> dict[str, Any]:
    """Write adapters of each expert's matrices by the names of transformers 4; return what they add to each slot."""
    config, tensors, deltas = source.config, {}, {}
    for layer in range(config.n_layers):
        for e in range(config.n_experts - 1):  # none of the last expert
            for part, name in enumerate(names):
                is_down = part == 2
                n, k = (config.hidden_dim, config.expert_dim) if is_down else (config.expert_dim, config.hidden_dim)
                a, b = rng.normal(size=(2, k)), rng.normal(size=(n, 2))
                slot = f"layers.{layer}.experts_{'down' if is_down else 'gate_up'}"
                first = e * n if is_down else (2 * e + part) * n
                total = deltas.setdefault(slot, np.zeros(config.slots()[slot]))
                total[first : first + n] = 2.0 * b @ a
                module = f"base_model.model.model.layers.{layer}.mlp.experts.{e}.{name}"
                tensors[f"{module}.lora_A.weight"] = a.astype(np.float32)
                tensors[f"{module}.lora_B.weight"] = b.astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return deltas


def test_adapters_of_each_experts_modules(tmp_path):
    model, ids = tiny_model("qwen3_moe"), token_ids()
    source, rng = open_module(model), np.random.default_rng(0)
    deltas = write_older_folder(tmp_path / "lora", ["gate_proj", "up_proj", "down_proj"], rng, source)
    adapters = tuple(read_adapters(tmp_path / "lora", source, "here"))
    learner = Learner(pack_base(source, weights="float32"), adapter=tmp_path / "lora", compute="float32")
    rows, before = RowReader(source._replace(adapters=adapters), "here"), values_by_slot(source)
    for slot, delta in deltas.items():
        merged = rows.values(slot, np.arange(len(delta)))
        np.testing.assert_allclose(merged - before[slot], delta, rtol=1e-4, atol=1e-4)
    for parameter, slot in (("gate_up_proj", "experts_gate_up"), ("down_proj", "experts_down")):
        for i, layer in enumerate(model.model.layers):
            matrices = getattr(layer.mlp.experts, parameter)
            matrices.data += torch.tensor(deltas[f"layers.{i}.{slot}"]).float().view_as(matrices)
    expected = logits_of(model, ids)
    engine = Engine.from_model(tiny_model("qwen3_moe"), weights="float32")
    number = engine.add_adapter(tmp_path / "lora")
    np.testing.assert_allclose(engine.logits(ids[0].tolist(), adapter=number), expected, rtol=0, atol=1e-3)
    got = Engine.from_model(learner).logits(ids[0].tolist())
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-3)


def test_rows_of_a_batch_have_their_own_adapters(tmp_path):
    """Bits depend neither on the neighbours, nor on chunks, nor on threads."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(5, 48, n).tolist() for n in (40, 3, 40, 33, 9, 50)]
    sampling = SamplingParams(max_new_tokens=12, seed=3)
    for seed in range(2):
        adapt(tiny_model("qwen3_moe"), tmp_path / str(seed), seed)

    def sample(**options: Any) -> list[Any]:
        engine = Engine.from_model(tiny_model("qwen3_moe"), weights="q8_0", **options)
        numbers = [engine.add_adapter(tmp_path / str(seed)) for seed in range(2)]
        adapters = [numbers[0], None, numbers[1], numbers[0], numbers[1], None]
        found = engine.generate(prompts, 2, sampling, adapter=adapters)
        return [(each.token_ids, np.asarray(each.logprobs).tolist()) for group in found for each in group]

    batch = sample()
    assert len({tuple(tokens) for tokens, _ in batch}) == 12
    assert sample(prefill_chunk=16) == batch
    assert same_on_any_threads(lambda: sample(max_batch=3)) == batch


@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss"])
def test_merged_and_exported_adapters(case, tokenizer, tmp_path):
    """A file with merged adapters, and a file of adapters as llama.cpp has them: (experts, r, k), (experts, n, r)."""
    folder = save(tiny_model(case, vocab_size=N_ROWS), tokenizer, tmp_path / "model")
    adapted, ids = adapt(tiny_model(case, vocab_size=N_ROWS), tmp_path / "lora"), token_ids()
    source = open_pretrained(folder)
    adapters = read_adapters(tmp_path / "lora", source, "here")
    export_gguf(folder, tmp_path / "merged.gguf", "f32", adapters=adapters)
    merged = open_gguf(tmp_path / "merged.gguf")
    np.testing.assert_allclose(naive_logits(merged, ids), logits_of(adapted, ids), rtol=0, atol=ATOL)
    export_adapters(folder, tmp_path / "lora.gguf", adapters)
    reader = gguf.GGUFReader(tmp_path / "lora.gguf")
    tensors, alpha = {each.name: each.data for each in reader.tensors}, reader.fields["adapter.lora.alpha"].contents()
    before, after = values_by_slot(source), values_by_slot(merged)
    n_experts, width = source.config.n_experts, source.config.expert_dim
    for location in iter_locations(source.config, list(dict.fromkeys(t.module for t in merged.targets.values()))):
        if location.n_experts == 1:
            continue
        i = location.weight.split(".")[1]
        delta = (after[location.weight] - before[location.weight]).reshape(n_experts, -1, location.shape[1])
        for name, half in (("down", slice(None)),) if "down" in location.weight else (
            ("gate", slice(0, width)), ("up", slice(width, 2 * width))
        ):  # fmt: skip
            a, b = (tensors[f"blk.{i}.ffn_{name}_exps.weight.lora_{end}"] for end in "ab")
            assert a.shape == (n_experts, 2, location.shape[1]) and b.shape[0::2] == (n_experts, 2)
            np.testing.assert_allclose(alpha / 2 * b @ a, delta[:, half], rtol=1e-4, atol=1e-5)


def test_experts_are_adapted_by_name_only(tmp_path):
    source = source_of_config(tiny_model("qwen3_5_moe_text").config.to_dict())

    def slots(*layers: str) -> set[str]:
        return {
            location.weight.split(".")[-1] for location, _ in choose_adapted(source, LoraSettings(2, layers)).factors
        }

    assert not any("experts" in slot for slot in slots() | slots("all-linear") | slots("down_proj"))
    assert slots("experts") == slots("mlp.experts") == {"experts_gate_up", "experts_down"}
    assert slots("experts.down_proj") == {"experts_down"}
    assert slots("all-linear", "experts") == slots() | {"experts_gate_up", "experts_down"}
    one = choose_adapted(source, LoraSettings(2, ["model.layers.1.mlp.experts.down_proj"])).factors
    assert [location.name for location, _ in one] == ["model.layers.1.mlp.experts.down_proj"]
    assert_raises(WhetValueError, 'Name "experts"', choose_adapted, source, LoraSettings(2, ["experts.3.down_proj"]))
    message = ("lora_rank is 99", "experts.down_proj is 32 x", "at most 32")
    assert_raises(WhetValueError, message, choose_adapted, source, LoraSettings(99, ["experts.down_proj"]))
    dense = source_of_config(tiny_model("llama").config.to_dict())
    assert_raises(WhetValueError, "lora_layers names 'experts'", choose_adapted, dense, LoraSettings(2, ["experts"]))


def test_adapters_of_other_experts_are_rejected(tmp_path):
    adapt(tiny_model("qwen3_moe"), tmp_path)
    source = open_module(tiny_model("qwen3_moe", num_experts=6))
    message = ("experts.gate_up_proj has", "expected A (6 r, k) and B (n, 6 r)")
    assert_raises(CheckpointError, message, read_adapted, tmp_path, source, "here")
    assert_raises(WhetValueError, ("has ranks 14 and 14", "multiple of 6"), read_adapters, tmp_path, source, "here")


def test_a_limit_of_packed_experts_needs_experts_of_a_file(tmp_path):
    """The command line passes the setting on; experts that are converted, or of a module, are packed at once."""
    tiny_model("qwen3_moe").to(torch.bfloat16).save_pretrained(tmp_path / "moe")
    tiny_model("llama").save_pretrained(tmp_path / "dense")
    ids, found = list(range(5, 30)), []
    for options in ({}, {"expert_bytes": 1}):
        with load_engine(str(tmp_path / "moe"), "bf16", None, "here", **options) as engine:
            logits = engine.logits(ids)
            assert (engine.memory["experts_resident_bytes"] == 0) == bool(options)
            found.append(logits)
    np.testing.assert_array_equal(*found)
    message = ("expert_bytes is 7", "the model has none")
    assert_raises(WhetValueError, message, load_engine, str(tmp_path / "dense"), None, None, "here", expert_bytes=7)
    message = ("expert_bytes is 7", "converts them")
    assert_raises(WhetValueError, message, load_engine, str(tmp_path / "moe"), "q8_0", None, "here", expert_bytes=7)
    assert all(issubclass(each, EngineSettings) for each in (GenerateConfig, ChatConfig, EvalConfig, ServeConfig))
