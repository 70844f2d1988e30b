"""An engine far from the trainer: weights and adapters as named arrays, with the trainer's version."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.engine.tiny_models import CASES, tiny_model
from tests.raising import assert_mentions, mentions
from tests.tiny import changed, tiny_llama, with_lora

from whet import Engine, SamplingParams
from whet.errors import WhetError, WhetTypeError, WhetValueError
from whet.models.packed_base import pack_base
from whet.models.sources.arrays import named_arrays
from whet.models.sources.live import open_module

SAMPLING = SamplingParams(max_new_tokens=6, seed=3)
PROMPTS = [[3, 5, 7], [4, 4]]


def sample(engine):
    return [[(c.token_ids, c.logprobs) for c in group] for group in engine.generate(PROMPTS, 2, SAMPLING)]


@pytest.mark.parametrize("case", CASES)
def test_weights_as_named_arrays(case):
    model = tiny_model(case)
    other = changed(model)
    with Engine.from_model(model, weights="float32") as far, Engine.from_model(other, weights="float32") as near:
        far.sync(named_arrays(other), version=7)
        assert sample(far) == sample(near)
        assert far.policy_version == 7
        assert {c.policy_version for group in far.generate(PROMPTS, 1, SAMPLING) for c in group} == {7}
        far.sync(model)  # and as a module again
        assert far.policy_version == 8
        with Engine.from_model(model, weights="float32") as first:
            assert sample(far) == sample(first)


def test_bfloat16_arrays_are_bits():
    model = tiny_llama().bfloat16()
    arrays = named_arrays(model)
    assert {str(array.dtype) for array in arrays.values()} == {"uint16"}
    with Engine.from_model(changed(model)) as far, Engine.from_model(model) as near:
        far.sync(arrays)
        assert sample(far) == sample(near) and far.policy_version == 1


def test_bfloat16_slots_halve_the_bytes_and_keep_the_results():
    model = changed(tiny_llama())
    whole = named_arrays(model)
    slots = [slot for slot, shape in open_module(model).config.slots().items() if len(shape) == 2]
    half = named_arrays(model, bfloat16_slots=slots)
    for name, array in half.items():
        assert str(array.dtype) == ("uint16" if array.ndim == 2 else "float32") and array.shape == whole[name].shape
    with Engine.from_model(tiny_llama(), weights="bf16") as far, Engine.from_model(model, weights="bf16") as near:
        far.sync(half)
        assert sample(far) == sample(near)


@pytest.mark.parametrize("base", [None, "q8_0"])
def test_adapters_with_and_without_weights(base):
    plain = tiny_llama(hidden_size=32, intermediate_size=32)
    adapted = with_lora(copy.deepcopy(plain), b_std=0.5, r=2, target_modules=["q_proj", "v_proj", "down_proj"],
                        modules_to_save=["model.norm"])  # fmt: skip
    with torch.no_grad():
        adapted.base_model.model.model.norm.modules_to_save["default"].weight.mul_(1.5)
    adapters = named_arrays(adapted, adapters_only=True)
    norm = adapters["model.norm"]
    assert norm.keys() == {"weight"} and (norm["weight"] == 1.5).all()
    assert all(isinstance(value, tuple) for value in adapters.values() if value is not norm) and len(adapters) == 7
    with Engine.from_model(adapted, weights=base or "float32") as near:
        expected = sample(near)
    engine = Engine.from_base(pack_base(open_module(plain), weights=base)) if base else Engine.from_model(
        plain, weights="float32"
    )  # fmt: skip
    with engine as far:
        before = sample(far)
        far.sync(adapters, version=3)
        assert sample(far) == expected != before and far.policy_version == 3
        if base:
            with pytest.raises(WhetValueError, match=mentions("weight is among the arrays", "the engine")):
                far.sync(named_arrays(plain))
            return
        far.sync(named_arrays(plain))
        assert sample(far) == before
        far.sync(named_arrays(adapted))
        assert sample(far) == expected
        far.sync(adapted)
        assert sample(far) == expected


def test_invalid_arrays_are_rejected_without_changes():
    model = tiny_llama()
    arrays = named_arrays(model)
    name = "model.layers.0.mlp.up_proj.weight"
    adapter = (np.zeros((2, 8), np.float32), np.zeros((8, 2), np.float32), 1.0)
    cases = {
        "there are no arrays": {},
        f"array {name} is missing. Send all weights": {k: v for k, v in arrays.items() if k != name},
        "has shape (3, 3), expected": {**arrays, name: np.zeros((3, 3), np.float32)},
        "the model has no parameter model.more": {**arrays, "model.more": np.zeros(3, np.float32)},
        "holds NaN or infinity": {**arrays, name: np.full_like(arrays[name], np.nan)},
        "the model has no module 'q'": {"q": adapter},
        "expected (r, k) and (n, r)": {"model.layers.0.self_attn.q_proj": adapter},
    }
    with Engine.from_model(model, weights="float32") as engine:
        before = sample(engine)
        for message, wrong in cases.items():
            with pytest.raises(WhetValueError) as error:
                engine.sync(wrong)
            assert_mentions(str(error.value), "Engine.sync", message)
        for message, wrong in {
            "is a ndarray of int64, expected a NumPy array of": {**arrays, name: np.zeros((1, 1), np.int64)},
            "is a Tensor of torch.float32": {**arrays, name: torch.zeros(1, 1)},
            "is a int, expected an array, or (A, B, scaling)": {**arrays, "model.layers.0.mlp.up_proj": 3},
        }.items():
            with pytest.raises(WhetTypeError) as type_error:
                engine.sync(wrong)
            assert_mentions(str(type_error.value), message)
        for version in (0, -1, 1.5):
            with pytest.raises(WhetError, match=mentions("version")):
                engine.sync(arrays, version=version)
        assert sample(engine) == before and engine.policy_version == 0
        engine.release_weights()
        with pytest.raises(WhetValueError, match=mentions("adapters", "release_weights", "sync")):
            engine.sync(named_arrays(with_lora(tiny_llama(), b_std=0.1), adapters_only=True))
        engine.sync(arrays)
        assert sample(engine) == before
    with pytest.raises(WhetValueError, match=mentions("no active LoRA adapter")):
        named_arrays(model, adapters_only=True)


def test_a_worker_needs_no_torch(tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path / "model")
    np.savez(tmp_path / "arrays.npz", **named_arrays(changed(model)))
    code = f"""
import sys
import numpy as np
import whet
engine = whet.Engine.from_pretrained({str(tmp_path / "model")!r}, weights="float32", tokenizer=None)
engine.sync(dict(np.load({str(tmp_path / "arrays.npz")!r})), version=5)
[[completion]] = engine.generate([[3, 5, 7]], 1, whet.SamplingParams(max_new_tokens=4))
assert completion.policy_version == 5 and "torch" not in sys.modules
print(completion.token_ids)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    with Engine.from_model(changed(model), weights="float32") as engine:
        assert ran.stdout.strip() == str(
            engine.generate([[3, 5, 7]], 1, SamplingParams(max_new_tokens=4))[0][0].token_ids
        )
