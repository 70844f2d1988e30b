"""Model memory: what engines and trainers really take, parameters of transformers' own models, bytes by hand."""

import dataclasses
import json

import numpy as np
import pytest
from tests.raising import assert_raises

import whet
from whet import Engine, SamplingParams
from whet.models.formats import FORMATS, MIXTURES, PAGE_TOKENS, choose_formats, describe_spans
from whet.models.sizes import PRESETS, cache_bytes, estimate, load_source, slot_bytes, source_of_config, training
from whet.models.slots import ModelSource, RowSlice

# Ragged: row counts and lengths that are not multiples of panels and blocks.
LLAMA = {
    "model_type": "llama",
    "vocab_size": 1003,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_GPT2 = {"vocab_size": 509, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 300, "attn_pdrop": 0.0}
CONFIGS = {
    "llama": LLAMA,
    "llama-biases-tied": {
        **LLAMA,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 20,
        "tie_word_embeddings": True,
    },
    "llama-super-blocks": {**LLAMA, "hidden_size": 256, "intermediate_size": 512},
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 70},
    "qwen2": {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 10, "attention_bias": True},
    "qwen3_moe": {
        **LLAMA,
        "model_type": "qwen3_moe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
    "phi3": {**LLAMA, "model_type": "phi3", "pad_token_id": 0},
    "gpt_neox": {name: value for name, value in LLAMA.items() if "key_value" not in name} | {"model_type": "gpt_neox"},
    "gpt2": {"model_type": "gpt2", **_GPT2},
    "gptj": {"model_type": "gptj", "rotary_dim": 4, **_GPT2},
}


def with_weights(source):
    """Give a model small random weights."""
    rng = np.random.default_rng(0)

    def slices():
        for slot, shape in source.config.slots().items():
            yield RowSlice(slot, 0, 0.02 * rng.standard_normal(shape, np.float32), "float32")

    return source._replace(slices=slices)


def used_by(engine, n_sequences, prompt_length, n_new):
    """Return the bytes of weights, pages at their peak, and workspace after a batch of sequences."""
    sampling = SamplingParams(max_new_tokens=n_new)
    streams = [engine.stream([(i + j) % 500 for j in range(prompt_length)], sampling) for i in range(n_sequences)]
    most = 0
    for tokens in zip(*streams, strict=True):
        assert len(tokens) == n_sequences
        most = max(most, engine.memory["kv_used_bytes"])
    memory = engine.memory
    return memory["weights_bytes"], most, memory["workspace_bytes"]


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("name", CONFIGS)
def test_engine_memory_matches_the_estimate(name, weights):
    source = source_of_config(CONFIGS[name])
    e = estimate(source, weights, context=200, batch=3)
    with Engine(with_weights(source), weights=weights, kv_bytes=e.kv_cache) as engine:
        assert engine.memory["kv_bytes"] == e.kv_cache
        weights_bytes, kv_bytes, workspace = used_by(engine, 3, 100, 100)
    assert weights_bytes == e.weights and kv_bytes == e.kv_cache
    assert e.workspace == pytest.approx(workspace, rel=0.02)
    assert e.n_parameters == source.config.n_parameters


@pytest.mark.parametrize("embeddings", [name for name in FORMATS if name not in MIXTURES])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_separate_embedding_formats(name, embeddings):
    source = with_weights(source_of_config(CONFIGS[name]))
    with Engine(source, weights="q4_k", embedding=embeddings, head=embeddings) as engine:
        assert engine.memory["weights_bytes"] == estimate(source, "q4_k", embeddings=embeddings).weights


def test_batch_above_the_default():
    source = source_of_config(LLAMA)
    e = estimate(source, context=90, batch=100)
    with Engine(with_weights(source), kv_bytes=e.kv_cache, max_batch=100) as engine:
        _, kv_bytes, workspace = used_by(engine, 100, 30, 60)
    assert kv_bytes == e.kv_cache and e.workspace == pytest.approx(workspace, rel=0.02)


def test_estimate_of_a_gguf_file_as_stored(tmp_path):
    """Quantised matrices count as stored, as in the engine."""
    rng = np.random.default_rng(0)
    plain = source_of_config({**LLAMA, "hidden_size": 256, "intermediate_size": 512})

    def slices():
        for slot, shape in plain.config.slots().items():
            matrix = rng.standard_normal(shape, np.float32)
            if slot.endswith("down"):
                yield RowSlice(slot, 0, whet.quantize(matrix, "q4_k").data, "q4_k")
            else:
                yield RowSlice(slot, 0, matrix, "float32")

    stored = ModelSource(plain.config, slices, {})
    with Engine(stored, weights=None) as engine:
        assert engine.formats["layers.0.down"] == "q4_k" and engine.formats["layers.0.o"] == "bfloat16"
        assert engine.memory["weights_bytes"] == estimate(stored, None).weights < estimate(plain).weights


@pytest.mark.parametrize(
    ("format", "rows", "columns", "n_bytes"),
    [
        ("float32", 32, 5, 32 * 5 * 4),
        ("float32", 3, 5, 16 * 5 * 4),  # whole panels of 16 rows
        ("bfloat16", 16, 64, 16 * 64 * 2),
        ("bfloat16", 16, 5, 16 * 6 * 2),  # two to a word
        ("int8", 16, 64, 16 * (64 + 4)),
        ("q8_0", 32, 128, 32 * 4 * 34),
        ("q4_0", 32, 128, 32 * 4 * 18),
        ("q4_k", 32, 512, 32 * 2 * 144),
        (None, 5, 0, 20),
    ],
)
def test_bytes_of_a_matrix(format, rows, columns, n_bytes):
    assert slot_bytes((rows, columns) if format else (rows,), format) == n_bytes


def test_a_small_model_by_hand():
    sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    source = source_of_config({**LLAMA, **sizes, "head_dim": 16})
    e = estimate(source, "bf16", context=130, batch=3, embeddings="float32")
    # Per layer: q and o 64 x 32, k and v 32 x 32, three of 48 x 32. Norms: 2 x 32 per layer, 32 at the end.
    assert e.linear == 2 * 2 * (2 * 64 + 2 * 32 + 3 * 48) * 32 and e.embeddings == 4 * 2 * 16 * 32
    assert e.norms == 4 * (2 * 2 * 32 + 32) and e.weights == e.linear + e.embeddings + e.norms
    # 129 tokens are computed, in three pages; one more copies the prompt's last page. A page has 2 layers, 2 heads
    # of 16, keys and values, 2 bytes.
    assert e.kv_cache == 3 * 4 * 64 * (2 * 2 * 16 * 2 * 2)
    assert e.total == e.weights + e.kv_cache + e.workspace and e.bits_per_weight == 8 * e.weights / e.n_parameters
    # float32 weights have float32 keys and values; a page has 64 tokens whatever the window.
    assert estimate(source, "float32", context=130, batch=3).kv_cache == 2 * e.kv_cache
    assert cache_bytes(source.config, "bfloat16", 1, 0) == PAGE_TOKENS * 256


def test_sliding_windows_do_not_save_pages():
    mistral = load_source("mistral-7b")
    whole = source_of_config({**PRESETS["mistral-7b"], "sliding_window": None})
    assert estimate(mistral, context=32768).kv_cache == estimate(whole, context=32768).kv_cache
    # 32 layers x 8 KV heads x 128 x 2 (keys, values) x 2 bytes; 512 pages of 64 tokens, and one
    assert estimate(mistral, context=32768).kv_cache == 32 * 8 * 128 * 2 * 2 * 64 * 513


def test_embeddings_keep_8_bits_with_4_bit_weights():
    source = load_source("smollm-135m")
    q8_0, q4_k = estimate(source, "q8_0"), estimate(source, "q4_k")
    assert q4_k.embeddings == q8_0.embeddings < estimate(source, "bf16").embeddings
    assert estimate(source, "q4_k").linear < 0.65 * q8_0.linear  # rows of 576 are in q5_0
    assert describe_spans(choose_formats(source, "q4_k", None, None, "")["embedding"]) == "q8_0"


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gpt_neox", "gptj", "phi3"])
def test_training_memory_matches_the_estimate(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from whet.algorithms.sft import SFT

    config = transformers.AutoConfig.for_model(**{**CONFIGS[name], "bos_token_id": 1, "eos_token_id": 2})
    model = transformers.AutoModelForCausalLM.from_config(config)
    trainer = SFT(model, compute="bfloat16")
    trainer.train_step([[3, 4], [7]], [[5, 6], [8]])

    def n_bytes(tensors):
        return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())

    parameters = list(model.parameters())
    moments = [s[key] for s in trainer.policy.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    e = training(source_of_config(config.to_dict()).config)
    assert (n_bytes(parameters), n_bytes(parameters), n_bytes(moments)) == e and e.total == sum(e)
    assert all(t.dtype == torch.float32 for t in [*parameters, *moments])


# ---------------------------------------------------------------- models


def test_parameters_of_the_documents_models():
    # RuvLLM 2.0's document lists 6.8, 13.0, 8.0 and 7.2 billion; the exact numbers are from the models' cards.
    # Its FP16 column, 2 bytes per parameter, is right to 1.2%. Its INT4 column omits the scales.
    document = {
        "llama-2-7b": (6_738_415_616, 13.64, 3.41),
        "llama-2-13b": (13_015_864_320, 26.01, 6.50),
        "llama-3-8b": (8_030_261_248, 16.01, 4.00),
        "mistral-7b": (7_241_732_096, 14.48, 3.62),
    }
    for name, (n_parameters, half_gb, int4_gb) in document.items():
        source = load_source(name)
        assert source.config.n_parameters == n_parameters
        assert 2 * n_parameters / 1e9 == pytest.approx(half_gb, rel=0.013)
        everything_int4 = estimate(source, "int4", embeddings="int4")
        assert everything_int4.bits_per_weight == pytest.approx(4.5, abs=0.01)
        assert 1.11 < everything_int4.weights / 1e9 / int4_gb < 1.14


@pytest.mark.parametrize("name", [*CONFIGS, *PRESETS])
def test_parameter_counts_match_transformers(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    given = CONFIGS.get(name) or PRESETS[name]
    config = transformers.AutoConfig.for_model(**{**given, "bos_token_id": 1, "eos_token_id": 2})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert source_of_config(given).config.n_parameters == model.num_parameters()


def test_errors_name_the_fix(tmp_path):
    source = source_of_config(LLAMA)
    gemma = {**LLAMA, "model_type": "gemma"}
    for call, message in (
        (lambda: load_source("lama-2-7b"), ("'lama-2-7b'", "Did you mean llama-2-7b?")),
        (lambda: load_source(str(tmp_path / "x")), ("neither a preset nor", "The presets are llama-2-7b")),
        (lambda: load_source(str(tmp_path)), "config.json"),
        (lambda: source_of_config(gemma), ("config: model_type is 'gemma'", "gemma2, gemma3_text", "phi3")),
        (lambda: source_of_config({"model_type": "llama"}), ("config", "num_hidden_layers is None", "an integer")),
        (lambda: source_of_config({**LLAMA, "num_hidden_layers": 10**12}), "num_hidden_layers is 1000000000000, exp"),
        (lambda: estimate(source, "q3_k"), ("estimate", "weights is 'q3_k'", "float32, bfloat16")),
        (lambda: estimate(source, ""), ("estimate", "weights is ''", "float32, bfloat16")),
        (lambda: Engine(source, head=""), ("Engine", "head is ''", "float32, bfloat16")),
        (lambda: estimate(source, "float16"), ("estimate", "weights is 'float16'", "float32, bfloat16")),
        (lambda: estimate(source, embeddings="fp8"), ("estimate", "embeddings is 'fp8'", "float32")),
        (lambda: estimate(source, context=0), ("estimate", "context is 0", "an integer >= 1")),
        (lambda: estimate(source, context=-7), ("estimate", "context is -7", "an integer >= 1")),
        (lambda: estimate(source, context=1.5), ("estimate", "context is 1.5", "an integer >= 1")),
        (lambda: estimate(source, batch=-1), ("estimate", "batch is -1", "an integer >= 1")),
        (lambda: estimate(source, context=513), ("context is 513", "512 tokens")),
        (
            lambda: estimate(ModelSource(dataclasses.replace(source.config, head_dim=1024), source.slices, {})),
            ("estimate: ", "not support this model"),
        ),
    ):
        assert_raises(whet.WhetValueError, message, call)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        for given in (tmp_path, tmp_path / "config.json"):
            assert_raises(whet.WhetValueError, r"config\.json", load_source, str(given))


def test_folder_and_config_file_are_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    config = source_of_config(LLAMA).config
    assert load_source(str(path)).config == load_source(str(tmp_path)).config == config
    # Default: 4,096 tokens, or the model's maximum if smaller.
    assert estimate(load_source(str(path))) == estimate(load_source(str(path)), context=512)
    assert estimate(load_source("llama-3-8b")) == estimate(load_source("llama-3-8b"), context=4096)
