"""Compare the speed of two builds of Whet: kernels, the engine's decoding and prefill, and a LoRA step.

    python tools/compare_builds.py MODEL.gguf PYTHON PYTHON [--rounds 15]

Each PYTHON is the interpreter of an environment with one build. Both run in turn, on one thread, and processor time is
measured, which other load disturbs less than elapsed time. Prints for each case the shortest times, their ratio, and
the median of the rounds' ratios, second build over first. Results must have the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SECONDS = 0.15  # of a measurement: as many calls as this takes, at least one


def make_cases(model: str) -> dict[str, Callable[[], np.ndarray]]:
    """Return functions to measure, each of which returns its numbers."""
    import whet
    from whet.config.sampling import SamplingParams

    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    logits, targets = normal(32, 49152), rng.integers(0, 49152, 32)
    x, norm_weight = normal(256, 576), normal(576)
    q, kv = normal(1, 9, 256, 64), normal(1, 3, 256, 64)
    gates = normal(256, 1536), normal(256, 1536)
    cases: dict[str, Callable[[], Any]] = {
        "token_logprobs": lambda: whet.compute_token_logprobs(logits, targets),
        "rms_norm": lambda: whet.rms_norm(x, norm_weight),
        "swiglu": lambda: whet.swiglu(*gates),
        "attention": lambda: whet.attention(q, kv, kv, causal=True),
        "group_advantages": lambda: whet.compute_batch_group_advantages(x.ravel(), 8),
    }
    rows = normal(32, 576)
    for format in ("float32", "bfloat16", "int8", "q8_0", "q4_0", "q4_k", "q6_k"):
        width = 512 if format in ("q4_k", "q6_k") else 576
        weight = whet.pack_weight(normal(1536, width), format)
        for n in (1, 32):
            cases[f"linear {format}, {n}"] = lambda weight=weight, n=n, k=width: whet.linear(
                np.ascontiguousarray(rows[:n, :k]), weight
            )
    for weights in ("own", "bf16"):
        engine = whet.Engine.from_gguf(model, max_batch=8, **({} if weights == "own" else {"weights": weights}))

        def decode(n: int, length: int, tokens: int, engine: Any = engine) -> np.ndarray:
            params = SamplingParams(temperature=0.0, max_new_tokens=tokens, stop_token_ids=[])
            found = engine.generate([[i + 1] * length for i in range(n)], sampling=params)
            return np.array([[each.token_ids, each.logprobs] for group in found for each in group])

        cases[f"engine {weights}, decode 1"] = lambda decode=decode: decode(1, 2, 12)
        cases[f"engine {weights}, decode 8"] = lambda decode=decode: decode(8, 2, 4)
        cases[f"engine {weights}, prefill"] = lambda decode=decode: decode(1, 120, 1)
    for compute in ("float32", "bfloat16"):
        learner = whet.Learner(model, lora_rank=8, compute=compute)

        def step(learner: Any = learner) -> np.ndarray:
            found = learner.logprobs([[1, 2, 3], [1, 2, 4]], [list(range(10, 42))] * 2)
            learner.backward(np.full((2, 32), -1.0 / 64, np.float32))
            learner.step(lr=0.0)
            return found.logprobs

        cases[f"LoRA step, {compute}"] = step
    return cases


def serve(model: str) -> None:
    """Measure the cases whose names are read: seconds per call and a hash of the result."""
    import whet

    whet.set_num_threads(1)
    cases = make_cases(model)
    print(json.dumps({"file": whet.__file__, "cases": list(cases), **whet.build_info()}), flush=True)
    for line in sys.stdin:
        call, n = cases[line.strip()], 0
        digest = hashlib.sha256(np.ascontiguousarray(call()).tobytes()).hexdigest()
        shortest, end = math.inf, time.thread_time() + SECONDS
        calls = 1
        while time.thread_time() < end or n == 0:
            started = time.thread_time()
            for _ in range(calls):
                call()
            seconds = (time.thread_time() - started) / calls
            if seconds * calls < 1e-3:
                calls *= 4
                continue
            shortest, n = min(shortest, seconds), n + 1
        print(json.dumps({"seconds": shortest, "hash": digest}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("pythons", nargs="*")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if arguments.pythons:
        compare(arguments.model, arguments.pythons, arguments.rounds)
    else:
        serve(arguments.model)


def compare(model: str, pythons: list[str], rounds: int) -> None:
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "WHET_NUM_THREADS": "1"}
    command = [os.path.abspath(__file__), os.path.abspath(model)]
    builds = [
        subprocess.Popen([python, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for python in pythons
    ]
    known = [json.loads(build.stdout.readline()) for build in builds]  # type: ignore[union-attr]
    for each in known:
        print(f"{each['compiler']}, {each['usable_instruction_sets'].split()[0]}: {each['file']}")

    def measure(build: Any, name: str) -> dict[str, Any]:
        build.stdin.write(name + "\n")
        build.stdin.flush()
        return json.loads(build.stdout.readline())

    times: dict[str, list[list[float]]] = {name: [[], []] for name in known[0]["cases"]}
    for i in range(rounds):
        for name, found in times.items():
            pair = {j: measure(builds[j], name) for j in ((0, 1), (1, 0))[i % 2]}
            assert pair[0]["hash"] == pair[1]["hash"], f"{name}: different results"
            for j in (0, 1):
                found[j].append(pair[j]["seconds"])
    ratios = []
    for name, (first, second) in times.items():
        ratios.append(min(second) / min(first))
        median = statistics.median(b / a for a, b in zip(first, second, strict=True))
        print(
            f"{name:28} {1e3 * min(first):9.4f} ms {1e3 * min(second):9.4f} ms  {ratios[-1]:.3f}  median {median:.3f}"
        )
    print(f"geometric mean {math.exp(statistics.fmean(map(math.log, ratios))):.3f}, worst {max(ratios):.3f}")
    for build in builds:
        build.stdin.close()  # type: ignore[union-attr]
        build.wait()


if __name__ == "__main__":
    main()
