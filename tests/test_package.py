"""`import whet`: NumPy only, results that do not depend on threads, a choice of instruction set."""

import multiprocessing
import os
import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.isas import assert_isas_agree, run_tests, usable_isas
from tests.processes import printed_by, run_python
from tests.raising import assert_mentions, assert_raises
from tests.threads import threads

import whet
from whet.errors import DEPENDENCIES

# The flags in /proc/cpuinfo that each instruction set needs, narrowest first.
AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
ISAS = {
    "scalar": set(),
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512bf16": AVX512 | {"avx512_bf16", "avx512_vnni"},
    "neon": set(),
    "neon_dot": {"asimddp"},
    "neon_i8mm": {"asimddp", "i8mm", "bf16"},
}


def available_isas():
    found = []
    for isa in ISAS:
        run = run_python("import whet; print(whet.isa())", WHET_ISA=isa)
        if run.returncode == 0:
            assert run.stdout.strip() == isa
            found.append(isa)
        else:
            assert f"WHET_ISA={isa} is not available" in run.stderr
    return found


def test_the_project_file_declares_the_dependencies():
    with open("pyproject.toml", "rb") as file:
        declared = tomllib.load(file)["project"]["dependencies"]
    names = [re.match(r"[\w-]+", requirement)[0].replace("-", "_") for requirement in declared]
    assert names == ["numpy", *DEPENDENCIES]


def test_the_primitives_and_the_trainers_are_imported_with_numpy_only():
    blocked = f"for name in {DEPENDENCIES!r}: sys.modules[name] = None"
    code = f"import sys\n{blocked}\nimport whet, whet.algorithms\nprint(whet.Engine.__name__, whet.Learner.__name__)"
    assert printed_by(code) == "Engine Learner\n"


def test_engine_is_exported_lazily_and_needs_only_numpy():
    code = (
        "import sys, whet; print('whet.engine' in sys.modules, 'Engine' in dir(whet) or 'Engine' in whet.__all__)\n"
        "from whet import *; whet.engine.Engine is Engine or 1 / 0; SamplingParams(); Completion\n"
        "print([m for m in ('torch', 'transformers', 'safetensors', 'rich', 'tyro') if m in sys.modules])\n"
        "whet.Engin"
    )
    run = run_python(code)
    assert run.stdout == "False True\n[]\n"
    assert "module 'whet' has no attribute 'Engin'" in run.stderr


IMPORTS = "import hashlib, numpy as np, whet"
DIGEST = """
rng = np.random.default_rng(0)
h = hashlib.sha256()
for dtype in (np.float32, np.float64):
    for n in [*range(0, 71), 1000, 5000]:
        p = -rng.exponential(2, n).astype(dtype); q = (p + rng.normal(0, .5, n)).astype(dtype)
        m = rng.random(n) < .8
        h.update(np.array([whet.compute_token_kl(p, q), whet.compute_token_kl_schulman(p, q, m)]).tobytes())
        if n:
            r = rng.normal(1, 1, (3, n)).astype(dtype); r[0, 0] = np.nan
            h.update(whet.compute_batch_group_advantages(r).tobytes())
            h.update(whet.compute_batch_group_advantages(r, scale="batch", eps=1e-4, ddof=1).tobytes())
            h.update(whet.compute_gae(r[1], r[2], m, 0.5, .99, .95)[0].tobytes())
            h.update(whet.get_rope(2 * n, max_position=9).cos_sin_cache.tobytes())
            x = rng.normal(0, 5, (3, n)).astype(np.float32)
            for out in whet.compute_token_logprobs(x, rng.integers(0, n, 3), temperature=.7, return_entropy=True):
                h.update(out.tobytes())
for m, n, k in ((1, 5, 3), (3, 17, 40), (9, 50, 256), (17, 100, 512)):
    x = rng.normal(size=(m, k)).astype(np.float32); w = rng.normal(size=(n, k)).astype(np.float32)
    h.update(whet.gemm(x, w, transpose_b=True).tobytes())
    h.update(whet.gemv(w, x[0]).tobytes()); h.update(whet.gemv(w, w[:, 0], transpose=True).tobytes())
    for format in ("float32", "bfloat16", "int8", "q8_0", "q4_0", "q4_k"):
        if k % 256 == 0 or format in ("float32", "bfloat16", "int8"):
            h.update(whet.linear(x, whet.pack_weight(w, format)).tobytes())
for n in (1, 15, 16, 33, 130, 1000):
    x, y = rng.normal(size=(2, 3, n)).astype(np.float32)
    for out in (whet.rms_norm(x, y[0]), whet.layer_norm(x, y[0], y[1]), whet.softmax(x), whet.log_softmax(x),
                whet.softcap(9 * x, 5.0), whet.silu(x), whet.gelu(x), whet.gelu(x, approximate="tanh"),
                whet.swiglu(x, y)):
        h.update(out.tobytes())
for d, t in ((32, 1), (40, 17), (64, 70)):
    q = rng.normal(size=(t, 6, d)).astype(np.float32); k, v = rng.normal(size=(2, t, 2, d)).astype(np.float32)
    h.update(whet.attention(q, k, v).tobytes())
    h.update(whet.decode_attention(q[-1:], k[None], v[None], np.array([t])).tobytes())
    for style in (True, False):
        x = q.copy(); whet.get_rope(d, is_neox_style=style)(np.arange(t) * 97, x); h.update(x.tobytes())
print(h.hexdigest())
"""


def test_results_do_not_depend_on_the_instruction_set():
    assert_isas_agree(IMPORTS, DIGEST)


def test_results_do_not_depend_on_the_number_of_threads():
    program = f"{IMPORTS}\n{DIGEST}"
    assert len({run_python(program, WHET_NUM_THREADS=n).stdout for n in ("1", "2", "5")}) == 1


def test_kernels_are_right_on_every_instruction_set():
    """Run the kernel tests on every instruction set except the first, on which the suite itself runs."""
    here = os.path.dirname(__file__)
    # probe measures rates, torch tensors use the same kernels, packing and RoPE scaling have no kernels, and DIGEST
    # covers every length and dtype of advantages and divergences.
    excluded = ["torch", "probe", "packing", "rope_scaling", "advantages", "divergence"]
    tests = [f"{here}/ops", f"{here}/nn/test_functions.py", *(f"--ignore={here}/ops/test_{n}.py" for n in excluded)]
    run = run_tests(usable_isas()[1:], *tests)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]


def test_build_info_lists_usable_instruction_sets():
    info = whet.build_info()
    built, usable = info["instruction_sets"].split(), info["usable_instruction_sets"].split()
    assert set(info) == {"compiler", "build_type", "instruction_sets", "usable_instruction_sets", "processors"}
    assert 1 <= int(info["processors"]) <= len(os.sched_getaffinity(0))
    assert set(usable) <= set(built) <= set(ISAS) and built[-1] in ("scalar", "neon") and built[-1] in usable
    assert set(usable) == set(available_isas())
    assert run_python("import whet; print(whet.isa())", WHET_ISA="").stdout.strip() == usable[0]
    assert any(name in info["compiler"] for name in ("GCC", "Clang", "clang")) and info["build_type"]


@pytest.mark.skipif(not os.path.exists("/proc/cpuinfo"), reason="only Linux lists a processor's flags there")
def test_every_instruction_set_of_the_processor_is_usable():
    cpuinfo = Path("/proc/cpuinfo").read_text()
    flags = set(re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE).group(1).split())
    info = whet.build_info()
    expected = [isa for isa in info["instruction_sets"].split() if flags >= ISAS[isa]]
    assert info["usable_instruction_sets"].split() == expected


def test_invalid_environment_variable_is_named():
    assert (
        "WHET_NUM_THREADS=many is not a number"
        in run_python("import whet; whet.get_num_threads()", WHET_NUM_THREADS="many").stderr
    )
    assert "WHET_ISA=mmx is not available" in run_python("import whet; whet.isa()", WHET_ISA="mmx").stderr
    run = run_python("import whet\ntry: whet.isa()\nexcept whet.WhetValueError: print('one')", WHET_ISA="mmx")
    assert run.stdout == "one\n"


def test_import_works_without_docstrings():
    code = "import whet; print(whet.compute_group_advantages([1.0, 3.0]), whet.compute_group_advantages.__doc__)"
    run = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("[-1.  1.] None\n", "")


def test_reloaded_module_keeps_its_docstring():
    code = (
        "import importlib, whet\nfor _ in range(6): importlib.reload(whet.ops.advantages)\n"
        "print(whet.ops.advantages.compute_group_advantages.__doc__)"
    )
    assert "group" in printed_by(code).splitlines()[0]


@pytest.mark.parametrize("work", ["whet.softmax(x, out=x)", "whet.linear(x, w)", "whet.compute_token_logprobs(x, ids)"])
def test_daemon_thread_in_the_core_does_not_abort_at_exit(work):
    code = f"""
import threading, time, numpy as np, whet
x = np.zeros((1000, 2000), np.float32)
w, ids, started = whet.pack_weight(np.ones((256, 2000), np.float32)), np.zeros(1000, int), threading.Event()
def loop():
    while True:
        {work}
        started.set()
threading.Thread(target=loop, daemon=True).start()
started.wait()
"""
    for _ in range(3):
        assert printed_by(code) == ""


def test_thread_settings():
    for n in (1, 4, 2):
        with threads(n):
            assert whet.get_num_threads() == n
    for bad, expected in ((0, "at least 1"), (1.5, "an integer"), (5000, "at most 1024")):
        assert_raises(whet.WhetError, ("set_num_threads", bad, expected), whet.set_num_threads, bad)


def test_threads_beyond_the_processors_are_not_started():
    usable = whet._core.max_processors()
    assert usable in (int(whet.build_info()["processors"]), int(whet.build_info()["processors"]) + 1)
    program = f"""{IMPORTS}
{DIGEST}
import os, warnings
print(whet.get_num_threads(), len(os.listdir("/proc/self/task")), file=sys.stderr)
warnings.simplefilter("error")
try:
    whet.set_num_threads(999)
except UserWarning as warning:
    print(warning, file=sys.stderr)
"""
    run = run_python(f"import sys\n{program}", WHET_NUM_THREADS="1000", OPENBLAS_NUM_THREADS="1")
    assert run.stdout == run_python(program, WHET_NUM_THREADS="1").stdout
    warning, *_, counts, second = run.stderr.splitlines()
    assert_mentions(warning, "WHET_NUM_THREADS", 1000, f"{usable} processor")
    assert_mentions(second, "set_num_threads", 999, f"{usable} processor")
    assert counts == f"{usable} {usable}"


X = np.random.default_rng(0).normal(size=(64, 5000))


def test_concurrent_calls_from_many_threads():
    expected = whet.compute_batch_token_kl(X, -X)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: whet.compute_batch_token_kl(X, -X), range(8)))
    for result in results:
        np.testing.assert_array_equal(result, expected)


def _in_child(queue):
    queue.put((whet.compute_batch_token_kl(X, -X), whet.get_num_threads()))


def test_core_works_after_fork():
    expected = whet.compute_batch_token_kl(X, -X)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    result, n_threads = queue.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0 and n_threads == whet.get_num_threads()
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(whet.compute_batch_token_kl(X, -X), expected)
