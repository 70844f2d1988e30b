"""The dispatcher: help, unknown names, missing packages, exit statuses."""

import gc
import os
import shlex
import subprocess
import sys

import pytest
from tests.processes import WHET, printed_by
from tests.raising import assert_mentions

from whet.cli import main
from whet.config.algorithms import ALGORITHMS
from whet.memory import without_gc

METHODS = tuple(ALGORITHMS)


@pytest.mark.parametrize(
    "code", ["import whet", "from whet.cli import main; main(['--help'])", "from whet.cli import main; main(['train'])"]
)
def test_import_and_help_load_only_numpy(code):
    code = f"import sys; before = set(sys.modules); {code}; print(*set(sys.modules) - before)"
    modules = printed_by(code).splitlines()[-1].split()
    assert {name.split(".")[0] for name in modules} <= sys.stdlib_module_names | {"whet", "numpy"}
    assert not {"asyncio", "ctypes.util", "multiprocessing", "unittest"} & set(modules)
    assert sum(name.startswith("whet.") for name in modules) < 40  # the primitives, and no engine, trainer or bench


def test_a_run_without_adapters_does_not_import_peft(files):
    code = "import sys; from whet.cli import main; assert main() == 0; print('peft' in sys.modules)"
    assert printed_by(code, "train", "sft", *files("run", steps=1)).splitlines()[-1] == "False"


def test_gc_is_enabled_again_after_imports(files, error_of):
    assert gc.isenabled()
    assert "cannot be loaded" in error_of("train", "sft", *files("run", model="tests")) and gc.isenabled()
    gc.disable()
    try:
        with without_gc():
            assert not gc.isenabled()
        assert not gc.isenabled()  # still disabled
    finally:
        gc.enable()


def test_help_does_not_import_torch():
    code = (
        "import sys\nfrom whet.cli import main\ntry: main(sys.argv[1:])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    out = printed_by(code, "train", "online-dpo", "--help", COLUMNS="80")
    assert out.endswith("False\n") and "--preference STR" in out


def test_usage(capsys):
    for argv in ([], ["--help"], ["-h"]):
        assert main(argv) == 0
    assert main(["--version"]) == 0
    out = capsys.readouterr().out
    assert out.count("usage: whet COMMAND") == 3 and out.endswith("whet 0.1.0\n")
    assert main(["train", "--help"]) == 0 and main(["train"]) == 2
    assert "METHOD is one of" in capsys.readouterr().out
    assert max(map(len, out.splitlines())) < 80


@pytest.mark.parametrize("method", METHODS)
def test_help_of_a_method(method, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["train", method, "--help"])
    out = capsys.readouterr().out
    assert exit_.value.code == 0 and f"usage: whet train {method} [CONFIG.toml]" in out
    assert "--learning-rate FLOAT" in out and "Learning rate after the warm-up." in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["train", "sft", "--help"], ["trian"]])
def test_python_m_whet_is_whet(argv):
    code = "import sys; from whet.cli import main; sys.argv[0] = 'whet'; sys.exit(main())"
    runs = [
        subprocess.run([sys.executable, *how, *argv], capture_output=True, text=True)
        for how in (["-m", "whet"], ["-c", code])
    ]
    as_module, as_command = [(run.returncode, run.stdout, run.stderr) for run in runs]
    assert as_module == as_command and "whet" in "".join(as_module[1:]).lower() and "__main__" not in as_module[1]


def test_unknown_names(error_of):
    assert_mentions(error_of("trian"), "whet: ", "'trian'", "Did you mean train?")
    assert_mentions(error_of("train", "gpro"), "'gpro'", "Did you mean grpo?")
    assert_mentions(error_of("train", "xyzzy"), "'xyzzy'", ", ".join(METHODS))


@pytest.mark.parametrize("package", ["tyro", "torch", "tokenizers"])
def test_missing_package_is_one_line_with_the_pip_command(package, files, error_of, monkeypatch):
    with pytest.raises(SystemExit):
        main(["train", "sft", "--help"])  # on first use, tyro imports the modules that sys.modules names
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    error = error_of("train", "sft", *files("run", steps=1))
    source = "'whet[train]'" if package == "torch" else "whet"
    assert_mentions(error, "whet: whet train", package, f"pip install {source}")


@pytest.mark.parametrize(("flag", "package"), [("--loggers=wandb", "wandb"), ("--lora-rank=1 --backend=torch", "peft")])
def test_missing_extra_is_reported_before_the_run(flag, package, files, error_of, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    error = error_of("train", "sft", *files("run", steps=1), *flag.split())
    assert_mentions(error, "whet: whet train sft", f"pip install 'whet[{package}]'")
    assert not (files.folder / "run").exists()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_closed_pipe_prints_no_traceback(unbuffered):
    command = f"{sys.executable} -c 'import sys; from whet.cli import main; sys.exit(main())' --help"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    pipe = ["bash", "-c", f"{command} | true; echo ${{PIPESTATUS[0]}}"]
    run = subprocess.run(pipe, capture_output=True, text=True, env=environment)
    assert (run.stdout, run.stderr) == ("141\n", "")


@pytest.mark.parametrize(
    ("closed", "argv", "status"), [("<&-", "chat MODEL", 0), (">&-", "--version", 0), ("2>&-", "trian", 2)]
)
def test_closed_stream_is_the_null_device(closed, argv, status, tiny_gguf):
    command = f"{shlex.join(WHET)} {argv.replace('MODEL', str(tiny_gguf))} {closed}"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (status, "", "")


@pytest.mark.parametrize("argv", ["info {}", "generate {} --prompt x", "chat {}", "estimate {}"])
def test_invalid_file_name_is_one_line(argv, capsys):
    assert main(argv.format("x" * 300).split()) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("whet: 'xxx") and "File name too long." in line


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
@pytest.mark.parametrize("argv", ["--help", "info {model}", "chat {model} --max-new-tokens 2"])
def test_full_disk_behind_standard_output_is_one_line(argv, tiny_gguf):
    """Whether a line end, the end of the command or the end of the process flushes it."""
    command = f"{shlex.join(WHET)} {argv.format(model=shlex.quote(str(tiny_gguf)))} > /dev/full"
    run = subprocess.run(["bash", "-c", command], input="hello\n", capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].startswith("whet: standard output cannot be written: No space left on device")
    assert "Traceback" not in run.stderr and "Exception" not in run.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1:strict", "utf-8:strict"])
def test_unencodable_characters_are_replaced(encoding, tiny_gguf, tmp_path):
    (tmp_path / "модель\udcff.gguf").symlink_to(tiny_gguf)
    argv = [*WHET, "info", os.fsencode(tmp_path / "модель\udcff.gguf")]
    run = subprocess.run(argv, capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding})
    assert (run.returncode, run.stderr) == (0, b"") and b"?.gguf" in run.stdout


@pytest.mark.parametrize(
    "error",
    [MemoryError("std::bad_alloc"), MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: no memory")],
)
def test_out_of_memory_is_one_line(error, error_of, monkeypatch):
    def raise_error(argv):
        raise error

    monkeypatch.setattr("whet.cli._run", raise_error)
    assert_mentions(error_of("info", "x"), f"({str(error) or 'MemoryError'})", "memory", "ulimit -v", "whet estimate")


@pytest.mark.parametrize("variable", ["WHET_NUM_THREADS", "WHET_ISA"])
def test_invalid_environment_variable_is_one_line(variable, tiny_gguf):
    environment = {**os.environ, variable: "many"}
    run = subprocess.run([*WHET, "info", tiny_gguf], capture_output=True, text=True, env=environment)
    [line] = run.stderr.splitlines()
    assert run.returncode == 2 and line.startswith(f"whet: {variable}=many ")


def test_unexpected_errors_keep_their_traceback(files, monkeypatch):
    monkeypatch.setattr("whet.runs.save.write_report", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["train", "sft", *files("run", steps=1)])
