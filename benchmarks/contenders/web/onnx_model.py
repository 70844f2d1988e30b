# pyright: reportMissingImports=false
"""transformers.js and its ONNX files, made from a GGUF file's weights without a hub.

The graph has the structure of published ones: ONNX Runtime's fused attention with rotary embeddings and a KV cache, its
fused norms, and plain matrix products, which its quantizer converts to 8 bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders.engine.models import SMOLLM2_135M, ModelShape, read_gguf_model
from benchmarks.contenders.web.engines import Engine

_FILES = {"fp32": "model.onnx", "q8": "model_quantized.onnx"}
_POSITIONS = 2048
_ORT = "com.microsoft"


def transformers_js(peers: Path, folder: Path, original: Callable[[Path], Path], dtype: str) -> Engine:
    """Create the engine of transformers.js with the weights of an original GGUF file.

    Args:
        peers: folder in which it is installed.
        folder: folder of the ONNX files.
        original: returns the path of the GGUF file.
        dtype: "fp32" or "q8".
    """

    def model(_: object) -> tuple[Path, dict[str, Any]]:
        path = original(folder)
        write_onnx(SMOLLM2_135M, path, folder / path.stem, dtype)
        return folder, {"folder": "/files/", "model": path.stem, "dtype": dtype}

    runtime = "onnxruntime-web/dist/ort-wasm-simd-threaded"
    downloads = ("@huggingface/transformers/dist/transformers.min.js", f"{runtime}.mjs", f"{runtime}.wasm")
    return Engine("transformers.js", downloads, peers, model=model)


def write_onnx(shape: ModelShape, gguf: Path, folder: Path, dtype: str) -> None:
    """Write config.json and the file of a dtype if they do not exist.

    Raises:
        ImportError: onnx, onnxruntime, gguf or transformers is missing.
    """
    path = folder / "onnx" / _FILES[dtype]
    if path.exists():
        return
    import onnx

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    if dtype == "fp32":
        model = read_gguf_model(shape, gguf)
        (folder / "config.json").write_text(json.dumps(model.config.to_dict()), encoding="utf-8")
        onnx.save(_graph(model), unfinished)
    else:
        from onnxruntime.quantization import QuantType, quantize_dynamic

        write_onnx(shape, gguf, folder, "fp32")
        options = {"MatMulConstBOnly": True, "DefaultTensorType": onnx.TensorProto.FLOAT}
        quantize_dynamic(path.with_name(_FILES["fp32"]), unfinished, weight_type=QuantType.QInt8, extra_options=options)
    unfinished.rename(path)


class _Graph:
    """Nodes and constants of an ONNX graph."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, name: str, values: Any) -> str:
        from onnx import numpy_helper

        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def node(self, operator: str, inputs: list[str], outputs: list[str], domain: str = "", **settings: Any) -> str:
        from onnx import helper

        self.nodes.append(helper.make_node(operator, inputs, outputs, name=outputs[0], domain=domain, **settings))
        return outputs[0]

    def product(self, x: str, name: str, weight: Any) -> str:
        """Add x w^T."""
        return self.node("MatMul", [x, self.constant(f"{name}.weight", weight.numpy().T)], [name])


def _graph(model: Any) -> Any:
    """Build the ONNX graph of the model with a KV cache, and the input and output names of transformers.js."""
    from onnx import TensorProto, helper

    config, graph = model.config, _Graph()
    n_heads, n_kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim, eps = config.hidden_size // n_heads, config.rms_norm_eps
    parameters = dict(model.named_parameters())
    angles = np.outer(
        np.arange(_POSITIONS), config.rope_parameters["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    )
    graph.constant("cos", np.cos(angles).astype(np.float32))
    graph.constant("sin", np.sin(angles).astype(np.float32))
    one, axis = graph.constant("one", np.array(1, np.int64)), graph.constant("axis", np.array([1], np.int64))
    # Attention takes the number of keys of each row minus one, and the total number of keys.
    n_keys = graph.node("ReduceSum", ["attention_mask", axis], ["n_keys"], keepdims=0)
    last = graph.node("Cast", [graph.node("Sub", [n_keys, one], ["last_64"])], ["last"], to=TensorProto.INT32)
    width = graph.node("Gather", [graph.node("Shape", ["attention_mask"], ["mask_shape"]), one], ["width_64"])
    total = graph.node("Cast", [width], ["width"], to=TensorProto.INT32)

    kv_names: list[tuple[str, str]] = []
    embedding = parameters["model.embed_tokens.weight"]
    x = graph.node("Gather", [graph.constant("embed_tokens", embedding.numpy()), "input_ids"], ["embedded"])
    first = graph.constant("layers.0.input_layernorm", parameters["model.layers.0.input_layernorm.weight"].numpy())
    normed = graph.node("SimplifiedLayerNormalization", [x, first], ["normed"], axis=-1, epsilon=eps, stash_type=1)

    def add_and_norm(x: str, change: str, name: str, weight: Any) -> tuple[str, str]:
        """Add residual and norm; return the sum and its norm."""
        outputs = [f"{name}.normed", "", "", f"{name}.sum"]
        scale = graph.constant(f"{name}.scale", weight.numpy())
        normed = graph.node("SkipSimplifiedLayerNormalization", [x, change, scale], outputs, _ORT, epsilon=eps)
        return outputs[3], normed

    for layer in range(config.num_hidden_layers):
        here, own = f"layers.{layer}", f"model.layers.{layer}"

        def product(x: str, name: str, here: str = here, own: str = own) -> str:
            return graph.product(x, f"{here}.{name}", parameters[f"{own}.{name}.weight"])

        q, k, v = (product(normed, f"self_attn.{name}_proj") for name in "qkv")
        past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        present = [f"present.{layer}.{kind}" for kind in ("key", "value")]
        kv_names += zip(past, present, strict=True)
        attended = graph.node(
            "GroupQueryAttention",
            [q, k, v, *past, last, total, "cos", "sin"],
            [f"{here}.attended", *present],
            _ORT,
            num_heads=n_heads,
            kv_num_heads=n_kv_heads,
            do_rotary=1,
            rotary_interleaved=0,
        )
        change = product(attended, "self_attn.o_proj")
        x, normed = add_and_norm(x, change, f"{here}.middle", parameters[f"{own}.post_attention_layernorm.weight"])
        gate, up = product(normed, "mlp.gate_proj"), product(normed, "mlp.up_proj")
        open_gate = graph.node("Mul", [gate, graph.node("Sigmoid", [gate], [f"{here}.sigmoid"])], [f"{here}.silu"])
        change = product(graph.node("Mul", [open_gate, up], [f"{here}.gated"]), "mlp.down_proj")
        after = f"model.layers.{layer + 1}.input_layernorm" if layer + 1 < config.num_hidden_layers else "model.norm"
        x, normed = add_and_norm(x, change, f"{here}.end", parameters[f"{after}.weight"])
    graph.node("MatMul", [normed, graph.constant("lm_head", embedding.numpy().T)], ["logits"])

    def value(name: str, kind: int, *sizes: int | str) -> Any:
        return helper.make_tensor_value_info(name, kind, sizes)

    def cache(name: str, length: str) -> Any:
        return value(name, TensorProto.FLOAT, "batch_size", n_kv_heads, length, head_dim)

    inputs = [
        value("input_ids", TensorProto.INT64, "batch_size", "sequence_length"),
        value("attention_mask", TensorProto.INT64, "batch_size", "total_sequence_length"),
        *(cache(past, "past_sequence_length") for past, _ in kv_names),
    ]
    outputs = [
        value("logits", TensorProto.FLOAT, "batch_size", "sequence_length", config.vocab_size),
        *(cache(present, "total_sequence_length") for _, present in kv_names),
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(_ORT, 1)]
    made = helper.make_graph(graph.nodes, config.model_type, inputs, outputs, graph.constants)
    return helper.make_model(made, opset_imports=opsets, ir_version=9)
