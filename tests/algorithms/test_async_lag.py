"""Completions sampled ahead of their step are from the versions that the plan names, however long steps take."""

import copy
import dataclasses
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from tests.raising import mentions
from tests.tiny import EOS, ScriptedEngine, TinyModel, fours, timeless, tiny_llama, with_lora

from whet import Engine, SamplingParams, StreamKey
from whet.algorithms.grpo import GRPO
from whet.algorithms.online_dpo import OnlineDPO
from whet.config.sampling import Completion
from whet.engine.session import EngineBusyError
from whet.errors import WhetError, WhetTypeError, WhetValueError
from whet.losses.terms import importance_weights
from whet.models.lora import LoraSettings, choose_adapted
from whet.models.sources.live import open_module
from whet.rollout.plan import Request, lags
from whet.rollout.stored_completions import load_completions, store_completions
from whet.training.callbacks import Callback, CheckpointCallback
from whet.training.sizes import Lengths, run_memory

ROWS = [[3 + i % 8, 4 + i % 5, 5][: 1 + i % 3] for i in range(40)]
SETTINGS = {"group_size": 4, "max_new_tokens": 12, "learning_rate": 0.02, "batch_size": 3, "compute": "float32"}
PLANS = [(1, 0), (3, 0), (2, 5), (3, 3)]
pytestmark = pytest.mark.filterwarnings("ignore:.*max_new_tokens=12 truncated")


class Log(Callback):
    """Metrics, and copies of the weights, after each step."""

    def __init__(self):
        self.metrics, self.models = [], []

    def on_train_begin(self, trainer, total_steps):
        self.models = [copy.deepcopy(trainer.model)]

    def on_step_end(self, trainer, metrics):
        self.metrics.append(timeless(metrics))
        self.models.append(copy.deepcopy(trainer.model))


def adapted():
    return with_lora(tiny_llama(), b_std=0.3, target_modules=["q_proj", "down_proj"])


def make(model, log=None, reward_fn=fours, **settings):
    callbacks = [*([log] if log else []), *settings.pop("callbacks", [])]
    return GRPO(model, reward_fn=reward_fn, callbacks=callbacks, **{**SETTINGS, **settings})


def versions_of(step, lag, tokens):
    """The plan: (version, end of its tokens) of a step's completions."""
    first = max(0, step - lag)
    if not tokens:
        return [(first, 12)]
    last = max(first, step - 1)
    return [(v, 12 if v == last else tokens * (v - first + 1)) for v in range(first, last + 1)]


def expected(trainer, models, step, prompts, lag, tokens):
    """The completions of a step, sampled one by one by engines that were made of its versions' weights."""
    seed = int(np.random.SeedSequence([0, step]).generate_state(1)[0])
    rows = {(i, j): [] for i in range(len(prompts)) for j in range(4)}
    over, versions, start = set(), {key: [] for key in rows}, 0
    for segment, (version, end) in enumerate(versions_of(step, lag, tokens)):
        engine = Engine.from_model(models[version], weights="float32")
        own = seed if segment == 0 else int(np.random.SeedSequence([seed, segment]).generate_state(1)[0])
        params = SamplingParams(max_new_tokens=min(end, 12) - start, stop_token_ids=[EOS], seed=own)
        for key, ids in rows.items():
            if key not in over and params.max_new_tokens > 0:
                [[found]] = engine.generate([[*prompts[key[0]], *ids]], 1, params, keys=[StreamKey(*key)])
                ids += found.token_ids
                versions[key] += [version] * len(found.token_ids)
                over |= {key} if found.finish_reason == "stop" else set()
        start = min(end, 12)
        if start == 12:
            break
    return [rows[key] for key in sorted(rows)], [versions[key] for key in sorted(rows)]


@pytest.mark.parametrize(("lag", "tokens"), PLANS)
@pytest.mark.parametrize("build", [tiny_llama, adapted])
def test_each_token_is_of_the_version_that_the_plan_names(build, lag, tokens):
    log, seen, prompts = Log(), [], []

    def reward(completions, prompts):
        seen.append((list(prompts), [c.tolist() for c in completions]))
        return fours(completions)

    trainer = make(build(), log, reward, async_lag=lag, async_tokens=tokens)
    trainer.train(ROWS, steps=7)
    for step, (prompts, completions) in enumerate(seen):
        rows, versions = expected(trainer, log.models, step, [p.tolist() for p in prompts[::4]], lag, tokens)
        assert completions == rows
        own = step - np.concatenate([np.array(v) for v in versions])
        assert log.metrics[step]["sampler/lag_max"] == own.max() <= lag
        assert log.metrics[step]["sampler/lag_mean"] == pytest.approx(own.mean())
        assert step == 0 or own.min() >= 1
    assert log.metrics[-1]["sampler/logprob_difference"] > 1e-4


@pytest.mark.parametrize(("lag", "tokens"), PLANS)
def test_results_do_not_depend_on_time(lag, tokens, monkeypatch):
    logs = [Log(), Log(), Log()]
    make(tiny_llama(), logs[0], async_lag=lag, async_tokens=tokens).train(ROWS, steps=6)

    def slow(completions):
        time.sleep(0.05)
        return fours(completions)

    slow.__name__ = "fours"
    make(tiny_llama(), logs[1], slow, async_lag=lag, async_tokens=tokens).train(ROWS, steps=6)
    trainer = make(tiny_llama(), logs[2], async_lag=lag, async_tokens=tokens)
    generate = trainer.engine.generate

    def slow_generate(*arguments, **options):
        time.sleep(0.05)
        return generate(*arguments, **options)

    monkeypatch.setattr(trainer.engine, "generate", slow_generate)
    metrics = trainer.train(ROWS, steps=6)
    assert logs[0].metrics == logs[1].metrics == logs[2].metrics
    assert metrics["time/wait_s"] > 0 and metrics["sampler/idle_time_s"] >= 0


class Evaluates(Callback):
    def on_step_end(self, trainer, metrics):
        trainer.evaluate(ROWS[:4])


@pytest.mark.parametrize(("lag", "tokens"), PLANS)
@pytest.mark.parametrize("build", [tiny_llama, adapted])
def test_a_resumed_run_has_the_same_bits(build, lag, tokens, tmp_path):
    settings = {"async_lag": lag, "async_tokens": tokens, "top_k": 6}
    whole, log = Log(), Log()
    trainer = make(build(), whole, **settings)
    trainer.train(ROWS, steps=8)

    class Stops(Callback):
        def on_step_end(self, trainer, metrics):
            trainer.should_stop = trainer.step in (2, 3, 5)

    saves = CheckpointCallback(tmp_path, every=1)
    stopping = {**settings, "callbacks": [Evaluates(), Stops(), saves]}
    make(build(), log, **stopping).train(ROWS, steps=8)
    while len(log.metrics) < 8:
        newest = max(tmp_path.glob("step-*"))
        model = build()
        callbacks = [log, Evaluates(), Stops(), CheckpointCallback(tmp_path, every=1)]
        resumed = GRPO.from_checkpoint(newest, model, reward_fn=fours, callbacks=callbacks)
        assert resumed.config.async_lag == lag
        resumed.train(ROWS, steps=8 - resumed.step)
    assert log.metrics == whole.metrics
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name])


def test_correction_weighs_tokens_by_the_trained_policy_over_the_version_that_sampled_them(monkeypatch):
    seen = []

    def record(old, sampler, mask, **options):
        seen.append((old, sampler, mask, options))
        return importance_weights(old, sampler, mask, **options)

    monkeypatch.setattr("whet.algorithms.grpo.importance_weights", record)
    log, off = Log(), Log()
    make(tiny_llama(), log, async_lag=2).train(ROWS, steps=4)
    assert {options["correction"] for *_, options in seen} == {"token_truncate"}
    assert max(np.abs(old - sampler)[mask].max() for old, sampler, mask, _ in seen) > 0.01
    corrected = ["sampler/importance_weight" in metrics for metrics in log.metrics]
    assert corrected == [False, True, True, True]  # the first step's completions are not older
    make(tiny_llama(), off, async_lag=2, sampler_correction="off").train(ROWS, steps=4)
    assert off.metrics[0] == log.metrics[0] and off.metrics[1]["loss"] != log.metrics[1]["loss"]


def test_a_reward_error_leaves_a_checkpoint_that_continues_to_the_same_bits(tmp_path):
    whole, log = Log(), Log()
    make(tiny_llama(), whole, async_lag=2).train(ROWS, steps=6)
    calls = []

    def broken(completions):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("no judge")
        return fours(completions)

    broken.__name__ = "fours"
    saves = [CheckpointCallback(tmp_path, every=100)]
    trainer = make(tiny_llama(), log, broken, async_lag=2, callbacks=saves)
    with pytest.raises(WhetError, match="no judge"):
        trainer.train(ROWS, steps=6)
    resumed = GRPO.from_checkpoint(tmp_path / "step-000003", tiny_llama(), reward_fn=fours, callbacks=[log])
    resumed.train(ROWS, steps=3)
    assert log.metrics == whole.metrics
    trainer.train(ROWS, steps=3)  # and so does the trainer itself
    assert log.metrics[3:6] == log.metrics[6:]


def test_a_sampling_error_ends_the_run_without_a_checkpoint(tmp_path, monkeypatch):
    trainer = make(tiny_llama(), async_lag=2, callbacks=[CheckpointCallback(tmp_path, every=2)])
    generate, calls = trainer.engine.generate, []

    def broken(*arguments, **options):
        calls.append(1)
        if len(calls) == 5:
            raise MemoryError("no room")
        return generate(*arguments, **options)

    monkeypatch.setattr(trainer.engine, "generate", broken)
    with pytest.raises(MemoryError, match="no room"):
        trainer.train(ROWS, steps=8)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000002"]


def test_weights_that_cannot_be_sampled_end_the_run_with_a_checkpoint(tmp_path):
    class Breaks(Callback):
        def on_step_end(self, trainer, metrics):
            if trainer.step == 2:
                next(trainer.model.parameters()).data[0, 0] = float("nan")

    trainer = make(tiny_llama(), async_lag=2, callbacks=[Breaks(), CheckpointCallback(tmp_path, every=100)])
    with pytest.raises(WhetValueError, match="NaN"):
        trainer.train(ROWS, steps=8)
    assert (tmp_path / "step-000002").is_dir()
    with pytest.raises(WhetValueError, match="NaN"):  # again, and does not wait for ever
        trainer.train(ROWS, steps=8)


def test_rows_that_changed_are_sampled_again():
    log, fresh = Log(), Log()

    class Stops(Callback):
        def on_step_end(self, trainer, metrics):
            trainer.should_stop = trainer.step == 2

    other = [[7], [8, 9], [10]] * 9
    trainer = make(tiny_llama(), log, async_lag=2, callbacks=[Stops()])
    trainer.train(ROWS, steps=8)
    trainer.train(other, steps=3)
    assert log.metrics[2]["sampler/lag_max"] == 0  # not the completions of the first rows
    assert trainer.last_completions[0]["step"] == 5
    assert fresh.metrics == []


def test_online_dpo_samples_ahead():
    def run(**settings):
        log = Log()
        trainer = OnlineDPO(
            tiny_llama(), tiny_llama(), reward_fn=fours, max_new_tokens=12, learning_rate=0.02, batch_size=3,
            callbacks=[log], **settings,
        )  # fmt: skip
        trainer.train(ROWS, steps=4)
        return log.metrics

    ahead = run(async_lag=2)
    assert ahead == run(async_lag=2) and ahead[-1]["sampler/lag_max"] == 2
    assert "sampler/lag_max" not in run()[0]


def test_settings_without_effect_are_refused():
    with pytest.raises(WhetValueError, match=mentions("async_lag", 1, "'torch'", "no effect")):
        make(tiny_llama(), async_lag=1, engine="torch")
    with pytest.raises(WhetValueError, match=mentions("GRPO", "async_lag", 1, "TorchEngine", "engine='native'")):
        make(TinyModel(), async_lag=1, compute="auto")
    with pytest.raises(WhetValueError, match=mentions("GRPO", "async_lag", "ScriptedEngine", "snapshot(model)")):
        make(TinyModel(), async_lag=1, compute="auto", engine=ScriptedEngine([]))
    for lag in (0, 1):
        with pytest.raises(WhetValueError, match=mentions("async_tokens", 4, "no effect", f"async_lag is {lag}")):
            make(tiny_llama(), async_lag=lag, async_tokens=4)
    for name, value in {"presence_penalty": 0.5, "min_new_tokens": 2, "stop": ["a"], "regex": "a+"}.items():
        with pytest.raises(WhetValueError, match=mentions("async_tokens", 4, name, value)):
            make(tiny_llama(), async_lag=2, async_tokens=4, **{name: value})
    with pytest.raises(WhetTypeError, match=mentions("GRPO", "async_lag", 1, "train(dataset)")):
        make(tiny_llama(), async_lag=1).train_step([[3], [4]])
    trainer = make(tiny_llama(), async_lag=2)
    trainer.config.async_lag = 0
    with pytest.raises(WhetValueError, match=mentions("async_lag", 0, 2)):
        trainer.train(ROWS, steps=1)


def test_a_sample_of_the_current_policy_waits_for_the_sampler():
    class Samples(Callback):
        def on_step_end(self, trainer, metrics):
            rollout = trainer.sample([[3, 4]], 4)
            engine = Engine.from_model(trainer.model, weights="float32")
            seed = int(np.random.SeedSequence([0, trainer.step]).generate_state(1)[0])
            params = SamplingParams(max_new_tokens=12, stop_token_ids=[EOS], seed=seed)
            assert rollout.completion_ids == [c.token_ids for c in engine.generate([[3, 4]], 4, params)[0]]

    make(tiny_llama(), async_lag=2, callbacks=[Samples()]).train(ROWS, steps=5)


def test_rewards_in_child_processes_fork_next_to_the_sampler():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, guarded = Log(), Log()
        make(tiny_llama(), plain, async_lag=1).train(ROWS, steps=4)
        make(tiny_llama(), guarded, async_lag=1, reward_timeout_s=30.0).train(ROWS, steps=4)
    assert plain.metrics == guarded.metrics


def test_a_snapshot_is_not_changed_by_training_and_by_a_busy_engine():
    model = adapted()
    engine = Engine.from_model(model, weights="float32")
    before = engine.generate([[3, 4]], 4, SamplingParams(max_new_tokens=12))
    snapshot = engine.snapshot(model)
    assert not list(snapshot.slices())  # adapters only
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2)
    whole = engine.snapshot(model)
    assert list(whole.slices())  # the base has changed
    engine.sync(whole)
    changed = engine.generate([[3, 4]], 4, SamplingParams(max_new_tokens=12))
    assert [c.token_ids for c in changed[0]] != [c.token_ids for c in before[0]]
    call = engine.open_prompt([3, 4])
    with pytest.raises(EngineBusyError):
        engine.sync(whole)
    call.close()
    other = Engine.from_model(tiny_llama(hidden_size=32), weights="float32")
    with pytest.raises(WhetValueError, match=mentions("Engine.snapshot", "model")):
        other.snapshot(model)


def test_completions_keep_their_bits_in_a_checkpoint():
    engine = Engine.from_model(tiny_llama(), weights="float32")
    params = SamplingParams(max_new_tokens=9, top_k=5, kept_tokens=True)
    [first, second] = engine.generate([[3, 4]], 2, params)[0]
    second.policy_version, second.policy_versions = 4, [3] * 4 + [4] * (len(second.token_ids) - 4)
    second.experts = np.arange(2 * 3 * 2, dtype=np.uint16).reshape(2, 3, 2)
    third = Completion([5], None, "length", 2, text="é")
    found = {(0, 0): first, (0, 1): second}
    loaded, header = load_completions(store_completions(found, {"first": 7}))
    assert loaded.keys() == found.keys() and header["first"] == 7
    for key, completion in found.items():
        assert loaded[key].token_ids == completion.token_ids and loaded[key].logprobs == completion.logprobs
        assert [loaded[key].kept_tokens[t].tolist() for t in range(len(completion.token_ids))] == [
            completion.kept_tokens[t].tolist() for t in range(len(completion.token_ids))
        ]
    assert loaded[0, 1].policy_versions == second.policy_versions
    assert np.array_equal(loaded[0, 1].experts, second.experts) and loaded[0, 1].experts.dtype == np.uint16
    assert load_completions(store_completions({(1, 0): third}, {}))[0] == {(1, 0): third}
    assert lags(loaded[0, 1], 5).tolist() == [2] * 4 + [1] * (len(second.token_ids) - 4)
    assert Request([[1]], 2, params).digest() != Request([[1]], 3, params).digest()


@pytest.mark.parametrize("lora", [False, True])
def test_kept_versions_use_the_estimated_memory(lora, monkeypatch):
    model = adapted() if lora else tiny_llama()
    seen, waited = [], threading.Event()

    def reward(completions):
        seen.append(sum(n for part, _, n in trainer.memory_blocks() if part == "kept_versions"))
        if len(seen) == 3:
            waited.set()
        return fours(completions)

    trainer = make(model, None, reward, async_lag=3)
    generate, calls = trainer.engine.generate, []

    def slow(*arguments, **options):
        calls.append(1)
        if len(calls) == 4:  # of step 3, while the versions of steps 1 and 2 wait
            waited.wait(60)
        return generate(*arguments, **options)

    monkeypatch.setattr(trainer.engine, "generate", slow)
    trainer.train(ROWS, steps=7)
    adapters = choose_adapted(open_module(tiny_llama()), LoraSettings(4, ["q_proj", "down_proj"])) if lora else None
    options = {"adapters": adapters} if lora else {}
    found, before = (
        run_memory(open_module(tiny_llama()), config, Lengths(3, 12), interpreter=0, **options)
        for config in (trainer.config, dataclasses.replace(trainer.config, async_lag=0))
    )
    assert seen[2] == max(seen) == found.parts["kept_versions"] > 0
    assert {"kv_cache", "workspace", "sampler_weights"} <= found.parts.keys() and not found.sampling
    assert found.total > before.total and "kept_versions" not in before.parts
    pool = run_memory(
        open_module(tiny_llama()), dataclasses.replace(trainer.config, engine="ray"), Lengths(3, 12), interpreter=0,
        **options,
    )  # fmt: skip
    assert pool.parts["kept_versions"] == found.parts["kept_versions"] // 2 * 3
