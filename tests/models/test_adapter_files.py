"""Files of adapters: Whet's own, and PEFT's, read and written by PEFT itself."""

import json

import numpy as np
import peft
import pytest
import torch
from tests.raising import assert_raises, mentions
from tests.tiny import tiny_llama, with_lora

import whet
from whet.errors import CheckpointError
from whet.models.adapter_files import from_peft, load_adapters, save_adapters, to_peft


def base_model():
    torch.manual_seed(0)
    return tiny_llama(vocab_size=40, intermediate_size=24).eval()


def peft_model(**settings):
    given = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], **settings}
    return with_lora(base_model(), b_std=1.0, task_type=None, **given).eval()


def logits(model):
    with torch.no_grad():
        return model(torch.arange(12)[None]).logits


def adapter(n_in, n_out, rank, alpha, seed):
    made = whet.MicroLoRA(n_in, n_out, rank, alpha, seed)
    made.B[:] = np.random.default_rng(seed).standard_normal(made.B.shape)
    return made


@pytest.mark.parametrize(
    "settings",
    [{}, {"use_rslora": True}, {"rank_pattern": {"layers.0.self_attn.q_proj": 5}, "alpha_pattern": {"down_proj": 2}}],
)
@pytest.mark.parametrize("from_folder", [True, False])
def test_peft_model_merged_by_whet_has_its_logits(settings, from_folder, tmp_path):
    model = peft_model(**settings)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    adapters = from_peft(tmp_path if from_folder else model)
    assert set(adapters) == {
        f"model.layers.{i}.{module}" for i in (0, 1) for module in ("self_attn.q_proj", "mlp.down_proj")
    }
    base = base_model()
    assert not torch.allclose(logits(base), expected, atol=1e-3)
    for module, one in adapters.items():
        one.merge(base.get_submodule(module).weight.detach())
    torch.testing.assert_close(logits(base), expected, rtol=1e-4, atol=1e-5)


def test_peft_reads_what_whet_wrote(tmp_path):
    adapters = {
        "model.layers.0.self_attn.q_proj": adapter(16, 16, 2, 4.0, 0),
        "model.layers.1.self_attn.q_proj": adapter(16, 16, 8, 1.5, 1),
        "model.layers.1.mlp.down_proj": adapter(24, 16, 1, 4.0, 2),
    }
    to_peft(tmp_path / "new" / "folder", adapters, "some/base")
    model = peft.PeftModel.from_pretrained(base_model(), str(tmp_path / "new" / "folder")).eval()
    assert model.peft_config["default"].base_model_name_or_path == "some/base"
    base = base_model()
    for module, one in adapters.items():
        one.merge(base.get_submodule(module).weight.detach())
    torch.testing.assert_close(logits(base), logits(model), rtol=1e-4, atol=1e-5)
    for module, one in from_peft(tmp_path / "new" / "folder").items():
        np.testing.assert_array_equal(one.A, adapters[module].A)
        np.testing.assert_array_equal(one.B, adapters[module].B)
        assert one.alpha == adapters[module].alpha


def test_bfloat16_adapters_are_read(tmp_path):
    model = peft_model().bfloat16()
    model.save_pretrained(tmp_path)
    name = "model.layers.0.self_attn.q_proj"
    weight = model.get_submodule(f"base_model.model.{name}").lora_B["default"].weight
    np.testing.assert_array_equal(from_peft(tmp_path)[name].B, weight.detach().float().numpy().T)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, ("use_dora is True", "only plain LoRA is read")),
        ({"r": 9}, ("has rank 9", "1 to 8")),
        ({"bias": "lora_only"}, ("bias is 'lora_only'", "'none'")),
        ({"init_lora_weights": "pissa"}, ("init_lora_weights is 'pissa'", "changes the base model")),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"target_modules": ["embed_tokens"]}, ("embed_tokens", "whet merge")),
    ],
)
def test_beyond_plain_lora_is_rejected(settings, message, tmp_path):
    model = peft_model(**settings)
    assert_raises(CheckpointError, message, from_peft, model)


def test_unreadable_peft_folders_are_rejected(tmp_path):
    assert_raises(CheckpointError, ("adapter_config.json cannot be read", "No such file"), from_peft, tmp_path)
    peft_model().save_pretrained(tmp_path)
    config = tmp_path / "adapter_config.json"
    text = config.read_text()
    for damaged, message in (
        ("{", "is not JSON"),
        ("[]", "holds a list"),
        ('{"peft_type": "IA3"}', "peft_type is 'IA3'"),
        ('{"peft_type": "LORA", "lora_alpha": "16"}', ("the alpha of", "is '16'", "a finite number")),
        ('{"peft_type": "LORA", "lora_alpha": NaN}', ("the alpha of", "is nan", "a finite number")),
        ('{"peft_type": "LORA", "alpha_pattern": 3}', ("alpha_pattern is 3", "regular expressions")),
        (
            '{"peft_type": "LORA", "alpha_pattern": {"(": 3}}',
            "alpha_pattern is {'\\(': 3}, expected regular expressions",
        ),
    ):
        config.write_text(damaged)
        assert_raises(CheckpointError, message, from_peft, tmp_path)
    config.write_text(text)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    assert_raises(CheckpointError, ("adapter_model.safetensors", "damaged"), from_peft, tmp_path)
    weights.unlink()
    assert_raises(CheckpointError, r"adapter_model.safetensors cannot be read", from_peft, str(tmp_path))
    with pytest.raises(whet.WhetTypeError, match=mentions("source is a Linear", "a folder or a PeftModel")):
        from_peft(torch.nn.Linear(2, 2))
    assert_raises(whet.WhetValueError, ("from_peft", "'other'", "default"), from_peft, peft_model(), "other")


def test_saved_adapters_resume_training_bitwise(tmp_path):
    adapters = {"model.layers.0.q": adapter(5, 3, 2, 4.0, 0), "head": adapter(7, 2, 8, 1.0, 1)}
    x, g = np.ones(5, np.float32), np.ones(3, np.float32)
    first = adapters["model.layers.0.q"]
    for _ in range(2):
        first.accumulate(x, g)
        first.adam_step(0.1)
    first.accumulate_fisher(x, g)
    first.consolidate()
    first.ewc_lambda = 0.25
    first.accumulate(x, g)
    save_adapters(tmp_path / "a.safetensors", adapters)
    save_adapters(tmp_path / "a.safetensors", adapters)
    loaded = load_adapters(tmp_path / "a.safetensors")
    assert list(loaded) == list(adapters) and [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    for one in (first, loaded["model.layers.0.q"]):
        one.adam_step(0.1)
    for module, one in adapters.items():
        for (key, value), (other_key, other) in zip(
            one.state_dict().items(), loaded[module].state_dict().items(), strict=True
        ):
            assert key == other_key
            np.testing.assert_array_equal(value, other)


def test_damaged_adapter_files_are_rejected(tmp_path):
    path = tmp_path / "a.safetensors"
    assert_raises(CheckpointError, ("a.safetensors cannot be read", "No such file"), load_adapters, path)
    save_adapters(path, {"head": adapter(5, 3, 2, 4.0, 0)})
    data = path.read_bytes()
    for damaged in (b"", data[:4], data[:-1], b"\xff" * 40):
        path.write_bytes(damaged)
        assert_raises(CheckpointError, (path, "damaged"), load_adapters, path)
    from safetensors.numpy import load, save

    tensors, numbers = load(data), {"head": {"alpha": 4.0}}
    fine = {"format": "whet-micro-lora-1", "adapters": json.dumps(numbers)}
    for changed, metadata, message in (
        (tensors, None, ("format None", "'whet-micro-lora-1'", "Read an adapter of PEFT with from_peft")),
        (tensors, {**fine, "adapters": "["}, "no readable list of adapters"),
        (tensors, {**fine, "adapters": "{}"}, ("holds head", "whose module", "in its list")),
        ({"head.lora_A": tensors["head.lora_A"]}, fine, ("head", "lora_B is missing")),
        ({**tensors, "head.x_A": np.zeros(2, np.float32)}, fine, ("head", "load_state_dict", "x_A or x_B is unknown")),
        ({**tensors, "head.lora_A": np.zeros((2, 5), np.int32)}, fine, ("head.lora_A is I32", "F32")),
        (tensors, {**fine, "adapters": '{"head": {"alpha": "four"}}'}, ("alpha is 'four'", "a finite float")),
    ):
        path.write_bytes(save(changed, metadata))
        assert_raises(CheckpointError, message, load_adapters, path)


def test_writing_without_adapters_or_folder_is_rejected(tmp_path):
    good = adapter(5, 3, 2, 4.0, 0)
    for function, rest in ((save_adapters, ()), (to_peft, ("base",))):
        with pytest.raises(whet.WhetValueError, match=mentions(function.__name__, "adapters", "empty")):
            function(tmp_path / "x", {}, *rest)
        with pytest.raises(whet.WhetTypeError, match=mentions("adapters has 'a'", "int", "a module name", "MicroLoRA")):
            function(tmp_path / "x", {"a": 3}, *rest)
    with pytest.raises(whet.WhetValueError, match=mentions("save_adapters", tmp_path / "missing")):
        save_adapters(tmp_path / "missing" / "a.safetensors", {"a": good})
