"""vLLM's RoPE benchmark: grid and flags of its script, with all flags honoured and no copy timed.

docs/errata.md lists the errors of the page that publishes its figures. The script always runs batches of 1, 4, 16, 64
with 64 to 512 tokens of 32 and 48 heads and ignores its flags; here a flag replaces that axis.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

import whet
from whet.bench.case import BenchOptions, Call, Case, NotMeasured, Provider, Suite, Table
from whet.bench.cuda import Replay
from whet.bench.kernels.rope import (
    RopeInputs,
    in_place,
    out_of_place,
    rope_case,
    torch_compiled,
    torch_rope,
    whet_rope,
    whet_rope_torch,
)
from whet.bench.prepare import Dtype, Prepare, resolve
from whet.errors import WhetValueError


@dataclass(frozen=True)
class RopeOptions(BenchOptions):
    """Settings of the RoPE benchmark; 0 selects the script's grid."""

    is_neox_style: bool = True
    """Pairing: NeoX (i with i + rotary_dim / 2; Llama, Mistral, Qwen) or GPT-J (2i with 2i + 1)."""
    batch_size: int = 0
    """Sequences; 0: 1, 4, 16 and 64."""
    seq_len: int = 0
    """Tokens per sequence; 0: 64, 128, 256 and 512, and 1 in a separate table."""
    num_heads: int = 0
    """Heads of the query; 0: 32 and 48."""
    num_kv_heads: int = 0
    """Heads of the key; 0: as many as the query, as in the script."""
    head_size: int = 128
    """Elements of a head."""
    rotary_dim: int = 32
    """Rotated elements of a head. A Llama rotates all of them."""
    dtype: Literal["bfloat16", "float"] = "bfloat16"
    """Dtype of query and key. The table of cosines and sines is float32 for every provider."""
    device: str = "cpu"
    """Device: cpu, or cuda:0. FlashInfer, vLLM and replayed CUDA graphs are measured on CUDA devices."""
    save_path: str = ""
    """Folder of the report, as --out."""

    def __post_init__(self) -> None:
        if self.save_path:
            object.__setattr__(self, "out", self.save_path)


# --- providers ------------------------------------------------------------------------------------------


def transformers_rope(inputs: RopeInputs) -> Call:
    """Call transformers' function for the pairing; cosines and sines are gathered in advance, once for all layers."""
    from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as neox
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj

    cos, sin = inputs.table(inputs.dtype)[inputs.torch_positions].chunk(2, -1)
    query, key = inputs.tensors
    if inputs.rope.is_neox_style:
        wide_cos, wide_sin = (part.repeat(1, 1, 2) for part in (cos, sin))
        return out_of_place(inputs, lambda: neox(query, key, wide_cos, wide_sin, unsqueeze_dim=2))
    n = inputs.rope.rotary_dim

    def rotate(x: Any) -> Any:
        import torch

        return torch.cat((gptj(x[..., :n], sin, cos), x[..., n:]), -1)

    return out_of_place(inputs, lambda: [rotate(query), rotate(key)])


def on_cuda(kernel: str, float32_table: bool) -> Prepare:
    """Prepare a CUDA kernel that takes flat positions, query and key, and writes in place."""

    def prepare(inputs: RopeInputs) -> Call:
        if not inputs.device.startswith("cuda"):
            raise NotMeasured(f"runs only on CUDA devices, but this run is on {inputs.device}")
        rotate, rope, pair = resolve(kernel), inputs.rope, inputs.pair()
        table = inputs.table("float32" if float32_table else inputs.dtype)
        positions = inputs.torch_positions.flatten()
        query, key = (x.view(len(positions), -1) for x in pair)
        return in_place(inputs, pair, rotate, positions, query, key, rope.head_size, table, rope.is_neox_style)

    return prepare


FLASHINFER = on_cuda("flashinfer.rope:apply_rope_with_cos_sin_cache_inplace", float32_table=True)
VLLM = on_cuda("vllm._custom_ops:rotary_embedding", float32_table=False)
VLLM_FLOAT32 = on_cuda("vllm._custom_ops:rotary_embedding", float32_table=True)


def replayed(prepare: Prepare) -> Prepare:
    """Prepare the call of another provider as a CUDA graph, whose replay excludes Python and kernel launches."""

    def prepare_replay(inputs: RopeInputs) -> Call:
        def restore(answers: Any) -> None:
            for answer, original in zip(answers, inputs.tensors, strict=True):
                answer.copy_(original)

        return Replay(prepare(inputs), restore)

    return prepare_replay


def providers(dtype: Dtype, device: str) -> list[Provider]:
    """Create the providers; the tolerance of those that round cosines, sines and products to bfloat16 is wider."""
    rough = 2.0**-5 if dtype == "bfloat16" else None
    has_arrays = dtype == "float32" and device == "cpu"
    as_torch = [Provider("whet torch", whet_rope_torch, note="torch tensors")] if has_arrays else []
    found = [
        Provider("whet", whet_rope, note="in place; torch tensors if the dtype is bfloat16"),
        *as_torch,
        Provider("torch", torch_rope, note="the formula, eager; the results are new tensors"),
        Provider("torch compiled", torch_compiled, note="the formula through torch.compile"),
        Provider("transformers", transformers_rope, None, rough, "computes in the dtype; gathering is not timed"),
        Provider("FlashInfer", FLASHINFER, note="in place, with a float32 table"),
        Provider("vLLM", VLLM, None, rough, "in place, with a table of the dtype, as its models pass it"),
        Provider("vLLM, float32 table", VLLM_FLOAT32, note="in place, with a float32 table"),
    ]
    if device == "cpu":
        return found
    replays = [
        replace(p, name=f"{p.name}, replayed", prepare=replayed(p.prepare), note="a CUDA graph of the call")
        for p in found
    ]
    return [*found, *replays]


# --- the tables -----------------------------------------------------------------------------------------

_BATCHES, _LENGTHS, _HEADS = (1, 4, 16, 64), (64, 128, 256, 512), (32, 48)
# (batch, tokens, heads, NeoX or not) -> provider -> seconds, from the page about the script.
_PUBLISHED = {
    (16, 512, 32, True): {"torch": 123.4e-6, "FlashInfer": 42.7e-6, "vLLM": 38.9e-6},
    (16, 512, 32, False): {"torch": 125.8e-6, "FlashInfer": 43.2e-6, "vLLM": 39.5e-6},
    (1, 64, 32, True): {"vLLM": 8.7e-6},
}
_IMPOSSIBLE = "Including the copies that the script times, vLLM's figure needs over 8 TB/s; see docs/errata.md."


def _published_times(options: RopeOptions, batch: int, tokens: int, heads: int) -> dict[str, float]:
    is_page_setting = (options.head_size, options.rotary_dim, options.dtype) == (128, 32, "bfloat16")
    if not is_page_setting or options.num_kv_heads not in (0, heads):
        return {}
    return _PUBLISHED.get((batch, tokens, heads, options.is_neox_style), {})


def _case(options: RopeOptions, batch: int, tokens: int, heads: int, rope: whet.RotaryEmbedding) -> Case:
    kv_heads = options.num_kv_heads or heads
    dtype = dtype_of(options)
    shape = (batch, tokens, heads, kv_heads, options.head_size)
    figures = _published_times(options, batch, tokens, heads)

    def inputs(rng: np.random.Generator) -> RopeInputs:
        return RopeInputs(rng, shape, rope, dtype, options.device)

    kv = "" if kv_heads == heads else f"/{kv_heads}"
    return replace(
        rope_case(f"{batch} x {tokens}, {heads}{kv} heads", shape, rope, dtype),
        inputs=inputs,
        device=options.device,
        size=batch * tokens if heads == (options.num_heads or _HEADS[0]) else None,
        thread_scaling=(batch, tokens) == (16, 512) and options.device == "cpu",
        published=figures,
        note=_IMPOSSIBLE if (batch, tokens) == (16, 512) and figures else "",
    )


def dtype_of(options: RopeOptions) -> Dtype:
    return "bfloat16" if options.dtype == "bfloat16" else "float32"


def _check(options: RopeOptions) -> None:
    for name in ("batch_size", "seq_len", "num_heads", "num_kv_heads"):
        value = getattr(options, name)
        if value < 0:
            raise WhetValueError(f"whet bench rope: {name} is {value}, expected at least 1, or 0 for the grid.")
    if options.device != "cpu" and not options.device.startswith("cuda"):
        raise WhetValueError(
            f"whet bench rope: device is {options.device!r}, expected cpu, cuda, or a numbered device such as cuda:0."
        )
    if options.device != "cpu":
        import torch

        if not torch.cuda.is_available():
            raise WhetValueError(f"whet bench rope: device is {options.device!r}, but torch finds no CUDA device.")


def tables(options: RopeOptions) -> list[Table]:
    """Create a table of the grid and, unless seq_len is given, a table of one token per sequence."""
    _check(options)
    rope = whet.get_rope(options.head_size, options.rotary_dim, is_neox_style=options.is_neox_style)
    batches = (options.batch_size,) if options.batch_size else (1, 16) if options.quick else _BATCHES
    lengths = (options.seq_len,) if options.seq_len else (64, 512) if options.quick else _LENGTHS
    heads = (options.num_heads,) if options.num_heads else (32,) if options.quick else _HEADS
    grid = [_case(options, b, t, h, rope) for h in heads for b in batches for t in lengths]
    found = [_table(options, "prefill", grid)]
    if not options.seq_len:
        decode = [_case(options, b, 1, h, rope) for h in heads for b in batches]
        if options.device == "cpu":  # only the processor's caches can be evicted
            cold = replace(decode[-1], name=f"{decode[-1].name}, cold", cache="cold", size=None, published={})
            decode.append(cold)
        found.append(_table(options, "decode", decode))
    return found


def _table(options: RopeOptions, phase: str, cases: list[Case]) -> Table:
    pairing, dtype = "NeoX" if options.is_neox_style else "GPT-J", dtype_of(options)
    return Table(
        f"RoPE, {phase}, {pairing} pairing, {dtype}",
        cases,
        providers(dtype, options.device),
        allocation="none if a provider writes in place; inside for the others: results and temporaries",
        note=f"Batch x tokens; heads of {options.head_size} elements, {options.rotary_dim} of them rotated; random "
        "positions below 8192. Bytes count rotated elements, read and written, and rows of the table.",
        item="tokens",
        size_label="tokens",
    )


SUITE = Suite(
    "rope",
    "Rotary position embedding",
    "vLLM's benchmark_rope.py on its own grid: Whet, the formula in torch, transformers, and on a CUDA device "
    "FlashInfer and vLLM.",
    tables,
    RopeOptions,
)
