"""Configs and the machinery of their fields: types, ranges, choices, unknown names."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import subprocess
import sys
import typing

import numpy as np
import pytest

from whet import config as configs
from whet.config import BestOfNConfig, DPOConfig, GRPOConfig, OnlineDPOConfig, RolloutConfig, SFTConfig, TrainerConfig
from whet.errors import WhetTypeError, WhetValueError
from whet.fields import make_config
from whet.sampling import SamplingParams

ALL = [SFTConfig, DPOConfig, GRPOConfig, OnlineDPOConfig, BestOfNConfig]


@pytest.mark.parametrize("config_class", ALL)
def test_defaults_are_valid_flat_and_plain(config_class):
    config = config_class()
    for name, value in dataclasses.asdict(config).items():
        assert value is None or isinstance(value, (bool, int, float, str, list)), name
    assert make_config(config_class, None, dataclasses.asdict(config)) == config


def test_every_field_has_its_line():
    source = inspect.getsource(configs)
    fields = re.findall(r"^    (\w+): .* = .*\n(.*)$", source, flags=re.MULTILINE)
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
    with pytest.raises(WhetTypeError, match=re.escape(message)):
        make_config(config_class, None, settings)


@pytest.mark.parametrize(
    ("config_class", "settings", "message"),
    [
        (SFTConfig, {"lr_schedule": "step"}, "lr_schedule is 'step', expected one of 'constant', 'linear', 'cosine'"),
        (SFTConfig, {"learning_rate": math.nan}, "learning_rate is nan, expected a number other than NaN"),
        (SFTConfig, {"adam_beta1": 1.0}, "adam_beta1 is 1.0, expected a number in [0, 1)"),
        (SFTConfig, {"batch_size": 0}, "batch_size is 0, expected an integer >= 1"),
        (SFTConfig, {"warmup_steps": -1}, "warmup_steps is -1, expected an integer >= 0"),
        (SFTConfig, {"max_skipped_steps": 0}, "max_skipped_steps is 0, expected an integer >= 1"),
        (GRPOConfig, {"group_size": 0}, "group_size is 0, expected an integer >= 1"),
        (GRPOConfig, {"beta": -0.1}, "beta is -0.1, expected a number >= 0"),
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
        (BestOfNConfig, {"temperature": 0.0}, "temperature is 0.0, expected a number > 0"),
    ],
)
def test_values_out_of_range_are_named(config_class, settings, message):
    with pytest.raises(WhetValueError, match=re.escape(message)):
        make_config(config_class, None, settings)


def test_numbers_of_numpy_and_whole_floats_do():
    config = SFTConfig(learning_rate=1, batch_size=np.int64(4), weight_decay=np.float32(0.5))
    assert config.batch_size == 4
    assert SFTConfig(stop_token_ids=(1, 2)).stop_token_ids == (1, 2)


def test_the_sampling_fields_are_those_of_the_engine():
    ours = {f.name for f in dataclasses.fields(RolloutConfig)}
    assert {f.name for f in dataclasses.fields(SamplingParams)} <= ours
    config = RolloutConfig(top_k=3, top_p=0.5, min_p=0.1, temperature=0.7, repetition_penalty=1.1, max_new_tokens=9)
    expected = SamplingParams(
        top_k=3, top_p=0.5, min_p=0.1, temperature=0.7, repetition_penalty=1.1, max_new_tokens=9, stop_token_ids=(2,),
        seed=5,
    )  # fmt: skip
    assert config.sampling([2], 5) == expected
    assert RolloutConfig(stop_token_ids=[8]).sampling([2], 5).stop_token_ids == (8,)


def test_shared_fields_mean_the_same_everywhere():
    hints = typing.get_type_hints(TrainerConfig)
    for name in set(hints) & set(typing.get_type_hints(RolloutConfig)):
        assert hints[name] == typing.get_type_hints(RolloutConfig)[name]


def test_configs_do_not_import_torch():
    code = "import whet.config, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
