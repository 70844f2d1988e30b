"""Loads of the suite "serve" that guidellm drives: synthetic prompts by chat completions, streamed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders.engine.workload import Workload, load_once
from benchmarks.contenders.serve.loads import file_of, open_server_for, request, stream_all
from benchmarks.contenders.serve.servers import Open, Server
from whet.bench.case import Call, NotMeasured, Timed
from whet.models.tokenizers import read_tokenizer

PROMPT = 128
ROOM = 64
"""Tokens of a prompt in addition: guidellm's number of the request, and the chat template."""
_ROUNDS = 2
"""Requests of each stream."""


def by_guidellm(open_server: Open, program: str, x: Workload) -> Call:
    """Let guidellm keep as many streams open as the workload has prompts, and time them from first to last.

    Args:
        program: guidellm's; empty: the one on PATH.
        x: prompts of PROMPT + ROOM tokens, by which servers are set up.

    Raises:
        NotMeasured: guidellm is missing.
        RuntimeError: a request failed, or has another number of tokens.
    """
    path = shutil.which(program or "guidellm")
    if path is None:
        raise NotMeasured(f"{program or 'guidellm'} is missing: pip install guidellm; --guidellm names its program")
    server = open_server_for(open_server, stream_all, x)
    sample = server.sample(request(x, x.prompts[0]))
    folder = load_once(("guidellm's tokenizer", file_of(x.files)), partial(_write_tokenizer, file_of(x.files)))

    def call() -> Timed:
        done = _run(path, server, Path(folder.name), x)
        if len(done) != _ROUNDS * len(x.prompts) or any(each["output_tokens"] != x.n_tokens for each in done):
            raise RuntimeError(f"guidellm counts {[each['output_tokens'] for each in done]} tokens")
        end, begin = max(each["request_end_time"] for each in done), min(each["request_start_time"] for each in done)
        first_s = float(np.median([each["time_to_first_token_ms"] for each in done])) / 1e3
        gap_s = float(np.median([each["inter_token_latency_ms"] for each in done])) / 1e3
        parts = {"all streams": end - begin, "first token (median)": first_s, "between tokens (median)": gap_s}
        return Timed(sample, parts, "all streams", server.note)

    return call


def _write_tokenizer(file: Path) -> tempfile.TemporaryDirectory[str]:
    """Write the tokenizer of a GGUF file, with which guidellm makes prompts and counts tokens."""
    folder = tempfile.TemporaryDirectory(prefix="whet-guidellm-")
    read_tokenizer(file).save_pretrained(folder.name)
    return folder


def _run(path: str, server: Server, folder: Path, x: Workload) -> list[dict[str, Any]]:
    """Return the requests that succeeded, with their times."""
    backend = {"kind": "openai_http", "target": server.url, "extras": {"body": dict(server.greedy)}}
    with tempfile.TemporaryDirectory(prefix="whet-guidellm-") as scratch:
        report = Path(scratch) / "report.json"
        command = [
            path, "run", "--backend", json.dumps(backend), "--profile", f"kind=concurrent,streams={len(x.prompts)}",
            "--constraint", f"kind=max_requests,count={_ROUNDS * len(x.prompts)}",
            "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={x.n_tokens}",
            "--tokenizer", f"kind=huggingface_auto,model={folder}", "--seed", f"kind=static,value={next(x.calls)}",
            "--output", f"kind=json,path={report}", "--disable-console",
        ]  # fmt: skip
        given = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=given, cwd=scratch)
        if done.returncode or not report.is_file():
            raise RuntimeError(f"guidellm failed: {(done.stdout + done.stderr)[-800:]}")
        [benchmark] = json.loads(report.read_text())["benchmarks"]
    return benchmark["requests"]["successful"]
