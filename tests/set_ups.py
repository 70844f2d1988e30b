"""Real installations of Whet in the documented ways, run by `make wheel-test` and `make setup-test`.

    wheel     `pip wheel .` without git, CMake and Ninja; the wheel in an empty environment; the source package
    pythons   constraints.txt under Python 3.11 to 3.14, for everything that `make check` installs, and the environment
              of `make demo` with every installed interpreter

Both link the core that `make test` compiled, and compile the extension for their interpreter.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "set-ups"
CORE = ROOT / "build" / "release" / "libwhet_core.a"
EXTRA = "dev"  # and the extras that it names
COMPILER = ("as", "ld", "ar", "ranlib", "nm", "strip", "sh", "uname")  # programs that it needs on PATH

sys.path.insert(0, str(ROOT / "tools"))
from interpreters import VERSIONS, find_interpreters  # noqa: E402
from set_up import BUILD_TOOLS, index_of_torch  # noqa: E402


def main() -> None:
    steps = {"wheel": check_wheel, "pythons": check_pythons}
    for name in sys.argv[1:]:
        start = time.monotonic()
        steps[name]()
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)


def run(*command: object, path: str | None = None, **env: object) -> str:
    """Run a command and return its output; stderr is passed through."""
    given = {**os.environ, "SKBUILD_CMAKE_DEFINE": f"WHET_CORE={CORE}", "PATH": path or os.environ["PATH"]}
    given |= {name: str(value) for name, value in env.items()}
    done = subprocess.run([str(part) for part in command], env=given, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{done.stdout}")
    return done.stdout


# ---------------------------------------------------------------- the wheel


def check_wheel() -> None:
    wheels, tools = WORK / "wheel", WORK / "compiler"
    for folder in (wheels, tools):
        shutil.rmtree(folder, ignore_errors=True)
    tools.mkdir(parents=True)
    compilers = (name.split()[0] for name in ("c++", sysconfig.get_config_var("CXX") or "c++"))
    for name in {*COMPILER, *compilers}:
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    base = Path(sys.base_prefix, "bin", "python3")
    run(base, "-m", "venv", wheels / "venv")
    python = wheels / "venv" / "bin" / "python"
    pinned = {"PIP_CONSTRAINT": ROOT / "constraints.txt", "PIP_DISABLE_PIP_VERSION_CHECK": 1}
    build = [python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", wheels, "."]
    run(*build, path=str(tools), SKBUILD_BUILD_DIR=WORK / "wheel-build", **pinned)
    run(python, "-m", "pip", "install", "-q", *wheels.glob("*.whl"), **pinned)
    print(run(python, "tests/wheel_smoke.py", path="/nowhere"), end="")
    check_source_package(wheels)


def check_source_package(folder: Path) -> None:
    """Check that the source package has every file in git except files for continuous integration."""
    code = f"import scikit_build_core.build as build; print(build.build_sdist({str(folder)!r}))"
    archive = run(sys.executable, "-c", code).split()[-1]
    with tarfile.open(folder / archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    expected = {name for name in run("git", "ls-files").splitlines() if not name.startswith((".ci/", ".github/"))}
    assert expected <= names, f"{archive} lacks {sorted(expected - names)}"
    assert not any(name.endswith((".so", ".pyc")) for name in names), archive


# ---------------------------------------------------------------- every Python


def check_pythons() -> None:
    WORK.mkdir(parents=True, exist_ok=True)
    interpreters = find_interpreters()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:  # two download packages while one compiles
        for line in pool.map(lambda version: check_python(version, interpreters.get(version)), VERSIONS):
            print(line, flush=True)


def check_python(version: str, interpreter: str | None) -> str:
    packages = resolve(version, interpreter)
    # If torch would install gigabytes of CUDA, the environment has no torch.
    cuda = any(name.startswith("nvidia-") for name in packages)
    summary = f"Python {version}: {len(packages)} packages{', including CUDA' if cuda else ''}"
    if interpreter is None:
        return f"{summary}; this interpreter is not installed"
    return f"{summary}; {check_environment(version, interpreter, 'bench' if cuda else 'train')}"


def resolve(version: str, interpreter: str | None) -> list[str]:
    """Resolve the packages of EXTRA under this Python, wheels only; pip downloads only their metadata.

    pip evaluates markers for the interpreter on which it runs: ``interpreter``, or else this one.
    """
    report, constraints = WORK / f"{version}-report.json", WORK / f"{version}-constraints.txt"
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    pins = [Requirement(line) for line in lines if line]
    constraints.write_text("".join(f"{r.name}{r.specifier}\n" for r in pins if applies(r, version)))
    pip = [sys.executable, "-m", "pip", *(["--python", interpreter] if interpreter else [])]
    where = ["--only-binary=:all:", "--python-version", version, "--target", WORK / "nowhere"]
    what = ["-q", "--dry-run", "--ignore-installed", "--report", report, "-c", constraints, *index_of_torch()]
    run(*pip, "install", "--disable-pip-version-check", *what, *where, *requirements(version), *BUILD_TOOLS)
    return [package["metadata"]["name"] for package in json.loads(report.read_text())["install"]]


def requirements(version: str) -> list[str]:
    """Return the requirements of the package with EXTRA and the extras that it names."""
    found, wanted = set(), [EXTRA]
    declared = [Requirement(line) for line in requires("whet") or []]
    for extra in wanted:
        for requirement in (r for r in declared if applies(r, version, extra)):
            if requirement.name == "whet":
                wanted += [e for e in requirement.extras if e not in wanted]
            else:
                found.add(f"{requirement.name}{requirement.specifier}")
    return sorted(found)


def applies(requirement: Requirement, version: str, extra: str = "") -> bool:
    environment = {"python_version": version, "python_full_version": f"{version}.0", "extra": extra}
    return requirement.marker is None or requirement.marker.evaluate(environment)


def check_environment(version: str, interpreter: str, extra: str) -> str:
    folder, stamp = WORK / version, f"build/set-ups/{version}/.installed-{extra}"
    shutil.rmtree(folder, ignore_errors=True)
    variables = [f"PYTHON={interpreter}", f"VENV=build/set-ups/{version}", f"BUILD=build/set-ups/{version}-build"]
    start = time.monotonic()
    run("make", *variables, stamp)
    run("make", "-q", *variables, stamp)  # a second run is a no-op
    elapsed = time.monotonic() - start
    python = folder / "bin" / "python"
    assert run(python, "-m", "whet", "--version") == run(folder / "bin" / "whet", "--version")
    assert "usage: whet train grpo" in run(python, "-m", "whet", "train", "grpo", "--help")
    run(python, "-c", "import whet; assert whet.compute_group_advantages([0.0, 1.0]).tolist() == [-1.0, 1.0]")
    if extra == "train":
        run(python, "-c", "import whet.nn, whet.algorithms.grpo, whet.cli.demo")
    return f"{interpreter} with [{extra}] in {elapsed:.0f} s"


if __name__ == "__main__":
    main()
