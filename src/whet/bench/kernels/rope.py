"""Tables of rotary position embeddings: RuvLLM's rows, and rotation in place compared with scaling in place.

Also the inputs, references and providers of ``whet bench rope``. Each call rotates the result of the previous call:
this preserves norms, and the timing includes no copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

import whet
from whet.bench.case import BenchOptions, Call, Case, NotMeasured, Provider, Table, to_array
from whet.bench.prepare import ITEM_BYTES, Dtype, normal, tensor
from whet.ops.rope import naive_rope

TOLERANCE = {"float32": 4e-6, "bfloat16": 2**-8}
"""Tolerance of answers: a few roundings of float32, or one to the 8 bits of bfloat16."""
_BASE_ELEMENTS = 1 << 22
_SAMPLED = 64
_MAX_POSITION = 8192


class RopeInputs:
    """Query (B, T, H, D) and key (B, T, Hkv, D), or no key (Hkv = 0), positions (B, T) and the embedding.

    Large inputs repeat 4 million normal numbers. ``pair`` copies query and key for providers that write in place; other
    providers share ``tensors``.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        shape: tuple[int, int, int, int, int],
        rope: whet.RotaryEmbedding,
        dtype: Dtype,
        device: str = "cpu",
    ) -> None:
        batch, tokens, heads, kv_heads, size = shape
        self.shapes = [(batch, tokens, n, size) for n in (heads, kv_heads) if n]
        self.rope, self.dtype, self.device = rope, dtype, device
        self.positions = rng.integers(rope.max_position, size=(batch, tokens))
        self.values = normal(rng, (min(_BASE_ELEMENTS, max(map(math.prod, self.shapes))),), dtype)
        chosen = np.linspace(0, batch * tokens - 1, min(_SAMPLED, batch * tokens)).astype(int)
        self.sample = np.unravel_index(chosen, (batch, tokens))

    def arrays(self) -> list[np.ndarray]:
        """Create float32 arrays of query and key."""
        return [np.resize(self.values, shape) for shape in self.shapes]

    @cached_property
    def tensors(self) -> list[Any]:
        """Tensors of query and key in the dtype and on the device, shared by providers that do not write."""
        return [tensor(array, self.dtype).to(self.device) for array in self.arrays()]

    def pair(self) -> list[Any]:
        """Copy ``tensors``."""
        return [tensor.clone() for tensor in self.tensors]

    @cached_property
    def torch_positions(self) -> Any:
        return tensor(self.positions).to(self.device)

    def table(self, dtype: str = "float32") -> Any:
        """Return the table of cosines and sines as a tensor on the device."""
        return tensor(self.rope.cos_sin_cache, dtype).to(self.device)


# --- reference ------------------------------------------------------------------------------------------


def rotate_exactly(inputs: RopeInputs) -> np.ndarray:
    """Rotate the heads of sampled tokens in float64; return query and key, flattened and concatenated."""
    rope, positions = inputs.rope, inputs.positions[inputs.sample]
    angles = positions[:, None] * rope.inv_freq
    table, rows = np.concatenate([np.cos(angles), np.sin(angles)], -1), np.arange(len(positions))
    sampled = _sample(inputs, inputs.arrays())
    return np.concatenate([naive_rope(rows, x, rope.head_size, table, rope.is_neox_style).ravel() for x in sampled])


def _sample(inputs: RopeInputs, answers: Any) -> list[np.ndarray]:
    found = [answer[inputs.sample] for answer in answers]
    return [to_array(x if isinstance(x, np.ndarray) else x.cpu()) for x in found]


class RopeAnswer(tuple[Any, ...]):
    """A provider's answer, query and key as (B, T, heads, D), with inputs that select the tokens to check."""

    def __new__(cls, inputs: RopeInputs, answers: Any) -> RopeAnswer:
        self = super().__new__(cls, answers)
        self.inputs = inputs
        return self

    inputs: RopeInputs

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.concatenate([x.ravel() for x in _sample(self.inputs, self)]).astype(dtype or np.float64)


# --- providers ------------------------------------------------------------------------------------------


def in_place(inputs: RopeInputs, answers: list[Any], function: Callable[..., Any], *arguments: Any) -> Call:
    """Make a call of a function that writes ``answers``, which are among its arguments."""
    answer = RopeAnswer(inputs, answers)

    def call() -> RopeAnswer:
        function(*arguments)
        return answer

    return call


def out_of_place(inputs: RopeInputs, run: Callable[[], Any]) -> Call:
    """Make a call of a function that returns new arrays or tensors."""
    return lambda: RopeAnswer(inputs, run())


def whet_rope(inputs: RopeInputs) -> Call:
    if inputs.device != "cpu":
        return whet_rope_cuda(inputs)
    if inputs.dtype == "bfloat16":
        return whet_rope_torch(inputs)
    answers = inputs.arrays()
    return in_place(inputs, answers, inputs.rope.forward, inputs.positions, *(*answers, None)[:2])


def whet_rope_torch(inputs: RopeInputs) -> Call:
    answers = inputs.pair()
    return in_place(inputs, answers, inputs.rope.forward, inputs.torch_positions, *(*answers, None)[:2])


def whet_rope_cuda(inputs: RopeInputs) -> Call:
    from whet.nn.rope_cuda import apply_rope_cuda

    rope, pair = inputs.rope, inputs.pair()
    rotation = rope.head_size, inputs.table(), rope.is_neox_style
    return in_place(inputs, pair, apply_rope_cuda, inputs.torch_positions, *(*pair, None)[:2], *rotation)


def whet_freqs(inputs: RopeInputs) -> Call:
    rope, (query,) = inputs.rope, inputs.arrays()
    arguments = inputs.positions, query, None, rope.head_size, rope.inv_freq, rope.is_neox_style
    return in_place(inputs, [query], whet.apply_rope_freqs, *arguments)


def formula(cos: Any, sin: Any, x: Any, rotary_dim: int, is_neox: bool) -> Any:
    """Rotate by the definition in torch, in float32; cos and sin (B, T, 1, rotary_dim / 2), x (B, T, heads, D)."""
    import torch

    rotary, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    a, b = rotary.chunk(2, -1) if is_neox else (rotary[..., ::2], rotary[..., 1::2])
    both = (a * cos - b * sin, b * cos + a * sin)
    out = torch.cat(both, -1) if is_neox else torch.stack(both, -1).flatten(-2)
    return torch.cat((out.to(x.dtype), rest), -1)


def _torch_formula(inputs: RopeInputs) -> Callable[[], list[Any]]:
    table, positions, tensors, rope = inputs.table(), inputs.torch_positions, inputs.tensors, inputs.rope

    def run() -> list[Any]:
        cos, sin = table[positions].unsqueeze(-2).chunk(2, -1)
        return [formula(cos, sin, x, rope.rotary_dim, rope.is_neox_style) for x in tensors]

    return run


def torch_rope(inputs: RopeInputs) -> Call:
    return out_of_place(inputs, _torch_formula(inputs))


def torch_compiled(inputs: RopeInputs) -> Call:
    import torch

    torch._dynamo.reset()  # else the ninth shape and later shapes would silently run uncompiled
    run = torch.compile(_torch_formula(inputs), dynamic=False)
    try:
        run()
    except Exception as error:  # no compiler, or none that torch supports
        raise NotMeasured(f"torch.compile failed: {str(error).strip().splitlines()[0]}") from None
    return out_of_place(inputs, run)


def numpy_rope(inputs: RopeInputs) -> Call:
    rope, arrays = inputs.rope, inputs.arrays()
    arguments = rope.head_size, rope.cos_sin_cache, rope.is_neox_style
    return out_of_place(inputs, lambda: [naive_rope(inputs.positions, x, *arguments) for x in arrays])


# --- RuvLLM's rows --------------------------------------------------------------------------------------

# An Apple M4 Pro, one thread: (dimensions, tokens) -> seconds.
_RUVLLM = {
    (64, 1): 151.73e-9, (64, 8): 713.37e-9, (64, 32): 2.68e-6, (64, 128): 10.46e-6,
    (128, 1): 288.80e-9, (128, 8): 1.33e-6, (128, 32): 5.21e-6, (128, 128): 24.28e-6,
}  # fmt: skip
_RUVLLM_TABLES = {(64, 1): 22.76e-9, (128, 8): 135.25e-9, (128, 32): 1.33e-6}
_ESTIMATE = "RuvLLM's document marks its figure as an estimate."


def rope_case(name: str, shape: tuple[int, int, int, int, int], rope: whet.RotaryEmbedding, dtype: Dtype) -> Case:
    """Create a case of shape (B, T, H, Hkv, D); bytes of heads read and written in place, table and positions."""
    batch, tokens, heads, kv_heads, _ = shape
    per_token = 2 * (heads + kv_heads) * rope.rotary_dim * ITEM_BYTES[dtype] + rope.rotary_dim * 4 + 8
    return Case(
        name,
        inputs=lambda rng: RopeInputs(rng, shape, rope, dtype),
        reference=rotate_exactly,
        tolerance=TOLERANCE[dtype],
        n_bytes=batch * tokens * per_token,
        n_items=batch * tokens,
    )


def _ruvllm_table(rows: dict[tuple[int, int], float], title: str, note: str, with_table: bool) -> Table:
    cases = []
    for (size, tokens), seconds in rows.items():
        rope = whet.get_rope(size, max_position=4096, is_neox_style=False)
        case = rope_case(f"{size} x {tokens}", (1, tokens, 1, 0, size), rope, "float32")
        mark = _ESTIMATE if with_table and size == 128 else ""
        cases.append(replace(case, published={"RuvLLM": seconds}, note=mark))
    computed = [Provider("whet", whet_freqs), Provider("torch", torch_computed), Provider("NumPy", numpy_computed)]
    with_lookup = [
        Provider("whet", whet_rope),
        Provider("whet torch", whet_rope_torch, note="torch tensors"),
        Provider("torch", torch_rope),
        Provider("torch compiled", torch_compiled),
        Provider("NumPy", numpy_rope),
    ]
    return Table(
        title,
        cases,
        with_lookup if with_table else computed,
        allocation="none for whet, which writes in place; inside for the others: results and temporaries",
        note=note,
        item="tokens",
    )


def torch_computed(inputs: RopeInputs) -> Call:
    """Rotate with sines and cosines of float64 angles; float32 angles are off by 10^-4 at position 4096."""
    rope, positions, tensors = inputs.rope, inputs.torch_positions, inputs.tensors
    inv_freq = tensor(rope.inv_freq)

    def run() -> list[Any]:
        angles = (positions[..., None] * inv_freq).unsqueeze(-2)
        cos, sin = angles.cos().float(), angles.sin().float()
        return [formula(cos, sin, x, rope.rotary_dim, rope.is_neox_style) for x in tensors]

    return out_of_place(inputs, run)


def numpy_computed(inputs: RopeInputs) -> Call:
    rope, (x,) = inputs.rope, inputs.arrays()

    def run() -> list[np.ndarray]:
        angles = (inputs.positions[..., None] * rope.inv_freq)[..., None, :]
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        out = np.empty_like(x)
        a, b = x[..., ::2], x[..., 1::2]
        out[..., ::2], out[..., 1::2] = a * cos - b * sin, a * sin + b * cos
        return [out]

    return out_of_place(inputs, run)


# --- in place, compared with scaling --------------------------------------------------------------------


def torch_scale(inputs: RopeInputs) -> Call:
    pair = inputs.pair()

    def scale() -> None:
        for x in pair:
            x.mul_(1.0)

    return in_place(inputs, pair, scale)


def untouched(inputs: RopeInputs) -> np.ndarray:
    """Return the sampled tokens unrotated."""
    return np.concatenate([x.ravel() for x in _sample(inputs, inputs.arrays())])


def _in_place_table(dtype: Dtype, is_neox: bool, quick: bool) -> Table:
    rope = whet.get_rope(128, max_position=_MAX_POSITION, is_neox_style=is_neox)
    sizes = [(4096, 32), (4096, 40)] if quick else [(4096, 32), (4096, 40), (16384, 32)]
    cases = [rope_case(f"{n} x {heads} heads", (1, n, heads, 0, 128), rope, dtype) for n, heads in sizes]
    return Table(
        f"RoPE in place, {'NeoX' if is_neox else 'GPT-J'} pairing, {dtype}",
        cases,
        [
            Provider("whet", whet_rope_torch),
            Provider("torch mul_(1.0)", torch_scale, untouched, note="scales in place: a lower bound"),
            Provider("torch", torch_rope),
        ],
        allocation="none, except torch: results and temporaries inside",
        note="head_dim 128, fully rotated, random positions from a table of 8192; 4096 tokens of 32 heads are "
        "131,072 x 128 elements.",
        item="tokens",
    )


def tables(options: BenchOptions) -> list[Table]:
    """Create the RoPE tables of the suite "kernels"."""
    return [
        _ruvllm_table(
            _RUVLLM,
            "RoPE, sines and cosines computed",
            "RuvLLM's row: one float32 head, interleaved pairs (GPT-J), sines and cosines inside the timing. All "
            "providers compute the angles in float64.",
            with_table=False,
        ),
        _ruvllm_table(
            _RUVLLM_TABLES,
            "RoPE with tables",
            "As above, with a table of 4096 positions. Two of the three figures in RuvLLM's document are estimates.",
            with_table=True,
        ),
        *(_in_place_table(dtype, neox, options.quick) for dtype in ("float32", "bfloat16") for neox in (True, False)),
    ]
