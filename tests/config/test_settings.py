"""Configs and the machinery of their fields: types, ranges, choices, unknown names."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import typing
from typing import Any

import numpy as np
import pytest
from tests.raising import assert_raises

from whet.cli.settings import read_toml, write_toml
from whet.config import (
    BestOfNConfig,
    DPOConfig,
    GRPOConfig,
    OnlineDPOConfig,
    RolloutConfig,
    SFTConfig,
    TrainerConfig,
    settings,
)
from whet.config.fields import make_config
from whet.config.sampling import DISTRIBUTION_SETTINGS, SamplingParams
from whet.errors import WhetTypeError, WhetValueError

ALL = [SFTConfig, DPOConfig, GRPOConfig, OnlineDPOConfig, BestOfNConfig]


@pytest.mark.parametrize("config_class", ALL)
def test_defaults_are_valid_flat_and_plain(config_class):
    config = config_class()
    for name, value in dataclasses.asdict(config).items():
        assert value is None or isinstance(value, (bool, int, float, str, list, dict)), name
    assert make_config(config_class, None, dataclasses.asdict(config)) == config


def test_every_field_has_its_line():
    source = inspect.getsource(settings)
    fields = re.findall(r"^    (\w+): (?!ClassVar).* = .*\n(.*)$", source, flags=re.MULTILINE)
    assert len(fields) > 40
    for name, next_line in fields:
        assert next_line.startswith('    """'), f"{name} has no line that says what it does"


def test_settings_take_the_place_of_a_configs_fields():
    base = GRPOConfig(beta=0.1, group_size=4)
    changed = make_config(GRPOConfig, base, {"group_size": 16})
    assert (changed.beta, changed.group_size, base.group_size) == (0.1, 16, 4)


@pytest.mark.parametrize(
    ("config_class", "settings", "message"),
    [
        (
            SFTConfig,
            {"learning_rat": 1.0},
            "SFTConfig: there is no setting 'learning_rat'. Did you mean learning_rate?",
        ),
        (SFTConfig, {"zzz": 1.0}, "there is no setting 'zzz'. There are: learning_rate"),
        (SFTConfig, {"batch_size": 2.0}, "SFTConfig: batch_size is 2.0, expected int"),
        (SFTConfig, {"batch_size": True}, "batch_size is True, expected int"),
        (SFTConfig, {"learning_rate": "1"}, "learning_rate is '1', expected float"),
        (SFTConfig, {"training_mode": 1}, "training_mode is 1, expected bool"),
        (SFTConfig, {"lr_schedule": 3}, "lr_schedule is 3, expected one of 'constant', 'linear', 'cosine'"),
        (SFTConfig, {"stop_token_ids": [1.5]}, "stop_token_ids is [1.5], expected a list of int values"),
        (SFTConfig, {"stop_token_ids": 2}, "stop_token_ids is 2, expected a list of int values"),
        (GRPOConfig, {"delta": "big"}, "delta is 'big', expected float or None"),
    ],
)
def test_wrong_types_and_names_are_named(config_class, settings, message):
    assert_raises(WhetTypeError, re.escape(message), make_config, config_class, None, settings)


@pytest.mark.parametrize(
    ("config_class", "settings", "message"),
    [
        (SFTConfig, {"lr_schedule": "step"}, "lr_schedule is 'step', expected one of 'constant', 'linear', 'cosine'"),
        (SFTConfig, {"learning_rate": math.nan}, "learning_rate is nan, expected a number other than NaN"),
        (SFTConfig, {"adam_beta1": 1.0}, "adam_beta1 is 1.0, expected a number in [0, 1)"),
        (SFTConfig, {"batch_size": 0}, "batch_size is 0, expected an integer >= 1"),
        (SFTConfig, {"warmup_steps": -1}, "warmup_steps is -1, expected an integer >= 0"),
        (SFTConfig, {"max_skipped_steps": 0}, "max_skipped_steps is 0, expected an integer >= 1"),
        (GRPOConfig, {"group_size": 0}, "group_size is 0, expected an integer >= 2"),
        (GRPOConfig, {"beta": -0.1}, "beta is -0.1, expected a finite number >= 0"),
        (GRPOConfig, {"epsilon": -1.0}, "GRPOConfig: epsilon is -1.0, expected a number >= 0"),
        (
            GRPOConfig,
            {"sampler_correction": "on"},
            "sampler_correction is 'on', expected one of 'auto', 'off', 'token_truncate'",
        ),
        (GRPOConfig, {"top_p": 0.0}, "top_p is 0.0"),
        (OnlineDPOConfig, {"beta": 0.0}, "OnlineDPOConfig: beta is 0.0, expected a finite number > 0"),
        (OnlineDPOConfig, {"max_new_tokens": 0}, "max_new_tokens is 0"),
        (DPOConfig, {"label_smoothing": 0.7}, "DPOConfig: label_smoothing is 0.7"),
        (GRPOConfig, {"group_size": 1}, "group_size is 1, expected an integer >= 2: of one completion"),
        (GRPOConfig, {"advantage_ddof": 2}, "advantage_ddof is 2, expected 0 or 1"),
        (GRPOConfig, {"reward_timeout_s": 0}, "reward_timeout_s is 0, expected seconds > 0, or None"),
        (SFTConfig, {"seed": -1}, "seed is -1, expected an integer from 0 to 2^64 - 1"),
        (SFTConfig, {"stop_token_ids": [-1]}, "stop_token_ids is [-1], expected token ids >= 0"),
        (BestOfNConfig, {"pad_token_id": -1}, "pad_token_id is -1, expected a token id >= 0"),
        (BestOfNConfig, {"temperature": 0.0}, "temperature is 0.0, expected a finite number > 0"),
    ],
)
def test_values_out_of_range_are_named(config_class, settings, message):
    assert_raises(WhetValueError, re.escape(message), make_config, config_class, None, settings)


@pytest.mark.parametrize(
    ("config_class", "settings", "why"),
    [
        (SFTConfig, {"schedule_steps": 9}, "lr_schedule is 'constant', which has no end"),
        (SFTConfig, {"max_tokens_per_step": 9, "micro_batch_size": 2}, "micro_batch_size sets the rows of a pass"),
        (SFTConfig, {"max_tokens_per_step": 9, "compute": "torch"}, "compute is 'torch'"),
        (DPOConfig, {"beta": 0.2, "loss_type": "sft"}, "'sft' uses the chosen completion only"),
        (DPOConfig, {"precompute_reference": True, "reference_free": True}, "the loss uses no reference"),
        (DPOConfig, {"precompute_reference": True, "loss_type": "sft"}, "the loss uses no reference"),
        (DPOConfig, {"reference_cache": "x"}, "it caches what precompute_reference computes"),
        (GRPOConfig, {"rollout_weights": "int8", "engine": "torch"}, "engine is 'torch', which samples from the model"),
        (GRPOConfig, {"kv_bytes": 1 << 30, "engine": "torch"}, "engine is 'torch', which samples from the model"),
        (GRPOConfig, {"epsilon": 0.1, "loss_type": "sapo"}, "'sapo' does not clip the ratio at 1 - epsilon"),
        (GRPOConfig, {"epsilon": 0.1, "loss_type": "cispo", "epsilon_high": 5.0}, "'cispo' does not clip the ratio"),
        (GRPOConfig, {"epsilon_high": 0.3, "loss_type": "sapo"}, "'sapo' has no such bound"),
        (GRPOConfig, {"delta": 2.0, "loss_type": "sapo"}, "'sapo' has no such bound"),
        (GRPOConfig, {"delta": 2.0, "loss_type": "cispo", "epsilon_high": 5.0}, "'cispo' has no such bound"),
        (GRPOConfig, {"sapo_tau_positive": 2.0}, "'dapo' has no temperature"),
        (GRPOConfig, {"sapo_tau_negative": 2.0}, "'dapo' has no temperature"),
        (GRPOConfig, {"kl_estimator": "k1", "beta": 0.0}, "beta is 0, and there is no KL term"),
        (GRPOConfig, {"sampler_cap": 2.0, "sampler_correction": "off"}, "sampler_correction is off"),
        (GRPOConfig, {"sampler_cap": 2.0, "rollout_weights": "float32"}, "sampler_correction is off"),
        (GRPOConfig, {"advantage_ddof": 1, "scale_rewards": "none"}, "scale_rewards is 'none', and nothing divides"),
        (GRPOConfig, {"advantage_eps": 1e-4, "scale_rewards": "none"}, "scale_rewards is 'none', and nothing divides"),
        (OnlineDPOConfig, {"beta": 0.2, "loss_type": "sft"}, "'sft' uses the chosen completion only"),
        (BestOfNConfig, {"rollout_weights": "int8", "engine": "torch"}, "engine is 'torch'"),
    ],
)
def test_a_setting_without_effect_is_refused(config_class, settings, why):
    name, value = next(iter(settings.items()))
    message = f"{config_class.__name__}: {name} is {value!r} and has no effect: {why}"
    assert_raises(WhetValueError, re.escape(message), config_class, **settings)
    config_class(**{**settings, name: getattr(config_class(), name)})  # at its default it asks for nothing


def test_settings_that_work_together_are_taken():
    SFTConfig(lr_schedule="cosine", schedule_steps=9, warmup_steps=9, micro_batch_size=2)
    SFTConfig(max_tokens_per_step=0, compute="torch")  # all at once, which is what happens
    DPOConfig(precompute_reference=True, reference_cache="x", beta=0.3)
    GRPOConfig(loss_type="cispo", epsilon_high=math.inf)
    GRPOConfig(loss_type="sapo", sapo_tau_positive=2.0, beta=0.1, kl_estimator="k1")
    GRPOConfig(kl_estimator="k1")  # beta may become that of a ref_model
    GRPOConfig(sampler_cap=2.0)  # on a quantised base, which GRPO sees
    GRPOConfig(rollout_weights="int8", sampler_cap=2.0, advantage_ddof=1, advantage_eps=1e-4, delta=2.0)


def test_cispo_wants_its_cap():
    with pytest.raises(WhetValueError, match=r"epsilon_high is None, and in 'cispo' it caps the ratio itself.*5\.0"):
        GRPOConfig(loss_type="cispo")


@pytest.mark.parametrize("config_class", ALL)
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_no_number_that_is_not_finite_gets_in(config_class, value):
    bounds = ("delta", "epsilon", "epsilon_high", "sampler_cap")  # +inf is a bound that nothing reaches
    hints = typing.get_type_hints(config_class)
    names = [name for name, hint in hints.items() if float in (hint, *typing.get_args(hint))]
    assert names
    for name in names:
        if value == math.inf and name in bounds:
            continue
        with pytest.raises((WhetTypeError, WhetValueError), match=f"{name} is "):
            config_class(**{name: [value] if hints[name] == list[float] else value})


def test_a_warm_up_fits_into_its_schedule():
    with pytest.raises(WhetValueError, match="warmup_steps is 10, expected at most schedule_steps=9"):
        SFTConfig(lr_schedule="linear", schedule_steps=9, warmup_steps=10)


def test_numbers_of_numpy_and_whole_floats_do():
    config = SFTConfig(learning_rate=1, batch_size=np.int64(4), weight_decay=np.float32(0.5))
    assert config.batch_size == 4
    assert [type(value) for value in (config.batch_size, config.weight_decay)] == [int, float]
    assert SFTConfig(stop_token_ids=(1, 2)).stop_token_ids == (1, 2)


def test_the_sampling_fields_are_those_of_the_engine():
    ours = {f.name for f in dataclasses.fields(RolloutConfig)}
    assert {f.name for f in dataclasses.fields(SamplingParams)} - ours == {"top_logprobs"}  # no algorithm reads them
    settings: dict[str, Any] = {
        "top_k": 3, "top_p": 0.5, "min_p": 0.1, "temperature": 0.7, "repetition_penalty": 1.1, "max_new_tokens": 9,
        "presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"4": 2}, "min_new_tokens": 2,
    }  # fmt: skip
    config = RolloutConfig(**settings, stop=["\n"])
    expected = SamplingParams(**settings, stop="\n", stop_token_ids=(2,), seed=5)
    assert config.sampling([2], 5) == expected
    assert RolloutConfig(stop_token_ids=[8]).sampling([2], 5).stop_token_ids == (8,)


def test_shared_fields_mean_the_same_everywhere():
    hints = typing.get_type_hints(TrainerConfig)
    for name in set(hints) & set(typing.get_type_hints(RolloutConfig)):
        assert hints[name] == typing.get_type_hints(RolloutConfig)[name]


@pytest.mark.parametrize("name", DISTRIBUTION_SETTINGS)
def test_a_setting_that_changes_the_distribution_is_not_plain(name):
    values = {"temperature": 0.5, "top_p": 0.5, "min_p": 0.5, "logit_bias": {3: 1.0}}
    assert RolloutConfig().uses_unmodified_distribution()
    assert not RolloutConfig(**{name: values.get(name, 2)}).uses_unmodified_distribution()
    assert RolloutConfig(stop=["x"]).uses_unmodified_distribution()


def test_a_bias_in_toml_is_a_table(tmp_path):
    config = RolloutConfig(logit_bias={4: 2.0, 11: -100})
    write_toml(tmp_path / "config.toml", dataclasses.asdict(config))
    assert "[logit_bias]\n4 = 2.0\n11 = -100" in (tmp_path / "config.toml").read_text()
    assert make_config(RolloutConfig, None, read_toml(tmp_path / "config.toml")) == config
