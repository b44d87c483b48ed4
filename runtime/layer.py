"""A layer call from Python: check, lay out the scratch, make one native call."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch

from expertile.codegen import isa as isas
from expertile.codegen.layouts import chunks_of
from expertile.runtime import call, checks, jit, openmp, spec, workspace
from expertile.runtime.driver import most_items, sums_bytes
from expertile.runtime.errors import ArgumentError
from expertile.runtime.spec import LayerKernels
from expertile.templates import gates
from expertile.templates.gates import Gate

SCRATCH_CAP = 512 << 20
"""Scratch bytes above which a call is cut into chunks of tokens."""
LEAST_CHUNK = 2048
"""Tokens of a chunk, at least."""

_calls = 0


def calls() -> int:
    """Native layer calls in this process so far (two that end at the same moment in two threads may count as one)."""
    return _calls


@dataclass(frozen=True)
class _Scratch:
    """Where the parts of the scratch begin, for a number of tokens; the last one is where it ends."""

    offsets: tuple[int, ...]
    thread_bytes: int
    size: int


@lru_cache(maxsize=4096)
def _scratch(kernels: LayerKernels, tokens: int, top_k: int, threads: int) -> _Scratch:
    """O(tokens · top_k · (H + I)) and, for each thread, the kernels' scratch and the sums of a down item."""
    shape = kernels.spec
    slots = tokens * top_k
    margin = 64  # layouts read up to a vector past the end
    thread_bytes = _align(kernels.scratch_bytes) + _align(
        sums_bytes(tokens, kernels.row_unit) + margin
    )
    sizes = {
        "counters": call.COUNTERS * call.COUNTER_STRIDE,
        "counts": 8 * shape.experts,
        "experts": call.EXPERT_BYTES * min(shape.experts, slots),
        "groups": call.GROUP_BYTES * slots,
        "items": call.ITEM_BYTES
        * most_items(threads, min(shape.experts, slots), shape.intermediate),
        "token": 4 * slots,
        "sorted_router": 4 * slots,
        "operand": 64 * chunks_of(shape.hidden) * slots + margin,
        "hidden_operand": 64 * chunks_of(shape.intermediate) * slots + margin,
        "thread_scratch": thread_bytes * threads,
    }
    offsets, end = [], 0
    for size in sizes.values():
        offsets.append(end)
        end += _align(size)
    return _Scratch(tuple(offsets), thread_bytes, end)


def _align(size: int) -> int:
    return (size + 63) & ~63


class Recorder(Protocol):
    """Whoever wants a call profiled."""

    def start(self, kernels: LayerKernels, threads: int) -> tuple[int, int]:
        """A native call follows on that many threads: the values of `call.PROFILE`."""

    def stop(self) -> None:
        """It is done."""


_prepared: dict[tuple[Any, ...], LayerKernels] = {}


def _signature(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    """All metadata of a weight that the checks look at."""
    if tensor is None:
        return None
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.layout,
        tensor.requires_grad,
        tensor.is_neg(),
    )


def prepare(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate: str | Gate,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    top_k: int,
    interleaved: bool,
    transposed: bool,
) -> LayerKernels:
    """The kernels for these tensors; checked in full the first time their metadata is seen."""
    try:
        key = (
            _signature(gate_up), _signature(down), _signature(gate_up_bias), _signature(down_bias),
            gate, top_k, interleaved, transposed, torch.is_grad_enabled(),
        )  # fmt: skip
        found = _prepared.get(key)
        if found is not None:
            return found
    except (AttributeError, TypeError, RuntimeError):
        key = None  # not all dense tensors: the checks will say so
    try:
        resolved = gates.resolve(gate)
    except (ValueError, TypeError) as error:
        raise ArgumentError(str(error)) from None
    shape = checks.layer(
        gate_up, down, gate_up_bias, down_bias, top_k, resolved, interleaved, transposed
    )
    row = [
        2 * weight.stride(1) if weight.shape[1] > 1 else 2 * weight.shape[2]
        for weight in (gate_up, down)
    ]
    kernels = spec.kernels(shape, row[0], row[1], isas.select().name)
    if key is not None:
        _prepared[key] = kernels
    return kernels


def run(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate: str | Gate,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    interleaved: bool,
    transposed: bool,
    recorder: Recorder | None = None,
) -> torch.Tensor:
    """The layer, computed. Arguments as in :func:`expertile.fused_experts`; the profiled driver runs for a recorder."""
    top_k = topk_ids.shape[-1] if isinstance(topk_ids, torch.Tensor) and topk_ids.dim() else 1
    kernels = prepare(
        gate_up, down, gate, gate_up_bias, down_bias, max(top_k, 1), interleaved, transposed
    )
    weights = gate_up, down, gate_up_bias, down_bias
    return execute(kernels, x, weights, topk_ids, topk_weights, recorder)


Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""gate_up, down and their biases."""


def execute(
    kernels: LayerKernels,
    x: torch.Tensor,
    weights: Weights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    recorder: Recorder | None = None,
) -> torch.Tensor:
    """The layer, computed by given kernels, which must be for such weights."""
    gate_up, down, gate_up_bias, down_bias = weights
    checks.routing(x, topk_ids, topk_weights, kernels.spec.hidden)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # the default may be elsewhere
    if x.shape[0] == 0:
        return out
    if topk_ids.shape[1] == 0:
        # zero_() would want threads, which a forked child doesn't have.
        ctypes.memset(out.data_ptr(), 0, out.nbytes)
        return out
    addresses = (
        gate_up.data_ptr(), gate_up.data_ptr() + kernels.up_offset, down.data_ptr(),
        *_bias_addresses(kernels, gate_up_bias), 0 if down_bias is None else down_bias.data_ptr(),
    )  # fmt: skip
    strides = (
        2 * gate_up.stride(0), 2 * down.stride(0),
        *(0 if bias is None else bias.element_size() * bias.stride(0) for bias in (gate_up_bias, down_bias)),
    )  # fmt: skip
    _chunks(kernels, x, out, topk_ids, topk_weights, addresses, strides, recorder)
    return out


def _bias_addresses(kernels: LayerKernels, bias: torch.Tensor | None) -> tuple[int, int]:
    if bias is None:
        return 0, 0
    shape = kernels.spec
    gap = (1 if shape.interleaved else shape.intermediate) if kernels.gate.gated else 0
    return bias.data_ptr(), bias.data_ptr() + gap * bias.element_size()


def _chunks(
    kernels: LayerKernels,
    x: torch.Tensor,
    out: torch.Tensor,
    ids: torch.Tensor,
    router: torch.Tensor,
    weights: tuple[int, ...],
    strides: tuple[int, ...],
    recorder: Recorder | None,
) -> None:
    """Run the layer on as many tokens at a time as the scratch cap allows."""
    tokens, top_k = ids.shape
    threads = openmp.threads()
    size = _scratch(kernels, tokens, top_k, threads).size
    step = tokens
    if size > SCRATCH_CAP and tokens > LEAST_CHUNK:
        step = max(LEAST_CHUNK, SCRATCH_CAP * tokens // size)
    space = workspace.acquire()
    try:
        for first in range(0, tokens, step):
            part = slice(first, first + step)
            whole = step == tokens
            arguments = (
                (x, out, ids, router) if whole else (x[part], out[part], ids[part], router[part])
            )
            # Its own for the last chunk: with fewer tokens the sums of a down item may take more.
            scratch = _scratch(kernels, min(step, tokens - first), top_k, threads)
            try:
                _native(kernels, space, scratch, threads, *arguments, weights, strides, recorder)
            except _BadId as error:
                _raise_bad_id(arguments[2], error.position, first, kernels.spec.experts)
    finally:
        workspace.release(space)


class _BadId(Exception):
    def __init__(self, position: int) -> None:
        self.position = position


def _raise_bad_id(ids: torch.Tensor, position: int, first: int, experts: int) -> None:
    token, slot = divmod(position, ids.shape[1])
    raise ArgumentError(
        f"topk_ids: expected ids from 0 to {experts - 1}, or -1 for an expert that is elsewhere, got "
        f"{int(ids[token, slot])} for token {first + token}, slot {slot}"
    ) from None


_Native = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)
_entries: dict[bool, Any] = {}


def _entry(profiled: bool) -> Any:
    """The driver, to be called from Python."""
    found = _entries.get(profiled)
    if found is None:
        found = _entries[profiled] = _Native(jit.driver(profiled))
    return found


def _native(
    kernels: LayerKernels,
    space: workspace.Workspace,
    scratch: _Scratch,
    threads: int,
    x: torch.Tensor,
    out: torch.Tensor,
    ids: torch.Tensor,
    router: torch.Tensor,
    weights: tuple[int, ...],
    strides: tuple[int, ...],
    recorder: Recorder | None,
) -> None:
    """One native call, and another if kernels had to be compiled first. Fields in the order of `call.OFFSETS`."""
    global _calls
    driver = _entry(recorder is not None)
    shape, omp = kernels.spec, openmp.runtime()
    base = space.reserve(scratch.size)
    dtype = checks.HIDDEN_DTYPES[x.dtype]
    gate_up, down = kernels.gate_up_table, kernels.down_table
    ids_size, router_size, size = ids.element_size(), router.element_size(), x.element_size()
    while True:
        space.write(
            x.data_ptr(), out.data_ptr(), ids.data_ptr(), router.data_ptr(), *weights,
            *kernels.ends(dtype), gate_up.address, down.address,
            *((omp.parallel, omp.barrier, omp.thread_number) if omp else (0, 0, 0)),
            *(base + offset for offset in scratch.offsets),
            ids.shape[0], ids.shape[1], shape.experts, shape.hidden, shape.intermediate,
            x.stride(0) * size, out.stride(0) * size, size,
            ids.stride(0) * ids_size, ids.stride(1) * ids_size,
            router.stride(0) * router_size, router.stride(1) * router_size,
            *strides,
            ids_size, checks.ROUTER_KINDS[router.dtype],
            kernels.block_tokens.bit_length() - 1, kernels.corner,
            threads, scratch.thread_bytes, _align(kernels.scratch_bytes), kernels.row_unit,
            0, 0, 0, 0, 0,
            *(recorder.start(kernels, threads) if recorder else (0, 0)),
        )  # fmt: skip
        status = driver(space.record)
        if status == call.OK:
            _calls += 1
            if recorder:
                recorder.stop()
            return
        if status == call.BAD_ID:
            raise _BadId(space.read("bad_position"))
        kernels.add_missing()
