"""``whet bench`` end to end: processes, files, options and errors."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.raising import assert_mentions

import whet.bench
from whet.bench import BenchOptions
from whet.bench.run import run_suite
from whet.bench.suites import CLONE, load_suite, suite_names
from whet.cli import main


def whet_bench(*arguments, cwd=None):
    command = [sys.executable, "-c", "import sys; from whet.cli import main; sys.exit(main())", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Run one row of one suite against one peer; return its results and folder."""
    folder = tmp_path_factory.mktemp("run")
    flags = ["--quick", "--only", "16 x 4", "--peers", "numpy", "--threads", "1", "--out", str(folder)]
    run = whet_bench("llm-ops", *flags)
    assert run.returncode == 0, run.stderr
    assert "16 x 4" in run.stdout
    return json.loads((folder / "results.json").read_text()), folder


def test_run_writes_results_report_and_plots(results):
    found, folder = results
    assert {"results.json", "rows.csv", "report.md", "report.html"} <= {path.name for path in folder.iterdir()}
    assert list(folder.glob("*.png"))
    assert (found["schema"], found["suite"], found["quick"]) == (1, "llm-ops", True)
    assert found["threads"]["asked"] == found["threads"]["whet"] == 1
    assert len(found["threads"]["cpus"]) == 1
    assert found["ceilings"]["1"]["flops"]["float32"] > 1e9
    assert found["command"].startswith("whet bench llm-ops --quick")
    cases = [case for table in found["tables"] for case in table["cases"]]
    assert cases
    for case in cases:
        assert "16 x 4" in case["name"]
        names = [row["provider"] for row in case["rows"]]
        assert names[0].startswith("whet")
        assert all(name.lower().startswith(("whet", "numpy")) for name in names)
        for row in case["rows"]:
            assert row["status"] == "measured"
            assert len(row["samples_s"]) >= 5
            assert row["error"] <= row["tolerance"]


def test_report_loads_no_external_resources(results):
    page = (results[1] / "report.html").read_text()
    assert "<script" not in page
    assert not re.search(r"(src|href)=[\"']?https?:", page)


def test_compare_finds_a_planted_regression(results, tmp_path):
    found, folder = results
    assert whet_bench("compare", str(folder), str(folder)).returncode == 0
    for case in (case for table in found["tables"] for case in table["cases"]):
        case["rows"][0]["samples_s"] = [3 * s for s in case["rows"][0]["samples_s"]]
    (tmp_path / "results.json").write_text(json.dumps(found))
    run = whet_bench("compare", str(folder), str(tmp_path))
    assert run.returncode == 1
    assert "16 x 4" in run.stdout


def test_help_lists_suites_and_options(capsys):
    assert main(["bench"]) == 2
    assert main(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    assert {"llm-ops", "trl", "impact"} <= set(suite_names())
    for name in suite_names():
        assert f"  {name} " in shown
        assert load_suite(name).name == name
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "llm-ops", "--help"])
    assert stopped.value.code == 0
    assert "--quick" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["llm-op"], ["'llm-op'", "llm-ops?"]),
        (["llm-ops", "--only", "17 x 3"], ["'17 x 3'", "16 x 4"]),
        (["llm-ops", "--peers", "jax"], ["'jax'", "NumPy"]),
        (["llm-ops", "--threads", "5000"], ["threads is 5000"]),
        (["llm-ops", "--threads", "-1"], ["threads is -1"]),
        (["compare", "nowhere", "nowhere"], ["nowhere"]),
        (["compare", ".", ".", "--threshold", "0"], ["threshold", "0.0", "above 0"]),
    ],
)
def test_invalid_option_is_one_line(arguments, facts, capsys):
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert_mentions(error, *facts)
    assert error.count("\n") == 1


def test_a_file_in_place_of_the_folder_is_one_line(tmp_path, capsys):
    (tmp_path / "out").touch()
    flags = ["--quick", "--only", "16 x 4", "--out", str(tmp_path / "out")]
    assert main(["bench", "llm-ops", *flags]) == 2
    assert_mentions(capsys.readouterr().err, "whet: ", tmp_path / "out", "exists")


def test_without_a_clone_other_suites_name_the_fix(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(whet.bench.suites._PACKAGES, "benchmarks.suites", str(tmp_path / "benchmarks"))
    assert suite_names() == ["kernels"]
    assert main(["bench", "grpo"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert_mentions(error, "'grpo'", "kernels", "clone", "pip install -e")


def test_interrupted_run_reports_partial_results(tmp_path, monkeypatch):
    measure = whet.bench.run._measure

    def stopped(*arguments, **named):
        _, found = measure(*arguments, **named)
        return 130, found

    monkeypatch.setattr("whet.bench.run._measure", stopped)
    options = BenchOptions(quick=True, only="16 x 4", peers=("numpy",), threads=1, out=str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        run_suite(load_suite("llm-ops"), options, "whet bench llm-ops")
    assert json.loads((tmp_path / "results.json").read_text())["interrupted"] is True


@pytest.mark.skipif(sys.platform != "linux", reason="a parent death signal exists on Linux only")
def test_worker_ends_with_the_command(tmp_path):
    command = [sys.executable, "-m", "whet", "bench", "llm-ops", "--threads", "1", "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as bench:
        deadline = time.monotonic() + 60
        while not (workers := psutil.Process(bench.pid).children()) and time.monotonic() < deadline:
            time.sleep(0.05)
        [worker] = workers
        while "whet.bench.worker" not in " ".join(worker.cmdline()) or worker.cpu_times().user < 1.5:
            time.sleep(0.05)
        bench.kill()
    assert worker.wait(timeout=20) is None and not worker.is_running()


def test_bench_uses_public_names_only():
    folder = Path(whet.bench.__file__).parent
    for path in [*folder.rglob("*.py"), *(CLONE / "benchmarks").rglob("*.py")]:
        assert not re.search(r"\b_core\b", path.read_text()), path
