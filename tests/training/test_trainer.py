"""Arguments of the trainer, modes and stop tokens."""

from __future__ import annotations

import pytest
from tests.raising import assert_raises, mentions
from tests.training.trainers import Net, RecordingLogger, llama, ones, sft

from whet.algorithms import DPO, GRPO, SFT, BestOfN, OnlineDPO
from whet.config import SFTConfig
from whet.errors import WhetTypeError, WhetValueError
from whet.nn.modules import module_mode, stop_token_ids


def test_invalid_constructor_arguments_are_rejected():
    assert_raises(WhetTypeError, ("SFT", "model", "function", "an nn.Module"), SFT, ones)
    assert_raises(WhetTypeError, ("'lerning_rate'", "learning_rate"), sft, lerning_rate=1.0)
    assert_raises(WhetTypeError, ("learning_rate", "'1e-4'", "float"), sft, learning_rate="1e-4")
    assert_raises(WhetValueError, ("learning_rate", "-1", "a finite number >= 0"), sft, learning_rate=-1)
    assert_raises(WhetTypeError, ("config", "SFTConfig", "DPOConfig"), DPO, Net(), config=SFTConfig())
    assert sft(config=SFTConfig(weight_decay=0.1), learning_rate=0.5).config.weight_decay == 0.1


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"logger": "wandb"}, ("SFT", "logger", "'wandb'", "method log")),
        ({"logger": [RecordingLogger(), print]}, ("SFT", "logger", "<built-in function print>")),
        ({"callbacks": len}, ("SFT", "callbacks", "<built-in function len>", "on_step_end")),
    ],
)
def test_invalid_loggers_and_callbacks_are_rejected(arguments, facts):
    assert_raises(WhetTypeError, facts, sft, **arguments)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [(SFT, {}), (GRPO, {"reward_fn": ones, "beta": 0.0}), (DPO, {"reference_free": True}), (DPO, {"loss_type": "sft"}),
     (OnlineDPO, {"reward_fn": ones, "reference_free": True})],
)  # fmt: skip
def test_a_reference_without_effect_is_rejected(algorithm, settings):
    with pytest.raises(WhetValueError, match=mentions(algorithm.__name__, "ref_model", "no effect")):
        algorithm(Net(), Net(), **settings)


def test_a_resumed_run_may_drop_its_reference(tmp_path):
    GRPO(Net(), Net(), reward_fn=ones, beta=0.1, kl_estimator="k1").save(tmp_path / "c")
    kept = GRPO.from_checkpoint(tmp_path / "c", reward_fn=ones)
    assert kept.ref_model is not None and kept.config.beta == 0.1
    plain = GRPO.from_checkpoint(tmp_path / "c", reward_fn=ones, beta=0.0, kl_estimator="k3")
    assert plain.ref_model is None and plain.config.beta == 0.0


def test_modes_are_restored_per_module():
    model = Net()
    model.dropout.eval()
    with module_mode(model, training=False):
        assert not any(member.training for member in model.modules())
    assert model.training and model.mixer.training and not model.dropout.training


def test_stop_tokens_of_model_and_tokenizer():
    class Tokenizer:
        eos_token_id = 9

    model = llama()
    assert stop_token_ids(model, None) == [2]
    assert stop_token_ids(model, Tokenizer()) == [9]
    model.generation_config.eos_token_id = [2, 9]
    assert stop_token_ids(model, Tokenizer()) == [2, 9]
    assert stop_token_ids(Net(), None) == [] and stop_token_ids(Net(), Tokenizer()) == [9]
    assert stop_token_ids(model, Tokenizer(), [5, 6]) == stop_token_ids(Net(), None, (5, 6)) == [5, 6]


def test_stop_tokens_outside_the_vocabulary_are_rejected():
    class Tokenizer:
        eos_token_id = 500

        def decode(self, ids, skip_special_tokens):
            return str(ids)

    model = llama()
    n_tokens = model.config.vocab_size
    with pytest.raises(WhetValueError, match=mentions("tokenizer", "eos_token_id", 500, n_tokens)):
        GRPO(model, reward_fn=ones, tokenizer=Tokenizer(), max_new_tokens=2).train_step([[4, 5]])
    with pytest.raises(WhetValueError, match=mentions("stop_token_ids", 500, n_tokens)):
        BestOfN(model, reward_fn=ones, stop_token_ids=[2, 500], max_new_tokens=2).generate([[4, 5]])
    model.generation_config.eos_token_id = [2, 500]
    with pytest.raises(WhetValueError, match=mentions("model", "eos_token_id", 500, n_tokens, "generation_config")):
        stop_token_ids(model, None)
    assert stop_token_ids(model, None, [n_tokens - 1]) == [n_tokens - 1]
    model.resize_token_embeddings(501)
    assert stop_token_ids(model, None) == [2, 500]
