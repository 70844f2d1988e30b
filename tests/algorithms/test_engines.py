"""Algorithms on each engine: equal tokens, synced weights, one policy version per rollout, mismatch with the policy."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from tests import byte_tokenizer as bytewise
from tests.engine.tiny_models import tiny_model
from tests.raising import assert_raises, mentions
from tests.tiny import EOS, OwnGenerate, Recorded, assert_same_weights, fours, letters_tokenizer, tiny_llama, with_lora

from whet import Learner
from whet.algorithms.best_of_n import BestOfN
from whet.algorithms.grpo import GRPO
from whet.algorithms.online_dpo import OnlineDPO
from whet.config import GRPOConfig
from whet.engine import Engine
from whet.errors import WhetValueError
from whet.models.packed_base import pack_base
from whet.models.sources.arrays import named_arrays
from whet.models.sources.live import open_module
from whet.nn.frozen import base_of, frozen_model
from whet.rollout.torch_engine import TorchEngine

PROMPTS = [[5], [6, 4], [7]]


def grpo(model=None, **settings):
    settings = {"reward_fn": fours, "group_size": 4, "max_new_tokens": 5, "learning_rate": 0.01} | settings
    return GRPO(tiny_llama() if model is None else model, **settings)


def completions(trainer):
    return [row["completion"] for row in trainer.last_completions]


def test_native_and_torch_engines_give_equal_steps():
    runs = {}
    for name, kind in (("native", Engine), ("torch", TorchEngine)):
        trainer = grpo(engine=name, compute="float32")
        assert isinstance(trainer.engine, kind)
        history = [trainer.train_step(PROMPTS)]
        first = completions(trainer)
        history += [trainer.train_step(PROMPTS) for _ in range(11)]
        runs[name] = first, history
        assert all(
            step["sampler/logprob_difference"] <= step["sampler/logprob_difference_max"] < 1e-5 for step in history
        )
    (tokens, native), (expected, torched) = runs["native"], runs["torch"]
    assert tokens == expected
    assert native[0]["loss"] == pytest.approx(torched[0]["loss"], abs=1e-6)
    for step, other in zip(native, torched, strict=True):
        # One token that differs moves the mean of 12 rewards by a twelfth.
        assert step["mean_reward"] == pytest.approx(other["mean_reward"], abs=0.35)
    assert np.mean([s["mean_reward"] for s in native]) == pytest.approx(
        np.mean([s["mean_reward"] for s in torched]), abs=0.1
    )


def test_every_rollout_has_one_policy_version_and_current_weights():
    trainer = grpo()
    engine = trainer.engine = Recorded(trainer.engine)
    for version in (1, 2):
        trainer.train_step(PROMPTS)
        assert {c.policy_version for group in engine.groups[-1] for c in group} == {version}
    # Weights changed without the optimizer: always token 9.
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()
        trainer.model.model.embed_tokens.weight[:, 0] = 1
        trainer.model.model.norm.weight.fill_(1)
        trainer.model.lm_head.weight[9, 0] = 100
    trainer.train_step(PROMPTS)
    assert {token for group in engine.groups[-1] for c in group for token in c.token_ids} == {9}


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_coarser_sampler_weights_are_corrected_and_measured(weights):
    trainer = grpo(rollout_weights=weights)
    step = trainer.train_step(PROMPTS)
    assert trainer.config.correction() == "token_truncate"
    assert 0 < step["sampler/logprob_difference"] < step["sampler/logprob_difference_max"] < 0.05
    # E[pi / pi_sampler] under the sampler is 1.
    assert step["sampler/importance_weight"] == pytest.approx(1, abs=0.02)
    assert "sampler/importance_weight" not in grpo(rollout_weights=weights, sampler_correction="off").train_step(
        PROMPTS
    )


def test_auto_correction_is_off_if_the_sampler_is_the_policy():
    assert GRPOConfig().correction() is None
    assert GRPOConfig(rollout_weights="float32").correction() is None
    assert GRPOConfig(rollout_weights="int4", sampler_correction="off").correction() is None
    assert GRPOConfig(sampler_correction="sequence_mask").correction() == "sequence_mask"
    assert "sampler/importance_weight" not in grpo().train_step(PROMPTS)


def test_auto_correction_does_not_require_logprobs():
    step = grpo(OwnGenerate(), rollout_weights="bf16").train_step(PROMPTS)
    assert math.isfinite(step["loss"]) and "sampler/logprob_difference" not in step


@pytest.mark.parametrize("engine", ["auto", "native", "torch"])
def test_online_dpo_measures_the_sampler_mismatch(engine):
    def online(**settings):
        return OnlineDPO(tiny_llama(), reward_fn=fours, engine=engine, max_new_tokens=5, compute="float32", **settings)

    step = online(micro_batch_size=1).train_step([[5], [6, 4], [7], [8]] * 2)
    assert step["frac_ties"] < 1
    assert 0 <= step["sampler/logprob_difference"] <= step["sampler/logprob_difference_max"] < 1e-5
    # The loss is at temperature 1, the samples are not.
    assert "sampler/logprob_difference" not in online(temperature=0.5).train_step([[5], [6, 4], [7], [8]] * 2)


def test_best_of_n_is_equal_on_both_engines():
    found = {}
    for engine in ("native", "torch"):
        best = BestOfN(tiny_llama(), fours, engine=engine, n=4, max_new_tokens=6)
        found[engine] = best.generate(PROMPTS, return_all=True)
        assert isinstance(best.engine, Engine if engine == "native" else TorchEngine)
    assert torch.equal(found["native"].sequences, found["torch"].sequences)


def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_run(tmp_path):
    through = grpo()
    for _ in range(2):
        through.train_step(PROMPTS)
    through.save(tmp_path / "checkpoint")
    resumed = GRPO.from_checkpoint(tmp_path / "checkpoint", tiny_llama(seed=1), reward_fn=fours)
    assert isinstance(resumed.engine, Engine)
    for trainer in (through, resumed):
        trainer.train_step(PROMPTS)
    assert completions(through) == completions(resumed)
    assert_same_weights(through.model, resumed.model)


def test_the_engine_is_created_once():
    trainer = grpo()
    engine = trainer.engine
    for _ in range(3):
        trainer.train_step(PROMPTS)
    assert trainer.engine is engine and engine.policy_version == 3


def test_sampling_memory_is_released_before_the_update():
    trainer = grpo()
    held = []
    update = trainer.update
    trainer.update = lambda: (held.append(trainer.engine.memory), update())[1]
    for _ in range(2):
        trainer.train_step(PROMPTS)
    assert [memory["kv_committed_bytes"] + memory["workspace_committed_bytes"] for memory in held] == [0, 0]
    assert trainer.evaluate(PROMPTS) >= 0
    assert trainer.engine.memory["kv_committed_bytes"] == 0


@pytest.mark.parametrize(
    ("compute", "format"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("torch", "float32")]
)
@pytest.mark.parametrize("make_model", [tiny_llama, lambda: with_lora(tiny_llama(), target_modules=["v_proj"])])
def test_auto_samples_in_the_format_of_the_matmuls(compute, format, make_model):
    trainer = grpo(make_model(), compute=compute)
    assert trainer.engine.formats["layers.0.o"] == format
    step = trainer.train_step(PROMPTS)
    # With bfloat16 weights the remaining difference is that training also rounds activations.
    assert 0 <= step["sampler/logprob_difference"] < (0.02 if format == "bfloat16" else 1e-5)


def test_the_engine_argument_overrides_the_config():
    assert isinstance(grpo(config=GRPOConfig(engine="torch")).engine, TorchEngine)
    assert isinstance(grpo(config=GRPOConfig(engine="torch"), engine="native").engine, Engine)
    assert grpo(engine="torch").config.engine == "torch"


def test_unsupported_models_fall_back_to_torch_with_one_warning():
    import peft

    def model():
        settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        return peft.get_peft_model(tiny_llama(), settings)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = grpo(model(), stop_token_ids=[EOS])
        for _ in range(2):
            trainer.train_step([[5], [6], [7]])
    warned = [w for w in caught if "native engine" in str(w.message)]
    assert len(warned) == 1 and "GRPO: torch samples" in str(warned[0].message) and warned[0].filename == __file__
    with pytest.raises(WhetValueError, match=mentions("learned", "prompts")):
        grpo(model(), engine="native")


@pytest.mark.parametrize("name", ["native", "torch"])
def test_rewards_get_text_before_stop_strings_and_all_tokens_are_trained(name):
    seen = []

    def reward(completions, completion_ids):
        seen.extend(zip(completions, completion_ids, strict=True))
        return [float(len(text)) for text in completions]

    tokenizer = letters_tokenizer()
    settings = {"stop": ["ab", "c"], "min_new_tokens": 2, "max_new_tokens": 12, "engine": name}
    trainer = grpo(reward_fn=reward, tokenizer=tokenizer, **settings)
    step = trainer.train_step(PROMPTS)
    stopped = 0
    for text, ids in seen:
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        assert whole.startswith(text) and len(ids) >= 2
        end = whole[len(text) :]
        assert end in ("", "ab", "c")
        stopped += end != ""
    assert stopped > 0 and math.isfinite(step["loss"])
    assert completions(trainer) == [text for text, _ in seen]
    best = BestOfN(tiny_llama(), reward, tokenizer=tokenizer, n=4, **settings)
    sequences, _, _ = best.generate([[5]], return_all=True)
    assert sequences.shape[1] > 1
    without = grpo(**settings)
    with pytest.raises(WhetValueError, match=mentions("stop", "('ab', 'c')", "tokenizer")):
        without.train_step(PROMPTS)


@pytest.mark.parametrize(
    "settings",
    [{"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"logit_bias": {4: 2.0}}],
)
def test_a_modified_distribution_is_measured_and_corrected(settings):
    """GRPO's log-probs are of the model's distribution, the engine's of the modified distribution."""
    step = grpo(max_new_tokens=8, sampler_correction="token_truncate", **settings).train_step(PROMPTS)
    assert step["sampler/logprob_difference"] > 1e-3 and step["sampler/importance_weight"] != 1
    trainer = OnlineDPO(tiny_llama(), reward_fn=fours, max_new_tokens=8, **settings)
    assert "sampler/logprob_difference" not in trainer.train_step(PROMPTS)


def test_the_samplers_experts_are_replayed():
    """The sampler multiplies 8-bit integers, the learner floats: at near ties their routers choose other experts."""

    def step(replay: bool, weights: str = "int8") -> dict[str, float]:
        base = pack_base(open_module(tiny_model("qwen3_moe", num_experts=16, num_experts_per_tok=4)), weights=weights)
        trainer = grpo(
            Learner(base, lora_rank=2), max_new_tokens=40, group_size=8, router_replay=replay, stop_token_ids=[0]
        )
        return trainer.train_step(PROMPTS)

    replayed, chosen, exact = step(True), step(False), step(True, "float32")
    assert 0.01 < replayed["sampler/replaced_experts"] < 0.5 and "sampler/replaced_experts" not in chosen
    assert replayed["sampler/logprob_difference"] < chosen["sampler/logprob_difference"]
    assert exact["sampler/replaced_experts"] < 0.01 and exact["sampler/logprob_difference_max"] < 1e-3


def test_the_samplers_experts_are_replayed_on_torch_modules():
    def step(**settings: Any) -> dict[str, float]:
        model = tiny_model("qwen3_moe", num_experts=16, num_experts_per_tok=4).requires_grad_(True)
        trainer = grpo(model, max_new_tokens=40, group_size=8, stop_token_ids=[0], **settings)
        return trainer.train_step(PROMPTS)

    metrics = step(rollout_weights="int8")
    assert 0.01 < metrics["sampler/replaced_experts"] < 0.5
    for settings in ({"router_replay": False}, {"compute": "torch"}, {"engine": "torch"}):
        assert "sampler/replaced_experts" not in step(**settings)


FILTERS = [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"min_new_tokens": 4}, {"top_k": 9, "top_p": 0.8, "beta": 0.1}]


def adapters_of(model, kind):
    """Return a model to train: all weights, a learner of new adapters on them, or a module that torch computes."""
    return Learner(pack_base(open_module(model), weights="float32"), lora_rank=2) if kind == "learner" else model


@pytest.mark.parametrize("settings", FILTERS, ids=str)
@pytest.mark.parametrize("kind, engine", [("kernels", "native"), ("learner", "native"), ("torch", "torch")])
def test_the_trained_distribution_is_the_filtered_one(settings, kind, engine):
    """Log-probs of policy and sampler agree, for tokens that were drawn from some of the vocabulary."""
    compute = {"kernels": "float32", "learner": "auto", "torch": "torch"}[kind]
    model = adapters_of(tiny_llama(initializer_range=0.3), kind)
    trainer = grpo(model, compute=compute, engine=engine, max_new_tokens=8, temperature=1.3, **settings)
    for _ in range(2):
        metrics = trainer.train_step(PROMPTS)
        assert metrics["sampler/logprob_difference_max"] < 1e-4
        assert metrics["entropy"] < math.log(3) + 1e-3 if settings.get("top_k") == 3 else metrics["entropy"] > 0


@pytest.mark.parametrize("kind", ["kernels", "learner"])
def test_completions_follow_a_grammar_and_are_trained_under_it(kind):
    seen = []

    def reward(prompts, completions):
        seen.extend(completions)
        return [float(text.count("a")) for text in completions]

    tokenizer, end = bytewise.byte_tokenizer(), bytewise.EOS
    model = adapters_of(tiny_llama(vocab_size=end + 4, eos_token_id=end, initializer_range=0.3), kind)
    trainer = grpo(
        model, compute="auto" if kind == "learner" else "float32", tokenizer=tokenizer, reward_fn=reward,
        regex="[ab]{3,5}", stop_token_ids=[end], learning_rate=0.05, max_new_tokens=8,
    )  # fmt: skip
    steps = [trainer.train_step(PROMPTS) for _ in range(6)]
    assert all(re.fullmatch("[ab]{3,5}", text) for text in seen) and len(seen) > 12
    assert max(step["sampler/logprob_difference_max"] for step in steps) < 2e-4
    assert max(step["entropy"] for step in steps) < math.log(3)
    assert steps[-1]["mean_reward"] > steps[0]["mean_reward"]


def test_grammars_need_the_native_engine_and_a_tokenizer():
    assert_raises(WhetValueError, ("regex", "'a+'", "engine", "'torch'"), grpo, regex="a+", engine="torch")
    assert_raises(WhetValueError, ("schema and regex",), grpo, regex="a+", schema="{}")
    assert_raises(WhetValueError, ("schema", "nowhere.json", "file"), grpo, schema="nowhere.json")
    assert GRPOConfig(schema={"type": "object"}).sampling([2], 0).schema == {"type": "object"}
    assert_raises(WhetValueError, ("regex", "tokenizer"), grpo(regex="a+").train_step, PROMPTS)


@pytest.mark.parametrize(
    "format, compute, corrected, gap",
    [("float32", "float32", False, 1e-5), ("bf16", "auto", False, 0.05), ("q8_0", "float32", True, 0.2)],
)
def test_policy_and_sampler_share_a_packed_base(format, compute, corrected, gap):
    model = with_lora(frozen_model(tiny_llama(), format), target_modules="all-linear")
    trainer = grpo(model, compute=compute)
    assert isinstance(trainer.engine, Engine) and trainer.engine.base is base_of(model)
    for _ in range(2):
        metrics = trainer.train_step(PROMPTS)
        assert metrics["sampler/logprob_difference_max"] < gap
        assert ("sampler/importance_weight" in metrics) is corrected
    key = "base", id(base_of(model).core)
    [held] = {block for holder in (trainer, trainer.engine) for block in holder.memory_blocks() if block[1] == key}
    assert held == ("weights", key, base_of(model).nbytes)


def test_sampler_formats_on_a_packed_base_are_the_base_formats():
    model = with_lora(frozen_model(tiny_llama(), "q8_0"), target_modules="all-linear")
    for engine in ("native", "auto"):
        with pytest.raises(WhetValueError, match=mentions("rollout_weights", "'int8'", "packed", "'auto'")):
            grpo(model, engine=engine, rollout_weights="int8")


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings")
def test_torch_samples_if_adapters_are_outside_the_layers_of_a_packed_base():
    model = with_lora(frozen_model(tiny_llama(), "q8_0"), b_std=0.1, target_modules=["embed_tokens", "lm_head"])
    with pytest.warns(UserWarning, match=mentions("torch samples", "native engine", "engine='torch'")):
        trainer = grpo(model, compute="float32")
    assert isinstance(trainer.engine, TorchEngine)
    assert trainer.train_step(PROMPTS)["sampler/logprob_difference_max"] < 1e-4
    with pytest.raises(WhetValueError, match=mentions("embedding")):
        grpo(model, engine="native")


def test_sampler_cap_requires_an_active_correction():
    def make(base, **settings):
        return grpo(with_lora(frozen_model(tiny_llama(), base), target_modules="all-linear"), **settings)

    capped, plain = (make("q8_0", **settings).train_step(PROMPTS) for settings in ({"sampler_cap": 0.5}, {}))
    assert capped["sampler/importance_weight"] == pytest.approx(0.5) and plain[
        "sampler/importance_weight"
    ] == pytest.approx(1, abs=0.05)
    for model in (lambda: make("bf16", sampler_cap=2.0), lambda: grpo(sampler_cap=2.0)):
        with pytest.raises(
            WhetValueError, match=mentions("sampler_cap", "2.0", "no effect", "sampler_correction", "'auto'")
        ):
            model()
    assert "sampler/importance_weight" in make("bf16", sampler_cap=2.0, sampler_correction="token_truncate").train_step(
        PROMPTS
    )


class Lagging:
    """Engine that samples from the weights of the sync before the last."""

    def __init__(self, model, lag):
        self.engine, self.lag, self.policy_version = Engine.from_model(model, weights="float32"), lag, 0
        self.pending = []

    def sync(self, model):
        self.policy_version += 1
        self.pending.append((self.policy_version, named_arrays(model)))
        if len(self.pending) > self.lag:
            version, arrays = self.pending.pop(0)
            self.engine.sync(arrays, version=version)

    def generate(self, prompt_ids, n, sampling):
        return self.engine.generate(prompt_ids, n, sampling)


def test_completions_of_an_older_policy_are_corrected_automatically():
    for lag in (0, 1):
        model = tiny_llama()
        trainer = grpo(model, engine=Lagging(model, lag), learning_rate=0.05, compute="float32")
        steps = [trainer.train_step(PROMPTS) for _ in range(3)]
        if not lag:
            assert all("sampler/importance_weight" not in step for step in steps)
            continue
        assert all(0 < step["sampler/importance_weight"] <= 3 for step in steps)
        assert steps[0]["sampler/logprob_difference"] < 1e-5 < 1e-3 < steps[2]["sampler/logprob_difference"]
    with pytest.raises(WhetValueError, match=mentions("sampler_cap")):
        grpo(sampler_cap=2.0)
    trainer = grpo(model := tiny_llama(), engine=Lagging(model, 1), sampler_cap=2.0)
    assert trainer.train_step(PROMPTS)["sampler/importance_weight"] <= 2
    off = grpo(model := tiny_llama(), engine=Lagging(model, 1), sampler_correction="off")
    assert "sampler/importance_weight" not in off.train_step(PROMPTS)
