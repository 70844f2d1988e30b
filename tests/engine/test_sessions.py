"""However and wherever a call on the engine ends, the next call finds it as good as new."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from tests.engine.tiny_models import VOCAB, tiny_model
from tests.processes import run_python
from tests.raising import assert_raises, mentions
from tests.representatives import cases
from tests.tiny import with_lora

import whet.engine.engine
import whet.engine.session
import whet.models.loading
from whet.config.sampling import SamplingParams
from whet.engine import Engine, EngineBusyError
from whet.errors import WhetError, WhetValueError

SHARED = np.random.default_rng(7).integers(3, VOCAB, 150).tolist()
PROMPTS = [[*SHARED, 5, 6], SHARED[:70] + [9] * 8, [*SHARED, 7], [3, 4]]
SAMPLING = SamplingParams(max_new_tokens=3, seed=4)
# Code that changes calls or weights; an interrupt in read-only code is equivalent to one next to it.
FILES = (whet.engine.engine.__file__, whet.engine.session.__file__, whet.models.loading.__file__)


def policy(seed: int = 1) -> Any:
    model = tiny_model("llama", max_position_embeddings=256)
    return with_lora(model, seed, r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False).eval()


def engine_of(model: Any, **options: Any) -> Engine:
    return Engine.from_model(model, weights="float32", prefill_chunk=64, **options)


def answers(engine: Engine, adapter: int | None = None) -> Any:
    """Return completions, log-probs and logits, with and without shared prefixes."""
    groups = engine.generate(PROMPTS, 2, SAMPLING, adapter=adapter)
    sampled = [(c.token_ids, c.logprobs, c.finish_reason) for group in groups for c in group]
    scores = engine.logprobs(PROMPTS, adapter=adapter)
    return sampled, [row.tolist() for row in scores], engine.logits(PROMPTS[1], adapter=adapter).tolist()


def assert_clean(engine: Engine) -> None:
    """Assert that ended calls leave no job, page or index entry, and no unreachable adapter."""
    assert engine.memory["kv_used_bytes"] == 0
    assert not engine._calls._sessions
    assert not engine._calls._dropped


def change(model: Any, factor: float, names: str = "") -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if names in name and parameter.ndim == 2:
                parameter.mul_(factor)


@contextlib.contextmanager
def interrupt_at(line: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt before the n-th executed line of the engine's Python; yield the executed lines."""
    run = [0]

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            run[0] += 1
            if run[0] == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield run
    finally:
        sys.settrace(before)


def stream_a_little(engine: Engine, model: Any) -> None:
    with engine.stream(PROMPTS[0], SAMPLING) as stream:
        next(stream)


def drop_a_stream(engine: Engine, model: Any) -> None:
    next(engine.stream(PROMPTS[0], SAMPLING))


def sync_merged(engine: Engine, model: Any) -> None:
    model.merge_adapter()
    try:
        engine.sync(model)
    finally:
        model.unmerge_adapter()


CALLS: dict[str, Callable[[Engine, Any], Any]] = {
    "generate": lambda engine, model: engine.generate(PROMPTS, 2, SAMPLING),
    "logprobs": lambda engine, model: engine.logprobs(PROMPTS),
    "stream": lambda engine, model: list(engine.stream(PROMPTS[0], SAMPLING)),
    "part of a stream": stream_a_little,
    "a stream that keeps its pages": lambda engine, model: list(engine.stream(PROMPTS[0], SAMPLING, keep=True)),
    "a dropped stream": drop_a_stream,
    "memory": lambda engine, model: engine.memory,
}


@pytest.mark.parametrize("name", cases(CALLS, lambda name: name in ("generate", "part of a stream")))
def test_interrupt_before_any_line_of_a_call(name):
    """The traceback, which references every frame of the call, is alive during the next call."""
    model = policy()
    with engine_of(model) as engine:
        right = answers(engine)
        line, interrupted = 1, True
        while interrupted:
            with interrupt_at(line), contextlib.suppress(KeyboardInterrupt):
                CALLS[name](engine, model)
                interrupted = False
            engine.add_adapter(model)  # a separate call, which finds no other in progress
            engine.sync(model)
            assert_clean(engine)
            line += 1
        assert line > 3
        assert answers(engine) == right


SYNCS: dict[str, tuple[Callable[[Any], None], Callable[[Engine, Any], Any]]] = {
    "all": (lambda model: change(model, 1.3), lambda engine, model: engine.sync(model)),
    "adapters": (lambda model: change(model, -1.2, "lora_A"), lambda engine, model: engine.sync(model)),
    "merged": (lambda model: change(model, -1.2, "lora_A"), sync_merged),
}


@pytest.mark.parametrize("name", cases(SYNCS, lambda name: name == "merged"))
def test_interrupt_before_any_line_of_a_sync(name):
    """The engine has either the old weights and version, or the new ones."""
    prepare, sync = SYNCS[name]
    model = policy()
    with engine_of(model) as engine:
        before = copy.deepcopy(model.state_dict())
        old = answers(engine)
        prepare(model)
        after = copy.deepcopy(model.state_dict())
        with engine_of(model) as fresh:
            if name == "merged":
                model.merge_adapter()
                fresh.sync(model)
                model.unmerge_adapter()
            new = answers(fresh)
        assert old != new
        line, interrupted, seen = 1, True, set()
        while interrupted:
            model.load_state_dict(after)
            version = engine.policy_version
            with interrupt_at(line), contextlib.suppress(KeyboardInterrupt):
                sync(engine, model)
                interrupted = False
            replaced = engine.policy_version != version
            seen.add(replaced)
            assert answers(engine) == (new if replaced else old)
            assert_clean(engine)
            model.load_state_dict(before)
            engine.sync(model)
            line += 1 if line < 50 else 4
        assert seen == {True, False}
        assert answers(engine) == old


def test_partial_sync_after_two_interrupts_is_reported(monkeypatch):
    model = policy()
    with engine_of(model) as engine:
        old = answers(engine)

        def stopped(*_: Any) -> None:
            raise MemoryError

        monkeypatch.setattr("whet.engine.engine.pack_slices", stopped)
        change(model, 1.3)
        with pytest.raises(MemoryError):
            engine.sync(model)
        monkeypatch.undo()
        for call in (engine.generate, engine.logprobs):
            assert_raises(WhetError, ("sync was interrupted", "Call sync again"), call, [[1, 2]])
        engine.sync(model)
        with engine_of(model) as fresh:
            assert answers(engine) == answers(fresh) != old


def test_released_weights_are_unusable_until_the_next_sync():
    model = policy().merge_and_unload()
    with engine_of(model) as engine:
        sampled, n_bytes = answers(engine), engine.memory["weights_bytes"]
        with engine.stream([1, 2], SAMPLING) as stream:
            next(stream)
            with pytest.raises(EngineBusyError, match=mentions("release_weights", "1 calls")):
                engine.release_weights()
        assert answers(engine) == sampled
        assert 0 < engine.release_weights() <= n_bytes
        assert {part: n for part, _, n in engine.memory_blocks()}["sampler_weights"] == 0
        for call in (engine.generate, engine.logprobs):
            assert_raises(WhetError, ("release_weights", "Call sync(model)"), call, [[1, 2]])
        engine.sync(model)
        assert answers(engine) == sampled


def test_weights_kept_by_sync_are_not_released():
    with engine_of(policy()) as engine:
        sampled = answers(engine)
        assert engine.release_weights() == 0
        assert answers(engine) == sampled


def test_sync_after_merge_unmerge_and_base_changes():
    """The packed weights equal the model's, whichever changed and however."""
    model = policy()
    with engine_of(model) as engine:

        def check() -> None:
            engine.sync(model)
            with engine_of(model) as fresh:
                assert answers(engine) == answers(fresh)

        model.merge_adapter()
        check()
        model.unmerge_adapter()
        check()
        model.get_base_model().model.layers[0].mlp.up_proj.weight.data[3, 1] += 5  # frozen, and written past autograd
        check()
        change(model, -1.0, "lora_B")
        check()


def test_sync_copies_only_adapters_if_the_base_is_unchanged(monkeypatch):
    from whet.engine import engine as module

    loads = []
    pack_slices = module.pack_slices
    monkeypatch.setattr(module, "pack_slices", lambda *arguments: (loads.append(1), pack_slices(*arguments)))
    model = policy()
    with engine_of(model) as engine:
        for factor in (2.0, -0.5):
            change(model, factor, "lora")
            engine.sync(model)
        assert len(loads) == 1
        with engine_of(model) as fresh:
            assert answers(engine) == answers(fresh)


def test_streams_with_adapters_closed_during_prefill():
    model = policy()
    with engine_of(model) as engine:
        number = engine.add_adapter(model)
        right = answers(engine)
        streams = [engine.stream(prompt, SAMPLING, adapter=number) for prompt in (PROMPTS[0], PROMPTS[2])]
        other = engine.stream([3], SAMPLING)
        next(other)  # a step: the first of the two is in the middle of its prompt
        for stream in streams:
            stream.close()
        assert len(list(other)) == 2
        engine.remove_adapter(number)
        assert answers(engine) == right
        assert_clean(engine)


def test_a_call_ends_with_a_removed_adapter():
    model = policy()
    with engine_of(model) as engine:
        own = engine.memory["adapters_bytes"]
        number = engine.add_adapter(model)
        right = [token.token_id for token in engine.stream(PROMPTS[2], SAMPLING, adapter=number)]
        stream = engine.stream(PROMPTS[2], SAMPLING, adapter=number)
        first = next(stream).token_id
        engine.remove_adapter(number)
        assert_raises(WhetValueError, "there is no adapter", engine.stream, [3], SAMPLING, adapter=number)
        assert engine.memory["adapters_bytes"] == own
        assert [first, *(token.token_id for token in stream)] == right
        assert_clean(engine)


def test_garbage_collected_stream_is_ended():
    model = policy()
    with engine_of(model) as engine:
        stream = engine.stream(PROMPTS[0], SAMPLING)
        next(stream)
        assert_raises(EngineBusyError, ("Engine.sync", "1 calls"), engine.sync, model)
        del stream
        gc.collect()
        engine.sync(model)
        assert_clean(engine)


def test_closing_the_engine_ends_its_streams():
    engine = engine_of(policy())
    stream = engine.stream(PROMPTS[0], SAMPLING)
    next(stream)
    engine.close()
    assert_raises(WhetValueError, ("Engine.stream", "the engine is closed"), next, stream)
    assert stream.finish_reason == "cancelled" and list(stream) == []
    for call in (lambda: engine.stream([1]), lambda: engine.memory, lambda: engine.sync(policy())):
        assert_raises(WhetValueError, "the engine is closed", call)


def test_nan_adapter_leaves_the_weights_unchanged():
    model = policy()
    with engine_of(model) as engine:
        right = answers(engine)
        change(model, 2.0)
        with torch.no_grad():
            next(p for name, p in model.named_parameters() if "lora_A" in name)[0, 0] = torch.nan
        assert_raises(WhetValueError, "holds NaN or infinity", engine.sync, model)
        assert engine.policy_version == 0
        assert answers(engine) == right


class Machine(RuleBasedStateMachine):
    """Calls in any order, possibly interrupted, while another thread makes calls."""

    def __init__(self) -> None:
        super().__init__()
        self.model = policy()
        self.engine = engine_of(self.model, max_batch=6)
        self.streams: list[Any] = []
        self.adapters: list[int] = []
        self.expected: dict[int, Any] = {}  # completions of the other thread, by version of the weights
        self.failures: list[BaseException] = []
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.other)

    @initialize()
    def begin(self) -> None:
        self.thread.start()

    def other(self) -> None:
        try:
            while not self.stopping.wait(0.001):
                [[completion]] = self.engine.generate([PROMPTS[2]], 1, SAMPLING)
                right = self.expected.setdefault(completion.policy_version, (completion.token_ids, completion.logprobs))
                assert right == (completion.token_ids, completion.logprobs)
        except BaseException as failure:  # shown by the main thread
            self.failures.append(failure)

    def call(self, line: int, function: Callable[[], Any]) -> Any:
        """Return a function's result; None if it was interrupted or blocked by the other thread's call."""
        with interrupt_at(line), contextlib.suppress(KeyboardInterrupt, EngineBusyError):
            return function()
        return None

    lines = st.one_of(st.just(0), st.integers(1, 120))

    @rule(line=lines, n=st.integers(1, 3))
    def generate(self, line: int, n: int) -> None:
        self.call(line, lambda: self.engine.generate(PROMPTS, n, SAMPLING))

    @rule(line=lines)
    def score(self, line: int) -> None:
        self.call(line, lambda: self.engine.logprobs(PROMPTS))

    @rule(line=lines, i=st.integers(0, 3), keep=st.booleans())
    def stream(self, line: int, i: int, keep: bool) -> None:
        stream = self.call(line, lambda: self.engine.stream(PROMPTS[i], SAMPLING, keep=keep))
        self.streams += [] if stream is None else [stream]

    @precondition(lambda self: self.streams)
    @rule(line=lines, i=st.integers(0, 9))
    def read(self, line: int, i: int) -> None:
        self.call(line, lambda: next(self.streams[i % len(self.streams)], None))

    @precondition(lambda self: self.streams)
    @rule(line=lines, i=st.integers(0, 9), drop=st.booleans())
    def leave(self, line: int, i: int, drop: bool) -> None:
        stream = self.streams.pop(i % len(self.streams))
        if not drop:
            self.call(line, stream.close)

    @rule(line=lines, names=st.sampled_from(["", "lora", "up_proj", "embed"]), factor=st.sampled_from([-1.0, 1.1]))
    def sync(self, line: int, names: str, factor: float) -> None:
        self.replace(line, lambda: change(self.model, factor, names), lambda: self.engine.sync(self.model))

    @rule(line=lines)
    def merge(self, line: int) -> None:
        self.replace(line, lambda: None, lambda: sync_merged(self.engine, self.model))

    def replace(self, line: int, prepare: Callable[[], None], sync: Callable[[], None]) -> None:
        before, version = copy.deepcopy(self.model.state_dict()), self.engine.policy_version
        prepare()
        self.call(line, sync)
        if self.engine.policy_version == version:
            self.model.load_state_dict(before)

    @rule(line=lines)
    def add_adapter(self, line: int) -> None:
        self.call(line, lambda: self.engine.add_adapter(self.model))
        self.adapters = sorted(self.engine._calls.adapters)  # one more, or none: what was given out can be named

    @precondition(lambda self: self.adapters)
    @rule(line=lines, i=st.integers(0, 9))
    def remove_adapter(self, line: int, i: int) -> None:
        number = self.adapters[i % len(self.adapters)]
        self.call(line, lambda: self.engine.remove_adapter(number))
        if number not in self.engine._calls.adapters:
            self.adapters.remove(number)

    @precondition(lambda self: self.adapters)
    @rule(line=lines, i=st.integers(0, 9))
    def generate_with_an_adapter(self, line: int, i: int) -> None:
        number = self.adapters[i % len(self.adapters)]
        self.call(line, lambda: self.engine.generate(PROMPTS, 1, SAMPLING, adapter=number))

    def teardown(self) -> None:
        self.stopping.set()
        if self.thread.ident:
            self.thread.join(timeout=60)
            assert not self.thread.is_alive(), "a call of the other thread does not end"
        assert not self.failures, self.failures
        self.streams.clear()
        gc.collect()
        assert sorted(self.engine._calls.adapters) == self.adapters
        version = self.engine.policy_version
        with self.engine as engine:
            mine = answers(engine)
            assert_clean(engine)
            engine.sync(self.model)
            assert engine.policy_version == version + 1
            with engine_of(self.model) as fresh:
                right = answers(fresh)
                assert answers(engine) == right
                # A sync while merged has packed the same sums, rounded differently.
                np.testing.assert_allclose(mine[2], right[2], rtol=1e-3, atol=1e-3)


def test_interrupted_calls_in_any_order_from_two_threads():
    run_state_machine_as_test(
        Machine,
        settings=settings(max_examples=15, stateful_step_count=12, suppress_health_check=list(HealthCheck)),
    )


def test_threads_may_change_while_kernels_run():
    """Runs in a separate process, because a failure would corrupt memory."""
    script = """
import threading
import numpy as np
import whet

a = np.random.default_rng(0).random((192, 192), np.float32)
right = whet.gemm(a, a)
stop = threading.Event()
wrong = []

def work():
    while not stop.is_set():
        if not np.array_equal(whet.gemm(a, a), right):
            wrong.append(1)

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for n in range(600):
    whet._core.set_num_threads(1 + n % 3, oversubscribe=True)
stop.set()
for thread in threads:
    thread.join()
print(len(wrong))
"""
    run = run_python(script)
    assert (run.returncode, run.stdout.strip()) == (0, "0"), run.stderr
