"""The servers' suite on a tiny model: the client's times, Whet's server and its peers in this process, and errors."""

import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from tests.cli.conftest import tiny_model, write_tiny_gguf  # noqa: F401  (a fixture)
from tests.raising import mentions
from tests.tiny import tiny_llama

from benchmarks.contenders.engine.models import StoredModel
from benchmarks.contenders.engine.workload import Workload, files_of, random_workload, sample_error
from benchmarks.contenders.llama_programs import find_llama_program
from benchmarks.contenders.serve import likelihoods, loads
from benchmarks.contenders.serve.client import Answer, post_all
from benchmarks.contenders.serve.guided import by_guidellm
from benchmarks.contenders.serve.likelihoods import Likelihoods, Rows, likelihood_error
from benchmarks.contenders.serve.loads import on_server
from benchmarks.contenders.serve.servers import WhetServer, every_setting, open_llama, open_whet
from benchmarks.suites.serve import ServeOptions, link, tables
from whet.bench import NotMeasured

torch.set_num_threads(1)
SIZES = {
    "vocab_size": 258, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def stored(tiny_model, tmp_path_factory):  # noqa: F811
    """Create the tiny model in a GGUF file, whose weights are so large that every token of a prompt matters."""
    folder = tmp_path_factory.mktemp("serve")
    model = tiny_llama(**SIZES, rms_norm_eps=1e-5, initializer_range=0.3, eos_token_id=1)
    path = write_tiny_gguf(model, tiny_model, folder / "tiny.gguf")
    return StoredModel("tiny", {"model_type": "llama", **SIZES}, "own", lambda _: path, folder, write=link)


@pytest.fixture(scope="module")
def load(stored):
    """Create a load of three prompts of 12 tokens with 10 new tokens each."""
    return random_workload(np.random.default_rng(0), stored, 3, 12, n_steps=9)


whet = partial(open_whet, "float32")


# --- the client -----------------------------------------------------------------------------------------


@contextmanager
def answering(*parts, status=200):
    """Answer every POST with these parts, each in its own chunk."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            for part in parts:
                self.wfile.write(part)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}\n\n'
TEXT = b'data: {"choices": [{"text": "a"}]}\n\n'


def test_gaps_count_every_token_once():
    answer = Answer(1.0, 9.0, [3.0, 4.0, 8.0], 5, 6, "abc", {})
    assert answer.first_s == 2
    assert answer.gaps_s.tolist() == [1, 4, 0, 0, 0]  # six tokens in three chunks


def test_streams_are_cut_anywhere():
    parts = (b": keep-alive\n\n" + TEXT[:9], TEXT[9:] + TEXT, USAGE + b"data: [DO", b"NE]\n\n")
    with answering(*parts) as address:
        for answer in post_all(address, "/", [{"stream": True}] * 3):
            assert (answer.text, answer.n_prompt, answer.n_tokens) == ("aa", 3, 4)
            assert answer.started_s < answer.arrivals_s[0] <= answer.arrivals_s[1] <= answer.ended_s


@pytest.mark.parametrize(
    ("parts", "fact"),
    [
        ((TEXT, USAGE), "without [DONE]"),
        ((TEXT, b"data: [DONE]\n\n"), "without usage"),
        ((b'data: {"error": {"message": "no"}}\n\n', b"data: [DONE]\n\n"), "no"),
    ],
)
def test_a_broken_stream_is_an_error(parts, fact):
    with answering(*parts) as address, pytest.raises(RuntimeError, match=mentions(fact)):
        post_all(address, "/", [{"stream": True}])


def test_an_error_status_is_an_error():
    with (
        answering(b"the reason", status=400) as address,
        pytest.raises(RuntimeError, match=mentions("400", "the reason")),
    ):
        post_all(address, "/", [{}])


# --- Whet's server --------------------------------------------------------------------------------------


TASKS = (loads.stream_all, loads.first_token, loads.longest_gaps, loads.whole, loads.in_turn, loads.at_once)


@pytest.mark.parametrize("task", TASKS)
def test_whet_is_right_in_every_task(load, task):
    call = on_server(whet, task, load)
    timed = call()
    assert sample_error(timed.value, load) < 1e-4
    assert 0 < timed.parts[timed.counted] < 60
    assert call().value is timed.value


def test_a_server_that_counts_other_tokens_is_not_timed(load, stored):
    other = Workload(load.files, [[*prompt, 5] for prompt in load.prompts], n_steps=9)

    class Deaf(WhetServer):
        def __init__(self):
            pass

        def complete(self, bodies):
            return post_all(address, "/", bodies)

    with answering(TEXT, USAGE, b"data: [DONE]\n\n") as address, pytest.raises(RuntimeError, match=mentions("3 + 4")):
        loads.stream_all(Deaf(), other)


def test_engine_and_cpu_time(load):
    assert sample_error(loads.in_process(load)(), load) < 0.05  # in bf16
    timed = loads.server_cpu(whet, load)()
    assert sample_error(timed.value, load) < 1e-4
    assert 0 <= timed.parts[timed.counted] < 10


def test_a_server_that_does_not_start_reports_why(tmp_path):
    (tmp_path / "no.gguf").write_bytes(b"GGUF")
    with pytest.raises(RuntimeError, match=mentions("did not start", "no.gguf")):
        open_whet("", tmp_path / "no.gguf", 1, 1, lambda _: 0.0)


def test_a_schema_must_not_change_the_completion(load):
    anything = {"type": "string"}
    with pytest.raises(RuntimeError, match=mentions("changes a completion")):
        loads.with_schema(whet, anything, load)()


# --- log-likelihoods ------------------------------------------------------------------------------------


def rows_of(stored, start):
    rng = np.random.default_rng(1)
    lengths = [20] * 5 if start > 1 else [4, 9, 20, 3, 11]
    return Rows(files_of(stored), [rng.integers(2, 258, n).tolist() for n in lengths], start)


@pytest.mark.parametrize("start", [1, 14])
def test_log_likelihoods_are_right(stored, start, monkeypatch):
    monkeypatch.setattr(likelihoods, "_BATCHES", (1, 2))
    x = rows_of(stored, start)
    for call, tolerance in ((likelihoods.by_server(whet, x), 1e-4), (likelihoods.by_transformers(x), 0.1)):
        first, second = call().value, call().value
        assert likelihood_error(first, x) < tolerance and likelihood_error(second, x) < tolerance
        assert first.rows != second.rows  # no prefix cache has them
        assert [len(each) for each in first.logprobs] == [len(row) - start for row in x.rows]


def test_wrong_log_likelihoods_are_found(stored):
    x = rows_of(stored, 1)
    right = likelihoods.by_server(whet, x)().value
    shifted = Likelihoods(right.rows, [np.roll(each, 1) for each in right.logprobs])
    assert likelihood_error(shifted, x) > 0.1
    assert likelihood_error(Likelihoods(right.rows, [each[:-1] for each in right.logprobs]), x) == np.inf


# --- llama-server and the suite -------------------------------------------------------------------------


def test_missing_llama_server_is_named(tmp_path, monkeypatch, load):
    monkeypatch.setattr("benchmarks.contenders.llama_programs.BUILT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for program in ("", str(tmp_path / "own")):
        with pytest.raises(NotMeasured, match=mentions("tools/llama_server.py", program or "llama-server")):
            on_server(partial(open_llama, program), loads.whole, load)
    for path in (tmp_path / "bin/llama-server", tmp_path / "llama-server", tmp_path / "own"):
        path.parent.mkdir(exist_ok=True)
        path.touch(0o755)
        assert find_llama_program("llama-server", "" if path.name != "own" else str(path)) == str(path)


def test_missing_guidellm_is_named(monkeypatch, tmp_path, load):
    monkeypatch.setenv("PATH", str(tmp_path))
    for program in ("", str(tmp_path / "none")):
        with pytest.raises(NotMeasured, match=mentions("pip install guidellm", program or "guidellm")):
            by_guidellm(whet, program, load)


def test_a_failure_of_guidellm_is_reported(tmp_path, load):
    program = tmp_path / "guidellm"
    program.write_text("#!/bin/sh\necho no such profile >&2; exit 3\n")
    program.chmod(0o755)
    call = by_guidellm(whet, str(program), load)
    with pytest.raises(RuntimeError, match="guidellm failed: no such profile"):
        call()


def test_settings_of_llama_server():
    assert len(every_setting(1)) == 2 and len(set(every_setting(8))) == 4


def test_serve_suite_has_every_row():
    found = {table.title.removesuffix(", SmolLM2-135M"): table for table in tables(ServeOptions())}
    names = {title: [case.name for case in table.cases] for title, table in found.items()}
    assert names["Streams at once"] == names["Slowest tokens of streams"] == ["8 streams", "32 streams"]
    assert found["Streams at once"].cases[1].n_items == 32 * 128
    assert [case.n_items for case in found["Log-likelihoods"].cases] == [8192, 8192]
    assert [provider.name for provider in found["One stream"].providers] == ["whet", "llama-server"]
    assert len([title for title in found if title.startswith("A prefix of 1,024 tokens")]) == 2
