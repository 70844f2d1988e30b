"""The harness with providers that are right, wrong, slow, failing, missing or impossibly fast."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from tests.raising import mentions
from tests.timed import timed

from whet.bench import Case, NotMeasured, Provider, Table, Timed
from whet.bench.case import WholeRun, relative_error
from whet.bench.harness import Effort, run_case
from whet.bench.machine import cpu_seconds, fastest_possible, highest, peak_bytes, watch_others
from whet.bench.stats import paired_ratio
from whet.errors import WhetError

BRIEF = Effort(rounds=9, case_s=20.0)
CEILINGS = {
    "read": {"L1": 4e11, "L2": 2e11, "L3": 1e11, "memory": 4e10},
    "copy": {"L1": 3e11, "L2": 1e11, "L3": 8e10, "memory": 3e10},
    "scale": {"L1": 3e11, "L2": 1e11, "L3": 8e10, "memory": 3e10},
    "flops": {"float32": 1e11, "float64": 5e10, "bfloat16": 2e11, "int8": 4e11},
}


def spin(seconds, answer=1.0):
    """Make a call that spins for ``seconds`` and returns the answer."""

    def call():
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass
        return answer

    return call


def a_case(**fields):
    return Case("one", inputs=lambda rng: 1.0, reference=lambda x: x, tolerance=1e-9, **fields)


def run(providers, case=None, effort=BRIEF, **table):
    case = case or a_case()
    table = Table("table", [case], providers, allocation="none", **table)
    result = run_case(table, case, providers, threads=1, effort=effort, seed=0)
    result.rate(CEILINGS)
    return {row.provider: row for row in result.rows}


@timed
def test_medians_and_ratios_equal_planted_times(monkeypatch):
    monkeypatch.setattr("whet.bench.machine.cpu_seconds", time.perf_counter)  # one processor, whatever the load
    rows = run([Provider("whet", lambda x: spin(2e-4)), Provider("peer", lambda x: spin(3e-4))])
    assert len(rows["whet"].samples_s) == len(rows["peer"].samples_s) == 9
    assert np.median(rows["whet"].samples_s) == pytest.approx(2e-4, rel=0.1)
    ratio = paired_ratio(rows["peer"].samples_s, rows["whet"].samples_s)
    assert ratio.median == pytest.approx(1.5, rel=0.1)
    assert ratio.stars == "***"
    assert rows["whet"].cpus == pytest.approx(1.0, abs=0.35)


@timed
def test_cpu_seconds_include_this_thread():
    cpu_s, own_s = cpu_seconds(), time.thread_time()
    spin(0.1)()
    assert cpu_seconds() - cpu_s == pytest.approx(time.thread_time() - own_s, rel=0.35)


@pytest.mark.skipif(sys.platform != "linux", reason="no CPU time of other processes")
def test_cpu_seconds_include_a_server_and_its_children():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True)\\nwhile True: pass'])"
    others_s = cpu_seconds() - time.process_time()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as server:
        try:
            assert server.stdout is not None and server.stdout.readline()
            deadline = time.perf_counter() + 60
            while cpu_seconds() - time.process_time() < others_s + 0.5:
                assert time.perf_counter() < deadline
                time.sleep(0.01)
        finally:
            os.killpg(server.pid, signal.SIGKILL)


@timed
def test_planted_difference_of_ten_percent_is_significant():
    providers = [Provider("whet", lambda x: spin(3.3e-4)), Provider("peer", lambda x: spin(3e-4))]
    rows = run(providers, effort=Effort(31, case_s=20.0))
    ratio = paired_ratio(rows["peer"].samples_s, rows["whet"].samples_s)
    assert ratio.stars == "***"
    assert ratio.high < 1


@timed
def test_short_calls_are_timed_in_loops():
    rows = run([Provider("whet", lambda x: lambda: x)])
    assert rows["whet"].loops >= 500
    assert np.median(rows["whet"].samples_s) < 1e-6


@timed
def test_a_call_that_repeats_the_work_counts_as_several():
    call = spin(4e-3)
    call.n_repeats = 20
    assert np.median(run([Provider("whet", lambda x: call)])["whet"].samples_s) == pytest.approx(2e-4, rel=0.1)


def test_a_device_is_waited_for_and_bounds_the_case(monkeypatch):
    waited, device = [], "cuda:1"
    monkeypatch.setattr("whet.bench.cuda.synchronize", waited.append)
    monkeypatch.setattr("whet.bench.cuda.cache_levels", lambda _: {"L2": 10_000})
    row = run([Provider("whet", lambda x: spin(1e-4))], a_case(device=device, n_bytes=12_000))["whet"]
    assert len(waited) > len(row.samples_s) and set(waited) == {device}
    expected = 10_000 / 2e11 + 2000 / 4e10
    assert fastest_possible(a_case(device=device, n_bytes=12_000), CEILINGS, 2)[0] == pytest.approx(expected)


def test_wrong_answer_is_reported_and_not_timed():
    calls = []

    def wrong(x):
        def call():
            calls.append(1)
            return x + 1e-8

        return call

    row = run([Provider("whet", lambda x: lambda: x), Provider("peer", wrong)])["peer"]
    assert (row.status, row.samples_s, len(calls)) == ("wrong", [], 1)
    assert row.why == "error 1e-08, allowed 1e-09"


def test_provider_can_have_its_own_definition_and_tolerance():
    doubled = Provider("peer", lambda x: lambda: 2 * x, reference=lambda x: 2 * x)
    rough = Provider("rough", lambda x: lambda: x + 1e-5, tolerance=1e-4)
    rows = run([Provider("whet", lambda x: lambda: x), doubled, rough])
    assert [row.status for row in rows.values()] == ["measured"] * 3
    assert rows["rough"].error == pytest.approx(1e-5)


def test_failing_provider_does_not_stop_the_others():
    def broken(x):
        raise RuntimeError("out of luck")

    def breaks_later(x):
        state = {"calls": 0}

        def call():
            state["calls"] += 1
            if state["calls"] > 20:
                raise ValueError("tired")
            time.sleep(0.001)
            return x

        return call

    rows = run([Provider("whet", lambda x: lambda: x), Provider("a", broken), Provider("b", breaks_later)])
    assert (rows["a"].status, rows["a"].why) == ("failed", "RuntimeError: out of luck")
    assert (rows["b"].status, rows["b"].why, rows["b"].samples_s) == ("failed", "ValueError: tired", [])
    assert rows["whet"].status == "measured"


def test_missing_package_is_named_with_its_pip_command():
    def missing(x):
        import no_such_package_at_all

        return no_such_package_at_all

    def missing_peer(x):
        raise ModuleNotFoundError("No module named 'rlox'", name="rlox")

    def too_large(x):
        raise NotMeasured("quadratic: only up to 10,000")

    absent = [Provider(prepare.__name__, prepare) for prepare in (missing, missing_peer, too_large)]
    rows = run([Provider("whet", lambda x: lambda: x), *absent])
    assert rows["missing"].why == "No module named 'no_such_package_at_all'"
    assert rows["missing_peer"].why == "rlox is not installed: pip install 'whet[peers]'"
    assert rows["too_large"].why == "quadratic: only up to 10,000"
    assert {row.status for row in rows.values()} == {"measured", "absent"}


def test_row_faster_than_the_ceiling_is_refused():
    idle = Provider("whet", lambda x: lambda: x)
    rows = run([idle, Provider("peer", lambda x: spin(0.02))], a_case(n_bytes=1e8, cache="cold"))
    assert rows["whet"].status == "refused"
    assert rows["whet"].why.startswith("impossible: ")
    assert "memory bandwidth of this machine" in rows["whet"].why
    assert rows["whet"].samples_s  # the samples stay in results.json
    assert rows["peer"].status == "measured"
    median_s = np.median(rows["peer"].samples_s)
    assert rows["peer"].bandwidth == pytest.approx(1e8 / median_s) and median_s >= 0.02
    assert rows["peer"].share == pytest.approx(1e8 / 4e10 / median_s)
    assert run([idle], a_case(n_flops=1e9))["whet"].bound == "float32 FMA"


@timed
def test_refused_row_is_rated_again_with_higher_ceilings():
    case = a_case(n_flops=1e8)
    provider = Provider("whet", lambda x: spin(5e-4))
    result = run_case(Table("t", [case], [provider], ""), case, [provider], 1, BRIEF, 0)
    result.rate(CEILINGS)
    assert result.rows[0].status == "refused"
    better = {**CEILINGS, "flops": dict.fromkeys(CEILINGS["flops"], 4e11)}
    result.rate(highest(CEILINGS, better))
    assert (result.rows[0].status, result.rows[0].why) == ("measured", "")


def test_bandwidth_bound_uses_the_cache_level_that_fits(monkeypatch):
    monkeypatch.setattr("whet.bench.machine.caches", lambda: {"L1": 1000, "L2": 10_000, "L3": 100_000})
    small, middle = a_case(n_bytes=2000), a_case(n_bytes=12_000)
    assert fastest_possible(small, CEILINGS, 2) == (pytest.approx(2000 / 4e11), "L1 bandwidth")
    expected = 2000 / 4e11 + 10_000 / 2e11
    assert fastest_possible(middle, CEILINGS, 2) == (pytest.approx(expected), "L2 bandwidth")
    large = a_case(n_bytes=1e6)
    expected = 2000 / 4e11 + 20_000 / 2e11 + 100_000 / 1e11 + 878_000 / 4e10
    assert fastest_possible(large, CEILINGS, 2) == (pytest.approx(expected), "memory bandwidth")
    reread = a_case(n_bytes=4000, footprint=2000)
    assert fastest_possible(reread, CEILINGS, 2)[0] == pytest.approx(4000 / 4e11)
    assert fastest_possible(a_case(n_bytes=2000, cache="cold"), CEILINGS, 2)[0] == pytest.approx(2000 / 4e10)
    assert fastest_possible(a_case(), CEILINGS, 2) == (0.0, "")


@timed
def test_cold_calls_are_slower_than_warm_ones():
    x = np.ones(1 << 17)  # 1 MiB
    provider = Provider("whet", lambda _: lambda: float(x.sum()), reference=lambda _: float(1 << 17))
    case = Case("sum", lambda rng: None, lambda _: 0.0, 1e-9, n_bytes=x.nbytes)
    medians = {}
    for cache in ("warm", "cold"):
        one = Case(**{**vars(case), "cache": cache})
        result = run_case(Table("t", [one], [provider], ""), one, [provider], 1, BRIEF, 0)
        medians[cache] = np.median(result.rows[0].samples_s)
        assert result.rows[0].loops == 1 or cache == "warm"
    assert medians["cold"] > 1.2 * medians["warm"]


@timed
def test_load_of_other_processes_is_measured():
    code = "import time\nend = time.monotonic() + 30\nwhile time.monotonic() < end: pass"
    with watch_others() as idle:
        time.sleep(0.5)
    # A child of a shell that has ended: a descendant of this process would be its own load.
    shell = ["sh", "-c", '"$0" -c "$1" > /dev/null & echo $!', sys.executable, code]
    busy = int(subprocess.run(shell, stdout=subprocess.PIPE, check=True).stdout)
    try:
        time.sleep(0.2)
        with watch_others() as others:
            spin(0.5)()
    finally:
        os.kill(busy, signal.SIGKILL)
    assert others["cpus"] > 0.3
    assert idle["cpus"] >= 0


def test_parts_are_recorded_per_sample_and_add_up():
    def timed(x):
        def call():
            spin(1e-3)()
            return Timed(x, {"first": 3e-4, "second": 5e-4})

        return call

    row = run([Provider("whet", timed)])["whet"]
    assert set(row.parts) == {"first", "second", "other"}
    assert all(len(seconds) == len(row.samples_s) for seconds in row.parts.values())
    totals = np.sum(list(row.parts.values()), axis=0)
    np.testing.assert_allclose(totals, row.samples_s, rtol=1e-6)


def test_very_slow_step_is_timed_from_the_third_call(monkeypatch):
    for name, seconds in {"VERY_SLOW": 1e-4, "SLOW": 1e-4, "SETTLE": 0.0, "TURN": 0.0}.items():
        monkeypatch.setattr(f"whet.bench.harness._{name}_S", seconds)
    calls = []

    def step():
        calls.append(spin(1e-3)())
        return Timed(1.0, {"all": 1e-3})

    row = run([Provider("whet", lambda x: step)])["whet"]
    assert len(row.samples_s) == BRIEF.rounds
    assert len(calls) == 2 + BRIEF.rounds


def test_provider_failing_on_the_second_call_does_not_stop_the_others():
    def once(x):
        answers = iter([Timed(x, {"all": 1e-3})])
        return lambda: next(answers)

    rows = run([Provider("whet", lambda x: spin(1e-4)), Provider("broken", once)])
    assert (rows["broken"].status, rows["broken"].samples_s) == ("failed", [])
    assert rows["whet"].status == "measured"


def test_a_lost_device_ends_the_run_and_names_the_provider(monkeypatch):
    def waits(device):
        if faults:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for it")

    def faulty(x):
        faults.append(x)
        raise RuntimeError("launch failed")

    faults = []
    monkeypatch.setattr("whet.bench.cuda.synchronize", waits)
    providers = [Provider("whet", lambda x: lambda: x), Provider("peer", faulty), Provider("next", lambda x: lambda: x)]
    with pytest.raises(WhetError, match=mentions("cuda:0", "peer", "illegal memory access", "--peers")):
        run(providers, a_case(device="cuda:0"))


def test_peak_memory_of_a_call():
    size = 100 << 20
    peak = peak_bytes(lambda: np.ones(size, np.uint8).sum())
    assert peak is not None
    assert 0.9 * size < peak < 1.5 * size


@pytest.mark.parametrize(
    ("answer", "reference", "error"),
    [
        ([1.0, 10.0], [1.5, 11.0], 0.5 / 1.5),
        ([0.25], [0.5], 0.25),
        ([np.nan, np.inf], [np.nan, np.inf], 0.0),
        ([np.nan], [1.0], np.inf),
        ([np.inf], [-np.inf], np.inf),
        ([1.0, 2.0], [1.0], np.inf),
        ([], [], 0.0),
    ],
)
def test_errors_by_hand(answer, reference, error):
    assert relative_error(answer, reference) == error


def test_errors_of_tensors_keep_their_precision():
    torch = pytest.importorskip("torch")
    assert relative_error(torch.tensor([1 + 2**-40], dtype=torch.float64), [1.0]) == 2**-40
    assert relative_error(torch.tensor([1.5], dtype=torch.bfloat16), [1.0]) == 0.5


def test_whole_run_is_made_once():
    answers = []

    def once(answer):
        answers.append(answer)
        return WholeRun(
            answer,
            [2.0, 4.0, 3.0],
            7.0,
            {"forward": [1.0, 2.0, 1.5]},
            9 << 20,
            {"weights": 5},
            [(0, 0.5)],
            [(0.1, 0.2)],
            "busy",
        )

    rows = run([Provider("whet", lambda x: lambda: once(1.0)), Provider("wrong", lambda x: lambda: once(2.0))])
    assert answers == [1.0, 2.0]
    row = rows["whet"]
    assert row.status == "measured" and row.samples_s == [2.0, 4.0, 3.0] and row.start_s == 7.0
    assert row.parts == {"forward": [1.0, 2.0, 1.5]} and row.peak_bytes == 9 << 20
    assert row.memory == {"weights": 5} and row.curve == [(0, 0.5)]
    assert row.scores == [(0.1, 0.2)] and row.note == "busy"
    assert rows["wrong"].status == "wrong" and rows["wrong"].samples_s == []
