"""Live modules that compute something else than their class and config."""

from __future__ import annotations

import pytest
import torch
from tests.raising import mentions

pytest.importorskip("transformers")
from tests.engine.tiny_models import tiny_model
from tests.tiny import tiny_llama, with_lora

from whet import Engine, WhetValueError
from whet.models.sources.live import open_module
from whet.nn.frozen import frozen_model


class Doubled(torch.nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


def patch_forward(model):
    mlp = model.model.layers[0].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(x) * 2


def hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output * 2)


def hook_before(model):
    model.model.layers[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))


def subclass(model):
    model.model.layers[0].mlp.up_proj.__class__ = Doubled


def other_activation(model):
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()


def other_scaling(model):
    model.model.layers[0].self_attn.scaling = 0.9


def other_epsilon(model):
    model.model.norm.variance_epsilon = 0.5


def changed_config(model):
    model.config.rms_norm_eps = 0.5


CHANGES = {
    patch_forward: "forward of model.layers.0.mlp is defined in",
    hook: "a forward hook of model.layers.0.mlp is defined in",
    hook_before: "a forward hook of model.layers.0 is defined in",
    subclass: "forward of model.layers.0.mlp.up_proj is defined in",
    other_activation: "model.layers.0.mlp.act_fn is a ReLU, and silu in the config",
    other_scaling: "model.layers.0.self_attn.scaling is 0.9, and 0.353553 in the config",
    other_epsilon: "model.norm.variance_epsilon is 0.5, and 1e-06 in the config",
    changed_config: "variance_epsilon is 1e-06, and 0.5 in the config",
}


@pytest.mark.parametrize("change", CHANGES)
def test_custom_forward_hook_or_activation_is_rejected_by_name(change):
    model = tiny_llama()
    change(model)
    with pytest.raises(WhetValueError, match=CHANGES[change]):
        Engine.from_model(model)


def test_sync_rejects_modules_changed_since():
    model = tiny_llama()
    engine = Engine.from_model(model)
    hook(model)
    with pytest.raises(WhetValueError, match=CHANGES[hook]):
        engine.sync(model)


def test_sliding_window_is_checked_per_layer():
    model = tiny_model("qwen2-windows")
    model.model.layers[1].self_attn.sliding_window = 3
    with pytest.raises(WhetValueError, match=mentions("layers.1.self_attn.sliding_window is 3", "4 in the config")):
        open_module(model)


def test_hooks_around_adapters_and_on_packed_bases_are_rejected():
    model = with_lora(tiny_llama())
    model.register_forward_hook(lambda module, inputs, output: None)
    with pytest.raises(WhetValueError, match=mentions("a forward hook of the model is")):
        open_module(model)
    model = frozen_model(tiny_llama(hidden_size=32, intermediate_size=64), "q8_0")
    open_module(model)
    hook(model)
    with pytest.raises(WhetValueError, match=CHANGES[hook]):
        open_module(model)


@pytest.mark.parametrize("case", ["llama-yarn", "granite", "gemma2", "phi3-longrope", "gpt_neox"])
def test_rounded_models_match_their_configs(case):
    for max_position in (None, 12):
        open_module(tiny_model(case).bfloat16(), max_position=max_position)


def test_hooks_of_trusted_libraries_are_accepted():
    accelerate = pytest.importorskip("accelerate")
    model = tiny_llama()
    model.enable_input_require_grads()
    model(torch.tensor([[1, 2]]), output_hidden_states=True)  # whose hooks stay
    accelerate.hooks.add_hook_to_module(model.model.layers[0].mlp, accelerate.hooks.ModelHook())
    open_module(model)
