"""A pool of workers samples the completions of an engine in this process, also if workers fail."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from functools import partial

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.algorithms.test_environments import ROWS, SETTINGS, Fails, model_of
from tests.cli.conftest import write_tiny_model
from tests.isas import usable_isas
from tests.raising import mentions
from tests.rollout.test_episodes import TEMPLATE
from tests.tiny import changed, fours, timeless, tiny_llama, with_lora

import whet
from whet import Engine, SamplingParams, StreamKey
from whet.algorithms.grpo import GRPO
from whet.errors import WhetError, WhetValueError
from whet.models.tokenizers import load_tokenizer
from whet.nn.frozen import frozen_model
from whet.rollout import ray_pool
from whet.rollout.ray_pool import RayPool, split_groups
from whet.tasks.environment import Step
from whet.training.callbacks import Callback

pytestmark = pytest.mark.needs("ray")
PROMPTS = [[3, 5, 7], [4, 4], [9], [6, 8, 3, 2], [5]]
ISAS = usable_isas()
SAMPLING = SamplingParams(max_new_tokens=12, seed=3)


@pytest.fixture(scope="module")
def cluster():
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield ray
    ray.shutdown()


def ids_of(groups):
    return [[(c.token_ids, c.logprobs, c.finish_reason, c.policy_version) for c in group] for group in groups]


def pool_of(model, workers, **options):
    return RayPool(model, workers=workers, threads=1, weights="float32", **options)


@given(n_prompts=st.integers(1, 40), n=st.integers(1, 20), n_workers=st.integers(1, 40))
def test_every_sample_is_in_one_range(n_prompts, n, n_workers):
    parts = split_groups(n_prompts, n, n_workers)
    assert sorted((p.prompt, i) for p in parts for i in range(p.first, p.first + p.count)) == [
        (prompt, i) for prompt in range(n_prompts) for i in range(n)
    ]
    assert len(parts) >= min(n_workers, n_prompts * n) or n_prompts >= n_workers


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_pool_samples_the_completions_of_one_engine(cluster, workers):
    model = tiny_llama()
    pool = pool_of(model, workers)
    try:
        with (
            Engine.from_model(model, weights="float32") as engine,
            pytest.raises(WhetValueError, match=mentions("RayPool", "weights", "sync(model)")),
        ):
            pool.generate(PROMPTS, 1, SAMPLING)
        for seed in (0, 1):
            other = changed(model, seed)
            pool.sync(other)
            engine = Engine.from_model(model, weights="float32")
            engine.sync(other, version=pool.policy_version)
            assert ids_of(pool.generate(PROMPTS, 4, SAMPLING)) == ids_of(engine.generate(PROMPTS, 4, SAMPLING))
            assert ids_of(pool.generate(PROMPTS[:1], 7, SAMPLING)) == ids_of(engine.generate(PROMPTS[:1], 7, SAMPLING))
            keys = [StreamKey(8, 2), StreamKey(1, 5)]
            of_keys = engine.generate(PROMPTS[:2], 3, SAMPLING, keys=keys)
            assert ids_of(pool.generate(PROMPTS[:2], 3, SAMPLING, keys=keys)) == ids_of(of_keys)
        assert pool.generate([], 2, SAMPLING) == []
    finally:
        pool.close()


class MixedPool(RayPool):
    """Pool that alternates instruction sets between workers."""

    def _environment(self):
        self.isas = [*getattr(self, "isas", []), ISAS[len(getattr(self, "isas", [])) % len(ISAS)]]
        return {**super()._environment(), "WHET_ISA": self.isas[-1]}


@pytest.mark.skipif(len(ISAS) < 2, reason="the processor has one instruction set")
@pytest.mark.parametrize("weights", ["float32", "bf16", "int8"])
def test_workers_with_two_instruction_sets_are_bit_identical(cluster, weights):
    model = tiny_llama()
    pool = MixedPool(model, workers=2, threads=1, weights=weights)
    try:
        found = cluster.get([actor.__ray_call__.remote(lambda worker: whet.isa()) for actor in pool.actors])
        assert found == ISAS[:2]
        pool.sync(model)
        engine = Engine.from_model(model, weights=weights)
        engine.policy_version = 1
        assert ids_of(pool.generate(PROMPTS, 4, SAMPLING)) == ids_of(engine.generate(PROMPTS, 4, SAMPLING))
        assert ids_of(pool.generate(PROMPTS[:1], 7, SAMPLING)) == ids_of(engine.generate(PROMPTS[:1], 7, SAMPLING))
    finally:
        pool.close()


@pytest.mark.parametrize("options", [{}, {"weights": "int8", "head": "bf16"}])
def test_weights_rounded_to_bfloat16_are_sent_as_bfloat16(cluster, options):
    model = tiny_llama()
    pool = RayPool(model, workers=1, threads=1, **options)
    try:
        other = changed(model)
        pool.sync(other)
        pool.load()
        arrays = cluster.get(pool._policy.weights[0]).arrays
        narrow = {name for name, array in arrays.items() if array.dtype == "uint16"}
        wide = {name for name, array in arrays.items() if array.ndim == 2} - narrow
        assert {"lm_head.weight"} <= narrow and bool(wide) == ("weights" in options)
        engine = Engine.from_model(other, **options)
        engine.policy_version = 1
        assert ids_of(pool.generate(PROMPTS, 4, SAMPLING)) == ids_of(engine.generate(PROMPTS, 4, SAMPLING))
    finally:
        pool.close()


def test_later_syncs_send_only_adapters(cluster):
    model = with_lora(tiny_llama(), b_std=0.3, target_modules=["q_proj", "down_proj"])
    pool = pool_of(model, 2)
    try:
        for seed in range(3):
            torch.manual_seed(seed)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter.normal_(std=0.3)
            pool.sync(model)
            assert pool._policy.weights_version == 1 and pool._policy.version == seed + 1
            engine = Engine.from_model(model, weights="float32")
            engine.sync(model, version=seed + 1)
            assert ids_of(pool.generate(PROMPTS, 2, SAMPLING)) == ids_of(engine.generate(PROMPTS, 2, SAMPLING))
    finally:
        pool.close()


def workers_of(cluster):
    """Return process ids of the pool's workers, not of other Ray clusters."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ray::Worker" in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


@pytest.mark.parametrize("killed", ["one", "all", "at sync"])
def test_killed_workers_do_not_change_completions(cluster, killed):
    model = tiny_llama(num_hidden_layers=4, hidden_size=64, max_position_embeddings=2048)
    long = SamplingParams(max_new_tokens=2000, seed=3)
    pool = pool_of(model, 2)
    try:
        pool.sync(model)
        engine = Engine.from_model(model, weights="float32")
        engine.sync(model)
        expected = ids_of(engine.generate(PROMPTS, 4, long))
        pool.generate(PROMPTS, 1, SAMPLING)
        pids = workers_of(cluster)
        assert len(pids) == 2

        def kill():
            time.sleep(0.0 if killed == "at sync" else 0.1)
            for pid in pids[: 1 if killed == "one" else 2]:
                os.kill(pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        if killed == "at sync":
            pool.sync(model)
            engine.sync(model)
            expected = ids_of(engine.generate(PROMPTS, 4, long))
        assert ids_of(pool.generate(PROMPTS, 4, long)) == expected
        thread.join()
        assert not set(workers_of(cluster)) & set(pids[: 1 if killed == "one" else 2])
    finally:
        pool.close()


def test_a_hanging_worker_is_replaced(cluster):
    model = tiny_llama()
    pool = pool_of(model, 2, call_timeout_s=4)
    try:
        pool.sync(model)
        expected = ids_of(pool.generate(PROMPTS, 4, SAMPLING))
        stopped = workers_of(cluster)[0]
        os.kill(stopped, signal.SIGSTOP)
        assert ids_of(pool.generate(PROMPTS, 4, SAMPLING)) == expected
        end = time.monotonic() + 30
        while stopped in workers_of(cluster) and time.monotonic() < end:
            time.sleep(0.2)
    finally:
        pool.close()
        with contextlib.suppress(ProcessLookupError):  # Ray cannot kill a stopped process
            os.kill(stopped, signal.SIGKILL)


def test_a_lost_node_does_not_change_completions():
    ran = subprocess.run([sys.executable, "-m", "tests.scale.nodes"], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines()[-1] == "same lost same"


def test_worker_errors_are_raised_unchanged(cluster):
    model = tiny_llama()
    with pytest.raises(WhetError, match=mentions("9 workers", "1 threads", "9 CPUs", "the cluster has 4")):
        pool_of(model, 9)
    with pytest.raises(WhetValueError, match=mentions("RayPool", "workers", 0)):
        pool_of(model, 0)
    holder = pool_of(model, 3)
    try:
        with pytest.raises(WhetError, match=mentions("after 3 s", "2 workers")):
            pool_of(model, 2, start_timeout_s=3)
        holder.sync(model)
        with pytest.raises(WhetValueError, match=mentions("prompt_ids[0]", "token 999")):
            holder.generate([[999]], 1, SAMPLING)
        assert len(holder.generate(PROMPTS, 1, SAMPLING)) == 5
    finally:
        holder.close()


def test_a_closed_pool_and_a_model_of_another_shape_are_rejected(cluster):
    pool = pool_of(tiny_llama(), 1)
    pool.sync(tiny_llama())
    try:
        with pytest.raises(WhetValueError, match=mentions("RayPool.sync", "model", "engine")):
            pool.sync(tiny_llama(hidden_size=32, intermediate_size=32))
        assert ids_of(pool.generate(PROMPTS, 1, SAMPLING))  # with the previous weights
    finally:
        pool.close()
    with pytest.raises(WhetValueError, match=mentions("RayPool.generate", "closed")):
        pool.generate(PROMPTS, 1, SAMPLING)


def test_too_many_workers_are_rejected_before_ray_starts(monkeypatch):
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray is started"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(WhetError, match=mentions("10000 workers", "1 threads", "10000 CPUs")):
        RayPool(tiny_llama(), workers=10_000)


def test_a_cluster_that_requires_a_token_is_reported(monkeypatch):
    import ray

    def refuse(**_):
        raise ConnectionError("Failed to connect") from RuntimeError("AuthenticationError: RPC error: InvalidAuthToken")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(WhetError, match=mentions("'auto'", "RAY_AUTH_MODE=token")):
        RayPool(tiny_llama(), workers=1, address="auto")


@pytest.mark.parametrize("name", ["Whet", "Python"])
def test_workers_of_another_version_are_rejected(cluster, monkeypatch, name):
    own = ray_pool.versions()
    monkeypatch.setattr(ray_pool, "versions", lambda: own | {name: "0.0"})
    with pytest.raises(WhetError, match=mentions("worker", f"{name} {own[name]}", "0.0")):
        pool_of(tiny_llama(), 1)


def test_grpo_steps_equal_the_native_engine(cluster):
    runs = []
    for settings in ({"engine": "native"}, {"engine": "ray", "rollout_workers": 2}):
        trainer = GRPO(
            tiny_llama(), reward_fn=fours, group_size=4, max_new_tokens=5, learning_rate=0.01, **settings
        )  # fmt: skip
        runs.append([timeless(trainer.train_step(PROMPTS)) for _ in range(3)] + [trainer.last_completions])
        getattr(trainer.engine, "close", lambda: None)()
    assert runs[0] == runs[1]
    with pytest.raises(WhetValueError, match=mentions("rollout_workers", 3, "no effect", "'auto'", "'ray'")):
        GRPO(tiny_llama(), reward_fn=fours, rollout_workers=3)


@pytest.mark.parametrize(("address", "variable"), [("127.0.0.1:9", ""), ("", "127.0.0.1:9")])
def test_a_missing_cluster_is_rejected(address, variable):
    code = f"""
from tests.tiny import tiny_llama
from whet.rollout.ray_pool import RayPool
RayPool(tiny_llama(), workers=1, address={address!r}, weights="float32")
"""
    environment = {**os.environ, "RAY_ADDRESS": variable}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert "there is no Ray cluster at '127.0.0.1:9'" in ran.stderr.splitlines()[-1]


@pytest.mark.parametrize("base", ["q8_0", "q4_k_m"])
def test_workers_pack_a_base_from_its_file(cluster, tmp_path, base):
    sizes = {"hidden_size": 256, "intermediate_size": 256} if base == "q4_k_m" else {"hidden_size": 32}
    tiny_llama(**sizes).save_pretrained(tmp_path / "model")
    plain = frozen_model(tmp_path / "model", base)
    model = with_lora(frozen_model(tmp_path / "model", base), b_std=0.3, target_modules=["q_proj"])
    for policy in (plain, model):
        pool = RayPool(policy, workers=2, threads=1)
        try:
            with Engine.from_model(policy) as engine:
                for seed in range(2):
                    with torch.no_grad():
                        for name, parameter in policy.named_parameters():
                            if "lora_B" in name:
                                parameter.normal_(std=0.3 + seed)
                    pool.sync(policy)
                    engine.sync(policy, version=seed + 1)
                    assert pool._policy.weights_version == 1
                    assert ids_of(pool.generate(PROMPTS, 2, SAMPLING)) == ids_of(engine.generate(PROMPTS, 2, SAMPLING))
        finally:
            pool.close()
    pool = RayPool(plain, workers=1, threads=1)
    try:
        pool.sync(plain)
        (tmp_path / "model").rename(tmp_path / "moved")
        with pytest.raises(WhetValueError, match=mentions("RayPool", "model", "every node")):
            pool.generate(PROMPTS, 2, SAMPLING)
    finally:
        pool.close()


def test_a_base_without_a_file_is_rejected(cluster):
    model = tiny_llama(hidden_size=32, intermediate_size=32)
    with pytest.raises(WhetValueError, match=mentions("RayPool", "base", "frozen_model")):
        pool_of(frozen_model(model, "q8_0"), 1)


def test_a_model_that_a_worker_cannot_load_is_reported(cluster, tmp_path):
    with closing(RayPool(load=partial(Engine.from_gguf, str(tmp_path / "none.gguf")), workers=1, threads=1)) as pool:
        with pytest.raises(WhetValueError, match=mentions("worker", "cannot load", "none.gguf", "every node")):
            pool.generate(PROMPTS, 1, SAMPLING)
        with pytest.raises(WhetValueError, match=mentions("RayPool.sync", "workers")):
            pool.sync(tiny_llama())
    with pytest.raises(WhetValueError, match=mentions("RayPool", "model", "load")):
        RayPool(workers=1)


@pytest.mark.parametrize("adapters", [False, True])
def test_several_versions_are_sampled_at_once(cluster, adapters):
    model = tiny_llama(num_hidden_layers=4, hidden_size=64, max_position_embeddings=1024)
    model = with_lora(model, b_std=0.3, target_modules=["q_proj"]) if adapters else model
    long = SamplingParams(max_new_tokens=600, seed=3)
    pool, engine = pool_of(model, 2), Engine.from_model(model, weights="float32")
    snapshots, expected, found = [], [], {}
    try:
        for _ in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(0.05)
            snapshots.append((pool.snapshot(model), engine.snapshot(model)))
        for version, (_, own) in enumerate(snapshots):  # snapshots are copies: the model has changed since
            engine.sync(own, version=version + 1)
            expected.append(ids_of(engine.generate(PROMPTS, 4, long)))
        assert len({str(groups) for groups in expected}) == 3
        threads = [
            threading.Thread(
                target=lambda i=i: found.update({i: ids_of(pool.generate(PROMPTS, 4, long, weights=snapshots[i][0]))})
            )
            for i in (2, 0, 1)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        os.kill(workers_of(cluster)[0], signal.SIGKILL)
        for thread in threads:
            thread.join()
        assert [found[i] for i in range(3)] == expected
        with pytest.raises(WhetValueError, match=mentions("RayPool.generate", "no weights", "sync")):
            pool.generate(PROMPTS, 1, SAMPLING)
    finally:
        pool.close()


@pytest.mark.parametrize(("lag", "tokens"), [(2, 0), (3, 4)])
@pytest.mark.parametrize("adapters", [False, True])
def test_sampling_ahead_on_a_pool_equals_the_native_engine(cluster, lag, tokens, adapters):
    rows = [[3 + i % 8, 4 + i % 5, 5][: 1 + i % 3] for i in range(40)]
    runs = []

    class Kills(Callback):
        def on_step_end(self, trainer, metrics):
            runs[-1].append(timeless(metrics))
            if trainer.step == 3:
                for pid in workers_of(cluster)[:1]:
                    os.kill(pid, signal.SIGKILL)
            trainer.evaluate(rows[:2])

    for settings in ({"engine": "native"}, {"engine": "ray", "rollout_workers": 2}):
        model = with_lora(tiny_llama(), b_std=0.3, target_modules=["q_proj"]) if adapters else tiny_llama()
        runs.append([])
        trainer = GRPO(
            model, reward_fn=fours, group_size=4, max_new_tokens=12, learning_rate=0.01, batch_size=3,
            callbacks=[Kills()], async_lag=lag, async_tokens=tokens, **settings,
        )  # fmt: skip
        trainer.train(rows, steps=8)
        getattr(trainer.engine, "close", lambda: None)()
    assert runs[0] == runs[1] and runs[0][-1]["sampler/lag_max"] == lag


class FailsOrIsEven(Fails):
    """Rewards every second row alike."""

    def reset(self, row, seed):
        self.is_even = row["name"] in "ace"
        return super().reset(row, seed)

    def step(self, message):
        return Step("more", reward=1.0) if self.is_even else super().step(message)


def test_episodes_with_filters_and_killed_workers_equal_the_native_engine(cluster, tmp_path):
    """An environment that fails in some episodes, and groups with equal rewards, which are dropped."""
    folder, runs, seen = write_tiny_model(tmp_path, TEMPLATE), [], []
    settings = {**SETTINGS, "group_size": 3, "filter_zero_variance": True, "max_turn_tokens": 4, "compute": "float32"}

    class Kills(Callback):
        def on_step_end(self, trainer, metrics):
            rows = [(row["completion"], row["reward"], row["error"]) for row in trainer.last_completions]
            seen.append(metrics)
            runs[-1].append(repr((timeless(metrics), rows)))  # NaN is the reward of a failed episode
            pids = workers_of(cluster)
            for pid in pids[: trainer.step % 3]:  # one, both, none
                os.kill(pid, signal.SIGKILL)

    for engine in ({"engine": "native"}, {"engine": "ray", "rollout_workers": 2}):
        runs.append([])
        trainer = GRPO(
            model_of(folder), environment=FailsOrIsEven, tokenizer=load_tokenizer(folder),
            callbacks=[Kills()], **settings, **engine,
        )  # fmt: skip
        trainer.train(ROWS, steps=4)
        getattr(trainer.engine, "close", lambda: None)()
    assert runs[0] == runs[1]
    assert any(each["episodes/ended_by_error"] > 0 for each in seen)
    assert any(each["frac_reward_zero_std"] > 0 for each in seen)
