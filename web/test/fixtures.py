"""Generate fixtures for the package's tests: models, tokenizers, chat templates and settings with Python's results.

python web/test/fixtures.py FOLDER
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import save_file
from tests.engine.tiny_models import CASES, family_name, tiny_model, token_ids
from tests.gguf_files import Q8_0, write_gguf
from tests.models.tokenizers import vocab_files
from tests.models.tokenizers.texts import make_texts
from tests.tiny import tiny_llama, with_lora
from web.facts import camel
from web.test.learner_fixtures import learning

import whet
from whet import _core
from whet.config.sampling import GRAMMAR_SETTINGS, SamplingParams
from whet.engine import Engine
from whet.errors import WhetTypeError, WhetValueError
from whet.gpu.program import read_kernel
from whet.models.families import FAMILIES
from whet.models.formats import FORMATS, choose_formats
from whet.models.packed_base import PackedBase
from whet.models.sources.live import open_module
from whet.models.tokenizers import GGUFTokenizer, read_tokenizer
from whet.models.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from whet.models.tokenizers.template import ChatTemplate

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say 'a' < \"b\" & é 日本"},
    {"role": "assistant", "content": "a\n"},
    {"role": "user", "content": "Why?"},
]


def tokenizers() -> list[dict[str, Any]]:
    """Train vocabularies and return them with texts, ids and decoded texts of Python's tokenizer."""
    cases: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for pre in ("gpt-2", "llama-bpe", "qwen2", "smollm", "deepseek-v3", "gpt-4o", "kimi-k2", "superbpe"):
        trained = vocab_files.train_byte_level(list(PRE_TOKENIZERS[pre].patterns))
        cases[pre] = vocab_files.byte_level_metadata(trained, pre), ["<|im_end|>", "<|tool|>", "<s>"]
    for prefix in (True, False):
        model = vocab_files.train_sentencepiece("bpe", add_dummy_prefix=prefix, byte_fallback=True)
        keys = vocab_files.sentencepiece_metadata(model) | {"tokenizer.ggml.precompiled_charsmap": []}
        cases[f"llama, add_space_prefix={prefix}"] = keys, [] if prefix else ["<tool>"]
    keys = cases["llama, add_space_prefix=True"][0]
    cases["llama, with BOS"] = keys | {"tokenizer.ggml.add_bos_token": True}, []
    found = []
    for name, (metadata, special) in cases.items():
        tokenizer = read_tokenizer(metadata)
        texts = make_texts(400, special)
        ids = [tokenizer.encode(text) for text in texts]
        decoded = [tokenizer.decode(each, skip_special_tokens=True) for each in ids]
        found.append(
            {"name": name, "metadata": metadata, "texts": texts, "ids": ids, "decoded": decoded}
            | {"stopIds": tokenizer.stop_token_ids, "roles": tokenizer.vocabulary.special_ids}
        )
    return found


def templates() -> list[dict[str, Any]]:
    """Return published chat templates with the texts that Python renders."""
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    found = []
    for path in sorted((ROOT / "tests/fixtures/templates").glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        for prompt in (True, False):
            try:
                text = ChatTemplate(source).render(MESSAGES, add_generation_prompt=prompt, tools=None, **tokens)
            except WhetValueError:
                text = None
            found.append({"name": path.stem, "source": source, "prompt": prompt, "text": text})
    return found


def settings() -> list[dict[str, Any]]:
    """Return values of sampling settings and whether Python accepts them."""
    numbers: list[Any] = [-3, -2, -1, -0.5, 0, 0.25, 1, 1.5, 2, 2.5, 21, 129, "1", True, None, [1], [], [-1], [0.5]]
    texts: list[Any] = ["a", "", "\ud800", ["a", "é"], ["a", ""], ["a"] * 65]
    tables: list[Any] = [{}, {"1": 2.5}, {"a": 1}, {"-1": 1}, {"1": 101}, {"1": "2"}, {"1": None}, {"1.5": 1}]
    native = (*GRAMMAR_SETTINGS, "grammar_after", "kept_tokens", "experts")  # not in the package
    found = []
    for name in (f.name for f in dataclasses.fields(SamplingParams) if f.name not in native):
        for value in [*numbers, *texts, *(tables if name == "logit_bias" else [])]:
            try:
                SamplingParams(**{name: value})
                is_accepted = True
            except (WhetTypeError, WhetValueError):
                is_accepted = False
            found.append({"name": camel(name), "value": value, "isAccepted": is_accepted})
    return found


def model(folder: Path) -> None:
    """Write a small Llama as GGUF files and a folder, an adapter, and the native engine's results."""
    trained = vocab_files.train_byte_level(list(PRE_TOKENIZERS["smollm"].patterns), 400)
    template = (ROOT / "tests/fixtures/templates/HuggingFaceTB-SmolLM2-135M-Instruct.jinja").read_text(encoding="utf-8")
    keys = vocab_files.byte_level_metadata(trained, "smollm") | {"tokenizer.chat_template": template}
    sizes = {
        "vocab_size": trained.get_vocab_size(),
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    llama = tiny_llama(
        **sizes, **heads, bos_token_id=0, eos_token_id=1, initializer_range=0.2, tie_word_embeddings=True
    )
    adapter = with_lora(tiny_llama(**sizes, **heads, bos_token_id=0, eos_token_id=1), b_std=0.2, **ADAPTER)
    adapter.save_pretrained(folder / "adapter")
    llama.save_pretrained(folder / "folder")
    trained.save(str(folder / "folder/tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "folder/tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    expected: dict[str, Any] = {}
    for kind in KINDS:
        path = write_gguf(llama, folder / f"{kind.lower()}.gguf", gguf.GGMLQuantizationType[kind], keys=keys)
        expected[path.stem] = run_native(Engine.from_gguf(path), read_tokenizer(path), folder / "adapter")
    expected["folder"] = run_native(Engine.from_pretrained(folder / "folder"), read_tokenizer(path), folder / "adapter")
    write_gguf(llama, folder / "part.gguf", keys=keys, split_max_tensors=8)
    drawn = samplings(Engine.from_gguf(folder / "q8_0.gguf"), read_tokenizer(path))
    found = {"prompt": PROMPT, "messages": MESSAGES, "cases": expected, "samplings": drawn}
    (folder / "model.json").write_text(json.dumps(found))


KINDS = ("F32", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
ADAPTER = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "lora_alpha": 16}
PROMPT = "The model is in café, and"


def run_native(engine: Engine, tokenizer: GGUFTokenizer, adapter: Path) -> dict[str, Any]:
    """Return samples and log-probs with and without an adapter."""
    ids = tokenizer.encode(PROMPT)
    sampling = SamplingParams(
        temperature=0.8, top_p=0.9, max_new_tokens=24, seed=7, stop_token_ids=tokenizer.stop_token_ids
    )
    number = engine.add_adapter(str(adapter))
    found: dict[str, Any] = {"ids": ids}
    for name, which in (("plain", None), ("adapted", number)):
        [samples] = engine.generate([ids], 2, sampling, adapter=which)
        [scores] = engine.logprobs([[*ids, *samples[0].token_ids]], adapter=which)
        found[name] = {
            "samples": [{"tokens": sample.token_ids, "logprobs": sample.logprobs, "finish": sample.finish_reason,
                         "text": tokenizer.decode(sample.token_ids, skip_special_tokens=True)} for sample in samples],
            "scores": scores.tolist(),
        }  # fmt: skip
    [[greedy]] = engine.generate([ids], 1, SamplingParams(temperature=0, max_new_tokens=16))
    chat = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    return found | {"greedy": greedy.token_ids, "chat": chat}


REORDERED = {
    "gpt2": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    "gemma4": {"target_modules": "all-linear"},
    "gpt_neox": {"target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]},
    "granite4-hybrid": {"target_modules": ["in_proj", "out_proj", "q_proj"]},
    "nemotron_h-groups": {"target_modules": ["in_proj", "q_proj", "up_proj", "down_proj"]},
    "qwen3_5_text": {"target_modules": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj"]},
}
"""Adapters of models whose files store transposed matrices, q, k and v head by head, or reordered value heads; and of
layers of different sizes."""
NO_GGUF = {
    "llama-proportional", "gemma2-kinds", "gemma2-attention", "granite_swa-bases", "qwen3_5_text-sizes",
    "olmoe-normalised", "qwen3_moe-dense", "lfm2_moe-plain", "granite4-experts",
    "nemotron_h-mixed", "gemma4-plain",
}  # fmt: skip
"""Cases that GGUF cannot express: proportional RoPE, an untied head of Gemma 2, no soft-cap, two RoPE bases, biases,
other routers or layers, a mixture without rotations."""


def families(folder: Path) -> None:
    """Write models of every family as files, with the native engine's results."""
    folder.mkdir(exist_ok=True)
    found = []
    for case in CASES:
        model = tiny_model(case)
        model.save_pretrained(folder / case)
        found.append(run_source(folder / case))
        if FAMILIES[family_name(case)].gguf is not None and case not in NO_GGUF and not case.endswith("-vision"):
            found.append(run_source(write_gguf(model, folder / f"{case}.gguf")))
    for case, settings in REORDERED.items():
        with_lora(tiny_model(case), b_std=0.2, **settings).save_pretrained(folder / f"{case}-adapter")
        for path in (folder / case, folder / f"{case}.gguf"):
            found.append(run_source(path, folder / f"{case}-adapter"))
    tiny_model("llama").half().save_pretrained(folder / "half")
    tiny_model("llama").bfloat16().save_pretrained(folder / "sharded", max_shard_size="8KB")
    found += [run_source(folder / "half"), run_source(folder / "sharded")]
    experts = tiny_model("qwen3_moe", moe_intermediate_size=32, head_dim=16)
    found += [
        run_source(write_gguf(experts, folder / f"experts-{fused}.gguf", Q8_0, fused_experts=fused))
        for fused in (False, True)
    ]
    gpt_oss = tiny_model("gpt_oss", hidden_size=64, intermediate_size=32, head_dim=16)

    def experts_kind(name: str) -> gguf.GGMLQuantizationType:
        return gguf.GGMLQuantizationType.MXFP4 if ".experts." in name else Q8_0

    found.append(run_source(write_gguf(gpt_oss, folder / "mxfp4.gguf", experts_kind)))
    experts.config.save_pretrained(folder / "fused")  # transformers' own names, which it does not write
    save_file({name: t.clone() for name, t in experts.state_dict().items()}, folder / "fused/model.safetensors")
    found.append(run_source(folder / "fused"))
    with_blocks = tiny_model("gemma4", hidden_size_per_layer_input=32)
    for table in (Q8_0, gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.BF16):  # of the second embedding

        def table_kind(name: str, kind: gguf.GGMLQuantizationType = table) -> gguf.GGMLQuantizationType:
            return kind if "embed_tokens_per_layer" in name else gguf.GGMLQuantizationType.F32

        found.append(run_source(write_gguf(with_blocks, folder / f"table-{table.name.lower()}.gguf", table_kind)))
    write_gguf(with_blocks, folder / "table-part.gguf", split_max_tensors=40)
    write_gguf(tiny_model("gemma4", vocab_size=400), folder / "vocabulary.gguf")
    found += [run_source(folder / "gemma4", weights=weights) for weights in ("float32", "q8_0")]
    for weights in ("float32", "bf16", "int8", "q8_0"):
        for path in (folder.parent / "folder", folder.parent / "q4_0.gguf", folder / "qwen2"):
            found.append(run_source(path, weights=weights))
    (folder.parent / "families.json").write_text(json.dumps(found))


def run_source(path: Path, adapter: Path | None = None, **options: Any) -> dict[str, Any]:
    engine, [ids] = Engine.from_pretrained(path, **options), token_ids().tolist()
    number = None if adapter is None else engine.add_adapter(str(adapter))
    sampling = SamplingParams(temperature=0.8, top_p=0.9, max_new_tokens=16, seed=3)
    [samples] = engine.generate([ids], 2, sampling, adapter=number)
    [scores] = engine.logprobs([ids], adapter=number)
    drawn = [{"tokens": sample.token_ids, "logprobs": sample.logprobs} for sample in samples]
    name = f"{'' if path.parent.name == 'fixtures' else 'families/'}{path.name}"
    file = name if path.is_file() else f"{name}/"
    found = {"file": file, "options": options, "ids": ids, "samples": drawn, "scores": scores.tolist()}
    return found | ({} if adapter is None else {"adapter": f"families/{adapter.name}/"})


def shaders() -> list[str]:
    """Return the sources of the GPU's pipelines for every family and format, each once."""
    models = [(tiny_model(case), "bf16") for case in CASES]
    models += [(tiny_model("llama", hidden_size=256, intermediate_size=512), name) for name in FORMATS]
    found = set()
    for made, weights in models:
        source = open_module(made)
        base = PackedBase(source, choose_formats(source, weights, None, None, "fixtures"))
        for kv_type in (_core.KvType.float32, _core.KvType.bfloat16):
            plan = _core.GpuPlan(base.core, kv_type=kv_type, max_rows=40, n_pages=8, n_states=2, binding_bytes=1 << 27)
            found.update(plan.pipelines)
    return sorted(constants + "".join(map(read_kernel, files)) for constants, files in found)


def samplings(engine: Engine, tokenizer: GGUFTokenizer) -> list[dict[str, Any]]:
    """Return samples with every setting, and with stop strings across token boundaries."""
    ids = tokenizer.encode(PROMPT)
    [[greedy]] = engine.generate([ids], 1, SamplingParams(temperature=0, max_new_tokens=24))
    [[plain]] = engine.generate([ids], 1, SamplingParams(temperature=0.9, max_new_tokens=40, seed=5))
    text = tokenizer.decode(plain.token_ids, skip_special_tokens=True)
    ends = [len(tokenizer.decode(plain.token_ids[:n], skip_special_tokens=True)) for n in (4, 9)]
    common = {"temperature": 0.9, "max_new_tokens": 40, "seed": 5}
    cases: list[dict[str, Any]] = [
        {"temperature": 1.3, "top_k": 40, "min_p": 0.02, "repetition_penalty": 1.2, "top_logprobs": 20},
        {"presence_penalty": 1.5, "frequency_penalty": -0.7, "top_logprobs": 3, "seed": 2**64 - 1},
        {"logit_bias": {greedy.token_ids[0]: -100, greedy.token_ids[3]: 7.5, 5: 0.1}, "temperature": 0},
        {"top_k": 2, "top_logprobs": 5, "logit_bias": {7: 3}},
        {"min_new_tokens": 9, "stop_token_ids": greedy.token_ids, "temperature": 0},
        common | {"stop": text[ends[0] - 2 : ends[0] + 2]},
        common | {"stop": text[ends[0] - 2 : ends[0] + 2], "min_new_tokens": 12},
        common | {"stop": [text[ends[1] - 1 : ends[1] + 3], text[ends[1] : ends[1] + 1], "<|im_end|>"]},
        common | {"stop": [text[:1], "never", text[-3:]], "top_logprobs": 1},
        common | {"stop": [text[ends[0] : ends[0] + 3] + "never"], "max_new_tokens": 6},
    ]
    found = []
    for case in cases:
        [samples] = engine.generate([ids], 2, SamplingParams(**case))
        options = {camel(name): value for name, value in case.items()} | {"seed": str(case.get("seed", 0))}
        drawn = []
        for sample in samples:
            text = sample.text
            if text is None:
                text = tokenizer.decode(sample.token_ids, skip_special_tokens=True)
            result = {"tokens": sample.token_ids, "logprobs": sample.logprobs, "finish": sample.finish_reason}
            drawn.append({**result, "text": text, "top": sample.top_logprobs})
        found.append({"options": options, "samples": drawn})
    return found


def ops() -> dict[str, Any]:
    """Return arguments and results of primitives and kernels, at sizes that are not multiples of a vector."""
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    rewards, p, q, logits = normal(7 * 5), -np.abs(normal(3 * 37)), -np.abs(normal(3 * 37)), 4 * normal(5, 301)
    rewards[3] = np.nan
    mask, tokens, dones = rng.random(3 * 37) < 0.8, rng.integers(0, 301, 5), rng.random(2 * 19) < 0.2
    x, weight, bias = normal(4, 83), normal(83), normal(83)
    q3, k3, v3 = normal(9, 4, 40), normal(21, 2, 40), normal(21, 2, 40)
    positions, heads, freqs = rng.integers(0, 5000, 6), normal(6, 3, 40), 1e4 ** (-np.arange(16) / 16)
    rotated, lora = heads.copy(), whet.MicroLoRA(83, 45, rank=3, alpha=6)
    whet.apply_rope_freqs(positions, rotated, None, 40, freqs)
    lora.A[:], lora.B[:] = normal(3, 83), normal(3, 45)
    lora_a, lora_b, grad, y = lora.A.copy(), lora.B.copy(), normal(4, 45), normal(4, 45)
    forward = lora.forward(x, y.copy())
    lora.accumulate(x, grad)
    lora.accumulate(x[:1], grad[:1])
    lora.sgd_step(0.1)
    sgd = lora.A.copy(), lora.B.copy()
    lora.accumulate(x, grad)
    lora.adam_step(0.01, weight_decay=0.1)
    logprobs, entropy = whet.compute_token_logprobs(logits, tokens, temperature=0.7, return_entropy=True)
    r2, v2 = normal(2, 19), normal(2, 19)
    advantages, returns = whet.compute_gae(r2, v2, dones.reshape(2, 19), [0.5, -1.0], 0.97, 0.9)
    lengths = rng.integers(1, 90, 41)
    found = {
        "rewards": rewards, "groups": whet.compute_batch_group_advantages(rewards, 5),
        "trl": whet.compute_batch_group_advantages(rewards, 5, ddof=1, eps=1e-4),
        "batch": whet.compute_batch_group_advantages(rewards, 5, scale="batch"),
        "pairs": whet.compute_batch_group_advantages(rewards[:34], 2),
        "p": p, "q": q, "mask": mask, "kl": whet.compute_batch_token_kl(p.astype(np.float32), q, 37, mask=mask),
        "schulman": whet.compute_batch_token_kl_schulman(p, q, 37), "logits": logits, "tokens": tokens,
        "logprobs": logprobs, "entropy": entropy, "r2": r2, "v2": v2, "dones": dones, "advantages": advantages,
        "returns": returns, "lengths": lengths, "bins": whet.pack_sequences(lengths, 100), "x": x, "weight": weight,
        "bias": bias, "rms": whet.rms_norm(x, weight), "norm": whet.layer_norm(x, weight, bias),
        "softmax": whet.softmax(x), "log_softmax": whet.log_softmax(x), "silu": whet.silu(x), "gelu": whet.gelu(x),
        "swiglu": whet.swiglu(x, x[::-1].copy()), "gemv": whet.gemv(x, weight), "q3": q3, "k3": k3, "v3": v3,
        "attention": whet.attention(q3, k3, v3), "decoded": whet.decode_attention(q3[:1], k3[None], v3[None], [21]),
        "last_keys": whet.decode_attention(q3[:1], k3[None], v3[None], [21], window=6),
        "window": whet.attention(q3, k3, v3, window=7),
        "positions": positions, "heads": heads, "freqs": freqs, "rotated": rotated, "y": y, "grad": grad,
        "lora_a": lora_a, "lora_b": lora_b, "forward": forward, "sgd_a": sgd[0], "sgd_b": sgd[1],
        "adam_a": lora.A, "adam_b": lora.B,
    }  # fmt: skip
    return {
        k: [None if v != v else v for v in x.ravel().tolist()] if hasattr(x, "ravel") else x for k, x in found.items()
    }


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model(folder)
    families(folder / "families")
    learning(folder)
    (folder / "shaders.json").write_text(json.dumps(shaders()), encoding="utf-8")
    (folder / "ops.json").write_text(json.dumps(ops()), encoding="utf-8")
    for name, cases in (("tokenizers", tokenizers()), ("templates", templates()), ("settings", settings())):
        (folder / f"{name}.json").write_text(
            json.dumps({"messages": MESSAGES, "cases": cases}, ensure_ascii=True), encoding="utf-8"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
