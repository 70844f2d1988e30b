"""Validation of configs: types, ranges, choices, unknown names."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import typing
from typing import Any

import numpy as np
import pytest
from tests.raising import assert_raises, mentions

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
from whet.config.toml import read_toml, write_toml
from whet.errors import WhetTypeError, WhetValueError

ALL = [SFTConfig, DPOConfig, GRPOConfig, OnlineDPOConfig, BestOfNConfig]


@pytest.mark.parametrize("config_class", ALL)
def test_defaults_are_valid_flat_and_plain(config_class):
    config = config_class()
    for name, value in dataclasses.asdict(config).items():
        assert value is None or isinstance(value, (bool, int, float, str, list, dict)), name
    assert make_config(config_class, None, dataclasses.asdict(config)) == config


def test_every_field_has_a_docstring():
    source = inspect.getsource(settings)
    fields = re.findall(r"^    (\w+): (?!ClassVar).* = .*\n(.*)$", source, flags=re.MULTILINE)
    assert len(fields) > 40
    for name, next_line in fields:
        assert next_line.startswith('    """'), f"{name} has no docstring"


def test_settings_override_fields_of_a_config():
    base = GRPOConfig(beta=0.1, group_size=4)
    changed = make_config(GRPOConfig, base, {"group_size": 16})
    assert (changed.beta, changed.group_size, base.group_size) == (0.1, 16, 4)


@pytest.mark.parametrize(
    ("config_class", "settings", "facts"),
    [
        (SFTConfig, {"learning_rat": 1.0}, ("SFTConfig", "'learning_rat'", "learning_rate?")),
        (SFTConfig, {"zzz": 1.0}, ("'zzz'", "learning_rate")),
        (SFTConfig, {"batch_size": 2.0}, ("SFTConfig", "batch_size", "2.0", "int")),
        (SFTConfig, {"batch_size": True}, ("batch_size", "True", "int")),
        (SFTConfig, {"learning_rate": "1"}, ("learning_rate", "'1'", "float")),
        (SFTConfig, {"training_mode": 1}, ("training_mode", "1", "bool")),
        (SFTConfig, {"lr_schedule": 3}, ("lr_schedule", "3", "one of 'constant', 'linear', 'cosine'")),
        (SFTConfig, {"stop_token_ids": [1.5]}, ("stop_token_ids", "[1.5]", "a list of int values")),
        (SFTConfig, {"stop_token_ids": 2}, ("stop_token_ids", "2", "a list of int values")),
        (GRPOConfig, {"delta": "big"}, ("delta", "'big'", "float or None")),
    ],
)
def test_wrong_types_and_unknown_names_are_rejected(config_class, settings, facts):
    assert_raises(WhetTypeError, facts, make_config, config_class, None, settings)


@pytest.mark.parametrize(
    ("config_class", "settings", "facts"),
    [
        (SFTConfig, {"lr_schedule": "step"}, ("lr_schedule", "'step'", "one of 'constant', 'linear', 'cosine'")),
        (SFTConfig, {"learning_rate": math.nan}, ("learning_rate", "nan", "a number other than NaN")),
        (SFTConfig, {"adam_beta1": 1.0}, ("adam_beta1", "1.0", "a number in [0, 1)")),
        (SFTConfig, {"batch_size": 0}, ("batch_size", "0", "an integer >= 1")),
        (SFTConfig, {"warmup_steps": -1}, ("warmup_steps", "-1", "an integer >= 0")),
        (SFTConfig, {"max_skipped_steps": 0}, ("max_skipped_steps", "0", "an integer >= 1")),
        (GRPOConfig, {"group_size": 0}, ("group_size", "0", "an integer >= 2")),
        (GRPOConfig, {"beta": -0.1}, ("beta", "-0.1", "a finite number >= 0")),
        (GRPOConfig, {"epsilon": -1.0}, ("GRPOConfig", "epsilon", "-1.0", "a number >= 0")),
        (
            GRPOConfig,
            {"sampler_correction": "on"},
            ("sampler_correction", "'on'", "one of 'auto', 'off', 'token_truncate'"),
        ),
        (GRPOConfig, {"top_p": 0.0}, ("top_p", "0.0")),
        (OnlineDPOConfig, {"beta": 0.0}, ("OnlineDPOConfig", "beta", "0.0", "a finite number > 0")),
        (OnlineDPOConfig, {"max_new_tokens": 0}, ("max_new_tokens", "0")),
        (DPOConfig, {"label_smoothing": 0.7}, ("DPOConfig", "label_smoothing", "0.7")),
        (GRPOConfig, {"group_size": 1}, ("group_size", "1", "an integer >= 2", "single completion")),
        (GRPOConfig, {"advantage_ddof": 2}, ("advantage_ddof", "2", "0 or 1")),
        (GRPOConfig, {"reward_timeout_s": 0}, ("reward_timeout_s", "0", "seconds > 0, or None")),
        (SFTConfig, {"seed": -1}, ("seed", "-1", "an integer from 0 to 2^64 - 1")),
        (SFTConfig, {"stop_token_ids": [-1]}, ("stop_token_ids", "[-1]", "token ids >= 0")),
        (BestOfNConfig, {"pad_token_id": -1}, ("pad_token_id", "-1", "a token id >= 0")),
        (BestOfNConfig, {"temperature": 0.0}, ("temperature", "0.0", "a finite number > 0")),
    ],
)
def test_values_out_of_range_are_rejected(config_class, settings, facts):
    assert_raises(WhetValueError, facts, make_config, config_class, None, settings)


@pytest.mark.parametrize(
    ("config_class", "settings", "why"),
    [
        (SFTConfig, {"schedule_steps": 9}, ("lr_schedule", "'constant'")),
        (SFTConfig, {"max_tokens_per_step": 9, "micro_batch_size": 2}, ("micro_batch_size", "pass")),
        (SFTConfig, {"max_tokens_per_step": 9, "compute": "torch"}, ("compute", "'torch'")),
        (SFTConfig, {"activation_bytes": 9, "compute": "torch"}, ("compute", "'torch'")),
        (DPOConfig, {"beta": 0.2, "loss_type": "sft"}, ("'sft'", "chosen")),
        (DPOConfig, {"precompute_reference": True, "reference_free": True}, ("loss", "reference")),
        (DPOConfig, {"precompute_reference": True, "loss_type": "sft"}, ("loss", "reference")),
        (DPOConfig, {"reference_cache": "x"}, ("precompute_reference",)),
        (GRPOConfig, {"rollout_weights": "int8", "engine": "torch"}, ("engine", "'torch'")),
        (GRPOConfig, {"kv_bytes": 1 << 30, "engine": "torch"}, ("engine", "'torch'")),
        (GRPOConfig, {"epsilon": 0.1, "loss_type": "sapo"}, ("'sapo'", "1 - epsilon")),
        (GRPOConfig, {"epsilon": 0.1, "loss_type": "cispo", "epsilon_high": 5.0}, ("'cispo'", "1 - epsilon")),
        (GRPOConfig, {"epsilon_high": 0.3, "loss_type": "sapo"}, ("'sapo'", "bound")),
        (GRPOConfig, {"delta": 2.0, "loss_type": "sapo"}, ("'sapo'", "bound")),
        (GRPOConfig, {"delta": 2.0, "loss_type": "cispo", "epsilon_high": 5.0}, ("'cispo'", "bound")),
        (GRPOConfig, {"sapo_tau_positive": 2.0}, ("'dapo'", "temperature")),
        (GRPOConfig, {"sapo_tau_negative": 2.0}, ("'dapo'", "temperature")),
        (GRPOConfig, {"kl_estimator": "k1", "beta": 0.0}, ("beta is 0", "KL")),
        (GRPOConfig, {"sampler_cap": 2.0, "sampler_correction": "off"}, ("sampler_correction is off",)),
        (GRPOConfig, {"sampler_cap": 2.0, "rollout_weights": "float32"}, ("sampler_correction is off",)),
        (GRPOConfig, {"advantage_ddof": 1, "scale_rewards": "none"}, ("scale_rewards", "'none'")),
        (GRPOConfig, {"advantage_eps": 1e-4, "scale_rewards": "none"}, ("scale_rewards", "'none'")),
        (OnlineDPOConfig, {"beta": 0.2, "loss_type": "sft"}, ("'sft'", "chosen")),
        (BestOfNConfig, {"rollout_weights": "int8", "engine": "torch"}, ("engine", "'torch'")),
    ],
)
def test_settings_without_effect_are_rejected(config_class, settings, why):
    name, value = next(iter(settings.items()))
    facts = (config_class.__name__, name, repr(value), "no effect", *why)
    assert_raises(WhetValueError, facts, config_class, **settings)
    config_class(**{**settings, name: getattr(config_class(), name)})  # its default is never rejected


def test_settings_that_work_together_are_accepted():
    SFTConfig(lr_schedule="cosine", schedule_steps=9, warmup_steps=9, micro_batch_size=2)
    SFTConfig(max_tokens_per_step=0, compute="torch")  # no limit, as with torch
    DPOConfig(precompute_reference=True, reference_cache="x", beta=0.3)
    GRPOConfig(loss_type="cispo", epsilon_high=math.inf)
    GRPOConfig(loss_type="sapo", sapo_tau_positive=2.0, beta=0.1, kl_estimator="k1")
    GRPOConfig(kl_estimator="k1")  # beta may be set by a ref_model
    GRPOConfig(sampler_cap=2.0)  # effective on a quantised base, which GRPO detects
    GRPOConfig(rollout_weights="int8", sampler_cap=2.0, advantage_ddof=1, advantage_eps=1e-4, delta=2.0)


def test_cispo_requires_its_cap():
    with pytest.raises(WhetValueError, match=mentions("epsilon_high is None", "'cispo'", "5.0")):
        GRPOConfig(loss_type="cispo")


@pytest.mark.parametrize("config_class", ALL)
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_non_finite_numbers_are_rejected(config_class, value):
    bounds = ("delta", "epsilon", "epsilon_high", "sampler_cap")  # +inf: no bound
    hints = typing.get_type_hints(config_class)
    names = [name for name, hint in hints.items() if float in (hint, *typing.get_args(hint))]
    assert names
    for name in names:
        if value == math.inf and name in bounds:
            continue
        with pytest.raises((WhetTypeError, WhetValueError), match=name):
            config_class(**{name: [value] if hints[name] == list[float] else value})


def test_warmup_must_fit_into_the_schedule():
    with pytest.raises(WhetValueError, match=mentions("warmup_steps", 10, "schedule_steps=9")):
        SFTConfig(lr_schedule="linear", schedule_steps=9, warmup_steps=10)


def test_numpy_numbers_and_integers_for_floats_are_converted():
    config = SFTConfig(learning_rate=1, batch_size=np.int64(4), weight_decay=np.float32(0.5))
    assert config.batch_size == 4
    assert [type(value) for value in (config.batch_size, config.weight_decay)] == [int, float]
    assert SFTConfig(stop_token_ids=(1, 2)).stop_token_ids == (1, 2)


def test_sampling_fields_match_sampling_params():
    ours = {f.name for f in dataclasses.fields(RolloutConfig)}
    others = {f.name for f in dataclasses.fields(SamplingParams)} - ours
    assert others == {"top_logprobs", "experts", "kept_tokens", "grammar_after"}  # no user of an algorithm reads them
    settings: dict[str, Any] = {
        "top_k": 3, "top_p": 0.5, "min_p": 0.1, "temperature": 0.7, "repetition_penalty": 1.1, "max_new_tokens": 9,
        "presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"4": 2}, "min_new_tokens": 2,
    }  # fmt: skip
    config = RolloutConfig(**settings, stop=["\n"])
    expected = SamplingParams(**settings, stop="\n", stop_token_ids=(2,), seed=5)
    assert config.sampling([2], 5) == expected
    for name, value in {"regex": "a+", "lark": "start: /a+/", "schema": {"type": "integer"}}.items():
        assert getattr(RolloutConfig(**{name: value}).sampling([2], 5), name) == value
    assert RolloutConfig(stop_token_ids=[8]).sampling([2], 5).stop_token_ids == (8,)


def test_shared_fields_have_the_same_type_everywhere():
    hints = typing.get_type_hints(TrainerConfig)
    for name in set(hints) & set(typing.get_type_hints(RolloutConfig)):
        assert hints[name] == typing.get_type_hints(RolloutConfig)[name]


@pytest.mark.parametrize("name", DISTRIBUTION_SETTINGS)
def test_settings_that_modify_the_distribution_are_detected(name):
    values = {"temperature": 0.5, "top_p": 0.5, "min_p": 0.5, "logit_bias": {3: 1.0}}
    assert RolloutConfig().uses_unmodified_distribution()
    assert not RolloutConfig(**{name: values.get(name, 2)}).uses_unmodified_distribution()
    assert RolloutConfig(stop=["x"]).uses_unmodified_distribution()


def test_logit_bias_is_a_toml_table(tmp_path):
    config = RolloutConfig(logit_bias={4: 2.0, 11: -100})
    write_toml(tmp_path / "config.toml", dataclasses.asdict(config))
    assert "[logit_bias]\n4 = 2.0\n11 = -100" in (tmp_path / "config.toml").read_text()
    assert make_config(RolloutConfig, None, read_toml(tmp_path / "config.toml")) == config
