"""Failures of every allocation in the extension module, of one or of all from it on: MemoryError, and a working engine.

The corresponding C++ test (cpp/tests/allocation_test.cpp) also finds leaks; this one includes bindings and whet.engine.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import resource
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tests.torture.common import ROOT, Tally, make_model, require, scaled

_SHIM = "WHET_TORTURE_SHIM"
_PROMPTS = [list(range(2, 14)) * 11, [5, 6, 7], list(range(2, 14)) * 11 + [3]]


def torture(scale: float) -> Iterator[Tally]:
    if _SHIM in os.environ:
        yield from _with_shim(scale)
        return
    with tempfile.TemporaryDirectory(prefix="whet-torture-") as name:
        shim, into = Path(name) / "shim.so", Path(name) / "tallies.jsonl"
        source = Path(__file__).with_name("failing_allocations.cpp")
        compiler = os.environ.get("CXX", "c++")
        subprocess.run([compiler, "-std=c++20", "-O1", "-shared", "-fPIC", source, "-o", shim], check=True)
        environment = {**os.environ, "LD_PRELOAD": str(shim), _SHIM: str(shim)}
        command = [sys.executable, "-m", "tests.torture", "allocations", f"--scale={scale}", f"--into={into}"]
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
        from tests.torture.__main__ import read_tallies

        yield from read_tallies(into)
    require(status == 0, f"the process with the shim ended with status {status}")


def _with_shim(scale: float) -> Iterator[Tally]:
    with tempfile.TemporaryDirectory(prefix="whet-torture-") as name:
        folder = make_model(Path(name), max_position_embeddings=256)
        for what, operation in _operations(folder):
            tally = Tally(f"failing allocations: {what}")
            _fail_each(tally, operation, scaled(1, 1 / scale))
            yield tally


# --- operations -----------------------------------------------------------------------------------------

Operation = Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]
"""Makes the call under test, and a call that must return the same answer after it."""


def _operations(folder: Path) -> list[tuple[str, Operation]]:
    """List the operations by name."""
    import torch

    import whet
    from whet.runs.models import load_model

    torch.set_num_threads(1)
    sampling = whet.SamplingParams(
        max_new_tokens=70, repetition_penalty=1.1, frequency_penalty=0.2, top_p=0.9, top_logprobs=2, stop="\x00\x01",
        logit_bias={5: 0.5}, seed=1,
    )  # fmt: skip
    kept = dataclasses.replace(sampling, kept_tokens=True)
    model, _ = load_model(str(folder), "float32")
    rng = np.random.default_rng(0)
    adapter = {
        f"model.layers.{i}.self_attn.q_proj": (rng.normal(size=(2, 32)), rng.normal(size=(32, 2)), 0.5) for i in (0, 1)
    }

    def engine(weights: str = "int8") -> whet.Engine:
        return whet.Engine.from_pretrained(folder, weights=weights, kv_bytes=1 << 20, max_batch=6, prefill_chunk=32)

    def answers(one: whet.Engine) -> Any:
        groups = [[(c.token_ids, c.logprobs) for c in group] for group in one.generate(_PROMPTS, 2, sampling)]
        scores = [row.tobytes() for row in one.logprobs(_PROMPTS, start=2)]
        require(one.memory["kv_used_bytes"] == 0, "pages are leaked")
        return groups, scores, one.logits([1, 2, 3]).tobytes()

    def of_engine(act: Callable[[whet.Engine], Any]) -> Operation:
        def make() -> tuple[Callable[[], Any], Callable[[], Any]]:
            one = engine()
            return lambda: act(one), lambda: answers(one)

        return make

    def streamed(one: whet.Engine) -> None:
        with one.stream(_PROMPTS[1], sampling) as stream:
            next(stream)

    def with_adapter(one: whet.Engine) -> None:
        number = one.add_adapter(adapter)
        try:
            one.generate([[1, 2, 3]], 1, whet.SamplingParams(max_new_tokens=3), adapter=number)
        finally:
            one.remove_adapter(number)

    def synced() -> tuple[Callable[[], Any], Callable[[], Any]]:
        one = whet.Engine.from_model(model, weights="int8", kv_bytes=1 << 20, tokenizer=folder)
        return lambda: one.sync(model), lambda: (one.sync(model), answers(one))[1]

    def learning() -> tuple[Callable[[], Any], Callable[[], Any]]:
        learner = whet.Learner(folder, lora_rank=4, weights="q8_0", compute="float32")
        prompts = [row[:12] for row in _PROMPTS]

        def learn() -> list[bytes]:
            learner.zero_grad()
            found = learner.logprobs(prompts, [[3, 4, 5]] * 3, return_entropy=True)
            learner.backward(found.mask * 1.0)
            return [found.logprobs.tobytes(), *(grad.tobytes() for a in learner.adapters for grad in a.gradients)]

        return learn, learn

    return [
        ("creating an engine", lambda: (lambda: engine().close(), lambda: answers(engine()))),
        ("generate", of_engine(lambda one: one.generate(_PROMPTS, 2, sampling))),
        ("generate with kept tokens", of_engine(lambda one: one.generate(_PROMPTS, 2, kept))),
        ("logprobs", of_engine(lambda one: one.logprobs(_PROMPTS, start=2, return_entropy=True))),
        ("logits", of_engine(lambda one: one.logits(_PROMPTS[1]))),
        ("stream", of_engine(streamed)),
        ("adapters", of_engine(with_adapter)),
        ("sync", synced),
        ("a learner's passes", learning),
        ("kernels", lambda: (_kernels, _kernels)),
    ]


def _kernels() -> list[bytes]:
    """Call each family of kernels once, in a new thread pool."""
    import whet

    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(33, 256)).astype(np.float32), rng.normal(size=(300, 256)).astype(np.float32)
    q, k, v = (rng.normal(size=(40, heads, 32)).astype(np.float32) for heads in (4, 2, 2))
    whet.set_num_threads(1)
    whet.set_num_threads(2)
    results = [
        whet.gemm(x, w, transpose_b=True),
        whet.gemv(w, x[0]),
        *(whet.linear(x, whet.pack_weight(w, format)) for format in ("float32", "bfloat16", "int8", "q8_0", "q4_k")),
        whet.rms_norm(x, w[0]),
        whet.softmax(x),
        whet.silu(x),
        whet.attention(q, k, v),
        whet.decode_attention(q[-1:], k[None], v[None], np.array([40])),
        whet.compute_batch_token_kl(x, x - 1),
        whet.compute_batch_group_advantages(x),
        whet.compute_token_logprobs(x, np.arange(33)),
        whet.MicroLoRA(256, 8, rank=2).forward(x, np.zeros((33, 8), np.float32)),
    ]
    return [np.asarray(result).tobytes() for result in results]


# --- failures -------------------------------------------------------------------------------------------


def _fail_each(tally: Tally, operation: Operation, every: int) -> None:
    """Fail every ``every``-th allocation in child processes; a new process continues after a crash."""
    for lasting in (False, True):
        reached = mmap.mmap(-1, 24)  # the allocation, 1 at the end, cases
        n, is_over = 1, False
        while not is_over:
            with tally.case(f"from allocation {n}{' on, all of them' if lasting else ''}"):
                reached[:24] = struct.pack("3q", n, 0, 0)
                pid = os.fork()
                if pid == 0:
                    _be_worker(operation, n, every, lasting, reached)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                n, is_over, cases = struct.unpack("3q", reached[:24])
                tally.cases += cases - 1
                require(is_over, f"allocation {n}: the process ended with status {status}; see above")
            n += every
            is_over = is_over or len(tally.failures) > 20


def _be_worker(operation: Operation, n: int, every: int, lasting: bool, reached: mmap.mmap) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    cases = 0
    shim = ctypes.CDLL(os.environ[_SHIM])
    shim.arm.argtypes, shim.disarm.restype = [ctypes.c_long, ctypes.c_bool], ctypes.c_long
    try:
        expected = operation()[1]()
        refused = 1
        while refused:
            reached[:24] = struct.pack("3q", n, 0, cases)
            act, answer = operation()
            refused = _run_with_failures(act, shim, n, lasting)
            require(refused >= 0, "the shim does not find the extension module")
            require(answer() == expected, f"after allocation {n} the answers differ")
            n, cases = n + every, cases + 1
        reached[:24] = struct.pack("3q", n, 1, cases)
        os._exit(0)
    except BaseException as error:
        print(f"allocation {n}, lasting {lasting}: {type(error).__name__}: {error}", flush=True)
    finally:
        os._exit(1)


def _run_with_failures(act: Callable[[], Any], shim: ctypes.CDLL, n: int, lasting: bool) -> int:
    """Run ``act`` with failing allocations, and return their number."""
    shim.arm(n, lasting)
    try:
        act()
    except MemoryError:
        pass
    except RuntimeError as error:  # the system's message if it cannot create a thread
        require("emory" in str(error) or "thread" in str(error) or "Resource" in str(error), f"raised {error!r}")
    finally:
        refused = shim.disarm()
    return refused
