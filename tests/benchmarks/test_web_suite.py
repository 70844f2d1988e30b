"""The browser suite: pages run the right model, and missing prerequisites are named."""

import shutil
from functools import partial

import numpy as np
import pytest
import torch
from tests.raising import mentions

from benchmarks.contenders.engine.models import LLAMA_135M, StoredModel, export_mixture, random_original
from benchmarks.contenders.engine.workload import Sample, random_workload
from benchmarks.contenders.web import kernels, onnx_model
from benchmarks.contenders.web.engines import Greedy, OnThreads, completion_error, on_native, whet_in_page
from benchmarks.contenders.web.page import Page, install_peers, missing_part
from benchmarks.suites.web import FORMATS, THREADS, WebOptions, blank, tables
from whet.bench import NotMeasured

torch.set_num_threads(1)
SMALL = LLAMA_135M.resized(
    "small", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    vocab_size=320, max_position_embeddings=256,
)  # fmt: skip
needs_page = pytest.mark.needs("page")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Create a workload of a prompt of 12 tokens and 10 steps of a model in q8_0, on one thread."""
    original = partial(random_original, SMALL)
    folder = tmp_path_factory.mktemp("models")
    shape = StoredModel(SMALL.name, SMALL.hf_config, "q8_0", original, folder, write=export_mixture)
    return OnThreads(random_workload(np.random.default_rng(0), shape, 1, 12, n_steps=9), 1)


def test_every_format_runs_on_every_number_of_threads():
    full = {table.title: table for table in tables(WebOptions())}
    for title in ("Decode in Chromium", "Prefill in Chromium", "Load in Chromium", "Memory in Chromium"):
        names = [case.name for case in full[title].cases]
        assert len(names) == len(FORMATS) * len(THREADS) and names[:2] == ["q8_0, 1 thread", "q8_0, 2 threads"]
    providers = [provider.name for provider in full["Decode in Chromium"].providers]
    assert providers == ["whet", "whet native", "wllama", "transformers.js fp32", "transformers.js q8"]
    assert full["Prefill in Chromium"].cases[0].n_items == 256
    assert "lacks llama.cpp's SIMD kernels" in full["Decode in Chromium"].note
    published = [table.cases[0].published.popitem()[1] for title, table in full.items() if title.startswith("Kernel")]
    assert published == [145e-6, 18e-6, 1.8e-6]
    assert sum(len(table.cases) for table in tables(WebOptions(quick=True))) == 4 + 3


def test_error_of_a_greedy_completion_is_its_gap_to_the_argmax(small):
    workload, n = small.workload, small.workload.n_tokens
    ids = list(workload.prompts[0])
    tokens: list[int] = []
    worst: list[int] = []
    for drawn in (tokens, worst):
        for _ in range(n):
            logits = workload.model(torch.tensor([[*ids, *drawn]])).logits[0, -1]
            drawn.append(int(logits.argmax() if drawn is tokens else logits.argmin()))
    assert completion_error(Greedy(ids, tokens), workload) == 0
    assert completion_error(Greedy(ids, tokens[:-1]), workload) == np.inf
    assert completion_error(Greedy(ids, worst), workload) > 1
    assert completion_error(Sample(ids, tokens, [0.0] * n), workload) > 1
    assert completion_error(0.0, workload) == 0


def test_missing_prerequisite_of_pages_is_named(tmp_path, monkeypatch):
    assert "make web" in missing_part(tmp_path)
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/index.js").touch()
    (tmp_path / "node_modules/playwright-core").mkdir(parents=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing_part(tmp_path) == "node is not installed: apt-get install nodejs"
    shutil.copy("/bin/true", tmp_path / "node")
    assert missing_part(tmp_path) == "chromium is not installed: apt-get install chromium"
    shutil.copy("/bin/true", tmp_path / "google-chrome")
    assert missing_part(tmp_path) == ""


def test_installed_peers_are_not_reinstalled(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/package-lock.json").write_text("{}")
    peers = tmp_path / "peers"
    with pytest.raises(NotMeasured, match=mentions("apt-get install npm")):
        install_peers(peers, tmp_path)
    peers.mkdir()
    (peers / "installed.json").write_text("{}")
    assert install_peers(peers, tmp_path) == peers / "node_modules"
    (tmp_path / "bench/package-lock.json").write_text("{ }")  # other versions are pinned
    with pytest.raises(NotMeasured):
        install_peers(peers, tmp_path)


@needs_page
def test_page_is_right_in_every_task(small):
    engine = whet_in_page()
    for task in ("decode", "prefill", "load"):
        timed = getattr(engine, task)(small)()
        x = small.workload
        if task == "prefill":
            assert len(timed.value.token_ids) == 1
        else:
            assert completion_error(timed.value, x) < 0.05
        assert timed.counted == task and timed.parts[task] > 0
    assert "wasm: " in timed.note and "scripts: " in timed.note
    run, empty = engine.lifetime(small)(), blank(small)()
    assert completion_error(run.value, small.workload) < 0.05
    assert run.peak_bytes > empty.peak_bytes > 1 << 20
    assert completion_error(on_native("decode")(small)().value, small.workload) < 0.05


@needs_page
def test_page_reports_errors(tmp_path):
    with pytest.raises(RuntimeError, match=mentions("none.js")):
        Page("none.js", {})
    page = Page("whet.js", {"files": tmp_path})
    with pytest.raises(RuntimeError, match=mentions("Engine.load")):
        page.call("load", url="/files/none.gguf", threads=1, contextLength=64)
    page.close()
    with pytest.raises((RuntimeError, ValueError)):
        page.call("load")


@needs_page
@pytest.mark.parametrize("table", kernels.tables(), ids=lambda table: table.title)
def test_kernels_in_a_page_are_right(table):
    case = table.cases[0]
    inputs = case.inputs(np.random.default_rng(0))
    for provider in table.providers:
        timed = provider.prepare(inputs)()
        assert table.error(timed.value, case.reference(inputs)) <= case.tolerance, provider.name
        assert 0 < timed.parts["call"] < 1


@pytest.mark.needs("onnxruntime")
def test_onnx_graph_equals_the_model(small, tmp_path):
    import onnxruntime as runtime

    onnx_model.write_onnx(SMALL, small.file, tmp_path, "fp32")
    session = runtime.InferenceSession(tmp_path / "onnx/model.onnx")
    ids = np.array(small.workload.prompts, np.int64)
    empty = {each.name: np.zeros((1, 1, 0, 32), np.float32) for each in session.get_inputs() if "past" in each.name}
    first, *cache = session.run(None, {"input_ids": ids[:, :7], "attention_mask": np.ones((1, 7), np.int64), **empty})
    rest = {
        "input_ids": ids[:, 7:],
        "attention_mask": np.ones((1, 12), np.int64),
        **dict(zip(empty, cache, strict=True)),
    }
    logits = np.concatenate([first, session.run(None, rest)[0]], axis=1)
    right = small.workload.model(torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(logits, right, atol=1e-4)
