"""The clients that people use, in their newest versions, each in a separate environment, against ``whet serve``.

Environments are made once, below the user's cache (~/.cache/whet/clients); remove them for newer versions. The scripts
in clients/ get the server's address and the engine's answers, and fail if a client's answer differs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.serve.models import write_tools_model
from tests.serve.test_command import start

import whet
from whet import SamplingParams
from whet.text.model import find_stop_ids, load_chat_tokenizer

WORK = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "whet" / "clients"
SCRIPTS = Path(__file__).with_name("clients")
CLIENTS = {  # script -> packages
    "openai_python": ["openai"],
    "ollama_python": ["ollama"],
    "litellm_client": ["litellm"],
    "instructor_client": ["instructor"],
    "pydantic_ai_client": ["pydantic-ai-slim[openai]"],
}
MESSAGES, SEED, MAX_TOKENS = [{"role": "user", "content": "hello"}], 7, 30
PROMPT = "hello world"


class Served(NamedTuple):
    """A server of a tiny model, and the engine's answers, for scripts."""

    url: str
    model: Path
    facts: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = write_tools_model(tmp_path_factory.mktemp("clients") / "tiny")
    process, url, _ = start(model, "--weights", "float32")
    try:
        yield Served(url.removesuffix("/v1"), model, json.dumps(engine_answers(model)))
    finally:
        process.kill()
        process.wait()


def engine_answers(model: Path) -> dict[str, Any]:
    tokenizer = load_chat_tokenizer(str(model), "test")
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    with whet.Engine.from_pretrained(model, weights="float32") as engine:
        stops = find_stop_ids(str(model), tokenizer, engine.config.vocab_size, "test")
        sampling = SamplingParams(seed=SEED, max_new_tokens=MAX_TOKENS, stop_token_ids=stops)
        [[sample]] = engine.generate([prompt], 1, sampling)
        [logprobs] = engine.logprobs([tokenizer.encode(PROMPT)])
    text = tokenizer.decode(sample.token_ids, skip_special_tokens=True)
    return {
        "messages": MESSAGES, "seed": SEED, "max_tokens": MAX_TOKENS, "text": text, "finish": sample.finish_reason,
        "n_tokens": len(sample.token_ids), "prompt": PROMPT, "logprobs": logprobs.tolist(),
    }  # fmt: skip


def environment(name: str, packages: list[str], *, inherits: bool = False) -> Path:
    """Create an environment with these packages unless it exists; return its interpreter.

    Args:
        name: of its folder.
        packages: to install.
        inherits: whether it has the packages of the current environment too, and Whet.
    """
    inherited = [path for path in sys.path if path.endswith("site-packages")] if inherits else []
    folder, wanted = WORK / name, json.dumps([packages, sys.executable, inherited])
    python, stamp = folder / "bin" / "python", folder / "packages.json"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    venv.create(folder, clear=True, with_pip=False)
    if inherits:
        [site] = folder.glob("lib/python*/site-packages")
        lines = [f"import site; site.addsitedir({path!r})\n" for path in inherited]
        (site / "inherited.pth").write_text("".join(lines))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-compile", *packages], check=True, env={**os.environ, "PYTHONPATH": ""})
    stamp.write_text(wanted)
    return python


def run(served: Served, *command: object, path: str = "", cwd: Path | None = None) -> str:
    """Run a client's script, and return what it prints; its errors fail the test."""
    given = {**os.environ, "PYTHONPATH": path, "WHET_MODEL": str(served.model)}
    done = subprocess.run(
        [*map(str, command), served.url, served.facts], capture_output=True, text=True, env=given, cwd=cwd, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("name", CLIENTS)
def test_clients_get_the_engines_answers(name, served):
    run(served, environment(name, CLIENTS[name]), SCRIPTS / f"{name}.py")


def test_openai_node(served):
    node = shutil.which("node")
    assert node, "Node is missing: pip install 'whet[web]'"
    folder = WORK / "openai_node"
    if not (folder / "node_modules" / "openai").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text("{}")
        install = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "openai"]
        subprocess.run(install, cwd=folder, check=True)
    run(served, node, SCRIPTS / "openai_node.mjs", cwd=folder)


def test_lm_eval(served):
    """Server and engine in process give the log-likelihoods, texts and accuracies that transformers gives."""
    python = environment("lm_eval", ["lm-eval[api]"], inherits=True)
    run(served, python, SCRIPTS / "lm_eval_harness.py", path=os.pathsep.join(sys.path))


def test_verifiers_trains_on_the_servers_tokens(served):
    python = environment("verifiers", ["verifiers", "uv"])
    rows = json.loads(run(served, python, SCRIPTS / "verifiers_train.py").splitlines()[-1])
    with whet.Engine.from_pretrained(served.model, weights="float32") as engine:
        right = engine.logprobs([row["token_ids"] for row in rows], start=[row["start"] for row in rows])
    for row, logprobs in zip(rows, right, strict=True):
        np.testing.assert_allclose(row["logprobs"], logprobs, rtol=0, atol=6e-5)  # traces have four decimals
