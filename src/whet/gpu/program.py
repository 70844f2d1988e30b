"""Runs a plan of the core on a GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet import _core
from whet.errors import WhetError, WhetValueError

_BINDING = re.compile(r"@binding\((\d+)\) var<storage, (read|read_write)>")


class Dispatch(NamedTuple):
    """A grid of workgroups: (groups, rows / rows of a workgroup) of one of its variants."""

    variants: list[tuple[int, int, Any, Any]]
    """Rows of a workgroup, groups, pipeline (None: skip), bind group: the first with all rows is used, or the last."""
    count: str
    """The rows: "tokens", "experts" (the chosen ones of each token), "heads" or "one"."""


@contextmanager
def _explained(where: str, pid: int = 0) -> Iterator[None]:
    """Explain errors of the GPU; ``pid``: the process that opened it, or 0."""
    from wgpu import GPUError, GPUOutOfMemoryError

    if pid not in (0, os.getpid()):
        raise WhetError(f"{where}: the process was forked, and its parent opened the GPU. Use the CPU: omit device.")
    try:
        yield
    except GPUOutOfMemoryError:
        raise WhetError(f"{where}: the GPU's memory is full. Lower kv_bytes or max_batch, or omit device.") from None
    except GPUError as error:
        raise WhetError(f"{where}: the GPU failed: {error}. Call again, or make a new engine.") from error


class Pass(NamedTuple):
    """A pass over the dispatches of a plan, which are encoded as commands: its name, rows, and adapters."""

    name: str
    n: int
    adapters: tuple[int, ...] = ()


class Decode(NamedTuple):
    """Steps of n tokens whose draws are the tokens of the next step, encoded as commands.

    Attributes:
        n: tokens of a step.
        n_steps: number of steps.
        adapters: of the tokens.
        inputs: names and bytes per step of the inputs that each step copies.
    """

    n: int
    n_steps: int
    adapters: tuple[int, ...]
    inputs: tuple[tuple[str, int], ...]


class Program:
    """The forward pass of a model on a GPU: its weights, keys and values, and the commands of a step.

    Args:
        device: from ``open_device``.
        weights: the core's packed weights. ``upload`` copies them.
        kv_type: format of keys and values, a ``_core.KvType``.
        kv_bytes: size of the cache of keys and values.
        max_rows: tokens of a step.
        n_used_experts: of a token, in a layer of a mixture.
        where: prefix of error messages.

    Attributes:
        kv_bytes: the part of ``kv_bytes`` that fits into the GPU's largest buffers.

    Raises:
        WhetValueError: the model has a part without a kernel.
    """

    def __init__(
        self, device: Any, weights: Any, *, kv_type: Any, kv_bytes: int, max_rows: int, n_used_experts: int, where: str
    ) -> None:
        self._device = device
        largest = binding_bytes(device)
        n_pages, n_states, self.kv_bytes = _core.gpu_pages(
            weights, kv_type=kv_type, kv_bytes=kv_bytes, binding_bytes=largest
        )
        try:
            self.plan = plan = _core.GpuPlan(
                weights, kv_type=kv_type, max_rows=max_rows, n_pages=n_pages, n_states=n_states, binding_bytes=largest
            )
        except ValueError as error:
            raise WhetValueError(
                f"{where}: device is 'gpu', which has no kernel for {error}. Use the CPU: omit device."
            ) from None
        self._where, self._pid = where, os.getpid()
        self._n_used_experts = n_used_experts
        self._made: dict[tuple[str, tuple[str, ...]], tuple[Any, Any]] = {}
        listed = plan.buffers
        with _explained(where):
            self._buffers = [self._make_buffer(name, n_bytes) for name, n_bytes, _ in listed]
            pipelines = [self._pipeline(*each) for each in plan.pipelines]
            self._dispatches = {
                name: [self._make_dispatch(self._buffers, pipelines, *each) for each in getattr(plan, name)]
                for name in ("write_pages", "forward", "head", "draw", "next_tokens")
            }
        self._named = {name: buffer for (name, *_), buffer in zip(listed, self._buffers, strict=True)}
        self._rows = {name: rows for name, _, rows in listed}
        self._points = {after: i for i, after in enumerate(plan.adapter_points)}
        self._adapters: dict[int, list[list[Dispatch]]] = {}  # by number: the dispatches of each point
        self._pending: list[Any] = []  # commands that are not yet submitted
        self._step = Pass("forward", 0)  # the last one
        self._ahead: dict[Pass | Decode, Any] = {}  # commands that are expected next

    @property
    def nbytes(self) -> int:
        """Size of all buffers in bytes."""
        return sum(buffer.size for buffer in self._buffers)

    def upload(self) -> None:
        """Copy the weights from the core's memory."""
        with self._use():
            self._upload(self._buffers, self.plan.uploads)

    # ------------------------------------------------------------------ called by the core

    def add_adapter(
        self,
        number: int,
        buffers: list[tuple[str, int, int]],
        uploads: list[tuple[int, int, memoryview]],
        pipelines: list[Any],
        points: list[list[tuple[Any, ...]]],
    ) -> None:
        """Copy an adapter, whose dispatches add to the products of the plan's points."""
        with self._use():
            made = [self._make_buffer(name, n_bytes) for name, n_bytes, _ in buffers]
            everything = self._buffers + made
            self._upload(everything, uploads)
            self._device.queue.write_buffer(made[0], 0, np.array([number], np.int32))
            compiled = [self._pipeline(*each) for each in pipelines]
            self._adapters[number] = [
                [self._make_dispatch(everything, compiled, *each) for each in dispatches] for dispatches in points
            ]

    def remove_adapter(self, number: int) -> None:
        """Free an adapter."""
        del self._adapters[number]
        self._ahead.clear()

    def write_pages(self, writes: np.ndarray) -> None:
        """Copy pages: (page, source) of each, in order."""
        with self._use():
            self._submit()
            n = 2 * self._rows["writes"]
            for begin in range(0, len(writes), n):
                part = writes[begin : begin + n]
                self._write("writes", part)
                self._write("params", np.array([len(part) // 2], np.uint32), 8)
                self._run(Pass("write_pages", 1))
                self._submit()

    def forward(
        self,
        tokens: np.ndarray,
        page_table: np.ndarray,
        runs: np.ndarray,
        rotation: np.ndarray,
        local_rotation: np.ndarray,
        embedded: np.ndarray,
    ) -> None:
        """Compute the hidden states of the tokens of a step."""
        inputs = {
            "tokens": tokens,
            "page_table": page_table,
            "runs": runs,
            "rotation": rotation,
            "local_rotation": local_rotation,
            "embedded": embedded,
        }
        n = len(tokens) // 4
        with self._use():
            self._submit()
            self._write("params", np.array([n], np.uint32))
            for name, values in inputs.items():
                self._write(name, values)
            self._step = Pass("forward", n, _adapters_of(tokens))
            self._run(self._step)

    def read_hidden(self, token: int) -> memoryview:
        """Return the hidden state of a token of the step."""
        with self._use():
            return self._read("hidden", token, 1)

    def read_experts(self, n: int) -> memoryview:
        """Return the experts that a mixture's layers chose for the first n tokens of the step."""
        with self._use():
            return self._read("recorded", 0, n)

    def draw(self, rows: np.ndarray, hidden: np.ndarray, draws: np.ndarray) -> memoryview:
        """Return a token and its log-prob after each hidden state, see ``logits``."""
        with self._use():
            self._write("draws", draws)
            self._run_heads(rows, hidden, "head", "draw")
            return self._read("drawn", 0, len(rows))

    def decode(
        self,
        n_steps: int,
        tokens: np.ndarray,
        page_table: np.ndarray,
        rotation: np.ndarray,
        local_rotation: np.ndarray,
        draws: np.ndarray,
    ) -> memoryview:
        """Return the tokens and log-probs that steps draw, one step after the other.

        Inputs cover all steps; each token after the first step is the one drawn before it.
        """
        inputs = {
            "tokens": tokens,
            "rotation": rotation,
            "local_rotation": local_rotation,
            "draws": draws,
        }
        n = len(draws) // 4 // n_steps
        steps = Decode(
            n, n_steps, _adapters_of(tokens),
            tuple((name, values.nbytes // n_steps) for name, values in inputs.items() if len(values)),
        )  # fmt: skip
        with self._use():
            self._submit()
            self._write("params", np.array([n, n], np.uint32))
            self._write("page_table", page_table)
            self._write("head_rows", np.arange(n, dtype=np.int32))
            for name, values in inputs.items():
                self._write(f"next_{name}", values)
            self._run(steps)
            self._submit()
            self._ahead = {steps: self._encode(steps)}  # while the GPU computes
            return self._read("all_drawn", 0, n * n_steps)

    def logits(self, rows: np.ndarray, hidden: np.ndarray) -> memoryview:
        """Return the logits of the hidden states of the step's tokens ``rows``; -1: of the row in ``hidden``."""
        with self._use():
            self._run_heads(rows, hidden, "head")
            return self._read("logits", 0, len(rows))

    # ------------------------------------------------------------------ private

    def _run_heads(self, rows: np.ndarray, hidden: np.ndarray, *names: str) -> None:
        n = len(rows)
        self._write("params", np.array([n], np.uint32), 4)
        self._write("head_rows", rows)
        self._write("head_in", hidden)
        passes = [Pass(name, n) for name in names]
        for each in passes:
            self._run(each)
        self._submit()
        # Most steps are like the one before. Encoding takes milliseconds, in which the GPU computes.
        self._ahead = {each: self._ahead.get(each) or self._encode(each) for each in (self._step, *passes)}

    def _use(self) -> AbstractContextManager[None]:
        return _explained(self._where, self._pid)

    def _make_buffer(self, name: str, n_bytes: int) -> Any:
        from wgpu import BufferUsage

        usage = BufferUsage.STORAGE | BufferUsage.COPY_SRC | BufferUsage.COPY_DST
        return self._device.create_buffer(size=-(-n_bytes // 4) * 4, usage=usage, label=name)

    def _upload(self, buffers: list[Any], uploads: list[tuple[int, int, memoryview]]) -> None:
        for buffer, offset, data in uploads:
            self._device.queue.write_buffer(buffers[buffer], offset, data)

    def _list_dispatches(self, of: Pass) -> Iterator[Dispatch]:
        """Yield the dispatches of a pass; the dispatches of adapters follow the products that they add to."""
        for i, dispatch in enumerate(self._dispatches[of.name], 1):
            yield dispatch
            if of.adapters and (point := self._points.get(i)) is not None:
                for number in of.adapters:
                    yield from self._adapters[number][point]

    def _pipeline(self, constants: str, files: tuple[str, ...]) -> tuple[Any, Any]:
        """Return a pipeline and its layout, compiled once."""
        if (constants, files) not in self._made:
            self._made[constants, files] = self._make_pipeline(constants, files)
        return self._made[constants, files]

    def _make_pipeline(self, constants: str, files: tuple[str, ...]) -> tuple[Any, Any]:
        from wgpu import ShaderStage

        code = constants + "".join(map(read_kernel, files))
        kinds = {"read": "read-only-storage", "read_write": "storage"}
        layout = self._device.create_bind_group_layout(
            entries=[
                {"binding": int(n), "visibility": ShaderStage.COMPUTE, "buffer": {"type": kinds[access]}}
                for n, access in _BINDING.findall(code)
            ]
        )
        pipeline = self._device.create_compute_pipeline(
            layout=self._device.create_pipeline_layout(bind_group_layouts=[layout]),
            compute={"module": self._device.create_shader_module(code=code, label=files[-1]), "entry_point": "main"},
        )
        return pipeline, layout

    def _make_dispatch(
        self,
        all_buffers: list[Any],
        all_pipelines: list[tuple[Any, Any]],
        variants: list[tuple[int, int, int | None, list[int]]],
        count: str,
    ) -> Dispatch:
        made = []
        for rows, groups, i, buffers in variants:
            if i is None:
                made.append((rows, groups, None, None))
                continue
            pipeline, layout = all_pipelines[i]
            entries = [
                {"binding": n, "resource": {"buffer": all_buffers[b], "offset": 0, "size": all_buffers[b].size}}
                for n, b in enumerate(buffers)
            ]
            made.append((rows, groups, pipeline, self._device.create_bind_group(layout=layout, entries=entries)))
        return Dispatch(made, count)

    def _write(self, name: str, values: np.ndarray, offset: int = 0) -> None:
        if len(values):
            self._device.queue.write_buffer(self._named[name], offset, values)

    def _run(self, of: Pass | Decode) -> None:
        self._pending.append(self._ahead.pop(of, None) or self._encode(of))

    def _encode(self, of: Pass | Decode) -> Any:
        encoder = self._device.create_command_encoder()
        if isinstance(of, Pass):
            self._encode_passes(encoder, of)
        else:
            self._encode_steps(encoder, of)
        return encoder.finish()

    def _encode_steps(self, encoder: Any, of: Decode) -> None:
        drawn = self._named["drawn"]
        step_bytes = of.n * (drawn.size // self._rows["drawn"])
        for step in range(of.n_steps):
            for name, n_bytes in of.inputs:
                source, target = self._named[f"next_{name}"], self._named[name]
                encoder.copy_buffer_to_buffer(source, step * n_bytes, target, 0, n_bytes)
            passes = [Pass("forward", of.n, of.adapters), Pass("head", of.n), Pass("draw", of.n)]
            self._encode_passes(encoder, *([Pass("next_tokens", of.n)] if step else []), *passes)
            encoder.copy_buffer_to_buffer(drawn, 0, self._named["all_drawn"], step * step_bytes, step_bytes)

    def _encode_passes(self, encoder: Any, *passes: Pass) -> None:
        commands = encoder.begin_compute_pass()
        for each in passes:
            self._encode_pass(commands, each)
        commands.end()

    def _encode_pass(self, commands: Any, of: Pass) -> None:
        for dispatch in self._list_dispatches(of):
            n = of.n * (self._n_used_experts if dispatch.count == "experts" else 1)
            rows, groups, pipeline, group = next((v for v in dispatch.variants if v[0] >= n), dispatch.variants[-1])
            if pipeline is None:
                continue
            commands.set_pipeline(pipeline)
            commands.set_bind_group(0, group)
            commands.dispatch_workgroups(groups, -(-n // rows))

    def _submit(self) -> None:
        if self._pending:
            self._device.queue.submit(self._pending)
            self._pending = []

    def _read(self, name: str, first: int, n: int) -> memoryview:
        """Return n rows of a result."""
        self._submit()
        buffer = self._named[name]
        row = buffer.size // self._rows[name]
        return self._device.queue.read_buffer(buffer, first * row, n * row)


def _adapters_of(tokens: np.ndarray) -> tuple[int, ...]:
    """Return the numbers of the adapters of a step's tokens."""
    return tuple(sorted(set(tokens[3::4].tolist()) - {0}))


def binding_bytes(device: Any) -> int:
    """Return the size of the largest buffer that a kernel can bind."""
    return min(device.limits["max-buffer-size"], device.limits["max-storage-buffer-binding-size"]) // 4 * 4


@cache
def read_kernel(name: str) -> str:
    """Return the source of a file of a pipeline."""
    return (Path(__file__).parent / "kernels" / f"{name}.wgsl").read_text(encoding="utf-8")
