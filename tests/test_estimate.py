"""Model memory: parameters against transformers' own models, bytes worked out by hand."""

import json

import pytest

import whet
from whet.estimate import (
    FORMATS,
    PRESETS,
    ModelShape,
    estimate,
    load_shape,
    matrix_bytes,
    shape_of_config,
)


def test_parameters_of_the_documents_models():
    # RuvLLM 2.0's document says 6.8, 13.0, 8.0 and 7.2 billion; the exact numbers are those of the models' cards.
    # Its FP16 column, 2 bytes per parameter, is right to 1.2%. Its INT4 column leaves out the scales.
    document = {
        "llama-2-7b": (6_738_415_616, 13.64, 3.41),
        "llama-2-13b": (13_015_864_320, 26.01, 6.50),
        "llama-3-8b": (8_030_261_248, 16.01, 4.00),
        "mistral-7b": (7_241_732_096, 14.48, 3.62),
    }
    for name, (n_parameters, half_gb, int4_gb) in document.items():
        assert PRESETS[name].n_parameters() == n_parameters
        assert 2 * n_parameters / 1e9 == pytest.approx(half_gb, rel=0.013)
        everything_q4 = estimate(PRESETS[name], "q4_0", embeddings="q4_0")
        assert everything_q4.bits_per_weight == pytest.approx(4.5, abs=0.01)
        assert 1.11 < everything_q4.weights / 1e9 / int4_gb < 1.14


CONFIGS = [
    {"model_type": "llama", "num_key_value_heads": 2},
    {"model_type": "llama", "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "head_dim": 20},
    {"model_type": "llama", "tie_word_embeddings": True},
    {"model_type": "mistral", "num_key_value_heads": 1, "head_dim": 8},
    {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 24},
    {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 24, "attention_bias": True},
    {"model_type": "phi3", "num_key_value_heads": 2, "pad_token_id": 0},
    {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 32},
]


@pytest.mark.parametrize("given", CONFIGS, ids=str)
def test_parameters_are_those_of_transformers(given):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **given,
    }
    config = transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert shape_of_config(config.to_dict()).n_parameters() == model.num_parameters()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_those_of_transformers(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shape = PRESETS[name]
    config = transformers.AutoConfig.for_model(
        "qwen2" if name.startswith("qwen2") else "llama",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_dim,
        intermediate_size=shape.ffn_dim,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert shape.n_parameters() == model.num_parameters()


@pytest.mark.parametrize(
    ("format", "rows", "columns", "n_bytes"),
    [
        ("float32", 3, 5, 60),
        ("bfloat16", 3, 5, 30),
        ("float16", 3, 5, 30),
        ("int8", 3, 64, 3 * (64 + 4)),
        ("q8_0", 3, 64, 3 * 2 * 34),
        ("q4_0", 3, 64, 3 * 2 * 18),
        ("q4_k", 3, 512, 3 * 2 * 144),
        ("q4_k", 3, 64, 3 * 2 * 18),  # as q4_0
        ("q4_0", 3, 40, 3 * 44),  # as int8
    ],
)
def test_bytes_of_a_matrix(format, rows, columns, n_bytes):
    assert matrix_bytes(rows, columns, format) == n_bytes


TINY = ModelShape(
    vocab_size=10, hidden_dim=8, ffn_dim=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=2, window=5, n_windowed=1
)


def test_a_small_model_by_hand():
    e = estimate(TINY, "bfloat16", context=12, batch=3, embeddings="float32", kv_cache="float16")
    # Per layer: q and out 8 x 8, k and v 4 x 8, three of 16 x 8: 128 + 64 + 384. Norms: 2 x 8 per layer, 8 at the end.
    assert e.linear == 2 * 2 * 576 and e.embeddings == 4 * 2 * 80 and e.norms == 4 * 40
    assert e.n_parameters == 2 * 576 + 160 + 40
    # Keys and values, 2 heads x 2, of 12 tokens in one layer and 5 in the other, 3 sequences, 2 bytes.
    assert e.kv_cache == 2 * 4 * (12 + 5) * 3 * 2
    # 36 tokens fit one pass: 3 x 8 + 2 x 8 + 2 x 4 + 2 x 16 each; and 3 rows of 10 logits.
    assert e.workspace == 4 * (36 * 80 + 30)
    assert e.weights == e.linear + e.embeddings + e.norms and e.total == e.weights + e.kv_cache + e.workspace
    assert e.bits_per_weight == 8 * e.weights / e.n_parameters


def test_workspace_of_a_long_prompt_is_that_of_one_pass():
    assert estimate(TINY, context=4096).workspace == 4 * (512 * 80 + 10)
    assert estimate(TINY, context=4096, batch=600).workspace == 4 * (600 * 80 + 6000)


def test_gqa_is_counted():
    # 32 layers x 8 KV heads x 128 x 2 (keys, values) x 2 bytes x 8192 tokens
    assert estimate(PRESETS["llama-3-8b"], context=8192).kv_cache == 32 * 8 * 128 * 2 * 2 * 8192
    # Mistral keeps no more than its window of 4096.
    mistral = PRESETS["mistral-7b"]
    assert estimate(mistral, context=32768).kv_cache == estimate(mistral, context=4096).kv_cache


def test_embeddings_follow_float_weights_alone():
    shape = PRESETS["smollm-135m"]
    assert estimate(shape, "float32").embeddings == 2 * estimate(shape, "q8_0").embeddings == 4 * 49152 * 576


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 7}, (7, 4)),
        ({"model_type": "mistral", "sliding_window": None}, (None, 0)),
        ({"model_type": "llama", "sliding_window": 7}, (None, 0)),
        ({"model_type": "qwen2", "sliding_window": 7}, (None, 0)),
        ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}, (7, 3)),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (7, 2),
        ),
    ],
)
def test_windows_of_a_config(config, window):
    sizes = {
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
    }
    shape = shape_of_config({**sizes, **config})
    assert (shape.window, shape.n_windowed, shape.n_kv_heads, shape.head_dim) == (*window, 2, 4)


def test_errors_say_the_mend(tmp_path):
    for call, message in (
        (lambda: load_shape("lama-2-7b"), "'lama-2-7b' is no preset.*Did you mean llama-2-7b?"),
        (lambda: load_shape(str(tmp_path)), "config.json is no file. The presets are llama-2-7b"),
        (lambda: shape_of_config({"model_type": "bert"}), "config has model_type 'bert', expected llama, mistral"),
        (lambda: shape_of_config({"model_type": "llama"}), "num_hidden_layers is None, expected an integer"),
        (lambda: estimate(TINY, "q5_1"), "weights is 'q5_1', expected one of float32, bfloat16"),
        (lambda: estimate(TINY, kv_cache="q8_0"), "kv_cache is 'q8_0', expected one of float32"),
        (lambda: estimate(TINY, context=0), "context is 0, expected at least 1"),
        (lambda: estimate(TINY, batch=-1), "batch is -1"),
    ):
        with pytest.raises(whet.WhetValueError, match=message):
            call()
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(whet.WhetValueError, match=r"config.json is no config: "):
            load_shape(str(tmp_path))


def test_a_folder_and_a_file_are_read(tmp_path):
    sizes = {"model_type": "llama", "vocab_size": 10, "hidden_size": 8, "intermediate_size": 16}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**sizes, "num_hidden_layers": 4, "num_attention_heads": 2}))
    assert load_shape(str(path)) == load_shape(str(tmp_path)) == ModelShape(10, 8, 16, 4, 2, 2, 4)
    assert all(estimate(load_shape(str(path)), format).total > 0 for format in FORMATS)


def test_windows_are_those_of_the_engine():
    config = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 9}
    config |= {"intermediate_size": 9, "num_key_value_heads": 4}
    # A Mistral config that does not tell has transformers' default.
    assert shape_of_config({**config, "model_type": "mistral"}).window == 4096
    assert shape_of_config({**config, "model_type": "mistral", "sliding_window": None}).window is None
    qwen = {**config, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    assert (shape_of_config(qwen).window, shape_of_config(qwen).n_windowed) == (8, 1)
    with pytest.raises(whet.WhetValueError, match="estimate: config: sliding_window is 0, expected an integer"):
        shape_of_config({**config, "model_type": "mistral", "sliding_window": 0})
    with pytest.raises(whet.WhetValueError, match="estimate: config: num_hidden_layers is 1000000000000, expected"):
        shape_of_config({**config, "model_type": "mistral", "num_hidden_layers": 10**12})
